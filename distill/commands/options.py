"""What the commands of a few options are asked; each of the others has them in its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class DemoOptions:
    """Of `understudy demo`."""

    config: Annotated[str, typer.Argument(help="the demo's config")] = "configs/demo.yaml"
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. train.steps=100")] = None


@dataclass(frozen=True)
class ReportOptions:
    """Of `understudy report`; times are texts such as `25ms`."""

    run: Annotated[Path, typer.Argument(help="run folder, or a result.json that `understudy evaluate` wrote")]
    to: Annotated[Path | None, typer.Option(help="HTML file; default report.html beside the result")] = None
    t_target: Annotated[
        str, typer.Option(help="target step of other hardware, e.g. 25ms: a second speed-up curve (with --t-draft)")
    ] = ""
    t_draft: Annotated[str, typer.Option(help="draft step of other hardware, e.g. 3ms")] = ""
    price_per_hour: Annotated[
        str,
        typer.Option(
            help="price of an hour of the device, e.g. 2.49; 2.49,4.98: without the draft, with it. Says what tokens cost"
        ),
    ] = ""


@dataclass(frozen=True)
class SweepOptions:
    """Of `understudy sweep`."""

    file: Annotated[Path, typer.Argument(help="sweep file, e.g. configs/sweeps/objectives.yaml")]
    launcher: Annotated[
        str, typer.Option(help='before `-m distill.train`, e.g. "accelerate launch --num_processes 2"')
    ] = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the runs and stop")] = False


@dataclass(frozen=True)
class ExportOptions:
    """Of `understudy export`."""

    run: Annotated[Path, typer.Argument(help="run folder (its best checkpoint) or a checkpoint folder")]
    to: Annotated[Path, typer.Option(help="directory to make")]
    dtype: Annotated[str, typer.Option(help="auto = the dtype the target is saved in; float32, bfloat16, float16")] = (
        "auto"
    )
    overwrite: Annotated[bool, typer.Option(help="replace an earlier export there")] = False
    quantize: Annotated[
        str,
        typer.Option(
            help="weights of the linear layers and the head in 8 bits: int8, int8-dynamic (activations too; what vLLM takes on CPUs), fp8; "
            "none; default export.quantize of the run"
        ),
    ] = ""


@dataclass(frozen=True)
class CheckExportOptions:
    """Of `understudy check-export`."""

    exported: Annotated[Path, typer.Argument(help="an exported directory")]
    config: Annotated[str, typer.Option(help="config that names the target and held-out prompts")]
    prompts: Annotated[int, typer.Option(help="held-out prompts", min=1)] = 20
    gamma: Annotated[int, typer.Option(help="drafted tokens per block", min=1, max=16)] = 4
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the config")] = None


@dataclass(frozen=True)
class ServeOptions:
    """Of `understudy serve`."""

    run: Annotated[Path, typer.Argument(help="run folder (what is exported in it) or an exported directory")]
    words: Annotated[
        list[str] | None, typer.Argument(help="more flags for the engine, after --, e.g. -- --dtype float32")
    ] = None
    engine: Annotated[str, typer.Option(help="the engine: vllm")] = "vllm"
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="port to listen on", min=1024, max=65535)] = 8000
    alone: Annotated[bool, typer.Option("--alone", help="the target without the draft, to compare with")] = False
    log: Annotated[Path | None, typer.Option(help="what the engine prints; default vllm.log beside the export")] = None
