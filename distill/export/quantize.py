"""8-bit weights for the draft, in the compressed-tensors format."""

from typing import Any

from transformers import PreTrainedModel

from distill.config.sections import Quantization
from distill.models.draft import as_exported, cast_weights
from distill.models.quantized import as_served, require_quantizer
from distill.models.target import Target
from distill.models.vocabulary import UNTIED_IN_ENGINES, give_own_head
from speculative.errors import UserError

# (number type, whether activations are quantised too, with one dynamic scale per token). Weights have one scale per row.
SCHEMES: dict[Quantization, tuple[str, bool]] = {
    "int8": ("int", False),
    "int8-dynamic": ("int", True),
    "fp8": ("float", True),
}
HEAD = "re:.*lm_head$"  # listed by name, since an engine's head class may be no linear layer


def quantize_draft(model: Any, how: Quantization) -> Any:
    """Quantise the linear layers and the head in place, and return compressed-tensors' config writer.

    A tied head gets its own weights, because every step reads the whole head but only one embedding row per token. The embedding is
    unchanged. The head stays tied for architectures that engines always load as tied.

    ``model``: in the dtype that it is exported in.

    Raises UserError: an unknown name, or compressed-tensors is not installed.
    """
    if how not in SCHEMES:
        raise UserError(f"--quantize {how}: choose {', '.join(SCHEMES)} or none")
    require_quantizer(how)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    config = model.config.get_text_config()
    if config.tie_word_embeddings and config.model_type in UNTIED_IN_ENGINES:
        give_own_head(model)
    kind, rounded = SCHEMES[how]
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, activations = numbers | {"strategy": "channel"}, numbers | {"strategy": "token", "dynamic": True}
    head, ignore = ([], [HEAD]) if config.tie_word_embeddings else ([HEAD], [])
    scheme = {"targets": [*head, "Linear"], "weights": weights, "input_activations": activations if rounded else None}
    planned = QuantizationConfig.model_validate({"config_groups": {"group_0": scheme}, "ignore": ignore})
    apply_quantization_config(model, planned, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            largest_N1 = module.weight.detach().float().abs().amax(1, keepdim=True)
            scale_N1, _ = calculate_qparams(-largest_N1, largest_N1, module.quantization_scheme.weights)
            # Every reader represents bfloat16 values exactly.
            module.weight_scale.data = scale_N1.bfloat16().to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def lighter_draft(draft: PreTrainedModel, how: Quantization, target: Target) -> PreTrainedModel:
    """Quantise the draft in place, so that it computes like a loaded 8-bit export next to the target."""
    cast_weights(draft, target.saved_dtype)
    quantize_draft(draft, how)
    return as_exported(as_served(draft, target.device), target)
