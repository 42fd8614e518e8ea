"""What each command is asked: one frozen dataclass a command, its docstring the help.

Apart from the commands, so that --help loads none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config.command_line import (
    Chat,
    Device,
    DraftingName,
    DraftSeconds,
    Dtype,
    Json,
    Launcher,
    MessagesColumn,
    Out,
    Overrides,
    Plot,
    PromptColumn,
    RuleName,
    Seed,
    TargetModel,
    TargetSeconds,
    TrustRemoteCode,
    argument,
    option,
)

STDLIB = "stdlib"
RunFolder = Annotated[Path, argument("run folder")]
KeyVariable = Annotated[str, option("environment variable with the key that the engine wants; default: none is sent")]


@dataclass(frozen=True)
class ConfigOptions:
    """Every key of a config with its default and meaning."""


@dataclass(frozen=True)
class ShowRunOptions:
    """The verdict of a finished run, with completions whose accepted tokens are marked."""

    run: RunFolder
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class DemoOptions:
    """Distil, judge and export a draft for the embedded target; ends with the numbers and what to type next."""

    config: Annotated[str, argument("the demo's config")] = "configs/demo.yaml"
    overrides: Overrides = None


@dataclass(frozen=True)
class ReportOptions:
    """One self-contained HTML page of a run (report.html), and its numbers as JSON beside it.

    understudy report runs/demo --t-target 25ms --t-draft 3ms

    understudy report runs/demo --price-per-hour 2.49
    """

    run: Annotated[Path, argument("run folder, or a result.json that `understudy evaluate` wrote")]
    to: Annotated[Path | None, option("HTML file; default report.html beside the result")] = None
    t_target: TargetSeconds = ""
    t_draft: DraftSeconds = ""
    price_per_hour: Annotated[
        str,
        option(
            "price of an hour of the device, e.g. 2.49; 2.49,4.98: without the draft, with it. Says what tokens cost"
        ),
    ] = ""


@dataclass(frozen=True)
class SweepOptions:
    """Train every combination of a grid, resumable, and compare them in one table with intervals."""

    file: Annotated[Path, argument("sweep file, e.g. configs/sweeps/grid.yaml")]
    launcher: Launcher = ""
    dry_run: Annotated[bool, option("print the runs and stop", "--dry-run")] = False


@dataclass(frozen=True)
class ExportOptions:
    """Write the best draft as an ordinary Hugging Face directory with the commands to serve it."""

    run: Annotated[Path, argument("run folder (its best checkpoint) or a checkpoint folder")]
    to: Annotated[Path, option("directory to make")]
    dtype: Dtype = "auto"
    overwrite: Annotated[bool, option("replace an earlier export there")] = False
    adapter: Annotated[
        bool, option("keep the adapter of a student.lora apart too: DIR/adapter, for peft and our decoder", "--adapter")
    ] = False
    quantize: Annotated[
        str,
        option(
            "weights of the linear layers and the head in 8 bits: int8, int8-dynamic (activations too; what vLLM takes on CPUs), fp8; "
            "none; default export.quantize of the run"
        ),
    ] = ""
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class CheckExportOptions:
    """Run an exported draft in transformers' own assisted generation: same greedy tokens? same tau as ours?"""

    exported: Annotated[Path, argument("an exported directory")]
    config: Annotated[str, option("config that names the target and held-out prompts")]
    prompts: Annotated[int, option("held-out prompts", min=1)] = 20
    gamma: Annotated[int, option("drafted tokens per block", min=1, max=16)] = 4
    overrides: Overrides = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class ServeOptions:
    """Start an installed engine with the target and a run's exported draft, as SERVING.md says; Ctrl-C ends it.

    understudy serve runs/demo --port 8000 -- --enforce-eager --dtype float32
    """

    run: Annotated[Path, argument("run folder (what is exported in it) or an exported directory")]
    words: Annotated[list[str] | None, argument("more flags for the engine, after --, e.g. -- --dtype float32")] = None
    engine: Annotated[str, option("the engine: vllm")] = "vllm"
    target: Annotated[str, option("directory or hub id of the target; default: the run's, or the export's hub id")] = ""
    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, option("port to listen on", min=1024, max=65535)] = 8000
    alone: Annotated[bool, option("the target without the draft, to compare with", "--alone")] = False
    log: Annotated[Path | None, option("what the engine prints; default vllm.log beside the export")] = None


@dataclass(frozen=True)
class CompareOptions:
    """Drafts of one target on the same held-out text: one table, paired differences, a plot, an exit status for CI.

    understudy compare runs/new runs/old --fail-below tau=2.1 --fail-if-worse
    """

    drafts: Annotated[
        list[str],
        argument(
            "two or more: runs, checkpoints, model directories, hub ids; `lookup`, `lookup+DRAFT`; `parallel+DRAFT`, `lookup+parallel+DRAFT`: "
            "a block in one pass"
        ),
    ]
    on: Annotated[Path | None, option("run whose held-out text judges all; default: the first run named")] = None
    rule: RuleName = ""
    gamma: Annotated[int, option("drafted tokens per block, 1 to 16; default: the run's")] = 0
    timing: Annotated[
        bool, option("measure steps and predict speed-ups; without, the target's weights stay on disk")
    ] = True
    fail_below: Annotated[
        list[str] | None,
        option("exit 1 when the first draft is below: tau=2.1, alpha=0.6, speed_up=1.2, tau.ci_low=2; repeatable"),
    ] = None
    fail_if_worse: Annotated[
        bool, option("exit 1 when the first draft is certainly worse than another", "--fail-if-worse")
    ] = False
    plot: Plot = None
    trust_remote_code: TrustRemoteCode = False
    out: Out = None


