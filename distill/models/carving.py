"""What to keep when a draft is carved from the target: which layers, and which channels of their MLPs.

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

# Names of the MLP's width in transformers' configs.
WIDTH_FIELDS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
LONGEST, SCORED_TOKENS = 512, 4096  # tokens of a text that is looked at; of all texts that score channels
BATCH_TOKENS = 2048  # positions of a forward
CANDIDATES = 8  # layer sets whose hidden states are held at once
EXCHANGE_GAIN = 1e-4  # alpha; below it an exchange is noise of the arithmetic


@dataclass(frozen=True)
class LayerChoice:
    """The layers to keep, and the measurements behind them. Every alpha is before any training."""

    layers: tuple[int, ...]
    alpha: float
    drop_one: tuple[float, ...]  # alpha of the target without layer i
    path: tuple[tuple[int, float], ...]  # (layer removed, alpha of what was left), one at a time
    exchanges: tuple[tuple[int, int, float], ...]  # (layer taken out, layer put in, alpha), after the path
    tokens: int  # positions scored


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(name in the model, list) of the layers: the first list as long as the config says the model is deep.

    Raises:
        UserError: there is none.
    """
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(
        f"{type(model).__name__}: no list of {depth} layers, so it can be neither carved nor sharded; use student.init: config"
    )


