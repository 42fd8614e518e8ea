"""The compiled hooks, loaded by `load`, under `pytest -m device` by the import of this file: before torch, which asks for hooks once."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("hooks.cpp")
FOLDER = Path(__file__).resolve().parents[3] / ".pytest_cache" / "pretend-cuda"


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line of pytest selects the tests of the device: `-m device`."""
    return ("-m", "device") in itertools.pairwise(arguments)


def why_not() -> str | None:
    """What stands against the device on this machine; None: nothing."""
    if sys.platform != "linux":
        return "the pretend device is made for Linux"
    if shutil.which("g++") is None:
        return "the pretend device needs a C++ compiler (g++)"
    if "+cpu" not in importlib.metadata.version("torch"):
        return "the pretend device needs the CPU build of torch"
    return None


def load() -> None:
    """Hooks into this process, torch's library with them; before anything imports torch."""
    assert "torch" not in sys.modules, "the pretend device comes before torch"
    ctypes.CDLL(str(_torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled()))
    sys.modules["triton"] = None  # type: ignore[assignment]  # Its kernels would ask for a real device.


def _compiled() -> Path:
    """Made once for a torch and a source, in about two seconds."""
    source = SOURCE.read_bytes() + importlib.metadata.version("torch").encode()
    library = FOLDER / f"hooks-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        torch = _torch_folder()
        partial = library.with_suffix(f".{os.getpid()}.tmp")
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(partial), *libraries], check=True, timeout=120)
        partial.replace(library)
    return library


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


LOADED = asked_for(sys.argv) and why_not() is None
if LOADED:
    load()
