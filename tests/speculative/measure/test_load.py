"""Speed under load: the roofline against hand-computed lines, the joined interval by simulation, full batches live."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulation import trials
from tiny_models import perturbed, prompts_of, tiny_model

from speculative import decode as decode_module
from speculative.decode import generate
from speculative.decoder import block_loop
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.drafter import Ask, Drafter, ModelDrafter, Proposal
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.engine.cached_model import CachedModel
from speculative.errors import UserError
from speculative.measure import load as load_module
from speculative.measure.cost import StepCosts
from speculative.measure.load import (
    DRAFTED,
    FOUND,
    PLAIN,
    FullBatch,
    LoadCurve,
    LoadEstimates,
    Roofline,
    StepLine,
    clock,
    fit_line,
    fit_roofline,
    full_batch_seconds,
    kind_shares,
    places_in,
)
from speculative.measure.measured import DRAFT, TARGET, Measured, Way, largest_load
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

# 10 ms fixed and 1 ms a token; the draft a tenth of both.
LINES = Roofline(StepLine(0.010, 0.001), StepLine(0.001, 0.0001))


def costs_at(load: int, gammas: tuple[int, ...] = (1, 4, 8)) -> StepCosts:
    """What a machine of exactly `LINES` would measure."""
    return StepCosts(
        LINES.target.seconds(load),
        {gamma: gamma * LINES.draft.seconds(load) for gamma in gammas},
        {gamma: LINES.target.seconds(load * (gamma + 1)) for gamma in gammas},
        batch_size=load,
        context=64,
    )


@pytest.mark.parametrize("loads", [(1,), (1, 4, 16)])
def test_the_roofline_that_made_the_costs_is_found_from_one_load_or_several(loads) -> None:
    found = fit_roofline([costs_at(load) for load in loads])
    assert (found.target.fixed, found.target.per_token) == pytest.approx((0.010, 0.001))
    assert found.target.free_tokens == pytest.approx(10.0)
    if len(loads) > 1:
        assert (found.draft.fixed, found.draft.per_token) == pytest.approx((0.001, 0.0001))
    for load in loads:
        assert found.draft.seconds(load) == pytest.approx(LINES.draft.seconds(load))


def test_a_line_never_falls_and_never_starts_below_nothing() -> None:
    falling, steep = fit_line((1, 2, 4), (4.0, 3.0, 2.0)), fit_line((1, 2, 4), (1.0, 3.0, 7.0))
    assert falling.per_token == 0.0
    assert falling.fixed > 0.0
    assert falling.free_tokens is None
    assert steep.fixed == 0.0
    assert steep.free_tokens == 0.0


def test_predicted_speed_up_by_hand() -> None:
    # Load 1: (11 ms * 3) / (4 * 1.1 + 15); load 90: (100 * 3) / (4 * 10 + 460).
    assert LINES.speed_up(1, 4, 3.0) == pytest.approx(33.0 / 19.4)
    assert LINES.speed_up(90, 4, 3.0) == pytest.approx(300.0 / 500.0)


def test_plain_decoding_wins_from_where_the_lines_say() -> None:
    # gamma 1 alone with tau 1.8: 1.8 (10 + n) > 1 + .1 n + 10 + 2 n while n < 7 / .3 = 23.3.
    curve = LoadCurve(LINES, {1: 1.8})
    assert curve.plain_wins_from() == 24
    assert curve.speed_up(23) > 1.0 > curve.speed_up(24)
    assert LoadCurve(LINES, {1: 1.05}).plain_wins_from() == 1
    assert LoadCurve(Roofline(StepLine(0.01, 0.0), StepLine(0.001, 0.0)), {1: 1.8}).plain_wins_from() is None


def test_more_tokens_a_block_at_a_small_load_fewer_at_a_large_one() -> None:
    taus = {gamma: (1 - 0.8 ** (gamma + 1)) / 0.2 for gamma in range(1, 17)}
    best = [LoadCurve(LINES, taus).best_gamma(load) for load in (1, 4, 16, 64)]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1] == 1
    slow = {gamma: LINES.speed_up(4, gamma, tau) for gamma, tau in taus.items()}
    assert LoadCurve(LINES, taus).best_gamma(4) == min(
        gamma for gamma in taus if slow[gamma] * 1.03 >= max(slow.values())
    )


def test_what_was_measured_bends_the_curve() -> None:
    curve = LoadCurve(LINES, {1: 1.8}, {1: 1.0, 16: 0.9})
    assert curve.speed_up(1) == pytest.approx(curve.predicted(1, 1))
    assert curve.speed_up(16) == pytest.approx(0.9 * curve.predicted(16, 1))
    assert curve.speed_up(4) == pytest.approx(0.95 * curve.predicted(4, 1))  # half-way in log(load)
    assert curve.speed_up(64) == pytest.approx(0.9 * curve.predicted(64, 1))
    slow_twin = next(load for load in range(1, 100) if all(curve.speed_up(later) <= 1.0 for later in range(load, 4097)))
    assert curve.plain_wins_from() == slow_twin < 24


def estimates(tokens_P, blocks_P, plain_T, drafted_T, **more) -> LoadEstimates:
    """At a load of 4, of a draft and of whom else."""
    plain_T = np.array(plain_T)
    return LoadEstimates(
        4, tokens_P, {"draft": blocks_P} | more, dict.fromkeys(("draft", *more), (plain_T, drafted_T / plain_T))
    )


def test_a_loaded_speed_by_hand() -> None:
    tokens_P, blocks_P = np.full(10, 30.0), np.full(10, 10.0)
    half_P = np.where(np.arange(10) < 7, 20.0, np.nan)  # counted on seven of ten prompts
    at_load = estimates(tokens_P, blocks_P, [0.01, 0.02], [0.02, 0.04], tree=half_P)
    found, alone = at_load.speed("draft"), at_load.speed(TARGET)
    assert found.speed_up == pytest.approx(1.5)  # tau 3, rho 2
    assert found.interval == pytest.approx((1.5, 1.5))  # no prompt and no turn differs
    assert alone.tokens_per_second == pytest.approx(4 / (0.01 * 0.02) ** 0.5)
    assert found.tokens_per_second == pytest.approx(1.5 * alone.tokens_per_second)
    assert (alone.speed_up, found.timed, at_load.speed("tree").timed) == (1.0, 10, 7)
    assert at_load.speed("tree").speed_up == pytest.approx(0.75)
    assert at_load.against("draft", "tree")[0] == pytest.approx(2.0)
    assert at_load.against("draft", "tree")[1] == pytest.approx((2.0, 2.0))


def test_too_few_prompts_or_turns_have_no_interval() -> None:
    tokens_P, blocks_P = np.full(10, 30.0), np.arange(8.0, 18.0)
    assert estimates(tokens_P, blocks_P, [0.01], [0.02]).speed("draft").interval is None
    few = estimates(tokens_P[:3], blocks_P[:3], [0.01, 0.01], [0.02, 0.02])
    assert few.speed("draft").interval is None
    ten = estimates(tokens_P, blocks_P, [0.01, 0.01], [0.02, 0.02])
    assert ten.speed("draft").interval is not None
    assert ten.speed("draft", 1.0 - 0.05 / 100).interval is None, "ten prompts cannot be that certain"


@pytest.mark.simulation
@pytest.mark.parametrize("noise", [0.01, 0.10], ids=["prompts decide", "turns decide"])
def test_the_joined_interval_covers(noise: float) -> None:
    """Prompts of a known tau, turns of a known rho that a common drift slows alike: the truth is covered in 95 of 100."""
    rng, repeats, covered = np.random.default_rng(5), trials(400, 4000), 0
    rate, rho = 0.8, 1.6  # of accepting another token; of the block
    truth = (1.0 / (1.0 - rate)) / rho
    for _ in range(repeats):
        # A prompt's blocks by a rate of its own, so that prompts differ by more than chance.
        blocks_P = rng.integers(8, 25, 40).astype(float)
        own_P = rng.gamma(25.0, 1.0 / 25.0, 40)
        tokens_P = blocks_P / (1.0 - rate) * own_P
        plain_T = 0.01 * np.exp(rng.normal(0.0, 0.3, 6))
        drafted_T = plain_T * rho * np.exp(rng.normal(0.0, noise, 6))
        low, high = estimates(tokens_P, blocks_P, plain_T, drafted_T).speed("draft").interval
        covered += low <= truth <= high
    share = covered / repeats
    assert 0.95 - 4 * (0.95 * 0.05 / repeats) ** 0.5 - 0.01 <= share <= 0.995


def test_places_are_spread_over_the_tokens_of_the_responses() -> None:
    texts = [([1, 2], [3] * 10), ([4], [5] * 30)]
    places = places_in(texts, 4000, None, np.random.default_rng(0))
    assert len({key for key, _ in places}) == 4000
    long = [ids for _, ids in places if ids[0] == 4]
    assert len(long) / 4000 == pytest.approx(0.75, abs=0.03)
    assert {len(ids) for ids in long} == set(range(1, 31))
    assert max(len(ids) for _, ids in places_in(texts, 100, 7, np.random.default_rng(0))) == 7


def test_every_row_says_something_in_every_block_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = tiny_model(), 5
    texts = [(ids, ids[::-1]) for _, ids in prompts_of([9, 14, 20])]
    said: list[tuple[int, list[int]]] = []

    def watched(target, drafter, prompts, settings, **rest):
        said.append((settings.gamma, []))
        rows_said = said[-1][1]
        for event in generate(target, drafter, prompts, settings, **rest):
            rows_said.append(event.index)
            assert event.finish_reason is None or len(rows_said) > rows * (load_module.TIMED_BLOCKS - 1)
            yield event

    monkeypatch.setattr(load_module, "generate", watched)
    settings = DecodeSettings(gamma=2, eos_ids=tuple(range(25)))
    draft = perturbed(target)
    both = full_batch_seconds(target, lambda: ModelDrafter(draft), texts, settings, rows, turns=2)
    for seconds_TB in both[:2]:
        assert seconds_TB.shape == (2, load_module.TIMED_BLOCKS - load_module.WARM_UP)
        assert seconds_TB.min() > 0.0
    assert (both.kinds_TB == load_module.DRAFTED).all()
    assert [gamma for gamma, _ in said] == [0, 2, 0, 2]
    for _, rows_said in said:
        blocks = np.reshape(rows_said, (load_module.TIMED_BLOCKS, rows))
        assert (np.sort(blocks, 1) == np.arange(rows)).all()


@pytest.mark.parametrize("load", [1, 3])
@pytest.mark.parametrize("drafts", [False, True])
def test_kinds_are_shared_out_as_independent_rows_have_them(load: int, drafts: bool) -> None:
    rows = np.random.default_rng(0).random((200_000, load)) < 0.3
    all_found, none_found = rows.all(1), ~rows.any(1)
    kinds = np.where(all_found, FOUND, np.where(none_found, DRAFTED if drafts else PLAIN, FOUND | (DRAFTED * drafts)))
    for kind, share in kind_shares(0.3, load, drafts).items():
        assert (kinds == kind).mean() == pytest.approx(share, abs=0.004)
    assert sum(kind_shares(0.3, load, drafts).values()) == pytest.approx(1.0)


def test_a_kind_counts_by_its_own_median_at_its_share() -> None:
    plain = np.array([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]])
    block = np.array([[1.0, 4.0, 4.0], [2.0, 2.2, 1.8]])
    timed = FullBatch(plain, block, np.array([[PLAIN, FOUND, FOUND], [PLAIN, PLAIN, PLAIN]]))
    # The second turn found nothing: what is known of such a block comes from the first.
    assert timed.ratios({PLAIN: 0.75, FOUND: 0.25}).tolist() == pytest.approx([0.75 + 1.0, 0.75 + 1.0])
    assert timed.ratios({PLAIN: 0.5, DRAFTED: 0.5}).tolist() == pytest.approx([1.0, 1.0])


class Scheduled(Drafter):
    """As a cascade proposes: nothing, a row from the text, a row from the model, one of each; in turn from block to block."""

    name, source_names = "scheduled", ("lookup", "draft")

    def __init__(self, model) -> None:
        self._model, self._blocks = model, 0

    @property
    def model(self):
        return self._model

    def propose(self, ask: Ask) -> Proposal:
        found, drafted = divmod(self._blocks % 4, 2)
        self._blocks += 1
        ids = torch.full((len(ask.lengths_R), ask.gamma), 7)
        return Proposal(ids, None, np.array([0, found, 2 * drafted]), None, np.array([0, 0, 1]))


def test_the_kinds_of_the_timed_blocks_are_theirs_one_by_one() -> None:
    target = tiny_model()
    timed = full_batch_seconds(
        target, lambda: Scheduled(target), [([5, 6, 7], [8, 9, 10])], DecodeSettings(gamma=2), 3, turns=2
    )
    kinds = [PLAIN, DRAFTED, FOUND, FOUND | DRAFTED]
    expected = [kinds[block % 4] for block in range(load_module.WARM_UP, load_module.TIMED_BLOCKS)]
    assert timed.kinds_TB.tolist() == [expected, expected]


@pytest.mark.parametrize("drafts", [False, True])
def test_the_kinds_of_blocks_that_run_in_compiled_code_are_seen(drafts: bool) -> None:
    """Texts that repeat themselves and others: some blocks find a proposal, some do not."""
    target = tiny_model(seed=3)
    texts = [([5, 6, 7] * 5, [5, 6, 7] * 3), (list(range(8, 24)), list(range(24, 31)))]

    def drafter() -> Drafter:
        lookup = PromptLookup(3, 1)
        return LookupDraft(lookup, ModelDrafter(perturbed(target)), then_gamma=1) if drafts else lookup

    timed = full_batch_seconds(target, drafter, texts, DecodeSettings(gamma=2), 1, turns=6)
    assert set(np.unique(timed.kinds_TB)) == {FOUND, DRAFTED if drafts else PLAIN}


def test_a_context_too_short_for_the_blocks_is_refused() -> None:
    target = tiny_model(max_position_embeddings=64)
    with pytest.raises(UserError, match="has no room for 18 blocks of 6"):
        full_batch_seconds(target, lambda: ModelDrafter(target), [([1, 2], [3, 4])], DecodeSettings(gamma=5), 2)


class Clock:
    """A recorded clock: every call of the decoder costs what is written here, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (decode_module, block_loop, load_module):
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

    Alone: both prompts 1 s and a block, then two blocks more. With the draft (the target itself: all is accepted): the same to the
    first token, then the draft reads both prompts (1 s), and one block says the other two tokens.
    """
    monkeypatch.setattr(load_module, "CLOCKED", 4)
    Clock(monkeypatch)
    target = tiny_model()
    ways = [Way(TARGET), Way(DRAFT, lambda: ModelDrafter(target), gamma=2)]
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    monkeypatch.setattr(load_module, "generate", partial(generate, runner="eager"))
    found = clock(target, ways, [ids for _, ids in prompts_of([4, 5, 6])], settings, 2, 1e9)
    for way, pause, stages in (
        (TARGET, 0.25, {"prefill": 1000 / 3, "host": 250.0}),
        (DRAFT, 1.25 / 2, {"prefill": 1000.0, "host": 250.0}),
    ):
        assert found[way]["first_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 1250.0))
        assert found[way]["per_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 1e3 * pause))
        assert found[way]["stages_ms"] == pytest.approx(stages)


def test_the_clock_ends_in_time_but_not_before_a_response_does(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Clock(monkeypatch)
    monkeypatch.setattr(load_module, "generate", partial(generate, runner="eager"))
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    found = clock(tiny_model(), [Way(TARGET)], [ids for _, ids in prompts_of([4, 5])], settings, 3, 2.0)
    assert found[TARGET]["first_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 1750.0))
    assert found[TARGET]["per_token_ms"] == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 250.0))
    # The warm-up is three prompts and a block. A turn has 1 s, and its three clients need 2.25 s for a response.
    assert passed.now == pytest.approx(1.75 + 2 * 2.25)


def test_responses_that_begin_in_time_are_clocked_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, 3.1 s a turn: two responses end after 1.75 s. The next two have a token after 3 s, and end after 3.5 s."""
    passed, clocked = Clock(monkeypatch), list[Response]()
    monkeypatch.setattr(load_module, "generate", partial(generate, runner="eager"))
    monkeypatch.setattr(load_module, "waits_of", lambda responses, timing: clocked.extend(responses))
    settings = DecodeSettings(GREEDY, rule=Rule.named("greedy"), max_tokens=3)
    clock(tiny_model(), [Way(TARGET)], [ids for _, ids in prompts_of([4, 5])], settings, 2, 6.2)
    assert [(len(one.response_ids), one.finish_reason) for one in clocked] == [(3, "length")] * 8
    assert passed.now == pytest.approx(1.25 + 2 * 3.5)


