"""`accelerate launch -m distill.train CONFIG key=value ...`: a run from config to verdict. A killed run resumes."""

import gc
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from data.batches.examples import as_examples
from data.responses.store import StoredRows
from distill.config.command_line import TrainOptions, run_program
from distill.config.layout import JUDGEMENT, JUDGING
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.serving_engine import for_engine, pair_notes
from distill.faults import Interrupted, exit_status
from distill.models.heads import SplitModel
from distill.models.quantized import require_quantizer
from distill.models.student import refuse_impossible, run_context
from distill.models.target import Target
from distill.run.checkpoint import keep_judgement, missed_checks, resume_point
from distill.run.first_student import first_student
from distill.run.launcher import launch_if_asked
from distill.run.prompts import load_prompts
from distill.run.responses import RunData, dated_tokenizer, decode_settings
from distill.run.run import Run, new_accelerator
from distill.run.session import check_instrument, preflight
from distill.training.batches import check_packing, make_batches, make_objective, make_survival
from distill.training.micro_batch import check_batches, chosen_micro_batch
from distill.training.module import DraftModule
from distill.training.plan import plan_lines, prompt_lines
from distill.training.rollouts import Rollouts
from distill.training.sharding import launched_plugin, settle_launcher, settled_precision, shards_of
from distill.training.signal import make_teacher, require_signal
from distill.training.teacher import CapturingTeacher, Teacher
from distill.training.tracking import judged_scalars, start_trackers
from distill.training.trainer import Checkpoint, Trainer
from distill.verdict.judge import DraftJudge, require_served
from speculative.drafters.draft import Drafting
from speculative.engine.models import mask_token_of
from speculative.measure.record import Record
from speculative.measure.self_checks import SelfCheckError

# Checkpoints at which live decoding and replay may differ before the run stops.
MOST_MISSES = 3


def start(config: RunConfig) -> Run:
    """Lock the run's folder, and start Accelerate and the trackers.

    Raises UserError: the folder is in use, holds another config or cannot be written; a package for a tracker or for export.quantize is not
    installed.
    """
    require_quantizer(config.export.quantize)
    precision, disagreement = settled_precision(config.train.mixed_precision)
    plugin = launched_plugin()
    accelerator = new_accelerator(
        mixed_precision=precision,
        log_with=list(config.tracking.trackers) or None,
        project_dir=str(config.folder),
        fsdp_plugin=plugin,
    )
    run = Run(config, accelerator)
    if disagreement is not None:
        run.say(disagreement)
    if run.device.type == "cuda":
        # Without it float32 products on a GPU do not use tensor cores and run at an eighth of the speed.
        torch.set_float32_matmul_precision("high")
        run.say(f"arithmetic: autocast {precision}, float32 products in TF32")
    settle_launcher(accelerator, config.optim, plugin)
    check_batches(config.train, run.ranks)
    run.claim()
    run.progress = run.seen(lambda: resume_point(run.folder)[0])
    set_seed(config.seed)
    start_trackers(accelerator, config.tracking.trackers, config.name, config.model_dump(mode="json"))
    return run


def distil(run: Run) -> None:
    """From prompts to verdict. Results that an earlier start left in the run's folder are reused."""
    from distill.verdict.conclusion import conclude_run  # Imported late, with its figures: a dry run needs none.

    config = run.config
    require_signal(config)
    target = Target(config.target, run.device, run.folder)
    sharded = config.target.shard and run.ranks > 1 and config.signal.source == "online"
    used = config.signal.source != "store" and (config.own_words or not config.only_ce)
    # A target that no step uses as a whole leaves the memory before training; a judge that decodes loads it for that.
    with target.single_load() if used and not sharded else nullcontext():
        with target.single_load():
            preflight(run, target)
            data = RunData(run, target)
            student, rows, judge, checks = prepared(data)
        with nullcontext(shards_of(run, target)) if sharded else target.loaded() if used else nullcontext() as model:
            judge_all(new_trainer(data, student, rows, model), judge)
        # Free the training state, which is in the checkpoints, to make room for the target.
        del model
        run.accelerator.free_memory()
        gc.collect()
        conclude_run(data, dict(checks))
    run.wait()


