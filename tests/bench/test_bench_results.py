"""Every file in bench/results is written whole by the command that its first key tells, and names the commit it was measured at."""

import ast
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_modules import ROOT, bench

from distill.config.command_line import command_of
from distill.run.provenance import describe_run

RESULTS = sorted((ROOT / "bench/results").iterdir())


@functools.cache
def parser_of(script: str) -> Callable[[list[str]], dict[str, Any]]:
    """A script's own argument parser."""
    module, app = bench(script), typer.Typer(add_completion=False)
    if hasattr(module, "words_of"):
        return lambda words: vars(module.words_of(words))
    app.command()(module.main if hasattr(module, "main") else command_of(module.program))
    command = typer.main.get_command(app)
    return lambda words: command.make_context(script, words).params


def outer_keys(node: ast.AST) -> Iterator[str]:
    """Keys of dictionaries that are not inside another one, and keys that are assigned to."""
    if isinstance(node, ast.Dict):
        yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        return
    places = [one for one in getattr(node, "targets", []) if isinstance(one, ast.Subscript)]
    if places:
        yield from (str(one.slice.value) for one in places if isinstance(one.slice, ast.Constant))
        return
    for child in ast.iter_child_nodes(node):
        yield from outer_keys(child)


def commits_in(value: Any) -> list[str | None]:
    """Of a result, or of its parts where it was measured at several."""
    if isinstance(value, dict) and "commit" in value:
        return [value["commit"]]
    return [commit for part in value.values() for commit in commits_in(part)] if isinstance(value, dict) else []


@functools.cache
def written_keys(script: Path) -> frozenset[str]:
    """Of a script and of the modules of bench that it imports."""
    found, left = {script}, [script]
    keys: set[str] = set()
    while left:
        tree = ast.parse(left.pop().read_text(encoding="utf-8"))
        keys |= set(outer_keys(tree))
        named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        paths = {ROOT / "bench" / f"{name.replace('.', '/')}.py" for name in named}
        left += [path for path in paths - found if path.exists()]
        found |= paths
    return frozenset(keys)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_what_its_command_writes(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert next(iter(found)) == "command"
    assert (commits := commits_in(found)), "it does not say at which commit it was measured"
    assert all(re.fullmatch("[0-9a-f]{40}", commit or "") for commit in commits)
    for command in found["command"].split(" && "):
        program, script, *words = shlex.split(command)
        assert program == "python"
        assert not [word for word in words if Path(word).is_absolute()], "nobody else has that path"
        taken = parser_of(Path(script).stem)(words)
        if "out" in taken:
            assert taken["out"] is not None, "it would write no file"
            assert ROOT / taken["out"] == path
        assert found.keys() <= written_keys(ROOT / script)


def test_a_command_is_recorded_as_it_is_typed_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("result_file")
    script, inside = ROOT / "bench/memory.py", ROOT / "bench/results/memory.json"
    monkeypatch.setattr("sys.argv", [str(script), "--pair", str(tmp_path / "my pair"), "--out", str(inside), "k=1"])
    told = "python bench/memory.py --pair 'my pair' --out bench/results/memory.json k=1"
    assert module.command_line() == told
    assert module.command_line(told) == told
    assert module.command_line("python bench/demo.py") == f"python bench/demo.py && {told}"
    module.write_result(tmp_path / "new" / "found.json", {"rows": [1], "machine": "m"})
    assert next(iter(json.loads((tmp_path / "new" / "found.json").read_text()).items())) == ("command", told)
    module.write_result(tmp_path / "new" / "found.json", {"rows": [1], "command": "python bench/demo.py"})
    again = json.loads((tmp_path / "new" / "found.json").read_text())
    assert list(again) == ["command", "commit", "rows"]
    assert again["command"] == "python bench/demo.py"
    assert again["commit"] == describe_run(0)["commit"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["found.json"]
