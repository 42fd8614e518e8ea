"""The chunked loss against its eager twin: value and gradient.

Legend: R rows (response tokens), C rows of a chunk, D hidden width, V vocabulary.
"""

from collections.abc import Iterator

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from data.collate import Batch, Example, collate
from distill import losses
from distill.objective import Objective, Sums, chunked_loss, eager_loss
from distill.student import DraftModule, add_lora
from distill.teacher import Teacher

ROWS, WIDTH, VOCAB = 11, 6, 19
MIXES = {name: {name: 1.0} for name in losses.NAMES} | {"mix": {"forward_kl": 0.5, "tv": 2.0, "ce": 0.1}}


class RecordingHead:
    """A linear head that notes how many rows it is given."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.rows: list[int] = []
        self.grad_modes: list[bool] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        self.grad_modes.append(torch.is_grad_enabled())
        return self.layer(hidden)


class Setting:
    """Hidden states and heads of both models, in float64."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.student_head = RecordingHead(nn.Linear(WIDTH, VOCAB, dtype=torch.float64))
        self.target_head = RecordingHead(nn.Linear(WIDTH, VOCAB, dtype=torch.float64).requires_grad_(False))
        self.student_hidden_RD = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        self.target_hidden_RD = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        self.labels_R = torch.randint(0, VOCAB, (ROWS,))

    def parameters(self) -> list[nn.Parameter]:
        return list(self.student_head.layer.parameters())

    def chunked(self, objective: Objective) -> Sums:
        return chunked_loss(
            objective, self.student_hidden_RD, self.student_head, self.parameters(), self.target_hidden_RD,
            self.target_head, self.labels_R,
        )  # fmt: skip

    def eager(self, objective: Objective) -> Sums:
        return eager_loss(
            objective, self.student_hidden_RD, self.student_head, self.target_hidden_RD, self.target_head, self.labels_R
        )

    def gradients(self, sums: Sums) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sums.loss * 0.37, [self.student_hidden_RD, *self.parameters()])


@pytest.mark.parametrize("chunk_tokens", [1, 3, ROWS, ROWS + 5])
@pytest.mark.parametrize("mix", MIXES)
def test_chunked_is_eager(mix: str, chunk_tokens: int) -> None:
    setting, objective = Setting(), Objective(MIXES[mix], temperature=1.3, beta=0.3, chunk_tokens=chunk_tokens)
    chunked, eager = setting.chunked(objective), setting.eager(objective)
    # The chunked total is handed to autograd as float32; its gradient stays float64.
    torch.testing.assert_close(chunked.loss.double(), eager.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked.overlap, eager.overlap, rtol=1e-12, atol=0)  # order of the sum
    assert chunked.tokens == eager.tokens == ROWS
    for mine, theirs in zip(setting.gradients(chunked), setting.gradients(eager), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)  # 0.37 is scaled as float32 in the chunked path


def test_no_head_ever_sees_more_rows_than_a_chunk() -> None:
    setting = Setting()
    sums = setting.chunked(Objective(MIXES["lk_hybrid"], chunk_tokens=4))
    setting.gradients(sums)
    assert setting.student_head.rows == setting.target_head.rows == [4, 4, 3]


def test_no_tensor_of_rows_times_vocabulary_lives_in_a_chunked_step() -> None:
    setting, objective = Setting(), Objective(MIXES["forward_kl"], chunk_tokens=2)
    with _LargestTensor() as largest:
        setting.gradients(setting.chunked(objective))
    assert largest.elements < ROWS * VOCAB
    with _LargestTensor() as largest:
        setting.gradients(setting.eager(objective))
    assert largest.elements >= ROWS * VOCAB, "the instrument sees what the eager twin makes"


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_without_gradient_the_value_is_the_same_and_nothing_is_differentiated() -> None:
    setting, objective = Setting(), Objective(MIXES["jsd"], chunk_tokens=3)
    expected = setting.chunked(objective).loss
    setting.student_head.grad_modes.clear()
    with torch.no_grad():
        sums = setting.chunked(objective)
    assert not sums.loss.requires_grad
    assert not any(setting.student_head.grad_modes), "a judgement must not pay for gradients nobody reads"
    torch.testing.assert_close(sums.loss, expected, rtol=0, atol=0)


def test_a_frozen_head_passes_the_gradient_of_the_hidden_states_only() -> None:
    setting, objective = Setting(), Objective(MIXES["forward_kl"], chunk_tokens=3)
    expected, *_ = setting.gradients(setting.eager(objective))
    setting.student_head.layer.requires_grad_(False)
    (gradient,) = torch.autograd.grad(setting.chunked(objective).loss * 0.37, setting.student_hidden_RD)
    torch.testing.assert_close(
        gradient, expected, rtol=1e-7, atol=1e-9
    )  # 0.37 is scaled as float32 in the chunked path


def test_no_rows_no_loss() -> None:
    setting, objective = Setting(), Objective(MIXES["forward_kl"], chunk_tokens=3)
    hidden_0D = setting.student_hidden_RD[:0]
    sums = chunked_loss(
        objective, hidden_0D, setting.student_head, setting.parameters(), setting.target_hidden_RD[:0], setting.target_head,
        setting.labels_R[:0],
    )  # fmt: skip
    sums.loss.backward()
    assert (float(sums.loss.detach()), float(sums.overlap), sums.tokens) == (0.0, 0.0, 0)
    assert setting.student_hidden_RD.grad is not None
    assert setting.student_hidden_RD.grad.abs().max() == 0


