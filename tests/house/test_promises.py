"""The table of promises in docs/gateway.md: each row names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## What each network-facing part promises"
PARTS = ("requests", "answers", "/health", "/metrics", "traffic log", "clients of engines", "serve")


def rows() -> list[list[str]]:
    section = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    table = section.lstrip().partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_each_part_that_faces_the_network_names_tests_that_exist() -> None:
    found = rows()
    assert all(any(part in row[0] for row in found) for part in PARTS)
    for part, *cells, tests in found:
        assert len(cells) == 5, part
        assert all(cells), part
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named, part
        assert len(named) == tests.count("`") // 2, part
        for file, test in named:
            (path,) = (ROOT / "tests").rglob(file)
            assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"
