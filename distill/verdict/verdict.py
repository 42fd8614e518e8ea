"""The verdict of a run: baseline against best, paired, timed, with the best gamma. Its shape: distill/run/verdict_record.py."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from distill.run.verdict_record import (
    BestDraft,
    Costs,
    Effects,
    JudgedDraft,
    Judgement,
    Outcome,
    PairedGain,
    Repetition,
    Verdict,
)
from distill.verdict.evidence import BASELINE, SERVED, Evidence
from speculative.explain.ceilings import advice
from speculative.explain.repetition import repetition
from speculative.measure.cost import StepCosts, best_gamma, break_even_alpha
from speculative.measure.effects import paired_effects, speed_interval

Draft = TypeVar("Draft", bound=JudgedDraft)
Speeds = Mapping[str, tuple[float, Sequence[float] | None]]  # by draft: median ratio to the target, its interval


def describe_costs(costs: StepCosts, gamma: int) -> Costs:
    """The measured costs as plain numbers."""
    gammas = sorted(costs.verify_seconds)
    return Costs(
        target_step_seconds=costs.target_seconds,
        draft_step_seconds=costs.draft_step_seconds,
        cost_ratio=costs.cost_ratio,
        cost_ratio_at={g: costs.cost_ratio_at(g) for g in gammas},
        verify_ratio={g: costs.verify_ratio(g) for g in gammas},
        break_even_alpha=break_even_alpha(gamma, costs.cost_ratio_at(gamma), costs.verify_ratio(gamma)),
        batch_size=costs.batch_size,
        context=costs.context,
    )


def best_timed_gamma(replay: Mapping[int, float], costs: StepCosts) -> tuple[int, float]:
    """(best gamma, its predicted speed-up) among the gammas whose costs were measured or lie between."""
    return best_gamma({gamma: tau for gamma, tau in replay.items() if gamma <= max(costs.verify_seconds)}, costs)


def verdict_of(evidence: Evidence, *, checkpoints: Sequence[Judgement], self_checks: dict[str, Any]) -> Verdict:
    """The verdict from evidence alone: the last contestant against the baseline and the served draft, where there are.

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
    chosen, predicted = (None, None) if costs is None else best_timed_gamma(best.replay, costs)
    repeated = Repetition.model_validate(repetition(evidence.frozen))
    return Verdict(
        rule=rule,
        gamma=gamma,
        prompts=best.prompts or 0,
        tokens=best.tokens or 0,
        baseline=_judged(evidence, BASELINE, JudgedDraft) if BASELINE in names else None,
        served=_judged(evidence, SERVED, JudgedDraft) if SERVED in names else None,
        best=_judged(evidence, evidence.best.name, BestDraft),
        target_tokens_per_second=evidence.speed["target"]["tokens_per_second"] if evidence.speed else None,
        speed_up={name: speed[0] for name, speed in speeds.items()} if speeds else None,
        speed_up_ci={name: speed[1] for name, speed in speeds.items()} if speeds else None,
        effects=effects,
        against_served=against_served,
        paired=PairedGain(alpha_gain=effects.alpha.gain, ci=effects.alpha.ci) if effects else None,
        replay=best.replay,
        best_gamma=chosen,
        predicted_speed_up=predicted,
        costs=describe_costs(costs, gamma) if costs is not None else None,
        checkpoints=[record.without_sums() for record in checkpoints],
        self_checks=self_checks,
        domains=best.domains,
        repetition=repeated,
        pays_off=pays,
        outcome=outcome,
        sentence=sentence,
        warnings=[*best.warnings, *([repeated.warning] if repeated.warning else [])],
        seconds={},
    )


def looks_of(checkpoints: Sequence[Judgement]) -> int:
    """How many drafts the best one was picked from: one a checkpoint, two where averaged weights were judged too."""
    return max(1, sum(2 if record.score_ema is not None else 1 for record in checkpoints[1:]))


