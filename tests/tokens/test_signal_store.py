"""The signal store: whole records or none, shared between ranks, and refused by name when it is damaged or another's."""

import errno
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from processes import forked, run_and_kill, run_child
from stored_signals import random_topk
from tiny_training import examples_of

from data.batches.collate import Example
from data.batches.examples import as_examples, example_key
from data.files import MANIFEST
from data.signals import store as signal_store
from data.signals.codec import decode_topk, encode_topk
from data.signals.signal import SampledSignal, TopKSignal
from data.signals.store import ENTRY, INDEX, SignalStore, signal_manifest
from speculative.errors import UserError

VOCAB, K, SAMPLES = 300, 6, 20
EXAMPLES = examples_of([9, 12, 7, 15, 10, 8])
LENGTHS = [example.response_tokens for example in EXAMPLES]


def refused(call: Any) -> str:
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text, text
    return text


def manifest_of(kind: str = "topk", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": 1.0, "vocab_rows": VOCAB, "target": "abc", "target_dtype": "float32", "seed": 0
    }  # fmt: skip
    entries = changes.pop("entries", K if kind == "topk" else SAMPLES)
    return signal_manifest(kind, entries, **(values | changes))


def opened(folder: Path, kind: str = "topk", **options: Any) -> SignalStore:
    store = SignalStore(folder / "signal")
    store.open(manifest_of(kind), LENGTHS, **options)
    return store


def signal_of(index: int, kind: str = "topk", tokens: int | None = None) -> Any:
    tokens = LENGTHS[index] if tokens is None else tokens
    if kind == "topk":
        return random_topk(tokens, K, VOCAB, seed=index)
    generator = np.random.default_rng(index)
    ids_RS = np.sort([generator.choice(VOCAB, 4, replace=False) for _ in range(tokens)]).astype(np.int64)
    counts_RS = np.array([generator.multinomial(SAMPLES, [0.5, 0.3, 0.2, 0.0]) for _ in range(tokens)])
    log_probs_RS = torch.where(torch.from_numpy(counts_RS) > 0, torch.log(torch.rand(tokens, 4)), -torch.inf)
    return SampledSignal(
        torch.from_numpy(ids_RS), torch.from_numpy(counts_RS / SAMPLES).float(), log_probs_RS, torch.rand(tokens)
    )


def filled(folder: Path, kind: str = "topk", **options: Any) -> SignalStore:
    store = opened(folder, kind, **options)
    for index in range(len(LENGTHS)):
        store.write(index, signal_of(index, kind))
    return store


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, getattr(right, name)) for name, value in vars(left).items())


def rounded(signal: TopKSignal) -> TopKSignal:
    record = np.frombuffer(encode_topk(signal, VOCAB), np.uint8)
    return decode_topk(record, len(signal.ids_RK), K, VOCAB)


# --- written and read --------------------------------------------------------------------------------------------------


def test_rows_come_back_in_the_asked_order(tmp_path: Path) -> None:
    store = filled(tmp_path)
    read = store.read([4, 0, 4])
    assert isinstance(read, TopKSignal)
    parts = [rounded(signal_of(index)) for index in (4, 0, 4)]
    assert torch.equal(read.ids_RK, torch.cat([part.ids_RK for part in parts]))
    assert torch.equal(read.log_probs_RK, torch.cat([part.log_probs_RK for part in parts]))
    assert torch.equal(read.log_tail_R, torch.cat([part.log_tail_R for part in parts]))


def test_samples_come_back(tmp_path: Path) -> None:
    store, signal = opened(tmp_path, "sampled"), signal_of(1, "sampled")
    store.write(1, signal)
    read = store.read([1])
    assert isinstance(read, SampledSignal)
    for row in range(LENGTHS[1]):
        drawn = signal.weights_RS[row] > 0
        kept = read.weights_RS[row] > 0
        assert torch.equal(read.ids_RS[row][kept], signal.ids_RS[row][drawn])
        assert torch.equal(read.weights_RS[row][kept], signal.weights_RS[row][drawn])
    assert torch.equal(read.entropy_R, signal.entropy_R)


def test_what_is_missing_is_known_and_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for index in (1, 4):
        store.write(index, signal_of(index))
    assert store.present().tolist() == [False, True, False, False, True, False]
    assert store.missing() == [0, 2, 3, 5]
    assert store.lacking([4, 2, 2, 1]) == [2]
    assert "example 2" in refused(lambda: store.read([1, 2]))
    assert "config.yaml --signal topk" in refused(lambda: store.read([2]))


