"""The end of a run and of an evaluation: evidence gathered, verdict.json, result.json, the report and the plot written."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data.files import write_json
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.models.draft import load_draft, served_copy
from distill.models.load import load_model
from distill.models.target import ServedTarget
from distill.report.page import report_command
from distill.run.checkpoint import load_judgements
from distill.run.folder import PROPOSALS, RESULT, VERDICT, step_folder
from distill.run.responses import decode_settings
from distill.verdict.evidence import BASELINE, BEST, SERVED, Contestant, Evidence, gather, gather_by_replay
from distill.verdict.findings import findings_of, serve_commands
from distill.verdict.token_view import spread_over, token_view
from distill.verdict.verdict import verdict_of
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.target_view import target_entropies
from speculative.rules.verify import Rule

SHOWN_RESPONSES = 8


def conclude_run(
    config: RunConfig,
    served: ServedTarget,
    heldout: Mapping[Rule, list[HeldoutResponse]],
    self_checks: dict[str, Any],
    seconds: Callable[[], Mapping[str, float]],
    context: int,
    trained_on: Sequence[str],
) -> dict[str, Any]:
    """result.json of a run whose last checkpoint is judged, finished: verdict and findings.

    With judge.live: never, nothing is decoded or timed: what only that measures is null.

    Args:
        heldout: frozen held-out responses by rule, the configured rule first.
        seconds: asked when everything is found: by stage, this one included.
        context: tokens of prompt and response that both models take.
        trained_on: domains of the training prompts.
    """
    run, live = config.folder, config.judge.live != "never"
    records = load_judgements(run)
    best = max(records, key=lambda record: record["score"])
    contestants = _contestants(config, served, records[0], best)
    if live:
        # Replay records are of the dial; a verdict of what was decoded.
        known = {BASELINE: records[0]} if records[0].get("live", True) else {}
        evidence = gather(
            config, served.model, contestants, heldout, gamma=config.judge.gamma, rule=config.judge_rule, context=context,
            known=known, log=run / PROPOSALS,
        )  # fmt: skip
    else:
        evidence = gather_by_replay(config, served, contestants, heldout, {BASELINE: records[0], BEST: best})
    verdict = verdict_of(evidence, checkpoints=records, self_checks=self_checks)
    result = findings_of(
        evidence, verdict, served.tokenizer, kind="run", name=config.name, checkpoints=records, trained_on=trained_on,
        serve=serve_commands(run, served, verdict["best_gamma"] or config.judge.gamma, config.judge_rule),
        provenance=_provenance(step_folder(run, best["step"])), config=dump_config(config),
        files={"proposals": PROPOSALS if live else None}, **(seen_by_both(evidence, served.model, served.tokenizer) if live else {}),
    )  # fmt: skip
    verdict["seconds"] = {stage: round(value, 2) for stage, value in seconds().items()}
    return result


def write_conclusion(run: Path, result: dict[str, Any]) -> None:
    """result.json, the report, and last verdict.json: where that is, a run is finished."""
    write_json(run / RESULT, result)
    report_command(run)
    write_json(run / VERDICT, result["verdict"])


def seen_by_both(evidence: Evidence, target: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """{entropies, token_view}: what only the target's weights can tell of frozen text and of the live run."""
    settings = decode_settings(evidence.config, target, evidence.gamma, evidence.rule)
    of_prompt = {response.prompt: response.domain for response in evidence.frozen}
    responses = evidence.responses or []
    domains = [of_prompt[tuple(response.prompt_ids)] for response in responses]
    chosen = spread_over(responses, domains, SHOWN_RESPONSES)
    view = token_view(
        target, evidence.best.draft, [responses[index] for index in chosen], [domains[index] for index in chosen],
        tokenizer, settings, name=evidence.best.name,
    )  # fmt: skip
    return {"entropies": target_entropies(target, evidence.frozen), "token_view": view}


def require_served(config: RunConfig, served: ServedTarget, longest: int) -> None:
    """Refuses a judge.served that could not be judged in the end, before the long work.

    Raises:
        UserError: not there, another vocabulary, or a context shorter than `longest`, prompt and response.
    """
    if config.judge.served is None:
        return
    draft = load_draft(config.judge.served, served, served.tokenizer)
    limit = getattr(draft.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < longest:
        raise UserError(
            f"judge.served: {config.judge.served} takes {limit} tokens, the longest held-out prompt with its response up to "
            f"{longest}; leave it out, or lower data.max_prompt_tokens or serving.max_tokens"
        )


def _contestants(
    config: RunConfig, served: ServedTarget, first: dict[str, Any], best: dict[str, Any]
) -> list[Contestant]:
    """Undistilled, served today (when the config names it), distilled."""
    target = served.model if config.judge.live != "never" else served
    found = []
    for name, label, record in ((BASELINE, "undistilled", first), (BEST, "distilled", best)):
        path = str(step_folder(config.folder, record["step"]) / "student")
        draft = served_copy(load_model(name, path), served.saved_dtype, target)
        found.append(Contestant(name, label, path, record["step"], draft))
    if config.judge.served is not None:
        loaded = load_draft(config.judge.served, target, served.tokenizer)
        draft = served_copy(loaded, served.saved_dtype, target)
        found.insert(1, Contestant(SERVED, "served today", config.judge.served, None, draft))
    return found


def _provenance(folder: Path) -> dict[str, Any]:
    path = folder / "provenance.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
