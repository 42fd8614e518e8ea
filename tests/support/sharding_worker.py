"""What `test_sharding` runs on several ranks: the same tiny training, plain and sharded.

torchrun --nproc_per_node 2 sharding_worker.py CONFIG     `distill.train` on a tiny loop, slow enough to be killed
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny_models import tiny_model
from tiny_training import (
    TOKENS,
    before_step,
    examples_of,
    fit,
    forget_accelerators,
    make_loop,
    make_mask_token,
    run_config,
    step_of,
    tiny_tokenizer,
    uneven_examples,
    write_target,
)

from data.batches.collate import collate
from distill import train
from distill.config.run import RunConfig
from distill.config.sections import ParallelConfig
from distill.config.target import TargetConfig
from distill.loss.definitions import Objective
from distill.models.student import add_lora
from distill.models.target import Target
from distill.run.checkpoint import resume_point
from distill.run.run import Run
from distill.training import sharding
from distill.training.batches import BatchSource, make_survival
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from distill.training.trainer import Trainer
from speculative.engine.models import mask_token_of

STEPS, STOP = 4, 2


def steps_config(folder: Path, micro_batch_size: int) -> RunConfig:
    """Four steps of eight sequences; a checkpoint after each second."""
    return run_config(
        folder,
        train={"steps": STEPS, "batch_size": 8, "micro_batch_size": micro_batch_size},
        optim={"lr": 1e-2, "warmup_ratio": 0.0, "max_grad_norm": 0.5},  # some steps are clipped
        judge={"every": STOP},
        loss={"name": "forward_kl", "chunk_tokens": 5},
    )


def tiny_student(variant: str) -> Any:
    """Two layers in float64, so that all that the number of ranks changes, the order of sums, is 1e-16 of a number.

    In float32 AdamW's division would blow rounding up to whole steps wherever a gradient is nearly zero.
    """
    model = tiny_model(vocab_size=TOKENS, seed=5, dtype=torch.float64, tie_word_embeddings="tied" in variant)
    model.train()
    if "recomputed" in variant:
        model.gradient_checkpointing_enable()
    if "blocks" in variant:
        make_mask_token(model, 0)
    if "lora" in variant:
        torch.manual_seed(3)
        return add_lora(model, 4, 8, "all-linear", mask_token_of(model.config)).to(torch.float64)
    return model


ENGINES = {
    "": {},
    "FSDP": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
}


def new_accelerator(config: RunConfig, engine: str = "") -> Accelerator:
    """As `distill.train` makes it under a launcher that asks for the engine."""
    forget_accelerators()
    for name in {name for settings in ENGINES.values() for name in settings}:
        os.environ.pop(name, None)
    os.environ |= ENGINES[engine]
    plugin = sharding.launched_plugin()
    precision = sharding.settled_precision(config.train.mixed_precision)[0]
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    sharding.settle_launcher(accelerator, config.optim, plugin)
    return accelerator


def new_loop(config: RunConfig, variant: str = "", engine: str = "") -> Trainer:
    """A loop of the float64 student against a float64 target, resumed where its run stands."""
    config.folder.mkdir(parents=True, exist_ok=True)
    if "blocks" in variant:
        parallel = ParallelConfig(tokens=5)
        config = config.model_copy(update={"student": config.student.model_copy(update={"parallel": parallel})})
    accelerator = new_accelerator(config, engine)
    target = tiny_model(vocab_size=TOKENS, dtype=torch.float64)
    module = DraftModule(
        tiny_student(variant), Objective({"forward_kl": 1.0}, chunk_tokens=5), make_survival(config.student.parallel)
    )
    run = Run(config, accelerator, resume_point(config.folder)[0])
    batches = BatchSource(run, uneven_examples(16))
    return Trainer(run, module, Teacher(target), batches, tiny_tokenizer(), {"seed": 0})


def trained(config: RunConfig, variant: str = "", engine: str = "", until: int = STEPS) -> dict[str, Any]:
    """Steps from where the run stands to ``until``, with checkpoints: first gradients, what was logged, final weights."""
    loop = new_loop(config, variant, engine)
    logged, gradients = [], {}
    while loop.progress.step < until:
        result, found = step_of(loop, loop.progress.step)
        gradients = gradients or found
        logged.append(result._asdict())
        loop.progress.step += 1
        if loop.progress.step % STOP == 0:
            loop.save()
    full = sharding.full_module(loop.accelerator, loop.wrapped, loop.module)
    weights = {} if full is None else {name: value.clone() for name, value in full.exported().state_dict().items()}
    return {
        "gradients": gradients,
        "logged": logged,
        "weights": weights,
        "kind": loop.accelerator.distributed_type.value,
    }


def teacher_case(folder: Path) -> dict[str, torch.Tensor]:
    """Hidden states of a target whole, and cut from the start: rank 0 alone reads its weights."""
    accelerator, path = Accelerator(cpu=True), folder / "target"
    write_target(path, tie_word_embeddings=True)  # transformers lets the main process write
    accelerator.wait_for_everyone()
    target = Target(TargetConfig(path=str(path)), torch.device("cpu"))
    batch = collate(uneven_examples(4), 0)
    with target.loaded() as model:
        seen = {"whole": Teacher(model).signal(batch).hidden_RD}
        whole_numbers = sum(weight.numel() for weight in model.parameters())
    if not accelerator.is_main_process:
        target.loaded = None  # type: ignore[method-assign, assignment]
    shards = sharding.shards_of(Run(run_config(folder), accelerator), target)
    teacher = Teacher(shards)
    seen["sharded"], seen["again"] = (teacher.signal(batch).hidden_RD for _ in range(2))
    local = sum(
        weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel() for weight in shards.parameters()
    )
    seen["kept"] = torch.tensor([local, whole_numbers])
    return seen


def leave() -> None:
    """As `distill.train` ends: a rank that leaves without a word may abort the one that is still reading from it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def cases(rank: int, folder: Path) -> None:
    """Everything that two ranks have to show, results in FOLDER/rankN.pt."""
    results: dict[str, Any] = {}
    for name, variant, engine in (
        ("ddp", "", ""),
        ("fsdp", "", "FSDP"),
        ("fsdp tied recomputed", "tied recomputed", "FSDP"),
        ("fsdp lora", "lora", "FSDP"),
        ("fsdp lora blocks", "lora blocks", "FSDP"),
    ):
        results[name] = trained(steps_config(folder / name.replace(" ", "-"), 2), variant, engine)
    for name, engine in (("ddp-stopped", ""), ("fsdp-stopped", "FSDP"), ("fsdp-killed", "FSDP")):
        trained(steps_config(folder / name, 2), engine=engine, until=STOP)
    results["ddp grown"] = trained(steps_config(folder / "one-stopped", 2))
    results["fsdp resumed"] = trained(steps_config(folder / "fsdp-killed", 2), engine="FSDP")
    results["teacher"] = teacher_case(folder)
    torch.save(results, folder / f"rank{rank}.pt")
    leave()


def slow_train(path: Path) -> int:
    """`distill.train` with a tiny loop in place of models and responses; each step takes a tenth of a second."""

    def distil(run: Run) -> None:
        (run.folder / f"rank{run.rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
        loop = make_loop(
            run.config, accelerator=run.accelerator, examples=examples_of([9, 12, 7, 15, 10, 8, 11, 14, 6, 13])
        )
        fit(before_step(loop, None, lambda: time.sleep(0.1)))

    train.distil = distil
    return train.main([str(path)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(slow_train(Path(sys.argv[1])))
