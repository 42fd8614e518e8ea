"""The cost of drafting on this machine, and the speed-up that a tau gives at that cost.

Shapes: none; seconds are per batch, gammas are drafted tokens per block.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from scipy import optimize
from transformers import PreTrainedModel

from speculative.decoder.block_loop import BlockLoop
from speculative.decoder.device_loop import open_loop
from speculative.decoder.responses import DecodeSettings, Timing
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import Ask, Drafter, Proposal, Seats
from speculative.engine.models import evaluating, vocab_rows
from speculative.engine.runners import resolve_runner
from speculative.measure.token_scores import StoredText
from speculative.progress import phase

# Gammas whose speed-ups differ by less count as equal.
NEAR_BEST = 0.03
# Costs are measured again until their standard errors are this small, relative, or the time is up.
AGREEMENT = 0.01
# Quantile of the block times in one repeat. Other processes can only add time, so a low quantile is taken.
QUIET = 0.25
# Timed blocks of one repeat, after one that is not counted.
TIMED_BLOCKS = 8
# Standard error of a median of n normal values over their median deviation, times sqrt(n).
MEDIAN_ERROR = 1.2533 * 1.4826

Steps = TypeVar("Steps", float, np.ndarray)


@dataclass(frozen=True)
class StepCosts:
    """Seconds measured inside the block loop at one batch size and context.

    target_seconds: one block of plain decoding (a 1-token call). draft_seconds[gamma]: drafting gamma tokens. verify_seconds[gamma]: a
    (gamma + 1)-token target call with its acceptance. spread: relative standard error of a block's cost in target steps, at the worst
    gamma; 0: nothing was measured. parallel: a block is one draft call. steps: how the target's calls ran. host_seconds: what the host
    adds to a plain step, and to a drafted block; opening_seconds, prompt_seconds: to a response, to read `context` tokens, alone and
    with the draft. text: mean tokens of the prompts and the responses whose speed-up is predicted; 0: prompts do not count.
    """

    target_seconds: float
    draft_seconds: dict[int, float]
    verify_seconds: dict[int, float]
    batch_size: int
    context: int
    spread: float = 0.0
    parallel: bool = False
    steps: str = ""
    host_seconds: tuple[float, float] = (0.0, 0.0)
    opening_seconds: tuple[float, float] = (0.0, 0.0)
    prompt_seconds: tuple[float, float] = (0.0, 0.0)
    text: tuple[float, float] = (0.0, 0.0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the target alone, with the host's: the unit of prices."""
        return self.target_seconds + self.host_seconds[0]

    @property
    def draft_step_seconds(self) -> float:
        """Seconds of one draft call: of a token, or of a whole block of a parallel draft."""
        seconds = self.draft_seconds.items()
        return statistics.median(spent / (1 if self.parallel else gamma) for gamma, spent in seconds)

    @property
    def cost_ratio(self) -> float:
        """c: one draft call over one target step, the median over the measured gammas: the number to quote."""
        return self.draft_step_seconds / self.target_seconds

    def cost_ratio_at(self, gamma: int) -> float:
        """c of one token of a block of gamma, interpolated between the measured gammas and constant beyond them: short blocks cost more
        per token, because the first step also reads what the previous block left unread. A parallel draft's block is interpolated as a
        whole.
        """
        gammas = sorted(self.draft_seconds)
        if self.parallel:
            block_seconds = np.interp(gamma, gammas, [self.draft_seconds[measured] for measured in gammas])
            return float(block_seconds) / max(gamma, 1) / self.target_seconds
        per_token = [self.draft_seconds[measured] / measured for measured in gammas]
        return float(np.interp(gamma, gammas, per_token)) / self.target_seconds

    def verify_ratio(self, gamma: int) -> float:
        """v(gamma): a (gamma + 1)-token target call over a 1-token call, interpolated linearly between measured gammas."""
        gammas = [0, *sorted(self.verify_seconds)]
        seconds = [self.target_seconds, *(self.verify_seconds[measured] for measured in gammas[1:])]
        if gamma > gammas[-1] and len(gammas) > 1:
            slope = (seconds[-1] - seconds[0]) / gammas[-1]
            return (seconds[-1] + slope * (gamma - gammas[-1])) / self.target_seconds
        return float(np.interp(gamma, gammas, seconds)) / self.target_seconds

    def timed(self, taus: Mapping[int, float]) -> dict[int, float]:
        """tau at gammas within the timed range; outside it a speed-up would be a guess."""
        return {gamma: tau for gamma, tau in taus.items() if gamma <= max(self.verify_seconds)}

    def block_price(self, gamma: int, drafted: int | None = None) -> float:
        """Steps of the target alone that a block of gamma tokens takes: gamma c + v, and the host's time on both sides. drafted: how many
        of the tokens the draft makes, by default all.
        """
        if gamma == 0:
            return 1.0
        drafted = gamma if drafted is None else drafted
        drafting = drafted * self.cost_ratio_at(drafted) if drafted else 0.0
        calls = (drafting + self.verify_ratio(gamma)) * self.target_seconds
        return (calls + self.host_seconds[1]) / self.step_seconds

    def with_prompts(self, steps: Steps, tokens: Steps, drafts: bool = True) -> Steps:
        """Tokens over this are the speed-up of responses of so many tokens whose blocks take `steps` steps of the target alone: the
        prompts are read on both sides. drafts: by the draft too.
        """
        prompt, response = self.text
        if not response:
            return steps
        both = zip(self.opening_seconds, self.prompt_seconds, strict=True)
        alone, drafted = (
            (opening + reading * prompt / max(1, self.context)) / response / self.step_seconds
            for opening, reading in both
        )
        return (steps + tokens * (drafted if drafts else alone)) / (1.0 + alone)

    def of_text(self, texts: Sequence[StoredText]) -> "StepCosts":
        """The costs for responses such as these: what a response costs beside its blocks counts, reading in proportion to its prompt."""
        prompt, response = np.mean([(len(one.prompt_ids), len(one.response_ids)) for one in texts], axis=0).tolist()
        return replace(self, text=(prompt, response))

    def speed_up(self, gamma: int, tau: float) -> float:
        """THE predicted speed-up: tokens/s at this gamma and tau over the target alone; prompts and the host count on both sides."""
        return 1.0 / self.with_prompts(self.block_price(gamma) / tau, 1.0, drafts=gamma > 0)

    def paying_tau(self, gamma: int) -> float:
        """The tau at which that speed-up is 1; infinity if the draft's own reading of the prompt costs more than it can save."""
        saved = 1.0 - self.with_prompts(0.0, 1.0)
        return self.with_prompts(self.block_price(gamma), 0.0) / saved if saved > 0.0 else math.inf


