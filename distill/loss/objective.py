"""From hidden states to the loss without ever holding [batch, time, vocabulary] logits.

Legend: R response tokens (rows) of a micro-batch, C tokens of a chunk, D hidden width, V vocabulary.

The head's products run chunk by chunk, and each chunk's gradient is taken at once, in closed form (`distill/loss/gradients.py`). So the
peak is O(C x V), and a step costs four products with a head: target forward, student forward, and two for the student's backward;
three with a stored signal. Inside a chunk the row mathematics goes block by block, each small enough to stay in the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from data.signals.signal import DenseSignal, SampledSignal, Signal, TopKSignal
from distill.loss import definitions as losses
from distill.loss.definitions import Objective
from distill.loss.gradients import Rows, Scratch, part_of, rows_of
from distill.models.heads import OutputHead

# A head that does not say how many tokens it knows is taken to know this many, when its chunk is chosen.
UNKNOWN_VOCABULARY = 1 << 17
# Bytes of a chunk's logits. On a CPU the head's weights are read once a chunk, so a chunk has CPU_ROWS rows at least.
CPU_CHUNK, CPU_ROWS, GPU_CHUNK = 8 << 20, 256, 256 << 20
# Bytes of a block: five or so of them share a core's cache; on a GPU they only bound the scratch memory.
CPU_BLOCK, GPU_BLOCK = 1 << 20, 64 << 20
# Rows of a micro-batch that the server's acceptance is estimated from, and the logits that they may have.
MEASURED_ROWS, MEASURED_LOGITS = 128, 1 << 23
# Bytes of a half-precision product on its way into a float32 sum.
PRODUCT_SLICE = 32 << 20


@dataclass
class Sums:
    """Sums over the response tokens of a micro-batch; `loss` carries the gradient.

    The overlap at the loss's temperature lies within [overlap, overlap + overlap_slack]; the slack is 0 but for a top-k
    signal. With a sampled signal the overlap is an unbiased estimate. Neither knows of tokens' weights.
    """

    loss: Tensor
    overlap: Tensor
    overlap_slack: Tensor
    tokens: int


def chunked_loss(
    objective: Objective,
    student_hidden_RD: Tensor,
    student_head: OutputHead,
    signal: Signal | None,
    labels_R: Tensor,
    weights_R: Tensor | None = None,
    *,
    reference: DenseSignal | None = None,
    answers_R: Tensor | None = None,
) -> Sums:
    """Summed loss of R tokens, chunk by chunk; its backward hands out the gradients taken on the way, once.

    `weights_R` multiplies loss and gradient of each token; where `answers_R` is given, overlap and slack are of its tokens alone.
    `reference` is another draft's hidden states and head, for weighting `selected`: two forward KLs are read without gradient,
    then only the kept rows train; the overlap is that of all rows.

    Raises:
        ValueError: an objective that the signal cannot serve, a weighting without a signal or reference.
    """
    refuse_impossible(objective, signal, reference)
    tokens, measured = labels_R.numel(), None
    if objective.weighting == "selected":
        kept_I, measured = _selected(objective, student_hidden_RD, student_head, signal, labels_R, reference)
        student_hidden_RD, labels_R = student_hidden_RD[kept_I], labels_R[kept_I]
        signal, weights_R = part_of(signal, kept_I), part_of(weights_R, kept_I)
    parameters = student_head.parameters()
    # Inside the function's forward gradients are off, so whether the caller wants them is asked here.
    wants_gradient = torch.is_grad_enabled() and (student_hidden_RD.requires_grad or bool(parameters))
    sweep = _Sweep(objective, signal, labels_R, weights_R, wants_gradient)
    seen: list[Rows] = []
    loss = _ChunkedLoss.apply(sweep, student_head, seen, student_hidden_RD, *parameters)
    rows = measured if measured is not None else seen[0]
    chosen = slice(None) if answers_R is None else answers_R
    overlap_R, slack_R = rows.overlap_C[chosen], rows.slack_C[chosen]
    return Sums(loss, overlap_R.double().sum(), slack_R.double().sum(), tokens)


def chunk_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a chunk when nobody says: a few megabytes of logits on a CPU, 256 MB on an accelerator."""
    row = vocabulary * dtype.itemsize
    return max(CPU_ROWS, CPU_CHUNK // row) if device.type == "cpu" else max(1, GPU_CHUNK // row)


@torch.no_grad()
def acceptance_sum(
    objective: Objective, student_hidden_RD: Tensor, student_head: OutputHead, signal: Signal
) -> Tensor | None:
    """How many of the R rows' tokens a server would accept if the student drafted them, by at most 128 rows spread over all.

    A top-k signal counts as the whole distribution: what truncation excludes lies in its tail. None where nothing can be said: no
    row, or samples, which do not tell what truncation leaves.
    """
    tokens = len(student_hidden_RD)
    if not tokens or isinstance(signal, SampledSignal):
        return None
    vocabulary = getattr(student_head.projection, "out_features", UNKNOWN_VOCABULARY)
    spread = slice(None, None, -(-tokens // max(1, min(MEASURED_ROWS, MEASURED_LOGITS // vocabulary))))
    target_NV, student_NV = _both_logits(objective, student_hidden_RD[spread], student_head, part_of(signal, spread))
    assert target_NV is not None
    # A row that stores nothing is nan.
    accepted_N = losses.acceptance(target_NV, student_NV, objective.serving, objective.rule).nan_to_num(0.0)
    return accepted_N.double().mean() * tokens


@torch.no_grad()
def kept_probs(
    objective: Objective, student_hidden_RD: Tensor, student_head: OutputHead, signal: Signal | None, labels_R: Tensor
) -> Tensor:
    """Probability that the server keeps the target's own token, were it drafted at its row: `definitions.kept`. (R,)"""
    vocabulary = getattr(student_head.projection, "out_features", UNKNOWN_VOCABULARY)
    found = [torch.zeros(0, device=labels_R.device)]
    for chosen in _slices(len(labels_R), max(1, MEASURED_LOGITS // vocabulary)):
        both = _both_logits(objective, student_hidden_RD[chosen], student_head, part_of(signal, chosen))
        found.append(losses.kept(*both, labels_R[chosen], objective.serving, objective.rule).float())
    return torch.cat(found)


def _both_logits(
    objective: Objective, student_ND: Tensor, student_head: OutputHead, signal: Signal | None
) -> tuple[Tensor | None, Tensor]:
    """(target, student) logits of a few rows, without gradient; no target's without a signal, or of samples."""
    student_NV = _head_of(student_head, student_ND, False).logits(slice(None))
    if isinstance(signal, DenseSignal):
        return _frozen_head_of(signal).logits(slice(None)), student_NV
    if not isinstance(signal, TopKSignal):
        return None, student_NV
    target_NV = torch.full_like(student_NV, -torch.inf, dtype=signal.log_probs_RK.dtype)
    target_NV.scatter_reduce_(-1, signal.ids_RK, signal.log_probs_RK * objective.temperature, "amax")
    return target_NV, student_NV


def refuse_impossible(objective: Objective, signal: Signal | None, reference: DenseSignal | None) -> None:
    """Raises ValueError for an objective that the signal cannot serve, a weighting without a signal or reference."""
    names = set(objective.weights)
    if names - set(losses.NAMES):
        raise ValueError(f"no objective is called {', '.join(sorted(names - set(losses.NAMES)))}")
    if signal is None and names != {"ce"}:
        raise ValueError(f"objective {', '.join(sorted(names - {'ce'}))} compares with a target, and there is none")
    if isinstance(signal, SampledSignal) and names - {"forward_kl", "ce"}:
        raise ValueError(
            f"objective {', '.join(sorted(names - {'forward_kl', 'ce'}))} is not linear in the target: no samples serve it"
        )
    if objective.weighting != "none" and signal is None:
        raise ValueError(f"weighting {objective.weighting} looks at the target, and there is none")
    if objective.weighting == "selected" and reference is None:
        raise ValueError("weighting selected compares with a reference, and there is none")


def _selected(
    objective: Objective,
    student_hidden_RD: Tensor,
    student_head: OutputHead,
    signal: Signal | None,
    labels_R: Tensor,
    reference: DenseSignal | None,
) -> tuple[Tensor, Rows]:
    """(kept rows, the student's forward KL and overlap at every row); no gradient."""
    assert reference is not None
    compare = replace(objective, weights={"forward_kl": 1.0}, weighting="none")
    with torch.no_grad():
        sweep = _Sweep(compare, signal, labels_R, None, False)
        student = _head_of(student_head, student_hidden_RD, False)
        ours = sweep.run(student)
        theirs = sweep.run(_frozen_head_of(reference))
        return losses.selected_rows(ours.loss_C, theirs.loss_C, objective.keep), ours


class _ChunkedLoss(torch.autograd.Function):
    """Gradient in the forward; the backward only scales it. Correct because the loss enters the step linearly.

    The head's parameters are inputs, so that their gradients travel the graph like any other: hooks of DDP and FSDP see them, a
    tied embedding adds its own, a second call before the optimizer's step accumulates.
    """

    @staticmethod
    def forward(
        ctx: Any, sweep: "_Sweep", head: OutputHead, seen: list[Rows], hidden_RD: Tensor, *parameters: Tensor
    ) -> Tensor:
        student = _head_of(head, hidden_RD, sweep.wants_gradient)
        rows = sweep.run(student)
        seen.append(rows)
        ctx.gradients = student.gradients(parameters) if sweep.wants_gradient else None
        return rows.loss_C.double().sum().to(torch.promote_types(rows.loss_C.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss hands out its gradients once: call it again for a second backward")
        # In place, and no reference stays here: autograd takes the head's gradient over instead of copying it.
        scale = grad_outputs[0]
        return (None, None, None, *(None if one is None else one.mul_(scale) for one in gradients))


class _Head:
    """Logits of some rows, without gradient; any function of hidden states will do."""

    # Whether the gradient may take the place of the logits: not where a graph has kept them.
    in_place = False
    vocabulary = UNKNOWN_VOCABULARY

    def __init__(self, logits_of: Callable[[Tensor], Tensor], hidden_RD: Tensor, autocast: bool = True) -> None:
        self.logits_of, self.hidden_RD, self.autocast = logits_of, hidden_RD.detach(), autocast
        self.dtype = hidden_RD.dtype

    def logits(self, chosen: slice) -> Tensor:
        """(C, V) logits of some rows."""
        # Autocast keeps casts of weights, and one made without gradient would be found by the pass that needs one.
        device = self.hidden_RD.device.type
        dtype, enabled = torch.get_autocast_dtype(device), self.autocast and torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            return self.logits_of(self.hidden_RD[chosen])

    def before_cap(self, gradient_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """The gradient with respect to the logits before the soft cap, where the head takes that one."""
        return gradient_CV

    def take(self, chosen: slice, gradient_CV: Tensor) -> None:
        """From the gradient of a chunk's logits to those of hidden states and weights."""
        raise NotImplementedError


class _GraphHead(_Head):
    """Any trainable head: autograd's graph of one chunk's logits at a time, entered with the closed-form gradient."""

    def __init__(self, head: OutputHead, hidden_RD: Tensor, wants_gradient: bool) -> None:
        super().__init__(head, hidden_RD)
        self.vocabulary = getattr(head.projection, "out_features", UNKNOWN_VOCABULARY)
        self.wants_gradient, self.parameters = wants_gradient, head.parameters()
        self.hidden_gradient_RD = torch.zeros_like(self.hidden_RD) if hidden_RD.requires_grad else None
        self.collected: list[Tensor | None] = [None] * len(self.parameters)

    def logits(self, chosen: slice) -> Tensor:
        if not self.wants_gradient:
            return super().logits(chosen)
        with torch.enable_grad():
            self.hidden_CD = self.hidden_RD[chosen].requires_grad_(self.hidden_gradient_RD is not None)
            self.graph_CV = self.logits_of(self.hidden_CD)
        return self.graph_CV.detach()

    def take(self, chosen: slice, gradient_CV: Tensor) -> None:
        inputs = ([] if self.hidden_gradient_RD is None else [self.hidden_CD]) + self.parameters
        found = list(torch.autograd.grad(self.graph_CV, inputs, gradient_CV, allow_unused=True))
        del self.graph_CV
        if self.hidden_gradient_RD is not None and (hidden_CD := found.pop(0)) is not None:
            self.hidden_gradient_RD[chosen] = hidden_CD
        for index, gradient in enumerate(found):
            earlier = self.collected[index]
            self.collected[index] = gradient if earlier is None or gradient is None else earlier.add_(gradient)

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the hidden states and of the parameters, in this order; None for what does not learn."""
        # Without rows there was no chunk; every rank must still have a gradient to reduce.
        empty = not len(self.hidden_RD)
        pairs = zip(self.collected, parameters, strict=True)
        return [self.hidden_gradient_RD, *(torch.zeros_like(one) if empty else found for found, one in pairs)]


class _LinearHead(_Head):
    """A plain linear head by hand: one product forward, two backward, one buffer for logits and their gradient.

    Under autocast the products run in its dtype, as torch's own would; the weight's gradient is summed in float32.
    """

    in_place = True

    def __init__(self, head: OutputHead, hidden_RD: Tensor, wants_gradient: bool, autocast: bool = True) -> None:
        layer, device = head.projection, hidden_RD.device.type
        assert isinstance(layer, nn.Linear)
        self.scale, self.softcap, self.wants_gradient = head.scale, head.softcap, wants_gradient
        self.dtype, self.vocabulary = layer.weight.dtype, layer.weight.shape[0]
        # Autocast leaves float64 alone.
        if autocast and torch.is_autocast_enabled(device) and torch.float64 not in (self.dtype, hidden_RD.dtype):
            self.dtype = torch.get_autocast_dtype(device)
        self.hidden_RD, self.weight_VD = hidden_RD.detach().to(self.dtype), layer.weight.detach().to(self.dtype)
        self.bias_V = None if layer.bias is None else layer.bias.detach().to(self.dtype)
        self.buffer_CV = self.weight_VD.new_empty(0, self.vocabulary)
        precise = torch.promote_types(layer.weight.dtype, torch.float32)
        self.hidden_gradient_RD = self.weight_gradient_VD = self.bias_gradient_V = None
        if wants_gradient and hidden_RD.requires_grad:
            self.hidden_gradient_RD = torch.empty_like(hidden_RD, memory_format=torch.contiguous_format)
        if wants_gradient and layer.weight.requires_grad:
            # Written by the first chunk, so not cleared where there is one.
            make = torch.empty_like if len(hidden_RD) else torch.zeros_like
            self.weight_gradient_VD = make(layer.weight, dtype=precise, memory_format=torch.contiguous_format)
        if wants_gradient and layer.bias is not None and layer.bias.requires_grad:
            self.bias_gradient_V = torch.zeros_like(layer.bias, dtype=precise)

    def logits(self, chosen: slice) -> Tensor:
        hidden_CD = self.hidden_RD[chosen]
        if len(self.buffer_CV) < len(hidden_CD):
            self.buffer_CV = hidden_CD.new_empty(len(hidden_CD), self.vocabulary)
        logits_CV = self.buffer_CV[: len(hidden_CD)]
        if self.bias_V is not None:
            torch.addmm(self.bias_V, hidden_CD, self.weight_VD.t(), beta=self.scale, alpha=self.scale, out=logits_CV)
        else:
            torch.mm(hidden_CD, self.weight_VD.t(), out=logits_CV)
            if self.scale != 1.0:
                logits_CV.mul_(self.scale)
        return logits_CV if self.softcap is None else logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)

    def before_cap(self, gradient_CV: Tensor, logits_CV: Tensor) -> Tensor:
        if self.softcap is None:
            return gradient_CV
        return gradient_CV.mul_(1.0 - (logits_CV / self.softcap).square())

    def take(self, chosen: slice, gradient_CV: Tensor) -> None:
        hidden_CD = self.hidden_RD[chosen]
        if self.hidden_gradient_RD is not None:
            into_CD = self.hidden_gradient_RD[chosen]
            if into_CD.dtype == self.dtype:
                into_CD.addmm_(gradient_CV, self.weight_VD, beta=0.0, alpha=self.scale)
            else:
                into_CD.copy_(gradient_CV @ self.weight_VD).mul_(self.scale)
        if self.weight_gradient_VD is not None:
            _add_product(self.weight_gradient_VD, gradient_CV.t(), hidden_CD, self.scale, fresh=chosen.start == 0)
        if self.bias_gradient_V is not None:
            self.bias_gradient_V.add_(gradient_CV.sum(0, dtype=self.bias_gradient_V.dtype), alpha=self.scale)

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        own = [one for one in (self.weight_gradient_VD, self.bias_gradient_V) if one is not None]
        return [self.hidden_gradient_RD, *(found.to(one.dtype) for found, one in zip(own, parameters, strict=True))]


def _head_of(head: OutputHead, hidden_RD: Tensor, wants_gradient: bool) -> "_GraphHead | _LinearHead":
    """The student's head, by hand where that is possible."""
    return (_LinearHead if _is_linear(head) else _GraphHead)(head, hidden_RD, wants_gradient)


def _frozen_head_of(signal: DenseSignal) -> _Head:
    """The target's head. Modules and `OutputHead`s run outside the student's autocast, plain ones into one buffer."""
    head = OutputHead(signal.head) if isinstance(signal.head, nn.Module) else signal.head
    if isinstance(head, OutputHead) and _is_linear(head):
        return _LinearHead(head, signal.hidden_RD, wants_gradient=False, autocast=False)
    return _Head(head, signal.hidden_RD, autocast=not isinstance(head, OutputHead))


def _is_linear(head: OutputHead) -> bool:
    """Whether the head is nothing but a linear layer: no adapter, quantisation, shard or hook."""
    layer = head.projection
    return (
        type(head) is OutputHead
        and type(layer) is nn.Linear
        and type(layer.weight) in (Tensor, nn.Parameter)
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor, scale: float, *, fresh: bool) -> None:
    """total += scale left @ right in place (total = ... when `fresh`), summed in the total's dtype."""
    if total_VD.dtype == left_VC.dtype:
        total_VD.addmm_(left_VC, right_CD, beta=0.0 if fresh else 1.0, alpha=scale)
        return
    # A half-precision product added into a float32 total, a slice at a time: no second matrix of that size.
    for part in _slices(len(total_VD), max(1, PRODUCT_SLICE // (right_CD.shape[-1] * left_VC.dtype.itemsize))):
        product = left_VC[part] @ right_CD
        if fresh:
            total_VD[part].copy_(product).mul_(scale)
        else:
            total_VD[part].add_(product, alpha=scale)


@dataclass
class _Sweep:
    """One pass over all rows: logits, row mathematics and gradients, chunk by chunk."""

    objective: Objective
    signal: Signal | None
    labels_R: Tensor
    weights_R: Tensor | None
    wants_gradient: bool
    scratch: Scratch = field(default_factory=Scratch)

    def run(self, head: "_Head") -> Rows:
        """Loss, overlap and slack of every row; the head collects the gradients."""
        objective, device = self.objective, self.labels_R.device
        chunk = objective.chunk_tokens or chunk_rows(head.vocabulary, head.dtype, device)
        block = min(chunk, _block_rows(head.vocabulary, device))
        target = _frozen_head_of(self.signal) if isinstance(self.signal, DenseSignal) else None
        nothing = torch.zeros(0, dtype=torch.promote_types(head.dtype, torch.float32), device=device)
        found = [Rows(nothing, nothing, nothing, None)]
        for chosen in _slices(self.labels_R.numel(), chunk):
            logits_CV = head.logits(chosen)
            against = part_of(self.signal, chosen) if target is None else target.logits(chosen)
            if target is not None and against.shape != logits_CV.shape:
                raise ValueError(f"target logits {tuple(against.shape)}, student logits {tuple(logits_CV.shape)}")
            labels_C, weights_C = self.labels_R[chosen], part_of(self.weights_R, chosen)
            gradient_CV = None
            if self.wants_gradient:
                gradient_CV = logits_CV if head.in_place else torch.empty_like(logits_CV)
            for part in _slices(len(logits_CV), block):
                rows = rows_of(
                    objective, part_of(against, part), logits_CV[part], labels_C[part], part_of(weights_C, part),
                    self.wants_gradient, self.scratch, block if objective.compile else None,
                )  # fmt: skip
                if gradient_CV is not None and rows.gradient_CV is not None:
                    gradient_CV[part] = head.before_cap(rows.gradient_CV, logits_CV[part])
                # Without its gradient: that would keep a block of logits alive.
                found.append(rows._replace(gradient_CV=None))
            if gradient_CV is not None:
                head.take(chosen, gradient_CV)
            del logits_CV, gradient_CV, against
        loss_R, overlap_R, slack_R = (torch.cat(parts) for parts in list(zip(*found, strict=True))[:3])
        return Rows(loss_R, overlap_R, slack_R, None)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _block_rows(vocabulary: int, device: torch.device) -> int:
    if device.type == "cpu":
        # Every thread gets its share: rows are what a softmax is divided by.
        return max(1, CPU_BLOCK // (vocabulary * 4)) * torch.get_num_threads()
    return max(1, GPU_BLOCK // (vocabulary * 4))
