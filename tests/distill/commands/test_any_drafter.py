"""`understudy readback --target --prompts` and `compare URL`: any drafter that a server runs, without a run of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, running_engine
from readback_run import GAMMA
from rich.console import Console
from tiny_training import tiny_tokenizer

from distill.commands.compare.compare import compare
from distill.commands.compare.options import CompareOptions
from distill.commands.readback.asking import Replies
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.commands.readback.source import counted_alone
from distill.engines.protocol.client import Answer
from distill.engines.protocol.counters import as_counts
from distill.engines.protocol.counts import DraftCounts
from distill.engines.protocol.engine import read_counts
from distill.run.heldout_set import HeldoutSet
from distill.run.readback_record import ReadbackRecord
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.engine_blocks import ServedBlocks, survival_intervals
from speculative.measure.measured import TARGET

pytestmark = pytest.mark.usefixtures("_quick")
PROMPTS = ["def add(a, b):", "class Node:", "import os", "for row in rows:", "return self.name", "if not values:"]


@pytest.fixture
def asked(tmp_path: Path, heldout: HeldoutSet) -> dict[str, Any]:
    """Options of a readback without a run."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return {
        "target": str(heldout.target.config.path),
        "prompts": str(file),
        "max_tokens": 16,
        "to": tmp_path / "out",
    }


@pytest.fixture
def served(make: Callable[..., FakeEngine]) -> Callable[..., FakeEngine]:
    return lambda **how: make(**{"prompts": []} | how)


def judged(engine: FakeEngine, asked: dict[str, Any], **more: Any) -> ReadbackRecord:
    with running_engine(engine) as url:
        return readback_command(ReadbackOptions(url, **asked | more))


def test_a_drafter_is_judged_without_a_run(served: Callable[..., FakeEngine], asked: dict[str, Any]) -> None:
    engine = served()
    found = judged(engine, asked)
    assert (found.agrees, found.causes, found.z, found.drafting, found.target) == (
        True,
        [],
        None,
        None,
        asked["target"],
    )
    assert (found.served.prompts, found.served.gamma, found.served.rule, found.replay) == (6, GAMMA, "unknown", None)
    assert found.served.tau == pytest.approx((found.served.tokens - 6) / engine.text.made_blocks(False))
    assert (found.greedy.equal, found.greedy.prompts) == (6, 6)
    assert found.text_fit is not None
    assert found.text_fit.same
    assert found.survival_ci is not None
    for own, (low, high) in zip(found.survival["served"], found.survival_ci, strict=True):
        assert 0 <= low <= own <= high <= 1
    assert ReadbackRecord.stored(asked["to"]) == found


def test_counters_alone_give_the_same_by_request(served: Callable[..., FakeEngine], asked: dict[str, Any]) -> None:
    """One request at a time, the counters are those of the request; several at a time, only sums are left."""
    told, alone, together = (
        judged(served(detail=detail), asked, concurrency=load)
        for detail, load in (("summary", 1), ("none", 1), ("none", 2))
    )
    assert told.served.tau == alone.served.tau == together.served.tau
    assert (told.source, alone.source, together.source) == ("responses", "responses", "metrics")
    assert told.served.tau_ci == alone.served.tau_ci
    assert told.survival["served"] == pytest.approx(alone.survival["served"])
    assert told.survival_ci == alone.survival_ci
    assert (together.served.tau_ci, together.survival_ci) == (None, None)
    assert any("no intervals" in note for note in together.notes)


def test_text_that_is_not_the_targets_is_found(served: Callable[..., FakeEngine], asked: dict[str, Any]) -> None:
    found = judged(served(noise=True, greedy_shift=7), asked)
    assert not found.agrees
    assert [cause.split(":")[0] for cause in found.causes] == ["text", "greedy"]
    assert not judged(served(greedy_shift=7), asked, temperature=0.0).agrees


