"""Atomic writes of files, and manifests that record what a folder was made from."""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from speculative.errors import UserError
from speculative.measure.record import Record

MANIFEST = "manifest.json"
CHECKSUM = "sha256"  # the manifest's key for the checksum of its other keys

Manifest = Mapping[str, Any]  # JSON: what a folder was made from; the keys are chosen by its writer.


@contextlib.contextmanager
def writing(place: str | Path, left: str = "") -> Iterator[None]:
    """Turn an OSError into a UserError that starts with ``place`` and ends with ``left``, which says what is kept."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({error.strerror or error}){left}") from error


def locked(path: Path, busy: str = "", *, by_process: bool = False) -> AcquireReturnProxy:
    """Hold the lock of a file until the end of a `with` or of the process. If it is held: wait, or UserError ``busy``.

    ``by_process``: the process may hold it several times.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path.resolve(), 0 if busy else -1, thread_local=False, is_singleton=by_process).acquire()
    except Timeout as error:
        raise UserError(busy) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to, then rename it; after a failed write nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, mode: int = 0o666, synced: bool = False) -> None:
    """Write a file atomically. mode: before the umask. synced: also flush it to the disk, to survive a loss of power."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    with replacing(path) as temporary, open(os.open(temporary, flags, mode), "wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    if synced:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush the names of a directory's files to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of the content into an open file; a single write may take less."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def open_modes(folder: Path) -> None:
    """Set the modes of a folder and its contents to what the umask gives; safetensors and mkdtemp make private files."""
    trial = folder / ".mode"
    trial.mkdir()
    mode = stat.S_IMODE(trial.stat().st_mode)
    trial.rmdir()
    for path in (folder, *folder.rglob("*")):
        # Some network disks have no modes.
        with contextlib.suppress(PermissionError):
            path.chmod(mode if path.is_dir() else mode & 0o666)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with the checksum of its content."""
    write_json(folder / MANIFEST, {**manifest, CHECKSUM: digest_of(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store, without its checksum, which is checked; UserError if it is missing or damaged."""
    path = folder / MANIFEST
    content = Record.read(path, "delete the folder to make it again").record()
    checksum = content.pop(CHECKSUM, None)
    # A manifest without a checksum has another format; comparing the keys gives a clearer message.
    if checksum is not None and checksum != digest_of(content):
        raise UserError(f"{path}: damaged, its checksum does not match; delete the folder to make it again")
    return content


def other_key(found: Manifest, wanted: Manifest) -> str:
    """The first key that differs in two manifests, with both values, as a phrase; empty if they are equal."""
    # `format` first: with another format, other keys differ too.
    for key in sorted(set(wanted) | set(found), key=lambda key: (key != "format", key)):
        if wanted.get(key) != found.get(key):
            return f"made with another {key} ({_short(found.get(key))}, now {_short(wanted.get(key))})"
    return ""


def digest_of(manifest: Manifest) -> str:
    """SHA-256 of the content of a manifest; the order of keys does not matter."""
    content = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
