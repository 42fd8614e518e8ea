"""How large the project may be. Whoever needs more raises a number here and says in the commit what the lines are for."""

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT, CODE = ("distill", "data", "speculative"), (".py", ".cpp", ".h", ".j2", ".js", ".css")
# Words that say what happened to a thing and not what it is.
PARTICIPLES = {"found", "own", "asked", "told", "said", "kept", "known", "given", "made", "one"}
LONGEST_LINE = 140


def files(folders: Iterable[str], endings: tuple[str, ...]) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings)


def lines(folders: Iterable[str], endings: tuple[str, ...]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files(folders, endings))


def keys() -> int:
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    return len(set(re.findall(r"^\| \**`([a-z_.0-9]+)`", page, re.M)))


def options() -> int:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8").splitlines()
    return len([line for line in page if re.match(r"^\* `-", line) and "`--help`" not in line])


def commands() -> int:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    return len(re.findall(r"^\* `[a-z][a-z-]*`:", page.split("## ")[0], re.M))


def long_participles(source: str) -> list[tuple[str, int]]:
    """(word, first line) of each of PARTICIPLES that is a name in a function for more than three lines."""
    names: list[tuple[str, int]] = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        at: dict[str, list[int]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in PARTICIPLES:
                at.setdefault(node.id, []).append(node.lineno)
        names += [(word, min(numbers)) for word, numbers in at.items() if max(numbers) - min(numbers) > 3]
    return names


def participles() -> int:
    return sum(len(long_participles(path.read_text(encoding="utf-8"))) for path in files(PRODUCT, (".py",)))


def unformatted() -> int:
    sources = (path.read_text(encoding="utf-8") for path in files((*PRODUCT, "tests", "bench", "examples"), (".py",)))
    return sum(len(re.findall(r"# fmt: skip$", source, re.M)) for source in sources)


# What is counted, the number on 2026-11-30, and what the work in hand may add. Whoever finishes it sets the first to the new number.
MOST: dict[str, tuple[Callable[[], int], int, int]] = {
    "product lines": (lambda: lines(PRODUCT, CODE), 47_629, 60),
    "test lines": (lambda: lines(["tests"], (".py",)), 46_940, 60),
    "bench lines": (lambda: lines(["bench"], (".py",)), 8_391, 40),
    "commands": (commands, 20, 0),
    "options": (options, 151, 0),
    "config keys": (keys, 98, 0),
    "participles that live long": (participles, 5, 0),
    "`# fmt: skip`": (unformatted, 17, 0),
}


@pytest.mark.parametrize("what", MOST)
def test_the_project_does_not_grow_unnoticed(what: str) -> None:
    count, number, allowed = MOST[what]
    assert count() <= number + allowed, f"more {what} than tests/house/test_weight.py allows"


def test_no_line_is_too_wide_for_a_screen() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files((*PRODUCT, "tests", "bench", "examples"), (".py",))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert wide == []


def test_the_reader_of_names_sees_participles() -> None:
    source = "def f():\n    found = 1\n\n\n\n    return found\n\n\ndef g():\n    said = 1\n    return said\n"
    assert long_participles(source) == [("found", 2)]
