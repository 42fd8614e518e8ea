"""Configs of a refresh's probe and training, as overrides of the run's config, and the stores that both start with."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import MANIFEST, write_bytes
from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill.config import layout
from distill.config.load import dump_config, load_config, load_run
from distill.live.versions import Version
from distill.run.lock import hold
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from speculative.errors import UserError

JUDGED = 2  # judged checkpoints, including the last; each further one widens the gate's intervals
# A warm start. Target, template, serving and seed stay the same, so the run's responses stay valid.
_WARM = {
    "student.init": "pretrained",
    "student.revision": None,
    "student.architecture": None,
    "student.layers": [0, -1],
    "student.intermediate_size": None,
    "student.embeddings": "random",
    "student.vocabulary": "same",
    "data.heldout_count": None,
    "data.too_long": "drop",
    "data.responses": "fresh",
    "serving.samples_per_prompt": 1,
    "judge.served": None,
    "judge.lenience": [],
}
# A probe is only replayed; nothing is timed.
_PROBE = {
    "judge.live": "never",
    "judge.load": [],
    "judge.latency_ms": {},
    "judge.replay_every": 0,
    "tracking.trackers": [],
    "export.quantize": None,
}


def student_of(version: Version | None, run: Path) -> Path:
    """The unrounded weights that a version was exported from; the version itself if its run is missing. ``run``: that of the first
    version, at its present path; ``version``: None for a draft that was never published.
    """
    home = run if version is None or version.parent is None else Path(version.provenance["run"])
    own = layout.best_student(home)
    return own if version is None or own.is_dir() else version.folder


def mixed(old: int, new: int, share: float) -> tuple[int, int]:
    """(old prompts, new prompts): the largest numbers with this share of new ones."""
    if share >= 1:
        return 0, new
    taken = min(new, int(old * share / (1 - share)))
    return min(old, round(taken * (1 - share) / share)), taken


def write_training(home: Path, student: Path, export: Path, folder: Path, share: float, asked: Sequence[str]) -> Path:
    """Write the training's config with this share of new prompts and return its path. It has as many epochs as `home`; fewer prompts mean
    fewer steps. ``asked``: the user's overrides. Raises UserError: an invalid one, or the prompts of `home` are missing.
    """
    config, (old_train, old_heldout), (new_train, new_heldout) = load_run(home, True), _prompts(home), _prompts(export)
    if not old_train.exists() or not old_heldout.exists():
        raise UserError(f"{home / layout.PROMPTS}: missing; it is not known what {home} was trained and judged on")
    had, fresh = len(StoredPrompts(old_train)), len(StoredPrompts(new_heldout))
    old, new = mixed(had, len(StoredPrompts(new_train)), share)
    judged = min(config.judge.prompts, len(StoredPrompts(old_heldout)))
    # Of one response a prompt, where `home` may have more.
    share_of_steps = min(1.0, (old + new) / had) / config.serving.samples_per_prompt
    steps = max(1, round(config.settled(had).train.steps * share_of_steps))
    keys = {
        "data.train": _sources((old_train, old), (new_train, new)),
        "data.heldout": _sources((old_heldout, judged), (new_heldout, fresh)),
        "train.steps": steps,
        "train.epochs": 0,
        "judge.prompts": judged + fresh,
        "judge.every": -(-steps // JUDGED),
    }
    return _write(folder / "refresh.yaml", home, student, folder, keys, asked)


def write_probe(home: Path, student: Path, export: Path, folder: Path, steps: int, asked: Sequence[str]) -> Path:
    """Write the probe's config and return its path: ``steps`` on the traffic alone, judged on its later part. Raises UserError: an invalid
    override.
    """
    train, heldout = _prompts(export)
    keys = _PROBE | {
        "data.train": _sources((train, None)),
        "data.heldout": _sources((heldout, None)),
        "judge.prompts": max(2, len(StoredPrompts(heldout))),
    }
    length = [f"train.steps={steps}", "train.epochs=0", f"judge.every={steps}"]
    return _write(folder.with_name(f"{folder.name}.yaml"), home, student, folder, keys, [*asked, *length])


def _prompts(folder: Path) -> tuple[Path, Path]:
    return folder / layout.PROMPTS / TRAIN_FILE, folder / layout.PROMPTS / HELDOUT_FILE


def _sources(*files: tuple[Path, int | None]) -> list[dict[str, str | int | None]]:
    return [{"path": str(path), "limit": limit} for path, limit in files if limit != 0]


def _write(path: Path, home: Path, student: Path, folder: Path, keys: dict[str, Any], asked: Sequence[str]) -> Path:
    own = {"name": folder.name, "output": str(folder.parent), "student.path": str(student)} | _WARM | keys
    words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in own.items()]
    write_bytes(path, dump_config(load_config(home / layout.CONFIG, [*words, *asked])).encode())
    return path


def adopt_stores(folder: Path, homes: Sequence[Path]) -> None:
    """Link the stored responses of other runs with the same settings into a run, so that it decodes only what is missing. Raises
    UserError: other settings, a damaged store, a folder in use, or a failed write.
    """
    with hold(folder):
        for home in homes:
            for name in (layout.TRAINING, layout.HELDOUT, layout.HELDOUT_GREEDY):
                if (home / layout.RESPONSES / name / MANIFEST).exists():
                    Store(folder / layout.RESPONSES / name).adopt(Store(home / layout.RESPONSES / name))
            for name in (layout.DAY, layout.SERVER_IDENTITY):
                if (home / layout.RESPONSES / name).exists() and not (folder / layout.RESPONSES / name).exists():
                    shutil.copyfile(home / layout.RESPONSES / name, folder / layout.RESPONSES / name)
