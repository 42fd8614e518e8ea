"""A target at one or more servers: stores their responses and top-k probabilities, and can be interrupted and continued.

The same prompts give the same store, however many servers answer and in whatever order, if the servers respect seeds.
"""

import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from data.responses.dealing import Dealing, Lane
from data.responses.endpoint import EndpointTarget
from data.responses.endpoint_keys import Endpoint
from data.responses.journal import Journal
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan, row_of
from data.responses.server_identity import NOISE, PRECISION, Says, WrongServer, gaps
from data.responses.store import TOKEN_BYTES, Row, Store
from data.signals.signal import TopKSignal
from data.signals.store import SignalStore
from speculative.decoder.responses import DecodeSettings
from speculative.progress import Phase, note, phase
from speculative.rules.sampling import SamplingSettings

ESTIMATED_FROM = 200  # the first answers, which tell how long the rest takes
COMPARED_PROMPTS, COMPARED_PLACES = 8, 4  # in each prompt
_LISTED = 20  # most probable tokens that local weights list at a place
_WRITTEN_AT_ONCE = 64  # Examples in a file of top-k probabilities.
_ENTRY_BYTES = 200  # Maximum size of an entry of `prompt_logprobs`: an id, its log-probability, rank and text.


@dataclass(frozen=True)
class LocalSays:
    """Next-token log-probabilities of local weights after some texts, each given by its ids. `dtype`: of the weights."""

    texts: list[list[int]]
    says: Says
    dtype: str

    def compare(self, target: EndpointTarget) -> None:
        """Say how far a server is from the local weights, and refuse one that has another model."""
        now = dict(target.each(lambda place: target.next_token(self.texts[place]), range(len(self.texts))))
        apart = gaps(self.says, [now[place] for place in range(len(self.texts))])
        url, mean = target.endpoint.url, sum(apart) / max(1, len(apart))
        if not apart:
            return note(
                f"warning: {url}: lists no log-probabilities, so its model is not compared with the local weights"
            )
        figures = f"{mean:.4f} nats on average and {max(apart):.3f} at most, on {len(self.texts)} texts"
        if mean > NOISE:
            raise WrongServer(
                f"{url}: {target.model} is not the model of {target.label}: their log-probabilities differ by {figures}, above the "
                f"noise of {NOISE}; serve {target.label}, or set it to the served model"
            )
        if mean > PRECISION[self.dtype == "float32"]:
            figures += (
                f"; it looks like another precision than {self.dtype} here, and drafts are judged with the local one"
            )
        note(
            f"{'warning: ' if ';' in figures else ''}{url}: log-probabilities differ from the local weights' by {figures}"
        )


