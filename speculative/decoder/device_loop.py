"""The block loop with its text on the device: a block is one recorded launch, and the host reads it one block later.

Shapes: R rows of the batch, G drafted tokens of a block, G1 = G + 1, C columns of the token buffer, L response positions,
U uniforms of a block, V vocabulary.

The whole block is recorded: the draft's catch-up and its G steps with sampling, the verify call, the rule, and the commit into
the device's token buffer, where the next block continues. So block k + 1 is launched before block k is read, nothing is uploaded
between admissions, and the device never waits for the host. If a response ends in block k, its row still runs in block k + 1 and
that result is discarded. A row at its budget does not advance.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.decoder.block_loop import BlockLoop, Layout, in_step_mode, layout_of, outcome_of, packed, unpacked
from speculative.decoder.compiled_loop import CompiledLoop
from speculative.decoder.decision import decide
from speculative.decoder.responses import BlockOutcome, DecodeSettings, Prompt, StageClock
from speculative.drafters.drafter import DeviceText, Drafter, ModelDrafter, Proposal
from speculative.engine.cached_model import CachedModel, upload
from speculative.engine.models import devices_of, is_recurrent
from speculative.engine.runners import COMPILED, RECORDED, GraphRunner
from speculative.engine.survey import surveyed
from speculative.rules.sampling import DRAFT_UNIFORM


class _Block(NamedTuple):
    """Results of a launch, on the device. checked_RN: the largest logits at positions that depend on committed text only."""

    checked_RN: torch.Tensor
    packed: torch.Tensor


class _Recorded:
    """Blocks of one kind on one pair of caches: their text buffers and their recordings."""

    def __init__(self, runner: GraphRunner, rows: int, columns: int, uniforms: int, device: torch.device) -> None:
        self.runner = runner
        ones_R = torch.ones(rows, dtype=torch.int64, device=device)
        self.text = DeviceText(
            torch.zeros((rows, columns), dtype=torch.int64, device=device),
            ones_R,
            ones_R.clone(),
            ones_R.clone(),
            torch.zeros((rows, columns, uniforms), dtype=torch.float64, device=device) if uniforms else None,
        )
        self.layout: Layout = ()


class _Flight(NamedTuple):
    """A block that was launched but not read: the requests in its rows, its copy to the host, and the event of its arrival."""

    seatings_R: np.ndarray
    host: torch.Tensor
    clock: StageClock
    recording_seconds: float


class DeviceLoop(BlockLoop):
    """A `BlockLoop` for a fixed gamma, a draft that proposes on the device (or none), no tree and no logits rules."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        rows: int,
        longest: int,
        settings: DecodeSettings,
        **options: Any,
    ):
        """See `BlockLoop`. `exact_stages`: a block is two launches, drafting and the rest, with a wait after each."""
        super().__init__(target, drafter, rows, longest, settings, **options)
        cached = self.target
        assert isinstance(cached, CachedModel)
        self._own, drafts = cached, drafter.cached if isinstance(drafter, ModelDrafter) else None
        sampled = not settings.sampling.greedy
        uniforms = 3 * (settings.gamma + 1) if sampled else 0
        # One model may be used by several drafters.
        kind = (type(drafter), settings.gamma, settings.rule, settings.sampling, self._keep_probs)
        recorded = cached.memory.blocks_with(drafts.memory if isinstance(drafts, CachedModel) else None)
        if kind not in recorded:
            runner_of_blocks = cached.memory.another_runner()
            assert isinstance(runner_of_blocks, GraphRunner)
            recorded[kind] = _Recorded(runner_of_blocks, rows, cached.cache.place.capacity, uniforms, cached.device)
        self._blocks: _Recorded = recorded[kind]
        self._text = self._blocks.text
        for lengths_R in (self._text.lengths_R, self._text.prompt_lengths_R, self._text.limits_R):
            lengths_R.fill_(1)
        self._seatings_R = np.zeros(rows, dtype=np.int64)  # Number of requests the row has had.
        self._flight: _Flight | None = None

    @staticmethod
    def serves(target: PreTrainedModel, drafter: Drafter | None, settings: DecodeSettings, runner: str) -> bool:
        """Whether this loop supports these settings."""
        if runner not in RECORDED or settings.tree is not None or settings.active_rules is not None:
            return False
        if is_recurrent(target) or len(devices_of(target)) > 1:
            return False
        # A subclass may propose differently, so each class sets `on_device` itself.
        return drafter is None or (
            bool(vars(type(drafter)).get("on_device"))
            and drafter.model is not None
            and not is_recurrent(drafter.model)
            and devices_of(drafter.model) == [target.device]
        )

    @in_step_mode
    def admit(self, rows: Sequence[int], prompts: Sequence[Prompt], budgets: Sequence[int] | None = None) -> None:
        if self._flight is not None:
            self._wait()  # Its time must not count as prefill.
        super().admit(rows, prompts, budgets)
        places = list(rows)
        self._seatings_R[places] += 1
        longest = int(self.lengths_R[places].max())
        rows_K = upload(np.array(places), self._device)
        text = self._text
        text.tokens_RC[:, :longest].index_copy_(0, rows_K, upload(self.tokens_RC[places, :longest], self._device))
        for on_device_R, own_R in (
            (text.lengths_R, self.lengths_R),
            (text.prompt_lengths_R, self.prompt_lengths_R),
            (text.limits_R, self.limits_R),
        ):
            on_device_R.index_copy_(0, rows_K, upload(own_R[places], self._device))
        if text.uniforms_RLU is not None:
            known = min(text.uniforms_RLU.shape[1], self._uniforms_RLG1U.shape[1])
            numbers = upload(self._uniforms_RLG1U[places, :known], self._device)
            text.uniforms_RLU[:, :known].index_copy_(0, rows_K, numbers.flatten(2))

    def leave(self, row: int) -> None:
        super().leave(row)
        self._seatings_R[row] += 1

    def rewind(self, row: int, length: int, last_id: int) -> None:
        raise AssertionError("a text on the device is not rewound")

    def keep(self, rows: list[int]) -> None:
        raise AssertionError("a recording knows its rows by address: they stay")

    def close(self, reusable: bool = True) -> None:
        if self._flight is not None:
            self._wait()  # The next call must not wait for a discarded block.
            self._book_recording(self._flight)
        self._flight = None
        super().close(reusable)

    @in_step_mode
    def run_block(self, gamma: int | None = None) -> BlockOutcome:
        """Read the next block; the one after it is already launched. Raises UserError on NaN or infinite logits."""
        assert gamma in (None, self.settings.gamma)
        flight = self._flight
        if flight is None or not self._seated(flight).any():
            if flight is not None:
                self._book_recording(flight)
            flight = self._launch(in_flight=False)
        # If every row ends with the block in flight, no further block is launched.
        ends_R = self.lengths_R + 1 >= self.limits_R
        self._flight = None if ends_R[self.active_R].all() else self._launch(in_flight=True)
        return self._land(flight)

    def _seated(self, flight: _Flight) -> np.ndarray:
        """Rows (R,) that still hold the same request as when the block was launched."""
        return self.active_R & (flight.seatings_R == self._seatings_R)

    def _launch(self, in_flight: bool) -> _Flight:
        """in_flight: the previous block was not read yet, so rows may be longer by the tokens it commits."""
        gamma = self.settings.gamma
        furthest_R = np.minimum(self.lengths_R + (gamma + 1 if in_flight else 0), self.limits_R)
        stop, fewest = int(furthest_R[self.active_R].max()) + gamma, 1
        if isinstance(self.drafter, ModelDrafter):
            fewest = self.drafter.fewest(gamma)
            # A text shorter than the tokens a block reads is read from its first token.
            stop = max(stop, fewest + gamma)
        shortest = fewest if int(self.lengths_R[self.active_R].min()) >= fewest else 1
        runner, prefixes = self._blocks.runner, self._prefixes(stop)
        recorded, stage = runner.recordings, "verify" if self._exact_stages else "block"
        if not self._exact_stages and not runner.knows((stage, prefixes, shortest)):
            self._wait()  # The recording time must not include the previous block.
        began, proposal = time.perf_counter(), None
        clock = StageClock(self._device, self._exact_stages)
        if self._exact_stages:
            proposal = Proposal(self._text.tokens_RC[:, :0])
            if gamma > 0:
                key = ("draft", prefixes, shortest)
                proposal = runner.launch(key, lambda: self._draft(prefixes, shortest), (), _checked_peaks)
            clock.mark("draft")
        block = runner.launch(
            (stage, prefixes, shortest),
            lambda: self._verify(proposal or self._draft(prefixes, shortest), prefixes),
            (self._text.tokens_RC, self._text.lengths_R),
            lambda block: block.checked_RN,
        )
        host = _on_the_way(block)
        clock.mark(stage)
        seconds = time.perf_counter() - began if runner.recordings > recorded else 0.0
        return _Flight(self._seatings_R.copy(), host, clock, seconds)

    def _prefixes(self, stop: int) -> tuple[int, int]:
        """Number of cache positions that the target's and the draft's calls read."""
        cached = [self._own, *([self.drafter.cached] if isinstance(self.drafter, ModelDrafter) else [])]
        sizes = [one.static_prefix(stop) for one in cached if isinstance(one, CachedModel)]
        return sizes[0], sizes[-1]

    def _draft(self, prefixes: tuple[int, int], shortest: int) -> Proposal:
        text, gamma = self._text, self.settings.gamma
        if not isinstance(self.drafter, ModelDrafter):
            return Proposal(text.tokens_RC[:, :0])  # Plain decoding.
        uniforms = self._uniforms_of_block()
        if uniforms is not None:
            uniforms = uniforms[:, :gamma, DRAFT_UNIFORM : DRAFT_UNIFORM + 1]
        return self.drafter.propose_on_device(text, gamma, self.draft_sampling, uniforms, prefixes[1], shortest)

    def _verify(self, proposal: Proposal, prefixes: tuple[int, int]) -> _Block:
        """The target's call, the rule and the commit."""
        text, width = self._text, self.settings.gamma + 1
        lengths_R1 = text.lengths_R.unsqueeze(1)
        places_G1 = self._own.memory.positions_C[:width]
        positions_RG1 = lengths_R1 - 1 + places_G1
        fed_ids = torch.cat((text.tokens_RC.gather(1, lengths_R1 - 1), proposal.ids_RG), 1)
        logits = self._own.feed_static(fed_ids, positions_RG1, prefixes[0], width)
        decision = decide(logits, proposal, self._uniforms_of_block(), self.settings)
        text.tokens_RC.scatter_(1, positions_RG1 + 1, decision.ids_RG1)
        grown_R = torch.minimum(text.lengths_R + decision.accepted_R + 1, text.limits_R)
        wanted = self._wanted(decision, logits, proposal)
        self._blocks.layout = layout_of(wanted)
        checked_RN = logits[:, 0].float().amax(-1, keepdim=True)
        if proposal.peaks_RG is not None:
            checked_RN = torch.cat((checked_RN, proposal.peaks_RG[:, :1].float()), 1)
        block = _Block(checked_RN, packed(wanted))
        text.lengths_R.copy_(grown_R)
        return block

    def _uniforms_of_block(self) -> torch.Tensor | None:
        """This block's uniforms (R, G1, 3) by the response position of its first token."""
        text = self._text
        if text.uniforms_RLU is None:
            return None
        rows, _, columns = text.uniforms_RLU.shape
        first_R11 = (text.lengths_R - text.prompt_lengths_R)[:, None, None]
        return text.uniforms_RLU.gather(1, first_R11.expand(-1, 1, columns)).view(rows, -1, 3)

    def _land(self, flight: _Flight) -> BlockOutcome:
        """Wait for a block. This is the only wait for the device."""
        spent = flight.clock.seconds()
        self.timing.target_calls += 1
        if not self._book_recording(flight):
            self.timing.block_seconds += spent.get("block", 0.0)
            self.timing.draft_seconds += spent.get("draft", 0.0)
            self.timing.verify_seconds += spent.get("verify", 0.0)
        rows_R = self._seated(flight)
        host = unpacked(flight.host.numpy(), self._blocks.layout)
        self._refuse_non_finite(host, rows_R)
        outcome = outcome_of(host, rows_R)
        grown_R = np.minimum(self.lengths_R + outcome.accepted_R + 1, self.limits_R)
        self.lengths_R = np.where(rows_R, grown_R, self.lengths_R)
        return outcome

    def _book_recording(self, flight: _Flight) -> bool:
        """Whether the launch made a recording first; then its time is not a block time."""
        self.timing.recording_seconds += flight.recording_seconds
        self.timing.recording_calls += flight.recording_seconds > 0.0
        return flight.recording_seconds > 0.0

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def open_loop(
    target: PreTrainedModel,
    drafter: Drafter | None,
    rows: int,
    longest: int,
    settings: DecodeSettings,
    *,
    runner: str,
    reads_each_block: bool = False,
    **options: bool,
) -> BlockLoop:
    """Return the loop for these settings. `reads_each_block`: the host must see each block before the next one starts."""
    on_device = not reads_each_block and DeviceLoop.serves(target, drafter, settings, runner)
    kind = DeviceLoop if on_device else CompiledLoop if runner == COMPILED else BlockLoop
    with surveyed():
        return kind(target, drafter, rows, longest, settings, runner=runner, **options)


def _on_the_way(block: _Block) -> torch.Tensor:
    """The block's numbers on the host once the clock's next mark is reached: an asynchronous copy into pinned memory."""
    return block.packed.to("cpu", non_blocking=True, copy=True)


def _checked_peaks(proposal: Proposal) -> torch.Tensor:
    assert proposal.peaks_RG is not None
    return proposal.peaks_RG[:, :1]
