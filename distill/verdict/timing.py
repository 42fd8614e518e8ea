"""Time ways to decode on the same text at one concurrency, and decide which one to run: speeds, which way is certainly faster than
which, what to run, rows of `Measured`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedModel

from distill.verdict.judging_setup import JudgingSetup
from speculative.errors import UserError
from speculative.evaluate import one_per_prompt
from speculative.measure.effects import fewest_prompts
from speculative.measure.intervals import Interval, lower_share, ratio_interval, sum_by_prompt
from speculative.measure.measured import LOOKUP_DRAFT, TARGET, How, Measured, Way
from speculative.measure.metrics import Waiting, alpha_with_interval
from speculative.measure.timing import (
    FEWEST_SAMPLES,
    Samples,
    Speed,
    SpeedEstimates,
    clock,
    requests_under_load,
    sample_ways,
    spread_order,
)
from speculative.measure.token_scores import TokenScores
from speculative.progress import each

# A speed-up is precise enough when the upper end of its interval is within this share of it.
PRECISION = 0.05
# A way that is slower than another at this confidence cannot be the fastest, so it does not widen the other's interval.
CERTAINLY_SLOWER = 0.997
CLOCK_SHARE = 1 / 4  # of judge.speed_seconds, for the waits at each load
# Lookup before the draft must be at least this much faster than everything else, or a second proposer is not worth having.
TOGETHER_WORTHWHILE = 1.03


@dataclass(frozen=True)
class Timing:
    """The timed ways at one concurrency. picked: names of the ways whose draft was picked among `setup.looks` judged ones, so their
    intervals are widened here, and only here. clocked: waits by way. warnings: what could not be timed.
    """

    setup: JudgingSetup
    concurrency: int
    ways: tuple[Way, ...]
    samples: Samples
    estimates: SpeedEstimates
    picked: frozenset[str] = frozenset()
    clocked: Mapping[str, Waiting] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
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
        return replace(self.estimates.speed(name), interval=self.against(name, TARGET)[1])

    def against(self, name: str, other: str) -> tuple[float, Interval | None]:
        """Tokens per second over those of another way, paired by prompt, with the interval.

        The interval knows that the fastest of several ways is chosen: its lower end is corrected for the family of this one, all ways
        at this load that may be run and are not certainly slower (`lower_share`). Each load has families of its own.
        """
        if (name, other) not in self._intervals:
            self._intervals[name, other] = self._corrected(name, other)
        return self.estimates.against(name, other)[0], self._intervals[name, other]

    def _corrected(self, name: str, other: str) -> Interval | None:
        confidence = self.confidence(name, other)
        ends = self.estimates.against(name, other, confidence)[1]
        if ends is None or name == other:
            return ends
        rest = [one.name for one in self.eligible if one.name not in (name, other)]
        leads = {one: self.estimates.against(name, one, CERTAINLY_SLOWER)[1] for one in rest}
        family = [name, *(one for one, lead in leads.items() if lead is None or lead[0] <= 1.0)]
        # The looks at checkpoints are in the confidence already; the share multiplies what they leave.
        share = lower_share(self.estimates.errors_of(family, other))
        lower = self.estimates.against(name, other, 1.0 - share * (1.0 - confidence))[1]
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
            if way.predicted is not None:
                counts_P, blocks_P, how["tau"] = tokens_P, sum_by_prompt(keys, way.predicted.blocks_N), "replay"
            else:
                counts_P, blocks_P = np.array([(one.tokens, one.blocks) for one in self.samples[way.name].values()]).T
            alpha, alpha_ci = None, None
            if way.name in scores:
                probs = [own.accept_probs(self.setup.rule) for own in scores[way.name]]
                alpha, alpha_ci = alpha_with_interval(probs, keys, confidence)
                how["alpha"] = "replay"
            row = replace(
                alone,
                way=way.name,
                gamma=way.gamma,
                alpha=alpha,
                alpha_ci=alpha_ci,
                tau=float(counts_P.sum() / blocks_P.sum()),
                tau_ci=ratio_interval(counts_P, blocks_P, confidence),
                tokens_per_second=speed.tokens_per_second,
                speed_up=speed.speed_up,
                speed_up_ci=speed.interval,
                how=how,
                ngrams=way.ngrams,
                then_gamma=way.then_gamma,
                then_way=way.then_way,
                tuned_on=way.tuned_on,
            )
            if (price := way.price) is not None:
                row = replace(
                    row,
                    total_variation=price.total_variation,
                    total_variation_ci=price.total_variation_ci,
                    differing=price.differing,
                    how=how | {"total_variation": "replay", "differing": "live"},
                )
            measured.append(row)
        return [
            replace(row, **seen, how=row.how | {key: "timed" for key, waits in seen.items() if waits})
            if (seen := self.clocked.get(row.way))
            else row
            for row in measured
        ]


def with_waits(timing: Timing, target: PreTrainedModel, about: str) -> Timing:
    """The timing with the waits of the target alone, the way `about` and the way to run; a warning where they do not fit memory."""
    setup, names = timing.setup, dict.fromkeys((about, timing.to_run()))
    ways = [Way(TARGET), *(timing[name] for name in names if name in timing)]
    prompts = [setup.heldout[index].prompt_ids for index in spread_order(len(setup.heldout))]
    seconds = CLOCK_SHARE * setup.judge.speed_seconds
    try:
        return replace(timing, clocked=clock(target, ways, prompts, setup.settings, timing.concurrency, seconds))
    except UserError as error:
        warning = f"latency at {timing.concurrency} concurrent requests was not measured: {error}"
        return replace(timing, warnings=(*timing.warnings, warning))


def time_ways(
    setup: JudgingSetup,
    target: PreTrainedModel,
    ways: Sequence[Way],
    about: str,
    picked: Collection[str] = (),
    load: int = 1,
) -> Timing:
    """Time every way on held-out text in turn, at one request until the speed-ups are precise enough or judge.speed_seconds have passed.

    about: the way that is timed until its own speed-up is precise enough. Any other way that is certainly slower is not timed any more.
    A way that does not fit memory is left out with a warning. Raises UserError: at one request, or the target alone does not fit.
    """
    fewest = fewest_prompts(0.95)
    blocks = {way.name: None if way.predicted is None else way.predicted.calls_N for way in ways}

    def estimates(samples: Samples) -> SpeedEstimates:
        expected = {name: blocks[name] for name in samples if name != TARGET}
        return SpeedEstimates(samples, setup.keys, setup.tokens_N, expected, fewest, load)

    def imprecise(samples: Samples) -> list[str]:
        return worth_timing(estimates(samples), [way.name for way in ways], about)

    if load == 1:
        texts = one_per_prompt(setup.heldout)[::-1]
        order = spread_order(len(texts))[: setup.judge.speed_prompts]
        chosen = [(texts[index].key, texts[index].prompt_ids) for index in order]
        samples, refused = sample_ways(
            target,
            ways,
            each([[prompt] for prompt in chosen], "timing, at most"),
            setup.settings,
            imprecise=imprecise,
            seconds=setup.judge.speed_seconds,
            least=min(FEWEST_SAMPLES, len(chosen)),
        )
        for error in refused.values():
            raise error
    else:
        requests = requests_under_load([(text.prompt_ids, text.response_ids) for text in setup.heldout], load)
        shown = each(requests, f"timing at {load} requests", FEWEST_SAMPLES)
        samples, refused = sample_ways(target, ways, shown, setup.settings, load=load)
    timed = tuple(way for way in ways if way.name in samples)
    warnings = tuple(f"{name} at judge.load {load} was not measured: {error}" for name, error in refused.items())
    return Timing(setup, load, timed, samples, estimates(samples), frozenset(picked), warnings=warnings)


def worth_timing(estimates: SpeedEstimates, names: Sequence[str], about: str) -> list[str]:
    """Ways whose speed-up is not precise enough yet. Ways that are certainly slower than another are left out, except `about`."""
    intervals = {name: estimates.against(name, TARGET)[1] for name in names}
    sure = max((interval[0] for interval in intervals.values() if interval is not None), default=0.0)
    wanted = []
    for name, interval in intervals.items():
        beaten = interval is not None and interval[1] < sure and name != about
        if not beaten and not estimates.precise(name, PRECISION):
            wanted.append(name)
    return wanted
