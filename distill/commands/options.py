"""Options of each command: one frozen dataclass per command, whose docstring is its help text.

The first sentence is the line in the list of commands. Kept apart from the commands, so that --help imports none of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import argument, option


@dataclass(frozen=True)
class ConfigOptions:
    """List every config key and its default.

    understudy config | less

    The keys that people set most come first. The same table is docs/reference/config.md.
    """


@dataclass(frozen=True)
class ShowRunOptions:
    """Show the verdict of a finished run.

    understudy show runs/demo

    understudy show runs/demo --page report.html --price-per-hour 2.49

    In three held-out responses it marks the tokens that the target accepted from the draft. With --page it writes the report instead,
    one HTML file without external files.
    """

    run: Annotated[Path, argument("run folder; with --page also a result.json of `understudy evaluate`")]
    page: Annotated[Path | None, option("HTML file to write")] = None
    price_per_hour: Annotated[str, option("price of an hour, e.g. 2.49; 2.49,4.98 = without and with the draft")] = ""


@dataclass(frozen=True)
class DemoOptions:
    """Train a small draft on a built-in target.

    understudy demo

    Trains, judges and exports the draft, then prints the numbers and the next commands. The target is a small model of Python
    code that comes with the package, so nothing is downloaded.
    """

    config: Annotated[str, argument("config of the demo")] = "configs/demo.yaml"
    overrides: shared.Overrides = None


@dataclass(frozen=True)
class ExportOptions:
    """Export the draft as a Hugging Face model.

    understudy export runs/demo --to runs/demo/export --quantize int8

    understudy export runs/demo --check runs/demo/export

    Writes the best checkpoint and SERVING.md, which has the commands to serve it with each engine. With --check it runs an export in
    transformers' own assisted generation instead, and compares the greedy tokens and tau with Understudy's.

    Exit status: 0 done, 1 the check found a difference, 2 a mistake in the command or its files.
    """

    run: Annotated[Path, argument("run folder (its best checkpoint is used) or checkpoint folder")]
    to: Annotated[Path | None, option("directory to write")] = None
    check: Annotated[Path | None, option("instead: directory of an export to check with transformers")] = None
    dtype: shared.Dtype = "auto"
    overwrite: Annotated[bool, option("replace an earlier export in that directory")] = False
    adapter: Annotated[bool, option("also write the LoRA adapter, for peft, to DIR/adapter", "--adapter")] = False
    quantize: Annotated[str, option("8-bit layers: int8, int8-dynamic (for CPUs), fp8, none; default: the run's")] = ""
    push: Annotated[str, option("upload the export as hub model ORG/NAME, private if it is new")] = ""
    push_dataset: Annotated[str, option("upload prompts and responses as hub dataset ORG/NAME")] = ""
    trust_remote_code: shared.TrustRemoteCode = False


@dataclass(frozen=True)
class ServeOptions:
    """Start an engine with target and draft.

    understudy serve runs/demo --port 8000 -- --enforce-eager --dtype float32

    Runs it by SERVING.md's command in the foreground; it must be installed. Ctrl-C ends it.
    """

    run: Annotated[Path, argument("run folder that has an export, or an exported directory")]
    words: Annotated[list[str] | None, argument("more flags for the engine, given after --")] = None
    engine: Annotated[str, option("engine to start: vllm or llama.cpp; default: serving.engine, or vllm")] = ""
    target: Annotated[str, option("target: directory or hub id; default: the run's, or the hub id in the export")] = ""
    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, option("port to listen on", min=1024, max=65535)] = 8000
    alone: Annotated[bool, option("serve the target without the draft, to compare", "--alone")] = False
