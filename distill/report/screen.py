"""What a person reads at the end: the verdict as a table, completions with the accepted tokens marked, what to do next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from distill.config.layout import BEST_LINK, REPORT, VERDICT
from distill.export.export import ExportReport
from distill.export.load_table import run_by_load
from distill.report.markdown import best_gamma_words
from distill.report.money import Prices, money_section
from distill.report.screen_table import screen_table
from distill.report.tables import cost_words, interval, number, way_of
from distill.run.result import Result
from distill.run.verdict_record import Costs, Interval, Judgement, OnText, Verdict
from speculative.decoder.responses import Response
from speculative.explain.token_class import token_pieces
from speculative.measure.replay import agreement_words

ACCEPTED_STYLE = "green"
OWN_STYLE = "bold yellow"


def verdict_table(verdict: Verdict) -> Table:
    """What could be run, side by side: the target alone, the drafts, what costs no training."""
    table = screen_table(
        f"{verdict.prompts} held-out prompts ({verdict.tokens:,} tokens), rule {verdict.rule}, gamma {verdict.gamma}",
        ("draft", "alpha", "tau", "accepted\n/drafted", "tokens/s", "speed"),
        words=("draft",),
        no_wrap=True,
        padding=(0, 1, 0, 0),
        caption="alpha: acceptance rate; tau: tokens per target call; [95 % interval]; g: gamma that the speed is of",
    )
    alone, way = verdict.target_tokens_per_second, way_of(verdict)
    if alone is not None:
        table.add_row(
            "target alone", "", "1.00", "", f"{alone:.0f}", "1.00x", style="bold" if verdict.run == "target" else ""
        )
    judged = "distilled" if verdict.baseline is not None else "the draft"
    for name, key in (("undistilled", "baseline"), ("served today", "served"), (judged, "best")):
        row = getattr(verdict, key)
        if row is None:
            continue
        table.add_row(
            name
            + ("" if row.step is None else f"\n  (step {row.step})")
            + (f"\n  {way}" if key == "best" and way else ""),
            f"{row.alpha:.3f}\n{interval(row.alpha_ci, 2)}",
            f"{row.tau:.2f}" + (f"\n{interval(row.tau_ci, 2)}" if row.tau_ci else "\n(replay)"),
            f"{row.accepted_per_drafted:.3f}" if row.accepted_per_drafted is not None else "",
            f"{row.tokens_per_second:.0f}" if alone is not None else "",
            _speed_cell(verdict.speed_up[key], (verdict.speed_up_ci or {}).get(key), row.speed_gamma)
            if verdict.speed_up
            else "",
            style="bold" if key == (verdict.run or "best") else "",
        )
    for rival in verdict.rivals:
        change = rival.alpha_change
        table.add_row(
            rival.name,
            f"{change.gain:+.3f}\n{interval(change.ci, 3)}" if change else "",
            f"{number(rival.tau, 2)}\n(replay)",
            "",
            f"{rival.tokens_per_second:.0f}",
            _speed_cell(rival.speed_up, rival.speed_up_ci, rival.gamma),
            style="bold" if verdict.run == rival.name else "",
        )
    return table


def _speed_cell(speed_up: float, ends: Interval | None, gamma: int | None) -> str:
    """Speed-up, its interval, and the gamma that it is of."""
    return "\n".join(
        part for part in (f"{speed_up:.2f}x" + (f" (g {gamma})" if gamma else ""), interval(ends, 2)) if part
    )


def print_money(console: Console, result: Result, prices: Prices) -> None:
    """What tokens and responses cost at these prices."""
    section = money_section(result, prices)
    for shown in section.tables:
        table = screen_table(section.title, shown.columns, overflow="fold")
        for row in shown.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in row))
        console.print(table)
    for line in section.lines:
        console.print(Text(line))


def judgement_table(title: str, judgement: Judgement) -> Table:
    """Numbers of one draft: overall and by domain."""
    check = judgement.replay_check
    caption = f"tau beside {agreement_words(check.record() if check else None, judgement.live_tokens or 0)}"
    columns = ("", "alpha", "tau", "accepted\n/drafted", "survival 1..gamma", "prompts", "tokens")
    table = screen_table(title, columns, caption=caption)
    rows: list[tuple[str, OnText]] = [("all", judgement)]
    rows += sorted(judgement.domains.items()) if len(judgement.domains) > 1 else []
    for name, row in rows:
        table.add_row(
            name,
            f"{row.alpha:.3f}\n{interval(row.alpha_ci)}",
            f"{number(row.tau, 2)}\n{interval(row.tau_ci, 2)}",
            number(row.accepted_per_drafted),
            " ".join(f"{value:.2f}" for value in row.survival or []),
            str(row.prompts),
            f"{row.tokens:,}",
        )
    return table


def marked_completion(tokenizer: Any, response: Response, prompt_lines: int = 6) -> Panel:
    """A completion; tokens that the draft proposed and the target accepted in one colour, the target's own in another."""
    prompt = tokenizer.decode(response.prompt_ids, skip_special_tokens=True).rstrip("\n").splitlines()
    shown = prompt if len(prompt) <= prompt_lines else [*prompt[: prompt_lines - 1], "    ..."]
    text = Text("\n".join(shown) + "\n", style="dim")
    # Characters split over tokens go to the token that completes them.
    for piece, accepted in zip(token_pieces(tokenizer, response.response_ids), response.proposed_mask, strict=True):
        text.append(piece, style=ACCEPTED_STYLE if accepted else OWN_STYLE)
    share = f"{sum(response.proposed_mask)} of {len(response.response_ids)} tokens by the draft, {response.blocks} target calls"
    return Panel(text, title=share, title_align="left", expand=True)


