"""The tables of the studies: write bench/results/objectives.md and its figure from the JSON files next to it.

python bench/study.py bench/studies/objectives.yaml                   trains in the background, resumable
python bench/objectives.py --study bench/studies/objectives.yaml      writes the study's JSON, then the tables of all studies
python bench/objectives.py                                            the tables of the existing JSON files

docs/studies.md has the conclusions.
"""

from __future__ import annotations

from distill.faults import run_script

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure

from data.files import write_bytes
from distill.report.plot import write_figure
from effects import holm, seed_effect
from result_file import write_result
from study_file import UNTRAINED, next_lr, read_study, read_tree

RESULTS = Path("bench/results")
PAGE = RESULTS / "objectives.md"
MAIN, SMALLER = "objectives", ("longer", "optimizers", "layers", "saturation", "signals")
MEASURES = ("alpha", "tau")
LEVEL = 0.05
Row = dict[str, Any]


def collected(path: Path) -> Row:
    """Finished results of a study, read from its folder."""
    from study import Books

    return Books(read_study(path, read_tree(path))).report()


def comparisons(result: Row) -> list[Row]:
    """Every contestant against the reference on each pair under each rule, over the seeds that both have.

    [{pair, rule, temperature, objective, seeds, alpha, tau: {gain, low, high, p_value, holm, says}}]. The p-values of a measure are
    adjusted together, over all pairs, rules and contestants.
    """
    cells = {(*_place(cell), cell["objective"], cell["seed"]): cell for cell in result["cells"]}
    rows: list[Row] = []
    for paired in result["paired"]:
        place, seeds = _place(paired), paired["seeds"]
        row: Row = {
            "pair": place[0],
            "rule": place[1],
            "temperature": place[2],
            "objective": paired["objective"],
            "seeds": len(seeds),
        }
        for name in MEASURES:
            own, base = (
                [cells[(*place, who, seed)][name] for seed in seeds]
                for who in (paired["objective"], result["reference"])
            )
            effect = seed_effect(np.subtract(own, base).tolist(), paired[f"{name}_error"], paired["prompts"])
            row[name] = dict(vars(effect))
        rows.append(row)
    for name in MEASURES:
        for row, adjusted in zip(rows, holm([row[name]["p_value"] for row in rows]), strict=True):
            sign = "gain" if row[name]["gain"] > 0 else "loss"
            row[name] |= {"holm": adjusted, "says": sign if adjusted < LEVEL else "no difference"}
    return rows


def _place(one: Row) -> tuple[Any, ...]:
    return one["pair"], one["rule"], one["temperature"]


