"""A real vLLM serves an exported draft: it accepts what replay says, by three rules, and writes the target's text.

`make engines` builds it (CPU, x86-64). Started as a user starts it, by `understudy serve`; two starts, one after the other.
"""

import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import ROOT, Server, built, serving
from tiny_training import tiny_tokenizer

from distill.commands.drift.drift import drift_command
from distill.commands.drift.options import DriftOptions
from distill.commands.export import export_run
from distill.commands.options import ExportOptions
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.config.layout import ANSWERS, BEST_LINK, EXPORT, HELDOUT_GREEDY, RESPONSES, STUDENT
from distill.engines.protocol.client import EngineClient
from distill.export.load_table import GAMMA_WITHOUT_VERDICT
from distill.models.load import EMBEDDED_FOLDER, load_tokenizer
from distill.run.readback_record import ReadbackRecord
from speculative.errors import UserError
from speculative.measure.replay import WORRYING_Z

BUILT = ROOT / ".venv-vllm" / "ready"
pytestmark = [pytest.mark.engine, *built(".venv-vllm")]
GAMMA = 3
# float32 and no compiled graphs: greedy text is the run's own token for token. The CPU platform wants model runner V1.
FLAGS = ["--enforce-eager", "--dtype", "float32", "--per-request-spec-decode-metrics", "detailed"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOG_STATS_INTERVAL": "1"}


def served(run: Path, as_exported: bool = False, **speculative: str) -> AbstractContextManager[Server]:
    """The engine under `understudy serve`, gone at the end; as_exported: by the printed command, untouched."""
    method = {"method": "draft_model", "model": str(run / EXPORT), "num_speculative_tokens": GAMMA}
    flags = FLAGS if as_exported else [*FLAGS, "--speculative-config", json.dumps(method | speculative)]
    return serving(run, ["--", *flags], "vLLM", ENVIRONMENT)


@pytest.fixture(scope="module")
def argmax(pair: Path) -> Iterator[Server]:
    """vLLM as it is by default: the draft proposes its argmax."""
    with served(pair) as server:
        yield server


@pytest.fixture(scope="module")
def sampling(pair: Path) -> Iterator[Server]:
    with served(pair, draft_sample_method="probabilistic") as server:
        yield server


@pytest.fixture(scope="module")
def sampled_only(pair: Path) -> Path:
    """The same run without greedy text: its readback asks for sampled text alone."""
    run = pair.parent / "sampled"
    shutil.copytree(pair, run, symlinks=True)
    shutil.rmtree(run / RESPONSES / HELDOUT_GREEDY)
    return run


@pytest.fixture(scope="module")
def light(pair: Path) -> Path:
    """The same run, exported with 8-bit weights and activations."""
    run = pair.parent / "light"
    shutil.copytree(pair, run, symlinks=True)
    export_run(ExportOptions(run, run / EXPORT, overwrite=True, quantize="int8-dynamic"))
    return run


@pytest.fixture(scope="module")
def eight_bits(light: Path) -> Iterator[Server]:
    with served(light) as server:
        yield server


@pytest.fixture(scope="module")
def masked(pair: Path) -> Path:
    """The same run with a mask token in its draft's config, exported again: it drafts in one pass, untrained."""
    run = pair.parent / "masked"
    shutil.copytree(pair, run, symlinks=True)
    config = run / BEST_LINK / STUDENT / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 0}))
    export_run(ExportOptions(run, run / EXPORT, overwrite=True))
    return run


@pytest.fixture(scope="module")
def one_pass(masked: Path) -> Iterator[Server]:
    with served(masked, as_exported=True) as server:
        yield server


def read_back(server: Server, run: Path, **options: Any) -> ReadbackRecord:
    return readback_command(ReadbackOptions(url=server.url, run=run, **options))


def check_agreement(found: ReadbackRecord, rule: str, gamma: int = GAMMA) -> None:
    assert (found.engine, found.served.rule, found.served.gamma) == ("vLLM", rule, gamma), found.causes
    assert found.agrees, found.causes
    assert found.z is not None
    assert abs(found.z) < WORRYING_Z
    low, high = found.served.tau_ci
    assert low <= found.replay.tau <= high
    assert 1 < found.served.tau < gamma + 1


def test_vllm_takes_the_pair(pair: Path) -> None:
    """By itself, since it takes as long as the engine's start."""
    assert json.loads((pair / EXPORT / "serving.json").read_text())["engines"]["vLLM"]["ok"]


