"""Training of parallel drafts: one pass is many prefixes with masks, drops change nothing on average, the step stays exact."""

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from eager_loss import dense_by_definition
from processes import run_ranks
from tiny_models import tiny_model
from tiny_training import (
    TOKENS,
    final_weights,
    fit,
    fresh_accelerator,
    make_loop,
    make_mask_token,
    metrics_of,
    run_config,
    step_of,
)
from torch import Tensor

from data.batches.collate import Example, collate
from distill.config.layout import step_folder
from distill.config.run import RunConfig
from distill.loss.definitions import Objective
from distill.loss.offsets import Survival
from distill.models.carving.layers import carve
from distill.run.run import Run
from distill.training.batches import make_batches
from distill.training.micro_batch import trial_batch, trial_step
from distill.training.module import DraftModule
from distill.training.teacher import Teacher, topk_signal
from speculative.errors import UserError

MASK = 0
PARALLEL = {"tokens": 4}


def texts_of(lengths: tuple[int, ...], prompt: int = 3, vocab: int = TOKENS) -> list[Example]:
    generator = np.random.default_rng(3)
    return [
        Example(generator.integers(3, vocab, length).astype(np.int32), np.arange(length) >= prompt)
        for length in lengths
    ]


def parallel_module(student: Any, objective: Objective, tokens: int = 4, retain: float = 0.6) -> DraftModule:
    make_mask_token(student, MASK)
    module = DraftModule(student, objective, Survival(tokens, retain))
    module.survival.kept_J = [0.8 / (1 + place) for place in range(tokens)]
    return module


def in_blocks(example: Example, depths: Any) -> Example:
    """The example with these depths of its response tokens, cut where it ends."""
    own = np.zeros(len(example.input_ids), dtype=np.int64)
    places = np.flatnonzero(example.loss_mask)
    own[places] = np.minimum(np.resize(np.asarray(depths), len(places)), len(own) - places)
    return replace(example, depths=own)


