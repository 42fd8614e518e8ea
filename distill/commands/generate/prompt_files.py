"""Input of `understudy generate`: prompts from arguments, files and standard input; past responses."""

import json
import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.prompts.columns import prompt_row
from distill.commands.generate.options import GenerateOptions
from distill.run.prompts import command_rows, render_rows
from speculative.decoder.responses import Prompt
from speculative.drafters.past_responses import ResponseIndex
from speculative.engine.models import vocab_rows
from speculative.errors import UserError


def read_past(path: Path, target: PreTrainedModel) -> ResponseIndex:
    """An index of the responses of an earlier `generate --out FILE.jsonl`. Raises UserError."""
    if not path.is_file():
        raise UserError(f"--past {path}: no such file")
    texts = []
    for number, line in enumerate(_decoded(f"--past {path}", path.read_bytes()).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = [*row["prompt_ids"], *row["response_ids"]]
        except (ValueError, KeyError, TypeError):
            ids = [None]
        if any(type(token_id) is not int for token_id in ids):
            raise UserError(f'{path}:{number}: no line of `understudy generate --out` ("prompt_ids", "response_ids")')
        texts.append(ids)
    return ResponseIndex.build(texts, vocab_rows(target))


def read_prompts(options: GenerateOptions, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Prompts (key, ids) from the command line, a source as a config names it, or standard input.

    Raises UserError: there is no prompt, or an invalid one; see also `command_rows` and `render_rows`.
    """
    typed = [(f"prompt-{number}", text) for number, text in enumerate(options.prompt or [], start=1)]
    if not typed and not options.prompts:
        if sys.stdin.isatty():
            raise UserError("no prompt: give --prompt TEXT, --prompts FILE, or a text on standard input")
        typed = [("standard input", _decoded("standard input", sys.stdin.buffer.read()))]
    for key, text in typed:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{key}: the prompt is not valid Unicode (it contains half of a surrogate pair)") from None
        if not text:
            raise UserError(f"{key}: the prompt is empty; write at least one character")
    rows = [prompt_row(text, None, "", key, None) for key, text in typed]
    if options.prompts:
        rows += command_rows(options.prompts)
    return render_rows(rows, tokenizer, options.chat)


def _decoded(what: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{what}: not UTF-8 text") from None
