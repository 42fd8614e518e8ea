"""Where a run came from: code, versions, models, command. Written beside every checkpoint."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "numpy", "understudy")


def model_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits of SHA-256 over the names, shapes and values of all weights.

    Values enter as float32, so the same weights loaded in another precision that holds them exactly agree. Each tensor gives
    at most 4096 evenly spread values: enough to tell two models apart, quick on a large one.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // 4096)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of SHA-256 over every token string with its id, the special ones marked."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    content = json.dumps([entries, sorted(tokenizer.all_special_ids)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


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
