"""`understudy export --push` and `--push-dataset`: what a hub receives, and mistakes in one line."""

import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import ORGANISATION, TOKEN, Hub, hub_server

from distill.commands.export import export
from distill.commands.options import ExportOptions


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
