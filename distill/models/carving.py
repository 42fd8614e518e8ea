"""Carve a draft from the target: choose layers and MLP channels, and copy their weights.

Legend: B sequences of a batch, T positions, R scored positions (rows), C rows of a chunk, D hidden width, F MLP channels,
V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from distill.models.heads import SplitModel
from distill.models.quantized import full_weight, quantization_name, quantization_of, without_quantization
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings, logits_to_probs

# Config fields of transformers that hold the MLP's width.
WIDTH_FIELDS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
LONGEST, SCORED_TOKENS = 512, 4096  # most tokens used per text; of all texts that score channels
BATCH_TOKENS = 2048  # positions of a forward
CANDIDATES = 8  # layer sets whose hidden states are in memory at once
EXCHANGE_GAIN = 1e-4  # in alpha; a smaller gain is rounding noise


@dataclass(frozen=True)
class LayerChoice:
    """The layers to keep, and the measurements for this choice. Every alpha is before training."""

    layers: tuple[int, ...]
    alpha: float
    drop_one: tuple[float, ...]  # alpha of the target without layer i
    path: tuple[tuple[int, float], ...]  # (layer removed, alpha of what was left), one at a time
    exchanges: tuple[tuple[int, int, float], ...]  # (layer taken out, layer put in, alpha), after the path
    tokens: int  # positions scored


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return (name in the model, module list) of the layers: the first list as long as the config's depth; UserError without one."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(f"{type(model).__name__}: no list of {depth} layers to carve or shard; use student.init: config")


def per_layer_fields(config: Any) -> dict[str, list[Any]]:
    """Return the fields of a text config that have one entry per layer, such as `layer_types`."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and not name.endswith(("_id", "_ids"))
        and name != "architectures"
    }


