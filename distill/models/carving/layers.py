"""Carve a draft from the target: the layers that it keeps, their weights, and a config that describes them."""

import copy
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from distill.models.load import reason_of, refusing
from distill.models.quantized import full_weight, quantization_name, quantization_of, without_quantization
from distill.models.text_model import same_logits, without_weights
from speculative.errors import UserError

# Names of a module's attributes that hold a layer's number, and of config fields that may hold a rule over layers.
INDEX = re.compile(r"(^|_)(layer|block)_?(idx|id|index|number)$")
RULE = re.compile(r"layer|dense|shared|period|offset|interval|step|freq|every|pattern")
PLAIN = (bool, int, float, str, tuple, type(None))
MOST_TRIALS, FEW_TRIALS = 400, 8  # configs tried for the layers of a user, and for a suggestion
MOST_PARTS = 10**5  # more than can differ
MOST_SUGGESTIONS = 4
_OUTPUTS: dict[type, int] = {}  # class of a layer -> entries of the tuple that its forward returns; 0: a tensor


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return (name in the model, module list) of the layers: the first list as long as the config's depth; UserError without one."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(f"{type(model).__name__}: no list of {depth} layers to carve or shard; use student.init: config")


def field_values(name: str, value: Any, depth: int, kept: Sequence[int]) -> list[Any]:
    """Return what a config field of a model of `depth` layers may be for the kept ones, the likeliest first.

    Such a field has an entry per layer, layer numbers in a list or as keys, a pattern that repeats, runs of equal layers, or a number of
    a rule: the first layers, the last ones, every n-th.
    """
    place, named = {layer: position for position, layer in enumerate(kept)}, bool(RULE.search(name))
    if type(value) is int and named and not re.search("size|dim", name):
        first, last = sum(layer < value for layer in kept), sum(layer >= depth - value for layer in kept)
        return list(dict.fromkeys([value, first, last, *range(len(kept) + 2)]))
    if isinstance(value, dict) and named and all(str(key).isdigit() for key in value):
        return [{place[int(key)]: entry for key, entry in value.items() if int(key) in place}]
    if not isinstance(value, list | tuple) or name.endswith(("_id", "_ids")) or name == "architectures":
        return [value]
    values: list[Any] = [[value[layer] for layer in kept]] if len(value) == depth else []
    if named and all(type(entry) is int and 0 <= entry < depth for entry in value):
        values.append([place[entry] for entry in value if entry in place])
        values += map(list, itertools.chain(*(itertools.combinations(range(len(kept)), n) for n in range(1, 4))))
    if value and all(isinstance(run, list | tuple) and len(run) == 2 and isinstance(run[1], int) for run in value):
        flat = [entry for entries, count in value for _ in range(count) for entry in entries]
        values += [[[[flat[layer]], 1] for layer in kept]] if len(flat) == depth else []
    values.append(value)
    return [*values, [value[layer % len(value)] for layer in kept]] if value and isinstance(value[0], str) else values


def layer_parts(layer: nn.Module, place: dict[int, int]) -> dict[str, Any]:
    """Return classes, plain attributes and shapes of weights of a layer, by name. A layer number is given as its `place`; -1 without one."""
    parts: dict[str, Any] = {}
    for name, module in layer.named_modules():
        parts[name] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, PLAIN) and not key.startswith(("_", "num_hidden_layers")):
                numbered = type(value) is int and INDEX.search(key)
                parts[f"{name}.{key}".lstrip(".")] = place.get(value, -1) if numbered else value  # type: ignore[arg-type]
    return parts | {name: tuple(value.shape) for name, value in (*layer.named_parameters(), *layer.named_buffers())}


