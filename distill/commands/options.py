"""Options of each command: one frozen dataclass per command, whose docstring is its help text.

The first sentence is the line in the list of commands. Kept apart from the commands, so that --help imports none of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import PROMPT_SOURCE, argument, option

RunFolder = Annotated[Path, argument("run folder")]
KeyVariable = Annotated[str, option("environment variable with the engine's API key; default: no key is sent")]


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

    Also decodes three held-out prompts and marks the tokens that the target accepted from the draft. With --page it writes the
    report instead, one HTML file without external files.
    """

    run: Annotated[Path, argument("run folder; with --page also a result.json of `understudy evaluate`")]
    page: Annotated[Path | None, option("HTML file to write")] = None
    price_per_hour: Annotated[str, option("price of an hour, e.g. 2.49; 2.49,4.98 = without and with the draft")] = ""
    trust_remote_code: shared.TrustRemoteCode = False


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
    engine: Annotated[str, option("engine to start: vllm or llama.cpp")] = "vllm"
    target: Annotated[str, option("target: directory or hub id; default: the run's, or the hub id in the export")] = ""
    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, option("port to listen on", min=1024, max=65535)] = 8000
    alone: Annotated[bool, option("serve the target without the draft, to compare", "--alone")] = False


@dataclass(frozen=True)
class DriftOptions:
    """Check whether acceptance has fallen.

    understudy drift runs/demo --metrics-url http://127.0.0.1:8000/metrics

    Compares a server's counters, or the answers of a readback, with the run's own held-out text.

    Exit status: 0 no drift seen, 3 refresh advised, 2 a mistake in the command or its files.
    """

    run: Annotated[Path, argument("run folder whose best draft is served")]
    metrics_url: Annotated[
        str, option("metrics page of a running engine, scraped several times, e.g. http://127.0.0.1:8000/metrics")
    ] = ""
    log: Annotated[
        Path | None, option("or answers as JSON lines, such as a readback's: responses of an engine, or counts")
    ] = None
    interval: Annotated[float, option("with --metrics-url: seconds between scrapes")] = 60.0
    scrapes: Annotated[int, option("with --metrics-url: number of scrapes, at least 2")] = 2
    api_key_env: KeyVariable = ""
    gamma: Annotated[int | None, option("the server's drafted tokens per block, if not logged", min=1, max=128)] = None
    rule: shared.RuleName = ""
    trust_remote_code: shared.TrustRemoteCode = False
    out: shared.Out = None


@dataclass(frozen=True)
class ReadbackOptions:
    """Judge the drafter of a running engine.

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo --plain http://127.0.0.1:8001/v1

    understudy readback http://127.0.0.1:8000/v1 --target Qwen/Qwen3-4B --prompts prompts.jsonl --plain http://127.0.0.1:8001/v1

    With --run: sends the run's held-out prompts. Checks that the engine accepts the draft as replay predicts and that its text
    is the target's own. With --target and --prompts it judges whatever the engine drafts with (EAGLE-3, DFlash, MTP, n-grams):
    tau and acceptance by position from the engine's counts, speed, and its text against the target loaded here.

    Served in other numerics than the run's? Then --draft and --target name what is replayed: a GGUF file is dequantised.

    Only one engine fits? Run the command without --plain, restart the engine without the draft, then repeat it with
    --resume --plain URL.

    Exit status: 0 all that is checked holds, 1 something does not, 2 a mistake in the command or a server that does not answer.
    """

    url: Annotated[str, argument("URL of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path | None, option("run folder whose best draft is served")] = None
    target: Annotated[str, option("target as served: directory, hub id, GGUF or `embedded`; default: the run's")] = ""
    draft: Annotated[str, option("with --run: the draft as it is served, e.g. a GGUF file; default: the run's")] = ""
    prompts: Annotated[str, option(f"with --target: {PROMPT_SOURCE}")] = ""
    chat: shared.Chat = False
    temperature: Annotated[float, option("with --target: sampling temperature; 0 = greedy text only", min=0)] = 1.0
    max_tokens: Annotated[int, option("with --target: maximum tokens per response", min=2)] = 128
    to: Annotated[Path, option("with --target: folder for readback.json and the answers")] = Path("readback")
    plain: Annotated[str, option("URL of the same engine without the draft, to measure the speed-up")] = ""
    speed: Annotated[bool, option("with --run and --plain: compare speeds with `understudy time`", "--speed")] = False
    rule: Annotated[str, option("auto or the engine's: greedy (temperature 0), greedy-draft, sample or block")] = "auto"
    gamma: Annotated[int | None, option("drafted tokens per block; default: as exported", min=1, max=128)] = None
    count: Annotated[int | None, option("prompts to send; default: all", min=1)] = None
    concurrency: Annotated[int, option("requests sent at once", min=1, max=1024)] = 1
    api_key_env: KeyVariable = ""
    resume: Annotated[bool, option("keep the answers of an interrupted or earlier readback", "--resume")] = False
    trust_remote_code: shared.TrustRemoteCode = False
    out: shared.Out = None
