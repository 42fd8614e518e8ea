"""TRL's own trainers, unchanged, on our models and tokens: one step at a time.

They run through `trainer.train()`, as users run them. `Stepped` keeps that loop in its own thread, which waits
after every step for its next turn, so that contestants can alternate within one process. Data is tokenised
beforehand. Two settings are not left at TRL's defaults: the dtype is that of the other contestants, and
reports and checkpoints are off.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PrinterCallback, TrainerCallback

from data.batches.collate import Example

# beta of TRL's generalised divergence: 0 is KL(target || student), 1 the reverse.
BETA = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}


@dataclass(frozen=True)
class Peer:
    """Which trainer, and its settings. `lmbda` (GKD): share of steps on the student's own text. None leaves a value to TRL."""

    trainer: Literal["gkd", "distillation"]
    beta: float | None = None
    lmbda: float | None = None
    temperature: float | None = 1.0
    defaults: bool = False  # gradient checkpointing and logging as TRL sets them; else off
    lr: float | None = None
    seed: int = 0


def version() -> str | None:
    """TRL's version; None where it is not installed."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        return None
    return importlib.metadata.version("trl")


def make_trainer(
    peer: Peer,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    batch_size: int,
    max_new_tokens: int,
    max_steps: int,
    bf16: bool = False,
) -> Any:
    """A TRL trainer on sequences whose first response token is where their loss mask begins."""
    from datasets import Dataset

    quiet()
    folder = tempfile.mkdtemp(prefix="trl-")
    device = next(student.parameters()).device
    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "max_steps": max_steps,
        "report_to": [],
        "save_strategy": "no",
        "bf16": bf16,
        "use_cpu": device.type == "cpu",
        "disable_tqdm": True,
        "seed": peer.seed,
        "dataloader_pin_memory": device.type != "cpu",
    }
    optional = {"beta": peer.beta, "temperature": peer.temperature, "learning_rate": peer.lr}
    given |= {key: value for key, value in optional.items() if value is not None}
    if not peer.defaults:
        given |= {"gradient_checkpointing": False, "logging_strategy": "no"}
    prompts = [example.input_ids[: int(example.loss_mask.argmax())].tolist() for example in examples]
    if peer.trainer == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        if peer.lmbda is not None:
            given["lmbda"] = peer.lmbda
        rows = [
            {
                "prompt": "",
                "input_ids": example.input_ids.tolist(),
                "completion_mask": example.loss_mask.astype(int).tolist(),
            }
            for example in examples
        ]
        longest = max(len(example.input_ids) for example in examples) + max_new_tokens
        args = GKDConfig(**given, max_new_tokens=max_new_tokens, max_length=longest)
        data = Dataset.from_list(rows)
        return _silent(GKDTrainer(student, teacher, args=args, train_dataset=data, processing_class=tokenizer))
    from trl import DistillationConfig, DistillationTrainer

    class Tokenised(DistillationTrainer):
        """Its text column contains the numbers of prompts that are already tokens."""

        def _tokenize_prompts(self, numbers: list[str]) -> Any:
            return [prompts[int(number)] for number in numbers], None, {}

    args = DistillationConfig(**given, max_completion_length=max_new_tokens)
    numbers = Dataset.from_list([{"prompt": str(number)} for number in range(len(prompts))])
    return _silent(Tokenised(student, teacher, args=args, train_dataset=numbers, processing_class=tokenizer))


def quiet() -> None:
    """Silence TRL's messages."""
    import transformers
    from datasets.utils.logging import disable_progress_bar

    transformers.utils.logging.set_verbosity_error()
    disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="trl")
    warnings.filterwarnings("ignore", category=FutureWarning)


def _silent(trainer: Any) -> Any:
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Turn(TrainerCallback):
    def __init__(self, stepped: Stepped) -> None:
        self.stepped = stepped

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stepped.wait_for_turn(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stepped.done.release()
        self.stepped.wait_for_turn(control)


class Stepped:
    """A trainer whose loop makes one step, data loading and callbacks included, whenever `step` is called."""

    def __init__(self, trainer: Any) -> None:
        """The trainer needs a larger `max_steps` than the steps that are run."""
        self.trainer = trainer
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.over, self.error = False, None
        trainer.add_callback(_Turn(self))
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:  # reported to the caller that waits for the step
            self.error = error
        self.over = True
        self.done.release()

    def wait_for_turn(self, control: Any) -> None:
        """In the trainer's thread."""
        self.go.acquire()
        if self.over:
            control.should_training_stop = True

    def step(self) -> None:
        """One step; raises what the trainer raised."""
        if not self.thread.ident:
            self.thread.start()
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        if self.over:
            raise RuntimeError("the trainer made all its max_steps")

    def close(self) -> None:
        """End the loop after the current step."""
        if self.thread.ident and not self.over:
            self.over = True
            self.go.release()
            self.thread.join()
