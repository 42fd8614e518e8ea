"""What `understudy compare` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class CompareOptions:
    """The drafts, the text they are judged on, and the gates."""

    drafts: Annotated[
        list[str],
        typer.Argument(help="two or more: runs, checkpoints, model directories, hub ids; `lookup`, `lookup+DRAFT`"),
    ]
    on: Annotated[
        Path | None, typer.Option(help="run whose held-out text judges all; default: the first run named")
    ] = None
    rule: Annotated[str, typer.Option(help="sample, greedy-draft, greedy or block; default: the run's")] = ""
    gamma: Annotated[int, typer.Option(help="drafted tokens per block, 1 to 16; default: the run's")] = 0
    timing: Annotated[
        bool, typer.Option(help="measure steps and predict speed-ups; without, the target's weights stay on disk")
    ] = True
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            help="exit 1 when the first draft is below: tau=2.1, alpha=.6, speed_up=1.2, tau.ci_low=2; repeatable"
        ),
    ] = None
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="exit 1 when the first draft is certainly worse than another")
    ] = False
    plot: Annotated[Path | None, typer.Option(help="png or svg; default compare.svg beside --out")] = None
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None
