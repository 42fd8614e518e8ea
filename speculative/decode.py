"""Public decoding functions: `generate` streams events, `decode` returns all responses. A decode call has a fixed number of rows. A row
whose response ended takes the next waiting prompt at once, so a long response never holds up the batch. When no prompt waits, finished
rows are dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculative.decoder.block_loop import BlockLoop, slots_beyond
from speculative.decoder.device_loop import open_loop
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import (
    STOP,
    BlockOutcome,
    CommitGate,
    DecodeSettings,
    Prompt,
    Response,
    Timing,
    append_block,
)
from speculative.decoder.text import TextStream
from speculative.drafters.drafter import Drafter
from speculative.drafters.gamma import FixedGamma, GammaPolicy
from speculative.engine.memory import check_memory, peak_bytes
from speculative.engine.models import (
    check_decodable,
    check_same_vocabulary,
    end_token_ids,
    in_eval_mode,
    max_positions,
    vocab_rows,
)
from speculative.engine.runners import UNRECORDED, resolve_runner
from speculative.engine.survey import Turn, surveyed
from speculative.errors import UserError
from speculative.progress import Phase

__all__ = ["STOP", "DecodeSettings", "Event", "check_prompts", "decode", "end_token_ids", "generate"]

CommitHook = Callable[[int, list[int]], None]


@dataclass(frozen=True)
class Event:
    """Tokens of prompt number `index` that were just committed; the last event of a response says why it ended. `text`: what the tokens
    add (with a tokenizer); streamed text is never changed. An event after the gate or a stop string may have no tokens. `response` grows
    and is complete with the last event.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    response: Response


@dataclass
class _Seat:
    """The request in a row: its prompt, its start time, and its response and text stream."""

    index: int
    response: Response
    seated: float
    stream: TextStream | None


class Options(TypedDict, total=False):
    """Options of a decode call.

    batch_size: rows at a time (32). tokenizer: events carry text; needed for stop strings. policy: how many tokens to propose
    (default: always settings.gamma); its maximum must not exceed settings.gamma. gate: called in order for every token before
    it is streamed; `response.gate_log` records the calls. log: writes every proposal as parquet. runner: `auto` (CUDA graphs on CUDA,
    compiled code elsewhere), `eager`, `compile` or `graph`. timing: filled while decoding. in_order: prompts get rows in their own order.
    """

    batch_size: int
    tokenizer: PreTrainedTokenizerBase | None
    policy: GammaPolicy | None
    gate: CommitGate | None
    log: ProposalLog | None
    runner: str
    timing: Timing | None
    in_order: bool


def generate(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    **options: Unpack[Options],
) -> Generator[Event, None, None]:
    """Decode prompts (key, token ids) and yield events as tokens commit; at most `batch_size` rows at a time.

    The text follows the target's distribution whatever the drafter (2211.17192); a response depends on (seed, key) and
    not on its batch, up to rounding, so samples of one prompt need distinct keys. Prompts beyond the first
    `batch_size` get a row in order of length, longest first. options: see `Options`.

    Everything is checked before the first event. Closing the stream early frees all memory. Raises UserError: empty
    prompt, unknown token id, prompt + max_tokens beyond the context, too little memory, drafts of another vocabulary,
    models that cannot be rolled back, NaN logits.
    """
    return _Call(target, drafter, prompts, settings, options).events()


def decode(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    on_commit: CommitHook | None = None,
    shown: Phase | None = None,
    **options: Unpack[Options],
) -> tuple[list[Response], Timing]:
    """Return all responses, in the order of the prompts, and the timing. `on_commit(index, token_ids)` is called with the tokens each
    block adds to prompt number `index`. `shown` counts tokens, and responses that ended.
    """
    timing = options["timing"] = options.get("timing") or Timing()
    responses: list[Response | None] = [None] * len(prompts)
    # Nobody reads the text as it commits: blocks need not be handed over one by one.
    for event in _Call(target, drafter, prompts, settings, options, runs_ahead=on_commit is None).events():
        responses[event.index] = event.response
        if shown is not None:
            shown.count(len(event.token_ids))
            shown.advance(event.finish_reason is not None)
        if on_commit is not None and event.token_ids:
            on_commit(event.index, event.token_ids)
    return [response for response in responses if response is not None], timing


