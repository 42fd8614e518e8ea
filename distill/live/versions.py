"""Versions of a served draft: drafts/NAME/v0001/, v0002/, ... Each is an export that never changes; `current` links to one.

    v0001/           what `understudy export` writes; its provenance.json also holds the version, its parent and run, what it was
                     trained on, how it was judged, and the name given with --approve
    current          link to the served version
    history.jsonl    one line per event: published, current, rejected, pruned; with time and origin

A version appears complete or not at all. Only `make_current` moves `current`: after a successful rollout, or with `--approve`.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data.files import locked, write_bytes, writing
from distill.config.layout import PROVENANCE
from speculative.errors import UserError
from speculative.measure.record import Record

CURRENT, HISTORY = "current", "history.jsonl"
_LOCK = ".lock"
_NAME = re.compile(r"v\d{4,}")
Event = Literal["published", "current", "rejected", "pruned"]


@dataclass(frozen=True)
class Version:
    """A version on disk. provenance: {version, parent, run, data_window, traffic, target, target_fingerprint, verdict,
    approved_by, made, ...}.
    """

    folder: Path
    provenance: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as v0007."""
        return self.folder.name

    @property
    def parent(self) -> str | None:
        """The version that it was trained from; None for the first."""
        return self.provenance["parent"]


def read_version(folder: Path) -> Version:
    """The version in a folder or at a link to one. Raises UserError if there is none."""
    folder = folder.resolve()
    with contextlib.suppress(UserError, KeyError):
        provenance = Record.read(folder / PROVENANCE).record()
        named = _NAME.fullmatch(folder.name) and provenance["version"] == folder.name
        if named and isinstance(provenance["parent"], str | None):
            return Version(folder, provenance)
    raise UserError(f"{folder}: not a draft version; give a folder such as drafts/NAME/v0001 of `understudy refresh`")


def list_versions(drafts: Path) -> list[Version]:
    """All versions of a draft, oldest first."""
    found = [path for path in drafts.glob("v*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return [read_version(path) for path in sorted(found, key=lambda path: int(path.name[1:]))]


def current_version(drafts: Path) -> Version | None:
    """The served version; None before the first. Raises UserError if the link points to no version."""
    link = drafts / CURRENT
    return read_version(link) if link.is_symlink() else None


def publish(run: Path, drafts: Path, provenance: Mapping[str, Any], *, parent: str | None = None, name: str) -> Version:
    """Export a run's best draft as a version, read-only; what a killed call left of it is completed.

    run: its folder, or one of its checkpoints. provenance: data_window, traffic, approved_by and further keys; see `Version`.
    Raises UserError: the run has no draft yet, the number belongs to another run, a write failed, or see `export_draft`.
    """
    # Imported here so that reading or moving versions does not import torch.
    from distill.export.export import export_draft
    from distill.export.facts import read_run

    facts = read_run(run, trusted=True)
    with locked(drafts / _LOCK):
        folder = drafts / name
        if not folder.exists():
            verdict = facts.verdict
            origin = {
                "version": name,
                "parent": parent,
                "run": str(run),
                "data_window": None,
                "traffic": None,
                "verdict": None if verdict is None else verdict.headline,
                "approved_by": None,
                "made": _now(),
            }
            export_draft(replace(facts, provenance=(facts.provenance or {}) | origin | dict(provenance)), folder)
        version = read_version(folder)
        if version.provenance["run"] != str(run):
            raise UserError(f"{folder}: already exists, made from {version.provenance['run']}; a version never changes")
        for path in (*folder.rglob("*"), folder):
            path.chmod(path.stat().st_mode & ~0o222)
        if name not in {event["version"] for event in history(drafts)}:
            _append(drafts, name, "published", str(provenance.get("approved_by") or "refresh"))
        return version


def make_current(drafts: Path, name: str, by: str) -> None:
    """Make ``name`` the served version; `current` is replaced atomically. Raises UserError: no such version, or the disk refuses."""
    read_version(drafts / name)
    with locked(drafts / _LOCK), writing(drafts / CURRENT):
        temporary = drafts / f".{CURRENT}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, drafts / CURRENT)
        # A kill between the two steps must not lose the event.
        if [event["version"] for event in history(drafts) if event["event"] == "current"][-1:] != [name]:
            _append(drafts, name, "current", by)


def reject(drafts: Path, name: str, by: str) -> None:
    """Record that a version was tried and taken back, so that a refresh does not wait for it. Raises UserError as `make_current`."""
    read_version(drafts / name)
    with locked(drafts / _LOCK):
        _append(drafts, name, "rejected", by)


def waiting_version(drafts: Path) -> Version | None:
    """The newest version, if it was published from the current one and was neither served nor rejected."""
    versions, current = list_versions(drafts), current_version(drafts)
    told = {event["version"] for event in history(drafts) if event["event"] in ("current", "rejected")}
    if not versions or current is None or versions[-1].name in told or versions[-1].parent != current.name:
        return None
    return versions[-1]


def history(drafts: Path) -> list[dict[str, str]]:
    """Every event {version, event, by, time}, oldest first."""
    path = drafts / HISTORY
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def prune(drafts: Path, keep: int, in_use: Collection[str] = ()) -> list[str]:
    """Remove all but the newest ``keep`` versions, the current one, its parent and those ``in_use``; return the names of the removed."""
    with locked(drafts / _LOCK):
        versions, current = list_versions(drafts), current_version(drafts)
        spared = {version.name for version in versions[max(0, len(versions) - keep) :]} | set(in_use)
        spared |= {current.name, current.parent or ""} if current is not None else set()
        gone = [version for version in versions if version.name not in spared]
        for version in gone:
            _append(drafts, version.name, "pruned", f"keep {keep}")
            # Rename first, so that a partly deleted version is never seen.
            os.replace(version.folder, drafts / f".{version.name}.pruned")
        for folder in drafts.glob(".v*.pruned"):
            remove_read_only(folder)
        return [version.name for version in gone]


def remove_read_only(folder: Path) -> None:
    """Delete a version, or a folder of versions."""
    for path in (folder, *filter(Path.is_dir, folder.rglob("*"))):
        path.chmod(0o755)
    shutil.rmtree(folder)


def next_name(drafts: Path) -> str:
    """The name after the highest that was ever given, including removed versions."""
    given = [path.name for path in drafts.glob("v*")] + [event["version"] for event in history(drafts)]
    return f"v{1 + max((int(name[1:]) for name in given if _NAME.fullmatch(name)), default=0):04d}"


def _append(drafts: Path, name: str, event: Event, by: str) -> None:
    events = [*history(drafts), {"version": name, "event": event, "by": by, "time": _now()}]
    with writing(drafts / HISTORY):
        write_bytes(drafts / HISTORY, "".join(json.dumps(one) + "\n" for one in events).encode())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
