"""Options of `understudy drift`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import argument, option


@dataclass(frozen=True)
class DriftOptions:
    """Check whether acceptance has fallen.

    understudy drift runs/demo --metrics-url http://127.0.0.1:8000/metrics

    Compares a server's counters, or the answers of a readback, with the run's own held-out text.

    Exit status: 0 no drift seen, 3 refresh advised, 2 a mistake in the command or its files.
    """

    run: Annotated[Path, argument("run folder whose best draft is served")]
    metrics_url: Annotated[
        str, option("metrics page of a running engine, scraped several times, e.g. http://127.0.0.1:8000/metrics")
    ] = ""
    log: Annotated[Path | None, option("or the answers that a readback kept, RUN/readback.jsonl")] = None
    interval: Annotated[float, option("with --metrics-url: seconds between scrapes")] = 60.0
    scrapes: Annotated[int, option("with --metrics-url: number of scrapes, at least 2")] = 2
    api_key_env: shared.KeyVariable = ""
    gamma: Annotated[int | None, option("the server's drafted tokens per block, if not logged", min=1, max=128)] = None
    rule: shared.RuleName = ""
    trust_remote_code: shared.TrustRemoteCode = False
    out: shared.Out = None
