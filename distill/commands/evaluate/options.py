"""Options of `understudy evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import argument, option


@dataclass(frozen=True)
class EvaluateOptions:
    """Judge a draft on held-out prompts.

    understudy evaluate runs/demo --config configs/demo.yaml

    understudy evaluate runs/demo --config configs/demo.yaml --gamma 5 --out result.json

    understudy evaluate runs/demo --config configs/demo.yaml --losslessness

    Decodes them speculatively, prints a table and writes result.json; `understudy show result.json --page FILE` makes a page of it.

    Exit status: 0 done, 1 --losslessness found another text distribution, 2 a mistake in the command or its files.
    """

    draft: Annotated[str, argument("run folder, checkpoint folder, model directory or hub id")]
    config: Annotated[str, option("config with the target, held-out prompts and serving settings")]
    gamma: Annotated[int, option("drafted tokens per block; default: the config's", min=0, max=32)] = 0
    rule: shared.RuleName = ""
    out: Annotated[
        Path,
        option(
            "file for the result; every drafted token goes to .proposals.parquet next to it. --losslessness and --scorer "
            "add to a result of the same draft that is already there, also to a run's own"
        ),
    ] = Path("result.json")
    losslessness: Annotated[
        bool, option("instead: test the text; exit 1 if it is not the target's", "--losslessness")
    ] = False
    scorer: Annotated[
        str,
        option(
            "instead: task scores with and without the draft: exact-match, exact-match-number, module:function or file.py:function"
        ),
    ] = ""
    references: Annotated[Path | None, option('answers for --scorer: JSON lines with "prompt" and "reference"')] = None
    prompts: Annotated[int, option("held-out prompts for --losslessness and --scorer", min=1)] = 32
    overrides: shared.Overrides = None
    trust_remote_code: shared.TrustRemoteCode = False
