"""Builds the C++ files of this folder with the local compiler when first needed: one library for all models, shapes and dtypes, in a few
seconds. It is kept in `$XDG_CACHE_HOME/understudy` (`~/.cache/understudy`) with its checksum; a damaged file is built again.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from speculative.engine.compiled.layouts import STRUCTS

SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in ("step", "rules", "block"))
HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in ("vector", "step", "product", "rules"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi")
BUILD_SECONDS = 120
MOST_KEPT = 8  # libraries of other versions and processors, 0.1 MB each


class NoLibrary(Exception):
    """The reason why compiled code is not available, in one line."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library. None, after one warning, if it cannot be built or loaded: models then run eagerly."""
    try:
        loaded = ctypes.CDLL(str(_kept_library()))
        sizes = list((ctypes.c_int64 * len(STRUCTS)).in_dll(loaded, "struct_bytes"))
        if sizes != [ctypes.sizeof(struct) for struct in STRUCTS]:
            raise NoLibrary(f"its structs have {sizes} bytes, which is not what layouts.py says")
    # RuntimeError: no home folder.
    except (NoLibrary, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        warnings.warn(f"models run without compiled code and take about three times as long: {error}", stacklevel=2)
        return None
    loaded.call_model.restype = loaded.run_blocks.restype = ctypes.c_int64
    loaded.forget_all.restype = None
    loaded.call_model.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    loaded.run_blocks.argtypes = [ctypes.c_void_p]
    return loaded


def _kept_library() -> Path:
    compiler = _compiler()
    folder = _folder()
    path = folder / f"step-{_key(compiler)}.so"
    if not _is_whole(path):
        _build(compiler, path)
        _forget_old(folder)
    return path


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", ""))
    found = next(filter(None, map(shutil.which, words[:1] or ("g++", "clang++", "c++"))), None)
    if found is None:
        raise NoLibrary(f"no C++ compiler ({' '.join(words) or 'g++, clang++'}) was found: install one, or set CXX")
    return [found, *words[1:]]


def _folder() -> Path:
    """The cache folder. Only this user may write to it, because its files are executed."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "understudy"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid"):
        state = folder.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise NoLibrary(f"{folder} belongs to another user or is writable by others: set XDG_CACHE_HOME")
    return folder


def _key(compiler: list[str]) -> str:
    """Hash of everything that determines the build: source, flags, compiler with the words of `CXX`, processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS).stdout
    cpuinfo = Path("/proc/cpuinfo")
    processor = platform.processor() + platform.machine()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        processor += str(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    code = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    parts = (*code, str(compiler), str(FLAGS), version, processor)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _checksum_of(path: Path) -> Path:
    return path.with_suffix(".checksum")


def _is_whole(path: Path) -> bool:
    """Check the checksum: loading a truncated file would kill the process."""
    try:
        told = _checksum_of(path).read_text().strip()
        return told == hashlib.blake2b(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _build(compiler: list[str], path: Path) -> None:
    """Build under a temporary name, then rename: concurrent builds replace each other's equal files."""
    print("understudy: compiling the CPU code, once for this machine (takes a few seconds)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        built = Path(folder) / path.name
        message = ""
        for threads in (("-fopenmp",), ()):  # without OpenMP, build for one thread
            command = [*compiler, *FLAGS, *threads, *map(str, SOURCES), "-o", str(built)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise NoLibrary(f"{compiler[0]} did not finish within {BUILD_SECONDS} s") from error
            if done.returncode == 0:
                break
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            message = message or next(iter(errors), f"status {done.returncode}")
        else:
            raise NoLibrary(f"{compiler[0]} failed: {message}")
        checksum = Path(folder) / "checksum"
        checksum.write_text(hashlib.blake2b(built.read_bytes()).hexdigest())
        built.replace(path)
        checksum.replace(_checksum_of(path))


def _forget_old(folder: Path) -> None:
    """Delete old versions and leftovers of killed builds. A process that has loaded a library keeps it."""
    for left in folder.glob("building-*"):
        if time.time() - left.stat().st_mtime > BUILD_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    kept = sorted(folder.glob("step-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[MOST_KEPT:]:
        path.unlink(missing_ok=True)
        _checksum_of(path).unlink(missing_ok=True)
