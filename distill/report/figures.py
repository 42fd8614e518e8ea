"""The figures of a report: inline SVG drawn by matplotlib, coloured by the page's own CSS variables.

matplotlib knows nothing of light and dark, so it draws in stand-in colours that are then replaced by `var(--...)`. Text stays text.
"""

import io
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from distill.report.tables import (
    GivenTimes,
    in_one_pass,
    in_order,
    judged,
    labels_of,
    main_curves,
    number,
    timed_speed_ups,
)
from distill.run.result import Calibration, Curve, Result, RuleCurves

SIZE = (4.9, 2.9)  # inches; a page shows it 360 to 480 pixels wide, so that 9 points are readable on a phone
INK, MUTED, RULE = "#010101", "#020202", "#030303"
SERIES = {"best": "#0a0001", "baseline": "#0a0002", "served": "#0a0003"}
OTHERS = ("#0a0004", "#0a0005", "#0a0006")
VARIABLES = {
    INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", SERIES["best"]: "var(--best)", SERIES["baseline"]: "var(--baseline)",
    SERIES["served"]: "var(--served)", OTHERS[0]: "var(--other-1)", OTHERS[1]: "var(--other-2)", OTHERS[2]: "var(--other-3)",
}  # fmt: skip
SHAPES = {"best": ("o", "-"), "baseline": ("s", "--"), "served": ("^", "-.")}
LONGEST_LABEL = 24
LEGEND_ROOM = 62  # characters of a legend's line, five of them for each sign before a label
LAST_GAMMA = 16  # beyond it curves are flat; tables go on to 32
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9,
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK,
    "grid.color": RULE, "axes.grid": True, "axes.axisbelow": True, "lines.linewidth": 1.7, "lines.markersize": 4,
    "legend.fontsize": 9, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none", "grid.linewidth": 0.8,
}  # fmt: skip


def figures_of(result: Result, given: GivenTimes) -> dict[str, str]:
    """{name: SVG element} of every figure this result has data for.

    Names: steps_alpha, steps_tau, survival, tau, speed, given, calibration.
    """
    drawn: dict[str, str] = {}
    if len(result.steps) > 1:
        for key in ("alpha", "tau"):
            drawn[f"steps_{key}"] = _draw(f"steps_{key}", f"{key} over optimizer steps", _steps, result, key)
    if any(row.survival for row in result.contestants):
        drawn["survival"] = _draw("survival", "survival by position in a block", _survival, result)
    curves = main_curves(result)
    if curves is not None:
        drawn["tau"] = _draw("tau", "tau over gamma", _taus, result, curves)
        if any(timed_speed_ups(result, curve) for curve in curves.contestants.values()):
            drawn["speed"] = _draw("speed", "speed-up over gamma on this machine", _speeds, result, curves)
        drawn["given"] = _draw("given", "speed-up over gamma at the given times", _given_speeds, result, curves, given)
    if result.calibration:
        drawn["calibration"] = _draw(
            "calibration", "accepted share over the draft's confidence", _reliability, result.calibration
        )
    return drawn


def series_of(result: Result) -> dict[str, str]:
    """{contestant: CSS variable of its colour}, the same in every figure."""
    return {name: VARIABLES[_colour(result, name)] for name in labels_of(result)}


def _colour(result: Result, name: str) -> str:
    others = [known for known in labels_of(result) if known not in SERIES]
    return SERIES.get(name) or OTHERS[others.index(name) % len(OTHERS) if name in others else 0]


def _style(result: Result, name: str) -> dict[str, Any]:
    marker, line = SHAPES.get(name, ("D", ":"))
    # SVG is XML, which has no signs for control characters.
    label = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in labels_of(result).get(name, name)
    )
    shown = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    # matplotlib leaves a label that starts with "_" out of its legends.
    return {
        "color": _colour(result, name),
        "marker": marker,
        "linestyle": line,
        "label": f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown,
    }


def _draw(name: str, title: str, plot: Any, *data: Any) -> str:
    """Draws one figure with `plot(axis, *data)` and returns it as an SVG element that fits into a page beside others."""
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        # A glyph that matplotlib's own font lacks is drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.add_subplot()
        plot(axis, *data)
        labels = axis.get_legend_handles_labels()[1]
        if labels:
            columns = len(labels) if sum(len(label) + 5 for label in labels) <= LEGEND_ROOM else 2
            axis.legend(
                loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, handlelength=1.9,
                columnspacing=0.9, handletextpad=0.5,
            )  # fmt: skip
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return inline_svg(buffer.getvalue(), name, title)


