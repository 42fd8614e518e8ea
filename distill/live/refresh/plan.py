"""What a refresh trains: the config of its probe and of its training, made from the run's own, and the stores that both begin with."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import MANIFEST, write_bytes
from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill.config.layout import (
    CONFIG,
    DAY,
    HELDOUT,
    HELDOUT_GREEDY,
    PROMPTS,
    RESPONSES,
    SERVED,
    TRAINING,
    best_student,
)
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.live.versions import Version
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from speculative.errors import UserError

PROBE = "probe"
JUDGED = 2  # checkpoints of the training, its end among them: each one more widens the gate's intervals


def student_of(version: Version | None, run: Path) -> Path:
    """The weights that a version was exported from, unrounded; the version itself where its run is gone.

    ``run``: the run of the first version, wherever it lies by now; ``version``: None for a draft that was never published.
    """
    home = run if version is None or version.parent is None else Path(version.provenance["run"])
    own = best_student(home)
    return own if version is None or own.is_dir() else version.folder


def mixed(old: int, new: int, share: float) -> tuple[int, int]:
    """(old prompts, new prompts): as many as there are at this share of new ones."""
    if share >= 1:
        return 0, new
    taken = min(new, int(old * share / (1 - share)))
    return min(old, round(taken * (1 - share) / share)), taken


def refresh_config(
    config: RunConfig, run: Path, student: Path, export: Path, folder: Path, share: float
) -> dict[str, Any]:
    """The training's config, as plain values: RUN's, with a warm start, and old prompts beside new ones at this share.

    As many epochs as RUN had, over fewer prompts in fewer steps.

    Raises:
        UserError: RUN no longer has the prompts that it was trained on.
    """
    old_train, old_heldout = run / PROMPTS / TRAIN_FILE, run / PROMPTS / HELDOUT_FILE
    if not old_train.exists() or not old_heldout.exists():
        raise UserError(f"{run / PROMPTS}: not there, so nothing is known of what {run} was trained and judged on")
    new_train, new_heldout = export / PROMPTS / TRAIN_FILE, export / PROMPTS / HELDOUT_FILE
    had = len(StoredPrompts(old_train))
    old, new = mixed(had, len(StoredPrompts(new_train)), share)
    tree = _warm(config, student, folder)
    judged = min(config.judge.prompts, len(StoredPrompts(old_heldout)))
    tree["data"] |= {
        "train": _sources((old_train, old), (new_train, new)),
        "heldout": _sources((old_heldout, judged), (new_heldout, len(StoredPrompts(new_heldout)))),
    }
    steps = max(1, round(config.train.steps * min(1.0, (old + new) / had)))
    tree["train"]["steps"] = steps
    tree["judge"] |= {"prompts": judged + len(StoredPrompts(new_heldout)), "every": -(-steps // JUDGED)}
    return tree


def probe_config(config: RunConfig, student: Path, export: Path, folder: Path, steps: int) -> dict[str, Any]:
    """The probe's: some steps on the traffic alone, replayed on its later part; nothing is timed."""
    tree = _warm(config, student, folder / PROBE)
    train, heldout = export / PROMPTS / TRAIN_FILE, export / PROMPTS / HELDOUT_FILE
    tree["data"] |= {"train": _sources((train, None)), "heldout": _sources((heldout, None))}
    tree["train"]["steps"] = steps
    tree["judge"] |= {
        "prompts": max(2, len(StoredPrompts(heldout))), "every": steps, "live": "never", "load": [], "temperatures": [], "dial_every": 0,
    }  # fmt: skip
    tree["tracking"]["trackers"], tree["export"]["quantize"] = [], None
    return tree


def _warm(config: RunConfig, student: Path, folder: Path) -> dict[str, Any]:
    """RUN's config in another folder, beginning with this student. Its target, template, serving and seed stay, and so do its responses."""
    tree: dict[str, Any] = json.loads(config.model_dump_json())
    tree |= {"name": folder.name, "output": str(folder.parent), "resume": "auto"}
    tree["student"] |= {
        "init": "pretrained", "path": str(student), "revision": None, "architecture": None, "layers": [0, -1], "intermediate_size": None,
        "embeddings": "random", "vocabulary": "same",
    }  # fmt: skip
    tree["data"] |= {"synthetic": None, "heldout_count": None, "too_long": "drop"}
    tree["serving"]["samples_per_prompt"] = 1
    tree["judge"]["served"] = None
    return tree


def _sources(*files: tuple[Path, int | None]) -> list[dict[str, Any]]:
    return [{"path": str(path), "limit": limit} for path, limit in files if limit != 0]


def write_config(path: Path, tree: dict[str, Any], overrides: Sequence[str], fixed: Sequence[str] = ()) -> RunConfig:
    """Writes a config with the user's overrides, and ``fixed`` ones behind them; returns it as it was read back.

    Raises:
        UserError: an override that is refused.
    """
    write_bytes(path, json.dumps(tree).encode())
    config = load_config(path, [*overrides, *fixed])
    write_bytes(path, dump_config(config).encode())
    return config


def adopt_stores(folder: Path, homes: Sequence[Path]) -> None:
    """Gives a run the responses of others made with the same: it then answers only what is missing.

    Raises:
        UserError: made with something else, damaged, or the disk refuses.
    """
    for home in homes:
        for name in (TRAINING, HELDOUT, HELDOUT_GREEDY):
            if (home / RESPONSES / name / MANIFEST).exists():
                Store(folder / RESPONSES / name).adopt(Store(home / RESPONSES / name))
        for name in (DAY, SERVED):
            if (home / RESPONSES / name).exists() and not (folder / RESPONSES / name).exists():
                shutil.copyfile(home / RESPONSES / name, folder / RESPONSES / name)


def run_config(run: Path) -> RunConfig:
    """The config of a run.

    Raises:
        UserError: no run there, or one that trains on the dataset's own answers, of which traffic has none.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: no config.yaml there; give the folder of a run, e.g. runs/demo")
    config = load_config(run / CONFIG)
    if config.data.responses == "reference":
        raise UserError(
            f"{run}: data.responses: reference; a refresh learns from the target's answers, train such a run first"
        )
    return config
