"""The draft before training, as the config asks for it."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.carving import channel_scores, choose_layers, layers_only, trim_mlps
from distill.config import RunConfig
from distill.student import add_lora, carve, from_architecture, load_model, load_tokenizer
from distill.transplant import fit_embeddings, transplant_vocabulary
from distill.vocabulary import compare_vocabularies, repair_rows, require_agreement, vocabulary_rows
from speculative.errors import UserError
from speculative.sampling import SamplingSettings


def make_student(
    config: RunConfig,
    target: PreTrainedModel,
    tokenizer: Any,
    calibration: Sequence[Sequence[int]] | None = None,
    *,
    layers: Sequence[int] | None = None,
    notes: dict[str, Any] | None = None,
) -> Any:
    """The draft before training, float32, in the target's vocabulary; a peft model when LoRA is asked for.

    Args:
        config: the run's; its `student` section is followed.
        target: the target model; it is left as it was.
        tokenizer: the target's.
        calibration: token ids of texts as the target will see them; `layers: auto` and `intermediate_size` measure on them.
        layers: what `layers: auto` chose earlier, so that a resumed run or another rank has the same without measuring.
        notes: is given what was chosen and measured, as plain values for JSON.

    Raises:
        UserError: layers the target lacks, a vocabulary that cannot be made to agree, an impossible architecture or pair of
            keys. ValueError: something to measure and no calibration.

    """
    student_config, notes = config.student, {} if notes is None else notes
    refuse_impossible(config)
    if student_config.init == "carved":
        student = _carved(config, target, calibration, layers, notes)
    elif student_config.init == "config":
        rows = vocabulary_rows(target.config)
        student = from_architecture(student_config.architecture or {}, tokenizer, rows, config.seed)
        if student_config.embeddings == "target":
            notes["embeddings"] = fit_embeddings(student, target, config.seed)
    else:
        student = _pretrained(config, target, tokenizer, notes)
    if student_config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    if student_config.lora is not None:
        lora = student_config.lora
        return add_lora(student, lora.rank, lora.alpha, lora.dropout, lora.target_modules)
    return student


def refuse_impossible(config: RunConfig, target_config: Any = None, vocab_rows: int | None = None) -> None:
    """Raises UserError when a key of `student` does nothing with this `init`, or asks for more than the target has."""
    student = config.student
    for set_, key, init in (
        (student.layers == "auto", "layers: auto", "carved"),
        (student.intermediate_size is not None, f"intermediate_size: {student.intermediate_size}", "carved"),
        (student.embeddings == "target", "embeddings: target", "config"),
        (student.vocabulary == "transplant", "vocabulary: transplant", "pretrained"),
    ):
        if set_ and student.init != init:
            raise UserError(f"student.{key} goes with student.init: {init}, and this run has init: {student.init}")
    if target_config is not None:
        text = target_config.get_text_config()
        for key, asked, there, wanted in (
            ("depth", student.depth, getattr(text, "num_hidden_layers", None), student.layers == "auto"),
            ("intermediate_size", student.intermediate_size, getattr(text, "intermediate_size", None), True),
        ):
            if wanted and asked is not None and isinstance(there, int) and asked > there:
                raise UserError(f"student.{key} = {asked}: the target has {there}")
    if (
        vocab_rows is not None
        and config.signal.source != "online"
        and config.signal.kind == "topk"
        and config.signal.k > vocab_rows
    ):
        raise UserError(
            f"signal.k = {config.signal.k}: the target's vocabulary has {vocab_rows} tokens; give at most that"
        )


def _carved(
    config: RunConfig,
    target: PreTrainedModel,
    calibration: Sequence[Sequence[int]] | None,
    layers: Sequence[int] | None,
    notes: dict[str, Any],
) -> PreTrainedModel:
    student_config = config.student
    measures = (student_config.layers == "auto" and layers is None) or student_config.intermediate_size is not None
    if measures and calibration is None:
        raise ValueError("student.layers: auto and student.intermediate_size are measured on text: pass calibration")
    if student_config.layers != "auto":
        layers = student_config.layers
    elif layers is None:
        choice = choose_layers(target, student_config.depth, calibration or (), settings=_serving(config))
        notes["layers"] = choice.as_dict()
        layers = choice.layers
    student = carve(target, layers)
    if student_config.intermediate_size is None:
        return student
    # The kept layers as the draft runs them: what they are fed differs from what the whole target feeds them.
    with layers_only(target, layers):
        scores = channel_scores(target, calibration or ())
    trimmed = trim_mlps(student, student_config.intermediate_size, scores)
    sums = [(scores_F.sum(), scores_F.topk(student_config.intermediate_size).values.sum()) for scores_F in scores]
    notes["intermediate_size"] = {
        "channels": student_config.intermediate_size,
        "of": len(scores[0]),
        "activity_kept": [float(kept / total) for total, kept in sums],
    }
    return trimmed


def _serving(config: RunConfig) -> SamplingSettings:
    """The server's temperature; at 0 that of the model itself, where overlap says more than whether the argmax is the same."""
    return SamplingSettings(temperature=config.serving.temperature or 1.0)


def _pretrained(config: RunConfig, target: PreTrainedModel, tokenizer: Any, notes: dict[str, Any]) -> PreTrainedModel:
    path, revision, rows = str(config.student.path), config.student.revision, vocabulary_rows(target.config)
    student = load_model("student.path", path, dtype=torch.float32, revision=revision)
    own_tokenizer = load_tokenizer(path, revision=revision)
    own_rows = vocabulary_rows(student.config)
    if config.student.vocabulary == "transplant":
        if compare_vocabularies(tokenizer, rows, own_tokenizer, own_rows).verdict == "refuse":
            notes["vocabulary"] = transplant_vocabulary(student, own_tokenizer, tokenizer, rows).as_dict()
            return student
        notes["vocabulary"] = {"exact_share": 1.0}  # nothing to transplant: they agree already
    agreement = require_agreement(tokenizer, rows, own_tokenizer, own_rows)
    if agreement.verdict == "repair":
        repair_rows(student, rows, agreement.token_rows)
    return student
