"""What `understudy traffic ...` is asked: one frozen dataclass a command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

TargetVersion = Annotated[
    str, typer.Option(help="what the log calls RUN's target; default: its fingerprint or its path")
]
AssumeSampling = Annotated[
    bool, typer.Option("--assume-sampling", help="requests that do not tell their sampling settings had RUN's")
]
Log = Annotated[Path, typer.Argument(help="directory that the gateway logs to")]


@dataclass(frozen=True)
class ShowOptions:
    """What came, by slice and draft version, and how much of what was drafted was accepted, over time."""

    log: Log
    run: Annotated[
        Path | None, typer.Option(help="run that made the served draft: is its acceptance as it was judged?")
    ] = None
    draft_version: Annotated[str, typer.Option(help="of --run; default: the version that served last")] = ""
    bins: Annotated[int, typer.Option(help="stretches of time, of one length", min=1, max=1000)] = 24
    plot: Annotated[Path | None, typer.Option(help="acceptance and requests over time, png or svg")] = None
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False


@dataclass(frozen=True)
class ExportTrafficOptions:
    """Prompts and the target's responses of a log (with --text), as a training run reads them: past to train on, latest held out.

    understudy traffic export traffic/ --run runs/demo --to exports/may
    """

    log: Log
    run: Annotated[
        Path, typer.Option(help="run whose target wrote the responses, at the settings of its serving section")
    ]
    to: Annotated[Path, typer.Option(help="folder to make: prompts/ and responses/train/ (docs/traffic.md)")]
    heldout: Annotated[int, typer.Option(help="prompts held out, of the latest fifth at most", min=2)] = 128
    alike: Annotated[
        int, typer.Option(help="at most so many requests with near-equal prompts, or of one conversation", min=1)
    ] = 8
    quota: Annotated[
        list[str] | None,
        typer.Option(help="at most so many training requests of a slice: 5000 for each, or code=2000; repeatable"),
    ] = None
    target_version: TargetVersion = ""
    assume_sampling: AssumeSampling = False


@dataclass(frozen=True)
class ForgetOptions:
    """Remove requests from a log and from its exports for good; the gateway may be running.

    understudy traffic forget 4f1c2a --log traffic/
    """

    ids: Annotated[list[str], typer.Argument(help="ids of requests, as in their header x-understudy-id")]
    log: Annotated[Path, typer.Option(help="directory that the gateway logs to")]
