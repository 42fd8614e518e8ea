"""What a sweep found: one row per combination, means over seeds with intervals, the best and what cannot be told from it."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from scipy import stats

from distill.commands.sweep.plan import MEASURES, SEED, SweepFile, Trial
from distill.run.folder import load_verdict
from speculative.errors import UserError

BEST, NOISE = "best", "within noise of the best"
OVER_SEEDS, JUDGED_INTERVAL = "t over seeds", "judged"
LEVEL = 0.95


def measures(sweep: SweepFile, trial: Trial) -> dict[str, Any]:
    """{alpha, tau, speed_up, metric, intervals: the judged ones that the verdict has} of a finished run.

    Raises:
        UserError: no verdict, or none with a number for the sweep's metric.
    """
    verdict = load_verdict(trial.config.folder).model_dump(mode="json")  # a tree, in which the metric is a path
    paths = {**MEASURES, "metric": sweep.metric}
    found: dict[str, Any] = {name: _number(verdict, path) for name, path in paths.items()}
    if found["metric"] is None:
        raise UserError(
            f"{sweep.path}: metric = {sweep.metric}: no number of that name in {trial.config.folder}/verdict.json"
        )
    intervals = {name: _interval_of(verdict, path) for name, path in paths.items()}
    return found | {"intervals": {name: ci for name, ci in intervals.items() if ci is not None}}


def _interval_of(verdict: Any, path: str) -> Any:
    """The judged interval: `best.tau_ci` of `best.tau`, `speed_up_ci.best` of `speed_up.best`, `x.ci` of `x.gain`, or None."""
    first, dot, rest = path.partition(".")
    places = [f"{path}_ci", f"{first}_ci{dot}{rest}"]
    if path.endswith(".gain"):
        places.append(f"{path.removesuffix('gain')}ci")
    return next((found for place in places if (found := _at(verdict, place)) is not None), None)


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _number(tree: Any, path: str) -> float | None:
    value = _at(tree, path)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def t_interval(values: Sequence[float]) -> list[float] | None:
    """[low, high] of the mean at 95 %: Student's t over independent runs; None for fewer than two.

    mean -+ t(0.975, n - 1) s / sqrt(n), s the sample's standard deviation.
    """
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.5 + LEVEL / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    mean = float(np.mean(values))
    return [mean - half, mean + half]


def summarise(
    sweep: SweepFile, trials: Sequence[Trial], found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows, the best first: {values, runs, seeds, failed, alpha, tau, speed_up, metric: {mean, ci}, interval, note}.

    Args:
        found: `measures` of the finished runs by name; combinations without any come last.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    rows = [_row(members, found) for members in groups.values()]
    sign = -1.0 if sweep.direction == "maximize" else 1.0
    rows.sort(key=lambda row: math.inf if row["metric"] is None else sign * row["metric"]["mean"])
    if rows and rows[0]["metric"] is not None:
        rows[0]["note"] = BEST
        for row in rows[1:]:
            if row["metric"] is not None and _overlap(row["metric"]["ci"], rows[0]["metric"]["ci"]):
                row["note"] = NOISE
    return rows


def _row(members: Sequence[Trial], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    done = [found[trial.config.name] for trial in members if trial.config.name in found]
    row: dict[str, Any] = {
        "values": {key: value for key, value in members[0].values.items() if key != SEED},
        "runs": [trial.config.name for trial in members],
        "seeds": len(done),
        "missing": len(members) - len(done),
    }
    for name in (*MEASURES, "metric"):
        values = [run[name] for run in done if run[name] is not None]
        judged = done[0]["intervals"].get(name) if len(done) == 1 else None
        row[name] = {"mean": float(np.mean(values)), "ci": t_interval(values) or judged} if values else None
    row["interval"] = OVER_SEEDS if len(done) > 1 else JUDGED_INTERVAL if done else None
    return row | {"note": ""}


def _overlap(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


def sweep_table(sweep: SweepFile, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per combination, the best first and bold."""
    kinds = {row["interval"] for row in rows if row["interval"]}
    says = {OVER_SEEDS: "over seeds (Student's t)", JUDGED_INTERVAL: "over prompts, as judged, where there is one seed"}
    told = "; ".join(says[kind] for kind in (OVER_SEEDS, JUDGED_INTERVAL) if kind in kinds)
    count = sum(row["metric"] is not None for row in rows)
    picked = (
        f" The best is picked out of {count} combinations; its interval is not widened for that." if count > 1 else ""
    )
    table = Table(
        title=f"sweep {sweep.name}: {sweep.direction} {sweep.metric}",
        caption=f"[95 % interval]: {told or 'none'}. Overlapping intervals: the difference may be noise.{picked}",
        box=box.SIMPLE_HEAD,
    )
    keys = list(rows[0]["values"]) if rows else []
    extra = sweep.metric not in MEASURES.values()
    for key in keys:
        table.add_column(key, overflow="fold")
    for name in ("alpha", "tau", "speed-up", *([sweep.metric] if extra else []), "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        cells = [_plain(row["values"][key]) for key in keys]
        cells += [_cell(row["alpha"], 3), _cell(row["tau"], 2), _cell(row["speed_up"], 2, "x")]
        cells += [_cell(row["metric"], 3)] if extra else []
        cells.append(f"{row['seeds']} of {row['seeds'] + row['missing']}" if row["missing"] else str(row["seeds"]))
        table.add_row(*cells, row["note"], style="bold" if row["note"] == BEST else "")
    return table


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return "null" if value is None else str(value)


def _cell(measured: Mapping[str, Any] | None, digits: int, unit: str = "") -> str:
    if measured is None:
        return "-"
    text = f"{measured['mean']:.{digits}f}{unit}"
    if measured["ci"] is not None:
        text += f"\n[{measured['ci'][0]:.{digits}f}, {measured['ci'][1]:.{digits}f}]"
    return text


def as_csv(sweep: SweepFile, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a spreadsheet: grid keys, then mean, low and high of every measure."""
    keys = [key for key in sweep.grid if key != SEED]
    names = [*MEASURES, "metric"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    bounds = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    writer.writerow([*keys, *bounds, "seeds", "missing", "interval", "note", "runs"])
    for row in rows:
        numbers: list[Any] = []
        for name in names:
            measured = row[name] or {"mean": "", "ci": None}
            numbers += [measured["mean"], *(measured["ci"] or ["", ""])]
        rest = [row["seeds"], row["missing"], row["interval"] or "", row["note"], " ".join(row["runs"])]
        writer.writerow([*(_plain(row["values"][key]) for key in keys), *numbers, *rest])
    return file.getvalue()
