"""The verdict of a run: baseline against best, paired, timed, with the best gamma; verdict.json and its schema.

rule, gamma, prompts, tokens      engine rule, drafted tokens per block, held-out prompts, their response tokens
baseline, best                    {step, alpha, alpha_ci, tau, tau_ci, accepted_per_drafted, survival, tokens_per_second}
target_tokens_per_second          the target alone; all tokens/s are at batch 1, alternating on the same prompts
speed_up                          {baseline, best}: median over prompts of tokens/s over the target's
paired                            {alpha_gain, ci}: best minus baseline on the same frozen text
replay                            {gamma: tau} of the best, every gamma from 1 to 16
best_gamma, predicted_speed_up    argmax of tau / (gamma c + v); best_gamma 0: no gamma pays
costs                             measured seconds, cost ratio c, v of each gamma, break-even alpha
checkpoints                       one judgement each, step 0 first
self_checks                       what was checked before anything was measured
domains                           best, per domain
pays_off, sentence                the answer; judge.live: never leaves null whatever needs the target's weights
seconds                           by stage
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from data.store import write_json
from distill import checkpoint
from distill.config import RunConfig
from distill.responses import decode_settings
from distill.served_target import ServedTarget
from distill.student import load_model
from distill.validate import DraftJudge, served_copy
from speculative.cost import StepCosts, best_gamma, break_even_alpha, measure_costs
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, compare_speed
from speculative.metrics import paired_alpha_gain
from speculative.token_scores import score_responses
from speculative.verify import Rule

VERDICT = "verdict.json"
JUDGED = ("step", "alpha", "alpha_ci", "tau", "tau_ci", "accepted_per_drafted", "survival")
# Keys and types of verdict.json; `understudy evaluate --json` prints the same shape.
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "rule": str, "gamma": int, "prompts": int, "tokens": int, "baseline": (dict, NoneType), "best": dict,
    "target_tokens_per_second": (float, NoneType), "speed_up": (dict, NoneType), "paired": (dict, NoneType), "replay": dict,
    "best_gamma": (int, NoneType), "predicted_speed_up": (float, NoneType), "costs": (dict, NoneType), "checkpoints": list,
    "self_checks": dict, "domains": dict, "pays_off": (bool, NoneType), "sentence": str, "seconds": dict,
}  # fmt: skip


def load_judgements(run: Path) -> list[dict[str, Any]]:
    """The record of every judged checkpoint, step 0 first.

    Raises:
        UserError: the run has none.
    """
    records = []
    for step in checkpoint.list_steps(run):
        path = checkpoint.step_folder(run, step) / checkpoint.JUDGEMENT
        if path.exists():
            records.append(json.loads(path.read_text(encoding="utf-8")))
    if not records:
        raise UserError(
            f"{run}: no judged checkpoint there; train first with `accelerate launch -m distill.train CONFIG`"
        )
    return records


def load_verdict(run: Path) -> dict[str, Any]:
    """verdict.json of a finished run.

    Raises:
        UserError: not there or damaged.
    """
    try:
        return json.loads((run / VERDICT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run / VERDICT}: not there or damaged; the run is not finished, start its command again"
        ) from error


def step_costs(
    config: RunConfig, target: PreTrainedModel, draft: PreTrainedModel, rule: Rule, gamma: int, context_limit: int
) -> StepCosts:
    """Stage times of this pair at batch 1 under a rule, at gammas up to 16 as far as the context has room."""
    blocks = 8
    gammas = sorted(
        g for g in {1, 2, 3, 5, 8, 12, 16, gamma} if g <= gamma or (blocks + 3) * (g + 1) < context_limit - 32
    )
    context = max(2, min(128, context_limit - (blocks + 3) * (max(gammas) + 1)))
    settings = decode_settings(config, target, rule=rule)
    with cpu_threads(config.judge.speed_threads):
        return measure_costs(
            target, draft, gammas=gammas, sampling=settings.sampling, rule=rule, context=context, blocks=blocks
        )


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Torch's CPU threads while something is timed: a small model at batch 1 is served best by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_costs(costs: StepCosts, gamma: int) -> dict[str, Any]:
    """The measured costs as plain numbers."""
    gammas = sorted(costs.verify_seconds)
    return {
        "target_step_seconds": costs.target_seconds,
        "draft_step_seconds": costs.draft_step_seconds,
        "cost_ratio": costs.cost_ratio,
        "verify_ratio": {str(g): costs.verify_ratio(g) for g in gammas},
        "break_even_alpha": break_even_alpha(gamma, costs.cost_ratio, costs.verify_ratio(gamma)),
        "batch_size": costs.batch_size,
        "context": costs.context,
    }


def sentence_of(speed_up: float, alpha_gain: float, ci: list[float], gamma: int) -> tuple[bool, str]:
    """(does the best draft pay off, one plain sentence)."""
    pays = speed_up > 1.0
    how = f"decodes {speed_up:.2f}x as fast as the target alone at gamma {gamma}"
    if ci[0] > 0:
        learned = f"accepts {alpha_gain:+.3f} [{ci[0]:+.3f}, {ci[1]:+.3f}] alpha over the undistilled baseline"
    else:
        learned = f"has no certain gain in alpha over the undistilled baseline ({alpha_gain:+.3f} [{ci[0]:+.3f}, {ci[1]:+.3f}])"
    return pays, f"{'It pays off' if pays else 'No gain'}: the distilled draft {how} and {learned}."


def make_verdict(
    config: RunConfig,
    served: ServedTarget,
    judge: DraftJudge,
    heldout: dict[Rule, list[HeldoutResponse]],
    self_checks: dict[str, Any],
    seconds: dict[str, float],
    context_limit: int,
) -> dict[str, Any]:
    """Times and pairs baseline and best of a run, writes verdict.json, returns it.

    With judge.live: never, nothing is decoded or timed: what only that measures is null.
    """
    if config.judge.live == "never":
        return _verdict_by_replay(config, served, heldout, seconds)
    run, rule, gamma, target = config.folder, config.judge_rule, config.judge.gamma, served.model
    records = load_judgements(run)
    best = max(records, key=lambda record: record["score"])
    drafts = {
        name: served_copy(
            load_model(name, str(checkpoint.step_folder(run, record["step"]) / "student")), served.saved_dtype, target
        )
        for name, record in (("baseline", records[0]), ("best", best))
    }
    baseline, best = (
        record if record.get("live", True) else {**record, **judge.judge_live(drafts[name], rule)}
        for name, record in (("baseline", records[0]), ("best", best))
    )
    settings = decode_settings(config, target, gamma, rule)
    frozen = heldout[rule]
    probs = {name: score_responses(draft, frozen, settings.sampling, rule) for name, draft in drafts.items()}
    paired = paired_alpha_gain(probs["best"], probs["baseline"], [response.prompt for response in frozen])
    speed = time_drafts(config, target, drafts, frozen, gamma, rule)
    costs = step_costs(config, target, drafts["best"], rule, gamma, context_limit)
    pays, sentence = sentence_of(speed["best"]["speed_up"], paired["alpha_gain"], paired["ci"], gamma)
    verdict = {
        "rule": rule,
        "gamma": gamma,
        "prompts": best["prompts"],
        "tokens": best["tokens"],
        "baseline": _judged(baseline) | {"tokens_per_second": speed["baseline"]["tokens_per_second"]},
        "best": _judged(best) | {"tokens_per_second": speed["best"]["tokens_per_second"]},
        "target_tokens_per_second": speed["target"]["tokens_per_second"],
        "speed_up": {name: speed[name]["speed_up"] for name in drafts},
        "paired": paired,
        **best_gamma_facts(best["replay"], costs),
        "costs": describe_costs(costs, gamma),
        "checkpoints": records,
        "self_checks": self_checks,
        "domains": best["domains"],
        "pays_off": pays,
        "sentence": sentence,
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
    }
    write_json(run / VERDICT, verdict)
    return verdict


def _verdict_by_replay(
    config: RunConfig,
    served: ServedTarget,
    heldout: dict[Rule, list[HeldoutResponse]],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The verdict of a run whose target is not here: alpha and tau from the frozen text."""
    run, rule, gamma = config.folder, config.judge_rule, config.judge.gamma
    records = load_judgements(run)
    best = max(records, key=lambda record: record["score"])
    settings = decode_settings(config, served, gamma, rule)
    probs: dict[str, Any] = {}
    for name, record in (("best", best), ("baseline", records[0])):
        draft = load_model("checkpoint", str(checkpoint.step_folder(run, record["step"]) / "student"))
        rounded = served_copy(draft, served.saved_dtype, served)
        probs[name] = score_responses(rounded, heldout[rule], settings.sampling, rule)
    paired = paired_alpha_gain(probs["best"], probs["baseline"], [response.prompt for response in heldout[rule]])
    _, sentence = sentence_of(1.0, paired["alpha_gain"], paired["ci"], gamma)
    learned = sentence[sentence.index(" and ") + 5 :]
    verdict = {
        "rule": rule, "gamma": gamma, "prompts": best["prompts"], "tokens": best["tokens"],
        "baseline": _judged(records[0]), "best": _judged(best), "target_tokens_per_second": None, "speed_up": None,
        "paired": paired, "replay": {str(g): tau for g, tau in best["replay"].items()}, "best_gamma": None,
        "predicted_speed_up": None, "costs": None, "checkpoints": records, "self_checks": {}, "domains": best["domains"],
        "pays_off": None,
        "sentence": f"Not timed here (judge.live: never): the distilled draft has tau {best['tau']:.2f} at gamma {gamma} by replay "
        f"(undistilled {records[0]['tau']:.2f}) and {learned}",
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
    }  # fmt: skip
    write_json(run / VERDICT, verdict)
    return verdict


