"""Logs of acceptance: each format as its writer writes it, torn and damaged ones, and what none of them is."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from data.responses.acceptance_log import EXPECTED, AcceptanceRecord, read_acceptance_log
from speculative.decoder.proposal_log import ProposalLog

# The engines' own words around made-up counts: vLLM since 0.9 (0.8 said less), llama-server since June 2026 and before.
VLLM = (
    "(APIServer pid=1) INFO 09-04 11:01:16 [loggers.py:311] Engine 000: Avg prompt throughput: 1.1 tokens/s, Running: 1 reqs\n"
    "(APIServer pid=1) INFO 09-04 11:01:16 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.31, Accepted "
    "throughput: 13.10 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: 131 tokens, Drafted: 300 tokens, Per-position "
    "acceptance rate: 0.700, 0.400, 0.210, Avg Draft acceptance rate: 43.7%\n"
    "(APIServer pid=1) INFO 09-04 11:01:26 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.00, Accepted "
    "throughput: 0.00 tokens/s, Drafted throughput: 0.60 tokens/s, Accepted: 0 tokens, Drafted: 6 tokens, Per-position "
    "acceptance rate: 0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%\n"
)
VLLM_08 = "INFO 04-01 10:00:00 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 33 tokens, Drafted: 66 tokens\n"
LLAMA = (
    "0.06.895.999 I slot print_timing: id  1 | task 0 |       total time =    2596.83 ms /   276 tokens\n"
    "0.06.896.015 I slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92\n"
    "0.09.100.015 I slot print_timing: id  1 | task 9 | draft acceptance = 0.00000 (    0 accepted /     8 generated), mean len =  1.00\n"
)
LLAMA_OLD = (
    "slot print_timing: id  0 | task 0 | \nprompt eval time =     393.25 ms /    13 tokens\n"
    "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)\n"
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def counts(records: list[AcceptanceRecord]) -> list[tuple[int, int, int | None]]:
    return [(record.accepted, record.drafted, record.blocks) for record in records]


def test_our_lines(tmp_path: Path) -> None:
    rows = [
        {"accepted": 3, "drafted": 8, "blocks": 2, "domain": "code", "time": "2026-11-20T10:00:00Z"},
        {"drafted": 4, "accepted": 0, "time": 17.5, "extra": [1]},
    ]
    log = read_acceptance_log(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n"))
    assert (log.format, log.sums, log.warnings) == ("jsonl", False, [])
    assert log.records == [
        AcceptanceRecord(0, 8, 3, 2, "code", "2026-11-20T10:00:00Z"),
        AcceptanceRecord(1, 4, 0, None, None, "17.5"),
    ]
    assert log.gamma() == 4.0


def test_comma_separated(tmp_path: Path) -> None:
    text = 'time,domain,drafted,accepted,blocks\r\n10:00,"a, b",8,3,2\r\n,,4,0,\r\n'
    log = read_acceptance_log(write(tmp_path, "a.csv", text))
    assert log.records == [AcceptanceRecord(0, 8, 3, 2, "a, b", "10:00"), AcceptanceRecord(1, 4, 0)]


def test_vllm(tmp_path: Path) -> None:
    log = read_acceptance_log(write(tmp_path, "server.log", VLLM))
    assert (log.format, log.sums) == ("vllm", True)
    assert counts(log.records) == [(131, 300, 100), (0, 6, 2)]
    assert log.records[0].time == "09-04 11:01:16"
    assert counts(read_acceptance_log(write(tmp_path, "old.log", VLLM_08)).records) == [(33, 66, None)]


def test_vllm_blocks_that_drafted_less_than_gamma_are_counted_by_the_mean_length(tmp_path: Path) -> None:
    # 131 accepted in 107 blocks: 2.22, and 300 / 3 = 100 would be 2.31.
    log = read_acceptance_log(write(tmp_path, "a.log", VLLM.replace("length: 2.31", "length: 2.22")))
    assert log.records[0].blocks == 107


def test_llama_cpp(tmp_path: Path) -> None:
    log = read_acceptance_log(write(tmp_path, "a.log", LLAMA))
    assert (log.format, log.sums) == ("llama.cpp", False)
    assert counts(log.records) == [(167, 259, 87), (0, 8, None)]
    assert log.records[0].time == "0.06.896.015"
    longer = LLAMA.replace("mean len", "mean acceptance length")
    assert counts(read_acceptance_log(write(tmp_path, "b.log", longer)).records) == [(167, 259, 87), (0, 8, None)]
    old = read_acceptance_log(write(tmp_path, "c.log", LLAMA_OLD))
    assert counts(old.records) == [(171, 297, None)]
    assert old.gamma() is None


def test_our_proposal_log(tmp_path: Path) -> None:
    path = tmp_path / "proposals.parquet"
    with ProposalLog(path, flush_rows=4) as log:
        for prompt, block, drafted, accepted in (("b", 0, 3, 2), ("a", 0, 3, 0), ("b", 1, 2, 2), ("a", 1, 3, 3)):
            log.add(prompt, block, 0, np.arange(drafted), accepted, None, None, "draft")
    found = read_acceptance_log(path)
    assert (found.format, found.sums) == ("proposals", False)
    assert counts(found.records) == [(4, 5, 2), (3, 6, 2)]  # b appears first
    damaged = tmp_path / "x.parquet"
    damaged.write_bytes(path.read_bytes()[:-40])
    assert "understudy generate --log" in refused(read_acceptance_log, damaged)


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("a.txt", VLLM, "vllm"),
        ("a.txt", LLAMA, "llama.cpp"),
        ("a.txt", '\n{"accepted": 1, "drafted": 2}\n', "jsonl"),
        ("a.txt", "accepted, drafted\n1,2\n", "csv"),
        ("a.out", "x\n" * 5000 + VLLM, "vllm"),
    ],
)
def test_the_format_is_told_by_content_and_through_gzip(tmp_path: Path, name: str, text: str, format: str) -> None:
    plain = read_acceptance_log(write(tmp_path, name, text))
    assert plain.format == format
    zipped = tmp_path / (name + ".gz")
    zipped.write_bytes(gzip.compress(text.encode()))
    assert read_acceptance_log(zipped).records == plain.records
    assert read_acceptance_log(zipped, format).records == plain.records


GOOD = {
    "jsonl": '{"accepted": 1, "drafted": 4}\n',
    "csv": "accepted,drafted\n1,4\n",
    "vllm": VLLM_08,
    "llama.cpp": LLAMA_OLD,
}
TORN = {
    "jsonl": '{"accepted": 1, "dra',
    "csv": "1",
    "vllm": VLLM.splitlines()[1][:110],
    "llama.cpp": "draft acceptance rate = 0.575",
}


@pytest.mark.parametrize("format", GOOD)
def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, "a", GOOD[format] + TORN[format])
    log = read_acceptance_log(path, format)
    number = GOOD[format].count("\n") + 1
    assert len(log.records) == 1
    assert log.warnings == [f"{path}:{number}: the last line is incomplete and skipped"]
    whole = read_acceptance_log(write(tmp_path, "b", GOOD[format].rstrip("\n")), format)
    assert whole.records == log.records
    assert whole.warnings == []


@pytest.mark.parametrize("format", GOOD)
def test_the_same_line_in_the_middle_is_damage_and_named(tmp_path: Path, format: str) -> None:
    number = GOOD[format].count("\n") + 1
    path = write(tmp_path, "a", GOOD[format] + TORN[format] + "\n" + GOOD[format])
    text = refused(read_acceptance_log, path, format)
    assert f"{path}:{number}: " in text
    assert EXPECTED[format] in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"accepted": 5, "drafted": 4}', "accepted 5 of only 4 drafted tokens"),
        ('{"accepted": -1, "drafted": 4}', '"accepted" is -1'),
        ('{"accepted": 1.5, "drafted": 4}', '"accepted" is 1.5'),
        ('{"accepted": true, "drafted": 4}', '"accepted" is true'),
        ('{"accepted": 1}', '"drafted" is missing'),
        ('{"accepted": 1, "drafted": 4, "blocks": 0}', "4 drafted tokens in 0 blocks"),
        ('{"accepted": 1, "drafted": 4, "blocks": "2"}', '"blocks" is "2"'),
        ('{"accepted": 1, "drafted": 4, "domain": 7}', '"domain" is 7'),
        ('{"accepted": NaN, "drafted": 4}', '"accepted" is NaN'),
        ("[1, 4]", "not a JSON object"),
    ],
)
def test_lines_of_ours_that_make_no_sense_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, "a.jsonl", '{"accepted": 1, "drafted": 4}\n' + line + "\n")
    assert refused(read_acceptance_log, path).startswith(f"{path}:2: {words}")


@pytest.mark.parametrize("line", ["5,4", "a,4", "-1,4", "1,4,9", "1.0,4", "²,4", '"1,4'])
def test_cells_that_make_no_sense_are_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "a.csv", f"accepted,drafted\n1,4\n{line}\n")
    assert "a.csv:3: " in refused(read_acceptance_log, path)


@pytest.mark.parametrize("text", ["", "\n\n", "nothing of the kind\n", "prompt,answer\n1,2\n"])
def test_a_log_without_a_record_lists_the_formats(tmp_path: Path, text: str) -> None:
    said = refused(read_acceptance_log, write(tmp_path, "a.log", text))
    assert all(expected in said for expected in EXPECTED.values())


def test_a_format_that_finds_nothing_says_so(tmp_path: Path) -> None:
    log = write(tmp_path, "a.log", VLLM)
    idle = write(tmp_path, "a.csv", "accepted,drafted\n0,0\n")
    for path, format, said in (
        (log, "llama.cpp", "no llama.cpp record"),
        (log, "yaml", "--format yaml: choose one of auto"),
        (tmp_path / "b.log", "auto", "no such file"),
        (idle, "auto", "no csv record with drafted tokens"),
    ):
        assert said in refused(read_acceptance_log, path, format)


def test_a_gzip_that_is_cut_off_gives_what_stands_before(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lines = [json.dumps({"accepted": int(a), "drafted": 1000}) + "\n" for a in generator.integers(0, 1000, 5000)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("".join(lines).encode())[:-2000])
    log = read_acceptance_log(path)
    assert 1000 < len(log.records) < 5000
    assert [record.accepted for record in log.records] == [json.loads(line)["accepted"] for line in lines][
        : len(log.records)
    ]
    assert "the compressed file is truncated" in log.warnings[0]
    broken = bytearray(gzip.compress("".join(lines).encode()))
    broken[len(broken) // 2 : len(broken) // 2 + 200] = bytes(200)
    path.write_bytes(broken)
    refused(read_acceptance_log, path)


def test_bytes_that_are_no_text_do_not_stop_an_engines_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"\xff\xfe progress 10%\rprogress 20%\n" + LLAMA.encode())
    assert counts(read_acceptance_log(path).records) == [(167, 259, 87), (0, 8, None)]
