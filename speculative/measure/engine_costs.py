"""The engine's clock: c and v(gamma) of a serving engine from streamed responses, and the speed-ups that they predict.

Requests come one after another, so many at a time, and each gets as many tokens as the run's response: prompts are read while others are
decoded, as when it is served. Shapes: S responses, C chunks of a stream, R repeats.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field
from scipy import special

from speculative.measure.cost import StepCosts, gamma_to_run
from speculative.measure.load import LoadCurve, fit_line, fit_roofline
from speculative.measure.measured import DRAFT, How, Measured
from speculative.measure.record import Record

TOGETHER = 0.05  # of a block's time: chunks that are closer came in one
Ratios = dict[str, tuple[float, float, float]]  # value, and the ends of its interval


class Stream(NamedTuple):
    """A streamed response: when it was asked for, the times of its chunks of tokens, and target calls after the first chunk."""

    sent: float
    seconds_C: Sequence[float]
    blocks: float

    def joined(self) -> "Stream":
        """The same, with one time for chunks that came together: some engines send a chunk for each token of a block."""
        times_C = np.array(self.seconds_C)
        apart = np.diff(times_C) > TOGETHER * (times_C[-1] - times_C[0]) / max(1.0, self.blocks)
        return self._replace(seconds_C=times_C[np.append(apart, True)].tolist())


def busiest(streams_S: Sequence[Stream]) -> int:
    """The most responses that were decoded at the same time."""
    ends = sorted(end for one in streams_S for end in ((one.seconds_C[0], 1), (one.seconds_C[-1], -1)))
    return max(itertools.accumulate(change for _, change in ends))


def served_seconds(streams_S: Sequence[Stream], timed: slice) -> tuple[float, float]:
    """Seconds of a block (of a step without a draft), and the rest of a response, which its prompt and the others' take; of the timed ones.

    A block is the median of those in which no other response got its first chunk: they read no prompt. Without such, of all.
    """
    joined = [stream.joined() for stream in streams_S]
    began_S, clean, every = np.sort([stream.seconds_C[0] for stream in joined]), list[float](), list[float]()
    for stream in joined[timed]:
        times_C = np.array(stream.seconds_C)
        gaps = np.diff(times_C)
        # Chunks of a step come a little before or after each other.
        until = np.searchsorted(began_S, times_C[1:] + 0.5 * gaps) - np.searchsorted(began_S, times_C[:-1] + 0.5 * gaps)
        clean, every = clean + gaps[until == 0].tolist(), every + gaps.tolist()
    block = float(np.median(clean or every or [0.0]))
    whole, blocks = (
        fmean(of)
        for of in zip(*((stream.seconds_C[-1] - stream.sent, stream.blocks) for stream in joined[timed]), strict=True)
    )
    return block, max(0.0, whole - blocks * block)


class EngineCosts(Record):
    """engine_costs.json: step times of a serving engine at each number of concurrent requests, medians over repeats."""

    FORMAT: ClassVar[int | None] = 1
    FILE: ClassVar[str] = "engine_costs.json"
    REMEDY: ClassVar[str] = "delete it, and use `understudy time` again"
    format: Literal[1] = Field(1, description="format of this file")
    engine: str = Field(description="name and version")
    device: str = Field(description="kind of this machine's processor, or the engine's URL")
    flags: list[str] = Field(description="flags that it was started with; empty: it was running")
    costs: list[StepCosts] = Field(description="seconds by load (batch_size); only the split of blocks is fitted")
    ratios: dict[int, Ratios] = Field(description="by load: c, v and blocks in plain steps, with 95 % intervals")
    prefill: dict[int, dict[int, float]] = Field(
        {},
        description="by load and gamma (0: plain): seconds of a response beyond its blocks: reading prompts, its own and others'",
    )

    @property
    def label(self) -> str:
        """How a figure from these times was obtained, in words."""
        return f"predicted (engine {self.engine})"

    @property
    def unsteady(self) -> list[int]:
        """Loads whose repeats differ too much to be used: the interval of a block is wider than the block."""
        blocks = {
            load: [of for name, of in own.items() if name.startswith("block")] for load, own in self.ratios.items()
        }
        return [load for load, own in blocks.items() if any(high - low > value for value, low, high in own)]

    def speed_up(self, one: StepCosts, gamma: int, tau: float, tokens: float, price: float | None = None) -> float:
        """Tokens per second over plain decoding, for responses of `tokens` tokens whose first comes from the prefill.

        one: the costs at a load. price: of a block in plain steps; default the measured one. tokens infinite: without prefill.
        """
        steps = (price or one.block_price(gamma)) / tau if gamma else 1.0
        return self._response_seconds(one, 0, 1.0, tokens) / self._response_seconds(one, gamma, steps, tokens)

    def _response_seconds(self, one: StepCosts, gamma: int, steps: float, tokens: float) -> float:
        """Seconds of a response over its tokens after the first; meanwhile the engine reads a prompt for every request."""
        first = self.prefill.get(one.batch_size) or {0: 0.0}
        read = float(np.interp(gamma, sorted(first), [first[known] for known in sorted(first)]))
        return read / max(1.0, tokens - 1.0) + steps * one.target_seconds

    def row(self, costs: StepCosts, gamma: int, tau: float, rule: str, tokens: float = math.inf) -> Measured:
        """The draft at a load and gamma (0: plain decoding); the interval is that of the block's time, at measured gammas."""
        _, low, high = self.ratios[costs.batch_size].get(f"block {gamma}", (1.0, 0.0, 0.0))
        speed_up, *ends = (self.speed_up(costs, gamma, tau, tokens, price) for price in (None, high, low))
        share = 1.0 if math.isinf(tokens) else tokens / max(1.0, tokens - 1.0)
        rate = costs.batch_size * share / self._response_seconds(costs, 0, 1.0, tokens)
        how = dict[str, How](tau="replay", speed_up="predicted (engine)", tokens_per_second="predicted (engine)")
        return Measured(
            DRAFT,
            rule,
            costs.batch_size,
            gamma=gamma,
            tau=tau,
            tokens_per_second=rate * speed_up,
            speed_up=speed_up,
            speed_up_ci=(ends[0], ends[1]) if low else None,
            how=how,
        )

    def rows(self, taus: Mapping[int, float], rule: str, tokens: float = math.inf) -> list[Measured]:
        """The draft at each load: at each measured gamma, then at the gamma to run (0: plain decoding), from taus by replay."""
        measured = []
        for one in self.costs:
            speeds = {gamma: self.speed_up(one, gamma, tau, tokens) for gamma, tau in one.timed(taus).items()}
            gammas = (*one.verify_seconds, gamma_to_run(speeds)[0])
            measured += [self.row(one, gamma, taus[gamma], rule, tokens) for gamma in gammas if gamma in taus]
        return measured

    def plain_wins_from(self, taus: Mapping[int, float], tokens: float = math.inf) -> int | None:
        """The load from which plain decoding is faster, by lines through all steps; None: not up to `load.MOST_LOAD`."""
        timed = {gamma: tau for gamma, tau in self.costs[0].timed(taus).items() if gamma}
        lines = LoadCurve(fit_roofline(self.costs), timed)
        best = {one.batch_size: max(self.speed_up(one, *of, tokens) for of in timed.items()) for one in self.costs}
        return replace(lines, measured_over_predicted={n: best[n] / lines.speed_up(n) for n in best}).plain_wins_from()