waits = st.dictionaries(
    st.sampled_from([1, 2, 4, 8]), st.tuples(st.floats(1, 100), st.none() | st.floats(1, 100)), max_size=4
)
limits = st.dictionaries(st.sampled_from(["first_token", "per_token"]), st.floats(1, 100), min_size=1)


@given(waits, limits, st.floats(0, 50))
def test_a_higher_limit_never_lowers_the_load(waits, limits, more) -> None:
    rows = [
        Measured(DRAFT, "sample", load, first_token_ms={"p90": first}, per_token_ms=later and {"p90": later})
        for load, (first, later) in waits.items()
    ]
    rows += [Measured(DRAFT, "sample"), Measured(TARGET, "sample", 64, first_token_ms={"p90": 0.0})]
    held = largest_load(rows, DRAFT, limits)
    assert held is None or held in waits
    for name in limits:
        raised = largest_load(rows, DRAFT, {**limits, name: limits[name] + more})
        assert (raised or 0) >= (held or 0)
    alone = largest_load(rows, DRAFT, {"first_token": limits.get("first_token", 1000.0)})
    assert (alone or 0) >= (held or 0), "a limit less"


def test_the_largest_load_by_hand() -> None:
    rows = [
        Measured(DRAFT, "sample", load, first_token_ms={"p90": first}, per_token_ms={"p90": later})
        for load, first, later in ((1, 40.0, 12.0), (4, 120.0, 25.0), (8, 290.0, 31.0))
    ]
    assert largest_load(rows, DRAFT, {"first_token": 300.0, "per_token": 30.0}) == 4
    assert largest_load(rows, DRAFT, {"first_token": 300.0}) == 8
    assert largest_load(rows, DRAFT, {"first_token": 39.0}) is None
    assert largest_load(rows, TARGET, {"first_token": 300.0}) is None
