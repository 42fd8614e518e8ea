"""Two drafters: the cheap one first, the second for rows where the first found too little.

Shapes: R rows, G drafted tokens (at most gamma), G1 = G + 1, V vocabulary, C columns of the token buffer, K rows taken.
"""

from dataclasses import replace

import numpy as np
import torch

from speculative.drafters.draft import Draft
from speculative.drafters.drafter import Ask, Drafter, ModelDrafter, Plan, Proposal, Seats
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.registry import Parts, way
from speculative.errors import UserError
from speculative.rules.sampling import one_hot


class LookupDraft(Drafter):
    """Rows in which `first` finds a token use its tokens; `then` drafts for the other rows. They can be nested.

    Why it is lossless: the choice of the drafter depends on the past alone, and either drafter is lossless. A choice that looks at what
    `first` sampled in this block would not be: the tokens that pass it do not follow the probabilities given to the rule. So `first` must
    not sample: this is refused before any of its tokens is committed.

    `then` drafts for the whole batch as soon as one row needs it: at most `then_gamma` tokens (None = as many as `first`), always a chain.
    """

    def __init__(self, first: Drafter, then: Drafter, then_gamma: int | None = None):
        """Raises UserError for a first drafter that always proposes (a model, a Lookahead), and for a number under 1."""
        if then_gamma is not None and then_gamma < 1:
            raise UserError(f"then_gamma = {then_gamma}: must be at least 1 token")
        if first.model is not None or first.observes:
            raise UserError(
                f"the {first.name} always proposes, so nothing would reach the second drafter: swap the two"
            )
        self.first, self.then, self.then_gamma = first, then, then_gamma
        self.name = f"{first.name} before {then.name}"
        self.source_names: tuple[str, ...] = (*first.source_names, *then.source_names)
        self.model, self.observes, self.shares_cache = then.model, then.observes, then.shares_cache
        self._strayed_R = np.zeros(0, dtype=bool)
        self._asked_lengths_R = np.zeros(0, dtype=np.int64)

    @property
    def recordings(self) -> int:
        return self.then.recordings

    def plan(self) -> Plan | None:
        first = self.first.plan()
        if first is None or type(self) is not LookupDraft or type(self.then) is not ModelDrafter:
            return None
        if self._strayed_R.any():  # they are called back by `propose`
            return None
        return first._replace(model=self.then, steps=self.then_gamma)

    def start(self, seats: Seats) -> None:
        self.first.start(seats)
        self.then.start(seats)
        self._strayed_R = np.zeros(seats.rows, dtype=bool)
        self._asked_lengths_R = np.ones(seats.rows, dtype=np.int64)

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        self.first.admit(rows, tokens_RC, lengths_R)
        self.then.admit(rows, tokens_RC, lengths_R)
        self._strayed_R[rows] = False

    def keep(self, rows: list[int]) -> None:
        self.first.keep(rows)
        self.then.keep(rows)
        self._strayed_R = self._strayed_R[rows]
        self._asked_lengths_R = self._asked_lengths_R[rows]

    def end(self) -> None:
        self.first.end()
        self.then.end()

    def observe(self, fed_ids_RG1: np.ndarray, predicted_ids_RG1: np.ndarray, accepted_R: np.ndarray) -> None:
        self.then.observe(fed_ids_RG1, predicted_ids_RG1, accepted_R)

    def propose(self, ask: Ask) -> Proposal:
        """Raises UserError if the first drafter samples, before any of its tokens is committed."""
        # Chains and a tree cannot share a batch, and a row's tree must not depend on the other rows.
        ask = ask._replace(tree=None)
        self._call_back_strayed(ask)
        early = self.first.propose(ask)
        if early.probs_RGV is not None:
            raise UserError(
                f"the {self.first.name} samples its proposals, so it cannot come before another: "
                "use one that depends only on the committed text, such as PromptLookup"
            )
        found_R = early.real_R
        taken_R = (found_R > 0) & ask.active_R
        if ask.gamma == 0 or bool((taken_R == ask.active_R).all()):
            # Not needed in this block, but it must know the committed length: its last draft was verified only up to here.
            self.then.propose(ask._replace(gamma=0))
            return early._replace(sources_R=early.proposers_R)
        # Copied before the device is busy with the second drafter.
        taken_K = torch.from_numpy(np.flatnonzero(taken_R)).to(early.ids_RG.device)
        late = self.then.propose(ask._replace(gamma=min(ask.gamma, self.then_gamma or ask.gamma)))
        late_sources_R = late.proposers_R + len(self.first.source_names)
        if not taken_R.any():
            return late._replace(sources_R=late_sources_R)
        self._strayed_R, self._asked_lengths_R = taken_R, ask.lengths_R.copy()
        counts_R = np.where(taken_R, found_R, late.real_R)
        sources_R = np.where(taken_R, early.proposers_R, late_sources_R)
        return Proposal(*_mixed(early, late, taken_K), counts_R, late.peaks_RG, sources_R)

    def _call_back_strayed(self, ask: Ask) -> None:
        """Correct `then` for rows that used `first`'s tokens while `then` drafted others: its memory is valid only up to the length at
        which it drafted, so it gets that length once, before the present one.
        """
        if self._strayed_R.any():
            lengths_R = np.where(self._strayed_R, self._asked_lengths_R, ask.lengths_R)
            self.then.propose(ask._replace(lengths_R=lengths_R, gamma=0))
            self._strayed_R = np.zeros_like(self._strayed_R)


def _mixed(early: Proposal, late: Proposal, taken_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merge ids and probabilities: the taken rows are `early`'s, as one-hot rows if `late` has rows of V."""
    rows, drafted = late.ids_RG.shape
    width = max(early.ids_RG.shape[1], drafted)
    taken_ids_KG = torch.nn.functional.pad(early.ids_RG[taken_K], (0, width - early.ids_RG.shape[1]))
    # Copies, here and below: the drafter may use its own tensors again.
    ids_RG = late.ids_RG.new_zeros((rows, width))
    ids_RG[:, :drafted] = late.ids_RG
    ids_RG.index_copy_(0, taken_K, taken_ids_KG)
    if late.probs_RGV is None:
        return ids_RG, None
    vocab = late.probs_RGV.shape[-1]
    probs_RGV = late.probs_RGV.new_zeros((rows, width, vocab))
    probs_RGV[:, :drafted] = late.probs_RGV
    probs_RGV.index_copy_(0, taken_K, one_hot(taken_ids_KG, vocab, probs_RGV.dtype))
    return ids_RG, probs_RGV


@way("lookup+draft", needs=("draft",), looks_up=True)
def _lookup_draft(parts: Parts) -> Drafter:
    return LookupDraft(PromptLookup(*(parts.ngrams or (3, 2))), parts.drafter(), then_gamma=parts.then_gamma)


@way("lookup+parallel", needs=("draft",), looks_up=True, parallel=True)
def _lookup_parallel(parts: Parts) -> Drafter:
    assert parts.draft is not None
    return _lookup_draft(replace(parts, draft=Draft(parts.draft.model, "parallel")))
