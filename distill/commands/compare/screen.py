"""What a person sees of a comparison: a table, the paired differences in words, domains, and one picture."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from distill.commands.compare.comparison import Comparison
from distill.commands.compare.contestants import drafting_of
from distill.report.plot import write_figure
from distill.report.screen_table import screen_table
from distill.report.tables import NOTHING, interval
from speculative.measure.effects import too_few

SHOWN_GAMMAS = 16


def compare_table(result: Comparison) -> Table:
    """Every draft with its numbers; without timing there is no speed."""
    timed = result.costs is not None
    table = screen_table(
        f"{result.prompts} held-out prompts of {result.on} ({result.tokens:,} tokens), rule {result.rule}, gamma {result.gamma}",
        ["draft", "parameters", "alpha", "tau"] + (["draft step", "speed", "best gamma"] if timed else []),
        words=("draft",),
        overflow="fold",
        caption="alpha: acceptance rate; tau: tokens per target call, by replay of the same text; [95 % interval]"
        + ("; speed: predicted from measured steps, over the target alone" if timed else ""),
    )
    for row in result.drafts:
        cells = [
            row.name if row.max_ngram is None else f"{row.name}\n(n-grams {row.max_ngram} to {row.min_ngram})",
            f"{row.parameters:,}" if row.parameters else NOTHING,
            NOTHING if row.alpha is None else f"{row.alpha:.3f}\n{interval(row.alpha_ci)}",
            f"{row.tau:.2f}\n{interval(row.tau_ci, 2)}",
        ]
        if row.speed_up is not None:
            best = f"{row.best_gamma}: {row.best_speed_up:.2f}x" if row.best_gamma else "none pays"
            seconds, of_block = row.draft_step_seconds, " a block" if drafting_of(row.path) == "parallel" else ""
            cells += [
                NOTHING
                if seconds is None
                else f"{1e3 * seconds:.2f} ms{of_block}\n(c = {row.cost_ratio:.2f}{of_block})",
                f"{row.speed_up:.2f}x\n{interval(row.speed_up_ci, 2)}",
                best,
            ]
        table.add_row(*cells)
    return table


def difference_lines(result: Comparison) -> list[str]:
    """One line per draft behind the first: what it gains or loses, and what could have been seen, if anything."""
    lines = []
    for other in result.differences:
        tau, alpha = other.tau, other.alpha
        answer = {"gain": "better", "loss": "worse", "none": "no certain difference"}[other.certain_tau]
        line = (
            f"{other.name} against {result.against}: {answer}; tau {tau.gain:+.3f} {interval(tau.ci, sign=True)}"
            f"{f', alpha {alpha.gain:+.4f} {interval(alpha.ci, 4, sign=True)}' if alpha else ''}"
        )
        if other.speed_up is not None:
            line += f", speed {other.speed_up.gain:+.2f}x {interval(other.speed_up.ci, 2, sign=True)}"
        seen, few = other.minimal_detectable.tau, too_few(other.prompts, other.corrected_confidence)
        if few is not None:
            line += f"; {few}"
        elif other.certain_tau == "none" and seen is not None:
            line += f"; a difference of {seen:.3f} in tau would have been seen in 4 of 5 cases"
        lines.append(line)
    if len(result.differences) > 1:
        count = len(result.differences)
        lines.append(f"intervals widened for {count} comparisons: all of them hold together with 95 %")
    return lines


def domain_table(result: Comparison) -> Table | None:
    """Who is better where; None for text of one domain."""
    if not result.domains:
        return None
    others = result.differences
    looks = len(others) * len(result.domains)
    table = screen_table(
        f"tau at gamma {result.gamma} by domain, and the difference to {result.against}",
        ("domain", "prompts", *(row.name for row in result.drafts)),
        words=("domain",),
        overflow="fold",
        caption=f"intervals widened for all {looks} comparisons; * = certain",
    )
    for domain in result.domains:
        cells = [domain.name, str(domain.prompts), f"{domain.tau[result.against]:.2f}"]
        for own in domain.differences:
            star = "" if own.certain_tau == "none" else " *"
            cells.append(f"{domain.tau[own.name]:.2f}\n{own.tau.gain:+.2f} {interval(own.tau.ci, 2, sign=True)}{star}")
        table.add_row(*cells)
    return table


def print_comparison(console: Console, result: Comparison) -> None:
    """The tables, the differences and what the gates say."""
    console.print(compare_table(result))
    domains = domain_table(result)
    if domains is not None:
        console.print(domains)
    for line in (*difference_lines(result), *result.failures):
        console.print(line, highlight=False, soft_wrap=True)


def plot_comparison(result: Comparison, path: Path) -> Path:
    """Writes the picture: tau over gamma of each draft with its band, and the paired differences; returns the file."""
    # Text stays text: searchable, and the file is small.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "understudy"}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        curves, gains = figure.subplots(1, 2)
        _curves(curves, result)
        _gains(gains, result)
        figure.suptitle(f"{result.prompts} held-out prompts, rule {result.rule}, by replay of the same text")
        write_figure(figure, path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    return path


def _curves(axis: Any, result: Comparison) -> None:
    for number, row in enumerate(result.drafts):
        shown = [index for index, gamma in enumerate(row.gammas) if gamma <= SHOWN_GAMMAS]
        gammas = [row.gammas[index] for index in shown]
        low, high = zip(*(row.taus_ci[index] for index in shown), strict=True)
        axis.fill_between(gammas, low, high, alpha=0.2, color=f"C{number}", linewidth=0)
        axis.plot(gammas, [row.taus[index] for index in shown], marker=".", color=f"C{number}")
    # Names given here and not to the lines: matplotlib leaves out a label that begins with an underscore.
    axis.legend(axis.get_lines(), [row.name for row in result.drafts], fontsize=8, loc="best")
    axis.axvline(result.gamma, linestyle=":", color="grey")
    axis.set(xlabel="gamma (drafted tokens per block)", ylabel="tau (tokens per target call)")
    axis.grid(alpha=0.3)


def _gains(axis: Any, result: Comparison) -> None:
    """A dot and its interval for each draft behind the first, over all text and by domain."""
    groups = [("all", result.differences)] + [(domain.name, domain.differences) for domain in result.domains]
    count = len(result.differences)
    for group, (_, differences) in enumerate(groups):
        for number, own in enumerate(differences, start=1):
            (low, high), height = own.tau.ci, group + 0.6 * (number - (count + 1) / 2) / count
            axis.plot([low, high], [height, height], color=f"C{number}", linewidth=2)
            axis.plot([own.tau.gain], [height], marker="o", color=f"C{number}")
    axis.axvline(0.0, color="C0", linewidth=1)
    axis.set_yticks(range(len(groups)), [name for name, _ in groups])
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.set(xlabel=f"difference in tau at gamma {result.gamma} to {result.against}")
    axis.grid(alpha=0.3, axis="x")
