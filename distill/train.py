"""`accelerate launch -m distill.train CONFIG key=value ...`: a run from config to verdict, resumed where it stands."""

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

from data.batches.examples import as_examples
from data.responses.rendered import RenderedPrompt, texts_of
from data.responses.store import StoredRows
from distill.config.command_line import TrainOptions, run_program
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.export.quantize import require_quantizer
from distill.faults import Interrupted, check_imports, exit_status
from distill.models.heads import SplitModel
from distill.models.load import tokenizer_fingerprint
from distill.models.student import carved_by_measurement, first_student, refuse_impossible
from distill.models.target import Target
from distill.report.plot import plot_run
from distill.report.wandb_panels import log_result
from distill.run import checkpoint
from distill.run.checkpoint import resume_point
from distill.run.folder import claim_folder
from distill.run.others import OtherTarget, open_others, require_unchanged
from distill.run.provenance import describe_run
from distill.run.responses import RunStores, decode_settings
from distill.run.session import check_instrument, new_accelerator, run_prompts
from distill.run.synthetic import with_synthetic
from distill.training.batches import check_packing, make_batches, make_objective, make_survival
from distill.training.loop import Loop
from distill.training.micro_batch import check_batches, chosen_micro_batch
from distill.training.module import DraftModule
from distill.training.sharding import launched_plugin, settle_launcher, settled_precision, sharded_teacher
from distill.training.signal import check_signal, make_reference, make_teacher
from distill.training.teacher import Teacher
from distill.training.tracking import start_trackers
from distill.verdict.conclusion import conclude_run, require_served, write_conclusion
from distill.verdict.judge import DraftJudge
from speculative.drafters.parallel import Drafting
from speculative.engine.parallel import mask_token_of
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule


