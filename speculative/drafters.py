"""Who proposes tokens. A drafter sees the committed tokens of every row and returns ids with their probabilities.

Shapes: R rows, G drafted tokens (gamma), V vocabulary, C columns of the token buffer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.sampling import SamplingSettings, logits_to_probs, sample


class Proposal(NamedTuple):
    """Drafted ids (R, G), the probabilities they were drawn from (R, G, V; None = one-hot), finite logits (R,) bool."""

    ids_RG: torch.Tensor
    probs_RGV: torch.Tensor | None
    finite_R: torch.Tensor


class Drafter(Protocol):
    """The protocol of everything that proposes. One object serves one batch after another.

    `model` is None for drafters without weights of their own. `name` is used in messages.
    """

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> PreTrainedModel | None: ...

    def start(self, tokens_RC: torch.Tensor, prompt_lengths: np.ndarray, capacity: int, needed: int) -> None:
        """Begin a batch. Row r's prompt is tokens_RC[r, :prompt_lengths[r]]; the rest of the row is scratch."""

    def propose(
        self,
        tokens_RC: torch.Tensor,
        lengths_R: torch.Tensor,
        longest: int,
        gamma: int,
        settings: SamplingSettings,
        uniforms_RG: torch.Tensor,
    ) -> Proposal:
        """Draft `gamma` tokens after tokens_RC[r, :lengths_R[r]]. `longest` is max(lengths), known without a sync.

        Only the drafter's own state may change. Whatever it remembers about tokens that were not committed must be
        repaired here: the committed tokens are handed in again at each call.
        """

    def keep(self, rows_K: torch.Tensor) -> None:
        """Compact to these rows, in this order."""


class ModelDrafter:
    """A causal LM of its own with its own cache.

    The cache never holds more than the committed tokens but the last two: each block starts by feeding those two. After
    a fully accepted block exactly two are unread (the last drafted token and the bonus), otherwise one is read again;
    so no block needs an extra call and shapes stay fixed.
    """

    name = "draft"

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._cached: CachedModel | None = None
        self._shortest_prompt = 0

    def start(self, tokens_RC: torch.Tensor, prompt_lengths: np.ndarray, capacity: int, needed: int) -> None:
        self._cached = CachedModel(self.model, self.name, tokens_RC.shape[0], capacity, needed)
        self._shortest_prompt = int(prompt_lengths.min())
        self._cached.prefill(tokens_RC, max(0, int(prompt_lengths.max()) - 2))

    def propose(
        self,
        tokens_RC: torch.Tensor,
        lengths_R: torch.Tensor,
        longest: int,
        gamma: int,
        settings: SamplingSettings,
        uniforms_RG: torch.Tensor,
    ) -> Proposal:
        assert self._cached is not None, "propose() before start()"
        starts_R = (lengths_R - 2).clamp_min(0)
        unread_R2 = tokens_RC.gather(1, starts_R.unsqueeze(1) + torch.arange(2, device=tokens_RC.device))
        if self._shortest_prompt >= 2:
            logits_RV = self._cached.feed(unread_R2, starts_R, longest, logits_kept=1)[:, 0]
        else:
            # A row of one token feeds it with a scratch token behind, which the next step overwrites.
            both_R2V = self._cached.feed(unread_R2, starts_R, max(longest, 2), logits_kept=2)
            logits_RV = both_R2V[torch.arange(len(lengths_R), device=lengths_R.device), lengths_R - 1 - starts_R]
        ids: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        finite: list[torch.Tensor] = []
        for step in range(gamma):
            if step > 0:
                logits_RV = self._cached.feed(ids[-1].unsqueeze(1), lengths_R + (step - 1), longest + step, 1)[:, 0]
            # amax spreads NaN and +inf, and is -inf only for a row without any possible token.
            finite.append(logits_RV.amax(-1).isfinite())
            if settings.greedy:
                ids.append(logits_RV.argmax(-1))
            else:
                probs.append(logits_to_probs(logits_RV, settings))
                ids.append(sample(probs[-1], uniforms_RG[:, step]))
        return Proposal(torch.stack(ids, 1), torch.stack(probs, 1) if probs else None, torch.stack(finite, 1).all(1))

    def keep(self, rows_K: torch.Tensor) -> None:
        assert self._cached is not None, "keep() before start()"
        self._cached.keep(rows_K)
