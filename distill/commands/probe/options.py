"""What `understudy probe` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import MessagesColumn, PromptColumn

STDLIB = "stdlib"


@dataclass(frozen=True)
class ProbeOptions:
    """Lists are texts such as `1,4,16`, times texts such as `25ms`."""

    target: Annotated[str, typer.Argument(help="target: directory, hub id or `embedded`")]
    drafts: Annotated[
        list[str] | None,
        typer.Argument(help="candidate drafts: directories, hub ids, runs; none = prompt lookup and ceilings only"),
    ] = None
    prompts: Annotated[
        str,
        typer.Option(
            help="file (jsonl, json, csv, parquet, txt; .gz), directory, hub id, or stdlib (the embedded domain)"
        ),
    ] = STDLIB
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the target's chat template")] = False
    count: Annotated[int, typer.Option(help="prompts used, spread over the file", min=1)] = 32
    max_tokens: Annotated[int, typer.Option(help="tokens of a response at most", min=1)] = 96
    temperatures: Annotated[str, typer.Option(help="sampling temperatures; 0 = greedy")] = "0,1"
    gammas: Annotated[str, typer.Option(help="drafted tokens per block that are timed")] = "1,3,5,8"
    batch_sizes: Annotated[str, typer.Option(help="batch sizes that are timed; the first decides")] = "1,4,16"
    t_target: Annotated[
        str, typer.Option(help="given instead of measured: one target step, e.g. 25ms (with --t-draft)")
    ] = ""
    t_draft: Annotated[str, typer.Option(help="given instead of measured: one draft step, e.g. 3ms")] = ""
    t_verify: Annotated[
        str, typer.Option(help="given: one verify call of a block; default: as long as a target step")
    ] = ""
    device_memory: Annotated[
        str, typer.Option(help="of the serving device, e.g. 80GB or 80GiB: does the pair fit? (with the next two)")
    ] = ""
    concurrency: Annotated[int, typer.Option(help="requests served at once there", min=0)] = 0
    context: Annotated[str, typer.Option(help="tokens of prompt and response of each, e.g. 8192 or 8k")] = ""
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto"
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: cuda where there is one")] = ""
    seed: Annotated[int, typer.Option(help="of all sampling")] = 0
    out: Annotated[Path | None, typer.Option(help="also write everything here as JSON")] = None
