"""Prompts of the two domains, before and after the shift."""

import ast
import json
import random
from collections.abc import Sequence

from data.prompts.sources import PromptRow
from data.prompts.stdlib import modules
from data.prompts.template import render_prompt
from distill.config.layout import TARGET_FACTS
from distill.config.run import RunConfig
from distill.models.load import load_tokenizer
from distill.run.prompts import command_rows, rows_of


def traffic_prompts(config: RunConfig, turn: int = 0) -> list[list[int]]:
    """Token ids of the run's held-out sources in random order: in the library's order, neighbours would be of one module.

    ``turn``: each loop of several has another order.

    Raises:
        UserError: see `load_source` and `render_prompt`.
    """
    asked = _rendered(config, rows_of(config.data.heldout or config.data.train)[0])
    random.Random(config.seed + turn).shuffle(asked)
    return asked


def shifted_prompts(config: RunConfig, path: str, turn: int = 0) -> list[list[int]]:
    """Prompts of a file, or of the default domain.

    Raises:
        UserError: as `traffic_prompts`.
    """
    if path:
        return _rendered(config, command_rows(path))
    heads = unit_test_heads()
    random.Random(config.seed + turn).shuffle(heads)
    rows = [PromptRow(head, None, None, "tests", f"tests:{number}") for number, head in enumerate(heads)]
    return _rendered(config, rows)


def unit_test_heads() -> list[str]:
    """The beginning of a unit test of each public method of the library's classes: another domain than function heads."""
    found = dict[str, None]()
    for _, source in modules(heldout=False):
        for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
            names = (node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            for name in (name for name in names if not name.startswith("_")):
                made = f"{kind.name.lower()} = {kind.name}()"
                found[f"    def test_{name}(self):\n        {made}\n        self.assertEqual("] = None
    return list(found)


def _rendered(config: RunConfig, rows: Sequence[PromptRow]) -> list[list[int]]:
    template, tokenizer = config.data.template, load_tokenizer(config.target.path)
    asked = [render_prompt(row, tokenizer, template) for row in rows]
    context = json.loads((config.folder / TARGET_FACTS).read_text(encoding="utf-8"))["context_length"]
    limits = (config.data.max_prompt_tokens, context and context - config.serving.max_tokens)
    return [ids for ids in asked if all(limit is None or len(ids) <= limit for limit in limits)]
