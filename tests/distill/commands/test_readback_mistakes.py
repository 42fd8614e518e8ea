"""Mistakes of those who run `understudy readback`, and servers that are none: a line each, and no answer lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, running_engine
from page_server import page_server
from readback_run import GAMMA, read
from refusals import refused

from distill.commands.readback import source
from distill.commands.readback.asking import AnswerFile, Replies
from distill.commands.readback.comparison import Counted, count
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.engines.protocol import client as engine_client
from distill.engines.protocol.client import Answer
from distill.engines.protocol.counts import DraftCounts
from distill.engines.protocol.engine import engine_in
from distill.export.load_table import GAMMA_WITHOUT_VERDICT
from distill.faults import Interrupted
from distill.run.heldout_set import HeldoutSet
from distill.run.verdict_record import DraftOf, Verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.measured import BY_BLOCK, DRAFT, LOOKUP, Measured
from speculative.rules.rule import Rule

pytestmark = pytest.mark.usefixtures("_quick")


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:99999", "http://[::1", "http://a b", "ftp://x", ""])
def test_an_address_that_is_none_is_one_line(run: Path, url: str) -> None:
    refused(lambda: readback_command(ReadbackOptions(url, run)))


def test_a_draft_without_a_run_is_not_ignored() -> None:
    options = ReadbackOptions("http://x:9", target="embedded", prompts="p.jsonl", draft="d.gguf")
    assert "--draft d.gguf: " in refused(readback_command, options)


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
@pytest.mark.parametrize("page", ["<html>hello</html>", '"hello"', "[1]", '{"data": ["x"]}', "{}"])
def test_a_server_that_is_no_engine_is_one_line(run: Path, page: str, kind: str) -> None:
    with page_server(lambda _: page, kind) as url, pytest.raises(UserError, match=url):
        readback_command(ReadbackOptions(url, run))
    with page_server(lambda _: page, kind) as url, pytest.raises(UserError):
        readback_command(ReadbackOptions(url.replace("http:", "https:"), run))


def test_a_wrong_second_address_costs_no_answers(make: Callable[..., FakeEngine], run: Path) -> None:
    read(make(), run, count=2)
    kept = (run / "readback.jsonl").read_bytes()
    with pytest.raises(UserError, match="no server answers"):
        read(make(), run, plain="http://127.0.0.1:9")
    with running_engine(make()) as url, pytest.raises(UserError, match="--plain"):
        readback_command(ReadbackOptions(url, run, plain=url.removesuffix("/v1") + "/"))
    assert (run / "readback.jsonl").read_bytes() == kept


def test_a_second_server_that_drafts_too_gives_no_speed_up(make: Callable[..., FakeEngine], run: Path) -> None:
    for detail in ("none", "detailed"):
        with running_engine(make(detail=detail)) as plain, pytest.raises(UserError, match=r"--plain .* drafts too"):
            read(make(), run, plain=plain)


def test_a_run_without_heldout_responses_is_one_line(
    make: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule in ("sample", "greedy"):
        empty = replace(heldout, responses=[], rule=Rule.named(rule))
        monkeypatch.setattr(source, "load_heldout_set", lambda *_, empty=empty: empty)
        with pytest.raises(UserError, match="no held-out responses"):
            read(make(), run)


def test_answers_of_many_threads_stay_whole_and_damaged_lines_cost_themselves_only(tmp_path: Path) -> None:
    class Client:
        def ask(self, prompt_ids: Any, settings: Any, key: str) -> Answer:
            return Answer(key, [1], "", False, 1.0, None, 1, {"ids": [int(key)] * 20_000})

        def read(self, body: dict[str, Any], settings: Any, key: str, seconds: float) -> Answer:
            return Answer(key, [1], "", False, seconds, None, 1, body)

    path, settings, client = tmp_path / "answers.jsonl", DecodeSettings(), Client()
    texts = [HeldoutResponse(str(number), "", [1], [1], [0.0]) for number in range(64)]
    file = AnswerFile(path, client, resume=False)  # type: ignore[arg-type]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda text: file.answer(text, settings), texts))
    lines = path.read_text().splitlines()
    assert sorted(json.loads(line)["key"] for line in lines) == sorted(text.key for text in texts)
    lines[3], lines[5], lines[7] = lines[3][:9], "7", '{"key": "x"}'
    path.write_text("\n".join(lines))
    assert AnswerFile(path, client, resume=True).kept.startswith("61 answers")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "usage"),
        (
            b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\ndata: {"error": {"message": "out of memory"}}\n\n',
            "out of memory",
        ),
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(sent: bytes, said: str) -> None:
    client = engine_client.EngineClient("http://127.0.0.1:9", None, 100)
    response = SimpleNamespace(content=sent, extensions={"arrivals": [(1.0, len(sent))] if sent else []})
    client._response = lambda *_, **__: response  # type: ignore[method-assign]
    with pytest.raises(UserError, match=said):
        client.ask([1], DecodeSettings(max_tokens=4), "a")


def test_ctrl_c_says_what_goes_on(make: Callable[..., FakeEngine], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = engine_client.EngineClient.ask, list[str]()

    def stopped(own: Any, prompt_ids: Any, settings: Any, key: str) -> Answer:
        asked.append(key)
        if len(asked) == 16:
            raise KeyboardInterrupt
        return ask(own, prompt_ids, settings, key)

    monkeypatch.setattr(engine_client.EngineClient, "ask", stopped)
    with pytest.raises(Interrupted, match=r"3 answers are kept in .*readback\.jsonl .*--resume"):
        read(make(), run)


def test_greedy_answers_of_a_sampled_run_are_no_part_of_its_log(make: Callable[..., FakeEngine], run: Path) -> None:
    engine = make(rule="greedy-draft")
    found = read(engine, run)
    assert found.greedy is not None
    rows = [json.loads(line) for line in (run / "readback.jsonl").read_text().splitlines()]
    assert {row["asked"]["temperature"] for row in rows} == {0.25}
    assert len(rows) == 10


def test_gammas_by_load_and_of_the_other_way_are_gammas_of_the_export(run: Path, heldout: HeldoutSet) -> None:
    timed = [(DRAFT, 1, 7), (DRAFT, 8, 2), (BY_BLOCK, 1, 8), (LOOKUP, 1, 9)]
    rows = [Measured(way, "sample", load, gamma=gamma, speed_up=1.5) for way, load, gamma in timed]
    verdict = Verdict.model_construct(
        rule="sample",
        gamma=3,
        measured=rows,
        drafts=[DraftOf(way=DRAFT)],
        run={"1": DRAFT, "8": DRAFT},
    )
    by_token, by_block = SimpleNamespace(drafting="autoregressive"), SimpleNamespace(drafting="parallel")
    for judged, draft, gammas in (
        (verdict, by_token, (7, 3, 2)),
        (verdict, by_block, (8, 7, 3)),
        (None, by_block, (GAMMA_WITHOUT_VERDICT, heldout.config.judge.gamma)),
    ):
        assert source._gammas(ReadbackOptions("", run), heldout, judged, draft) == gammas  # type: ignore[arg-type]


def counted_of(accepted: list[list[int]], drafted: list[list[int]], tokens: int, engine: str = "vllm") -> Counted:
    """`count` of answers of so many tokens; llama.cpp tells no blocks."""
    answers = []
    for kept, tried in zip(accepted, drafted, strict=True):
        blocks = (len(kept), None, tuple(kept), tuple(tried)) if engine == "vllm" else (None, None)
        counts = DraftCounts(engine, sum(kept), sum(tried), *blocks)
        answers.append(Answer("", [5] * tokens, "", False, 1.0, counts, tokens, {}))
    texts = [HeldoutResponse("", "", [1], [5] * tokens, [0.0] * tokens) for _ in answers]
    named = engine_in("vLLM" if engine == "vllm" else engine)
    return count(Replies(DecodeSettings(), texts, answers, engine=named), GAMMA)


@pytest.mark.parametrize("gamma", [2, 3, 8])
def test_llama_cpps_gamma_is_read_whatever_was_asked_for(gamma: int) -> None:
    """Responses cut at their length: 10 blocks, half of each draft accepted."""
    kept = gamma // 2
    counted = counted_of([[kept] * 10] * 3, [[gamma] * 10] * 3, 1 + 10 * (kept + 1), "llama.cpp")
    assert (counted.gamma, counted.blocks) == (gamma, 30)


def test_llama_cpps_answer_without_counts_was_not_drafted() -> None:
    counts = DraftCounts("llama.cpp", 10, 30, None, None)
    answers = [Answer("", [5] * 21, "", False, 1.0, counts, 21, {}), Answer("", [5] * 3, "", True, 1.0, None, 3, {})]
    texts = [HeldoutResponse("", "", [1], [5] * one.tokens, [0.0] * one.tokens) for one in answers]
    counted = count(Replies(DecodeSettings(), texts, answers, engine=engine_in("llama.cpp")), GAMMA)
    assert (counted.tokens, counted.blocks) == (22, 12)


def test_one_prompt_without_token_ids_tells_nothing(
    make: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet
) -> None:
    with pytest.raises(UserError, match="at least 2 prompts"):
        read(make(ids=False, tokenizer=heldout.target.tokenizer), run, count=1)


def test_few_blocks_say_how_little_they_tell(make: Callable[..., FakeEngine], run: Path) -> None:
    found = read(make(rule="sample"), run, count=2, rule="sample")
    assert any("too few to detect" in note for note in found.notes)
    assert not any("too few" in note for note in read(make(), run, rule="greedy-draft").notes), (
        "nothing is random there"
    )
