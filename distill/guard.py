"""Refuses to start when a folder of the user's hides one of our packages: `data` is a common name."""

import importlib.util
from pathlib import Path

from speculative.errors import UserError

PACKAGES = ("data", "speculative", "distill")


def check_imports() -> None:
    """Our three packages must be siblings.

    Raises:
        UserError: one of them resolves to another place; it is named.
    """
    home = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != home / package:
            raise UserError(
                f"`import {package}` finds {found or 'a folder without __init__.py'}, not ours beside {home / 'distill'}; "
                f"run from another directory or rename that {package}"
            )
