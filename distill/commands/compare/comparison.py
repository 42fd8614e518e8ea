"""A comparison: every way on the same held-out responses as rows of `Measured`, and paired differences to the first.

Its keys are those of `--out`.

Shapes: N responses, K gammas.
"""

import datetime
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from distill.config.retired import retired
from distill.config.ways import way_named
from distill.run.heldout_set import HeldoutSet
from speculative.drafters.draft import Drafting
from speculative.drafters.registry import Recipe, recipes
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.baseline_replay import found_blocks, found_steps, kept_by_lookup, tuned_lookup
from speculative.measure.cost import StepCosts, gamma_to_run, given_costs
from speculative.measure.effects import CallEffects, Certain, Gain, paired_gains
from speculative.measure.engine_costs import EngineCosts
from speculative.measure.intervals import Interval
from speculative.measure.measured import HELD_OUT, LOOKUP, Measured, Row, Way
from speculative.measure.metrics import CURVE_GAMMAS, alpha_with_interval, calls_curve, predicted_row
from speculative.measure.record import Record
from speculative.measure.replay import Blocks, expected_blocks, survival_of, texts_of
from speculative.measure.token_scores import TokenScores, accepted_sums, scored_gammas
from speculative.rules.rule import Rule

# Where nothing was timed the fewest target calls are best.
UNTIMED = given_costs(1.0, 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored(Way):
    """A way with its scores on the held-out responses and its step costs, from which figures at every gamma follow.

    scores: of its draft; None for lookup alone. engine: its run's step times in a serving engine. kept: where lookup
    is in it, tokens of a lookup that are kept at each place of each
    response (`kept_by_lookup`). costs: of lookup alone the target's side. shape: of its draft.
    """

    path: str
    parameters: int
    scores: list[TokenScores] | None
    costs: StepCosts | None
    kept: list[np.ndarray] | None = None
    engine: EngineCosts | None = None
    shape: Hashable = None

    def chosen(self, rows: Sequence[int]) -> "Scored":
        """The same, restricted to these responses."""
        return replace(
            self,
            scores=None if self.scores is None else [self.scores[row] for row in rows],
            kept=None if self.kept is None else [self.kept[row] for row in rows],
        )

    @property
    def judged(self) -> list[TokenScores] | None:
        """The scores of a draft without lookup, for which alpha and survival are known; None otherwise."""
        return self.scores if self.kept is None else None

    @property
    def tokens_N(self) -> np.ndarray:
        return np.array([len(one) for one in (self.scores if self.kept is None else self.kept) or []])

    def _blocks(self, rule: Rule, gammas: Sequence[int]) -> Blocks:
        """Expected blocks (N, K); `found_NK` are those that lookup proposed."""
        drafted = None if self.scores is None else texts_of(self.scores, rule)
        if self.kept is None:
            return expected_blocks(drafted or [], gammas)
        return found_blocks(self.kept, gammas, drafted)

    def calls(self, rule: Rule, gammas: Sequence[int]) -> np.ndarray:
        """Expected target calls (N, K)."""
        return self._blocks(rule, gammas).calls_NK

    def steps(self, rule: Rule, gammas: Sequence[int]) -> np.ndarray | None:
        """Target steps (N, K) that the responses take, with their prompts; None where nothing was timed."""
        if self.costs is None:
            return None
        steps_NK = found_steps(self._blocks(rule, gammas), gammas, self.costs, None if self.scores is None else gammas)
        return self.costs.with_prompts(steps_NK, self.tokens_N[:, None], self.scores is not None)


class NamedWay(NamedTuple):
    """A way to compare: its recipe, and its draft (None: it needs none)."""

    recipe: Recipe
    draft: str | None

    @property
    def drafting(self) -> Drafting:
        return "parallel" if self.recipe.parallel else "autoregressive"


@functools.cache
def way_of(text: str) -> NamedWay:
    """`WAY:DRAFT`, `WAY` for one that needs no draft, or `DRAFT`. To name a folder called prompt-lookup, write `./prompt-lookup`.

    Raises UserError: a way that needs a draft without one or one without a use, and one that replay cannot predict from the text alone.
    """
    name, colon, draft = text.partition(":")
    if text.startswith(("lookup+", "parallel+")) and not colon and text not in recipes() and not Path(text).exists():
        raise UserError(retired("compare lookup+DRAFT") or text)
    known = name in recipes() or retired(f"way: {name}") is not None
    if not known:
        return NamedWay(recipes()["draft"], text)
    recipe = way_named(name)
    if not recipe.replayed or "past" in recipe.needs:
        raise UserError(f"{text}: {name} is not compared by replay; judge.ways times it in a run")
    if ("draft" in recipe.needs) != bool(draft):
        raise UserError(f"{text}: write {name}:DRAFT" if "draft" in recipe.needs else f"{text}: write {name} alone")
    return NamedWay(recipe, draft or None)


def with_lookup(
    draft: Scored | None, texts: Sequence[HeldoutResponse], rule: Rule, gamma: int, costs: StepCosts | None
) -> Scored:
    """Lookup alone, or before a draft, at the n-gram sizes that replay of the text finds best at this gamma.

    costs: measured ones of the draft, or of any draft for lookup alone; None: untimed.
    """
    scored = draft or Scored(name=LOOKUP, path=LOOKUP, parameters=0, scores=None, costs=costs)
    drafted = None if scored.scores is None else texts_of(scored.scores, rule)
    sizes = tuned_lookup(texts, costs or UNTIMED, (gamma,), drafted).sizes
    kept = [kept_by_lookup(text, max(CURVE_GAMMAS), *sizes) for text in texts]
    return replace(scored, costs=costs, kept=kept, ngrams=sizes)


class ComparedWay(Record):
    """Figures of a way besides its rows. survival is null for a way with lookup. For `parallel:DRAFT` the draft step and `cost_ratio`
    are per block, which is one draft call; `cost_ratio_at` is per token. best_gamma 0: none pays. in_engine: `EngineCosts.rows`.
    """

    way: str
    path: str
    parameters: int
    survival: list[float] | None
    gammas: list[int]
    taus: list[float]
    taus_ci: list[Interval]
    best_gamma: int | None = None
    best_speed_up: float | None = None
    draft_step_seconds: float | None = None
    cost_ratio: float | None = None
    cost_ratio_at: float | None = None
    engine: str | None = None
    in_engine: Sequence[Row] = ()


class Difference(CallEffects):
    """What a way gains over the first on a text; alpha is null where one of the two has none."""

    way: str
    text: str
    alpha: Gain | None
    certain: Certain | None


class JudgedGate(Record):
    """A `--fail-below` and the value it was compared with."""

    condition: str
    metric: str
    value: float
    bound: float
    failed: bool


class Comparison(Record):
    """Ways on the held-out text of the run `on`, all at `gamma`; `against` is the first of them. Rows and differences are of the whole
    text and of each of its domains. target_step_seconds, verify_ratio: shared by all, null and empty without timing.
    """

    format: Literal[2]
    kind: Literal["comparison"]
    made: str
    on: str
    target: dict[str, str]
    rule: str
    gamma: int
    sampling: dict[str, Any]
    ways: list[ComparedWay]
    measured: list[Row]
    target_step_seconds: float | None
    verify_ratio: dict[int, float]
    differences: list[Difference]
    gates: list[JudgedGate]
    failures: list[str]

    @property
    def against(self) -> str:
        """The way that the others are compared with."""
        return self.ways[0].way

    @property
    def domains(self) -> list[str]:
        """The texts of single domains; empty if there is only one domain."""
        return list(dict.fromkeys(row.text for row in self.measured if row.text != HELD_OUT))

    def row(self, way: str, text: str = HELD_OUT) -> Measured:
        return next(row for row in self.measured if (row.way, row.text) == (way, text))

    def differences_on(self, text: str = HELD_OUT) -> list[Difference]:
        return [one for one in self.differences if one.text == text]


def comparison(text: HeldoutSet, scored_ways: Sequence[Scored], gamma: int, looks: int = 1) -> Comparison:
    """The rows, the paired differences and the domains; no gate is judged yet.

    ``looks``: drafts that each way was picked from on this text; the differences are widened for them too.
    """
    first, *others = scored_ways
    domains = sorted({response.domain for response in text.responses})
    texts = [HELD_OUT, *(domains if len(domains) > 1 else [])]
    looks *= len(others)
    measured, differences = [], []
    for name in texts:
        chosen = [row for row, one in enumerate(text.responses) if name in (HELD_OUT, one.domain)]
        keys = [text.responses[row].prompt for row in chosen]
        own = [scored.chosen(chosen) for scored in scored_ways]
        widened = looks * (1 if name == HELD_OUT else len(domains))
        measured += [_row(scored, keys, text.rule, gamma, name) for scored in own]
        differences += [_difference(scored, own[0], keys, text.rule, gamma, (name, widened)) for scored in own[1:]]
    costs, keys = first.costs, [response.prompt for response in text.responses]
    return Comparison(
        format=2,
        kind="comparison",
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        on=str(text.run),
        target={"path": text.config.target.path, "fingerprint": str(text.manifest["target"])},
        rule=text.rule.name,
        gamma=gamma,
        sampling=text.sampling.as_dict(),
        ways=[_way(scored, keys, text.rule, gamma) for scored in scored_ways],
        measured=measured,
        target_step_seconds=None if costs is None else costs.target_seconds,
        verify_ratio={} if costs is None else {g: costs.verify_ratio(g) for g in sorted(costs.verify_seconds)},
        differences=differences,
        gates=[],
        failures=[],
    )


def _row(scored: Scored, keys: Sequence[Any], rule: Rule, gamma: int, text: str) -> Measured:
    """A row for a way on a text at one gamma: alpha and tau by replay, and the predicted speed-up if steps were timed."""
    tuned_on = None if scored.ngrams is None else scored.tuned_on
    row = Measured(scored.name, rule.name, text=text, gamma=gamma, ngrams=scored.ngrams, tuned_on=tuned_on)
    if scored.judged is not None:
        alpha, alpha_ci = alpha_with_interval([own.accept_probs(rule) for own in scored.judged], keys)
        row = replace(row, alpha=alpha, alpha_ci=alpha_ci, how={"alpha": "replay"})
    steps_N1 = scored.steps(rule, (gamma,))
    steps_N = None if steps_N1 is None else steps_N1[:, 0]
    return predicted_row(row, keys, scored.tokens_N, scored.calls(rule, (gamma,))[:, 0], steps_N)


def _way(scored: Scored, keys: Sequence[Any], rule: Rule, gamma: int) -> ComparedWay:
    gammas, scores, costs = scored_gammas(scored.scores or [], CURVE_GAMMAS), scored.scores, scored.costs
    curve = calls_curve(scored.tokens_N, scored.calls(rule, gammas), keys)
    way = ComparedWay(
        way=scored.name,
        path=scored.path,
        parameters=scored.parameters,
        gammas=gammas,
        taus=curve.tau,
        taus_ci=curve.tau_ci,
        survival=None if scored.judged is None else survival_of(scored.judged, rule, gamma),
    )
    if scored.engine is not None and scored.judged is not None:
        rows = scored.engine.rows(dict(zip(gammas, curve.tau, strict=True)), rule.name, curve.tokens / len(keys))
        rows = [replace(row, way=scored.name) for row in rows]
        way = way.model_copy(update={"engine": scored.engine.label, "in_engine": rows})
    if costs is None:
        return way
    # Gammas beyond the measured ones would be guesses.
    gammas = scored_gammas(scores or [], range(1, max(costs.verify_seconds) + 1))
    steps_NK = scored.steps(rule, gammas)
    assert steps_NK is not None
    best, speed_up = gamma_to_run(dict(zip(gammas, (curve.tokens / steps_NK.sum(0)).tolist(), strict=True)))
    pays: dict[str, float] = {"best_gamma": best, "best_speed_up": speed_up}
    if scores is not None:
        pays |= {"draft_step_seconds": costs.draft_step_seconds, "cost_ratio": costs.cost_ratio}
        pays["cost_ratio_at"] = costs.cost_ratio_at(gamma)
    return way.model_copy(update=pays)


def _difference(
    ours: Scored, first: Scored, keys: Sequence[Any], rule: Rule, gamma: int, where: tuple[str, int]
) -> Difference:
    """What a way gains over the first. The speed-up uses the costs of each. where: the text, and how many comparisons were made on it."""
    text, looks = where
    pairs = {"tau": [scored.calls(rule, (gamma,))[:, 0] for scored in (ours, first)]}
    timed = [steps_N1[:, 0] for scored in (ours, first) if (steps_N1 := scored.steps(rule, (gamma,))) is not None]
    pairs |= {"speed_up": timed} if len(timed) == 2 else {}
    judged = [scored.judged for scored in (ours, first) if scored.judged is not None]
    pairs |= {"alpha": [accepted_sums(scores, rule) for scores in judged]} if len(judged) == 2 else {}
    gains = {"alpha": None, "certain": None} | paired_gains(keys, first.tokens_N, pairs, looks)
    return Difference(way=ours.name, text=text, **gains)
