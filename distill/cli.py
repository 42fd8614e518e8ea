"""The `understudy` command. Training itself is `accelerate launch -m distill.train CONFIG`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from distill.commands.generate.options import GenerateOptions
from distill.commands.options import (
    CheckExportOptions,
    CompareOptions,
    DemoOptions,
    DriftOptions,
    EvaluateOptions,
    ExportOptions,
    ProbeOptions,
    ReadbackOptions,
    ReportOptions,
    ServeOptions,
    SweepOptions,
)
from distill.config.command_line import RespondOptions, TrainOptions, command_of
from distill.config.layout import EXPORT
from distill.faults import check_imports, exit_status
from distill.live.gateway.options import GatewayOptions
from distill.live.loop.options import LoopOptions
from distill.live.refresh.options import RefreshOptions
from distill.live.rollout.options import RolloutOptions
from distill.live.traffic.options import ExportTrafficOptions, ForgetOptions, ShowOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Draft models that a target LLM agrees with: evaluate and export them. "
    "Train with `accelerate launch -m distill.train CONFIG key=value ...`.",
)
READER_LEFT = 141  # As the shell reports a program ended by SIGPIPE.


def command(program: Callable[[Any], int | None]) -> None:
    """Registers a function of a dataclass of options. What is heavy is imported when a command runs, never for --help."""
    app.command()(command_of(program))


@command
def demo(options: DemoOptions) -> int:
    """Distil, judge and export a draft for the embedded target; ends with the numbers and what to type next."""
    from distill import train as program
    from distill.commands.export import export_run
    from distill.commands.show import show_run
    from distill.config.load import load_config

    overrides = list(options.overrides or [])
    status = program.command(TrainOptions(options.config, overrides))
    if status == 0:
        run = load_config(options.config, overrides).folder
        export_run(ExportOptions(run, run / EXPORT, overwrite=True))
        show_run(run)
    return status


@command
def train(options: TrainOptions) -> int:
    """Train on this machine's one device; for several use `accelerate launch -m distill.train CONFIG`."""
    from distill import train as program

    return program.command(options)


@command
def evaluate(options: EvaluateOptions) -> int:
    """Judge a draft by real speculative decoding on held-out prompts: a table and result.json (`understudy report result.json`)."""
    from distill.commands.evaluate.command import evaluate_command

    return evaluate_command(options)


@command
def probe(options: ProbeOptions) -> None:
    """Go or no-go for a target and its candidate drafts, in minutes, before anything is trained.

    understudy probe TARGET DRAFT --prompts prompts.jsonl --chat

    understudy probe TARGET DRAFT --t-target 25ms --t-draft 3ms     (plan for hardware that is not here)
    """
    from distill.commands.probe.probe import probe
    from distill.commands.probe.screen import print_probe

    print_probe(Console(), probe(options, Console(stderr=True)))


@command
def report(options: ReportOptions) -> None:
    """One self-contained HTML page of a run (report.html), and its numbers as JSON beside it.

    understudy report runs/demo --t-target 25ms --t-draft 3ms

    understudy report runs/demo --price-per-hour 2.49
    """
    from distill.report.money import parse_prices
    from distill.report.page import given_times, report_command
    from distill.report.screen import print_money

    prices = parse_prices(options.price_per_hour)
    files = report_command(options.run, options.to, given_times(options.t_target, options.t_draft), prices)
    if prices is not None:
        print_money(Console(), files.result, prices)
    print(f"{files.html}\n{files.summary}")


@command
def compare(options: CompareOptions) -> int:
    """Drafts of one target on the same held-out text: one table, paired differences, a plot, an exit status for CI.

    understudy compare runs/new runs/old --fail-below tau=2.1 --fail-if-worse
    """
    from distill.commands.compare.compare import compare_command
    from distill.commands.compare.screen import print_comparison

    result, status = compare_command(options)
    print_comparison(Console(), result)
    return status


@command
def drift(options: DriftOptions) -> int:
    """Is the draft still as good as when it was judged? A server's acceptance log, or fresh prompts, against the run's own.

    understudy drift runs/demo --log vllm.log

    understudy drift runs/demo --prompts fresh.jsonl --plot drift.png

    Exit status: 0 no drift seen, 3 refresh advised, 2 a mistake.
    """
    from distill.commands.drift.drift import REFRESH, drift_command

    return REFRESH if drift_command(options, Console())["refresh"] else 0


@command
def readback(options: ReadbackOptions) -> int:
    """Does a running engine accept this run's draft as replay predicts, and write the target's own text?

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo --plain http://127.0.0.1:8001/v1

    Exit status: 0 it does, 1 it does not, 2 a mistake or a server that is gone.
    """
    from distill.commands.readback.readback import readback_command

    return 0 if readback_command(options, Console()).agrees else 1


