"""Tiny pieces of a training run for the tests of `distill` and `data`: a tokenizer, a target on disk, a loop."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from bench_modules import bench
from tiny_models import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data.batches.collate import Example
from distill.config.layout import list_steps, step_folder
from distill.config.load import parse_config
from distill.config.run import RunConfig
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.mask_token import give_mask_token
from distill.run.checkpoint import resume_point
from distill.run.run import Run
from distill.train import judge_all
from distill.training.batches import BatchSource, make_survival
from distill.training.module import DraftModule
from distill.training.sharding import whole
from distill.training.teacher import Teacher
from distill.training.trainer import StepResult, Trainer
from speculative.engine.models import mask_token_of

TOKENS = 300
train_tokenizer = bench("train_target").train_tokenizer


@functools.lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, 300 tokens: 256 bytes, three special ones and some merges."""
    texts = ["def add(first, second):\n    return first + second\n" * 4, "What is 3 + 4? The answer is 7.\n" * 4]
    return train_tokenizer(texts, TOKENS, max_length=256)


def write_target(folder: Path, **overrides: Any) -> PreTrainedModel:
    """A random Llama of three layers with its tokenizer, as a Hugging Face directory."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = tiny_model(**{"num_hidden_layers": 3, "vocab_size": TOKENS, **ids, **overrides})
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def write_prompts(path: Path, count: int) -> Path:
    """A jsonl of distinct prompts of uneven length."""
    rows = [
        {"prompt": f"def f{index}(a{', b' * (index % 5)}):", "kind": "odd" if index % 2 else "even"}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def forget_accelerators() -> None:
    """Accelerate keeps one state per process: the next Accelerator starts again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def fresh_accelerator(folder: Path, **options: Any) -> Accelerator:
    """An Accelerator on the CPU that knows nothing of earlier ones in this process."""
    forget_accelerators()
    return Accelerator(cpu=True, project_dir=str(folder), **options)


def run_config(folder: Path, **sections: Any) -> RunConfig:
    """A config whose run folder is ``folder / run``; sections override key by key."""
    tree: dict[str, Any] = {
        "name": "run",
        "output": str(folder),
        "data": {"train": [{"path": "unused.jsonl"}]},
        "loss": {"name": "lk_hybrid", "chunk_tokens": 5},
        "optim": {"lr": 1e-2},
        "train": {"steps": 6, "batch_size": 4, "micro_batch_size": 2},
        "judge": {"every": 2},
    }
    return parse_config(merged(tree, sections), "test")


