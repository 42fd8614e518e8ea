"""Racing at batch 1: who is timed on what, and what the times say of all prompts."""

from dataclasses import replace

import numpy as np
import pytest
from simulation import trials
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decoder.responses import DecodeSettings, Response, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.measure import race as race_module
from speculative.measure.measured import TARGET as ALONE
from speculative.measure.measured import Way
from speculative.measure.race import SITTING, Lap, Standings, race, spread_order
from speculative.rules.sampling import SamplingSettings

SETTINGS = DecodeSettings(SamplingSettings(1.0), 0, "sample", max_tokens=12)


def lap(prefill, seconds, tokens, blocks):
    return Lap(prefill, seconds, Response("", [], response_ids=[0] * tokens, blocks=blocks))


def by_key(laps):
    return {f"p{number}": own for number, own in enumerate(laps)}


HAND = {
    ALONE: by_key([lap(0.1, 1.0, 10, 10), lap(0.2, 2.0, 20, 20), lap(0.1, 1.0, 10, 10)]),
    "draft": by_key([lap(0.2, 0.6, 10, 4), lap(0.4, 1.2, 20, 8), lap(0.2, 0.6, 10, 4)]),
}


def test_the_speed_up_is_pooled_over_all_prompts_and_agrees_with_the_column():
    # A step takes .1 s, so a block costs 1.5 steps; reading a prompt 4/3 steps alone and 8/3 with the draft.
    tokens, blocks = np.array([10, 20, 10, 40]), np.array([4.0, 8.0, 4.0, 20.0])
    standings = Standings(HAND, range(4), tokens, {"draft": blocks})
    own, alone = standings.speed("draft"), standings.speed(ALONE)
    expected = (80 + 4 * 4 / 3) / (1.5 * 36 + 4 * 8 / 3)
    assert own.speed_up == pytest.approx(expected)
    assert own.tokens_per_second / alone.tokens_per_second == pytest.approx(own.speed_up)
    assert alone.tokens_per_second == pytest.approx(80 / (8.0 + 4 * 0.4 / 3))
    assert (alone.speed_up, alone.interval, own.timed) == (1.0, (1.0, 1.0), 3)
    low, high = own.interval
    assert low < own.speed_up < high


def test_where_replay_has_no_law_a_token_takes_the_place_of_a_block():
    standings = Standings(HAND, range(4), np.array([10, 20, 10, 40]), {"draft": None})
    # .06 s a token over a step of .1 s, on every timed prompt; reading a prompt as before.
    assert standings.speed("draft").speed_up == pytest.approx((80 + 4 * 4 / 3) / (0.6 * 80 + 4 * 8 / 3))
    assert standings.counted("draft") == {"p0": (10, 4), "p1": (20, 8), "p2": (10, 4)}
    # Pooled: a response of 30 tokens weighs three times as much as one of 10.
    laps = {
        ALONE: by_key([lap(0.0, 1.0, 10, 10), lap(0.0, 3.0, 30, 30)]),
        "tree": by_key([lap(0.0, 1.0, 10, 9), lap(0.0, 1.5, 30, 9)]),
    }
    pooled = Standings(laps, range(2), np.array([10, 30]), {"tree": None})
    assert pooled.speed("tree").speed_up == pytest.approx(4.0 / 2.5)


def test_two_that_are_the_same_are_the_same_for_certain():
    laps = HAND | {"twin": HAND["draft"]}
    blocks = np.array([4.0, 8.0, 4.0])
    standings = Standings(laps, range(3), np.array([10, 20, 10]), {"draft": blocks, "twin": blocks})
    assert standings.against("draft", "twin") == (1.0, (1.0, 1.0))
    with pytest.raises(ValueError, match="timed on no prompt"):
        Standings(laps | {"late": {}}, range(3), np.array([10, 20, 10]), {"late": blocks})


