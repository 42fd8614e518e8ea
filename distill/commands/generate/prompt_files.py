"""What `understudy generate` reads: prompts from arguments, files and standard input; past responses for retrieval."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculative.decoder.responses import Prompt
from speculative.drafters.retrieval import Datastore
from speculative.engine.models import vocab_rows
from speculative.errors import UserError


def read_datastore(path: Path | None, target: PreTrainedModel) -> Datastore:
    """A saved datastore, or one built from the responses of an earlier `generate --out FILE.jsonl`."""
    assert path is not None
    if path.suffix != ".jsonl":
        return Datastore.load(path)
    texts = []
    for number, line in _lines_of("--datastore", path):
        try:
            row = json.loads(line)
            ids = [*row["prompt_ids"], *row["response_ids"]]
        except (ValueError, KeyError, TypeError):
            ids = [None]
        if any(type(token_id) is not int for token_id in ids):
            raise UserError(
                f'{path}:{number}: not a line of `understudy generate --out` ("prompt_ids", "response_ids")'
            )
        texts.append(ids)
    return Datastore.build(texts, vocab_rows(target))


def read_prompts(
    texts: list[str], file: Path | None, tokenizer: PreTrainedTokenizerBase, chat: bool, system: str
) -> list[Prompt]:
    """Prompts (key, ids) from the command line, a file (JSON lines with "prompt", or plain lines), or standard input."""
    named = [(f"prompt-{number}", text) for number, text in enumerate(texts, start=1)]
    if file is not None:
        named += _file_prompts(file)
    if not named:
        if sys.stdin.isatty():
            raise UserError("no prompt: give --prompt TEXT, --prompts FILE, or a text on standard input")
        named = [("standard input", _decoded("standard input", sys.stdin.buffer.read()))]
    if chat and not tokenizer.chat_template:
        raise UserError("--chat: the target's tokenizer has no chat template")
    prompts: list[Prompt] = []
    for key, text in named:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{key}: the prompt is not valid Unicode (it holds half of a surrogate pair)") from None
        if not text:
            raise UserError(f"{key}: the prompt is empty; write at least one character")
        if chat:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": text})
            text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        ids = tokenizer(text, add_special_tokens=not chat, verbose=False).input_ids
        if not ids:
            raise UserError(f"{key}: the prompt has no token; write at least one character")
        prompts.append((key, ids))
    return prompts


def _decoded(what: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{what}: not UTF-8 text") from None


def _lines_of(option: str, file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that hold anything; split at line feeds only, which JSON text does not contain."""
    if not file.is_file():
        raise UserError(f"{option} {file}: no such file")
    for number, line in enumerate(_decoded(f"{option} {file}", file.read_bytes()).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _file_prompts(file: Path) -> list[tuple[str, str]]:
    if file.suffix == ".json":
        raise UserError(f'--prompts {file}: give JSON lines (.jsonl, an object with "prompt" a line) or plain lines')
    named = []
    for number, line in _lines_of("--prompts", file):
        text: Any = line
        if file.suffix == ".jsonl":
            try:
                text = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f'{file}:{number}: each line must be a JSON object with a "prompt" text')
        named.append((f"{file.name}:{number}", text))
    if not named:
        raise UserError(f"--prompts {file}: no prompt in it")
    return named
