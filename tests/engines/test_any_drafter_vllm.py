"""Drafters that are not ours, judged in a real vLLM without a run: n-grams, and an EAGLE-3 head with random weights.

`make engines` builds vLLM (CPU, x86-64). Two of three engines run at a time.
"""

import inspect
import json
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eagle_head import write_eagle_head
from engine_process import Server, built, raw_vllm
from function_heads import write_heads
from tiny_training import tiny_tokenizer

from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.models.load import EMBEDDED_FOLDER, load_model, load_tokenizer
from distill.run.readback_record import ReadbackRecord
from speculative.errors import UserError
from speculative.measure.measured import TARGET

pytestmark = [pytest.mark.engine, *built(".venv-vllm")]
GAMMA, PROMPTS, TOKENS = 3, 6, 24
FLAGS = ["--enforce-eager", "--dtype", "float32"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("drafters")
    write_heads(found / "prompts.jsonl", ["statistics", "shutil"], PROMPTS)
    return found


def served(folder: Path, name: str, *words: str, **speculative: Any) -> Any:
    drafting = (
        ["--speculative-config", json.dumps({"num_speculative_tokens": GAMMA} | speculative)] if speculative else []
    )
    return raw_vllm(EMBEDDED_FOLDER, [*FLAGS, *words, *drafting], folder / f"{name}.log", ENVIRONMENT)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    with served(folder, "plain") as server:
        yield server


@pytest.fixture(scope="module")
def ngrams(folder: Path) -> Iterator[Server]:
    """As it is by default: no counts in its answers, counters on /metrics."""
    with served(folder, "ngrams", method="ngram", prompt_lookup_min=2, prompt_lookup_max=4) as server:
        yield server


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Server]:
    """A random head that proposes the two most frequent tokens of Python text, so that chance accepts some."""
    tokenizer = load_tokenizer(str(EMBEDDED_FOLDER))
    counts = Counter(tokenizer(inspect.getsource(statistics)).input_ids)
    eagle = write_eagle_head(folder / "eagle", sorted(token for token, _ in counts.most_common(2)))
    with served(
        folder, "eagle", "--per-request-spec-decode-metrics", "detailed", method="eagle3", model=str(eagle)
    ) as server:
        yield server


def judged(server: Server, folder: Path, **more: Any) -> ReadbackRecord:
    # As the engine computes it: in float32, and not in the 16 bits of the file.
    if not (target := folder / "target-32").exists():
        load_model("target", "embedded").save_pretrained(target)
        load_tokenizer("embedded").save_pretrained(target)
    settings = {"target": str(target), "prompts": str(folder / "prompts.jsonl"), "max_tokens": TOKENS}
    to = folder / server.log.stem
    return readback_command(ReadbackOptions(server.url, **{"to": to, "temperature": 0.8} | settings | more))


def check_text(found: ReadbackRecord) -> None:
    assert found.agrees, found.causes
    assert (found.engine, found.version.startswith("0."), found.z, found.replay) == ("vLLM", True, None, None)
    assert found.greedy is not None
    assert found.greedy.same
    assert found.text_fit is not None
    assert found.text_fit.same


def test_the_engine_starts_alone(plain: Server) -> None:
    assert plain.url


def test_it_starts_with_ngrams(ngrams: Server) -> None:
    assert ngrams.url


def test_ngrams_are_judged_by_counters_alone(ngrams: Server, plain: Server, folder: Path) -> None:
    found = judged(ngrams, folder, plain=plain.url)
    check_text(found)
    assert (found.source, found.served.gamma, found.served.prompts) == ("responses", GAMMA, PROMPTS)
    # Every call emits one token and what it accepts; in most of them n-grams find nothing.
    rows = [
        json.loads(line)["response"]["metrics"]["speculative_decoding"]
        for line in (folder / "ngrams" / "readback.jsonl").open()
    ]
    accepted = sum(row["num_accepted_draft_tokens"] for row in rows)
    assert sum(row["num_spec_steps"] for row in rows) < 0.7 * (found.served.tokens - PROMPTS)
    assert found.served.tau == pytest.approx(
        (found.served.tokens - PROMPTS) / (found.served.tokens - PROMPTS - accepted), rel=0.03
    )
    low, high = found.served.tau_ci
    assert 1 <= low <= found.served.tau <= high <= GAMMA + 1
    assert found.survival_ci is not None
    assert found.measured[-1].way == TARGET
    assert found.served.speed_up is not None


def test_another_tokenizer_is_refused(ngrams: Server, folder: Path) -> None:
    other = folder / "other"
    shutil.copytree(EMBEDDED_FOLDER, other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(UserError, match="other tokens than the tokenizer of --target"):
        judged(ngrams, folder, target=str(other), to=folder / "refused")


def test_it_starts_with_a_head(head: Server) -> None:
    assert head.url


def test_a_head_is_judged_by_its_requests(head: Server, plain: Server, folder: Path) -> None:
    found = judged(head, folder, plain=plain.url)
    check_text(found)
    assert (found.source, found.served.gamma) == ("responses", GAMMA)
    first, *_, last = found.survival["served"]
    assert 0 < first < 0.5
    assert last < 0.1
    assert 1 < found.served.tau < 1.5
    assert found.survival_ci is not None
    assert len(found.survival_ci) == GAMMA
