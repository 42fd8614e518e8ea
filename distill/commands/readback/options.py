"""What `understudy readback` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class ReadbackOptions:
    """gamma, rule: of the server; by default those of the run's export, and whichever rule fits."""

    url: Annotated[str, typer.Argument(help="of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path, typer.Option(help="run folder whose best draft is served")]
    plain: Annotated[str, typer.Option(help="url of the same engine without the draft: the served speed-up")] = ""
    rule: Annotated[
        str, typer.Option(help="auto, or what the engine is told: greedy (temperature 0), greedy-draft, sample, block")
    ] = "auto"
    gamma: Annotated[int | None, typer.Option(help="drafted tokens per block; default: as exported")] = None
    prompts: Annotated[int | None, typer.Option(help="held-out prompts to ask; default: all of the run's")] = None
    concurrency: Annotated[int, typer.Option(help="requests under way at once")] = 1
    model: Annotated[str, typer.Option(help="its name at the server; default: the only one")] = ""
    timeout: Annotated[float, typer.Option(help="seconds of one request")] = 600.0
    seed: Annotated[int, typer.Option(help="of the requests, added to the run's")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="keep what an interrupted readback was answered")] = False
    json: Annotated[bool, typer.Option("--json", help="print served.json instead of the table")] = False
    out: Annotated[Path | None, typer.Option(help="write it here too")] = None
