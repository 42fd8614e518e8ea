"""`accelerate launch -m distill.train CONFIG key=value ...`: a run from config to verdict, resumed where it stands."""

import contextlib
import gc
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from transformers import PreTrainedModel

from data.collate import Example
from data.respond import RenderedPrompt
from data.store import Row, write_json
from distill import checkpoint
from distill.batches import BatchSource, check_packing
from distill.conclusion import conclude_run, require_served, write_conclusion
from distill.config import RunConfig, TargetConfig, load_config
from distill.corpus import HeldoutLoss, window_examples, windows_of
from distill.faults import explain
from distill.guard import check_imports
from distill.heads import SplitModel
from distill.loop import Loop, check_batches, resume_point
from distill.make_student import make_student, refuse_impossible
from distill.make_teacher import make_teacher
from distill.objective import Objective
from distill.plot import plot_run
from distill.prompts import load_prompts
from distill.provenance import describe_run, tokenizer_fingerprint
from distill.report_panels import log_result
from distill.responses import RunStores, decode_settings
from distill.rollouts import Rollouts, text_examples
from distill.served_target import ServedTarget
from distill.sharding import gathered, require_deepspeed, settle_launcher, shard_teacher
from distill.student import (
    DraftModule,
    context_of,
    find_student,
    from_architecture,
    load_model,
    load_tokenizer,
)
from distill.teacher import Teacher
from distill.tracking import start_trackers
from distill.validate import DraftJudge
from distill.vocabulary import vocabulary_rows
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, self_checks
from speculative.verify import Rule

# Responses that layers and channels are chosen by.
CALIBRATION_TEXTS = 32

USAGE = """usage: accelerate launch -m distill.train CONFIG [key=value ...]

CONFIG is a YAML file such as configs/demo.yaml; overrides reach any key:
    optim.lr=3e-4  loss.name=forward_kl  data.train.0.path=prompts.jsonl
On one CPU or GPU `python -m distill.train CONFIG` does the same. A killed run goes on when the same command is given again."""


def make_objective(config: RunConfig) -> Objective:
    """The objective that the config names."""
    loss, weighting = config.loss, config.loss.weighting
    # Greedy serving has no temperature: the estimate of alpha on the progress line is then the one at temperature 1.
    serving_temperature = config.serving.temperature or 1.0
    return Objective(
        config.loss_weights(0), loss.temperature, loss.beta, loss.eta, loss.chunk_tokens, serving_temperature,
        weighting=weighting.name if weighting.name != "position" else "none", keep=weighting.keep, compile=config.train.compile,
    )  # fmt: skip


def make_reference(config: RunConfig, target: ServedTarget) -> Teacher | None:
    """The draft that loss.weighting: selected compares with.

    Raises:
        UserError: not there, or of another vocabulary.
    """
    path = config.loss.weighting.reference
    if path is None:
        return None
    name = find_student(path)
    reference = load_model("loss.weighting.reference", name)
    if vocabulary_rows(reference.config) != target.facts.vocab_rows:
        raise UserError(
            f"loss.weighting.reference {path!r}: {vocabulary_rows(reference.config)} vocabulary rows, the target has "
            f"{target.facts.vocab_rows}; give a draft distilled for this target"
        )
    return Teacher(reference.to(target.device))  # type: ignore[arg-type]


def new_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the best device that has float64, which the sums need: Apple's GPU does not, its CPU does."""
    # The other ranks wait while the main process judges: for longer than the usual ten minutes on real prompts.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    return Accelerator(cpu=torch.backends.mps.is_available(), kwargs_handlers=[patience], **options)