@dataclass(frozen=True)
class DriftOptions:
    """Is the draft still as good as when it was judged? A server's acceptance log, or fresh prompts, against the run's own.

    understudy drift runs/demo --log vllm.log

    understudy drift runs/demo --prompts fresh.jsonl

    Exit status: 0 no drift seen, 3 refresh advised, 2 a mistake.
    """

    run: Annotated[Path, argument("run folder whose best draft is served")]
    log: Annotated[
        Path | None, option("acceptance log: vLLM or llama.cpp output, JSON lines, csv, proposal log; .gz too")
    ] = None
    prompts: Annotated[
        str, option("or fresh prompts, decoded here: file (jsonl, json, csv, parquet, txt; .gz), directory or hub id")
    ] = ""
    metrics_url: Annotated[
        str, option("or the counters of a running engine, e.g. http://127.0.0.1:8000/metrics: differences of scrapes")
    ] = ""
    interval: Annotated[float, option("of --metrics-url: seconds between scrapes")] = 60.0
    scrapes: Annotated[int, option("of --metrics-url: how many, at least 2")] = 2
    api_key_env: KeyVariable = ""
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Chat = False
    format: Annotated[str, option("of the log: auto, jsonl, csv, vllm, llama.cpp, proposals")] = "auto"
    gamma: Annotated[int | None, option("drafted tokens per block of the server, if not in the log")] = None
    rule: RuleName = ""
    drafting: DraftingName = ""
    confidence: Annotated[float, option("of the interval that says whether acceptance fell")] = 0.95
    trust_remote_code: TrustRemoteCode = False
    out: Out = None


@dataclass(frozen=True)
class EvaluateOptions:
    """Judge a draft by real speculative decoding on held-out prompts: a table and result.json (`understudy report result.json`)."""

    draft: Annotated[str, argument("run folder, checkpoint folder, model directory or hub id")]
    config: Annotated[str, option("config that names the target, held-out prompts and serving settings")]
    gamma: Annotated[str, option("drafted tokens per block: 5, or a range 1:8")] = ""
    rule: RuleName = ""
    as_json: Json = False
    out: Annotated[
        Path,
        option(
            "where the result is written; every drafted token beside it as .proposals.parquet; --losslessness and --scorer "
            "are added to the result that judges this draft there, a run's own too"
        ),
    ] = Path("result.json")
    losslessness: Annotated[
        bool, option("instead: prove that the text is the target's own; exit 1 when it is not", "--losslessness")
    ] = False
    scorer: Annotated[
        str,
        option(
            "instead: task scores with and without the draft by exact-match, exact-match-number, module:function or file.py:function"
        ),
    ] = ""
    references: Annotated[Path | None, option('answers for --scorer: JSON lines with "prompt" and "reference"')] = None
    drafting: DraftingName = ""
    prompts: Annotated[int, option("held-out prompts for --losslessness and --scorer", min=1)] = 32
    samples: Annotated[int, option("responses per prompt for --losslessness (0 = 16) and --scorer (0 = 1)", min=0)] = 0
    control: Annotated[
        bool, option("--losslessness: a third set of texts at 1.1 times the temperature, which must be told apart")
    ] = True
    overrides: Overrides = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class ProbeOptions:
    """Go or no-go for a target and its candidate drafts, in minutes, before anything is trained.

    understudy probe TARGET DRAFT --prompts prompts.jsonl --chat

    understudy probe TARGET DRAFT --t-target 25ms --t-draft 3ms     (plan for hardware that is not here)
    """

    target: TargetModel
    drafts: Annotated[
        list[str] | None,
        argument("candidate drafts: directories, hub ids, runs; none = prompt lookup and ceilings only"),
    ] = None
    prompts: Annotated[
        str, option("file (jsonl, json, csv, parquet, txt; .gz), directory, hub id, or stdlib (the embedded domain)")
    ] = STDLIB
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Chat = False
    count: Annotated[int, option("prompts used, spread over the file", min=1)] = 32
    max_tokens: Annotated[int, option("tokens of a response at most", min=1)] = 96
    temperatures: Annotated[str, option("sampling temperatures; 0 = greedy")] = "0,1"
    gammas: Annotated[str, option("drafted tokens per block that are timed")] = "1,3,5,8"
    batch_sizes: Annotated[str, option("batch sizes that are timed; the first decides")] = "1,4,16"
    t_target: TargetSeconds = ""
    t_draft: DraftSeconds = ""
    t_verify: Annotated[str, option("given: one verify call of a block; default: as long as a target step")] = ""
    device_memory: Annotated[
        str, option("of the serving device, e.g. 80GB or 80GiB: does the pair fit? (with the next two)")
    ] = ""
    concurrency: Annotated[int, option("requests served at once there", min=0)] = 0
    context: Annotated[str, option("tokens of prompt and response of each, e.g. 8192 or 8k")] = ""
    dtype: Dtype = "auto"
    device: Device = ""
    seed: Seed = 0
    out: Out = None


