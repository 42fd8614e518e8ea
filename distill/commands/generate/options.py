"""Options of `understudy generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import PROMPT_SOURCE, option


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text, sped up by a draft.

    understudy generate embedded --prompt "def add(a, b):" --draft runs/demo/export

    understudy generate embedded --prompts prompts.jsonl --draft runs/demo/export --gamma auto --out responses.jsonl

    The text is the target's own. Numbers go to standard error.
    """

    target: shared.TargetModel
    prompt: Annotated[list[str] | None, option("a prompt; repeatable")] = None
    prompts: Annotated[str, option(f"{PROMPT_SOURCE}; default: one prompt on standard input")] = ""
    chat: shared.Chat = False
    draft: Annotated[str, option("draft: directory, hub id, run or checkpoint folder")] = ""
    drafter: Annotated[
        str,
        option(
            "way to draft: `draft` (default with --draft), `prompt-lookup`, `past-responses`, ... (docs/decoder.md)"
        ),
    ] = ""
    past: Annotated[Path | None, option("past responses to draft from: the --out file of an earlier command")] = None
    gamma: Annotated[str, option("drafted tokens per block (default 4); auto = the fastest, which may be none")] = ""
    rule: Annotated[
        str,
        option("acceptance rule: sample, greedy-draft, greedy or block; default: greedy at temperature 0, else sample"),
    ] = ""
    temperature: Annotated[float, option("sampling temperature; 0 = greedy")] = 0.0
    top_k: Annotated[int, option("keep the k most probable tokens; 0 = off")] = 0
    top_p: Annotated[float, option("nucleus sampling; 1 = off")] = 1.0
    max_tokens: Annotated[int | None, option("maximum tokens per response; default: 128, or as many as fit")] = None
    seed: Annotated[int, option("seed of all sampling")] = 0
    batch_size: Annotated[int, option("responses decoded at once", min=1)] = 16
    dtype: shared.Dtype = "auto"
    device: shared.Device = ""
    out: Annotated[Path | None, option("file for the responses as JSON lines; default: printed as they finish")] = None
