"""For `make check`: known vulnerabilities and licences of what we depend on. Where no index answers, one line says what was left out.

Vulnerabilities are looked for in the versions of constraints.txt. Those have no local part: no advisory knows
2.13.0+cpu, torch's wheel for CPUs.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT, TOOLS = HERE.parents[1], HERE / "audit.txt"
ENVIRONMENT = ROOT / ".venv-audit"
SOCKET_SECONDS, MOST_SECONDS = 10, 120
EXTRAS = ("", "endpoint", "gateway", "lowbit", "quantize")  # that users install
# Permissive ones, and copyleft that ends at its own files (MPL), as packages write them.
ALLOWED = {
    "Apache-2.0", "Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache-2.0 WITH LLVM-exception",
    "MIT", "MIT License", "MIT-CMU", "HPND", "ISC", "ISC License (ISCL)", "0BSD", "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause",
    "3-Clause BSD License", "PSF-2.0", "Python Software Foundation License", "CNRI-Python", "Zlib", "BSL-1.0", "CC0-1.0",
    "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)",
}  # fmt: skip
IN_FILES_ONLY = {"torchao": "BSD-3-Clause"}  # Their metadata name no licence, their LICENSE files do.


def main() -> int:
    """1 when something is wrong; 0 also when nothing can be known."""
    if not have_tools():
        print("audit: left out, for no package index answers: neither vulnerabilities nor licences were looked at")
        return 0
    names = needed("understudy", EXTRAS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "venv").symlink_to(sys.prefix)  # pip-licenses finds nothing below a folder with a blank
        python = str(Path(folder) / "venv" / "bin" / "python")
        found = said_by("pip-licenses", "--python", python, "--format", "json", "--packages", *sorted(names)) or []
    faults = [f"{name}: licence {text}, which tests/house/audit.py does not allow" for name, text in not_allowed(found)]
    pins, how = (
        str(ROOT / "constraints.txt"),
        ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"),
    )
    audited = said_by("pip-audit", "-r", pins, *how, "--timeout", str(SOCKET_SECONDS)) or {"dependencies": []}
    looked_at = [one for one in audited["dependencies"] if "vulns" in one]
    faults += vulnerable(looked_at, mentioned((HERE / "advisories.txt").read_text(encoding="utf-8")))
    told = (
        f"{len(looked_at)} of {len(audited['dependencies'])} pinned versions"
        if looked_at
        else "left out, for no index answers for them"
    )
    print(
        *faults,
        f"audit: licences of {len(found)} packages; known vulnerabilities: {told}; faults: {len(faults)}",
        sep="\n",
    )
    return 1 if faults else 0


def have_tools() -> bool:
    """Whether the tools are installed, now or before."""
    ready = ENVIRONMENT / "ready"
    if ready.exists() and ready.read_bytes() == TOOLS.read_bytes():
        return True
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        ENVIRONMENT / "bin" / "python",
        "install",
        "-q",
        "--timeout",
        str(SOCKET_SECONDS),
        "--retries",
        "0",
        "-r",
        TOOLS,
    ]
    try:
        venv.create(ENVIRONMENT, clear=True)
        subprocess.run(install, check=True, capture_output=True, timeout=MOST_SECONDS)
    except (subprocess.SubprocessError, OSError):
        return False
    ready.write_bytes(TOOLS.read_bytes())
    return True


def said_by(tool: str, *words: str) -> Any:
    """The JSON that a tool prints; None when it fails or takes too long."""
    try:
        done = subprocess.run([ENVIRONMENT / "bin" / tool, *words], capture_output=True, timeout=MOST_SECONDS)
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return None


def needed(name: str, extras: Iterable[str]) -> set[str]:
    """The installed packages that one needs, itself among them, by their requirements' names."""
    names, waiting = set[str](), [(name, frozenset(extras))]
    seen = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        try:
            told = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        names.add(name)
        for one in map(Requirement, told):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted):
                step = one.name, frozenset(one.extras) | {""}
                waiting += [step] if step not in seen else []
                seen.add(step)
    return names


def not_allowed(found: Iterable[Mapping[str, str]]) -> list[tuple[str, str]]:
    """(package, licence) where a part of the licence that binds us is not allowed; found: as pip-licenses says it."""
    told = [(one["Name"], IN_FILES_ONLY.get(one["Name"], one["License"])) for one in found]
    return [
        (name, text)
        for name, text in told
        if not all(any(one in ALLOWED for one in part.split(" OR ")) for part in re.split(r"; | AND ", text))
    ]


def mentioned(text: str) -> set[str]:
    """The ids of a list of advisories; each has a reason."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(len(line) == 2 for line in lines), "advisories.txt: an id without a reason"
    return {name for name, _ in lines}


def vulnerable(looked_at: Iterable[Mapping[str, Any]], known: set[str]) -> list[str]:
    """A line for each vulnerability but the known ones; looked_at: as pip-audit says it."""
    return [
        f"{one['name']} {one['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no version yet'}; take that "
        "version, or say in tests/house/advisories.txt why not"
        for one in looked_at
        for fault in one["vulns"]
        if known.isdisjoint({fault["id"], *fault.get("aliases", ())})
    ]


if __name__ == "__main__":
    sys.exit(main())
