"""The teacher's signal in shards: whole rows or none, shared between ranks, and refused by name when damaged."""

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from processes import forked, run_and_kill, run_child
from refusals import refused
from simulation import trials
from stored_signals import random_topk
from tiny_training import examples_of

from data.batches.collate import Example
from data.batches.examples import as_examples, example_key
from data.signals import store as signal_store
from data.signals.columns import decode, encode
from data.signals.signal import TopKSignal, joined
from data.signals.store import SHARDS, SignalStore, signal_manifest
from speculative.errors import UserError

VOCAB, K = 300, 6
EXAMPLES = examples_of([9, 12, 7, 15, 10, 8])
LENGTHS = [example.response_tokens for example in EXAMPLES]


def manifest_of(k: int = K, **changes: Any) -> dict[str, Any]:
    return signal_manifest(
        k, **({"temperature": 1.0, "vocab_rows": VOCAB, "target": "abc", "target_dtype": "float32"} | changes)
    )


def opened(folder: Path, lengths: Any = LENGTHS, keys: Any = None, **options: Any) -> SignalStore:
    store = SignalStore(folder / "responses" / "train")
    store.open(manifest_of(**options.pop("changes", {})), lengths, keys, **options)
    return store


def signal_of(index: int, tokens: int | None = None) -> TopKSignal:
    return random_topk(LENGTHS[index] if tokens is None else tokens, K, VOCAB, seed=index)


def filled(folder: Path, lengths: Any = LENGTHS, **options: Any) -> SignalStore:
    """In messages of two."""
    store = opened(folder, lengths, **options)
    for index in range(0, len(lengths), 2):
        store.write({n: signal_of(n, lengths[n]) for n in range(index, min(index + 2, len(lengths)))})
    return store


def rounded(signal: TopKSignal) -> TopKSignal:
    return decode(encode(signal, VOCAB), len(signal.ids_RK), K, VOCAB)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(SHARDS))


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, getattr(right, name)) for name, value in vars(left).items())


# --- written and read --------------------------------------------------------------------------------------------------


