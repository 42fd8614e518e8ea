"""OpenVINO GenAI serves an exported draft: at 32 bits it writes the target's greedy text and accepts what replay says.

`make engines` builds it (CPU, x86-64). Started as a user starts it, by `understudy serve`.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import ROOT, Server, serving
from processes import free_port
from timed_run import write_verdict

from data.responses.store import Store
from distill.commands.options import ReadbackOptions
from distill.commands.readback.clock import time_command
from distill.commands.readback.readback import readback_command
from distill.commands.readback.speed import seen_in
from distill.config.command_line import TimeOptions
from distill.config.layout import ENGINE_COSTS, EXPORT, HELDOUT_GREEDY, RESPONSES
from distill.models.load import EMBEDDED_FOLDER, load_model
from distill.run.responses import frozen_responses_of
from speculative.measure.engine_costs import EngineCosts
from speculative.measure.replay import WORRYING_Z

BUILT = ROOT / ".venv-openvino" / "ready"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(340),
    pytest.mark.skipif(not BUILT.exists(), reason="no OpenVINO GenAI in .venv-openvino: `make engines` builds it"),
]
GAMMA = 3
BIN = BUILT.parent / "bin"
# The engine's own counts of one request at a time, as its documentation reads them.
OWN_COUNTS = """
import json, sys
import numpy as np, openvino as ov, openvino_genai as genai
place, gamma, most, prompts = json.loads(sys.argv[1])
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
draft = genai.draft_model(place + "/draft-fp32", "CPU", **exact)
pipeline = genai.LLMPipeline(place + "/target-fp32", "CPU", draft_model=draft, **exact)
config = genai.GenerationConfig(max_new_tokens=most, num_assistant_tokens=gamma, ignore_eos=True)
for ids in prompts:
    found = pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), config).extended_perf_metrics
    print(found.get_num_accepted_tokens(), found.get_num_draft_tokens(), len(found.main_model_metrics.raw_metrics.m_durations))
