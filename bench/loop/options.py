"""What bench/closed_loop.py is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import Overrides


@dataclass(frozen=True)
class LoopOptions:
    """Where the loop runs, on what, and how much of it."""

    config: Annotated[str, typer.Argument(help="of the first draft's run; its data.heldout is the traffic before")] = (
        "configs/loop.yaml"
    )
    overrides: Overrides = None
    shifted: Annotated[
        str,
        typer.Option(
            help="prompts of the traffic after (jsonl, txt, ..); default: unit tests of the library's classes"
        ),
    ] = ""
    engine: Annotated[str, typer.Option(help="vllm, house (our own decoder), or auto: vllm where it is installed")] = (
        "auto"
    )
    to: Annotated[Path, typer.Option(help="folder of everything that is made")] = Path("runs/loop")
    fast: Annotated[bool, typer.Option("--fast", help="a third of the requests")] = False
