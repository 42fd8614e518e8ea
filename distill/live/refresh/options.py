"""What `understudy refresh` is asked. Apart from the command, so that --help loads nothing of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import Launcher, Overrides
from distill.live.traffic.options import AssumeSampling, TargetVersion


@dataclass(frozen=True)
class RefreshOptions:
    """Train the served draft on what came, if that is worth it, and publish it as a version, if it is certainly better.

    understudy refresh runs/demo --traffic traffic/ --dry-run

    Exit status: 0 published or not needed, 1 the old draft stays or the training failed, 2 a mistake.
    """

    run: Annotated[Path, typer.Argument(help="run folder of the first version of the draft that is served")]
    overrides: Overrides = None
    traffic: Annotated[
        Path | None,
        typer.Option(help="the gateway's --log directory; without it the run's draft only becomes the first version"),
    ] = None
    drafts: Annotated[Path | None, typer.Option(help="folder of the draft's versions; default drafts/NAME")] = None
    share: Annotated[
        float, typer.Option(help="of the training prompts that are traffic; the rest is the run's own")
    ] = 0.5
    probe_steps: Annotated[int, typer.Option(help="steps on fresh traffic that say whether there is headroom")] = 30
    margin: Annotated[float, typer.Option(help="alpha that an old slice may certainly not lose more of")] = 0.01
    false_alarms: Annotated[float, typer.Option(help="probability of any false alarm over the whole log")] = 0.01
    drop: Annotated[float, typer.Option(help="fall in accepted/drafted that is to be found fast")] = 0.05
    payback_days: Annotated[float, typer.Option(help="days in which the training must have paid for itself")] = 7.0
    target_version: TargetVersion = ""
    assume_sampling: AssumeSampling = False
    keep: Annotated[int, typer.Option(help="newest versions that stay; the current one and its parent do anyway")] = 5
    launcher: Launcher = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell the reasons and write nothing")] = False
    force: Annotated[bool, typer.Option("--force", help="train whatever the reasons say; the gate still judges")] = (
        False
    )
    approve: Annotated[
        str, typer.Option(help="your name: what passes the gate, or has passed it and waits, becomes `current` at once")
    ] = ""
