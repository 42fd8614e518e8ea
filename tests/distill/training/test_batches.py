"""From the mix to micro-batches: the same sequences for any ranks and micro-batches, packed or padded."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import killed_often, run_child, run_ranks
from tiny_models import prompts_of, tiny_model
from tiny_training import (
    TOKENS,
    ScriptedJudge,
    examples_of,
    final_weights,
    fit,
    fresh_accelerator,
    make_loop,
    metrics_of,
    run_config,
    share_of,
    step_of,
    tiny_tokenizer,
)

from data.batches.collate import Batch, Example
from data.responses.rendered import RenderedPrompt
from distill.config.layout import list_steps
from distill.config.run import RunConfig
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.run.checkpoint import resume_point
from distill.run.run import Run
from distill.training.batches import BatchSource
from distill.training.module import DraftModule
from distill.training.rollouts import Rollouts
from distill.training.teacher import Teacher
from distill.training.trainer import Trainer
from speculative.errors import UserError

LENGTHS = [9, 12, 7, 15, 10, 8, 11, 14, 6, 13, 5, 16, 9, 10, 12, 7, 8]
EVERY = 3
DRAFT: Any = "draft"


class FakeRollouts:
    """Sequences whose ids tell kind and generation; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, object]] = []

    def examples(self, kind: str, generation: int, draft: object) -> list[Example]:
        self.asked.append((kind, generation, draft))
        first = {"student": 100, "speculative": 200}[kind] + generation
        made = examples_of([4 + (index + generation) % 7 for index in range(9)], seed=generation)
        for example in made:
            example.input_ids[0] = first
        if kind == "student":
            return made
        return [Example(e.input_ids, e.loss_mask, np.full(len(e.input_ids), 2.0, dtype=np.float32)) for e in made]


def config_of(folder: Path, mix: dict[str, float] | None = None, **train: Any) -> RunConfig:
    mix = mix or {"target": 1.0}
    return run_config(
        folder,
        data={"train": [{"path": "unused"}], "mix": mix, "rollouts": {"every": EVERY}},
        loss={"name": "forward_kl"},
        train={"steps": 6, "batch_size": 8, "micro_batch_size": 2, **train},
    )


MIX = {"target": 0.4, "student": 0.3, "speculative": 0.3}


def source_of(config: RunConfig, rank: int = 0, ranks: int = 1, rollouts: FakeRollouts | None = None) -> BatchSource:
    made: Any = rollouts or FakeRollouts()
    return BatchSource(share_of(config, rank, ranks), examples_of(LENGTHS), made)


def ahead_of(config: RunConfig) -> BatchSource:
    return BatchSource(share_of(config), examples_of(LENGTHS))


def indices_of(window: Sequence[Batch]) -> list[tuple[int, ...]]:
    return [batch.indices for batch in window]


def test_the_next_step_is_made_by_a_thread_beside_this_one(tmp_path: Path) -> None:
    """Slow twin: a source that is asked for one step only. Any order and another micro-batch size give what they ask for."""
    config = config_of(tmp_path, {"target": 1.0})
    source, told = ahead_of(config), list[tuple[str, list[tuple[int, ...]]]]()
    source.read_ahead = lambda window: told.append((threading.current_thread().name, indices_of(window)))
    asked = [(0, 2), (1, 2), (2, 2), (2, 1), (3, 1), (0, 4), (5, 4)]
    for step, size in asked:
        source.micro_batch_size = size
        twin = ahead_of(config)
        twin.micro_batch_size = size
        assert indices_of(source.micro_batches(step)) == indices_of(twin.micro_batches(step))
    assert source._ahead is None, "nothing behind the last step"
    assert len(told) == 6, "steps 1, 2, 3, 3, 4, 1"
    assert all(name.startswith("batches") for name, _ in told)
    twin = ahead_of(config)
    twin.micro_batch_size = 2
    assert told[1][1] == indices_of(twin.micro_batches(2))


def test_what_the_thread_meets_is_raised_by_the_step_that_asks(tmp_path: Path) -> None:
    source = ahead_of(config_of(tmp_path, {"target": 1.0}))

    def damaged(window: Sequence[Batch]) -> None:
        raise UserError("shard: damaged")

    source.read_ahead = damaged
    source.micro_batches(0)
    with pytest.raises(UserError, match="damaged"):
        source.micro_batches(1)


def sequences(batch: Batch) -> list[tuple[int, ...]]:
    """The sequences of a batch by position ids, padding behind them left out where it is id 0."""
    found: list[list[int]] = []
    positions = batch.position_ids_BT
    for row, ids in enumerate(batch.input_ids_BT.tolist()):
        for place, token in enumerate(ids):
            if place == 0 or (positions is not None and positions[row, place] == 0):
                found.append([])
            found[-1].append(token)
    kept = [sequence for sequence in found if any(sequence)]
    return [tuple(sequence[: max(i for i, token in enumerate(sequence) if token) + 1]) for sequence in kept]