def _effects(evidence: Evidence, against: str, looks: int) -> Effects:
    effects = paired_effects(
        evidence.own_scores(evidence.best.name),
        evidence.own_scores(against),
        evidence.keys,
        rule=evidence.rule,
        gamma=evidence.gamma,
        costs=_costs_at(evidence, evidence.best.name),
        baseline_costs=_costs_at(evidence, against),
        looks=looks,
    )
    return Effects.model_validate(effects)


def _costs_at(evidence: Evidence, name: str) -> tuple[float, float] | None:
    """(c, v(gamma)) of a contestant."""
    if not evidence.costs:
        return None
    costs = evidence.costs[name]
    return costs.cost_ratio_at(evidence.gamma), costs.verify_ratio(evidence.gamma)


def conclude(
    evidence: Evidence,
    effects: Effects | None,
    speeds: Speeds | None,
    against_served: Effects | None = None,
) -> tuple[Outcome, bool | None, str]:
    """(outcome, whether decoding with the draft is certainly faster than without, the answer in one sentence)."""
    who = "the distilled draft" if effects else evidence.best.label
    learned = _learned(effects) if effects else None
    pays, fast = _fast(evidence, speeds)
    end = f"{_against(against_served)}{'' if pays else _hopeless(evidence)}."
    if effects is not None and effects.certain == "loss":
        return "loss", pays, f"It got worse: {who} {learned} and {fast}{end}"
    if effects is not None and effects.certain == "none":
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


def _learned(effects: Effects) -> str:
    gain, (low, high) = effects.alpha.gain, effects.alpha.ci
    if gain == low == high == 0.0:
        return "is the undistilled one: no checkpoint is better than the undistilled baseline"
    numbers = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    if effects.certain != "none":
        return f"accepts {numbers} alpha over the undistilled baseline"
    size = ""
    if effects.prompts < effects.fewest_prompts:
        size = f"; {effects.prompts} prompts are too few to be certain, give at least {effects.fewest_prompts}"
    elif effects.minimal_detectable.alpha:
        size = f"; {effects.minimal_detectable.alpha:.3f} would have been seen with 80 % probability"
    return f"has no certain difference in alpha to the undistilled baseline ({numbers}{size})"


def _against(effects: Effects | None) -> str:
    """How it stands to the draft that is served today."""
    if effects is None:
        return ""
    gain, (low, high) = effects.alpha.gain, effects.alpha.ci
    word = {"gain": "accepts more than", "loss": "accepts less than", "none": "is not to be told in alpha from"}
    words = f"; it {word[effects.certain]} the draft served today ({gain:+.3f} [{low:+.3f}, {high:+.3f}] alpha"
    speed = effects.speed_up
    if speed is None:
        return f"{words})"
    return f"{words}, predicted speed-up {speed.gain:+.2f}x [{speed.ci[0]:+.2f}, {speed.ci[1]:+.2f}])"


def _fast(evidence: Evidence, speeds: Speeds | None) -> tuple[bool | None, str]:
    """(certainly faster than the target alone, in words)."""
    if speeds is None:
        judged, baseline = evidence.judged[evidence.best.name], evidence.judged.get(BASELINE)
        before = f" (undistilled {baseline.tau:.2f})" if baseline else ""
        return None, f"has tau {judged.tau:.2f} at gamma {evidence.gamma} by replay{before}, not timed here"
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
    advised = advice(evidence.costs[evidence.best.name])
    return f"; {advised[1]}" if advised else ""


def _judged(evidence: Evidence, name: str, kind: type[Draft]) -> Draft:
    """What the verdict tells of a draft: what is known of its judgement, and its speed."""
    known = evidence.judged[name].model_dump(include=set(kind.model_fields), exclude_unset=True)
    speed = {"tokens_per_second": evidence.speed[name]["tokens_per_second"]} if evidence.speed else {}
    known.pop("tokens_per_second", None)  # of the judge's batch, not of one prompt at a time
    return kind.model_validate(known | speed)