def test_temperature_softens_the_loss_and_not_the_overlap() -> None:
    setting = Setting()
    hot, cold = (setting.chunked(Objective(MIXES["forward_kl"], temperature=t)) for t in (3.0, 1.0))
    target_NV = (setting.target_head.layer(setting.target_hidden_RD) / 3.0).log_softmax(-1)
    student_NV = (setting.student_head.layer(setting.student_hidden_RD) / 3.0).log_softmax(-1)
    expected = losses.forward_kl(target_NV, student_NV).sum()
    torch.testing.assert_close(hot.loss.double(), expected, rtol=1e-6, atol=0)  # the total is float32
    torch.testing.assert_close(hot.overlap, cold.overlap, rtol=0, atol=0)


def test_overlap_is_taken_at_the_temperature_of_the_server() -> None:
    setting = Setting()
    for loss_temperature in (1.0, 0.6, 2.0):
        objective = Objective(MIXES["tv"], temperature=loss_temperature, serving_temperature=0.6, chunk_tokens=4)
        target_NV = (setting.target_head.layer(setting.target_hidden_RD) / 0.6).softmax(-1)
        student_NV = (setting.student_head.layer(setting.student_hidden_RD) / 0.6).softmax(-1)
        expected = torch.minimum(target_NV, student_NV).sum().detach()
        torch.testing.assert_close(setting.chunked(objective).overlap, expected, rtol=1e-10, atol=0)  # exp of log-probs


def test_without_a_target_the_overlap_is_zero() -> None:
    setting = Setting()
    sums = chunked_loss(
        Objective(MIXES["ce"]),
        setting.student_hidden_RD,
        setting.student_head,
        setting.parameters(),
        None,
        None,
        setting.labels_R,
    )
    expected = nn.functional.cross_entropy(
        setting.student_head.layer(setting.student_hidden_RD), setting.labels_R, reduction="sum"
    )
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-6, atol=0)  # the total is float32
    assert float(sums.overlap) == 0.0


def batch_of(lengths: list[int], vocab: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in lengths:
        ids = torch.randint(1, vocab, (length,), generator=generator).numpy()
        mask = torch.arange(length).numpy() >= length // 3
        examples.append(Example(ids, mask))
    return collate(examples, 0)


def eager_of_model(module: DraftModule, batch: Batch, teacher: Teacher) -> Tensor:
    """The loss from the models' own full logits."""
    logits_BTV = module.student(input_ids=batch.input_ids_BT).logits
    target_BTV = teacher.split.model(input_ids=batch.input_ids_BT).logits
    rows_RV, target_RV = (logits.reshape(-1, logits.shape[-1])[batch.rows_R] for logits in (logits_BTV, target_BTV))
    return module.objective.per_token(target_RV, rows_RV, batch.labels_R)[0].sum()


def both_gradients(module: DraftModule, autocast: bool = False) -> Iterator[tuple[str, Tensor, Tensor]]:
    teacher, batch = Teacher(tiny_model(seed=1)), batch_of([12, 7, 9], 50)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = module(batch.input_ids_BT, batch.rows_R, batch.labels_R, teacher.hidden(batch), teacher.head)
    loss.backward()
    chunked = {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    module.zero_grad()
    expected = eager_of_model(module, batch, teacher)
    expected.backward()
    torch.testing.assert_close(
        loss, expected, rtol=3e-2 if autocast else 1e-5, atol=0
    )  # bf16 has 8 bits; float32 order of sums
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


def test_gradient_under_bf16_autocast_points_the_same_way() -> None:
    module = DraftModule(tiny_model(seed=0, tie_word_embeddings=True), Objective(MIXES["forward_kl"], chunk_tokens=4))
    for name, mine, theirs in both_gradients(module, autocast=True):
        assert mine.dtype == torch.float32
        cosine = nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
        assert cosine > 0.98, name  # 8 bits of mantissa through two layers


@pytest.mark.parametrize("modules", ["all-linear", ("q_proj", "lm_head")])
def test_gradient_of_adapters_with_everything_else_frozen(modules: str | tuple[str, ...]) -> None:
    torch.manual_seed(0)
    student = add_lora(tiny_model(seed=0), rank=4, alpha=8.0, dropout=0.0, target_modules=modules)
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
        wrapped = add_lora(student, 4, 8.0, 0.0, "all-linear") if lora else student
        module = DraftModule(wrapped, Objective(MIXES["forward_kl"], chunk_tokens=4)).train()
        teacher, batch = Teacher(tiny_model(seed=1)), batch_of([12, 7], 50)
        loss, _ = module(batch.input_ids_BT, batch.rows_R, batch.labels_R, teacher.hidden(batch), teacher.head)
        loss.backward()
        return {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    for name, expected in plain.items():
        found = checkpointed[name]
        assert expected is not None
        assert found is not None, f"{name} does not learn under gradient checkpointing"
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the same operations, run twice