def given_costs(
    target_seconds: float,
    draft_seconds: float,
    verify_seconds: float | None = None,
    max_gamma: int = 16,
    *,
    parallel: bool = False,
) -> StepCosts:
    """Costs that were not measured here: one target step, one draft call (parallel: of a whole block) and a verify call, in seconds.

    A verify call is taken to cost the same at every gamma up to `max_gamma`, by default as much as a 1-token call: true if reading the
    weights dominates (a large model, few rows), else too optimistic. `context` 0: unknown.
    """
    verify = target_seconds if verify_seconds is None else verify_seconds
    ends = (1, max_gamma)
    return StepCosts(
        target_seconds,
        {g: (1 if parallel else g) * draft_seconds for g in ends},
        dict.fromkeys(ends, verify),
        batch_size=1,
        context=0,
        parallel=parallel,
    )


def predicted_speed_up(tau: float, gamma: int, c: float, v: float) -> float:
    """Tokens per second, tau / (gamma * c + v), over the target alone (2211.17192 Theorem 3.8 with a measured v): for given step times,
    without the host and without prompts. For measured ones see `StepCosts.speed_up`.
    """
    return tau / (gamma * c + v)


def first_near_best(steps_K: np.ndarray) -> int:
    """Place of the first of these times (K,) that is at most NEAR_BEST above the smallest: timing cannot tell them apart."""
    return int((steps_K <= (1.0 + NEAR_BEST) * steps_K.min()).argmax())


