"""The tokenizer trained from nothing: any text survives, special tokens have fixed ids, the same text gives the same one."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import tiny_tokenizer
from transformers import AutoTokenizer

from data.tokenizer import BOS, EOS, PAD, save_tokenizer, train_tokenizer

SPECIAL = (PAD, BOS, EOS)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda t: not any(s in t for s in SPECIAL)
)


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_any_text_survives(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert all(token > 2 for token in ids[1:])
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n  x\t", " ,don't .", "a  b", "\x00\x7f", "e\u0301 \u00e9", "👩‍👩‍👧 漢字 ﷽", "0123456789"]
)
def test_awkward_text_survives(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_text_is_not_normalised() -> None:
    tokenizer = tiny_tokenizer()
    composed, decomposed = "é", unicodedata.normalize("NFD", "é")
    assert tokenizer(composed)["input_ids"] != tokenizer(decomposed)["input_ids"]


def test_special_tokens_have_fixed_ids_and_are_one_token() -> None:
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer(f"a{EOS}b", add_special_tokens=False)["input_ids"][1] == 2
    assert 260 < len(tokenizer) <= 300


def test_digits_stand_alone() -> None:
    ids = tiny_tokenizer()("2024", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4


def test_the_same_text_gives_the_same_tokenizer() -> None:
    texts = ["def add(first, second):\n    return first + second\n", "for item in items:\n    print(item)\n"] * 3
    first, again = (train_tokenizer(texts, 290, 64) for _ in range(2))
    assert first.get_vocab() == again.get_vocab()
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    save_tokenizer(tokenizer, tmp_path / "made" / "here")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "made" / "here")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.model_max_length == 256
    text = "def f(a, b):\n    return 'é'  # ,  ."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
