"""Prompts that every machine has: heads of functions of the standard library."""

import json
from pathlib import Path

from data.prompts.stdlib import functions, library_folder


def write_heads(path: Path, modules: list[str], count: int) -> None:
    """Short function heads of some modules of the standard library as prompts."""
    sources = [(library_folder() / f"{name}.py").read_text(encoding="utf-8") for name in modules]
    heads = [head for source in sources for head, _ in functions(source) if len(head) < 180]
    path.write_text("".join(json.dumps({"prompt": head}) + "\n" for head in heads[:count]), encoding="utf-8")
