"""What `understudy loop-demo` is asked. Apart, so that --help loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class LoopOptions:
    """A run to begin with, and what its traffic shifts to."""

    config: Annotated[str, typer.Argument(help="of the first draft's run; its data.heldout is the traffic before")] = (
        "configs/loop.yaml"
    )
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. train.steps=100")] = None
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