def test_a_second_opening_reads_what_the_first_wrote_and_goes_on(tmp_path: Path) -> None:
    opened(tmp_path).write(0, signal_of(0))
    second = opened(tmp_path)
    second.write(3, signal_of(3))
    assert same(second.read([0]), rounded(signal_of(0)))
    assert opened(tmp_path).missing() == [1, 2, 4, 5]
    assert len(list(second.folder.glob("shard-*.bin"))) == 2, "nobody appends to a file of another opening"


def test_two_openings_that_pick_a_file_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rank started twice: neither has seen the other's file when it looks."""
    first, second = opened(tmp_path), opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", lambda *_: iter(()))
        for index in range(6):
            (first, second)[index % 2].write(index, signal_of(index))
    assert len(list(first.folder.glob("shard-000-*.bin"))) == 2
    for index in range(6):
        assert same(opened(tmp_path).read([index]), rounded(signal_of(index)))


def test_a_grown_file_is_read_on(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path, rank=1)
    for index in range(4):
        writer.write(index, signal_of(index))
        assert same(reader.read([index]), rounded(signal_of(index)))


def test_a_new_file_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_store, "SHARD_BYTES", 150)
    monkeypatch.setattr(signal_store, "OPEN_FILES", 2)
    store = filled(tmp_path)
    assert len(list(store.folder.glob("shard-000-*.bin"))) >= 3
    for index in (*range(6), *range(6)):
        assert same(store.read([index]), rounded(signal_of(index)))
    shards = str(store.folder / "shard-")
    reading = [one for one in psutil.Process().open_files() if one.path.startswith(shards) and one.mode == "r"]
    assert 1 <= len(reading) <= 2


def test_an_example_without_response_tokens(tmp_path: Path) -> None:
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(), [0, 3])
    store.write(0, signal_of(0, tokens=0))
    assert store.missing() == [1]
    assert len(store.read([0]).log_tail_R) == 0  # type: ignore[union-attr]
    store.write(1, signal_of(1, tokens=3))
    assert len(store.read([0, 1, 0]).log_tail_R) == 3  # type: ignore[union-attr]


def test_rows_of_another_number_or_kind_are_a_fault_of_ours(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="example 0"):
        store.write(0, signal_of(0, tokens=LENGTHS[0] + 1))
    with pytest.raises(ValueError, match="kind topk"):
        store.write(0, signal_of(0, "sampled"))


def test_facts_of_topk(tmp_path: Path) -> None:
    store = filled(tmp_path)
    tails = torch.cat([signal_of(index).log_tail_R for index in range(6)]).double().exp()
    facts = store.facts()
    assert (facts["kind"], facts["examples"], facts["tokens"]) == ("topk", 6, sum(LENGTHS))
    assert facts["tail_mean"] == pytest.approx(float(tails.mean()), rel=1e-12)
    assert facts["tail_max"] == pytest.approx(float(tails.max()), rel=1e-12)
    on_disk = sum(path.stat().st_size for path in store.folder.glob("*.bin"))
    assert facts["bytes_per_token"] == pytest.approx(on_disk / sum(LENGTHS))


def test_facts_of_samples(tmp_path: Path) -> None:
    store = filled(tmp_path, "sampled")
    distinct = torch.cat([(signal_of(index, "sampled").weights_RS > 0).sum(-1) for index in range(6)]).double()
    facts = store.facts()
    assert (facts["distinct_mean"], facts["distinct_max"]) == (pytest.approx(float(distinct.mean())), distinct.max())
    assert "tail_mean" not in facts
    assert opened(tmp_path / "empty").facts()["tail_mean"] == 0.0


def test_bytes_a_token_at_the_size_of_a_real_vocabulary(tmp_path: Path) -> None:
    """<= 400 bytes at k = 64 and 151,936 tokens, index included, for responses of 64 tokens."""
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(entries=64, vocab_rows=151_936), [64])
    store.write(0, random_topk(64, 64, 151_936))
    assert store.facts()["bytes_per_token"] <= 278
    assert sum(path.stat().st_size for path in store.folder.glob("*.bin")) / 64 <= 278


