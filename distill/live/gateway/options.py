"""What `understudy gateway` is asked. Apart, so that --help loads nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class GatewayOptions:
    """A streaming proxy before engines: splits traffic between drafts and logs what was accepted, hashes only unless --text.

    understudy gateway --engine http://127.0.0.1:8001 --log traffic/

    understudy gateway --engine URL --engine URL2 --share .1 --draft-version v0001 --draft-version v0002 --log traffic/ --text
    """

    engine: Annotated[
        list[str], typer.Option(help="address of an engine, e.g. http://127.0.0.1:8001; again for more arms")
    ]
    log: Annotated[Path, typer.Option(help="directory of the traffic's log; one gateway a directory")]
    share: Annotated[
        list[float] | None, typer.Option(help="of the conversations, for each engine behind the first")
    ] = None
    draft_version: Annotated[
        list[str] | None, typer.Option(help="of each engine in turn, e.g. v0007; default: unknown")
    ] = None
    target_version: Annotated[str, typer.Option(help="of what all engines serve; written into each record")] = "unknown"
    plain_engine: Annotated[str, typer.Option(help="address of the same target without a draft, asked under load")] = ""
    shed_above: Annotated[int, typer.Option(help="requests in flight above which --plain-engine is asked", min=1)] = 64
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="port to listen on; 0: any that is free", min=0, max=65535)] = 8080
    api_key_env: Annotated[str, typer.Option(help="environment variable with the key that clients must send")] = ""
    text: Annotated[bool, typer.Option("--text", help="keep token ids of prompts and responses (else hashes only)")] = (
        False
    )
    reservoir: Annotated[int, typer.Option(help="with --text: responses a slice whose text is kept", min=0)] = 10_000
    retention_days: Annotated[
        float, typer.Option(help="with --text: days until text is taken out of the log", min=0)
    ] = 30.0
    exclude_tenant: Annotated[
        list[str] | None,
        typer.Option(help="never log requests whose header x-understudy-tenant says this; again for more"),
    ] = None
    usage: Annotated[
        bool, typer.Option("--usage", help="ask for usage in streams, on which vLLM's counts ride (clients see it)")
    ] = False
    sampling: Annotated[
        str, typer.Option(help="the engines' defaults, e.g. temperature=0.7,top_p=0.8,top_k=20,min_p=0")
    ] = ""
    max_body: Annotated[int, typer.Option(help="largest request body in bytes", min=1)] = 16 << 20
    max_connections: Annotated[int, typer.Option(help="clients at once; more get 503", min=1)] = 2048
    idle_seconds: Annotated[
        float, typer.Option(help="without a byte from the engine or to the client: ended", min=1)
    ] = 300.0
