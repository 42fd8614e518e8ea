"""The panels of a report in wandb: the same tables, curves and page, logged to a run that is under way.

wandb is imported only here and only when a run has it as a tracker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from distill.report.page import render_page
from distill.report.tables import (
    GivenTimes,
    Table,
    disagreement_table,
    forgetting_table,
    headline_table,
    in_one_pass,
    judged,
    labels_of,
    main_curves,
    measured_times,
    slice_tables,
    timed_speed_ups,
)
from distill.run.result import Result

PREFIX = "report"
HEADLINES = ("alpha", "tau", "accepted_per_drafted", "speed_up", "tokens_per_second")


def log_result(accelerator_or_run: Any, result: Result) -> list[str]:
    """Logs what a report shows to wandb, in one step; returns the names of the panels, [] where the run has no wandb tracker.

    Args:
        accelerator_or_run: an Accelerator whose trackers were started, or a wandb run.
    """
    run = wandb_run(accelerator_or_run)
    if run is None:
        return []
    import wandb

    given = measured_times(result)
    panels: dict[str, Any] = {f"{PREFIX}/headline": _table(wandb, headline_table(result))}
    panels |= _charts(wandb, result, given)
    for slices in slice_tables(result):
        panels[f"{PREFIX}/slices by {slices.columns[0]}"] = _table(wandb, slices)
    for name, table in (("disagreements", disagreement_table(result)), ("forgetting", forgetting_table(result))):
        if table is not None:
            panels[f"{PREFIX}/{name}"] = _table(wandb, table)
    if result.token_view:
        panels[f"{PREFIX}/tokens"] = _tokens(wandb, result)
    # inject would add a style sheet of wandb's servers to a page that needs no network.
    panels[f"{PREFIX}/page"] = wandb.Html(render_page(result, given), inject=False, data_is_not_path=True)
    run.log(panels)
    verdict, main = result.verdict, judged(result)
    run.summary.update(
        {f"{PREFIX}/outcome": verdict.outcome, f"{PREFIX}/sentence": verdict.sentence}
        | {f"{PREFIX}/{key}": value for key in HEADLINES if (value := getattr(main, key)) is not None}
    )
    return list(panels)


def wandb_run(accelerator_or_run: Any) -> Any:
    """The wandb run of an Accelerator on its main process, None when it has none; a run is given back as it is."""
    trackers = getattr(accelerator_or_run, "trackers", None)
    if trackers is None:
        return accelerator_or_run
    found = [tracker for tracker in trackers if tracker.name == "wandb"]
    return found[0].tracker if found and accelerator_or_run.is_main_process else None


def _table(wandb: Any, table: Table) -> Any:
    """The cells as they are read: value, interval and mark."""
    rows = [
        [" ".join(part for part in (cell.text, cell.note, cell.mark) if part) for cell in row] for row in table.rows
    ]
    return wandb.Table(columns=[column or "measure" for column in table.columns], data=rows)


def _charts(wandb: Any, result: Result, given: GivenTimes) -> dict[str, Any]:
    """Line charts; a series is left out where its values are null."""
    labels, charts = labels_of(result), {}

    def chart(name: str, title: str, xname: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
        if series:
            xs, ys = zip(*series.values(), strict=True)
            charts[f"{PREFIX}/{name}"] = wandb.plot.line_series(
                xs=xs, ys=ys, keys=list(series), title=title, xname=xname
            )

    def over_gamma(name: str, title: str, series: Mapping[str, Mapping[int, float]]) -> None:
        chart(name, title, "gamma", {label: (list(fast), list(fast.values())) for label, fast in series.items()})

    steps = result.steps
    if len(steps) > 1:
        at = [step.step or 0 for step in steps]
        for key in ("alpha", "tau"):
            ours = {"judged": (at, [getattr(step, key) for step in steps])}
            if steps[0].step == 0:
                ours[labels.get("baseline", "baseline")] = (at, [getattr(steps[0], key)] * len(at))
            chart(f"{key} over steps", f"{key} over steps", "optimizer step", ours)
    rows = {labels[row.name]: row.survival for row in result.contestants if row.survival}
    chart(
        "survival",
        "first j drafted tokens accepted",
        "j",
        {name: (list(range(1, len(s) + 1)), s) for name, s in rows.items()},
    )
    curves = main_curves(result)
    if curves is not None:
        known = {labels.get(name, name): curve for name, curve in curves.contestants.items()}
        timed = {name: fast for name, curve in known.items() if (fast := timed_speed_ups(result, curve))}
        chart("tau", "tau over gamma", "gamma", {name: (curve.gammas, curve.tau) for name, curve in known.items()})
        over_gamma("speed-up", "speed-up here", timed)
        at_times = {
            labels.get(name, name): given.speed_ups(curve, in_one_pass(result, name))
            for name, curve in curves.contestants.items()
        }
        over_gamma("speed-up at given times", "speed-up at given times", at_times)
    if result.calibration:
        bins = result.calibration.bins
        confidence = [one.confidence for one in bins]
        points = {"draft": (confidence, [one.accepted for one in bins]), "calibrated": (confidence, confidence)}
        chart("calibration", "share accepted over the draft's probability", "probability", points)
    return charts


def _tokens(wandb: Any, result: Result) -> Any:
    """Every token of the view in one table."""
    of_token = {"token": "text", "id": "id", "written by": "by", "block": "block"}
    of_token |= {"target_prob": "target_prob", "draft_prob": "draft_prob"}
    rows = [
        [response.key, place, *(getattr(token, key) for key in of_token.values())]
        for response in (result.token_view.responses if result.token_view else [])
        for place, token in enumerate(response.tokens)
    ]
    return wandb.Table(columns=["response", "place", *of_token], data=rows)
