"""The datastore against counting by hand, its file, and what decoding makes of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from file_modes import other_modes, umask
from host_rows import (
    TARGET,
    HostRows,
    few_ids,
    repeating_prompts,
    row_steps,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_models import VOCAB, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters import retrieval
from speculative.drafters.retrieval import Datastore, Retrieval
from speculative.errors import UserError
from speculative.rules.sampling import GREEDY

FOUR = tiny_model(vocab_size=4)


def counted(responses: list[list[int]], text: list[int], min_ngram: int, max_ngram: int, gamma: int) -> list[int]:
    """The definition: the longest n-gram with a match, then by each next token the majority of who still agrees."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        matches = [
            response[place:]
            for response in responses
            for place in range(size, len(response))
            if response[place - size : place] == text[-size:]
        ]
        if not matches:
            continue
        chain: list[int] = []
        for step in range(gamma):
            going_on = [match for match in matches if len(match) > step]
            if step < retrieval.VOTED_TOKENS and going_on:
                # Of equally frequent tokens Counter names the one it met first.
                winner = Counter(match[step] for match in going_on).most_common(1)[0][0]
                matches = [match for match in going_on if match[step] == winner]
            if len(matches[0]) <= step:
                break
            chain.append(matches[0][step])
        return chain
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=6),
    row_steps,
    st.integers(1, 2),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_proposals_are_those_of_counting_by_hand(responses, steps, min_ngram, more, gamma):
    sizes = {"min_ngram": min_ngram, "max_ngram": min_ngram + more}
    if all(len(response) <= min_ngram for response in responses):
        with pytest.raises(UserError, match=r"would be empty|longer than min_ngram"):
            Datastore.build(responses, 4, **sizes)
        return
    rows = HostRows(Retrieval(Datastore.build(responses, 4, **sizes)), rows=4, model=FOUR)
    for step in steps:
        rows.apply(step)
        expected = [
            counted(responses, text, min_ngram, min_ngram + more, gamma) if active else []
            for text, active in zip(rows.texts, rows.active, strict=True)
        ]
        assert rows.proposed(gamma) == expected


def proposed_after(datastore: Datastore, text: list[int], gamma: int = 4) -> list[int]:
    ids_RG, counts_R = datastore.continuations(np.array([[*text, 9, 9]]), np.array([len(text)]), gamma)
    return ids_RG[0, : counts_R[0]].tolist()


def test_a_continuation_longer_than_the_vote_follows_one_of_the_matches(monkeypatch):
    monkeypatch.setattr(retrieval, "VOTED_TOKENS", 1)
    store = Datastore.build([[1, 2, 3, 3], [1, 2, 4, 4], [1, 2, 4, 5]], 6)
    assert proposed_after(store, [1]) == [2, 3, 3]
    monkeypatch.undo()
    assert proposed_after(Datastore.build([[1, 2, 3, 3], [1, 2, 4, 4], [1, 2, 4, 5]], 6), [1]) == [2, 4, 4]


def test_only_the_tokens_prove_a_match_and_not_their_hash(monkeypatch):
    """With all powers 1 the hash is a sum: 5 and 1 has that of 2 and 4, 3 and 3, 0 and 6."""
    monkeypatch.setattr(retrieval, "MULTIPLIER", 1)
    store = Datastore.build([[2, 4, 8]], 10, min_ngram=2, max_ngram=2)
    assert proposed_after(store, [2, 4]) == [8]
    assert proposed_after(store, [5, 1]) == []


def test_longer_ngrams_are_kept_only_where_shorter_ones_are_ambiguous():
    once = Datastore.build([[1, 2, 3, 4, 5, 6, 7, 8]], 10, max_ngram=8)
    assert len(once.hashes_M) == 7
    twice = Datastore.build([[1, 2, 3, 4], [5, 2, 3, 6]], 10, max_ngram=8)
    # 1, 2, 3 and 5 alone; then 1 2 and 5 2 and 2 3, the second token being said twice; then 1 2 3 and 5 2 3.
    assert len(twice.hashes_M) == 4 + 3 + 2


