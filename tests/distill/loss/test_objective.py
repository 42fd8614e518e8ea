"""The chunked loss against its eager twin: value and gradient.

Legend: R rows (response tokens), C rows of a chunk, D hidden width, V vocabulary.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager_loss import PLAIN, dense_by_definition, eager_loss
from stored_signals import topk_of
from tiny_models import tiny_model
from tiny_training import examples_of
from torch import Tensor, nn

from data.batches.collate import Batch, collate
from data.signals.signal import DenseSignal, Signal
from distill.loss import rows
from distill.loss.chunk_heads import OutputHead, Student
from distill.loss.definitions import Objective
from distill.loss.objective import Scored, acceptance_sum, chunked_loss
from distill.models.student import add_lora
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

ROOT = Path(__file__).resolve().parents[3]
ROWS, WIDTH, TARGET_WIDTH, VOCAB = 11, 6, 9, 19
MIXES = {name: {name: 1.0} for name in (*PLAIN, "ce")} | {"mix": {"forward_kl": 0.5, "tv": 2.0, "ce": 0.1}}
SERVED = {"topk": list(MIXES), "dense": list(MIXES), "none": ["ce"]}
CASES = [(kind, mix) for kind, mixes in SERVED.items() for mix in mixes]


class Wrapped(nn.Linear):
    """Not what its weights say: a head that must be asked."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 1.5 * super().forward(hidden)


class Setting:
    """Hidden states and heads of both models, of different widths, in float64."""

    def __init__(
        self,
        seed: int = 0,
        bias: bool = True,
        scale: float = 1.0,
        softcap: float | None = None,
        plain: bool = True,
        dtype: torch.dtype = torch.float64,
        rows: int = ROWS,
    ) -> None:
        torch.manual_seed(seed)
        layer = (nn.Linear if plain else Wrapped)(WIDTH, VOCAB, bias=bias, dtype=torch.float64)
        target_layer = nn.Linear(TARGET_WIDTH, VOCAB, dtype=torch.float64)
        hidden_RD = (2 * torch.randn(rows, WIDTH, dtype=torch.float64)).to(dtype).requires_grad_()
        target_hidden_RD = 2 * torch.randn(rows, TARGET_WIDTH, dtype=torch.float64)
        self.labels_R = torch.randint(0, VOCAB, (rows,))
        self.weights_R = torch.rand(rows, dtype=torch.float64)
        self.student = Student(hidden_RD, OutputHead(layer.to(dtype), scale, softcap))
        target_layer.requires_grad_(False)
        self.dense = DenseSignal(target_hidden_RD.to(dtype), target_layer.to(dtype))

    def signal(self, kind: str, temperature: float = 1.0) -> Signal | None:
        if kind == "dense":
            return self.dense
        logits_RV = self.dense.head(self.dense.hidden_RD)
        return topk_of(logits_RV, 5, temperature) if kind == "topk" else None

    def loss(
        self, function: Callable[..., Scored], objective: Objective, kind: str = "dense", **options: Any
    ) -> Scored:
        signal = self.signal(kind, objective.temperature)
        return function(objective, self.student, signal, self.labels_R, **options)

    def gradients(self, sums: Scored) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sums.loss * 0.37, [self.student.hidden_RD, *self.student.head.parameters()])


def assert_twins(setting: Setting, objective: Objective, kind: str, **options: Any) -> None:
    chunked, eager = (setting.loss(one, objective, kind, **options) for one in (chunked_loss, eager_loss))
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)  # float64; sums in another order
    for mine, theirs in zip(chunked, eager, strict=True):
        close(mine, theirs)
    assert len(chunked.overlap_R) == setting.labels_R.numel(), "of all rows"
    pairs = list(zip(setting.gradients(chunked), setting.gradients(eager), strict=True))
    assert len(pairs) == 1 + len(setting.student.head.parameters())
    for mine, theirs in pairs:
        close(mine, theirs)


