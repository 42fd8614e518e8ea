"""Command lines as frozen dataclasses: one annotated field per option, with its help and its default."""

import functools
import gc
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

HELP = {"help_option_names": ["-h", "--help"]}


def option(text: str, *names: str, **more: Any) -> Any:
    """An option and its help text; without ``names`` it has the name of its field."""
    return typer.Option(*names, help=text, **more)


def argument(text: str) -> Any:
    return typer.Argument(help=text)


# Options that several commands share.
PROMPT_SOURCE = "file (jsonl, json, csv, parquet, txt; may be .gz, .bz2, .zst), directory or hub id"
Chat = Annotated[bool, option("wrap each prompt in the target's chat template")]
TargetModel = Annotated[str, argument("target: directory, hub id or `embedded`")]
RuleName = Annotated[str, option("acceptance rule: sample, greedy-draft, greedy or block; default: the run's")]
Dtype = Annotated[str, option("auto (as the target is saved), float32, bfloat16 or float16")]
Device = Annotated[str, option("cpu, cuda or cuda:N; default: cuda if there is a GPU")]
Overrides = Annotated[list[str] | None, argument("config overrides as key=value, e.g. optim.lr=3e-4")]
Launcher = Annotated[str, option('command put before `-m distill.train`, e.g. "accelerate launch --num_processes 2"')]
TrustRemoteCode = Annotated[bool, option("run the weights' own code if the config asks for it", "--trust-remote-code")]
Out = Annotated[Path | None, option("file for all results, as JSON")]
KeyVariable = Annotated[str, option("environment variable with the engine's API key; default: no key is sent")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options to start several processes."""

    num_processes: Annotated[
        int | None,
        option(
            "processes that Accelerate's launcher starts, one per device; default: one process, without the launcher",
            min=1,
        ),
    ] = None
    config_file: Annotated[
        str, option("config of that launcher, see `accelerate config`; default: configs/accelerate/ddp.yaml")
    ] = ""


@dataclass(frozen=True)
class TrainOptions(LaunchOptions):
    """Train a draft and judge it.

    understudy train my.yaml --dry-run

    understudy train my.yaml

    understudy train my.yaml optim.lr=3e-4

    understudy train my.yaml --num-processes 8 --config-file configs/accelerate/fsdp2.yaml

    It begins with its plan: prompts, steps, memory, disk. The same command continues an interrupted run. With --num-processes
    it starts Accelerate's launcher, as `accelerate launch -m distill.train my.yaml` does.
    """

    config: Annotated[str, argument("YAML file, e.g. configs/demo.yaml")]
    overrides: Overrides = None
    dry_run: Annotated[
        bool, option("print the plan and a prompt as the target sees it; no weights are loaded", "--dry-run")
    ] = False


@dataclass(frozen=True)
class RespondOptions(LaunchOptions):
    """Let the target answer the prompts.

    understudy respond my.yaml

    understudy respond my.yaml --signal topk --num-processes 8

    understudy respond my.yaml --engine vllm --replicas 2

    understudy respond my.yaml --batch-requests requests.jsonl

    With --signal the target's probabilities are stored too. Training with signal.source=store then never loads the target.
    With --engine an installed engine answers; its flags follow after --. A batch service answers the file of --batch-requests.
    """

    config: Annotated[str, argument("YAML file, e.g. configs/demo.yaml")]
    overrides: Overrides = None
    signal: Annotated[
        str, option("also store the target's probabilities: topk or none; default: what signal.source needs")
    ] = ""
    engine: Annotated[str, option("engine that answers, started and ended by this command: vllm")] = ""
    replicas: Annotated[
        int | None, option("servers that --engine starts; default: one for each device, one on a CPU", min=1)
    ] = None
    batch_requests: Annotated[
        Path | None, option("instead: write the requests of all missing answers to this file (.jsonl)")
    ] = None
    batch_results: Annotated[Path | None, option("first take the answers in this file of a batch service (.jsonl)")] = (
        None
    )
    batch_chat: Annotated[
        bool, option("write requests to /v1/chat/completions, as `vllm run-batch` needs", "--batch-chat")
    ] = False

    @property
    def engine_words(self) -> list[str]:
        """Flags of the engine, which follow the overrides after --."""
        return list(itertools.dropwhile(lambda word: not word.startswith("-"), self.overrides or []))

    @property
    def batch(self) -> bool:
        """Whether a batch service answers."""
        return bool(self.batch_requests or self.batch_results)


@dataclass(frozen=True)
class CheckPairOptions:
    """Check a pair before it is served.

    understudy check-pair Qwen/Qwen3-4B runs/support/export --gguf draft.gguf --engine llama.cpp

    Compares tokenizers, chat templates, rows, heads, contexts and dtypes, and says what happens in which engine otherwise, and the fix.

    Exit status: 0 nothing breaks serving, 1 something does, 2 a mistake in the command or its files.
    """

    target: Annotated[str, argument("target: directory, hub id, GGUF file or `embedded`")]
    draft: Annotated[str, argument("draft: exported or other model directory, or hub id")]
    gguf: Annotated[list[Path] | None, option("GGUF file of the target or the draft to check too; repeatable")] = None
    engine: Annotated[str, option("check for this engine only, e.g. vLLM or llama.cpp; default: all")] = ""
    tensor_parallel: Annotated[int, option("GPUs that the engine splits each layer over", min=1)] = 1
    trust_remote_code: TrustRemoteCode = False


def command_of(program: Callable[[Any], int | None]) -> Callable[..., None]:
    """Wrap a program as a typer command: each field of its parameter, a dataclass, is an option; what it returns is the exit status."""
    options = next(kind for name, kind in get_type_hints(program).items() if name != "return")
    return functools.wraps(program)(_command(options, lambda: program))


def lazy_command(options: type, place: str) -> Callable[..., None]:
    """Like `command_of`, for ``module:name``, imported when it runs; its parameter `console` gets a rich Console."""

    def program() -> Callable[[Any], Any]:
        gc.disable()  # What is imported stays; looking for garbage in it, now or later, takes a third of a short command.
        try:
            function = pkgutil.resolve_name(place)
        finally:
            gc.freeze()
            gc.enable()
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
    """Run a program with these arguments (None: the process's own) and return its exit status, 2 for a wrong command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
    app.command(no_args_is_help=True, context_settings=HELP)(command_of(program))
    try:
        app(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    raise AssertionError("typer ends by SystemExit")
