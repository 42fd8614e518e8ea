"""The laws of a parallel draft's offsets against enumeration: what is drawn, what is reached, what a row weighs."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from distill.loss.definitions import kept
from distill.loss.offsets import DECAY, Survival, drawn_depths, survival_sums
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

VOCAB, BLOCK = 3, 3


def test_a_start_is_kept_to_each_depth_with_its_probability() -> None:
    mask = np.arange(4006) >= 6
    depths = drawn_depths(np.random.default_rng(1), mask, 4, 0.7)
    assert not depths[:6].any()
    counts = Counter(depths[6:].tolist())
    for depth in (1, 2, 3, 4):
        share, wanted = sum(count for own, count in counts.items() if own >= depth) / 4000, 0.7 ** (depth - 1)
        assert share == pytest.approx(wanted, abs=4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-3)
    # Without a drop every start goes to the end of its stretch of response tokens, or as far as the block is long.
    gapped = np.array([False, True, True, False, True, True, True, True, True])
    assert drawn_depths(np.random.default_rng(0), gapped, 4, 1.0).tolist() == [0, 2, 1, 0, 4, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("rule", "serving"),
    [
        ("sample", SamplingSettings(1.0)),
        ("sample", SamplingSettings(0.7, top_k=2)),
        ("greedy-draft", SamplingSettings(0.9)),
        ("greedy", GREEDY),
    ],
)
def test_survival_is_the_chance_that_a_block_reaches_further(rule: str, serving: SamplingSettings) -> None:
    """A target that looks at all drafted tokens, a draft that looks at none: all blocks, one by one, against the mean
    over the target's text.
    """
    generator = torch.Generator().manual_seed(6)
    draft_JV = torch.randn(BLOCK, VOCAB, generator=generator, dtype=torch.float64)
    targets = {
        prefix: draft_JV[length] + 0.4 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
        for length in range(BLOCK)
        for prefix in itertools.product(range(VOCAB), repeat=length)
    }
    draft_probs = logits_to_probs(draft_JV, serving if rule == "sample" else GREEDY)
    target_probs = {prefix: logits_to_probs(logits_V, serving) for prefix, logits_V in targets.items()}
    expected, found = [0.0] * BLOCK, torch.zeros(2, BLOCK, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=BLOCK):
        # The block that is drafted so, and the chance that its first tokens are all kept: 2211.17192, Algorithm 1.
        drafted, passing = 1.0, 1.0
        written, kept_J = 1.0, []
        for place, token in enumerate(tokens):
            target, draft = float(target_probs[tokens[:place]][token]), float(draft_probs[place][token])
            drafted *= draft
            passing *= min(1.0, target / draft) if draft else 0.0
            expected[place] += drafted * passing / VOCAB ** (BLOCK - 1 - place)
            written *= target
            logits = targets[tokens[:place]][None], draft_JV[place][None]
            kept_J.append(kept(*logits, torch.tensor([token]), serving, Rule.named(rule)))
        found += written * survival_sums(torch.stack(kept_J, 1), torch.tensor([BLOCK]))
    assert found[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert found[1].tolist() == pytest.approx([1.0] * BLOCK)
    assert 0.02 < expected[-1] <= expected[0] < 1.01


def test_what_a_row_weighs_follows_the_running_mean() -> None:
    survival = Survival(3, 0.5)
    assert survival.weights() == [1.0, 2.0, 4.0], "a young draft is taught every offset"
    # Two blocks of depth 2 and one of depth 1, in two micro-batches: 1, .5 and then .5, .25; nobody asks for the third token.
    survival.note(survival_sums(torch.tensor([[1.0, 0.5, 9.0], [0.5, 9.0, 9.0]]), torch.tensor([2, 1])))
    survival.note(survival_sums(torch.tensor([[0.6, 0.5, 9.0]]), torch.tensor([2])))
    assert survival.weights() == [1.0, 2.0, 4.0], "within a step nothing changes"
    survival.settle()
    first, second = 1 - (1 - DECAY) * (1 - 2.1 / 3), 1 - (1 - DECAY) * (1 - 0.8 / 2)
    assert survival.kept_J == pytest.approx([first, second, 1.0])
    assert survival.weights() == pytest.approx([1.0, first / 0.5, second / 0.25])
    other = Survival(3, 0.5)
    other.load_state_dict(survival.state_dict())
    survival.settle()
    assert other.kept_J == survival.kept_J, "what was noted counts once"
