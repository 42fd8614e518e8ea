"""The table of disagreements against places counted by hand and blocks counted token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.models.load import EMBEDDED_FOLDER, load_tokenizer
from speculative.evaluate import HeldoutResponse
from speculative.explain.disagreements import disagreements
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

TOKENIZER = load_tokenizer(str(EMBEDDED_FOLDER))


def word(text):
    (token_id,) = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return token_id


A, B, C, D = (word(text) for text in (" return", " if", "self", " for"))


def scored(ids, choices, log_draft=None, log_target=None):
    ids, choices = np.array(ids), np.array(choices)
    log_target = np.zeros(len(ids)) if log_target is None else np.array(log_target)
    log_draft = np.where(ids == choices, 0.0, -np.inf) if log_draft is None else np.array(log_draft)
    return TokenScores(log_draft, log_target, ids == choices, choices)


def random_text(seed, responses=4, longest=30):
    rng = np.random.default_rng(seed)
    texts, scores = [], []
    for index in range(responses):
        length = int(rng.integers(0, longest))
        ids = rng.choice([A, B, C, D], length)
        choices = np.where(rng.random(length) < 0.6, ids, rng.choice([A, B, C, D], length))
        log_target = -rng.exponential(0.7, length)
        log_draft = log_target + rng.normal(-0.3, 1.0, length)
        texts.append(HeldoutResponse(f"r{index}", "a", [5 + index % 2], ids.tolist(), log_target.tolist()))
        scores.append(scored(ids, choices, log_draft, log_target))
    return texts, scores


def counted_blocks(flags, gamma):
    """Blocks of greedy decoding along a text, token by token."""
    blocks, accepted = 0, 0
    for flag in flags:
        blocks += accepted == 0
        accepted = accepted + 1 if accepted < gamma and flag else 0
    return blocks


def test_a_table_by_hand():
    # Said B where C was wanted twice (prompts 1 and 2), A where B was wanted once.
    texts = [
        HeldoutResponse("one", "a", [C], [A, B, A, A, A, A], [0.0] * 6),
        HeldoutResponse("two", "a", [D, D], [A, A, B, A], [0.0] * 4),
    ]
    scores = [scored(texts[0].response_ids, [A, C, A, A, A, B]), scored(texts[1].response_ids, [A, A, C, A])]
    flags = [own.matches.tolist() for own in scores]
    rows = disagreements(texts, scores, rule=Rule.named("greedy"), gamma=3, tokenizer=TOKENIZER, seconds_per_block=0.02)
    assert [(row.target_said, row.draft_wanted, row.count, row.prompts) for row in rows] == [
        (" if", "self", 2, 2),
        (" return", " if", 1, 1),
    ]
    assert [row.lost_share for row in rows] == pytest.approx([2 / 3, 1 / 3])
    tau = 10 / sum(counted_blocks(own, 3) for own in flags)
    agreed = 10 / (counted_blocks([1, 1, 1, 1, 1, 0], 3) + counted_blocks([1, 1, 1, 1], 3))
    assert rows[0].tau_if_agreed == pytest.approx(agreed)
    assert rows[0].tokens_per_second_lost == pytest.approx((agreed - tau) / 0.02)
    # It was a bonus-free last block's correction: agreeing there saves nothing.
    assert rows[1].tokens_per_second_lost == pytest.approx(0.0, abs=1e-9)
    assert rows[0].example == {"key": "one", "position": 1}
    assert rows[0].context == "self return"
    assert rows[1].context == "self return if return return return"


@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_the_counterfactual_equals_replaying_all_text_again(rule, gamma):
    texts, scores = random_text(0, longest=90)
    tokens = sum(len(own) for own in scores)
    rows = disagreements(texts, scores, rule=Rule.named(rule), gamma=gamma, tokenizer=TOKENIZER, seconds_per_block=1.0)
    assert len(rows) > 8
    names = {word(text): text for text in (" return", " if", "self", " for")}
    for row in rows:
        agreed = []
        for text, own in zip(texts, scores, strict=True):
            ids = np.array(text.response_ids)
            here = [
                (names[said], names[wanted]) == (row.target_said, row.draft_wanted)
                for said, wanted in zip(ids, own.choice_ids, strict=True)
            ]
            ratio = np.where(
                here,
                np.maximum(own.log_draft_probs - own.log_target_probs, 0),
                own.log_draft_probs - own.log_target_probs,
            )
            agreed.append(replace(own, log_draft_probs=own.log_target_probs + ratio, matches=own.matches | here))
        assert row.tau_if_agreed == pytest.approx(
            tokens / expected_blocks_of(agreed, Rule.named(rule), (gamma,)).sum(), rel=1e-9
        )


@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
def test_a_parallel_draft_is_right_there_from_every_start(rule):
    texts, scores = random_text(3, responses=2, longest=20)
    rng, offsets, agreed = np.random.default_rng(0), 4, []
    for index, own in enumerate(scores):
        places = np.arange(len(own))[:, None] + np.arange(offsets)
        inside, places = places < len(own), np.minimum(places, len(own) - 1)
        log_draft = np.where(inside, np.minimum(own.log_draft_probs[places] - rng.random(places.shape), 0.0), 0.0)
        log_target = np.where(inside, own.log_target_probs[places], 0.0)
        matches = (own.matches[places] & (rng.random(places.shape) < 0.7)) | ~inside
        table = TokenScores(log_draft, log_target, matches, own.choice_ids[places])
        scores[index] = replace(own, by_start=table)
    rows = disagreements(texts, scores, rule=Rule.named(rule), gamma=offsets, tokenizer=TOKENIZER)
    names = {word(text): text for text in (" return", " if", "self", " for")}
    for text, own in zip(texts, scores, strict=True):
        table, said = own.by_start, [names[token] for token in text.response_ids]
        log_draft, matches = table.log_draft_probs.copy(), table.matches.copy()
        pairs = list(zip(said, (names[token] for token in own.choice_ids), strict=True))
        for start, offset in np.ndindex(*matches.shape):
            here = start + offset
            if here < len(own) and pairs[here] == (rows[0].target_said, rows[0].draft_wanted):
                matches[start, offset] = True
                log_draft[start, offset] = max(log_draft[start, offset], table.log_target_probs[start, offset])
        agreed.append(replace(own, by_start=replace(table, log_draft_probs=log_draft, matches=matches)))
    tokens = sum(len(own) for own in scores)
    now, then = (tokens / expected_blocks_of(found, Rule.named(rule), (offsets,)).sum() for found in (scores, agreed))
    assert then > now
    assert rows[0].tau_if_agreed == pytest.approx(then, rel=1e-9)


@given(st.integers(0, 2**20), st.sampled_from(["sample", "greedy-draft"]), st.integers(1, 6))
@settings(max_examples=30)
def test_agreeing_never_hurts_and_shares_are_of_the_whole(seed, rule, gamma):
    texts, scores = random_text(seed, responses=3, longest=12)
    rows = disagreements(texts, scores, rule=Rule.named(rule), gamma=gamma, tokenizer=TOKENIZER)
    if not rows:
        return
    tau = sum(len(own) for own in scores) / expected_blocks_of(scores, Rule.named(rule), (gamma,)).sum()
    assert all(row.tau_if_agreed >= tau - 1e-9 for row in rows)
    assert all(row.tokens_per_second_lost is None for row in rows)
    taus = [row.tau_if_agreed for row in rows]
    assert taus == sorted(taus, reverse=True)
    share = sum(row.lost_share for row in rows)
    # A draft that takes its argmax loses nothing where it agrees; a sampling one may.
    assert share == pytest.approx(1.0) if rule == "greedy-draft" else share <= 1 + 1e-9


def test_no_disagreement_no_row_and_foreign_scores_are_refused():
    text = HeldoutResponse("one", "a", [C], [A, B], [0.0, 0.0])
    assert (
        disagreements([text], [scored([A, B], [A, B])], rule=Rule.named("greedy"), gamma=2, tokenizer=TOKENIZER) == []
    )
    assert disagreements([], [], rule=Rule.named("greedy"), gamma=2, tokenizer=TOKENIZER) == []
    with pytest.raises(ValueError, match="not of these texts"):
        disagreements([text], [scored([A], [A])], rule=Rule.named("greedy"), gamma=2, tokenizer=TOKENIZER)
