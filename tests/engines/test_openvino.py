"""OpenVINO GenAI runs an exported draft by the command of its page: at 32 bits it writes the target's greedy text.

`make engines` builds it (CPU, x86-64).
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from engine_process import ROOT, built

from data.responses.store import Store
from distill.config.layout import EXPORT, HELDOUT_GREEDY, RESPONSES
from distill.models.load import EMBEDDED_FOLDER
from distill.run.responses import heldout_responses

BUILT = ROOT / ".venv-openvino" / "ready"
pytestmark = [pytest.mark.engine, *built(".venv-openvino")]
GAMMA, PROMPTS, MOST = 3, 12, 30
BIN = BUILT.parent / "bin"
# Ids of each response, with the accepted and the drafted tokens of the engine's own counts.
DECODE = """
import json, sys
import numpy as np, openvino as ov, openvino_genai as genai
place, gamma, most, prompts = json.loads(sys.argv[1])
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
draft = genai.draft_model(place + "/draft-fp32", "CPU", **exact)
pipeline = genai.LLMPipeline(place + "/target-fp32", "CPU", draft_model=draft, **exact)
config = genai.GenerationConfig(max_new_tokens=most, num_assistant_tokens=gamma, ignore_eos=True)
for ids in prompts:
    found = pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), config)
    counts = found.extended_perf_metrics
    print(json.dumps([list(found.tokens[0]), counts.get_num_accepted_tokens(), counts.get_num_draft_tokens()]))
"""


@pytest.fixture(scope="module")
def converted(greedy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of target and draft in OpenVINO's format, made by the command of the page, which also decodes a prompt."""
    command = json.loads((greedy / EXPORT / "serving.json").read_text())["engines"]["OpenVINO GenAI"]["command"]
    draft = tmp_path_factory.mktemp("openvino") / "draft"
    shutil.copytree(greedy / EXPORT, draft)
    places = {"DRAFT": str(draft), "TARGET": str(EMBEDDED_FOLDER), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", command], env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    return draft.with_name("draft-openvino")


def test_a_sampled_run_is_refused(pair: Path) -> None:
    reasons = json.loads((pair / EXPORT / "serving.json").read_text())["engines"]["OpenVINO GenAI"]["reasons"]
    assert "temperature > 0" in reasons[0]


def test_greedy_text_is_the_targets(converted: Path, greedy: Path) -> None:
    texts = heldout_responses(Store(greedy / RESPONSES / HELDOUT_GREEDY).read())[:PROMPTS]
    asked = json.dumps([str(converted), GAMMA, MOST, [list(text.prompt_ids) for text in texts]])
    done = subprocess.run([BIN / "python", "-c", DECODE, asked], capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    same = [
        ids[: len(text.response_ids)] == list(text.response_ids[:MOST])
        for text, (ids, *_) in zip(texts, answers, strict=True)
    ]
    assert sum(same) >= PROMPTS - 1, "one may differ after a near-tie"
    assert 0 < sum(accepted for _, accepted, _ in answers) < sum(drafted for *_, drafted in answers)
