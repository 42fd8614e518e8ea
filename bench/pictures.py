"""Draw the pictures of docs/ from the demo's stored result, the report in headless Chromium.

    python bench/pictures.py        # bench/results/demo_cpu.json -> docs/demo.png, docs/report.png

Each PNG names under `SOURCE` a digest of what it was drawn from, the stored figures and the code; a test compares it with the present.
"""

from distill.faults import run_script

import hashlib
import inspect
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from data.files import replacing
from distill.report import figures
from distill.report.page import render_page
from distill.run.result import RESULT_FORMAT, Result
from distill.run.verdict_record import Verdict
from result_file import ROOT
from speculative.errors import UserError

DOCS, DEMO = ROOT / "docs", ROOT / "bench/results/demo_cpu.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = "1000,1500"  # pixels
SOURCE = "drawn from"
# Matplotlib draws the same figure in other bytes from version to version.
FIGURES = re.compile(r"data:image/[^\"')]+")


def demo_report(stored: dict[str, Any]) -> str:
    """The page of the demo's verdict, as `understudy show --page` writes it; what only a run's folder has is left out."""
    verdict, machine = Verdict.model_validate(stored["verdict"]), stored["machine"]
    version = machine["versions"]["understudy"]
    facts = {"format": RESULT_FORMAT, "version": version, "kind": "run", "name": "demo", "provenance": machine}
    return render_page(Result.model_validate(facts | {"verdict": verdict}))


def sources_of(stored: dict[str, Any]) -> dict[str, str]:
    """Picture -> digest of what it is drawn from."""
    drawing = inspect.getsource(figures)
    parts = {
        "demo.png": json.dumps(stored["verdict"]["checkpoints"]) + drawing,
        "report.png": FIGURES.sub("", demo_report(stored)) + drawing,
    }
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}


def draw_pictures(result: Path = DEMO) -> None:
    """Draw all pictures.

    Raises UserError: no browser.
    """
    stored = json.loads(result.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures.plot_judgements(Verdict.model_validate(stored["verdict"]).checkpoints, "demo", folder / "demo.png")
        (folder / "report.html").write_text(demo_report(stored), encoding="utf-8")
        _photograph(folder / "report.html", folder / "report.png")
        for picture, digest in sources_of(stored).items():
            about = PngInfo()
            about.add_text(SOURCE, digest)
            with Image.open(folder / picture) as image, replacing(DOCS / picture) as temporary:
                image.convert("RGB").quantize(200).save(temporary, format="png", pnginfo=about, optimize=True)
            print(DOCS / picture)


def _photograph(page: Path, to: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UserError(f"no {', '.join(BROWSERS)}; install one, e.g. apt install chromium")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}")
    command = [browser, *flags, f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={to}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(result: Annotated[Path, typer.Argument(help="the demo's result")] = DEMO) -> None:
    """Draw the pictures of docs/."""
    draw_pictures(result)


if __name__ == "__main__":
    run_script(main)
