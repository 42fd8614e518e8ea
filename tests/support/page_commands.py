"""Commands and code that README and the pages show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = r"<!-- needs [^>]+ -->\n"


def blocks(page: str, language: str, marked: bool | None = None) -> list[str]:
    """Code blocks of a page: all, those below `<!-- needs ... -->` (marked True), or the others (False)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^({NEEDS})?```{language}\n(.*?)^```", text, flags=re.M | re.S)
    return [code for mark, code in found if marked is None or bool(mark) == marked]


def commands(page: str, marked: bool | None = None) -> list[list[str]]:
    """The words of each command in the bash blocks of a page."""
    lines = "".join(blocks(page, "bash", marked)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
