"""Load a draft from any source, check it against the target's vocabulary, and round its weights as for serving."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.config.layout import find_student
from distill.models.files.gguf import GGUF, read_gguf, tokens_of
from distill.models.load import gguf_path, load_model, load_tokenizer
from distill.models.quantized import as_served
from distill.models.target import Target
from distill.models.vocabulary import (
    TokenDifference,
    VocabularyAgreement,
    compare_vocabularies,
    first_string_difference,
    repair_rows,
    require_agreement,
    tokens_by_id,
    vocabulary_rows,
)
from speculative.errors import UserError


def load_draft(path: str, target: Target) -> PreTrainedModel:
    """Load a draft from a run, checkpoint, model or peft directory, or hub id; UserError if not found or of another vocabulary."""
    draft, agreement = read_draft(path, target)
    require_agreement(agreement)
    return draft


def read_draft(path: str, target: Target) -> tuple[PreTrainedModel, VocabularyAgreement]:
    """(draft, agreement of its vocabulary with the target's); padded rows are repaired if no token differs. UserError: not found."""
    name, rows = find_student(path), target.facts.vocab_rows
    draft = as_served(load_model("draft", name), target.device)
    own, other = (target.tokenizer, _other_token(name, target)) if name.endswith(GGUF) else (load_tokenizer(name), None)
    agreement = compare_vocabularies(target.tokenizer, rows, own, vocabulary_rows(draft.config), other)
    if agreement.verdict != "refuse":
        repair_rows(draft, rows, agreement.token_rows)
    return draft, agreement


def _other_token(name: str, target: Target) -> TokenDifference | None:
    """The first of the target's tokens that a GGUF file does not have; transformers may add tokens to those of a file."""
    path = gguf_path("draft", name)
    known, strings = tokens_of(path, read_gguf(path)[0]), tokens_by_id(target.tokenizer)
    if target.config.path.endswith(GGUF):
        strings = {one: string for one, string in strings.items() if one in known}
    return first_string_difference(strings, {one: known[one] for one in strings if one in known})


def served_draft(path: str, target: Target) -> PreTrainedModel:
    """Load a draft as it is served with this target: of a GGUF file its weights, else as exported. UserError: see `load_draft`."""
    return as_served_from(path, load_draft(path, target), target)


def as_served_from(path: str, draft: PreTrainedModel, target: Target) -> PreTrainedModel:
    """Return a copy of the draft read from ``path`` as it is served; see `served_draft`."""
    if path.endswith(GGUF):
        return cast_copy(draft, [target.dtype], target.device)
    return as_exported(draft, target)


def as_exported(model: PreTrainedModel, target: Target) -> PreTrainedModel:
    """Return a copy with weights rounded to the export dtype, which computes in the target's dtype.

    Measurements then hold for the exported draft, not for the float32 weights in training.
    """
    return cast_copy(model, (target.saved_dtype, target.dtype), target.device)


def cast_copy(model: PreTrainedModel, dtypes: Sequence[torch.dtype], device: torch.device) -> PreTrainedModel:
    """Return a copy for inference on a device, with weights rounded to each dtype in turn; it keeps the last."""
    rounded = copy.deepcopy(model)
    for dtype in dtypes:
        cast_weights(rounded, dtype)
    rounded.to(device)  # type: ignore[arg-type]
    return rounded.requires_grad_(False).eval()


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters in place, not buffers, as `from_pretrained(dtype=...)`: `model.to(dtype)` would round the rotary frequencies too.

    Raises UserError: a weight overflows in `dtype`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        wide, parameter.data = parameter.data, parameter.data.to(dtype)
        if ((parameter.data != wide) & ~parameter.data.isfinite()).any():
            name_of = str(dtype).removeprefix("torch.")
            raise UserError(
                f"weight {name} is not a number; the draft is damaged, so train it again with a lower optim.lr"
                if wide.isnan().any()
                else f"weight {name} has values up to {wide[wide.isfinite()].abs().max():.3g}, too large for {name_of}; choose bfloat16"
            )
    model.config.dtype = dtype
