"""What a tau is worth at a measured price."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import perturbed, tiny_model

from speculative.decoder import responses as clock_module
from speculative.decoder.responses import Response
from speculative.drafters.draft import Draft
from speculative.measure import cost as cost_module
from speculative.measure.cost import (
    StepCosts,
    _agreed,
    best_gamma,
    break_even_alpha,
    gamma_to_run,
    given_costs,
    iid_tau,
    measure_costs,
    near_best_gammas,
    predicted_speed_up,
)

FREE = StepCosts(1.0, {1: 0.02, 8: 0.16}, {1: 1.0, 8: 1.0}, batch_size=1, context=1)


def test_iid_tau_and_its_ends():
    assert iid_tau(0.0, 5) == 1.0
    assert iid_tau(1.0, 5) == 6.0
    assert iid_tau(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)


@pytest.mark.parametrize(("c", "alpha"), [(0.1, 0.33), (0.2, 0.51), (0.4, 0.71), (0.6, 0.83)])
def test_break_even_alpha_at_gamma_5(c, alpha):
    assert break_even_alpha(5, 5 * c + 1.0) == pytest.approx(alpha, abs=0.006)
    assert predicted_speed_up(iid_tau(break_even_alpha(5, 5 * c + 1.0), 5), 5, c, 1.0) == pytest.approx(1.0)


def test_break_even_where_anything_or_nothing_pays():
    assert break_even_alpha(3, 1.0) == 0.0
    assert break_even_alpha(3, 5.5) is None


@pytest.mark.parametrize(("c", "gamma", "speed_up"), [(0.02, 11, 3.8), (0.1, 6, 2.5), (0.4, 2, 1.4)])
def test_best_gamma_at_alpha_08(c, gamma, speed_up):
    taus = {length: iid_tau(0.8, length) for length in range(1, 17)}
    costs = StepCosts(1.0, {1: c}, {1: 1.0, 16: 1.0}, batch_size=1, context=1)
    best, predicted = best_gamma(taus, costs)
    assert abs(best - gamma) <= 1  # the optimum is flat
    assert predicted == pytest.approx(speed_up, abs=0.07)


def test_no_gain_is_a_legal_answer():
    costs = StepCosts(1.0, {5: 4.0}, {5: 1.4}, batch_size=1, context=1)
    assert best_gamma({1: 1.3, 5: 2.1}, costs) == (0, 1.0)
    assert best_gamma({}, FREE) == (0, 1.0)


def test_of_gammas_that_timing_cannot_tell_apart_the_smallest_is_run():
    assert gamma_to_run({1: 1.2, 2: 1.46, 3: 1.5, 4: 1.45}) == (2, 1.46)
    assert gamma_to_run({1: 1.2, 2: 1.45, 3: 1.5}) == (3, 1.5)
    # A gamma that loses is not run for being near one that wins.
    assert gamma_to_run({0: 1.0, 1: 0.99, 2: 1.01}) == (2, 1.01)
    assert gamma_to_run({0: 1.0, 3: 0.9}) == gamma_to_run({}) == (0, 1.0)


def test_verify_ratio_is_interpolated_between_measured_calls():
    costs = StepCosts(2.0, {4: 1.0}, {4: 4.0, 8: 5.0}, batch_size=1, context=1)
    assert costs.verify_ratio(0) == 1.0
    assert costs.verify_ratio(2) == pytest.approx(1.5)
    assert costs.verify_ratio(6) == pytest.approx(2.25)
    assert costs.verify_ratio(16) == pytest.approx(2.5 + 8 * (2.5 - 1.0) / 8)
    assert costs.cost_ratio == pytest.approx(0.125)


def test_a_block_of_a_parallel_draft_costs_one_call_at_every_gamma():
    costs = StepCosts(2.0, {1: 0.4, 5: 0.48}, {1: 2.0, 5: 2.0}, batch_size=1, context=1, parallel=True)
    assert costs.cost_ratio == pytest.approx(0.22)
    assert [gamma * costs.cost_ratio_at(gamma) for gamma in (1, 3, 5, 9)] == pytest.approx([0.2, 0.22, 0.24, 0.24])
    taus = {1: 1.5, 2: 1.9, 3: 2.1, 4: 2.2, 5: 2.25}
    by_hand = {gamma: tau / (1.0 + 0.2 + 0.01 * (gamma - 1)) for gamma, tau in taus.items()}
    assert best_gamma(taus, costs) == (5, pytest.approx(max(by_hand.values())))
    given = given_costs(1.0, 0.25, parallel=True)
    assert given.cost_ratio == 0.25
    assert [gamma * given.cost_ratio_at(gamma) for gamma in (1, 4, 16)] == [0.25, 0.25, 0.25]


def test_a_best_gamma_is_reported_only_as_far_as_it_is_known():
    taus = {gamma: iid_tau(0.8, gamma) for gamma in range(1, 17)}
    exact = StepCosts(1.0, {1: 0.1}, {1: 1.0, 16: 1.0}, batch_size=1, context=1)
    speed = {gamma: taus[gamma] / (0.1 * gamma + 1.0) for gamma in taus}
    best = max(speed.values())
    by_hand = [gamma for gamma in taus if speed[gamma] >= 0.97 * best]
    assert near_best_gammas(taus, exact) == (by_hand[0], by_hand[-1]) == (4, 8)
    vague = near_best_gammas(taus, replace(exact, spread=0.05))
    assert vague == (min(g for g in taus if speed[g] >= 0.9 * best), max(g for g in taus if speed[g] >= 0.9 * best))
    assert near_best_gammas({5: 1.1}, StepCosts(1.0, {5: 4.0}, {5: 1.4}, batch_size=1, context=1)) is None


def test_costs_are_ratios_within_a_repeat_and_their_medians_over_repeats():
    # Three repeats on a machine that slows down by half, one of them disturbed while it verified at gamma 2.
    # (draft, verify, host, opening, prompt) of gamma 0, 2, 4
    calm = np.array([[0.0, 1.0, 0.1, 2.0, 5.0], [0.3, 1.2, 0.2, 3.0, 8.0], [0.5, 1.5, 0.2, 3.0, 8.0]])
    repeats = np.stack([calm, 1.5 * calm, calm])
    repeats[2, 1, 1] = 9.0
    costs = _agreed(repeats, (2, 4), 1, 64)
    assert costs.target_seconds == 1.0
    assert costs.draft_seconds == pytest.approx({2: 0.3, 4: 0.5})
    assert costs.verify_seconds == pytest.approx({2: 1.2, 4: 1.5})
    assert costs.host_seconds == pytest.approx((0.1, 0.2))
    assert costs.opening_seconds == pytest.approx((2.0, 3.0))
    assert costs.prompt_seconds == pytest.approx((5.0, 8.0))
    assert costs.spread == 0.0
    repeats[1, 1, 1] += 0.3  # 1.4 steps instead of 1.2
    deviation = 0.2 / np.sqrt(3) / 1.7
    assert _agreed(repeats, (2, 4), 1, 64).spread == pytest.approx(1.2533 * 1.4826 * deviation)


@pytest.fixture
def cpu_clock(monkeypatch):
    """Stages are timed by this process's own seconds: what else runs here counts for nothing."""
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=time.process_time))


