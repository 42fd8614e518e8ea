"""Several servers of one target: what they answer together, when some are dead, slow or wrong, and what is said about them."""

from __future__ import annotations

import contextlib
import copy
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_server import MODEL, Behaviour, running_server
from processes import run_ranks
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, forget_accelerators, small_config, tiny_tokenizer

from data.files import read_manifest
from data.responses import dealing, servers
from data.responses.endpoint import PROBE_TEXT, EndpointTarget
from data.responses.endpoint_keys import Endpoint
from data.responses.journal import Journal, settle
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan
from data.responses.servers import Servers, local_says
from data.responses.store import Row, Store
from distill import respond, train
from distill.config.layout import RESPONSES, TRAINING
from distill.run.verdict_record import load_verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

SETTINGS = DecodeSettings(SamplingSettings(), max_tokens=6, rule=Rule.named("sample"), eos_ids=(2,), seed=5)
COUNT = 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(dealing, "RECHECK_SECONDS", 0.05)
    monkeypatch.setattr(EndpointTarget, "retries", 0)
    monkeypatch.setattr(dealing, "_FEWEST_SECONDS", 60.0)
    monkeypatch.setattr(dealing, "_PATIENCE_SECONDS", 10.0)


@contextlib.contextmanager
def fakes(count: int) -> Iterator[tuple[list[str], list[Behaviour]]]:
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(running_server()) for _ in range(count)]
        yield [url for url, _ in pairs], [behaviour for _, behaviour in pairs]


def servers_at(*urls: str, **options: Any) -> Servers:
    endpoint = Endpoint(urls=urls, **{"concurrency": 2, "timeout": 15.0, **options})
    return Servers(endpoint, tiny_tokenizer(), TOKENS)


