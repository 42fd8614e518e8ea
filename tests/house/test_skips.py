"""Which tests may be skipped: those that need a GPU, a browser or an engine that `make engines` builds; never for a missing package."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# `gpu` and `device` are skipped by conftest; a browser is no Python package; engines live in an environment of their own.
MAY_SKIP = {
    "bench/test_smollm2.py",  # the real tokenizer, if `make smollm2` has fetched it
    "bench/test_bench_pictures.py",
    "conftest.py",
    "distill/report/test_report_browser.py",
    "engines/test_engine_loop.py",
    "speculative/engine/test_products.py",
    "support/engine_process.py",
}
SKIPS = {"skip", "skipif", "importorskip", "xfail"}


def skips(source: str) -> list[int]:
    """The lines on which a test is skipped, or allowed to fail."""
    nodes = ast.walk(ast.parse(source)) if any(name in source for name in SKIPS) else ()  # parsing takes seconds
    return sorted(node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in SKIPS)


@pytest.mark.parametrize(
    "call", ["pytest.mark.skipif(True, reason='')", "pytest.skip('')", "pytest.importorskip('trl')"]
)
def test_the_reader_sees_skips(call: str) -> None:
    assert skips(call) == [1]


def test_no_test_is_skipped_for_a_missing_package() -> None:
    found = {
        path.relative_to(TESTS).as_posix(): lines
        for path in TESTS.rglob("*.py")
        if (lines := skips(path.read_text(encoding="utf-8")))
    }
    assert found.keys() <= MAY_SKIP, found


@pytest.mark.parametrize("mark", ["device", "engine", "loop", "ranks", "real"])
def test_a_mark_that_runs_by_itself_stands_in_the_files_it_is_looked_for_in(mark: str) -> None:
    """tests/conftest.py reads for it before it imports: a mark that a helper gives would leave its tests out."""
    assert any(
        f"mark.{mark}" in path.read_text(encoding="utf-8")
        for path in TESTS.rglob("test_*.py")
        if path.name != Path(__file__).name
    )


def test_every_test_of_an_engine_is_marked_in_its_file() -> None:
    for path in (TESTS / "engines").glob("test_*.py"):
        assert re.search(r"^pytestmark = \[pytest\.mark\.(engine|loop)\b", path.read_text(encoding="utf-8"), re.M), path