@contextmanager
def layers_only(model: PreTrainedModel, kept: Sequence[int]) -> Iterator[None]:
    """Inside, the model has only the kept layers, in that order, and computes without a cache like a draft carved from them; no copies."""
    name, layers = layer_list(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    config = model.config.get_text_config()
    depth, fields = config.num_hidden_layers, per_layer_fields(config)
    chosen = [layers[index] for index in kept]
    indexed: list[tuple[Any, int, int]] = [
        (module, position, module.layer_idx)  # type: ignore[misc]
        for position, layer in enumerate(chosen)
        for module in layer.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    try:
        setattr(parent, leaf, nn.ModuleList(chosen))
        config.num_hidden_layers = len(chosen)
        for field, values in fields.items():
            setattr(config, field, [values[index] for index in kept])
        for module, position, _ in indexed:
            module.layer_idx = position
        yield
    finally:
        setattr(parent, leaf, layers)
        config.num_hidden_layers = depth
        for field, values in fields.items():
            setattr(config, field, values)
        for module, _, before in indexed:
            module.layer_idx = before


def sample_sequences(sequences: Sequence[Sequence[int]], tokens: int, length: int) -> list[list[int]]:
    """About `tokens` tokens of text: evenly spread sequences, each cut to `length` tokens; ValueError if none has two tokens."""
    usable = [list(sequence[:length]) for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ValueError("layers and channels are chosen on text; give sequences of at least two tokens")
    count = round(tokens * len(usable) / sum(map(len, usable)))
    count = min(max(count, 1), len(usable))
    return [usable[index * len(usable) // count] for index in range(count)]


def _batches(sequences: Sequence[Sequence[int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
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


class LayerScorer:
    """alpha between a target and the same target with fewer layers, on fixed text."""

    def __init__(
        self,
        target: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        settings: SamplingSettings | None = None,
        chunk: int = 256,
    ) -> None:
        """``sequences``: token ids, every position is scored. ``settings``: the server's. ``chunk``: rows whose logits are in memory at once."""
        self.target, self.chunk, self.settings = target, chunk, settings or SamplingSettings()
        self.split = SplitModel(target)
        self.batches = _batches(sequences, target.device)
        self.target_hidden_RD = self._hidden()
        self.tokens = len(self.target_hidden_RD)
        self._known: dict[tuple[int, ...], float] = {}

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        return torch.cat([self.split.hidden(ids_BT)[real_BT] for ids_BT, real_BT in self.batches])

    @torch.no_grad()
    def alphas(self, candidates: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the mean over positions of sum_v min(target, target with only these layers), one per candidate."""
        unknown = [kept for kept in dict.fromkeys(candidates) if kept not in self._known]
        for start in range(0, len(unknown), CANDIDATES):
            group = unknown[start : start + CANDIDATES]
            hidden = []
            for kept in group:
                with layers_only(self.target, kept):
                    hidden.append(self._hidden())
            sums = [0.0] * len(group)
            for first in range(0, self.tokens, self.chunk):
                rows = slice(first, first + self.chunk)
                target_probs_CV = self._probs(self.target_hidden_RD[rows])
                for index, hidden_RD in enumerate(hidden):
                    overlap_C = torch.minimum(target_probs_CV, self._probs(hidden_RD[rows])).sum(-1)
                    # A layer set may overflow in half precision. It scores 0 there, and the search continues.
                    sums[index] += float(overlap_C.nan_to_num(0.0).double().sum())
            self._known |= {kept: total / self.tokens for kept, total in zip(group, sums, strict=True)}
        return [self._known[kept] for kept in candidates]

    def _probs(self, hidden_CD: Tensor) -> Tensor:
        return logits_to_probs(self.split.head(hidden_CD), self.settings)


def choose_layers(
    target: PreTrainedModel,
    depth: int,
    sequences: Sequence[Sequence[int]],
    *,
    settings: SamplingSettings | None = None,
    tokens: int = 1024,
) -> LayerChoice:
    """Search greedily for the `depth` layers with the highest alpha, on a sample of the text.

    Repeatedly remove the layer whose removal costs the least alpha. A layer's value depends on the others that remain, so alphas
    with one layer dropped do not rank the layers to keep. At the end, exchange a kept layer for a removed one until no exchange
    helps. About depth^3 / 3 layer forwards in total. Deterministic.

    Raises ValueError: no text.
    """
    total = target.config.get_text_config().num_hidden_layers
    scorer = LayerScorer(target, sample_sequences(sequences, tokens, LONGEST), settings)
    kept = tuple(range(total))
    drop_one = scorer.alphas([_without(kept, layer) for layer in kept]) if total > 1 else [0.0]
    path: list[tuple[int, float]] = []
    while len(kept) > depth:
        alphas = scorer.alphas([_without(kept, layer) for layer in kept])
        best = max(range(len(kept)), key=alphas.__getitem__)
        path.append((kept[best], alphas[best]))
        kept = _without(kept, kept[best])
    alpha = scorer.alphas([kept])[0]
    exchanges: list[tuple[int, int, float]] = []
    # Every exchange raises alpha, so no set repeats; the limit bounds the time.
    while len(exchanges) < 2 * depth:
        pairs = [(out, into) for out in kept for into in range(total) if into not in kept]
        if not pairs:
            break
        sets = [tuple(sorted((*_without(kept, out), into))) for out, into in pairs]
        alphas = scorer.alphas(sets)
        best = max(range(len(pairs)), key=alphas.__getitem__)
        if alphas[best] < alpha + EXCHANGE_GAIN:
            break
        kept, alpha = sets[best], alphas[best]
        exchanges.append((*pairs[best], alpha))
    return LayerChoice(kept, alpha, tuple(drop_one), tuple(path), tuple(exchanges), scorer.tokens)


def _without(layers: tuple[int, ...], layer: int) -> tuple[int, ...]:
    return tuple(other for other in layers if other != layer)


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
    found = []
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
                found.append(_Mlp(ups, down, channels))
    return found[0] if len(found) == 1 else None


def _mlps(model: PreTrainedModel) -> tuple[str, list[_Mlp]]:
    name, layers = layer_list(model)
    mlps = [_find_mlp(layer, model.config.get_text_config().hidden_size) for layer in layers]
    known = [mlp for mlp in mlps if mlp is not None]
    if len(known) < len(mlps) or len({mlp.channels for mlp in known}) > 1:
        raise UserError(
            f"student.intermediate_size: {type(model).__name__} does not have a plain or gated MLP of one width in every layer; "
            "leave the key out"
        )
    return name, known


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
        for ids_BT, real_BT in _batches(sample_sequences(sequences, SCORED_TOKENS, LONGEST), model.device):
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
        kept = kept_channels(scores_F, size)
        for name in (*mlp.ups, mlp.down):
            key, module = f"{prefix}.{index}.{name}", layers.get_submodule(f"{index}.{name}")
            # Linear holds (outputs, inputs), Conv1D the transpose; the channels are the outputs of an up.
            axis = int((name == mlp.down) != isinstance(module, Conv1D))
            state[f"{key}.weight"] = state[f"{key}.weight"].index_select(axis, kept)
            if name != mlp.down and f"{key}.bias" in state:
                state[f"{key}.bias"] = state[f"{key}.bias"][kept]
    for field in WIDTH_FIELDS:
        # None means four times the hidden width in transformers.
        if getattr(text_config, field, 0) in (mlps[0].channels, None):
            setattr(text_config, field, size)
    with torch.random.fork_rng(devices=[]):
        return filled(
            config, state, model, f"student.intermediate_size: {type(model).__name__} has no single config field for its MLP's width; "
            "leave the key out",
        )  # fmt: skip


def carve(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a draft made of some of the target's layers, its embeddings, final norm and head; copied, float32.

    Raises UserError: a layer that the target does not have, the same layer twice, an architecture without a plain list of layers, only
    recurrent layers of a hybrid, or a multimodal model whose text model cannot be extracted.
    """
    if target.config.get_text_config(decoder=True) is not target.config:
        raise UserError(
            f"student.init: carved: {type(target).__name__} is multimodal, and transformers has no causal LM for its text model "
            "only; use student.init: pretrained or config"
        )
    depth = target.config.get_text_config().num_hidden_layers
    chosen = [layer + depth if layer < 0 else layer for layer in layers]
    if not chosen or any(not 0 <= layer < depth for layer in chosen):
        raise UserError(f"student.layers = {list(layers)}: the target has layers 0 to {depth - 1} (or -{depth} to -1)")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"student.layers = {list(layers)}: a layer of the target appears twice; list each layer once")
    kinds = getattr(target.config, "layer_types", None) or []
    attention = [layer for layer, kind in enumerate(kinds) if "attention" in kind and kind != "linear_attention"]
    if attention and not set(attention) & set(chosen):
        raise UserError(
            f"student.layers = {list(layers)}: recurrent layers only, and {type(target).__name__} cannot decode without an "
            f"attention layer; take in one of {attention}"
        )
    with layers_only(target, chosen):
        config = copy.deepcopy(target.config)
        state = {key: full_weight(value).float() for key, value in target.state_dict().items()}
    without_quantization(config)
    return filled(
        config, state, target, f"student.init: carved: the target's weights are packed ({quantization_name(target.config)}), "
        "so no layer can be copied; carve from the unquantised model and give it as student.path, or use student.init: config"
        if quantization_of(target.config) is not None else f"student.init: carved: {type(target).__name__} cannot be carved",
    )  # fmt: skip


def filled(config: Any, state: dict[str, Tensor], source: PreTrainedModel, refusal: str) -> PreTrainedModel:
    """Return a float32 model of this config with these weights and the generation config of `source`.

    Raises UserError: the config needs other weights; the message is `refusal` and the first of them.
    """
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {(key, value.shape) for key, value in made.state_dict().items()}
    if other := sorted(key for key, _ in expected ^ {(key, value.shape) for key, value in state.items()}):
        raise UserError(f"{refusal} ({other[0]} does not fit)")
    made.load_state_dict(state)
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.eval()