def prepared(data: RunData) -> tuple[Any, StoredRows | None, DraftJudge, Mapping[str, Any]]:
    """(student, responses to train on, judge, results of the self-checks). Purely on-policy training uses no responses."""
    run, target, config = data.run, data.target, data.run.config
    run.say(data.prompts.report)
    # Report config and student errors before the long work of generating responses.
    require_served(
        config.judge.served_paths,
        target,
        max(len(prompt.prompt_ids) for prompt in data.prompts.heldout) + config.serving.max_tokens,
    )
    run.config = config = config.settled(len(data.prompts.train))
    if run.main:
        run.say("\n".join(plan_lines(config, target, data.prompts, run.device, run.ranks)))
    settings = decode_settings(config.serving, config.seed, target).under(config.judge_rule, config.judge.gamma)
    student = first_student(data, trial=data.chosen_by_text)
    for line in pair_notes(config, target.side, student):
        run.say(line)
    checks: Mapping[str, Any] = {}
    if config.decodes:  # otherwise replay alone judges, and there is nothing to check
        with run.progress.timed("self_checks"):
            checks = check_instrument(run, target, data.prompts.heldout, settings)
    if data.chosen_by_text:
        student = first_student(data)
    rows = data.training if config.data.mix.target else None
    drafting: Drafting = "autoregressive" if config.student.parallel is None else "parallel"
    return student, rows, DraftJudge(run, settings, target, data.heldout, drafting), checks


def print_plan(config: RunConfig, ranks: int) -> None:
    """Print what a run of this config would do, and a prompt as the target would see it. No weights are loaded, and nothing is kept.

    Raises UserError: as a run until its prompts are read.
    """
    target = Target(config.target, new_accelerator().device)
    facts, data = target.outline(), config.data
    refuse_impossible(config.student, target.side.config)
    context = run_context(config.student, data.context_length, facts.context_length)
    tokenizer, judged = dated_tokenizer(target, config.folder), config.judge.prompts
    prompts = load_prompts(data, tokenizer, context, config.serving.max_tokens, judged, vocab_rows=facts.vocab_rows)
    plan = plan_lines(config.settled(len(prompts.train)), target, prompts, target.device, ranks)
    print(prompts.report, *plan, *prompt_lines(prompts.train[0], tokenizer), sep="\n")


def judge_all(trainer: Trainer, judge: DraftJudge) -> None:
    """Train to the last step or until judge.patience runs out. Checkpoints are judged and kept, evaluations between them recorded."""
    for checkpoint in trainer.fit():
        if checkpoint.folder is None:
            replay_now(trainer, judge, checkpoint)
        else:
            keep(trainer, judge, checkpoint, checkpoint.folder / JUDGEMENT)
        if 0 < trainer.config.judge.patience <= trainer.progress.judged_without_gain:
            break


def new_trainer(data: RunData, student: Any, rows: StoredRows | None, model: PreTrainedModel | None) -> Trainer:
    """Make the trainer of a student: objective, teacher, batches. ``model``: the target, where steps use it."""
    run, target, config = data.run, data.target, data.run.config
    module = DraftModule(student, make_objective(config), make_survival(config.student.parallel))
    if config.train.compile:
        module.inner.base_model.compile(dynamic=True)  # batch widths vary
    run.say(
        f"{len(rows or ())} responses of {rows.response_tokens_N.sum() if rows else 0:,} tokens; "
        + (f"target {target.facts.parameters:,} parameters, " if target.facts.parameters else "")
        + f"draft {sum(parameter.numel() for parameter in module.parameters()):,}"
    )
    examples = rows.examples if rows is not None else as_examples(())
    teacher = make_teacher(run, target.facts, model, examples)
    online = teacher.teacher if isinstance(teacher, CapturingTeacher) else teacher
    online = online if isinstance(online, Teacher) else None
    if config.train.packing is not None:
        # A store was made from padded rows, so it needs no check.
        for split in (SplitModel(module.inner), *([] if online is None else [online.split])):
            check_packing(split)
    mask_token = mask_token_of(module.inner.config) if module.survival is not None else None
    rollouts = (
        Rollouts(run, model, target.tokenizer, data.prompts.train) if model is not None and config.own_words else None
    )
    batches = make_batches(run, examples, rollouts, teacher, mask_token)
    # A sharded target needs all ranks together, but each rank runs its own number of trial steps.
    alone = None if config.target.shard else online
    run.wait()  # Trial steps need all ranks, and ranks load their models at different speeds.
    batches.micro_batch_size = chosen_micro_batch(
        config.train, config.optim, run.accelerator, module, alone, batches.longest
    )
    return Trainer(run, module, teacher, batches, target.tokenizer, data.provenance())


