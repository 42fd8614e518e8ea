"""A result as the report uses it: the judged draft, ways, curves. Pure: its figures are those of the result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distill.report.money import Prices
from distill.run.result import Result, RuleCurves
from distill.run.verdict_record import DraftOf, Outcome, Verdict
from speculative.measure.metrics import Curve

OUTCOMES: dict[Outcome, str] = {
    "pays_off": "Pays off",
    "best_with_lookup": "Best with lookup before the draft",
    "baseline_better": "A baseline is better",
    "no_speed": "No speed-up",
    "no_measurable_gain": "No measurable gain",
    "loss": "Loss",
    "not_timed": "Not timed",
}


@dataclass(frozen=True)
class View:
    """Input of every section. figures: {name: picture as a data URI}, see `distill.report.figures`."""

    result: Result
    prices: Prices | None = None
    figures: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> Verdict:
        return self.result.verdict

    @cached_property
    def draft(self) -> DraftOf:
        """The draft that the report is about."""
        return self.verdict.drafts[-1]

    @cached_property
    def ways(self) -> list[str]:
        """Every way with a curve or a slice, the drafts first."""
        drafts, curves = [one.way for one in self.verdict.drafts], self.curves.ways if self.curves else {}
        return list(dict.fromkeys([*drafts, *curves]))

    @cached_property
    def curves(self) -> RuleCurves | None:
        """Curves of the judged rule, or of the first rule if that one has none."""
        rules = self.result.curves.rules if self.result.curves else []
        return next((curves for curves in rules if curves.rule == self.verdict.rule), rules[0] if rules else None)

    @cached_property
    def survival(self) -> dict[str, list[float]]:
        """{way: share of blocks whose first j tokens are all accepted}: live for the judged draft if it was decoded, else by replay."""
        curves = self.in_order(self.curves) if self.curves else []
        replayed = {way: curve.survival for way, curve in curves if curve.survival}
        return replayed | ({self.draft.way: self.verdict.survival} if self.verdict.survival else {})

    def in_order(self, curves: RuleCurves) -> list[tuple[str, Curve]]:
        """(way, curve) of the ways that have a curve, in the order of `ways`."""
        return [(name, curves.ways[name]) for name in self.ways if name in curves.ways]

    def timed_speed_ups(self, curve: Curve) -> dict[int, float]:
        """{gamma: predicted speed-up} of a curve at the gammas up to the largest one that was timed."""
        last = max(self.verdict.costs.verify_ratio, default=None) if self.verdict.costs else None
        return {
            gamma: value
            for gamma, value in zip(curve.gammas, curve.predicted_speed_up or [], strict=False)
            if value is not None and (last is None or gamma <= last)
        }
