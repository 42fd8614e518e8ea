"""The generated pages of docs/reference, made from the code's own help texts and fields; a test compares them.

python tests/support/reference_pages.py        # writes docs/reference/*.md
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT)]

import typer  # noqa: E402
from key_table import key_table  # noqa: E402
from typer.cli import get_docs_for_click  # noqa: E402

from distill.cli import app  # noqa: E402
from distill.config.layout import FILES  # noqa: E402
from distill.config.table import config_table  # noqa: E402

FOLDER = ROOT / "docs" / "reference"


def config_page() -> str:
    return f"""# Configuration

This page is for people who write a config. It lists every key with its default and its meaning, as `understudy config` prints them.
Override any key on the command line: `optim.lr=3e-4` or `data.train.0.path=prompts.jsonl`. An unknown key, a wrong type or an impossible
combination is an error that names the key and, for a misspelt key, the nearest valid one. `N` is the place in a list, from 0.

{config_table()}
"""


def verdict_page() -> str:
    return f"""# Keys of result.json and verdict.json

A run, an evaluation and a comparison write these files. [How to read a verdict](../verdict.md) explains the numbers.

{key_table()}
"""


def cli_page() -> str:
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="understudy"), name="understudy")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def run_page() -> str:
    rows = [(", ".join(f"`{name}`" for name in names.split(", ")), *more) for names, *more in FILES]
    table = "\n".join(
        f"| {' | '.join(row)} |" for row in (("file", "written by, or at", "contents"), ("---",) * 3, *rows)
    )
    return f"""# What a run leaves in its folder

{table}
"""


PAGES = {"config.md": config_page, "verdict.md": verdict_page, "cli.md": cli_page, "run.md": run_page}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