def step_costs(seconds: Mapping[tuple[int, int], float], parallel: bool) -> list[StepCosts]:
    """Costs at each load, from seconds of a block by (load, gamma); gamma 0: a plain step.

    What each drafted token adds to a block is a draft step and a wider target call; the line through the plain steps of all loads tells
    the latter. A block in one pass has one draft call: what a block of gamma 0 would take beyond a plain step.
    """
    loads, gammas = (sorted({cell[place] for cell in seconds}) for place in range(2))
    line, costs = fit_line(loads, [seconds[load, 0] for load in loads]), []
    for load in loads:
        step, blocks = seconds[load, 0], {gamma: seconds[load, gamma] for gamma in gammas[1:]}
        slope, start = np.polyfit(gammas[1:], list(blocks.values()), 1).tolist()
        draft = max(1e-6 * step, start - step if parallel else slope - line.per_token * load)
        drafts = {gamma: draft * (1 if parallel else gamma) for gamma in blocks}
        verify = {gamma: block - drafts[gamma] for gamma, block in blocks.items()}
        costs.append(StepCosts(step, drafts, verify, load, context=0, parallel=parallel))
    return costs


def ratios_of(costs: StepCosts, repeats_R: Sequence[StepCosts]) -> Ratios:
    """`c`, `v GAMMA` and `block GAMMA`, with Student's intervals of medians over the repeats."""

    def of(costs_of: StepCosts) -> dict[str, float]:
        each = {"v": costs_of.verify_ratio, "block": costs_of.block_price}
        return {"c": costs_of.cost_ratio} | {
            f"{name} {gamma}": get(gamma) for gamma in costs_of.verify_seconds for name, get in each.items()
        }

    reach = float(special.stdtrit(len(repeats_R) - 1, 0.975)) * math.sqrt(math.pi / 2.0 / len(repeats_R))
    halves = {name: reach * stdev(of(costs_of)[name] for costs_of in repeats_R) for name in of(costs)}
    return {name: (value, max(0.0, value - halves[name]), value + halves[name]) for name, value in of(costs).items()}
