"""`understudy respond CONFIG [--signal topk|none] [key=value ...]`: store responses and probabilities of the target.

Makes the same responses as training does. With --signal it also stores the target's probabilities at every response token, so that
training with `signal.source=store` never loads the target. On several devices: `understudy respond CONFIG --num-processes 8`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from data.responses.store import StoredRows
from data.signals.store import SignalFacts
from distill.config.command_line import RespondOptions, run_program
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.serving_engine import for_engine
from distill.faults import exit_status
from distill.models.target import Target
from distill.run.launcher import launch_if_asked
from distill.run.responses import RunData
from distill.run.run import Run, new_accelerator
from distill.run.session import preflight
from distill.training.signal import fill, open_signal_store, signal_line
from speculative.errors import UserError

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


def run(config_path: str | Path, overrides: Sequence[str] = (), signal: str | None = None) -> SignalFacts | None:
    """Make the responses of a run and, if wanted, its signal store; return the facts of that store.

    Raises UserError: invalid config, folder of another run or in use, missing target or prompts, disk full.
    """
    config, wanted = _resolved(config_path, overrides, signal)
    ranks = Run(config, new_accelerator(project_dir=str(config.folder)))
    ranks.claim()
    target = Target(config.target, ranks.device, ranks.folder)
    with target.single_load():
        preflight(ranks, target)
        data = RunData(ranks, target)
        ranks.say(data.prompts.report)
        rows = data.training
        assert data.heldout
        ranks.say(f"{len(rows)} responses of {rows.response_tokens_N.sum():,} tokens")
        facts = _signal(ranks, rows, target) if wanted else None
    ranks.end()
    return facts


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
        overrides, signal = options.overrides or [], options.signal or None
        _resolved(options.config, overrides, signal)
        asked = ["--signal", signal] if signal else []
        launch_if_asked(options, "distill.respond", options.config, *overrides, *asked)
        run(options.config, overrides, signal)
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, by default the process's own, and return the exit status of `command`."""
    return run_program(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
