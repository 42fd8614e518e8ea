"""Files that are there whole or not at all, and manifests that say what a folder of them was made from."""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speculative.errors import UserError

MANIFEST = "manifest.json"
CHECKSUM = "sha256"  # the manifest's key for the checksum of its other keys

Manifest = Mapping[str, Any]  # JSON: whatever a folder was made from, under names that only its maker knows


@contextlib.contextmanager
def writing(place: str | Path, left: str = "") -> Iterator[None]:
    """A disk that refuses is a UserError that names the place, and what is left of it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({error.strerror or error}){left}") from error


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Holds the lock of a file; the system releases it when its process dies. busy: what to say when another holds it; empty: wait for it.

    Raises:
        UserError: another holds it, or the disk refuses.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise UserError(busy) from error
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under, then renamed; a failed write leaves no trace."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, mode: int = 0o666, synced: bool = False) -> None:
    """Writes a file, whole or not at all. mode: less what the umask takes. synced: so that it survives a loss of power."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    with replacing(path) as temporary, open(os.open(temporary, flags, mode), "wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    if synced:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Returns when the names of its files are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: int, content: bytes | memoryview) -> None:
    """All of the content into an open file: a single write may take less."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def write_json(path: Path, value: Any) -> None:
    """Writes JSON under a temporary name, then renames."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def open_modes(folder: Path) -> None:
    """Gives a folder and all in it the modes that the umask gives: safetensors and mkdtemp make theirs private."""
    trial = folder / ".mode"
    trial.mkdir()
    mode = stat.S_IMODE(trial.stat().st_mode)
    trial.rmdir()
    for path in (folder, *folder.rglob("*")):
        # Some network disks have no modes to give.
        with contextlib.suppress(PermissionError):
            path.chmod(mode if path.is_dir() else mode & 0o666)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest with the checksum of its content."""
    write_json(folder / MANIFEST, {**manifest, CHECKSUM: _digest(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store, its checksum checked and left out.

    Raises:
        UserError: missing or damaged.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        checksum = found.pop(CHECKSUM, None)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a readable manifest; delete the folder to make it again") from error
    # One without a checksum is of another format: comparing its keys says so more plainly.
    if checksum is not None and checksum != _digest(found):
        raise UserError(f"{path}: damaged, its checksum is another; delete the folder to make it again")
    return found


def require_manifest(folder: Path, wanted: Manifest, remedy: str) -> None:
    """Raises UserError when a folder's manifest differs: the first differing key and both values are named, and the remedy."""
    if said := other_key(read_manifest(folder), json.loads(json.dumps(wanted))):
        raise UserError(f"{folder}: {said}; {remedy}")


def other_key(found: Manifest, wanted: Manifest) -> str:
    """Says the first key under which two manifests differ, and both values; empty when they are the same."""
    # Of another format the other keys are others too.
    for key in sorted(set(wanted) | set(found), key=lambda key: (key != "format", key)):
        if wanted.get(key) != found.get(key):
            return f"made with another {key} ({_short(found.get(key))}, now {_short(wanted.get(key))})"
    return ""


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.stem.replace('shard', 'checksum')}.sha256")


def _checksum_line(path: Path, digest: str) -> bytes:
    return f"{digest}  {path.name}\n".encode()


def _digest(manifest: Manifest) -> str:
    """SHA-256 of the content of a manifest, whatever the order of its keys."""
    content = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
