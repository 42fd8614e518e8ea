"""Choose the MLP channels of a carved draft, and remove the others.

Legend: B sequences of a batch, T positions, R rows (real positions), D hidden width, F MLP channels.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from distill.models.carving.layers import filled, layer_list
from distill.models.quantized import full_weight
from speculative.errors import UserError

# Config fields of transformers that hold the MLP's width.
WIDTH_FIELDS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
SCORED_TOKENS = 4096  # of all texts that score channels
LONGEST = 512  # most tokens used per text
BATCH_TOKENS = 2048  # positions of a forward


@dataclass(frozen=True)
class _Mlp:
    """The matrices of a layer's MLP by their names in the layer: into the F channels (ups), and back (down)."""

    ups: tuple[str, ...]
    down: str
    channels: int


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    weight: Any = module.weight
    return tuple(weight.shape) if isinstance(module, Conv1D) else (weight.shape[1], weight.shape[0])


def _find_mlp(layer: nn.Module, width: int) -> _Mlp | None:
    """Find the MLP by its shape: one matrix back to the hidden width, one (plain) or two (gated) that feed it, no other weights.

    Attention does not match: it has three matrices before its output, or one of another width.
    """
    candidates = []
    for prefix, module in layer.named_modules():
        linear = {
            f"{prefix}.{name}".lstrip("."): child
            for name, child in module.named_children()
            if isinstance(child, nn.Linear | Conv1D)
        }
        if len(linear) not in (2, 3):
            continue
        for down, last in linear.items():
            channels, outputs = _sizes(last)
            ups = tuple(name for name in linear if name != down)
            # A norm over the channels would change when channels are removed.
            mixed = any(
                channels in weight.shape
                for name, weight in module.named_parameters()
                if f"{prefix}.{name}".lstrip(".").rpartition(".")[0] not in linear
            )
            fits = all(_sizes(linear[name]) == (width, channels) for name in ups)
            if fits and outputs == width != channels and not mixed:
                candidates.append(_Mlp(ups, down, channels))
    return candidates[0] if len(candidates) == 1 else None


def _mlps(model: PreTrainedModel) -> tuple[str, list[_Mlp]]:
    name, layers = layer_list(model)
    mlps = [_find_mlp(layer, model.config.get_text_config().hidden_size) for layer in layers]
    plain = [mlp for mlp in mlps if mlp is not None]
    if len(plain) < len(mlps) or len({mlp.channels for mlp in plain}) > 1:
        raise UserError(
            f"student.intermediate_size: {type(model).__name__} does not have a plain or gated MLP of one width in every layer; "
            "leave the key out"
        )
    return name, plain


def sample_sequences(sequences: Sequence[Sequence[int]], tokens: int, length: int) -> list[list[int]]:
    """About `tokens` tokens of text: evenly spread sequences, each cut to `length` tokens; ValueError if none has two tokens."""
    usable = [list(sequence[:length]) for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ValueError("channels are chosen on text; give sequences of at least two tokens")
    count = round(tokens * len(usable) / sum(map(len, usable)))
    count = min(max(count, 1), len(usable))
    return [usable[index * len(usable) // count] for index in range(count)]


def text_batches(sequences: Sequence[Sequence[int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return batches of (ids, real positions), both (B, T), padded on the right, which a causal model ignores."""
    batches, rest = [], sorted(sequences, key=len, reverse=True)
    while rest:
        width = len(rest[0])
        batch, rest = rest[: max(1, BATCH_TOKENS // width)], rest[max(1, BATCH_TOKENS // width) :]
        # Pad with the sequence's last token, since a pad id makes some models of transformers warn.
        ids_BT = torch.tensor([[*sequence, *[sequence[-1]] * (width - len(sequence))] for sequence in batch])
        real_BT = torch.arange(width) < torch.tensor([[len(sequence)] for sequence in batch])
        batches.append((ids_BT.to(device), real_BT.to(device)))
    return batches


@torch.no_grad()
def channel_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Score each MLP channel, one float64 (F,) per layer: mean over positions of |channel| times its output column's norm.

    Raises UserError: the architecture's MLP is unknown. ValueError: no text.
    """
    name, mlps = _mlps(model)
    layers = model.get_submodule(name)
    downs: list[nn.Module] = [layers.get_submodule(f"{i}.{mlp.down}") for i, mlp in enumerate(mlps)]
    sums = [torch.zeros(mlp.channels, dtype=torch.float64, device=model.device) for mlp in mlps]
    real: list[Tensor] = []

    def collector(index: int) -> Any:
        def collect(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows_RF = inputs[0].reshape(-1, inputs[0].shape[-1])[real[0].reshape(-1)]
            sums[index] += rows_RF.abs().sum(0, dtype=torch.float64)

        return collect

    hooks = [down.register_forward_pre_hook(collector(index)) for index, down in enumerate(downs)]
    try:
        count = 0
        for ids_BT, real_BT in text_batches(sample_sequences(sequences, SCORED_TOKENS, LONGEST), model.device):
            real[:] = [real_BT]
            count += int(real_BT.sum())
            model.base_model(input_ids=ids_BT, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    norms = [
        full_weight(down.weight).double().norm(dim=1 if isinstance(down, Conv1D) else 0)  # type: ignore[arg-type]
        for down in downs
    ]
    return [total / count * norm for total, norm in zip(sums, norms, strict=True)]


def kept_channels(scores_F: Tensor, size: int) -> Tensor:
    """Return the positions of the `size` highest scores, ascending; of equal scores the first."""
    return scores_F.cpu().sort(descending=True, stable=True).indices[:size].sort().values


def trim_mlps(model: PreTrainedModel, size: int, scores: Sequence[Tensor]) -> PreTrainedModel:
    """Return a model whose MLPs keep the `size` channels with the highest scores (one (F,) per layer); float32, on the CPU.

    Its logits equal those of the given model with the other channels set to zero.

    Raises UserError: more channels requested than there are, or the architecture's MLP or its config field is unknown.
    """
    prefix, mlps = _mlps(model)
    if size > mlps[0].channels:
        raise UserError(f"student.intermediate_size = {size}: the target's MLPs have {mlps[0].channels} channels")
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    layers = model.get_submodule(prefix)
    state = {key: value.detach().float().cpu() for key, value in model.state_dict().items()}
    for index, (mlp, scores_F) in enumerate(zip(mlps, scores, strict=True)):
        channels = kept_channels(scores_F, size)
        for name in (*mlp.ups, mlp.down):
            key, module = f"{prefix}.{index}.{name}", layers.get_submodule(f"{index}.{name}")
            # Linear holds (outputs, inputs), Conv1D the transpose; the channels are the outputs of an up.
            axis = int((name == mlp.down) != isinstance(module, Conv1D))
            state[f"{key}.weight"] = state[f"{key}.weight"].index_select(axis, channels)
            if name != mlp.down and f"{key}.bias" in state:
                state[f"{key}.bias"] = state[f"{key}.bias"][channels]
    for field in WIDTH_FIELDS:
        # None means four times the hidden width in transformers.
        if getattr(text_config, field, 0) in (mlps[0].channels, None):
            setattr(text_config, field, size)
    with torch.random.fork_rng(devices=[]):
        return filled(
            config,
            state,
            model,
            f"student.intermediate_size: {type(model).__name__} has no single config field for its MLP's width; "
            "leave the key out",
        )
