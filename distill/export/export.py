"""Write a trained student as a directory for serving engines: weights, the target's tokenizer, commands, model card.

All files are written and checked in a temporary sibling directory, which is then renamed (`distill.export.destination`).
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig

from distill.config.layout import ADAPTER, PROVENANCE, SERVING_FILE, SERVING_FORMAT, VERDICT
from distill.engines.protocol.engine import known_engines
from distill.engines.protocol.facts import EngineFacts, gather_facts
from distill.engines.protocol.verdict import EngineVerdict, check_all, others
from distill.export.card import NO_GAIN, NOT_MEASURED, model_card, serving_page
from distill.export.destination import appearing_directory, check_destination
from distill.export.facts import RunFacts, ways_to_serve
from distill.export.merge import load_merged_student
from distill.export.model_files import add_older_keys, copy_tokenizer, rewrite
from distill.export.pair import MERGE, pair_notes
from distill.export.quantize import quantize_draft
from distill.models.draft import cast_weights
from distill.models.load import ADAPTER_FILE, base_of_adapter, public_name, resolve, saved_dtype, without_folders
from distill.models.student import check_saved
from distill.models.target import TargetSide, dtype_name, load_target_side
from distill.models.text_model import PROBE_TOKENS
from distill.models.vocabulary import VocabularyAgreement, role_ids, tokenizer_differences, vocabulary_rows
from distill.report.measured import engine_parts
from distill.run.verdict_record import Verdict
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.measure.measured import HELD_OUT
from speculative.rules.sampling import SamplingSettings

SERVING_VERSION = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = (
    "the weights are 8-bit in compressed-tensors format, which {readers} read. Other engines were not tried. For engines with "
    "their own format (GGUF, MLX, ExLlama) export with --quantize none and quantise with their tools"
)


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote and checked."""

    path: Path
    dtype: str
    parameters: int
    vocabulary: VocabularyAgreement
    engines: list[EngineVerdict]
    warnings: list[str]
    checks: list[str]


def export_draft(
    run: RunFacts, to: Path, *, dtype: str = "auto", overwrite: bool = False, adapter: Path | None = None
) -> ExportReport:
    """Export a trained student as the draft of its target.

    Args:
        run: the student, its target, measurements and serving settings. An adapter is merged into its base here.
        to: directory to create.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: the dtype of the target's checkpoint.
        overwrite: replace an earlier export at `to`.
        adapter: a peft directory, already merged into the student, to copy into the export.

    Raises UserError: for a path, model, vocabulary or dtype that cannot be exported. The content of `to` is unchanged then.
    """
    path = check_destination(to, sources=_directories_read(run.student_dir, run.target), overwrite=overwrite)
    target_side = load_target_side(run.target, run.trust_remote_code, run.revision)
    export_dtype, rows = _export_dtype(dtype, target_side.config), vocabulary_rows(target_side.config)
    student = load_merged_student(run.student_dir, target_side.tokenizer, rows, run.trust_remote_code)
    plan, served = ways_to_serve(run.verdict, run.curves, student.model.config)
    take_over_ids(student.model, target_side, served["gamma"], run.sampling)  # transformers drafts token by token
    cast_weights(student.model, export_dtype)
    warnings = student.notes + _warnings(plan.gamma, plan.gain, run.quantize)
    if (base := base_of_adapter(run.target, run.revision)) is not None:
        warnings.append(f"the target is {MERGE.format(base=base.path)} in the commands")
    parameters = sum(parameter.numel() for parameter in student.model.parameters())
    draft_record = {
        "name": path.name,
        "rows": vocabulary_rows(student.model.config),
        "dtype": dtype_name(export_dtype),
        "quantised": run.quantize,
        "parameters": parameters,
    }
    packed = quantize_draft(student.model, run.quantize) if run.quantize else None
    try:
        with appearing_directory(path) as working:
            _save(student.model, packed, adapter, working)
            rewrite(working / "config.json", add_older_keys)
            copy_tokenizer(target_side, working, run.revision)
            checks = check_exported(working, student.model, target_side.tokenizer, run.trust_remote_code)
            draft_side = load_target_side(str(working), run.trust_remote_code)
            served |= {"sampling": run.sampling}
            facts = gather_facts(target_side, draft_side, str(path), **served)
            engines = check_all(facts)
            warnings += pair_notes(facts)
            serving = {
                "format": SERVING_FORMAT,
                "version": SERVING_VERSION,
                "target": _target_record(run, target_side),
                "draft": draft_record,
                "vocabulary": asdict(student.agreement),
                "gamma": plan.gamma,
                "gamma_source": plan.source,
                "gain": plan.gain,
                **_measurements(run.verdict),
                **_of_engines(facts, engines, run.target, path.name),
                "warnings": warnings,
                "checks": checks,
            }
            _write_pages(working, serving, run)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}; free space there or choose another directory") from error
    return ExportReport(
        path=path,
        dtype=dtype_name(export_dtype),
        parameters=parameters,
        vocabulary=student.agreement,
        engines=engines,
        warnings=warnings,
        checks=checks,
    )


def _target_record(run: RunFacts, side: TargetSide) -> dict[str, Any]:
    return {
        "name": public_name(run.target),
        "rows": vocabulary_rows(side.config),
        "dtype": dtype_name(saved_dtype(side.config)),
        "quantised": getattr(side.config, "quantization_config", None) is not None,
    }


