"""What each command is asked: one frozen dataclass a command (that of generate is in its folder). Apart from the commands, so that --help loads none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distill.config.command_line import MessagesColumn, PromptColumn

STDLIB = "stdlib"


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
    t_draft: Annotated[
        str, typer.Option(help="draft call of other hardware (a token, or a block drafted in one pass), e.g. 3ms")
    ] = ""
    price_per_hour: Annotated[
        str,
        typer.Option(
            help="price of an hour of the device, e.g. 2.49; 2.49,4.98: without the draft, with it. Says what tokens cost"
        ),
    ] = ""


@dataclass(frozen=True)
class SweepOptions:
    """Of `understudy sweep`."""

    file: Annotated[Path, typer.Argument(help="sweep file, e.g. configs/sweeps/grid.yaml")]
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
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="keep the adapter of a student.lora apart too: DIR/adapter, for peft and our decoder"
        ),
    ] = False
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


@dataclass(frozen=True)
class CompareOptions:
    """The drafts, the text they are judged on, and the gates."""

    drafts: Annotated[
        list[str],
        typer.Argument(
            help="two or more: runs, checkpoints, model directories, hub ids; `lookup`, `lookup+DRAFT`; `parallel+DRAFT`, `lookup+parallel+DRAFT`: "
            "a block in one pass"
        ),
    ]
    on: Annotated[
        Path | None, typer.Option(help="run whose held-out text judges all; default: the first run named")
    ] = None
    rule: Annotated[str, typer.Option(help="sample, greedy-draft, greedy or block; default: the run's")] = ""
    gamma: Annotated[int, typer.Option(help="drafted tokens per block, 1 to 16; default: the run's")] = 0
    timing: Annotated[
        bool, typer.Option(help="measure steps and predict speed-ups; without, the target's weights stay on disk")
    ] = True
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            help="exit 1 when the first draft is below: tau=2.1, alpha=.6, speed_up=1.2, tau.ci_low=2; repeatable"
        ),
    ] = None
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="exit 1 when the first draft is certainly worse than another")
    ] = False
    plot: Annotated[Path | None, typer.Option(help="png or svg; default compare.svg beside --out")] = None
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None


@dataclass(frozen=True)
class DriftOptions:
    """One of `log` and `prompts`. gamma, rule: of the server, by default the log's and the run's verdict's."""

    run: Annotated[Path, typer.Argument(help="run folder whose best draft is served")]
    log: Annotated[
        Path | None,
        typer.Option(
            help="acceptance log: vLLM or llama.cpp output, JSON lines, csv, proposal log; .gz too; or the gateway's log directory"
        ),
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
    draft_version: Annotated[
        str, typer.Option(help="of a gateway's log: requests of this draft; default: of the one that served last")
    ] = ""
    format: Annotated[str, typer.Option(help="of the log: auto, jsonl, csv, vllm, llama.cpp, proposals")] = "auto"
    gamma: Annotated[int | None, typer.Option(help="drafted tokens per block of the server, if not in the log")] = None
    rule: Annotated[str, typer.Option(help="engine rule of the server; default: the run's")] = ""
    drafting: Annotated[str, typer.Option(help="autoregressive or parallel, of the server; default: as exported")] = ""
    false_alarms: Annotated[float, typer.Option(help="probability of any false alarm over the whole log")] = 0.01
    drop: Annotated[float, typer.Option(help="fall in accepted/drafted that is to be found fast")] = 0.05
    two_sided: Annotated[bool, typer.Option("--two-sided", help="tell of a rise too")] = False
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None
    plot: Annotated[Path | None, typer.Option(help="picture of the test statistic, png or svg")] = None
    seed: Annotated[int, typer.Option(help="of the simulations that set the threshold")] = 0


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
    drafting: Annotated[
        str,
        typer.Option(
            help="--losslessness, --scorer: the draft proposes autoregressive (default) or parallel; a judgement takes the faster"
        ),
    ] = ""
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
    t_draft: Annotated[
        str,
        typer.Option(
            help="given instead of measured: one draft call (a token, or a block drafted in one pass), e.g. 3ms"
        ),
    ] = ""
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


@dataclass(frozen=True)
class ReadbackOptions:
    """gamma, rule: of the server; by default those of the run's export, and whichever rule fits."""

    url: Annotated[str, typer.Argument(help="of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path, typer.Option(help="run folder whose best draft is served")]
    plain: Annotated[str, typer.Option(help="url of the same engine without the draft: the served speed-up")] = ""
    rule: Annotated[
        str, typer.Option(help="auto, or what the engine is told: greedy (temperature 0), greedy-draft, sample, block")
    ] = "auto"
    gamma: Annotated[int | None, typer.Option(help="drafted tokens per block; default: as exported")] = None
    drafting: Annotated[
        str, typer.Option(help="autoregressive or parallel, as the server was started; default: as exported")
    ] = ""
    prompts: Annotated[int | None, typer.Option(help="held-out prompts to ask; default: all of the run's")] = None
    concurrency: Annotated[int, typer.Option(help="requests under way at once")] = 1
    model: Annotated[str, typer.Option(help="its name at the server; default: the only one")] = ""
    timeout: Annotated[float, typer.Option(help="seconds of one request")] = 600.0
    seed: Annotated[int, typer.Option(help="of the requests, added to the run's")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="keep what an interrupted readback was answered")] = False
    json: Annotated[bool, typer.Option("--json", help="print served.json instead of the table")] = False
    out: Annotated[Path | None, typer.Option(help="write it here too")] = None
