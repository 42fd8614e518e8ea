"""Options of `understudy probe`."""

from dataclasses import dataclass
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import PROMPT_SOURCE, argument, option

STDLIB = "stdlib"


@dataclass(frozen=True)
class ProbeOptions:
    """Check whether a draft can pay off.

    understudy probe TARGET DRAFT --prompts prompts.jsonl --chat

    understudy probe TARGET DRAFT --times 25ms,3ms

    Takes minutes and trains nothing: measures acceptance and step times of candidate drafts and says go or no-go. With
    --times it plans for hardware that is not here.
    """

    target: shared.TargetModel
    drafts: Annotated[
        list[str] | None,
        argument("candidate drafts: directories, hub ids or runs; without any, only prompt lookup and upper bounds"),
    ] = None
    prompts: Annotated[str, option(f"{PROMPT_SOURCE}, or stdlib (built-in Python prompts)")] = STDLIB
    chat: shared.Chat = False
    count: Annotated[int, option("number of prompts to use, spread over the file", min=1)] = 32
    max_tokens: Annotated[int, option("maximum tokens per response", min=1)] = 96
    temperatures: Annotated[str, option("sampling temperatures; 0 = greedy")] = "0,1"
    gammas: Annotated[str, option("numbers of drafted tokens per block to time")] = "1,3,5,8"
    batch_sizes: Annotated[str, option("batch sizes to time; the first one decides go or no-go")] = "1,4,16"
    times: Annotated[
        str,
        option(
            "times instead of measuring: of a target step, a draft call and, if known, a verify call, e.g. 25ms,3ms,28ms; or "
            "a file of `understudy time`. Default: such a file in the draft's run"
        ),
    ] = ""
    server: Annotated[
        str, option("does it fit: device memory, concurrent requests, tokens of a request, e.g. 80GB,64,8k")
    ] = ""
    dtype: shared.Dtype = "auto"
    device: shared.Device = ""
    out: shared.Out = None
