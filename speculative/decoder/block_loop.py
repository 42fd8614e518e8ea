"""A batch of rows decoded one block at a time: draft, verify in one target call, commit. Plain decoding is gamma 0.

Shapes: R rows of the batch, G drafted tokens of this block, G1 = G + 1, V vocabulary, C columns of the token buffer,
L response positions, U uniforms per position, N nodes of a token tree, D its depth.

The committed text lives on the host: row r is tokens_RC[r, :lengths_R[r]], prompt included. Invariant at the start of
a block: the target's cache holds all of it but the last token, which is the first one fed to the verify call. So a
block needs gamma + 1 target positions, the prompt's logits are never computed, and rolling back means not advancing a
length. A block reads the device once.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.decoder.responses import BlockOutcome, DecodeSettings, Prompt, Timing
from speculative.decoder.stage_clock import StageClock
from speculative.drafters.drafter import Ask, Drafter, Proposal, Seats
from speculative.engine.cached_model import open_model, upload
from speculative.engine.models import without_autograd
from speculative.engine.runners import EAGER
from speculative.errors import UserError
from speculative.rules.block_verify import verify_block
from speculative.rules.sampling import (
    ACCEPTANCE_COIN,
    DRAFT_UNIFORM,
    RESIDUAL_UNIFORM,
    logits_to_probs,
    most_likely,
    most_likely_and_peak,
    row_uniforms,
)
from speculative.rules.tree import TokenTree
from speculative.rules.tree_verify import verify_tree, verify_tree_greedy
from speculative.rules.verify import draft_settings_for, verify, verify_greedy


class _Decision(NamedTuple):
    """What a rule decided, on the device. `log_probs_RG1`, `overlap_RG` are None for greedy rules."""

    accepted_R: torch.Tensor
    next_ids_R: torch.Tensor
    drafted_ids_RG: torch.Tensor  # by depth: the accepted path first
    log_probs_RG1: torch.Tensor | None = None
    overlap_RG: torch.Tensor | None = None


P = ParamSpec("P")
T = TypeVar("T")


def _in_step_mode(method: "Callable[Concatenate[BlockLoop, P], T]") -> "Callable[Concatenate[BlockLoop, P], T]":
    """The method runs without autograd, whoever calls it: buffers made in inference mode are written only in it."""

    @wraps(method)
    def run(self: "BlockLoop", *args: P.args, **kwargs: P.kwargs) -> T:
        with self._step_mode():
            return method(self, *args, **kwargs)

    return run


class BlockLoop:
    """Rows neither stop nor shrink by themselves: `decode` says who sits where; `cost` drives this loop to time it."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        rows: int,
        longest: int,
        settings: DecodeSettings,
        *,
        runner: str = EAGER,
        exact_stages: bool = False,
        keep_probs: bool = False,
    ):
        """`longest`: tokens of the longest prompt with its budget. `keep_probs`: outcomes carry both probabilities of
        every drafted token (for the proposal log). `exact_stages` waits for the device between stages.
        """
        self.settings, self.drafter = settings, drafter
        self.timing = Timing()
        self.keys = [""] * rows
        slack = slots_beyond(settings)
        self.tokens_RC = np.zeros((rows, longest + slack), dtype=np.int64)
        self._rows_R = np.arange(rows)
        self.lengths_R = np.ones(rows, dtype=np.int64)  # An empty seat is a text of one token that never grows.
        self.prompt_lengths_R = np.ones(rows, dtype=np.int64)
        self.active_R = np.zeros(rows, dtype=bool)
        self.target = open_model(target, "target", rows, longest + slack, runner)
        self._device = target.device
        self._step_mode = without_autograd(runner, target, drafter.model if drafter is not None else None)
        self._exact_stages, self._keep_probs = exact_stages, keep_probs
        self._draft_sampling = draft_settings_for(settings.rule, settings.sampling)
        self._rules = settings.active_rules
        self._uniforms_RLU = np.zeros((rows, 0, 0))
        if drafter is not None:
            drafter.start(Seats(rows, longest + slack, self.target, runner))

    @_in_step_mode
    def admit(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Seat these prompts in these rows (whoever sat there is gone) and let both models read them."""
        began = time.perf_counter()
        rows = list(rows)
        for row, (key, ids) in zip(rows, prompts, strict=True):
            self.keys[row] = key
            self.tokens_RC[row, : len(ids)] = ids
            self.lengths_R[row] = self.prompt_lengths_R[row] = len(ids)
        self.active_R[rows] = True
        if not self.settings.sampling.greedy:
            tables = [self._uniform_table(self.keys[row]) for row in rows]
            if not self._uniforms_RLU.size:
                self._uniforms_RLU = np.zeros((len(self.lengths_R), *tables[0].shape))
            self._uniforms_RLU[rows] = tables
        # In order of rows, so that a full house is prefilled as one batch of all rows.
        rows.sort()
        self.target.prefill(self.tokens_RC, rows, self.lengths_R[rows] - 1)
        if self.drafter is not None:
            self.drafter.admit(rows, self.tokens_RC, self.lengths_R)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.timing.prefill_seconds += time.perf_counter() - began

    def leave(self, row: int) -> None:
        """This row is done. Until it is filled again or compacted it is computed as a text of one token."""
        self.active_R[row] = False
        self.lengths_R[row] = self.prompt_lengths_R[row] = 1

    def rewind(self, row: int, length: int, last_id: int) -> None:
        """Cut a row to `length` tokens of which the last is `last_id` (what a gate put there)."""
        assert length > self.prompt_lengths_R[row]
        self.lengths_R[row] = length
        self.tokens_RC[row, length - 1] = last_id

    @_in_step_mode
    def keep(self, rows: list[int]) -> None:
        """Compact to these rows; the others stop costing anything."""
        self.keys = [self.keys[row] for row in rows]
        self._rows_R = np.arange(len(rows))
        self.tokens_RC, self.lengths_R = self.tokens_RC[rows], self.lengths_R[rows]
        self.prompt_lengths_R, self.active_R = self.prompt_lengths_R[rows], self.active_R[rows]
        if self._uniforms_RLU.size:
            self._uniforms_RLU = self._uniforms_RLU[rows]
        self.target.keep(rows)
        if self.drafter is not None:
            self.drafter.keep(rows)

    @_in_step_mode
    def run_block(self, gamma: int | None = None, stop_below: float = 0.0) -> BlockOutcome:
        """Draft, verify and commit one block of every active row. Raises UserError on NaN or infinite logits."""
        gamma = self.settings.gamma if gamma is None else gamma
        recordings = self._recordings()
        clock = StageClock(self._device, self._exact_stages)
        uniforms = self._block_uniforms(gamma)
        proposal = self._propose(gamma, stop_below, uniforms)
        clock.mark("draft")

        last_R = self.tokens_RC[self._rows_R, self.lengths_R - 1]
        fed_ids = torch.cat((upload(last_R[:, None], self._device), proposal.ids_RG), 1)
        if proposal.tree is not None:
            logits = self.target.feed_tree(fed_ids, self.lengths_R - 1, proposal.tree)
        else:
            logits = self.target.feed(fed_ids, self.lengths_R - 1, fed_ids.shape[1])
        clock.mark("verify")

        if self._rules is not None:
            logits = self._apply_rules(logits, proposal.ids_RG)
        peaks, decision = self._decide(logits, proposal, uniforms)
        outcome = self._read(peaks, decision, logits, proposal, fed_ids)
        clock.mark("accept")
        spent = clock.seconds()
        if self._recordings() > recordings:
            self.timing.recording_seconds += sum(spent.values())
            self.timing.recording_calls += 1
        else:
            self.timing.draft_seconds += spent["draft"]
            self.timing.verify_seconds += spent["verify"]
            self.timing.accept_seconds += spent["accept"]
        self.timing.draft_steps += proposal.ids_RG.shape[1] if proposal.tree is None else proposal.tree.depth
        self.timing.target_calls += 1
        return outcome

    def _recordings(self) -> int:
        own = self.target.runner.recordings
        return own + getattr(self.drafter, "recordings", 0)

    def _propose(self, gamma: int, stop_below: float, uniforms: torch.Tensor | None) -> Proposal:
        if self.drafter is None:
            return Proposal(torch.zeros((len(self.lengths_R), 0), dtype=torch.int64, device=self._device))
        draft_uniforms = None
        if uniforms is not None and gamma > 0:
            draft_uniforms = _columns(uniforms[:, :gamma], DRAFT_UNIFORM, 3)
        return self.drafter.propose(
            Ask(
                self.tokens_RC,
                self.lengths_R,
                self.prompt_lengths_R,
                self.active_R,
                gamma,
                self._draft_sampling,
                draft_uniforms,
                self._rules,
                stop_below,
                self.settings.tree if gamma > 0 else None,
            )
        )

    def _uniform_table(self, key: str) -> np.ndarray:
        """Uniforms (L, U) of a response: three a position, two more per further candidate; block: all of a block."""
        settings = self.settings
        length = settings.max_tokens + slots_beyond(settings)
        if settings.rule == "block":
            return row_uniforms(settings.seed, key, length, 3 * (settings.gamma + 1), "block").numpy()
        table = row_uniforms(settings.seed, key, length)
        if settings.tree is not None and settings.tree.max_children > 1:
            columns = 2 * (settings.tree.max_children - 1)
            table = torch.cat((table, row_uniforms(settings.seed, key, length, columns, "candidates")), 1)
        return table.numpy()

    def _block_uniforms(self, gamma: int) -> torch.Tensor | None:
        """This block's uniforms (R, gamma + 1, U), by the response position of its first token."""
        if self.settings.sampling.greedy:
            return None
        rows = self._rows_R
        first_R = self.lengths_R - self.prompt_lengths_R
        if self.settings.rule == "block":
            numbers = self._uniforms_RLU[rows, first_R].reshape(len(rows), -1, 3)[:, : gamma + 1]
        else:
            numbers = self._uniforms_RLU[rows[:, None], first_R[:, None] + np.arange(gamma + 1)]
        return upload(numbers, self._device)

    def _apply_rules(self, logits_RG1V: torch.Tensor, draft_ids_RG: torch.Tensor) -> torch.Tensor:
        """The logits rules at every place of the block, each with the drafted tokens before it in the text."""
        assert self._rules is not None
        longest = int(self.lengths_R.max()) + draft_ids_RG.shape[1]
        tokens_RC = upload(self.tokens_RC[:, :longest], self._device).clone()
        lengths_R, prompts_R = (upload(lengths, self._device) for lengths in (self.lengths_R, self.prompt_lengths_R))
        places_G1 = torch.arange(draft_ids_RG.shape[1] + 1, device=self._device)
        ends_RG1 = lengths_R.unsqueeze(1) + places_G1
        tokens_RC.scatter_(1, ends_RG1[:, :-1], draft_ids_RG)
        return self._rules(logits_RG1V, tokens_RC, ends_RG1, prompts_R)

    def _decide(
        self, logits: torch.Tensor, proposal: Proposal, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, _Decision]:
        """A number per row and place that is NaN or infinite when the logits are, and what the rule makes of them."""
        drafted_R = None
        if proposal.counts_R is not None:
            drafted_R = upload(proposal.counts_R, self._device)
        if uniforms is None:
            target_ids, peaks = most_likely_and_peak(logits)
            if proposal.tree is not None:
                return peaks, self._decide_tree_greedy(proposal.tree, target_ids, proposal.ids_RG)
            greedy = verify_greedy(target_ids, proposal.ids_RG, drafted_R)
            return peaks, _Decision(greedy.accepted_B, greedy.next_ids_B, proposal.ids_RG)
        target_probs = logits_to_probs(logits, self.settings.sampling)
        peaks = target_probs[..., 0]  # Softmax makes the whole row NaN when one logit is NaN or infinite.
        if proposal.tree is not None:
            return peaks, self._decide_tree(proposal.tree, target_probs, proposal, uniforms)
        width = proposal.ids_RG.shape[1]
        rule = verify_block if self.settings.rule == "block" else verify
        verified = rule(
            target_probs,
            proposal.ids_RG,
            proposal.probs_RGV,
            uniforms[:, :width, ACCEPTANCE_COIN],
            uniforms[:, : width + 1, RESIDUAL_UNIFORM],
            drafted_R,
        )
        ids_RG1 = _with_next(proposal.ids_RG, verified.accepted_B, verified.next_ids_B)
        log_probs = target_probs.gather(-1, ids_RG1.unsqueeze(-1)).squeeze(-1).double().log()
        decision = _Decision(
            verified.accepted_B, verified.next_ids_B, proposal.ids_RG, log_probs, verified.overlap_BG.double()
        )
        return peaks, decision

    def _decide_tree_greedy(
        self, tree: TokenTree, target_ids_RN1: torch.Tensor, node_ids_RN: torch.Tensor
    ) -> _Decision:
        verified = verify_tree_greedy(tree, target_ids_RN1, node_ids_RN)
        self.target.commit_path(self.lengths_R - 1, verified.path_BD)
        return _Decision(verified.accepted_B, verified.next_ids_B, _path_ids(node_ids_RN, verified.path_BD))

    def _decide_tree(
        self, tree: TokenTree, target_probs_RN1V: torch.Tensor, proposal: Proposal, uniforms: torch.Tensor
    ) -> _Decision:
        coins_RDK = _columns(uniforms[:, : tree.depth], ACCEPTANCE_COIN, 4)
        residual_uniforms_RD1 = uniforms[:, : tree.depth + 1, RESIDUAL_UNIFORM]
        verified = verify_tree(
            tree,
            target_probs_RN1V,
            proposal.ids_RG,
            proposal.probs_RGV,
            coins_RDK,
            residual_uniforms_RD1,
            replacement=False,
        )
        self.target.commit_path(self.lengths_R - 1, verified.path_BD)
        drafted_RD = _path_ids(proposal.ids_RG, verified.path_BD)
        ids_RD1 = _with_next(drafted_RD, verified.accepted_B, verified.next_ids_B)
        nodes_RD1 = torch.nn.functional.pad(verified.path_BD, (1, 0))
        rows_RD1V = target_probs_RN1V.gather(1, nodes_RD1.unsqueeze(-1).expand(-1, -1, target_probs_RN1V.shape[-1]))
        log_probs = rows_RD1V.gather(-1, ids_RD1.unsqueeze(-1)).squeeze(-1).double().log()
        return _Decision(verified.accepted_B, verified.next_ids_B, drafted_RD, log_probs, verified.overlap_BD.double())

    def _read(
        self, peaks: torch.Tensor, decision: _Decision, logits: torch.Tensor, proposal: Proposal, fed_ids: torch.Tensor
    ) -> BlockOutcome:
        """Bring the block to the host, the only time the device is waited for, and commit it."""
        width = decision.drafted_ids_RG.shape[1]
        wanted = {
            "accepted": decision.accepted_R,
            "next": decision.next_ids_R,
            "drafted": decision.drafted_ids_RG,
            "peaks": peaks,
        }
        if proposal.peaks_RG is not None:
            wanted["draft_peaks"] = proposal.peaks_RG
        if decision.log_probs_RG1 is not None and decision.overlap_RG is not None:
            wanted |= {"log_probs": decision.log_probs_RG1, "overlap": decision.overlap_RG}
        if self.drafter is not None and self.drafter.observes:
            wanted |= {"predicted": most_likely(logits), "fed": fed_ids}
        if self._keep_probs and decision.log_probs_RG1 is not None and proposal.tree is None:
            wanted |= self._both_probs(logits, proposal)
        host = _to_host(wanted)
        self._refuse_non_finite(host)
        accepted_R = host["accepted"]
        ids_RG1 = np.concatenate((host["drafted"], host["drafted"][:, :1] if width else host["next"][:, None]), 1)
        ids_RG1[self._rows_R, accepted_R] = host["next"]
        counts_R = np.full(len(accepted_R), width) if proposal.counts_R is None else proposal.counts_R
        if "overlap" in host:
            tested_RG = np.arange(width) < np.minimum(accepted_R + 1, counts_R)[:, None]
            overlap_sums_R = (host["overlap"] * tested_RG).sum(1)
        else:
            overlap_sums_R = accepted_R.astype(np.float64)  # One-hot rows overlap exactly where they are accepted.
        if "predicted" in host and self.drafter is not None:
            self.drafter.observe(host["fed"], host["predicted"], accepted_R)
        self.tokens_RC[self._rows_R[:, None], self.lengths_R[:, None] + np.arange(width + 1)] = ids_RG1
        self.lengths_R = self.lengths_R + (accepted_R + 1) * self.active_R
        return BlockOutcome(
            accepted_R,
            ids_RG1,
            host.get("log_probs"),
            overlap_sums_R,
            counts_R,
            proposal.sources_R,
            host["drafted"],
            host.get("target_probs"),
            host.get("draft_probs"),
        )

    def _both_probs(self, logits: torch.Tensor, proposal: Proposal) -> dict[str, torch.Tensor]:
        drafted_RG1 = proposal.ids_RG.unsqueeze(-1)
        target_probs = logits_to_probs(logits[:, :-1], self.settings.sampling).gather(-1, drafted_RG1).squeeze(-1)
        draft_probs = torch.ones_like(target_probs)
        if proposal.probs_RGV is not None:
            draft_probs = proposal.probs_RGV.gather(-1, drafted_RG1).squeeze(-1)
        return {"target_probs": target_probs, "draft_probs": draft_probs}

    def _refuse_non_finite(self, host: dict[str, np.ndarray]) -> None:
        for name in ("draft_peaks", "peaks"):
            if name not in host:
                continue
            sums_R = host[name].sum(1)  # A sum keeps NaN and infinity.
            if math.isfinite(sums_R.sum()):
                continue
            broken_R = ~np.isfinite(sums_R) & self.active_R
            if broken_R.any():
                who = "target" if name == "peaks" or self.drafter is None else self.drafter.name
                raise UserError(
                    f"the {who} returned NaN or infinite logits for prompt {self.keys[int(broken_R.argmax())]!r}: "
                    "check its weights and dtype"
                )


def slots_beyond(settings: DecodeSettings) -> int:
    """Positions a row needs behind prompt + max_tokens: what a last block drafts and throws away."""
    return (settings.gamma if settings.tree is None else settings.tree.size) + 2


def _columns(uniforms_RGU: torch.Tensor, first: int, others: int) -> torch.Tensor:
    """Column `first` and every second one from `others` on: the numbers of the first candidate and of the further ones."""
    first_RG1 = uniforms_RGU[..., first : first + 1]
    if uniforms_RGU.shape[-1] <= others:
        return first_RG1
    # Slices, not a list of indices: that would be copied to the device in every block.
    return torch.cat((first_RG1, uniforms_RGU[..., others::2]), -1)


def _with_next(drafted_RG: torch.Tensor, accepted_R: torch.Tensor, next_ids_R: torch.Tensor) -> torch.Tensor:
    """Emitted ids (R, G1): the drafted ones with the target's own at place accepted; what stands behind is idle."""
    ids_RG1 = torch.nn.functional.pad(drafted_RG, (0, 1))
    return ids_RG1.scatter_(1, accepted_R.unsqueeze(1), next_ids_R.unsqueeze(1))


def _path_ids(node_ids_RN: torch.Tensor, path_RD: torch.Tensor) -> torch.Tensor:
    """Ids (R, D) of the accepted nodes; what stands behind the accepted ones is idle."""
    return node_ids_RN.gather(1, (path_RD - 1).clamp_min(0))


def _to_host(wanted: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """All tensors as arrays; from an accelerator in one transfer."""
    if next(iter(wanted.values())).device.type != "cpu":
        return _in_one_transfer(wanted)
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in wanted.items()
    }


def _in_one_transfer(wanted: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """float64 holds every id, and every probability, exactly."""
    flat = torch.cat([tensor.reshape(-1).double() for tensor in wanted.values()]).cpu().numpy()
    arrays, start = {}, 0
    for name, tensor in wanted.items():
        part = flat[start : start + tensor.numel()].reshape(tensor.shape)
        arrays[name] = part if tensor.is_floating_point() else part.astype(np.int64)
        start += tensor.numel()
    return arrays
