"""Responses on disk as they end: JSON lines that a kill, a full disk or an interrupt cannot take away."""

import json
from pathlib import Path

from distill.commands.output import check_writable
from speculative.decoder.responses import Response
from speculative.errors import UserError

KEYS = ("key", "text", "finish_reason", "prompt_ids", "response_ids", "blocks", "drafted", "accepted")


class ResponseFile:
    """`out` appears when all responses are in it, in the order of the prompts; a former one stays until then.

    Until then each finished response is in `NAME.partial.jsonl` beside it, where it also stays when the run fails.
    """

    def __init__(self, out: Path):
        """Raises UserError when there is no place for it."""
        check_writable("--out", out)
        self.out = out.resolve()
        self.partial = self.out.with_name(f"{self.out.stem}.partial.jsonl")
        check_writable("--out", self.partial)
        self._lines: dict[int, str] = {}
        self._write(self.partial, "", "w")

    def add(self, index: int, response: Response) -> None:
        """A finished response of prompt number `index`."""
        self._lines[index] = json_line(response)
        self._write(self.partial, self._lines[index], "a")

    def complete(self) -> None:
        """All are there: put them in order and under the final name."""
        self._write(self.partial, "".join(self._lines[index] for index in sorted(self._lines)), "w")
        self.partial.replace(self.out)

    def give_up(self) -> str:
        """Words about what is left of an unfinished run."""
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


def json_line(response: Response) -> str:
    """One response as a line. ASCII only: some readers take rare characters for the end of a line."""
    return json.dumps({key: getattr(response, key) for key in KEYS}) + "\n"
