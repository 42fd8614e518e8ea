"""What `understudy generate` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import (
    Chat,
    Device,
    DraftingName,
    Dtype,
    MessagesColumn,
    PromptColumn,
    Seed,
    TargetModel,
)


@dataclass(frozen=True)
class GenerateOptions:
    """Text from a target, sped up by a draft; the text is the target's own. Numbers go to standard error.

    understudy generate embedded --prompt "def add(a, b):" --draft runs/demo/export --gamma auto
    """

    target: TargetModel
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None
    prompts: Annotated[
        str,
        typer.Option(
            help="file (jsonl, json, csv, parquet, txt; .gz), directory or hub id; without any, one on standard input"
        ),
    ] = ""
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Chat = False
    system: Annotated[str, typer.Option(help="system message (with --chat)")] = ""
    draft: Annotated[str, typer.Option(help="draft model: directory, hub id, run or checkpoint folder")] = ""
    drafter: Annotated[
        str,
        typer.Option(
            help="who proposes: draft (default with --draft), lookup (the prompt's own n-grams), retrieval, early-exit, "
            "jacobi, cascade (lookup, then the draft), none (default without)"
        ),
    ] = ""
    drafting: DraftingName = ""
    exit_layers: Annotated[int, typer.Option(help="layers of early-exit; 0 = a third")] = 0
    datastore: Annotated[Path | None, typer.Option(help="past texts for retrieval: --out file of an earlier run")] = (
        None
    )
    gamma: Annotated[
        str, typer.Option(help="drafted tokens per block (default 4), or auto: what pays most, none included")
    ] = ""
    stop_below: Annotated[float, typer.Option(help="stop drafting behind a token of less probability; 0 = off")] = 0.0
    tree: Annotated[str, typer.Option(help="candidates per depth instead of a chain, e.g. 3,2,1")] = ""
    rule: Annotated[
        str, typer.Option(help="sample, greedy-draft, greedy, block; default: greedy at temperature 0, else sample")
    ] = ""
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0
    top_k: Annotated[int, typer.Option(help="keep the k most probable tokens; 0 = off")] = 0
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1 = off")] = 1.0
    min_p: Annotated[float, typer.Option(help="drop tokens under min-p x the largest probability; 0 = off")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="1 = off")] = 1.0
    max_tokens: Annotated[
        int | None,
        typer.Option(help="tokens of a response at most; default: 128, or what the context leaves behind its prompt"),
    ] = None
    min_tokens: Annotated[int, typer.Option(help="no end token before so many")] = 0
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends a response; may be given several times")] = (
        None
    )
    seed: Seed = 0
    batch_size: Annotated[int, typer.Option(help="rows decoded at once", min=1)] = 16
    dtype: Dtype = "auto"
    device: Device = ""
    runner: Annotated[str, typer.Option(help="model calls: auto, eager, compile, graph (CUDA)")] = "auto"
    out: Annotated[
        Path | None,
        typer.Option(help="write responses here as JSON lines; without it, several are printed as they end"),
    ] = None
    log: Annotated[Path | None, typer.Option(help="write every drafted token here as parquet")] = None
    numbers: Annotated[Path | None, typer.Option(help="write the run's numbers here as JSON")] = None

    @property
    def kind(self) -> str:
        """Who proposes, the default said."""
        return self.drafter or ("draft" if self.draft else "none")