@command
def respond(options: RespondOptions) -> int:
    """Let the target answer the prompts; with --signal, training needs it no more (signal.source=store).

    On several devices: `accelerate launch -m distill.respond CONFIG --signal topk`.
    """
    from distill import respond as program

    return program.command(options)


@command
def sweep(options: SweepOptions) -> None:
    """Train every combination of a grid, resumable, and compare them in one table with intervals."""
    from distill.commands.sweep.sweep import run_sweep

    run_sweep(options)


@command
def generate(options: GenerateOptions) -> None:
    """Text from a target, sped up by a draft; the text is the target's own. Numbers go to standard error.

    understudy generate embedded --prompt "def add(a, b):" --draft runs/demo/export --gamma auto
    """
    from distill.commands.generate.generate import generate_command

    print(*generate_command(options), sep="\n", file=sys.stderr)


@command
def export(options: ExportOptions) -> None:
    """Write the best draft as an ordinary Hugging Face directory with the commands to serve it."""
    from distill.commands.export import export_run
    from distill.report.screen import export_lines

    print("\n".join(export_lines(export_run(options))))


@command
def serve(options: ServeOptions) -> int:
    """Start an installed engine with the target and a run's exported draft, as SERVING.md says; Ctrl-C ends it.

    understudy serve runs/demo --port 8000 -- --enforce-eager --dtype float32
    """
    from distill.commands.serve import serve

    return serve(options)


@command
def gateway(options: GatewayOptions) -> None:
    """A streaming proxy before engines: splits traffic between drafts and logs what was accepted, hashes only unless --text.

    understudy gateway --engine http://127.0.0.1:8001 --log traffic/

    understudy gateway --engine URL --engine URL2 --share .1 --draft-version v0001 --draft-version v0002 --log traffic/ --text
    """
    from distill.live.gateway.command import gateway

    gateway(options)


@command
def check_export(options: CheckExportOptions) -> int:
    """Run an exported draft in transformers' own assisted generation: same greedy tokens? same tau as ours?"""
    from distill.commands.export import check_export

    return check_export(options)


@command
def refresh(options: RefreshOptions) -> int:
    """Train the served draft on what came, if that is worth it, and publish it as a version, if it is certainly better.

    understudy refresh runs/demo --traffic traffic/ --dry-run

    Exit status: 0 published or not needed, 1 the old draft stays or the training failed, 2 a mistake.
    """
    from distill.live.refresh.refresh import refresh_command

    return refresh_command(options, Console())


@command
def rollout(options: RolloutOptions) -> int:
    """Serve a version beside the current one, compare the two on live traffic, then move all of it, or go back.

    understudy rollout drafts/demo v0002 --log traffic/ --engine-command "understudy serve {draft} --port {port} -- --per-request-spec-decode-metrics detailed"

    Exit status: 0 the version serves, 3 it was taken back, 2 a mistake.
    """
    from distill.live.rollout.rollout import rollout

    return rollout(options)


@command
def loop_demo(options: LoopOptions) -> int:
    """The closed loop shown whole: traffic shifts, an alarm rings, a draft is trained anew and takes over; everything is killed once.

    Exit status: 0 all went as it should, 1 something did not (loop.json says what), 2 a mistake.
    """
    from distill.live.loop.loop import loop_demo

    return loop_demo(options)


traffic = typer.Typer(
    no_args_is_help=True, help="The log of live traffic: look at it, export it to train from, forget requests."
)
app.add_typer(traffic, name="traffic")


def traffic_show(options: ShowOptions) -> None:
    """What came, by slice and draft version, and how much of what was drafted was accepted, over time."""
    from distill.live.traffic.show import show_traffic

    show_traffic(options, Console())


def traffic_export(options: ExportTrafficOptions) -> None:
    """Prompts and the target's responses of a log (with --text), as a training run reads them: past to train on, latest held out.

    understudy traffic export traffic/ --run runs/demo --to exports/may
    """
    from distill.live.traffic.export import export_command

    export_command(options, Console())


def traffic_forget(options: ForgetOptions) -> None:
    """Remove requests from a log and from its exports for good; the gateway may be running.

    understudy traffic forget 4f1c2a --log traffic/
    """
    from distill.live.traffic.forget import forget_command

    forget_command(options, Console())


traffic.command("show")(command_of(traffic_show))
traffic.command("export")(command_of(traffic_export))
traffic.command("forget")(command_of(traffic_forget))


@app.command()
def show(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """The verdict of a finished run, with completions whose accepted tokens are marked."""
    from distill.commands.show import show_run

    show_run(run)


@app.command()
def config() -> None:
    """Every key of a config with its default and meaning."""
    from distill.config.table import config_table

    print(config_table())


def main() -> None:
    """Entry point: a mistake of the user is one line and exit status 2."""
    try:
        check_imports()
        app()
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): no more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_LEFT)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


if __name__ == "__main__":
    main()
