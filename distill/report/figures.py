"""The figures of a report, drawn by matplotlib as SVG data URIs, and the plot of a run.

The palette is readable on light and dark pages, the background is transparent, and text stays text.
"""

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from data.files import write_bytes
from distill.config.layout import PLOT
from distill.report.view import View
from distill.run.checkpoint import load_judgements
from distill.run.result import RuleCurves
from speculative.evaluate import Judgement
from speculative.measure.measured import DRAFT, SERVED, UNDISTILLED
from speculative.measure.metrics import Curve

SIZE = (4.9, 2.9)  # inches; a page shows it 360 to 480 pixels wide, so that 9 points are readable on a phone
INK, RULE = "#7c8694", "#7c869440"  # contrast above 3.5 on white and on the page's dark ground
COLOURS = {DRAFT: "#2f86d1", UNDISTILLED: "#8a8f98", SERVED: "#c07a10"}
OTHERS = ("#9468c8", "#359468", "#cc5a82")
SHAPES = {DRAFT: ("o", "-"), UNDISTILLED: ("s", "--"), SERVED: ("^", "-.")}
LONGEST_LABEL = 24
LEGEND_WIDTH = 62  # characters of a legend line; the marker before each label takes five
LAST_GAMMA = 16  # beyond it curves are flat; tables go on to 32
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": RULE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "lines.linewidth": 1.7,
    "lines.markersize": 4,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "grid.linewidth": 0.8,
}


def figures_of(view: View) -> dict[str, str]:
    """{name: data URI} of every figure this result has data for: steps_alpha, steps_tau, survival, tau, speed."""
    result, drawn = view.result, dict[str, str]()
    if len(result.verdict.checkpoints) > 1:
        for key in ("alpha", "tau"):
            drawn[f"steps_{key}"] = _draw(f"steps_{key}", _steps, view, key)
    if view.survival:
        drawn["survival"] = _draw("survival", _survival, view)
    if view.curves is not None:
        drawn["tau"] = _draw("tau", _taus, view, view.curves)
        if any(view.timed_speed_ups(curve) for curve in view.curves.ways.values()):
            drawn["speed"] = _draw("speed", _speeds, view, view.curves)
    return drawn


def _style(view: View, name: str) -> dict[str, str]:
    others = [known for known in view.ways if known not in COLOURS]
    marker, line = SHAPES.get(name, ("D", ":"))
    # SVG is XML, which has no signs for control characters.
    label = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in name)
    shown = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return {
        "color": COLOURS.get(name) or OTHERS[others.index(name) % len(OTHERS) if name in others else 0],
        "marker": marker,
        "linestyle": line,
        # matplotlib leaves a label that starts with "_" out of its legends.
        "label": f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown,
    }


def _draw(name: str, plot: Any, *data: Any) -> str:
    """Draw one figure with `plot(axis, *data)`. The same data give the same bytes."""
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        # A glyph that matplotlib's own font lacks is drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.add_subplot()
        plot(axis, *data)
        labels = axis.get_legend_handles_labels()[1]
        if labels:
            columns = len(labels) if sum(len(label) + 5 for label in labels) <= LEGEND_WIDTH else 2
            axis.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 1.0),
                ncols=columns,
                borderaxespad=0.2,
                handlelength=1.9,
                columnspacing=0.9,
                handletextpad=0.5,
            )
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode()}"


def plot_steps(axis: Any, steps: Sequence[Any], key: str, best: int | None, style: Mapping[str, Any]) -> None:
    """alpha or tau over the steps of judged checkpoints, the first as a line where it is step 0, the best with its value. steps: records
    with `step`, `key` and its interval under `KEY_ci`.
    """
    first, at = steps[0], [step.step for step in steps]
    if first.step == 0:
        axis.axhline(getattr(first, key), color=COLOURS[UNDISTILLED], linestyle="--", label="undistilled")
    values, ends = [getattr(step, key) for step in steps], [getattr(step, f"{key}_ci") for step in steps]
    if all(ends):
        axis.fill_between(at, *zip(*ends, strict=True), color=style["color"], alpha=0.18, linewidth=0)
    axis.plot(at, values, **style)
    checks = [(step.step, step.live_check) for step in steps if key == "tau" and step.live_check]
    if checks:
        taus = [check.tau for _, check in checks]
        around = [[abs(check.tau - check.tau_ci[end]) for _, check in checks] for end in (0, 1)]
        where = [step for step, _ in checks]
        axis.errorbar(where, taus, around, fmt="x", color=INK, linewidth=1, label="some prompts, live")
    again = [(step.step, step.fresh_check.alpha) for step in steps if key == "alpha" and step.fresh_check]
    if again:
        axis.plot(*zip(*again, strict=True), "x", color=INK, label="some prompts, answered again")
    if best in at:
        value = values[at.index(best)]
        shown = f"{value:.3f}" if key == "alpha" else f"{value:.2f}"
        axis.annotate(shown, (best, value), xytext=(0, 7), textcoords="offset points", ha="center")
        axis.margins(y=0.15)
    axis.set(xlabel="optimizer step", ylabel=key)


