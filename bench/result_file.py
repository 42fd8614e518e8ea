"""JSON result files of the scripts in bench/: written atomically, with the command and the commit as the first keys."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.files import write_json
from distill.run.provenance import describe_run

ROOT = Path(__file__).resolve().parents[1]


def command_line(earlier: str = "") -> str:
    """This process's command as it is typed at the repository's root. earlier: a command whose file this one adds to.

    A file or folder outside the repository is reduced to its last name, because the result is published.
    """
    words = [_published(Path(word)) if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", _published(Path(sys.argv[0]).resolve()), *words])
    return command if earlier in ("", command) else f"{earlier} && {command}"


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """Write a result atomically. Existing keys `command` and `commit` are kept, for results of a parent process."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"command": command_line(), "commit": describe_run(0)["commit"]} | dict(result))


def _published(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
