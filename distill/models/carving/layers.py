"""Carve a draft from the target: the layers that it keeps, their weights, and a config that describes them."""

import copy
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
from speculative.engine.library_state import attention_name
from speculative.errors import UserError

# Names of a module's attributes that hold a layer's number, and of config fields that may hold layers.
INDEX = re.compile(r"(^|_)(layer|block)_?(idx|id|index|number)$")
NUMBERS = re.compile(r"layer|dense|shared")
PLAIN = (bool, int, float, str, tuple, type(None))
_OUTPUTS: dict[type, int] = {}  # class of a layer -> entries of the tuple that its forward returns; 0: a tensor


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return (name in the model, module list) of the layers: the first list as long as the config's depth; UserError without one."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(f"{type(model).__name__}: no list of {depth} layers to carve or shard; use student.init: config")


def field_value(name: str, value: Any, depth: int, chosen: Sequence[int]) -> Any:
    """Return what a config field of a model of `depth` layers is for the kept ones.

    Such a field has an entry per layer, layer numbers in a list or as keys, or a number of first or last layers. Others are unchanged.
    """
    place = {layer: position for position, layer in enumerate(chosen)}
    named = bool(NUMBERS.search(name))
    if type(value) is int and named and re.search("first|num_dense", name):
        return sum(layer < value for layer in chosen)
    if type(value) is int and named and "shared_layers" in name:
        return sum(layer >= depth - value for layer in chosen)
    if isinstance(value, dict) and named and value and all(str(key).isdigit() for key in value):
        return {place[int(key)]: entry for key, entry in value.items() if int(key) in place}
    if not isinstance(value, list | tuple) or name.endswith(("_id", "_ids")) or name == "architectures":
        return value
    numbers = named and all(type(entry) is int and 0 <= entry < depth for entry in value)
    if numbers and list(value) == sorted(set(value)):
        return [place[entry] for entry in value if entry in place]
    return [value[layer] for layer in chosen] if len(value) == depth else value


def layer_parts(layer: nn.Module, place: dict[int, int]) -> dict[str, Any]:
    """Return classes, plain attributes and shapes of weights of a layer, by name; a layer number as its `place`, or -1."""
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


