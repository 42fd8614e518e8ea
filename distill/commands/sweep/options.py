"""Options of `understudy sweep`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import argument, option


@dataclass(frozen=True)
class SweepOptions:
    """Train every combination of a grid.

    understudy sweep configs/sweeps/grid.yaml

    Ends with one table of all runs with confidence intervals. The same command continues an interrupted sweep.
    """

    file: Annotated[Path, argument("sweep file, e.g. configs/sweeps/grid.yaml")]
    launcher: shared.Launcher = ""
    dry_run: Annotated[bool, option("print the list of runs and exit", "--dry-run")] = False
