"""What `make check` refuses of dependencies, by what its tools say; it never fails for want of a network."""

import subprocess

import audit
import pytest


@pytest.fixture
def no_index(tmp_path, monkeypatch):
    """A machine on which nothing but itself answers, as pip sees it."""
    monkeypatch.setattr(audit, "ENVIRONMENT", tmp_path / "tools")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_index_it_is_left_out_on_one_line(no_index, capfd):
    assert audit.main() == 0
    out, error = capfd.readouterr()
    assert (out.count("\n"), error) == (1, "")
    assert "left out" in out


@pytest.mark.parametrize("text", ["GPL-3.0", "MIT AND AGPL-3.0", "UNKNOWN", "Proprietary", "GPL-2.0 OR LGPL-3.0"])
def test_a_licence_that_is_not_on_the_list_is_a_fault(text):
    assert audit.not_allowed([{"Name": "a", "License": text}]) == [("a", text)]


def test_licences_of_the_list_pass():
    texts = ["MIT", "BSD License", "MPL-2.0 AND MIT", "Apache-2.0 OR GPL-3.0", "Apache Software License; MIT License"]
    assert audit.not_allowed({"Name": "a", "License": text} for text in texts) == []


def test_a_vulnerability_is_a_fault_unless_it_is_listed_with_a_reason():
    found = [
        {"name": "torch", "version": "2.0", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}]}
    ]
    (line,) = audit.vulnerable(found, set())
    assert "torch 2.0: PYSEC-1, mended in 2.1" in line
    assert audit.vulnerable(found, audit.mentioned("# why\nCVE-1 only with a pickle, which we never read\n")) == []
    with pytest.raises(AssertionError, match="without a reason"):
        audit.mentioned("CVE-1\n")


def test_what_users_install_is_looked_at_and_what_tests_need_is_not():
    names = audit.needed("understudy", audit.EXTRAS)
    assert {"understudy", "torch", "h11", "uvloop", "openai", "tqdm"} <= names
    assert not {"pytest", "hypothesis", "selenium", "mypy"} & names


def test_a_tool_that_fails_says_nothing(monkeypatch):
    def slow(*_, **__):
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(audit.subprocess, "run", slow)
    assert audit.said_by("pip-audit") is None


def test_pins_have_no_local_part():
    pins = (audit.ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "torch==" in pins
    assert "+" not in "".join(line.partition("#")[0] for line in pins.splitlines())