class Layers:
    """The layers of a target. Models without weights show what each of them would become in a draft."""

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

    def _outer(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        weights = model.state_dict().items()
        return {name: tuple(value.shape) for name, value in weights if not name.startswith(f"{self.prefix}.")}

    def places(self, layers: Sequence[int]) -> list[int]:
        """Numbers of these layers from the first; UserError: one that the target does not have, or the same twice."""
        chosen = [layer + self.depth if layer < 0 else layer for layer in layers]
        if not chosen or any(not 0 <= layer < self.depth for layer in chosen):
            raise UserError(
                f"student.layers = {list(layers)}: the target has layers 0 to {self.depth - 1} (or -{self.depth} to -1)"
            )
        if len(set(chosen)) != len(chosen):
            raise UserError(f"student.layers = {list(layers)}: a layer of the target appears twice; list each once")
        return chosen

    def config_of(self, chosen: Sequence[int]) -> tuple[PretrainedConfig | None, str]:
        """(a config under which each kept layer is what it is in the target, ""); (None, why) if there is none."""
        kinds = getattr(self.config, "layer_types", None) or []
        attention = {at for at, kind in enumerate(kinds) if "attention" in kind and kind != "linear_attention"}
        if attention and attention.isdisjoint(chosen):
            return None, "a draft needs an attention layer to decode"
        fields = {name: field_value(name, value, self.depth, chosen) for name, value in self.config.to_dict().items()}
        fields[self.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)
        logging.disable(logging.WARNING)
        try:
            config = type(self.config).from_dict(fields, attn_implementation=attention_name(self.config))
            model = without_weights(config)
            layers, outer = list(model.get_submodule(self.prefix)), self._outer(model)  # type: ignore[call-overload]
        except Exception as error:  # whatever a family's own code raises for a config that it cannot take
            return None, reason_of(error)
        finally:
            logging.disable(logging.NOTSET)
        if len(layers) != len(chosen):
            return None, f"the draft would have {len(layers)} layers"
        place, drafts = {layer: position for position, layer in enumerate(chosen)}, dict(enumerate(range(len(chosen))))
        for layer, draft in zip(chosen, layers, strict=True):
            was, now = layer_parts(self.layers[layer], place), layer_parts(draft, drafts)
            for name in was.keys() | now.keys():
                if was.get(name, "") != now.get(name, ""):
                    return None, f"{name} of layer {layer} would be {now.get(name)}, not {was.get(name)}"
        for name in self.outer.keys() | outer.keys():
            shapes = self.outer.get(name, ()), outer.get(name, ())
            if len(shapes[0]) != len(shapes[1]) or (shapes[0] != shapes[1] and layer_axis(*shapes, self.depth) is None):
                return None, f"{name} would not fit"
        return config, ""


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

    Raises UserError: a layer that the target does not have, the same layer twice, layers that no config describes; see also `Layers`.
    """
    source = Layers(target)
    chosen = source.places(layers)
    config, reason = source.config_of(chosen)
    if config is not None:
        state, packed = _weights(target, source, config, chosen), quantization_of(target.config) is not None
        refusal = f"student.init: carved: {source.name} cannot be carved"
        if packed:
            refusal = (
                f"student.init: carved: the target's weights are packed ({quantization_name(target.config)}), so no layer can be copied; "
                "carve from the unquantised model and give it as student.path, or use student.init: config"
            )
        draft = filled(config, {name: value.float() for name, value in state.items()}, target, refusal)
        # The target runs its layers in their order, and in other arithmetic if it is packed.
        if packed or chosen != sorted(chosen):
            return draft
        twin = copy.deepcopy(draft).to(target.device)  # type: ignore[arg-type]
        for name, weight in twin.named_parameters():
            weight.data = weight.data.to(state[name].dtype)
        reason = _difference(target, twin, chosen)
        if not reason:
            return draft
    raise not_kept(layers, source, reason)


def not_kept(layers: Sequence[int], source: Layers, reason: str) -> UserError:
    """The error of layers that no draft can keep."""
    return UserError(
        f"student.layers = {list(layers)}: {source.name} cannot keep these layers as they are ({reason}); try other layers, "
        "or student.init: pretrained or config"
    )


def _weights(
    target: PreTrainedModel, source: Layers, config: PretrainedConfig, chosen: Sequence[int]
) -> dict[str, Tensor]:
    """The target's weights by their names in the draft."""
    place = {f"{source.prefix}.{layer}": f"{source.prefix}.{position}" for position, layer in enumerate(chosen)}
    state = {}
    for name, value in target.state_dict().items():
        layer = re.match(rf"{re.escape(source.prefix)}\.\d+", name)
        if layer is None or layer[0] in place:
            state[name if layer is None else place[layer[0]] + name[layer.end() :]] = full_weight(value)
    for name, value in without_weights(config).state_dict().items():
        axis = layer_axis(state[name].shape, value.shape, source.depth) if name in state else None
        if axis is not None and name in source.outer:
            parts = state[name].unflatten(axis, (source.depth, -1))
            state[name] = parts.index_select(axis, torch.tensor(chosen, device=parts.device)).flatten(axis, axis + 1)
    return state


def _difference(target: PreTrainedModel, draft: PreTrainedModel, kept: Sequence[int]) -> str:
    """Why a draft in the target's dtype does not compute on tokens what its layers compute there; empty if it does."""
    try:
        with layers_only(target, kept):
            return "" if same_logits(target, draft) else "in the draft they would compute something else"
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        return reason_of(error)


def filled(config: Any, state: dict[str, Tensor], source: PreTrainedModel, refusal: str) -> PreTrainedModel:
    """Return a float32 model of this config with these weights and the generation config of `source`.

    Raises UserError: the config needs other weights; the message is `refusal` and the first of them.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {(key, value.shape) for key, value in model.state_dict().items()}
    if other := sorted(key for key, _ in expected ^ {(key, value.shape) for key, value in state.items()}):
        raise UserError(f"{refusal} ({other[0]} does not fit)")
    model.load_state_dict(state)
    weights = model.state_dict().items()
    if lost := [key for key, value in weights if not torch.allclose(value, state[key].to(value), 0, 0, equal_nan=True)]:
        raise UserError(
            f"{refusal} ({lost[0]} is tied to another weight that differs; set tie_word_embeddings to false)"
        )
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()
