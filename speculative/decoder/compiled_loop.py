"""The block loop on a CPU: a block is one call of compiled code, from the first draft step to the commit.

Shapes: R rows of the batch, K of them active, G drafted tokens of this block, G1 = G + 1, V vocabulary.
"""

import time
from typing import Any

import numpy as np
import torch

from speculative.decoder.block_loop import BlockLoop, in_step_mode
from speculative.decoder.responses import BlockOutcome
from speculative.drafters.drafter import ModelDrafter, Proposal
from speculative.engine.cached_model import CachedModel
from speculative.engine.compiled.model import CompiledModel, address_of, bits_of, check
from speculative.rules.lossy import Lossy

NOBODY, MODEL, GIVEN = range(3)  # source of the proposal, as in block.cpp


class CompiledLoop(BlockLoop):
    """A `BlockLoop` whose blocks run in compiled code where possible: chains with token-wise rules."""

    _request: "_Request | None" = None

    @in_step_mode
    def run_block(self, gamma: int | None = None, stop_below: float = 0.0) -> BlockOutcome:
        """See `BlockLoop`: the same outcome, to rounding."""
        gamma = self.settings.gamma if gamma is None else gamma
        target, drafter = _compiled(self.target), self.drafter
        settings, lossy_greedy = self.settings, self.settings.lossy is not None and self.settings.sampling.greedy
        token_by_token = not (self._rules or settings.tree or settings.rule == "block" or lossy_greedy)
        told_more = self._keep_probs or (drafter is not None and drafter.observes)
        if target is None or not token_by_token or told_more or not self.active_R.any():
            return super().run_block(gamma, stop_below)
        draft, read_R, proposal = None, None, None
        # Exact type: a subclass may propose differently.
        if type(drafter) is ModelDrafter and stop_below == 0.0:
            draft, read_R = _compiled(drafter.cached), drafter.read_R
            draft = draft if draft is not None and draft.vocab == target.vocab else None
        if drafter is not None and draft is None:
            began, read_R = time.perf_counter(), None
            proposal = self._propose(gamma, stop_below, self._block_uniforms(gamma))
            self.timing.draft_seconds += time.perf_counter() - began
            gamma = proposal.ids_RG.shape[1]
            if proposal.peaks_RG is not None:
                self._refuse_non_finite({"draft_peaks": proposal.peaks_RG.float().numpy()}, self.active_R)
        arrays = (self.tokens_RC, self.lengths_R, self.prompt_lengths_R, self._uniforms_RLU, read_R)
        addresses = (*target.addresses(), *((0, 0) if draft is None else draft.addresses()))
        made_for = (gamma, torch.get_num_threads(), addresses, *map(id, arrays))
        if self._request is None or self._request.made_for != made_for:
            self._request = _Request(self, made_for, target.vocab, arrays, draft is not None)
        return self._run(self._request, target, proposal)

    def _run(self, request: "_Request", target: CompiledModel, proposal: Proposal | None) -> BlockOutcome:
        request.fill(self.active_R, proposal)
        check(target.library.run_block(request.address))
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
        drafter = self.drafter.cached if isinstance(self.drafter, ModelDrafter) else None
        compiled = _compiled(self.target) or _compiled(drafter)
        if compiled is not None:
            compiled.library.forget_all()
        super().close(reusable)


class _Request:
    """Inputs and outputs of block.cpp. Blocks of one width and one set of arrays reuse the same memory."""

    def __init__(
        self,
        loop: CompiledLoop,
        made_for: tuple[Any, ...],
        vocab: int,
        arrays: tuple[np.ndarray | None, ...],
        drafts: bool,
    ) -> None:
        """arrays: tokens, lengths, prompt lengths, uniforms, and the length the draft has read."""
        self.made_for, self._arrays = made_for, arrays
        self._proposal: Any = None
        gamma, threads, addresses = made_for[:3]
        rows, sampling, lossy = len(loop.lengths_R), loop.settings.sampling, loop.settings.lossy or Lossy()
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
        draft_peaks_R, peaks_R = self.peaks_2R
        # The fields of `Block`, in its order.
        fields = {
            "rows": 0, "gamma": gamma, "proposer": NOBODY if gamma == 0 else MODEL if drafts else GIVEN,
            "greedy_target": not self._sampled, "greedy_draft": loop.drafts_greedily, "threads": threads,
            "columns": tokens_RC.shape[1], "vocabulary": vocab, "positions": uniforms_RLU.shape[1],
            "target": target_model, "draft": draft_model, "target_layers": target_layers, "draft_layers": draft_layers,
            "seats": address_of(self._seats_R), "tokens": address_of(tokens_RC), "lengths": address_of(lengths_R),
            "read": address_of(read_R), "prompt_lengths": address_of(prompt_lengths_R),
            "uniforms": address_of(uniforms_RLU) if self._sampled else 0,
            "given_ids": 0, "given_counts": 0, "given_probs": 0,
            "accepted": address_of(self._accepted_R), "drafted": address_of(self._drafted_RG),
            "ids": address_of(self._ids_RG1), "log_probs": address_of(self._log_probs_RG1),
            "overlap": address_of(self._overlap_R), "peaks": address_of(peaks_R), "draft_peaks": address_of(draft_peaks_R),
            "seconds": address_of(self.seconds), "lenience": bits_of(lossy.lenience), "epsilon": bits_of(lossy.epsilon),
        }  # fmt: skip
        for whose, one in {"target": sampling, "draft": loop.draft_sampling}.items():
            fields |= {f"{whose} {name}": bits_of(getattr(one, name)) for name in ("temperature", "top_p", "min_p")}
            fields[f"{whose} top_k"] = one.top_k
        self._numbers = np.array(list(fields.values()), dtype=np.int64)
        self.address = address_of(self._numbers)
        first = list(fields).index("given_ids")
        self._given = self._numbers[first : first + 3]

    def fill(self, active_R: np.ndarray, proposal: Proposal | None) -> None:
        """Set the active rows and the proposal of this block."""
        seats_K = active_R.nonzero()[0]
        self._seats_R[: len(seats_K)] = seats_K
        self._numbers[0] = len(seats_K)
        if proposal is None:
            return
        ids_RG, probs_RGV, counts_R = proposal.ids_RG.long().contiguous(), proposal.probs_RGV, proposal.counts_R
        probs_RGV = None if probs_RGV is None else probs_RGV.float().contiguous()
        counts_R = None if counts_R is None else np.ascontiguousarray(counts_R, dtype=np.int64)
        self._proposal = ids_RG, probs_RGV, counts_R  # keeps the arrays alive while their addresses are used
        self._given[:] = ids_RG.data_ptr(), address_of(counts_R), 0 if probs_RGV is None else probs_RGV.data_ptr()

    def outcome(self, active_R: np.ndarray, proposal: Proposal | None) -> BlockOutcome:
        """Outcome of the block that was just run, as copies that the next block does not change."""
        log_probs_RG1 = self._log_probs_RG1.copy() if self._sampled else None
        counts_R, sources_R = (None, None) if proposal is None else (proposal.counts_R, proposal.sources_R)
        return BlockOutcome(
            active_R.copy(), self._accepted_R.copy(), self._ids_RG1.copy(), log_probs_RG1, self._overlap_R.copy(),
            self._counts_R if counts_R is None else counts_R, sources_R, self._drafted_RG.copy(), None, None,
        )  # fmt: skip


def _compiled(cached: Any) -> CompiledModel | None:
    return cached.compiled if isinstance(cached, CachedModel) else None
