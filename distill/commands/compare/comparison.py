"""A comparison: every draft on one frozen text, paired differences to the first, domains; its keys are what `--out` writes."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distill.run.frozen_text import FrozenText
from distill.run.verdict_record import Effects, Interval, Record
from distill.verdict.verdict import describe_costs
from speculative.measure.cost import StepCosts, best_gamma, predicted_speed_up
from speculative.measure.curves import rule_curve
from speculative.measure.effects import paired_effects
from speculative.measure.token_scores import TokenScores


@dataclass(frozen=True)
class Entry:
    """A draft on the table: what the frozen text and the clock say of it."""

    name: str
    path: str
    parameters: int
    scores: list[TokenScores]
    costs: StepCosts | None


class ComparedDraft(Record):
    """A draft's row: tau at the gamma compared at, `taus` at every gamma; speeds are predicted, null without timing."""

    name: str
    path: str
    parameters: int
    prompts: int
    tokens: int
    alpha: float
    alpha_ci: Interval
    tau: float
    tau_ci: Interval
    survival: list[float]
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


class Difference(Effects):
    """What a draft gains over the first."""

    name: str
    path: str


class DomainComparison(Record):
    """Alpha and tau by draft on one domain; the differences are widened for all domains."""

    name: str
    prompts: int
    tokens: int
    alpha: dict[str, float]
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


def comparison(text: FrozenText, entries: Sequence[Entry], gamma: int) -> Comparison:
    """The table, the paired differences and the domains; no gate is judged yet."""
    keys = [response.prompt for response in text.responses]
    first, *others = entries
    domains = sorted({response.domain for response in text.responses})
    looks = len(others)
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
    curve = rule_curve(entry.scores, keys, rule, survival_gamma=gamma)
    taus = dict(zip(curve["gammas"], curve["tau"], strict=True))
    bands = dict(zip(curve["gammas"], curve["tau_ci"], strict=True))
    row = ComparedDraft(
        name=entry.name, path=entry.path, parameters=entry.parameters, prompts=curve["prompts"], tokens=curve["tokens"],
        alpha=curve["alpha"], alpha_ci=curve["alpha_ci"], tau=taus[gamma], tau_ci=bands[gamma],
        survival=curve["survival"], gammas=curve["gammas"], taus=curve["tau"], taus_ci=curve["tau_ci"], speed_up=None,
        speed_up_ci=None, best_gamma=None, best_speed_up=None, draft_step_seconds=None, cost_ratio=None,
    )  # fmt: skip
    if entry.costs is None:
        return row
    c, v = entry.costs.cost_ratio_at(gamma), entry.costs.verify_ratio(gamma)
    # Gammas beyond the measured ones would be guesses.
    best, speed = best_gamma({g: taus[g] for g in range(1, max(entry.costs.verify_seconds) + 1)}, entry.costs)
    low, high = bands[gamma]
    return row.model_copy(
        update={
            "speed_up": predicted_speed_up(taus[gamma], gamma, c, v),
            "speed_up_ci": (predicted_speed_up(low, gamma, c, v), predicted_speed_up(high, gamma, c, v)),
            "best_gamma": best,
            "best_speed_up": speed,
            "draft_step_seconds": entry.costs.draft_step_seconds,
            "cost_ratio": entry.costs.cost_ratio,
            "cost_ratio_at": c,
        }
    )


def _difference(ours: Entry, first: Entry, keys: Sequence[Any], rule: str, gamma: int, looks: int) -> Difference:
    """What a draft gains over the first: `paired_effects`, with each draft's own price in the speed-up."""
    price, first_price = (
        None if entry.costs is None else (entry.costs.cost_ratio_at(gamma), entry.costs.verify_ratio(gamma))
        for entry in (ours, first)
    )
    effects = paired_effects(
        ours.scores, first.scores, keys, rule=rule, gamma=gamma, costs=price if first_price else None,
        baseline_costs=first_price, looks=looks,
    )  # fmt: skip
    return Difference.model_validate({"name": ours.name, "path": ours.path, **effects})


def _domain(name: str, text: FrozenText, entries: Sequence[Entry], gamma: int, looks: int) -> DomainComparison:
    chosen = [index for index, response in enumerate(text.responses) if response.domain == name]
    keys = [text.responses[index].prompt for index in chosen]
    own = [replace(entry, scores=[entry.scores[index] for index in chosen]) for entry in entries]
    curves = {entry.name: rule_curve(entry.scores, keys, text.rule, (gamma,), survival_gamma=gamma) for entry in own}
    first, *others = own
    return DomainComparison(
        name=name,
        prompts=curves[first.name]["prompts"],
        tokens=curves[first.name]["tokens"],
        alpha={draft: curve["alpha"] for draft, curve in curves.items()},
        tau={draft: curve["tau"][0] for draft, curve in curves.items()},
        differences=[_difference(entry, first, keys, text.rule, gamma, looks) for entry in others],
    )