def time_drafts(
    config: RunConfig,
    target: PreTrainedModel,
    drafts: dict[str, PreTrainedModel],
    frozen: list[HeldoutResponse],
    gamma: int,
    rule: Rule,
) -> dict[str, dict[str, float]]:
    """Tokens/s at batch 1 of the target alone and with each draft, alternating on the same held-out prompts."""
    # Spread over the set, which is stored longest prompt first.
    spread = np.linspace(0, len(frozen) - 1, min(config.judge.speed_prompts, len(frozen))).astype(int)
    prompts = [(frozen[index].key, frozen[index].prompt_ids) for index in spread]
    with cpu_threads(config.judge.speed_threads):
        return compare_speed(target, drafts, prompts, decode_settings(config, target, gamma, rule))


def best_gamma_facts(replay: dict[Any, float], costs: StepCosts) -> dict[str, Any]:
    """{replay, best_gamma, predicted_speed_up}: the best among the gammas whose costs were measured or lie between."""
    taus = {int(gamma): tau for gamma, tau in replay.items()}
    chosen, predicted = best_gamma({g: tau for g, tau in taus.items() if g <= max(costs.verify_seconds)}, costs)
    return {
        "replay": {str(gamma): tau for gamma, tau in taus.items()},
        "best_gamma": chosen,
        "predicted_speed_up": predicted,
    }


def verdict_of_one(
    judged: dict[str, Any],
    gamma_facts: dict[str, Any],
    speed: dict[str, dict[str, float]],
    checks: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """The shape of verdict.json for one draft that was not trained here: `baseline` and `paired` are null."""
    speed_up = speed["best"]["speed_up"]
    return {
        "rule": judged["rule"],
        "gamma": judged["gamma"],
        "prompts": judged["prompts"],
        "tokens": judged["tokens"],
        "baseline": None,
        "best": _judged(judged) | {"tokens_per_second": speed["best"]["tokens_per_second"]},
        "target_tokens_per_second": speed["target"]["tokens_per_second"],
        "speed_up": {"best": speed_up},
        "paired": None,
        **gamma_facts,
        "checkpoints": [judged],
        "self_checks": checks,
        "domains": judged["domains"],
        "pays_off": speed_up > 1.0,
        "sentence": f"{'It pays off' if speed_up > 1.0 else 'No gain'}: {name} decodes {speed_up:.2f}x as fast as the target "
        f"alone at gamma {judged['gamma']}.",
        "seconds": {},
    }


def _judged(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in JUDGED if key in record}
