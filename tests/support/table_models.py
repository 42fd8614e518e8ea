"""Language models as tables, for proofs by enumeration: a row of probabilities for every context, in float64. And random
token trees.

Contexts are numbered like the nodes of a heap: 0 is the empty one, and context c followed by token t is c * V + t + 1.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import strategies as st

from speculative.rules.sampling import SamplingSettings, logits_to_probs, sample
from speculative.rules.tree import TokenTree

TRUNCATIONS = [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8}]
SETTINGS = [
    pytest.param(SamplingSettings(temperature, **cut), id=f"T{temperature}-{cut}")
    for temperature in (0.0, 0.5, 1.0)
    for cut in TRUNCATIONS
]


TREES = {
    "chain": TokenTree.from_branching((1, 1, 1)),
    "star": TokenTree.from_branching((4,)),
    "two-levels": TokenTree.from_branching((2, 2)),
    "widening": TokenTree((0, 1, 1, 1)),
    "ragged": TokenTree((0, 0, 1, 1, 2, 3)),
    "one-deep-leg": TokenTree((0, 0, 2, 3)),
}


def table_pair(
    seed: int, vocab: int, length: int, settings: SamplingSettings, draft_settings: SamplingSettings | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (contexts, V) of a random target and of a draft that half agrees, for contexts of at most `length` tokens."""
    contexts = sum(vocab**level for level in range(length + 1))
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(contexts, vocab, generator=generator, dtype=torch.float64)
    noise = torch.randn(contexts, vocab, generator=generator, dtype=torch.float64)
    return logits_to_probs(logits, settings), logits_to_probs(logits + noise, draft_settings or settings)


def followed(contexts: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    return contexts * vocab + tokens + 1


def all_sequences(vocab: int, length: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(vocab), repeat=length))).view(-1, length)


def text_probs(emitted: torch.Tensor, target: torch.Tensor, length: int) -> torch.Tensor:
    """Distribution (*, V ** length) of texts, when `emitted` (*, contexts) is the mass of each context, to be continued
    by the target.
    """
    vocab = target.shape[1]
    mass, first = emitted.clone(), 0
    for level in range(length):
        behind = first + vocab**level
        grown = mass[..., first:behind, None] * target[first:behind]
        mass[..., behind : behind + vocab ** (level + 1)] += grown.flatten(-2)
        first = behind
    return mass[..., first : first + vocab**length]


def target_text_probs(target: torch.Tensor, length: int) -> torch.Tensor:
    """The target's own distribution of texts."""
    vocab = target.shape[1]
    start = torch.zeros(sum(vocab**level for level in range(length + 1)), dtype=torch.float64)
    start[0] = 1.0
    return text_probs(start, target, length)


def emitted_mass(contexts: torch.Tensor, weights: torch.Tensor, next_rows: torch.Tensor, length: int) -> torch.Tensor:
    """Mass of every context of at most `length` tokens when `next_rows` follow `contexts` with these weights."""
    vocab = next_rows.shape[1]
    weighted = weights.unsqueeze(1) * next_rows / next_rows.sum(1, keepdim=True)
    codes = followed(contexts.unsqueeze(1), torch.arange(vocab), vocab)
    mass = torch.zeros(sum(vocab**level for level in range(length + 1)), dtype=torch.float64)
    return mass.index_add(0, codes.flatten(), weighted.flatten())


@st.composite
def token_trees(draw, max_nodes: int = 6):
    """Any tree in level order."""
    parents, depths = [0], [0, 1]
    for node in range(2, draw(st.integers(1, max_nodes)) + 1):
        allowed = [parent for parent in range(node) if depths[parent] + 1 >= depths[-1]]
        parents.append(draw(st.sampled_from(allowed)))
        depths.append(depths[parents[-1]] + 1)
    return TokenTree(tuple(parents))


def recorded_rows(monkeypatch, *modules):
    """The rows that the modules' functions draw their next tokens from, as they draw them."""
    rows = []

    def recording(probs, uniforms):
        rows.append(probs)
        return sample(probs, uniforms)

    for module in modules:
        monkeypatch.setattr(module, "sample", recording)
    return rows