def gamma_to_run(speed_ups: Mapping[int, float]) -> tuple[int, float]:
    """The smallest gamma whose speed-up is nearly the highest and above 1, and that speed-up; (0, 1.0) when none beats 1."""
    gammas = sorted(gamma for gamma, speed_up in speed_ups.items() if gamma > 0 and speed_up > 1.0)
    if not gammas:
        return 0, 1.0
    gamma = gammas[first_near_best(1.0 / np.array([speed_ups[gamma] for gamma in gammas]))]
    return gamma, speed_ups[gamma]


def best_gamma(taus: Mapping[int, float], costs: StepCosts) -> tuple[int, float]:
    """The gamma of `taus` with the highest predicted speed-up, and that speed-up; (0, 1.0) when none beats 1."""
    speed_ups = {gamma: costs.speed_up(gamma, tau) for gamma, tau in taus.items()}
    gamma = max(speed_ups, key=speed_ups.__getitem__, default=0)
    return (gamma, speed_ups[gamma]) if gamma and speed_ups[gamma] > 1.0 else (0, 1.0)


def near_best_gammas(taus: Mapping[int, float], costs: StepCosts) -> tuple[int, int] | None:
    """The gammas around the best one whose predicted speed-up is within a share `NEAR_BEST`, or twice the spread of the costs if that is
    more: first and last; None when none pays.
    """
    speed_ups = {gamma: costs.speed_up(gamma, tau) for gamma, tau in taus.items()}
    best, speed_up = best_gamma(taus, costs)
    if best == 0:
        return None
    enough = speed_up * (1.0 - max(NEAR_BEST, 2.0 * costs.spread))
    near = sorted(gamma for gamma in speed_ups if gamma > 0)
    first = last = near.index(best)
    while first > 0 and speed_ups[near[first - 1]] >= enough:
        first -= 1
    while last + 1 < len(near) and speed_ups[near[last + 1]] >= enough:
        last += 1
    return near[first], near[last]


