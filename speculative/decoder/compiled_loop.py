"""The block loop on a CPU: a block of plain decoders is one call of compiled code, from the draft's first step to the commit.

Shapes: R rows of the batch, K of them active, G drafted tokens of this block, G1 = G + 1, V vocabulary.
"""

from typing import Any

import numpy as np
import torch

from speculative.decoder.block_loop import BlockLoop, in_step_mode
from speculative.decoder.responses import BlockOutcome
from speculative.drafters.drafter import ModelDrafter, Proposal
from speculative.engine.cached_model import CachedModel
from speculative.engine.compiled.model import CompiledModel, address_of, bits_of

NOBODY, MODEL, GIVEN = range(3)  # who proposes, as in block.cpp


class CompiledLoop(BlockLoop):
    """A `BlockLoop` whose blocks run in compiled code where they can: chains, under rules that go from token to token."""

    _request: "_Request | None" = None

    @in_step_mode
    def run_block(self, gamma: int | None = None, stop_below: float = 0.0) -> BlockOutcome:
        """See `BlockLoop`: the same outcome, to rounding."""
        gamma = self.settings.gamma if gamma is None else gamma
        target, drafter = _compiled(self.target), self.drafter
        token_by_token = self._rules is None and self.settings.tree is None and self.settings.rule != "block"
        told_more = self._keep_probs or (drafter is not None and drafter.observes)
        if target is None or not token_by_token or told_more or not self.active_R.any():
            return super().run_block(gamma, stop_below)
        # A class that inherits from this one proposes in its own way.
        draft = _compiled(drafter.cached) if type(drafter) is ModelDrafter and stop_below == 0.0 else None
        proposal = None
        if drafter is not None and draft is None:
            proposal = self._propose(gamma, stop_below, self._block_uniforms(gamma))
            gamma = proposal.ids_RG.shape[1]
        read_R = drafter.read_R if draft is not None and isinstance(drafter, ModelDrafter) else None
        arrays = (self.tokens_RC, self.lengths_R, self.prompt_lengths_R, self._uniforms_RLU, read_R)
        addresses = (*target.addresses(), *((0, 0) if draft is None else draft.addresses()))
        made_for = (gamma, torch.get_num_threads(), addresses, *map(id, arrays))
        if self._request is None or self._request.made_for != made_for:
            self._request = _Request(self, made_for, target.vocab, arrays, draft is not None)
        return self._run(self._request, target, proposal)

    def _run(self, request: "_Request", target: CompiledModel, proposal: Proposal | None) -> BlockOutcome:
        request.fill(self.active_R, proposal)
        target.library.run_block(request.address)
        timing = self.timing
        draft, verify, accept = request.seconds.tolist()
        timing.draft_seconds += draft
        timing.verify_seconds += verify
        timing.accept_seconds += accept
        timing.target_calls += 1
        if not np.isfinite(request.peaks_2R.sum()):
            draft_peaks_R, peaks_R = request.peaks_2R
            self._refuse_non_finite({"draft_peaks": draft_peaks_R[:, None], "peaks": peaks_R[:, None]}, self.active_R)
        return request.outcome(self.active_R, proposal)

    def close(self, reusable: bool = True) -> None:
        target = _compiled(self.target)
        if target is not None:
            target.library.forget_all()
        super().close(reusable)


class _Request:
    """What block.cpp is handed, and where it answers: the same memory from block to block of one width and one set of arrays."""

    def __init__(
        self,
        loop: CompiledLoop,
        made_for: tuple[Any, ...],
        vocab: int,
        arrays: tuple[np.ndarray | None, ...],
        drafts: bool,
    ) -> None:
        """arrays: tokens, lengths, prompt lengths, uniforms, what the draft has read."""
        self.made_for, self._arrays = made_for, arrays
        self._proposal: Any = None
        gamma, threads, addresses = made_for[:3]
        rows, sampling = len(loop.lengths_R), loop.settings.sampling
        self._sampled = not sampling.greedy
        self._seats_R = np.zeros(rows, dtype=np.int64)
        self._accepted_R, self._drafted_RG = np.zeros(rows, np.int64), np.zeros((rows, gamma), np.int64)
        self._ids_RG1, self._counts_R = np.zeros((rows, gamma + 1), np.int64), np.full(rows, gamma)
        self._log_probs_RG1, self._overlap_R = np.zeros((rows, gamma + 1)), np.zeros(rows)
        self.peaks_2R, self.seconds = np.zeros((2, rows)), np.zeros(3)
        tokens_RC, lengths_R, prompt_lengths_R, uniforms_RLU, read_R = arrays
        assert tokens_RC is not None
        assert uniforms_RLU is not None
        target_model, target_layers, draft_model, draft_layers = addresses
        proposer = NOBODY if gamma == 0 else MODEL if drafts else GIVEN
        draft_peaks_R, peaks_R = self.peaks_2R
        self._numbers = np.array(
            [
                0, gamma, proposer, not self._sampled, loop.drafts_greedily, threads, tokens_RC.shape[1], vocab,
                uniforms_RLU.shape[1], target_model, draft_model, target_layers, draft_layers, address_of(self._seats_R),
                *map(address_of, (tokens_RC, lengths_R, read_R, prompt_lengths_R, uniforms_RLU if self._sampled else None)),
                0, 0, 0,
                *map(address_of, (self._accepted_R, self._drafted_RG, self._ids_RG1, self._log_probs_RG1, self._overlap_R)),
                *map(address_of, (peaks_R, draft_peaks_R, self.seconds)),
                bits_of(sampling.temperature), bits_of(sampling.top_p), bits_of(sampling.min_p), sampling.top_k,
            ],
            dtype=np.int64,
        )  # fmt: skip
        self.address = address_of(self._numbers)
        self._given = self._numbers[19:22]

    def fill(self, active_R: np.ndarray, proposal: Proposal | None) -> None:
        """Who takes part in this block, and what is proposed to it."""
        seats_K = active_R.nonzero()[0]
        self._seats_R[: len(seats_K)] = seats_K
        self._numbers[0] = len(seats_K)
        if proposal is None:
            return
        ids_RG, probs_RGV = proposal.ids_RG.contiguous(), proposal.probs_RGV
        assert probs_RGV is None or (probs_RGV.is_contiguous() and probs_RGV.dtype == torch.float32)
        self._proposal = ids_RG, proposal  # while their addresses are used
        counts_R = proposal.counts_R
        self._given[:] = ids_RG.data_ptr(), address_of(counts_R), 0 if probs_RGV is None else probs_RGV.data_ptr()

    def outcome(self, active_R: np.ndarray, proposal: Proposal | None) -> BlockOutcome:
        """The block that was just run; nothing in it changes with the next one."""
        return BlockOutcome(
            active_R.copy(),
            self._accepted_R.copy(),
            self._ids_RG1.copy(),
            self._log_probs_RG1.copy() if self._sampled else None,
            self._overlap_R.copy(),
            self._counts_R if proposal is None or proposal.counts_R is None else proposal.counts_R,
            None if proposal is None else proposal.sources_R,
            self._drafted_RG.copy(),
            None,
            None,
        )


def _compiled(cached: Any) -> CompiledModel | None:
    return cached.compiled if isinstance(cached, CachedModel) else None