def test_rows_come_back_in_the_asked_order(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for order in ([4, 0, 4], [5]):
        assert same(store.read(order), joined([rounded(signal_of(index)) for index in order]))
    assert len(next(iter(vars(store.read([])).values()))) == 0


def test_others_read_the_shards_too(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (path,) = files(tmp_path)
    table = datasets.Dataset.from_file(str(path)).with_format("numpy")
    assert table.num_rows == 6
    np.testing.assert_array_equal(table[2]["ids"].reshape(-1, K), signal_of(2).ids_RK)  # type: ignore[union-attr]


def test_what_is_missing_is_known_and_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write({index: signal_of(index) for index in (1, 4)})
    assert store.present().tolist() == [False, True, False, False, True, False]
    assert store.missing() == [0, 2, 3, 5]
    assert store.lacking([4, 2, 2, 1]) == [2]
    text = refused(lambda: store.read([1, 2]))
    assert "example 2" in text
    assert "config.yaml --signal topk" in text


def test_a_second_opening_goes_on_in_a_file_of_its_own_and_each_sees_the_other(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.write({0: signal_of(0)})
    second.write({3: signal_of(3)})
    for index in range(4, 6):
        first.write({index: signal_of(index)})
        assert second.lacking([index]) == []
        assert same(second.read([index]), rounded(signal_of(index))), "a grown file is read on"
    assert opened(tmp_path).missing() == second.missing() == [1, 2]
    assert len(files(tmp_path)) == 2


def test_a_new_file_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_store, "SHARD_BYTES", 1500)
    monkeypatch.setattr(signal_store, "MAPPED_FILES", 2)
    store = filled(tmp_path)
    assert len(files(tmp_path)) == 3
    for index in (*range(6), *range(6)):
        assert same(store.read([index]), rounded(signal_of(index)))


def test_an_example_without_response_tokens(tmp_path: Path) -> None:
    store = opened(tmp_path, lengths=[0, 3])
    store.write({0: signal_of(0, tokens=0)})
    assert store.missing() == [1]
    store.write({1: signal_of(1, tokens=3)})
    assert [len(store.read(order).ids_RK) for order in ([0], [0, 1, 0])] == [0, 3]  # type: ignore[union-attr]


def test_rows_of_another_number_are_a_fault_of_ours(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="example 0 has"):
        store.write({0: signal_of(0, tokens=LENGTHS[0] + 1)})


def test_facts(tmp_path: Path) -> None:
    store = filled(tmp_path)
    tails = torch.cat([signal_of(index).log_tail_R for index in range(6)]).double().exp()  # type: ignore[union-attr]
    facts = store.facts()
    assert (facts.examples, facts.tokens) == (6, sum(LENGTHS))
    assert facts.mean == pytest.approx(float(tails.mean()), rel=1e-12)
    assert facts.largest == pytest.approx(float(tails.max()), rel=1e-12)
    assert facts.bytes_per_token == pytest.approx(files(tmp_path)[0].stat().st_size / sum(LENGTHS))
    assert opened(tmp_path / "empty").facts().mean == 0.0


def test_bytes_a_token_at_the_size_of_a_real_vocabulary(tmp_path: Path) -> None:
    """<= 300 bytes at k = 64 and 151,936 tokens, a message for every eight responses of 64 tokens."""
    store = opened(tmp_path, lengths=[64] * 8, changes={"k": 64, "vocab_rows": 151_936})
    signal = random_topk(64, 64, 151_936)
    store.write(dict.fromkeys(range(8), signal))
    assert store.facts().bytes_per_token == files(tmp_path)[0].stat().st_size / 512 <= 285


def test_more_entries_than_tokens_are_refused() -> None:
    assert "signal.k = 301: the target's vocabulary has 300 tokens" in refused(lambda: manifest_of(301))
    assert manifest_of(300)["k"] == 300


def test_a_key_sees_ids_masks_and_borders() -> None:
    parts = [
        ([3, 4, 5], [False, True, True]),
        ([6, 7], [False, True]),
        ([3, 4, 6], [False, True, True]),
        ([3, 4, 5], [False, False, True]),
        ([3, 4, 5, 6], [False, True, True, False]),
        ([7], [True]),
    ]
    examples = [Example(np.array(ids, np.int32), np.array(mask)) for ids, mask in parts]
    keys = as_examples(examples).keys_N.tolist()
    assert len(set(keys)) == 6
    assert as_examples(examples[::-1]).keys_N.tolist() == keys[::-1]
    assert example_key(examples[0].input_ids, examples[0].loss_mask, "name") != keys[0]


def keyed(folder: Path, keys: list[int]) -> SignalStore:
    """A store opened for the examples of these keys, each of as many tokens as its key says."""
    return opened(folder, keys, [1 << 60 | key for key in keys])


def test_a_store_grows_by_keys(tmp_path: Path) -> None:
    """What is known of an example is found again whatever its number, beside whichever others."""
    first = keyed(tmp_path, [3, 5, 7])
    first.write({number: signal_of(0, tokens=key) for number, key in enumerate([3, 5, 7])})
    before = {path: path.read_bytes() for path in files(tmp_path)}
    grown = keyed(tmp_path, [4, 7, 3, 6, 5])
    assert grown.missing() == [0, 3]
    assert grown.facts().tokens == 15
    for number, key in ((0, 4), (3, 6)):
        grown.write({number: signal_of(0, tokens=key)})
    assert all(path.read_bytes() == content for path, content in before.items())
    for order in ([4, 7, 3, 6, 5], [7, 4], [3], [6, 5, 4, 3], [3, 3]):
        store = keyed(tmp_path, order)
        assert store.missing() == []
        for number, key in enumerate(order):
            assert same(store.read([number]), rounded(signal_of(0, tokens=key)))
    assert same(first.read([2]), rounded(signal_of(0, tokens=7))), "an older opening reads on"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"target": "xyz"}, "target"),
        ({"target_dtype": "bfloat16"}, "target_dtype"),
        ({"temperature": 2.0}, "temperature"),
        ({"vocab_rows": 301}, "vocab_rows"),
        ({"k": 7}, "k"),
        ({"prompts": True}, "prompt_tokens"),
    ],
)
def test_signals_of_other_settings_stand_beside_each_other(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    store, other = filled(tmp_path), opened(tmp_path, changes=change)
    assert other.missing() == list(range(6))
    assert f"another {key} " in other.faults()[0]
    other.write({0: random_topk(LENGTHS[0], change.get("k", K), VOCAB)})
    assert (other.missing(), store.missing()) == ([1, 2, 3, 4, 5], [])
    assert same(opened(tmp_path).read([0]), store.read([0]))


# --- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.simulation
def test_one_flipped_byte_anywhere_is_refused_by_name_missing_or_harmless(tmp_path: Path) -> None:
    """Every third byte, in `make prove` each. Missing: of a row no other byte is read. Harmless: what is read is what was written."""
    lengths = [1, 2, 1]  # two messages, of two rows and one
    whole, refusals = filled(tmp_path, lengths).read(range(3)), 0
    (path,) = files(tmp_path)
    content = path.read_bytes()
    for position in range(0, len(content), step := trials(3, 1)):
        mask = 1 << (position % 8)
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
        store = opened(tmp_path, lengths)
        present = np.flatnonzero(store.present()).tolist()
        try:
            read = [store.read([number]) for number in present]
        except UserError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert "\n" not in said
            assert path.name in said, (position, said)
            refusals += 1
            continue
        starts = np.cumsum([0, *lengths])
        for number, signal in zip(present, read, strict=True):
            wanted = whole.rows(slice(int(starts[number]), int(starts[number + 1])))
            assert same(signal, wanted), (position, number)
    values = (part for n in range(3) for part in encode(signal_of(n, lengths[n]), VOCAB).values())
    assert refusals >= sum(part.nbytes // step for part in values), "every byte of a value at least"


@pytest.mark.simulation
def test_of_a_truncated_file_only_whole_rows_are_there(tmp_path: Path) -> None:
    filled(tmp_path)
    (path,) = files(tmp_path)
    content, found = path.read_bytes(), set()
    for length in range(0, len(content), trials(21, 7)):
        path.write_bytes(content[:length])
        store = opened(tmp_path)
        present = np.flatnonzero(store.present()).tolist()
        assert present == list(range(len(present)))
        store.read(present)
        found.add(len(present))
        said = store.faults()
    assert found == {0, 2, 4}
    assert said == [f"{path.name} ends in the middle of a row or is damaged"]
    path.unlink()
    assert len(opened(tmp_path).missing()) == 6


def flip(path: Path, pattern: bytes) -> None:
    """Changes a bit within bytes that stand in a file once."""
    content = path.read_bytes()
    assert content.count(pattern) == 1
    position = content.index(pattern) + len(pattern) // 2
    path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])


