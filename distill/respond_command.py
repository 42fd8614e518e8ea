"""`understudy respond CONFIG [--signal topk|sampled|none] [key=value ...]`: the target answers, and says what it thought.

Responses as training makes them, and beside them the target's distributions at every response token, so that training with
`signal.source=store` needs no target. On several devices: `accelerate launch -m distill.respond_command CONFIG ...`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.collate import Example, collate
from data.signal_codec import RELATIVE_ERROR
from data.signal_store import SignalStore, signal_manifest
from data.store import MANIFEST, Row
from distill import checkpoint
from distill.capture import CapturingTeacher
from distill.config import RunConfig, load_config
from distill.faults import explain
from distill.guard import check_imports
from distill.prompts import load_prompts
from distill.responses import RunStores
from distill.served_target import ServedTarget, TargetFacts
from distill.student import context_of
from distill.teacher import Teacher
from speculative.errors import UserError

KINDS = ("topk", "sampled", "none")
FOLDER = "signal"
USAGE = """usage: understudy respond CONFIG [--signal topk|sampled|none] [key=value ...]

The target answers the prompts of CONFIG into the run's folder. With --signal its distributions at every response token are
kept too: topk the k most probable tokens and the rest's mass (signal.k), sampled unbiased draws (signal.samples). Without
--signal: what the config's signal.source needs. A killed run goes on when the same command is given again."""


def open_signal_store(
    config: RunConfig, examples: Sequence[Example], facts: TargetFacts, accelerator: Accelerator, *, repair: bool
) -> SignalStore:
    """The run's signal store, open on every rank; all ranks call it.

    ``repair``: whoever fills the store; it is created, and what is damaged counts as missing. Otherwise it must be complete.

    Raises:
        UserError: made from another target, examples or settings; not there or not complete (the command is named); damaged.
    """
    signal, store = config.signal, SignalStore(config.folder / FOLDER)
    manifest = signal_manifest(
        signal.kind, signal.k if signal.kind == "topk" else signal.samples, examples, temperature=config.loss.temperature,
        vocab_rows=facts.vocab_rows, target=facts.fingerprint, target_dtype=facts.dtype, seed=config.seed,
    )  # fmt: skip
    command = f"understudy respond {config.folder / 'config.yaml'} --signal {signal.kind}"
    if not repair and not (store.folder / MANIFEST).exists():
        raise UserError(f"{store.folder}: signal.source is store, and there is none; run `{command}` first")
    lengths, rank = [example.response_tokens for example in examples], accelerator.process_index
    if accelerator.is_main_process:
        store.open(manifest, lengths, rank=rank, repair=repair)
    accelerator.wait_for_everyone()  # it is there before another rank looks
    if not accelerator.is_main_process:
        store.open(manifest, lengths, rank=rank, repair=repair)
    if not repair and (missing := store.missing()):
        raise UserError(
            f"{store.folder}: the signal of {len(missing)} of {len(examples)} examples is missing; run `{command}` first"
        )
    return store


def fill(
    config: RunConfig, store: SignalStore, target: ServedTarget, examples: Sequence[Example], accelerator: Accelerator
) -> None:
    """Captures what the store lacks, this rank its share: micro-batches of like length, the longest first.

    What an earlier run left is checked first. The target's weights are not touched when nothing is missing.

    Raises:
        UserError: disk full; a target whose distributions are not finite.
    """
    show = accelerator.is_main_process
    if show and store.present().any():
        store.verify(show=True)
    accelerator.wait_for_everyone()
    missing = store.missing()
    accelerator.wait_for_everyone()  # all have counted before one of them writes: else shares would overlap or gape
    size = config.train.micro_batch_size
    order = sorted(missing, key=lambda index: (-len(examples[index].input_ids), index))
    mine = [order[start : start + size] for start in range(0, len(order), size)]
    mine = mine[accelerator.process_index :: accelerator.num_processes]
    if mine:
        pad_id = target.tokenizer.pad_token_id if target.tokenizer.pad_token_id is not None else 0
        teacher = CapturingTeacher(
            Teacher(target.model), store, config.signal, config.loss.temperature, config.seed, config.loss.chunk_tokens
        )
        with _bar(sum(map(len, mine)), show) as bar:
            for indices in mine:
                batch = collate([examples[index] for index in indices], pad_id, indices)
                teacher.fill(batch.to(accelerator.device))
                bar.advance(bar.task_ids[0], len(indices))
    accelerator.wait_for_everyone()


