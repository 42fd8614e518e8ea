"""A race: several ways to decode, timed in turn on the same prompts at batch 1, extrapolated to all held-out prompts.

The speed-up over the target alone is pooled: the seconds of the target alone for all P held-out prompts, over the seconds of
a way. Replay gives the number of blocks for all prompts. The cost of a block is timed on some of them, in steps of the target
in the same run, so that a slow machine affects both:

    speed-up = (sum_p n_p + P f) / (rho sum_p B_p + P g)

n, B: tokens and expected blocks of a prompt's response. rho: seconds of a block over seconds of a step of the target alone, on
the same prompt; f, g: seconds of reading a prompt, alone and with the way, in such steps. A ratio estimator (Cochran,
Sampling Techniques, chapter 6): the chance in the timed prompts' texts does not enter. If replay has no law (`Way.blocks_N` is
None), the cost per token of the timed prompts is used instead of the cost per block.

Whole responses alternate, not blocks, so that the CPU caches are in the same state as in serving. A process differs from the next
one by more than one response from the next: by where its memory lies and by what else the machine does at the time. So the race
has rounds of a few prompts, with a pause and new memory before each, and an interval is at least as wide as the rounds' means say.

Shapes: N responses, P prompts, M timed prompts, S rounds.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.engine.memory import release
from speculative.measure.intervals import Interval, sum_by_prompt
from speculative.measure.measured import TARGET, Way

# Times more than this many standard deviations from the median are cut to that limit: the machine was disturbed. The deviation is
# NORMAL median deviations, as of normal values, of which 1 in 16,000 is cut.
FAR, NORMAL = 4.0, 1.4826
# A median deviation below this share of the median is clock rounding; then nothing is cut.
LEAST_DEVIATION = 0.01
FEWEST_TO_TELL = 6
# Prompts of a round, and seconds of rest before it.
ROUND = 3
REST_SECONDS = 0.5
# With fewer rounds than this their spread is not known.
FEWEST_ROUNDS = 3
# If timing has less than this share of the variance, the texts dominate and more timing does not help.
SMALL_SHARE = 0.1


@dataclass(frozen=True)
class Sample:
    """One response of one way. Seconds: of reading the prompt, and of everything after it; blocks that recorded a call count as the
    others' average.
    """

    prefill_seconds: float
    seconds: float
    response: Response
    round_number: int = 0

    @property
    def said(self) -> tuple[int, int]:
        """(tokens, blocks); for the target alone a block is a step."""
        return len(self.response.response_ids), self.response.blocks

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this response, including its prefill."""
        return len(self.response.response_ids) / (self.prefill_seconds + self.seconds)


Samples = dict[str, dict[str, Sample]]  # by way, by key of the prompt


def race(
    target: PreTrainedModel,
    ways: Sequence[Way],
    prompts: Iterable[Prompt],
    settings: DecodeSettings,
    *,
    still: Callable[[Samples], Collection[str]],
    seconds: float,
    least: int,
) -> Samples:
    """Time the target alone and the ways on one prompt after the other, each prompt once, in rounds; the first way rotates.

    still: called after every prompt from the `least`-th on; returns the ways to time further, none ends the race. seconds:
    also ends it, but not before `least` prompts. settings: rule and sampling; gamma is each way's own.
    """
    everybody = (Way(TARGET), *ways)
    samples: Samples = {way.name: {} for way in everybody}
    running, began = list(everybody), time.perf_counter()
    for number, prompt in enumerate(prompts):
        round_number, place = divmod(number, ROUND)
        if place == 0:
            if round_number:
                time.sleep(REST_SECONDS)
            release()
            for way in running:
                _sample(target, way, prompt, settings, round_number)  # warm-up, not counted
        start = number % len(running)
        for way in itertools.chain(running[start:], running[:start]):
            samples[way.name][prompt[0]] = _sample(target, way, prompt, settings, round_number)
        if number + 1 < least:
            continue
        wanted = still(samples)
        running = [way for way in everybody if way.name in wanted or way.name == TARGET]
        if len(running) == 1 or time.perf_counter() - began >= seconds:
            break
    return samples


