"""Make the teacher of a run: the target itself, or the run's store of its probabilities."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.batches.collate import Example, collate
from data.batches.examples import Examples, as_examples
from data.signals.columns import RELATIVE_ERROR
from data.signals.store import SignalFacts, SignalStore
from distill.config.layout import RESPONSES, TRAINING
from distill.config.run import RunConfig
from distill.config.sections import SignalConfig
from distill.models.target import Target, TargetFacts
from distill.run.responses import signal_manifest_of
from distill.run.run import Run
from distill.training.teacher import CapturingTeacher, StoredTeacher, Teacher, TeacherSource
from speculative.errors import UserError
from speculative.progress import phase

# Sequences of a forward without gradients if train.micro_batch_size is not set.
FILLED_AT_ONCE = 32


def open_signal_store(
    run: Run, examples: Examples | Sequence[Example], facts: TargetFacts, *, repair: bool
) -> SignalStore:
    """Open the run's signal store, next to its responses, on every rank. Signals of other examples stay in the store.

    ``repair``: for callers that compute missing signals; damaged ones then count as missing. Otherwise the store must be complete.

    Raises UserError: missing or incomplete; the message has the command that makes it.
    """
    config = run.config
    store, examples = SignalStore(run.folder / RESPONSES / TRAINING), as_examples(examples)
    examples = examples.with_prompts(config.loss.prompt_weight)
    store.open(signal_manifest_of(run, facts), examples.predicted_N, examples.keys_N, repair=repair)
    if not repair and (missing := store.missing()):
        found = "".join(f" ({said})" for said in store.faults())
        raise UserError(
            f"{store.folder}: signal.source is {config.signal.source}, but the signal of {len(missing)} of {len(examples)} examples is "
            f"missing{found}; run {store.again} first"
        )
    return store


def require_signal(config: RunConfig) -> None:
    """Raise UserError, before any prompt is answered, if the run wants a stored signal and has none at all."""
    store = SignalStore(config.folder / RESPONSES / TRAINING)
    wanted = config.signal.source == "store" and not config.only_ce and config.data.mix.target
    if wanted and not any(store.folder.glob("topk-*")):
        raise UserError(f"{store.folder}: signal.source is store, but none is there; run {store.again} first")


def fill(run: Run, store: SignalStore, target: Target, examples: Examples) -> None:
    """Compute this rank's share of the missing signals, in micro-batches of similar length, the longest first.

    Existing ones are verified first. The target is loaded only if some are missing. UserError: disk full, or logits that are not finite.
    """
    config = run.config
    examples = examples.with_prompts(config.loss.prompt_weight)
    rank, ranks = run.rank, run.ranks
    if store.present().any():
        store.verify(rank=rank, ranks=ranks)
    run.wait()
    # One list for all ranks, so that the shares fit together.
    missing = np.array(run.seen(store.missing), dtype=np.int64)
    size = config.train.micro_batch_size or FILLED_AT_ONCE
    order = missing[np.argsort(-examples.lengths_N[missing].astype(np.int64), kind="stable")].tolist()
    mine = [order[start : start + size] for start in range(0, len(order), size)][rank::ranks]
    if mine:
        with target.loaded() as model, phase("teacher signal", sum(map(len, mine))) as shown:
            teacher = CapturingTeacher(Teacher(model), store, config.loss.chunk_tokens)
            for indices in mine:
                batch = collate([examples[index] for index in indices], indices=indices)
                teacher.fill(batch.to(run.device))
                shown.advance(len(indices))
    run.wait()


def signal_line(signal: SignalConfig, facts: SignalFacts) -> str:
    """One line about the stored signal: its size, and how far truncation can lower an acceptance rate computed from it."""
    return (
        f"signal: topk k {signal.k}, {facts.bytes_per_token:.0f} bytes per token, {facts.tokens:,} tokens in {facts.examples:,} examples; "
        f"tail mass: mean {facts.mean:.4f}, maximum {facts.largest:.4f} (alpha computed from the store is too low by at most the mean, "
        f"plus or minus {RELATIVE_ERROR} for rounding)"
    )


def make_teacher(run: Run, facts: TargetFacts, model: Any, examples: Examples) -> TeacherSource | None:
    """The target itself, its store, or the target asked once per sequence; None if no objective needs a target.

    ``model``: the target; None where steps read its store. UserError: a store that is not complete, or of other settings.
    """
    config = run.config
    if config.only_ce:
        return None
    signal = config.signal
    if signal.source == "online":
        return Teacher(model)
    store = open_signal_store(run, examples, facts, repair=signal.source == "capture")
    return StoredTeacher(store) if model is None else CapturingTeacher(Teacher(model), store, config.loss.chunk_tokens)
