"""Replay against brute force, against live decoding, and as the oracle that sees faults losslessness cannot."""

import collections
import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scored_texts import kept_at_least, random_scores
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.measure import replay as replay_module
from speculative.measure import token_scores as scores_module
from speculative.measure.metrics import rule_curve
from speculative.measure.replay import (
    agreement_of,
    agreement_warning,
    agreement_words,
    block_variance,
    expected_blocks,
    expected_blocks_of,
    replay,
    survival_of,
    texts_of,
)
from speculative.measure.token_scores import TokenScores, score_responses, score_tokens, scored_gammas
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs, one_hot
from speculative.rules.verify import verify, verify_block

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.03)


def scores_of_probs(accept_probs):
    """Responses whose tokens pass with these probabilities under rule `sample`; `greedy` keeps the sure ones."""
    with np.errstate(divide="ignore"):
        return [
            TokenScores(np.log(probs), np.zeros(len(probs)), probs == 1, np.zeros(len(probs), dtype=int))
            for probs in accept_probs
        ]


def counted_blocks(flags, gamma):
    """Blocks of a response whose token t would pass as a drafted token iff flags[t]: the process, token by token."""
    blocks, accepted = 0, 0
    for flag in flags:
        blocks += accepted == 0
        if accepted < gamma and flag:
            accepted += 1
        else:  # correction, or the bonus token whatever its flag
            accepted = 0
    return blocks