def start(config: RunConfig) -> Accelerator:
    """Claims the run's folder and starts Accelerate and the trackers.

    Raises:
        UserError: the folder holds another config or cannot be written; a tracker, or what export.quantize asks for, is not installed.
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
    if disagreement is not None:
        accelerator.print(disagreement)
    if accelerator.device.type == "cuda":
        # Without it float32 products of a GPU leave its tensor cores idle: an eighth of the speed for digits no draft needs.
        torch.set_float32_matmul_precision("high")
        accelerator.print(f"arithmetic: autocast {precision}, float32 products in TF32")
    settle_launcher(accelerator, config.optim, plugin)
    check_batches(config.train, accelerator.num_processes)
    if accelerator.is_main_process:
        claim_folder(config)
    accelerator.wait_for_everyone()
    set_seed(config.seed)
    start_trackers(
        accelerator, config.tracking.trackers, config.tracking.project, config.name, config.model_dump(mode="json")
    )
    return accelerator


def distil(config: RunConfig, accelerator: Accelerator) -> None:
    """Responses, self-checks, training with judged checkpoints, verdict and plot."""
    # What the main process sees: on a network disk another machine sees a new file later.
    (progress,) = broadcast_object_list([resume_point(config.folder)[0] if accelerator.is_main_process else None])
    target = Target(config.target, accelerator.device, config.folder)
    tokenizer = target.tokenizer
    context, dated, sets = run_prompts(config, target, accelerator)
    accelerator.print(sets.report)
    refuse_impossible(config.student, target.side.config)
    check_signal(config.signal, target.facts.vocab_rows)
    settings = decode_settings(config.serving, config.seed, target)
    judged_at = settings.under(config.judge_rule, config.judge.gamma)
    # Before the long work: whatever is wrong with the student is told now, not after the target has answered. Only one that is
    # carved by measurements on the target's own text has to wait for that text.
    longest = max(len(prompt.prompt_ids) for prompt in sets.heldout) + config.serving.max_tokens
    require_served(config.judge.served, target, longest)
    measured, prompts = carved_by_measurement(config.student), (sets.train, sets.heldout)
    student = None if measured else first_student(config, accelerator, target, prompts=prompts)
    # Without the target's weights there is no instrument to check: replay alone judges.
    live = config.judge.live != "never"
    with progress.timed("self_checks"):
        checks = check_instrument(config, accelerator, target, sets.heldout, judged_at) if live else {}
    with progress.timed("respond"):
        stores = RunStores(config, accelerator, target)
        wanted = config.data.mix.target or measured
        train, told = with_synthetic(config, dated, sets.train, stores, context, accelerator)
        rows = stores.training(train) if wanted else None  # on-policy alone trains on nothing of them
        heldout = stores.heldout_by_rule(sets.heldout)
        others = open_others(config, accelerator, target, train, sets.heldout, context)
    if student is None:
        student = first_student(config, accelerator, target, rows or (), prompts)
    provenance = describe_run(config.seed) | {
        "target": config.target.path, "target_fingerprint": target.facts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer), "sampling": settings.sampling.as_dict(),
    } | ({"synthetic_prompts": told} if told else {})  # fmt: skip
    if others:
        provenance["other_targets"] = [one.told() for one in others]
        if accelerator.is_main_process:
            require_unchanged(config, provenance["other_targets"])
    drafting: Drafting = "autoregressive" if config.student.parallel is None else "parallel"
    judge = DraftJudge(
        config.judge, judged_at, accelerator, target, heldout, drafting, [(one.weight, one.heldout) for one in others]
    )
    loop = _loop(config, accelerator, target, student, train, rows, judge, progress, provenance, context, others)
    loop.fit()
    if config.target.shard:
        target.release()  # no piece is of use to the verdict, for which the main process loads the whole
    if not target.in_memory:
        # What trained is in the checkpoints; the verdict wants the target in its place.
        accelerator.free_memory()
        del loop, student
        gc.collect()
    if accelerator.is_main_process:
        domains = sorted(set(texts_of(sets.train, "domain").unique().to_pylist()))
        _conclude(config, accelerator, target, heldout, checks, progress, context, domains, others)
    accelerator.wait_for_everyone()


def _loop(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    student: Any,
    prompts: Sequence[RenderedPrompt],
    rows: StoredRows | None,
    judge: DraftJudge,
    progress: checkpoint.Progress,
    provenance: dict[str, Any],
    context: int,
    others: Sequence[OtherTarget],
) -> Loop:
    """The student with everything that trains it: objective, teacher, batches."""
    module = DraftModule(student, make_objective(config), make_survival(config))
    if config.train.compile:
        module.inner.base_model.compile(dynamic=True)  # batches differ in width
    accelerator.print(
        f"{len(rows or ())} responses of {rows.response_tokens_N.sum() if rows else 0:,} tokens; "
        + (f"target {target.facts.parameters:,} parameters, " if target.facts.parameters else "")
        + f"draft {sum(parameter.numel() for parameter in module.parameters()):,}"
    )
    examples = rows.examples if rows is not None else as_examples(())
    if config.target.shard and accelerator.num_processes > 1 and config.signal.source == "online":
        target.hold(sharded_teacher(accelerator, target))
    teacher = make_teacher(config, target, examples, accelerator, others)
    shares = [(one.weight, one.examples) for one in others]
    reference = make_reference(config.loss.weighting.reference, target)
    if config.train.packing is not None:
        check_packing(SplitModel(module.inner))
        if reference is not None:
            check_packing(reference.split)
        if target.in_memory:  # it then reads packed rows too; a store was made from padded ones
            check_packing(SplitModel(target.model))
    mask_token = mask_token_of(module.inner.config) if module.survival is not None else None
    batches = make_batches(config, accelerator, target, prompts, examples, context, teacher, mask_token, shares)
    if accelerator.is_main_process:
        target.remember()
    if config.signal.source == "store" and config.judge.live != "checkpoint":
        target.release()  # the store speaks for it, and replay judges: until the verdict nobody needs its weights
    # A target in pieces is asked by all ranks together, and each makes as many trials as its own memory wants.
    alone = target.in_memory and config.signal.source != "store" and not config.target.shard
    online = Teacher(target.model) if alone else None
    batches.micro_batch_size = chosen_micro_batch(
        config.train, config.optim, accelerator, module, online, batches.longest
    )
    return Loop(config, accelerator, module, teacher, batches, target.tokenizer, judge, progress, provenance, reference)


def _conclude(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    heldout: dict[Rule, list[HeldoutResponse]],
    checks: dict[str, Any],
    progress: checkpoint.Progress,
    context: int,
    trained_on: Sequence[str],
    others: Sequence[OtherTarget],
) -> None:
    """Verdict, report and plot, on the main process."""
    started = time.perf_counter()
    plot_run(config.folder)

    def seconds() -> dict[str, float]:
        progress.spend("verdict", time.perf_counter() - started)
        return progress.seconds

    result = conclude_run(config, target, heldout, checks, seconds, context, trained_on, others)
    write_conclusion(config.folder, result)
    log_result(accelerator, result)
    accelerator.print(result.verdict.sentence)


def command(options: TrainOptions) -> int:
    """A run from config to verdict: `accelerate launch -m distill.train CONFIG key=value ...`.

    CONFIG is a YAML file such as configs/demo.yaml; overrides reach any key:
    optim.lr=3e-4  loss.name=forward_kl  data.train.0.path=prompts.jsonl

    On one CPU or GPU `python -m distill.train CONFIG` does the same. A killed run goes on when the same command is given again.
    Exit status: 0 done, 1 failed self-check, 2 a mistake of the user, 130 interrupted.
    """
    accelerator: Accelerator | None = None
    try:
        check_imports()
        config = load_config(options.config, options.overrides or [])
        accelerator = start(config)
        distil(config, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        if accelerator is not None and isinstance(error, Interrupted):
            accelerator.end_training()  # all ranks have agreed to stop
            return exit_status(error)
        return exit_status(error, accelerator.trackers if accelerator is not None else ())
    accelerator.end_training()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, by default the process's own; returns the exit status of `command`."""
    return run_program(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
