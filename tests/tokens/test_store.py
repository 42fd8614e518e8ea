"""The token store: rows come back as written, whole or absent, and damage or another manifest is refused by name."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from failures import Killed, files_no_larger_than, killed
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_child
from refusals import refused

from data import shards
from data.files import MANIFEST
from data.responses import store as token_store
from data.responses.store import INDEX, Row, Store, row_keys
from speculative.errors import UserError

IDENTITY = {"target": "abc", "tokenizer": "def", "sampling": {"temperature": 1.0, "top_k": 0}, "eos_ids": [2]}


def row_of(index: int, prompt: int = 3, response: int = 4) -> Row:
    ids = list(range(index, index + prompt + response))
    mask = [False] * prompt + [True] * response
    return Row(
        f"prompt{index}", index % 2, "code", ids, mask, [-0.5 * step for step in range(response)], index % 2 == 0
    )


def keys_of(*rows: Row) -> pa.Array:
    return row_keys(pa.array([row.prompt_id for row in rows]), pa.array([row.sample for row in rows]))


def there(store: Store, *indices: int) -> list[bool]:
    return store.present(keys_of(*map(row_of, indices))).tolist()


def opened(folder: Path) -> Store:
    store = Store(folder / "store")
    store.open(IDENTITY)
    return store


rows = st.lists(
    st.builds(
        Row,
        prompt_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        sample=st.integers(0, 100),
        domain=st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        input_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
        loss_mask=st.lists(st.booleans(), min_size=1, max_size=6),
        log_target_probs=st.lists(st.floats(max_value=0, allow_nan=False, width=32), max_size=6),
        finished=st.booleans(),
        rejected=st.lists(st.booleans(), max_size=6),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    store = opened(tmp_path_factory.mktemp("round"))
    store.write_shard(0, rows)
    assert store.read() == rows


def test_a_selection_is_what_is_read_in_its_order(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for shard in range(3):
        store.write_shard(shard, [row_of(2 * shard), row_of(2 * shard + 1)])
    chosen = [row_of(index) for index in (5, 0, 3)]
    store.select(keys_of(*chosen), ["new", "code", "other"])
    domains = zip(chosen, ["new", "code", "other"], strict=True)
    assert store.read() == [replace(row, domain=domain) for row, domain in domains], "labels may change"
    store.select(keys_of(*chosen[:1]), ["code"])
    assert store.read() == chosen[:1]
    assert there(store, *range(6)) == [True] * 6, "the others stay"
    assert "1 of 2 responses are missing" in refused(lambda: store.select(keys_of(row_of(1), row_of(9)), ["a", "b"]))
    assert store.read() == chosen[:1]
    content = bytearray((store.folder / INDEX).read_bytes())
    content[len(content) // 2] ^= 1
    (store.folder / INDEX).write_bytes(bytes(content))
    assert INDEX in refused(store.read)


def test_rows_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow twin: the rows in memory. Ids are no copies, and few shards stay mapped."""
    monkeypatch.setattr(shards, "MAPPED_SHARDS", 2)
    monkeypatch.setattr(token_store, "SCANNED_SHARDS", 2)
    store = opened(tmp_path)
    rows = [row_of(index, prompt=1 + index % 3, response=index % 4 + 1) for index in range(12)]
    for shard in range(6):
        store.write_shard(shard, rows[2 * shard : 2 * shard + 2])
    stored = store.rows()
    assert list(stored) == rows
    assert stored[2:9:3] == rows[2:9:3]
    assert stored[-1] == rows[-1]
    examples = stored.examples
    assert len(examples) == 12
    for number, row in enumerate(rows):
        example, twin = examples[number], row.example()
        assert not example.input_ids.flags.writeable
        assert not example.input_ids.flags.owndata
        assert (example.input_ids.dtype, example.loss_mask.dtype) == (np.int32, bool)
        np.testing.assert_array_equal(example.input_ids, twin.input_ids)
        np.testing.assert_array_equal(example.loss_mask, twin.loss_mask)
        assert examples.lengths_N[number] == len(twin.input_ids)
        assert examples.predicted_N[number] == twin.response_tokens
    del example
    assert len(set(examples.keys_N.tolist())) == 12
    mapped = {one.path for one in psutil.Process().memory_maps() if one.path.startswith(str(store.folder))}
    assert 1 <= len(mapped) <= 2


def _resident(folder: Path, small: Path, tokens: int, told: Path) -> None:
    def opened_rows(path: Path) -> Any:
        store = Store(path)
        rows = store.rows()
        assert store.present(row_keys(rows.listed["prompt_id"], rows.listed["sample"])).all()
        store.verify()
        for number in range(0, len(rows), 7):
            assert rows.examples[number].input_ids.sum() > 0
        return rows

    kept = [opened_rows(small)]
    before = psutil.Process().memory_info().rss
    kept.append(opened_rows(folder))
    told.write_text(str((psutil.Process().memory_info().rss - before) / tokens))