def test_the_engine_without_the_draft_may_come_later_at_the_same_address(
    served: Callable[..., FakeEngine], asked: dict[str, Any]
) -> None:
    engine = served(slow=0.01)
    with running_engine(engine) as url:
        first = readback_command(ReadbackOptions(url, **asked))
        with pytest.raises(UserError, match="same server"):
            readback_command(ReadbackOptions(url, **asked, plain=url))
        engine.text, engine.drafts, engine.requests = replace(engine.text, draft=None, made={}), False, 0
        engine.becomes(counters=False)
        both = readback_command(ReadbackOptions(url, **asked, plain=url, resume=True))
    assert engine.requests == 1 + 6
    assert (first.served.tau, first.served.speed_up) == (both.served.tau, None)
    assert both.served.speed_up is not None
    assert (both.engine, both.version, both.measured[-1].way) == ("vLLM", "0.32.0", TARGET)


def test_mistakes_are_one_line(served: Callable[..., FakeEngine], asked: dict[str, Any], run: Path) -> None:
    for more, said in (
        ({"prompts": "nowhere.jsonl"}, "--prompts nowhere.jsonl"),
        ({"target": ""}, "--run RUN, or --target"),
        ({"run": run}, "--count N"),
        ({"max_tokens": 4096}, "lower --max-tokens"),
        ({"to": Path(__file__)}, "--to .*File exists"),
    ):
        with pytest.raises(UserError, match=said):
            readback_command(ReadbackOptions("http://127.0.0.1:9", **asked | more))
    with pytest.raises(UserError, match="no server answers"):
        readback_command(ReadbackOptions("http://127.0.0.1:9", **asked))
    with pytest.raises(UserError, match="reports no draft counts"):
        judged(served(detail="none", counters=False), asked)
    with pytest.raises(UserError, match="other tokens than the tokenizer of --target"):
        judged(served(tokenizer=tiny_tokenizer()), asked)


def test_calls_without_a_draft_count_in_tau() -> None:
    """11 tokens: the prefill's, 4 blocks that accept 3, and 3 calls in which n-grams found nothing."""
    texts = [HeldoutResponse(str(number), "", [1], [], []) for number in range(2)]
    counts = DraftCounts("vllm", 3, 12, 4, 3)
    answers = [Answer(text.key, list(range(11)), "", False, 1.0, counts, 11, {}) for text in texts]
    found = counted_alone(Replies(DecodeSettings(), texts, answers), None)
    assert found.counted.tau == pytest.approx(10 / 7)
    assert found.tau_ci == pytest.approx((10 / 7, 10 / 7))
    assert "43%" in found.notes[-1]
    sums = replace(
        Replies(DecodeSettings(), texts, [replace(one, counts=None) for one in answers]),
        server=DraftCounts("vllm", 6, 24, 8, accepted_G=(4, 2), tokens=22),
    )
    assert counted_alone(sums, None).counted.tau == pytest.approx(10 / 7)


def test_counts_between_two_scrapes_are_read_as_those_of_a_request() -> None:
    found = read_counts(as_counts(DraftCounts("vllm", 6, 15, 5, accepted_G=(3, 2, 1), tokens=12)))
    assert found == DraftCounts("vllm", 6, 15, 5, 3, histogram=(2, 1, 1, 1))
    assert as_counts(DraftCounts("sglang", 6, None, 5)) == {}


