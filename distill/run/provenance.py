"""Origin of a run: code, versions, machine, command. Written with every checkpoint."""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from speculative.measure.record import version_of

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "numpy", "understudy")
HOME = Path(__file__).resolve().parents[2]


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=HOME, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def describe_run(seed: int) -> dict[str, Any]:
    """Commit, hash of uncommitted changes, versions, machine, command line and seed.

    It is published with the draft, so it contains no text of files. The commit is left out if git reports another repository,
    such as a project in which Understudy is installed.
    """
    top = _git("rev-parse", "--show-toplevel")
    ours = top is not None and Path(top).resolve() == HOME
    difference = _git("diff", "HEAD") if ours else None
    return {
        "commit": _git("rev-parse", "HEAD") if ours else None,
        "uncommitted_changes": f"sha256 {hashlib.sha256(difference.encode()).hexdigest()}" if difference else None,
        "argv": sys.argv,
        "seed": seed,
        "versions": {package: version_of(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }
