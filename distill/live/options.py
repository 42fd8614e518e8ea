"""What the commands of the live loop are asked: one frozen dataclass a command. Apart from them, so that --help loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import Launcher, Overrides, TrustRemoteCode

TargetVersion = Annotated[str, typer.Option(help="RUN's target in the log; default: fingerprint, path")]
AssumeSampling = Annotated[bool, typer.Option("--assume-sampling", help="unknown sampling is RUN's")]
Log = Annotated[Path, typer.Argument(help="directory that the gateway logs to")]


@dataclass(frozen=True)
class GatewayOptions:
    """A streaming proxy before engines: splits traffic between drafts and logs what was accepted, hashes only unless --text.

    understudy gateway --engine http://127.0.0.1:8001 --log traffic/

    understudy gateway --engine URL --engine URL2 --share 0.1 --draft-version v0001 --draft-version v0002 --log traffic/ --text
    """

    engine: Annotated[list[str], typer.Option(help="address of an engine; again for more arms")]
    log: Annotated[Path, typer.Option(help="directory of the traffic's log; one gateway a directory")]
    share: Annotated[list[float] | None, typer.Option(help="of the conversations; for each further engine")] = None
    draft_version: Annotated[list[str] | None, typer.Option(help="of each engine in turn, e.g. v0007")] = None
    target_version: Annotated[str, typer.Option(help="of what all engines serve; written into each record")] = "unknown"
    plain_engine: Annotated[str, typer.Option(help="address of the same target without a draft, asked under load")] = ""
    shed_above: Annotated[int, typer.Option(help="requests in flight above which --plain-engine is asked", min=1)] = 64
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="port to listen on; 0: any that is free", min=0, max=65535)] = 8080
    api_key_env: Annotated[str, typer.Option(help="environment variable with the key that clients must send")] = ""
    text: Annotated[bool, typer.Option("--text", help="keep token ids of text, not hashes only")] = False
    reservoir: Annotated[int, typer.Option(help="with --text: responses a slice whose text is kept", min=0)] = 10_000
    retention_days: Annotated[float, typer.Option(help="with --text: days that text is kept", min=0)] = 30.0
    trust_clock: Annotated[bool, typer.Option("--trust-clock", help="erase old text though the clock jumped")] = False
    exclude_tenant: Annotated[
        list[str] | None, typer.Option(help="x-understudy-tenant whose requests are never logged; again for more")
    ] = None
    usage: Annotated[bool, typer.Option("--usage", help="ask for usage in streams, on which vLLM's counts ride")] = (
        False
    )
    sampling: Annotated[str, typer.Option(help="the engines' defaults: temperature=0.7,top_p=0.8,..")] = ""
    max_body: Annotated[int, typer.Option(help="largest request body in bytes", min=1)] = 16 << 20
    max_connections: Annotated[int, typer.Option(help="clients answered at once; more get 503", min=1)] = 2048
    idle_seconds: Annotated[float, typer.Option(help="seconds without a byte: ended", min=1)] = 300.0


@dataclass(frozen=True)
class ShowOptions:
    """What came, by slice and draft version, and how much of what was drafted was accepted, over time."""

    log: Log
    run: Annotated[Path | None, typer.Option(help="that made the draft: is it accepted as then?")] = None
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
    run: Annotated[Path, typer.Option(help="whose target wrote the responses, at its `serving`")]
    to: Annotated[Path, typer.Option(help="folder to make: prompts/ and responses/train/ (docs/traffic.md)")]
    heldout: Annotated[int, typer.Option(help="prompts held out, of the latest fifth at most", min=2)] = 128
    alike: Annotated[int, typer.Option(help="most near-equal prompts, or of one conversation", min=1)] = 8
    quota: Annotated[list[str] | None, typer.Option(help="most to train on of each slice: 5000, or code=2000")] = None
    target_version: TargetVersion = ""
    assume_sampling: AssumeSampling = False
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class ForgetOptions:
    """Remove requests from a log and its exports for good, and their text from the rest of the conversation; the gateway may be running.

    understudy traffic forget 4f1c2a --log traffic/

    Exit status: 0 all were found, 1 one of them nowhere, 2 a mistake.
    """

    ids: Annotated[list[str], typer.Argument(help="ids of requests, as in their header x-understudy-id")]
    log: Annotated[Path, typer.Option(help="directory that the gateway logs to")]


@dataclass(frozen=True)
class RefreshOptions:
    """Train the served draft on what came, if that is worth it, and publish it as a version, if it is certainly better.

    understudy refresh runs/demo --traffic traffic/ --dry-run

    Exit status: 0 published or not needed, 1 the old draft stays or the training failed, 2 a mistake.
    """

    run: Annotated[Path, typer.Argument(help="run folder of the first version of the draft that is served")]
    overrides: Overrides = None
    traffic: Annotated[Path | None, typer.Option(help="the gateway's --log; without it v0001 is published")] = None
    drafts: Annotated[Path | None, typer.Option(help="folder of the draft's versions; default drafts/NAME")] = None
    share: Annotated[float, typer.Option(help="of the training prompts that is traffic")] = 0.5
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
    force: Annotated[bool, typer.Option("--force", help="train all the same; the gate still judges")] = False
    approve: Annotated[str, typer.Option(help="your name: what passed the gate is `current` at once")] = ""
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class RolloutOptions:
    """Serve a version beside the current one, compare the two on live traffic, then move all of it, or go back.

    understudy rollout drafts/demo v0002 --log traffic/ --engine-command "understudy serve {draft} --port {port} -- --per-request-spec-decode-metrics detailed"

    Exit status: 0 the version serves, 3 it was taken back, 2 a mistake.
    """

    drafts: Annotated[Path, typer.Argument(help="folder of the draft's versions, drafts/NAME")]
    version: Annotated[str, typer.Argument(help="the version that is to be served, e.g. v0002")]
    log: Annotated[Path, typer.Option(help="log directory of the running gateway")]
    engine_command: Annotated[str, typer.Option(help="starts the new engine, without a shell: {draft}, {port}")] = ""
    engine_url: Annotated[str, typer.Option(help="instead: of an engine with it that runs already")] = ""
    port: Annotated[int, typer.Option(help="of the new engine; default: a free one", min=0, max=65535)] = 0
    share: Annotated[float, typer.Option(help="of the conversations, while the two are compared")] = 0.1
    margin: Annotated[float, typer.Option(help="fall in acceptance that is allowed; 0: a certain gain")] = 0.0
    slower: Annotated[float, typer.Option(help="certainly so much slower a token is too slow; 0.05: by 5 %")] = 0.05
    false_alarms: Annotated[float, typer.Option(help="chance that one as good is called worse")] = 0.05
    requests: Annotated[int, typer.Option(help="of both engines at most; undecided then, it goes back", min=1)] = 20_000
    watch: Annotated[int, typer.Option(help="requests that are watched when all go to the new engine", min=0)] = 500
    start_timeout: Annotated[float, typer.Option(help="seconds until the new engine must answer")] = 900.0
    drain: Annotated[float, typer.Option(help="seconds for the last requests of an engine")] = 30.0
    back: Annotated[bool, typer.Option("--back", help="take an unfinished rollout back")] = False