def test_the_engine_starts(argmax: Server) -> None:
    with urllib.request.urlopen(f"{argmax.url}/health", timeout=5) as answer:
        assert answer.status == 200


def test_greedy_text_is_the_targets_and_tau_is_replays(argmax: Server, pair: Path) -> None:
    found = read_back(argmax, pair, rule="greedy")
    check_agreement(found, "greedy")
    assert found.greedy.same
    assert found.greedy is not None
    assert found.greedy.equal + found.greedy.near_ties == found.served.prompts > 30


def test_argmax_drafts_at_a_temperature(argmax: Server, sampled_only: Path) -> None:
    asked = DriftOptions(run=sampled_only, rule="greedy-draft")
    with ThreadPoolExecutor(1) as beside:
        counters = replace(asked, metrics_url=f"{argmax.url}/metrics", interval=6.0)
        scraped = beside.submit(drift_command, counters)
        found = read_back(argmax, sampled_only)
    check_agreement(found, "greedy-draft")
    assert found.text_fit is not None
    assert found.text_fit.same
    # What the same answers say of a server that is thought to draft more.
    other = read_back(argmax, sampled_only, gamma=5, resume=True)
    assert not other.agrees
    assert other.causes[0].startswith("gamma: the server drafts 3 tokens per block, not 5")
    # The answers, and the engine's counters while it answered.
    requests = drift_command(replace(asked, log=sampled_only / ANSWERS))
    assert requests.now.prompts == found.served.prompts
    assert not any(of.refresh for of in (requests, scraped.result()))


def test_foreign_token_ids_are_refused(argmax: Server, pair: Path) -> None:
    rows = len(load_tokenizer(str(EMBEDDED_FOLDER)))
    body = {"model": str(EMBEDDED_FOLDER), "prompt": [1, rows], "max_tokens": 1}
    request = urllib.request.Request(
        f"{argmax.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=30)
    with pytest.raises(UserError, match="tokenizer"):
        EngineClient(argmax.url, tiny_tokenizer(), 512, model=None, timeout=30, concurrency=1).identify()


def test_the_engine_starts_with_sampled_drafts(sampling: Server) -> None:
    assert "probabilistic" in sampling.log.read_text()


def test_sampled_drafts(sampling: Server, sampled_only: Path) -> None:
    found = read_back(sampling, sampled_only, rule="sample-untruncated")
    check_agreement(found, "sample-untruncated")
    assert found.text_fit is not None
    assert found.text_fit.same


def test_the_engine_starts_with_a_draft_in_8_bits(eight_bits: Server) -> None:
    with urllib.request.urlopen(f"{eight_bits.url}/health", timeout=5) as answer:
        assert answer.status == 200


def test_a_draft_in_8_bits_is_accepted_as_replay_of_it_says(eight_bits: Server, light: Path) -> None:
    """What is replayed is the export, not the draft that it was made of. Without VNNI the CPU's products saturate."""
    found = read_back(eight_bits, light, rule="greedy", count=12)
    assert found.greedy.same
    if re.search("vnni|amx_int8", Path("/proc/cpuinfo").read_text()):  # without it the CPU's products saturate
        check_agreement(found, "greedy")
    else:
        assert not found.agrees


def test_the_engine_starts_with_a_draft_of_one_pass_a_block(one_pass: Server, masked: Path) -> None:
    """By the command that the export printed."""
    serving = json.loads((masked / EXPORT / "serving.json").read_text())
    assert '"parallel_drafting":true' in serving["engines"]["vLLM"]["command"].replace(" ", "")
    with urllib.request.urlopen(f"{one_pass.url}/health", timeout=5) as answer:
        assert answer.status == 200


def test_a_block_in_one_pass_is_accepted_as_replay_says(one_pass: Server, masked: Path) -> None:
    found = read_back(one_pass, masked, rule="greedy", count=12, gamma=GAMMA_WITHOUT_VERDICT)
    check_agreement(found, "greedy", GAMMA_WITHOUT_VERDICT)
    assert found.drafting == "parallel"
    assert found.greedy.same
    assert found.survival["served"] == pytest.approx(found.survival["replay"], abs=0.02)
    assert 0 < found.survival["served"][1] < 0.5 * found.survival["served"][0], "the mask is not learnt"
