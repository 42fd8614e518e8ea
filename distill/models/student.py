"""Make the draft before training, from the config: pretrained, carved from the target, or random."""

import copy
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.config.sections import LoraConfig, StudentConfig
from distill.models.carving.channels import WIDTH_FIELDS, channel_scores, trim_mlps
from distill.models.carving.layers import Layers, carve, filled, not_kept
from distill.models.files.gguf import GGUF
from distill.models.load import load_model, load_tokenizer, read_config, refusing
from distill.models.mask_token import give_mask_token
from distill.models.quantized import full_weight, quantization_name, quantization_of, without_quantization
from distill.models.text_model import same_logits, without_weights
from distill.models.transplant import fit_embeddings, transplant_vocabulary
from distill.models.vocabulary import (
    compare_vocabularies,
    refuse_rowless,
    refuse_tied,
    repair_rows,
    require_agreement,
    role_ids,
    untie_for_adapters,
    vocabulary_rows,
)
from speculative.engine.models import MASK_TOKEN_KEYS, evaluating, mask_token_of, max_positions
from speculative.errors import UserError

# Tokens of a sequence if neither a model nor the config sets a limit.
NO_LIMIT = 1 << 20


def make_student(
    config: StudentConfig,
    target: PreTrainedModel,
    tokenizer: Any,
    calibration: Sequence[Sequence[int]] = (),
    *,
    seed: int = 0,
    notes: dict[str, Any] | None = None,
    texts: Iterable[Sequence[int]] = (),
) -> Any:
    """Make the draft before training, without adapters: float32, with the target's vocabulary.

    Args:
        tokenizer: the target's.
        calibration: token ids of texts as the target will see them, on which `intermediate_size` measures.
        seed: of random weights.
        notes: receives what was chosen and measured, as plain values for JSON.
        texts: token ids that the draft will read, each of which needs a row; may be iterated more than once.

    Raises UserError: layers that the target lacks, a vocabulary that cannot agree, or an impossible architecture or pair of keys. Raises
    ValueError: a measurement is needed and there is no calibration.
    """
    notes = {} if notes is None else notes
    refuse_impossible(config)
    if config.init == "carved":
        student = _carved(config, target, calibration, notes)
    elif config.init == "config":
        rows = vocabulary_rows(target.config)
        student = from_architecture(config.architecture or {}, tokenizer, rows, seed)
        if config.embeddings == "target":
            notes["embeddings"] = fit_embeddings(student, target, seed)
    else:
        student = _pretrained(config, target, tokenizer, notes, texts)
    if config.parallel is not None:
        notes["parallel"] = give_mask_token(student, tokenizer, texts)
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    return student


def check_saved(folder: Path, model: PreTrainedModel, tolerance: float = 1e-4, **options: Any) -> PreTrainedModel:
    """Load what `save_pretrained` wrote to a folder, and return it. UserError: not loadable, or it computes other logits.

    options: of `load_model`.
    """
    loaded = load_model("saved draft", str(folder), **options)
    with evaluating(model):
        if same_logits(model, loaded, tolerance):
            return loaded
    raise UserError(
        f"student: saved and loaded again, the draft computes other logits, because config.json cannot describe this "
        f"{type(model).__name__}; start from another draft (student.init)"
    )


def refuse_impossible(student: StudentConfig, target_config: Any = None) -> None:
    """Raise UserError if a key of `student` has no effect with this `init`, or asks for more than the target has."""
    for set_, key, init in (
        (student.intermediate_size is not None, f"intermediate_size: {student.intermediate_size}", "carved"),
        (student.embeddings == "target", "embeddings: target", "config"),
        (student.vocabulary == "transplant", "vocabulary: transplant", "pretrained"),
    ):
        if set_ and student.init != init:
            raise UserError(f"student.{key} needs student.init: {init}, but this run has init: {student.init}")
    if target_config is not None:
        text = target_config.get_text_config()
        size, there = student.intermediate_size, getattr(text, "intermediate_size", None)
        if size is not None and isinstance(there, int) and size > there:
            raise UserError(f"student.intermediate_size = {size}: the target has {there}")
        if student.init == "carved" and student.lora is not None and "lm_head" in student.lora.target_modules:
            refuse_tied(text, student.lora.target_modules)


def _carved(
    config: StudentConfig,
    target: PreTrainedModel,
    calibration: Sequence[Sequence[int]],
    notes: dict[str, Any],
) -> PreTrainedModel:
    student = carve(target, config.layers)
    if config.intermediate_size is None:
        return student
    scores = channel_scores(student, calibration)
    trimmed = trim_mlps(student, config.intermediate_size, scores)
    sums = [(scores_F.sum(), scores_F.topk(config.intermediate_size).values.sum()) for scores_F in scores]
    kept = [float(part / total) for total, part in sums]
    notes["intermediate_size"] = {"channels": config.intermediate_size, "of": len(scores[0]), "activity_kept": kept}
    return trimmed


