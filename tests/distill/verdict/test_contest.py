"""Who races, at which gamma, with how many blocks, and who is timed for how long."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import perturbed, prompts_of, tiny_model

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import LOOKUP, PAST, TOGETHER
from distill.verdict.contest import entrants_of, hold, steps_by_response, worth_timing
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.drafter import ModelDrafter
from speculative.evaluate import frozen_responses
from speculative.measure.cost import StepCosts
from speculative.measure.race import ALONE, Lap, Standings
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import GREEDY

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.05)
SETTINGS = DecodeSettings(GREEDY, 2, "greedy", max_tokens=40)
COSTS = StepCosts(0.010, {1: 0.002, 4: 0.008, 6: 0.012}, {1: 0.011, 4: 0.012, 6: 0.013}, 1, 32)


@pytest.fixture(scope="module")
def pair():
    """(frozen text, scores of the draft, history)."""
    frozen = frozen_responses(TARGET, prompts_of([6, 9, 5, 7, 8, 6, 4, 5]), SETTINGS, "made up")
    history = frozen_responses(TARGET, prompts_of([5, 8, 7]), SETTINGS, "made up")
    return frozen, score_tokens(DRAFT, frozen, SETTINGS.sampling), history


def entrants(pair, history=True):
    frozen, scores, past = pair
    drafts = {"best": ("distilled", lambda: ModelDrafter(DRAFT))}
    return entrants_of(SETTINGS, TARGET, drafts, frozen, {"best": scores}, {"best": COSTS}, past if history else [])


def test_everybody_has_the_gamma_that_pays_most_and_the_blocks_that_decoding_counts(pair):
    frozen, scores, _ = pair
    found = {one.name: one for one in entrants(pair)}
    assert list(found) == ["best", LOOKUP, PAST, TOGETHER]
    gammas = range(1, 7)
    seconds = {
        gamma: expected_blocks_of(scores, "greedy", (gamma,)).sum() * (COSTS.draft_seconds[1] * gamma + 0.01 * COSTS.verify_ratio(gamma))
        for gamma in gammas
    }  # fmt: skip
    assert found["best"].gamma == min(seconds, key=seconds.__getitem__)
    for one in found.values():
        settings = DecodeSettings(GREEDY, one.gamma, "greedy", max_tokens=40)
        for text, blocks in zip(frozen, one.blocks_N, strict=True):
            (response,), _ = decode(TARGET, one.drafter(), [(text.key, text.prompt_ids)], settings)
            assert response.response_ids == text.response_ids
            assert response.blocks == blocks, one.name
    assert found[LOOKUP].tuned_on == "training prompts"
    without = {one.name: one for one in entrants(pair, history=False)}
    assert PAST not in without
    assert "judged prompts" in without[LOOKUP].tuned_on


def test_a_contest_times_everybody_and_tells_who_is_faster(pair):
    frozen = pair[0]
    judging = JudgeConfig(speed_seconds=1e-6, speed_prompts=8)
    contest = hold(judging, SETTINGS, TARGET, entrants(pair), "best", frozen)
    assert {name: len(of) for name, of in contest.laps.items()} == dict.fromkeys(
        (ALONE, "best", LOOKUP, PAST, TOGETHER), 6
    )
    assert "best" in contest
    assert "served" not in contest
    assert contest.against("best", "best") == (1.0, (1.0, 1.0))
    there, back = contest.against("best", LOOKUP)[0], contest.against(LOOKUP, "best")[0]
    assert there * back == pytest.approx(1.0)
    assert not (contest.beats("best", LOOKUP) and contest.beats(LOOKUP, "best"))
    steps = steps_by_response(contest)
    assert all(own.shape == (8,) for own in steps.values())


def standings_of(speed_ups, prompts, noise):
    """A made-up race of so many timed prompts."""
    rng, laps = np.random.default_rng(0), {ALONE: {}}
    for number in range(prompts):
        laps[ALONE][str(number)] = [Lap(0.0, 1.0, Response("", [], response_ids=[0] * 10, blocks=10))]
        for name, speed_up in speed_ups.items():
            seconds = np.exp(rng.normal(0, noise)) / speed_up
            laps.setdefault(name, {})[str(number)] = [
                Lap(0.0, seconds, Response("", [], response_ids=[0] * 10, blocks=5))
            ]
    return Standings(laps, range(50), np.full(50, 10), {name: np.full(50, 5.0) for name in speed_ups}, 6)


def test_who_certainly_loses_is_timed_no_further_but_the_question_is_until_it_is_known():
    rough = standings_of({"best": 1.5, LOOKUP: 0.8, TOGETHER: 1.6}, 8, 0.2)
    names = ["best", LOOKUP, TOGETHER]
    assert worth_timing(rough, names, "best") == ["best", TOGETHER]
    assert worth_timing(rough, names, LOOKUP) == names
    assert worth_timing(standings_of({"best": 1.5, LOOKUP: 1.0, TOGETHER: 1.6}, 60, 0.02), names, "best") == []
    assert worth_timing(standings_of({"best": 1.5, LOOKUP: 1.0, TOGETHER: 1.6}, 4, 0.02), names, "best") == names


def test_behind_the_lookup_stands_the_draft_that_needs_the_fewest_steps(pair):
    frozen, scores, _ = pair
    dear = replace(COSTS, draft_seconds={gamma: 3 * seconds for gamma, seconds in COSTS.draft_seconds.items()})
    drafts = {name: (name, lambda: ModelDrafter(DRAFT)) for name in ("lighter", "best")}
    for costs, behind in (({"lighter": COSTS, "best": dear}, "lighter"), ({"lighter": dear, "best": COSTS}, "best")):
        found = entrants_of(SETTINGS, TARGET, drafts, frozen, dict.fromkeys(drafts, scores), costs, [], ["lighter"])
        assert {one.name: one.behind for one in found if one.behind} == {TOGETHER: behind}