def test_a_rank_holds_less_than_two_bytes_a_token(tmp_path: Path) -> None:
    """Python lists of the same rows are 100. In a process of its own, which has opened a store before."""
    stores, count, length = [Store(tmp_path / "small"), Store(tmp_path / "large")], 4096, 2000
    ids, mask, log_probs = np.arange(1, length + 1), np.arange(length) > 10, np.full(length - 11, -1.0)
    for store, rows in zip(stores, (512, count), strict=True):
        store.open(IDENTITY)
        for start in range(0, rows, 32):
            numbers = range(start, start + 32)
            made = [Row(f"{number:016x}", 0, "code", ids, mask, log_probs, True) for number in numbers]  # type: ignore[arg-type]
            store.write_shard(start // 32, made)
    told = tmp_path / "told"
    assert run_child(_resident, stores[1].folder, stores[0].folder, count * length, told) == 0
    assert float(told.read_text()) < 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("target", "xyz", 'made with another target ("abc", now "xyz")'),
        ("sampling", {"temperature": 0.7, "top_k": 0}, "another sampling"),
        ("eos_ids", [2, 3], "another eos_ids ([2], now [2, 3])"),
        ("new_key", 1, "another new_key (null, now 1)"),
        ("format", 3, "another format (null, now 3)"),  # before `new_key`, which another format explains
    ],
)
def test_a_store_made_with_something_else_is_refused_by_key(tmp_path: Path, key: str, value: Any, said: str) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0)])
    changed = IDENTITY | {key: value} | ({"new_key": 1} if key == "format" else {})
    assert refused(lambda: store.open(changed)).startswith(f"{store.folder}: ")
    assert said in refused(lambda: store.open(changed))
    store.open(dict(reversed(IDENTITY.items())) | {"eos_ids": (2,)})
    assert store.read() == [row_of(0)]


def test_one_flipped_byte_anywhere_is_refused_by_name_or_harmless(tmp_path: Path) -> None:
    """Every byte of the manifest, every third of the shard; only white space of the manifest is harmless."""
    store, harmless, told = opened(tmp_path), "", []
    store.write_shard(0, [row_of(0)])
    for path in sorted(store.folder.iterdir()):
        content = path.read_bytes()
        for position in range(0, len(content), 3 if path.suffix == ".arrow" else 1):
            flipped = content[position] ^ (1 << position % 8)
            path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
            try:
                store.open(IDENTITY)
                assert (store.read(), store.manifest(), path.name) == ([row_of(0)], IDENTITY, MANIFEST)
                harmless += chr(content[position])
            except UserError as error:
                told.append((str(store.folder) if path.name == MANIFEST else path.name, str(error)))
        path.write_bytes(content)
    assert set(harmless) <= set(" \n")
    assert all(name in text and "\n" not in text for name, text in told)


def test_a_shard_that_is_cut_or_gone_is_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(index) for index in range(20)])
    rows = store.rows()
    (path,) = rows.files
    content = path.read_bytes()
    for harm in (content[:-200], b"", b"not arrow at all"):
        path.write_bytes(harm)
        for read in (store.read, Store(store.folder).rows):
            assert refused(read).startswith(f"{path}: damaged shard (")
    path.unlink()
    assert f"{path.name}: this shard is missing" in refused(lambda: rows[0])


def test_a_store_grows_and_adopts_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Shard 0 of a plan may later have other rows: they are written beside the earlier ones."""
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0), row_of(2)])
    before = {path: path.read_bytes() for path in store.folder.iterdir()}
    store.write_shard(0, [row_of(1), row_of(3)])
    other = opened(tmp_path / "other")
    other.write_shard(0, [row_of(4)])
    for _ in range(2):
        store.adopt(other)
    assert len(store.rows().files) == 3
    assert all(path.read_bytes() == content for path, content in before.items())
    assert there(store, *range(6)) == [True] * 5 + [False]
    assert not store.present(keys_of(replace(row_of(0), sample=7)))[0]
    foreign = Store(tmp_path / "foreign")
    foreign.open({**IDENTITY, "target": "other"})
    assert "made with another target" in refused(lambda: store.adopt(foreign))
    other.rows().files[0].write_bytes(b"damaged")
    assert "damaged shard" in refused(lambda: Store(tmp_path / "new").adopt(other))


def test_keys_depend_on_prompt_sample_ids_and_mask() -> None:
    row = row_of(0)
    changes: list[dict[str, Any]] = [
        {"prompt_id": "other"},
        {"sample": 1},
        {"input_ids": [*row.input_ids[:-1], 99]},
        {"loss_mask": [True, *row.loss_mask[1:]]},
    ]
    assert len({row.key, *(replace(row, **change).key for change in changes)}) == 5
    assert replace(row, domain="other", finished=False).key == row.key


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            store.write_shard(0, [row_of(1)])
    assert store.read() == []
    ids = np.random.default_rng(0).integers(0, 2**31, 20000).tolist()
    with files_no_larger_than(10_000):
        text = refused(lambda: store.write_shard(0, [Row("big", 0, "code", ids, [True] * 20000, [], True)]))
    assert "cannot be written" in text
    assert sorted(path.name for path in store.folder.iterdir()) == [MANIFEST]
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in refused(lambda: Store(tmp_path / "file" / "store").open(IDENTITY))
