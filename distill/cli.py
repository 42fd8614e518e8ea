"""The `understudy` command and the table of its subcommands."""

import os
import sys
from pathlib import Path

import typer

from distill.commands import options as of
from distill.commands.compare.options import CompareOptions
from distill.commands.drift.options import DriftOptions
from distill.commands.evaluate.options import EvaluateOptions
from distill.commands.generate.options import GenerateOptions
from distill.commands.probe.options import ProbeOptions
from distill.commands.readback.options import ReadbackOptions, TimeOptions
from distill.commands.sweep.options import SweepOptions
from distill.config.command_line import CheckPairOptions, RespondOptions, TrainOptions, lazy_command
from distill.config.retired import retired
from distill.faults import exit_status
from distill.live.options import (
    ExportTrafficOptions,
    ForgetOptions,
    GatewayOptions,
    RefreshOptions,
    RolloutOptions,
    ShowOptions,
)
from speculative.errors import UserError

READER_LEFT = 141  # The status that a shell reports for a program ended by SIGPIPE.
TRAIN, JUDGE, SERVE, WATCH = "Train", "Judge", "Serve", "Watch"  # Panels of --help.
# Name, panel, options (their docstring is the help), function: imported when the command runs, never for --help.
COMMANDS = (
    ("demo", TRAIN, of.DemoOptions, "distill.cli:demo"),
    ("train", TRAIN, TrainOptions, "distill.train:command"),
    ("respond", TRAIN, RespondOptions, "distill.respond:command"),
    ("sweep", TRAIN, SweepOptions, "distill.commands.sweep.sweep:run_sweep"),
    ("config", TRAIN, of.ConfigOptions, "distill.config.table:print_table"),
    ("probe", JUDGE, ProbeOptions, "distill.commands.probe.probe:probe_command"),
    ("evaluate", JUDGE, EvaluateOptions, "distill.commands.evaluate.evaluate:evaluate_command"),
    ("compare", JUDGE, CompareOptions, "distill.commands.compare.compare:compare"),
    ("show", JUDGE, of.ShowRunOptions, "distill.commands.show:show"),
    ("export", SERVE, of.ExportOptions, "distill.commands.export:export"),
    ("check-pair", SERVE, CheckPairOptions, "distill.commands.export:check_pair_command"),
    ("serve", SERVE, of.ServeOptions, "distill.commands.serve:serve"),
    ("time", SERVE, TimeOptions, "distill.commands.readback.clock:time_command"),
    ("generate", SERVE, GenerateOptions, "distill.commands.generate.generate:generate_command"),
    ("readback", WATCH, ReadbackOptions, "distill.commands.readback.readback:readback"),
    ("drift", WATCH, DriftOptions, "distill.commands.drift.drift:drift"),
    ("gateway", WATCH, GatewayOptions, "distill.live.gateway.command:gateway"),
    ("refresh", WATCH, RefreshOptions, "distill.live.refresh.refresh:refresh_command"),
    ("rollout", WATCH, RolloutOptions, "distill.live.rollout.rollout:rollout"),
)
TRAFFIC_COMMANDS = (
    ("show", ShowOptions, "distill.live.traffic.show:show_traffic"),
    ("export", ExportTrafficOptions, "distill.live.traffic.export:export_command"),
    ("forget", ForgetOptions, "distill.live.traffic.forget:forget_command"),
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train draft models that agree with your LLM, and measure whether they make it faster.",
)
traffic = typer.Typer(no_args_is_help=True, help="Show, export or erase logged traffic.")
for _name, _panel, _options, _place in COMMANDS:
    app.command(_name, rich_help_panel=_panel)(lazy_command(_options, _place))
for _name, _asked, _place in TRAFFIC_COMMANDS:
    traffic.command(_name)(lazy_command(_asked, _place))
app.add_typer(traffic, name="traffic", rich_help_panel=WATCH)


def demo(options: of.DemoOptions) -> int:
    """Train, judge and export the demo; returns the exit status of the training."""
    from distill import train
    from distill.commands.export import export_run
    from distill.config.layout import EXPORT
    from distill.config.load import config_file, load_config

    overrides = list(options.overrides or [])
    status = train.command(TrainOptions(options.config, overrides))
    if status == 0:
        config = load_config(options.config, overrides)
        run, trusted = config.folder, config.target.trust_remote_code  # As the training did.
        export_run(of.ExportOptions(run, run / EXPORT, overwrite=True, trust_remote_code=trusted))
        print(f"exported draft   {run / EXPORT}  (how to serve it: {run / EXPORT / 'SERVING.md'})")
        print(
            f"For your own model: copy {config_file(Path('configs/demo.yaml'))}, set target.path and data.train, then"
        )
        print("  understudy train my.yaml")
    return status


def main() -> None:
    """Entry point. A mistake of the user prints one line and exits with status 2."""
    try:
        until = sys.argv.index("--") if "--" in sys.argv else None  # Words behind it are an engine's.
        given = enumerate(sys.argv[:until])
        words = [word.partition("=")[0] for place, word in given if place == 2 or word.startswith("--")]
        if instead := retired(*sys.argv[1:2], *(f"{sys.argv[1]} {word}" for word in words)):
            raise UserError(instead)
        app()
    except BrokenPipeError:
        # The reader of a pipe has closed it (`| head`): write nothing more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_LEFT)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


if __name__ == "__main__":
    main()
