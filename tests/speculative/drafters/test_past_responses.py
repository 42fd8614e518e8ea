"""The index of past responses against counting by hand, and what decoding makes of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from host_rows import (
    HostRows,
    row_steps,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from speculative.drafters import past_responses
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.errors import UserError

FOUR = tiny_model(vocab_size=4)


def counted(responses: list[list[int]], text: list[int], min_ngram: int, max_ngram: int, gamma: int) -> list[int]:
    """The definition: the longest n-gram with a match, then by each next token the majority of who still agrees."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        matches = [
            response[place:]
            for response in responses
            for place in range(size, len(response))
            if response[place - size : place] == text[-size:]
        ]
        if not matches:
            continue
        chain: list[int] = []
        for step in range(gamma):
            going_on = [match for match in matches if len(match) > step]
            if step < past_responses.VOTED_TOKENS and going_on:
                # Of equally frequent tokens Counter names the one it met first.
                winner = Counter(match[step] for match in going_on).most_common(1)[0][0]
                matches = [match for match in going_on if match[step] == winner]
            if len(matches[0]) <= step:
                break
            chain.append(matches[0][step])
        return chain
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=6),
    row_steps,
    st.integers(1, 2),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_proposals_are_those_of_counting_by_hand(responses, steps, min_ngram, more, gamma):
    sizes = {"min_ngram": min_ngram, "max_ngram": min_ngram + more}
    if all(len(response) <= min_ngram for response in responses):
        with pytest.raises(UserError, match=r"would be empty|longer than min_ngram"):
            ResponseIndex.build(responses, 4, **sizes)
        return
    rows = HostRows(PastResponses(ResponseIndex.build(responses, 4, **sizes)), rows=4, model=FOUR)
    for step in steps:
        rows.apply(step)
        expected = [
            counted(responses, text, min_ngram, min_ngram + more, gamma) if active else []
            for text, active in zip(rows.texts, rows.active, strict=True)
        ]
        assert rows.proposed(gamma) == expected


def proposed_after(index: ResponseIndex, text: list[int], gamma: int = 4) -> list[int]:
    ids_RG, counts_R = index.continuations(np.array([[*text, 9, 9]]), np.array([len(text)]), gamma)
    return ids_RG[0, : counts_R[0]].tolist()


def test_a_continuation_longer_than_the_vote_follows_one_of_the_matches(monkeypatch):
    monkeypatch.setattr(past_responses, "VOTED_TOKENS", 1)
    store = ResponseIndex.build([[1, 2, 3, 3], [1, 2, 4, 4], [1, 2, 4, 5]], 6)
    assert proposed_after(store, [1]) == [2, 3, 3]
    monkeypatch.undo()
    assert proposed_after(ResponseIndex.build([[1, 2, 3, 3], [1, 2, 4, 4], [1, 2, 4, 5]], 6), [1]) == [2, 4, 4]


def test_only_the_tokens_prove_a_match_and_not_their_hash(monkeypatch):
    """With all powers 1 the hash is a sum: 5 and 1 has that of 2 and 4, 3 and 3, 0 and 6."""
    monkeypatch.setattr(past_responses, "MULTIPLIER", 1)
    store = ResponseIndex.build([[2, 4, 8]], 10, min_ngram=2, max_ngram=2)
    assert proposed_after(store, [2, 4]) == [8]
    assert proposed_after(store, [5, 1]) == []


def test_longer_ngrams_are_kept_only_where_shorter_ones_are_ambiguous():
    once = ResponseIndex.build([[1, 2, 3, 4, 5, 6, 7, 8]], 10, max_ngram=8)
    assert len(once.hashes_M) == 7
    twice = ResponseIndex.build([[1, 2, 3, 4], [5, 2, 3, 6]], 10, max_ngram=8)
    # 1, 2, 3 and 5 alone; then 1 2 and 5 2 and 2 3, the second token being said twice; then 1 2 3 and 5 2 3.
    assert len(twice.hashes_M) == 4 + 3 + 2
