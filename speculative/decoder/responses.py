"""Settings, responses and timing of a decoding run, and how a block is appended token by token, as in plain decoding.

Shapes: R rows of the batch, G drafted tokens of a block, G1 = G + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from speculative.decoder.text import TextStream
from speculative.errors import UserError
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree
from speculative.rules.verify import draft_settings_for

Prompt = tuple[str, Sequence[int]]  # key, token ids

# end: an end token; stop: a stop string; length: the budget; gate: the commit gate ended the response.
FinishReason = Literal["end", "stop", "length", "gate"]


@dataclass(frozen=True)
class DecodeSettings:
    """How to decode. `gamma` 0 is plain decoding; `eos_ids` end a response and are part of it. fit_context: shorten a response's budget to
    the context that its prompt leaves, instead of refusing the prompt. tree: a token tree instead of a chain; gamma is then its depth.
    rules: changes to the logits of both models. stop: strings that end a response (needs a tokenizer). min_tokens: no end token before
    this many tokens. At temperature 0 the rule becomes `greedy`.

    Raises UserError for a value outside its range and for a rule that contradicts the temperature or the tree.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    gamma: int = 0
    rule: Rule = field(default=Rule.named("sample"))
    max_tokens: int = 256
    eos_ids: tuple[int, ...] = ()
    seed: int = 0
    tree: TokenTree | None = None
    rules: LogitsRules | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    fit_context: bool = False

    def __post_init__(self) -> None:
        for name in ("gamma", "max_tokens", "min_tokens", "seed"):
            if type(getattr(self, name)) is not int:
                raise UserError(f"{name} = {getattr(self, name)!r}: must be a whole number")
        for name in ("eos_ids", "stop"):
            if isinstance(getattr(self, name), str) or not isinstance(getattr(self, name), Sequence):
                raise UserError(f"{name} = {getattr(self, name)!r}: must be a tuple")
        if self.gamma < 0:
            raise UserError(f"gamma = {self.gamma}: must be 0 (plain decoding) or a positive number of drafted tokens")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens = {self.max_tokens}: must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UserError(f"min_tokens = {self.min_tokens}: must be between 0 and max_tokens = {self.max_tokens}")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise UserError(f"stop has {string!r}: every stop string needs at least one character")
        draft_settings_for(self.rule, self.sampling)
        if self.rule.joint and self.sampling.greedy:
            raise UserError("rule = 'block' needs sampling: at temperature 0 use rule 'greedy'")
        object.__setattr__(self, "rule", self.rule.at(self.sampling.temperature))
        if self.tree and not self.rule.lossless:
            raise UserError(f"lenience = {self.rule.lenience}: does not support token trees; remove the tree")
        if self.tree is not None:
            if self.gamma not in (0, self.tree.depth):
                raise UserError(f"gamma = {self.gamma} with a tree of depth {self.tree.depth}: they must be equal")
            if self.rule.joint:
                raise UserError("rule = 'block' does not support token trees: remove the tree, or use rule 'sample'")
            if self.active_rules is not None:
                raise UserError("logits rules with a token tree are not supported: use a chain (no tree)")

    def under(self, rule: Rule, gamma: int) -> DecodeSettings:
        """These settings for `gamma` drafted tokens a block under an engine rule; `greedy` decodes at temperature 0."""
        return replace(self, sampling=GREEDY if rule.greedy else self.sampling, rule=rule, gamma=gamma)

    def at_temperature_0(self, gamma: int = 0) -> DecodeSettings:
        """These settings with both models' argmax, by default without a draft."""
        return self.under(Rule.usual(0), gamma)

    @property
    def active_rules(self) -> LogitsRules | None:
        """The logits rules including `min_tokens`; None if nothing changes the logits."""
        rules = self.rules or LogitsRules()
        if self.min_tokens > 0 and self.eos_ids:
            end_ids = tuple(dict.fromkeys((*self.eos_ids, *rules.eos_ids)))
            rules = replace(rules, min_tokens=max(rules.min_tokens, self.min_tokens), eos_ids=end_ids)
        return rules if rules.active else None