@torch.no_grad()
def local_says(model: PreTrainedModel, prompts: Sequence[RenderedPrompt]) -> LocalSays:
    """What a model says at some places of the first prompts."""
    texts, says = list[list[int]](), list[dict[str, float]]()
    for prompt in prompts[:COMPARED_PROMPTS]:
        ids = list(prompt.prompt_ids)
        logits_TV = model(input_ids=torch.tensor([ids], device=model.device)).logits[0]
        for end in sorted({-(-len(ids) * part // COMPARED_PLACES) for part in range(1, COMPARED_PLACES + 1)}):
            top = logits_TV[end - 1].float().log_softmax(-1).topk(min(_LISTED, logits_TV.shape[-1]))
            texts.append(ids[:end])
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            says.append({f"token_id:{token}": value for token, value in pairs})
    return LocalSays(texts, says, str(model.dtype).removeprefix("torch."))


class Servers:
    """Servers of one target. No request is made before the first call."""

    def __init__(self, endpoint: Endpoint, tokenizer: Any, vocab_rows: int, record: Path | None = None) -> None:
        """As `EndpointTarget`. record: where only servers have the weights."""
        singles = [endpoint.model_copy(update={"urls": (url,)}) for url in endpoint.urls]
        self.lanes = [Lane(EndpointTarget(single, tokenizer, vocab_rows, record)) for single in singles]
        self.local: LocalSays | None = None  # to compare each server with, where the weights are here too
        self._settings: tuple[SamplingSettings, Sequence[RenderedPrompt]] | None = None

    @property
    def model(self) -> str:
        """The name of the model at the first server that answers; UserError: see `EndpointTarget.model`."""
        names, faults = SimpleQueue[str | Exception](), list[Exception]()

        def ask(lane: Lane) -> None:
            try:
                names.put(str(lane.target.model))
            except Exception as error:
                names.put(error)

        # Daemons, because the others do not wait for one that never answers.
        for lane in self.lanes:
            threading.Thread(target=ask, args=(lane,), daemon=True, name="endpoint").start()
        with phase(f"asking {', '.join(lane.url for lane in self.lanes)}"):
            while len(faults) < len(self.lanes):
                if isinstance(found := names.get(), str):
                    return found
                faults.append(found)
        raise faults[0]

    def check(self) -> None:
        """Let the next work begin with a look at all servers. UserError then: none answers, or one has another model than the target."""
        for lane in self.lanes:
            lane.new, lane.fault, lane.look_at = True, None, 0.0

    def _look(self, lane: Lane) -> None:
        target = lane.target
        target.check()
        if self._settings is not None:
            target.check_probabilities(*self._settings)
        if self.local is not None and not lane.compared:
            self.local.compare(target)
            target.compare_chat()
            lane.compared = True

    def each(self, work: Callable[[EndpointTarget, Any], Any], jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (job, result) as they finish; see `Dealing.results`."""
        return Dealing(self.lanes, work, self._look, jobs).results()

    def respond(
        self,
        store: Store,
        plan: ResponsePlan,
        settings: DecodeSettings,
        *,
        show: bool = True,
        signal_bytes: float = 0.0,
    ) -> None:
        """Like `data.responses.respond.respond`, after `settle`. signal_bytes: stored later for each response token.

        Every request has a seed made from (settings.seed, prompt id, sample number), so responses after a kill are the same, if the
        server respects seeds.

        Raises UserError: no server answers, or not at these settings. Finished responses are kept.
        """
        lacking, total = plan.share(store)
        if not lacking:
            return
        self._settings = (settings.sampling, plan.prompts)
        self.check()
        answers: dict[int, dict[int, Row]] = {shard: {} for shard, _ in lacking}
        wanted = {shard: len(numbers) for shard, numbers in lacking}

        def keep(shard: int, number: int, row: Row) -> None:
            answers[shard][number] = row
            if len(answers[shard]) == wanted[shard]:
                rows = answers.pop(shard)
                store.write_shard(shard, [rows[number] for number in sorted(rows)])

        jobs = [(shard, number) for shard, numbers in lacking for number in numbers]

        def work(target: EndpointTarget, job: tuple[int, int]) -> tuple[str, Row]:
            prompt, sample = plan.job(job[1])
            answer = target.answer(prompt.prompt_ids, settings, f"{prompt.prompt_id}:{sample}")
            return target.endpoint.url, row_of(prompt, sample, answer)

        label, done = f"{store.folder.name} responses", total - len(jobs)
        with (
            Journal(store.folder, plan.rank) as journal,
            phase(label, total, done, show and plan.rank == 0) as progress,
        ):
            speed = _Speed(progress, self.lanes, jobs, signal_bytes)
            for job, (url, row) in self.each(work, jobs):
                journal.add(row)
                speed.count(job, url, row)
                keep(job[0], job[1], row)

    def topk(
        self, store: SignalStore, rows: Sequence[Row], k: int, *, rank: int = 0, ranks: int = 1, show: bool = True
    ) -> None:
        """Write the missing signal of an opened store. Example i is row i; each rank writes every `ranks`-th.

        Raises UserError: no server answers or one returns no or too few `prompt_logprobs`. Finished rows are kept.
        """
        missing = [index for index in store.missing() if index % ranks == rank]
        if not missing:
            return
        longest = max(len(rows[index].prompt_ids) + len(rows[index].response_ids) for index in missing)
        for lane in self.lanes:
            lane.target.allow(longest * (k + 2) * _ENTRY_BYTES)
        self.check()
        mine = len(range(rank, len(rows), ranks))

        def work(target: EndpointTarget, index: int) -> TopKSignal:
            return target.score(rows[index].prompt_ids, rows[index].response_ids, k)

        with phase("teacher signal", mine, mine - len(missing), show and rank == 0) as progress:
            scored: dict[int, TopKSignal] = {}
            try:
                for index, signal in self.each(work, missing):
                    scored[index] = signal
                    if len(scored) == _WRITTEN_AT_ONCE:
                        store.write(scored)
                        scored = {}
                    progress.count(len(signal.log_tail_R))
                    progress.advance()
            finally:
                if scored:
                    store.write(scored)


class _Speed:
    """What servers do in a second, and, from the first answers, what the rest takes."""

    def __init__(self, progress: Phase, lanes: Sequence[Lane], jobs: Sequence[Any], signal_bytes: float) -> None:
        self.progress, self.lanes, self.jobs, self.signal_bytes = progress, lanes, len(jobs), signal_bytes
        # The first jobs, not the first to finish, because those are short.
        self.first = set(jobs[:ESTIMATED_FROM] if len(jobs) > ESTIMATED_FROM else ())
        self.tokens, self.stored, self.responses = Counter[str](), 0, 0
        self.sampled = Counter[str]()

    def count(self, job: Any, url: str, row: Row) -> None:
        """An answer arrived."""
        tokens, progress = len(row.log_target_probs), self.progress
        self.tokens[url] += tokens
        progress.count(tokens)
        progress.advance()
        if len(self.lanes) > 1:
            seconds = max(progress.seconds, 1.0)
            rates = [
                f"{urllib.parse.urlsplit(lane.url).netloc} "
                + ("out" if lane.fault else f"{self.tokens[lane.url] / seconds:,.0f}")
                for lane in self.lanes
            ]
            progress.facts += f" ({', '.join(rates)})"
        if job in self.first:
            self.first.remove(job)
            self.sampled.update(prompt=len(row.input_ids) - tokens, response=tokens)
            if not self.first:
                self._estimate()

    def _estimate(self) -> None:
        each = self.sampled["response"] / ESTIMATED_FROM
        size = TOKEN_BYTES * (self.sampled["prompt"] / ESTIMATED_FROM + each) + self.signal_bytes * each
        rate = self.tokens.total() / self.progress.seconds
        left = timedelta(seconds=round((self.jobs - self.progress.fresh) * each / rate))
        note(
            f"{self.progress.label}: by the first {ESTIMATED_FROM} answers, {self.jobs:,} have about {each * self.jobs:,.0f} tokens; "
            f"{left} left at {rate:,.0f} tok/s, {decimal(int(size * self.jobs))} on disk"
        )
