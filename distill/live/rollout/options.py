"""What `understudy rollout` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class RolloutOptions:
    """Serve a version beside the current one, compare the two on live traffic, then move all of it, or go back.

    understudy rollout drafts/demo v0002 --log traffic/ --engine-command "understudy serve {draft} --port {port} -- --per-request-spec-decode-metrics detailed"

    Exit status: 0 the version serves, 3 it was taken back, 2 a mistake.
    """

    drafts: Annotated[Path, typer.Argument(help="folder of the draft's versions, drafts/NAME")]
    version: Annotated[str, typer.Argument(help="the version that is to be served, e.g. v0002")]
    log: Annotated[Path, typer.Option(help="log directory of the running gateway")]
    engine_command: Annotated[
        str, typer.Option(help="starts the new engine; {draft} and {port} are put in, no shell reads it")
    ] = ""
    engine_url: Annotated[
        str, typer.Option(help="instead: an engine with the new draft that runs already, e.g. in Kubernetes")
    ] = ""
    port: Annotated[int, typer.Option(help="of the new engine; default: a free one", min=0, max=65535)] = 0
    share: Annotated[float, typer.Option(help="of the conversations, while the two are compared")] = 0.1
    margin: Annotated[
        float,
        typer.Option(help="acceptance that the new draft may certainly not be lower by; 0: a certain gain is asked"),
    ] = 0.0
    slower: Annotated[float, typer.Option(help="certainly so much slower a token is too slow; 0.05: by 5 %")] = 0.05
    false_alarms: Annotated[
        float,
        typer.Option(
            help="chance that a draft as good as the old one is called worse while they are compared, or watched"
        ),
    ] = 0.05
    requests: Annotated[int, typer.Option(help="of both engines at most; undecided then, it goes back", min=1)] = 20_000
    watch: Annotated[int, typer.Option(help="requests that are watched when all go to the new engine", min=0)] = 500
    start_timeout: Annotated[float, typer.Option(help="seconds until the new engine must answer")] = 900.0
    drain: Annotated[
        float, typer.Option(help="seconds that an engine gets for its last requests before it is ended")
    ] = 30.0
    back: Annotated[bool, typer.Option("--back", help="take an unfinished rollout back")] = False
