"""Several ways to decode, timed in turn on the same prompts at batch 1, and what their times say of all held-out prompts.

The speed-up over the target alone is pooled: the seconds that the target alone needs for all P held-out prompts over the
seconds that a way needs for them. How many blocks a way needs is known for all of them from replay; what a block costs
is timed on some of them, in steps of the target beside it, so that a drifting machine slows both alike:

    speed-up = (sum_p n_p + P f) / (rho sum_p B_p + P g)

n, B: tokens and expected blocks of a prompt's response. rho: seconds of a block over seconds of a step of the target alone, on
the same prompt; f, g: seconds of reading a prompt, alone and with the way, in such steps. A ratio estimator (Cochran,
Sampling Techniques, chapter 6): the luck of the timed prompts' texts is not in it. Where replay has no law (`Way.blocks_N` is
None) a token takes the place of a block: what one costs is known from the timed prompts alone.

Whole responses alternate, not blocks: between blocks of one response the caches hold what they hold when it is served.

Shapes: N responses, P prompts, M timed prompts.
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
from speculative.measure.intervals import Interval, sum_by_prompt
from speculative.measure.measured import TARGET, Way

# More than so many median deviations from the median: the machine was elsewhere, and the time is taken as that far.
FAR = 4.0
# A median deviation under this share of the median is rounding of the clock; nothing is far for that.
LEAST_DEVIATION = 0.01
FEWEST_TO_TELL = 6
# Timing more can do nothing for an interval whose width is the texts': its own share of the variance is then under this.
SMALL_SHARE = 0.1


@dataclass(frozen=True)
class Lap:
    """One response of one way. Seconds: of reading the prompt, and of everything behind that.

    Blocks that recorded a model call first count as long as the others.
    """

    prefill_seconds: float
    seconds: float
    response: Response

    @property
    def said(self) -> tuple[int, int]:
        """(tokens, blocks); of the target alone a block is a step."""
        return len(self.response.response_ids), self.response.blocks

    @property
    def tokens_per_second(self) -> float:
        """Of this response, its prompt read."""
        return len(self.response.response_ids) / (self.prefill_seconds + self.seconds)


Laps = dict[str, dict[str, Lap]]  # by way, by key of the prompt


def race(
    target: PreTrainedModel,
    ways: Sequence[Way],
    prompts: Iterable[Prompt],
    settings: DecodeSettings,
    *,
    still: Callable[[Laps], Collection[str]],
    seconds: float,
    least: int,
) -> Laps:
    """Times the target alone and the ways on one prompt after the other, each prompt once, who begins changing in turn.

    still: asked after every prompt from the `least`-th on, who is worth another; nobody ends the race. seconds: ends it
    too, but not before `least` prompts. settings: rule and sampling; gamma is each way's own.
    """
    everybody = (Way(TARGET), *ways)
    laps: Laps = {way.name: {} for way in everybody}
    running, began = list(everybody), time.perf_counter()
    for number, prompt in enumerate(prompts):
        for way in everybody if number == 0 else ():
            _lap(target, way, prompt, settings)  # warm-up, not counted
        start = number % len(running)
        for way in itertools.chain(running[start:], running[:start]):
            laps[way.name][prompt[0]] = _lap(target, way, prompt, settings)
        if number + 1 < least:
            continue
        wanted = still(laps)
        running = [way for way in everybody if way.name in wanted or way.name == TARGET]
        if len(running) == 1 or time.perf_counter() - began >= seconds:
            break
    return laps


def _lap(target: PreTrainedModel, way: Way, prompt: Prompt, settings: DecodeSettings) -> Lap:
    drafter = way.drafter() if way.drafter is not None else None
    (response,), timing = decode(target, drafter, [prompt], way.settings(settings))
    seconds, timed = timing.total_seconds - timing.prefill_seconds, response.blocks - timing.recording_calls
    if 0 < timed < response.blocks:
        seconds = (seconds - timing.recording_seconds) * response.blocks / timed
    return Lap(timing.prefill_seconds, seconds, response)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a way over all held-out prompts, and how many times that of the target alone.

    interval: of the speed-up; None where too few prompts were timed to be certain. timed: how many were.
    """

    tokens_per_second: float
    speed_up: float
    interval: Interval | None
    timed: int


