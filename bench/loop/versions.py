"""A bad version for the rollout: the served one with shuffled weights."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from data.files import write_json
from distill.config.layout import PROVENANCE
from distill.live.versions import next_name


def shuffled_version(drafts: Path, good: str) -> str:
    """Copy a version with the rows of each matrix shuffled; return the copy's name."""
    name = next_name(drafts)
    folder = drafts / f".{name}.tmp"
    shutil.copytree(drafts / good, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        orders = {key: torch.randperm(len(value), generator=generator) for key, value in weights.items() if value.dim()}
        save_file(weights | {key: weights[key][order] for key, order in orders.items()}, path, {"format": "pt"})
    told = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    told |= {"version": name, "parent": good, "approved_by": "nobody: its weights are shuffled"}
    write_json(folder / PROVENANCE, told)
    os.replace(folder, drafts / name)
    return name