def _bar(total: int, show: bool) -> Progress:
    columns = (
        TextColumn("[bold]teacher signal"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    # On stderr: stdout may be JSON for a script.
    bar = Progress(*columns, console=Console(stderr=True), disable=not show, refresh_per_second=2)
    bar.add_task("", total=total)
    return bar


def signal_line(config: RunConfig, facts: dict[str, Any]) -> str:
    """What is stored, in one line: size, and what truncation can do to an acceptance rate computed from it."""
    size = f"{facts['bytes_per_token']:.0f} bytes a token, {facts['tokens']:,} tokens of {facts['examples']:,} examples"
    if facts["kind"] == "topk":
        return (
            f"signal: topk k {config.signal.k}, {size}; tail mass mean {facts['tail_mean']:.4f}, at most {facts['tail_max']:.4f} "
            f"(alpha from the store is low by at most the mean, give or take {RELATIVE_ERROR} of rounding)"
        )
    return (
        f"signal: sampled {config.signal.samples} draws, {size}; {facts['distinct_mean']:.1f} distinct ids a token, at most "
        f"{facts['distinct_max']:.0f} (unbiased for forward_kl and ce)"
    )


def _resolved(config_path: str | Path, overrides: Sequence[str], signal: str | None) -> tuple[RunConfig, bool]:
    """(the config that training from the store will have, whether a signal is wanted)."""
    if signal is not None and signal not in KINDS:
        raise UserError(f"--signal {signal}: one of {', '.join(KINDS)}")
    config = load_config(config_path, overrides)
    if config.target is None:
        raise UserError(f"{config_path}: target: null has nobody to answer; respond goes with a target")
    if signal == "none" or (signal is None and config.signal.source == "online"):
        return config, False
    asked = [*overrides, f"signal.kind={signal or config.signal.kind}"]
    if config.signal.source == "online":
        asked.append("signal.source=store")  # an objective that the signal cannot serve is told before the work
    return load_config(config_path, asked), True


def run(config_path: str | Path, overrides: Sequence[str] = (), signal: str | None = None) -> dict[str, Any] | None:
    """Makes the responses of a run, and the signal store when one is wanted; returns its facts.

    Raises:
        UserError: odd config, folder of another run, target or prompts not there, disk full.
    """
    from distill.train import context_limit, new_accelerator  # here, for training opens its store by this module

    config, wanted = _resolved(config_path, overrides, signal)
    assert config.target is not None
    accelerator = new_accelerator(project_dir=str(config.folder))
    try:
        if accelerator.is_main_process:
            checkpoint.claim_folder(config)
        accelerator.wait_for_everyone()
        target = ServedTarget(config.target, accelerator.device, config.folder)
        context = context_limit(config, target.facts.context_length, context_of(config.student))
        sets = load_prompts(config.data, target.tokenizer, context, config.serving.max_tokens, config.judge.prompts)
        accelerator.print(sets.report)
        stores = RunStores(config, accelerator, target, target.tokenizer)
        rows = stores.training(sets.train)
        stores.heldout_by_rule(sets.heldout)
        if accelerator.is_main_process:
            target.remember()
        tokens = int(np.sum([row.example().response_tokens for row in rows]))
        accelerator.print(f"{len(rows)} responses of {tokens:,} tokens")
        return _signal(config, rows, target, accelerator) if wanted else None
    finally:
        accelerator.end_training()


def _signal(config: RunConfig, rows: Sequence[Row], target: ServedTarget, accelerator: Accelerator) -> dict[str, Any]:
    examples = [row.example() for row in rows]
    store = open_signal_store(config, examples, target.facts, accelerator, repair=True)
    try:
        if target.config.endpoint is not None:
            rank, ranks = accelerator.process_index, accelerator.num_processes
            target.endpoint.topk(store, rows, config.signal.k, rank=rank, ranks=ranks, label="teacher signal")
            accelerator.wait_for_everyone()
        else:
            fill(config, store, target, examples, accelerator)
        assert not store.missing()
        facts = store.facts()
    finally:
        store.close()
    accelerator.print(signal_line(config, facts))
    accelerator.print(f"train from it with signal.source=store signal.kind={config.signal.kind} behind the config")
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0 done, 2 a mistake of the user, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        check_imports()
        signal, rest = _without_option(arguments, "--signal")
        run(rest[0], rest[1:], signal)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        print(explained[0], file=sys.stderr)
        return explained[1]
    return 0


def _without_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """(value of an option or None, the other arguments, at least one). Raises UserError."""
    value, rest, left = None, [], list(arguments)
    while left:
        argument = left.pop(0)
        if argument == name:
            if not left:
                raise UserError(f"{name}: one of {', '.join(KINDS)}")
            value = left.pop(0)
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    if not rest:
        raise UserError("respond: which config? e.g. understudy respond configs/demo.yaml --signal topk")
    return value, rest


if __name__ == "__main__":
    sys.exit(main())
