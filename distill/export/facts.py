"""Facts of a run that an export needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.hub import hub_id
from data.prompts.sources import dataset_id
from distill.config.layout import (
    BEST_LINK,
    CONFIG,
    PROVENANCE,
    RESULT,
    STUDENT,
    VERDICT,
    near_path,
    run_of,
    step_folder,
)
from distill.config.load import dump_config, load_trusted
from distill.config.sections import Quantization
from distill.engines.protocol.engine import engine_in
from distill.engines.protocol.facts import OnePass, Timed
from distill.export.load_table import GammaPlan, drafts_by, gamma_plan
from distill.models.load import public_name, resolve, without_folders
from distill.run.result import Curves, Result
from distill.run.verdict_record import WAYS, Verdict, drafting_to_serve, load_verdict
from speculative.engine.models import mask_token_of
from speculative.errors import UserError
from speculative.measure.measured import DRAFT, LOOKUP, LOOKUP_DRAFT, Measured
from speculative.measure.record import Record
from speculative.rules.sampling import SamplingSettings


@dataclass(frozen=True)
class RunFacts:
    """A student and its target, their measurements, and the serving settings.

    student_dir: a Hugging Face model directory or a peft adapter directory. target: a directory, a hub id or `embedded`.
    verdict: None if nothing was measured. curves: replay's predictions under each rule.
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


def read_run(path: Path, trusted: bool = False) -> RunFacts:
    """Read the facts of a run's best checkpoint, or of one checkpoint. ``trusted``: see `load_trusted`.

    Raises UserError: `path` is neither a run nor a checkpoint of one, or no checkpoint was judged yet.
    """
    run = run_of(path)
    if run is None:
        raise UserError(
            f"{path}: neither a run (a directory with config.yaml) nor a checkpoint of one{near_path(path)}"
        )
    folder = path if run != path else run / BEST_LINK
    if not (folder / STUDENT).exists():
        raise UserError(f"{path}: no checkpoint yet; finish the run first (the same command continues it)")
    config = load_trusted(run / CONFIG, trusted)
    verdict = load_verdict(run) if (run / VERDICT).exists() else None
    if verdict is not None and folder.resolve() != step_folder(run, verdict.drafts[-1].step or 0).resolve():
        verdict = None  # it belongs to another checkpoint
    curves = Result.read(run / RESULT).curves if verdict is not None and (run / RESULT).exists() else None
    provenance = Record.read(folder / PROVENANCE, "start the run's command again").record()
    base, paths = config.student.path, [source.path for source in config.data.train]
    provenance["data"] = [dataset_id(path) or Path(path).name for path in paths]
    provenance |= {"config": dump_config(config), "base": base and public_name(base)}
    # Front matter of a card has only names of the hub.
    ids = list(filter(None, map(dataset_id, paths)))
    provenance["hub"] = {"data": ids, "base": hub_id(str(Path(resolve(base or config.target.path))))}
    provenance = json.loads(without_folders(json.dumps(provenance)))
    where = config.target
    return RunFacts(
        folder / STUDENT,
        where.path,
        verdict,
        curves,
        provenance,
        config.serving.sampling,
        where.revision,
        where.trust_remote_code,
        config.export.quantize,
    )


def ways_to_serve(
    verdict: Verdict | None, curves: Curves | None, draft_config: Any
) -> tuple[GammaPlan, dict[str, Any]]:
    """Return the gammas of the way to serve, and the fields of `EngineFacts` that come from the measurements."""
    mask_token, names = mask_token_of(draft_config), drafts_by(verdict)

    def served(plan: GammaPlan, way: str) -> tuple[int, Mapping[str, float]]:
        return plan.gamma, curves.taus_at(plan.gamma, way) if curves else {}

    plan = gamma_plan(verdict, names["autoregressive"])
    gamma, taus = served(plan, names["autoregressive"])
    fields: dict[str, Any] = {"gamma": gamma, "taus": taus, **_lookups_of(verdict)}
    if mask_token is not None and drafting_to_serve(verdict, True) == "parallel":
        plan = gamma_plan(verdict, names["parallel"])
        fields["one_pass"] = OnePass(mask_token, *served(plan, names["parallel"]))
    if verdict and verdict.engine and (verdict.drafts[-1].drafting == "parallel") == ("one_pass" in fields):
        engine = engine_in(verdict.engine.engine).name
        own = gamma_plan(verdict, engine=engine)
        fields["timed_in"] = Timed(engine, *served(own, DRAFT), own.by_load)
    return plan, fields | {"gamma_by_load": plan.by_load, "measured_rule": verdict.rule if verdict else None}


def _lookups_of(verdict: Verdict | None) -> dict[str, Measured | None]:
    """Return the fields `lookup` and `lookup_draft` of `EngineFacts` from a verdict."""
    if verdict is None:
        return {}
    lookup, lookup_draft = verdict.row(LOOKUP), verdict.row(LOOKUP_DRAFT)
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), "autoregressive")
    then_way = lookup_draft.then_way if lookup_draft else None
    single = then_way == WAYS["autoregressive"] or (own == "autoregressive" and then_way != WAYS["parallel"])
    return {"lookup": lookup, "lookup_draft": lookup_draft if single and verdict.to_run() == LOOKUP_DRAFT else None}
