"""A row of the board is read from a finished run, or from what bench/demo.py stored; the board shows it so."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_modules import ROOT, bench

from distill.run.verdict_record import Verdict
from speculative.errors import UserError


def stored_demo() -> tuple[Verdict, dict[str, Any], float]:
    stored = json.loads((ROOT / "bench/results/demo_cpu.json").read_text())
    return Verdict.model_validate(stored["verdict"]), stored["machine"], stored["seconds"] / 60


def test_the_board_has_the_row_of_the_stored_demo() -> None:
    row = bench("yardstick").row_of(*stored_demo())
    assert row in (ROOT / "docs/studies.md").read_text().splitlines()


def test_the_row_of_a_run_says_where_it_comes_from(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("yardstick").main(tiny_run)
    head, _, row = capsys.readouterr().out.strip().splitlines()
    names, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row))
    found = dict(zip(names, cells, strict=True))
    origin = json.loads((tiny_run / "best/provenance.json").read_text())
    verdict = json.loads((tiny_run / "verdict.json").read_text())
    draft = next(line for line in verdict["measured"] if line["way"] == "draft" and line.get("speed_up"))
    assert found["commit"].rstrip("+") == origin["commit"][:8]
    assert found["alpha"].startswith(f"{draft['alpha']:.3f} [")
    assert found["speed-up"].startswith(f"{draft['speed_up']:.2f}x")
    stages = sum(seconds for stage, seconds in verdict["seconds"].items() if "/" not in stage)
    assert found["minutes"] == f"{stages / 60:.0f}"


def test_a_run_without_a_timed_draft_has_no_row() -> None:
    verdict, machine, minutes = stored_demo()
    untimed = verdict.model_copy(update={"measured": [row for row in verdict.measured if row.speed_up is None]})
    with pytest.raises(UserError, match="the verdict timed no draft"):
        bench("yardstick").row_of(untimed, machine, minutes)
