"""Shards and manifest: whole or absent, and refused by name when they are another run's."""

import hashlib
import os
from collections.abc import Callable
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

from data.files import MANIFEST, require_manifest, write_json
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("target", "xyz", ['"abc"', '"xyz"']),
        ("tokenizer", "xyz", ['"def"']),
        ("sampling", {"temperature": 0.7, "top_k": 0}, ["0.7"]),
        ("eos_ids", [2, 3], ["[2, 3]"]),
        ("new_key", 1, ["null", "1"]),
    ],
)
def test_a_store_from_something_else_is_refused_by_key(tmp_path: Path, key: str, value: Any, said: list[str]) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0)])
    text = refused(lambda: store.open(IDENTITY | {key: value}))
    assert f"another {key} " in text
    assert str(store.folder) in text
    assert all(part in text for part in said), text
    assert store.read() == [row_of(0)], "nothing is lost"


def test_the_same_manifest_is_accepted_again_whatever_the_order_and_tuples(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0)])
    before = (store.folder / MANIFEST).read_bytes()
    store.open(dict(reversed(IDENTITY.items())) | {"eos_ids": (2,)})
    assert (store.folder / MANIFEST).read_bytes() == before
    assert store.read() == [row_of(0)]


def test_another_format_is_said_before_what_else_it_made_another(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_json(tmp_path / "store" / MANIFEST, {"format": 2, "examples": 1800})
    text = refused(lambda: require_manifest(tmp_path / "store", {"format": 3, "dtype": "bfloat16"}, "delete it"))
    assert "made with another format (2, now 3)" in text


@pytest.mark.parametrize("content", ["", "{", "\x00\x01"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    store = opened(tmp_path)
    (store.folder / MANIFEST).write_text(content)
    assert MANIFEST in refused(lambda: store.open(IDENTITY))


HARM: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"not arrow at all"),
    "another shard": lambda path: path.write_bytes(path.with_name("shard-00000.arrow").read_bytes()),
    "no checksum": lambda path: path.with_name("checksum-00001.sha256").unlink(),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_shard_is_named(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    store = opened(tmp_path)
    for shard in range(2):
        store.write_shard(shard, [row_of(20 * shard + index) for index in range(20)])
    path = store.shard_path(1)
    checksum = path.with_name("checksum-00001.sha256").read_text(encoding="utf-8")
    assert checksum == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n", "as sha256sum -c reads it"
    harm(path)
    text = refused(store.read)
    assert str(path) in text
    assert "delete" in text


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ (1 << position % 8)]) + content[position + 1 :]


def test_one_flipped_byte_anywhere_is_refused_by_name_or_harmless(tmp_path: Path) -> None:
    """Every byte of manifest and checksum, every third of the shard; harmless is white space of the manifest only."""
    store = opened(tmp_path)
    rows = [row_of(0)]
    store.write_shard(0, rows)
    harmless = []
    for path in sorted(store.folder.iterdir()):
        content = path.read_bytes()
        for position in range(0, len(content), 3 if path.suffix == ".arrow" else 1):
            path.write_bytes(flipped(content, position))
            said = ""
            try:
                store.open(IDENTITY)
                assert store.read() == rows, (path, position)
                assert store.manifest() == IDENTITY
                assert path.name == MANIFEST
                harmless.append(chr(content[position]))
            except UserError as error:
                said = str(error)
            # A manifest whose checksum's key is another word is told by that key.
            assert not said or (str(store.folder) if path.name == MANIFEST else path.name) in said
            assert "\n" not in said
        path.write_bytes(content)
    assert set("".join(harmless)) <= set(" \n")
    assert store.read() == rows


def test_a_store_grows_and_keeps_what_it_has(tmp_path: Path) -> None:
    """The plan's shard 0 is other rows now: what is there stays as it is, the new rows lie beside it."""
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0), row_of(2)])
    before = {path: path.read_bytes() for path in store.folder.iterdir()}
    store.write_shard(0, [row_of(1), row_of(3)])
    store.write_shard(0, [row_of(4)])
    assert len(store.shards()) == 3
    assert all(path.read_bytes() == content for path, content in before.items())
    assert there(store, *range(6)) == [True] * 5 + [False]
    assert not store.present(keys_of(Row("prompt0", 7, "code", [1], [True], [], True)))[0], "another sample"


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
    monkeypatch.setattr(token_store, "MAPPED_SHARDS", 2)
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


def test_a_shard_that_is_gone_is_called_missing_and_not_damaged(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0)])
    rows = store.rows()
    (path,) = rows.files
    path.unlink()
    assert f"{path.name}: this shard is missing" in refused(lambda: rows[0])


def test_keys_see_prompt_sample_ids_and_mask(tmp_path: Path) -> None:
    row = row_of(0)
    others = [
        row,
        replace(row, prompt_id="other"),
        replace(row, sample=1),
        replace(row, input_ids=[*row.input_ids[:-1], 99]),
        replace(row, loss_mask=[True, *row.loss_mask[1:]]),
        replace(row, domain="other", finished=False),
    ]
    keys = []
    for index, other in enumerate(others):
        store = opened(tmp_path / str(index))
        store.write_shard(0, [other])
        keys.append(int(store.rows().examples.keys_N[0]))
    assert len(set(keys)) == 5
    assert keys[0] == keys[5], "a label is no part of it"


def test_a_shard_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.write_shard(0, [row_of(0)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            store.write_shard(1, [row_of(1)])
    assert there(store, 0, 1) == [True, False]
    assert store.read() == [row_of(0)]
    store.write_shard(1, [row_of(1)])
    assert store.read() == [row_of(0), row_of(1)]


def test_a_writer_that_really_runs_out_of_disk_space(tmp_path: Path) -> None:
    store = opened(tmp_path)
    generator = np.random.default_rng(0)
    big = Row("big", 0, "code", generator.integers(0, 2**31, 20000).tolist(), [True] * 20000, [-1.0] * 20000, True)
    with files_no_larger_than(10_000):
        text = refused(lambda: store.write_shard(0, [big]))
    assert "cannot be written" in text
    assert sorted(path.name for path in store.folder.iterdir()) == [MANIFEST]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in refused(lambda: Store(tmp_path / "file" / "store").open(IDENTITY))


def test_a_store_adopts_the_rows_of_others_made_with_the_same(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in "abc"]
    for store, rows in zip(stores, ([1, 2], [3], [4]), strict=True):
        store.open(IDENTITY)
        store.write_shard(0, [row_of(index) for index in rows])
    for other in (stores[1], stores[2], stores[1]):  # each has a shard 0; one is adopted twice
        stores[0].adopt(other)
    assert there(stores[0], 1, 2, 3, 4) == [True] * 4
    assert sorted(row.prompt_id for row in stores[0].read()) == [f"prompt{index}" for index in (1, 2, 3, 4)]
    foreign = Store(tmp_path / "foreign")
    foreign.open({**IDENTITY, "target": "other"})
    assert "made with another target" in refused(lambda: stores[0].adopt(foreign))
    (stores[1].shard_path(0)).write_bytes(b"damaged")
    assert "damaged shard" in refused(lambda: Store(tmp_path / "new").adopt(stores[1]))
