"""The run's held-out prompts put to engines, one by one, and every answer kept as soon as it is there."""

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.files import write_bytes
from data.responses.engine_client import Answer, EngineClient
from data.responses.engine_counts import CountsError
from data.responses.engine_metrics import ServerCounts, difference
from distill.faults import Interrupted
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse

WARM_TOKENS = 8  # of a request that nobody counts, before each mode
_KEYS = ("key", "domain", "asked", "seconds", "response")


@dataclass(frozen=True)
class Asked:
    """What one sampling brought. answers: in the order of texts, the run's own to the same prompts.

    plain: of the server without the draft, empty where there is none. server: what the draft's server counted meanwhile.
    reset: why it could not be told, empty otherwise.
    """

    settings: DecodeSettings
    texts: list[HeldoutResponse]
    answers: list[Answer]
    plain: list[Answer] = field(default_factory=list)
    server: ServerCounts | None = None
    reset: str = ""


class AnswerFile:
    """Answers of one server as JSON lines that `drift --log` reads, written as they come; those of an earlier start stay until then."""

    def __init__(self, path: Path, client: EngineClient, resume: bool) -> None:
        """``resume``: what is there is kept, and not asked for again."""
        self.path, self.client, self.fresh = path, client, 0
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        if resume and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # A killed program may have torn it.
                    found = json.loads(line)
                    row = {name: found[name] for name in _KEYS}
                    self._known[row["key"], json.dumps(row["asked"])] = row

    def __len__(self) -> int:
        return len(self._known)

    def answer(self, text: HeldoutResponse, settings: DecodeSettings) -> Answer:
        """The server's answer to a prompt, as kept or asked for now.

        Raises:
            UserError: the server is gone; how many answers are kept is said.
        """
        asked = settings.sampling.as_dict() | {"max_tokens": settings.max_tokens, "seed": settings.seed}
        place = text.key, json.dumps(asked)
        if (row := self._known.get(place)) is not None:
            return self.client.read(row["response"], settings, text.key, row["seconds"])
        try:
            found = self.client.ask(text.prompt_ids, settings, text.key)
        except UserError as error:
            raise UserError(f"{error}; {self.kept}") from error
        with self._lock:
            row = dict(zip(_KEYS, (text.key, text.domain, asked, found.seconds, found.body), strict=True))
            self._known[place] = row
            if self.fresh:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            else:
                write_bytes(self.path, "".join(json.dumps(one) + "\n" for one in self._known.values()).encode())
            self.fresh += 1
        return found

    @property
    def kept(self) -> str:
        """What a broken readback leaves."""
        return f"{len(self)} answers are kept in {self.path} (`drift --log` reads them, --resume goes on)"


def ask(files: Sequence[AnswerFile], texts: Sequence[HeldoutResponse], settings: DecodeSettings) -> Asked:
    """Every prompt put to every server, prompt by prompt so that both meet the same machine, the draft's server first.

    Raises:
        UserError: a server is gone or cannot answer; the one without the draft has one.
        Interrupted: Ctrl-C; how many answers are kept is said.
    """
    own, client = files[0], files[0].client
    for one in files:
        few = replace(settings, max_tokens=min(WARM_TOKENS, settings.max_tokens))
        warm = one.client.ask(texts[0].prompt_ids, few, "warm")
        seen = one.client.scrape() if one is not own else None
        if one is not own and (warm.counts is not None or (seen is not None and seen.blocks)):
            raise UserError(f"--plain {one.client.endpoint.url}: drafts too; give the same engine without the draft")
    before = client.scrape(settle=True)
    jobs = [(one, text) for text in texts for one in range(len(files))]
    try:
        found = client.each(lambda job: files[job[0]].answer(job[1], settings), jobs)
        answers = {(one, text.key): answer for (one, text), answer in found}
    except KeyboardInterrupt:
        raise Interrupted(own.kept) from None
    after = client.scrape(settle=True)
    server, reset = None, ""
    # What was taken from a file is in no counter.
    if before is not None and after is not None and own.fresh == len(texts):
        try:
            server = difference(before, after)
        except CountsError as error:
            reset = str(error)
    of_server = [[answers[one, text.key] for text in texts] for one in range(len(files))]
    return Asked(settings, list(texts), of_server[0], of_server[1] if len(files) > 1 else [], server, reset)
