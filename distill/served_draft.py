"""A draft from wherever it lies, as it fits the target's vocabulary."""

from typing import Any

from transformers import PreTrainedModel

from distill.served_target import ServedTarget
from distill.student import find_student, load_model, load_tokenizer
from distill.vocabulary import repair_rows, require_agreement, vocabulary_rows


def load_draft(path: str, target: PreTrainedModel | ServedTarget, tokenizer: Any) -> PreTrainedModel:
    """A draft from a run, checkpoint, directory or hub id, its vocabulary checked against the target's.

    Raises:
        UserError: not there, or another vocabulary.
    """
    name = find_student(path)
    draft = load_model("draft", name)
    rows = target.facts.vocab_rows if isinstance(target, ServedTarget) else vocabulary_rows(target.config)
    agreement = require_agreement(tokenizer, rows, load_tokenizer(name), vocabulary_rows(draft.config))
    if agreement.verdict == "repair":
        repair_rows(draft, rows, agreement.token_rows)
    return draft
