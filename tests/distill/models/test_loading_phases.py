"""Loading and hashing weights are phases that are counted, so that a large model is not silent."""

from pathlib import Path

import pytest
from gguf_file import tokenizer_metadata, write_model
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer

from distill.models.load import load_model, model_fingerprint
from speculative import progress


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[progress.Phase]:
    phases: list[progress.Phase] = []
    monkeypatch.setattr(progress._display, "open", phases.append)
    monkeypatch.setattr(progress._display, "close", lambda *_: None)
    return phases


def test_weights_of_a_directory(opened: list[progress.Phase], tiny_target: Path) -> None:
    weights = model_fingerprint(load_model("target", str(tiny_target))) and [*opened]
    assert [phase.label for phase in weights] == [f"loading {tiny_target}", "loading weights", "hashing weights"]
    assert all(phase.done == phase.total and phase.done > 20 for phase in weights[1:])


def test_tensors_of_a_gguf_file(opened: list[progress.Phase], tmp_path: Path) -> None:
    model = tiny_model(vocab_size=TOKENS, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = write_model(tmp_path / "target.gguf", model, tokenizer_metadata(tiny_tokenizer()))
    load_model("target", str(path))
    tensors = next(phase for phase in opened if phase.label.startswith("converting"))
    assert tensors.done == tensors.total == len({weight.data_ptr() for weight in model.parameters()})
