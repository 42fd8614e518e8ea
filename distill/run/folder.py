"""What a run's folder tells an export of it, and its verdict."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.layout import (
    BEST_LINK,
    CONFIG,
    PROVENANCE,
    RESULT,
    STUDENT,
    VERDICT,
    run_of,
    step_folder,
)
from distill.config.load import dump_config, load_config
from distill.config.sections import Quantization
from distill.run.result import Curves, load_result
from distill.run.verdict_record import Verdict
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings


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