def merged(tree: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The tree whose sections these override key by key."""
    own = {name: {**tree.get(name, {}), **new} if isinstance(new, dict) else new for name, new in sections.items()}
    return tree | own


def small_config(folder: Path, prompts: int = 24, **sections: Any) -> Path:
    """The config file of a run of seconds in a folder, with a random target and so many prompts; sections as in `run_config`."""
    target = folder / "target"
    if not target.exists():
        write_target(target)
    source = {"path": str(write_prompts(folder / "prompts.jsonl", prompts)), "prompt_column": "prompt"}
    tree = {
        "name": "small",
        "output": str(folder),
        "target": {"path": str(target)},
        "data": {"train": [source], "template": {"mode": "plain"}},
        "serving": {"max_tokens": 8, "shard_size": 8, "batch_size": 8},
        "train": {"batch_size": 4},
        "judge": {"every": 2, "gamma": 2, "speed_prompts": 2, "speed_seconds": 0.1},
    }
    path = folder / f"{sections.get('name', 'small')}.yaml"
    path.write_text(json.dumps(merged(tree, sections)), encoding="utf-8")
    return path


def share_of(config: RunConfig, rank: int = 0, ranks: int = 1) -> Any:
    """What a batch source asks of a run."""
    return SimpleNamespace(config=config, rank=rank, ranks=ranks)


def examples_of(lengths: Sequence[int], vocab: int = TOKENS, seed: int = 0) -> list[Example]:
    """Random sequences; the response is a share of each that differs from sequence to sequence."""
    generator = np.random.default_rng(seed)
    examples = []
    for length in lengths:
        mask = np.arange(length) >= generator.integers(1, length)
        examples.append(Example(generator.integers(3, vocab, length).astype(np.int32), mask))
    return examples


# Response tokens per sequence: unequal between sequences, micro-batches and ranks.
RESPONSE_TOKENS = (1, 14, 3, 9, 2, 2, 11, 5, 4, 4, 13, 1, 6, 2, 8, 3)


def uneven_examples(count: int = 8) -> list[Example]:
    """The first so many sequences of `RESPONSE_TOKENS`."""
    generator = np.random.default_rng(7)
    examples = []
    for index, tokens in enumerate(RESPONSE_TOKENS[:count]):
        length = tokens + 2 + index % 3
        ids = generator.integers(3, TOKENS, length).astype(np.int32)
        examples.append(Example(ids, np.arange(length) >= length - tokens))
    return examples


class ScriptedJudge:
    """Scores each draft of a checkpoint by a rule of its step, and notes the step."""

    def __init__(self, score: Callable[[int], float] = float) -> None:
        self.score = score
        self.steps: list[int] = []

    def __call__(self, step: int, draft: DraftModule, folder: Path) -> dict[str, Any]:
        self.steps.append(step)
        return {"step": step, "score": self.score(step), "alpha": 0.5}

    def headline(self, record: dict[str, Any]) -> str:
        return f"step {record['step']}"


def make_mask_token(draft: Any, token: int) -> None:
    """Makes this token the mask token of a draft, with the mean of all embeddings as its own."""
    if mask_token_of(draft.config) != token:
        with torch.no_grad():
            table = draft.get_input_embeddings().weight
            table[token] = table.mean(0)
    draft.config.pard_token = token
    give_mask_token(draft, tiny_tokenizer(), ())


def make_loop(
    config: RunConfig,
    judge: Any = None,
    *,
    accelerator: Accelerator | None = None,
    student: Any = None,
    objective: Objective | None = None,
    examples: Sequence[Example] | None = None,
    kind: str = "llama",
) -> Any:
    """A trainer as `distill.train` makes it, `judge` with it, on a random target and the draft carved from it; resumes as that does."""
    config.folder.mkdir(parents=True, exist_ok=True)
    accelerator = accelerator or fresh_accelerator(config.folder)
    torch.manual_seed(config.seed)
    target = tiny_model(kind, vocab_size=TOKENS)
    module = DraftModule(
        student if student is not None else carve(target, [0]),
        objective or Objective(config.loss_weights(), chunk_tokens=config.loss.chunk_tokens),
        make_survival(config.student.parallel),
    )
    if module.survival is not None:
        make_mask_token(module.inner, 0)
    examples = examples if examples is not None else examples_of([9, 12, 7, 15, 10, 8, 11, 14, 6, 13])
    run = Run(config, accelerator, resume_point(config.folder)[0])
    batches = BatchSource(run, examples)
    trainer = Trainer(run, module, Teacher(target), batches, tiny_tokenizer(), {"seed": 0})
    trainer.judge = judge or ScriptedJudge()
    return trainer


def fit(trainer: Any) -> None:
    """To the end, each checkpoint judged and kept as `distill.train` does it."""
    judge_all(trainer, trainer.judge)


def before_step(trainer: Any, at: int | None, act: Callable[[], object]) -> Any:
    """The trainer, which does something when the step behind ``at`` begins, or each one (None)."""
    step = trainer.step

    def acting(window: Any) -> Any:
        if at in (None, trainer.progress.step):
            act()
        return step(window)

    trainer.step = acting
    return trainer


def step_of(trainer: Any, step: int = 0) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Takes a step; its result, and the gradients before they are clipped."""
    gradients: dict[str, torch.Tensor] = {}
    clip = trainer.clip_gradients

    def recording_clip() -> float:
        for name, weight in trainer.wrapped.named_parameters():
            if weight.grad is not None:
                gradients[name.removeprefix("module.")] = whole(weight.grad).clone()
        return clip()

    trainer.clip_gradients = recording_clip
    result = trainer.step(trainer.micro_batches(step))
    trainer.clip_gradients = clip
    return result, gradients


def metrics_of(config: RunConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = ("tokens_per_second", "seconds", "peak_memory_mib", "judge/judging_seconds")
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def final_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Weights of the newest checkpoint's student."""
    from safetensors.torch import load_file

    newest = list_steps(config.folder)[-1]
    return load_file(step_folder(config.folder, newest) / "student" / "model.safetensors")