@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_expected_blocks_and_variance_equal_brute_force(gamma):
    rng = np.random.default_rng(gamma)
    responses = [rng.random(length) for length in (1, 2, 5, 9)]
    mean, square = np.zeros(4), np.zeros(4)
    for index, probs in enumerate(responses):
        for flags in itertools.product((0, 1), repeat=len(probs)):
            weight = np.where(flags, probs, 1 - probs).prod()
            blocks = counted_blocks(flags, gamma)
            mean[index] += weight * blocks
            square[index] += weight * blocks**2
    scores = scores_of_probs(responses)
    np.testing.assert_allclose(expected_blocks_of(scores, Rule.named("sample"), (gamma,))[:, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(
        block_variance(texts_of(scores, Rule.named("sample")), gamma), square - mean**2, rtol=1e-9, atol=1e-12
    )
    assert replay(responses, (gamma,)) == {gamma: pytest.approx(17 / mean.sum(), rel=1e-12)}


# Sums of numbers near 1 in another order.
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def random_blocks(length, offsets, seed=0):
    """A response scored at random by a parallel draft: offset by offset other numbers of the same tokens."""
    by_offset = [random_scores(length, seed + offset) for offset in range(offsets)]
    log_target = random_scores(length, seed).log_target_probs

    def table(values, behind):
        rows = [
            [values(by_offset[j])[i + j] if i + j < length else behind for j in range(offsets)] for i in range(length)
        ]
        return np.array(rows)

    by_start = TokenScores(
        table(lambda one: one.log_draft_probs, 0.0),
        table(lambda one: log_target, 0.0),
        table(lambda one: one.matches, True),
        table(lambda one: one.choice_ids, 0),
    )
    return replace(by_offset[0], by_start=by_start)


def blocks_by_recursion(scores, rule, gamma):
    """(mean, variance) of the number of blocks."""

    @functools.cache
    def moments(start):
        if start >= len(scores):
            return 0.0, 0.0
        left = min(gamma, len(scores) - start)
        kept = [kept_at_least(scores, rule, start, count) for count in range(left + 1)] + [0.0]
        mean = square = 0.0
        for count in range(left + 1):
            behind_mean, behind_square = moments(start + count + 1)
            weight = kept[count] - kept[count + 1]
            mean += weight * (1 + behind_mean)
            square += weight * (1 + 2 * behind_mean + behind_square)
        return mean, square

    mean, square = moments(0)
    return mean, square - mean**2


@pytest.mark.parametrize("rule", ["sample", "block", "greedy-draft"])
@pytest.mark.parametrize("parallel", [False, True])
def test_expected_blocks_of_every_rule_equal_the_recursion(rule, parallel, monkeypatch):
    scores, gammas = [random_scores(length, seed=length) for length in (12, 1, 40, 5)], (0, 1, 2, 5, 32)
    if parallel:
        scores, gammas = [random_blocks(length, 7, seed=length) for length in (12, 1, 40, 5)], (0, 1, 2, 5, 7)
    blocks_NK = expected_blocks_of(scores, Rule.named(rule), gammas)
    for row, text in enumerate(scores):
        for column, gamma in enumerate(gammas):
            mean, variance = blocks_by_recursion(text, rule, gamma)
            np.testing.assert_allclose(blocks_NK[row, column], mean, **TIGHT)
            check = agreement_of([text], Rule.named(rule), [mean + 100], gamma)
            if variance > 1e-9:
                # The counted blocks become a whole number first.
                np.testing.assert_allclose(check.z, (int(mean + 100) - mean) / math.sqrt(variance), rtol=1e-6)
    assert blocks_NK[:, 0].tolist() == [12, 1, 40, 5], "gamma 0 is a call per token"
    monkeypatch.setattr(replay_module, "ENTRIES_PER_GROUP", 1)
    one_at_a_time = expected_blocks_of(scores, Rule.named(rule), gammas)
    np.testing.assert_allclose(one_at_a_time, blocks_NK, **TIGHT)


def distributions(seed, shape, vocab):
    probs = np.random.default_rng(seed).dirichlet(np.ones(vocab), shape)
    return torch.from_numpy(probs)


def block_outcomes(rule, gamma, target_of, draft_of):
    """{tokens that a block emits: probability} over all drafts and coins, by the rule's own functions. Rows by drafted prefix."""
    vocab = len(target_of(()))
    outcomes = collections.defaultdict(float)
    for drafted in itertools.product(range(vocab), repeat=gamma):
        drafts = torch.stack([draft_of(drafted[:place]) for place in range(gamma)])
        if rule == "greedy-draft":
            drafts = one_hot(drafts.argmax(-1), vocab, torch.float64)
        left = math.prod(drafts[place, token].item() for place, token in enumerate(drafted))
        if left == 0:
            continue
        rows = torch.stack([target_of(drafted[:place]) for place in range(gamma + 1)])
        given = (rows[None], torch.tensor([drafted]), drafts[None], torch.zeros(1, gamma), torch.zeros(1, gamma + 1))
        if rule == "block":
            passing, order = verify_block(*given).accept_probs_BG[0].tolist(), range(gamma, 0, -1)
        else:
            passing, order = verify(*given).accept_probs_BG[0].tolist(), range(1, gamma + 1)
        weights = [1.0]
        for place, token in enumerate(drafted):
            weights.append(min(1.0, weights[-1] * (rows[place, token] / drafts[place, token]).item()))
        ends = {}  # tokens kept -> probability given the draft
        for count in order:
            if rule == "block":  # From the back: the longest prefix that passes.
                ends[count], left = left * passing[count - 1], left * (1.0 - passing[count - 1])
            else:
                ends[count - 1], left = left * (1.0 - passing[count - 1]), left * passing[count - 1]
        ends[0 if rule == "block" else gamma] = left
        for kept, probability in ends.items():
            following = rows[kept]
            if kept < gamma:
                scale = weights[kept] if rule == "block" else 1.0
                following = (scale * rows[kept] - drafts[kept]).clamp_min(0)
            for token in range(vocab):
                if probability > 0 and following[token] > 0:
                    outcomes[(*drafted[:kept], token)] += probability * (following[token] / following.sum()).item()
    return outcomes


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
@pytest.mark.parametrize("parallel", [False, True])
def test_the_laws_equal_an_enumeration_of_every_text(rule, gamma, parallel):
    """Each text of four tokens, over all drafts and coins of all its blocks: its probability and its blocks."""
    vocab, length = 2, 4
    contexts = [c for size in range(length + gamma + 1) for c in itertools.product(range(vocab), repeat=size)]
    target = dict(zip(contexts, distributions(1, len(contexts), vocab), strict=True))
    draft = dict(zip(contexts, distributions(2, (len(contexts), gamma), vocab), strict=True))

    def drafted_from(start, prefix):
        """A parallel draft knows the text before the block and the offset, another one what it drafted."""
        return draft[start][len(prefix)] if parallel else draft[start + prefix][0]

    emitted = {
        start: block_outcomes(
            rule, gamma, lambda behind, s=start: target[s + behind], lambda prefix, s=start: drafted_from(s, prefix)
        )
        for start in contexts
        if len(start) < length
    }
    for text in itertools.product(range(vocab), repeat=length):

        def moments(place, text=text):
            """(probability of the rest of the text, expected blocks on that event) from a block that starts at `place`."""
            if place >= length:
                return 1.0, 0.0
            written = blocks = 0.0
            for tokens, probability in emitted[text[:place]].items():
                if tokens[: length - place] == text[place : place + len(tokens)]:
                    rest, more = moments(place + len(tokens))
                    written, blocks = written + probability * rest, blocks + probability * (rest + more)
            return written, blocks

        written, blocks = moments(0)
        log_target = np.log([target[text[:place]][token] for place, token in enumerate(text)])
        assert written == pytest.approx(math.exp(log_target.sum()), rel=1e-12), "the text is the target's"
        tables = np.zeros((4, length, gamma))
        tables[2], tables[3] = True, 1.0
        for start, offset in itertools.product(range(length), range(gamma)):
            if start + offset < length:
                row, token = drafted_from(text[:start], text[start : start + offset]), text[start + offset]
                tables[:, start, offset] = math.log(row[token]), log_target[start + offset], row.argmax() == token, 1.0
        by_start = TokenScores(tables[0], tables[1], tables[2] > 0, tables[2].astype(int))
        scores = TokenScores(*(part[:, 0] for part in (tables[0], tables[1], tables[2] > 0, tables[2])))
        scores = replace(scores, log_target_probs=log_target, by_start=by_start if parallel else None)
        expected = expected_blocks_of([scores], Rule.named(rule), (gamma,))[0, 0]
        assert expected == pytest.approx(blocks / written, rel=1e-12)


def test_a_parallel_draft_is_not_asked_beyond_the_offsets_it_was_scored_at():
    scores = [random_blocks(9, 3)]
    with pytest.raises(ValueError, match="scored at 3 offsets"):
        expected_blocks_of(scores, Rule.named("sample"), (1, 4))
    assert scored_gammas(scores, range(33)) == [0, 1, 2, 3]
    assert rule_curve(scores, ["one"], Rule.named("sample"), survival_gamma=3).gammas == [0, 1, 2, 3]
    # Somebody who needs no model may propose more.
    sure = [np.array([5, -1, -1, -1, -1, 2, -1, -1, -1])]
    found, drafted = expected_blocks(texts_of(scores, Rule.named("greedy-draft"), sure=sure), (3,), (6,))
    kept = [kept_at_least(scores[0], "greedy-draft", 6, count) for count in (1, 2, 3)]
    assert found[0, 0] == 1.0
    assert drafted[0, 0] == expected_blocks_of([rest_of(scores[0], 6)], Rule.named("greedy-draft"), (3,))[0, 0], kept


def rest_of(scores, start):
    by_start = TokenScores(*(part[start:] for part in list(vars(scores.by_start).values())[:4]))
    return replace(TokenScores(*(part[start:] for part in list(vars(scores).values())[:4])), by_start=by_start)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_scores_by_start_equal_one_block_at_a_time(kind, monkeypatch):
    sampling, windows = SamplingSettings(0.9, top_k=30), {"sliding_window": 4} if kind == "gemma3_text" else {}
    model = tiny_model(kind, **windows)
    model.config.pard_token = 49
    texts, _ = decode(model, None, prompts_of([3, 1, 7]), DecodeSettings(sampling, max_tokens=9, eos_ids=(3,)))
    scores = score_tokens(model, texts, sampling, offsets=4)
    monkeypatch.setattr(scores_module, "MASKS_PER_FORWARD", 7)
    for text, own, again in zip(texts, scores, score_tokens(model, texts, sampling, offsets=4), strict=True):
        np.testing.assert_allclose(again.by_start.log_draft_probs, own.by_start.log_draft_probs, atol=1e-4)
        said = text.response_ids
        for start, offset in itertools.product(range(len(said)), range(4)):
            found = [vars(own.by_start)[name][start, offset] for name in list(vars(own))[:4]]
            if start + offset >= len(said):
                assert found[:3] == [0.0, 0.0, True]
                continue
            with torch.no_grad():
                logits = model(torch.tensor([[*text.prompt_ids, *said[:start], *[49] * offset]])).logits[0, -1]
            token = said[start + offset]
            expected = logits_to_probs(logits[None], sampling)[0, token].double().log().item()
            assert found[0] == pytest.approx(expected, abs=1e-4)
            assert found[1] == text.log_target_probs[start + offset]
            assert (found[2], found[3]) == (logits.argmax() == token, logits.argmax())
            whole = logits.double().div(0.9).log_softmax(-1)[token].item()
            assert own.by_start.log_whole_probs[start, offset] == pytest.approx(whole, abs=1e-4)
        np.testing.assert_array_equal(own.by_start.log_draft_probs[:, 0], own.log_draft_probs)


@given(seed=st.integers(0, 10_000), length=st.integers(1, 30), gamma=st.integers(1, 12))
def test_no_rule_keeps_more_than_block_verification_and_longer_blocks_never_cost_calls(seed, length, gamma):
    text = [random_scores(length, seed)]
    token_wise, block = (
        expected_blocks_of(text, Rule.named(rule), (gamma - 1, gamma))[0] for rule in ("sample", "block")
    )
    assert block[1] <= token_wise[1] + 1e-9
    assert math.ceil(length / (gamma + 1)) - 1e-9 <= block[1] <= length + 1e-9
    one_token = expected_blocks_of([random_scores(1, seed)], Rule.named("block"), (gamma,))
    assert one_token[0, 0] == 1.0
    np.testing.assert_allclose(
        *(expected_blocks_of(text, Rule.named(rule), (1,)) for rule in ("sample", "block")), rtol=1e-12
    )


def test_survival_counts_blocks_that_fit_into_the_text():
    both_kinds = random_scores(25, 4, spread=0.5), random_blocks(25, 4, 4)
    for rule, text in itertools.product(("sample", "block"), both_kinds):
        # Where blocks start, from the recursion's own law.
        starts = np.zeros(40)
        starts[0] = 1.0
        for place in range(25):
            kept = [kept_at_least(text, rule, place, min(j, 25 - place)) for j in range(5)] + [0.0]
            for count in range(5):
                starts[place + count + 1] += starts[place] * (kept[count] - kept[count + 1])
        for j, found in enumerate(survival_of([text], Rule.named(rule), 4), start=1):
            whole = [place for place in range(25) if place + j <= 25]
            expected = sum(starts[place] * kept_at_least(text, rule, place, j) for place in whole)
            assert found == pytest.approx(expected / sum(starts[place] for place in whole))
    short = random_scores(2, 1)
    assert survival_of([short], Rule.named("sample"), 4)[2:] == [0.0, 0.0], "no block of three tokens fits"


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_greedy_replay_equals_live_block_counts_exactly(gamma):
    settings = DecodeSettings(GREEDY, gamma, Rule.named("greedy"), max_tokens=40, eos_ids=(3, 8))
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts_of([9, 1, 23, 4, 15]), settings, batch_size=2)
    scores, counted = score_tokens(DRAFT, responses, GREEDY), [response.blocks for response in responses]
    assert expected_blocks_of(scores, Rule.named("greedy"), (gamma,))[:, 0].tolist() == counted
    assert agreement_of(scores, Rule.named("greedy"), counted, gamma).z == 0.0
    # From plain text as well: speculation did not change it.
    plain, _ = decode(
        TARGET, None, prompts_of([9, 1, 23, 4, 15]), DecodeSettings(GREEDY, max_tokens=40, eos_ids=(3, 8))
    )
    assert expected_blocks_of(score_tokens(DRAFT, plain, GREEDY), Rule.named("greedy"), (gamma,)).sum() == sum(counted)


@pytest.fixture(scope="module")
def sampled_text():
    """The target's own text, which no rule and no gamma changes, and what the draft says of it."""
    settings = DecodeSettings(SamplingSettings(0.8, top_p=0.95), 0, Rule.named("sample"), 40, (3,), seed=9)
    texts, _ = decode(TARGET, None, prompts_of([5] * 60), settings, batch_size=60)
    return texts, score_tokens(DRAFT, texts, settings.sampling)


@pytest.mark.parametrize("rule", ["sample", "sample-untruncated", "greedy-draft", "block"])
@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
def test_replay_agrees_with_live_decoding(rule, gamma, sampled_text):
    sampling = SamplingSettings(0.8, top_p=0.95)
    prompts = prompts_of([5] * 60)
    live, _ = decode(
        TARGET, ModelDrafter(DRAFT), prompts, DecodeSettings(sampling, gamma, Rule.named(rule), 40, (3,)), batch_size=60
    )
    counted = [response.blocks for response in live]
    assert abs(agreement_of(score_tokens(DRAFT, live, sampling), Rule.named(rule), counted, gamma).z) < 3.5
    # On other text of the same target, with another seed, the two taus agree within both standard errors.
    plain, scores = sampled_text
    blocks = expected_blocks_of(scores, Rule.named(rule), (gamma,))[:, 0]
    taus, errors = [], []
    for counts, texts in ((blocks, plain), (np.array(counted), live)):
        tokens = np.array([len(response.response_ids) for response in texts])
        taus.append(tokens.sum() / counts.sum())
        errors.append(np.std(tokens - taus[-1] * counts) * math.sqrt(len(tokens)) / counts.sum())
    assert abs(taus[0] - taus[1]) < 3.5 * math.hypot(*errors)


def test_a_draft_that_truncates_nothing_is_distinguished_from_one_that_samples_like_the_target():
    worse, settings = (
        perturbed(TARGET, 0.05),
        DecodeSettings(SamplingSettings(1.0, top_k=4), 4, Rule.named("sample-untruncated"), 60),
    )
    live, _ = decode(TARGET, ModelDrafter(worse), prompts_of([5] * 80), settings, batch_size=80)
    scores, counted = score_tokens(worse, live, settings.sampling), [response.blocks for response in live]
    assert abs(agreement_of(scores, Rule.named("sample-untruncated"), counted, 4).z) < 3.5
    assert agreement_of(scores, Rule.named("sample"), counted, 4).z > 5
    assert scores[0].log_drafted(Rule.named("sample-untruncated")) is not scores[0].log_draft_probs
    plain = score_tokens(worse, live, SamplingSettings(1.0))[0]
    assert plain.log_drafted(Rule.named("sample-untruncated")) is plain.log_draft_probs


def test_positions_that_drift_later_are_seen_by_replay_and_by_nothing_else():
    """A draft step at a wrong position leaves the text the target's; only fewer tokens are accepted. The calls that are compared with the
    model's own at its first use are right here.
    """
    target = tiny_model("gpt2")
    draft = perturbed(target, 0.01)
    settings = DecodeSettings(SamplingSettings(1.0), 4, Rule.named("sample"), max_tokens=40)
    prompts = prompts_of([5] * 40)

    calls = itertools.count()

    def shift(module, args, kwargs):
        if kwargs["input_ids"].shape[1] == 1 and next(calls) > 2:
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return args, kwargs

    z_scores = {}
    for name in ("right", "shifted"):
        hook = draft.register_forward_pre_hook(shift, with_kwargs=True) if name == "shifted" else None
        responses, _ = decode(target, ModelDrafter(draft), prompts, settings, batch_size=40)
        if hook is not None:
            hook.remove()
        scores = score_tokens(draft, responses, settings.sampling)
        z_scores[name] = agreement_of(scores, Rule.named("sample"), [response.blocks for response in responses], 4).z
    assert abs(z_scores["right"]) < 3.5
    assert z_scores["shifted"] > 6


@pytest.mark.parametrize("rule", ["sample", "sample-untruncated", "greedy-draft"])
def test_scores_equal_one_text_at_a_time_and_do_not_depend_on_the_chunks(rule, monkeypatch):
    sampling = SamplingSettings(0.9, top_k=30, min_p=0.01)
    texts, _ = decode(
        TARGET, None, prompts_of([9, 1, 23, 4, 15]), DecodeSettings(sampling, max_tokens=20, eos_ids=(3,))
    )
    whole = score_responses(DRAFT, texts, sampling, Rule.named(rule))
    for text, scores in zip(texts, whole, strict=True):
        with torch.no_grad():
            logits = DRAFT(torch.tensor([text.prompt_ids + text.response_ids])).logits
        logits = logits[0, len(text.prompt_ids) - 1 : -1]
        tokens = torch.tensor(text.response_ids)
        if rule.startswith("sample"):
            drafted = sampling if rule == "sample" else SamplingSettings(0.9)
            draft_probs = logits_to_probs(logits, drafted).gather(1, tokens[:, None])[:, 0].double()
            expected = (draft_probs / torch.tensor(text.log_target_probs, dtype=torch.float64).exp()).clamp_max(1.0)
        else:
            expected = (logits.argmax(-1) == tokens).double()
        # Float32 sums in another order.
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(scores_module, "LOGITS_PER_FORWARD", 1)
    monkeypatch.setattr(scores_module, "PROBS_PER_CHUNK", 150)
    for chunked, scores in zip(score_responses(DRAFT, texts, sampling, Rule.named(rule)), whole, strict=True):
        np.testing.assert_allclose(chunked, scores, rtol=1e-4, atol=1e-5)  # float32, other shapes


def test_a_draft_that_saw_something_else_is_warned_about_and_an_honest_one_is_not():
    sure, coins = scores_of_probs([np.ones(40)] * 5), scores_of_probs([np.full(40, 0.5)] * 50)
    exact = int(expected_blocks_of(sure, Rule.named("greedy"), (3,)).sum())
    honest = agreement_of(sure, Rule.named("greedy"), [exact // 5] * 5, 3)
    assert agreement_warning(honest) is None
    assert agreement_words(honest, 200) == "replay 4.00, exact"
    worse = agreement_of(sure, Rule.named("greedy"), [exact // 5 + 1] * 5, 3)
    assert "no randomness involved" in str(agreement_warning(worse))
    assert agreement_words(worse, 200) == "replay 4.00, not exact"
    predicted = expected_blocks_of(coins, Rule.named("sample"), (3,)).sum()
    spread = np.sqrt(block_variance(texts_of(coins, Rule.named("sample")), 3).sum())
    for deviations, warns in ((3.5, False), (-3.5, False), (4.5, True), (-4.5, True)):
        check = agreement_of(coins, Rule.named("sample"), [predicted + deviations * spread], 3)
        text = agreement_warning(check)
        assert (text is not None) == warns
        assert not warns or (f"z = {check.z:+.1f}" in str(text) and "draft positions, masks" in str(text))
    assert agreement_words(None, 1) == "no replay for this rule"
    assert agreement_warning(None) is None
