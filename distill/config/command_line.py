"""A command line is a frozen dataclass: each option stands once, as an annotated field with its help and its default."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

HELP = {"help_option_names": ["-h", "--help"]}
# Of every command with --prompts, named as in a config.
PromptColumn = Annotated[str, typer.Option(help="of --prompts: column with a plain prompt; default: a usual name")]
MessagesColumn = Annotated[str, typer.Option(help="of --prompts: column with chat messages (role, content)")]


@dataclass(frozen=True)
class TrainOptions:
    """What `distill.train` is called with."""

    config: Annotated[str, typer.Argument(help="YAML file, e.g. configs/demo.yaml")]
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. optim.lr=3e-4")] = None


@dataclass(frozen=True)
class RespondOptions:
    """What `distill.respond` is called with."""

    config: Annotated[str, typer.Argument(help="YAML file, e.g. configs/demo.yaml")]
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. signal.k=32")] = None
    signal: Annotated[
        str,
        typer.Option(
            help="keep the target's distributions too: topk, sampled or none; default: what the config's signal.source needs"
        ),
    ] = ""


def command_of(program: Callable[[Any], int | None]) -> Callable[..., None]:
    """A program of one parameter, a dataclass, as typer takes it: a parameter a field; what it returns is the exit status."""
    options = next(kind for name, kind in get_type_hints(program).items() if name != "return")

    @functools.wraps(program)
    def command(**values: Any) -> None:
        status = program(options(**values))
        if status:
            raise typer.Exit(status)

    command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return command


def run_program(program: Callable[[Any], int | None], arguments: Sequence[str] | None = None) -> int:
    """Runs a program with these arguments (None: the process's own); returns its exit status, 2 for a wrong call."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
    app.command(no_args_is_help=True, context_settings=HELP)(command_of(program))
    try:
        app(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    raise AssertionError("typer ends by SystemExit")
