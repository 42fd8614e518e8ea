"""The batched block loop: draft `gamma` tokens, verify them in one target call, commit. Plain decoding is gamma 0.

Shapes: R rows of the batch, G drafted tokens (gamma), G1 = G + 1, V vocabulary, C columns of the token buffer,
L response positions.

Invariant at the start of a block: row r's committed text is tokens_RC[r, :lengths_R[r]] (prompt included) and the
target's cache holds all of it but the last token, which is the first one fed to the verify call. So a block needs
gamma + 1 target positions, the prompt's logits are never computed, and rolling back means not advancing a length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.cache import CachedModel, check_same_vocabulary, evaluating, max_positions, vocab_rows
from speculative.drafters import Drafter
from speculative.errors import UserError
from speculative.responses import BlockOutcome, DecodeSettings, Prompt, Response, Timing, record_block
from speculative.sampling import ACCEPTANCE_COIN, DRAFT_UNIFORM, RESIDUAL_UNIFORM, logits_to_probs, row_uniforms
from speculative.verify import Verified, draft_settings_for, verify, verify_greedy

CommitHook = Callable[[int, list[int]], None]


class BlockLoop:
    """A batch of prompts being decoded, one block at a time. Rows neither stop nor shrink by themselves.

    `decode` is the ordinary way in; `cost` drives this loop directly to time its stages.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        prompts: Sequence[Prompt],
        settings: DecodeSettings,
        exact_stages: bool = False,
    ):
        """`exact_stages` waits for the device between drafting and verifying, so that `timing` splits them truly."""
        self.settings = settings
        self.exact_stages = exact_stages
        self.drafter = drafter if settings.gamma > 0 else None
        self.keys = [key for key, _ in prompts]
        self.timing = Timing()
        self.prompt_lengths = np.array([len(ids) for _, ids in prompts])
        self.lengths = self.prompt_lengths.copy()
        self._draft_sampling = draft_settings_for(settings.rule, settings.sampling)

        began = time.perf_counter()
        device, rows = target.device, len(prompts)
        # A row that is done keeps writing one block behind its end until the batch is compacted.
        slack = 2 * (settings.gamma + 1)
        needed = int(self.prompt_lengths.max()) + settings.max_tokens
        capacity = needed + slack
        padded = np.zeros((rows, capacity), dtype=np.int64)
        for row, (_, ids) in enumerate(prompts):
            padded[row, : len(ids)] = ids
        self.tokens_RC = torch.from_numpy(padded).to(device)
        self.lengths_R = torch.from_numpy(self.lengths).to(device)
        self.prompt_lengths_R = self.lengths_R.clone()
        self.active_R = torch.ones(rows, dtype=torch.int64, device=device)
        self.block_G1 = torch.arange(settings.gamma + 1, device=device)
        self.uniforms_RL3: torch.Tensor | None = None
        if not settings.sampling.greedy:
            streams = [row_uniforms(settings.seed, key, settings.max_tokens + slack) for key in self.keys]
            self.uniforms_RL3 = torch.stack(streams).to(device)

        self.target = CachedModel(target, "target", rows, capacity, needed)
        self.target.prefill(self.tokens_RC, int(self.prompt_lengths.max()) - 1)
        if self.drafter is not None:
            self.drafter.start(self.tokens_RC, self.prompt_lengths, capacity, needed)
        self._wait_for_device()
        self.timing.prefill_seconds += time.perf_counter() - began

    def run_block(self) -> BlockOutcome:
        """Draft, verify and commit one block of every active row. Raises UserError on NaN or infinite logits."""
        gamma, longest = self.settings.gamma, int(self.lengths.max())
        began = time.perf_counter()
        uniforms_RG13 = None
        if self.uniforms_RL3 is not None:
            first_R1 = (self.lengths_R - self.prompt_lengths_R).unsqueeze(1)
            index_RG1 = (first_R1 + self.block_G1).unsqueeze(-1).expand(-1, -1, 3)
            uniforms_RG13 = self.uniforms_RL3.gather(1, index_RG1)
        draft_ids_RG, draft_probs_RGV, draft_finite_R = self._propose(longest, uniforms_RG13)
        if self.exact_stages:
            self._wait_for_device()
        drafted = time.perf_counter()

        starts_R = self.lengths_R - 1
        last_R1 = self.tokens_RC.gather(1, starts_R.unsqueeze(1))
        logits_RG1V = self.target.feed(torch.cat((last_R1, draft_ids_RG), 1), starts_R, longest + gamma, gamma + 1)
        finite_R = logits_RG1V.amax(-1).isfinite().all(-1)
        verified, target_probs_RG1V = self._verify(logits_RG1V, draft_ids_RG, draft_probs_RGV, uniforms_RG13)
        outcome = self._commit(verified, draft_ids_RG, target_probs_RG1V, torch.stack((draft_finite_R, finite_R), 1))
        ended = time.perf_counter()
        self.timing.draft_seconds += drafted - began
        self.timing.verify_seconds += ended - drafted
        self.timing.draft_steps += gamma
        self.timing.target_calls += 1
        return outcome

    def keep(self, rows: list[int]) -> None:
        """Compact to these rows; the others stop costing anything."""
        rows_K = torch.tensor(rows, dtype=torch.int64, device=self.tokens_RC.device)
        self.keys = [self.keys[row] for row in rows]
        self.prompt_lengths, self.lengths = self.prompt_lengths[rows], self.lengths[rows]
        self.tokens_RC, self.lengths_R = self.tokens_RC[rows_K], self.lengths_R[rows_K]
        self.prompt_lengths_R, self.active_R = self.prompt_lengths_R[rows_K], self.active_R[rows_K]
        if self.uniforms_RL3 is not None:
            self.uniforms_RL3 = self.uniforms_RL3[rows_K]
        self.target.keep(rows_K)
        if self.drafter is not None:
            self.drafter.keep(rows_K)

    def stop_rows(self, rows: list[int]) -> None:
        """Rows that are done: their text no longer grows, though they are computed until the next `keep`."""
        self.active_R[torch.tensor(rows, device=self.active_R.device)] = 0

    def _wait_for_device(self) -> None:
        if self.tokens_RC.device.type == "cuda":
            torch.cuda.synchronize(self.tokens_RC.device)

    def _propose(
        self, longest: int, uniforms_RG13: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if self.drafter is None:
            return self.tokens_RC[:, :0], None, torch.ones_like(self.active_R, dtype=torch.bool)
        uniforms_RG = self.tokens_RC[:, :0] if uniforms_RG13 is None else uniforms_RG13[:, :-1, DRAFT_UNIFORM]
        return self.drafter.propose(
            self.tokens_RC, self.lengths_R, longest, self.settings.gamma, self._draft_sampling, uniforms_RG
        )

    def _verify(
        self,
        logits_RG1V: torch.Tensor,
        draft_ids_RG: torch.Tensor,
        draft_probs_RGV: torch.Tensor | None,
        uniforms_RG13: torch.Tensor | None,
    ) -> tuple[Verified, torch.Tensor | None]:
        if uniforms_RG13 is None:
            return verify_greedy(logits_RG1V.argmax(-1), draft_ids_RG), None
        target_probs_RG1V = logits_to_probs(logits_RG1V, self.settings.sampling)
        coins_RG = uniforms_RG13[:, :-1, ACCEPTANCE_COIN]
        residual_uniforms_RG1 = uniforms_RG13[:, :, RESIDUAL_UNIFORM]
        verified = verify(target_probs_RG1V, draft_ids_RG, draft_probs_RGV, coins_RG, residual_uniforms_RG1)
        return verified, target_probs_RG1V

    def _commit(
        self,
        verified: Verified,
        draft_ids_RG: torch.Tensor,
        target_probs_RG1V: torch.Tensor | None,
        finite_R2: torch.Tensor,
    ) -> BlockOutcome:
        accepted_R1 = verified.accepted_B.unsqueeze(1)
        ids_RG1 = torch.nn.functional.pad(draft_ids_RG, (0, 1))
        ids_RG1.scatter_(1, accepted_R1, verified.next_ids_B.unsqueeze(1))
        self.tokens_RC.scatter_(1, self.lengths_R.unsqueeze(1) + self.block_G1, ids_RG1)
        self.lengths_R += (verified.accepted_B + 1) * self.active_R

        tested_RG = self.block_G1[:-1] <= accepted_R1
        overlap_sums_R1 = (verified.overlap_BG * tested_RG).sum(-1, keepdim=True).double()
        if target_probs_RG1V is None:
            log_probs_RG1 = torch.zeros_like(ids_RG1, dtype=torch.float64)
        else:
            log_probs_RG1 = target_probs_RG1V.gather(-1, ids_RG1.unsqueeze(-1)).squeeze(-1).double().log()
        # The only two transfers of a block.
        integers = torch.cat((accepted_R1, self.lengths_R.unsqueeze(1), finite_R2, ids_RG1), 1).cpu().numpy()
        floats = torch.cat((overlap_sums_R1, log_probs_RG1), 1).cpu().numpy()
        self._refuse_non_finite(integers[:, 2:4] != 0)
        self.lengths = integers[:, 1].copy()
        return BlockOutcome(integers[:, 0], integers[:, 4:], floats[:, 1:], floats[:, 0])

    def _refuse_non_finite(self, finite_R2: np.ndarray) -> None:
        if finite_R2.all():
            return
        row, which = map(int, np.argwhere(~finite_R2)[0])
        name = "target" if which == 1 or self.drafter is None else self.drafter.name
        raise UserError(
            f"the {name} returned NaN or infinite logits for prompt {self.keys[row]!r}: check its weights and dtype"
        )


def decode(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    batch_size: int = 32,
    on_commit: CommitHook | None = None,
) -> tuple[list[Response], Timing]:
    """Decode prompts (key, token ids) in batches, in the order given; sort them by length for speed.

    The text follows the target's distribution whatever the drafter (2211.17192); a response depends on (seed, key) and
    not on its batch, up to rounding, so samples of one prompt need distinct keys. `on_commit(index, token_ids)` is
    called with the tokens each block adds to prompt number `index`. Rows that are done are dropped once they are half
    of the batch.

    Raises UserError: empty prompt, unknown token id, prompt + max_tokens beyond the context, drafts of another
    vocabulary, models that cannot be rolled back, NaN logits.
    """
    if settings.gamma > 0 and drafter is None:
        raise UserError(f"gamma = {settings.gamma} needs a draft: give one, or set gamma to 0")
    if settings.gamma == 0:
        drafter = None
    check_prompts(target, drafter, prompts, settings.max_tokens)
    if drafter is not None and drafter.model is not None:
        check_same_vocabulary(target, drafter.model)

    began = time.perf_counter()
    responses = [Response(key=key, prompt_ids=list(ids)) for key, ids in prompts]
    timing = Timing()
    with evaluating(target, drafter.model if drafter is not None else None):
        for first in range(0, len(prompts), batch_size):
            batch = responses[first : first + batch_size]
            loop = BlockLoop(target, drafter, prompts[first : first + batch_size], settings)
            _run_to_the_end(loop, batch, first, on_commit)
            for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "draft_steps", "target_calls"):
                setattr(timing, name, getattr(timing, name) + getattr(loop.timing, name))
    timing.total_seconds = time.perf_counter() - began
    return responses, timing


