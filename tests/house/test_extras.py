"""A package that only an extra brings: a command without it says in one line what to install."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from page_server import page_server

from distill import cli, respond
from distill.faults import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
name: asked
output: {folder}
target: {{path: {target}, endpoint: {{urls: ["http://127.0.0.1:9/v1"], weights: server}}}}
student: {{init: pretrained, path: {target}}}
signal: {{source: store}}
judge: {{live: never, prompts: 4}}
data: {{train: [{{path: {prompts}, prompt_column: prompt}}], template: {{mode: plain}}}}
"""


def is_told(line: str, module: str, extra: str) -> bool:
    return line == f"understudy: {module} is not installed; `pip install 'understudy[{extra}]'` brings it"


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {
        extra: {re.split("[>=]", one)[0].replace("-", "_") for one in listed}
        for extra, listed in project["optional-dependencies"].items()
    }
    del names["dev"], names["docs"]
    assert set().union(*names.values()) == set(EXTRAS)
    assert [module for module, extra in EXTRAS.items() if module not in names[extra]] == []


@pytest.mark.parametrize("module", ["uvicorn", "h11"])
def test_the_gateway_without_its_extra(tmp_path: Path, module: str) -> None:
    text = f"raise ModuleNotFoundError('No module named {module}', name='{module}')"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    words = [Path(sys.executable).with_name("understudy"), "gateway", "--engine", "http://127.0.0.1:9", "--log"]
    done = subprocess.run(
        [*map(str, words), str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert is_told(line, module, EXTRAS[module])


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


def test_a_target_behind_a_server_without_its_extra(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "openai")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def f{number}(x):"}}\n' for number in range(24)), encoding="utf-8")
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, target=tiny_target, prompts=prompts), encoding="utf-8")
    assert respond.main([str(config)]) == 2
    assert is_told(capsys.readouterr().err.splitlines()[-1], "openai", "endpoint")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["readback", "URL", "--run", "RUN"], "openai"),
        (["drift", "RUN", "--metrics-url", "URL/metrics"], "prometheus_client"),
    ],
)
def test_an_engine_that_is_asked_without_the_extra(
    words: list[str], module: str, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, module)
    with page_server(lambda _: "up 1\n") as url:
        words = [word.replace("URL", url).replace("RUN", str(tiny_run)) for word in words]
        monkeypatch.setattr(sys, "argv", ["understudy", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert is_told(line, module, "endpoint")
