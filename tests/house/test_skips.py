"""Which tests may be skipped: those that need a GPU, a browser or an engine that `make engines` builds; never for a missing package."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# `gpu` and `device` are skipped by conftest; a browser is no Python package; engines live in an environment of their own.
MAY_SKIP = {
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