def check_prompts(target: PreTrainedModel, drafter: Drafter | None, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Raises UserError naming the first prompt that cannot be decoded with this budget, and why."""
    known = vocab_rows(target)
    limits = [(longest, "target") for longest in [max_positions(target)] if longest is not None]
    if drafter is not None and drafter.model is not None:
        limits += [(longest, drafter.name) for longest in [max_positions(drafter.model)] if longest is not None]
    context, name = min(limits, default=(None, ""))
    for key, ids in prompts:
        if len(ids) == 0:
            raise UserError(f"prompt {key!r} is empty: give at least one token (for example the BOS token)")
        if min(ids) < 0 or max(ids) >= known:
            raise UserError(f"prompt {key!r} has token id {max(ids)} but the target knows ids 0..{known - 1}")
        if context is not None and len(ids) + max_tokens > context:
            raise UserError(
                f"prompt {key!r} has {len(ids)} tokens; with max_tokens = {max_tokens} that exceeds the "
                f"{name}'s context of {context}: shorten the prompt or lower max_tokens"
            )


def _run_to_the_end(loop: BlockLoop, responses: list[Response], first: int, on_commit: CommitHook | None) -> None:
    """Run blocks until every response of the batch has met its end token or its budget."""
    indices = list(range(len(responses)))  # row of the loop -> response
    running = set(indices)
    while running:
        outcome = loop.run_block()
        stopped = []
        for row, index in enumerate(indices):
            if index not in running:
                continue
            added = record_block(responses[index], outcome, row, loop.settings)
            if on_commit is not None:
                on_commit(first + index, added)
            response = responses[index]
            if response.finished or len(response.response_ids) == loop.settings.max_tokens:
                running.remove(index)
                stopped.append(row)
        if not running or not stopped:
            continue
        if 2 * len(running) <= len(indices):
            kept = [row for row, index in enumerate(indices) if index in running]
            loop.keep(kept)
            indices = [indices[row] for row in kept]
        else:
            loop.stop_rows(stopped)


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every id that ends a response by the model's generation config, or by its config; () when none is known."""
    value = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if value is None:
        value = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)