def chosen(result: Row, rows: Sequence[Row]) -> dict[tuple[str, float], Row]:
    """By (rule, temperature), what to train with: {objective: a contestant or the reference, pairs: compared on}.

    A contestant replaces the reference if its gain in tau is certain on at least two pairs and its loss on none, with several
    seeds; of several contestants, the one with the largest mean gain.
    """
    told: dict[tuple[str, float], Row] = {}
    for law in dict.fromkeys((row["rule"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["rule"], row["temperature"]) == law]
        winners: dict[str, float] = {}
        for objective in dict.fromkeys(row["objective"] for row in own):
            of_it = [row for row in own if row["objective"] == objective]
            says = [row["tau"]["says"] for row in of_it]
            if says.count("gain") >= 2 and "loss" not in says and min(row["seeds"] for row in of_it) > 1:
                winners[objective] = float(np.mean([row["tau"]["gain"] for row in of_it]))
        best = max(winners, key=winners.__getitem__, default=result["reference"])
        told[law] = {"objective": best, "pairs": len({row["pair"] for row in own})}
    return told


def _law_words(rule: str, temperature: float) -> str:
    return rule if rule == "greedy" else f"{rule} at T {temperature:g}"


def page(results: Sequence[Row], figure: str) -> str:
    """The Markdown of the main study and then the smaller ones; `figure`: the picture's file name."""
    main, *smaller = results
    rows = comparisons(main)
    lines = [
        "# Which objective, for which rule?",
        "",
        "Made by `python bench/objectives.py` from `bench/results/objectives_cpu.json` and the smaller studies in the same folder; trained by "
        f"`python bench/study.py bench/studies/objectives.yaml`. {_finished(main)}",
        "",
        *_method(main, sorted({row["seeds"] for row in rows})),
        "",
        "## What to train with",
        "",
        *_defaults(main, rows),
        "",
        f"![gain in tau and alpha over {main['reference']}]({figure})",
        "",
        "## Every comparison",
        "",
        *_study(main, rows),
    ]
    for result in smaller:
        lines += [
            f"## {result['about'] or result['study']}",
            "",
            f"`bench/studies/{result['study']}.yaml`. {_finished(result)}",
            "",
        ]
        lines += _study(result, comparisons(result))
    return "\n".join(lines)


def _study(result: Row, rows: Sequence[Row]) -> list[str]:
    """The tables of a study: comparisons, levels, learning rates."""
    told = (
        f"Gains over `{result['reference']}`, paired by prompt, with 95 % intervals; the last columns say what holds after Holm's "
        f"correction over all {len(rows)} comparisons of a measure."
    )
    tables = [told, "", *_table(rows), "", "Levels, means over seeds, alpha and tau:", "", *_levels(result), ""]
    return [*tables, *_tuning(result), ""] if result["lr"] else tables


def _finished(result: Row) -> str:
    planned = _planned(result)
    missing = planned - len(result["cells"])
    return f"Finished: {len(result['cells'])} of {planned} cells" + (
        ", the rest is not in these tables." if missing else "."
    )


def _planned(result: Row) -> int:
    laws = sum(len(served["rules"]) for served in result["served"])
    return laws * len(result["pairs"]) * len(result["contestants"]) * len(result["seeds"])


def _method(result: Row, seeds: Sequence[int]) -> list[str]:
    said = " or ".join(map(str, seeds)) or "no"
    least, most = result["trained_tokens"]
    lr = " and ".join(f"{lr:g}" for lr in result["lr"])
    return [
        f"Each draft is trained for {result['steps']} steps of {result['batch_size']} responses: within a pair, temperature and seed every "
        "objective sees the same sequences in the same order. Its learning rate is the best of "
        f"{lr} and of further ones, until the best lies between others, by tau on {result['tune_prompts']} held-out prompts that judge nothing, at T {result['tune_at']:g} with the first seed. "
        f"Replay judges it on {result['prompts']} other held-out prompts at gamma {result['gamma']}. The target's distributions are its own, "
        "not a store's. The seed is the order of the data. These are short trainings: "
        f"{least:,} to {most:,} response tokens; longer ones may give another order.",
        "",
        f"An interval includes two sources of variation: prompts (paired, delta method) and seeds (the spread of the gains of {said} seed"
        f"{'' if said == '1' else 's'}, divided by their number); degrees of freedom after Welch and Satterthwaite."
        + (" With one seed it knows of prompts alone, and another seed may say otherwise." if 1 in seeds else ""),
    ]


def _defaults(result: Row, rows: Sequence[Row]) -> list[str]:
    lines = ["| engine rule | objective | seeds | pairs with a gain or loss in tau |", "|---|---|---|---|"]
    for (rule, temperature), told in chosen(result, rows).items():
        own = [row for row in rows if (row["rule"], row["temperature"]) == (rule, temperature)]
        counts = {name: _says(own, name) for name in dict.fromkeys(row["objective"] for row in own)}
        parts = [
            f"{word} for {', '.join(f'{name} {says.count(word)} of {len(says)}' for name, says in named.items())}"
            for word in ("gain", "loss")
            if (named := {name: says for name, says in counts.items() if word in says})
        ]
        seeds = sorted({row["seeds"] for row in own})
        told_seeds = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        lines.append(
            f"| {_law_words(rule, temperature)} | {told['objective']} | {told_seeds} | {'; '.join(parts) or 'no difference'} |"
        )
    rule = (
        f"All are compared with `{result['reference']}`. A contestant takes its place where the gain in tau is certain on at least two pairs "
        "and the loss on none, with several seeds; one seed decides nothing. `loss.name: null` follows this table."
    )
    return [*lines, "", rule] if rows else ["Nothing is finished yet."]


def _says(rows: Sequence[Row], objective: str) -> list[str]:
    return [row["tau"]["says"] for row in rows if row["objective"] == objective]


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| pair | rule | objective | seeds | alpha | tau | alpha says | tau says |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["rule"], -row["temperature"], row["pair"], -row["tau"]["gain"])):
        gains = [f"{row[name]['gain']:+.4f} [{row[name]['low']:+.4f}, {row[name]['high']:+.4f}]" for name in MEASURES]
        parts = [row["pair"], _law_words(row["rule"], row["temperature"]), row["objective"], row["seeds"], *gains]
        lines.append("| " + " | ".join(map(str, [*parts, *(row[name]["says"] for name in MEASURES)])) + " |")
    return lines


