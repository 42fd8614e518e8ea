"""The benches run on any pair and write the JSON they promise; what they measure is not asserted, how they count is."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_modules import ROOT, bench

CELL = {"device", "batch", "mode", "gamma", "drafter", "tokens_per_second", "tau", "floor_share", "vs_hf_assisted"}


def test_a_missing_file_is_one_line(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "bench" / "decode.py"
    monkeypatch.syspath_prepend(str(script.parent))
    words = ["--target", str(tiny_target), "--prompts", str(tmp_path / "none.jsonl")]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "none.jsonl" in said
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    texts = [f"def function_{number}(value, other):" for number in range(4)]
    path.write_text("".join(json.dumps({"prompt": text, "kind": "heads"}) + "\n" for text in texts))
    return path


def test_the_decoder_bench_writes_a_cell_for_everything(
    tiny_target: Path, tiny_run: Path, prompts: Path, tmp_path: Path
) -> None:
    bench("decode").main(
        out=tmp_path / "decode.json",
        target=str(tiny_target),
        draft=str(tiny_run / "best" / "student"),
        prompts=str(prompts),
        chat=False,
        gammas="1,2",
        count=1,
        max_tokens=4,
        longest=60,
        batch=2,
        drafters=True,
        threads=0,
        dtype="float32",
        device="cpu",
        repeats=1,
    )
    result = json.loads((tmp_path / "decode.json").read_text())
    cells = result["cells"]
    assert result["machine"]["dtype"] == "float32"
    assert all(set(cell) >= CELL | {"vs_plain", "prompts"} for cell in cells)
    assert {cell["mode"] for cell in cells} == {"greedy", "sample"}
    assert {cell["batch"] for cell in cells} == {1, 2}
    assert {cell["prompts"] for cell in cells} == {"heads", "copied"}
    names = {cell["drafter"] for cell in cells}
    assert names >= {
        "draft",
        "prompt-lookup",
        "past-responses",
        "early-exit",
        "lookahead",
        "lookup+draft",
        "draft, adaptive",
    }
    shares = [cell["floor_share"] for cell in cells if cell["floor_share"] is not None]
    assert len(shares) == 2 * 2 * 2  # kinds x modes x gammas
    assert all(share > 0 for share in shares)


def test_the_bandwidth_limit_covers_the_same_blocks_as_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is in neither. With a limit of one second per block, tokens per second of the limit are tau."""
    module = bench("decode")
    score = module.Score()

    def ours(prompt: Any) -> tuple[int, float, float]:
        score.blocks += 5
        return 10, 1.0, 1.0

    class Pair:
        def least_seconds(self, gamma: int, prompt: Any, length: int, blocks: int) -> float:
            return float(blocks)

    contestants = {"ours": module.with_floor(Pair(), ours, 3, score)}
    module.compete([("a", [1]), ("b", [2])], contestants, {"ours": score}, 3, "")
    assert (score.tokens, score.blocks, score.least_seconds) == (60, 30, 30.0)


def test_retrieval_never_holds_the_answers_it_is_measured_on(tiny_target: Path, tiny_run: Path, prompts: Path) -> None:
    module = bench("decode")
    target, draft, tokenizer = module.load_pair(str(tiny_target), str(tiny_run / "best" / "student"), "float32", "cpu")
    kinds = module.load_prompts(str(prompts), tokenizer, False, 8, 60)
    full = module.Bench(target, draft, 8)
    module.with_past(full, dict(kinds), 4)  # all four are measured: nothing is left for the store
    assert "heads" not in full.stores
    half = module.Bench(target, draft, 8)
    module.with_past(half, dict(kinds), 2)
    assert "heads" in half.stores
    assert [key for key, _ in half.kinds["heads"]] == ["heads:0", "heads:1"]


def test_the_bench_of_many_responses_starts_a_run_that_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = bench("scale")
    monkeypatch.setattr(module, "RESPONSE_TOKENS", 20)
    module.grow(tmp_path / "few", 32)
    shards = Path(tmp_path / "few" / "run" / "responses" / "train")
    before = {path: path.stat().st_mtime_ns for path in shards.glob("shard-*")}
    module.grow(tmp_path / "few", 96)
    after = {path: path.stat().st_mtime_ns for path in shards.glob("shard-*")}
    assert after.items() > before.items(), "what is there stays"
    found = module.start(tmp_path / "few", tmp_path / "few")
    assert found["responses"] == 96
    assert set(found) == {"responses", "resident_bytes", "startup_seconds", "reading_seconds", "peak_bytes"}