def _steps(axis: Any, view: View, key: str) -> None:
    plot_steps(axis, view.verdict.checkpoints, key, view.draft.step, _style(view, view.draft.way))


def _survival(axis: Any, view: View) -> None:
    for way, survival in view.survival.items():
        axis.plot(range(len(survival) + 1), [1.0, *survival], **_style(view, way))
    axis.set(xlabel="j, drafted tokens", ylabel="first j all accepted", ylim=(0, 1.03))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _shown(curve: Curve, values: Sequence[Any]) -> tuple[list[int], list[Any]]:
    pairs = [(gamma, value) for gamma, value in zip(curve.gammas, values, strict=True) if gamma <= LAST_GAMMA]
    return [gamma for gamma, _ in pairs], [value for _, value in pairs]


def _taus(axis: Any, view: View, curves: RuleCurves) -> None:
    for name, curve in view.in_order(curves):
        style = _style(view, name)
        if curve.tau_ci and all(ends is not None for ends in curve.tau_ci):
            gammas, ends = _shown(curve, curve.tau_ci)
            axis.fill_between(gammas, *zip(*ends, strict=True), color=style["color"], alpha=0.18, linewidth=0)
        axis.plot(*_shown(curve, curve.tau), **{**style, "markersize": 3})
    axis.set(xlabel="gamma, drafted tokens per block", ylabel="tau")


def _speeds(axis: Any, view: View, curves: RuleCurves) -> None:
    """One line per draft, with the judged one's peak and its timed speed-up."""
    for name, curve in view.in_order(curves):
        fast = {gamma: value for gamma, value in view.timed_speed_ups(curve).items() if gamma <= LAST_GAMMA}
        if not fast:
            continue
        axis.plot(list(fast), list(fast.values()), **{**_style(view, name), "markersize": 3})
        if name == view.draft.way:
            peak = max(fast, key=fast.__getitem__)
            at = (peak, fast[peak])
            axis.annotate(f"{fast[peak]:.2f}x at {peak}", at, xytext=(4, 7), textcoords="offset points", fontsize=8.5)

    row = view.verdict.row(view.draft.way)
    if row is not None and row.speed_up is not None and curves.rule == view.verdict.rule:
        error = [[abs(row.speed_up - end)] for end in row.speed_up_ci] if row.speed_up_ci else None
        look: dict[str, Any] = {"color": INK, "fmt": "*", "markersize": 8, "capsize": 3, "linewidth": 1.2}
        axis.errorbar([row.gamma], [row.speed_up], yerr=error, label="timed", **look)
    axis.axhline(1.0, color=INK, linewidth=1.0)
    where = (LAST_GAMMA, 1.0)
    axis.annotate("target alone", where, xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8)
    axis.set(xlabel="gamma, drafted tokens per block", ylabel="predicted speed-up")
    axis.set_ylim(0, 1.12 * axis.dataLim.y1)  # room for the words at the peak


STYLE = {"color": COLOURS[DRAFT], "marker": "o", "label": "distilled"}


def plot_run(run: Path) -> Path:
    """Write `plot.png` into the run's folder from its judgements. Returns the file."""
    plot_judgements(load_judgements(run), run.name, run / PLOT)
    return run / PLOT


def plot_judgements(records: Sequence[Judgement], name: str, to: Path) -> None:
    """Write the plot of a run's judgements, step 0 first, with intervals shaded."""
    best = max(records, key=lambda record: record.score or 0.0)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, key in zip(figure.subplots(1, 2), ("alpha", "tau"), strict=True):
        plot_steps(axis, records, key, best.step, STYLE)
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    first = records[0]
    figure.suptitle(f"{name}: rule {first.rule}, gamma {first.gamma}, {first.prompts} held-out prompts")
    write_figure(figure, to)


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a picture atomically, png or svg by the file's name."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix.lower().removeprefix("."), **options)
    write_bytes(path, content.getvalue())