class GateRecord(NamedTuple):
    """One call of a commit gate: response position, token, and answer (`keep`, `stop` or the id of the replacement)."""

    position: int
    token_id: int
    answer: str


@dataclass
class Response:
    """One decoded response and what happened to the drafted tokens in it.

    budget: maximum number of tokens. log_target_probs: log target probability of each token under the sampling settings (0.0 when greedy,
    NaN for a token from the gate). drafted_counts, accepted_counts: per block, *before* the end token or the budget cut the last block;
    sources: who drafted them, an index into the drafter's `source_names`.
    proposed_mask: per response token, 1 for an accepted drafted token, 0 for the target's own. tested: positions at which a drafted token
    was tested. commit_seconds: when each block was committed, from the moment the prompt got its row; commit_sizes: its tokens. text:
    decoded, cut before a stop string; None when no tokenizer was given.
    """

    key: str
    prompt_ids: list[int]
    budget: int = 0
    response_ids: list[int] = field(default_factory=list)
    log_target_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    blocks: int = 0
    drafted_counts: list[int] = field(default_factory=list)
    accepted_counts: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    proposed_mask: list[int] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)
    commit_sizes: list[int] = field(default_factory=list)
    text: str | None = None
    gate_log: list[GateRecord] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the response ended by itself (end token, stop string, gate) and not at its budget."""
        return self.finish_reason not in (None, "length")


@dataclass
class Timing:
    """Seconds by stage, summed over blocks. `host_seconds` is the rest, including the time that the reader of a stream spends between
    events. On CUDA these are device times (events); they include host time while the device waits for the host.

    recording: blocks in which a model call was compiled or captured, block: those that ran as one launch; they count in no other stage.
    draft, verify: the models' calls with their sampling; accept: the rule and the transfer to the host.
    """

    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    block_seconds: float = 0.0
    recording_seconds: float = 0.0
    total_seconds: float = 0.0
    target_calls: int = 0
    recording_calls: int = 0
    peak_bytes: int = 0

    @property
    def decoding_seconds(self) -> float:
        """Of all blocks: draft, verify, accept, and those that ran as one launch."""
        return self.draft_seconds + self.verify_seconds + self.accept_seconds + self.block_seconds

    @property
    def host_seconds(self) -> float:
        return max(0.0, self.total_seconds - self.prefill_seconds - self.recording_seconds - self.decoding_seconds)


class StageClock:
    """Adds the time since the last `mark` (or the start) to a stage: by CUDA events, so nothing waits, or the wall clock on a CPU. With
    `exact` every mark waits for the device and reads the wall clock.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        """Start at once."""
        self._device, self._exact = device, exact and device.type == "cuda"
        self._by_events = device.type == "cuda" and not exact
        self.start()

    def start(self) -> None:
        """Reset and start again."""
        self._stages: list[str] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._read()

    def mark(self, stage: str) -> None:
        """Assign the time since the last mark to a stage."""
        self._stages.append(stage)
        self._read()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage since the start; on CUDA it waits for the last mark."""
        if self._by_events:
            if not self._events[-1].query():
                self._events[-1].synchronize()
            between = [one.elapsed_time(two) / 1e3 for one, two in zip(self._events, self._events[1:], strict=False)]
        else:
            between = [two - one for one, two in zip(self._marks, self._marks[1:], strict=False)]
        spent = dict.fromkeys(self._stages, 0.0)
        for stage, seconds in zip(self._stages, between, strict=True):
            spent[stage] += seconds
        return spent

    def _read(self) -> None:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
            return
        if self._exact:
            torch.cuda.synchronize(self._device)
        self._marks.append(time.perf_counter())


class BlockOutcome(NamedTuple):
    """One block on the host. Only the first accepted + 1 entries of a row of `ids_RG1` and `log_probs_RG1` count. rows_R: whether the row
    was active; the entries of other rows are meaningless. drafted_counts_R: number of real drafted ids. sources_R: index of the drafter.
    Probabilities of the drafted ids are set if they were requested; log_probs_RG1 is None for greedy rules. ended: when it was committed
    (`time.perf_counter`), if before it was returned.
    """

    rows_R: np.ndarray
    accepted_R: np.ndarray
    ids_RG1: np.ndarray
    log_probs_RG1: np.ndarray | None
    drafted_counts_R: np.ndarray
    sources_R: np.ndarray | None
    drafted_ids_RG: np.ndarray
    target_probs_RG: np.ndarray | None
    draft_probs_RG: np.ndarray | None
    ended: float | None = None


class _Stop:
    """Answer of a commit gate: end the response before this token."""


STOP = _Stop()
# (key, response position, token id, response ids so far) -> None to keep, another id to replace it, or STOP.
CommitGate = Callable[[str, int, int, Sequence[int]], "int | _Stop | None"]


def append_block(
    response: Response,
    outcome: BlockOutcome,
    row: int,
    settings: DecodeSettings,
    stream: TextStream | None,
    gate: CommitGate | None,
    known_ids: int,
) -> tuple[list[int], str]:
    """Append a block token by token: the gate first, then end tokens, stop strings and the budget, as in plain decoding. Returns the
    appended ids and the text that became stable. `known_ids`: number of ids that a gate may answer.
    """
    accepted, drafted = int(outcome.accepted_R[row]), int(outcome.drafted_counts_R[row])
    response.blocks += 1
    response.drafted += drafted
    response.accepted += accepted
    response.drafted_counts.append(drafted)
    response.accepted_counts.append(accepted)
    response.sources.append(0 if outcome.sources_R is None else int(outcome.sources_R[row]))
    response.tested += min(accepted + 1, drafted)
    appended: list[int] = []
    pieces: list[str] = []
    replaced = False
    for token_id in outcome.ids_RG1[row, : accepted + 1].tolist():
        position = len(response.response_ids)
        if gate is not None:
            answer = gate(response.key, position, token_id, tuple(response.response_ids))
            if isinstance(answer, _Stop):
                response.gate_log.append(GateRecord(position, token_id, "stop"))
                response.finish_reason = "gate"
                break
            replaced = answer is not None and answer != token_id
            if answer is not None and (type(answer) is not int or not 0 <= answer < known_ids):
                raise UserError(
                    f"the commit gate returned {answer!r}: must be None (keep the token), an id 0..{known_ids - 1} "
                    "(replace it) or STOP"
                )
            response.gate_log.append(GateRecord(position, token_id, str(answer) if replaced else "keep"))
            token_id = token_id if answer is None else int(answer)
        response.response_ids.append(token_id)
        appended.append(token_id)
        if token_id in settings.eos_ids:
            response.finish_reason = "end"
        if stream is not None:
            pushed = stream.push(token_id)
            pieces.append(pushed.text)
            if pushed.stopped is not None and response.finish_reason is None:
                response.finish_reason = "stop"
        if response.finish_reason is None and len(response.response_ids) == response.budget:
            response.finish_reason = "length"
        # Tokens drafted after a replaced token belong to another text.
        if response.finish_reason is not None or replaced:
            break
    kept, log_probs_RG1 = len(appended), outcome.log_probs_RG1
    response.log_target_probs += [0.0] * kept if log_probs_RG1 is None else log_probs_RG1[row, :kept].tolist()
    response.proposed_mask += [1] * min(accepted, kept) + [0] * (kept - min(accepted, kept))
    if replaced:
        response.proposed_mask[-1] = 0
        response.log_target_probs[-1] = float("nan")  # The target did not score this token.
    return appended, "".join(pieces)
