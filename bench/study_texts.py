"""The shared data of a study's trainings, and one training: from the target with its responses to a judged draft.

Shapes: P prompts, one response each.
"""

import gc
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import PreTrainedModel

from data.batches.collate import Batch
from data.signals.signal import DenseSignal
from distill.config.run import RunConfig
from distill.models.draft import as_exported
from distill.models.student import refuse_impossible
from distill.models.target import Target
from distill.run.answers import Answers, first_student
from distill.run.responses import RunStores, decode_settings
from distill.run.run import Run, new_accelerator
from distill.run.session import run_prompts
from distill.training.batches import make_batches, make_objective
from distill.training.micro_batch import chosen_micro_batch
from distill.training.module import DraftModule
from distill.training.sharding import settled_precision
from distill.training.signal import make_teacher
from distill.training.teacher import CapturingTeacher, Teacher, TeacherSource
from distill.training.trainer import Trainer
from speculative.errors import UserError
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, score_tokens
from study_file import UNTRAINED, Study, Training, texts_key


class RememberingTeacher(Teacher):
    """The target, run once per example. Its hidden states stay in memory: 4 bytes x width per response token in float32.

    Its output is exactly the target's, so runs that differ only in the objective can share it.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__(target)
        self._hidden: dict[tuple[int, int], Tensor] = {}

    def signal(self, batch: Batch) -> DenseSignal:
        """Same as `Teacher.signal`, without running the target if all examples are known. For micro-batches without packing."""
        counts = torch.bincount(batch.rows_R // batch.input_ids_BT.shape[1], minlength=len(batch.indices)).tolist()
        # With the rows: the same example has more of them where the loss covers its prompt.
        keys = list(zip(batch.indices, counts, strict=True))
        if not all(key in self._hidden for key in keys):
            asked = super().signal(batch)
            told = zip(keys, asked.hidden_RD.split(counts), strict=True)
            self._hidden |= {key: hidden_RD.clone() for key, hidden_RD in told if key[0] >= 0}  # -1 is any sequence
            return asked
        return DenseSignal(torch.cat([self._hidden[key] for key in keys]), self.split.head)


class Texts:
    """Prompts, responses and the target of trainings with one `texts_key`; made once, in a folder that other studies find too."""

    def __init__(self, study: Study, config: RunConfig) -> None:
        """The responses are those of the first seed, for every seed: prompts can be paired over seeds."""
        digest = hashlib.sha256(texts_key(study, config).encode()).hexdigest()[:12]
        name, output = f"texts-t{config.serving.temperature:g}-{digest}", str(Path(config.output).parent)
        config = config.model_copy(update={"name": name, "output": output, "seed": study.seeds[0]})
        accelerator = _accelerator(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        self.target = Target(config.target, accelerator.device)
        heldout = config.judge.prompts + study.tune_prompts
        run = Run(config, accelerator)
        self.context, self.tokenizer, self.sets = run_prompts(run, self.target, heldout)
        if len(self.sets.heldout) < heldout:
            raise UserError(
                f"{study.name}: {len(self.sets.heldout)} held-out prompts are too few for {config.judge.prompts} that judge "
                f"(judge.prompts) and {study.tune_prompts} that tune (tune_prompts); add to data.heldout, or lower these"
            )
        stores = RunStores(run, self.target)
        self.rows = stores.training(self.sets.train)
        self.heldout = stores.heldout(self.sets.heldout, config.serving_rule, select=True)
        self.sampling = decode_settings(config.serving, config.seed, self.target).sampling
        self.teacher = RememberingTeacher(self.target.model)


def _accelerator(config: RunConfig) -> Accelerator:
    """One for each training: its optimizers and schedules are registered with it."""
    return new_accelerator(mixed_precision=settled_precision(config.train.mixed_precision)[0])


def train(training: Training, texts: Texts) -> tuple[PreTrainedModel, int]:
    """(the trained draft as it would be served, response tokens that it was trained on). No checkpoint is written.

    Raises:
        NotFinite: it diverged. UserError: a student that cannot be made.
    """
    # What a run keeps (which layers were chosen, what the target said) is of this training alone: the next one's config is another.
    with tempfile.TemporaryDirectory(prefix="understudy-study-") as passing:
        config = training.config.model_copy(update={"output": passing})
        config.folder.mkdir()
        return _trained(config, texts, 0 if training.contestant == UNTRAINED else config.train.steps)


def _trained(config: RunConfig, texts: Texts, steps: int) -> tuple[PreTrainedModel, int]:
    target, accelerator = texts.target, _accelerator(config)
    set_seed(config.seed)
    refuse_impossible(config.student, target.side.config)
    run = Run(config, accelerator)
    answers = Answers(run, target, texts.tokenizer, texts.sets, texts.context)
    answers.training = texts.rows
    student = first_student(answers)
    module = DraftModule(student, make_objective(config))
    examples = texts.rows.examples
    teacher: TeacherSource | None = texts.teacher
    if config.signal.source == "capture":
        teacher = make_teacher(run, target, examples)
        if isinstance(teacher, CapturingTeacher):
            teacher.teacher = texts.teacher  # the contestants share the target's stored answers
    batches = make_batches(run, target, texts.sets.train, examples, texts.context, teacher)
    batches.micro_batch_size = chosen_micro_batch(
        config.train, config.optim, accelerator, module, texts.teacher, batches.longest
    )
    trainer = Trainer(run, module, teacher, batches, target.tokenizer, {})
    for step in range(steps):
        run.progress.step = step
        run.progress.tokens_seen += trainer.step(trainer.micro_batches(step)).tokens
    average = None if trainer.average is None else DraftModule(trainer.average.module, module.objective)
    draft = as_exported((average or module).exported(), target)
    if isinstance(teacher, CapturingTeacher):
        teacher.store.close()
    accelerator.free_memory()
    return draft, run.progress.tokens_seen


def sums_of(scores: Sequence[TokenScores], rule: str, gamma: int) -> dict[str, list[float]]:
    """{tokens, accepted, blocks} by prompt: response tokens, the sum of their acceptance probabilities, expected target calls."""
    return {
        "tokens": [len(text) for text in scores],
        "accepted": [round(float(text.accept_probs(rule).sum()), 3) for text in scores],
        "blocks": np.round(expected_blocks_of(scores, rule, (gamma,))[:, 0], 3).tolist(),
    }


def alpha_tau(sums: dict[str, list[float]]) -> dict[str, float]:
    """{alpha, tau} of sums by prompt."""
    tokens = sum(sums["tokens"])
    return {"alpha": sum(sums["accepted"]) / tokens, "tau": tokens / sum(sums["blocks"])}


def result_of(training: Training, texts: Texts) -> dict[str, Any]:
    """Trains and judges: {.., trained_tokens, seconds, tuning: {alpha, tau}, judged: {rule: sums by prompt}}.

    The first `judge.prompts` held-out prompts judge; `tuning` uses only the prompts after them, with the first rule.
    """
    started = time.process_time()
    draft, tokens = train(training, texts)
    trained = time.process_time()
    config = training.config
    scores = score_tokens(draft, texts.heldout, texts.sampling)
    judged, kept = scores[: config.judge.prompts], scores[config.judge.prompts :]
    rules, gamma = training.served.rules, config.judge.gamma
    result = {
        "pair": training.pair,
        "contestant": training.contestant,
        "temperature": training.served.temperature,
        "seed": training.seed,
        "lr": training.lr,
        "trained_tokens": tokens,
        "seconds": {"train": round(trained - started, 2), "judge": round(time.process_time() - trained, 2)},
        "tuning": alpha_tau(sums_of(kept, rules[0], gamma)),
        "judged": {rule: sums_of(judged, rule, gamma) for rule in rules},
    }
    del draft
    gc.collect()
    return result