def test_the_refusal_names_file_example_and_remedy(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (path,) = files(tmp_path)
    flip(path, encode(signal_of(2), VOCAB)["ids"].tobytes())
    for call in (lambda: opened(tmp_path).read([2]), lambda: opened(tmp_path).verify()):
        text = refused(call)
        assert str(path) in text
        assert "example 2" in text
        assert "config.yaml --signal topk" in text
    assert same(opened(tmp_path).read([1, 3]), store.read([1, 3])), "the others are whole"


@pytest.mark.parametrize("look", ["lacking", "verify"])
def test_whoever_repairs_makes_a_damaged_shard_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], look: str
) -> None:
    whole = filled(tmp_path).read(range(6))
    (path,) = files(tmp_path)
    flip(path, encode(signal_of(2), VOCAB)["log_probs"].tobytes())
    repairing, beside = opened(tmp_path, repair=True), opened(tmp_path, repair=True, rank=1)
    if look == "verify":
        repairing.verify()
        beside.verify()
    assert repairing.lacking(range(6))[-4:] == [2, 3, 4, 5]
    assert repairing.missing() == beside.missing() == list(range(6))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert path.name in said[0]
    assert "example 2" in said[0]
    repairing.write({index: signal_of(index) for index in range(6)})
    assert repairing.lacking(range(6)) == beside.lacking(range(6)) == []
    assert same(opened(tmp_path).read(range(6)), whole)