def test_measured_costs_are_positive_and_complete(cpu_clock):
    target = tiny_model(num_hidden_layers=6)
    costs = measure_costs(target, Draft(perturbed(tiny_model())), gammas=(1, 4), batch_size=2, context=16, repeats=1)
    assert set(costs.draft_seconds) == set(costs.verify_seconds) == {1, 4}
    assert costs.target_seconds > 0
    assert costs.draft_seconds[4] > costs.draft_seconds[1] > 0
    assert (costs.batch_size, costs.context) == (2, 16)
    draft = perturbed(target)
    draft.config.pard_token = 49
    block = measure_costs(target, Draft(draft, "parallel"), gammas=(1, 8), batch_size=2, context=16, repeats=2)
    assert block.parallel
    assert block.draft_seconds[8] < 4 * block.draft_seconds[1], "eight calls would take eight times as long"


def test_without_a_draft_the_targets_own_calls_are_timed_and_proposals_are_free(cpu_clock):
    target = tiny_model(num_hidden_layers=6, hidden_size=512, intermediate_size=2048)
    costs = measure_costs(target, None, gammas=(1, 4), batch_size=2, context=16, repeats=2)
    assert set(costs.verify_seconds) == {1, 4}
    assert costs.target_seconds > 0
    # Making four ids takes tens of microseconds, a call of six layers of this width milliseconds.
    assert costs.cost_ratio < 0.2