"""


def served(run: Path, *words: str) -> Any:
    log = run / f"openvino-{len(words)}.log"
    return serving(
        run, ["--engine", "openvino", "--log", str(log), "--", "--gamma", str(GAMMA), *words], "OpenVINO GenAI", {}
    )


@pytest.fixture(scope="module")
def exact(greedy: Path) -> Iterator[Server]:
    with served(greedy) as server:
        yield server


def test_the_pair_is_converted(greedy: Path) -> None:
    """By itself, since it takes as long as all that follows."""
    for role in ("target", "draft"):
        assert (greedy / f"{EXPORT}-openvino" / f"{role}-fp32" / "openvino_model.xml").is_file()
    serving_file = json.loads((greedy / EXPORT / "serving.json").read_text())
    assert serving_file["engines"]["OpenVINO GenAI"]["ok"]


def test_a_sampled_run_is_refused(pair: Path) -> None:
    reasons = json.loads((pair / EXPORT / "serving.json").read_text())["engines"]["OpenVINO GenAI"]["reasons"]
    assert "temperature > 0" in reasons[0]


@pytest.mark.parametrize("concurrency", [1, 16])
def test_greedy_text_is_the_targets_and_tau_is_replays(exact: Server, greedy: Path, concurrency: int) -> None:
    found = readback_command(
        ReadbackOptions(url=exact.url, run=greedy, rule="greedy", gamma=GAMMA, concurrency=concurrency)
    )
    assert (found.engine, found.served.rule, found.served.gamma) == ("openvino", "greedy", GAMMA)
    assert found.agrees, found.causes
    assert found.greedy is not None
    assert found.greedy.equal + found.greedy.near_ties == found.served.prompts > 30
    # Nothing is random: the blocks are those of replay, but for near-ties.
    assert abs(found.z) < WORRYING_Z
    assert found.served.tau == pytest.approx(found.replay.tau, rel=0.01)
    assert found.served.accepted_per_drafted == pytest.approx(found.replay.accepted_per_drafted, abs=0.01)
    assert 1 < found.served.tau < GAMMA + 1
    assert "OpenVINO GenAI 2026." in found.where


def test_our_counts_are_the_engines_own(exact: Server, greedy: Path) -> None:
    """Alone, a request has the counts of `extended_perf_metrics`, which leave out the last block."""
    texts = frozen_responses_of(Store(greedy / RESPONSES / HELDOUT_GREEDY).read())[:6]
    prompts = [list(text.prompt_ids) for text in texts]
    asked = json.dumps([str(greedy / f"{EXPORT}-openvino"), GAMMA, 30, prompts])
    done = subprocess.run([BIN / "python", "-c", OWN_COUNTS, asked], capture_output=True, text=True, check=True)
    own = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    ours = []
    for ids in prompts:
        body = {"prompt": ids, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        counts = post(exact, body)["metrics"]["speculative_decoding"]
        accepted_B, drafted_B = counts["per_step_accepted"], counts["per_step_drafted"]
        ours.append((sum(accepted_B[:-1]), sum(drafted_B[:-1]), len(accepted_B) + 1))
        assert (sum(accepted_B), sum(drafted_B)) == (counts["num_accepted_draft_tokens"], counts["num_draft_tokens"])
    assert ours == own


def post(server: Server, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 9999]},
        {"prompt": []},
        {"prompt": [5], "temperature": 0.5},
        {"prompt": [5], "max_tokens": 500},
        {"prompt": [5], "n": 2},
        [],
    ],
)
def test_what_it_cannot_do_is_refused(exact: Server, body: Any) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(exact, {"temperature": 0} | body if isinstance(body, dict) else body)
    assert post(exact, {"prompt": "def", "temperature": 0, "max_tokens": 4})["usage"]["completion_tokens"] == 4


def test_it_is_timed_at_both_loads(greedy: Path, tmp_path: Path) -> None:
    """Sixteen requests arrive while the pipeline decodes, and are decoded together: otherwise nothing could be timed."""
    timed = tmp_path / "timed"
    shutil.copytree(greedy, timed, symlinks=True)
    write_verdict(timed, "greedy")
    words = TimeOptions(timed, engine="openvino", load="1,16", gamma="1,3", repeats=2, port=free_port())
    assert time_command(words) == 0
    costs = EngineCosts.read(timed / ENGINE_COSTS, "")
    assert costs.engine.startswith("openvino 2026.")
    for one in costs.costs:
        assert set(one.verify_seconds) == {1, 3}
        assert 0 < one.target_seconds < one.block_price(3) * one.target_seconds
    assert seen_in(timed, costs.engine, 256) == []
    assert "256 requests at a time" in seen_in(timed, costs.engine, 257)[0]


def test_an_8_bit_draft_is_replayed_as_it_is_served(greedy: Path) -> None:
    """Converted at the start. Replay multiplies the weights out, so nothing is random."""
    place = greedy / f"{EXPORT}-openvino" / "draft-int8"
    with served(greedy, "--draft-weights", "int8") as server:
        found = readback_command(
            ReadbackOptions(url=server.url, run=greedy, rule="greedy", gamma=GAMMA, count=24, draft=str(place))
        )
    assert found.agrees, found.causes
    assert found.greedy is not None
    assert found.greedy.equal + found.greedy.near_ties == 24
    # As readback itself: at most 2 % of the blocks may differ, after near-ties of the draft.
    assert found.served.tau == pytest.approx(found.replay.tau, rel=0.02)
    sizes = [(place.parent / f"draft-{kind}" / "openvino_model.bin").stat().st_size for kind in ("int8", "fp32")]
    assert sizes[0] < sizes[1] / 3
    assert load_model("draft", str(place)).config.vocab_size == 4096


def test_a_target_in_8_bits_is_replayed_as_it_is_served(greedy: Path) -> None:
    place = greedy / f"{EXPORT}-openvino"
    with served(greedy, "--weights", "int8", "--draft-weights", "int8") as server:
        found = readback_command(
            ReadbackOptions(
                url=server.url,
                run=greedy,
                rule="greedy",
                gamma=GAMMA,
                count=24,
                draft=str(place / "draft-int8"),
                target=str(place / "target-int8"),
            )
        )
    assert found.agrees, found.causes
    assert found.greedy is not None
    assert found.greedy.same
    assert found.served.tau == pytest.approx(found.replay.tau, rel=0.02)


def test_the_command_of_the_page_runs(greedy: Path, tmp_path: Path) -> None:
    command = json.loads((greedy / EXPORT / "serving.json").read_text())["engines"]["OpenVINO GenAI"]["command"]
    draft = tmp_path / "draft"
    shutil.copytree(greedy / EXPORT, draft)
    places = {"DRAFT": str(draft), "TARGET": str(EMBEDDED_FOLDER), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", command], env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
