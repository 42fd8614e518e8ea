"""Time ways to decode on the same text at one concurrency, and decide which one to run.

At one request whole responses alternate (`speculative.measure.race`); at a larger load all rows of the batch are occupied
(`full_batch`). Both give the same kind of answer: speeds, which way is certainly faster than which, what to run, rows of `Measured`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from rich.progress import track
from transformers import PreTrainedModel

from distill.verdict.judging_setup import JudgingSetup
from speculative.decoder.responses import Prompt
from speculative.errors import UserError
from speculative.measure.effects import fewest_prompts
from speculative.measure.intervals import Interval, lower_share, ratio_interval, sum_by_prompt
from speculative.measure.load import DRAFTED, LoadEstimates, clock, full_batch_seconds, kind_shares
from speculative.measure.measured import LOOKUP_DRAFT, TARGET, How, Measured, Way
from speculative.measure.metrics import Waiting, alpha_with_interval
from speculative.measure.race import FEWEST_ROUNDS, ROUND, Samples, Speed, SpeedEstimates, race, spread_order
from speculative.measure.token_scores import TokenScores

# A speed-up is precise enough when the upper end of its interval is within this share of it.
PRECISION = 0.05
# A way that is slower than another at this confidence cannot be the fastest, so it does not widen the other's interval.
CERTAINLY_SLOWER = 0.997
CLOCK_SHARE = 1 / 4  # of judge.speed_seconds, for the waits at each load
# Lookup before the draft must be at least this much faster than everything else, or a second proposer is not worth having.
TOGETHER_WORTHWHILE = 1.03


class Timed(Protocol):
    """What was timed at one concurrency."""

    def speed(self, name: str, confidence: float = 0.95) -> Speed: ...

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]: ...

    def errors_of(self, names: Sequence[str], other: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Timing:
    """The timed ways at one concurrency. picked: names of the ways whose draft was picked among `setup.looks` judged ones, so their
    intervals are widened here, and only here. counted: (tokens, blocks) by timed prompt of ways that replay
    cannot predict. samples: the timed responses of one request. clocked: waits by way.
    """

    setup: JudgingSetup
    concurrency: int
    ways: tuple[Way, ...]
    timed: Timed
    picked: frozenset[str] = frozenset()
    counted: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    clocked: Mapping[str, Waiting] = field(default_factory=dict)
    _intervals: dict[tuple[str, str], Interval | None] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, name: str) -> Way:
        return next(one for one in self.ways if one.name == name)

    def __contains__(self, name: str) -> bool:
        return any(one.name == name for one in self.ways)

    def confidence(self, *names: str) -> float:
        """Confidence of an interval that involves these ways."""
        return self.setup.confidence(not self.picked.isdisjoint(names))

    def speed(self, name: str) -> Speed:
        """Speed of a way, or of the target alone."""
        return replace(self.timed.speed(name), interval=self.against(name, TARGET)[1])

    def against(self, name: str, other: str) -> tuple[float, Interval | None]:
        """Tokens per second over those of another way, paired by prompt, with the interval.

        The interval knows that the fastest of several ways is chosen: its lower end is corrected for the family of this one, all ways
        at this load that may be run and are not certainly slower (`lower_share`). Each load has families of its own.
        """
        if (name, other) not in self._intervals:
            self._intervals[name, other] = self._corrected(name, other)
        return self.timed.against(name, other)[0], self._intervals[name, other]

    def _corrected(self, name: str, other: str) -> Interval | None:
        confidence = self.confidence(name, other)
        ends = self.timed.against(name, other, confidence)[1]
        if ends is None or name == other:
            return ends
        rest = [one.name for one in self.eligible if one.name not in (name, other)]
        leads = {one: self.timed.against(name, one, CERTAINLY_SLOWER)[1] for one in rest}
        family = [name, *(one for one, lead in leads.items() if lead is None or lead[0] <= 1.0)]
        # The looks at checkpoints are in the confidence already; the share multiplies what they leave.
        share = lower_share(self.timed.errors_of(family, other))
        lower = self.timed.against(name, other, 1.0 - share * (1.0 - confidence))[1]
        return lower and (lower[0], ends[1])

    def beats(self, name: str, other: str = TARGET) -> bool:
        """Whether a way is certainly faster than another."""
        interval = self.against(name, other)[1]
        return interval is not None and interval[0] > 1.0

    @property
    def eligible(self) -> list[Way]:
        """The ways that may be run: all but lossy ones."""
        return [one for one in self.ways if one.lossless]

    def to_run(self) -> str:
        """The way to run: the fastest of those certainly faster than the target alone, or the target alone if there is none.

        Lookup before the draft is chosen only if it is certainly faster than every other way by TOGETHER_WORTHWHILE, or if no other
        way is certainly faster than the target alone.
        """
        ways = [one.name for one in self.eligible]
        certain = [name for name in ways if self.beats(name)]
        alone = [name for name in certain if name != LOOKUP_DRAFT]
        if LOOKUP_DRAFT in certain and (not alone or self._worthwhile(set(ways))):
            return LOOKUP_DRAFT
        return max(alone, key=lambda name: self.speed(name).speed_up, default=TARGET)

    def _worthwhile(self, others: set[str]) -> bool:
        return all(
            self.beats(LOOKUP_DRAFT, other) and self.against(LOOKUP_DRAFT, other)[0] >= TOGETHER_WORTHWHILE
            for other in others - {LOOKUP_DRAFT}
        )

    def rows(self, scores: Mapping[str, Sequence[TokenScores]]) -> list[Measured]:
        """Rows of the target alone and of every way. scores: of the drafts, by way."""
        tokens_N, keys = self.setup.tokens_N, self.setup.keys
        tokens_P = sum_by_prompt(keys, tokens_N)
        alone = Measured(
            TARGET,
            self.setup.rule.name,
            self.concurrency,
            prompts=len(tokens_P),
            tokens=int(tokens_N.sum()),
            gamma=0,
            tau=1.0,
            tokens_per_second=self.speed(TARGET).tokens_per_second,
            speed_up=1.0,
            how={"speed_up": "timed"},
        )
        measured = [alone]
        for way in self.ways:
            speed, confidence = self.speed(way.name), self.confidence(way.name)
            how: dict[str, How] = {"tau": "live", "speed_up": "timed"}
            costs = [name for name in way.price if not name.endswith("_ci")]
            how |= {name: "replay" if name == "total_variation" else "live" for name in costs}
            if way.blocks_N is None:
                said_P, blocks_P = np.array(list(self.counted[way.name].values()), dtype=np.float64).T
            else:
                said_P, blocks_P, how["tau"] = tokens_P, sum_by_prompt(keys, way.blocks_N), "replay"
            alpha, alpha_ci = None, None
            if way.name in scores:
                probs = [own.accept_probs(self.setup.rule) for own in scores[way.name]]
                alpha, alpha_ci = alpha_with_interval(probs, keys, confidence)
                how["alpha"] = "replay"
            measured.append(
                replace(
                    alone,
                    way=way.name,
                    gamma=way.gamma,
                    alpha=alpha,
                    alpha_ci=alpha_ci,
                    tau=float(said_P.sum() / blocks_P.sum()),
                    tau_ci=ratio_interval(said_P, blocks_P, confidence),
                    tokens_per_second=speed.tokens_per_second,
                    speed_up=speed.speed_up,
                    speed_up_ci=speed.interval,
                    how=how,
                    ngrams=way.ngrams,
                    then_gamma=way.then_gamma,
                    behind=way.behind,
                    tuned_on=way.tuned_on,
                    **way.price,
                )
            )
        return [
            replace(row, **seen, how=row.how | {key: "timed" for key, waits in seen.items() if waits})
            if (seen := self.clocked.get(row.way))
            else row
            for row in measured
        ]


def with_waits(timing: Timing, target: PreTrainedModel, about: str) -> tuple[Timing, list[str]]:
    """The timing with the waits of the target alone, the way `about` and the way to run; a warning where they do not fit memory."""
    setup, names = timing.setup, dict.fromkeys((about, timing.to_run()))
    ways = [Way(TARGET), *(timing[name] for name in names if name in timing)]
    prompts = [setup.frozen[index].prompt_ids for index in spread_order(len(setup.frozen))]
    seconds = CLOCK_SHARE * setup.judge.speed_seconds
    try:
        clocked = clock(target, ways, prompts, setup.settings, timing.concurrency, seconds)
    except UserError as error:
        return timing, [f"latency at {timing.concurrency} concurrent requests was not measured: {error}"]
    return replace(timing, clocked=clocked), []


def time_ways(
    setup: JudgingSetup, target: PreTrainedModel, ways: Sequence[Way], about: str, picked: Sequence[str] = ()
) -> Timing:
    """Time every way at one request on held-out prompts in turn, until the speed-ups are precise enough or judge.speed_seconds have passed.

    about: the way that is timed until its own speed-up is precise enough. Any other way that is certainly slower is not timed any more.
    """
    judging, chosen = setup.judge, _prompts_to_time(setup)
    fewest = fewest_prompts(0.95)
    blocks = {way.name: way.calls_N for way in ways}

    def estimates(samples: Samples) -> SpeedEstimates:
        return SpeedEstimates(samples, setup.keys, setup.tokens_N, blocks, fewest)

    def still(samples: Samples) -> list[str]:
        return worth_timing(estimates(samples), [way.name for way in ways], about)

    prompts = track(chosen, "timing", transient=True)
    seconds, least = judging.speed_seconds, min(max(fewest, FEWEST_ROUNDS * ROUND), len(chosen))
    samples = race(target, ways, prompts, setup.settings, still=still, seconds=seconds, least=least)
    timed = estimates(samples)
    counted = {way.name: timed.counted(way.name) for way in ways if way.blocks_N is None}
    return Timing(setup, 1, tuple(ways), timed, frozenset(picked), counted, samples)


def _prompts_to_time(setup: JudgingSetup) -> list[Prompt]:
    """judge.speed_prompts of the held-out prompts, spread over all."""
    first_of_prompt = list({text.prompt: text for text in reversed(setup.frozen)}.values())[::-1]
    chosen = [first_of_prompt[index] for index in spread_order(len(first_of_prompt))]
    return [(text.key, text.prompt_ids) for text in chosen[: setup.judge.speed_prompts]]


def worth_timing(estimates: SpeedEstimates, names: Sequence[str], about: str) -> list[str]:
    """Ways whose speed-up is not precise enough yet. Ways that are certainly slower than another are left out, except `about`."""
    intervals = {name: estimates.against(name, TARGET)[1] for name in names}
    sure = max((interval[0] for interval in intervals.values() if interval is not None), default=0.0)
    wanted = []
    for name, interval in intervals.items():
        beaten = interval is not None and interval[1] < sure and name != about
        if not beaten and not estimates.known(name, PRECISION):
            wanted.append(name)
    return wanted


def time_at_load(
    setup: JudgingSetup, target: PreTrainedModel, ways: Sequence[Way], load: int, first: Timing
) -> tuple[Timing | None, list[str]]:
    """(the timing with `load` rows occupied throughout, a line for each way that does not fit memory). first: the timing at one request."""
    texts = [(text.prompt_ids, text.response_ids) for text in setup.frozen]
    tokens_P = sum_by_prompt(setup.keys, setup.tokens_N)
    times: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    calls, left_out = {}, []
    for way in ways:
        assert way.drafter is not None
        drafts = way.then_gamma is not None
        shares = {DRAFTED: 1.0} if way.found is None else kind_shares(way.found, load, drafts=drafts)
        try:
            timed = full_batch_seconds(target, way.drafter, texts, way.settings(setup.settings), load)
            times[way.name] = (np.median(timed.plain_TB, axis=1), timed.ratios(shares))
        except UserError as error:
            left_out.append(f"{way.name} at judge.load {load} was not measured: {error}")
            continue
        calls[way.name] = _calls_P(setup, way, tokens_P, first.counted)
    if not times:
        return None, left_out
    held = tuple(way for way in ways if way.name in times)
    return Timing(setup, load, held, LoadEstimates(load, tokens_P, calls, times), first.picked, first.counted), left_out


def _calls_P(
    setup: JudgingSetup, way: Way, tokens_P: np.ndarray, counted: Mapping[str, Mapping[str, tuple[int, int]]]
) -> np.ndarray:
    """Expected target calls of each prompt. For a way that replay cannot predict: those counted, NaN elsewhere."""
    if way.calls_N is not None:
        return sum_by_prompt(setup.keys, way.calls_N)
    keys = {text.prompt: text.key for text in reversed(setup.frozen)}
    per_token = {key: blocks / max(1, tokens) for key, (tokens, blocks) in counted[way.name].items()}
    prompts = dict.fromkeys(setup.keys)
    return tokens_P * np.array([per_token.get(keys[prompt], np.nan) for prompt in prompts])