def iid_tau(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma+1)) / (1 - alpha): tau if every token were accepted independently (2211.17192 equation 1). Acceptance is
    autocorrelated, so this overstates tau by 4-15 %: for planning, never for a measurement.
    """
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


def break_even_alpha(gamma: int, cost: float) -> float | None:
    """The alpha at which the i.i.d. tau just pays the cost of a block; 0.0 if any alpha pays, None if even alpha 1 does not."""
    if cost <= 1.0:
        return 0.0
    if cost > gamma + 1:
        return None
    return float(optimize.brentq(lambda alpha: iid_tau(alpha, gamma) - cost, 0.0, 1.0, xtol=1e-15))


class _FreeProposals(Drafter):
    """Proposes gamma fixed tokens at once, so that only the target is timed."""

    name = "free proposals"
    source_names: tuple[str, ...] = ("free",)

    def start(self, seats: Seats) -> None:
        self._device = seats.target.device

    def propose(self, ask: Ask) -> Proposal:
        ids_RG = torch.zeros((len(ask.lengths_R), ask.gamma), dtype=torch.int64, device=self._device)
        return Proposal(ids_RG, counts_R=np.full(len(ask.lengths_R), ask.gamma))


def measure_costs(
    target: PreTrainedModel,
    draft: Draft | None,
    settings: DecodeSettings | None = None,
    *,
    gammas: Sequence[int] = (1, 3, 5, 8),
    batch_size: int = 1,
    context: int = 128,
    repeats: int = 3,
    seconds: float = 2.0,
) -> StepCosts:
    """Time the stages of the real block loop on random tokens, until the cost of a block is known.

    Each repeat times all gammas in turn, each by a low quantile of its blocks over the plain step of the same repeat, so that a slow
    machine changes both. The costs are medians over at least ``repeats``; more are made until their standard errors are within AGREEMENT
    or ``seconds`` are spent. A loop of draft steps alone would make the draft look up to 1.7x faster: in the block loop the target's
    weights evict it from the caches. settings: rule, sampling and seed. context: must leave room for `TIMED_BLOCKS` blocks in both models.
    Without a draft, proposals are free, which gives the target's times. A parallel draft also reads the accepted tokens, of which there
    are few here: without static shapes its live blocks are wider by tau - 1 tokens.
    """
    settings = settings or DecodeSettings()
    ids = np.random.default_rng(settings.seed).integers(0, vocab_rows(target), size=(batch_size, context))
    prompts = [(str(row), row_ids.tolist()) for row, row_ids in enumerate(ids)]
    columns = (0, *gammas)
    measured: list[list[list[float]]] = []
    began = time.perf_counter()
    with evaluating(target, draft.model if draft is not None else None), phase("timing steps") as shown:
        while True:
            of_repeat = []
            for gamma in columns:
                most, opening = (TIMED_BLOCKS + 1) * (gamma + 1), time.perf_counter()
                wanted = DecodeSettings(settings.sampling, gamma, settings.rule, most, seed=settings.seed)
                drafter = draft.drafter() if draft is not None else _FreeProposals()
                loop = open_loop(
                    target,
                    drafter if gamma > 0 else None,
                    batch_size,
                    context + most,
                    wanted,
                    runner=resolve_runner("auto", target.device),
                    exact_stages=True,
                )
                steps = loop.target.how
                opened = time.perf_counter()
                loop.admit(range(batch_size), prompts)
                reading = time.perf_counter() - opened
                seconds_B2, host, first = _block_seconds(loop)
                stages = np.quantile(seconds_B2, QUIET, axis=0).tolist()
                of_repeat.append([*stages, host, opened - opening + first, reading])
                loop.close()
            measured.append(of_repeat)
            shown.advance()
            if len(measured) < repeats:
                continue
            costs = _agreed(np.array(measured), gammas, batch_size, context)
            costs = replace(costs, parallel=draft is not None and draft.parallel, steps=steps)
            if costs.spread <= AGREEMENT or time.perf_counter() - began >= seconds:
                return costs


def _agreed(seconds_RG5: np.ndarray, gammas: Sequence[int], batch_size: int, context: int) -> StepCosts:
    """Costs from (draft, verify, host, opening, prompt) seconds of every repeat, the plain step first among the gammas."""
    steps_R = seconds_RG5[:, 0, 1]
    ratios_RG5 = seconds_RG5 / steps_R[:, None, None]
    ratios_RG2 = ratios_RG5[:, 1:, :2]
    step, ratios_G2 = float(np.median(steps_R)), np.median(ratios_RG2, axis=0)
    prices_RG = ratios_RG2.sum(-1)
    prices_G = np.median(prices_RG, axis=0)
    deviations_G = np.median(np.abs(prices_RG - prices_G), axis=0) / np.sqrt(len(prices_RG))
    spread = float((MEDIAN_ERROR * deviations_G / prices_G).max(initial=0.0))
    drafting, verifying = (
        {gamma: step * float(ratios_G2[column, part]) for column, gamma in enumerate(gammas)} for part in range(2)
    )
    host, opening, reading = (
        (step * float(np.median(of_RG[:, 0])), step * float(np.median(of_RG[:, 1:])))
        for of_RG in np.moveaxis(ratios_RG5[..., 2:], -1, 0)
    )
    costs = StepCosts(step, drafting, verifying, batch_size, context, spread)
    return replace(costs, host_seconds=host, opening_seconds=opening, prompt_seconds=reading)


def _block_seconds(loop: BlockLoop) -> tuple[list[tuple[float, float]], float, float]:
    """((draft, verify) seconds of `TIMED_BLOCKS` blocks after one that is not counted, without those that recorded a call; what the host
    adds to each of them, and to the first one). Blocks may run ahead, as in `decode`.
    """
    loop.may_run, marks, spent = TIMED_BLOCKS + 1, [time.perf_counter()], []
    for _ in range(TIMED_BLOCKS + 1):
        loop.timing = Timing()
        loop.run_block()
        marks.append(time.perf_counter())
        spent.append(loop.timing)
    beside_B = np.diff(marks) - [timing.decoding_seconds + timing.recording_seconds for timing in spent]
    host = max(0.0, float(beside_B[1:].mean()))
    first = max(0.0, float(beside_B.sum()) - host * len(spent))
    timed = [timing for timing in spent[1:] if timing.recording_calls == 0]
    return [(timing.draft_seconds, timing.verify_seconds + timing.accept_seconds) for timing in timed], host, first