def _sample(target: PreTrainedModel, way: Way, prompt: Prompt, settings: DecodeSettings, round_number: int) -> Sample:
    drafter = way.drafter() if way.drafter is not None else None
    (response,), timing = decode(target, drafter, [prompt], way.settings(settings))
    seconds, timed = timing.total_seconds - timing.prefill_seconds, response.blocks - timing.recording_calls
    if 0 < timed < response.blocks:
        seconds = (seconds - timing.recording_seconds) * response.blocks / timed
    return Sample(timing.prefill_seconds, seconds, response, round_number)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a way over all held-out prompts, its ratio to the target alone, the interval of that (None: too few timed
    prompts), and the number of timed prompts.
    """

    tokens_per_second: float
    speed_up: float
    interval: Interval | None
    timed: int


class SpeedEstimates:
    """Results of a race for all held-out prompts. Raises ValueError: a way was timed on no prompt."""

    def __init__(
        self,
        samples: Samples,
        prompt_keys: Sequence[Hashable],
        tokens_N: np.ndarray,
        blocks: Mapping[str, np.ndarray | None],
        fewest: int = 2,
    ) -> None:
        """blocks: expected ones (N,) of every way but the target alone; None: replay has no law for it. fewest: timed prompts
        needed for an interval.
        """
        self.fewest = fewest
        self._by_token = {name for name, own_N in blocks.items() if own_N is None}
        self._blocks_N = {name: np.asarray(tokens_N if own_N is None else own_N) for name, own_N in blocks.items()}
        self._blocks_N[TARGET] = np.asarray(tokens_N)
        self._tokens_P = sum_by_prompt(prompt_keys, self._blocks_N[TARGET])
        self._count_P = sum_by_prompt(prompt_keys, np.ones(len(tokens_N)))
        self._blocks = {name: sum_by_prompt(prompt_keys, own_N) for name, own_N in self._blocks_N.items()}
        self._samples = samples
        self._alone = {
            key: sample.seconds / sample.response.blocks for key, sample in samples[TARGET].items()
        }  # seconds of a step
        self._prices = {name: self._priced(name) for name in samples}

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        mean, interval = self.against(name, TARGET, confidence)
        step_seconds = float(_near(np.array(list(self._alone.values()))).mean())
        tokens = float(self._tokens_P.sum())
        alone = tokens / (step_seconds * self._steps(TARGET))
        return Speed(alone * mean, mean, interval, len(self._samples[name]))

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """How many times the tokens per second of `other` a way has, and its interval; paired by prompt, on the scale of logarithms, by
        linearising (the delta method): the variances over the texts and over the timed prompts or their rounds add up, and Student's t
        has the degrees of freedom of such a sum (Satterthwaite 1946).
        """
        ratio = self._steps(other) / self._steps(name)
        if name == other:
            return 1.0, (1.0, 1.0)
        both = [key for key in self._prices[name] if key in self._prices[other]]
        if len(both) < self.fewest or len(self._tokens_P) < 2:
            return ratio, None
        texts, timed, of_timed = self._variances(name, other, both)
        total = texts + timed
        if total == 0.0:
            return ratio, (ratio, ratio)
        freedom = total**2 / (texts**2 / (len(self._tokens_P) - 1) + timed**2 / of_timed)
        reach = float(special.stdtrit(freedom, 0.5 + confidence / 2.0)) * math.sqrt(total)
        return ratio, (ratio * math.exp(-reach), ratio * math.exp(reach))

    def errors_of(self, names: Sequence[str], other: str) -> np.ndarray:
        """(R, K) what each text and each timed prompt adds to the error of the logarithm of `against`, for `intervals.lower_share`."""
        columns, prompts = [], len(self._tokens_P)
        for name in names:
            shares_P = self._steps_P(other) / self._steps(other) - self._steps_P(name) / self._steps(name)
            both = [key for key in self._prices[name] if key in self._prices[other]]
            errors_M = self._errors_of(other, both) - self._errors_of(name, both)
            timed_M = (errors_M - errors_M.mean()) / math.sqrt(max(1, len(both) * (len(both) - 1)))
            of_key = dict(zip(both, timed_M, strict=True))
            timed = [of_key.get(key, 0.0) for key in self._prices[other]]
            columns.append([*math.sqrt(prompts / max(1, prompts - 1)) * shares_P, *timed])
        return np.array(columns).T

    def known(self, name: str, within: float) -> bool:
        """Whether the interval is within the share `within` of the speed-up, or as narrow as timing can make it."""
        speed_up, interval = self.against(name, TARGET)
        if interval is None:
            return False
        texts, timed, _ = self._variances(name, TARGET, list(self._prices[name]))
        return interval[1] <= speed_up * (1.0 + within) or timed <= SMALL_SHARE * (texts + timed)

    def counted(self, name: str) -> dict[str, tuple[int, int]]:
        """(tokens, blocks) of each timed prompt, as decoded."""
        return {key: sample.said for key, sample in self._samples[name].items()}

    def _priced(self, name: str) -> dict[str, tuple[float, float]]:
        """(rho, prefill in steps of the target alone) of each timed prompt."""
        both = [key for key in self._samples[name] if key in self._alone]
        if not both:
            raise ValueError(f"{name} was timed on no prompt")
        samples, steps_M = [self._samples[name][key] for key in both], np.array([self._alone[key] for key in both])
        units_M = np.array([max(1, sample.said[0]) if name in self._by_token else sample.said[1] for sample in samples])
        rho_M = _near(np.array([sample.seconds for sample in samples]) / units_M / steps_M)
        if name in self._by_token:
            # A ratio of sums over the timed prompts, with more weight on long responses, linearised: its mean is the ratio.
            weights_M = np.array([sample.said[0] for sample in samples], dtype=np.float64)
            pooled = float(rho_M @ weights_M / weights_M.sum())
            rho_M = pooled + (rho_M - pooled) * weights_M / weights_M.mean()
        prefill_M = _near(np.array([sample.prefill_seconds for sample in samples]) / steps_M)
        return dict(zip(both, zip(rho_M.tolist(), prefill_M.tolist(), strict=True), strict=True))

    def _means(self, name: str) -> tuple[float, float]:
        rho, prefill = np.mean(list(self._prices[name].values()), axis=0).tolist()
        return rho, prefill

    def _steps_P(self, name: str) -> np.ndarray:
        """Expected seconds of each prompt (P,), in steps of the target alone."""
        rho, prefill = self._means(name)
        return rho * self._blocks[name] + prefill * self._count_P

    def _steps(self, name: str) -> float:
        return float(self._steps_P(name).sum())

    def _variances(self, name: str, other: str, both: Sequence[str]) -> tuple[float, float, int]:
        """Of the logarithm of `against`: (over the texts, over the timed prompts or their rounds if that is more, degrees of freedom of
        the latter).
        """
        prompts = len(self._tokens_P)
        texts = float((self.errors_of([name], other)[:prompts] ** 2).sum())
        errors_M = self._errors_of(other, both) - self._errors_of(name, both)
        timed, of_timed = float(errors_M.var(ddof=1) / len(both)), len(both) - 1
        rounds_M = [self._samples[name][key].round_number for key in both]
        sums_S = sum_by_prompt(rounds_M, errors_M - errors_M.mean())
        if len(sums_S) >= FEWEST_ROUNDS:
            # Sums over unequal rounds, as of clusters (Cochran, chapter 9).
            between = len(sums_S) / (len(sums_S) - 1) * float((sums_S**2).sum()) / len(both) ** 2
            if between > timed:
                timed, of_timed = between, len(sums_S) - 1
        return texts, timed, of_timed

    def _errors_of(self, name: str, both: Sequence[str]) -> np.ndarray:
        """(M,) total steps if each timed prompt's own cost replaced the mean cost, as a share."""
        prices_M2 = np.array([self._prices[name][key] for key in both])
        of_2 = np.array([self._blocks[name].sum(), self._count_P.sum()])
        return np.asarray(prices_M2 @ of_2 / self._steps(name))


def _near(values_M: np.ndarray) -> np.ndarray:
    """The values, with outliers cut to the limit around the median; with few values nothing is cut."""
    if len(values_M) < FEWEST_TO_TELL:
        return values_M
    median = float(np.median(values_M))
    deviation = max(float(np.median(np.abs(values_M - median))), LEAST_DEVIATION * abs(median))
    reach = FAR * NORMAL * deviation
    return np.clip(values_M, median - reach, median + reach)


def spread_order(count: int) -> list[int]:
    """0 .. count - 1 so that whatever number comes first is spread over all: ranks of the multiples of the golden ratio."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    return np.argsort(np.argsort(np.arange(count) * golden % 1.0)).tolist()
