"""Trains the draft: student, objectives, the Accelerate loop, checkpoints, verdict and export."""

import importlib.util
import sys
from pathlib import Path


def _refuse_foreign(package: str) -> None:
    """Checks, before anything else of ours is imported, that `import package` finds the package beside this one.

    Raises SystemExit: a program of ours starts, and it does not: status 2, after one line. ImportError: the same in another program.
    """
    home = Path(__file__).resolve().parents[1]
    spec = importlib.util.find_spec(package)
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if origin == home / package / "__init__.py":
        return
    line = (
        f"understudy: {origin or 'sys.path'} hides our package `{package}` ({home / package}); run `understudy train CONFIG`, which "
        "imports nothing from the working directory; if it says the same, unset PYTHONPATH or install Understudy into "
        "an environment of its own"
    )
    # Python writes -m there until it has found the module to run.
    if Path(*sys.argv[:1]).stem not in ("-m", "understudy"):
        raise ImportError(line)
    print(line, file=sys.stderr)
    raise SystemExit(2)


for _package in ("data", "speculative"):
    _refuse_foreign(_package)
