"""Which names are the hub's: a missing local path is no request, and an unreachable hub is asked once."""

import http.server
import logging
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from refusals import refused

from data import hub
from data.prompts.sources import dataset_id
from distill.config.layout import near_path
from distill.models.load import load_tokenizer, public_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model of its own, and a cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "reach_hub", lambda endpoint: pytest.fail("the hub was asked"))
    monkeypatch.setattr("distill.models.load.reach_hub", lambda endpoint: pytest.fail("the hub was asked"))
    for folder in (
        "drafts/small",
        f"cache/models--acme--Tiny-Chat/snapshots/{COMMIT}",
        "cache/models--drafts--big",
        "org",
    ):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("acme/Tiny-Chat", "acme/Tiny-Chat"),
        ("gpt2", "gpt2"),
        ("drafts/big", "drafts/big"),
        (f"cache/models--acme--Tiny-Chat/snapshots/{COMMIT}", "acme/Tiny-Chat"),
        (f"/gone/models--gpt2/snapshots/{COMMIT}/", "gpt2"),
        ("acme/Tiny-GGUF/tiny.q8_0.gguf", "acme/Tiny-GGUF"),
        ("tiny.gguf", None),
        ("drafts/small", None),
        ("drafts/smal", None),
        ("drafts", None),
        ("models/target", None),
        ("runs/nothing", None),
        ("a/b/c", None),
        ("/x", None),
        ("./x", None),
        ("~/x", None),
        ("my target", None),
        ("été/x", None),
        ("", None),
    ],
)
def test_a_name_is_of_the_hub_or_a_path(here: Path, path: str, name: str | None) -> None:
    assert hub.hub_id(path) == name


def test_sources_of_files_have_no_name_on_the_hub(here: Path) -> None:
    for path in ("stdlib", "a/b.jsonl", "org/p.jsonl.zst", "org/set", "data.bz2"):
        assert dataset_id(path) is None
    assert dataset_id(f"/c/datasets--a--b/snapshots/{COMMIT}") == dataset_id("a/b") == "a/b"


@pytest.mark.parametrize("path", ["models/target", "runs/nothing", "./x", "/x/y", "drafts/smal", "a b/c", "a/b/c"])
def test_a_missing_path_is_one_line_and_no_request(here: Path, path: str) -> None:
    line = refused(load_tokenizer, path)
    assert line.startswith(f"tokenizer {path!r}: no ")
    assert "give a model directory or a hub id" in line
    assert ("hf download drafts/smal" in line) == (path == "drafts/smal")


def test_public_names_have_no_folders(here: Path) -> None:
    names = {
        f"cache/models--acme--Tiny-Chat/snapshots/{COMMIT}": "acme/Tiny-Chat",
        "drafts/small": "small",
        "drafts/gone": "gone",
        "/a/b": "b",
        "acme/x": "acme/x",
        "acme/x/x.gguf": "acme/x/x.gguf",
    }
    assert {path: public_name(path) for path in names} == names


def test_a_hub_that_cannot_be_reached_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for _ in range(2):
            hub.reach_hub(url)
        server.shutdown()
    assert (len(asked), constants.HF_HUB_OFFLINE, caplog.text) == (1, False, "")
    hub.reach_hub.cache_clear()
    with caplog.at_level(logging.WARNING):
        hub.reach_hub(url)  # nobody listens there any more
    assert constants.HF_HUB_OFFLINE
    assert "only its cache on this machine is used" in caplog.text


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_asks_to_try_again_is_not_waited_for(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would ask for each file again and again, for a minute, and print every attempt."""
    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab-target").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.reach_hub.cache_clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with caplog.at_level(logging.WARNING):
            line = refused(load_tokenizer, "lab-targte")
        server.shutdown()
    assert asked == ["/"], "one sign of life, and no retries"
    assert caplog.text.count("\n") == 1
    assert line.endswith("; did you mean lab-target?")
    hub.reach_hub.cache_clear()


def test_the_most_similar_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert near_path("rnus/dmeo") == "; did you mean runs/demo?"
    assert near_path(tmp_path / "runs" / "dem") == f"; did you mean {tmp_path}/runs/demo?"
    for path in ("runs/demo", "elsewhere/demo", "runs/xyz"):
        assert near_path(path) == ""