@dataclass(frozen=True)
class ReadbackOptions:
    """Does a running engine accept this run's draft as replay predicts, and write the target's own text?

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo --plain http://127.0.0.1:8001/v1

    Exit status: 0 it does, 1 it does not, 2 a mistake or a server that is gone.
    """

    url: Annotated[str, argument("of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path, option("run folder whose best draft is served")]
    plain: Annotated[str, option("url of the same engine without the draft: the served speed-up")] = ""
    rule: Annotated[
        str, option("auto, or what the engine is told: greedy (temperature 0), greedy-draft, sample, block")
    ] = "auto"
    gamma: Annotated[int | None, option("drafted tokens per block; default: as exported", min=1, max=128)] = None
    drafting: DraftingName = ""
    prompts: Annotated[int | None, option("held-out prompts to ask; default: all of the run's", min=1)] = None
    concurrency: Annotated[int, option("requests under way at once", min=1, max=1024)] = 1
    model: Annotated[str, option("its name at the server; default: the only one")] = ""
    timeout: Annotated[float, option("seconds of one request")] = 600.0
    api_key_env: KeyVariable = ""
    seed: Annotated[int, option("of the requests, added to the run's")] = 0
    resume: Annotated[bool, option("keep what an interrupted readback was answered", "--resume")] = False
    trust_remote_code: TrustRemoteCode = False
    json: Json = False
    out: Out = None


@dataclass(frozen=True)
class GenerateOptions:
    """Text from a target, sped up by a draft; the text is the target's own. Numbers go to standard error.

    understudy generate embedded --prompt "def add(a, b):" --draft runs/demo/export --gamma auto
    """

    target: TargetModel
    prompt: Annotated[list[str] | None, option("a prompt; may be given several times")] = None
    prompts: Annotated[
        str,
        option("file (jsonl, json, csv, parquet, txt; .gz), directory or hub id; without any, one on standard input"),
    ] = ""
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Chat = False
    system: Annotated[str, option("system message (with --chat)")] = ""
    draft: Annotated[str, option("draft model: directory, hub id, run or checkpoint folder")] = ""
    drafter: Annotated[
        str,
        option(
            "who proposes: draft (default with --draft), lookup (the prompt's own n-grams), retrieval, early-exit, "
            "jacobi, cascade (lookup, then the draft), none (default without)"
        ),
    ] = ""
    drafting: DraftingName = ""
    exit_layers: Annotated[int, option("layers of early-exit; 0 = a third")] = 0
    datastore: Annotated[Path | None, option("past texts for retrieval: --out file of an earlier run")] = None
    gamma: Annotated[str, option("drafted tokens per block (default 4), or auto: what pays most, none included")] = ""
    stop_below: Annotated[float, option("stop drafting behind a token of less probability; 0 = off")] = 0.0
    tree: Annotated[str, option("candidates per depth instead of a chain, e.g. 3,2,1")] = ""
    rule: Annotated[
        str, option("sample, greedy-draft, greedy, block; default: greedy at temperature 0, else sample")
    ] = ""
    temperature: Annotated[float, option("0 = greedy")] = 0.0
    top_k: Annotated[int, option("keep the k most probable tokens; 0 = off")] = 0
    top_p: Annotated[float, option("nucleus sampling; 1 = off")] = 1.0
    min_p: Annotated[float, option("drop tokens under min-p x the largest probability; 0 = off")] = 0.0
    repetition_penalty: Annotated[float, option("1 = off")] = 1.0
    max_tokens: Annotated[
        int | None, option("tokens of a response at most; default: 128, or what the context leaves behind its prompt")
    ] = None
    min_tokens: Annotated[int, option("no end token before so many")] = 0
    stop: Annotated[list[str] | None, option("a text that ends a response; may be given several times")] = None
    seed: Seed = 0
    batch_size: Annotated[int, option("rows decoded at once", min=1)] = 16
    dtype: Dtype = "auto"
    device: Device = ""
    runner: Annotated[str, option("model calls: auto, eager, compile, graph (CUDA)")] = "auto"
    out: Annotated[
        Path | None, option("write responses here as JSON lines; without it, several are printed as they end")
    ] = None
    log: Annotated[Path | None, option("write every drafted token here as parquet")] = None
    numbers: Annotated[Path | None, option("write the run's numbers here as JSON")] = None

    @property
    def kind(self) -> str:
        """Who proposes, the default said."""
        return self.drafter or ("draft" if self.draft else "none")