def prompts() -> list[RenderedPrompt]:
    texts = [f"def f{index}(a{', b' * (index % 4)}):" for index in range(COUNT)]
    ids = [tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [RenderedPrompt(f"prompt-{index}", "code", of) for index, of in enumerate(ids)]


def made(target: Servers, folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """The files of a store that the servers filled."""
    store = Store(folder)
    store.open({"a": 1})
    settle(store)
    target.respond(store, ResponsePlan(prompts(), 1, 8, rank, ranks), SETTINGS, show=False)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows_in(folder: Path) -> list[Row]:
    return sorted(Store(folder).read(), key=lambda row: row.prompt_id)


def looked_at(target: Servers) -> None:
    """Let the servers do nothing, after a look at each."""
    target.check()
    assert len(list(target.each(lambda _, job: job, range(1)))) == 1


def answered(behaviour: Behaviour) -> int:
    return sum("seed" in request for request in behaviour.requests)


def test_any_number_of_servers_gives_the_same_store(tmp_path: Path) -> None:
    with fakes(3) as (urls, behaviours):
        one, two, three = (made(servers_at(*urls[:count]), tmp_path / str(count)) for count in (1, 2, 3))
        assert len(one) == 1 + 3, "a manifest and the shards"
        assert one == two == three
        assert all(answered(behaviour) for behaviour in behaviours)
        behaviours[1].dead_after = len(behaviours[1].requests) + 1 + 3
        assert made(servers_at(*urls), tmp_path / "dying") == one
        made(servers_at(*urls[:2]), tmp_path / "ranks", 0, 2)
        assert made(servers_at(*urls[:2]), tmp_path / "ranks", 1, 2) == one


def test_a_fast_server_gets_more(tmp_path: Path) -> None:
    with fakes(2) as (urls, behaviours):
        behaviours[0].seconds = 0.3
        made(servers_at(*urls), tmp_path / "a")
        assert answered(behaviours[0]) < answered(behaviours[1]) / 2
        assert answered(behaviours[0]) + answered(behaviours[1]) == COUNT


@pytest.mark.parametrize("fault", ["500", "drop", "junk", "never"])
def test_the_others_do_what_a_bad_server_leaves(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dealing, "_FEWEST_SECONDS", 0.5)
    with fakes(3) as (urls, behaviours):
        good = made(servers_at(urls[0]), tmp_path / "good")
        behaviours[1].always = fault
        start = time.monotonic()
        assert made(servers_at(*urls, timeout=100.0), tmp_path / "bad") == good
        assert time.monotonic() - start < 50, "before the answer that takes a minute"
        if fault != "never":
            assert f"{urls[1]}" in (said := capsys.readouterr().err)
            assert "the other servers take its share" in said


def test_a_dead_server_is_named_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fakes(2) as (urls, behaviours):
        behaviours[0].seconds, behaviours[1].dead_after = 0.1, 0
        target = servers_at(*urls)
        looked_at(target)
        assert [lane.fault is None for lane in target.lanes] == [True, False]
        assert f"{urls[1]}: no server answers" in capsys.readouterr().err
        results = target.each(lambda one, _: (time.sleep(0.02), one.endpoint.url)[1], range(2000))
        assert next(results)[1] == urls[0]
        behaviours[1].dead_after = None
        assert any(url == urls[1] for _, url in results)
        assert f"{urls[1]}: answers again" in capsys.readouterr().err


def test_a_server_that_comes_back_with_another_model_gets_no_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fakes(2) as (urls, behaviours):
        behaviours[0].seconds = 0.1
        target = servers_at(*urls)
        target.local = local_says(MODEL, prompts())
        looked_at(target)
        behaviours[1].always, behaviours[1].model = "500", tiny_model(vocab_size=TOKENS, seed=4)
        results = target.each(lambda one, job: one.answer([5, 6], SETTINGS, str(job)), range(30))
        next(results)
        behaviours[1].always = None
        served = answered(behaviours[1])
        assert len(list(results)) == 29
        assert answered(behaviours[1]) <= served + 2, "what was under way"
        assert "is not the model of target.path" in (said := capsys.readouterr().err)
        assert said.count("it gets no more work") == 1


def test_no_server_is_the_usual_line_and_keeps_what_is_finished(tmp_path: Path) -> None:
    with fakes(2) as (urls, behaviours):
        made(servers_at(*urls), tmp_path / "good")
        for behaviour in behaviours:
            behaviour.requests.clear()
            behaviour.dead_after = 1 + 4
        text = refused(made, servers_at(*urls), tmp_path / "dead")
        assert "no server answers" in text
        assert "the same command continues" in text
        for behaviour in behaviours:
            behaviour.requests.clear()
            behaviour.dead_after = None
        made(servers_at(*urls), tmp_path / "dead")  # what was finished may be written in files of its own
        assert rows_in(tmp_path / "dead") == rows_in(tmp_path / "good")
        assert sum(map(answered, behaviours)) == COUNT - 8, "all eight answers were kept"
    assert "no server answers" in refused(looked_at, servers_at("http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"))


def test_a_job_that_no_server_can_do_ends_the_run(tmp_path: Path) -> None:
    with fakes(3) as (urls, _):
        target = servers_at(*urls)

        def work(one: Any, job: int) -> int:
            if job == 7:
                raise UserError("seven is too much")
            return job

        results = target.each(work, range(40))
        assert next(results)[0] < 7
        with pytest.raises(UserError, match="seven is too much"):
            list(results)


def test_a_kill_loses_only_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fakes(2) as (urls, behaviours):
        made(servers_at(*urls), tmp_path / "good")
        add, count = Journal.add, iter(range(11))

        def add_or_die(journal: Journal, row: Any) -> None:
            add(journal, row)
            if next(count) == 10:
                journal._file.write(b'["prompt-3", 0, "code", [1, 2')
                raise SystemExit

        monkeypatch.setattr(Journal, "add", add_or_die)
        with pytest.raises(SystemExit):
            made(servers_at(*urls), tmp_path / "killed")
        monkeypatch.setattr(Journal, "add", add)
        for behaviour in behaviours:
            behaviour.requests.clear()
        files = made(servers_at(*urls), tmp_path / "killed")
        assert not [name for name in files if name.startswith("unwritten")]
        assert rows_in(tmp_path / "killed") == rows_in(tmp_path / "good")
        # By seed, because a request of the killed run may arrive late.
        seeds = {one["seed"] for behaviour in behaviours for one in behaviour.requests if "seed" in one}
        assert len(seeds) == COUNT - 11


def test_a_server_that_never_answers_does_not_hide_the_others_model() -> None:
    with fakes(1) as (urls, _), socket.create_server(("127.0.0.1", 0)) as silent:
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        assert servers_at(hung, *urls, timeout=600.0).model == "tiny"


def test_a_kill_of_more_ranks_loses_nothing_that_is_left_to_fewer(tmp_path: Path) -> None:
    """Three ranks are killed, then two begin, of which one is killed before it wrote anything."""
    with fakes(1) as (urls, _):
        made(servers_at(*urls), tmp_path / "good")
    store, rows = Store(tmp_path / "killed"), rows_in(tmp_path / "good")
    store.open({"a": 1})
    for rank in range(3):
        with contextlib.suppress(KeyboardInterrupt), Journal(store.folder, rank) as journal:
            for row in rows[rank::3]:
                journal.add(row)
            raise KeyboardInterrupt
    settle(store)
    assert rows_in(tmp_path / "killed") == rows
    assert len(list(store.folder.glob("shard-*"))) == 1
    with contextlib.suppress(KeyboardInterrupt), Journal(store.folder, 0) as journal:
        journal.add(rows[0])  # a kill between a shard and the end of the journal
        raise KeyboardInterrupt
    settle(store)
    assert rows_in(tmp_path / "killed") == rows
    with fakes(1) as (urls, behaviours):
        for rank in range(2):
            made(servers_at(*urls), tmp_path / "killed", rank, 2)
        assert not answered(behaviours[0])


def test_the_first_answers_tell_tokens_time_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "ESTIMATED_FROM", 5)
    with fakes(2) as (urls, behaviours):
        shown: list[str] = []
        count = servers._Speed.count
        monkeypatch.setattr(
            servers._Speed, "count", lambda self, *row: (count(self, *row), shown.append(self.progress.line()))[0]
        )
        behaviours[0].seconds, behaviours[1].dead_after = 0.1, 2 + 6
        made(servers_at(*urls), tmp_path / "a")
    said = capsys.readouterr().err
    assert said.count("by the first 5 answers, 20 have about 120 tokens; 0:00:0") == 1
    assert " tok/s, " in said
    assert "kB on disk" in said
    host = urls[0].removeprefix("http://").removesuffix("/v1")
    assert f"({host} " in shown[-1]
    assert " out)" in shown[-1]
    assert " left, " in shown[-2]


def other(kind: str) -> Any:
    model = copy.deepcopy(MODEL)
    if kind == "bfloat16":
        return model.to(torch.bfloat16)
    return tiny_model(vocab_size=TOKENS, seed=4) if kind == "another" else model


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("same", "log-probabilities differ from the local weights' by 0.0000 nats on average"),
        ("bfloat16", "it looks like another precision than float32"),
        ("another", "is not the model of target.path: their log-probabilities differ by"),
    ],
)
def test_each_server_is_compared_with_the_local_weights(
    kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fakes(2) as (urls, behaviours):
        behaviours[1].model = other(kind)
        target = servers_at(*urls)
        target.local = local_says(MODEL, prompts())
        text = refused(looked_at, target) if kind == "another" else ""
        if not text:
            looked_at(target)
            text = capsys.readouterr().err
        line = next(line for line in text.splitlines() if urls[1] in line)
        assert said in line
        assert "at most, on 32 texts" in line
        assert line.startswith("warning: ") == (kind == "bfloat16")


def test_another_chat_template_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with fakes(1) as (urls, behaviours):
        target = servers_at(*urls)
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        target.lanes[0].target.tokenizer = tokenizer
        target.local = local_says(MODEL, prompts())
        chat = [{"role": "user", "content": PROBE_TEXT}]
        ours = list(tokenizer.apply_chat_template(chat, return_dict=False))
        for ids, warned in ((None, False), (ours, False), ([*ours[:4], 9], True)):
            behaviours[0].chat_ids = ids
            target.lanes[0].compared = False
            looked_at(target)
            said = capsys.readouterr().err
            assert (
                f"makes 5 tokens of a chat and that of target.path {len(ours)}, of which the first 4" in said
            ) == warned


def config_of(folder: Path, **sections: Any) -> Path:
    MODEL.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    return small_config(folder, 24, data={"heldout_count": 6}, judge={"prompts": 6, "live_prompts": 4}, **sections)


def run(config: Path, *overrides: str) -> None:
    forget_accelerators()
    respond.run(config, overrides, "none")


def run_as_rank(_: int, config: Path, *overrides: str) -> None:
    run(config, *overrides)


@pytest.mark.usefixtures("without_figures")
def test_servers_answer_and_local_weights_do_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The store is that of a local run; training carves, decodes and times, and goes on when the servers are gone."""
    config = config_of(tmp_path, train={"steps": 4, "batch_size": 4, "micro_batch_size": 4})
    run(config, "name=local")
    with fakes(2) as (urls, _):
        at = f"target.endpoint={{urls: {urls}, concurrency: 2}}"
        run(config, at, "name=served")
        run_ranks(run_as_rank, config, at, "name=ranks")
    folders = {name: tmp_path / name / RESPONSES / TRAINING for name in ("local", "served", "ranks")}
    assert read_manifest(folders["served"]) == read_manifest(folders["local"])
    assert "log-probabilities differ from the local weights' by 0.0000 nats" in capfd.readouterr().err
    ranks, served = ({path.name for path in folders[name].glob("shard*")} for name in ("ranks", "served"))
    assert ranks == served
    forget_accelerators()
    assert train.main([str(config), "name=served"]) == 0
    verdict = load_verdict(tmp_path / "served")
    assert any(row.speed_up for row in verdict.measured)
    assert all(record.live_check is not None for record in verdict.checkpoints)


def test_a_folder_without_weights_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    assert respond.main([str(config), "target.endpoint={urls: ['http://127.0.0.1:9/v1']}"]) == 2
    assert "no weights there; give the whole model, or set target.endpoint.weights: server" in capsys.readouterr().err
