"""Write responses as they finish, as JSON lines that survive a kill, a full disk or an interrupt."""

import json
from pathlib import Path

from distill.commands.output import check_writable
from speculative.decoder.responses import Response
from speculative.errors import UserError

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
