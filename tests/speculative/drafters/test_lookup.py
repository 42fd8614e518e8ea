"""Prompt lookup: what it proposes against a search by hand, and what decoding makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_rows import (
    HostRows,
    row_steps,
)
from hypothesis import given
from hypothesis import strategies as st

from speculative.drafters.lookup import PromptLookup, one_hot_proposal, proposal_width
from speculative.errors import UserError


def searched(text: list[int], min_ngram: int, max_ngram: int, gamma: int) -> list[int]:
    """The definition, by looking everywhere: longest n-gram first, its latest earlier occurrence, copied on and on."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - 1, size - 1, -1):
            if text[start - size : start] == text[len(text) - size :]:
                grown = list(text)
                for place in range(gamma):
                    grown.append(grown[start + place])
                return grown[len(text) :]
    return []


@given(row_steps, st.integers(1, 3), st.integers(0, 2), st.integers(0, 6))
def test_proposals_are_those_of_a_search_by_hand(steps, min_ngram, more, gamma):
    rows = HostRows(PromptLookup(min_ngram + more, min_ngram), rows=4)
    for step in steps:
        rows.apply(step)
        expected = [
            searched(text, min_ngram, min_ngram + more, gamma) if active else []
            for text, active in zip(rows.texts, rows.active, strict=True)
        ]
        assert rows.proposed(gamma) == expected


def test_an_accelerator_sees_two_widths_only():
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert [proposal_width(np.array(counts), 5, cpu) for counts in ([], [0, 0], [1, 3])] == [0, 0, 3]
    assert [proposal_width(np.array(counts), 5, other) for counts in ([], [0, 0], [1, 3])] == [0, 0, 5]
    proposal = one_hot_proposal([[3], [], [4, 5]], 5, cpu)
    assert proposal.ids_RG.tolist() == [[3, 0], [0, 0], [4, 5]]
    assert proposal.counts_R.tolist() == [1, 0, 2]
    assert one_hot_proposal([[3], [], [4, 5]], 5, other).ids_RG.shape == (3, 5)


def test_an_empty_range_of_ngrams_is_refused():
    for sizes in ((0, 0), (2, 3), (3, 0)):
        with pytest.raises(UserError, match="must be 1 <= min_ngram <= max_ngram"):
            PromptLookup(*sizes)
