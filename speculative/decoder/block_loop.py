"""A batch of rows decoded one block at a time: draft, verify in one target call, commit. Plain decoding is gamma 0.

Shapes: R rows of the batch, G drafted tokens of this block, G1 = G + 1, V vocabulary, C columns of the token buffer, L response positions,
U uniforms per place of a block, N nodes of a token tree, D its depth.

The committed text is on the host: row r is tokens_RC[r, :lengths_R[r]], prompt included. At the start of a block the target's cache holds
all of it except the last token, which is the first token of the verify call. So a block needs gamma + 1 target positions, the prompt's
logits are never computed, and a rollback only leaves a length unchanged. The host reads the device once per block.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.decoder.decision import Decision, columns, decide
from speculative.decoder.responses import BlockOutcome, DecodeSettings, Prompt, StageClock, Timing
from speculative.drafters.drafter import Ask, Drafter, Proposal, Seats
from speculative.engine.cached_model import open_model, upload
from speculative.engine.memory import release
from speculative.engine.models import without_autograd
from speculative.engine.runners import EAGER
from speculative.errors import UserError
from speculative.rules.sampling import DRAFT_UNIFORM, block_uniforms, logits_to_probs, most_likely
from speculative.rules.verify import draft_settings_for

P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound="BlockLoop")


def in_step_mode(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Run the method in inference mode: buffers created in inference mode can be written only in it."""

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._step_mode():
            return method(self, *args, **kwargs)

    return run


