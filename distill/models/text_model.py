"""Extract the text model of a multimodal checkpoint as a causal LM, since only text is used here."""

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import add_hook_to_module
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from distill.models.quantized import quantization_of

# Text models without a causal LM class of their own. Their rotary positions have three axes, which are equal in text, so they
# equal the plain model given here.
PLAIN_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
PROBE_TOKENS = 8


def auto_class(config: Any) -> Any:
    """Return the class that loads this config: a causal LM if transformers has one, else the multimodal model."""
    multimodal = AutoModelForImageTextToText._model_mapping
    wanted = not _has_causal_lm(config) and type(config) in multimodal
    return AutoModelForImageTextToText if wanted else AutoModelForCausalLM


def _has_causal_lm(config: Any) -> bool:
    return type(config) in AutoModelForCausalLM._model_mapping


def text_only(model: PreTrainedModel) -> Any:
    """The model's text model and head as a causal LM, sharing its weights; the model itself if it is one or has none."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        return model
    config, head = _causal_config(text_config), model.get_output_embeddings()
    if not _has_causal_lm(config) or head is None:
        return model
    config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    config.dtype = model.dtype
    config._attn_implementation = text_config._attn_implementation
    if quantization_of(model.config) is not None:
        config.quantization_config = quantization_of(model.config)
    with init_empty_weights(include_buffers=False):
        text: Any = AutoModelForCausalLM.from_config(config)
    decoder = model.get_decoder()
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(head)
    if hasattr(model, "_hf_hook"):  # spread over devices: return logits to the device of the ids
        add_hook_to_module(text, model._hf_hook)
        text.hf_device_map = model.hf_device_map
    text.generation_config = copy.deepcopy(model.generation_config)
    if not _same_logits(model.eval(), text.eval()):
        return model
    decoder.config = config  # one config for everything that reads its layers
    return text


def _causal_config(text_config: Any) -> Any:
    plain = PLAIN_TYPES.get(text_config.model_type)
    if plain is None:
        return text_config
    fields = text_config.to_dict()
    del fields["model_type"]
    rope = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    return AutoConfig.for_model(plain, **fields)


@torch.no_grad()
def _same_logits(model: PreTrainedModel, text: PreTrainedModel) -> bool:
    """Whether both give equal logits for text: some families do more before the layers or after the head."""
    ids_BT = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    whole, own = (part(input_ids=ids_BT, use_cache=False).logits.float() for part in (model, text))
    return whole.shape == own.shape and torch.allclose(whole, own, rtol=1e-2, atol=1e-2)