# --- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_one_flipped_byte_anywhere_is_refused_by_name_or_harmless(tmp_path: Path, kind: str) -> None:
    """Every byte of every file. Harmless means: what is read is what was written."""
    whole = filled(tmp_path, kind).read(range(6))
    folder, harmless = tmp_path / "signal", []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in range(len(content)):
            mask = 1 << (position % 8)
            path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
            try:
                store = opened(tmp_path, kind)
                read = store.read(range(6))
                assert store.missing() == []
                store.verify()
                store.close()
            except UserError as error:
                text = str(error)
                assert "\n" not in text
                named = path.name if path.suffix == ".bin" else str(folder)
                assert named in text, (path, position, text)
                continue
            assert same(read, whole), (path, position)
            harmless.append((path.name, position))
        path.write_bytes(content)
    # Only white space of the manifest may be another character and mean the same.
    assert {name for name, _ in harmless} <= {MANIFEST}
    text = (folder / MANIFEST).read_text()
    assert all(text[position].isspace() for _, position in harmless)


@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    whole = filled(tmp_path, kind).read(range(6))
    folder = tmp_path / "signal"
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for length in {0, 1, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:length])
            if path.name == MANIFEST and length == len(content) - 1:
                continue  # the line end
            text = refused(lambda: opened(tmp_path, kind).read(range(6)))
            assert path.name in text, (path, length)
        path.unlink()
        if path.name != MANIFEST:
            assert path.name in refused(lambda: opened(tmp_path, kind).read(range(6)))
        path.write_bytes(content)
    assert same(opened(tmp_path, kind).read(range(6)), whole)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(bytes(content))


def offset_of(store: SignalStore, index: int) -> int:
    return int(np.fromfile(store.folder / INDEX, ENTRY)[index]["offset"])


def test_the_refusal_names_file_example_and_remedy(tmp_path: Path) -> None:
    store = filled(tmp_path)
    flip(tmp_path / "signal" / "shard-000-000.bin", offset_of(store, 2) + 1)
    for call in (lambda: opened(tmp_path).read([2]), lambda: opened(tmp_path).verify()):
        text = refused(call)
        assert str(store.folder / "shard-000-000.bin") in text
        assert "example 2" in text
        assert "config.yaml --signal topk" in text
    assert same(opened(tmp_path).read([1, 3]), store.read([1, 3])), "the others are whole"


@pytest.mark.parametrize("where", ["record", "entry"])
@pytest.mark.parametrize("look", ["lacking", "verify"])
def test_whoever_repairs_makes_the_damaged_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, look: str
) -> None:
    whole = filled(tmp_path).read(range(6))
    store = opened(tmp_path)
    path = store.folder / ("shard-000-000.bin" if where == "record" else INDEX)
    flip(path, offset_of(store, 2) + 1 if where == "record" else 2 * ENTRY.itemsize + 9)
    repairing = opened(tmp_path, repair=True)
    if look == "verify":
        repairing.verify()
        assert repairing.missing() == [2]
    assert repairing.lacking(range(6)) == [2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert path.name in said[0]
    assert "example 2" in said[0]
    repairing.write(2, signal_of(2))
    assert repairing.lacking(range(6)) == []
    assert same(opened(tmp_path).read(range(6)), whole)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"target": "xyz"}, "target"),
        ({"target_dtype": "bfloat16"}, "target_dtype"),
        ({"temperature": 2.0}, "temperature"),
        ({"vocab_rows": 301}, "vocab_rows"),
        ({"entries": 7}, "k"),
        ({"prompts": True}, "prompt_tokens"),
    ],
)
def test_a_foreign_store_is_refused_by_key(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    store = filled(tmp_path)
    text = refused(lambda: SignalStore(store.folder).open(manifest_of(**change), LENGTHS, repair=True))
    assert f"another {key} " in text
    assert str(store.folder) in text
    assert store.missing() == [], "nothing is lost"


def test_another_seed_matters_for_samples_only(tmp_path: Path) -> None:
    filled(tmp_path / "a", "sampled")
    text = refused(lambda: SignalStore(tmp_path / "a" / "signal").open(manifest_of("sampled", seed=1), LENGTHS))
    assert "another seed (0, now 1)" in text
    filled(tmp_path / "b")
    SignalStore(tmp_path / "b" / "signal").open(manifest_of(seed=1), LENGTHS)


def test_files_of_another_store_do_not_fit(tmp_path: Path) -> None:
    """Same sizes, another target: entries and records are bound to their manifest."""
    store, other = filled(tmp_path), SignalStore(tmp_path / "other")
    other.open(manifest_of(target="xyz"), LENGTHS)
    for index in range(6):
        other.write(index, signal_of(5 - index, tokens=LENGTHS[index]))
    for name in (INDEX, "shard-000-000.bin"):
        content = (store.folder / name).read_bytes()
        (store.folder / name).write_bytes((other.folder / name).read_bytes())
        assert name in refused(lambda: opened(tmp_path).read(range(6)))
        (store.folder / name).write_bytes(content)


def test_records_of_two_examples_cannot_change_places(tmp_path: Path) -> None:
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(), [4, 4])
    for index in range(2):
        store.write(index, signal_of(index, tokens=4))
    path = store.folder / INDEX
    content = path.read_bytes()
    path.write_bytes(content[ENTRY.itemsize :] + content[: ENTRY.itemsize])
    assert INDEX in refused(lambda: store.read([0]))
    anew = SignalStore(tmp_path / "signal")
    anew.open(manifest_of(), [4, 4])
    assert same(anew.read([0]), rounded(signal_of(0, tokens=4))), "where an entry lies does not matter"


