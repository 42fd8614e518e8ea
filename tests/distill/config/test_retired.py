"""What was retired is refused in one line that says what to use instead."""

import sys

import pytest
from refusals import refused

from distill import cli
from distill.config.load import parse_config
from distill.config.retired import RETIRED


def test_a_retired_key_or_value_names_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETIRED, "optim.old", "set optim.lr")
    monkeypatch.setitem(RETIRED, "student.init: older", "set student.init to carved")
    monkeypatch.setitem(RETIRED, "tracking.trackers: older", "use wandb")
    tree = {"name": "x", "data": {"train": [{"path": "stdlib"}]}}
    for section, line in [
        ({"optim": {"old": 1}}, "a.yaml: `optim.old` is retired; set optim.lr"),
        ({"student": {"init": "older"}}, "a.yaml: `student.init: older` is retired; set student.init to carved"),
        ({"tracking": {"trackers": ["older"]}}, "a.yaml: `tracking.trackers: older` is retired; use wandb"),
    ]:
        assert refused(parse_config, tree | section, "a.yaml") == line


def test_a_retired_option_or_command_names_its_successor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RETIRED, "sweep --old", "use a grid")
    monkeypatch.setitem(RETIRED, "traffic older", "use `traffic show`")
    for words, line in [
        (["sweep", "s.yaml", "--old=3"], "understudy: `sweep --old` is retired; use a grid\n"),
        (["traffic", "older", "x"], "understudy: `traffic older` is retired; use `traffic show`\n"),
    ]:
        monkeypatch.setattr(sys, "argv", ["understudy", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert (stopped.value.code, capsys.readouterr().err) == (2, line)


def test_words_for_an_engine_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETIRED, "serve --old", "leave it out")
    monkeypatch.setattr(cli, "app", lambda: None)
    monkeypatch.setattr(sys, "argv", ["understudy", "serve", "runs/demo", "--", "--old"])
    cli.main()
