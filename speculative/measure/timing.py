"""Time several ways to decode in turn, at one request or at a load of n, and extrapolate the times to all held-out prompts.

The speed-up over the target alone is pooled: the seconds of the target alone for all P held-out prompts, over the seconds of
a way. Replay gives the number of blocks for all prompts. The cost of a block is timed, in steps of the target in the same
sample, so that a slow machine affects both:

    speed-up = (sum_p n_p + P f) / (rho sum_p B_p + P g)

n, B: tokens and expected blocks of a prompt's response. rho: seconds of a block over seconds of a step of the target alone, in
the same sample; f, g: seconds of reading a prompt, alone and with the way, in such steps (under load: 0). A ratio estimator
(Cochran, Sampling Techniques, chapter 6): the chance in the timed texts does not enter. Where replay cannot
predict blocks (`Way.predicted` is None), the cost per token is timed instead of the cost per block.

A sample is a whole response to one prompt; under load it is `LOAD_BLOCKS` blocks of n requests, which begin somewhere in their
responses, as on a server, and whose rows go to the next requests when they end. Whole samples of the ways alternate, so that the
CPU caches are in the same state as in serving. A process differs from the next one by more than one sample from the next: by where
its memory lies and by what else the machine does at the time. So there are rounds of a few samples, with a pause and new memory
before each, and an interval is at least as wide as the rounds' means say.

Shapes: N responses, P prompts, M samples of a way, S rounds.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special
from transformers import PreTrainedModel

from speculative.decode import Options, decode, generate
from speculative.decoder.responses import DecodeSettings, Prompt, Response, Timing
from speculative.engine.memory import release
from speculative.errors import UserError
from speculative.measure.intervals import Interval, sum_by_prompt
from speculative.measure.measured import TARGET, Way
from speculative.measure.metrics import Waiting, waits_of
from speculative.progress import each

# Times more than this many standard deviations from the median are cut to that limit: the machine was disturbed. The deviation is
# NORMAL median deviations, as of normal values, of which 1 in 16,000 is cut.
FAR, NORMAL = 4.0, 1.4826
# A median deviation below this share of the median is clock rounding; then nothing is cut.
LEAST_DEVIATION = 0.01
FEWEST_TO_TELL = 6
# Samples of a way in a round, and seconds of rest before it.
ROUND = 3
REST_SECONDS = 0.5
# With fewer rounds than this their spread is not known.
FEWEST_ROUNDS = 3
# If timing has less than this share of the variance, the texts dominate and more timing does not help.
SMALL_SHARE = 0.1
# Fewest samples of a way before timing may end, all of them under load; blocks of a sample under load.
FEWEST_SAMPLES, LOAD_BLOCKS = FEWEST_ROUNDS * ROUND, 16
NEXT_REQUESTS = 4  # a row, for those that end
CLOCKED, CLOCK_TURNS = 32, 2  # fewest requests of a way whose waits are clocked; its turns


@dataclass(frozen=True)
class Sample:
    """One sample of one way. Seconds: of reading the prompt, and of everything after it; blocks that recorded a call count as the others'
    average. tokens: of a row. blocks: target calls; for the target alone a block is a step.
    """

    prefill_seconds: float
    seconds: float
    tokens: float
    blocks: int
    round_number: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of a row, including its prefill."""
        return self.tokens / (self.prefill_seconds + self.seconds)


Samples = dict[str, dict[str, Sample]]  # by way, by key of what was decoded
Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, ids of its response


def sample_ways(
    target: PreTrainedModel,
    ways: Sequence[Way],
    requests: Iterable[Sequence[Prompt]],
    settings: DecodeSettings,
    *,
    load: int = 1,
    imprecise: Callable[[Samples], Collection[str]] = lambda samples: samples,
    seconds: float = math.inf,
    least: int = 1,
) -> tuple[Samples, dict[str, UserError]]:
    """(samples of the target alone and the ways, why a way that was left out cannot be decoded), in rounds; the first way rotates.

    requests: of each sample: one prompt; under load `load` of them and those that follow. imprecise: called after every sample from the
    `least`-th on; returns the ways to sample further, none ends it. seconds: also ends it, but not before `least`. settings: rule and
    sampling; gamma is each way's own. Raises UserError if the target alone cannot be decoded.
    """
    every, began, refused = (Way(TARGET), *ways), time.perf_counter(), dict[str, UserError]()
    samples: Samples = {way.name: {} for way in every}
    running = list(every)

    def tried(way: Way, prompts: Sequence[Prompt]) -> tuple[float, float, float, int] | None:
        try:
            return _sample(target, way, prompts, settings, load)
        except UserError as error:  # later requests may be longer, and take more memory
            if way.name == TARGET:
                raise
            refused[way.name] = error
            samples.pop(way.name)
            running.remove(way)
            return None

    for number, prompts in enumerate(requests):
        round_number, place = divmod(number, ROUND)
        if place == 0:
            if round_number:
                time.sleep(REST_SECONDS)
            release()
            for way in list(running):
                tried(way, prompts)  # warm-up, not counted
        start = number % len(running)
        for way in [*running[start:], *running[:start]]:
            if (found := tried(way, prompts)) is not None:
                samples[way.name][prompts[0][0]] = Sample(*found, round_number)
        if number + 1 < least:
            continue
        wanted = imprecise(samples)
        running = [way for way in running if way.name in wanted or way.name == TARGET]
        if len(running) == 1 or time.perf_counter() - began >= seconds:
            break
    return samples, refused


