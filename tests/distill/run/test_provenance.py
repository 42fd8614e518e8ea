"""What a run says of the code that made it, and what it must never say: it is published with the draft."""

import hashlib
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distill.run import provenance

PASSWORD = "hunter2-of-the-lab"


def repository(folder: Path) -> str:
    """A git repository with a password in its uncommitted changes; the commit."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    folder.mkdir(parents=True, exist_ok=True)
    git("init", "-q")
    (folder / ".gitignore").write_text(".venv\n", encoding="utf-8")
    (folder / "settings.py").write_text("", encoding="utf-8")
    git("add", ".")
    git("commit", "-qm", "start")
    (folder / "settings.py").write_text(f"password = '{PASSWORD}'\n", encoding="utf-8")
    return git("rev-parse", "HEAD")


def installed_at(home: Path) -> Any:
    """The module as a package whose folder lies in ``home``."""
    path = home / "distill" / "run" / "provenance.py"
    path.parent.mkdir(parents=True)
    path.write_text(Path(provenance.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("installed_provenance", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", [".venv/lib/python3.11/site-packages", "vendored/understudy"])
def test_the_repository_around_us_is_nobodys_business(tmp_path: Path, place: str) -> None:
    repository(tmp_path / "myproject")
    facts = installed_at(tmp_path / "myproject" / place).describe_run(0)
    assert (facts["commit"], facts["uncommitted_changes"]) == (None, None)


def test_uncommitted_changes_of_ours_are_a_hash(tmp_path: Path) -> None:
    commit = repository(tmp_path)
    facts = installed_at(tmp_path).describe_run(0)
    difference = subprocess.run(["git", "diff", "HEAD"], cwd=tmp_path, check=True, capture_output=True).stdout
    assert PASSWORD in difference.decode()
    assert facts["commit"] == commit
    assert facts["uncommitted_changes"] == "sha256 " + hashlib.sha256(difference.strip()).hexdigest()
    assert PASSWORD not in json.dumps(facts)