def export_lines(report: ExportReport) -> list[str]:
    """What an export wrote, what was checked, and which engines take it."""
    lines = [
        f"{report.path}: {report.parameters:,} parameters in {report.dtype}, vocabulary: {report.vocabulary.detail}"
    ]
    lines.extend(f"checked: {check}" for check in report.checks)
    for engine in report.engines:
        lines.append(f"{engine.engine:<14} {'takes it' if engine.ok else 'refuses it: ' + '; '.join(engine.reasons)}")
    lines.extend(f"warning: {warning}" for warning in report.warnings)
    lines.append(f"how to serve it: {report.path / 'SERVING.md'}")
    return lines


def outside_check_lines(found: dict[str, Any], gamma: int) -> list[str]:
    """What `distill.export.check.outside_check` found."""
    theirs, ours = found["transformers"], found["ours"]
    lines = [f"same greedy tokens as the target alone on {found['equal']} of {found['prompts']} prompts"]
    if found["first_difference"]:
        lines.append(f"first difference: {found['first_difference']}")
    lines.append(
        f"tau at gamma {gamma}: transformers {theirs['tau']:.3f}, ours {ours['tau']:.3f} "
        f"[{ours['tau_ci'][0]:.3f}, {ours['tau_ci'][1]:.3f}]"
    )
    return lines


def _cost_line(verdict: Verdict, costs: Costs) -> str:
    """Best gamma, its predicted speed-up, the cost ratio and the break-even alpha."""
    best = (
        f"best gamma {best_gamma_words(verdict)}, predicted speed-up {verdict.predicted_speed_up:.2f}x"
        if verdict.best_gamma
        else "no gamma pays on this machine"
    )
    break_even = costs.break_even_alpha
    return (
        f"{best}; cost ratio {cost_words(verdict, costs.cost_ratio)}, break-even alpha at gamma {verdict.gamma} = "
        + ("none" if break_even is None else f"{break_even:.2f}")
    )


def last_screen(
    console: Console, run: Path, verdict: Verdict, completions: Sequence[Panel], export: Path | None
) -> None:
    """The screen that ends a demo."""
    style = "green" if verdict.outcome in ("pays_off", "best_together") else "yellow"
    console.print()
    if completions:
        legend = Text.assemble(
            "held-out completions: ", ("accepted from the draft", ACCEPTED_STYLE), ", ", ("the target's own", OWN_STYLE)
        )
        console.print(Group(legend, *completions))
    console.print(verdict_table(verdict))
    console.print(Text(verdict.sentence, style=f"bold {style}"))
    if verdict.costs is not None:
        console.print(_cost_line(verdict, verdict.costs))
    if by_load := run_by_load(verdict):
        console.print(f"what to run by requests at once: {by_load}", highlight=False)
    seconds = verdict.seconds
    parts = {stage: value for stage, value in seconds.items() if "/" not in stage}
    console.print("time: " + ", ".join(f"{stage} {value:.0f} s" for stage, value in parts.items()), highlight=False)
    places = Table.grid(padding=(0, 2))
    if (run / REPORT).exists():
        places.add_row("report", f"{run / REPORT}  (open it in a browser)")
    places.add_row("verdict", str(run / VERDICT))
    places.add_row("best checkpoint", str(run / BEST_LINK))
    if export is not None:
        places.add_row("exported draft", f"{export}  (how to serve it: {export / 'SERVING.md'})")
    console.print(places, highlight=False)
    console.print(
        "your own model: copy configs/demo.yaml, set target.path and data.train, then\n"
        "  accelerate launch -m distill.train my.yaml && understudy export runs/NAME --to my-draft",
        highlight=False,
    )