def _sample(
    target: PreTrainedModel, way: Way, prompts: Sequence[Prompt], settings: DecodeSettings, load: int
) -> tuple[float, float, float, int]:
    """(seconds of reading the prompt, of the blocks, tokens of a row, blocks)."""
    drafter, own_settings = way.drafter() if way.drafter is not None else None, way.settings(settings)
    if load == 1:
        (response,), timing = decode(target, drafter, prompts, own_settings)
        prefill, tokens, blocks = timing.prefill_seconds, float(len(response.response_ids)), response.blocks
    else:
        timing, most = Timing(), min(own_settings.max_tokens, LOAD_BLOCKS * (own_settings.gamma + 1))
        options = Options(batch_size=load, in_order=True, timing=timing)
        stream = generate(target, drafter, prompts, replace(own_settings, max_tokens=most, fit_context=True), **options)
        with contextlib.closing(stream):
            # A block is an event of every row.
            tokens = sum(len(event.token_ids) for event in itertools.islice(stream, LOAD_BLOCKS * load)) / load
        prefill, blocks = 0.0, timing.target_calls
    seconds, timed = timing.total_seconds - timing.prefill_seconds, blocks - timing.recording_calls
    if 0 < timed < blocks:
        seconds = (seconds - timing.recording_seconds) * blocks / timed
    return prefill, seconds, tokens, blocks