def test_the_host_and_the_prompt_count_on_both_sides_of_the_speed_up():
    """By hand: 60 tokens. Alone 2 + 6 ms for the response and 60 steps of 2.1 ms; with the draft 3 + 9 ms, and 20
    blocks of 1 + 2.4 + 0.3 ms.
    """
    costs = StepCosts(
        0.002,
        {4: 0.001},
        {4: 0.0024},
        1,
        64,
        host_seconds=(0.0001, 0.0003),
        opening_seconds=(0.002, 0.003),
        prompt_seconds=(0.012, 0.018),
        text=(32.0, 60.0),
    )
    timed = (0.008 + 60 * 0.0021) / (0.012 + 20 * 0.0037)
    assert costs.speed_up(4, 3.0) == pytest.approx(timed)
    assert costs.speed_up(0, 1.0) == pytest.approx(1.0)
    assert predicted_speed_up(3.0, 4, costs.cost_ratio_at(4), costs.verify_ratio(4)) > 1.1 * timed
    assert costs.speed_up(4, costs.paying_tau(4)) == pytest.approx(1.0)
    # Of a long prompt and a short answer: the draft reads for longer than the target alone takes for all.
    short = replace(costs, text=(2000.0, 2.0))
    assert short.paying_tau(4) == math.inf
    assert break_even_alpha(4, short.paying_tau(4)) is None
    # What is proposed without a draft has no draft step, and only the target reads its prompt.
    steps = costs.with_prompts(20 * costs.block_price(4, 0), 60.0, drafts=False)
    assert 60.0 / steps == pytest.approx((0.008 + 60 * 0.0021) / (0.008 + 20 * 0.0027))
    # A pair without overheads is the plain law.
    assert FREE.speed_up(8, 4.0) == pytest.approx(predicted_speed_up(4.0, 8, 0.02, 1.0))


@pytest.mark.parametrize("ahead", [False, True])
def test_overheads_are_what_the_clock_shows_beside_the_stages(monkeypatch, ahead):
    """A clock that advances by 2 ms when a loop is opened, 5 ms while a prompt is read (10 by both), and 10 ms in a
    block's stages, 4 of them
    drafting. The first block needs 3 ms more; the host adds 1 ms to each block, unless the first call runs all blocks at once.
    """
    now = [0.0]

    class Loop:
        def __init__(self, target, drafter, *_, **__):
            self.target, self.drafter, self.ran = SimpleNamespace(how="eager"), drafter, 0
            now[0] += 0.002

        def admit(self, rows, prompts):
            now[0] += 0.010 if self.drafter else 0.005

        def run_block(self):
            drafting = 0.004 if self.drafter else 0.0
            self.timing.draft_seconds, self.timing.verify_seconds = drafting, 0.006
            if not ahead:
                now[0] += drafting + 0.006 + 0.001
            elif self.ran == 0:
                now[0] += self.may_run * (drafting + 0.006)
            now[0] += 0.003 if self.ran == 0 else 0.0
            self.ran += 1

        def close(self):
            pass

    monkeypatch.setattr(cost_module, "open_loop", Loop)
    monkeypatch.setattr(cost_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    target, draft = tiny_model(), Draft(perturbed(tiny_model()))
    costs = measure_costs(target, draft, gammas=(2,), context=16, repeats=1, seconds=0.0)
    host = 0.0 if ahead else 0.001
    assert costs.host_seconds == pytest.approx((host, host), abs=1e-9)
    assert costs.opening_seconds == pytest.approx((0.005, 0.005))
    assert costs.prompt_seconds == pytest.approx((0.005, 0.010))
    assert costs.block_price(2) == pytest.approx((0.010 + host) / (0.006 + host))
    texts = [Response("", [0] * prompt, response_ids=[0] * said) for prompt, said in ((30, 40), (34, 60))]
    assert costs.of_text(texts).text == (32.0, 50.0)


def test_given_times_are_taken_as_they_are():
    costs = given_costs(0.025, 0.003)
    assert costs.cost_ratio == pytest.approx(0.12)
    assert [costs.verify_ratio(gamma) for gamma in (1, 5, 16)] == [1.0, 1.0, 1.0]
    dearer = given_costs(0.025, 0.003, 0.03, max_gamma=8)
    assert [dearer.verify_ratio(gamma) for gamma in (1, 5, 8)] == pytest.approx([1.2, 1.2, 1.2])
    assert max(dearer.verify_seconds) == 8