@settings(max_examples=25)
@given(st.lists(few_ids, min_size=1, max_size=5))
def test_a_saved_datastore_comes_back(tmp_path_factory, responses):
    if all(len(response) < 2 for response in responses):
        return
    path = tmp_path_factory.mktemp("datastore") / "deep" / "past.safetensors"
    built = Datastore.build(responses, 4, max_ngram=3)
    built.save(path)
    loaded = Datastore.load(path)
    for name in ("tokens_N", "hashes_M", "starts_M"):
        assert np.array_equal(getattr(built, name), getattr(loaded, name))
        assert getattr(built, name).dtype == getattr(loaded, name).dtype
    assert (loaded.vocab_size, loaded.min_ngram, loaded.max_ngram) == (4, 1, 3)
    assert [file.name for file in path.parent.iterdir()] == ["past.safetensors"]


def test_files_that_are_no_datastore_are_refused(tmp_path: Path):
    foreign, damaged, store = tmp_path / "weights.safetensors", tmp_path / "damaged", tmp_path / "store"
    save_file({"tokens": np.zeros(3)}, foreign)
    Datastore.build([[1, 2, 3]], 4).save(store)
    damaged.write_bytes(store.read_bytes()[:-5])
    with safe_open(store, framework="numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in ("tokens", "hashes", "starts")}
    for name, wrong in {"tokens": [1, 4, 3, -1], "hashes": [1], "starts": [1, 9]}.items():
        save_file(arrays | {name: np.array(wrong, dtype=arrays[name].dtype)}, tmp_path / name, metadata=metadata)
        save_file(arrays | {name: arrays[name].astype(np.int8)}, tmp_path / f"int8 {name}", metadata=metadata)
    save_file(
        arrays, tmp_path / "no size", metadata={"format": metadata["format"], "vocab_size": "4", "min_ngram": "1"}
    )
    for path, message in (
        (tmp_path / "nowhere", r"datastore .*nowhere does not exist: build it"),
        (tmp_path, "does not exist"),
        (foreign, r"weights\.safetensors is not a datastore in format"),
        (damaged, r"damaged cannot be read"),
        (tmp_path / "tokens", r"tokens cannot be read \(token ids or n-gram sizes out of range\): build it again"),
        (tmp_path / "hashes", r"hashes cannot be read \(n-grams that begin outside"),
        (tmp_path / "starts", r"starts cannot be read \(n-grams that begin outside"),
        *((tmp_path / f"int8 {name}", r"int8 .* where u?int(32|64) is stored") for name in arrays),
        (tmp_path / "no size", r"no size cannot be read \('max_ngram'\)"),
    ):
        assert re.search(message, refused(Datastore.load, path))


def test_the_file_has_the_mode_that_the_umask_gives(tmp_path: Path):
    with umask(0o027):
        Datastore.build([[1, 2]], 4).save(tmp_path / "made" / "store")
    assert other_modes(tmp_path / "made", 0o027) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"datastore .*file/store cannot be written"):
        Datastore.build([[1, 2]], 4).save(tmp_path / "file" / "store")
    folder = tmp_path / "taken"
    folder.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        Datastore.build([[1, 2]], 4).save(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_responses_that_cannot_be_stored_are_refused():
    for responses, message in (
        ([], "would be empty"),
        ([[], []], "would be empty"),
        ([[1, 2], [1, 4]], "the responses of the datastore have token id 4 but vocab_size is 4"),
        ([[1, -1, 2]], "token id -1"),
        ([[1, -7, 2]], "token id -7"),
        ([[1], [2]], r"no response .* longer than min_ngram = 1"),
    ):
        with pytest.raises(UserError, match=message):
            Datastore.build(responses, 4)
    with pytest.raises(UserError, match="min_ngram <= max_ngram"):
        Datastore.build([[1, 2]], 4, min_ngram=3, max_ngram=2)


def test_another_vocabulary_is_refused():
    drafter = Retrieval(Datastore.build([[1, 2, 3]], VOCAB - 1))
    with pytest.raises(UserError, match=r"built for a vocabulary of 49 token ids but the target has 50"):
        decode(TARGET, drafter, repeating_prompts(1), DecodeSettings(GREEDY, 2, "greedy", max_tokens=4))