def _levels(result: Row) -> list[str]:
    names = [UNTRAINED, *result["contestants"]]
    lines = [f"| pair | rule | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    places: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for cell in (*result["untrained"], *result["cells"]):
        places.setdefault(_place(cell), {}).setdefault(cell["objective"], []).append(cell)
    for (pair, rule, temperature), own in places.items():
        means = [
            {key: np.mean([cell[key] for cell in own[name]]) for key in MEASURES} if name in own else None
            for name in names
        ]
        shown = [f"{mean['alpha']:.3f}, {mean['tau']:.2f}" if mean else "" for mean in means]
        lines.append(f"| {pair} | {_law_words(rule, temperature)} | {' | '.join(shown)} |")
    return lines


def _tuning(result: Row) -> list[str]:
    lines = ["Tau on the tuning prompts by learning rate; the chosen one is bold.", ""]
    rates = sorted({row["lr"] for row in result["tuning"]})
    lines += [f"| pair | objective | {' | '.join(f'{lr:g}' for lr in rates)} |", "|---|---|" + "---|" * len(rates)]
    tables: dict[tuple[str, str], dict[float, float]] = {}
    for row in result["tuning"]:
        tables.setdefault((row["pair"], row["objective"]), {})[row["lr"]] = row["tau"]
    for (pair, objective), taus in tables.items():
        best = max(taus.values()) if next_lr(result["lr"], taus) is None else None
        shown = ["" if lr not in taus else f"{taus[lr]:.3f}" if taus[lr] else "diverged" for lr in rates]
        marked = [f"**{text}**" if text and taus[lr] == best else text for lr, text in zip(rates, shown, strict=True)]
        lines.append(f"| {pair} | {objective} | {' | '.join(marked)} |")
    return lines


def draw(result: Row, path: Path) -> None:
    """The gains with their intervals: a row of panels for tau and one for alpha, a panel for each rule; filled = holds after Holm."""
    rows, names = comparisons(result), [name for name in result["contestants"] if name != result["reference"]]
    laws = list(dict.fromkeys((row["rule"], row["temperature"]) for row in rows)) or [("sample", 1.0)]
    figure = Figure(figsize=(3.4 * len(laws), 7.0), layout="constrained")
    axes = figure.subplots(2, len(laws), sharey=True, squeeze=False)
    for (line, measure), (column, law) in ((a, b) for a in enumerate(("tau", "alpha")) for b in enumerate(laws)):
        axis = axes[line][column]
        for number, pair in enumerate(result["pairs"]):
            own = [row for row in rows if (row["rule"], row["temperature"]) == law and row["pair"] == pair]
            for row in own:
                effect, height = row[measure], -names.index(row["objective"]) - 0.22 * (number - 1)
                axis.plot([effect["low"], effect["high"]], [height] * 2, color=f"C{number}")
                axis.plot(
                    effect["gain"],
                    height,
                    marker="o",
                    color=f"C{number}",
                    label=pair if row is own[0] else None,
                    fillstyle="none" if effect["says"] == "no difference" else "full",
                )
        axis.axvline(0.0, color="grey", linewidth=0.8)
        axis.set(title=_law_words(*law) if line == 0 else "", xlabel=f"gain in {measure}")
        axis.set_yticks([-number for number in range(len(names))], names)
    if rows:
        axes[0][0].legend(fontsize=7)
    figure.suptitle(f"gain over {result['reference']}; filled: certain after Holm's correction")
    write_figure(figure, path)


def main(
    study: Annotated[
        list[Path] | None, typer.Option(help="study file whose finished trainings are collected first")
    ] = None,
    results: Annotated[Path, typer.Option(help="folder of the JSON files")] = RESULTS,
    to: Annotated[Path, typer.Option(help="the page; its figure is written next to it")] = PAGE,
) -> None:
    """Collects, and writes the page."""
    for path in study or []:
        found = collected(path)
        if found["tuning"] or found["cells"]:
            write_result(_result(results, found["study"]), found)
    names = [MAIN, *(name for name in SMALLER if _result(results, name).exists())]
    loaded = [json.loads(_result(results, name).read_text(encoding="utf-8")) for name in names]
    figure = to.with_suffix(".png")
    draw(loaded[0], figure)
    write_bytes(to, page(loaded, figure.name).encode())


def _result(folder: Path, name: str) -> Path:
    return folder / f"{name}_cpu.json"


if __name__ == "__main__":
    run_script(main)
