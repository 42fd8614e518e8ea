"""A comparison: every draft on one frozen text, paired differences to the first, domains; its keys are what `--out` writes."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from distill.commands.compare.contestants import Entry
from distill.run.frozen_text import FrozenText
from distill.run.verdict_record import CallEffects, Certain, Gain, Interval, Record
from distill.verdict.verdict import describe_costs
from speculative.measure.curves import CURVE_GAMMAS, calls_curve, rule_curve
from speculative.measure.effects import effects_of_calls, paired_effects
from speculative.measure.token_scores import scored_gammas


class ComparedDraft(Record):
    """A contestant's row: tau at the gamma compared at, `taus` at every gamma; speeds are predicted, null without timing.

    Of `lookup` and `lookup+DRAFT` alpha and survival are null, and the n-gram sizes are told. Of `parallel+DRAFT` the draft step and
    `cost_ratio` are those of a block, which is one draft call; `cost_ratio_at` is of a token of it.
    """

    name: str
    path: str
    parameters: int
    prompts: int
    tokens: int
    alpha: float | None
    alpha_ci: Interval | None
    tau: float
    tau_ci: Interval
    survival: list[float] | None
    gammas: list[int]
    taus: list[float]
    taus_ci: list[Interval]
    speed_up: float | None
    speed_up_ci: Interval | None
    best_gamma: int | None
    best_speed_up: float | None
    draft_step_seconds: float | None
    cost_ratio: float | None
    cost_ratio_at: float | None = None
    max_ngram: int | None = None
    min_ngram: int | None = None


class Difference(CallEffects):
    """What a contestant gains over the first; alpha is null where one of the two has none."""

    name: str
    path: str
    alpha: Gain | None
    certain: Certain | None


class DomainComparison(Record):
    """Alpha and tau by draft on one domain; the differences are widened for all domains."""

    name: str
    prompts: int
    tokens: int
    alpha: dict[str, float | None]
    tau: dict[str, float]
    differences: list[Difference]


class JudgedGate(Record):
    """A `--fail-below` and the value it was held against."""

    condition: str
    metric: str
    value: float
    bound: float
    failed: bool


class TargetCosts(Record):
    """What all drafts share of the measured costs; the rest stands in each draft's row."""

    target_step_seconds: float
    verify_ratio: dict[int, float]
    batch_size: int | None
    context: int | None


class Comparison(Record):
    """Drafts on the held-out text of the run `on`; `against` is the first of them."""

    format: Literal[1]
    kind: Literal["comparison"]
    made: str
    on: str
    target: dict[str, str]
    rule: str
    gamma: int
    sampling: dict[str, Any]
    prompts: int
    tokens: int
    drafts: list[ComparedDraft]
    costs: TargetCosts | None
    against: str
    differences: list[Difference]
    domains: list[DomainComparison]
    plot: str | None
    gates: list[JudgedGate]
    failures: list[str]


def comparison(text: FrozenText, entries: Sequence[Entry], gamma: int, looks: int = 1) -> Comparison:
    """The table, the paired differences and the domains; no gate is judged yet.

    ``looks``: drafts that each contestant was picked from on this text; the differences are widened for them too.
    """
    keys = [response.prompt for response in text.responses]
    first, *others = entries
    domains = sorted({response.domain for response in text.responses})
    looks *= len(others)
    rows = [_row(entry, keys, text.rule, gamma) for entry in entries]
    costs = (
        None
        if first.costs is None
        else describe_costs(first.costs, gamma).model_dump(include=set(TargetCosts.model_fields))
    )
    return Comparison(
        format=1,
        kind="comparison",
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        on=str(text.run),
        target={"path": text.config.target.path, "fingerprint": str(text.manifest["target"])},
        rule=text.rule,
        gamma=gamma,
        sampling=text.sampling.as_dict(),
        prompts=rows[0].prompts,
        tokens=rows[0].tokens,
        drafts=rows,
        costs=costs and TargetCosts(**costs),
        against=first.name,
        differences=[_difference(entry, first, keys, text.rule, gamma, looks) for entry in others],
        domains=[
            _domain(name, text, entries, gamma, looks * len(domains)) for name in (domains if len(domains) > 1 else [])
        ],
        plot=None,
        gates=[],
        failures=[],
    )


