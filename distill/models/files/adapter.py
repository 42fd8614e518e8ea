"""Merge a peft adapter into its base."""

import warnings
from typing import Any

from transformers import PreTrainedModel

from distill.models.vocabulary import untie_for_adapters


def with_adapter(model: Any, source: str, revision: str | None) -> PreTrainedModel:
    """Return the base with the adapter in `source` (directory or hub id) merged into it, all of its weights trainable.

    Raises ValueError or RuntimeError: it cannot be merged, or its weights are not those of this base.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights  # late: it takes a second and only adapters need it

    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    rows = load_peft_weights(source, device="cpu", revision=revision).get(f"base_model.model.{name}.weight")
    if rows is not None and len(rows) != len(table.weight):
        model.resize_token_embeddings(len(rows), mean_resizing=False)  # the adapter brings the whole table
    modules = getattr(PeftConfig.from_pretrained(source, revision=revision), "target_modules", None) or []
    untie_for_adapters(model, modules if isinstance(modules, str) else list(modules))
    with warnings.catch_warnings():
        # About how peft calls transformers, and missing weights, which are an error below.
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, source, revision=revision)
        result = adapted.load_adapter(source, adapted.active_adapter, revision=revision)
    if not hasattr(adapted, "merge_and_unload"):
        raise ValueError("an adapter of this type cannot be merged; train with LoRA")
    # Beside the adapter's own weights peft saves tables of the base, some of them twice.
    own = [weight for weight in result.unexpected_keys if adapted.base_model.prefix in weight]
    if other := [*result.missing_keys, *own]:
        raise ValueError(f"weight {other[0]} (of {len(other)}) is only in one of the two")
    merged = adapted.merge_and_unload()
    for weight in merged.parameters():
        weight.requires_grad_(weight.is_floating_point())  # peft froze them
    return merged.eval()
