"""Options of `understudy compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import argument, option


@dataclass(frozen=True)
class CompareOptions:
    """Compare drafts on the same held-out text.

    understudy compare runs/new runs/old lookup+draft:runs/new --fail-below tau=2.1 --fail-below others

    understudy compare http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 runs/mine

    Prints one table with the paired differences between the drafts of one target. A URL is a running engine with any drafter: it
    is sent the run's held-out prompts.

    Exit status: 0 done, 1 a --fail-below condition holds, 2 a mistake in the command or its files.
    """

    drafts: Annotated[
        list[str],
        argument(
            "two or more: run, checkpoint, model directory, hub id, URL of an engine, or WAY:DRAFT and WAY as "
            "`understudy generate --drafter` names them, e.g. lookup+draft:DRAFT, parallel:DRAFT, prompt-lookup"
        ),
    ]
    on: Annotated[Path | None, option("run whose held-out text is used for all; default: the first run given")] = None
    rule: shared.RuleName = ""
    gamma: Annotated[int, option("drafted tokens per block; default: the URLs', else the run's", min=0, max=32)] = 0
    timing: Annotated[bool, option("measure step times, predict speed-ups; --no-timing never loads the target")] = True
    fail_below: Annotated[
        list[str] | None,
        option(
            "exit 1 when the first is below a limit: tau=2.1, alpha=0.6, speed_up=1.2, tau.ci_low=2, or `others`: another "
            "draft is certainly better; repeatable"
        ),
    ] = None
    trust_remote_code: shared.TrustRemoteCode = False
    out: shared.Out = None