def test_survival_intervals_cover_the_estimate() -> None:
    rows = [ServedBlocks(9, 4, (2, 0, 1, 3), (3, 3, 3, 3)), ServedBlocks(6, 4, (0, 1, 0, 1), (3, 3, 3, 1))] * 4
    sums = [np.array(side) for side in zip(*(row.sums(4) for row in rows), strict=True)]
    ends = survival_intervals(*sums, range(8))
    for (low, high), own in zip(ends[:3], sums[1].sum(0) / np.maximum(sums[0].sum(0), 1), strict=False):
        assert low <= own <= high
    assert ends[3] == (0.0, 1.0)  # never drafted
    # Two responses to each of four prompts are four units, however many responses there are.
    twice = [np.repeat(side, 2, 0) for side in sums]
    assert survival_intervals(*twice, np.arange(16) // 2)[:3] == ends[:3]
    narrow, wide = (survival_intervals(*twice, keys)[0] for keys in (range(16), np.arange(16) // 2))
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_prompts_without_all_ids_are_left_out_of_differences(
    served: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet, tmp_path: Path
) -> None:
    """Pairs are by prompt: what one server does not list is not compared, and the rest still agrees with replay."""
    prompts, console, out = [one.prompt_ids for one in heldout.responses], Console(file=io.StringIO()), tmp_path / "o"
    lacking = sum(sum(prompt) % 3 == 0 for prompt in prompts)
    assert 0 < lacking < len(prompts)
    with running_engine(served(prompts=prompts, unlisted=3)) as one:
        assert compare(CompareOptions([str(run), one], rule="greedy", gamma=GAMMA, out=out), console) == 0
    assert f"{lacking} prompts are not compared" in console.file.getvalue()  # type: ignore[attr-defined]
    found = json.loads(out.read_text())
    assert found["differences"][0]["tau"]["gain"] == pytest.approx(0, abs=1e-9)
    assert found["measured"][1]["prompts"] == len(prompts) - lacking


def test_a_served_drafter_beside_ours(
    served: Callable[..., FakeEngine],
    run: Path,
    heldout: HeldoutSet,
    draft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedily the served tau is that of replay, prompt by prompt; a second server that drafts less accepts less per call."""
    prompts, console, loaded = [one.prompt_ids for one in heldout.responses], Console(file=io.StringIO()), list[str]()
    out = tmp_path / "out.json"
    with running_engine(served(prompts=prompts)) as one, running_engine(served(prompts=prompts, gamma=1)) as two:
        drafts = [one, two, str(run)]
        asked = CompareOptions(drafts, rule="greedy", gamma=GAMMA, out=out)
        assert compare(asked, console) == 0
        narrow = replace(asked, drafts=[two, str(run)], gamma=0, out=tmp_path / "narrow.json")
        assert compare(narrow, console) == 0
        with pytest.raises(UserError, match="--fail-below"):
            compare(replace(asked, fail_below=["tau=1"]), console)
        with pytest.raises(UserError, match="lookup is not replayed"):
            compare(replace(asked, drafts=[one, f"lookup+draft:{run}"]), console)
        monkeypatch.setattr(HeldoutSet, "draft", lambda _, path: loaded.append(path) or draft)
        with pytest.raises(UserError, match="no mask token"):
            compare(replace(asked, drafts=[f"parallel:{run}", one]), console)
        assert loaded[-1] == str(run)
        with pytest.raises(UserError, match="--on RUN"):
            compare(CompareOptions([one, two]), console)
    (same,) = json.loads((tmp_path / "narrow.json").read_text())["differences"]
    assert same["tau"]["gain"] == pytest.approx(0, abs=1e-9), "one draft, at the gamma of the server"
    found = json.loads(out.read_text())
    first, less, ours = found["measured"]
    assert (first["how"]["tau"], ours["how"]["tau"], less["gamma"], first["prompts"]) == ("served", "replay", 1, 10)
    assert first["tau"] == pytest.approx(ours["tau"])
    narrower, replayed = found["differences"]
    assert replayed["tau"]["gain"] == pytest.approx(0, abs=1e-9)
    assert replayed["tokens_per_second"] is None
    assert narrower["tau"]["gain"] == pytest.approx(less["tau"] - first["tau"])
    assert narrower["tau"]["ci"][0] <= narrower["tau"]["gain"] <= narrower["tau"]["ci"][1]
    assert "compared with" in console.file.getvalue()  # type: ignore[attr-defined]
