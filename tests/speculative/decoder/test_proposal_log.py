"""The log of drafted tokens: what a row says, and that a file is there whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures import files_no_larger_than
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from speculative.decoder.proposal_log import ProposalLog

Block = tuple[str, int, int, np.ndarray, int, np.ndarray | None, np.ndarray | None, str]


def block_of(prompt: str, block: int, position: int, gamma: int, accepted: int, source: str = "draft") -> Block:
    ids, probs = np.arange(gamma) + 100 * block, np.linspace(0.25, 1, gamma)
    return prompt, block, position, ids, accepted, probs, probs / 2, source


def rows_of(block: Block) -> list[dict[str, Any]]:
    """The slow twin: what the log must hold of one block."""
    prompt, number, position, ids, accepted, target_probs, draft_probs, source = block
    return [
        {
            "prompt": prompt,
            "position": position + place,
            "block": number,
            "place": place,
            "drafted": int(token),
            "accepted": place < accepted,
            "tested": place <= accepted,
            "target_prob": None if target_probs is None else float(np.float32(target_probs[place])),
            "draft_prob": None if draft_probs is None else float(np.float32(draft_probs[place])),
            "source": source,
        }
        for place, token in enumerate(ids)
    ]


def written(path: Path, blocks: list[Block], **options: Any) -> pa.Table:
    with ProposalLog(path, **options) as log:
        for block in blocks:
            log.add(*block)
    return pq.read_table(path)


probabilities = st.one_of(st.none(), st.just(0.0), st.floats(0, 1, width=32))
blocks_strategy = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**31 - 200),
        st.lists(st.integers(0, 2**31 - 1), max_size=5),
        st.floats(0, 1),
        probabilities,
        probabilities,
        st.sampled_from(["draft", "lookup", "é"]),
    ),
    max_size=8,
)


@given(blocks_strategy, st.integers(1, 12))
def test_what_is_read_is_what_was_added_whatever_the_row_groups(tmp_path_factory, drawn, flush_rows):
    blocks: list[Block] = []
    for prompt, number, position, ids, share, target_prob, draft_prob, source in drawn:
        arrays = [None if one is None else np.full(len(ids), one) for one in (target_prob, draft_prob)]
        accepted = round(share * len(ids))
        blocks.append((prompt, number, position, np.array(ids, dtype=np.int64), accepted, *arrays, source))
    table = written(tmp_path_factory.mktemp("log") / "log.parquet", blocks, flush_rows=flush_rows)
    assert table.to_pylist() == [row for block in blocks for row in rows_of(block)]


def test_memory_is_bounded_by_row_groups(tmp_path):
    with ProposalLog(tmp_path / "log.parquet", flush_rows=10) as log:
        for number in range(9):
            log.add(*block_of("one", number, 4 * number, 4, 3))
    file = pq.ParquetFile(tmp_path / "log.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [12, 12, 12]


def test_a_killed_process_leaves_the_older_file_or_none(tmp_path):
    program = (
        "import os, sys, numpy as np\n"
        "from speculative.decoder.proposal_log import ProposalLog\n"
        "with ProposalLog(sys.argv[1], flush_rows=1) as log:\n"
        "    log.add('one', 0, 0, np.arange(3), 1, None, None, 'draft')\n"
        "    os._exit(7)\n"
    )
    older = tmp_path / "older.parquet"
    written(older, [block_of("older", 0, 0, 2, 1)])
    for path in (tmp_path / "none.parquet", older):
        killed = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).resolve().parents[3])
        assert killed.returncode == 7
    assert not (tmp_path / "none.parquet").exists()
    assert pq.read_table(older).to_pydict()["prompt"] == ["older", "older"]


@pytest.mark.parametrize("flush_rows", [10, 10**9])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_full_disk_is_one_line_and_leaves_the_older_file(tmp_path, flush_rows, interrupted):
    """Met while decoding and at the end alike; what stopped the run before is not hidden by it."""
    path = tmp_path / "log.parquet"
    written(path, [block_of("older", 0, 0, 2, 1)])
    generator = np.random.default_rng(0)

    def run():
        with ProposalLog(path, flush_rows=flush_rows) as log:
            for number in range(300):
                ids, probs = generator.integers(0, 2**31 - 1, 100), generator.random(100)
                log.add(f"prompt {number}", number, 0, ids, 3, probs, probs, "draft")
            if interrupted:
                raise KeyboardInterrupt

    with files_no_larger_than(20_000):
        if interrupted and flush_rows > 10:
            with pytest.raises(KeyboardInterrupt) as stopped:
                run()
            assert "cannot be written" in stopped.value.__notes__[0]
        else:
            assert "log cannot be written" in refused(run)
    assert pq.read_table(path).num_rows == 2
    assert os.listdir(tmp_path) == ["log.parquet"]
