"""The comparison on the screen: a table, the paired differences in words, domains, and one picture."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from distill.commands.compare.comparison import Comparison, way_of
from distill.report.plot import write_figure
from distill.report.table import Cell, Column, Table
from speculative.measure.effects import too_few
from speculative.measure.intervals import interval

SHOWN_GAMMAS = 16


def compare_table(result: Comparison) -> Table:
    """One row per way; without timing there are no speed columns."""
    timed, first = result.target_step_seconds is not None, result.row(result.against)
    columns: list[Column | str] = ["way", Column("parameters", ","), Column("alpha", ".3f"), Column("tau", ".2f")]
    if timed:
        columns += [Column("draft step, ms", ".2f"), Column("speed-up", ".2f", "x"), "best gamma"]
    table = Table(
        columns,
        title=f"{first.prompts} held-out prompts of {result.on} ({first.tokens:,} tokens), rule {result.rule}, gamma {result.gamma}",
        caption="alpha: acceptance rate; tau: tokens per target call, by replay; [95 % interval]"
        + ("; speed-up over the target alone, predicted from measured steps" if timed else ""),
    )
    for way in result.ways:
        row = result.row(way.way)
        alpha, tau = Cell(row.alpha, row.alpha_ci), Cell(row.tau, row.tau_ci)
        cells: list[Any] = [Cell(way.way, note=row.sizes), way.parameters or None, alpha, tau]
        if timed:
            of_block = " a block" if way_of(way.path).recipe.parallel else ""
            step = None if way.draft_step_seconds is None else 1e3 * way.draft_step_seconds
            cells.append(Cell(step, note="" if step is None else f"c = {way.cost_ratio:.2f}{of_block}"))
            cells.append(Cell(row.speed_up, row.speed_up_ci))
            cells.append(f"{way.best_gamma}: {way.best_speed_up:.2f}x" if way.best_gamma else "none pays")
        table.add(*cells)
    return table


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


def engine_table(result: Comparison) -> Table:
    """The speed-up of each way at each load and gamma in the engine that its run was timed in."""
    speed, load, gamma = Column("speed-up", ".2f", "x"), Column("load", "d"), Column("gamma", "d")
    table = Table(["way", "how", load, gamma, Column("tau", ".2f"), speed, Column("tokens/s", ",.0f")])
    for one in result.ways:
        for row in one.in_engine:
            cells = row.concurrency, row.gamma, row.tau, Cell(row.speed_up, row.speed_up_ci), row.tokens_per_second
            table.add(one.way, one.engine, *cells)
    return table


def domain_table(result: Comparison) -> Table | None:
    """tau of every way by domain; None if the text has one domain."""
    if not result.domains:
        return None
    looks = len(result.differences_on()) * len(result.domains)
    table = Table(
        ["domain", Column("prompts", "d"), *(Column(one.way, ".2f") for one in result.ways)],
        title=f"tau at gamma {result.gamma} by domain, and the difference from {result.against}",
        caption=f"Intervals are widened for all {looks} comparisons; * = certain",
    )
    for domain in result.domains:
        first = result.row(result.against, domain)
        cells = [
            Cell(result.row(own.way, domain).tau, note=f"{own.tau:+.2f}" + " *" * (own.certain_tau != "none"))
            for own in result.differences_on(domain)
        ]
        table.add(domain, first.prompts, first.tau, *cells)
    return table


def print_comparison(console: Console, result: Comparison) -> None:
    """Print the tables, the differences and the failed gates."""
    console.print(compare_table(result))
    if (in_engine := engine_table(result)).cells:
        console.print(in_engine)
    domains = domain_table(result)
    if domains is not None:
        console.print(domains)
    for line in (*difference_lines(result), *result.failures):
        console.print(line, highlight=False, soft_wrap=True)


def plot_comparison(result: Comparison, path: Path) -> Path:
    """Write the picture, tau over gamma of each draft with its band and the paired differences. Return the file."""
    # Text stays text: searchable, and the file is small.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "understudy"}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        curves, gains = figure.subplots(1, 2)
        _curves(curves, result)
        _gains(gains, result)
        prompts = result.row(result.against).prompts
        figure.suptitle(f"{prompts} held-out prompts, rule {result.rule}, by replay of the same text")
        write_figure(figure, path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    return path


def _curves(axis: Any, result: Comparison) -> None:
    for number, row in enumerate(result.ways):
        shown = [index for index, gamma in enumerate(row.gammas) if gamma <= SHOWN_GAMMAS]
        gammas = [row.gammas[index] for index in shown]
        low, high = zip(*(row.taus_ci[index] for index in shown), strict=True)
        axis.fill_between(gammas, low, high, alpha=0.2, color=f"C{number}", linewidth=0)
        axis.plot(gammas, [row.taus[index] for index in shown], marker=".", color=f"C{number}")
    # Names given here and not to the lines: matplotlib leaves out a label that begins with an underscore.
    axis.legend(axis.get_lines(), [row.way for row in result.ways], fontsize=8, loc="best")
    axis.axvline(result.gamma, linestyle=":", color="grey")
    axis.set(xlabel="gamma (drafted tokens per block)", ylabel="tau (tokens per target call)")
    axis.grid(alpha=0.3)


def _gains(axis: Any, result: Comparison) -> None:
    """A dot and its interval for each way after the first, over all text and by domain."""
    groups = [("all", result.differences_on()), *((domain, result.differences_on(domain)) for domain in result.domains)]
    count = len(groups[0][1])
    for group, (_, differences) in enumerate(groups):
        for number, own in enumerate(differences, start=1):
            (low, high), height = own.tau.ci, group + 0.6 * (number - (count + 1) / 2) / count
            axis.plot([low, high], [height, height], color=f"C{number}", linewidth=2)
            axis.plot([own.tau.gain], [height], marker="o", color=f"C{number}")
    axis.axvline(0.0, color="C0", linewidth=1)
    axis.set_yticks(range(len(groups)), [name for name, _ in groups])
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.set(xlabel=f"difference in tau at gamma {result.gamma} from {result.against}")
    axis.grid(alpha=0.3, axis="x")