@settings(max_examples=25, deadline=None)
@given(
    step=st.integers(0, 12),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 2), (8, 1), (2, 4)]),
    packing=st.sampled_from([None, 16, 40]),
)
def test_a_step_has_the_same_sequences_for_any_ranks_micro_batches_and_packing(
    tmp_path_factory: pytest.TempPathFactory, step: int, shape: tuple[int, int], packing: int | None
) -> None:
    folder, (ranks, micro_batch_size) = tmp_path_factory.getbasetemp(), shape
    whole = source_of(config_of(folder, MIX, micro_batch_size=8)).micro_batches(step, DRAFT)
    assert len(whole) == 1
    config = config_of(folder, MIX, micro_batch_size=micro_batch_size, packing=packing)
    shares = [source_of(config, rank, ranks).micro_batches(step, DRAFT) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "every rank makes the same number of forwards"
    found = [batch for share in shares for batch in share]
    assert sorted(s for batch in found for s in sequences(batch)) == sorted(sequences(whole[0]))
    assert sorted(torch.cat([batch.labels_R for batch in found]).tolist()) == sorted(whole[0].labels_R.tolist())
    assert sorted(i for batch in found for i in batch.indices) == sorted(whole[0].indices)
    if packing is None:
        assert all(len(batch.input_ids_BT) == micro_batch_size for batch in found)
    else:
        assert all(batch.input_ids_BT.numel() <= micro_batch_size * packing for batch in found)


def test_shares_and_generations_show_in_the_sequences(tmp_path: Path) -> None:
    rollouts = FakeRollouts()
    source = source_of(config_of(tmp_path, MIX, micro_batch_size=8), rollouts=rollouts)
    counts = {"target": 0, "student": 0, "speculative": 0}
    for step in range(30):
        (batch,) = source.micro_batches(step, DRAFT)
        first_ids = [sequence[0] for sequence in sequences(batch)]
        assert len(first_ids) == 8
        assert (np.diff([len(sequence) for sequence in sequences(batch)]) <= 0).all(), "falling length over all pools"
        for index, first in zip(batch.indices, first_ids, strict=True):
            # The rollouts' marks may also be the first id of a response of the target, whose number tells it.
            if index >= 0:
                counts["target"] += 1
            else:
                kind, mark = ("speculative", 200) if first >= 200 else ("student", 100)
                counts[kind] += 1
                assert first - mark == step // EVERY, "of the generation that serves this step"
    for name, share in MIX.items():
        assert abs(counts[name] - 30 * 8 * share) < 1
    assert [(kind, generation) for kind, generation, _ in rollouts.asked if kind == "student"] == [
        ("student", generation) for generation in range(10)
    ], "each generation is asked for once"
    assert {draft for *_, draft in rollouts.asked} == {DRAFT}


def test_a_step_learns_a_share_of_the_prompt_tokens_with_more_weight(tmp_path: Path) -> None:
    """All response tokens are learnt; of the prompt tokens about the share, other ones in each step, for any micro-batches."""

    def drawn_of(step: int, micro_batch_size: int, **loss: float) -> list[tuple[int, list[bool]]]:
        config = config_of(tmp_path, micro_batch_size=micro_batch_size)
        config = config.model_copy(update={"loss": config.loss.model_copy(update={"prompt_weight": 0.3, **loss})})
        found = []
        for batch in source_of(config).micro_batches(step, DRAFT):
            assert batch.answers_R is not None
            assert batch.weights_R is not None
            weight = 0.3 / loss.get("prompt_share", 1.0)
            torch.testing.assert_close(batch.weights_R, torch.where(batch.answers_R, 1.0, weight))
            if batch.drawn_R is None:
                continue
            assert batch.drawn_R[batch.answers_R].all()
            ends = batch.rows_R.div(batch.input_ids_BT.shape[1], rounding_mode="floor")
            for row, index in enumerate(batch.indices):
                own = (ends == row) & ~batch.answers_R
                found.append((index, batch.drawn_R[own].tolist()))
        return found

    assert not drawn_of(0, 8), "without a share all are learnt"
    whole = drawn_of(0, 8, prompt_share=0.4)
    assert whole == drawn_of(0, 2, prompt_share=0.4)
    assert whole != drawn_of(1, 8, prompt_share=0.4)
    tokens = [one for step in range(6) for _, own in drawn_of(step, 8, prompt_share=0.4) for one in own]
    # Five standard deviations of a binomial share.
    assert abs(np.mean(tokens) - 0.4) < 5 * (0.4 * 0.6 / len(tokens)) ** 0.5


@pytest.mark.parametrize(
    ("mix", "train", "message"),
    [
        ({"target": 1.0}, {"packing": 12}, r"train\.packing = 12: set it to at least 16, for data\.mix\.target"),
    ],
)
def test_impossible_sets_are_refused(
    tmp_path: Path, mix: dict[str, float], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        BatchSource(share_of(config_of(tmp_path, mix, **train)), examples_of(LENGTHS))


def rollout_loop(config: RunConfig) -> Trainer:
    """A loop on all three pools, rollouts made by the draft that trains; resumes where the run stands."""
    torch.set_num_threads(1)
    config.folder.mkdir(parents=True, exist_ok=True)
    accelerator, tokenizer, target = fresh_accelerator(config.folder), tiny_tokenizer(), tiny_model(vocab_size=TOKENS)
    module = DraftModule(carve(target, [0]), Objective(config.loss_weights(), chunk_tokens=5))
    prompts = [RenderedPrompt(key, "any", tuple(ids)) for key, ids in prompts_of([3, 5, 2, 4, 6, 3], vocab_size=TOKENS)]
    run = Run(config, accelerator, resume_point(config.folder)[0])
    rollouts = Rollouts(run, target, tokenizer, prompts)
    examples = examples_of(LENGTHS)
    batches = BatchSource(share_of(config), examples, rollouts)
    trainer: Any = Trainer(run, module, Teacher(target), batches, tokenizer, {"seed": 0})
    trainer.judge = ScriptedJudge()
    return trainer


def rollout_config(folder: Path, packing: int | None) -> RunConfig:
    return run_config(
        folder,
        data={
            "train": [{"path": "unused"}],
            "mix": MIX,
            "rollouts": {"every": 2, "prompts": 4},
        },
        serving={"shard_size": 2, "batch_size": 2, "max_tokens": 6},
        train={"steps": 11, "batch_size": 4, "micro_batch_size": 2, "packing": packing},
        judge={"every": 5},
    )


@pytest.mark.parametrize("packing", [None, 32])
def test_a_run_killed_anywhere_ends_with_the_same_weights(tmp_path: Path, packing: int | None) -> None:
    whole, killed = (rollout_config(tmp_path / name, packing) for name in ("whole", "killed"))

    def fit_whole(config: RunConfig) -> None:
        fit(rollout_loop(config))

    def fit_to_9(config: RunConfig) -> None:
        loop = rollout_loop(config)
        make = loop.batches.micro_batches
        loop.batches.micro_batches = lambda step, draft: os._exit(9) if step == 9 else make(step, draft)  # type: ignore[method-assign]
        fit(loop)

    fit_whole(whole)
    # Resumes at 5, in a generation that the draft of step 4 made; two have been made since.
    assert run_child(fit_to_9, killed) == 9

    def lines() -> int:
        path = killed.folder / "metrics.jsonl"
        return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0

    assert killed_often(fit_whole, killed, progress=lines, times=4, most=2, seed=1) >= 1
    assert list_steps(killed.folder) == [0, 5, 10, 11]
    torch.testing.assert_close(final_weights(killed), final_weights(whole), rtol=0, atol=0)
    facts = [[(line.get("loss"), line.get("tokens")) for line in metrics_of(config)] for config in (whole, killed)]
    assert facts[0] == facts[1]


def packed_config(folder: Path, micro_batch_size: int, packing: int | None = 50) -> RunConfig:
    train = {"batch_size": 8, "micro_batch_size": micro_batch_size, "steps": 20, "packing": packing}
    return run_config(folder, train=train, optim={"max_grad_norm": 1e6, "warmup_ratio": 0.0})


def one_step(config: RunConfig) -> dict[str, Any]:
    """The gradient of the first step, its result, and the response tokens of its micro-batches."""
    loop = make_loop(config, examples=examples_of([20, 19, 18, 17, 16, 15, 14, 13]))
    rows = [batch.labels_R.numel() for batch in loop.micro_batches(0)]
    result, gradients = step_of(loop)
    return {"gradients": gradients, "loss": result.loss, "tokens": result.tokens, "rows": rows}


def _rank(rank: int, folder: Path) -> None:
    torch.save(one_step(packed_config(folder, 1)), folder / f"rank{rank}.pt")


def test_packed_ranks_of_which_one_has_nothing_left_make_the_whole_gradient(tmp_path: Path) -> None:
    run_ranks(_rank, tmp_path)
    shared = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    # Three rows for two ranks: two micro-batches each, one of them without a response token.
    assert [len(one["rows"]) for one in shared] == [2, 2]
    assert [one["rows"][1] == 0 for one in shared] == [False, True]
    for whole in (one_step(packed_config(tmp_path / str(packing), 8, packing)) for packing in (50, None)):
        assert shared[0]["tokens"] == whole["tokens"] == sum(sum(one["rows"]) for one in shared)
        assert shared[0]["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        for one in shared:
            # float32 sums taken in another order
            torch.testing.assert_close(one["gradients"], whole["gradients"], rtol=1e-4, atol=1e-6)
