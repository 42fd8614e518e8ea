"""General text as examples: windows are the documents in order, and every token but a window's first is to be predicted."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import tiny_tokenizer

from data.batches.windows import cut_windows, documents_of, text_examples
from data.prompts import stdlib
from data.prompts.prompt import PromptSource
from speculative.errors import UserError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(3, 90), max_size=20), min_size=1, max_size=20), st.integers(1, 16))
def test_windows_are_the_documents_in_order(documents: list[list[int]], window: int) -> None:
    windows = cut_windows(documents, window, eos_id=2)
    stream = [token for document in documents for token in [*document, 2]]
    assert windows.dtype == np.int32
    assert windows.shape[1] == window
    assert windows.reshape(-1).tolist() == stream[: windows.size]
    assert len(stream) - windows.size < window


def test_general_text_comes_in_windows(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("def add(first, second):\n    return first + second\n" * 40, encoding="utf-8")
    examples = text_examples([PromptSource(path=str(path))], tiny_tokenizer(), 16)
    assert len(examples) > 5
    for example in examples:
        assert len(example.input_ids) == 16
        assert example.loss_mask.tolist() == [False] + [True] * 15
    with pytest.raises(UserError, match="fewer than"):
        text_examples([PromptSource(path=str(path))], tiny_tokenizer(), 10**6)


def test_chats_are_no_general_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"chat.jsonl:1: chat messages are not plain text"):
        documents_of(PromptSource(path=str(path)))


def test_the_standard_library_is_a_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib, "corpus_documents", lambda heldout: ["held out" if heldout else "trained"])
    assert documents_of(PromptSource(path="stdlib")) == ["trained"]
    assert documents_of(PromptSource(path="stdlib", split="heldout")) == ["held out"]
