"""Log to wandb what Accelerate's tracker cannot: intervals as bands, the report page and the table of ways.

wandb is imported only if a run has it as a tracker.
"""

from typing import Any

from distill.report.measured import stages_table, waits_table, ways_tables
from distill.report.page import render_page
from distill.run.result import Result

PAGE, TABLES = "report/page", ("report/ways", "report/waits", "report/stages")


def log_result(accelerator: Any, result: Result) -> None:
    """Log page, tables, and alpha and tau over checkpoints between the ends of their intervals to wandb, if it is a tracker."""
    found = [tracker.tracker for tracker in accelerator.trackers if tracker.name == "wandb"]
    if not (found and accelerator.is_main_process):
        return
    import wandb

    run = found[0]

    # inject=True would add a style sheet from wandb's servers to a page that needs no network.
    page = wandb.Html(render_page(result), inject=False, data_is_not_path=True)
    rows = result.verdict.measured
    tables = dict(zip(TABLES, (ways_tables(result.verdict)[0], waits_table(rows), stages_table(rows)), strict=True))
    known = {
        name: wandb.Table([column.name for column in one.heads], one.texts())
        for name, one in tables.items()
        if one.cells
    }
    bands = {}
    for key in ("alpha", "tau"):
        ends = [(one.step, getattr(one, key), getattr(one, f"{key}_ci")) for one in result.verdict.checkpoints]
        if points := [(step, value, *both) for step, value, both in ends if both]:
            steps, *lines = zip(*points, strict=True)
            title = f"{key} by replay, 95 % interval"
            bands[f"bands/{key}"] = wandb.plot.line_series(steps, lines, [key, "low", "high"], title, "step")
    run.log({PAGE: page} | known | bands)
    run.summary.update({"report/outcome": result.verdict.outcome, "report/headline": result.verdict.headline})