def _measurements(verdict: Verdict | None) -> dict[str, Any]:
    """Return the part of serving.json that comes from the verdict."""
    if verdict is None:
        return {"measured": None, "headline": "", "run": {}, "timed_in": []}
    parts = engine_parts(verdict)
    return {
        "measured": [row.record() for row in verdict.measured if row.text == HELD_OUT],
        "headline": verdict.headline,
        "run": {load: verdict.to_run(int(load)) for load in verdict.run},
        "timed_in": [part if isinstance(part, str) else part.markdown() for part in parts],
    }


def _of_engines(facts: EngineFacts, engines: list[EngineVerdict], target: str, draft: str) -> dict[str, Any]:
    """Return the part of serving.json that is about engines; it names no folder of this machine."""
    public = replace(facts, target=public_name(target), draft=draft, lookup=None, lookup_draft=None)
    return {
        "gamma_by_load": facts.gamma_by_load,
        "sampling": facts.request,
        "facts": asdict(public),
        "engines": {engine.engine: asdict(engine) for engine in engines},
        "other_engines": others(facts),
    }


def check_exported(directory: Path, model: Any, tokenizer: Any, trust_remote_code: bool = False) -> list[str]:
    """Reload a written directory, compare it with the model in memory, and return the checks as sentences.

    Raises UserError: logits differ, or the tie of head and embedding. RuntimeError: the tokenizer differs, which is a bug in the export.
    """
    loaded = check_saved(directory, model, 0.0, dtype="auto", trust_remote_code=trust_remote_code)
    loaded_tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    differing = tokenizer_differences(tokenizer, loaded_tokenizer)
    if differing or loaded_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise RuntimeError(f"{directory}: its tokenizer differs from the target's: {differing or 'vocabulary'}")
    dtype = dtype_name(loaded.dtype)
    return [f"the export was reloaded, and its logits of {PROBE_TOKENS} tokens are equal in {dtype}"]


def _directories_read(student_dir: Path, target: str) -> list[Path]:
    base = base_of_adapter(student_dir) if student_dir.is_dir() else None
    names = [str(student_dir), resolve(target), *([base.path] if base else [])]
    return [Path(name) for name in names if Path(name).is_dir()]


def _export_dtype(dtype: str, target_config: Any) -> torch.dtype:
    if dtype == "auto":
        return saved_dtype(target_config)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _save(model: Any, packed: Any, adapter: Path | None, working: Path) -> None:
    model.save_pretrained(working)
    if packed is not None:
        packed.update_config(working)
    if adapter is not None:
        shutil.copytree(adapter, working / ADAPTER)
        config = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
        if (base := base_of_adapter(adapter)) and Path(base.path).is_dir():
            config["base_model_name_or_path"] = os.path.relpath(base.path, working / ADAPTER)
        (working / ADAPTER / ADAPTER_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _warnings(gamma: int, gain: bool | None, quantize: str | None) -> list[str]:
    warnings = []
    if gain is False:
        warnings.append(NO_GAIN.format(gamma=gamma))
    if gain is None:
        warnings.append(NOT_MEASURED)
    if quantize is not None:
        readers = {one.name: one for one in known_engines().values() if one.reads_int8 is not None}
        limits = [f". {one.name} {one.version} {one.reads_int8}" for one in readers.values() if one.reads_int8]
        warnings.append("".join([QUANTISED.format(readers=" and ".join(readers)), *limits * (quantize == "int8")]))
    return warnings


def _write_pages(working: Path, serving: dict[str, Any], run: RunFacts) -> None:
    """Write pages and records. serving.json names all entries of the directory."""
    verdict, provenance = run.verdict, run.provenance
    texts = {"SERVING.md": serving_page(serving), "README.md": model_card(serving, verdict, provenance)}
    if verdict is not None:
        texts[VERDICT] = without_folders(json.dumps(verdict.record(), indent=2, default=str)) + "\n"
    if provenance is not None:
        texts[PROVENANCE] = json.dumps(provenance, indent=2, default=str) + "\n"
    files = sorted({entry.name for entry in working.iterdir()} | texts.keys() | {SERVING_FILE})
    texts[SERVING_FILE] = json.dumps({**serving, "files": files}, indent=2) + "\n"
    for name, text in texts.items():
        (working / name).write_text(text, encoding="utf-8")


def take_over_ids(model: Any, target_side: TargetSide, gamma: int, sampling: SamplingSettings | None) -> None:
    """Give the draft the target's bos, eos and pad ids, and a generation config with the measured settings."""
    text = model.config.get_text_config()
    places = target_side.generation_config, target_side.config.get_text_config(), target_side.tokenizer
    ids: dict[str, Any] = dict(role_ids(text.vocab_size, *places))
    for name, value in ids.items():
        setattr(text, name, value)
    if len(end_ids := end_token_ids(target_side, target_side.tokenizer)) > 1:
        ids["eos_token_id"] = list(end_ids)
    # transformers reads these three from the draft's generation config. Its default gate (0.4) would end blocks early.
    assisted = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    fields: dict[str, Any] = {}
    if sampling is not None:
        # top_k is written even if it is off (0), since transformers' default is 50.
        fields = {"do_sample": False} if sampling.greedy else {"do_sample": True, **sampling.as_dict()}
    if not fields.get("min_p"):
        fields.pop("min_p", None)
    model.generation_config = GenerationConfig(**ids, **fields, **assisted)
