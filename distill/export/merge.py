"""Load a trained student as one model: a checkpoint or a merged adapter, with the target's vocabulary rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.models.load import ADAPTER_FILE, base_of_adapter, load_model, load_tokenizer
from distill.models.vocabulary import (
    VocabularyAgreement,
    compare_vocabularies,
    give_own_head,
    refuse_tied,
    repair_rows,
    require_agreement,
    untie_for_adapters,
)
from speculative.errors import UserError
from speculative.measure.record import Record

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
MERGE_TOLERANCE = 1e-3  # relative to the largest logit: in float32, merging only changes the order of sums


@dataclass(frozen=True)
class MergedStudent:
    """A causal LM in float32 with the target's row count, ready to cast and write."""

    model: Any
    agreement: VocabularyAgreement
    notes: list[str]


def load_merged_student(
    student_dir: Path, target_tokenizer: Any, target_rows: int, trust_remote_code: bool = False
) -> MergedStudent:
    """Load a checkpoint or an adapter directory, check its vocabulary, repair its rows, merge the adapter.

    Raises UserError: the directory is missing or incomplete, the vocabulary differs, or the adapter does not merge.
    """
    if not student_dir.is_dir():
        raise UserError(f"student {student_dir}: no such directory; give a checkpoint directory of a run")
    base = base_of_adapter(student_dir)
    what, model_dir = ("student", str(student_dir)) if base is None else (base.what, base.path)
    model: Any = load_model(what, model_dir, trust_remote_code=trust_remote_code)
    places = [student_dir] + ([Path(base.path)] if base else [])
    tokenizer_dir = next((place for place in places if any((place / name).is_file() for name in TOKENIZER_FILES)), None)
    notes: list[str] = []
    if tokenizer_dir is None:
        notes.append("the student has no tokenizer of its own, so its token ids are assumed to be the target's")
        student_tokenizer = target_tokenizer
    else:
        student_tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    agreement = require_agreement(compare_vocabularies(target_tokenizer, target_rows, student_tokenizer, rows))
    # Rows come first: an adapter trained on repaired rows fits only repaired rows.
    repair_rows(model, target_rows, agreement.token_rows)
    if base is not None:
        adapter = Record.read(student_dir / ADAPTER_FILE, "save the adapter again").record()
        modules = adapter.get("target_modules") or []
        if untie_for_adapters(model, [modules] if isinstance(modules, str) else list(modules)):
            notes.append(
                "the adapter changes a tied embedding, so head and embedding are both exported: a larger draft"
            )
        model = _merged(model, student_dir, agreement.token_rows)
    return MergedStudent(model.eval(), agreement, notes)


def _merged(model: Any, adapter_dir: Path, token_rows: int) -> Any:
    """Return the model with the adapter merged."""
    from peft import PeftModel  # imported late: it takes a second and only adapters need it

    ids_BT = torch.arange(min(16, token_rows))[None]
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter_dir)).eval()
    except (OSError, ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"adapter {adapter_dir} does not fit its base: {why}") from error
    if not hasattr(adapted, "merge_and_unload"):
        raise UserError(f"adapter {adapter_dir}: an adapter of this type cannot be merged; train with LoRA")
    with torch.no_grad():
        before = adapted(input_ids=ids_BT).logits
        merged = adapted.merge_and_unload()
        after = merged(input_ids=ids_BT).logits
    merge_error = float((after - before).abs().max())
    if not merge_error <= MERGE_TOLERANCE * float(before.abs().max()):
        raise UserError(
            f"adapter {adapter_dir}: merging changes a logit by {merge_error:.3g}; leave tied embeddings and the head "
            "out of target_modules"
        )
    if (
        merged.config.tie_word_embeddings
        and merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight
    ):
        refuse_tied(
            merged.config.get_text_config(), ["lm_head"]
        )  # the adapter brought a head of its own (modules_to_save)
        give_own_head(merged)
    return merged
