"""Prompt lookup against a search by hand, the pool of the target's own predictions against its definition."""

from __future__ import annotations

import numpy as np
import torch
from host_rows import (
    HostRows,
    row_steps,
)
from hypothesis import given
from hypothesis import strategies as st

from speculative.drafters.lookup import Lookahead, PromptLookup, one_hot_proposal, proposal_width


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


Block = tuple[list[int], list[int], int]  # fed, predicted, accepted


def expected_chain(blocks: list[Block], text: list[int], ngram: int, gamma: int) -> list[int]:
    """The definition: all blocks so far read again, the latest n-gram of each token."""
    pool: dict[int, list[int]] = {}
    for fed, predicted, _ in blocks:
        for place in range(len(fed)):
            run = [predicted[place]]
            while len(run) < ngram - 1 and fed[place + len(run) : place + len(run) + 1] == run[-1:]:
                run.append(predicted[place + len(run)])
            pool[fed[place]] = run
    guesses = blocks[-1][1][blocks[-1][2] + 1 :] if blocks else []
    chain: list[int] = []
    while len(chain) < gamma:
        last = (text + chain)[-1]
        if last in pool:
            chain += pool[last]
        else:
            chain.append(guesses[len(chain)] if len(chain) < len(guesses) else text[len(chain) % len(text)])
    return chain[:gamma]


@given(row_steps, st.integers(2, 5), st.integers(0, 6), st.randoms(use_true_random=False))
def test_pooled_proposals_are_those_of_the_definition(steps, ngram, gamma, random):
    rows = HostRows(Lookahead(ngram), rows=4)
    history: list[list[Block]] = [[] for _ in range(4)]
    for step in steps:
        rows.apply(step)
        what, value = step
        if what == "keep":
            history = [history[row] for row in dict.fromkeys(row % len(history) for row in value)]
        elif what == "admit":
            history[value[0] % len(history)] = []
        expected = [
            expected_chain(history[row], text, ngram, gamma) if active else []
            for row, (text, active) in enumerate(zip(rows.texts, rows.active, strict=True))
        ]
        assert rows.proposed(gamma) == expected
        width = max(map(len, expected), default=0)
        fed, predicted, accepted = [], [], []
        for row, chain in enumerate(expected):
            fed.append([rows.texts[row][-1], *chain, *[0] * (width - len(chain))])
            # Often what was fed next, so that runs occur.
            predicted.append(
                [random.choice([*fed[-1][place + 1 : place + 2], random.randint(0, 3)]) for place in range(width + 1)]
            )
            accepted.append(random.randint(0, len(chain)))
            if rows.active[row]:
                history[row].append((fed[-1], predicted[-1], accepted[-1]))
        rows.drafter.observe(np.array(fed), np.array(predicted), np.array(accepted))
