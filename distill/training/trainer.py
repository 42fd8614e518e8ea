"""The training loop: steps and checkpoints. Judging happens elsewhere.

Legend: R response tokens of a micro-batch.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.filesize import decimal
from torch import Tensor

from data.batches.collate import Batch
from distill.config.layout import ADAPTER, PROGRESS, STATE, STUDENT, step_folder
from distill.faults import Interrupt, Interrupted
from distill.run import checkpoint
from distill.run.run import Run
from distill.training import sharding
from distill.training.batches import BatchSource
from distill.training.module import DraftModule
from distill.training.optim import SpikeGuard, make_optimizers, make_schedules
from distill.training.teacher import TeacherSource
from distill.training.tracking import Metrics
from speculative.decoder.responses import StageClock
from speculative.engine.memory import peak_bytes
from speculative.errors import UserError
from speculative.progress import phase

# Consecutive skipped updates after which the run stops, because it is no longer a spike.
MOST_SKIPS = 20
FORECAST = 20  # steps of a start after which the time that is left is printed, by the later half of them
# Stages of a step. data: micro-batches, and rollouts when they are due. teacher: the target's layers, or reading its store.
# student: the draft's layers, forward and backward. loss: the head products of both models and the divergence.
STAGES = ("data", "teacher", "student", "loss", "optimizer")


class NotFinite(UserError):
    """Loss or gradient is nan or infinite; the update was not applied."""


@dataclass(frozen=True)
class Checkpoint:
    """The draft at a step. ``folder`` has it and everything a resumed run needs; None for an evaluation between two checkpoints.

    ``draft``: all ranks call it. The draft with all of its weights, in eval mode; with ``everywhere=False`` on the main process only,
    None elsewhere.
    """

    step: int
    folder: Path | None
    draft: Callable[..., DraftModule | None]


class StepResult(NamedTuple):
    """One optimizer step: means over all response tokens of all ranks.

    `alpha` estimates the draft's acceptance on this batch at the serving settings. With a stored signal it can be too low by
    `alpha_slack`. `positions` counts all tokens that the draft processed, with prompts, without padding and without `masks`,
    the mask tokens of a parallel draft.
    """

    loss: float
    alpha: float
    tokens: int
    grad_norm: float
    lr: float
    alpha_slack: float
    skipped: bool
    positions: int
    masks: int
    seconds: dict[str, float]


class Trainer:
    """Train a `DraftModule` on micro-batches, from the current step of its run."""

    def __init__(
        self,
        run: Run,
        module: DraftModule,
        teacher: TeacherSource | None,
        batches: BatchSource,
        tokenizer: Any,
        provenance: Mapping[str, Any],
    ) -> None:
        """Prepare the module and optimizers with Accelerate, and load the last checkpoint if the run has one."""
        run.wait()  # Ranks take different times to make students and load the target.
        config, accelerator = run.config, run.accelerator
        self.run, self.config, self.accelerator, self.progress = run, config, accelerator, run.progress
        self.teacher, self.batches = teacher, batches
        self.tokenizer, self.provenance = tokenizer, provenance
        optimizers = make_optimizers(module, config.optim)
        self.wrapped, self.optimizers = sharding.prepare(accelerator, module, optimizers)
        self.schedulers = make_schedules(optimizers, config.optim, config.train.steps)
        self.spikes = SpikeGuard()
        self.survival = self.module.survival
        survival = [self.survival] if self.survival is not None else []
        accelerator.register_for_checkpointing(*self.schedulers, self.spikes, *survival)
        self.clock = self.module.clock = StageClock(accelerator.device)
        self.metrics = Metrics(run.folder, accelerator, bool(config.tracking.trackers))
        state = step_folder(run.folder, self.progress.step) / STATE
        if run.seen(state.exists):
            sharding.load_state(accelerator, self.wrapped, self.optimizers, state)
        self.metrics.cut_after(self.progress.step)

    @property
    def module(self) -> DraftModule:
        """The module without Accelerate's wrapper, for saving and judging. Training must go through the wrapper."""
        return self.accelerator.unwrap_model(self.wrapped)

    def fit(self) -> Iterator[Checkpoint]:
        """Train to the last step. Yields each checkpoint when it is written, the first before any step, and evaluations between them.

        Random numbers drawn by the caller while it holds a checkpoint do not affect training.

        Raises NotFinite: before the update; the message has the last good checkpoint. Raises Interrupted: Ctrl-C, after a checkpoint was
        written.
        """
        interrupt, train, every, halfway = Interrupt(), self.config.train, self.config.judge.replay_every, 0.0
        word = "distil" if self.teacher else "train"
        try:
            if self._is_due():  # otherwise the run resumes from an interrupt's checkpoint
                yield from self._held(self.save())
            with phase(word, train.steps, self.progress.step) as shown:
                while self.progress.step < train.steps:
                    shown.facts = self._one_step()
                    shown.advance()
                    if shown.fresh == FORECAST // 2:
                        halfway = self.progress.seconds["train"]
                    if shown.fresh == FORECAST < train.steps:
                        self._forecast((self.progress.seconds["train"] - halfway) / (FORECAST - FORECAST // 2))
                    if not (stop := self._any_rank(interrupt.requested)) and self._is_due():
                        yield from self._held(self.save())
                        stop = self._any_rank(interrupt.requested)
                    if every and self.progress.step % every == 0 and not self._is_due():
                        yield from self._held(None)
                    if stop:
                        folder = self.save()  # Not judged first: a launcher waits 30 s.
                        raise Interrupted(f"checkpoint {folder} is saved; run the same command to continue from it")
        finally:
            interrupt.restore()

    def _forecast(self, step: float) -> None:
        """Print how long the rest takes at so many seconds a step, and as long for each judgement as before."""
        left = self.config.train.steps - self.progress.step
        judged, every = len(self.run.seen(lambda: checkpoint.judged_scores(self.run.folder))), self.config.judge.every
        judgement = self.progress.seconds.get("judge", 0.0) / max(1, judged)
        due = -(-self.config.train.steps // every) - self.progress.step // every
        spent = timedelta(seconds=round(left * step + due * judgement))
        self.run.say(
            f"after {FORECAST} steps: {spent} left, for {left:,} steps of {step:.2g} s and {due} judgements of "
            f"{timedelta(seconds=round(judgement))}, then the verdict; "
            f"peak memory with activations: {decimal(peak_bytes(self.accelerator.device))}"
        )

    def _held(self, folder: Path | None) -> Iterator[Checkpoint]:
        device = self.accelerator.device  # without a list torch would initialise every GPU in every rank
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.wrapped.eval()
            yield Checkpoint(self.progress.step, folder, self._draft)

    def _draft(self, everywhere: bool = True) -> DraftModule | None:
        return sharding.full_module(self.accelerator, self.wrapped, self.module, everywhere)

    def _one_step(self) -> str:
        """Run the next step and record it; returns the text for the progress line."""
        started = time.perf_counter()
        self.clock.start()
        result = self.step(self.micro_batches(self.progress.step))
        elapsed = time.perf_counter() - started
        self.progress.step += 1
        self.progress.tokens_seen += result.tokens
        self.progress.spend("train", elapsed)
        for stage, seconds in result.seconds.items():
            self.progress.spend(f"train/{stage}", seconds)
        return self._record(result, elapsed)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step. They depend on the step and its stored rollouts only."""
        return self.batches.micro_batches(step, lambda: cast(DraftModule, self._draft()).exported())

    def step(self, window: Sequence[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches.

        The number of valid tokens of all ranks is known before the first backward. Each micro-batch backpropagates its
        summed loss x ranks / that number, because DDP averages gradients over ranks.

        Raises NotFinite: loss or gradient norm is nan or infinite; weights and optimizer are as before the step.
        """
        accelerator = self.accelerator
        self._set_objective()
        counts = torch.tensor([(b.response_tokens, b.positions, b.masks) for b in window]).sum(0)
        tokens, positions, masks = accelerator.reduce(counts.to(accelerator.device)).tolist()
        # Loss, overlap, slack and gradient norm. They are reduced so that all ranks decide alike in spite of rounding.
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        self.wrapped.train()
        self.clock.mark("data")
        for index, batch in enumerate(window):
            sums[:3] += self._accumulate(batch, tokens, last=index == len(window) - 1)
        sums[3] = self.clip_gradients()
        *totals, norms = accelerator.reduce(sums).tolist()
        mean_loss, mean_overlap, mean_slack = (total / max(tokens, 1) for total in totals)
        grad_norm = norms / accelerator.num_processes
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            self.wrapped.zero_grad(set_to_none=True)
            raise NotFinite(
                f"step {self.progress.step + 1}: loss {mean_loss:g}, gradient norm {grad_norm:g}; stopped before the update; "
                f"{checkpoint.last_good(self.run.folder)}; start another run (set name) with a lower optim.lr "
                f"(now {float(self.schedulers[0].base_lrs[0]):g})"
            )
        # Some optimizers keep their learning rate as a tensor.
        lr, skipped = float(self.schedulers[0].get_last_lr()[0]), self.spikes.is_spike(grad_norm)
        if self.survival is not None:
            self.survival.settle(accelerator.reduce(self.survival.seen_2J.to(accelerator.device)))
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            if not skipped:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if skipped:
            self._note_skip(grad_norm)
        self.clock.mark("optimizer")
        seconds = dict.fromkeys(STAGES, 0.0) | self.clock.seconds()
        return StepResult(
            mean_loss, mean_overlap, tokens, grad_norm, lr, mean_slack, skipped, positions, masks, seconds
        )

    def _accumulate(self, batch: Batch, tokens: int, last: bool) -> Tensor:
        """Add a micro-batch's gradient; returns summed loss, overlap and slack (3,). ``last``: ranks exchange gradients after it."""
        accelerator = self.accelerator
        batch = batch.to(accelerator.device)
        signal = self.teacher.signal(batch) if self.teacher else None
        self.clock.mark("teacher")
        with contextlib.nullcontext() if last else accelerator.no_sync(self.wrapped):
            # DDP's wrapper applies autocast itself, FSDP2's units do not.
            with accelerator.autocast() if accelerator.is_fsdp2 else contextlib.nullcontext():
                loss, overlap, slack = self.wrapped(batch, signal)
            accelerator.backward(loss * (accelerator.num_processes / max(tokens, 1)))
            self.clock.mark("student")
        return torch.stack([loss.detach().double(), overlap.double(), slack.double()])

    def clip_gradients(self) -> float:
        """Norm of the whole gradient before clipping it to `optim.max_grad_norm`. All ranks call it."""
        most = self.config.optim.max_grad_norm
        return float(sharding.whole(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), most)))

    def _set_objective(self) -> None:
        step = self.progress.step
        weights = self.config.loss_weights(step)
        if step and self.config.loss_weights(step - 1) != weights:
            self.spikes.forget()
        if self.module.objective.weights != weights:
            self.module.objective = dataclasses.replace(self.module.objective, weights=weights)

    def _note_skip(self, grad_norm: float) -> None:
        """Print that an update was skipped; raise NotFinite after `MOST_SKIPS` of them in a row."""
        step, median = self.progress.step + 1, self.spikes.median()
        if self.run.main:
            print(
                f"step {step}: gradient norm {grad_norm:.3g} is {grad_norm / max(median, 1e-30):.0f} times the recent median; "
                "update skipped",
                file=sys.stderr,
            )
        if self.spikes.skipped_in_a_row >= MOST_SKIPS:
            raise NotFinite(
                f"step {step}: {MOST_SKIPS} updates skipped in a row, gradient norm {grad_norm:.3g}, recent median {median:.3g}; "
                f"{checkpoint.last_good(self.run.folder)}; start another run (set name) with a lower optim.lr"
            )

    def _record(self, result: StepResult, elapsed: float) -> str:
        """Write the metrics of a step; returns the text for the progress line."""
        device = self.accelerator.device
        values: dict[str, Any] = {"loss": result.loss}
        if self.teacher is not None:
            values["alpha_train"] = result.alpha
            if result.alpha_slack:
                values["alpha_slack"] = result.alpha_slack
        values |= {name: getattr(result, name) for name in ("lr", "grad_norm", "tokens")}
        values |= {"tokens_seen": self.progress.tokens_seen, "tokens_per_second": round(result.tokens / elapsed, 1)}
        if self.survival is not None:
            values["masks"] = result.masks
            values |= {f"survival/{place}": round(kept, 5) for place, kept in enumerate(self.survival.kept_J, 1)}
        if result.skipped:
            values["skipped"] = True
        values["seconds"] = {stage: round(seconds, 5) for stage, seconds in result.seconds.items()}
        values["peak_memory_mib"] = round(peak_bytes(device) / 2**20, 1)
        self.metrics.write(self.progress.step, values)
        alpha = f" alpha {result.alpha:.3f}" if self.teacher else ""
        return f"loss {result.loss:.3f}{alpha} {result.tokens / elapsed:,.0f} tok/s"

    def _is_due(self) -> bool:
        return self.progress.step % self.config.judge.every == 0 or self.progress.step == self.config.train.steps

    def save(self) -> Path:
        """Write the checkpoint of this step unless it exists; returns its folder."""
        folder = step_folder(self.run.folder, self.progress.step)
        if self.run.seen((folder / PROGRESS).exists):
            return folder
        draft = self._draft(everywhere=False)
        # Adapters are merged into a copy, so every checkpoint holds an ordinary model.
        students: dict[str, Any] = {} if draft is None else {STUDENT: draft.exported()}
        if draft is not None and self.progress.step and (adapter := draft.adapter()) is not None:
            students[ADAPTER] = adapter
        checkpoint.save_checkpoint(self.run, students, self.tokenizer, self.provenance)
        if self.run.main:
            checkpoint.prune_states(self.run.folder)
        return folder

    def _any_rank(self, flag: bool) -> bool:
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.accelerator.device)).item())
