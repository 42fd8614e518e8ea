"""The target answers the prompts, at the serving settings, into a store: batched, resumable, shared between ranks."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from data.prompts.template import loss_mask
from data.responses.store import Row, Store
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.drafter import Drafter
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
    drafter: Drafter | None = None,
    companion: Callable[[Path, Sequence[Response]], None] | None = None,
) -> None:
    """Makes the responses that the store lacks, with a drafter speculatively. This rank writes every `ranks`-th shard.

    A response depends on (settings.seed, prompt id, sample number) alone, so a killed and resumed run gives the same ones.
    ``companion`` is given the path of a shard and its responses before it is written: a shard that is there has one.

    Raises:
        UserError: the store was made with another manifest; a prompt that does not fit; disk full.
    """
    shards = plan_shards(prompts, samples_per_prompt, shard_size)
    # Every rank: one that does not look would write into a store that another refuses.
    store.open(manifest)
    missing = store.missing(len(shards))
    mine = range(rank, len(shards), ranks)
    done = sum(len(shards[shard]) for shard in mine if shard not in missing)
    with ResponseBar(label, sum(len(shards[shard]) for shard in mine), done, show and rank == 0) as bar:
        for shard in mine:
            if shard not in missing:
                continue
            keyed = [(f"{prompt.prompt_id}:{sample}", prompt.prompt_ids) for prompt, sample in shards[shard]]
            responses, _ = decode(
                target, drafter, keyed, settings, batch_size=batch_size, on_commit=lambda _, ids: bar.count(len(ids))
            )
            if companion is not None:
                companion(store.shard_path(shard), responses)
            pairs = zip(shards[shard], responses, strict=True)
            store.write_shard(shard, [row_of(prompt, sample, response) for (prompt, sample), response in pairs])
            bar.advance(len(responses))


def row_of(prompt: RenderedPrompt, sample: int, response: Response) -> Row:
    """A store row of a prompt and one answer."""
    input_ids = [*prompt.prompt_ids, *response.response_ids]
    mask = loss_mask(len(prompt.prompt_ids), len(input_ids))
    log_probs = list(response.log_target_probs)
    return Row(prompt.prompt_id, sample, prompt.domain, input_ids, mask, log_probs, response.finished)


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
    texts = []
    answered = [prompt for prompt in prompts if prompt.reference_ids]
    for prompt in answered:
        ids = list(prompt.reference_ids or ())
        text = Response(prompt.prompt_id, list(prompt.prompt_ids), response_ids=ids[:max_tokens])
        text.log_target_probs = [0.0] * len(text.response_ids)
        text.finish_reason = "end" if len(ids) <= max_tokens else "length"
        texts.append(text)
    if not sampling.greedy:
        # With stored logarithms of 0 the acceptance probability min(1, model / 1) is the model's own probability.
        with np.errstate(divide="ignore"):
            for text, probs in zip(texts, score_responses(target, texts, sampling), strict=True):
                text.log_target_probs = np.log(probs).tolist()
    store.write_shard(0, [row_of(prompt, 0, text) for prompt, text in zip(answered, texts, strict=True)])


class ResponseBar:
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

    def __enter__(self) -> "ResponseBar":
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
