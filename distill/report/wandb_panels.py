"""Log a finished run to wandb: the report page, the table of ways, outcome and headline. Checkpoints are logged during training.

wandb is imported only here, and only if a run has it as a tracker.
"""

from typing import Any

from distill.report.measured import ways_tables
from distill.report.page import render_page
from distill.run.result import Result

PAGE, WAYS_TABLE = "report/page", "report/ways"


def log_result(accelerator_or_run: Any, result: Result) -> list[str]:
    """Log page and table to wandb in one step. Returns the names of the panels, [] if the run has no wandb tracker.

    Args:
        accelerator_or_run: an Accelerator whose trackers were started, or a wandb run.
    """
    run = wandb_run(accelerator_or_run)
    if run is None:
        return []
    import wandb

    table = ways_tables(result.verdict)[0]
    # inject=True would add a style sheet from wandb's servers to a page that needs no network.
    page = wandb.Html(render_page(result), inject=False, data_is_not_path=True)
    ways = wandb.Table(columns=[column.name for column in table.heads], data=table.texts())
    run.log({PAGE: page, WAYS_TABLE: ways})
    run.summary.update({"report/outcome": result.verdict.outcome, "report/headline": result.verdict.headline})
    return [PAGE, WAYS_TABLE]


def wandb_run(accelerator_or_run: Any) -> Any:
    """The wandb run of an Accelerator on its main process, or None. A wandb run is returned unchanged."""
    trackers = getattr(accelerator_or_run, "trackers", None)
    if trackers is None:
        return accelerator_or_run
    found = [tracker for tracker in trackers if tracker.name == "wandb"]
    return found[0].tracker if found and accelerator_or_run.is_main_process else None
