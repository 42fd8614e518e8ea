"""The block loop on a CPU: a block runs in compiled code, from the first draft step to the commit, and short blocks several in a call.

Shapes: B blocks of a call, R rows of the batch, K of them active, G drafted tokens of a block, G1 = G + 1, V vocabulary.
"""

import ctypes
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from speculative.decoder.block_loop import BlockLoop, in_step_mode
from speculative.decoder.responses import BlockOutcome
from speculative.drafters.drafter import ModelDrafter, Plan, Proposal
from speculative.drafters.past_responses import ResponseIndex
from speculative.engine.cached_model import CachedModel
from speculative.engine.compiled.layouts import Block, Sampling
from speculative.engine.compiled.model import CompiledModel, address_of, check
from speculative.rules.sampling import SamplingSettings

NOBODY, MODEL, GIVEN = range(3)  # source of the proposal, as in block.cpp
# A call that runs ahead ends after so many blocks, and none starts after so long: Python takes about 0.2 ms of it.
MOST_BLOCKS, LAST_START_NANOSECONDS = 64, 60_000_000


class CompiledLoop(BlockLoop):
    """A `BlockLoop` whose blocks run in compiled code where possible: chains with token-wise rules."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._requests: dict[int, _Request] = {}  # the last of each gamma
        # Blocks that ran but were not asked for yet, with their draft, verify and accept seconds.
        self.ahead: deque[tuple[BlockOutcome, list[float]]] = deque()
        # None: of a tokenizer without an end token.
        self._ends_E = np.array([token for token in self.settings.eos_ids if token is not None], dtype=np.int64)

    def run_block(self, gamma: int | None = None) -> BlockOutcome:
        """See `BlockLoop`: the same outcome, to rounding."""
        return self._next() if self.ahead else self._start(gamma)

    @in_step_mode
    def _start(self, gamma: int | None) -> BlockOutcome:
        gamma = self.settings.gamma if gamma is None else gamma
        target, drafter = _compiled(self.target), self.drafter
        settings, rule = self.settings, self.settings.rule
        token_by_token = not (self._rules or settings.tree or rule.joint or (rule.greedy and not rule.lossless))
        told_more = self._keep_probs or (drafter is not None and drafter.observes)
        if target is None or not token_by_token or told_more or not self.active_R.any():
            return super().run_block(gamma)
        drafting = self._drafting(gamma, target.vocab)
        past = drafting.past
        arrays = {
            "tokens": self.tokens_RC,
            "lengths": self.lengths_R,
            "prompt_lengths": self.prompt_lengths_R,
            "limits": self.limits_R,
            "ends": self._ends_E,
            "uniforms": None if settings.sampling.greedy else self._uniforms_RLG1U,
            "read": drafting.read_R,
            "past": None if past is None else past.tokens_N,
            "past_hashes": None if past is None else past.hashes_M,
            "past_starts": None if past is None else past.starts_M,
        }
        draft = (0, 0) if drafting.model is None else drafting.model.addresses()
        ahead = self.may_run > 1 and drafting.proposal is None
        blocks, addresses = MOST_BLOCKS if ahead else 1, (*target.addresses(), *draft)
        how = drafting.gamma, drafting.ngrams, drafting.steps, drafting.proposal is None
        made_for = (blocks, *how, torch.get_num_threads(), addresses, *map(id, arrays.values()))
        request = self._requests.get(drafting.gamma)
        if request is None or request.made_for != made_for:
            request = self._requests[drafting.gamma] = _Request(self, made_for, arrays, target.vocab, drafting)
        return self._run(request, target, drafting.proposal)

    def _drafting(self, gamma: int, vocab: int) -> "_Drafting":
        plan = Plan() if self.drafter is None else self.drafter.plan()
        if plan is not None:
            if plan.model is None:
                return _Drafting(gamma, plan.ngrams, past=plan.past)
            model = _compiled(plan.model.cached)
            if model is not None and model.vocab == vocab:
                return _Drafting(
                    gamma, plan.ngrams, model, min(gamma, plan.steps or gamma), plan.model.read_R, past=plan.past
                )
        began = time.perf_counter()
        proposal = self._propose(gamma, self._block_uniforms(gamma))
        self.timing.draft_seconds += time.perf_counter() - began
        if proposal.peaks_RG is not None:
            self._refuse_non_finite({"draft_peaks": proposal.peaks_RG.float().numpy()}, self.active_R)
        return _Drafting(proposal.ids_RG.shape[1], proposal=proposal)

    def _run(self, request: "_Request", target: CompiledModel, proposal: Proposal | None) -> BlockOutcome:
        request.fill(self.active_R, proposal, self.may_run)
        done = target.library.run_blocks(request.address)
        check(done == 0)
        self.ahead.extend(request.outcomes(done, self.active_R, proposal))
        if not np.isfinite(request.peaks_2BR[:, :done].sum()):
            draft_peaks_BR, peaks_BR = request.peaks_2BR[:, :done]
            self._refuse_non_finite({"draft_peaks": draft_peaks_BR.T, "peaks": peaks_BR.T}, self.active_R)
        return self._next()

    def _next(self) -> BlockOutcome:
        outcome, (draft, verify, accept) = self.ahead.popleft()
        timing = self.timing
        timing.draft_seconds += draft
        timing.verify_seconds += verify
        timing.accept_seconds += accept
        timing.target_calls += 1
        return outcome

    def close(self, reusable: bool = True) -> None:
        drafter = self.drafter.cached if isinstance(self.drafter, ModelDrafter) else None
        compiled = _compiled(self.target) or _compiled(drafter)
        if compiled is not None:
            compiled.library.forget_all()
        super().close(reusable)


class _Drafting(NamedTuple):
    """How a block of `gamma` tokens is proposed: as a `Plan` says, by a compiled model that has read `read_R` tokens of each row, or as a
    proposal that is ready.
    """

    gamma: int
    ngrams: tuple[int, int] | None = None
    model: CompiledModel | None = None
    steps: int = 0
    read_R: np.ndarray | None = None
    proposal: Proposal | None = None
    past: ResponseIndex | None = None


class _Request:
    """Inputs and outputs of block.cpp. Calls of one number of blocks, one width and one set of arrays reuse the same memory."""

    def __init__(
        self,
        loop: CompiledLoop,
        made_for: tuple[Any, ...],
        arrays: dict[str, np.ndarray | None],
        vocab: int,
        drafting: _Drafting,
    ) -> None:
        """made_for: number of blocks first. arrays: those that calls share, by their names in `Block`."""
        self.made_for, self._arrays = made_for, arrays
        self._proposal: Any = None
        blocks, gamma, past = made_for[0], drafting.gamma, drafting.past
        rows, sampling = len(loop.lengths_R), loop.settings.sampling
        self._sampled = not sampling.greedy
        self._seats_R = np.zeros(rows, dtype=np.int64)
        self._accepted_BR, self._counts_BR, self._sources_BR = np.zeros((3, blocks, rows), np.int64)
        self._drafted_BRG, self._ids_BRG1 = (np.zeros((blocks, rows, width), np.int64) for width in (gamma, gamma + 1))
        self._log_probs_BRG1, self.peaks_2BR = np.zeros((blocks, rows, gamma + 1)), np.zeros((2, blocks, rows))
        self._seconds_B3 = np.zeros((blocks, 3))
        outputs = {
            "seats": self._seats_R,
            "accepted": self._accepted_BR,
            "drafted": self._drafted_BRG,
            "ids": self._ids_BRG1,
            "counts": self._counts_BR,
            "sources": self._sources_BR,
            "log_probs": self._log_probs_BRG1,
            "draft_peaks": self.peaks_2BR[0],
            "peaks": self.peaks_2BR[1],
            "seconds": self._seconds_B3,
        }
        target, target_layers, draft, draft_layers = made_for[6]
        longest, shortest = drafting.ngrams or (0, 0)
        given, drafts = drafting.proposal is not None, drafting.model is not None and gamma > 0
        self._block = Block(
            blocks=blocks,
            nanoseconds=LAST_START_NANOSECONDS,
            batch=rows,
            gamma=gamma,
            proposer=GIVEN if given else MODEL if drafts else NOBODY,
            greedy_target=not self._sampled,
            greedy_draft=loop.drafts_greedily,
            threads=made_for[5],
            columns=loop.tokens_RC.shape[1],
            vocabulary=vocab,
            positions=loop._uniforms_RLG1U.shape[1],
            places=loop._uniforms_RLG1U.shape[2],
            longest_ngram=longest,
            shortest_ngram=shortest,
            steps=drafting.steps,
            past_tokens=0 if past is None else len(past.tokens_N),
            past_ngrams=0 if past is None else len(past.hashes_M),
            target=target,
            draft=draft,
            target_layers=target_layers,
            draft_layers=draft_layers,
            last_end=address_of(loop._ends_E) + loop._ends_E.nbytes,
            lenience=loop.settings.rule.lenience,
            sampling=_sampling(sampling, vocab),
            draft_sampling=_sampling(loop.draft_sampling, vocab),
            **{name: address_of(array) for name, array in (arrays | outputs).items()},
        )
        self.address = ctypes.addressof(self._block)

    def fill(self, active_R: np.ndarray, proposal: Proposal | None, most: int) -> None:
        """Set the active rows and the proposal of the next block, and the number of blocks of the call."""
        seats_K = active_R.nonzero()[0]
        self._seats_R[: len(seats_K)] = seats_K
        self._block.rows, self._block.blocks = len(seats_K), min(most, len(self._accepted_BR))
        if proposal is None:
            return
        ids_RG, probs_RGV, counts_R = proposal.ids_RG.long().contiguous(), proposal.probs_RGV, proposal.counts_R
        probs_RGV = None if probs_RGV is None else probs_RGV.float().contiguous()
        counts_R = None if counts_R is None else np.ascontiguousarray(counts_R, dtype=np.int64)
        self._proposal = ids_RG, probs_RGV, counts_R  # keeps the arrays alive while their addresses are used
        self._block.given_ids, self._block.given_counts = ids_RG.data_ptr(), address_of(counts_R)
        self._block.given_probs = None if probs_RGV is None else probs_RGV.data_ptr()

    def outcomes(
        self, done: int, active_R: np.ndarray, proposal: Proposal | None
    ) -> list[tuple[BlockOutcome, list[float]]]:
        """The blocks that were just run, as copies that the next call does not change, and their draft, verify and accept seconds."""
        active_R = active_R.copy()
        outputs = (
            self._accepted_BR,
            self._counts_BR,
            self._sources_BR,
            self._ids_BRG1,
            self._log_probs_BRG1,
            self._drafted_BRG,
        )
        copies, seconds_B3 = [whole[:done].copy() for whole in outputs], self._seconds_B3[:done].tolist()
        own_B = self._seconds_B3[:done].sum(1)
        ended_B = (time.perf_counter() - (own_B.sum() - own_B.cumsum())).tolist()
        results = []
        for accepted_R, counts_R, sources_R, ids_RG1, log_probs_RG1, drafted_RG, seconds, ended in zip(
            *copies, seconds_B3, ended_B, strict=True
        ):
            if proposal is None:  # a block is as wide as its longest row
                drafted_RG = drafted_RG[:, : int(counts_R[active_R].max())]
            outcome = BlockOutcome(
                active_R,
                accepted_R,
                ids_RG1,
                log_probs_RG1 if self._sampled else None,
                counts_R,
                sources_R if proposal is None else proposal.sources_R,
                drafted_RG,
                None,
                None,
                ended,
            )
            results.append((outcome, seconds))
        return results


def _sampling(settings: SamplingSettings, vocab: int) -> Sampling:
    return Sampling(settings.temperature, settings.top_p, settings.min_p, min(settings.top_k, vocab))


def _compiled(cached: Any) -> CompiledModel | None:
    return cached.compiled if isinstance(cached, CachedModel) else None