class BlockLoop:
    """Decodes a batch of rows block by block. `decode` assigns prompts to rows and ends them; `cost` drives the loop to time it."""

    # A loop may run so many blocks in a `run_block`, and return the rest, `ahead`, from the next ones: until then rows change only where a
    # response ends, and gamma not at all.
    may_run = 1
    ahead: Sequence[object] = ()

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
        self.lengths_R = np.ones(rows, dtype=np.int64)  # An empty row is a text of one token that never grows.
        self.prompt_lengths_R = np.ones(rows, dtype=np.int64)
        self.limits_R = np.ones(rows, dtype=np.int64)  # Length at which a row's response is full.
        self.active_R = np.zeros(rows, dtype=bool)
        self.target = open_model(target, "target", rows, longest + slack, runner)
        self._device = target.device
        self._step_mode = without_autograd(runner, target, drafter.model if drafter is not None else None)
        self._exact_stages, self._keep_probs = exact_stages, keep_probs
        self.draft_sampling = draft_settings_for(settings.rule, settings.sampling)
        self.drafts_greedily = self.draft_sampling.greedy
        self._rules = settings.active_rules
        self._uniforms_RLG1U = np.zeros((rows, 0, 0, 0))
        if drafter is not None:
            try:
                drafter.start(Seats(rows, longest + slack, self.target, runner))
            except BaseException:
                drafter.end()
                raise

    def close(self, reusable: bool = True) -> None:
        """End the decode call. `reusable`: no error occurred, so the next call may reuse caches and recordings."""
        if self.drafter is not None:
            self.drafter.end()
        if reusable:
            self.target.close()
        elif self.drafter is not None and self.drafter.model is not None:
            release(self.drafter.model)

    @in_step_mode
    def admit(self, rows: Sequence[int], prompts: Sequence[Prompt], budgets: Sequence[int] | None = None) -> None:
        """Assign these prompts to these rows, replacing their former requests, and prefill both models. budgets: of each response; None =
        max_tokens.
        """
        began = time.perf_counter()
        rows = list(rows)
        for row, (key, ids) in zip(rows, prompts, strict=True):
            self.keys[row] = key
            self.tokens_RC[row, : len(ids)] = ids
            self.lengths_R[row] = self.prompt_lengths_R[row] = len(ids)
        budgets = [self.settings.max_tokens] * len(rows) if budgets is None else budgets
        self.limits_R[rows] = self.lengths_R[rows] + np.array(budgets)
        self.active_R[rows] = True
        if not self.settings.sampling.greedy:
            tables = [self._uniform_table(self.keys[row]) for row in rows]
            if not self._uniforms_RLG1U.size:
                self._uniforms_RLG1U = np.zeros((len(self.lengths_R), *tables[0].shape))
            self._uniforms_RLG1U[rows] = tables
        # In order of rows, so that a full batch is prefilled as one batch of all rows.
        rows.sort()
        self.target.prefill(self.tokens_RC, rows, self.lengths_R[rows] - 1)
        if self.drafter is not None and rows:
            self.drafter.admit(rows, self.tokens_RC, self.lengths_R)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.timing.prefill_seconds += time.perf_counter() - began

    def leave(self, row: int) -> None:
        """Mark the row as done. Until it is reused or dropped, it is computed as a text of one token."""
        self.active_R[row] = False
        self.lengths_R[row] = self.prompt_lengths_R[row] = 1

    def rewind(self, row: int, length: int, last_id: int) -> None:
        """Cut a row to `length` tokens and set the last one to `last_id` (the replacement from a commit gate)."""
        assert length > self.prompt_lengths_R[row]
        self.lengths_R[row] = length
        self.tokens_RC[row, length - 1] = last_id

    @in_step_mode
    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.keys = [self.keys[row] for row in rows]
        self._rows_R = np.arange(len(rows))
        self.tokens_RC, self.lengths_R = self.tokens_RC[rows], self.lengths_R[rows]
        self.prompt_lengths_R, self.active_R = self.prompt_lengths_R[rows], self.active_R[rows]
        self.limits_R = self.limits_R[rows]
        if self._uniforms_RLG1U.size:
            self._uniforms_RLG1U = self._uniforms_RLG1U[rows]
        self.target.keep(rows)
        if self.drafter is not None:
            self.drafter.keep(rows)

    @in_step_mode
    def run_block(self, gamma: int | None = None) -> BlockOutcome:
        """Draft, verify and commit one block of every active row. Raises UserError on NaN or infinite logits."""
        gamma = self.settings.gamma if gamma is None else gamma
        recordings = self._recordings()
        clock = StageClock(self._device, self._exact_stages)
        uniforms = self._block_uniforms(gamma)
        proposal = self._propose(gamma, uniforms)
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
        decision = decide(logits, proposal, uniforms, self.settings)
        if decision.path_RD is not None:
            self.target.commit_path(self.lengths_R - 1, decision.path_RD)
        outcome = self._read(decision, logits, proposal, fed_ids)
        clock.mark("accept")
        spent = clock.seconds()
        if self._recordings() > recordings:
            self.timing.recording_seconds += sum(spent.values())
            self.timing.recording_calls += 1
        else:
            self.timing.draft_seconds += spent["draft"]
            self.timing.verify_seconds += spent["verify"]
            self.timing.accept_seconds += spent["accept"]
        self.timing.target_calls += 1
        return outcome

    def _recordings(self) -> int:
        return self.target.runner.recordings + (self.drafter.recordings if self.drafter is not None else 0)

    def _propose(self, gamma: int, uniforms: torch.Tensor | None) -> Proposal:
        if self.drafter is None:
            return Proposal(torch.zeros((len(self.lengths_R), 0), dtype=torch.int64, device=self._device))
        draft_uniforms = None
        if uniforms is not None and gamma > 0:
            draft_uniforms = columns(uniforms[:, :gamma], DRAFT_UNIFORM, 3)
        text = self.tokens_RC, self.lengths_R, self.prompt_lengths_R, self.active_R
        sampling, rules, tree = self.draft_sampling, self._rules, self.settings.tree if gamma > 0 else None
        return self.drafter.propose(Ask(*text, gamma, sampling, draft_uniforms, rules, tree))

    def _uniform_table(self, key: str) -> np.ndarray:
        """Uniforms (L, G1, U) of a response: three per place of a block, plus two per further candidate."""
        settings = self.settings
        candidates = 1 if settings.tree is None else settings.tree.max_children
        length, columns = settings.max_tokens + slots_beyond(settings), 3 + 2 * (candidates - 1)
        return block_uniforms(settings.seed, key, length, settings.gamma + 1, columns).numpy()

    def _block_uniforms(self, gamma: int) -> torch.Tensor | None:
        """This block's uniforms (R, gamma + 1, U), by the response position of its first token."""
        if self.settings.sampling.greedy:
            return None
        first_R = self.lengths_R - self.prompt_lengths_R
        return upload(self._uniforms_RLG1U[self._rows_R, first_R, : gamma + 1], self._device)

    def _apply_rules(self, logits_RG1V: torch.Tensor, draft_ids_RG: torch.Tensor) -> torch.Tensor:
        """Apply the logits rules at every position of the block; each sees the drafted tokens before it."""
        assert self._rules is not None
        longest = int(self.lengths_R.max()) + draft_ids_RG.shape[1]
        tokens_RC = upload(self.tokens_RC[:, :longest], self._device).clone()
        lengths_R, prompts_R = (upload(lengths, self._device) for lengths in (self.lengths_R, self.prompt_lengths_R))
        places_G1 = torch.arange(draft_ids_RG.shape[1] + 1, device=self._device)
        ends_RG1 = lengths_R.unsqueeze(1) + places_G1
        tokens_RC.scatter_(1, ends_RG1[:, :-1], draft_ids_RG)
        return self._rules(logits_RG1V, tokens_RC, ends_RG1, prompts_R)

    def _read(
        self, decision: Decision, logits: torch.Tensor, proposal: Proposal, fed_ids: torch.Tensor
    ) -> BlockOutcome:
        """Copy the block to the host and commit it. This is the only wait for the device."""
        wanted = self._wanted(decision, logits, proposal)
        if self.drafter is not None and self.drafter.observes:
            wanted |= {"predicted": most_likely(logits), "fed": fed_ids}
        host = _to_host(wanted)
        self._refuse_non_finite(host, self.active_R)
        width = decision.drafted_ids_RG.shape[1]
        outcome = outcome_of(host, self.active_R.copy(), proposal.counts_R)._replace(sources_R=proposal.sources_R)
        if "predicted" in host and self.drafter is not None:
            # A row may have fewer tokens than the widest row; what follows its own tokens is padding.
            host["fed"][:, 1:][np.arange(width) >= outcome.drafted_counts_R[:, None]] = -1
            self.drafter.observe(host["fed"], host["predicted"], outcome.accepted_R)
        self.tokens_RC[self._rows_R[:, None], self.lengths_R[:, None] + np.arange(width + 1)] = outcome.ids_RG1
        self.lengths_R = self.lengths_R + (outcome.accepted_R + 1) * self.active_R
        return outcome

    def _wanted(self, decision: Decision, logits: torch.Tensor, proposal: Proposal) -> dict[str, torch.Tensor]:
        """The tensors of a block that the host needs."""
        wanted = {
            "accepted": decision.accepted_R,
            "next": decision.next_ids_R,
            "drafted": decision.drafted_ids_RG,
            "peaks": decision.peaks_RG1,
        }
        if proposal.peaks_RG is not None:
            wanted["draft_peaks"] = proposal.peaks_RG
        if decision.log_probs_RG1 is not None:
            wanted["log_probs"] = decision.log_probs_RG1
        if self._keep_probs and decision.log_probs_RG1 is not None and proposal.tree is None:
            drafted_RG1 = proposal.ids_RG.unsqueeze(-1)
            target_probs = logits_to_probs(logits[:, :-1], self.settings.sampling).gather(-1, drafted_RG1).squeeze(-1)
            draft_probs = torch.ones_like(target_probs)
            if proposal.probs_RGV is not None:
                draft_probs = proposal.probs_RGV.gather(-1, drafted_RG1).squeeze(-1)
            wanted |= {"target_probs": target_probs, "draft_probs": draft_probs}
        return wanted

    def _refuse_non_finite(self, host: dict[str, np.ndarray], rows_R: np.ndarray) -> None:
        for name in ("draft_peaks", "peaks"):
            if name not in host:
                continue
            sums_R = host[name].sum(1)  # A sum keeps NaN and infinity.
            if math.isfinite(sums_R.sum()):
                continue
            broken_R = ~np.isfinite(sums_R) & rows_R
            if broken_R.any():
                who = "target" if name == "peaks" or self.drafter is None else self.drafter.name
                raise UserError(
                    f"the {who} returned NaN or infinite logits for prompt {self.keys[int(broken_R.argmax())]!r}: "
                    "check its weights and dtype"
                )


