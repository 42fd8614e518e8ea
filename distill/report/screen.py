"""The last screen of a run: the verdict as a table, completions with the accepted tokens marked, and the next step."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from distill.config.layout import BEST_LINK, EXPORT, REPORT, RESULT, VERDICT
from distill.report.measured import engine_parts, load_table, waits_table, ways_tables
from distill.report.money import Prices
from distill.report.sections.money import money_lines, money_table
from distill.report.table import Cell, Column, Table
from distill.run.result import ResponseSeen, Result
from distill.run.verdict_record import Verdict, load_verdict
from speculative.evaluate import Judgement, OnText
from speculative.measure.replay import agreement_words

ACCEPTED_STYLE = "green"
OWN_STYLE = "bold yellow"
PROMPT_LINES, SHOWN_RESPONSES = 6, 3


def judgement_table(title: str, judgement: Judgement) -> Table:
    """Numbers of one draft: overall and by domain."""
    table = Table(
        [
            "",
            Column("alpha", ".3f"),
            Column("tau", ".2f"),
            Column("accepted / drafted", ".3f"),
            "survival 1..gamma",
            Column("prompts", ","),
            Column("tokens", ","),
        ],
        title=title,
        caption=f"tau compared with {agreement_words(judgement.replay_check, judgement.live_tokens or 0)}",
    )
    rows: list[tuple[str, OnText]] = [("all", judgement)]
    rows += sorted(judgement.domains.items()) if len(judgement.domains) > 1 else []
    for name, row in rows:
        survival = " ".join(f"{value:.2f}" for value in row.survival or [])
        table.add(
            name,
            Cell(row.alpha, row.alpha_ci),
            Cell(row.tau, row.tau_ci),
            row.accepted_per_drafted,
            survival,
            row.prompts,
            row.tokens,
        )
    return table


def marked_completion(seen: ResponseSeen) -> Panel:
    """A completion with accepted draft tokens in one colour and the target's own tokens in another."""
    prompt = seen.prompt.rstrip("\n").splitlines()
    shown = prompt if len(prompt) <= PROMPT_LINES else [*prompt[: PROMPT_LINES - 1], "    ..."]
    text = Text("\n".join(shown) + "\n", style="dim")
    for token in seen.tokens:
        text.append(token.text, style=ACCEPTED_STYLE if token.by == "draft" else OWN_STYLE)
    drafted = sum(token.by == "draft" for token in seen.tokens)
    share = f"{drafted} of {seen.tokens_count} tokens from the draft, {seen.blocks} target calls"
    return Panel(text, title=share, title_align="left", expand=True)


def show_run(run: Path, prices: Prices | None = None) -> None:
    """Print the verdict of a finished run, some of its completions and where its files are.

    Raises UserError: the run is not finished, or a file of it is damaged.
    """
    verdict, console = load_verdict(run), Console()
    view = Result.read(run / RESULT).token_view
    completions = [marked_completion(seen) for seen in view.responses[:SHOWN_RESPONSES]] if view else []
    last_screen(console, run, verdict, completions, run / EXPORT if (run / EXPORT).exists() else None)
    if prices is not None:
        if table := money_table(verdict, prices):
            console.print(table)
        for line in money_lines(verdict, prices):
            console.print(Text(line))


def last_screen(
    console: Console, run: Path, verdict: Verdict, completions: Sequence[Panel], export: Path | None
) -> None:
    """Print the last screen of a run."""
    style = "green" if verdict.outcome in ("pays_off", "best_with_lookup") else "yellow"
    console.print()
    if completions:
        legend = Text.assemble(
            "held-out completions: ", ("accepted from the draft", ACCEPTED_STYLE), ", ", ("the target's own", OWN_STYLE)
        )
        console.print(Group(legend, *completions))
    for table in ways_tables(verdict):
        console.print(table)
    console.print(Text(verdict.headline, style=f"bold {style}"))
    for fact in verdict.facts:
        console.print(Text(fact))
    if verdict.costs is not None:
        break_even = verdict.costs.break_even_alpha
        alpha = "none" if break_even is None else f"{break_even:.2f}"
        steps = f" ({verdict.costs.steps})" if verdict.costs.steps else ""
        console.print(
            f"cost ratio {verdict.costs.cost_ratio:.2f}{steps}, break-even alpha at gamma {verdict.gamma}: {alpha}"
        )
    if max(verdict.concurrencies, default=1) > 1:
        console.print(load_table(verdict))
        console.print(waits_table(verdict.measured))
    for part in engine_parts(verdict):
        console.print(part, highlight=False)
    parts = {stage: value for stage, value in verdict.seconds.items() if "/" not in stage}
    console.print("time: " + ", ".join(f"{stage} {value:.0f} s" for stage, value in parts.items()), highlight=False)
    places = RichTable.grid(padding=(0, 2))
    if (run / REPORT).exists():
        places.add_row("report", f"{run / REPORT}  (open it in a browser)")
    places.add_row("verdict", str(run / VERDICT))
    places.add_row("best checkpoint", str(run / BEST_LINK))
    if export is not None:
        places.add_row("exported draft", f"{export}  (how to serve it: {export / 'SERVING.md'})")
    console.print(places, highlight=False, markup=False)
    if export is None:
        console.print(
            f"next             understudy export {run} --to {run / EXPORT}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
