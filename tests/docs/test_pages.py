"""The pages for newcomers: the code of the extend page runs, commands parse, their config loads, and the site of all pages builds."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from page_commands import blocks, commands
from processes import run_child
from typer.testing import CliRunner

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.prompts.template import render_prompt
from distill.cli import app
from distill.config.load import load_config
from distill.engines.protocol.engine import known_engines
from distill.models.load import EMBEDDED, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DOCS, CONFIG = ROOT / "docs", ROOT / "configs" / "quickstart.yaml"
# What a page of the site fetches when it is opened.
FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\ssrc=["']?(https?:)?//|<link\b[^>]*rel=["']?stylesheet[^>]*href=["']?(https?:)?//"""
)
NOWHERE = "http://127.0.0.1:9"


def parse(words: list[str]) -> None:
    """Parses a command of understudy without running it; raises what click raises."""
    group: Any = typer.main.get_command(app)
    above = group.make_context("understudy", words[:1])
    found = group.get_command(above, words[0])
    assert found is not None, words[0]
    found.make_context(words[0], words[1:], parent=above)


def test_the_code_of_extend_runs() -> None:
    """In a process of its own, because it registers an objective, a drafter and an engine."""
    code = "\n".join(blocks("docs/extend.md", "python"))
    assert all(word in code for word in ("@registered", "Rule.named(", "@way(", "register(", "load_source("))

    def start() -> None:
        known_engines.cache_clear()  # a test before this one may have asked
        exec(code, {})

    assert run_child(start) == 0


@pytest.mark.parametrize("words", commands("docs/quickstart.md", marked=True), ids=" ".join)
def test_a_command_of_the_quickstart_that_needs_an_engine_takes_its_options(words: list[str]) -> None:
    """The others run in tests/docs/test_commands.py."""
    parse(words[1:])


def test_the_quickstart_config_loads_and_its_chats_are_prompts() -> None:
    config = load_config(CONFIG)
    (source,) = config.data.train
    rows = load_source(PromptSource(path=str(ROOT / source.path), messages_column=source.messages_column))
    assert 60 <= len(rows) <= 100
    tokenizer = load_tokenizer(EMBEDDED)
    tokenizer.chat_template = (CONFIG.parent / "examples" / "chat_template.jinja").read_text(encoding="utf-8")
    lengths = [len(render_prompt(row, tokenizer, config.data.template)) for row in rows]
    assert max(lengths) + config.serving.max_tokens < tokenizer.model_max_length


def test_the_site_builds_without_a_network(tmp_path: Path) -> None:
    environment = os.environ | {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "configs" / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "index.html").exists()
    for page in DOCS.rglob("*.md"):
        html = (tmp_path / page.relative_to(DOCS)).with_suffix(".html").read_text(encoding="utf-8")
        assert not (found := FETCHED.search(html)), f"{page.name}: {found}"


def test_the_parser_sees_options_and_commands_that_do_not_exist() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["probe", "--help"]).exit_code == 0
    for words in (
        ["train", "a.yaml", "--no-such-option", "1"],
        ["train"],
        ["serve", "a", "--port", "x"],
    ):
        with pytest.raises(Exception, match=r"option|parameter|argument|range|integer"):
            parse(words)
    with pytest.raises(AssertionError, match="distil"):
        parse(["distil"])
