"""Extract the text model of a multimodal checkpoint as a causal LM, since only text is used here."""

import contextlib
import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MULTIMODAL
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, initialization

from distill.models.library_state import spread_alike
from distill.models.quantized import quantization_of
from speculative.engine.library_state import attention_name

# Text models without a causal LM class of their own. Their rotary positions have three axes, which are equal in text, so they
# equal the plain model given here.
PLAIN_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
PROBE_TOKENS = 16


def auto_class(config: Any) -> Any:
    """Return the class that loads this config: a causal LM if transformers has one, else the multimodal model."""
    wanted = type(config) not in CAUSAL and type(config) in MULTIMODAL
    return AutoModelForImageTextToText if wanted else AutoModelForCausalLM


def without_weights(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the model of a config on the meta device: neither memory nor random numbers."""
    # A model's own code may ask for values while it is made, as `from_pretrained` lets it.
    safe = getattr(initialization, "meta_device_safe_creation_ops", contextlib.nullcontext)
    with torch.device("meta"), safe():
        return auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def text_only(model: PreTrainedModel) -> Any:
    """The model's text model and head as a causal LM, sharing its weights; the model itself if it is one or has none."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        return model
    config, head = _causal_config(text_config), model.get_output_embeddings()
    if type(config) not in CAUSAL or head is None:
        return model
    config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    config.dtype = model.dtype
    if quantization_of(model.config) is not None:
        config.quantization_config = quantization_of(model.config)
    with init_empty_weights(include_buffers=False):
        text: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name(text_config))
    decoder = model.get_decoder()
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(head)
    spread_alike(text, model)  # logits return to the device of the ids
    text.generation_config = copy.deepcopy(model.generation_config)
    if not same_logits(model.eval(), text.eval()):
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
def same_logits(model: PreTrainedModel, other: PreTrainedModel, tolerance: float = 1e-2) -> bool:
    """Whether two models in eval mode give equal logits for token ids spread over the vocabulary, in the precision of each."""
    table: Any = model.get_input_embeddings()
    ids_BT = torch.linspace(0, len(table.weight) - 1, PROBE_TOKENS).long().unsqueeze(0)
    first, second = (
        one(input_ids=ids_BT.to(one.device), use_cache=False).logits.float().cpu() for one in (model, other)
    )
    return first.shape == second.shape and torch.allclose(first, second, tolerance, tolerance, equal_nan=True)
