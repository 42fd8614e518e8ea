"""A run's folder: who may go on in it, and what an export needs to know of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import MANIFEST, write_bytes
from distill.config.layout import (
    BEST_LINK,
    CHECKPOINTS,
    CONFIG,
    PROMPTS,
    PROVENANCE,
    RESULT,
    SELF_CHECKS,
    STUDENT,
    STUDENT_NOTES,
    VERDICT,
    run_of,
    step_folder,
)
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.config.sections import Quantization
from distill.run.result import Curves, load_result
from distill.run.verdict_record import Verdict
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings

# Keys that a resumed run may have changed: they do not reach what is trained on, only how it is laid out or shown.
MAY_DIFFER = (
    "resume", "output", "target.shard", "target.device_map", "student.gradient_checkpointing", "target.endpoint.url", "target.endpoint.api_key_env",
    "target.endpoint.concurrency", "target.endpoint.timeout", "target.endpoint.retries", "train.micro_batch_size", "train.log_every", "train.keep_states", "train.profile_steps", "loss.chunk_tokens",
    "serving.batch_size", "judge.batch_size", "judge.speed_prompts", "judge.speed_seconds", "judge.speed_threads", "judge.served", "tracking.trackers",
    "tracking.project", "export.quantize",
)  # fmt: skip


def claim_folder(config: RunConfig) -> None:
    """Makes the run's folder, or accepts it when it holds the same config (apart from `MAY_DIFFER`).

    Raises:
        UserError: another config is there (first differing line named), or the folder cannot be written.
    """
    folder, text = config.folder, dump_config(config)
    path = folder / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before the first checkpoint only the responses could hang on the config, and their manifests guard them: a start
        # that failed may be mended.
        if path.exists() and (folder / CHECKPOINTS).exists():
            may = set(MAY_DIFFER)
            if config.loss.weighting.name == "selected":
                may.discard("train.micro_batch_size")  # it chooses within a micro-batch
            old_tree, new_tree = load_config(path).model_dump(mode="json"), config.model_dump(mode="json")
            difference = _first_difference(old_tree, new_tree, may)
            if difference is not None:
                key, old, new = difference
                # An earlier version kept no prompts, and its responses are of another format.
                copied = " (its responses may be copied there)" if (folder / PROMPTS / MANIFEST).exists() else ""
                raise UserError(
                    f"{folder}: holds a run with another config ({key} is {old}, now {new}); "
                    f"choose another name=...{copied}, or delete the folder"
                )
            if config.resume == "never":
                raise UserError(
                    f"{folder}: holds a run already and resume is never; choose another name=..., or delete the folder"
                )
        elif path.exists() and path.read_text(encoding="utf-8") != text:
            for stale in (SELF_CHECKS, STUDENT_NOTES):
                (folder / stale).unlink(missing_ok=True)
        write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); set output=... to a folder that can"
        ) from error


def _first_difference(old: Any, new: Any, may: set[str], key: str = "") -> tuple[str, str, str] | None:
    """(dotted key, old value, new value) of the first difference between two trees that matters."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in (*old, *(name for name in new if name not in old)):
            found = _first_difference(old.get(name), new.get(name), may, f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if old == new or key in may else (key, json.dumps(old), json.dumps(new))


@dataclass(frozen=True)
class RunFacts:
    """What an export needs to know: the student and its target, what was measured of them, how they are served.

    student_dir: a Hugging Face model directory, or a peft adapter directory. target: directory or hub id, or `embedded`. verdict: None
    when nothing was measured. curves: what replay predicts under each rule.
    """

    student_dir: Path
    target: str
    verdict: Verdict | None = None
    curves: Curves | None = None
    provenance: dict[str, Any] | None = None
    sampling: SamplingSettings | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: Quantization | None = None


def read_run(path: Path) -> RunFacts:
    """Facts of a run's best checkpoint, or of one checkpoint of a run.

    Raises:
        UserError: neither a run's folder nor a checkpoint of one, or nothing judged yet.
    """
    run = run_of(path)
    if run is None:
        raise UserError(f"{path}: neither a run's folder (config.yaml in it) nor a checkpoint of one")
    folder = path if run != path else run / BEST_LINK
    if not (folder / STUDENT).exists():
        raise UserError(f"{path}: no checkpoint there yet; finish the run first (the same command goes on)")
    config = load_config(run / CONFIG)
    verdict = load_verdict(run) if (run / VERDICT).exists() else None
    if verdict is not None and folder.resolve() != step_folder(run, verdict.drafts[-1].step or 0).resolve():
        verdict = None  # the verdict is of another checkpoint
    curves = load_result(run / RESULT).curves if verdict is not None and (run / RESULT).exists() else None
    provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    data = [source.path for source in config.data.train]
    provenance |= {"data": data, "config": dump_config(config), "base": config.student.path}
    where = config.target
    return RunFacts(
        folder / STUDENT, where.path, verdict, curves, provenance, config.serving.sampling, where.revision,
        where.trust_remote_code, config.export.quantize,
    )  # fmt: skip


def load_verdict(run: Path) -> Verdict:
    """verdict.json of a finished run.

    Raises:
        UserError: not there or damaged, or a key is missing or holds something else (it is named).
    """
    unfinished = "not there; the run is not finished, start its command again"
    return Verdict.read(run / VERDICT, "delete it, and start the run's command again", unfinished)