def test_too_few_timed_prompts_have_no_interval_and_are_never_known():
    standings = Standings(HAND, range(3), np.array([10, 20, 10]), {"draft": np.array([4.0, 8.0, 4.0])}, fewest=4)
    assert standings.speed("draft").interval is None
    assert not standings.known("draft", 10.0)


def test_a_prompt_during_which_the_machine_was_elsewhere_hardly_counts():
    def laps(bad):
        ours = [lap(0.0, (5.0 if number == bad else 0.5 + 0.001 * number), 10, 5) for number in range(12)]
        return {ALONE: by_key([lap(0.0, 1.0, 10, 10)] * 12), "draft": by_key(ours)}

    tokens, blocks = np.full(12, 10), np.full(12, 5.0)
    quiet, noisy = (Standings(laps(bad), range(12), tokens, {"draft": blocks}).speed("draft") for bad in (None, 3))
    assert noisy.speed_up == pytest.approx(quiet.speed_up, rel=0.01)


def drawn_standings(rng, prompts, timed, noise, between=0.0):
    """A made-up race: texts differ in how well they are drafted, the clock in how it runs; `between`: each sitting's in how dear a
    way is.
    """
    tokens = rng.integers(20, 120, prompts)
    tau = 1.0 + 3.0 * rng.beta(3, 2, prompts)
    blocks = tokens / tau
    laps = {ALONE: {}, "draft": {}, "baseline": {}}
    dear = np.exp(rng.normal(0, between, (timed, 3)))
    for place, number in enumerate(rng.choice(prompts, timed, replace=False)):
        drift = np.exp(rng.normal(0, 0.2))
        for column, (name, price, prefill, count) in enumerate(
            (
                (ALONE, 1.0, 1.5, tokens[number]),
                ("draft", 1.6, 2.5, blocks[number]),
                ("baseline", 1.2, 1.5, 0.8 * tokens[number]),
            )
        ):
            seconds = drift * np.exp(rng.normal(0, noise)) * dear[place // SITTING, column]
            count = max(1, round(float(count)))
            own = lap(prefill * seconds, price * seconds * count, int(tokens[number]), count)
            laps[name][str(number)] = replace(own, sitting=place // SITTING)
    return Standings(laps, range(prompts), tokens, {"draft": blocks, "baseline": 0.8 * tokens})


@pytest.mark.simulation
@pytest.mark.parametrize(("prompts", "timed", "noise"), [(64, 16, 0.05), (24, 8, 0.15), (200, 12, 0.1)])
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
        standings = drawn_standings(rng, prompts, timed, noise)
        for place, (other, value) in enumerate(((ALONE, truth), ("baseline", baseline))):
            low, high = standings.against("draft", other)[1]
            inside[place] += low <= value <= high
    # Three standard errors of the simulation below 95 %, and two points that few prompts may cost.
    assert (inside / runs > 0.93 - 3 * np.sqrt(0.05 * 0.95 / runs)).all(), inside / runs


@pytest.mark.simulation
@pytest.mark.parametrize("timed", [12, 24])
def test_intervals_hold_where_sittings_differ_more_than_prompts(timed):
    """Every sitting has other prices, by 6 %; within it prompts differ by 2 %. Without sittings two intervals in ten are wrong."""
    runs, rng = trials(300, 3000), np.random.default_rng(5)
    tokens = rng.integers(20, 120, 400_000)
    blocks = (tokens / (1.0 + 3.0 * rng.beta(3, 2, 400_000))).mean()
    # Means of logarithmic normal prices; as above the same factor stands in both parts.
    factor = np.exp(0.02**2 + 0.06**2)
    truth = (tokens.mean() + 1.5 * factor) / (1.6 * factor * blocks + 2.5 * factor)
    inside, without = 0, 0
    for _ in range(runs):
        standings = drawn_standings(rng, 200, timed, 0.02, between=0.06)
        low, high = standings.against("draft", ALONE)[1]
        inside += low <= truth <= high
        alone = {
            name: {key: replace(own, sitting=0) for key, own in of.items()} for name, of in standings._laps.items()
        }
        ours = {name: standings._blocks[name] for name in ("draft", "baseline")}
        standings = Standings(alone, range(200), standings._tokens_P, ours)
        low, high = standings.against("draft", ALONE)[1]
        without += low <= truth <= high
    assert inside / runs > 0.93 - 3 * np.sqrt(0.05 * 0.95 / runs), inside / runs
    assert without / runs < 0.88, without / runs


def test_a_sitting_has_new_memory_and_its_first_responses_do_not_count(monkeypatch):
    """Prompts 0 and 3 begin a sitting: before them all idle memory is freed and each way runs once more."""
    happened = []
    monkeypatch.setattr(race_module, "release", lambda: happened.append("release"))
    monkeypatch.setattr(race_module.time, "sleep", lambda seconds: happened.append("rest"))

    def decoded(target, drafter, prompts, settings, **_):
        happened.append(prompts[0][0])
        return [Response(prompts[0][0], [1], response_ids=[2], blocks=1)], Timing(total_seconds=1.0)

    monkeypatch.setattr(race_module, "decode", decoded)
    prompts = [(name, [1]) for name in "abcde"]
    laps = race(None, [], prompts, DecodeSettings(), still=lambda _: ["x"], seconds=1e9, least=9)
    assert happened == ["release", "a", "a", "b", "c", "rest", "release", "d", "d", "e"]
    assert {key: own.sitting for key, own in laps[ALONE].items()} == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1}


@pytest.mark.simulation
def test_the_ratio_estimator_is_narrower_than_the_timed_prompts_alone():
    rng, estimates, plain = np.random.default_rng(3), [], []
    for _ in range(trials(200, 1000)):
        standings = drawn_standings(rng, 64, 12, 0.03)
        estimates.append(standings.speed("draft").speed_up)
        # Seconds of the timed responses alone over those with the draft.
        laps = standings._laps
        seconds = [
            sum(laps[name][key].prefill_seconds + laps[name][key].seconds for key in laps["draft"])
            for name in (ALONE, "draft")
        ]
        plain.append(seconds[0] / seconds[1])
    assert np.std(estimates) < 0.6 * np.std(plain)


def test_everybody_runs_on_the_first_prompts_and_then_only_who_is_worth_it():
    target = tiny_model()
    draft = perturbed(target, 0.03)
    ways = [Way("draft", lambda: ModelDrafter(draft), 2), Way("lookup", PromptLookup, 3)]
    asked = []

    def still(laps):
        asked.append({name: len(of) for name, of in laps.items()})
        return ["draft"] if len(asked) < 3 else []

    prompts = prompts_of([4, 6, 5, 7, 4, 6])
    laps = race(target, ways, prompts, SETTINGS, still=still, seconds=1e9, least=2)
    assert {name: len(of) for name, of in laps.items()} == {ALONE: 4, "draft": 4, "lookup": 2}
    assert asked[0] == {ALONE: 2, "draft": 2, "lookup": 2}
    assert all(own.response.blocks <= 12 and own.seconds > 0 for of in laps.values() for own in of.values())
    assert {own.response.blocks for own in laps[ALONE].values()} == {12}


def test_the_budget_ends_a_race_but_not_before_the_least():
    prompts = prompts_of([4, 6, 5, 7])
    laps = race(tiny_model(), [Way("lookup", PromptLookup, 3)], prompts, SETTINGS, still=list, seconds=0.0, least=3)
    assert len(laps["lookup"]) == 3


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
    monkeypatch.setattr(race_module, "decode", lambda *_, **__: ([response], timing))
    laps = race(None, [], [("one", [1])], DecodeSettings(), still=lambda _: [], seconds=0.0, least=1)
    assert laps[ALONE]["one"] == Lap(1.0, 5.0, response)
