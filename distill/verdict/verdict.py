"""The verdict of a run: baseline against best, paired, timed, with the best gamma; verdict.json and its schema.

rule, gamma, prompts, tokens      engine rule, drafted tokens per block, held-out prompts, their response tokens
baseline, best                    {step, alpha, alpha_ci, tau, tau_ci, accepted_per_drafted, survival, tokens_per_second}
served                            the same of the draft that is served today (judge.served)
target_tokens_per_second          the target alone; all tokens/s are at batch 1, alternating on the same prompts
speed_up, speed_up_ci             by draft: median over prompts of tokens/s over the target's, and its interval
effects, against_served           best minus baseline (minus served) on the same frozen text: see speculative/measure/effects.py
paired                            {alpha_gain, ci}: alpha of `effects`, its interval widened for the checkpoints looked at
replay                            {gamma: tau} of the best, every gamma from 0 to 32
best_gamma, predicted_speed_up    argmax of tau / (gamma c + v); best_gamma 0: no gamma pays
costs                             measured seconds, cost ratio c, v of each gamma, break-even alpha
checkpoints                       one judgement each, step 0 first
self_checks                       what was checked before anything was measured
domains                           best, per domain
pays_off                          whether the target with the draft is certainly faster than alone
outcome                           pays_off, no_speed, no_measurable_gain, loss or not_timed: what distilling brought
sentence, warnings                the answer in words; judge.live: never leaves null whatever needs the target's weights
seconds                           by stage
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any

from distill.verdict.evidence import BASELINE, SERVED, Evidence
from speculative.explain.ceilings import advice
from speculative.measure.cost import StepCosts, best_gamma, break_even_alpha
from speculative.measure.effects import paired_effects, speed_interval

JUDGED = ("step", "alpha", "alpha_ci", "tau", "tau_ci", "accepted_per_drafted", "survival")
# Keys and types of verdict.json; `understudy evaluate --json` prints the same shape.
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "rule": str, "gamma": int, "prompts": int, "tokens": int, "baseline": (dict, NoneType), "served": (dict, NoneType),
    "best": dict, "target_tokens_per_second": (float, NoneType), "speed_up": (dict, NoneType), "speed_up_ci": (dict, NoneType),
    "effects": (dict, NoneType), "against_served": (dict, NoneType), "paired": (dict, NoneType), "replay": dict,
    "best_gamma": (int, NoneType), "predicted_speed_up": (float, NoneType), "costs": (dict, NoneType), "checkpoints": list,
    "self_checks": dict, "domains": dict, "pays_off": (bool, NoneType), "outcome": str, "sentence": str, "warnings": list,
    "seconds": dict,
}  # fmt: skip
# What else is told of the best: of the very run that its tau is of.
OF_THE_LAST_RUN = ("replay_check", "live_tokens", "live")
OUTCOMES = ("pays_off", "no_speed", "no_measurable_gain", "loss", "not_timed")


def describe_costs(costs: StepCosts, gamma: int) -> dict[str, Any]:
    """The measured costs as plain numbers."""
    gammas = sorted(costs.verify_seconds)
    return {
        "target_step_seconds": costs.target_seconds,
        "draft_step_seconds": costs.draft_step_seconds,
        "cost_ratio": costs.cost_ratio,
        "cost_ratio_at": {str(g): costs.cost_ratio_at(g) for g in gammas},
        "verify_ratio": {str(g): costs.verify_ratio(g) for g in gammas},
        "break_even_alpha": break_even_alpha(gamma, costs.cost_ratio_at(gamma), costs.verify_ratio(gamma)),
        "batch_size": costs.batch_size,
        "context": costs.context,
    }


def best_gamma_facts(replay: dict[Any, float], costs: StepCosts) -> dict[str, Any]:
    """{best_gamma, predicted_speed_up}: the best among the gammas whose costs were measured or lie between."""
    taus = {int(gamma): tau for gamma, tau in replay.items()}
    chosen, predicted = best_gamma({g: tau for g, tau in taus.items() if g <= max(costs.verify_seconds)}, costs)
    return {"best_gamma": chosen, "predicted_speed_up": predicted}


def verdict_of(
    evidence: Evidence,
    *,
    checkpoints: Sequence[dict[str, Any]],
    self_checks: dict[str, Any],
) -> dict[str, Any]:
    """verdict.json from evidence alone: the last contestant against the baseline and the served draft, where there are.

    How long it all took is not known yet.

    checkpoints: every judged one, of which the last contestant was picked: its interval is widened for them.
    """
    rule, gamma, best = evidence.rule, evidence.gamma, evidence.judged[evidence.best.name]
    names = [one.name for one in evidence.contestants]
    costs = evidence.costs[evidence.best.name] if evidence.costs else None
    looks = looks_of(checkpoints)
    effects = _effects(evidence, BASELINE, looks) if BASELINE in names else None
    against_served = _effects(evidence, SERVED, looks) if SERVED in names else None
    speeds = {name: speed_interval(evidence.speed[name]["ratios"]) for name in names} if evidence.speed else None
    outcome, pays, sentence = conclude(evidence, effects, speeds, against_served)
    timed: dict[str, Any] = {"best_gamma": None, "predicted_speed_up": None}
    if costs is not None:
        timed = best_gamma_facts(best["replay"], costs)
    return {
        "rule": rule,
        "gamma": gamma,
        "prompts": best["prompts"],
        "tokens": best["tokens"],
        **{name: _judged(evidence, name) if name in names else None for name in (BASELINE, SERVED)},
        "best": _judged(evidence, evidence.best.name) | {key: best[key] for key in OF_THE_LAST_RUN if key in best},
        "target_tokens_per_second": evidence.speed["target"]["tokens_per_second"] if evidence.speed else None,
        "speed_up": {name: speed[0] for name, speed in speeds.items()} if speeds else None,
        "speed_up_ci": {name: speed[1] for name, speed in speeds.items()} if speeds else None,
        "effects": effects,
        "against_served": against_served,
        "paired": {"alpha_gain": effects["alpha"]["gain"], "ci": effects["alpha"]["ci"]} if effects else None,
        "replay": {str(g): tau for g, tau in best["replay"].items()},
        **timed,
        "costs": describe_costs(costs, gamma) if costs is not None else None,
        "checkpoints": [_without_sums(record) for record in checkpoints],
        "self_checks": self_checks,
        "domains": best["domains"],
        "pays_off": pays,
        "outcome": outcome,
        "sentence": sentence,
        "warnings": list(best.get("warnings", [])),
        "seconds": {},
    }


def looks_of(checkpoints: Sequence[dict[str, Any]]) -> int:
    """How many drafts the best one was picked from: one a checkpoint, two where averaged weights were judged too."""
    return max(1, sum(2 if "score_ema" in record else 1 for record in checkpoints[1:]))


def _effects(evidence: Evidence, against: str, looks: int) -> dict[str, Any]:
    return paired_effects(
        evidence.own_scores(evidence.best.name),
        evidence.own_scores(against),
        evidence.keys,
        rule=evidence.rule,
        gamma=evidence.gamma,
        costs=_costs_at(evidence, evidence.best.name),
        baseline_costs=_costs_at(evidence, against),
        looks=looks,
    )


def _costs_at(evidence: Evidence, name: str) -> tuple[float, float] | None:
    """(c, v(gamma)) of a contestant."""
    if not evidence.costs:
        return None
    costs = evidence.costs[name]
    return costs.cost_ratio_at(evidence.gamma), costs.verify_ratio(evidence.gamma)


def conclude(
    evidence: Evidence,
    effects: dict[str, Any] | None,
    speeds: dict[str, Any] | None,
    against_served: dict[str, Any] | None = None,
) -> tuple[str, bool | None, str]:
    """(outcome, whether decoding with the draft is certainly faster than without, the answer in one sentence)."""
    who = "the distilled draft" if effects else evidence.best.label
    learned = _learned(effects) if effects else None
    pays, fast = _fast(evidence, speeds)
    end = f"{_against(against_served)}{'' if pays else _hopeless(evidence)}."
    if effects is not None and effects["certain"] == "loss":
        return "loss", pays, f"It got worse: {who} {learned} and {fast}{end}"
    if effects is not None and effects["certain"] == "none":
        return "no_measurable_gain", pays, f"No measurable gain: {who} {learned}; it {fast}{end}"
    if speeds is None:
        return (
            "not_timed",
            None,
            f"Whether it pays was not measured (judge.live: never): {who} {fast}{f', and {learned}' if learned else ''}{end}",
        )
    if pays:
        return "pays_off", True, f"It pays off: {who} {fast}{f' and {learned}' if learned else ''}{end}"
    interval = speeds[evidence.best.name][1]
    certain = interval is not None and interval[1] < 1.0
    start = "It does not pay off here" if certain else "Not certain to pay off here"
    though = f", though it {learned}" if learned else ""
    return "no_speed", pays, f"{start}: {who} {fast}{though}{end}"


def _learned(effects: dict[str, Any]) -> str:
    gain, (low, high) = effects["alpha"]["gain"], effects["alpha"]["ci"]
    if gain == low == high == 0.0:
        return "is the undistilled one: no checkpoint is better than the undistilled baseline"
    numbers = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    if effects["certain"] != "none":
        return f"accepts {numbers} alpha over the undistilled baseline"
    size = ""
    if effects["prompts"] < effects["fewest_prompts"]:
        size = f"; {effects['prompts']} prompts are too few to be certain, give at least {effects['fewest_prompts']}"
    elif effects["minimal_detectable"]["alpha"]:
        size = f"; {effects['minimal_detectable']['alpha']:.3f} would have been seen with 80 % probability"
    return f"has no certain difference in alpha to the undistilled baseline ({numbers}{size})"


def _against(effects: dict[str, Any] | None) -> str:
    """How it stands to the draft that is served today."""
    if effects is None:
        return ""
    gain, (low, high) = effects["alpha"]["gain"], effects["alpha"]["ci"]
    word = {"gain": "accepts more than", "loss": "accepts less than", "none": "is not to be told in alpha from"}
    words = f"; it {word[effects['certain']]} the draft served today ({gain:+.3f} [{low:+.3f}, {high:+.3f}] alpha"
    speed = effects["speed_up"]
    if speed is None:
        return f"{words})"
    return f"{words}, predicted speed-up {speed['gain']:+.2f}x [{speed['ci'][0]:+.2f}, {speed['ci'][1]:+.2f}])"


def _fast(evidence: Evidence, speeds: dict[str, Any] | None) -> tuple[bool | None, str]:
    """(certainly faster than the target alone, in words)."""
    if speeds is None:
        judged, baseline = evidence.judged[evidence.best.name], evidence.judged.get(BASELINE)
        before = f" (undistilled {baseline['tau']:.2f})" if baseline else ""
        return None, f"has tau {judged['tau']:.2f} at gamma {evidence.gamma} by replay{before}, not timed here"
    speed_up, interval = speeds[evidence.best.name]
    if interval is None:
        how = f"decodes {speed_up:.2f}x as fast as the target alone at gamma {evidence.gamma}"
        return False, f"{how}, on too few prompts to be certain (judge.speed_prompts)"
    low, high = interval
    how = f"decodes {speed_up:.2f}x [{low:.2f}, {high:.2f}] as fast as the target alone at gamma {evidence.gamma}"
    if low <= 1.0 <= high:
        how += ", which cannot be told from no speed-up"
    return low > 1.0, how


def _hopeless(evidence: Evidence) -> str:
    """What even the best draft would give at these costs, when that is too little."""
    if not evidence.costs:
        return ""
    costs = evidence.costs[evidence.best.name]
    advised = advice(costs)
    return f"; {advised[1]}" if advised else ""


def _judged(evidence: Evidence, name: str) -> dict[str, Any]:
    record = evidence.judged[name]
    row = {key: record[key] for key in JUDGED if key in record}
    return row | ({"tokens_per_second": evidence.speed[name]["tokens_per_second"]} if evidence.speed else {})


def _without_sums(record: dict[str, Any]) -> dict[str, Any]:
    """A judgement without its lists by response, which judgement.json keeps."""
    return {
        key: _without_sums(value) if isinstance(value, dict) else value
        for key, value in record.items()
        if key != "per_response"
    }
