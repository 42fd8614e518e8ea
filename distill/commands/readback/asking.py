"""The run's held-out prompts put to engines, one by one, and every answer kept as soon as it is there."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.responses.engine_client import Answer, EngineClient, line_of
from data.responses.engine_counts import CountsError
from data.responses.engine_metrics import ServerCounts, difference
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse

WARM_TOKENS = 8  # of a request that nobody counts, before each mode


@dataclass(frozen=True)
class Asked:
    """What one mode (`sampled` or `greedy`) brought. answers: in the order of texts, the run's own to the same prompts.

    plain: of the server without the draft, empty where there is none. server: what the draft's server counted meanwhile.
    reset: why it could not be told, empty otherwise.
    """

    mode: str
    settings: DecodeSettings
    texts: list[HeldoutResponse]
    answers: list[Answer]
    plain: list[Answer] = field(default_factory=list)
    server: ServerCounts | None = None
    reset: str = ""


class AnswerFile:
    """Answers as JSON lines, written as they come; with `resume` those of an earlier start are taken from it."""

    def __init__(self, path: Path, client: EngineClient, resume: bool) -> None:
        """Reads what is there, or starts anew.

        Raises:
            UserError: not writable.
        """
        self.path, self.client, self._known = path, client, {}  # type: ignore[var-annotated]
        try:
            if resume and path.is_file():
                with contextlib.suppress(ValueError):  # The last line of a killed program may be torn.
                    for line in path.read_text(encoding="utf-8").splitlines():
                        row = json.loads(line)
                        self._known[(row["mode"], row["key"], json.dumps(row["asked"]))] = row
            path.write_text("".join(json.dumps(row) + "\n" for row in self._known.values()), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error

    def __len__(self) -> int:
        return len(self._known)

    def answer(self, text: HeldoutResponse, settings: DecodeSettings, mode: str) -> Answer:
        """The server's answer to a prompt, as kept or asked for now.

        Raises:
            UserError: the server is gone; how many answers are kept is said.
        """
        place = (mode, text.key, json.dumps(line_of(_nothing(text.key), mode, "", settings)["asked"]))
        row = self._known.get(place)
        if row is not None:
            return self.client.read(row["response"], settings, text.key, row["seconds"])
        try:
            found = self.client.ask(text.prompt_ids, settings, text.key)
        except UserError as error:
            raise UserError(
                f"{error}; {len(self)} answers are kept in {self.path} (`drift --log` reads them, --resume goes on)"
            ) from error
        row = self._known[place] = line_of(found, mode, text.domain, settings)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return found


def ask(
    files: Sequence[AnswerFile], texts: Sequence[HeldoutResponse], settings: DecodeSettings, mode: str, concurrency: int
) -> Asked:
    """Every prompt put to every server, prompt by prompt so that both meet the same machine, the draft's server first.

    Raises:
        UserError: a server is gone or cannot answer.
    """
    for one in files:
        few = DecodeSettings(settings.sampling, max_tokens=min(WARM_TOKENS, settings.max_tokens), rule=settings.rule)
        one.client.ask(texts[0].prompt_ids, few, "warm")
    client, fresh = files[0].client, len(files[0])
    before = client.scrape(settle=True)
    jobs = [(one, text) for text in texts for one in files]
    with _pool(concurrency) as pool:
        answers = list(pool.map(lambda job: job[0].answer(job[1], settings, mode), jobs))
    after = client.scrape(settle=True)
    server, reset = None, ""
    # What was taken from a file is in no counter.
    if before is not None and after is not None and len(files[0]) - fresh == len(texts):
        try:
            server = difference(before, after)
        except CountsError as error:
            reset = str(error)
    return Asked(
        mode, settings, list(texts), answers[:: len(files)], answers[1::2] if len(files) > 1 else [], server, reset
    )


@contextlib.contextmanager
def _pool(concurrency: int) -> Iterator[Any]:
    """Threads that ask nothing more once one of them has failed."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="readback")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _nothing(key: str) -> Answer:
    return Answer(key, None, "", False, 0.0, None, 0, {})
