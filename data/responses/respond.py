"""The target answers the prompts, at the serving settings, into a store: batched, resumable, shared between ranks."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from data.prompts.template import loss_mask
from data.responses.store import Row, Store
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.measure.token_scores import score_responses
from speculative.rules.sampling import SamplingSettings


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the target will see it. `reference_ids`: the dataset's own answer, when one is mapped."""

    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    text: str = ""
    reference_ids: tuple[int, ...] | None = None


def prompts_fingerprint(prompts: Sequence[RenderedPrompt]) -> str:
    """16 hex digits of SHA-256 over ids, domains and tokens of all prompts, in order."""
    content = json.dumps([(p.prompt_id, p.domain, p.prompt_ids, p.reference_ids) for p in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def plan_shards(
    prompts: Sequence[RenderedPrompt], samples_per_prompt: int, shard_size: int
) -> list[list[tuple[RenderedPrompt, int]]]:
    """(prompt, sample number) jobs cut into shards: a function of the arguments alone.

    Longest prompts first, so that a batch holds prompts of like length and memory runs out at once or never.
    """
    order = sorted(prompts, key=lambda prompt: (-len(prompt.prompt_ids), prompt.prompt_id))
    jobs = [(prompt, sample) for prompt in order for sample in range(samples_per_prompt)]
    return [jobs[start : start + shard_size] for start in range(0, len(jobs), shard_size)]


def respond(
    store: Store,
    manifest: dict[str, Any],
    target: PreTrainedModel,
    prompts: Sequence[RenderedPrompt],
    settings: DecodeSettings,
    *,
    samples_per_prompt: int,
    batch_size: int,
    shard_size: int,
    rank: int = 0,
    ranks: int = 1,
    label: str = "responses",
    show: bool = True,
) -> None:
    """Makes the responses that the store lacks. This rank writes every `ranks`-th shard.

    A response depends on (settings.seed, prompt id, sample number) alone, so a killed and resumed run gives the same ones.

    Raises:
        UserError: the store was made with another manifest; a prompt that does not fit; disk full.
    """
    shards = plan_shards(prompts, samples_per_prompt, shard_size)
    # Every rank: one that does not look would write into a store that another refuses.
    store.open(manifest)
    missing = store.missing(len(shards))
    mine = [shard for shard in range(len(shards)) if shard % ranks == rank]
    done = sum(len(shards[shard]) for shard in mine if shard not in missing)
    with _bar(label, sum(len(shards[shard]) for shard in mine), done, show and rank == 0) as progress:
        for shard in mine:
            if shard in missing:
                store.write_shard(shard, _answer(target, shards[shard], settings, batch_size, progress.count))
                progress.advance(len(shards[shard]))


def _answer(
    target: PreTrainedModel,
    jobs: Sequence[tuple[RenderedPrompt, int]],
    settings: DecodeSettings,
    batch_size: int,
    count: Callable[[int], None],
) -> list[Row]:
    keyed = [(f"{prompt.prompt_id}:{sample}", prompt.prompt_ids) for prompt, sample in jobs]
    responses, _ = decode(
        target, None, keyed, settings, batch_size=batch_size, on_commit=lambda _index, token_ids: count(len(token_ids))
    )
    return [
        row_of(prompt, sample, response.response_ids, response.log_target_probs, response.finished)
        for (prompt, sample), response in zip(jobs, responses, strict=True)
    ]


def row_of(
    prompt: RenderedPrompt, sample: int, response_ids: Sequence[int], log_target_probs: Sequence[float], finished: bool
) -> Row:
    """A store row of a prompt and one answer."""
    input_ids = [*prompt.prompt_ids, *response_ids]
    mask = loss_mask(len(prompt.prompt_ids), len(input_ids))
    return Row(prompt.prompt_id, sample, prompt.domain, input_ids, mask, list(log_target_probs), finished)


def store_references(
    store: Store,
    manifest: dict[str, Any],
    target: PreTrainedModel,
    prompts: Sequence[RenderedPrompt],
    sampling: SamplingSettings,
    max_tokens: int,
) -> None:
    """Stores the dataset's own answers, cut at `max_tokens`, with the target's probabilities of their tokens.

    The probabilities come from one forward. A token that the settings exclude (top-k, top-p) has probability 0 and
    logarithm -inf; under greedy settings all logarithms are 0.
    """
    store.open(manifest)
    if not store.missing(1):
        return
    answered = [prompt for prompt in prompts if prompt.reference_ids]
    texts = [
        Response(key=p.prompt_id, prompt_ids=list(p.prompt_ids), response_ids=list(p.reference_ids or ())[:max_tokens])
        for p in answered
    ]
    for text in texts:
        text.log_target_probs = [0.0] * len(text.response_ids)
    if not sampling.greedy:
        # With stored logarithms of 0 the acceptance probability min(1, model / 1) is the model's own probability.
        with np.errstate(divide="ignore"):
            for text, probs in zip(texts, score_responses(target, texts, sampling), strict=True):
                text.log_target_probs = np.log(probs).tolist()
    rows = [
        row_of(prompt, 0, text.response_ids, text.log_target_probs, len(prompt.reference_ids or ()) <= max_tokens)
        for prompt, text in zip(answered, texts, strict=True)
    ]
    store.write_shard(0, rows)


class _bar:  # noqa: N801 -- a context manager used like a function
    """A progress line: responses done, tokens/s of this run, remaining time."""

    def __init__(self, label: str, total: int, done: int, show: bool) -> None:
        columns = (
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        # On stderr: stdout may be JSON for a script.
        self.progress = Progress(
            *columns, console=Console(stderr=True), disable=not show or done == total, refresh_per_second=2
        )
        self.task = self.progress.add_task(label, total=total, completed=done, rate="")
        self.tokens = 0

    def __enter__(self) -> "_bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def count(self, tokens: int) -> None:
        """Counts decoded tokens."""
        self.tokens += tokens
        elapsed = self.progress.tasks[0].elapsed or 0.0
        rate = f"{self.tokens / elapsed:,.0f} tok/s" if elapsed > 1.0 else ""
        self.progress.update(self.task, rate=rate)

    def advance(self, responses: int) -> None:
        """Counts stored responses."""
        self.progress.advance(self.task, responses)
