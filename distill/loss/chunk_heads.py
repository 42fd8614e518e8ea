"""Heads that compute a chunk's logits and backpropagate the gradient of these logits, one chunk at a time.

Legend: R rows of a micro-batch, C rows of a chunk, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.signals.signal import DenseSignal
from speculative.engine.library_state import is_hooked

UNKNOWN_VOCABULARY = 1 << 17
# Bytes of a half-precision product before it is added to a float32 sum.
PRODUCT_SLICE = 32 << 20


def slices(total: int, size: int) -> Iterator[slice]:
    """Slices of `size` rows that cover 0 .. total."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


class OutputHead:
    """Projection, scale and soft cap: hidden states (..., D) -> logits (..., V). Owns no parameters."""

    def __init__(self, projection: nn.Module, scale: float = 1.0, softcap: float | None = None) -> None:
        """logits = softcap tanh(scale projection(hidden) / softcap), without the cap if it is None."""
        self.projection, self.scale, self.softcap = projection, scale, softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V) logits."""
        logits = self.projection(hidden).to(hidden.device)  # a target may be spread over devices
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters."""
        return [parameter for parameter in self.projection.parameters() if parameter.requires_grad]

    @property
    def vocabulary(self) -> int:
        """Vocabulary size. A large one is assumed for the chunk size if the projection has none."""
        return getattr(self.projection, "out_features", UNKNOWN_VOCABULARY)


class Student(NamedTuple):
    """Hidden states (R, D) of the trained model, and its head."""

    hidden_RD: Tensor
    head: OutputHead

    def rows(self, chosen: slice | Tensor) -> "Student":
        """A subset of the rows."""
        return Student(self.hidden_RD[chosen], self.head)


class Head:
    """Logits of some rows without gradient, from any function of hidden states."""

    # Whether the gradient may overwrite the logits; not if a graph still holds them.
    in_place = False
    vocabulary = UNKNOWN_VOCABULARY

    def __init__(self, logits_of: Callable[[Tensor], Tensor], hidden_RD: Tensor, autocast: bool = True) -> None:
        self.logits_of, self.hidden_RD, self.autocast = logits_of, hidden_RD.detach(), autocast
        self.dtype = hidden_RD.dtype

    def logits(self, chosen: slice) -> Tensor:
        """(C, V) logits of some rows."""
        # Autocast caches casts of weights; one cached here without gradient would be reused by the pass that needs a gradient.
        device = self.hidden_RD.device.type
        dtype, enabled = torch.get_autocast_dtype(device), self.autocast and torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            return self.logits_of(self.hidden_RD[chosen])

    def before_cap(self, gradient_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """The gradient with respect to the logits before the soft cap, if `take` expects that."""
        return gradient_CV

    def take(self, chosen: slice, gradient_CV: Tensor) -> None:
        """Backpropagate the gradient of a chunk's logits to hidden states and weights."""
        raise NotImplementedError


class GraphHead(Head):
    """Any trainable head: an autograd graph of one chunk's logits at a time, which receives the gradient of these logits."""

    def __init__(self, head: OutputHead, hidden_RD: Tensor, wants_gradient: bool) -> None:
        super().__init__(head, hidden_RD)
        self.vocabulary, self.wants_gradient, self.parameters = head.vocabulary, wants_gradient, head.parameters()
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
        gradients = list(torch.autograd.grad(self.graph_CV, inputs, gradient_CV, allow_unused=True))
        del self.graph_CV
        if self.hidden_gradient_RD is not None and (hidden_CD := gradients.pop(0)) is not None:
            self.hidden_gradient_RD[chosen] = hidden_CD
        for index, gradient in enumerate(gradients):
            earlier = self.collected[index]
            self.collected[index] = gradient if earlier is None or gradient is None else earlier.add_(gradient)

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the hidden states and of the parameters, in this order; None for frozen ones."""
        # Without rows there is no chunk, but every rank needs a gradient to reduce.
        empty = not len(self.hidden_RD)
        pairs = zip(self.collected, parameters, strict=True)
        return [self.hidden_gradient_RD, *(torch.zeros_like(one) if empty else found for found, one in pairs)]


class LinearHead(Head):
    """A plain linear head without autograd: one product forward, two backward, one buffer for logits and their gradient.

    Under autocast the products use its dtype, as in torch; the weight's gradient is summed in float32.
    """

    in_place = True

    def __init__(self, head: OutputHead, hidden_RD: Tensor, wants_gradient: bool, autocast: bool = True) -> None:
        layer, device = head.projection, hidden_RD.device.type
        assert isinstance(layer, nn.Linear)
        self.scale, self.softcap, self.wants_gradient = head.scale, head.softcap, wants_gradient
        self.dtype, self.vocabulary = layer.weight.dtype, layer.weight.shape[0]
        # Autocast does not change float64.
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
            # The first chunk overwrites it, so it is cleared only if there is no chunk.
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


def head_of(student: Student, wants_gradient: bool) -> GraphHead | LinearHead:
    """The student's head: `LinearHead` if possible, otherwise `GraphHead`."""
    return (LinearHead if _is_linear(student.head) else GraphHead)(student.head, student.hidden_RD, wants_gradient)


def frozen_head_of(signal: DenseSignal) -> Head:
    """The target's head. Modules and `OutputHead`s run outside the student's autocast; plain linear ones reuse one buffer."""
    head = OutputHead(signal.head) if isinstance(signal.head, nn.Module) else signal.head
    if isinstance(head, OutputHead) and _is_linear(head):
        return LinearHead(head, signal.hidden_RD, wants_gradient=False, autocast=False)
    return Head(head, signal.hidden_RD, autocast=not isinstance(head, OutputHead))


def _is_linear(head: OutputHead) -> bool:
    """Whether the head is a plain linear layer, without adapter, quantisation, sharding or hooks."""
    layer = head.projection
    return (
        type(head) is OutputHead
        and type(layer) is nn.Linear
        and type(layer.weight) in (Tensor, nn.Parameter)
        and not is_hooked(layer)
    )


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor, scale: float, *, fresh: bool) -> None:
    """total += scale left @ right in place (total = ... when `fresh`), summed in the total's dtype."""
    if total_VD.dtype == left_VC.dtype:
        total_VD.addmm_(left_VC, right_CD, beta=0.0 if fresh else 1.0, alpha=scale)
        return
    # Add the half-precision product to the float32 total in slices, to avoid a second matrix of that size.
    for part in slices(len(total_VD), max(1, PRODUCT_SLICE // (right_CD.shape[-1] * left_VC.dtype.itemsize))):
        product = left_VC[part] @ right_CD
        if fresh:
            total_VD[part].copy_(product).mul_(scale)
        else:
            total_VD[part].add_(product, alpha=scale)