@pytest.mark.parametrize("chunk_tokens", [1, 3, ROWS, None])
@pytest.mark.parametrize(("kind", "mix"), CASES)
def test_chunked_is_eager(kind: str, mix: str, chunk_tokens: int | None) -> None:
    assert_twins(Setting(), Objective(MIXES[mix], beta=0.3, chunk_tokens=chunk_tokens), kind)


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 1.5, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize(("kind", "mix"), CASES)
def test_chunked_is_eager_for_every_head(kind: str, mix: str, options: dict[str, Any], plain: bool) -> None:
    setting = Setting(plain=plain, **options)
    objective = Objective(MIXES[mix], temperature=1.3, beta=0.3, chunk_tokens=4)
    assert_twins(setting, objective, kind, weights_R=setting.weights_R)


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
def test_two_calls_before_a_step_add_up(plain: bool) -> None:
    setting, objective = Setting(plain=plain), Objective(MIXES["jsd"], chunk_tokens=4)
    weight = setting.student.head.projection.weight
    (expected,) = torch.autograd.grad(setting.loss(eager_loss, objective).loss, weight)
    both = [setting.loss(chunked_loss, objective).loss for _ in range(2)]
    for loss in both:
        (loss * 0.5).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-10, atol=1e-12)  # order of sums
    (setting.loss(chunked_loss, objective).loss + setting.loss(chunked_loss, objective).loss).backward()
    torch.testing.assert_close(weight.grad, 3 * expected, rtol=1e-10, atol=1e-12)  # order of sums
    with pytest.raises(RuntimeError, match="once"):
        both[0].backward()


def test_autograd_takes_the_heads_gradient_over_without_a_copy() -> None:
    setting = Setting(bias=False)
    loss = setting.loss(chunked_loss, Objective(MIXES["forward_kl"], chunk_tokens=4)).loss
    buffer = loss.grad_fn.gradients[1].data_ptr()  # type: ignore[union-attr]
    loss.backward()
    gradient = setting.student.head.projection.weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.data_ptr() == buffer


@pytest.mark.parametrize("kind", ["dense", "topk"])
@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
def test_a_chunked_step_holds_a_few_chunks_whatever_the_rows(kind: str, plain: bool) -> None:
    rows, chunk_tokens = 600, 4
    setting, objective = Setting(plain=plain, rows=rows), Objective(MIXES["jsd"], chunk_tokens=chunk_tokens)
    signal, numbers = (
        setting.signal(kind),
        rows * (WIDTH + 8),
    )  # the hidden states' gradient; each row's losses and label
    arguments = (objective, setting.student, signal, setting.labels_R)
    most = {}
    for function in (chunked_loss, eager_loss):
        with _Operations() as seen:
            setting.gradients(function(*arguments))
        most[function] = seen.most_bytes / 8
    assert most[chunked_loss] < numbers + 12 * chunk_tokens * VOCAB + 4 * WIDTH * VOCAB
    assert most[eager_loss] > 4 * rows * VOCAB, "the instrument sees what the eager twin makes"