def layer_axis(shape: Sequence[int], kept_shape: Sequence[int], depth: int) -> int | None:
    """Return the axis along which a weight outside the layers holds an equal part for each; None if it does not."""
    axes = [axis for axis, (size, kept) in enumerate(zip(shape, kept_shape, strict=True)) if size != kept]
    parts = [axis for axis in axes if shape[axis] % depth == 0 and kept_shape[axis] % (shape[axis] // depth) == 0]
    return axes[0] if len(axes) == len(parts) == 1 else None


class LayerSets:
    """Which layers of a target a config can describe. Models without weights show what each layer would become in the draft."""

    def __init__(self, target: PreTrainedModel) -> None:
        """Raises UserError: the target has no plain list of layers, or is multimodal and its text model cannot be extracted."""
        self.name, self.config = type(target).__name__, copy.deepcopy(target.config)
        if self.config.get_text_config(decoder=True) is not self.config:
            raise UserError(
                f"student.init: carved: {self.name} is multimodal, and transformers has no causal LM for its text model only; use "
                "student.init: pretrained or config"
            )
        without_quantization(self.config)
        self.depth = self.config.num_hidden_layers
        with refusing("student.init: carved"):
            model = without_weights(self.config)
        self.prefix, self.layers = layer_list(model)
        self.outer = self._outer(model)
        kinds = getattr(self.config, "layer_types", None) or []
        self.attention = {at for at, kind in enumerate(kinds) if "attention" in kind and kind != "linear_attention"}
        self.reason = ""  # why the layers asked for last do not fit

    def _outer(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        weights = model.state_dict().items()
        return {name: tuple(value.shape) for name, value in weights if not name.startswith(f"{self.prefix}.")}

    def config_of(self, kept: Sequence[int], trials: int = MOST_TRIALS) -> PretrainedConfig | None:
        """Return a config under which each kept layer is what it is in the target; None if none was found, see `reason`."""
        self.reason = "a draft needs an attention layer to decode"
        if self.attention and self.attention.isdisjoint(kept):
            return None
        fields = self.config.to_dict()
        depth = self.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        choices = {name: field_values(name, value, self.depth, kept) for name, value in fields.items() if name != depth}
        fields |= {name: len(kept) if name == depth else choices[name][0] for name in fields}
        wrong, config = self._try(fields, kept)
        single = [[(name, value) for value in values] for name, values in choices.items() if len(values) > 1]
        pairs = itertools.chain(*(itertools.product(*two) for two in itertools.combinations(single, 2)))
        for change in itertools.islice(itertools.chain(*map(zip, single), pairs), trials):
            if not wrong:
                return config
            trial = fields | dict(change)
            other, its_config = self._try(trial, kept)
            if len(other) < len(wrong):
                fields, wrong, config = trial, other, its_config
        self.reason = min(wrong, default="")
        return None if wrong else config

    def _try(self, fields: dict[str, Any], kept: Sequence[int]) -> tuple[list[str], PretrainedConfig | None]:
        """Return (what would differ in a draft with these fields, its config)."""
        logging.disable(logging.WARNING)
        try:
            config = type(self.config).from_dict(copy.deepcopy(fields))
            model = without_weights(config)
            config._attn_implementation = self.config._attn_implementation
            layers, outer = list(model.get_submodule(self.prefix)), self._outer(model)  # type: ignore[call-overload]
        except Exception as error:  # whatever a family's own code raises for a config that it cannot take
            return [reason_of(error)] * MOST_PARTS, None
        finally:
            logging.disable(logging.NOTSET)
        place = {layer: position for position, layer in enumerate(kept)}
        wrong = [f"the draft would have {len(layers)} layers"] * (len(layers) != len(kept))
        for layer, draft in zip(kept, layers, strict=False):
            was, now = layer_parts(self.layers[layer], place), layer_parts(draft, dict(enumerate(range(len(kept)))))
            differing = [name for name in was.keys() | now.keys() if was.get(name, "") != now.get(name, "")]
            wrong += [f"{name} of layer {layer} would be {now.get(name)}, not {was.get(name)}" for name in differing]
        for name in self.outer.keys() | outer.keys():
            shapes = self.outer.get(name, ()), outer.get(name, ())
            if len(shapes[0]) != len(shapes[1]) or (shapes[0] != shapes[1] and layer_axis(*shapes, self.depth) is None):
                wrong.append(f"{name} would not fit")
        return wrong, config

    def near(self, kept: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield layers that fit, the closest to these first, and sets of as many before larger ones."""
        here = tuple(sorted(kept))
        others = [layer for layer in range(self.depth) if layer not in here]
        moves = sorted((abs(new - old), old, new) for old in here for new in others)
        moved = (sorted({*here, new} - {old}) for _, old, new in moves)
        blocks = (range(first, first + len(here)) for first in range(self.depth - len(here) + 1))
        more = (sorted((*here, *new)) for count in (1, 2) for new in itertools.combinations(others, count))
        sets = itertools.islice(itertools.chain([here], moved, blocks, more), MOST_TRIALS)
        return (tuple(one) for one in sets if self.config_of(one, FEW_TRIALS) is not None)


@contextmanager
def layers_only(model: PreTrainedModel, kept: Sequence[int]) -> Iterator[None]:
    """Inside, the other layers hand their input on, so that the model computes like a draft of the kept ones; no copies."""
    others = [layer for number, layer in enumerate(layer_list(model)[1]) if number not in kept]
    before = [vars(layer).get("forward") for layer in others]
    try:
        for layer in others:
            layer.forward = _handing_on(layer)
        yield
    finally:
        for layer, forward in zip(others, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _handing_on(layer: nn.Module) -> Callable[..., Any]:
    """Return a forward of a layer that returns its input, in the form of the layer's own output, which is seen once for each class."""
    forward = layer.forward

    def handed_on(*inputs: Any, **named: Any) -> Any:
        if type(layer) not in _OUTPUTS:
            outputs = forward(*inputs, **named)
            _OUTPUTS[type(layer)] = len(outputs) if isinstance(outputs, tuple) else 0
        hidden_BTD = inputs[0] if inputs else named["hidden_states"]
        others = (None,) * (_OUTPUTS[type(layer)] - 1)
        return (hidden_BTD, *others) if _OUTPUTS[type(layer)] else hidden_BTD

    return handed_on


def carve(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a draft made of some of the target's layers, its embeddings, final norm and head; copied, float32.

    Raises UserError: a layer that the target does not have, the same layer twice, layers that no config describes; see also `LayerSets`.
    """
    sets = LayerSets(target)
    depth = sets.depth
    chosen = [layer + depth if layer < 0 else layer for layer in layers]
    if not chosen or any(not 0 <= layer < depth for layer in chosen):
        raise UserError(f"student.layers = {list(layers)}: the target has layers 0 to {depth - 1} (or -{depth} to -1)")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"student.layers = {list(layers)}: a layer of the target appears twice; list each layer once")
    draft = _carved(target, sets, chosen)
    if draft is not None:
        return draft
    reason, fitting = sets.reason, itertools.islice(sets.near(chosen), MOST_SUGGESTIONS)
    near = next((near for near in fitting if _carved(target, sets, near) is not None), None)
    raise UserError(
        f"student.layers = {list(layers)}: {sets.name} cannot keep these layers as they are ({reason}); "
        + (f"layers {list(near)} would do" if near else "use student.init: pretrained or config")
    )


def _carved(target: PreTrainedModel, sets: LayerSets, kept: Sequence[int]) -> PreTrainedModel | None:
    """Return a draft of the kept layers that computes on tokens what they compute in the target; None, and a reason in `sets`, if there is none."""
    config = sets.config_of(kept)
    if config is None:
        return None
    place = {f"{sets.prefix}.{layer}": f"{sets.prefix}.{position}" for position, layer in enumerate(kept)}
    state = {}
    for name, value in target.state_dict().items():
        layer = re.match(rf"{re.escape(sets.prefix)}\.\d+", name)
        if layer is None or layer[0] in place:
            state[name if layer is None else place[layer[0]] + name[layer.end() :]] = full_weight(value)
    for name, value in without_weights(config).state_dict().items():
        axis = layer_axis(state[name].shape, value.shape, sets.depth) if name in state else None
        if axis is not None and name in sets.outer:
            parts = state[name].unflatten(axis, (sets.depth, -1))
            state[name] = parts.index_select(axis, torch.tensor(kept, device=parts.device)).flatten(axis, axis + 1)
    packed = quantization_of(target.config) is not None
    draft = filled(
        config,
        {name: value.float() for name, value in state.items()},
        target,
        f"student.init: carved: the target's weights are packed ({quantization_name(target.config)}), so no layer can be copied; carve from "
        "the unquantised model and give it as student.path, or use student.init: config"
        if packed
        else f"student.init: carved: {sets.name} cannot be carved",
    )
    # The target runs its layers in their order, and in other arithmetic if it is packed.
    if packed or list(kept) != sorted(kept):
        return draft
    twin = copy.deepcopy(draft).to(target.device)  # type: ignore[arg-type]
    for name, weight in twin.named_parameters():
        weight.data = weight.data.to(state[name].dtype)
    sets.reason = "in the draft they would compute something else"
    try:
        with layers_only(target, kept):
            return draft if same_logits(target, twin) else None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        sets.reason = reason_of(error)
        return None


def filled(config: Any, state: dict[str, Tensor], source: PreTrainedModel, refusal: str) -> PreTrainedModel:
    """Return a float32 model of this config with these weights and the generation config of `source`.

    Raises UserError: the config needs other weights; the message is `refusal` and the first of them.
    """
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {(key, value.shape) for key, value in made.state_dict().items()}
    if other := sorted(key for key, _ in expected ^ {(key, value.shape) for key, value in state.items()}):
        raise UserError(f"{refusal} ({other[0]} does not fit)")
    made.load_state_dict(state)
    weights = made.state_dict().items()
    if lost := [key for key, value in weights if not torch.allclose(value, state[key].to(value), 0, 0, equal_nan=True)]:
        raise UserError(
            f"{refusal} ({lost[0]} is tied to another weight that differs; set tie_word_embeddings to false)"
        )
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.eval()