def _row(entry: Entry, keys: Sequence[Any], rule: str, gamma: int) -> ComparedDraft:
    curve = _curve(entry, keys, rule, CURVE_GAMMAS, gamma)
    taus = dict(zip(curve["gammas"], curve["tau"], strict=True))
    bands = dict(zip(curve["gammas"], curve["tau_ci"], strict=True))
    max_ngram, min_ngram = entry.sizes or (None, None)
    row = ComparedDraft(
        name=entry.name, path=entry.path, parameters=entry.parameters, prompts=curve["prompts"], tokens=curve["tokens"],
        alpha=curve["alpha"], alpha_ci=curve["alpha_ci"], tau=taus[gamma], tau_ci=bands[gamma],
        survival=curve["survival"], gammas=curve["gammas"], taus=curve["tau"], taus_ci=curve["tau_ci"], speed_up=None,
        speed_up_ci=None, best_gamma=None, best_speed_up=None, draft_step_seconds=None, cost_ratio=None,
        max_ngram=max_ngram, min_ngram=min_ngram,
    )  # fmt: skip
    if entry.costs is None:
        return row
    # Gammas beyond the measured ones would be guesses.
    gammas = scored_gammas(entry.scores or [], range(1, max(entry.costs.verify_seconds) + 1))
    steps_NK = entry.steps(rule, gammas)
    assert steps_NK is not None
    speeds = dict(zip(gammas, (curve["tokens"] / steps_NK.sum(0)).tolist(), strict=True))
    best = max(speeds, key=speeds.__getitem__)
    own_N1 = entry.steps(rule, [gamma])
    assert own_N1 is not None
    # Tokens per target step, as tau is tokens per target call.
    speed = calls_curve(_tokens(entry), own_N1, keys)
    drafting = entry.scores is not None
    return row.model_copy(
        update={
            "speed_up": speed["tau"][0],
            "speed_up_ci": tuple(speed["tau_ci"][0]),
            "best_gamma": best if speeds[best] > 1.0 else 0,
            "best_speed_up": max(speeds[best], 1.0),
            "draft_step_seconds": entry.costs.draft_step_seconds if drafting else None,
            "cost_ratio": entry.costs.cost_ratio if drafting else None,
            "cost_ratio_at": entry.costs.cost_ratio_at(gamma) if drafting else None,
        }
    )


def _tokens(entry: Entry) -> np.ndarray:
    return np.array([len(one) for one in (entry.scores if entry.kept is None else entry.kept) or []])


def _curve(entry: Entry, keys: Sequence[Any], rule: str, gammas: Iterable[int], survival_gamma: int) -> dict[str, Any]:
    """`rule_curve`; of a rival without alpha and survival."""
    gammas = scored_gammas(entry.scores or [], gammas)
    if entry.kept is None:
        assert entry.scores is not None
        return rule_curve(entry.scores, keys, rule, gammas, survival_gamma=survival_gamma)
    blocks = entry.blocks(rule, gammas)
    curve = calls_curve(_tokens(entry), blocks.found_NK + blocks.others_NK, keys)
    return {"gammas": gammas, "alpha": None, "alpha_ci": None, "survival": None, **curve}


def _difference(ours: Entry, first: Entry, keys: Sequence[Any], rule: str, gamma: int, looks: int) -> Difference:
    """What a contestant gains over the first, with each one's own price in the speed-up."""
    named = {"name": ours.name, "path": ours.path}
    if ours.kept is not None or first.kept is not None:
        sides = []
        for entry in (ours, first):
            blocks, steps_N1 = entry.blocks(rule, (gamma,)), entry.steps(rule, (gamma,))
            calls_N = (blocks.found_NK + blocks.others_NK)[:, 0]
            sides.append((calls_N, None if steps_N1 is None else steps_N1[:, 0]))
        return Difference.model_validate(named | effects_of_calls(keys, _tokens(first), *sides, looks=looks))
    price, first_price = (
        None if entry.costs is None else (entry.costs.cost_ratio_at(gamma), entry.costs.verify_ratio(gamma))
        for entry in (ours, first)
    )
    assert ours.scores is not None
    assert first.scores is not None
    effects = paired_effects(
        ours.scores, first.scores, keys, rule=rule, gamma=gamma, costs=price if first_price else None,
        baseline_costs=first_price, looks=looks,
    )  # fmt: skip
    return Difference.model_validate(named | effects)


def _domain(name: str, text: FrozenText, entries: Sequence[Entry], gamma: int, looks: int) -> DomainComparison:
    chosen = [index for index, response in enumerate(text.responses) if response.domain == name]
    keys = [text.responses[index].prompt for index in chosen]
    own = [entry.chosen(chosen) for entry in entries]
    curves = {entry.name: _curve(entry, keys, text.rule, (gamma,), gamma) for entry in own}
    first, *others = own
    return DomainComparison(
        name=name,
        prompts=curves[first.name]["prompts"],
        tokens=curves[first.name]["tokens"],
        alpha={draft: curve["alpha"] for draft, curve in curves.items()},
        tau={draft: curve["tau"][0] for draft, curve in curves.items()},
        differences=[_difference(entry, first, keys, text.rule, gamma, looks) for entry in others],
    )
