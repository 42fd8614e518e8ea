"""The comparison on the screen: the report's table of ways, each draft's costs, the paired differences in words, and domains."""

from collections.abc import Iterator

from rich.console import Console

from distill.commands.compare.comparison import Comparison, way_of
from distill.report.measured import timed_table
from distill.report.table import Cell, Column, Table
from speculative.measure.effects import too_few
from speculative.measure.intervals import interval

BY_REPLAY = "tau is computed from the stored responses, speed is predicted from step times. Brackets: 95 % interval."


def compare_table(result: Comparison) -> Table:
    """One row per way on the whole text."""
    first = result.row(result.against)
    about = f"{first.prompts} held-out prompts of {result.on} ({first.tokens:,} tokens), rule {result.rule}, gamma {result.gamma}"
    return timed_table([result.row(one.way) for one in result.ways], None, about, BY_REPLAY)


def cost_lines(result: Comparison) -> Iterator[str]:
    """One line per draft: its size and, if it was timed, its step time and best gamma."""
    for way in result.ways:
        if way.parameters:
            line = f"{way.way}: {way.parameters:,} parameters"
            if way.draft_step_seconds is not None:
                of_block = " a block" if way_of(way.path).recipe.parallel else ""
                line += f", draft step {1e3 * way.draft_step_seconds:.2f} ms (c = {way.cost_ratio:.2f}{of_block}), "
                line += (
                    f"fastest at gamma {way.best_gamma}: {way.best_speed_up:.2f}x"
                    if way.best_gamma
                    else "no gamma pays"
                )
            yield line


def difference_lines(result: Comparison) -> list[str]:
    """One line per way after the first: its gain or loss, or the detectable difference if none is certain."""
    lines, differences = [], result.differences_on()
    for other in differences:
        answer = {"gain": "better", "loss": "worse", "none": "no certain difference"}[other.certain_tau]
        line = f"{other.way} compared with {result.against}: {answer}; tau {other.tau:+.3f}"
        line += f", alpha {other.alpha:+.4f}" if other.alpha else ""
        if other.speed_up is not None:
            line += f", speed {other.speed_up.gain:+.2f}x {interval(other.speed_up.ci, '+.2f')}"
        seen, few = other.minimal_detectable.tau, too_few(other.prompts, other.corrected_confidence)
        if few is not None:
            line += f"; {few}"
        elif other.certain_tau == "none" and seen is not None:
            line += f"; a difference of {seen:.3f} in tau would have been detected with 80 % probability"
        lines.append(line)
    if len(differences) > 1:
        lines.append(f"Intervals are widened for {len(differences)} comparisons, so that all hold jointly at 95 %.")
    return lines


def domain_table(result: Comparison) -> Table:
    """tau of every way by domain."""
    looks = len(result.differences_on()) * len(result.domains)
    table = Table(
        ["domain", Column("prompts", "d"), *(Column(one.way, ".2f") for one in result.ways)],
        title=f"tau at gamma {result.gamma} by domain, and the difference from {result.against}",
        caption=f"Intervals are widened for all {looks} comparisons; * = certain",
    )
    for domain in result.domains:
        first = result.row(result.against, domain)
        cells = [
            Cell(result.row(gain.way, domain).tau, note=f"{gain.tau:+.2f}" + " *" * (gain.certain_tau != "none"))
            for gain in result.differences_on(domain)
        ]
        table.add(domain, first.prompts, first.tau, *cells)
    return table


def print_comparison(console: Console, result: Comparison) -> None:
    """Print the tables, the differences and the failed gates."""
    console.print(compare_table(result))
    for one in result.ways:
        for load in dict.fromkeys(row.concurrency for row in one.in_engine):
            rows = [row for row in one.in_engine if row.concurrency == load]
            console.print(timed_table(rows, None, f"{one.way} at {load} requests, {one.engine}", BY_REPLAY))
    if result.domains:
        console.print(domain_table(result))
    for line in (*cost_lines(result), *difference_lines(result), *result.failures):
        console.print(line, highlight=False, soft_wrap=True)
