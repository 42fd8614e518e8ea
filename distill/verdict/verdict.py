"""The verdict of a run: baseline against best, paired, timed, with the best gamma. Its shape: distill/run/verdict_record.py."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from distill.run.verdict_record import (
    LOOKUP,
    PAST,
    TOGETHER,
    WAYS,
    BestDraft,
    Costs,
    Effects,
    JudgedDraft,
    Judgement,
    Latency,
    PairedGain,
    Repetition,
    Rival,
    Verdict,
)
from distill.verdict.evidence import BASELINE, SERVED, Evidence
from distill.verdict.sentence import conclude
from speculative.explain.repetition import repetition
from speculative.measure.cost import StepCosts, best_gamma, break_even_alpha, near_best_gammas
from speculative.measure.effects import paired_effects
from speculative.measure.intervals import ratio_interval, sum_by_prompt
from speculative.measure.metrics import latency
from speculative.measure.race import ALONE, Speed
from speculative.measure.replay import law_of

Draft = TypeVar("Draft", bound=JudgedDraft)


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
    speeds = speeds_of(evidence, looks)
    outcome, pays, run, sentence = conclude(evidence, effects, speeds, against_served)
    taus = {gamma: tau for gamma, tau in best.replay.items() if costs and 1 <= gamma <= max(costs.verify_seconds)}
    chosen, predicted = (None, None) if costs is None else best_gamma(taus, costs)
    repeated = Repetition.model_validate(repetition(evidence.frozen))
    return Verdict(
        rule=rule,
        gamma=gamma,
        prompts=best.prompts or 0,
        tokens=best.tokens or 0,
        baseline=_judged(evidence, BASELINE, JudgedDraft, speeds) if BASELINE in names else None,
        served=_judged(evidence, SERVED, JudgedDraft, speeds) if SERVED in names else None,
        best=_widened(evidence, _judged(evidence, evidence.best.name, BestDraft, speeds), looks),
        target_tokens_per_second=speeds[ALONE].tokens_per_second if speeds else None,
        speed_up={name: speeds[name].speed_up for name in names} if speeds else None,
        speed_up_ci={name: speeds[name].interval for name in names} if speeds else None,
        speed_up_median={name: speeds[name].median for name in names} if speeds else None,
        rivals=_rivals(evidence, speeds),
        latency=_latency(evidence),
        load=[],
        plain_wins_from=None,
        roofline=None,
        run=run,
        effects=effects,
        against_served=against_served,
        paired=PairedGain(alpha_gain=effects.alpha.gain, ci=effects.alpha.ci) if effects else None,
        replay=best.replay,
        best_gamma=chosen,
        best_gamma_range=near_best_gammas(taus, costs) if costs else None,
        predicted_speed_up=predicted,
        costs=describe_costs(costs, gamma) if costs is not None else None,
        drafting=evidence.best.draft.drafting,
        checkpoints=[record.without_sums() for record in checkpoints],
        self_checks=self_checks,
        domains=best.domains,
        targets=[],
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


def _effects(evidence: Evidence, against: str, looks: int, of: str | None = None) -> Effects:
    of = of or evidence.best.name
    effects = paired_effects(
        evidence.own_scores(of),
        evidence.own_scores(against),
        evidence.keys,
        rule=evidence.rule,
        gamma=evidence.gamma,
        costs=_costs_at(evidence, of),
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


def speeds_of(evidence: Evidence, looks: int) -> dict[str, Speed] | None:
    """Of the target alone and of every entrant; where the picked draft drafts, intervals are widened for the looks."""
    contest = evidence.contest
    if contest is None:
        return None
    picked = (evidence.best.name, TOGETHER, *WAYS.values())
    return {
        name: contest.speed(name, confidence_of(looks) if name in picked else confidence_of(1))
        for name in (ALONE, *(one.name for one in contest.entrants))
    }


def confidence_of(looks: int) -> float:
    """Of one interval, so that as many of them hold together with 95 %."""
    return 1.0 - 0.05 / looks


def _rivals(evidence: Evidence, speeds: Mapping[str, Speed] | None) -> list[Rival]:
    """What needs no training, the draft with it, and the draft otherwise: drafting the other way, in fewer bytes."""
    if evidence.contest is None or speeds is None:
        return []
    rows = []
    tokens = sum(len(text.response_ids) for text in evidence.frozen)
    others = [one.name for one in evidence.others]
    for name in (LOOKUP, PAST, TOGETHER, *others):
        if name not in evidence.contest:
            continue
        one, speed = evidence.contest[name], speeds[name]
        ratio, interval = evidence.contest.against(evidence.best.name, name)
        rows.append(
            Rival(
                name=name,
                gamma=one.gamma,
                tau=tokens / float(one.blocks_N.sum()),
                tokens_per_second=speed.tokens_per_second,
                speed_up=speed.speed_up,
                speed_up_ci=speed.interval,
                draft_over_it=ratio,
                draft_over_it_ci=interval,
                ngrams=one.ngrams,
                then_gamma=one.then_gamma,
                behind=one.behind,
                tuned_on=one.tuned_on,
                timed_prompts=speed.timed,
                alpha_change=_effects(evidence, evidence.best.name, 1, name).alpha
                if name in others and name not in WAYS.values()
                else None,
            )
        )
    return rows


def _latency(evidence: Evidence) -> dict[str, Latency]:
    """Of the responses that were timed, by entrant and of the target alone."""
    laps = evidence.contest.laps if evidence.contest else {}
    said = {name: [lap.response for own in of.values() for lap in own] for name, of in laps.items()}
    return {name: Latency.model_validate(latency(responses)) for name, responses in said.items()}


def _judged(evidence: Evidence, name: str, kind: type[Draft], speeds: Mapping[str, Speed] | None) -> Draft:
    """What the verdict tells of a draft: what is known of its judgement, and its speed."""
    known = evidence.judged[name].model_dump(include=set(kind.model_fields), exclude_unset=True)
    known.pop("tokens_per_second", None)  # of the judge's batch, not of one prompt at a time
    if speeds is not None and evidence.contest is not None:
        one, tokens = evidence.contest[name], sum(len(text.response_ids) for text in evidence.frozen)
        known |= {
            "tokens_per_second": speeds[name].tokens_per_second,
            "speed_gamma": one.gamma,
            "speed_tau": tokens / float(one.blocks_N.sum()),
        }
    return kind.model_validate(known)


def _widened(evidence: Evidence, best: BestDraft, looks: int) -> BestDraft:
    """The picked draft's own alpha and tau, their intervals as wide as its gain's: it is there because it looked good."""
    if looks == 1:
        return best
    confidence = confidence_of(looks)
    own = evidence.own_scores(evidence.best.name)
    law = law_of(evidence.rule, evidence.settings.sampling)
    accepted_P = sum_by_prompt(evidence.keys, np.array([one.accept_probs(law).sum() for one in own]))
    tokens_P = sum_by_prompt(evidence.keys, np.array([len(one) for one in own]))
    changed: dict[str, Any] = {"alpha_ci": ratio_interval(accepted_P, tokens_P, confidence)}
    if evidence.responses:
        said_P, blocks_P = (
            np.array([float(value) for value in values])
            for values in zip(*((len(one.response_ids), one.blocks) for one in evidence.responses), strict=True)
        )
        changed["tau_ci"] = ratio_interval(said_P, blocks_P, confidence)
    return best.model_copy(update=changed)