def keep(trainer: Trainer, judge: DraftJudge, checkpoint: Checkpoint, path: Path) -> None:
    """Judge a checkpoint, unless its record already exists at ``path``, and keep the best so far. All ranks must call it.

    Raises SelfCheckError: live decoding, or new responses of a server, and replay have differed at `MOST_MISSES` checkpoints.
    """
    run, step = trainer.run, checkpoint.step
    if not run.seen(path.exists):
        with run.progress.timed("judge"):
            draft = checkpoint.draft()
            assert draft is not None  # on every rank
            record = judge(step, draft, path.parent)
            run.record(path, lambda: record)
        run.say(judge.headline(record))
    record = run.seen(lambda: Record.read(path).record())
    if run.main:
        shutil.rmtree(path.parent / JUDGING, ignore_errors=True)
    flat = judged_scalars(record)
    flat["judge/judging_seconds"] = run.progress.seconds.get("judge", 0.0)  # all judgements so far
    trainer.metrics.write(step, flat, always=True)
    keep_judgement(run, step)
    missed = run.seen(lambda: missed_checks(run.folder))
    if run.config.judge.live == "checkpoint" and step in missed and len(missed) >= MOST_MISSES:
        if run.config.target.at_server:
            raise SelfCheckError(
                f"new responses of the server differ from the stored ones by more than chance at {len(missed)} checkpoints (steps "
                f"{', '.join(map(str, missed))}), so another model or other settings answer now; give the run another name, or "
                "set judge.live: never to go on by replay alone"
            )
        raise SelfCheckError(
            f"live decoding and replay differ by more than chance at {len(missed)} checkpoints (steps "
            f"{', '.join(map(str, missed))}), so acceptance here is not what an engine would see; try target.dtype: float32, "
            "or set judge.live: end to go on by replay alone"
        )


def replay_now(trainer: Trainer, judge: DraftJudge, checkpoint: Checkpoint) -> None:
    """Between checkpoints: write held-out alpha and tau of the current weights, by replay, to the metrics."""
    run, step = trainer.run, checkpoint.step
    with run.progress.timed("judge"):
        draft = checkpoint.draft(everywhere=False)
        if draft is not None:
            reading = judge.replay_now(draft)
            trainer.metrics.write(step, {f"replay/{key}": value for key, value in reading.items()}, always=True)
            run.say(f"step {step:>5}  replay  alpha {reading['alpha']:.3f}  tau {reading['tau']:.2f} by replay")
        run.wait()


def command(options: TrainOptions) -> int:
    """A run from config to verdict; `understudy train CONFIG` does the same, also in a project that has its own package `data`.

    The same command continues a killed run. Exit status: 0 done, 1 failed self-check, 2 user error, 130 interrupted.
    """
    run: Run | None = None
    try:
        overrides = options.overrides or []
        config = for_engine(load_config(options.config, overrides))
        if options.dry_run:
            print_plan(config, options.num_processes or 1)
            return 0
        launch_if_asked(options, "distill.train", options.config, *overrides)
        from distill.commands.readback.clock import time_serving_engine  # Imported late: a dry run starts no engine.

        run = start(config)
        distil(run)
        run.end(lambda: time_serving_engine(run))  # Nothing else needs memory now, and no rank waits for it.
    except (Exception, KeyboardInterrupt) as error:
        if run is not None and isinstance(error, Interrupted):
            run.end()  # all ranks have agreed to stop
            return exit_status(error)
        return exit_status(error, run.accelerator.trackers if run is not None else ())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, by default the process's own. Returns the exit status."""
    return run_program(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
