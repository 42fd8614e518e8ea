"""What `understudy drift` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import MessagesColumn, PromptColumn


@dataclass(frozen=True)
class DriftOptions:
    """One of `log` and `prompts`. gamma, rule: of the server, by default the log's and the run's verdict's."""

    run: Annotated[Path, typer.Argument(help="run folder whose best draft is served")]
    log: Annotated[
        Path | None,
        typer.Option(help="acceptance log: vLLM or llama.cpp output, JSON lines, csv, proposal log; .gz too"),
    ] = None
    prompts: Annotated[
        str,
        typer.Option(
            help="or fresh prompts, decoded here: file (jsonl, json, csv, parquet, txt; .gz), directory or hub id"
        ),
    ] = ""
    metrics_url: Annotated[
        str,
        typer.Option(
            help="or the counters of a running engine, e.g. http://127.0.0.1:8000/metrics: differences of scrapes"
        ),
    ] = ""
    interval: Annotated[float, typer.Option(help="of --metrics-url: seconds between scrapes")] = 60.0
    scrapes: Annotated[int, typer.Option(help="of --metrics-url: how many, at least 2")] = 2
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Annotated[bool, typer.Option(help="wrap fresh prompts in the target's chat template")] = False
    format: Annotated[str, typer.Option(help="of the log: auto, jsonl, csv, vllm, llama.cpp, proposals")] = "auto"
    gamma: Annotated[int | None, typer.Option(help="drafted tokens per block of the server, if not in the log")] = None
    rule: Annotated[str, typer.Option(help="engine rule of the server; default: the run's")] = ""
    false_alarms: Annotated[float, typer.Option(help="probability of any false alarm over the whole log")] = 0.01
    drop: Annotated[float, typer.Option(help="fall in accepted/drafted that is to be found fast")] = 0.05
    two_sided: Annotated[bool, typer.Option("--two-sided", help="tell of a rise too")] = False
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None
    plot: Annotated[Path | None, typer.Option(help="picture of the test statistic, png or svg")] = None
    seed: Annotated[int, typer.Option(help="of the simulations that set the threshold")] = 0
