"""Files of `understudy generate`: prompts, past responses, and responses as they finish; a kill, full disk or interrupt loses none."""

import json
import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.prompts.columns import prompt_row
from distill.commands.generate.options import GenerateOptions
from distill.commands.output import check_writable
from distill.run.prompts import command_rows, render_rows
from speculative.decoder.responses import Prompt, Response
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


KEYS = ("key", "text", "finish_reason", "prompt_ids", "response_ids", "blocks", "drafted", "accepted")


class ResponseFile:
    """`out` is written when all responses are there, in the order of the prompts. An earlier file stays until then.

    Until then each finished response is in `NAME.partial.jsonl` next to it. That file stays if the run fails.
    """

    def __init__(self, out: Path):
        """Raises UserError if it cannot be written."""
        check_writable("--out", out)
        self.out = out.resolve()
        self.partial = self.out.with_name(f"{self.out.stem}.partial.jsonl")
        check_writable("--out", self.partial)
        self._lines: dict[int, str] = {}
        self._write(self.partial, "", "w")

    def add(self, index: int, response: Response) -> None:
        """Add the finished response of prompt number `index`."""
        # ASCII only: some readers take rare characters for the end of a line.
        self._lines[index] = json.dumps({key: getattr(response, key) for key in KEYS}) + "\n"
        self._write(self.partial, self._lines[index], "a")

    def complete(self) -> None:
        """Write all responses in order under the final name."""
        self._write(self.partial, "".join(self._lines[index] for index in sorted(self._lines)), "w")
        self.partial.replace(self.out)

    def give_up(self) -> str:
        """Return a phrase about the responses of an unfinished run that are kept."""
        if not self._lines:
            self.partial.unlink(missing_ok=True)
            return "no response had ended; nothing was written"
        return f"{len(self._lines)} finished responses are in {self.partial}"

    def _write(self, path: Path, text: str, mode: str) -> None:
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"--out {self.out}: cannot be written ({error.strerror}); {len(self._lines)} responses were finished; "
                f"those that could be written are in {self.partial}"
            ) from error