def test_more_entries_than_tokens_are_refused() -> None:
    assert "signal.k = 301" in refused(lambda: manifest_of(entries=301))
    assert "300 tokens" in refused(lambda: manifest_of(entries=301))
    assert manifest_of(entries=300)["k"] == 300
    assert "255" in refused(lambda: manifest_of("sampled", entries=256))


def test_a_key_sees_ids_masks_and_borders() -> None:
    parts = [
        ([3, 4, 5], [False, True, True]), ([6, 7], [False, True]), ([3, 4, 6], [False, True, True]),
        ([3, 4, 5], [False, False, True]), ([3, 4, 5, 6], [False, True, True, False]), ([7], [True]),
    ]  # fmt: skip
    examples = [Example(np.array(ids, np.int32), np.array(mask)) for ids, mask in parts]
    keys = as_examples(examples).keys_N.tolist()
    assert len(set(keys)) == 6
    assert as_examples(examples[::-1]).keys_N.tolist() == keys[::-1]
    assert example_key(examples[0].input_ids, examples[0].loss_mask, "name") != keys[0]


def keyed(folder: Path, keys: list[int], **options: Any) -> SignalStore:
    """A store opened for the examples of these keys, each of as many tokens as its key says."""
    store = SignalStore(folder / "signal")
    store.open(manifest_of(), keys, [1 << 60 | key for key in keys], **options)
    return store


def test_a_store_grows_by_keys(tmp_path: Path) -> None:
    """What is known of an example is found again whatever its number, beside whichever others."""
    first = keyed(tmp_path, [3, 5, 7])
    for number, key in enumerate([3, 5, 7]):
        first.write(number, signal_of(0, tokens=key))
    files = {path: path.read_bytes() for path in first.folder.glob("shard-*")}
    grown = keyed(tmp_path, [4, 7, 3, 6, 5])
    assert grown.missing() == [0, 3]
    assert grown.facts()["tokens"] == 15
    for number, key in ((0, 4), (3, 6)):
        grown.write(number, signal_of(0, tokens=key))
    assert all(path.read_bytes() == content for path, content in files.items())
    for order in ([4, 7, 3, 6, 5], [7, 4], [3], [6, 5, 4, 3]):
        store = keyed(tmp_path, order)
        assert store.missing() == []
        store.check_files()
        for number, key in enumerate(order):
            assert same(store.read([number]), rounded(signal_of(0, tokens=key)))
    assert same(first.read([2]), rounded(signal_of(0, tokens=7))), "an older opening reads on"


def test_free_places_are_used_again_and_ranks_agree_on_them(tmp_path: Path) -> None:
    store = keyed(tmp_path, [3, 4, 5, 6])
    for number in (0, 2, 3):
        store.write(number, signal_of(0, tokens=3 + number))
    one, other = keyed(tmp_path, [8, 6, 4, 3, 9]), keyed(tmp_path, [8, 6, 4, 3, 9], rank=1)
    assert one.missing() == [0, 2, 4]
    one.write(0, signal_of(0, tokens=8))
    late = keyed(tmp_path, [8, 6, 4, 3, 9], rank=2)
    other.write(2, signal_of(0, tokens=4))
    late.write(4, signal_of(0, tokens=9))
    whole = keyed(tmp_path, [3, 4, 5, 6, 8, 9])
    assert whole.missing() == []
    for number, key in enumerate([3, 4, 5, 6, 8, 9]):
        assert same(whole.read([number]), rounded(signal_of(0, tokens=key)))
    assert (whole.folder / INDEX).stat().st_size == 6 * ENTRY.itemsize


