"""The verdict that a run's folder holds."""

from pathlib import Path

from distill.config.layout import VERDICT
from distill.run.verdict_record import Verdict


def load_verdict(run: Path) -> Verdict:
    """verdict.json of a finished run.

    Raises:
        UserError: not there or damaged, or a key is missing or holds something else (it is named).
    """
    unfinished = "not there; the run is not finished, start its command again"
    return Verdict.read(run / VERDICT, "delete it, and start the run's command again", unfinished)
