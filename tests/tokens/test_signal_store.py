"""The teacher's signal in shards: whole rows or none, shared between ranks, and refused by name when damaged."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failures import files_no_larger_than
from processes import forked, run_and_kill, run_child
from refusals import refused
from stored_signals import random_topk
from tiny_training import examples_of

from data.batches.collate import Example
from data.batches.examples import as_examples, example_key
from data.shards import Shards
from data.signals.columns import decode, encode
from data.signals.signal import TopKSignal, joined
from data.signals.store import SignalStore, signal_manifest

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
    """In files of two examples."""
    store = opened(folder, lengths, **options)
    for index in range(0, len(lengths), 2):
        store.write({n: signal_of(n, lengths[n]) for n in range(index, min(index + 2, len(lengths)))})
    return store


def rounded(signal: TopKSignal) -> TopKSignal:
    return decode(encode(signal, VOCAB), len(signal.ids_RK), K, VOCAB)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("topk-*"))


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, getattr(right, name)) for name, value in vars(left).items())


# --- written and read --------------------------------------------------------------------------------------------------


def test_rows_come_back_in_the_asked_order(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for order in ([4, 0, 4], [5]):
        assert same(store.read(order), joined([rounded(signal_of(index)) for index in order]))
    assert len(next(iter(vars(store.read([])).values()))) == 0


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write({index: signal_of(index) for index in (1, 4)})
    assert store.present().tolist() == [False, True, False, False, True, False]
    assert store.missing() == [0, 2, 3, 5]
    assert store.lacking([4, 2, 2, 1]) == [2]
    text = refused(lambda: store.read([1, 2]))
    assert "example 2" in text
    assert "config.yaml --signal topk" in text


def test_rows_of_another_number_are_a_fault_of_ours(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="example 0 has"):
        store.write({0: signal_of(0, tokens=LENGTHS[0] + 1)})


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


def test_facts(tmp_path: Path) -> None:
    store = filled(tmp_path)
    tails = torch.cat([signal_of(index).log_tail_R for index in range(6)]).double().exp()
    facts = store.facts()
    assert (facts.examples, facts.tokens) == (6, sum(LENGTHS))
    assert facts.mean == pytest.approx(float(tails.mean()), rel=1e-12)
    assert facts.largest == pytest.approx(float(tails.max()), rel=1e-12)
    assert facts.bytes_per_token == sum(path.stat().st_size for path in files(tmp_path)) / sum(LENGTHS)
    assert opened(tmp_path / "empty").facts().mean == 0.0
    large = opened(tmp_path / "large", lengths=[64] * 8, changes={"k": 64, "vocab_rows": 151_936})
    large.write(dict.fromkeys(range(8), random_topk(64, 64, 151_936)))
    assert large.facts().bytes_per_token <= 290, "at the size of a real vocabulary"


def test_an_example_without_response_tokens(tmp_path: Path) -> None:
    store = opened(tmp_path, lengths=[0, 3])
    store.write({0: signal_of(0, tokens=0)})
    assert store.missing() == [1]
    with pytest.raises(ValueError, match="example 1 has 3 tokens, not 4"):
        store.write({1: signal_of(1, tokens=4)})
    store.write({1: signal_of(1, tokens=3)})
    assert [len(store.read(order).ids_RK) for order in ([0], [0, 1, 0])] == [0, 3]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_file_is_refused_by_name_or_made_again(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = filled(tmp_path).read(range(6))
    path = next(file for file in files(tmp_path) if encode(signal_of(2), VOCAB)["ids"].tobytes() in file.read_bytes())
    content = path.read_bytes()
    middle = content.index(encode(signal_of(2), VOCAB)["ids"].tobytes())
    flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
    path.write_bytes({"flip": flipped, "cut": content[:-1], "empty": b""}[harm])

    def whole() -> SignalStore:
        store = opened(tmp_path)
        store.verify()
        return store

    for call in (whole, lambda: opened(tmp_path).read([2])):
        message = refused(call)
        assert message.startswith(f"{path}: damaged shard (")
        assert message.endswith("--signal topk` to make its rows again")
    if harm == "flip":
        assert same(opened(tmp_path).read([0, 1, 4, 5]), joined([rounded(signal_of(n)) for n in (0, 1, 4, 5)]))
    repairing, beside = opened(tmp_path, repair=True), opened(tmp_path, repair=True)
    assert repairing.lacking(range(6)) == repairing.missing() == beside.missing() == [2, 3]
    assert capsys.readouterr().err.count("\n") == 1
    repairing.write({index: signal_of(index) for index in (2, 3)})
    assert repairing.lacking(range(6)) == beside.lacking(range(6)) == []
    assert same(opened(tmp_path).read(range(6)), expected)


def test_a_file_that_another_rank_deleted_meanwhile_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    listed = Shards.names
    monkeypatch.setattr(Shards, "names", lambda shards: [*listed(shards), "topk-0123456789abcdef.arrow"])
    assert opened(tmp_path, repair=True).missing() == []


def test_a_file_with_any_byte_flipped_or_of_any_length_is_refused_and_made_again(tmp_path: Path) -> None:
    lengths = [2, 1]
    store = filled(tmp_path, lengths)
    (path,), expected = files(tmp_path), store.read([0, 1])
    store.close()
    content = path.read_bytes()

    def read_back() -> None:
        store = opened(tmp_path, lengths)
        store.faults()
        store.read([0, 1])

    flips = [content[:at] + bytes([byte ^ 1 << at % 8]) + content[at + 1 :] for at, byte in enumerate(content)]
    for number, harmed in enumerate([*flips, *(content[:size] for size in range(len(content)))]):
        path.write_bytes(harmed)
        refused(read_back)
        if number % 7 == 0:
            repairing = opened(tmp_path, lengths, repair=True)
            assert repairing.lacking([0, 1]) == [0, 1], number
    repairing.write({index: signal_of(index, lengths[index]) for index in (0, 1)})
    assert same(opened(tmp_path, lengths).read([0, 1]), expected)


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write({0: signal_of(0)})
    with files_no_larger_than(100):
        assert "earlier shards stay" in refused(lambda: store.write({1: signal_of(1)}))
    assert store.missing() == [1, 2, 3, 4, 5]
    store.write({1: signal_of(1)})
    assert same(opened(tmp_path).read([0, 1]), store.read([0, 1]))


# --- several writers, and their deaths ---------------------------------------------------------------------------------

MANY = 300


def whole(folder: Path) -> SignalStore:
    store = opened(folder, lengths=[5] * MANY)
    assert store.missing() == []
    for number in range(MANY):
        assert same(store.read([number]), rounded(signal_of(number, tokens=5)))
    return store


def _fill_in_child(folder: Path, rank: int, ranks: int) -> None:
    store = opened(folder, lengths=[5] * MANY, repair=True)
    for index in store.missing():
        if index % ranks == rank:
            store.write({index: signal_of(index, tokens=5)})
            time.sleep(0.0002)


def written(folder: Path) -> Any:
    return lambda: len(files(folder))


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    generator, kills = random.Random(0), 0
    while run_and_kill(_fill_in_child, tmp_path, 0, 1, progress=written(tmp_path), generator=generator, most=40) != 0:
        kills += 1
        assert kills < 100
        opened(tmp_path, lengths=[5] * MANY).verify()  # not to repair: nothing may need it
    assert kills >= 3
    whole(tmp_path)


def test_a_killed_rank_costs_the_others_nothing(tmp_path: Path) -> None:
    with forked(_fill_in_child, tmp_path, 1, 2) as other:
        run_and_kill(_fill_in_child, tmp_path, 0, 2, progress=written(tmp_path), generator=random.Random(1), most=100)
        other.join(60)
        assert other.exitcode == 0
    assert run_child(_fill_in_child, tmp_path, 0, 1) == 0
    whole(tmp_path).verify()