def start(config: RunConfig) -> Accelerator:
    """Claims the run's folder and starts Accelerate and the trackers.

    Raises:
        UserError: the folder holds another config or cannot be written; a tracker is not installed.
    """
    require_deepspeed()
    accelerator = new_accelerator(
        mixed_precision=config.train.mixed_precision,
        log_with=list(config.tracking.trackers) or None,
        project_dir=str(config.folder),
    )
    settle_launcher(accelerator, config)
    check_batches(config.train, accelerator.num_processes)
    if accelerator.is_main_process:
        checkpoint.claim_folder(config)
    accelerator.wait_for_everyone()
    set_seed(config.seed)
    start_trackers(
        accelerator, config.tracking.trackers, config.tracking.project, config.name, config.model_dump(mode="json")
    )
    return accelerator


def pretrain(config: RunConfig, accelerator: Accelerator) -> None:
    """Trains a model from text alone (loss ce, target null); `best` is the checkpoint with the lowest held-out loss."""
    student_config = config.student
    if student_config.path is None and student_config.tokenizer is None:
        raise UserError("student.tokenizer: name the tokenizer's directory (make one with `understudy tokenizer`)")
    tokenizer = load_tokenizer(student_config.tokenizer or str(student_config.path))
    if student_config.architecture is not None:
        student = from_architecture(student_config.architecture, tokenizer, len(tokenizer), config.seed)
    else:
        student = load_model(
            "student.path", str(student_config.path), dtype=torch.float32, revision=student_config.revision
        )
    if student_config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    if tokenizer.eos_token_id is None:
        raise UserError("student.tokenizer: it has no eos token, which separates documents")
    window = int(config.train.window or 0)
    windows = windows_of(config.data.train, tokenizer, window)
    heldout = (
        windows_of(config.data.heldout, tokenizer, window) if config.data.heldout else windows[-len(windows) // 50 :]
    )
    if not config.data.heldout:
        windows = windows[: -len(windows) // 50]
        if not len(windows):
            raise UserError("data: one window of text is too little to hold some out; give more text or data.heldout")
    accelerator.print(f"{windows.size:,} training tokens, {sum(p.numel() for p in student.parameters()):,} parameters")
    progress, _ = resume_point(config)
    provenance = describe_run(config.seed) | {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "training_tokens": int(windows.size),
    }
    module = DraftModule(student, make_objective(config))
    if config.train.compile:
        module.inner.base_model.compile(dynamic=True)  # batches differ in width
    validator = HeldoutLoss(config, accelerator, heldout)
    loop = Loop(config, accelerator, module, None, window_examples(windows), tokenizer, validator, progress, provenance)
    loop.fit()
    accelerator.print(
        f"best: step {loop.progress.best_step}, held-out loss {-(loop.progress.best_score or 0):.4f}, {config.folder}/best"
    )


def load_target(config: TargetConfig, device: torch.device) -> tuple[PreTrainedModel, Any, torch.dtype]:
    """(target on its device, its tokenizer, the dtype its weights are saved in).

    Raises:
        UserError: not there, not loadable, hub not reachable.
    """
    target = ServedTarget(config, device)
    return target.model, target.tokenizer, target.saved_dtype


def context_limit(config: RunConfig, *limits: int | None) -> int:
    """Tokens of prompt + response that fit: the smallest limit of the models, or a lower `data.context_length`."""
    return min([limit for limit in (*limits, config.data.context_length) if limit], default=1 << 20)


def positions_of(model: PreTrainedModel) -> int | None:
    """The context that a model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_instrument(
    config: RunConfig, accelerator: Accelerator, target: ServedTarget, prompts: Sequence[RenderedPrompt]
) -> dict[str, Any]:
    """The self-checks on the first held-out prompts, once per run.

    Raises:
        SelfCheckError: the judge contradicts itself.
    """
    path = config.folder / "self_checks.json"
    found = path.exists()
    accelerator.wait_for_everyone()  # all ranks have looked before one of them writes
    if found:
        return json.loads(path.read_text(encoding="utf-8"))
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:8]]
    result = self_checks(target.model, keyed, decode_settings(config, target, config.judge.gamma, config.judge_rule))
    if accelerator.is_main_process:
        write_json(path, result)
    accelerator.print(
        f"self-checks: target as its own draft alpha {result['alpha_live']:.3f} live, {result['alpha_replay']:.3f} replay; "
        f"speculative greedy = plain greedy on {result['greedy_equal']}/{result['prompts']} prompts"
    )
    accelerator.wait_for_everyone()
    return result


def distil(config: RunConfig, accelerator: Accelerator) -> None:
    """Responses, self-checks, training with judged checkpoints, verdict and plot."""
    assert config.target is not None
    progress, _ = resume_point(config)
    target = ServedTarget(config.target, accelerator.device, config.folder)
    tokenizer = target.tokenizer
    context = context_limit(config, target.facts.context_length, context_of(config.student))
    sets = load_prompts(config.data, tokenizer, context, config.serving.max_tokens, config.judge.prompts)
    accelerator.print(sets.report)
    refuse_impossible(config, target.side.config, target.facts.vocab_rows)
    # Before the long work: whatever is wrong with the student is told now, not after the target has answered. Only one that is
    # carved by measurements on the target's own text has to wait for that text.
    longest = max(len(prompt.prompt_ids) for prompt in sets.heldout) + config.serving.max_tokens
    require_served(config, target, longest)
    student = None if carved_by_measurement(config) else first_student(config, accelerator, target)
    clock = _Clock(progress)
    # Without the target's weights there is no instrument to check: replay alone judges.
    live = config.judge.live != "never"
    checks = check_instrument(config, accelerator, target, sets.heldout) if live else {}
    clock.stop("self_checks")
    stores = RunStores(config, accelerator, target, tokenizer)
    wanted = config.data.mix.target or carved_by_measurement(config)
    rows = stores.training(sets.train) if wanted else []  # on-policy alone trains on nothing of them
    heldout = stores.heldout_by_rule(sets.heldout)
    clock.stop("respond")
    if student is None:
        student = first_student(config, accelerator, target, rows)
    module = DraftModule(student, make_objective(config))
    if config.train.compile:
        module.inner.base_model.compile(dynamic=True)  # batches differ in width
    accelerator.print(
        f"{len(rows)} responses of {sum(map(len, (row.log_target_probs for row in rows))):,} tokens; "
        + (f"target {target.facts.parameters:,} parameters, " if target.facts.parameters else "")
        + f"draft {_parameters(module):,}"
    )
    provenance = describe_run(config.seed) | {
        "target": config.target.path, "target_fingerprint": target.facts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer), "sampling": decode_settings(config, target).sampling.as_dict(),
    }  # fmt: skip
    judge = DraftJudge(config, accelerator, target, heldout)
    examples = [row.example() for row in rows]
    teacher = make_teacher(config, target, examples, accelerator)
    reference = make_reference(config, target)
    if config.train.packing is not None:
        check_packing(SplitModel(module.inner))
        if reference is not None:
            check_packing(reference.split)
        if target.in_memory:  # it then reads packed rows too; a store was made from padded ones
            check_packing(SplitModel(target.model))
    batches = make_batches(config, accelerator, target, sets.train, examples, context)
    if accelerator.is_main_process:
        target.remember()
    if config.signal.source == "store" and config.judge.live != "checkpoint":
        target.release()  # the store speaks for it, and replay judges: until the verdict nobody needs its weights
    if config.target.shard and accelerator.num_processes > 1 and target.in_memory:
        shard_teacher(target.model)
    loop = Loop(
        config, accelerator, module, teacher, examples, tokenizer, judge, progress, provenance, batches,
        reference,
    )  # fmt: skip
    loop.fit()
    if not target.in_memory:
        # What trained is in the checkpoints; the verdict wants the target in its place.
        accelerator.free_memory()
        del loop, module, student, batches, teacher, reference
        gc.collect()
    with gathered(target.model) if target.in_memory else contextlib.nullcontext():
        if accelerator.is_main_process:
            domains = sorted({prompt.domain for prompt in sets.train})
            _conclude(config, accelerator, target, heldout, checks, progress, context, domains)
        accelerator.wait_for_everyone()


def _conclude(
    config: RunConfig,
    accelerator: Accelerator,
    target: ServedTarget,
    heldout: dict[Rule, list[HeldoutResponse]],
    checks: dict[str, Any],
    progress: checkpoint.Progress,
    context: int,
    trained_on: Sequence[str],
) -> None:
    """Verdict, report and plot, on the main process."""
    clock = _Clock(progress)
    result = conclude_run(config, target, heldout, checks, progress.seconds, context, trained_on)
    plot_run(config.folder)
    clock.stop("verdict")
    result["verdict"]["seconds"] = {stage: round(value, 2) for stage, value in progress.seconds.items()}
    write_conclusion(config.folder, result)
    log_result(accelerator, result)
    accelerator.print(result["verdict"]["sentence"])


def carved_by_measurement(config: RunConfig) -> bool:
    """Whether the draft's first weights are chosen by what the target does on text."""
    return config.student.layers == "auto" or config.student.intermediate_size is not None


def first_student(config: RunConfig, accelerator: Accelerator, target: ServedTarget, rows: Sequence[Row] = ()) -> Any:
    """The draft before training. What was chosen for it is kept in student.json: a resumed run and every rank have the same."""
    wants_weights = config.student.init == "carved" or config.student.embeddings == "target"
    source: Any = target.model if wants_weights else target.side
    path, notes = config.folder / "student.json", dict[str, Any]()
    # Every n-th response, so that all domains have a say.
    texts = [list(row.input_ids) for row in rows[:: max(1, len(rows) // CALIBRATION_TEXTS)]][:CALIBRATION_TEXTS]

    def made() -> Any:
        known = json.loads(path.read_text(encoding="utf-8")).get("layers") if path.exists() else None
        layers = known["layers"] if isinstance(known, dict) else None
        return make_student(config, source, target.tokenizer, texts or None, layers=layers, notes=notes)

    student = made() if accelerator.is_main_process else None
    if accelerator.is_main_process and notes and not path.exists():
        write_json(path, notes)
        accelerator.print(f"student: {path} says what was measured and chosen")
    accelerator.wait_for_everyone()
    return student if student is not None else made()


def make_batches(
    config: RunConfig,
    accelerator: Accelerator,
    target: ServedTarget,
    prompts: list[RenderedPrompt],
    examples: list[Example],
    context: int,
) -> BatchSource:
    """The source of micro-batches, with rollouts and general text where the mix has a share of them."""
    mix, data, tokenizer = config.data.mix, config.data, target.tokenizer
    rollouts, text = None, None
    if mix.student or mix.speculative:
        rollouts = Rollouts(config, accelerator, target.model, tokenizer, prompts, config.folder)
        longest = max(len(p.prompt_ids) for p in prompts) + (data.rollouts.max_tokens or config.serving.max_tokens)
        if config.train.packing is not None and longest > config.train.packing:
            raise UserError(
                f"train.packing = {config.train.packing}: a rollout may have {longest} tokens; set it to at least that"
            )
    if mix.text:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "data.text: the target's tokenizer has no eos token, which separates documents; set data.mix.text to 0"
            )
        if data.text_window > context:
            raise UserError(
                f"data.text_window = {data.text_window}: the models take {context} tokens; set it to at most that"
            )
        text = text_examples(data.text, tokenizer, data.text_window)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return BatchSource(config, examples, pad_id, accelerator.process_index, accelerator.num_processes, rollouts, text)


class _Clock:
    """Time since the last stop, booked under a stage."""

    def __init__(self, progress: checkpoint.Progress) -> None:
        self.progress, self.started = progress, time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.progress.spend(stage, now - self.started)
        self.started = now


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0 done, 1 failed self-check, 2 a mistake of the user, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    accelerator: Accelerator | None = None
    try:
        check_imports()
        config = load_config(arguments[0], arguments[1:])
        accelerator = start(config)
        if config.target is None:
            pretrain(config, accelerator)
        else:
            distil(config, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        print(explained[0], file=sys.stderr)
        return explained[1]
    finally:
        if accelerator is not None:
            accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
