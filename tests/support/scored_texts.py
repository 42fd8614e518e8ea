"""Responses scored at random, and what of a block is kept, token by token."""

import math

import numpy as np

from speculative.measure.token_scores import TokenScores


def random_scores(length, seed=0, spread=1.0):
    """A response scored at random: log ratios of both signs, some tokens that the draft never says."""
    rng = np.random.default_rng(seed)
    log_target = np.log(rng.uniform(0.05, 1.0, length))
    log_draft = np.minimum(log_target + spread * rng.normal(size=length), 0.0)
    log_draft[rng.random(length) < 0.05] = -np.inf
    return TokenScores(log_draft, log_target, rng.random(length) < 0.7, np.zeros(length, dtype=int))


def kept_at_least(scores, rule, start, count):
    """P(a block from `start` keeps `count` tokens | text), token by token."""
    walk = highest = 0.0
    if scores.by_start is not None:
        row = {name: values[start] for name, values in vars(scores.by_start).items() if values is not None}
        scores, start = TokenScores(**row), 0
    for place in range(start, start + count):
        if rule in ("greedy", "greedy-draft"):
            ratio = 1.0 if scores.matches[place] else math.inf
        else:
            drafted = math.exp(scores.log_draft_probs[place])
            ratio = math.exp(scores.log_target_probs[place]) / drafted if drafted > 0 else math.inf
        walk += math.log(ratio) if rule == "block" else math.log(max(1.0, ratio))
        highest = max(highest, walk)
    return math.exp(-highest)
