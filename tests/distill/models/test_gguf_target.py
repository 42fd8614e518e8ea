"""A GGUF file as a target: its tokenizer splits as llama.cpp does, and its weights are the file's own."""

from pathlib import Path

import gguf
import pytest
import torch
from gguf_file import tokenizer_metadata, write_model
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer

from distill.models.files.gguf import pre_tokenizer_name
from distill.models.load import load_model, load_tokenizer

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(("named", "name"), [("smollm", "smollm"), ("command-r", "smollm"), ("gpt-2", "gpt-2")])
def test_the_tokenizer_of_a_file_splits_as_the_file_says(tmp_path: Path, named: str, name: str) -> None:
    tokenizer, text = tiny_tokenizer(), "in 2024,  12 of 345\n 6"
    path = write_model(
        tmp_path / "target.gguf",
        tiny_model(vocab_size=TOKENS, tie_word_embeddings=True, **IDS),
        tokenizer_metadata(tokenizer, named),
    )
    read = load_tokenizer(str(path))
    assert pre_tokenizer_name(read) == name
    same = read(text, add_special_tokens=False).input_ids == tokenizer(text, add_special_tokens=False).input_ids
    assert same == (name == "smollm"), "the tiny tokenizer splits off each digit"


def test_the_weights_are_those_of_the_file(tmp_path: Path) -> None:
    own = tiny_model(vocab_size=TOKENS, tie_word_embeddings=True, **IDS)
    tokens, ids = tokenizer_metadata(tiny_tokenizer()), torch.arange(1, 40)[None]
    exact, half, four = (
        load_model("target", str(write_model(tmp_path / f"{kind}.gguf", own, tokens, kind)))
        for kind in ("F32", "F16", "Q4_1")
    )
    torch.testing.assert_close(exact(ids).logits, own(ids).logits, rtol=1e-5, atol=1e-5)
    weight = own.model.layers[0].mlp.up_proj.weight
    assert torch.equal(half.model.layers[0].mlp.up_proj.weight, weight.half().float()), (
        "in float32, with the file's 16 bits"
    )
    moved = (four.model.layers[0].mlp.up_proj.weight - weight).norm() / weight.norm()
    assert 0.02 < moved < 0.15


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    class Reader(gguf.gguf_reader.GGUFReader):
        def __init__(self, path: str) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    tokens, path = tokenizer_metadata(tiny_tokenizer()), tmp_path / "target.gguf"
    for count in (1, 2):
        own = tiny_model(vocab_size=TOKENS, tie_word_embeddings=True, **IDS)
        torch.nn.init.constant_(own.model.norm.weight, float(count))
        write_model(path, own, tokens, "F32")
        for _ in range(2):
            assert float(load_model("target", str(path)).model.norm.weight[0]) == count
        assert len(read) == count
