"""Slices partition the tokens: counts, lost shares and weighted acceptance add up; a row equals plain sums by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.evaluate import HeldoutResponse
from speculative.explain.slices import slice_tables
from speculative.explain.token_class import token_classes
from speculative.measure.intervals import ratio_interval, sum_by_prompt
from speculative.measure.measured import DRAFT, UNDISTILLED
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

PIECES = ("foo", "bar", " baz", "_", "1", "\n  ", ".", "", "\u00e9", "\U0001f600")


def scores_of(rng, log_target_probs, likeness):
    length = len(log_target_probs)
    log_draft = log_target_probs + np.log(rng.random(length) ** (1 / likeness)) if likeness else log_target_probs
    choices = rng.integers(0, 9, length)
    return TokenScores(log_draft, log_target_probs, rng.random(length) < 0.6, choices)


def stored_text(seed=0, prompts=6, samples=2, longest=40, greedy=False):
    """(texts, scores by contestant, pieces, entropies) of a few prompts with several responses each."""
    rng = np.random.default_rng(seed)
    texts, pieces, entropies = [], [], []
    scores = {UNDISTILLED: [], DRAFT: []}
    for prompt in range(prompts):
        prompt_ids = [prompt + 1] * int(rng.integers(1, 100))
        for sample in range(samples):
            length = int(rng.integers(0, longest))
            logs = np.zeros(length) if greedy else -rng.exponential(1.0, length)
            ids = rng.integers(0, 9, length).tolist()
            domain = ("python", "chat")[prompt % 2]
            texts.append(HeldoutResponse(f"{prompt}-{sample}", domain, prompt_ids, ids, logs.tolist()))
            for name, likeness in ((UNDISTILLED, 1.0), (DRAFT, 4.0)):
                scores[name].append(scores_of(rng, logs, likeness))
            pieces.append([PIECES[place] for place in rng.integers(0, len(PIECES), length)])
            entropies.append(rng.exponential(0.8, length))
    return texts, scores, pieces, entropies


@given(st.integers(0, 2**20), st.sampled_from(["sample", "greedy-draft", "block"]), st.booleans())
@settings(max_examples=25)
def test_slices_of_each_dimension_partition_the_tokens(seed, rule, with_entropies):
    texts, scores, pieces, entropies = stored_text(seed, prompts=3, longest=30)
    tables = slice_tables(
        texts, scores, rule=Rule.named(rule), pieces=pieces, entropies=entropies if with_entropies else None
    )
    accepted = {
        name: np.concatenate([one.accept_probs(Rule.named(rule)) for one in own]) for name, own in scores.items()
    }
    tokens = len(accepted[DRAFT])
    assert (len(tables) == 6) == (tokens > 0)
    for table in tables:
        rows = table.rows
        assert sum(row.tokens for row in rows) == tokens
        assert all(row.tokens > 0 for row in rows)
        # Nothing is rejected where the draft happens to be right everywhere.
        assert sum(row.lost_share for row in rows) == pytest.approx(1.0 if (accepted[DRAFT] < 1).any() else 0.0)
        for name, values in accepted.items():
            weighted = sum(row.alpha[name] * row.tokens for row in rows) / tokens
            assert weighted == pytest.approx(values.mean(), abs=1e-12)
        gain = sum(row.gain * row.tokens for row in rows) / tokens
        assert gain == pytest.approx(accepted[DRAFT].mean() - accepted[UNDISTILLED].mean(), abs=1e-12)


def the_slow_rows(texts, scores, label_of, rule):
    """{name: (tokens, prompts, alpha of best, its interval, gain, its interval, lost share)}, token by token.

    The intervals of the gains share 5 % among the slices.
    """
    tokens, total_lost = {}, 0.0
    for index, text in enumerate(texts):
        ours, base = (scores[name][index].accept_probs(Rule.named(rule)) for name in (DRAFT, UNDISTILLED))
        for place in range(len(text.response_ids)):
            tokens.setdefault(label_of(index, place), []).append((text.prompt, ours[place], ours[place] - base[place]))
            total_lost += 1 - ours[place]
    rows = {}
    for name, found in tokens.items():
        keys, ours, gains = zip(*found, strict=True)
        counts = sum_by_prompt(keys, np.ones(len(keys)))
        intervals = [
            list(ratio_interval(sum_by_prompt(keys, np.array(values)), counts, level)) if len(counts) > 1 else None
            for values, level in ((ours, 0.95), (gains, 1 - 0.05 / len(tokens)))
        ]
        rows[name] = (
            len(keys),
            len(counts),
            np.mean(ours),
            intervals[0],
            np.mean(gains),
            intervals[1],
            np.sum(1 - np.array(ours)) / total_lost,
        )
    return rows


def test_rows_equal_sums_token_by_token():
    texts, scores, pieces, entropies = stored_text(3, prompts=5, longest=80)
    classes = [token_classes(own) for own in pieces]

    def position(_, place):
        edges = [(1, 4), (5, 16), (17, 64), (65, 256)]
        return next(f"{low}-{high}" for low, high in edges if low <= place + 1 <= high)

    def entropy(index, place):
        value = entropies[index][place]
        return next(
            (name for name, high in (("< 0.1", 0.1), ("0.1-0.5", 0.5), ("0.5-1", 1), ("1-2", 2)) if value < high), "> 2"
        )

    def prompt_length(index, _):
        length = len(texts[index].prompt_ids)
        bins = [(1, 16), (17, 32), (33, 64), (65, 128)]
        return next(f"{low}-{high} tokens" for low, high in bins if low <= length <= high)

    labels = {
        "domain": lambda index, _: texts[index].domain,
        "prompt length": prompt_length,
        "position": position,
        "first tokens": lambda _, place: "first 8" if place < 8 else "later",
        "token class": lambda index, place: classes[index][place],
        "target entropy": entropy,
    }
    for table in slice_tables(texts, scores, rule=Rule.named("sample"), pieces=pieces, entropies=entropies):
        expected = the_slow_rows(texts, scores, labels[table.dimension], "sample")
        assert {row.name for row in table.rows} == set(expected)
        for row in table.rows:
            tokens, prompts, alpha, alpha_ci, gain, gain_ci, lost_share = expected[row.name]
            assert (row.tokens, row.prompts) == (tokens, prompts)
            assert row.alpha[DRAFT] == pytest.approx(alpha)
            assert row.alpha_ci[DRAFT] == (None if alpha_ci is None else pytest.approx(alpha_ci))
            assert row.gain == pytest.approx(gain)
            assert row.gain_ci == (None if gain_ci is None else pytest.approx(gain_ci))
            assert row.lost_share == pytest.approx(lost_share)


def test_a_row_is_certain_only_beyond_chance_among_its_neighbours_and_on_enough_prompts():
    """`slight` falls, and `twin` rises by chance, by what one row alone would be certain of; `few` falls far in each of
    only three prompts.
    """
    rng = np.random.default_rng(0)
    texts, scores = [], {UNDISTILLED: [], DRAFT: []}
    shifts = {"few": -0.3, "gain": 0.3, "loss": -0.3, "same": 0.0, "slight": -0.0018, "twin": 0.0}
    for domain, shift in shifts.items():
        for prompt in range(3 if domain == "few" else 12):
            logs = -rng.exponential(1.0, 20)
            texts.append(HeldoutResponse(f"{domain}-{prompt}", domain, [len(texts)], [5] * 20, logs.tolist()))
            for name, extra in ((UNDISTILLED, 0.0), (DRAFT, shift)):
                wanted = 0.6 + extra + rng.normal(0, 0.01, 20)
                own = TokenScores(logs + np.log(wanted), logs, np.ones(20, bool), np.zeros(20))
                scores[name].append(own)
    table = slice_tables(texts, scores, rule=Rule.named("sample"), pieces=None)[0]
    # Six rows at 70 % together are 95 % each.
    alone = slice_tables(texts, scores, rule=Rule.named("sample"), pieces=None, confidence=1 - 6 * 0.05)[0]
    assert table.corrected_confidence == pytest.approx(1 - 0.05 / 6)
    assert alone.corrected_confidence == pytest.approx(0.95)
    certain = {row.name: row.certain for row in table.rows}
    expected = {"few": "none", "gain": "gain", "loss": "loss", "same": "none", "slight": "none", "twin": "none"}
    assert certain == expected
    assert {row.name: row.certain for row in alone.rows} == expected | {"slight": "loss", "twin": "gain"}
    assert table.rows[0].gain_ci[1] < 0, "three prompts that agree"


def test_without_entropies_sampled_text_is_sliced_by_surprisal_and_greedy_text_is_not():
    texts, scores, pieces, _ = stored_text(1)
    table = slice_tables(texts, scores, rule=Rule.named("sample"), pieces=pieces)[-1]
    surprisals = -np.concatenate([text.log_target_probs for text in texts])
    assert table.dimension == "target surprisal"
    assert {row.name: row.tokens for row in table.rows}["0.5-1"] == int(((surprisals >= 0.5) & (surprisals < 1)).sum())
    texts, scores, pieces, _ = stored_text(1, greedy=True)
    dimensions = [table.dimension for table in slice_tables(texts, scores, rule=Rule.named("greedy"), pieces=pieces)]
    assert dimensions == ["domain", "prompt length", "position", "first tokens", "token class"]


def test_a_perfect_draft_loses_nothing_and_empty_text_has_no_table():
    texts, scores, _, _ = stored_text(2)
    perfect = [
        TokenScores(one.log_target_probs, one.log_target_probs, one.matches, one.choice_ids) for one in scores[DRAFT]
    ]
    for table in slice_tables(texts, {DRAFT: perfect}, rule=Rule.named("sample"), pieces=None):
        assert all(row.lost_share == 0.0 and row.alpha[DRAFT] == 1.0 for row in table.rows)
    assert slice_tables([], {DRAFT: []}, rule=Rule.named("sample"), pieces=[]) == []


def test_what_is_not_of_the_same_text_is_refused():
    texts, scores, pieces, _ = stored_text(2)
    with pytest.raises(ValueError, match="no scores of 'draft'"):
        slice_tables(texts, {"other": scores[DRAFT]}, rule=Rule.named("sample"), pieces=pieces)
    with pytest.raises(ValueError, match="pieces are not of these texts"):
        slice_tables(texts, scores, rule=Rule.named("sample"), pieces=[own[:-1] for own in pieces])
    with pytest.raises(ValueError, match="scores of 'draft' are not"):
        slice_tables(texts, {DRAFT: scores[DRAFT][::-1]}, rule=Rule.named("sample"), pieces=pieces)