def per_layer_fields(config: Any) -> dict[str, list[Any]]:
    """Fields of a text config with one entry per layer, such as `layer_types`."""
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
    """Within it the model has the kept layers only, in that order, and computes what a draft carved from them would.

    Nothing is copied. Only forwards without a cache are meant.
    """
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
    """About `tokens` tokens of text: sequences spread evenly over all, each cut to its first `length` tokens.

    Raises:
        ValueError: nothing to choose from.
    """
    usable = [list(sequence[:length]) for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ValueError("layers and channels are chosen on text: give sequences of at least two tokens")
    count = round(tokens * len(usable) / sum(map(len, usable)))
    count = min(max(count, 1), len(usable))
    return [usable[index * len(usable) // count] for index in range(count)]


def _batches(sequences: Sequence[Sequence[int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(ids, real positions), both (B, T), padded on the right, where a causal model cannot see."""
    batches, rest = [], sorted(sequences, key=len, reverse=True)
    while rest:
        width = len(rest[0])
        batch, rest = rest[: max(1, BATCH_TOKENS // width)], rest[max(1, BATCH_TOKENS // width) :]
        # Padded with its own last token: a pad id makes some models of transformers warn.
        ids_BT = torch.tensor([[*sequence, *[sequence[-1]] * (width - len(sequence))] for sequence in batch])
        real_BT = torch.arange(width) < torch.tensor([[len(sequence)] for sequence in batch])
        batches.append((ids_BT.to(device), real_BT.to(device)))
    return batches


class LayerScorer:
    """alpha between a target and itself with fewer layers, on fixed text."""

    def __init__(
        self,
        target: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        settings: SamplingSettings | None = None,
        chunk: int = 256,
    ) -> None:
        """``sequences`` of token ids, every position scored; ``settings`` of the server; ``chunk`` rows have logits at once."""
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
        """Mean over positions of sum_v min(target, target with these layers only), one per candidate."""
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
                    # A layer set may overflow in half precision: worth nothing, but no reason to stop.
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
    """The `depth` layers with the highest alpha that a greedy search finds on some of the text.

    From all layers, the one whose removal costs least alpha goes, again and again: what a layer is worth depends on which
    others are left, so alphas with one layer dropped do not rank those to keep when most go. The search ends with exchanges
    of one kept layer for one removed, until none helps. About depth^3 / 3 layer forwards in all. Deterministic.

    Raises:
        ValueError: no text.
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
    # Every exchange raises alpha, so no set comes twice; the bound is for the time.
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
    """The matrices of a layer's MLP, by their names in the layer: into the F channels, and back."""

    ups: tuple[str, ...]
    down: str
    channels: int


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module.weight
    return tuple(weight.shape) if isinstance(module, Conv1D) else (weight.shape[1], weight.shape[0])


def _find_mlp(layer: nn.Module, width: int) -> _Mlp | None:
    """The MLP, found by its shape: one matrix back to the hidden width, and one (plain) or two (gated) that feed it; no other weights.

    Attention does not look like this: it has three matrices in front of its output, or one of another width.
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
            # A norm over the channels would see the others vanish.
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
            f"student.intermediate_size: {type(model).__name__} has no plain or gated MLP of one width in every layer to trim; "
            "leave the key out"
        )
    return name, known


@torch.no_grad()
def channel_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each MLP channel writes, one float64 (F,) per layer: mean over positions of |channel| times its output column's norm.

    Raises:
        UserError: an architecture whose MLP is not known. ValueError: no text.
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
    """The `size` highest scores' places, ascending; of equal ones the first."""
    return scores_F.cpu().sort(descending=True, stable=True).indices[:size].sort().values


def trim_mlps(model: PreTrainedModel, size: int, scores: Sequence[Tensor]) -> PreTrainedModel:
    """A model whose MLPs keep the `size` channels with the highest scores (one (F,) per layer); float32, on the CPU.

    Its logits are those of the given model with the other channels held at zero.

    Raises:
        UserError: more channels asked for than there are; an architecture whose MLP or its config field is not known.
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
        # None is transformers' word for four times the hidden width.
        if getattr(text_config, field, 0) in (mlps[0].channels, None):
            setattr(text_config, field, size)
    with torch.random.fork_rng(devices=[]):
        return _filled(
            config, state, model, f"student.intermediate_size: {type(model).__name__} has no config field that alone sets its MLP's width; "
            "leave the key out",
        )  # fmt: skip


def carve(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A draft made of some of the target's layers, its embeddings, final norm and head; all copied, float32.

    Raises:
        UserError: a layer the target does not have, the same layer twice, an architecture without a plain list of layers, a
            hybrid's recurrent layers alone, a multimodal one whose text model cannot be taken out.
    """
    if target.config.get_text_config(decoder=True) is not target.config:
        raise UserError(
            f"student.init: carved: {type(target).__name__} is multimodal and transformers has no causal LM of its text model "
            "alone; use student.init: pretrained or config"
        )
    depth = target.config.get_text_config().num_hidden_layers
    chosen = [layer + depth if layer < 0 else layer for layer in layers]
    if not chosen or any(not 0 <= layer < depth for layer in chosen):
        raise UserError(f"student.layers = {list(layers)}: the target has layers 0 to {depth - 1} (or -{depth} to -1)")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"student.layers = {list(layers)}: names a layer of the target twice")
    kinds = getattr(target.config, "layer_types", None) or []
    attention = [layer for layer, kind in enumerate(kinds) if "attention" in kind and kind != "linear_attention"]
    if attention and not set(attention) & set(chosen):
        raise UserError(
            f"student.layers = {list(layers)}: recurrent layers only, which {type(target).__name__} does not decode without one of "
            f"attention; take in one of {attention}"
        )
    with layers_only(target, chosen):
        config = copy.deepcopy(target.config)
        state = {key: full_weight(value).float() for key, value in target.state_dict().items()}
    without_quantization(config)
    return _filled(
        config, state, target, f"student.init: carved: the target's weights are packed ({quantization_name(target.config)}) in a way "
        "that no layer can be copied from; carve from the unquantised model and give it as student.path, or use student.init: config"
        if quantization_of(target.config) is not None else f"student.init: carved: {type(target).__name__} cannot be carved",
    )  # fmt: skip


def _filled(config: Any, state: dict[str, Tensor], source: PreTrainedModel, refusal: str) -> PreTrainedModel:
    """A float32 model of this config with these weights, generating as `source` does.

    Raises:
        UserError: the config makes other weights: `refusal`, and the first of them.
    """
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {(key, value.shape) for key, value in made.state_dict().items()}
    if other := sorted(key for key, _ in expected ^ {(key, value.shape) for key, value in state.items()}):
        raise UserError(f"{refusal} ({other[0]} does not fit)")
    made.load_state_dict(state)
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.eval()
