"""Send the run's held-out prompts to engines, and write every answer to a file as it arrives."""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.files import write_bytes
from distill.engines.protocol.client import Answer, EngineClient
from distill.engines.protocol.counters import as_counts, difference
from distill.engines.protocol.counts import CountsError, DraftCounts
from distill.engines.protocol.engine import UNKNOWN, Engine
from distill.faults import Interrupted
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.progress import phase

_Job = tuple[Callable[[HeldoutResponse, DecodeSettings], Answer | None], HeldoutResponse]
TURN = 4  # requests of each place in a turn of one of several servers
WARM_TOKENS = 8  # of the uncounted request before each sampling mode
_KEYS = ("key", "domain", "asked", "seconds", "first_seconds", "response")


@dataclass(frozen=True)
class Replies:
    """All answers under one sampling setting. answers: in the order of `texts`, the run's own responses to the same prompts.

    plain: answers of the server without the draft; empty if there is none. server: difference of the draft server's counters.
    reset: why the counters cannot be used; else empty. left_out: answers without ids, where others have them.
    """

    settings: DecodeSettings
    texts: list[HeldoutResponse]
    answers: list[Answer]
    plain: list[Answer] = field(default_factory=list)
    server: DraftCounts | None = None
    reset: str = ""
    left_out: int = 0
    engine: Engine = UNKNOWN

    @property
    def prompts(self) -> list[Hashable]:
        """The prompt of each answer: the unit of every interval."""
        return [text.prompt for text in self.texts] or list(range(len(self.answers)))


class AnswerFile:
    """Answers of one server as JSON lines, which `drift --log` reads. The file of an earlier readback stays until the first answer."""

    def __init__(self, path: Path, client: EngineClient, resume: bool) -> None:
        """``resume``: keep the answers in the file and do not ask for them again."""
        self.path, self.client, self.fresh, self.counting = path, client, 0, False
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        if resume and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # A killed process may leave a partial line.
                    found = json.loads(line)
                    row = {name: found[name] for name in _KEYS}
                    self._known[row["key"], json.dumps(row["asked"])] = row

    def has(self, texts: Sequence[HeldoutResponse], settings: DecodeSettings) -> bool:
        """Whether all answers are in the file, so that nothing is asked."""
        return all((text.key, _asked(settings)) in self._known for text in texts)

    def answer(self, text: HeldoutResponse, settings: DecodeSettings) -> Answer:
        """Return the server's answer to a prompt, from the file or by asking. With `counting`, also its counts, by the server's counters.

        Raises UserError: the server is gone; the message states how many answers are kept.
        """
        place = text.key, _asked(settings)
        if (row := self._known.get(place)) is not None:
            return self.client.read(row["response"], settings, text.key, row["seconds"], row["first_seconds"])
        try:
            before = self.client.scrape() if self.counting else None
            reply = self.client.ask(text.prompt_ids, settings, text.key)
            if before is not None and (after := self.client.scrape(settle=True)) is not None:
                body = reply.body | as_counts(difference(before, after))
                reply = self.client.read(body, settings, text.key, reply.seconds, reply.first_seconds)
        except (UserError, CountsError) as error:
            raise UserError(f"{error}; {self.kept}") from error
        with self._lock:
            values = (text.key, text.domain, json.loads(place[1]), reply.seconds, reply.first_seconds, reply.body)
            row = dict(zip(_KEYS, values, strict=True))
            self._known[place] = row
            if self.fresh:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            else:
                write_bytes(self.path, "".join(json.dumps(one) + "\n" for one in self._known.values()).encode())
            self.fresh += 1
        return reply

    def spare(self, text: HeldoutResponse, settings: DecodeSettings) -> None:
        """Ask for a response that is neither kept nor counted. Raises UserError: as `answer`."""
        # Of another seed, so that the prompt is not in the engine's cache when it counts.
        self.client.ask(text.prompt_ids, replace(settings, seed=~settings.seed), text.key)

    @property
    def kept(self) -> str:
        """What remains after an interrupted readback, as a phrase."""
        return f"{len(self._known)} answers are kept in {self.path} (`drift --log` reads them; --resume continues)"


def _asked(settings: DecodeSettings) -> str:
    return json.dumps(settings.sampling.as_dict() | {"max_tokens": settings.max_tokens, "seed": settings.seed})


def ask(
    files: Sequence[AnswerFile],
    texts: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    by_request: bool = False,
    full: bool = False,
) -> Replies:
    """Send every prompt to every server, one server at a time, in short turns so that both see the same machine load.

    full: keep the servers busy before and after each turn with requests that are not counted, where answers have counts of their own.
    by_request: if the answers have no counts and prompts are sent one at a time, read the counters after each. A server whose
    answers are all in its file is not asked.

    Raises UserError: a server is gone or cannot answer, or the --plain server uses a draft. Interrupted: Ctrl-C; the message states how
    many answers are kept.
    """
    drafting, client, earlier = files[0], files[0].client, files[0].fresh
    lacking = [file for file in files if not file.has(texts, settings)]
    for file in lacking:
        few = replace(settings, seed=~settings.seed, max_tokens=min(WARM_TOKENS, settings.max_tokens))
        warm = file.client.ask(texts[0].prompt_ids, few, "warm")
        seen = file.client.scrape() if file is not drafting else None
        if file is not drafting and (warm.counts is not None or (seen is not None and seen.blocks)):
            raise UserError(
                f"--plain {file.client.endpoint.url}: this server drafts too; give the same engine without the draft"
            )
        full = full and (file is not drafting or warm.counts is not None)
        file.counting = by_request and file is drafting and warm.counts is None and client.endpoint.concurrency == 1
    before = client.scrape(settle=True) if drafting in lacking else None
    # Servers take turns: together they would slow each other down.
    busy = client.endpoint.concurrency
    turn = len(texts) if len(files) == 1 else TURN * busy if busy > 1 or full else 1
    answers = dict[tuple[int, str], Answer]()
    try:
        with phase(f"asking, {busy} at a time", len(files) * len(texts), show=bool(lacking)) as shown:
            for first, (place, file) in itertools.product(range(0, len(texts), turn), enumerate(files)):
                ours = texts[first : first + turn]
                spare: list[_Job] = [(file.spare, text) for text in ours[: busy if full else 0]]
                jobs = [*spare, *((file.answer, text) for text in ours), *spare]
                for (_, text), answer in client.each(lambda job: job[0](job[1], settings), jobs):
                    if answer is not None:
                        answers[place, text.key] = answer
                        shown.advance()
    except KeyboardInterrupt:
        raise Interrupted(drafting.kept) from None
    after = client.scrape(settle=True) if drafting in lacking else None
    server, reset = None, ""
    # Answers from the file are not in the server's counters, and with `full` others are.
    if not full and before is not None and after is not None and drafting.fresh - earlier == len(texts):
        try:
            server = difference(before, after)
        except CountsError as error:
            reset = str(error)
    of_server = [[answers[file, text.key] for text in texts] for file in range(len(files))]
    listed = [row for row, answer in enumerate(of_server[0]) if answer.ids is not None] or [*range(len(texts))]
    drafted, *plain = ([of[row] for row in listed] for of in of_server)
    listed_texts = [texts[row] for row in listed]
    return Replies(
        settings,
        listed_texts,
        drafted,
        plain[0] if plain else [],
        server,
        reset,
        len(texts) - len(listed),
        client.engine,
    )
