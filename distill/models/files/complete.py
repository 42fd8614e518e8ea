"""Whether every weight of a model's files is used, and every weight of the model is in them."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from distill.models.quantized import quantization_name, quantization_of
from speculative.errors import UserError

# Draft heads: they read hidden states of the target. Names of their classes, and of weights that only they have.
HEAD_CLASSES = re.compile(
    r"eagle(?!.*(Conditional|Chat))|medusa|hydra|speculator|dflash|dspark|nextn|mtp", re.IGNORECASE
)
HEAD_WEIGHTS = re.compile(r"(model\.)?(fc|d2t|t2d|midlayer|eagle_module|medusa_head)\b")
# Weights that change no logit of a text: buffers that are computed, drafting layers, value heads, other inputs, scales of a cache.
UNUSED = re.compile(
    r"inv_freq$|(cos|sin)_cached$|position_ids$|embed_positions\.weights$|_extra_state$|(^|\.)(pooler|v_head)\.|"
    r"\.(attn|attention|self_attn|self_attention)\.(bias|masked_bias|causal_mask)$|(^|\.)mtp[^.]*\.|"
    r"\.(q|k|v|kv|prob)_scale$|\.[kv]_proj\.output_scale$|(^|\.)(vision|visual|audio|image|multi_modal|mm_)[^.]*\."
)
SCALES = re.compile(r"scales?(_\w+)?$|scale_2$|qweight$|qzeros$|absmax$|_packed$|SCB$")


class Reports(logging.Filter):
    """Keeps the tables that transformers logs of weights that do not fit from the screen; `load_model` says it in one line."""

    # If transformers logs nothing.
    UNSEEN = "its weights cannot be made of those in the files; set TRANSFORMERS_VERBOSITY=warning to see which"
    reason = UNSEEN

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            weight, why = (
                re.search(r"^(\S+) +\|.*CONVERSION", text, re.MULTILINE),
                re.search(r"^\w*Error: .*", text, re.MULTILINE),
            )
            self.reason = f"weight {weight and weight[1]} cannot be made of those in the files ({why and why[0]})"
        return "LOAD REPORT" not in text and not text.startswith(
            ("Unknown quantization type", "The tied weights mapping")
        )


REPORTS = Reports()
for _name in ("transformers.modeling_utils", "transformers.quantizers.auto"):
    logging.getLogger(_name).addFilter(REPORTS)


def refuse_incomplete(what: str, path: str, name: str, config: Any, loading: Mapping[str, Any]) -> None:
    """Raise UserError if a weight of the files is not used, or one of the model is not in them; transformers only logs this."""
    unused = sorted(weight for weight in loading["unexpected_keys"] if not _is_harmless(weight, config))
    problems = {
        weight: f"has shape {list(has)} in the files, {list(wants)} by config.json"
        for weight, has, wants in loading["mismatched_keys"]
    }
    problems |= dict.fromkeys(loading["missing_keys"], "is missing in the files")
    problems |= dict.fromkeys(unused, f"is in the files, and transformers' {name} does not use it")
    if not problems:
        return
    if head := next(filter(HEAD_WEIGHTS.match, unused), None):
        raise head_error(what, path, f"weight {head}")
    first = min(problems, key=lambda weight: (not SCALES.search(weight), weight))
    fix = "give a complete model, whose config.json describes its weights"
    if SCALES.search(first) or quantization_of(config) is not None:
        method = quantization_name(config) if quantization_of(config) is not None else "config.json does not say how"
        fix = (
            f"its weights are quantised in a way that transformers does not read here ({method}); give the model before quantisation, "
            "or leave the weights on a server (target.endpoint.weights: server)"
        )
    raise UserError(f"{what} {path!r}: weight {first} {problems[first]} (of {len(problems)} that do not fit); {fix}")


def _is_harmless(name: str, config: Any) -> bool:
    """Whether a weight of the files that the model does not use leaves its logits for text unchanged."""
    text = config.get_text_config(decoder=True)
    layer = re.search(r"\.layers\.(\d+)\.", name)
    # Layers behind the last one that predict further tokens, as of DeepSeek-V3 and GLM-4.
    drafting = any(value for key, value in text.to_dict().items() if "nextn" in key or "mtp" in key)
    if layer and drafting and int(layer[1]) >= text.num_hidden_layers:
        return True
    # AutoGPTQ writes a bias of zeros for layers that have none.
    return bool(UNUSED.search(name)) or (name.endswith(".bias") and quantization_name(config) == "gptq")


def head_error(what: str, path: str, sign: str) -> UserError:
    """Return the error for a draft head that was given as a model. sign: what shows that it is one."""
    return UserError(
        f"{what} {path!r}: is a draft head, which reads hidden states of its target ({sign}), not a language model; give a whole model, or "
        "let an engine draft with the head and measure it with `understudy readback --target`"
    )
