"""Timing ways in turn: which are sampled, and what the times say of all prompts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from simulation import trials
from tiny_models import perturbed, prompts_of, tiny_model

from speculative import decode as decode_module
from speculative.decode import generate
from speculative.decoder import block_loop
from speculative.decoder.responses import DecodeSettings, Response, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.engine.cached_model import CachedModel
from speculative.errors import TooLittleMemory, UserError
from speculative.measure import timing as timing_module
from speculative.measure.measured import DRAFT, TARGET, Way
from speculative.measure.timing import (
    LOAD_BLOCKS,
    ROUND,
    Sample,
    SpeedEstimates,
    clock,
    requests_under_load,
    sample_ways,
    spread_order,
)
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

SETTINGS = DecodeSettings(SamplingSettings(1.0), 0, Rule.named("sample"), max_tokens=12)


def sample(prefill, seconds, tokens, blocks):
    return Sample(prefill, seconds, tokens, blocks)


def by_key(samples):
    return {f"p{number}": own for number, own in enumerate(samples)}


HAND = {
    TARGET: by_key([sample(0.1, 1.0, 10, 10), sample(0.2, 2.0, 20, 20), sample(0.1, 1.0, 10, 10)]),
    "draft": by_key([sample(0.2, 0.6, 10, 4), sample(0.4, 1.2, 20, 8), sample(0.2, 0.6, 10, 4)]),
}


def test_the_speed_up_is_pooled_over_all_prompts_and_agrees_with_the_column():
    # A step takes .1 s, so a block costs 1.5 steps; reading a prompt 4/3 steps alone and 8/3 with the draft.
    tokens, blocks = np.array([10, 20, 10, 40]), np.array([4.0, 8.0, 4.0, 20.0])
    estimates = SpeedEstimates(HAND, range(4), tokens, {"draft": blocks})
    own, alone = estimates.speed("draft"), estimates.speed(TARGET)
    expected = (80 + 4 * 4 / 3) / (1.5 * 36 + 4 * 8 / 3)
    assert own.speed_up == pytest.approx(expected)
    assert own.tokens_per_second / alone.tokens_per_second == pytest.approx(own.speed_up)
    assert alone.tokens_per_second == pytest.approx(80 / (8.0 + 4 * 0.4 / 3))
    assert (alone.speed_up, alone.interval, own.timed) == (1.0, (1.0, 1.0), 3)
    low, high = own.interval
    assert low < own.speed_up < high


def test_where_replay_has_no_law_a_token_takes_the_place_of_a_block():
    estimates = SpeedEstimates(HAND, range(4), np.array([10, 20, 10, 40]), {"draft": None})
    # .06 s a token over a step of .1 s, on every timed prompt; reading a prompt as before.
    assert estimates.speed("draft").speed_up == pytest.approx((80 + 4 * 4 / 3) / (0.6 * 80 + 4 * 8 / 3))
    # Pooled: a response of 30 tokens weighs three times as much as one of 10.
    samples = {
        TARGET: by_key([sample(0.0, 1.0, 10, 10), sample(0.0, 3.0, 30, 30)]),
        "tree": by_key([sample(0.0, 1.0, 10, 9), sample(0.0, 1.5, 30, 9)]),
    }
    pooled = SpeedEstimates(samples, range(2), np.array([10, 30]), {"tree": None})
    assert pooled.speed("tree").speed_up == pytest.approx(4.0 / 2.5)


def test_two_that_are_the_same_are_the_same_for_certain():
    samples = HAND | {"twin": HAND["draft"]}
    blocks = np.array([4.0, 8.0, 4.0])
    estimates = SpeedEstimates(samples, range(3), np.array([10, 20, 10]), {"draft": blocks, "twin": blocks})
    assert estimates.against("draft", "twin") == (1.0, (1.0, 1.0))
    with pytest.raises(ValueError, match="timed on no prompt"):
        SpeedEstimates(samples | {"late": {}}, range(3), np.array([10, 20, 10]), {"late": blocks})


def test_too_few_samples_or_prompts_have_no_interval_and_are_never_precise():
    estimates = SpeedEstimates(HAND, range(3), np.array([10, 20, 10]), {"draft": np.array([4.0, 8.0, 4.0])}, fewest=4)
    assert estimates.speed("draft").interval is None
    assert not estimates.precise("draft", 10.0)


def test_a_prompt_during_which_the_machine_was_elsewhere_hardly_counts():
    def samples(bad):
        ours = [sample(0.0, (5.0 if number == bad else 0.5 + 0.001 * number), 10, 5) for number in range(12)]
        return {TARGET: by_key([sample(0.0, 1.0, 10, 10)] * 12), "draft": by_key(ours)}

    tokens, blocks = np.full(12, 10), np.full(12, 5.0)
    quiet, noisy = (
        SpeedEstimates(samples(bad), range(12), tokens, {"draft": blocks}).speed("draft") for bad in (None, 3)
    )
    assert noisy.speed_up == pytest.approx(quiet.speed_up, rel=0.01)


def drawn_estimates(rng, prompts, timed, noise, between=0.0):
    """Made-up samples: texts differ in how well they are drafted, the clock in how it runs, rounds (`between`) in a way's price."""
    tokens = rng.integers(20, 120, prompts)
    tau = 1.0 + 3.0 * rng.beta(3, 2, prompts)
    blocks = tokens / tau
    samples = {TARGET: {}, "draft": {}, "baseline": {}}
    dear = np.exp(rng.normal(0, between, (timed, 3)))
    for place, number in enumerate(rng.choice(prompts, timed, replace=False)):
        drift = np.exp(rng.normal(0, 0.2))
        for column, (name, price, prefill, count) in enumerate(
            (
                (TARGET, 1.0, 1.5, tokens[number]),
                ("draft", 1.6, 2.5, blocks[number]),
                ("baseline", 1.2, 1.5, 0.8 * tokens[number]),
            )
        ):
            seconds = drift * np.exp(rng.normal(0, noise)) * dear[place // ROUND, column]
            count = max(1, round(float(count)))
            own = sample(prefill * seconds, price * seconds * count, int(tokens[number]), count)
            samples[name][str(number)] = replace(own, round_number=place // ROUND)
    return SpeedEstimates(samples, range(prompts), tokens, {"draft": blocks, "baseline": 0.8 * tokens})


@pytest.mark.simulation
@pytest.mark.parametrize(("prompts", "timed", "noise"), [(64, 16, 0.05), (24, 8, 0.15), (200, 12, 0.1), (40, 9, 0.1)])
def test_intervals_cover_what_they_promise(prompts, timed, noise):
    runs = trials(400, 4000)
    rng = np.random.default_rng(7)
    population = rng.integers(20, 120, 400_000)
    blocks = population / (1.0 + 3.0 * rng.beta(3, 2, 400_000))
    # Logarithms are symmetric, so a ratio of means of times exceeds the true one by a factor that is the same in both.
    alone = population.mean() + 1.5 * np.exp(noise**2)
    truth = alone / (1.6 * np.exp(noise**2) * blocks.mean() + 2.5 * np.exp(noise**2))
    baseline = (1.2 * 0.8 * population.mean() + 1.5) / (1.6 * blocks.mean() + 2.5)
    inside = np.zeros(2)
    for _ in range(runs):
        estimates = drawn_estimates(rng, prompts, timed, noise)
        for place, (other, value) in enumerate(((TARGET, truth), ("baseline", baseline))):
            low, high = estimates.against("draft", other)[1]
            inside[place] += low <= value <= high
    # Three standard errors of the simulation below 95 %, and two points that few prompts may cost.
    assert (inside / runs > 0.93 - 3 * np.sqrt(0.05 * 0.95 / runs)).all(), inside / runs


@pytest.mark.simulation
@pytest.mark.parametrize("timed", [12, 24])
def test_intervals_hold_where_rounds_differ_more_than_prompts(timed):
    """Every round has other prices, by 6 %; within it prompts differ by 2 %. Without rounds two intervals in ten are wrong."""
    runs, rng = trials(300, 3000), np.random.default_rng(5)
    tokens = rng.integers(20, 120, 400_000)
    blocks = (tokens / (1.0 + 3.0 * rng.beta(3, 2, 400_000))).mean()
    # Means of logarithmic normal prices; as above the same factor stands in both parts.
    factor = np.exp(0.02**2 + 0.06**2)
    truth = (tokens.mean() + 1.5 * factor) / (1.6 * factor * blocks + 2.5 * factor)
    inside, without = 0, 0
    for _ in range(runs):
        estimates = drawn_estimates(rng, 200, timed, 0.02, between=0.06)
        low, high = estimates.against("draft", TARGET)[1]
        inside += low <= truth <= high
        alone = {
            name: {key: replace(own, round_number=0) for key, own in of.items()}
            for name, of in estimates._samples.items()
        }
        ours = {name: estimates._blocks[name] for name in ("draft", "baseline")}
        estimates = SpeedEstimates(alone, range(200), estimates._tokens_P, ours)
        low, high = estimates.against("draft", TARGET)[1]
        without += low <= truth <= high
    assert inside / runs > 0.93 - 3 * np.sqrt(0.05 * 0.95 / runs), inside / runs
    assert without / runs < 0.88, without / runs


def test_a_round_has_new_memory_and_its_first_responses_do_not_count(monkeypatch):
    """Prompts 0 and 3 begin a round: before them all idle memory is freed and each way runs once more."""
    happened = []
    monkeypatch.setattr(timing_module, "release", lambda: happened.append("release"))
    monkeypatch.setattr(timing_module.time, "sleep", lambda seconds: happened.append("rest"))

    def decoded(target, drafter, prompts, settings, **_):
        happened.append(prompts[0][0])
        return [Response(prompts[0][0], [1], response_ids=[2], blocks=1)], Timing(total_seconds=1.0)

    monkeypatch.setattr(timing_module, "decode", decoded)
    prompts = [(name, [1]) for name in "abcde"]
    samples, _ = sample_ways(None, [], [[prompt] for prompt in prompts], DecodeSettings(), least=9)
    assert happened == ["release", "a", "a", "b", "c", "rest", "release", "d", "d", "e"]
    assert {key: own.round_number for key, own in samples[TARGET].items()} == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1}


def test_a_way_that_fails_after_its_first_prompts_is_left_out_alone(monkeypatch):
    """Later requests may be longer."""

    def decoded(target, drafter, prompts, settings, **_):
        if drafter == "greedy for memory" and prompts[0][0] == "b":
            raise TooLittleMemory("no room")
        return [Response(prompts[0][0], [1], response_ids=[2], blocks=1)], Timing(total_seconds=1.0)

    monkeypatch.setattr(timing_module, "decode", decoded)
    ways = [Way("large", lambda: "greedy for memory", 2), Way("small", lambda: None, 2)]
    samples, refused = sample_ways(None, ways, [[(name, [1])] for name in "abc"], DecodeSettings(), least=9)
    assert {name: [*of] for name, of in samples.items()} == {TARGET: [*"abc"], "small": [*"abc"]}
    assert {name: str(error) for name, error in refused.items()} == {"large": "no room"}


@pytest.mark.simulation
def test_the_ratio_estimator_is_narrower_than_the_timed_prompts_alone():
    rng, speed_ups, plain = np.random.default_rng(3), [], []
    for _ in range(trials(200, 1000)):
        estimates = drawn_estimates(rng, 64, 12, 0.03)
        speed_ups.append(estimates.speed("draft").speed_up)
        # Seconds of the timed responses alone over those with the draft.
        samples = estimates._samples
        seconds = [
            sum(samples[name][key].prefill_seconds + samples[name][key].seconds for key in samples["draft"])
            for name in (TARGET, "draft")
        ]
        plain.append(seconds[0] / seconds[1])
    assert np.std(speed_ups) < 0.6 * np.std(plain)


def test_every_way_runs_on_the_first_prompts_and_then_only_the_imprecise_ones():
    target = tiny_model()
    draft = perturbed(target, 0.03)
    ways = [Way("draft", lambda: ModelDrafter(draft), 2), Way("lookup", PromptLookup, 3)]
    calls = []

    def imprecise(samples):
        calls.append({name: len(of) for name, of in samples.items()})
        return ["draft"] if len(calls) < 3 else []

    prompts = [[prompt] for prompt in prompts_of([4, 6, 5, 7, 4, 6])]
    samples, _ = sample_ways(target, ways, prompts, SETTINGS, imprecise=imprecise, least=2)
    assert {name: len(of) for name, of in samples.items()} == {TARGET: 4, "draft": 4, "lookup": 2}
    assert calls[0] == {TARGET: 2, "draft": 2, "lookup": 2}
    assert all(own.blocks <= 12 and own.seconds > 0 for of in samples.values() for own in of.values())
    assert {own.blocks for own in samples[TARGET].values()} == {12}
    samples, _ = sample_ways(target, ways, prompts, SETTINGS, seconds=0.0, least=3)
    assert len(samples["lookup"]) == 3, "the budget ends it, but not before the least"


def test_under_load_every_row_is_occupied_in_every_block(monkeypatch):
    """A tenth of all tokens end a response: its row goes to the next request at once."""
    target, rows, streams = tiny_model(), 3, []
    draft = perturbed(target)

    def watched(*given, **options):
        streams.append([])
        for event in generate(*given, **options):
            streams[-1].append(event)
            yield event

    monkeypatch.setattr(timing_module, "generate", watched)
    texts = [(ids, ids[::-1]) for _, ids in prompts_of([9, 14, 20])]
    settings = DecodeSettings(SamplingSettings(1.0), max_tokens=24, eos_ids=tuple(range(5)))
    ways = [Way("draft", lambda: ModelDrafter(draft), 2)]
    samples, refused = sample_ways(target, ways, requests_under_load(texts, rows), settings, load=rows)
    assert refused == {}
    assert {name: len(of) for name, of in samples.items()} == {TARGET: 9, "draft": 9}
    assert any(event.finish_reason for stream in streams for event in stream)
    for stream in streams:
        blocks = [stream[first : first + rows] for first in range(0, len(stream), rows)]
        assert len(blocks) == LOAD_BLOCKS
        assert all(len({event.index for event in block}) == rows for block in blocks)
    assert {(one.tokens, one.blocks, one.prefill_seconds) for one in samples[TARGET].values()} == {(16.0, 16, 0.0)}
    for one in samples["draft"].values():
        assert one.blocks == LOAD_BLOCKS < one.tokens < 3 * LOAD_BLOCKS
        assert one.seconds > 0.0


def test_a_way_that_does_not_fit_is_left_out_and_a_target_that_does_not_is_an_error():
    def unfit():
        raise UserError("no room")

    ways = [Way("draft", unfit, 2), Way("lookup", PromptLookup, 2)]
    samples, refused = sample_ways(tiny_model(), ways, [prompts_of([4])], SETTINGS)
    assert (list(samples), str(refused["draft"])) == ([TARGET, "lookup"], "no room")
    with pytest.raises(UserError, match="empty"):
        sample_ways(tiny_model(), ways, [[("a", [])]], SETTINGS)


def test_requests_under_load_begin_anywhere_in_the_responses():
    texts = [([1, 2], [3] * 10), ([4], [5] * 30)]
    samples = list(requests_under_load(texts, 1000))
    assert all(len({key for key, _ in requests}) == 5000 for requests in samples)
    first = [ids for requests in samples for _, ids in requests[:1000]]
    long = [ids for ids in first if ids[0] == 4]
    assert len(long) / 9000 == pytest.approx(0.75, abs=0.03)
    assert {len(ids) for ids in long} == set(range(1, 31))
    assert {tuple(ids) for requests in samples for _, ids in requests[1000:]} == {(1, 2), (4,)}


def test_a_load_counts_in_tokens_per_second_alone():
    blocks = {"draft": np.array([4.0, 8.0, 4.0])}
    one, many = (SpeedEstimates(HAND, range(3), np.array([10, 20, 10]), blocks, load=load) for load in (1, 4))
    assert many.speed("draft") == replace(
        one.speed("draft"), tokens_per_second=4 * one.speed("draft").tokens_per_second
    )


@pytest.mark.parametrize("count", [1, 2, 5, 16, 23])
def test_a_spread_order_has_everyone_once_and_is_spread_from_the_start(count):
    order = list(spread_order(count))
    assert sorted(order) == list(range(count))
    if count >= 16:
        assert {place * 4 // count for place in order[:6]} == {0, 1, 2, 3}


def test_blocks_that_recorded_a_call_count_as_long_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s, of which 1 for the prompt and 5 in the 2 of 10 blocks that recorded: 4 s in 8 blocks, 5 s in 10."""
    response = Response("one", [1], response_ids=[2] * 10, blocks=10)
    timing = Timing(prefill_seconds=1.0, recording_seconds=5.0, recording_calls=2, total_seconds=10.0)
    monkeypatch.setattr(timing_module, "decode", lambda *_, **__: ([response], timing))
    samples, _ = sample_ways(None, [], [[("one", [1])]], DecodeSettings())
    assert samples[TARGET]["one"] == Sample(1.0, 5.0, 10, 10)


class Clock:
    """A recorded clock: every call of the decoder costs what is written here, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (decode_module, block_loop, timing_module):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.charge(monkeypatch, CachedModel, "prefill", lambda model, tokens, rows, lengths: 0.5 * len(rows))
        self.charge(monkeypatch, block_loop.BlockLoop, "run_block", lambda *_: 0.25)

    def charge(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, price) -> None:
        usual = getattr(kind, name)

        def charged(*given, **more):
            self.now += price(*given)
            return usual(*given, **more)

        monkeypatch.setattr(kind, name, charged)


def test_waits_by_hand_on_a_recorded_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, responses of three tokens: a prompt costs 0.5 s for each model that reads it, a block 0.25 s.

    Alone: both prompts 1 s and a block, then two blocks more. With the draft (the target itself: all is accepted): both prompts 2 s, and
    one block has all three tokens.
    """
    monkeypatch.setattr(timing_module, "CLOCKED", 4)
    Clock(monkeypatch)
    target = tiny_model()
    ways = [Way(TARGET), Way(DRAFT, lambda: ModelDrafter(target), gamma=2)]
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    monkeypatch.setattr(timing_module, "generate", partial(generate, runner="eager"))
    found = clock(target, ways, [ids for _, ids in prompts_of([4, 5, 6])], settings, 2, 1e9)
    for way, first, pause, stages in (
        (TARGET, 1250.0, 250.0, {"prefill": 1000 / 3, "host": 250.0}),
        (DRAFT, 2250.0, 0.0, {"prefill": 2000.0, "host": 250.0}),
    ):
        assert found[way]["first_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), first))
        assert found[way]["per_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), pause))
        assert found[way]["stages_ms"] == pytest.approx(stages)


def test_the_clock_ends_in_time_but_not_before_a_response_does(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Clock(monkeypatch)
    monkeypatch.setattr(timing_module, "generate", partial(generate, runner="eager"))
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    found = clock(tiny_model(), [Way(TARGET)], [ids for _, ids in prompts_of([4, 5])], settings, 3, 2.0)
    assert found[TARGET]["first_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 1750.0))
    assert found[TARGET]["per_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 250.0))
    # The warm-up is three prompts and a block. A turn has 1 s, and its three clients need 2.25 s for a response.
    assert passed.now == pytest.approx(1.75 + 2 * 2.25)


def test_responses_that_begin_in_time_are_clocked_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, 3.1 s a turn: two responses end after 1.75 s. The next two have a token after 3 s, and end after 3.5 s."""
    passed, clocked = Clock(monkeypatch), list[Response]()
    monkeypatch.setattr(timing_module, "generate", partial(generate, runner="eager"))
    monkeypatch.setattr(timing_module, "waits_of", lambda responses, timing: clocked.extend(responses))
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    clock(tiny_model(), [Way(TARGET)], [ids for _, ids in prompts_of([4, 5])], settings, 2, 6.2)
    assert [(len(one.response_ids), one.finish_reason) for one in clocked] == [(3, "length")] * 8
    assert passed.now == pytest.approx(1.25 + 2 * 3.5)
