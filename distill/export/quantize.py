"""The draft in fewer bytes: 8-bit weights in the compressed-tensors format, which vLLM and transformers read.

Shapes: N output rows of a weight, K input columns.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.config.sections import Quantization
from distill.models.draft import as_exported, cast_weights
from distill.models.quantized import as_served
from distill.models.target import Target
from distill.models.vocabulary import UNTIED_IN_ENGINES, give_own_head
from speculative.errors import UserError

# (kind of number, whether activations are rounded too: with a scale of each token, found as it passes). Weights have one of each row.
SCHEMES: dict[Quantization, tuple[str, bool]] = {
    "int8": ("int", False),
    "int8-dynamic": ("int", True),
    "fp8": ("float", True),
}
HEAD = "re:.*lm_head$"  # vLLM's head is no linear layer by its class
# A row's largest weights may be cut to give all others a finer grid: these shares of its largest are tried.
CLIPS = tuple(1.0 - 0.02 * step for step in range(11))
CALIBRATED_ON = 64  # responses


def has_quantizer() -> bool:
    """Whether compressed-tensors is installed."""
    return find_spec("compressed_tensors") is not None


def require_quantizer(how: Quantization | None) -> None:
    """Refuses 8 bits without the library, before the long work.

    Raises:
        UserError: compressed-tensors is not installed.
    """
    if how is not None and not has_quantizer():
        raise UserError(
            f"--quantize {how} needs compressed-tensors; `pip install 'understudy[quantize]'`, or set export.quantize to null"
        )


def quantize_draft(model: Any, how: Quantization, texts: Iterable[list[int]]) -> Any:
    """Replaces the weights of the linear layers and of the head in place; gives the library's writer of the config.

    A tied head gets weights of its own: the embedding is looked up, a row a token, and stays as it is; the head is read whole at
    every step. It stays tied where engines know the architecture as tied only.

    Args:
        model: a causal LM in the dtype that it is exported in.
        how: see `SCHEMES`.
        texts: token ids that the clipping is chosen on: the run's own responses; empty = nothing is clipped.

    Raises:
        UserError: another name, or compressed-tensors is not installed.
    """
    if how not in SCHEMES:
        raise UserError(f"--quantize {how}: choose {', '.join(SCHEMES)} or none")
    require_quantizer(how)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = model.config.get_text_config()
    if config.tie_word_embeddings and config.model_type in UNTIED_IN_ENGINES:
        give_own_head(model)
    kind, rounded = SCHEMES[how]
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, activations = numbers | {"strategy": "channel"}, numbers | {"strategy": "token", "dynamic": True}
    head, ignore = ([], [HEAD]) if config.tie_word_embeddings else ([HEAD], [])
    scheme = {"targets": [*head, "Linear"], "weights": weights, "input_activations": activations if rounded else None}
    with _mean_squares(model) as squares, torch.no_grad():
        for ids in islice((ids for ids in texts if len(ids) > 1), CALIBRATED_ON):
            model(input_ids=torch.tensor([ids], device=model.device))
    planned = QuantizationConfig.model_validate({"config_groups": {"group_0": scheme}, "ignore": ignore})
    apply_quantization_config(model, planned, show_progress=False)
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale_N1 = row_scales(module.weight, squares.get(name), module.quantization_scheme.weights)
            module.weight_scale.data = scale_N1.to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def lighter_draft(
    draft: PreTrainedModel, how: Quantization, texts: Iterable[list[int]], target: Target
) -> PreTrainedModel:
    """What loads from an export of the draft, made in place without one, computing as it would beside the target."""
    cast_weights(draft, target.saved_dtype)
    quantize_draft(draft, how, texts)
    return as_exported(as_served(draft, target.device), target)


def row_scales(weight_NK: Tensor, square_K: Tensor | None, args: Any) -> Tensor:
    """Scales (N, 1) that every reader has exactly (bfloat16 values): of `CLIPS`, the one with the least squared error of the output.

    square_K: mean square of each input where it was seen; the error of a weight counts by it. None: nothing is clipped.
    args: of the weights, the library's.
    """
    from compressed_tensors.quantization import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight_NK = weight_NK.detach().float()
    largest_N1 = weight_NK.abs().amax(1, keepdim=True)
    scales, errors = [], []
    for clip in CLIPS if square_K is not None else CLIPS[:1]:
        scale_N1, zero_N1 = calculate_qparams(-clip * largest_N1, clip * largest_N1, args)
        scale_N1 = scale_N1.bfloat16().float()
        error_NK = fake_quantize(weight_NK, scale_N1, zero_N1, args) - weight_NK
        scales.append(scale_N1)
        errors.append((error_NK.square() * (1.0 if square_K is None else square_K)).sum(1, keepdim=True))
    best_1N1 = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(scales).gather(0, best_1N1)[0]


@contextmanager
def _mean_squares(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """{name of a linear layer: sum over tokens of each input's square}, filled while the context is open."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = seen.get(name, 0.0) + inputs[0].float().square().flatten(0, -2).sum(0)

        return note

    linear = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    handles = [one.register_forward_pre_hook(watch(name)) for name, one in linear]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
