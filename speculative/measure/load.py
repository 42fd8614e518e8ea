"""Speed over the load, the number of requests decoded at once: the cost of a call by its tokens, and the speed-up at every load.

Shapes: M measured calls.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize

from speculative.measure.cost import StepCosts, first_near_best, predicted_speed_up

# Largest load considered: no server decodes more requests at once.
MOST_LOAD = 4096


@dataclass(frozen=True)
class StepLine:
    """Seconds of one model call over the tokens fed to it (rows x tokens of a row): fixed + per_token * tokens.

    `fixed` is the cost of any call (reading the weights, launching), `per_token` the cost of each token.
    """

    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    @property
    def free_tokens(self) -> float | None:
        """fixed / per_token: a call with this many tokens takes twice as long as one with almost none, so verification is
        no longer free; None if tokens cost nothing.
        """
        return self.fixed / self.per_token if self.per_token > 0.0 else None


@dataclass(frozen=True)
class Roofline:
    """Both models' calls; a block at load n is gamma draft calls on n tokens and a target call on n * (gamma + 1).

    parallel: one draft call on n * (gamma + 1) tokens in place of the gamma calls.
    """

    target: StepLine
    draft: StepLine
    parallel: bool = False

    def speed_up(self, load: int, gamma: int, tau: float) -> float:
        """Predicted tokens per second with the draft over plain decoding at this load."""
        plain = self.target.seconds(load)
        drafted = self.draft.seconds(load * (gamma + 1)) / gamma if self.parallel else self.draft.seconds(load)
        c, v = drafted / plain, self.target.seconds(load * (gamma + 1)) / plain
        return predicted_speed_up(tau, gamma, c, v)


def fit_line(tokens_M: Sequence[float], seconds_M: Sequence[float]) -> StepLine:
    """The line with the least squared relative error, neither part below 0."""
    tokens, seconds = np.asarray(tokens_M, dtype=np.float64), np.asarray(seconds_M, dtype=np.float64)
    columns_M2 = np.stack((np.ones_like(tokens), tokens), 1) / seconds[:, None]
    (fixed, per_token), _ = optimize.nnls(columns_M2, np.ones_like(seconds))
    return StepLine(float(fixed), float(per_token))


def fit_roofline(costs: Sequence[StepCosts]) -> Roofline:
    """The lines through all measured steps, at one batch size or at several."""
    target = [(cost.batch_size, cost.target_seconds) for cost in costs]
    target += [(cost.batch_size * (g + 1), seconds) for cost in costs for g, seconds in cost.verify_seconds.items()]
    parallel = any(cost.parallel for cost in costs)
    draft = [
        (cost.batch_size * (g + 1), seconds) if parallel else (cost.batch_size, seconds / g)
        for cost in costs
        for g, seconds in cost.draft_seconds.items()
    ]
    of_target, of_draft = (fit_line(*zip(*calls, strict=True)) for calls in (target, draft))
    return Roofline(of_target, of_draft, parallel)


@dataclass(frozen=True)
class LoadCurve:
    """Speed-up over the load: the roofline's, drawn through what was measured.

    taus: tokens per target call by gamma, from 1. measured_over_predicted: by measured load; between two loads it is
    interpolated over log(load), beyond them it stays.
    """

    roofline: Roofline
    taus: Mapping[int, float]
    measured_over_predicted: Mapping[int, float] = field(default_factory=dict)

    def predicted(self, load: int, gamma: int) -> float:
        return self.roofline.speed_up(load, gamma, self.taus[gamma])

    def best_gamma(self, load: int) -> int:
        """The smallest gamma, at least 1, whose predicted speed-up at this load is nearly the highest."""
        gammas = sorted(self.taus)
        return gammas[first_near_best(1.0 / np.array([self.predicted(load, gamma) for gamma in gammas]))]

    def speed_up(self, load: int) -> float:
        """Speed-up at the best gamma of this load."""
        predicted = self.predicted(load, self.best_gamma(load))
        if not self.measured_over_predicted:
            return predicted
        loads = sorted(self.measured_over_predicted)
        ratios = [self.measured_over_predicted[known] for known in loads]
        return predicted * float(np.interp(math.log(load), np.log(loads), ratios))

    def plain_wins_from(self, most: int = MOST_LOAD) -> int | None:
        """The smallest load from which the draft is never faster than plain decoding, up to `most`; None if it still is
        faster at `most`.
        """
        if self.speed_up(most) > 1.0:
            return None
        # Between measured loads it may rise and fall; beyond them a speed-up above 1 only falls, so its end is found by bisection.
        measured = min(max(self.measured_over_predicted, default=1), most)
        wins = max((load for load in range(1, measured + 1) if self.speed_up(load) > 1.0), default=0)
        if wins < measured:
            return wins + 1
        beyond = range(wins + 1, most)
        return wins + 1 + bisect.bisect_left(beyond, True, key=lambda load: self.speed_up(load) <= 1.0)
