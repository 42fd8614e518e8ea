"""What README says is true: the map, the commands, the pages that are generated."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from reference_pages import PAGES
from typer.testing import CliRunner

from distill.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run `python tests/support/reference_pages.py`"
    assert not re.search(r"\|\s*\|$", page, flags=re.M), "every key has its meaning"


def test_the_map_has_every_package() -> None:
    page_map = README.split("## Map")[1].split("\n## ")[0]
    packages = ("distill", "data", "speculative")
    folders = {path.parent.name for package in packages for path in (ROOT / package).glob("*/__init__.py")}
    assert set(re.findall(r"\b([a-z]+)/", page_map)) == folders | {
        *packages,
        "configs",
        "bench",
        "docs",
        "tests",
        "examples",
    }


def test_every_file_that_readme_and_docs_name_is_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        named = re.findall(
            r"\b((?:distill|speculative|data|tests|bench|configs)/[\w/.-]+\.(?:py|yaml|jsonl?)\b)", page.read_text()
        )
        assert [name for name in named if not (ROOT / name).exists()] == [], page.name


def test_every_understudy_command_of_the_readme_exists() -> None:
    help_text = CliRunner().invoke(app, ["--help"]).output
    for command in set(re.findall(r"understudy ([a-z][a-z-]+)", README)):
        assert command in help_text, command


def test_the_test_command_is_the_one_ci_runs() -> None:
    assert "make test" in README
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "läufe/understudy" in script, "the suite runs in a folder of this name, below one with a blank and an umlaut"
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False).returncode == 0


def test_nothing_is_left_to_fill_in_and_every_picture_is_there() -> None:
    assert "@@" not in README
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_decoders_page_shows_code_that_runs(tiny_run: Path, tiny_target: Path) -> None:
    page = (ROOT / "docs" / "decoder.md").read_text(encoding="utf-8")
    code = page.split("```python")[1].split("```")[0]
    assert "runs/demo/export" in code
    code = code.replace("distill/embedded", str(tiny_target)).replace("max_tokens=128", "max_tokens=8")
    names: dict[str, Any] = {}
    exec(code.replace("runs/demo/export", str(tiny_run / "best" / "student")), names)
    assert [len(response.response_ids) for response in names["responses"]]
    assert names["event"].finish_reason is not None
    assert "@@" not in page