class Standings:
    """What a race says of all held-out prompts.

    Raises:
        ValueError: a way was timed on no prompt.
    """

    def __init__(
        self,
        laps: Laps,
        prompt_keys: Sequence[Hashable],
        tokens_N: np.ndarray,
        blocks: Mapping[str, np.ndarray | None],
        fewest: int = 2,
    ) -> None:
        """blocks: expected ones (N,) of every way but the target alone; None: replay has no law for it. fewest: timed prompts that
        an interval needs.
        """
        self.fewest = fewest
        self._by_token = {name for name, own_N in blocks.items() if own_N is None}
        self._blocks_N = {name: np.asarray(tokens_N if own_N is None else own_N) for name, own_N in blocks.items()}
        self._blocks_N[TARGET] = np.asarray(tokens_N)
        self._tokens_P = sum_by_prompt(prompt_keys, self._blocks_N[TARGET])
        self._count_P = sum_by_prompt(prompt_keys, np.ones(len(tokens_N)))
        self._blocks = {name: sum_by_prompt(prompt_keys, own_N) for name, own_N in self._blocks_N.items()}
        self._laps = laps
        self._alone = {key: lap.seconds / lap.response.blocks for key, lap in laps[TARGET].items()}  # a step
        self._prices = {name: self._priced(name) for name in laps}

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        """Of one way."""
        mean, interval = self.against(name, TARGET, confidence)
        step_seconds = float(_near(np.array(list(self._alone.values()))).mean())
        tokens = float(self._tokens_P.sum())
        alone = tokens / (step_seconds * self._steps(TARGET))
        return Speed(alone * mean, mean, interval, len(self._laps[name]))

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """How many times the tokens per second of `other` a way has, and its interval; paired by prompt.

        On the scale of logarithms, by linearising (the delta method): the variance over the texts and that over the timed
        prompts add up, and Student's t has the degrees of freedom of such a sum (Satterthwaite 1946).
        """
        ratio = self._steps(other) / self._steps(name)
        if name == other:
            return 1.0, (1.0, 1.0)
        both = [key for key in self._prices[name] if key in self._prices[other]]
        if len(both) < self.fewest or len(self._tokens_P) < 2:
            return ratio, None
        texts, timed = self._variances(name, other, both)
        total = texts + timed
        if total == 0.0:
            return ratio, (ratio, ratio)
        freedom = total**2 / (texts**2 / (len(self._tokens_P) - 1) + timed**2 / (len(both) - 1))
        reach = float(special.stdtrit(freedom, 0.5 + confidence / 2.0)) * math.sqrt(total)
        return ratio, (ratio * math.exp(-reach), ratio * math.exp(reach))

    def known(self, name: str, within: float) -> bool:
        """Whether the interval is within so large a share of the speed-up, or as narrow as timing can make it."""
        speed_up, interval = self.against(name, TARGET)
        if interval is None:
            return False
        texts, timed = self._variances(name, TARGET, list(self._prices[name]))
        return interval[1] <= speed_up * (1.0 + within) or timed <= SMALL_SHARE * (texts + timed)

    def steps_N(self, name: str) -> np.ndarray:
        """Expected seconds of each response (N,), its prompt read, in steps of the target alone: what speed-ups are made of."""
        rho, prefill = self._means(name)
        return rho * self._blocks_N[name] + prefill

    def counted(self, name: str) -> dict[str, tuple[int, int]]:
        """(tokens, blocks) of each timed prompt, as decoded."""
        return {key: lap.said for key, lap in self._laps[name].items()}

    def _priced(self, name: str) -> dict[str, tuple[float, float]]:
        """(rho, prefill in steps of the target alone) of each timed prompt."""
        both = [key for key in self._laps[name] if key in self._alone]
        if not both:
            raise ValueError(f"{name} was timed on no prompt")
        laps, steps_M = [self._laps[name][key] for key in both], np.array([self._alone[key] for key in both])
        units_M = np.array([max(1, lap.said[0]) if name in self._by_token else lap.said[1] for lap in laps])
        rho_M = _near(np.array([lap.seconds for lap in laps]) / units_M / steps_M)
        if name in self._by_token:
            # A ratio of sums over the timed prompts, long responses weighing more, linearised: its mean is the ratio.
            weights_M = np.array([lap.said[0] for lap in laps], dtype=np.float64)
            pooled = float(rho_M @ weights_M / weights_M.sum())
            rho_M = pooled + (rho_M - pooled) * weights_M / weights_M.mean()
        prefill_M = _near(np.array([lap.prefill_seconds for lap in laps]) / steps_M)
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

    def _variances(self, name: str, other: str, both: Sequence[str]) -> tuple[float, float]:
        """Of the logarithm of `against`: (over the texts, over the timed prompts)."""
        prompts = len(self._tokens_P)
        shares_P = self._steps_P(other) / self._steps(other) - self._steps_P(name) / self._steps(name)
        texts = prompts / (prompts - 1) * float((shares_P**2).sum())
        pulls_M = self._pulls(other, both) - self._pulls(name, both)
        return texts, float(pulls_M.var(ddof=1) / len(both))

    def _pulls(self, name: str, both: Sequence[str]) -> np.ndarray:
        """(M,) each timed prompt's own price in place of the mean: the share of all steps it would make."""
        prices_M2 = np.array([self._prices[name][key] for key in both])
        of_2 = np.array([self._blocks[name].sum(), self._count_P.sum()])
        return np.asarray(prices_M2 @ of_2 / self._steps(name))


def _near(values_M: np.ndarray) -> np.ndarray:
    """The values, those far from their median moved to where far begins; a few do not tell what is far."""
    if len(values_M) < FEWEST_TO_TELL:
        return values_M
    median = float(np.median(values_M))
    deviation = max(float(np.median(np.abs(values_M - median))), LEAST_DEVIATION * abs(median))
    return np.clip(values_M, median - FAR * deviation, median + FAR * deviation)


def spread_order(count: int) -> list[int]:
    """0 .. count - 1 so that whatever number comes first is spread over all: ranks of the multiples of the golden ratio."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    return np.argsort(np.argsort(np.arange(count) * golden % 1.0)).tolist()
