"""The commands that answer "does it pay, and will it stay so": probe, report, compare, drift."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PROBE_HELP = """Go or no-go for a target and its candidate drafts, in minutes, before anything is trained.

    understudy probe TARGET DRAFT --prompts prompts.jsonl --chat

    understudy probe TARGET DRAFT --t-target 25ms --t-draft 3ms     (plan for hardware that is not here)
"""
REPORT_HELP = """One self-contained HTML page of a run (report.html), with a Markdown and a JSON twin beside it.

    understudy report runs/demo --t-target 25ms --t-draft 3ms
"""
COMPARE_HELP = """Drafts of one target on the same held-out text: one table, paired differences, a plot, an exit status for CI.

    understudy compare runs/new runs/old --fail-below tau=2.1 --fail-if-worse
"""
DRIFT_HELP = """Is the draft still as good as when it was judged? A server's acceptance log, or fresh prompts, against the run's own.

    understudy drift runs/demo --log vllm.log

    understudy drift runs/demo --prompts fresh.jsonl --plot drift.png

Exit status: 0 no drift seen, 3 refresh advised, 2 a mistake.
"""


def probe(
    target: Annotated[str, typer.Argument(help="target: directory, hub id or `embedded`")],
    drafts: Annotated[
        list[str] | None,
        typer.Argument(help="candidate drafts: directories, hub ids, runs; none = prompt lookup and ceilings only"),
    ] = None,
    prompts: Annotated[
        str, typer.Option(help='.jsonl with "prompt", .txt one a line, or stdlib (the embedded domain)')
    ] = "stdlib",
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the target's chat template")] = False,
    count: Annotated[int, typer.Option(help="prompts used, spread over the file", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response at most", min=1)] = 96,
    temperatures: Annotated[str, typer.Option(help="sampling temperatures; 0 = greedy")] = "0,1",
    gammas: Annotated[str, typer.Option(help="drafted tokens per block that are timed")] = "1,3,5,8",
    batch_sizes: Annotated[str, typer.Option(help="batch sizes that are timed; the first decides")] = "1,4,16",
    t_target: Annotated[
        str, typer.Option(help="given instead of measured: one target step, e.g. 25ms (with --t-draft)")
    ] = "",
    t_draft: Annotated[str, typer.Option(help="given instead of measured: one draft step, e.g. 3ms")] = "",
    t_verify: Annotated[
        str, typer.Option(help="given: one verify call of a block; default: as long as a target step")
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: cuda where there is one")] = "",
    seed: Annotated[int, typer.Option(help="of all sampling")] = 0,
    out: Annotated[Path | None, typer.Option(help="also write everything here as JSON")] = None,
) -> None:
    """Go or no-go."""
    from distill.commands.probe.probe import ProbeOptions
    from distill.commands.probe.probe import probe as look
    from distill.commands.probe.screen import print_probe

    options = ProbeOptions(
        target, drafts or (), prompts, chat, count, max_tokens, temperatures, gammas, batch_sizes, t_target, t_draft,
        t_verify, dtype, device, seed, out,
    )  # fmt: skip
    print_probe(Console(), look(options, Console(stderr=True)))


def report(
    run: Annotated[Path, typer.Argument(help="run folder, or a result.json that `understudy evaluate` wrote")],
    to: Annotated[Path | None, typer.Option(help="HTML file; default report.html beside the result")] = None,
    t_target: Annotated[
        str, typer.Option(help="target step of other hardware, e.g. 25ms: a second speed-up curve (with --t-draft)")
    ] = "",
    t_draft: Annotated[str, typer.Option(help="draft step of other hardware, e.g. 3ms")] = "",
) -> None:
    """The report."""
    from distill.report.page import given_times, report_command

    files = report_command(run, to, given_times(t_target, t_draft))
    print(f"{files.html}\n{files.markdown}\n{files.summary}")


def compare(
    drafts: Annotated[list[str], typer.Argument(help="two or more: runs, checkpoints, model directories, hub ids")],
    on: Annotated[
        Path | None, typer.Option(help="run whose held-out text judges all; default: the first run named")
    ] = None,
    rule: Annotated[str, typer.Option(help="sample, greedy-draft, greedy or block; default: the run's")] = "",
    gamma: Annotated[int, typer.Option(help="drafted tokens per block, 1 to 16; default: the run's")] = 0,
    timing: Annotated[
        bool, typer.Option(help="measure steps and predict speed-ups; without, the target's weights stay on disk")
    ] = True,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            help="exit 1 when the first draft is below: tau=2.1, alpha=.6, speed_up=1.2, tau.ci_low=2; repeatable"
        ),
    ] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="exit 1 when the first draft is certainly worse than another")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="png or svg; default compare.svg beside --out")] = None,
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None,
) -> None:
    """Drafts side by side."""
    from distill.commands.compare.compare import Options, compare_command
    from distill.commands.compare.screen import compare_table, difference_lines, domain_table

    result, status = compare_command(
        Options(drafts, on, rule, gamma, timing, fail_below or (), fail_if_worse, plot, out)
    )
    console = Console()
    console.print(compare_table(result))
    domains = domain_table(result)
    if domains is not None:
        console.print(domains)
    for line in (*difference_lines(result), *result["failures"]):
        console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def drift(
    run: Annotated[Path, typer.Argument(help="run folder whose best draft is served")],
    log: Annotated[
        Path | None,
        typer.Option(help="acceptance log: vLLM or llama.cpp output, JSON lines, csv, proposal log; .gz too"),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="or fresh prompts, decoded here: .jsonl or .txt")] = None,
    chat: Annotated[bool, typer.Option(help="wrap fresh prompts in the target's chat template")] = False,
    format: Annotated[str, typer.Option(help="of the log: auto, jsonl, csv, vllm, llama.cpp, proposals")] = "auto",
    gamma: Annotated[int | None, typer.Option(help="drafted tokens per block of the server, if not in the log")] = None,
    rule: Annotated[str, typer.Option(help="engine rule of the server; default: the run's")] = "",
    false_alarms: Annotated[float, typer.Option(help="probability of any false alarm over the whole log")] = 0.01,
    drop: Annotated[float, typer.Option(help="fall in accepted/drafted that is to be found fast")] = 0.05,
    two_sided: Annotated[bool, typer.Option("--two-sided", help="tell of a rise too")] = False,
    out: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="picture of the test statistic, png or svg")] = None,
    seed: Annotated[int, typer.Option(help="of the simulations that set the threshold")] = 0,
) -> None:
    """Drift."""
    from distill.commands.drift.drift import REFRESH, DriftOptions, drift_command

    options = DriftOptions(run, log, prompts, chat, format, gamma, rule, false_alarms, drop, two_sided, out, plot, seed)
    if drift_command(options, Console())["refresh"]:
        raise typer.Exit(REFRESH)


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for function, text in ((probe, PROBE_HELP), (report, REPORT_HELP), (compare, COMPARE_HELP), (drift, DRIFT_HELP)):
        app.command(help=text)(function)