class _Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """The name of every operation, and the most bytes that what they made has held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.held: dict[int, int] = {}
        self.most_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and (key := (memory := value.untyped_storage())._cdata) not in {
                *self.held,
                *given,
            }:
                self.held[key] = memory.nbytes()
                weakref.finalize(memory, self.held.pop, key, None)
        self.most_bytes = max(self.most_bytes, sum(self.held.values()))
        return result


@pytest.mark.parametrize(
    ("kind", "frozen", "products"), [("dense", False, 4), ("topk", False, 3), ("dense", True, 3), ("topk", True, 2)]
)
def test_products_of_a_step(kind: str, frozen: bool, products: int) -> None:
    setting = Setting(bias=False)
    setting.student.head.projection.requires_grad_(not frozen)
    signal = setting.signal(kind)
    with _Operations() as seen:
        sums = chunked_loss(Objective(MIXES["jsd"]), setting.student, signal, setting.labels_R)
        setting.gradients(sums)
    assert sum(name in ("mm", "addmm", "addmm_", "matmul") for name in seen.names) == products


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
def test_without_gradient_the_value_is_the_same_and_nothing_is_differentiated(plain: bool) -> None:
    setting, objective = Setting(bias=False, plain=plain), Objective(MIXES["jsd"], chunk_tokens=3)
    expected = setting.loss(chunked_loss, objective).loss
    with torch.no_grad(), _Operations() as seen:
        sums = setting.loss(chunked_loss, objective)
    assert not sums.loss.requires_grad
    products = sum(name in ("mm", "addmm", "addmm_") for name in seen.names)
    assert products == 2 * 4, "a judgement must not pay for gradients nobody reads"
    torch.testing.assert_close(sums.loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
def test_a_frozen_head_passes_the_gradient_of_the_hidden_states_only(plain: bool) -> None:
    setting, objective = Setting(plain=plain), Objective(MIXES["forward_kl"], chunk_tokens=3)
    expected, *_ = setting.gradients(setting.loss(eager_loss, objective))
    setting.student.head.projection.requires_grad_(False)
    (gradient,) = setting.gradients(setting.loss(chunked_loss, objective))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)  # order of sums


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
@pytest.mark.parametrize("learns", ["weight", "bias"])
def test_a_head_that_learns_in_part_over_hidden_states_that_do_not(learns: str, plain: bool) -> None:
    setting, objective = Setting(plain=plain), Objective(MIXES["forward_kl"], chunk_tokens=3)
    setting.student.hidden_RD.requires_grad_(False)
    setting.student.head.projection.requires_grad_(False)
    parameter = getattr(setting.student.head.projection, learns).requires_grad_(True)
    (expected,), (found,) = (
        torch.autograd.grad(setting.loss(one, objective).loss, parameter) for one in (eager_loss, chunked_loss)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # order of sums


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
@pytest.mark.parametrize("kind", ["dense", "topk"])
def test_no_rows_no_loss(kind: str, plain: bool) -> None:
    setting = Setting(rows=0, plain=plain)
    objective = Objective({"forward_kl": 1.0}, chunk_tokens=3)
    sums = setting.loss(chunked_loss, objective, kind)
    sums.loss.backward()
    assert (float(sums.loss.detach()), sums.overlap_R.numel()) == (0.0, 0)
    for value in (setting.student.hidden_RD, *setting.student.head.parameters()):
        assert value.grad is not None, "every rank has a gradient to reduce"
        assert value.grad.shape == value.shape
        assert not value.grad.any()


SERVED_AT = [
    (SamplingSettings(0.6), "sample"),
    (SamplingSettings(0.8, top_p=0.7), "sample"),
    (SamplingSettings(0.8, top_k=4, min_p=0.05), "block"),
    (SamplingSettings(1.0, top_k=3), "greedy-draft"),
    (SamplingSettings(0.8), "greedy"),
    (SamplingSettings(0.0), "sample"),
]


@pytest.mark.parametrize(("serving", "rule"), SERVED_AT, ids=str)
def test_acceptance_is_the_servers(serving: SamplingSettings, rule: str) -> None:
    """Row by row, by hand: both rows scaled, cut and normalised in numpy; then the rule."""
    setting = Setting()
    objective = Objective(MIXES["tv"], temperature=1.3, serving=serving, rule=Rule.named(rule))
    logits = (setting.dense.head(setting.dense.hidden_RD), setting.student.head(setting.student.hidden_RD))
    expected = 0.0
    for target_V, student_V in zip(*(one.detach().numpy() for one in logits), strict=True):
        target, student = (_served(row_V, serving) for row_V in (target_V, student_V))
        if rule in ("greedy", "greedy-draft"):
            student = (student == student.max()) * 1.0
        if rule == "greedy":
            target = (target == target.max()) * 1.0
        expected += sum(map(min, target, student))
    found = acceptance_sum(objective, setting.student, setting.dense)
    assert float(found) == pytest.approx(expected, rel=1e-9)
    whole = topk_of(logits[0].detach(), VOCAB, objective.temperature)
    stored = acceptance_sum(objective, setting.student, whole)
    assert float(stored) == pytest.approx(expected, rel=1e-9)


def _served(logits_V: np.ndarray, serving: SamplingSettings) -> np.ndarray:
    if serving.greedy:
        return (logits_V == logits_V.max()) * 1.0
    order = np.argsort(-logits_V)
    probs = np.exp(logits_V / serving.temperature)
    kept = order[: serving.top_k or None]
    below = np.cumsum(probs[kept]) / probs[kept].sum() - probs[kept] / probs[kept].sum()
    kept = kept[below < serving.top_p]
    kept = kept[probs[kept] >= serving.min_p * probs[kept].max()]
    served = np.zeros_like(probs)
    served[kept] = probs[kept] / probs[kept].sum()
    return served


def test_acceptance_is_not_guessed() -> None:
    setting, objective = Setting(), Objective(MIXES["forward_kl"], serving=SamplingSettings(0.7))
    nothing = setting.dense.rows(slice(0, 0))
    assert acceptance_sum(objective, setting.student.rows(slice(0)), nothing) is None
    assert not objective.overlap_is_acceptance
    assert replace(objective, temperature=0.7).overlap_is_acceptance


def test_a_target_of_another_vocabulary_is_refused() -> None:
    setting = Setting()
    setting.dense = DenseSignal(setting.dense.hidden_RD, nn.Linear(TARGET_WIDTH, VOCAB + 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="20"):
        setting.loss(chunked_loss, Objective(MIXES["tv"]))


def test_the_compiled_loss_is_the_loss() -> None:
    setting, objective = Setting(rows=8), Objective(MIXES["mix"], chunk_tokens=4)  # a shorter chunk is compiled anew
    plain, compiled = (setting.loss(chunked_loss, one) for one in (objective, replace(objective, compile=True)))
    torch.testing.assert_close(compiled.loss, plain.loss, rtol=1e-10, atol=0)  # fused sums
    for mine, theirs in zip(setting.gradients(compiled), setting.gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # fused sums


def test_without_a_compiler_the_loss_runs_eagerly_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        def call(*arguments: Any) -> Any:
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    rows._compiled.cache_clear()
    setting, objective = Setting(), Objective(MIXES["mix"], chunk_tokens=4)
    with pytest.warns(UserWarning, match="no compiler here") as seen:
        compiled = setting.loss(chunked_loss, replace(objective, compile=True))
    rows._compiled.cache_clear()
    assert len(seen) == 1
    torch.testing.assert_close(compiled.loss, setting.loss(chunked_loss, objective).loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("plain", [True, False], ids=["by hand", "by graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "topk"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 2.0}], ids=["linear", "capped"])
def test_bf16_products_point_the_same_way(kind: str, dtype: torch.dtype, options: dict[str, Any], plain: bool) -> None:
    """Autocast of float32 weights, and weights that are bf16 themselves, against float64."""
    exact = Setting(plain=plain, **options)
    expected = exact.loss(chunked_loss, Objective(MIXES["forward_kl"], chunk_tokens=4), kind)
    setting = Setting(dtype=dtype, plain=plain, **options)
    signal = exact.signal(kind)
    if isinstance(signal, DenseSignal):
        signal = setting.dense
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        objective = Objective(MIXES["forward_kl"], chunk_tokens=4)
        sums = chunked_loss(objective, setting.student, signal, setting.labels_R)
    assert sums.loss.dtype == torch.float32
    torch.testing.assert_close(sums.loss.double(), expected.loss, rtol=3e-2, atol=0)  # 8 bits of mantissa
    inputs = [setting.student.hidden_RD, *setting.student.head.parameters()]
    for value, mine, theirs in zip(inputs, setting.gradients(sums), exact.gradients(expected), strict=True):
        assert mine.dtype == value.dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.05  # 8 bits of mantissa


def eager_of_model(module: DraftModule, batch: Batch, teacher: Teacher) -> Tensor:
    """The loss from the models' own full logits."""
    logits_BTV = module.student(input_ids=batch.input_ids_BT).logits
    target_BTV = teacher.split.model(input_ids=batch.input_ids_BT).logits
    rows_RV, target_RV = (logits.reshape(-1, logits.shape[-1])[batch.rows_R] for logits in (logits_BTV, target_BTV))
    return dense_by_definition(module.objective, target_RV, rows_RV, batch.labels_R).loss_N.sum()


