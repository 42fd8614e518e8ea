"""`understudy export --push` and `--push-dataset`: what a hub receives, and mistakes in one line."""

import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import ORGANISATION, TOKEN, Hub, hub_server

from distill.commands.export import export
from distill.commands.options import ExportOptions
from speculative.errors import UserError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the library asks, by somebody who is logged in."""
    with hub_server() as running:
        for name, value in {"ENDPOINT": running.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_and_its_dataset_arrive_whole_and_private(
    hub: Hub, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dataset = f"{ORGANISATION}/draft", f"{ORGANISATION}/answers"
    export(ExportOptions(tiny_run, tmp_path / "out", push=model, push_dataset=dataset))
    sent = {("model", model): files_of(tmp_path / "out"), ("dataset", dataset): files_of(tiny_run / "dataset")}
    assert hub.files == sent
    assert {"model.safetensors", "README.md", "SERVING.md"} <= hub.files["model", model].keys()
    assert hub.private == sent.keys()
    said = capsys.readouterr().out
    for (kind, name), files in sent.items():
        size = sum(map(len, files.values()))
        assert re.search(rf"uploaded: {len(files)} files, {size:,} bytes: .* as {kind} {name}", said)
    # A second upload goes to the same repository.
    export(ExportOptions(tiny_run, tmp_path / "out", overwrite=True, push=model))
    assert hub.files["model", model] == files_of(tmp_path / "out")


@pytest.mark.parametrize("option", ["push", "push_dataset"])
@pytest.mark.parametrize(
    ("name", "token", "told"),
    [
        ("org/draft", None, "not logged in, or the token is not valid; run `hf auth login`"),
        ("org/draft", "hf_wrong", "not logged in, or the token is not valid; run `hf auth login`"),
        ("org/a draft", TOKEN, "not a name of the hub; give ORG/NAME of letters, digits, -, _ and ."),
        ("draft", TOKEN, "not a name of the hub; give ORG/NAME"),
        ("a/b/c", TOKEN, "not a name of the hub; give ORG/NAME"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    hub: Hub,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    name: str,
    token: str | None,
    told: str,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    before = files_of(tiny_run)
    with pytest.raises(UserError) as raised:
        export(ExportOptions(tiny_run, tmp_path / "out", **{option: name}))
    assert str(raised.value).startswith(f"--{option.replace('_', '-')} {name}: {told}")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert files_of(tiny_run) == before


def test_an_organisation_that_is_not_yours_and_a_hub_that_is_gone_leave_the_export(
    hub: Hub, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"--push other/draft: no user or organisation other that you may write to; .* is written"
    ):
        export(ExportOptions(tiny_run, tmp_path / "out", push="other/draft"))
    assert (tmp_path / "out" / "SERVING.md").exists()
    assert hub.files == {}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^--push org/draft: .*\(nothing is written\)$"):
        export(ExportOptions(tiny_run, tmp_path / "gone", push="org/draft"))
    assert not (tmp_path / "gone").exists()
