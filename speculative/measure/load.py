"""Speed under load: the cost of a call by its tokens, the speed-up at every load, and block times with a full batch, measured in
the decoder, alternating between plain decoding and a drafter.

A load n is the number of requests decoded at once. Shapes: P prompts, T turns, M measured calls, B timed blocks of a turn.
"""

import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy import optimize, special
from transformers import PreTrainedModel

from speculative.decode import Event, Options, context_of, generate
from speculative.decoder.responses import DecodeSettings, Prompt, Response, Timing
from speculative.drafters.drafter import Drafter
from speculative.errors import UserError
from speculative.measure.cost import StepCosts, first_near_best, predicted_speed_up
from speculative.measure.effects import fewest_prompts
from speculative.measure.intervals import Interval, ratio_interval
from speculative.measure.measured import TARGET, Way
from speculative.measure.metrics import Waiting, waits_of
from speculative.measure.race import Speed

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


class LoadEstimates:
    """Measurements at one load: like `race.SpeedEstimates`, with a full batch and without prefill.

    A way's time is rho sum B steps of the target in the same run, from two independent sources: the target calls B
    that replay expects for each prompt's responses (all that is known of tau), and rho, seconds of a block over those of
    a step of plain decoding, the geometric mean over the turns.
    """

    def __init__(
        self,
        load: int,
        tokens_P: np.ndarray,
        blocks: Mapping[str, np.ndarray],
        times: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """blocks: (P,) by way, NaN for prompts without data. times: (seconds of a plain step, rho) by way, each (T,)."""
        self._calls_P = {TARGET: tokens_P, **blocks}
        self._log_rho_T = {TARGET: np.zeros(1)} | {name: np.log(rho_T) for name, (_, rho_T) in times.items()}
        self._plain = load / math.exp(float(np.mean([np.log(plain_T).mean() for plain_T, _ in times.values()])))

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        ratio, interval = self.against(name, TARGET, confidence)
        return Speed(ratio * self._plain, ratio, interval, int(np.isfinite(self._calls_P[name]).sum()))

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """How many times the tokens per second of `other` a way has, and its interval: None on too few prompts or turns.

        The interval joins the bootstrap of the calls over prompts and Student's of log rho over the turns, both paired, by the
        distances of their ends (Zou and Donner 2008, "square and add", on the log scale), so it is as lopsided as they are.
        """
        if name == other:
            return 1.0, (1.0, 1.0)
        known_P = np.isfinite(self._calls_P[name]) & np.isfinite(self._calls_P[other])
        own_P, others_P = self._calls_P[name][known_P], self._calls_P[other][known_P]
        log_rho_T = self._log_rho_T[name] - self._log_rho_T[other]
        calls = float(others_P.sum() / own_P.sum())
        ratio = calls / math.exp(float(log_rho_T.mean()))
        if len(own_P) < fewest_prompts(confidence) or len(log_rho_T) < 2:
            return ratio, None
        low, high = ratio_interval(others_P, own_P, confidence)
        reach = float(special.stdtrit(len(log_rho_T) - 1, 0.5 + confidence / 2.0))
        half = reach * float(log_rho_T.std(ddof=1)) / math.sqrt(len(log_rho_T))
        down, up = math.hypot(math.log(calls / low), half), math.hypot(math.log(high / calls), half)
        return ratio, (ratio * math.exp(-down), ratio * math.exp(up))

    def errors_of(self, names: Sequence[str], other: str) -> np.ndarray:
        """(R, K) as `SpeedEstimates.errors_of`. The blocks of every way are timed beside plain steps of their own."""
        calls_P, errors = {}, {}
        for name in (*names, other):
            known_P, log_rho_T = np.nan_to_num(self._calls_P[name]), self._log_rho_T[name]
            calls_P[name], errors[name] = (
                known_P / known_P.sum(),
                log_rho_T.std() / math.sqrt(max(1, len(log_rho_T) - 1)),
            )
        texts_PK = np.stack([calls_P[other] - calls_P[name] for name in names], 1)
        timed_K = np.array([errors[name] for name in names])
        return np.concatenate((texts_PK, np.diag(timed_K), np.full((1, len(names)), errors[other])))


Stream = Generator[Event, None, None]
Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, ids of its response

TURNS = 6
WARM_UP = 2  # untimed blocks of each way at the start of a turn
BURSTS, BURST = 4, 4  # of timed blocks: number of changes between the ways in a turn, and blocks between them
TIMED_BLOCKS = WARM_UP + BURSTS * BURST


# Flags for the cost of a block: some row has a proposal found without a model; a model drafted for some row.
PLAIN, FOUND, DRAFTED = 0, 1, 2


class FullBatch(NamedTuple):
    """Seconds (T, B) of plain steps and of blocks, and of what kind (T, B) each block was: PLAIN, FOUND, DRAFTED or both."""

    plain_TB: np.ndarray
    block_TB: np.ndarray
    kinds_TB: np.ndarray

    def ratios(self, shares: Mapping[int, float]) -> np.ndarray:
        """(T,) a block's time over a plain step's in each turn, the kinds in these shares.

        By kind, the median of the turn, or of all turns if the turn has none. A kind that never occurred is left out of the shares;
        if none occurred, all blocks count as one kind.
        """
        steps_TB = self.block_TB / np.median(self.plain_TB, axis=1, keepdims=True)
        seen = {kind: share for kind, share in shares.items() if share > 0.0 and (self.kinds_TB == kind).any()}
        if not seen:
            return np.median(steps_TB, axis=1)
        ratios_T = np.zeros(len(steps_TB))
        for kind, share in seen.items():
            of_kind_TB = self.kinds_TB == kind
            typical = float(np.median(steps_TB[of_kind_TB]))
            medians = [
                np.median(steps_B[own_B]) if own_B.any() else typical
                for steps_B, own_B in zip(steps_TB, of_kind_TB, strict=True)
            ]
            ratios_T += share / sum(seen.values()) * np.array(medians)
        return ratios_T


def kind_shares(found: float, load: int, drafts: bool) -> dict[int, float]:
    """Shares of the kinds of blocks at a load, for a drafter that finds a proposal in the share `found` of a row's blocks.

    drafts: a model drafts for rows without a proposal; otherwise they are decoded plainly. Rows are taken as independent.
    """
    all_found, none_found = found**load, (1.0 - found) ** load
    mixed = max(0.0, 1.0 - all_found - none_found)
    if not drafts:
        return {PLAIN: none_found, FOUND: all_found + mixed}
    return {FOUND: all_found, DRAFTED: none_found, FOUND | DRAFTED: mixed}


def full_batch_seconds(
    target: PreTrainedModel,
    drafter: Callable[[], Drafter],
    texts: Sequence[Text],
    settings: DecodeSettings,
    load: int,
    *,
    turns: int = TURNS,
) -> FullBatch:
    """Seconds of each timed plain step, and of each block at `settings.gamma`, with `load` rows active throughout.

    Each turn decodes from `load` new random positions in the texts, as on a full server: each request somewhere in its
    response, long ones more often. Requests end only after `TIMED_BLOCKS` blocks, so no row is ever free. Both ways decode
    from the same positions and alternate every few blocks, so that a slow period of the machine affects both; so both hold
    their caches at once. The decoder's own work is included.

    Raises UserError: too little memory for this many rows, or no room in the context for the blocks.
    """
    endless = replace(settings, eos_ids=(), stop=(), min_tokens=0, fit_context=False)
    plain = replace(endless, gamma=0, tree=None, max_tokens=TIMED_BLOCKS)
    drafted = replace(endless, max_tokens=TIMED_BLOCKS * (settings.gamma + 1))
    context, name = context_of(target, drafter())
    longest = None if context is None else context - drafted.max_tokens
    if longest is not None and longest < 1:
        raise UserError(
            f"the {name}'s context of {context} tokens has no room for {TIMED_BLOCKS} blocks of {settings.gamma + 1} tokens: "
            "lower gamma"
        )
    rng = np.random.default_rng(0)
    turns_of: list[tuple[list[float], list[float], list[int]]] = []
    for _ in range(turns):
        prompts = places_in(texts, load, longest, rng)
        proposer = drafter()
        # With lookup before a draft the model is the last source.
        models = len(proposer.source_names) - (proposer.model is not None)
        with contextlib.ExitStack() as ending:
            streams = [
                ending.enter_context(contextlib.closing(generate(target, who, prompts, asked, batch_size=load)))
                for who, asked in ((None, plain), (proposer, drafted))
            ]
            turns_of.append(_in_turn(streams, load, models))
    return FullBatch(*(np.array(part) for part in zip(*turns_of, strict=True)))


def _in_turn(streams: Sequence[Stream], load: int, models: int) -> tuple[list[float], list[float], list[int]]:
    """Seconds of each timed block of both streams, and the kinds of the second's; the streams begin in turn."""
    seconds, of_kind = (list[float](), list[float]()), list[int]()
    for stream in streams:
        for _ in range(WARM_UP):
            _next_block(stream, load)
    for burst in range(BURSTS):
        for who in (0, 1) if burst % 2 == 0 else (1, 0):
            for _ in range(BURST):
                spent, responses = _next_block(streams[who], load)
                seconds[who].append(spent)
                if who == 1:
                    of_kind.append(_kind(responses, models))
    return *seconds, of_kind


def _next_block(stream: Stream, load: int) -> tuple[float, list[Response]]:
    """Seconds until every row has a token, which is one block if no row is free, and the rows' responses."""
    began = time.perf_counter()
    responses = [next(stream).response for _ in range(load)]
    return time.perf_counter() - began, responses


def _kind(responses: Sequence[Response], models: int) -> int:
    """The kind of the responses' last block; sources from number `models` on are models."""
    kind = PLAIN
    for one in responses:
        if one.drafted_counts[-1] > 0:
            kind |= DRAFTED if one.sources[-1] >= models else FOUND
    return kind


CLOCKED, CLOCK_TURNS = 32, 2  # fewest requests of a way; its turns


def clock(
    target: PreTrainedModel,
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    load: int,
    seconds: float,
) -> dict[str, Waiting]:
    """Waits with each way for `load` clients, each of which asks again when its response ends.

    At least CLOCKED requests and two a client, or as many as begin within `seconds` for all ways, each to its end. The ways take
    turns. A turn begins with one request of every client at once; its clients go on until the last counted response ends.
    Raises UserError if there is too little memory.
    """
    count, ids = -(-max(CLOCKED, 2 * load) // CLOCK_TURNS), itertools.cycle(prompts)
    waits = {way.name: (list[Response](), Timing()) for way in ways}
    for turn in range(-1, CLOCK_TURNS):
        requests = [(f"{turn} {number}", next(ids)) for number in range(count + 2 * load)]
        # Turn -1 is a warm-up: one block, unless calls are recorded.
        most = seconds / (CLOCK_TURNS * len(ways)) if turn >= 0 or target.device.type == "cuda" else 0.0
        for way in ways[:: 1 if turn % 2 else -1]:
            responses, timing = waits[way.name] if turn >= 0 else ([], Timing())
            how = Options(batch_size=load, timing=timing, in_order=True)
            stop, seen, ended = time.perf_counter() + most, dict[int, Response](), 0
            stream = generate(target, way.drafter and way.drafter(), requests, way.settings(settings), **how)
            with contextlib.closing(stream):
                for event in stream:
                    late = time.perf_counter() > stop
                    if event.index in seen or event.index < (load if late else count):
                        seen[event.index] = event.response
                        ended += event.finish_reason is not None
                    if (late and turn < 0) or ended == (max(load, len(seen)) if late else count):
                        break
            responses += seen.values()
    return {name: waits_of(*seen) for name, seen in waits.items()}


def places_in(texts: Sequence[Text], count: int, longest: int | None, rng: np.random.Generator) -> list[Prompt]:
    """Texts cut at random response positions, all positions equally likely; at most `longest` tokens each."""
    ends = np.cumsum([len(response) for _, response in texts])
    prompts: list[Prompt] = []
    for number, place in enumerate(rng.integers(0, ends[-1], count)):
        index = int(np.searchsorted(ends, place, side="right"))
        prompt, response = texts[index]
        ids = [*prompt, *response[: int(place) - (int(ends[index]) - len(response))]]
        prompts.append((f"{number}", ids[:longest]))
    return prompts
