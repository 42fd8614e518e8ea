"""What the tests of the host-side drafters share: rows as the block loop keeps them, and its two proofs by decoding.

Shapes: R rows, C columns of the token buffer.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from scipy import stats
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import Ask, Drafter, Seats
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model()
SMALL_VOCAB = 8
SMALL_TARGET = tiny_model(vocab_size=SMALL_VOCAB)
SMALL_DRAFT = perturbed(SMALL_TARGET, 0.1)
CAPACITY = 80


def seats(rows: int, model: Any = None) -> Seats:
    """Seats beside a target that only its device and model are asked of."""
    target: Any = SimpleNamespace(device=torch.device("cpu"), model=model)
    return Seats(rows, CAPACITY, target)


class HostRows:
    """The texts of a drafter's rows, told to it as the block loop would. Behind each text stands noise."""

    def __init__(self, drafter: Drafter, rows: int, model: Any = None):
        self.drafter = drafter
        self.texts: list[list[int]] = [[0] for _ in range(rows)]
        self.active = [False] * rows
        self._noise = np.random.default_rng(0)
        drafter.start(seats(rows, model))

    def apply(self, step: tuple[str, Any]) -> None:
        """One of `row_steps`."""
        what, value = step
        if what == "keep":
            kept = [row % len(self.texts) for row in value]
            kept = list(dict.fromkeys(kept))
            self.texts, self.active = [self.texts[row] for row in kept], [self.active[row] for row in kept]
            self.drafter.keep(kept)
            return
        row, ids = value[0] % len(self.texts), value[1]
        if what == "admit":
            self.texts[row], self.active[row] = list(ids), True
            self.drafter.admit([row], self.tokens_RC(), self.lengths_R())
        elif what == "leave":
            self.active[row] = False
        elif self.active[row]:
            self.texts[row] = (self.texts[row] + ids)[: CAPACITY - 10]

    def tokens_RC(self) -> np.ndarray:
        tokens_RC = self._noise.integers(0, 4, (len(self.texts), CAPACITY))
        for row, text in enumerate(self.texts):
            tokens_RC[row, : len(text)] = text
        return tokens_RC

    def lengths_R(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts])

    def ask(self, gamma: int, sampling: SamplingSettings = GREEDY) -> Ask:
        lengths_R = self.lengths_R()
        return Ask(self.tokens_RC(), lengths_R, np.ones_like(lengths_R), np.array(self.active), gamma, sampling)

    def proposed(self, gamma: int) -> list[list[int]]:
        """The real ids of each row; checks the shape of the proposal."""
        proposal = self.drafter.propose(self.ask(gamma))
        assert proposal.probs_RGV is None
        assert proposal.ids_RG.dtype == torch.int64
        counts = [proposal.ids_RG.shape[1]] * len(self.texts) if proposal.counts_R is None else proposal.counts_R
        assert proposal.ids_RG.shape == (len(self.texts), max(counts, default=0))
        assert max(counts, default=0) <= gamma
        return [ids[:count] for ids, count in zip(proposal.ids_RG.tolist(), counts, strict=True)]


few_ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)
row_and_ids = st.tuples(st.integers(0, 5), few_ids)
row_steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), row_and_ids),
        st.tuples(st.just("grow"), row_and_ids),
        st.tuples(st.just("grow"), row_and_ids),
        st.tuples(st.just("leave"), row_and_ids),
        st.tuples(st.just("keep"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    ),
    max_size=12,
)


def repeating_prompts(count: int = 8) -> list[tuple[str, list[int]]]:
    """Prompts of different length that say things twice, so that their own text is worth looking at."""
    return [
        (key, ids + ids[: 1 + index % 4]) for index, (key, ids) in enumerate(prompts_of([9, 2, 23, 4, 40, 3, 15, 6]))
    ][:count]


def sampled_text_p_value(drafter: Drafter, way: DecodeSettings, rows: int = 6000, **options: Any) -> float:
    """Chi-square of three sampled tokens after one prompt against the target's own probabilities, by enumeration; rows are recycled.

    Also asserts that the drafter's tokens were both accepted and rejected.
    """
    prompt, length = [1, 2, 3, 5, 1, 2, 3, 1, 2], 3
    settings = replace(way, sampling=SamplingSettings(1.0, top_k=4), max_tokens=length)
    prompts = [(str(row), prompt) for row in range(rows)]
    responses, _ = decode(SMALL_TARGET, drafter, prompts, settings, batch_size=rows // 3, **options)
    assert way.gamma == 0 or {count for one in responses for count in one.accepted_counts} >= {0, 1}
    texts = list(itertools.product(range(SMALL_VOCAB), repeat=length))
    with torch.no_grad():
        contexts = torch.tensor([prompt + list(text) for text in texts])
        logits = SMALL_TARGET(contexts).logits[:, len(prompt) - 1 : -1].double()
    kept = logits >= logits.topk(4).values[..., -1:]
    probs = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    joint = probs.gather(-1, torch.tensor(texts).unsqueeze(-1)).squeeze(-1).prod(-1)
    number = {text: place for place, text in enumerate(texts)}
    counts = torch.bincount(
        torch.tensor([number[tuple(one.response_ids)] for one in responses]), minlength=len(texts)
    ).double()
    assert not bool(counts[joint == 0].any()), "a token of probability 0 was said"
    frequent = joint * rows >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    expected = torch.cat([joint[frequent], joint[~frequent].sum()[None]])
    return float(stats.chisquare(observed.numpy(), (expected / expected.sum() * rows).numpy()).pvalue)
