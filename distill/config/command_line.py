"""A command line is a frozen dataclass: each option stands once, as an annotated field with its help and its default."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

HELP = {"help_option_names": ["-h", "--help"]}


def option(told: str, *names: str, **more: Any) -> Any:
    """An option with its help; by default it is named as its field."""
    return typer.Option(*names, help=told, **more)


def argument(told: str) -> Any:
    """An argument with its help."""
    return typer.Argument(help=told)


# What several commands are asked, each said once. Of every command with --prompts, named as in a config:
PromptColumn = Annotated[str, option("of --prompts: column with a plain prompt; default: a usual name")]
MessagesColumn = Annotated[str, option("of --prompts: column with chat messages (role, content)")]
Chat = Annotated[bool, option("wrap each prompt in the target's chat template")]
TargetModel = Annotated[str, argument("target: directory, hub id or `embedded`")]
RuleName = Annotated[str, option("engine rule: sample, greedy-draft, greedy or block; default: the run's")]
DraftingName = Annotated[
    str, option("how the draft drafts: autoregressive, or parallel (a block in one pass); default: as exported")
]
Dtype = Annotated[str, option("auto (as the target is saved), float32, bfloat16, float16")]
Device = Annotated[str, option("cpu, cuda, cuda:1; default: cuda where there is one")]
Seed = Annotated[int, option("of all sampling")]
Overrides = Annotated[list[str] | None, argument("key=value for the config, e.g. optim.lr=3e-4")]
Launcher = Annotated[str, option('before `-m distill.train`, e.g. "accelerate launch --num_processes 2"')]
TargetSeconds = Annotated[str, option("given instead of measured: one target step, e.g. 25ms (with --t-draft)")]
DraftSeconds = Annotated[
    str, option("given: one draft call (a token, or a block drafted in one pass), e.g. 3ms (with --t-target)")
]
TrustRemoteCode = Annotated[
    bool, option("run code that comes with the weights, where the config asks for it", "--trust-remote-code")
]
Out = Annotated[Path | None, option("also write everything here as JSON")]
Plot = Annotated[Path | None, option("a picture, png or svg")]
Json = Annotated[bool, option("print the result as JSON", "--json")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What starts several processes."""

    num_processes: Annotated[
        int | None, option("processes for Accelerate's launcher to start, one a device; default: one, here", min=1)
    ] = None
    config_file: Annotated[
        str,
        option("of that launcher, see `accelerate config`; default with --num-processes: configs/accelerate/ddp.yaml"),
    ] = ""


@dataclass(frozen=True)
class TrainOptions(LaunchOptions):
    """Train a draft, from config to verdict, here or on several devices.

    understudy train my.yaml optim.lr=3e-4

    understudy train my.yaml --num-processes 8 --config-file configs/accelerate/fsdp2.yaml

    The same as `accelerate launch -m distill.train my.yaml`, and it works in any directory.
    """

    config: Annotated[str, argument("YAML file, e.g. configs/demo.yaml")]
    overrides: Overrides = None


@dataclass(frozen=True)
class RespondOptions(LaunchOptions):
    """Let the target answer the prompts; with --signal, training needs it no more (signal.source=store).

    On several devices: `understudy respond CONFIG --signal topk --num-processes 8`.
    """

    config: Annotated[str, argument("YAML file, e.g. configs/demo.yaml")]
    overrides: Overrides = None
    signal: Annotated[
        str,
        option(
            "keep the target's distributions too: topk, sampled or none; default: what the config's signal.source needs"
        ),
    ] = ""


def command_of(program: Callable[[Any], int | None]) -> Callable[..., None]:
    """A program of one parameter, a dataclass, as typer takes it: a parameter a field; what it returns is the exit status."""
    options = next(kind for name, kind in get_type_hints(program).items() if name != "return")
    return functools.wraps(program)(_command(options, lambda: program))


def lazy_command(options: type, place: str) -> Callable[..., None]:
    """The same of a function `module:name` that is imported when the command runs; its help is the dataclass's docstring.

    A function that has a `console` is given one.
    """

    def program() -> Callable[[Any], Any]:
        function = pkgutil.resolve_name(place)
        if "console" not in inspect.signature(function).parameters:
            return function
        from rich.console import Console

        return functools.partial(function, console=Console())

    command = _command(options, program)
    command.__doc__ = options.__doc__
    return command


def _command(options: type, program: Callable[[], Callable[[Any], Any]]) -> Callable[..., None]:
    def command(**values: Any) -> None:
        status = program()(options(**values))
        if isinstance(status, int) and status:
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