def inline_svg(source: str, name: str, title: str) -> str:
    """An SVG file as an element of a page: no name spaces, no fixed size, ids of its own, the page's colours."""
    root = ElementTree.fromstring(source)
    used = {
        value.split("#")[1].rstrip(")")
        for element in root.iter()
        for value in element.attrib.values()
        if value.startswith(("#", "url(#"))
    }
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in list(root.iter()):
        element.tag = element.tag.split("}")[-1]
        if element.tag in ("metadata", "style"):
            parents[element].remove(element)
            continue
        attributes = {key.split("}")[-1]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                if value in used:
                    element.set(key, f"{name}-{value}")
                continue
            if value.startswith(("#", "url(#")):
                value = value.replace("#", f"#{name}-", 1)
            if key == "style":
                for stand_in, variable in VARIABLES.items():
                    value = value.replace(stand_in, variable)
            element.set(key, value)
    box = root.get("viewBox", "")
    root.attrib.clear()
    for key, value in (("viewBox", box), ("role", "img"), ("aria-label", title), ("data-figure", name)):
        root.set(key, value)
    return ElementTree.tostring(root, encoding="unicode")


def _band(axis: Any, ends: Sequence[float] | None, colour: str) -> None:
    if ends is not None:
        axis.axhspan(*ends, color=colour, alpha=0.18, linewidth=0)


def _steps(axis: Any, result: Result, key: str) -> None:
    steps, main = result.steps, judged(result)
    style = _style(result, main.name)
    baseline = steps[0]
    base_style = {**_style(result, "baseline"), "marker": ""} if baseline.step == 0 else None
    if base_style:
        _band(axis, getattr(baseline, f"{key}_ci"), base_style["color"])
        axis.axhline(getattr(baseline, key), **base_style)
    at, values = [step.step for step in steps], [getattr(step, key) for step in steps]
    if all(getattr(step, f"{key}_ci") for step in steps):
        low, high = zip(*(getattr(step, f"{key}_ci") for step in steps), strict=True)
        axis.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axis.plot(at, values, **style)
    best = next((step for step in steps if step.step == main.step), None)
    if best is not None:
        axis.annotate(
            number(getattr(best, key), 3 if key == "alpha" else 2),
            (best.step, getattr(best, key)),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=INK,
        )
        axis.margins(y=0.15)
    axis.set(xlabel="optimizer step", ylabel=key)


def _survival(axis: Any, result: Result) -> None:
    for row in result.contestants:
        if row.survival:
            places = range(len(row.survival) + 1)
            axis.plot(places, [1.0, *row.survival], **_style(result, row.name))
    axis.set(xlabel="j, drafted tokens", ylabel="first j all accepted", ylim=(0, 1.03))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _shown(curve: Curve, values: Sequence[Any]) -> tuple[list[int], list[Any]]:
    pairs = [(gamma, value) for gamma, value in zip(curve.gammas, values, strict=True) if gamma <= LAST_GAMMA]
    return [gamma for gamma, _ in pairs], [value for _, value in pairs]


def _taus(axis: Any, result: Result, curves: RuleCurves) -> None:
    for name, curve in in_order(result, curves):
        style = _style(result, name)
        if curve.tau_ci and all(ends is not None for ends in curve.tau_ci):
            gammas, ends = _shown(curve, curve.tau_ci)
            axis.fill_between(gammas, *zip(*ends, strict=True), color=style["color"], alpha=0.18, linewidth=0)
        axis.plot(*_shown(curve, curve.tau), **{**style, "markersize": 3})
    axis.set(xlabel="gamma, drafted tokens a block", ylabel="tau")


def _speed_axis(axis: Any) -> None:
    axis.axhline(1.0, color=INK, linewidth=1.0)
    axis.annotate(
        "target alone",
        (LAST_GAMMA, 1.0),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=MUTED,
    )
    axis.set(xlabel="gamma, drafted tokens a block", ylabel="speed-up")
    axis.set_ylim(0, 1.12 * axis.dataLim.y1)  # room for the words at the peak


def _speed_lines(
    axis: Any, result: Result, curves: RuleCurves, speed_ups: Callable[[str, Curve], Mapping[int, float]]
) -> None:
    """A line a draft; the judged one's peak is named."""
    for name, curve in in_order(result, curves):
        fast = {gamma: value for gamma, value in speed_ups(name, curve).items() if gamma <= LAST_GAMMA}
        if not fast:
            continue
        axis.plot(list(fast), list(fast.values()), **{**_style(result, name), "markersize": 3})
        if name == judged(result).name:
            peak = max(fast, key=fast.__getitem__)
            axis.annotate(
                f"{fast[peak]:.2f}x at {peak}",
                (peak, fast[peak]),
                xytext=(4, 7),
                textcoords="offset points",
                color=INK,
                fontsize=8.5,
            )


def _speeds(axis: Any, result: Result, curves: RuleCurves) -> None:
    main, gamma = judged(result), result.verdict.gamma
    _speed_lines(axis, result, curves, lambda _, curve: timed_speed_ups(result, curve))
    if main.speed_up is not None and curves.rule == result.verdict.rule:
        ends = main.speed_up_ci
        error = [[abs(main.speed_up - end)] for end in ends] if ends else None
        axis.errorbar(
            [gamma],
            [main.speed_up],
            yerr=error,
            color=INK,
            fmt="*",
            markersize=8,
            capsize=3,
            linewidth=1.2,
            label="measured",
        )
    _speed_axis(axis)


def _given_speeds(axis: Any, result: Result, curves: RuleCurves, given: GivenTimes) -> None:
    _speed_lines(axis, result, curves, lambda name, curve: given.speed_ups(curve, in_one_pass(result, name)))
    _speed_axis(axis)


def _reliability(axis: Any, calibration: Calibration) -> None:
    bins = [one for one in calibration.bins if one.weight > 0]
    heaviest = max((one.weight for one in bins), default=1.0)
    for one in bins:
        # How often this confidence occurs, as a bar from below, at most a quarter of the height.
        axis.bar(
            one.low,
            0.25 * one.weight / heaviest,
            width=0.96 * (one.high - one.low),
            align="edge",
            color=RULE,
            linewidth=0,
        )
    axis.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, label="perfectly calibrated")
    colour = SERIES["best"]
    for one in bins:
        if one.ci:
            axis.plot([one.confidence] * 2, one.ci, color=colour, linewidth=1.2)
    axis.plot([one.confidence for one in bins], [one.accepted for one in bins], color=colour, marker="o", label="draft")
    if calibration.stop_below:
        axis.axvline(calibration.stop_below, color=INK, linestyle=":", linewidth=1.2, label="stop below")
    axis.set(xlabel="probability the draft gave its token", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1.02))
