"""The example that shows the packages without the programs."""

import re
from pathlib import Path

import pytest
from bench_modules import ROOT, bench


def test_the_example_distils_measures_and_ends_with_a_verdict(
    tiny_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = bench("../examples/loop")
    # A tiny target has no draft that is faster; the timed part is to run all the same.
    monkeypatch.setattr(example, "best_gamma", lambda taus, costs: (2, 1.1))
    example.main(
        target=str(tiny_target),
        prompts=48,
        heldout_prompts=16,
        max_prompt_tokens=60,
        max_tokens=16,
        steps=80,
        batch_size=8,
        gamma=2,
    )
    printed = capsys.readouterr().out
    before, after = (float(value) for value in re.findall(r"replay: alpha ([.\d]+)", printed))
    assert after > before + 0.02, "the student learnt nothing"
    predicted = float(re.search(r"gamma 2, tau ([.\d]+)", printed).group(1))
    live, low, high = (float(value) for value in re.search(r"live: tau (\S+) \[(\S+), (\S+)\]", printed).groups())
    assert low - 0.3 < predicted < high + 0.3, f"replay says {predicted}, live decoding {live}"
    assert re.search(r"verdict: alpha \S+; \S+x \[\S+, \S+\]: the draft (pays off|slows|may or may not)", printed)


def test_the_example_is_read_in_minutes() -> None:
    assert len((ROOT / "examples/loop.py").read_text(encoding="utf-8").splitlines()) <= 200