def both_gradients(module: DraftModule) -> Iterator[tuple[str, Tensor, Tensor]]:
    teacher, batch = Teacher(tiny_model(seed=1)), collate(examples_of([12, 7, 9], 50), 0)
    loss, *_ = module(batch, teacher.signal(batch))
    loss.backward()
    chunked = {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    module.zero_grad()
    expected = eager_of_model(module, batch, teacher)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # float32 order of sums
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            assert chunked[name] is not None, name
            assert weight.grad is not None, name
            yield name, chunked[name], weight.grad


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mix", ["lk_hybrid", "mix"])
def test_gradient_of_a_whole_model(mix: str, tied: bool) -> None:
    student = tiny_model(seed=0, tie_word_embeddings=tied)
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == tied
    names = []
    for name, mine, theirs in both_gradients(DraftModule(student, Objective(MIXES[mix], chunk_tokens=4))):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )  # float32 sums
        names.append(name)
    assert len(names) == len(dict(student.named_parameters()))


@pytest.mark.parametrize("modules", ["all-linear", ("q_proj", "lm_head")])
def test_gradient_of_adapters_with_everything_else_frozen(modules: str | tuple[str, ...]) -> None:
    torch.manual_seed(0)
    student = add_lora(tiny_model(seed=0), rank=4, alpha=8.0, target_modules=modules)
    # Adapters start with B = 0, where half of the gradients vanish: move away from there.
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    names = []
    for name, mine, theirs in both_gradients(DraftModule(student, Objective(MIXES["lk_hybrid"], chunk_tokens=4))):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)  # float32 sums in another order
        names.append(name)
    assert names
    assert all("lora" in name for name in names)


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_changes_no_gradient(lora: bool) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        student = tiny_model(seed=0)
        if checkpointing:
            student.gradient_checkpointing_enable()
        wrapped = add_lora(student, 4, 8.0, "all-linear") if lora else student
        module = DraftModule(wrapped, Objective(MIXES["forward_kl"], chunk_tokens=4)).train()
        teacher, batch = Teacher(tiny_model(seed=1)), collate(examples_of([12, 7], 50), 0)
        loss, *_ = module(batch, teacher.signal(batch))
        loss.backward()
        return {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    for name, expected in plain.items():
        found = checkpointed[name]
        assert expected is not None
        assert found is not None, f"{name} does not learn under gradient checkpointing"
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the same operations, run twice