def requests_under_load(texts: Sequence[Text], load: int) -> Iterator[list[Prompt]]:
    """The requests of each sample: `load` texts cut at random positions of their responses, all positions equally likely, and then whole
    prompts for the rows that end.
    """
    rng, ends = np.random.default_rng(0), np.cumsum([len(response) for _, response in texts])
    for number in range(FEWEST_SAMPLES):
        requests = list[Sequence[int]]()
        for place in rng.integers(0, ends[-1], load).tolist():
            index = int(np.searchsorted(ends, place, side="right"))
            prompt, response = texts[index]
            requests.append([*prompt, *response[: place - (int(ends[index]) - len(response))]])
        requests += [texts[index][0] for index in rng.integers(0, len(texts), NEXT_REQUESTS * load)]
        yield [(f"{number} {row}", list(ids)) for row, ids in enumerate(requests)]


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a way over all held-out prompts, its ratio to the target alone, the interval of that (None: too few samples
    or prompts), and the number of samples.
    """

    tokens_per_second: float
    speed_up: float
    interval: Interval | None
    timed: int


class SpeedEstimates:
    """What the samples say of all held-out prompts. Raises ValueError: a way has no sample."""

    def __init__(
        self,
        samples: Samples,
        prompt_keys: Sequence[Hashable],
        tokens_N: np.ndarray,
        blocks: Mapping[str, np.ndarray | None],
        fewest: int = 2,
        load: int = 1,
    ) -> None:
        """blocks: expected ones (N,) of every way but the target alone; None: replay cannot predict it. fewest: prompts and samples
        needed for an interval.
        """
        self.fewest, self._load = fewest, load
        self._by_token = {name for name, own_N in blocks.items() if own_N is None}
        self._blocks_N = {name: np.asarray(tokens_N if own_N is None else own_N) for name, own_N in blocks.items()}
        self._blocks_N[TARGET] = np.asarray(tokens_N)
        self._tokens_P = sum_by_prompt(prompt_keys, self._blocks_N[TARGET])
        self._count_P = sum_by_prompt(prompt_keys, np.ones(len(tokens_N)))
        self._blocks = {name: sum_by_prompt(prompt_keys, own_N) for name, own_N in self._blocks_N.items()}
        self._samples = samples
        # Seconds of a step.
        self._alone = {key: sample.seconds / sample.blocks for key, sample in samples[TARGET].items()}
        self._prices = {name: self._priced(name) for name in samples}

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        mean, interval = self.against(name, TARGET, confidence)
        step_seconds = float(_near(np.array(list(self._alone.values()))).mean())
        tokens = float(self._tokens_P.sum())
        alone = self._load * tokens / (step_seconds * self._steps(TARGET))
        return Speed(alone * mean, mean, interval, len(self._samples[name]))

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """How many times the tokens per second of `other` a way has, and its interval; paired by sample, on the scale of logarithms, by
        linearising (the delta method): the variances over the texts and over the samples or their rounds add up, and Student's t
        has the degrees of freedom of such a sum (Satterthwaite 1946).
        """
        ratio = self._steps(other) / self._steps(name)
        if name == other:
            return 1.0, (1.0, 1.0)
        shared = self._shared(name, other)
        if min(len(shared), len(self._tokens_P)) < self.fewest:
            return ratio, None
        texts, timed, of_timed = self._variances(name, other, shared)
        total = texts + timed
        if total == 0.0:
            return ratio, (ratio, ratio)
        freedom = total**2 / (texts**2 / (len(self._tokens_P) - 1) + timed**2 / of_timed)
        reach = float(special.stdtrit(freedom, 0.5 + confidence / 2.0)) * math.sqrt(total)
        return ratio, (ratio * math.exp(-reach), ratio * math.exp(reach))

    def errors_of(self, names: Sequence[str], other: str) -> np.ndarray:
        """(R, K) what each text and each sample adds to the error of the logarithm of `against`, for `intervals.lower_share`."""
        columns, prompts = [], len(self._tokens_P)
        for name in names:
            shares_P = self._steps_P(other) / self._steps(other) - self._steps_P(name) / self._steps(name)
            shared = self._shared(name, other)
            errors_M = self._errors_of(other, shared) - self._errors_of(name, shared)
            timed_M = (errors_M - errors_M.mean()) / math.sqrt(max(1, len(shared) * (len(shared) - 1)))
            of_key = dict(zip(shared, timed_M, strict=True))
            timed = [of_key.get(key, 0.0) for key in self._prices[other]]
            columns.append([*math.sqrt(prompts / max(1, prompts - 1)) * shares_P, *timed])
        return np.array(columns).T

    def precise(self, name: str, within: float) -> bool:
        """Whether the interval is within the share `within` of the speed-up, or as narrow as timing can make it."""
        speed_up, interval = self.against(name, TARGET)
        if interval is None:
            return False
        texts, timed, _ = self._variances(name, TARGET, list(self._prices[name]))
        return interval[1] <= speed_up * (1.0 + within) or timed <= SMALL_SHARE * (texts + timed)

    def _shared(self, name: str, other: str) -> list[str]:
        """Keys that both ways have a sample of."""
        return [key for key in self._prices[name] if key in self._prices[other]]

    def _priced(self, name: str) -> dict[str, tuple[float, float]]:
        """(rho, prefill in steps of the target alone) of each sample."""
        keys = [key for key in self._samples[name] if key in self._alone]
        if not keys:
            raise ValueError(f"{name} was timed on no prompt")
        samples, steps_M = [self._samples[name][key] for key in keys], np.array([self._alone[key] for key in keys])
        units_M = np.array([max(1, sample.tokens) if name in self._by_token else sample.blocks for sample in samples])
        rho_M = _near(np.array([sample.seconds for sample in samples]) / units_M / steps_M)
        if name in self._by_token:
            # A ratio of sums over the samples, with more weight on long ones, linearised: its mean is the ratio.
            weights_M = np.array([sample.tokens for sample in samples])
            pooled = float(rho_M @ weights_M / weights_M.sum())
            rho_M = pooled + (rho_M - pooled) * weights_M / weights_M.mean()
        prefill_M = _near(np.array([sample.prefill_seconds for sample in samples]) / steps_M)
        return dict(zip(keys, zip(rho_M.tolist(), prefill_M.tolist(), strict=True), strict=True))

    def _steps_P(self, name: str) -> np.ndarray:
        """Expected seconds of each prompt (P,), in steps of the target alone."""
        rho, prefill = np.mean(list(self._prices[name].values()), axis=0)
        return rho * self._blocks[name] + prefill * self._count_P

    def _steps(self, name: str) -> float:
        return float(self._steps_P(name).sum())

    def _variances(self, name: str, other: str, keys: Sequence[str]) -> tuple[float, float, int]:
        """Of the logarithm of `against`: (over the texts, over the samples or their rounds if that is more, degrees of freedom of
        the latter).
        """
        prompts = len(self._tokens_P)
        texts = float((self.errors_of([name], other)[:prompts] ** 2).sum())
        errors_M = self._errors_of(other, keys) - self._errors_of(name, keys)
        timed, of_timed = float(errors_M.var(ddof=1) / len(keys)), len(keys) - 1
        rounds_M = [self._samples[name][key].round_number for key in keys]
        sums_S = sum_by_prompt(rounds_M, errors_M - errors_M.mean())
        if len(sums_S) >= FEWEST_ROUNDS:
            # Sums over unequal rounds, as of clusters (Cochran, chapter 9).
            between = len(sums_S) / (len(sums_S) - 1) * float((sums_S**2).sum()) / len(keys) ** 2
            if between > timed:
                timed, of_timed = between, len(sums_S) - 1
        return texts, timed, of_timed

    def _errors_of(self, name: str, keys: Sequence[str]) -> np.ndarray:
        """(M,) total steps if each sample's own cost replaced the mean cost, as a share."""
        prices_M2 = np.array([self._prices[name][key] for key in keys])
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
    for turn in each(range(-1, CLOCK_TURNS), "timing waits"):
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
