"""Options of the live commands: one frozen dataclass per command. Kept apart from the commands, so that --help imports none of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import Launcher, Overrides, TrustRemoteCode

TargetVersion = Annotated[str, typer.Option(help="version of RUN's target in the log; default: fingerprint or path")]
Log = Annotated[Path, typer.Argument(help="directory that the gateway logs to")]


@dataclass(frozen=True)
class GatewayOptions:
    """Proxy requests and log what was accepted.

    understudy gateway --engine http://127.0.0.1:8001 --draft-version v0001 --log traffic/ --text

    Streams requests to an engine, or to two during a rollout, and logs acceptance. Text is logged as hashes, unless --text
    is given.
    """

    engine: Annotated[list[str], typer.Option(help="address of the engine; one")]
    log: Annotated[Path, typer.Option(help="directory of the traffic log; one gateway per directory")]
    draft_version: Annotated[str, typer.Option(help="version of the engine's draft, e.g. v0007")] = "unknown"
    target_version: Annotated[str, typer.Option(help="version of the served target, for each record")] = "unknown"
    plain_engine: Annotated[str, typer.Option(help="address of the same target without a draft, used under load")] = ""
    shed_above: Annotated[int, typer.Option(help="requests in flight above which --plain-engine is used", min=1)] = 64
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="port to listen on; 0 = any free port", min=0, max=65535)] = 8080
    api_key_env: Annotated[str, typer.Option(help="environment variable with the key that clients must send")] = ""
    text: Annotated[bool, typer.Option("--text", help="log token ids of the text, not only hashes")] = False
    retention_days: Annotated[float, typer.Option(help="with --text: days until text is erased", min=0)] = 30.0
    usage: Annotated[bool, typer.Option("--usage", help="ask for usage in streams; engines send counts with it")] = (
        False
    )
    sampling: Annotated[str, typer.Option(help="sampling defaults of the engine, e.g. temperature=0.7,top_p=0.8")] = ""


@dataclass(frozen=True)
class ShowOptions:
    """Show logged requests and their acceptance.

    understudy traffic show traffic/

    Prints them by slice, by draft version and over time, and whether acceptance has fallen.
    """

    log: Log
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False


@dataclass(frozen=True)
class ExportTrafficOptions:
    """Export logged traffic as training data.

    understudy traffic export traffic/ --run runs/demo --to exports/may

    Writes the prompts and the target's responses of a log that was made with --text. The latest prompts are held out.
    """

    log: Log
    run: Annotated[Path, typer.Option(help="run whose target wrote the responses, with the run's `serving` settings")]
    to: Annotated[Path, typer.Option(help="folder to write: prompts/ and responses/train/ (docs/traffic.md)")]
    heldout: Annotated[int, typer.Option(help="prompts to hold out, at most the latest fifth", min=2)] = 128
    target_version: TargetVersion = ""
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class ForgetOptions:
    """Erase requests from a log.

    understudy traffic forget 4f1c2a --log traffic/

    Also erases their text from later requests of the conversation. The gateway may be running.

    Exit status: 0 all were found, 1 at least one was not found, 2 a mistake in the command or its files.
    """

    ids: Annotated[list[str], typer.Argument(help="request ids, as in the header x-understudy-id")]
    log: Annotated[Path, typer.Option(help="directory that the gateway logs to")]


@dataclass(frozen=True)
class RefreshOptions:
    """Retrain the served draft on traffic.

    understudy refresh runs/demo --traffic traffic/ --dry-run

    understudy refresh runs/demo --traffic traffic/

    Trains only if acceptance fell and a retraining would pay off. A statistical test decides whether the new version is
    published.

    Exit status: 0 published or not needed, 1 the old draft stays or the training failed, 2 a mistake in the command or its
    files.
    """

    run: Annotated[Path, typer.Argument(help="run folder of the first version of the served draft")]
    overrides: Overrides = None
    traffic: Annotated[Path | None, typer.Option(help="the gateway's --log; without it, v0001 is published")] = None
    drafts: Annotated[Path | None, typer.Option(help="folder of the draft's versions; default: drafts/NAME")] = None
    share: Annotated[float, typer.Option(help="share of the training prompts that comes from traffic")] = 0.5
    margin: Annotated[float, typer.Option(help="largest allowed loss of alpha on an old slice")] = 0.01
    payback_days: Annotated[float, typer.Option(help="days within which the training must pay for itself")] = 7.0
    target_version: TargetVersion = ""
    launcher: Launcher = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the reasons and write nothing")] = False
    force: Annotated[
        bool, typer.Option("--force", help="train in any case; the statistical test still decides whether to publish")
    ] = False
    approve: Annotated[str, typer.Option(help="your name; a version that passes the test is `current` at once")] = ""
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class RolloutOptions:
    """Compare a new draft on live traffic.

    understudy rollout drafts/demo v0002 --log traffic/ --engine-command "understudy serve {draft} --port {port}"

    Serves it next to the current version, compares the two, then moves all traffic to it or takes it back. The
    engine has to report its counts (docs/readback.md lists the flags).

    Exit status: 0 the new version serves, 3 it was taken back, 2 a mistake in the command or its files.
    """

    drafts: Annotated[Path, typer.Argument(help="folder of the draft's versions, drafts/NAME")]
    version: Annotated[str, typer.Argument(help="version to serve, e.g. v0002")]
    log: Annotated[Path, typer.Option(help="log directory of the running gateway")]
    engine_command: Annotated[
        str,
        typer.Option(help="command that starts the new engine, run without a shell; {draft} and {port} are filled in"),
    ] = ""
    engine_url: Annotated[str, typer.Option(help="instead: address of a running engine that has the new version")] = ""
    share: Annotated[float, typer.Option(help="the new version's share of conversations during the comparison")] = 0.1
    margin: Annotated[float, typer.Option(help="allowed fall in acceptance; 0 = a certain gain is required")] = 0.0
    slower: Annotated[
        float, typer.Option(help="take it back when certainly slower per token by this share, 0.05 = 5 %")
    ] = 0.05
    requests: Annotated[int, typer.Option(help="most requests of both; if undecided, it is taken back", min=1)] = 20_000
    watch: Annotated[int, typer.Option(help="requests to watch after all traffic goes to the new engine", min=0)] = 500
    back: Annotated[bool, typer.Option("--back", help="take back an unfinished rollout")] = False
