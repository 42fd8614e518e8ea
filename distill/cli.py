"""The `understudy` command: one row a subcommand."""

import os
import sys

import typer

from distill.commands import options as of
from distill.config.command_line import RespondOptions, TrainOptions, lazy_command
from distill.faults import exit_status
from distill.live.options import (
    ExportTrafficOptions,
    ForgetOptions,
    GatewayOptions,
    RefreshOptions,
    RolloutOptions,
    ShowOptions,
)

READER_LEFT = 141  # As the shell reports a program ended by SIGPIPE.
# name, what it is asked (its docstring is the help), the function that does it: imported when it runs, never for --help.
COMMANDS = (
    ("demo", of.DemoOptions, "distill.cli:demo"),
    ("train", TrainOptions, "distill.train:command"),
    ("evaluate", of.EvaluateOptions, "distill.commands.evaluate.evaluate:evaluate_command"),
    ("probe", of.ProbeOptions, "distill.commands.probe.probe:probe_command"),
    ("report", of.ReportOptions, "distill.commands.show:report"),
    ("compare", of.CompareOptions, "distill.commands.compare.compare:compare"),
    ("drift", of.DriftOptions, "distill.commands.drift.drift:drift"),
    ("readback", of.ReadbackOptions, "distill.commands.readback.readback:readback"),
    ("respond", RespondOptions, "distill.respond:command"),
    ("sweep", of.SweepOptions, "distill.commands.sweep.sweep:run_sweep"),
    ("generate", of.GenerateOptions, "distill.commands.generate.generate:generate_command"),
    ("export", of.ExportOptions, "distill.commands.export:export"),
    ("serve", of.ServeOptions, "distill.commands.serve:serve"),
    ("gateway", GatewayOptions, "distill.live.gateway.command:gateway"),
    ("check-export", of.CheckExportOptions, "distill.commands.export:check_export"),
    ("refresh", RefreshOptions, "distill.live.refresh.refresh:refresh_command"),
    ("rollout", RolloutOptions, "distill.live.rollout.rollout:rollout"),
    ("show", of.ShowRunOptions, "distill.commands.show:show"),
    ("config", of.ConfigOptions, "distill.config.table:print_table"),
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
    help="Draft models that agree with a target LLM: train, evaluate, export and serve them.",
)
traffic = typer.Typer(
    no_args_is_help=True, help="The log of live traffic: look at it, export it to train from, forget requests."
)
for _app, _commands in ((app, COMMANDS), (traffic, TRAFFIC_COMMANDS)):
    for _name, _options, _place in _commands:
        _app.command(_name)(lazy_command(_options, _place))
app.add_typer(traffic, name="traffic")


def demo(options: of.DemoOptions) -> int:
    """Trains, exports and shows; the exit status of the training."""
    from distill import train
    from distill.commands.export import export_run
    from distill.commands.show import show_run
    from distill.config.layout import EXPORT
    from distill.config.load import load_config

    overrides = list(options.overrides or [])
    status = train.command(TrainOptions(options.config, overrides))
    if status == 0:
        config = load_config(options.config, overrides)
        run, trusted = config.folder, config.target.trust_remote_code  # as the training did
        export_run(of.ExportOptions(run, run / EXPORT, overwrite=True, trust_remote_code=trusted))
        show_run(run, trusted)
    return status


def main() -> None:
    """Entry point: a mistake of the user is one line and exit status 2."""
    try:
        app()
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): no more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_LEFT)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


if __name__ == "__main__":
    main()
