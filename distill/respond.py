"""`understudy respond CONFIG [--signal topk|none] [key=value ...]`: store responses and probabilities of the target.

Makes the same responses as training does. With --signal it also stores the target's probabilities at every response token, so that
training with `signal.source=store` never loads the target. On several devices: `understudy respond CONFIG --num-processes 8`, or
`--engine vllm`. With `--batch-requests FILE` and `--batch-results FILE` a batch service answers.
"""

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from data.responses.batch_file import CHAT, COMPLETIONS, in_words, read_results, write_requests
from data.responses.server_identity import NOISE
from data.responses.store import Row, StoredRows
from data.signals.store import SignalFacts
from distill.config.command_line import RespondOptions, run_program
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.replicas import Replicas
from distill.engines.protocol.serving_engine import for_engine
from distill.faults import exit_status
from distill.models.load import resolve
from distill.models.target import Target
from distill.run.launcher import launch_if_asked
from distill.run.responses import RunData
from distill.run.run import Run, new_accelerator
from distill.run.session import preflight
from distill.training.signal import fill, open_signal_store, signal_line
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.explain.text_fit import CERTAIN, evidence_of

KINDS = ("topk", "none")


def _resolved(config_path: str | Path, overrides: Sequence[str], signal: str | None) -> tuple[RunConfig, bool]:
    """(the config for training from the store, whether to store probabilities)."""
    if signal is not None and signal not in KINDS:
        raise UserError(f"--signal {signal}: choose one of {', '.join(KINDS)}")
    config = for_engine(load_config(config_path, overrides))
    if signal == "none" or (signal is None and config.signal.source == "online"):
        return config, False
    if config.signal.source == "online":  # Refuses an objective that the stored signal cannot serve before any work.
        config = for_engine(load_config(config_path, [*overrides, "signal.source=store"]))
    return config, True


def run(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    signal: str | None = None,
    options: RespondOptions | None = None,
) -> SignalFacts | None:
    """Make the responses of a run and, if wanted, its signal store; return the facts of that store.

    ``options``: who answers, if not the target in this process.

    Raises UserError: invalid config, folder of another run or in use, missing target or prompts, disk full.
    """
    config, wanted = _resolved(config_path, overrides, signal)
    options = options or RespondOptions(str(config_path))
    replicas = _replicas(options, config)
    ranks = Run(config, new_accelerator(project_dir=str(config.folder)))
    ranks.claim()
    target = Target(config.target, ranks.device, ranks.folder)
    with target.single_load():
        preflight(ranks, target)
        data = RunData(ranks, target)
        ranks.say(data.prompts.report)
        facts = None
        if not options.batch or _batch(options, data):
            engines: AbstractContextManager[None] = nullcontext()
            if replicas is not None and any(one.lacking for one in data.lacking()):
                engines = replicas.started(target, data.context, ranks.folder)
            with engines:
                rows = data.training
                assert data.heldout
            ranks.say(f"{len(rows)} responses of {rows.response_tokens_N.sum():,} tokens")
            facts = _signal(ranks, rows, target) if wanted else None
    ranks.end()
    return facts


def _replicas(options: RespondOptions, config: RunConfig) -> Replicas | None:
    """The replicas of --engine, not started. Raises UserError: options that exclude each other; see also `Replicas`."""
    words = options.engine_words
    ranks = max(options.num_processes or 1, int(os.environ.get("WORLD_SIZE", "1"))) > 1 or options.config_file
    if (options.engine or options.batch) and (ranks or config.target.endpoint is not None):
        raise UserError(
            "--engine, --batch-requests, --batch-results: one process does this, with the weights of target.path; leave "
            f"{'--num-processes' if ranks else 'target.endpoint'} out"
        )
    if options.batch and options.engine:
        raise UserError("--engine, --batch-requests, --batch-results: an engine answers, or a batch service; give one")
    if options.batch_chat and not options.batch_requests:
        raise UserError("--batch-chat: it is the form of the requests; give their file with --batch-requests")
    if not options.engine and (options.replicas or words):
        raise UserError(f"{'--replicas' if options.replicas else words[0]}: name the engine with --engine")
    return Replicas(options.engine, options.replicas, words) if options.engine else None


def _batch(options: RespondOptions, data: RunData) -> bool:
    """Read results and write requests, as the options say; return whether no answer is missing."""
    requests, results, say = options.batch_requests, options.batch_results, data.run.say

    def count() -> int:
        return sum(len(one.lacking) for one in wanted)

    wanted, command = data.lacking(), f"understudy respond {options.config}"
    if results:
        before, rows = count(), data.target.facts.vocab_rows
        left_out = read_results(results, wanted, rows, functools.partial(_prove, data.target))
        say(f"{results}: {before - count():,} answers taken; left out: {in_words(left_out)}")
        wanted = data.lacking()  # Logged answers are taken as soon as the held-out ones are there.
    if (missing := count()) and requests:
        url = CHAT if options.batch_chat else COMPLETIONS
        write_requests(requests, wanted, resolve(data.run.config.target.path), url, data.tokenizer)
        say(f"{requests}: {missing:,} requests (docs/respond.md); continue by {command} --batch-results RESULTS")
    elif missing:
        say(f"{missing:,} answers are missing: {command} --batch-requests FILE asks for them, {command} makes them")
    return not missing


def _prove(target: Target, rows: Sequence[Row], settings: DecodeSettings) -> None:
    """Raise UserError if a batch service certainly answered with another model, precision or kind of probabilities."""
    with target.loaded() as model:
        evidence = evidence_of(model, rows, settings.sampling)
    gaps = [one.log_target_probs - np.array(row.log_target_probs) for one, row in zip(evidence, rows, strict=True)]
    apart = float(np.abs(np.concatenate(gaps)).mean())
    if apart > NOISE or (settings.sampling.greedy and any(one.against > CERTAIN for one in evidence)):
        raise UserError(
            f"target.path {target.config.path}: certainly did not write the first {len(rows)} answers of the batch (log-probabilities are "
            f"{apart:.2f} nats apart); the service must run this model in {target.facts.dtype}, with probabilities after temperature, "
            "top-k and top-p (docs/respond.md)"
        )


def _signal(run: Run, rows: StoredRows, target: Target) -> SignalFacts:
    config = run.config
    store = open_signal_store(run, rows.examples, target.facts, repair=True)
    try:
        if target.config.at_server:
            target.endpoint.topk(store, rows, config.signal.k, rank=run.rank, ranks=run.ranks)
            run.wait()
        else:
            fill(run, store, target, rows.examples)
        run.await_seen(lambda: not store.missing(), store.folder)
        facts = store.facts()
    finally:
        store.close()
    run.say(signal_line(config.signal, facts))
    run.say("to train from it, add signal.source=store to the command")
    return facts


def command(options: RespondOptions) -> int:
    """Let the target answer the prompts of CONFIG, and with --signal store its probabilities at every response token too.

    topk: the k most probable tokens and the total of the rest (signal.k).
    The same command continues an interrupted run. Exit status: 0 done, 2 a mistake of the user, 130 interrupted.
    """
    try:
        overrides = (options.overrides or [])[: len(options.overrides or []) - len(options.engine_words)]
        signal = options.signal or None
        _resolved(options.config, overrides, signal)
        asked = ["--signal", signal] if signal else []
        if not (options.engine or options.batch):
            launch_if_asked(options, "distill.respond", options.config, *overrides, *asked)
        run(options.config, overrides, signal, options)
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, by default the process's own, and return the exit status of `command`."""
    return run_program(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
