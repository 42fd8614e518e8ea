"""The run that readback's tests share."""

from readback_run import _quick, draft, heldout, make, run

__all__ = ["_quick", "draft", "heldout", "make", "run"]
