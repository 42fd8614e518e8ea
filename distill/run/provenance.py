"""Where a run came from: code, versions, models, command. Written beside every checkpoint."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "numpy", "understudy")


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_run(seed: int) -> dict[str, Any]:
    """Commit and uncommitted changes, versions, machine, command line, seed."""
    difference = _git("diff", "HEAD")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": difference or None,
        "argv": sys.argv,
        "seed": seed,
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }
