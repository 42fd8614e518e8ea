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
from data.files import MANIFEST
from data.signals import store as signal_store
from data.signals.codec import decode_topk, encode_topk
from data.signals.signal import SampledSignal, TopKSignal
from data.signals.store import ENTRY, INDEX, SignalStore, examples_fingerprint, signal_manifest
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


def manifest_of(kind: str = "topk", examples: Any = EXAMPLES, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": 1.0, "vocab_rows": VOCAB, "target": "abc", "target_dtype": "float32", "seed": 0
    }  # fmt: skip
    entries = changes.pop("entries", K if kind == "topk" else SAMPLES)
    return signal_manifest(kind, entries, examples, **(values | changes))


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
    monkeypatch.setattr(signal_store, "MAPPED_FILES", 2)
    store = filled(tmp_path)
    assert len(list(store.folder.glob("shard-000-*.bin"))) >= 3
    for index in (*range(6), *range(6)):
        assert same(store.read([index]), rounded(signal_of(index)))
    mapped = [one.path for one in psutil.Process().memory_maps() if one.path.startswith(str(store.folder))]
    assert 1 <= len(mapped) <= 2


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
        ({"examples": EXAMPLES[::-1]}, "responses"),
        ({"examples": EXAMPLES[:5]}, "examples"),
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


def test_more_entries_than_tokens_are_refused() -> None:
    assert "signal.k = 301" in refused(lambda: manifest_of(entries=301))
    assert "300 tokens" in refused(lambda: manifest_of(entries=301))
    assert manifest_of(entries=300)["k"] == 300
    assert "255" in refused(lambda: manifest_of("sampled", entries=256))


def test_fingerprint_of_examples_sees_ids_masks_and_borders() -> None:
    def of(*parts: tuple[list[int], list[bool]]) -> str:
        return examples_fingerprint([Example(np.array(ids, np.int32), np.array(mask)) for ids, mask in parts])

    first, second = ([3, 4, 5], [False, True, True]), ([6, 7], [False, True])
    prints = {
        of(first, second), of(second, first), of(first), of(([3, 4, 6], first[1]), second),
        of((first[0], [False, False, True]), second), of(([3, 4, 5, 6], [False, True, True, False]), ([7], [True])),
    }  # fmt: skip
    assert len(prints) == 6
    assert of(first, second) == of(first, second)


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
