"""The pictures of docs/ show what the present code draws from the stored results."""

import json
import shutil
from pathlib import Path

import pytest
from bench_modules import ROOT, bench
from PIL import Image

pictures = bench("pictures")


def stored() -> dict:
    return json.loads(pictures.DEMO.read_text())


def test_every_picture_was_drawn_from_the_present_code_and_results() -> None:
    sources = pictures.sources_of(stored())
    assert {path.name for path in (ROOT / "docs").rglob("*.png")} == sources.keys()
    for name, digest in sources.items():
        with Image.open(ROOT / "docs" / name) as image:
            assert image.text[pictures.SOURCE] == digest, f"docs/{name} is older: run `python bench/pictures.py`"


def test_another_figure_or_another_look_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, other = pictures.sources_of(stored()), stored()
    other["verdict"]["checkpoints"][1]["alpha"] += 0.01
    assert pictures.sources_of(other)["demo.png"] != before["demo.png"]
    other = stored()
    other["verdict"]["headline"] = "No gain."
    assert pictures.sources_of(other)["report.png"] != before["report.png"]
    render = pictures.render_page
    monkeypatch.setattr(pictures, "render_page", lambda result: render(result).replace("<h1", "<h1 class=small"))
    assert pictures.sources_of(stored())["report.png"] != before["report.png"]


@pytest.mark.skipif(not any(map(shutil.which, pictures.BROWSERS)), reason="needs chromium (apt install chromium)")
def test_the_command_draws_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    pictures.main()
    for name, digest in pictures.sources_of(stored()).items():
        with Image.open(tmp_path / name) as image:
            assert image.text[pictures.SOURCE] == digest
            assert image.width >= 1000
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 100, "an empty page has few colours"
