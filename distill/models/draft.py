"""A draft from wherever it lies, checked against the target's vocabulary and rounded as it would be served."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.config.layout import find_student
from distill.models.load import load_model, load_tokenizer, refusing
from distill.models.quantized import as_served
from distill.models.target import Target
from distill.models.vocabulary import (
    VocabularyAgreement,
    compare_vocabularies,
    repair_rows,
    require_agreement,
    vocabulary_rows,
)
from speculative.errors import UserError
from speculative.measure.record import Record

ADAPTER_FILE = "adapter_config.json"


def base_of_adapter(student_dir: Path) -> str | None:
    """The base model that an adapter directory names; None when `student_dir` is no adapter.

    Raises:
        UserError: when the adapter names no base.

    """
    adapter_file = student_dir / ADAPTER_FILE
    if not adapter_file.is_file():
        return None
    base = Record.read(adapter_file, "save the adapter again").record().get("base_model_name_or_path")
    if not (isinstance(base, str) and base):
        raise UserError(f"{adapter_file}: base_model_name_or_path is empty; write the base's directory or hub id there")
    # A run that was moved keeps its base at the same place relative to the adapter; a folder of that name where we work is another.
    beside = os.path.join(student_dir, base)
    return beside if os.path.isdir(beside) else base


def load_draft(path: str, target: Target) -> PreTrainedModel:
    """A draft from a run, checkpoint, directory (also a peft one beside its base) or hub id, its vocabulary checked against the target's.

    Raises:
        UserError: not there, or another vocabulary.
    """
    draft, agreement = read_draft(path, target)
    require_agreement(agreement)
    return draft


def read_draft(path: str, target: Target) -> tuple[PreTrainedModel, VocabularyAgreement]:
    """(draft from anywhere, how its vocabulary agrees with the target's); rows are mended where that is all it takes.

    Raises:
        UserError: not there.
    """
    name, rows = find_student(path), target.facts.vocab_rows
    base = base_of_adapter(Path(name))
    draft = as_served(load_model("draft", name), target.device) if base is None else _adapted(name, base)
    own = load_tokenizer(base or name)
    agreement = compare_vocabularies(target.tokenizer, rows, own, vocabulary_rows(draft.config))
    if agreement.verdict != "refuse":
        repair_rows(draft, rows, agreement.token_rows)
    return draft, agreement


def _adapted(name: str, base: str) -> PreTrainedModel:
    from peft import PeftModel  # costs a second to import and is needed for adapters only

    with refusing(f"draft {name!r}: the adapter does not fit its base {base}"):
        return PeftModel.from_pretrained(load_model("base of the adapter", base), name).merge_and_unload()


def as_exported(model: PreTrainedModel, target: Target) -> PreTrainedModel:
    """A copy whose weights are rounded to the dtype they will be exported in, computing in the target's dtype.

    So the numbers belong to the draft that is exported, not to the float32 weights that train.
    """
    return cast_copy(model, (target.saved_dtype, target.dtype), target.device)


def cast_copy(model: PreTrainedModel, dtypes: Sequence[torch.dtype], device: torch.device) -> PreTrainedModel:
    """A copy for inference on a device, its weights rounded through the dtypes, the last of which it keeps."""
    rounded = copy.deepcopy(model)
    for dtype in dtypes:
        # Weights only: rounding the rotary frequencies, which are computed and not saved, would be another model.
        cast_weights(rounded, dtype)
    rounded.to(device)  # type: ignore[arg-type]
    return rounded.requires_grad_(False).eval()


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters in place.

    Buffers keep their dtype, as in `from_pretrained(dtype=...)`: `model.to(dtype)` would round the rotary frequencies
    too and the model in memory would no longer be the one that loads.

    Raises:
        UserError: when a weight overflows in `dtype`.

    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        parameter.data = parameter.data.to(dtype)
        if not torch.isfinite(parameter.data).all():
            raise UserError(f"weight {name} is not finite in {str(dtype).removeprefix('torch.')}; choose bfloat16")
    model.config.dtype = dtype