def context_of(target: PreTrainedModel, drafter: Drafter | None) -> tuple[int | None, str]:
    """The shorter context length of the two models and the name of that model; None if neither config gives one."""
    models = [(target, "target")]
    if drafter is not None and drafter.model is not None:
        models.append((drafter.model, drafter.name))
    limits = [(longest, name) for model, name in models if (longest := max_positions(model.config)) is not None]
    return min(limits, key=lambda limit: limit[0], default=(None, ""))


def check_prompts(
    target: PreTrainedModel, drafter: Drafter | None, prompts: Sequence[Prompt], settings: DecodeSettings
) -> None:
    """Raise UserError with the first prompt that cannot be decoded with this budget, and the reason."""
    rows, max_tokens = vocab_rows(target), settings.max_tokens
    context, name = context_of(target, drafter)
    for prompt in prompts:
        paired = isinstance(prompt, tuple) and len(prompt) == 2
        if not paired or not isinstance(prompt[0], str) or isinstance(prompt[1], str):
            raise UserError(f"a prompt is {str(prompt)[:60]!r}: give pairs (key, token ids), like ('first', [1, 2, 3])")
        key, ids = prompt
        if len(ids) == 0:
            raise UserError(f"prompt {key!r} is empty: give at least one token (for example the BOS token)")
        if min(ids) < 0 or max(ids) >= rows:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise UserError(f"prompt {key!r} has token id {wrong} but the target knows ids 0..{rows - 1}")
        if context is None or len(ids) + (1 if settings.fit_context else max_tokens) <= context:
            continue
        if settings.fit_context:
            raise UserError(f"prompt {key!r} has {len(ids)} tokens but the {name}'s context is {context}: shorten it")
        raise UserError(
            f"prompt {key!r} has {len(ids)} tokens; with max_tokens = {max_tokens} that exceeds the context of "
            f"{context} of the {name}: shorten the prompt or lower max_tokens"
        )