def one_by_one(module: DraftModule, target: Any, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """The slow twin: a forward of prefix and masks for each block, all logits. (Summed loss, survival sums of the deepest blocks)"""
    total, survival = torch.zeros((), dtype=torch.float64), torch.zeros(2, len(module.survival.kept_J))
    for example in examples:
        ids, deepest = torch.from_numpy(example.input_ids.astype(np.int64)), int(np.argmax(example.depths))
        targets_TV = target(ids[None]).logits[0].log_softmax(-1)
        for first in np.flatnonzero(example.loss_mask):
            depth, kept = int(example.depths[first]), 1.0
            asked = torch.cat([ids[:first], torch.full((depth - 1,), MASK)])
            students_TV = module.student(asked[None]).logits[0].log_softmax(-1)
            for offset, weight in enumerate(module.survival.weights()[:depth]):
                row, label = first - 1 + offset, ids[first + offset : first + offset + 1]
                pair = targets_TV[row : row + 1], students_TV[row : row + 1]
                total = total + weight * dense_by_definition(module.objective, *pair, label).loss_N.double().sum()
                if first == deepest:
                    kept *= float((pair[1] - pair[0]).detach()[0, label].exp().clamp(max=1.0))
                    survival[:, offset] += torch.tensor([kept, 1.0])
    return total, survival


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_one_pass_is_each_block_asked_alone(kind: str) -> None:
    options = {"sliding_window": 6} if kind == "gemma3_text" else {}
    target = tiny_model(kind, vocab_size=TOKENS, dtype=torch.float64, **options)
    student = tiny_model(kind, vocab_size=TOKENS, dtype=torch.float64, seed=4, **options)
    module = parallel_module(student, Objective({"lk_hybrid": 1.0, "ce": 0.5}, chunk_tokens=5))
    drawn = ([4, 1, 2], [3], [1, 4])
    examples = [in_blocks(one, depths) for one, depths in zip(texts_of((11, 7, 9)), drawn, strict=True)]
    batch = collate(examples, 1)
    loss, _, _ = module(batch, Teacher(target).signal(batch))
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    expected, survival = one_by_one(module, target, examples)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(module.survival.seen_2J.float(), survival, rtol=1e-5, atol=1e-6)
    assert batch.masks == sum(int((one.depths - 1).clip(0).sum()) for one in examples) > 10
    again = {name: weight.grad for name, weight in module.named_parameters()}
    # The models are float64, but their norms compute in float32.
    torch.testing.assert_close(gradients, again, rtol=1e-4, atol=1e-6)
    (table,) = (
        gradients[name] for name, weight in module.named_parameters() if weight is student.get_input_embeddings().weight
    )
    assert table[MASK].abs().max() > 1e-3, "the mask token learns, though it is the padding too"


def test_the_mean_over_drops_is_the_dense_loss() -> None:
    target, student = (tiny_model(vocab_size=TOKENS, dtype=torch.float64, seed=seed) for seed in (0, 4))
    (text,) = texts_of((6,))
    outcomes = {}
    for retain in (1.0, 0.6):
        module = parallel_module(student, Objective({"forward_kl": 1.0}), 3, retain)
        signal_of, mean = Teacher(target).signal, {}
        probs = [1.0 - retain, retain * (1.0 - retain), retain**2]
        for depths in itertools.product((1, 2, 3), repeat=3):
            share = float(np.prod([probs[depth - 1] for depth in depths]))
            if share:
                batch = collate([in_blocks(text, depths)], 1)
                module.zero_grad()
                loss, _, _ = module(batch, signal_of(batch))
                loss.backward()
                numbers = {name: weight.grad for name, weight in module.named_parameters()} | {"loss": loss.detach()}
                mean = {name: mean.get(name, 0.0) + share * number for name, number in numbers.items()}
        outcomes[retain] = mean
    # Weights of offsets are float32.
    torch.testing.assert_close(outcomes[0.6], outcomes[1.0], rtol=1e-5, atol=1e-7)


def blocks_config(folder: Path, micro_batch_size: int = 2, **sections: Any) -> RunConfig:
    return run_config(
        folder,
        student={"parallel": PARALLEL},
        train={"batch_size": 4, "micro_batch_size": micro_batch_size, "steps": 4},
        optim={"lr": 1e-2, "warmup_ratio": 0.0, "max_grad_norm": 1e6},
        judge={"every": 2, "gamma": 3},
        **sections,
    )


def two_steps(folder: Path, micro_batch_size: int) -> dict[str, Any]:
    """Loss of each of two steps, the gradient of the second, and survival behind it."""
    student = carve(tiny_model(vocab_size=TOKENS), [0])
    loop = make_loop(blocks_config(folder, micro_batch_size), student=student, examples=texts_of((8, 15, 5, 11), 4))
    losses = [loop.step(loop.micro_batches(0)).loss]
    result, gradients = step_of(loop, 1)
    losses.append(result.loss)
    assert result.masks > 10
    return {"losses": losses, "gradients": gradients, "survival": loop.survival.kept_J, "masks": result.masks}


def _rank(rank: int, folder: Path) -> None:
    torch.save(two_steps(folder, 1), folder / f"rank{rank}.pt")


def test_the_step_is_the_same_however_the_batch_is_shared(tmp_path: Path) -> None:
    run_ranks(_rank, tmp_path / "ranks")
    whole, others = two_steps(tmp_path / "whole", 4), [two_steps(tmp_path / "micro", 1)]
    others += [torch.load(tmp_path / "ranks" / f"rank{rank}.pt") for rank in (0, 1)]
    assert whole["survival"][3] < whole["survival"][0] < 1.0
    for other in others:
        assert other["masks"] == whole["masks"]
        assert other["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert other["survival"] == pytest.approx(whole["survival"], rel=1e-5)
        # Behind an update of Adam's, whose steps have the sign of a rounding where a gradient is nearly zero.
        torch.testing.assert_close(other["gradients"], whole["gradients"], rtol=1e-2, atol=1e-4)


def test_a_stopped_run_goes_on_exactly(tmp_path: Path) -> None:
    whole, stopped = blocks_config(tmp_path / "whole"), blocks_config(tmp_path / "stopped")
    fit(make_loop(whole))
    loop = make_loop(stopped)
    step = loop.step
    loop.step = lambda window: step(window if loop.progress.step < 3 else None)  # type: ignore[method-assign,arg-type]
    with pytest.raises(TypeError):
        fit(loop)
    fit(make_loop(stopped))
    assert metrics_of(stopped) == metrics_of(whole)
    lines = [line for line in metrics_of(whole) if "loss" in line]
    assert lines[0]["survival/4"] > lines[-1]["survival/4"] >= 0.9**4 / 1.001, "it starts at 1"
    assert all(line["masks"] for line in lines)
    torch.testing.assert_close(final_weights(stopped), final_weights(whole), rtol=0, atol=0)
    config = json.loads((step_folder(whole.folder, 4) / "student" / "config.json").read_text(encoding="utf-8"))
    assert config["pard_token"] == MASK


def test_a_text_with_the_mask_token_is_refused(tmp_path: Path) -> None:
    (text,) = texts_of((9,))
    text.input_ids[1] = MASK
    run = Run(blocks_config(tmp_path), fresh_accelerator(tmp_path))
    with pytest.raises(UserError, match="contains the draft's mask token 0"):
        make_batches(run, [text] * 4, mask_token=MASK)


def test_a_trial_step_asks_for_blocks_too_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model(vocab_size=TOKENS)
    module = parallel_module(carve(target, [0]), Objective({"forward_kl": 1.0}), 8, 0.7)
    batch = trial_batch(2, 200, module)
    # 199 response tokens, each with retain + .. + retain^7 masks on average.
    assert batch.masks / (2 * 199) == pytest.approx(sum(0.7**k for k in range(1, 8)), rel=0.15)
    accelerator: Any = SimpleNamespace(autocast=nullcontext, device=torch.device("cpu"))
    trial_step(accelerator, module, Teacher(target), trial_batch(1, 20, module))
    assert float(module.survival.seen_2J.abs().sum()) == 0.0

    def refuse(loss: Tensor) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Tensor, "backward", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        trial_step(accelerator, module, Teacher(target), trial_batch(1, 20, module))
    assert float(module.survival.seen_2J.abs().sum()) == 0.0


def test_a_stored_signal_serves_every_offset() -> None:
    """All of the vocabulary stored is the target itself."""
    target, student = (tiny_model(vocab_size=TOKENS, dtype=torch.float64, seed=seed) for seed in (0, 4))
    module = parallel_module(student, Objective({"forward_kl": 1.0}))
    batch = collate([in_blocks(one, [4, 2, 1]) for one in texts_of((11, 7))], 1)
    dense = Teacher(target).signal(batch)
    stored: Any = topk_signal(dense.head, dense.hidden_RD, TOKENS)
    losses = [float(module(batch, signal)[0].detach()) for signal in (dense, stored)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
