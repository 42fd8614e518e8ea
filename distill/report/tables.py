"""What commands take of a result and of its intervals as words."""

from collections.abc import Sequence

from distill.report.table import NOTHING
from distill.report.table import interval as written
from distill.run.result import Contestant, Result

__all__ = ["NOTHING", "interval", "judged"]


def interval(ends: Sequence[float] | None, digits: int = 3, sign: bool = False) -> str:
    """`[low, high]`, nothing for null."""
    return written(ends, f"{'+' if sign else ''}.{digits}f")


def judged(result: Result) -> Contestant:
    """The contestant that the report is about: the best, or the only one."""
    return next((row for row in result.contestants if row.name == "best"), result.contestants[-1])