class _Call:
    """One decode call; its arguments are checked in the constructor."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        prompts: Sequence[Prompt],
        settings: DecodeSettings,
        options: Options,
        runs_ahead: bool = False,
    ):
        self.target, self.drafter, self.prompts, self.settings = target, drafter, prompts, settings
        self.tokenizer, self.gate, self.log = options.get("tokenizer"), options.get("gate"), options.get("log")
        self.policy = policy = options.get("policy") or FixedGamma(settings.gamma)
        fixed = type(policy) is FixedGamma and policy.max_gamma == settings.gamma
        self.reads_each_block = self.gate is not None or not fixed
        self.runs_ahead = runs_ahead and self.gate is None and not settings.stop
        self.gamma = 0  # of the last choice
        self.timing = options.get("timing") or Timing()
        batch_size = options.get("batch_size", 32)
        if settings.gamma > 0 and drafter is None:
            raise UserError(f"gamma = {settings.gamma} needs a draft: give one, or set gamma to 0")
        if settings.stop and self.tokenizer is None:
            raise UserError("stop strings need the tokenizer: pass tokenizer=...")
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: must be at least 1")
        if drafter is not None and not hasattr(drafter, "propose"):
            raise UserError(f"{type(drafter).__name__} is not a drafter: give ModelDrafter(model)")
        if settings.gamma == 0:
            self.drafter = drafter = None
        if self.policy.max_gamma > settings.gamma:
            raise UserError(
                f"the gamma policy proposes up to {self.policy.max_gamma} tokens but gamma = {settings.gamma}: "
                "raise gamma, or lower the maximum of the policy"
            )
        if settings.tree is not None:
            if not (isinstance(self.policy, FixedGamma) and self.policy.max_gamma == settings.gamma):
                raise UserError(f"a token tree needs a fixed gamma, its depth: use FixedGamma({settings.tree.depth})")
            if self.log is not None:
                raise UserError("the proposal log does not support token trees: remove the tree or the log")
        self.draft_model = drafter.model if drafter is not None else None
        self.turn = Turn(target, self.draft_model)
        with self.turn:
            check_decodable(target, "target")
            check_prompts(target, drafter, prompts, settings)
            if drafter is not None and self.draft_model is not None:
                check_decodable(self.draft_model, drafter.name)
                check_same_vocabulary(target, self.draft_model)
        if settings.active_rules is not None:
            settings.active_rules.check(vocab_rows(target))
        self.rows = min(batch_size, len(prompts))
        self.runner = resolve_runner(options.get("runner", "auto"), target.device)
        context, _ = context_of(target, drafter) if settings.fit_context else (None, "")
        most = settings.max_tokens
        self.budgets = [min(most, (context or len(ids) + most) - len(ids)) for _, ids in prompts]
        self.seats: list[_Seat | None] = [None] * self.rows
        self.in_order, self.began = options.get("in_order", False), 0.0

    def events(self) -> Generator[Event, None, None]:
        """The stream of events. Memory is allocated when the first event is requested."""
        blocks = self._blocks()
        try:
            while True:
                with self.turn:
                    events = next(blocks, None)
                if events is None:
                    return
                yield from events
        finally:
            with self.turn:
                blocks.close()

    def _blocks(self) -> Generator[list[Event], None, None]:
        """The events of each block."""
        if not self.prompts:
            return
        timing, policy = self.timing, self.policy
        self.began = time.perf_counter() - timing.total_seconds  # Several calls may share one timing.
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        # Eval mode lasts for the whole stream. no_grad covers blocks, gates and choices of gamma, but not the caller's code between events.
        with ExitStack() as ending:
            with torch.no_grad(), surveyed():
                ending.enter_context(in_eval_mode(self.target, self.draft_model))
                loop = self._open()
            ending.push(lambda kind, *_: loop.close(reusable=kind in (None, GeneratorExit)))
            policy.start(self.rows)
            order = list(range(len(self.prompts)))
            if len(order) > self.rows and not self.in_order:
                order.sort(key=lambda index: -len(self.prompts[index][1]))
            waiting = deque(order)
            loop.timing = timing
            free = list(range(self.rows))
            while True:
                self._seat(loop, free, waiting)
                seated = [row for row, place in enumerate(self.seats) if place is not None]
                if not seated:
                    break
                # A recorded graph holds the addresses of its buffers, so its rows cannot be compacted.
                if self.runner in UNRECORDED and len(seated) <= len(self.seats) / 2:
                    loop.keep(seated)
                    policy.keep(seated)
                    self.seats = [self.seats[row] for row in seated]
                if self.target.training or (self.draft_model is not None and self.draft_model.training):
                    ending.enter_context(in_eval_mode(self.target, self.draft_model))  # another call of them has ended
                with torch.no_grad():
                    events, free = self._one_block(loop)
                yield events
            timing.peak_bytes = peak_bytes(self.target.device)

    def _open(self) -> BlockLoop:
        settings = self.settings
        longest = max(len(ids) + budget for (_, ids), budget in zip(self.prompts, self.budgets, strict=True))
        fed = 1 + (settings.gamma if settings.tree is None else settings.tree.size)
        shared = self.drafter is not None and self.drafter.shares_cache
        check_memory(self.target, self.draft_model, self.rows, longest + slots_beyond(settings), fed, shared)
        return open_loop(
            self.target,
            self.drafter,
            self.rows,
            longest,
            settings,
            runner=self.runner,
            keep_probs=self.log is not None,
            reads_each_block=self.reads_each_block,
        )

    def _seat(self, loop: BlockLoop, free: list[int], waiting: deque[int]) -> None:
        """Give free rows to waiting prompts."""
        rows, now = free[: len(waiting)], time.perf_counter()
        indices = [waiting.popleft() for _ in rows]
        for row, index in zip(rows, indices, strict=True):
            key, ids = self.prompts[index]
            stream = TextStream(self.tokenizer, self.settings.stop) if self.tokenizer is not None else None
            response = Response(key=key, prompt_ids=list(ids), budget=self.budgets[index])
            self.seats[row] = _Seat(index, response, now, stream)
            self.policy.admit(row)
        if rows:
            loop.admit(rows, [self.prompts[index] for index in indices], [self.budgets[index] for index in indices])

    def _one_block(self, loop: BlockLoop) -> tuple[list[Event], list[int]]:
        """Run one block. Returns the events of its rows and the rows that are free because their response ended."""
        policy, timing, began = self.policy, loop.timing, time.perf_counter()
        recorded, before = timing.recording_calls, timing.decoding_seconds
        if not loop.ahead:
            self.gamma = policy.choose(loop.active_R)
            loop.may_run = getattr(policy, "holds", 1) if self.runs_ahead else 1  # policies of others may lack it
        outcome = loop.run_block(self.gamma)
        # In compiled code without what a call costs, whatever number of blocks it runs: all widths are timed alike.
        own = None if outcome.ended is None else timing.decoding_seconds - before
        seconds = (own or time.perf_counter() - began) if timing.recording_calls == recorded else None
        width, rows = outcome.drafted_ids_RG.shape[1], (outcome.rows_R, outcome.drafted_counts_R, outcome.accepted_R)
        policy.record(width, *rows, seconds)
        return self._committed(loop, outcome)

    def _committed(self, loop: BlockLoop, outcome: BlockOutcome) -> tuple[list[Event], list[int]]:
        """Append a block to the responses. Returns its events and the rows that are free because their response ended."""
        gate, now = self.gate, time.perf_counter() if outcome.ended is None else outcome.ended
        known_ids = vocab_rows(self.target) if gate is not None else 0
        events, freed = [], []
        for row, seat in enumerate(self.seats):
            if seat is None or not outcome.rows_R[row]:
                continue
            response = seat.response
            before = len(response.response_ids)
            if self.log is not None:
                _log_block(self.log, loop, outcome, row, response)
            ids, text = append_block(response, outcome, row, self.settings, seat.stream, gate, known_ids)
            whole = gate is None or ids == outcome.ids_RG1[row, : int(outcome.accepted_R[row]) + 1].tolist()
            if response.finish_reason is None and not whole:
                loop.rewind(row, len(response.prompt_ids) + before + len(ids), ids[-1])
            response.commit_seconds.append(now - seat.seated)
            response.commit_sizes.append(len(ids))
            if response.finish_reason is not None:
                if seat.stream is not None:
                    text += seat.stream.finish()
                    response.text = seat.stream.text
                loop.leave(row)
                self.seats[row] = None
                freed.append(row)
            events.append(Event(seat.index, ids, text, response.finish_reason, response))
        self.timing.total_seconds = time.perf_counter() - self.began
        return events, freed


def _log_block(log: ProposalLog, loop: BlockLoop, outcome: BlockOutcome, row: int, response: Response) -> None:
    count, accepted = int(outcome.drafted_counts_R[row]), int(outcome.accepted_R[row])
    if count == 0:
        return
    both = outcome.target_probs_RG, outcome.draft_probs_RG
    target_probs, draft_probs = (None if own_RG is None else own_RG[row, :count] for own_RG in both)
    ids, position = outcome.drafted_ids_RG[row, :count], len(response.response_ids)
    names = loop.drafter.source_names if loop.drafter is not None else ("",)
    source = names[0 if outcome.sources_R is None else int(outcome.sources_R[row])]
    log.add(response.key, response.blocks, position, ids, accepted, target_probs, draft_probs, source)
