"""The list of a log's exports, and removal of rows from them.

exports.json of a log directory: [{folder, made, rows, uses: [runs that hold its rows]}]. Rows have a keyed hash of their request's id,
so that they are found without a list of ids.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.files import MANIFEST, read_manifest, write_bytes, writing
from data.responses.rendered import StoredPrompts
from data.responses.store import Row, Store
from distill.live.traffic.record import keyed_hash
from distill.live.traffic.retention import write_lock
from speculative.errors import UserError

EXPORTS, EXPORT_SHARD = "exports.json", 512
PROMPT_FILES, RESPONSES = ("prompts/train.arrow", "prompts/heldout.arrow"), "responses/train"


@dataclass(frozen=True)
class Export:
    """One export. made: Unix seconds. uses: folders of runs that hold copies of its rows."""

    folder: str
    made: float
    rows: int
    uses: list[str] = field(default_factory=list)


def partial_of(folder: Path) -> Path:
    """The path of an export while it is written."""
    return folder.with_name(f".{folder.name}.partial")


def row_id(salt: bytes, record_id: str) -> str:
    """The id of an exported row, which replaces its request's id."""
    return keyed_hash(salt, "row", record_id)[:16]


def list_exports(directory: Path) -> list[Export]:
    """All exports of a log, oldest first. Raises UserError if the list is damaged."""
    path = directory / EXPORTS
    with contextlib.suppress(FileNotFoundError):
        try:
            return TypeAdapter(list[Export]).validate_json(path.read_bytes(), strict=True)
        except ValueError as error:
            raise UserError(f"{path}: damaged ({error}); repair it: it lists where text was exported") from error
    return []


def note_export(directory: Path, folder: Path, made: float, rows: int) -> None:
    """Record that a folder holds rows of a log. Raises UserError if the list is damaged or cannot be written."""
    _write(directory, folder, Export(str(folder.resolve()), made, rows))


def note_use(folder: Path, run: Path) -> None:
    """Record in an export's log that a run holds copies of its rows. Raises UserError: no export in ``folder``; the list cannot be
    written.
    """
    try:
        log = Path(read_manifest(folder / "prompts")["traffic"]["log"])
    except KeyError as error:
        raise UserError(f"{folder}: not what `understudy traffic export` writes") from error
    for own in [export for export in list_exports(log) if export.folder == str(folder.resolve())]:
        _write(log, folder, replace(own, uses=sorted({*own.uses, str(run.resolve())})))


def drop_export(directory: Path, folder: Path) -> None:
    """Delete an export that no run uses, and its entry in the list. Raises UserError: the list is damaged, or cannot be written."""
    shutil.rmtree(folder, ignore_errors=True)
    _write(directory, folder, None)


def _write(directory: Path, folder: Path, entry: Export | None) -> None:
    """Replace the entry of a folder; None removes it."""
    path = directory / EXPORTS
    with writing(path), write_lock(directory):
        kept = [export for export in list_exports(directory) if export.folder != str(folder.resolve())]
        kept += [] if entry is None else [entry]
        if kept:
            write_bytes(path, (json.dumps(list(map(asdict, kept)), indent=2) + "\n").encode(), 0o600)
        else:
            path.unlink(missing_ok=True)


def write_rows(store: Store, manifest: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write rows into an empty store."""
    store.open(manifest)
    for number, start in enumerate(range(0, len(rows), EXPORT_SHARD)):
        store.write_shard(number, rows[start : start + EXPORT_SHARD])


def forget_exported(folder: Path, row_ids: set[str]) -> int:
    """Remove rows from an existing export; return the number of prompts removed. Raises UserError: a file is damaged, or cannot be
    written.
    """
    found = 0
    for path in (folder / name for name in PROMPT_FILES):
        if not path.exists():
            continue
        prompts = StoredPrompts(path)
        chosen_N = np.array([one not in row_ids for one in prompts.column("prompt_id").to_pylist()], dtype=bool)
        if not chosen_N.all():
            found += int((~chosen_N).sum())
            prompts.write(path, chosen_N)
    store, rewritten = Store(folder / RESPONSES), Store((folder / RESPONSES).with_name(".rewritten"))
    if not store.folder.exists() and rewritten.folder.exists():  # killed between the last two steps
        rewritten.folder.rename(store.folder)
    if (store.folder / MANIFEST).exists():
        rows = store.read()
        kept = [row for row in rows if row.prompt_id not in row_ids]
        if len(kept) < len(rows):
            with writing(store.folder):
                shutil.rmtree(rewritten.folder, ignore_errors=True)
                write_rows(rewritten, store.manifest(), kept)
                shutil.rmtree(store.folder)
                rewritten.folder.rename(store.folder)
    return found