def slots_beyond(settings: DecodeSettings) -> int:
    """Positions a row needs after prompt + max_tokens: the last block may draft beyond the end."""
    return (settings.gamma if settings.tree is None else settings.tree.size) + 2


def outcome_of(host: dict[str, np.ndarray], rows_R: np.ndarray, counts_R: np.ndarray | None = None) -> BlockOutcome:
    """The outcome of a block for these rows, from host arrays. `counts_R`: number of real drafted ids per row, None = all."""
    accepted_R, drafted_RG, width = host["accepted"], host["drafted"], host["drafted"].shape[1]
    ids_RG1 = np.concatenate((drafted_RG, drafted_RG[:, :1] if width else host["next"][:, None]), 1)
    ids_RG1[np.arange(len(ids_RG1)), accepted_R] = host["next"]
    counts_R = np.full(len(accepted_R), width) if counts_R is None else counts_R
    log_probs, target_probs, draft_probs = map(host.get, ("log_probs", "target_probs", "draft_probs"))
    return BlockOutcome(rows_R, accepted_R, ids_RG1, log_probs, counts_R, None, drafted_RG, target_probs, draft_probs)


def _to_host(wanted: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """All tensors as arrays; from an accelerator in one transfer."""
    if next(iter(wanted.values())).device.type != "cpu":
        return unpacked(packed(wanted).cpu().numpy(), layout_of(wanted))
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in wanted.items()
    }


Layout = tuple[tuple[str, torch.Size, bool], ...]  # of each tensor: name, shape, whether it holds fractions


def layout_of(wanted: dict[str, torch.Tensor]) -> Layout:
    """The layout that `packed` uses for these tensors."""
    return tuple((name, tensor.shape, tensor.is_floating_point()) for name, tensor in wanted.items())


def packed(wanted: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tensors, flattened into one float64 tensor, which holds every id and probability exactly."""
    return torch.cat([tensor.reshape(-1).double() for tensor in wanted.values()])


def unpacked(flat: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Inverse of `packed`, on the host."""
    arrays, start = {}, 0
    for name, shape, floating in layout:
        part = flat[start : start + shape.numel()].reshape(shape)
        arrays[name] = part if floating else part.astype(np.int64)
        start += shape.numel()
    return arrays