@pytest.mark.parametrize(("damage", "said"), [("cut", "ends early"), ("gone", "missing")])
def test_a_look_at_the_files_finds_what_is_not_there(tmp_path: Path, damage: str, said: str) -> None:
    store = filled(tmp_path)
    store.check_files()
    path = store.folder / "shard-000-000.bin"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    text = refused(opened(tmp_path).check_files)
    assert f"{path}: {said}" in text
    assert "--signal topk" in text


def test_folders_are_not_listed_at_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *given: (listed.append(given[1]), glob(*given))[1])
    filled(tmp_path)
    assert len(listed) == 1


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.write(0, signal_of(0))
    write, room = os.write, [10]

    def full(file: int, content: Any) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(file, content[: room[0]])
        room[0] -= taken
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        text = refused(lambda: store.write(1, signal_of(1)))
    assert "No space left" in text
    assert str(store.folder) in text
    assert store.missing() == [1, 2, 3, 4, 5]
    store.write(1, signal_of(1))  # behind the ten bytes that nobody points to
    assert same(opened(tmp_path).read([1]), rounded(signal_of(1)))
    assert same(opened(tmp_path).read([0]), rounded(signal_of(0)))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "signal").write_text("in the way")
    assert "cannot be written" in refused(lambda: opened(tmp_path))


# --- several writers, and their deaths ---------------------------------------------------------------------------------

MANY = 300


def _fill_in_child(folder: Path, rank: int, ranks: int) -> None:
    store = SignalStore(folder / "signal")
    store.open(manifest_of(), [5] * MANY, rank=rank, repair=True)
    for index in store.missing():
        if index % ranks == rank:
            store.write(index, signal_of(index, tokens=5))
            time.sleep(0.0002)


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    generator, kills = random.Random(0), 0
    index = tmp_path / "signal" / INDEX

    def written() -> int:
        return int(np.fromfile(index, ENTRY)["tokens"].astype(bool).sum()) if index.exists() else 0

    while run_and_kill(_fill_in_child, tmp_path, 0, 1, progress=written, generator=generator, most=40) != 0:
        kills += 1
        assert kills < 100
        if (tmp_path / "signal" / MANIFEST).exists():
            store = SignalStore(tmp_path / "signal")
            store.open(manifest_of(), [5] * MANY)  # not to repair: nothing may need it
            store.verify()
            store.close()
    assert kills >= 3
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(), [5] * MANY)
    assert store.missing() == []
    for number in range(MANY):
        assert same(store.read([number]), rounded(signal_of(number, tokens=5)))


def test_two_ranks_write_at_once(tmp_path: Path) -> None:
    with forked(_fill_in_child, tmp_path, 0, 2) as one, forked(_fill_in_child, tmp_path, 1, 2) as other:
        one.join(60)
        other.join(60)
        assert (one.exitcode, other.exitcode) == (0, 0)
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(), [5] * MANY)
    assert store.missing() == []
    for number in range(MANY):
        assert same(store.read([number]), rounded(signal_of(number, tokens=5)))
    assert {path.name[:9] for path in store.folder.glob("shard-*")} == {"shard-000", "shard-001"}


def test_a_killed_rank_costs_the_other_nothing(tmp_path: Path) -> None:
    index = tmp_path / "signal" / INDEX

    def written() -> int:
        return int(np.fromfile(index, ENTRY)["tokens"].astype(bool).sum()) if index.exists() else 0

    with forked(_fill_in_child, tmp_path, 1, 2) as other:
        run_and_kill(_fill_in_child, tmp_path, 0, 2, progress=written, generator=random.Random(1), most=100)
        other.join(60)
        assert other.exitcode == 0
    assert run_child(_fill_in_child, tmp_path, 0, 1) == 0
    store = SignalStore(tmp_path / "signal")
    store.open(manifest_of(), [5] * MANY)
    assert store.missing() == []
    store.verify()
    assert json.loads((store.folder / MANIFEST).read_text())["kind"] == "topk"