def test_rows_of_another_store_do_not_fit(tmp_path: Path) -> None:
    """Same sizes, another target or another example: a row's checksum begins with its settings and its key."""
    store, other = filled(tmp_path / "a"), opened(tmp_path / "b", changes={"target": "xyz"})
    other.write({index: signal_of(index) for index in range(6)})
    (own,), (foreign,) = files(tmp_path / "a"), files(tmp_path / "b")
    own.write_bytes(foreign.read_bytes().replace(b"xyz", b"abc"))
    assert own.name in refused(lambda: opened(tmp_path / "a").read([0]))
    store = opened(tmp_path / "c", lengths=[4, 4])
    store.write({index: signal_of(index, tokens=4) for index in range(2)})
    (path,) = files(tmp_path / "c")
    keys = np.arange(2, dtype=np.uint64)
    path.write_bytes(path.read_bytes().replace(keys.tobytes(), keys[::-1].tobytes()))
    assert path.name in refused(lambda: opened(tmp_path / "c", lengths=[4, 4]).read([0]))


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.write({0: signal_of(0)})
    write, left = os.write, [10]

    def full(file: int, content: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(file, content[: left[0]])
        left[0] -= taken
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        text = refused(lambda: store.write({1: signal_of(1)}))
    assert "No space left" in text
    assert str(store.folder) in text
    assert store.missing() == [1, 2, 3, 4, 5]
    store.write({1: signal_of(1)})  # in another file: nothing is read behind the ten bytes
    assert same(opened(tmp_path).read([0, 1]), store.read([0, 1]))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "responses").write_text("in the way")
    assert "cannot be written" in refused(lambda: opened(tmp_path).write({0: signal_of(0)}))


# --- several writers, and their deaths ---------------------------------------------------------------------------------

MANY = 300


def _fill_in_child(folder: Path, rank: int, ranks: int) -> None:
    store = opened(folder, lengths=[5] * MANY, rank=rank, repair=True)
    for index in store.missing():
        if index % ranks == rank:
            store.write({index: signal_of(index, tokens=5)})
            time.sleep(0.0002)


def whole(folder: Path) -> SignalStore:
    store = opened(folder, lengths=[5] * MANY)
    assert store.missing() == []
    for number in range(MANY):
        assert same(store.read([number]), rounded(signal_of(number, tokens=5)))
    return store


def written(folder: Path) -> Any:
    return lambda: sum(path.stat().st_size for path in files(folder)) // 600


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    generator, kills = random.Random(0), 0
    while run_and_kill(_fill_in_child, tmp_path, 0, 1, progress=written(tmp_path), generator=generator, most=40) != 0:
        kills += 1
        assert kills < 100
        opened(tmp_path, lengths=[5] * MANY).verify()  # not to repair: nothing may need it
    assert kills >= 3
    whole(tmp_path)


def test_ranks_write_at_once_and_a_killed_one_costs_the_others_nothing(tmp_path: Path) -> None:
    with forked(_fill_in_child, tmp_path, 1, 2) as other:
        run_and_kill(_fill_in_child, tmp_path, 0, 2, progress=written(tmp_path), generator=random.Random(1), most=100)
        other.join(60)
        assert other.exitcode == 0
    assert run_child(_fill_in_child, tmp_path, 0, 1) == 0
    whole(tmp_path).verify()
    assert {path.name[:10] for path in files(tmp_path)} == {"signal-000", "signal-001"}
