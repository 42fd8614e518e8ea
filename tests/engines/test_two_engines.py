"""`understudy compare URL URL RUN` on two engines that serve one pair: OpenVINO GenAI and llama.cpp. `make engines` builds them."""

import io
import json
from pathlib import Path

import pytest
from engine_process import LLAMA_ALONE, LLAMA_EXACT, ROOT, serving
from rich.console import Console

from distill.commands.compare.compare import compare
from distill.commands.options import CompareOptions
from distill.config.layout import EXPORT

BUILT = [ROOT / f".venv-{name}" / "ready" for name in ("openvino", "llamacpp")]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(340),
    pytest.mark.skipif(
        not all(one.exists() for one in BUILT), reason="needs OpenVINO GenAI and llama.cpp: `make engines`"
    ),
]
GAMMA = 3


def test_the_pair_is_converted(greedy: Path) -> None:
    """By itself, since it takes as long as what follows."""
    assert (greedy / f"{EXPORT}-openvino").is_dir()


def test_one_draft_in_two_engines(greedy: Path, tmp_path: Path) -> None:
    out, console = tmp_path / "out.json", Console(file=io.StringIO(), width=200)
    words = ["--log", str(tmp_path / "openvino.log"), "--engine", "openvino", "--", "--gamma", str(GAMMA)]
    more = ["--log", str(tmp_path / "llama.log"), "--engine", "llama.cpp", "--"]
    more += ["--spec-draft-n-max", str(GAMMA), *LLAMA_ALONE, *LLAMA_EXACT]
    with serving(greedy, words, "OpenVINO GenAI", {}) as one, serving(greedy, more, "llama.cpp", {}) as two:
        asked = CompareOptions([one.url, two.url, str(greedy)], rule="greedy", gamma=GAMMA, out=out)
        assert compare(asked, console) == 0
    found = json.loads(out.read_text())
    first, second, ours = found["measured"]
    assert first["prompts"] == second["prompts"] == ours["prompts"] > 30
    assert (first["gamma"], second["gamma"]) == (GAMMA, GAMMA)
    assert min(first["tokens_per_second"], second["tokens_per_second"]) > 0
    other, replayed = found["differences"]
    # At 32 bits and temperature 0 nothing differs but texts behind a near-tie.
    for gain in (other["tau"], replayed["tau"]):
        assert gain["gain"] == pytest.approx(0, abs=0.02 * first["tau"])
    assert other["tokens_per_second"] is not None
    assert f"{two.url} compared with {one.url}: tau" in console.file.getvalue()  # type: ignore[attr-defined]
