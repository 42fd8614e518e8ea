"""Keys of verdict.json that go when their readers have moved to `measured`."""

from collections.abc import Mapping, Sequence
from typing import Any

from distill.run.verdict_record import (
    WAYS,
    BestDraft,
    Effects,
    Gain,
    JudgedDraft,
    LoadRival,
    LoadRow,
    Rival,
)
from distill.verdict.evidence import Evidence
from distill.verdict.sentence import Conclusion
from speculative.measure.cost import best_gamma
from speculative.measure.effects import paired_effects
from speculative.measure.measured import HELD_OUT, SERVED, TARGET, UNDISTILLED, Measured


def old_fields(
    evidence: Evidence, measured: Sequence[Measured], said: Conclusion, gain: Effects | None,
    taus: Mapping[int, float],
) -> dict[str, Any]:  # fmt: skip
    rows = {
        one.way: one for one in measured if one.concurrency == 1 and one.text == HELD_OUT and one.speed_up is not None
    }
    judged = {one.way: one for one in measured if one.text == HELD_OUT and one.speed_up is None}
    best, names = evidence.best.name, [one.name for one in evidence.candidates]
    costs = evidence.costs[best] if evidence.costs else None
    chosen, predicted = (None, None) if costs is None else best_gamma(taus, costs)

    def draft(name: str, kind: Any) -> Any:
        known = evidence.judged[name].model_dump(include=set(kind.model_fields), exclude_unset=True)
        known.pop("tokens_per_second", None)
        known |= {"alpha_ci": judged[name].alpha_ci, "tau_ci": judged[name].tau_ci}
        if name in rows:
            row = rows[name]
            known |= {"tokens_per_second": row.tokens_per_second, "speed_gamma": row.gamma, "speed_tau": row.tau}
        return kind.model_validate(known)

    return {
        "baseline": draft(UNDISTILLED, JudgedDraft) if UNDISTILLED in names else None,
        "served": draft(SERVED, JudgedDraft) if SERVED in names else None,
        "best": draft(best, BestDraft),
        "target_tokens_per_second": rows[TARGET].tokens_per_second if rows else None,
        "speed_up": {name: rows[name].speed_up for name in names} if rows else None,
        "speed_up_ci": {name: rows[name].speed_up_ci for name in names} if rows else None,
        "rivals": [_rival(evidence, row) for name, row in rows.items() if name not in (*names, TARGET)],
        "load": _loads(evidence, measured),
        "run": evidence.contest.to_run() if evidence.contest else None,
        "effects": gain,
        "best_gamma": chosen,
        "predicted_speed_up": predicted,
        "drafting": evidence.best.draft.drafting,
        "domains": evidence.judged[best].domains,
    }


def _rival(evidence: Evidence, row: Measured) -> Rival:
    assert evidence.contest is not None
    ratio, interval = evidence.contest.against(evidence.best.name, row.way)
    change = None
    if row.way in [one.name for one in evidence.others] and row.way not in WAYS.values():
        question = evidence.question
        found = paired_effects(
            evidence.own_scores(row.way), evidence.own_scores(evidence.best.name), question.keys, rule=question.rule, gamma=question.gamma
        )  # fmt: skip
        change = Gain.model_validate(found["alpha"])
    return Rival(
        name=row.way, gamma=row.gamma, tau=row.tau, tokens_per_second=row.tokens_per_second, speed_up=row.speed_up,
        speed_up_ci=row.speed_up_ci, draft_over_it=ratio, draft_over_it_ci=interval, ngrams=row.ngrams, then_gamma=row.then_gamma,
        behind=row.behind, tuned_on=row.tuned_on, timed_prompts=evidence.contest.speed(row.way).timed, alpha_change=change,
    )  # fmt: skip


def _loads(evidence: Evidence, measured: Sequence[Measured]) -> list[LoadRow]:
    found = []
    for contest in evidence.contests if evidence.contests[1:] else ():
        rows = {one.way: one for one in measured if one.concurrency == contest.concurrency and one.speed_up is not None}
        names = [one.name for one in evidence.candidates]
        if evidence.best.name not in rows:
            continue
        row = rows[evidence.best.name]
        found.append(
            LoadRow(
                concurrency=contest.concurrency, gamma=row.gamma, speed_up=row.speed_up, speed_up_ci=row.speed_up_ci,
                predicted=row.speed_up, plain_tokens_per_second=rows[TARGET].tokens_per_second,
                tokens_per_second=row.tokens_per_second, run=contest.to_run(),
                rivals=[
                    LoadRival(
                        name=one.way, gamma=one.gamma, ngrams=one.ngrams, then_gamma=one.then_gamma, tuned_on=one.tuned_on,
                        speed_up=one.speed_up, speed_up_ci=one.speed_up_ci,
                    )
                    for one in rows.values() if one.way not in (*names, TARGET)
                ],
            )
        )  # fmt: skip
    return found
