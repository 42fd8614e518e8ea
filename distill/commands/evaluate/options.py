"""What `understudy evaluate` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class EvaluateOptions:
    """A draft, the config that judges it, and the tests for a doubter."""

    draft: Annotated[str, typer.Argument(help="run folder, checkpoint folder, model directory or hub id")]
    config: Annotated[str, typer.Option(help="config that names the target, held-out prompts and serving settings")]
    gamma: Annotated[str, typer.Option(help="drafted tokens per block: 5, or a range 1:8")] = ""
    rule: Annotated[
        str, typer.Option(help="sample, greedy-draft, greedy or block; default: the config's judge.rule")
    ] = ""
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON, in the shape of verdict.json")] = (
        False
    )
    out: Annotated[
        Path,
        typer.Option(
            help="where the result is written; every drafted token beside it as .proposals.parquet; --losslessness and --scorer "
            "are added to the result that judges this draft there, a run's own too"
        ),
    ] = Path("result.json")
    losslessness: Annotated[
        bool,
        typer.Option("--losslessness", help="instead: prove that the text is the target's own; exit 1 when it is not"),
    ] = False
    scorer: Annotated[
        str,
        typer.Option(
            help="instead: task scores with and without the draft by exact-match, exact-match-number, module:function or file.py:function"
        ),
    ] = ""
    references: Annotated[
        Path | None, typer.Option(help='answers for --scorer: JSON lines with "prompt" and "reference"')
    ] = None
    prompts: Annotated[int, typer.Option(help="held-out prompts for --losslessness and --scorer", min=1)] = 32
    samples: Annotated[
        int, typer.Option(help="responses per prompt for --losslessness (0 = 16) and --scorer (0 = 1)", min=0)
    ] = 0
    control: Annotated[
        bool,
        typer.Option(
            help="--losslessness: a third set of texts at 1.1 times the temperature, which must be told apart"
        ),
    ] = True
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the config")] = None
