"""With a real vLLM: a batch file is answered by `run-batch`, and the walk-through of docs/serious-run.md, in small, with its kills."""

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_modules import bench
from engine_process import ROOT, built
from function_heads import write_heads
from tiny_training import forget_accelerators

from data.responses.store import Store
from distill.config.layout import RESPONSES, TRAINING
from distill.models.load import EMBEDDED_FOLDER
from distill.respond import main
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import load_verdict

pytestmark = [pytest.mark.engine, *built(".venv-vllm", 3600)]
CONFIG = """
name: batch
output: {folder}/runs
target: {{path: embedded, dtype: float32}}
data:
  train: [{{path: {folder}/train.jsonl}}]
  heldout_count: 4
  template: {{mode: plain}}
  context_length: 256
serving: {{temperature: 0.8, top_p: 0.95, max_tokens: 24, engine: vllm}}
judge: {{prompts: 4}}
"""
LONGEST = 1500  # seconds
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def respond(*words: str | Path) -> int:
    forget_accelerators()
    return main([str(word) for word in words])


def test_run_batch_answers_a_batch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, requests, results = (tmp_path / name for name in ("my.yaml", "requests.jsonl", "results.jsonl"))
    config.write_text(CONFIG.format(folder=tmp_path))
    write_heads(tmp_path / "train.jsonl", ["ast", "random"], 20)
    assert respond(config, "--batch-requests", requests, "--batch-chat") == 0
    words = ["--model", str(EMBEDDED_FOLDER), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--trust-request-chat-template"]
    program = ROOT / ".venv-vllm" / "bin" / "vllm"
    with (tmp_path / "log").open("w") as log:
        command = [program, "run-batch", "-i", requests, "-o", results, *words]
        assert subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log).returncode == 0
    assert respond(config, "--batch-results", results) == 0
    assert "24 answers taken; left out: none" in capsys.readouterr().out
    rows = Store(tmp_path / "runs" / "batch" / RESPONSES / TRAINING).read()
    assert len(rows) == 16
    assert all(len(row.log_target_probs) == len(row.response_ids) for row in rows)


@pytest.mark.timeout(LONGEST)
def test_a_serious_run_in_small(tmp_path: Path) -> None:
    # Six commands and ten starts of vLLM take longer than pytest's own clock gives a test.
    faulthandler.dump_traceback_later(LONGEST + 60, exit=True, file=sys.__stderr__)
    program, folder = bench("serious_run"), tmp_path / "run"
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    program.main(folder=folder, count=96, until="readback", out=out, page=page)
    found = json.loads(out.read_text())
    assert list(found["seconds"]) == list(program.STAGES)
    run = folder / "runs" / "serious"
    assert load_verdict(run).headline
    assert ReadbackRecord.stored(run).agrees  # type: ignore[union-attr]
    text = page.read_text()
    for line in ("one of the two replicas", "launcher and ranks"):
        assert f"# kill -9: {line}" in text
    # On a fast machine the other replica has answered everything before the command can be killed.
    again = "# kill -9: the command itself" in text
    assert text.count("understudy respond my.yaml --engine vllm --replicas 2") == 1 + again