def _pretrained(
    config: StudentConfig,
    target: PreTrainedModel,
    tokenizer: Any,
    notes: dict[str, Any],
    texts: Iterable[Sequence[int]],
) -> PreTrainedModel:
    path, revision, rows = str(config.path), config.revision, vocabulary_rows(target.config)
    student = load_model("student.path", path, revision=revision)
    if quantization_of(student.config) is not None:
        student = _dequantised(student, path)
    rotations: list[Any] = [module for module in student.modules() if hasattr(module, "original_inv_freq")]
    if path.endswith(GGUF) and any(not torch.equal(one.inv_freq, one.original_inv_freq) for one in rotations):
        raise UserError(  # the scaled frequencies are a buffer, which no checkpoint keeps
            f"student.path {path!r}: scales its rotary positions (rope_freqs.weight), and config.json cannot say so; give the "
            "Hugging Face directory that it was converted from"
        )
    own_tokenizer = load_tokenizer(path, revision=revision)
    own_rows = vocabulary_rows(student.config)
    agreement = compare_vocabularies(tokenizer, rows, own_tokenizer, own_rows)
    if config.vocabulary == "transplant":
        if agreement.verdict == "refuse":
            notes["vocabulary"] = transplant_vocabulary(student, own_tokenizer, tokenizer, rows).as_dict()
            for key in MASK_TOKEN_KEYS:  # In the target's vocabulary its id is another token.
                vars(student.config).pop(key, None)
            return student
        notes["vocabulary"] = {"exact_share": 1.0}  # nothing to transplant: the vocabularies agree
    refuse_rowless(require_agreement(agreement), tokenizer, texts)
    repair_rows(student, rows, agreement.token_rows)
    return student


def _dequantised(student: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the values of quantised weights as float32, which can be trained. UserError: packed weights without values by name."""
    config = copy.deepcopy(student.config)
    without_quantization(config)
    state = {name: full_weight(value).float() for name, value in student.state_dict().items()}
    packed = f"student.path: the weights of {path} are packed ({quantization_name(student.config)}); give plain ones"
    return filled(config, state, student, packed)


def context_of(student: StudentConfig) -> int | None:
    """The context length of a draft by its config alone; None if it is the target's. UserError: no readable config or unknown type."""
    if student.init == "pretrained":
        return max_positions(read_config("student.path", str(student.path), revision=student.revision))
    if student.init == "config":
        return max_positions(_architecture_config(student.architecture or {}))
    return None


def run_context(student: StudentConfig, asked: int | None, target_context: int | None) -> int:
    """Return the most tokens of a run's sequences: the target's context, or ``asked`` by `data.context_length`.

    Raises UserError: the draft has a shorter context; see also `context_of`.
    """
    limits = [limit for limit in (target_context, asked) if limit is not None]
    context = context_of(student)
    if context is None or not limits or context >= min(limits):
        return min(limits, default=context or NO_LIMIT)
    which, remedy = (
        (f"student.path {student.path!r}", "start from another draft")
        if student.init == "pretrained"
        else ("student.architecture", f"set its max_position_embeddings to {min(limits)}")
    )
    raise UserError(
        f"{which} is made for {context} tokens, but the run needs {min(limits)}, so an engine would serve the pair up to {context} only; "
        f"{remedy}, or set data.context_length: {context} if you serve no longer texts"
    )


def from_architecture(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_rows: int, seed: int
) -> PreTrainedModel:
    """Make a draft with random weights and the tokenizer's vocabulary; UserError for an unknown `model_type` or impossible field."""
    config = _architecture_config(architecture, vocab_size=vocab_rows, **role_ids(vocab_rows, tokenizer))
    with refusing("student.architecture"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _architecture_config(architecture: dict[str, Any], **defaults: Any) -> PretrainedConfig:
    """Raise UserError for a missing or unknown `model_type` and for an unknown or impossible field."""
    model_type = str(architecture.get("model_type"))
    fields = {name: value for name, value in architecture.items() if name != "model_type"}
    with refusing("student.architecture"):
        # transformers accepts any field and ignores unknown ones, so check the names here.
        plain = AutoConfig.for_model(model_type)
        for name in fields:
            # Most config.json files on hubs have the base of the rotation as a field of its own; transformers takes it too.
            older = name == "rope_theta" and hasattr(plain, "rope_parameters")
            if not (hasattr(plain, name) or older):
                near = difflib.get_close_matches(name, plain.to_dict(), n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise UserError(f"student.architecture.{name}: {model_type} has no such field{hint}")
        return AutoConfig.for_model(model_type, **{**defaults, **fields})


def outlined_student(config: StudentConfig, target_config: Any, trust_remote_code: bool = False) -> Any:
    """The draft that a run trains, adapters included, without weights: its shapes, on the meta device. UserError: as `make_student`."""
    rows = vocabulary_rows(target_config)
    if config.init == "carved":
        source = Layers(without_weights(target_config, trust_remote_code))
        shape, reason = source.config_of(source.places(config.layers))
        if shape is None:
            raise not_kept(config.layers, source, reason)
        for field in WIDTH_FIELDS if config.intermediate_size else ():
            if hasattr(shape, field):
                setattr(shape, field, config.intermediate_size)
    elif config.init == "config":
        shape = _architecture_config(config.architecture or {}, vocab_size=rows)
    else:
        shape = read_config("student.path", str(config.path), revision=config.revision)
    with refusing("student.architecture" if config.init == "config" else "student"):
        outlined = without_weights(shape)
    return with_adapters(outlined, config.lora)


def with_adapters(student: PreTrainedModel, lora: LoraConfig | None) -> Any:
    """Return the draft with the adapters that a run trains; the draft itself without any."""
    if lora is None:
        return student
    return add_lora(student, lora.rank, lora.alpha, lora.target_modules, mask_token_of(student.config))


def add_lora(
    model: PreTrainedModel, rank: int, alpha: int, target_modules: Sequence[str] | str, mask_token: int | None = None
) -> Any:
    """Return the model with trainable low-rank adapters (peft). All else is frozen except the embedding of a mask token.

    Raises UserError: the model has no module of that name, or a tied head must stay tied.
    """
    from peft import LoraConfig as Adapters
    from peft import get_peft_model

    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    untie_for_adapters(model, modules)
    own = None if mask_token is None else [mask_token]
    lora = Adapters(
        r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM", trainable_token_indices=own
    )
    with refusing(f"student.lora.target_modules = {modules}"):
        return get_peft_model(model, lora)
