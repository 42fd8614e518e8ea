"""The Accelerate loop: one exact step, checkpoints, judgements, early stop. It knows nothing of what is judged, or how.

Legend: R response tokens of a micro-batch.
"""

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as ProgressBar,
)
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from data.collate import Batch, Example, collate
from data.packing import batches_per_epoch, micro_batches, plan_epoch
from data.store import write_json
from distill import checkpoint
from distill.config import OptimConfig, RunConfig, TrainConfig
from distill.student import DraftModule
from distill.teacher import Teacher
from distill.tracking import Metrics
from speculative.errors import UserError


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the checkpoint was written."""


class NotFinite(UserError):
    """Loss or gradient is nan or infinite; the update was not made."""


class Validator(Protocol):
    """Judges a checkpoint. All ranks call it; the record is the same on each."""

    def __call__(self, step: int, module: DraftModule) -> dict[str, Any]:
        """A JSON-able record with at least `score`: higher is better."""
        ...

    def headline(self, record: dict[str, Any]) -> str:
        """The record in one line for the screen."""
        ...


@dataclass
class StepResult:
    """One optimizer step: means over all response tokens of all ranks."""

    loss: float
    alpha: float
    tokens: int
    grad_norm: float
    lr: float


class Interrupt:
    """Ctrl-C sets a flag that the loop reads between steps; a second one stops at once."""

    def __init__(self) -> None:
        """Takes the handlers over until `restore`."""
        self.requested = False
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step, with a checkpoint; once more stops at once", file=sys.stderr)

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Loop:
    """Trains a `DraftModule` on examples, from wherever its run stands."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        module: DraftModule,
        teacher: Teacher | None,
        examples: Sequence[Example],
        tokenizer: Any,
        validator: Validator,
        progress: checkpoint.Progress,
        provenance: dict[str, Any],
    ) -> None:
        """Prepares the module and optimizer with Accelerate and loads the last checkpoint, if the run has one.

        Raises:
            UserError: batch, micro-batch and number of ranks do not divide.
        """
        train = config.train
        check_batches(train, accelerator.num_processes)
        self.config, self.accelerator, self.teacher, self.examples = config, accelerator, teacher, examples
        self.tokenizer, self.validator, self.progress, self.provenance = tokenizer, validator, progress, provenance
        self.lengths = np.array([len(example.input_ids) for example in examples])
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.run = config.folder
        optimizers = make_optimizers(module, config.optim)
        self.wrapped, *self.optimizers = accelerator.prepare(module, *optimizers)
        self.schedulers = [
            get_cosine_with_min_lr_schedule_with_warmup(
                optimizer,
                num_warmup_steps=round(config.optim.warmup_ratio * train.steps),
                num_training_steps=train.steps,
                min_lr_rate=config.optim.final_lr_ratio,
            )
            for optimizer in optimizers
        ]
        accelerator.register_for_checkpointing(*self.schedulers)
        self.metrics = Metrics(self.run, accelerator, train.log_every, bool(config.tracking.trackers))
        if progress.step or (checkpoint.step_folder(self.run, 0) / "state").exists():
            accelerator.load_state(str(checkpoint.step_folder(self.run, progress.step) / "state"))
            self.metrics.cut_after(progress.step)

    @property
    def module(self) -> DraftModule:
        """The module without Accelerate's wrapper: to save and to judge, never to train through."""
        return self.accelerator.unwrap_model(self.wrapped)

    def fit(self) -> None:
        """Steps to the end (or to early stop), judging at step 0 and at every checkpoint.

        Raises:
            NotFinite: before the update; names the last good checkpoint.
            Interrupted: Ctrl-C, after a checkpoint was written.
        """
        interrupt = Interrupt()
        try:
            self._judge_if_due()
            with self._bar() as show:
                while self.progress.step < self.config.train.steps and not self._out_of_patience():
                    started = time.perf_counter()
                    result = self.step(self._micro_batches(self.progress.step))
                    elapsed = time.perf_counter() - started
                    self.progress.step += 1
                    self.progress.tokens_seen += result.tokens
                    self.progress.spend("train", elapsed)
                    self._record(result, result.tokens / elapsed, show)
                    self._judge_if_due()
                    if self._any_rank(interrupt.requested):
                        self._save()
                        raise Interrupted(str(checkpoint.step_folder(self.run, self.progress.step)))
        finally:
            interrupt.restore()

    def step(self, window: Sequence[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches.

        The number of valid tokens of all ranks is known before the first backward. Each micro-batch backpropagates its
        summed loss x ranks / that number: DDP averages gradients over ranks, the factor undoes it.

        Raises:
            NotFinite: loss or gradient norm is nan or infinite; weights and optimizer are as before the step.
        """
        accelerator = self.accelerator
        tokens = int(
            accelerator.reduce(torch.tensor(sum(b.labels_R.numel() for b in window), device=accelerator.device)).item()
        )
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        self.wrapped.train()
        for index, batch in enumerate(window):
            batch = batch.to(accelerator.device)
            last = index == len(window) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.wrapped):
                hidden_RD = self.teacher.hidden(batch) if self.teacher else None
                head = self.teacher.head if self.teacher else None
                loss, overlap = self.wrapped(batch.input_ids_BT, batch.rows_R, batch.labels_R, hidden_RD, head)
                accelerator.backward(loss * (accelerator.num_processes / max(tokens, 1)))
            sums += torch.stack([loss.detach().double(), overlap.double()])
        grad_norm = float(accelerator.clip_grad_norm_(self.wrapped.parameters(), self.config.optim.max_grad_norm))
        mean_loss, mean_overlap = (accelerator.reduce(sums) / max(tokens, 1)).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            self._refuse_update(mean_loss, grad_norm)
        lr = self.schedulers[0].get_last_lr()[0]
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return StepResult(mean_loss, mean_overlap, tokens, grad_norm, lr)

    def _refuse_update(self, loss: float, grad_norm: float) -> None:
        self.wrapped.zero_grad(set_to_none=True)
        steps = checkpoint.list_steps(self.run)
        good = f"last good checkpoint: {checkpoint.step_folder(self.run, steps[-1])}" if steps else "no checkpoint yet"
        raise NotFinite(
            f"step {self.progress.step + 1}: loss {loss:g}, gradient norm {grad_norm:g}; stopped before the update; {good}; "
            f"try a lower optim.lr (now {self.config.optim.lr:g})"
        )

    def _micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step: a function of the step alone."""
        train, accelerator = self.config.train, self.accelerator
        epoch, index = divmod(step, batches_per_epoch(len(self.examples), train.batch_size))
        if getattr(self, "_planned_epoch", None) != epoch:
            self._plan, self._planned_epoch = plan_epoch(self.lengths, train.batch_size, self.config.seed, epoch), epoch
        shares = micro_batches(
            self._plan[index], train.micro_batch_size, accelerator.process_index, accelerator.num_processes
        )
        return [collate([self.examples[i] for i in share], self.pad_id) for share in shares]

    def _record(self, result: StepResult, tokens_per_second: float, show: Callable[[StepResult, float], None]) -> None:
        values = {
            "loss": result.loss, "alpha_train": result.alpha, "lr": result.lr, "grad_norm": result.grad_norm,
            "tokens": result.tokens, "tokens_seen": self.progress.tokens_seen, "tokens_per_second": round(tokens_per_second, 1),
        }  # fmt: skip
        if self.teacher is None:
            del values["alpha_train"]
        self.metrics.write(self.progress.step, values)
        show(result, tokens_per_second)

    def _judge_if_due(self) -> None:
        """Checkpoint, then judge it; a checkpoint already judged is left alone (after a resume)."""
        step = self.progress.step
        if step % self.config.judge.every and step != self.config.train.steps:
            return  # an interrupt's checkpoint, met again after a resume
        folder = checkpoint.step_folder(self.run, step)
        self._save()
        record = self._judgement(folder / checkpoint.JUDGEMENT)
        flat = {f"judge/{key}": value for key, value in record.items() if isinstance(value, int | float)}
        self.metrics.write(step, flat, always=True)
        # From the files, not from memory: a kill between two writes cannot make them disagree.
        scores = checkpoint.judged_scores(self.run)
        self.progress.best_step, self.progress.best_score = max(scores, key=lambda item: item[1])
        self.progress.judged_without_gain = sum(step > self.progress.best_step for step, _ in scores)
        if self.accelerator.is_main_process:
            write_json(folder / checkpoint.PROGRESS, vars(self.progress))
            checkpoint.point_best(self.run, self.progress.best_step)
        self.accelerator.wait_for_everyone()

    def _judgement(self, path: Path) -> dict[str, Any]:
        """The record at ``path``, made first when there is none."""
        judged = path.exists()
        # All ranks have looked before the first of them can write it: else they would part ways here.
        self.accelerator.wait_for_everyone()
        if judged:
            return json.loads(path.read_text(encoding="utf-8"))
        started = time.perf_counter()
        self.wrapped.eval()
        # What the judge draws must not reach the training: after a resume the judgement is not repeated.
        with torch.random.fork_rng():
            record = self.validator(self.progress.step, self.module)
        self.progress.spend("judge", time.perf_counter() - started)
        if self.accelerator.is_main_process:
            write_json(path, record)
            self.accelerator.print(self.validator.headline(record))
        self.accelerator.wait_for_everyone()
        return record

    def _save(self) -> None:
        """Writes the checkpoint of this step, unless it is there."""
        if (checkpoint.step_folder(self.run, self.progress.step) / checkpoint.PROGRESS).exists():
            return
        # Adapters are merged into a copy: every checkpoint holds an ordinary model, whatever its base was.
        exported = self.module.exported() if self.accelerator.is_main_process else None
        checkpoint.save_checkpoint(self.run, self.accelerator, exported, self.tokenizer, self.progress, self.provenance)
        if self.accelerator.is_main_process:
            checkpoint.prune_states(self.run, self.config.train.keep_states)

    def _out_of_patience(self) -> bool:
        patience = self.config.judge.patience
        return patience > 0 and self.progress.judged_without_gain >= patience

    def _any_rank(self, flag: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.accelerator.device)).item())

    @contextlib.contextmanager
    def _bar(self) -> Any:
        """A progress line with loss, alpha estimate, tokens/s and remaining time on the main process."""
        columns = (
            TextColumn("[bold]distil" if self.teacher else "[bold]train"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with ProgressBar(*columns, disable=not self.accelerator.is_main_process, refresh_per_second=2) as bar:
            task = bar.add_task("", total=self.config.train.steps, completed=self.progress.step, facts="")

            def show(result: StepResult, tokens_per_second: float) -> None:
                alpha = f" alpha {result.alpha:.3f}" if self.teacher else ""
                facts = f"loss {result.loss:.3f}{alpha} {tokens_per_second:,.0f} tok/s"
                bar.update(task, completed=self.progress.step, facts=facts)

            yield show


def check_batches(train: TrainConfig, ranks: int) -> None:
    """Raises UserError when the sequences of a step do not divide into micro-batches of all ranks."""
    if train.batch_size % (train.micro_batch_size * ranks):
        raise UserError(
            f"train.batch_size = {train.batch_size} is not a multiple of micro_batch_size x ranks = "
            f"{train.micro_batch_size} x {ranks}"
        )


def make_optimizers(module: torch.nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
    """Optimizers of all that is trainable, at one learning rate; weight decay on matrices only.

    `adamw`: one AdamW. `muon`: Muon (orthogonalised momentum, arXiv 2502.16982) for the matrices of the layers, its updates
    scaled to AdamW's size so that the same learning rate serves; AdamW for embeddings, head and vectors.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    tables |= {id(parameter) for name, parameter in named if "lm_head" in name or "embed" in name}
    hidden = [p for _, p in named if p.dim() == 2 and id(p) not in tables] if optim.name == "muon" else []
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if any(group["params"] for group in groups):
        optimizers.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas))
    if hidden:
        optimizers.append(
            torch.optim.Muon(hidden, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def resume_point(config: RunConfig) -> tuple[checkpoint.Progress, Path | None]:
    """Progress of the newest resumable checkpoint and its folder; fresh progress when there is none."""
    step = checkpoint.last_resumable(config.folder)
    if step is None:
        return checkpoint.Progress(), None
    folder = checkpoint.step_folder(config.folder, step)
    return checkpoint.Progress(**json.loads((folder / checkpoint.PROGRESS).read_text(encoding="utf-8"))), folder
