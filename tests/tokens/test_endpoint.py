"""The target behind a server: against a local one that speaks vLLM's protocol on top of a real tiny model, and fails at times."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_server
import numpy as np
import pytest
import torch
from model_server import MODEL, Behaviour, logits_after
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer

from data.responses.endpoint import EndpointTarget
from data.responses.endpoint_keys import Endpoint
from data.responses.journal import settle
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan, respond
from data.responses.server_identity import TEXTS, TOP, difference
from data.responses.servers import Servers
from data.responses.store import Row, Store
from data.signals.signal import TopKSignal
from data.signals.store import SignalStore, signal_manifest
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure.measured import DRAFT, UNDISTILLED
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings, logits_to_probs

GREEDY = DecodeSettings(SamplingSettings(temperature=0.0), max_tokens=10, rule=Rule.named("greedy"), eos_ids=(2,))
SAMPLED = replace(GREEDY, sampling=SamplingSettings(temperature=0.8, top_k=20), rule=Rule.named("sample"), seed=5)


def target_at(url: str, record: Path | None = None, retries: int = 2, **options: Any) -> EndpointTarget:
    settings: dict[str, Any] = {"concurrency": 4, "timeout": 20.0, **options}
    target = EndpointTarget(Endpoint(urls=(url,), **settings), tiny_tokenizer(), TOKENS, record)
    target.retries = retries
    return target


def servers_at(*urls: str, retries: int = 2, **options: Any) -> Servers:
    settings: dict[str, Any] = {"concurrency": 4, "timeout": 20.0, **options}
    target = Servers(Endpoint(urls=urls, **settings), tiny_tokenizer(), TOKENS)
    for lane in target.lanes:
        lane.target.retries = retries
    return target


def rendered(count: int = 9) -> list[RenderedPrompt]:
    texts = [f"def f{index}(a{', b' * (index % 4)}):" for index in range(count)]
    return [
        RenderedPrompt(f"prompt-{index}", "code", tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]))
        for index, text in enumerate(texts)
    ]


def made(target: Servers, folder: Path, settings: DecodeSettings, samples: int = 1) -> list[Row]:
    store = Store(folder)
    store.open({"a": 1})
    plan = ResponsePlan(rendered(), samples, 4)
    settle(store)
    target.respond(store, plan, settings, show=False)
    return list(store.chosen(plan.keys, plan.domains()))


def locally(folder: Path, settings: DecodeSettings) -> list[Row]:
    store = Store(folder)
    store.open({"a": 1})
    respond(store, ResponsePlan(rendered(), 1, 4), MODEL, settings, batch_size=4, show=False)
    return store.read()


def with_common_end_token(tmp_path: Path, settings: DecodeSettings) -> DecodeSettings:
    """The settings with an end token that about half of the responses meet."""
    counts: dict[int, int] = {}
    rows = locally(tmp_path / "look", GREEDY)
    for row in rows:
        for token in set(row.response_ids[:-1]):
            counts[token] = counts.get(token, 0) + 1
    end = min(counts, key=lambda token: (abs(counts[token] - len(rows) / 2), token))
    return replace(settings, eos_ids=(end,))


def test_greedy_responses_are_those_of_local_decoding(server: Any, tmp_path: Path) -> None:
    settings = with_common_end_token(tmp_path, GREEDY)
    ours, theirs = locally(tmp_path / "local", settings), made(servers_at(server[0]), tmp_path / "served", settings)
    assert ours == theirs
    assert {row.finished for row in theirs} == {True, False}


@pytest.mark.parametrize("keeps_end_token", [True, False])
def test_ids_are_read_from_the_names_of_tokens(server: Any, tmp_path: Path, keeps_end_token: bool) -> None:
    url, behaviour = server
    settings = with_common_end_token(tmp_path, GREEDY)
    behaviour.token_ids, behaviour.keeps_end_token = False, keeps_end_token
    rows = locally(tmp_path / "local", settings)
    answers = [target_at(url).answer(row.prompt_ids, settings, "key") for row in rows]
    ours = [(row.response_ids, row.finished) for row in rows]
    assert [(answer.response_ids, answer.finished) for answer in answers] == ours
    behaviour.token_names = False
    assert "returns no token ids" in refused(lambda: target_at(url).answer([5, 6], settings, "key"))


def test_requests_say_all_settings_and_the_key_of_a_response_makes_its_seed(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    rows = made(servers_at(url), tmp_path / "a", SAMPLED, samples=2)
    requests = [request for request in behaviour.requests if "stop_token_ids" in request]
    assert len(requests) == len(rows) == 18
    assert len({request["seed"] for request in requests}) == 18
    asked = {
        name: requests[0][name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "model")
    }
    assert asked == {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "model": "tiny",
    }
    assert made(servers_at(url, concurrency=1), tmp_path / "b", SAMPLED, samples=2) == rows
    assert made(servers_at(url), tmp_path / "c", replace(SAMPLED, seed=6), samples=2) != rows


def test_sampled_responses_carry_their_probability_under_the_settings(server: Any, tmp_path: Path) -> None:
    for row in made(servers_at(server[0]), tmp_path / "a", SAMPLED):
        start = len(row.prompt_ids)
        probs = logits_to_probs(logits_after(list(row.input_ids))[start - 1 : -1], SAMPLED.sampling)
        wanted = probs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0].log()
        # float32 forwards over texts of other lengths
        torch.testing.assert_close(torch.tensor(row.log_target_probs), wanted, atol=1e-4, rtol=0)


def topk_locally(row: Row, k: int) -> TopKSignal:
    logs = logits_after(list(row.input_ids))[len(row.prompt_ids) - 1 : -1].double().log_softmax(-1)
    log_probs, ids = logs.topk(k)
    return TopKSignal(ids, log_probs.float(), (1 - log_probs.exp().sum(-1)).log().float())


def test_topk_is_the_local_one(server: Any, tmp_path: Path) -> None:
    # Sampled, so that some tokens are not among the seven: the server names such a token besides.
    rows = locally(tmp_path / "local", replace(SAMPLED, sampling=SamplingSettings()))
    target = target_at(server[0])
    assert any(set(row.response_ids) - set(topk_locally(row, 7).ids_RK.flatten().tolist()) for row in rows)
    for row in rows:
        found, wanted = target.score(row.prompt_ids, row.response_ids, 7), topk_locally(row, 7)
        assert torch.equal(found.ids_RK, wanted.ids_RK)
        # JSON carries float32 exactly; forwards of the same text in one piece agree to rounding
        torch.testing.assert_close(found.log_probs_RK, wanted.log_probs_RK, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.log_tail_R.exp(), wanted.log_tail_R.exp(), atol=1e-5, rtol=0)


def test_all_of_the_vocabulary_leaves_no_tail(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.max_logprobs = TOKENS
    row = locally(tmp_path / "local", GREEDY)[0]
    found = target_at(url).score(row.prompt_ids, row.response_ids, TOKENS)
    assert torch.isinf(found.log_tail_R).all()
    torch.testing.assert_close(found.log_probs_RK.exp().sum(-1), torch.ones(len(row.response_ids)))


def test_what_has_no_probability_is_an_empty_entry(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clamped = {"5": {"logprob": 0.0, "rank": 1}, "6": {"logprob": -9999.0, "rank": 2}}
    monkeypatch.setattr(model_server, "places", lambda prompt, _k, _behaviour: [None, *[clamped] * (len(prompt) - 1)])
    found = target_at(server[0]).score([5, 5], [5], 2)
    assert found.ids_RK[0, 0] == 5
    assert found.log_probs_RK.tolist() == [[0.0, -math.inf]]
    assert found.log_tail_R.tolist() == [-math.inf]


def opened(folder: Path, rows: list[Row], k: int = 5) -> SignalStore:
    store = SignalStore(folder)
    facts: dict[str, Any] = {"temperature": 1.0, "vocab_rows": TOKENS, "target": "t", "target_dtype": "d"}
    store.open(signal_manifest(k, **facts), [len(row.response_ids) for row in rows])
    return store


def test_a_signal_store_is_filled_by_two_ranks(server: Any, tmp_path: Path) -> None:
    rows = locally(tmp_path / "local", GREEDY)
    store = opened(tmp_path / "signal", rows)
    servers_at(server[0]).topk(store, rows, 5, rank=0, ranks=2, show=False)
    assert np.flatnonzero(store.present()).tolist() == [0, 2, 4, 6, 8]
    servers_at(server[0]).topk(store, rows, 5, rank=1, ranks=2, show=False)
    assert store.missing() == []
    for index, row in enumerate(rows):
        found, wanted = store.read([index]), topk_locally(row, 5)
        assert isinstance(found, TopKSignal)
        # to the rounding of the store's codec
        torch.testing.assert_close(found.log_tail_R.exp(), wanted.log_tail_R.exp(), atol=2e-3, rtol=0)
        assert torch.equal(found.ids_RK.sort().values, wanted.ids_RK.sort().values)


def test_dropped_slow_and_failing_requests_change_nothing(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    good = made(servers_at(url), tmp_path / "good", SAMPLED)
    start = len(behaviour.requests)
    behaviour.faults = {start + 1: "500", start + 4: "500", start + 6: "slow", start + 8: "500", start + 9: "drop"}
    assert made(servers_at(url, retries=4), tmp_path / "bad", SAMPLED) == good
    assert len(behaviour.requests) > start + len(good)


def test_a_server_that_dies_loses_no_answer_and_the_same_call_goes_on(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    good = made(servers_at(url), tmp_path / "good", SAMPLED)
    behaviour.requests.clear()
    behaviour.dead_after = 5 + 6  # what is asked before the first response, then six responses: one shard of four
    text = refused(made, servers_at(url, retries=0, concurrency=1), tmp_path / "killed", SAMPLED)
    assert "the same command continues" in text
    assert len(list((tmp_path / "killed").glob("shard-00000-*.arrow"))) == 1
    behaviour.dead_after = None
    behaviour.requests.clear()
    assert made(servers_at(url), tmp_path / "killed", SAMPLED) == good
    assert len({request["seed"] for request in behaviour.requests if "seed" in request}) == 3, "only what was missing"
    assert made(servers_at("http://127.0.0.1:9/v1"), tmp_path / "killed", SAMPLED) == good, "nothing to ask"


def test_a_signal_that_breaks_off_keeps_what_was_written(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    rows = locally(tmp_path / "local", GREEDY)
    store = opened(tmp_path / "signal", rows)
    behaviour.dead_after = 1 + 4
    with pytest.raises(UserError, match="finished work is kept"):
        servers_at(url, retries=0, concurrency=1).topk(store, rows, 5, show=False)
    assert len(store.missing()) == 5
    behaviour.dead_after = None
    behaviour.requests.clear()
    servers_at(url).topk(store, rows, 5, show=False)
    assert store.missing() == []
    asked = {tuple(request["prompt"]) for request in behaviour.requests if "prompt_logprobs" in request}
    assert asked <= {tuple(rows[index].input_ids) for index in range(4, 9)}, "only what was missing"


def test_no_server_is_one_line(tmp_path: Path) -> None:
    target = target_at("http://127.0.0.1:9/v1", retries=0)
    text = refused(lambda: target.model)
    assert "target.endpoint.urls: http://127.0.0.1:9/v1: no server answers" in text
    assert "refused" in text


def answered(url: str, tokens: int = 1, **options: Any) -> Any:
    return target_at(url, **options).answer([5] * tokens, GREEDY, "key")


def scored(url: str, k: int, tokens: int = 1) -> Any:
    return target_at(url).score([5], range(6, 6 + tokens), k)


@pytest.mark.parametrize(
    ("behaviour", "ask", "words"),
    [
        (
            {"faults": {0: "slow"}},
            lambda url: answered(url, timeout=0.2, retries=0),
            "no answer within 0.2 s (attempts: 1); raise target.endpoint.timeout",
        ),
        ({"faults": {0: "junk"}}, answered, "not a completion"),
        ({}, lambda url: target_at(url.removesuffix("/v1")).model, "must end in /v1"),
        ({}, lambda url: target_at(url, model="huge").model, "serves tiny"),
        ({"served": ("one", "two")}, lambda url: target_at(url).model, "serves one, two; set one"),
        ({}, lambda url: answered(url, tokens=245), "data.context_length"),
        ({"shift": TOKENS}, answered, f"has {TOKENS} rows"),
        ({"shift": TOKENS}, lambda url: scored(url, 4), f"has {TOKENS} rows"),
        (
            {"max_logprobs": 20},
            lambda url: scored(url, 64),
            "at most 20 prompt_logprobs; start it with --max-logprobs 64",
        ),
        ({"lost_places": 2}, lambda url: scored(url, 4, tokens=3), "--no-enable-prefix-caching"),
        ({"scale": 0.3}, lambda url: scored(url, 20), "raw_logprobs"),
        ({"prompt_logprobs": False}, lambda url: scored(url, 4), "no prompt_logprobs"),
    ],
)
def test_what_the_server_lacks_is_one_line(server: Any, behaviour: dict[str, Any], ask: Any, words: str) -> None:
    url, does = server
    for name, value in behaviour.items():
        setattr(does, name, value)
    assert words in refused(ask, url)


def test_a_wrong_key_is_one_line(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, behaviour = server
    behaviour.key = "right"
    monkeypatch.delenv("MY_KEY", raising=False)
    assert "MY_KEY" in refused(lambda: target_at(url, api_key_env="MY_KEY").model)
    monkeypatch.setenv("MY_KEY", "right")
    assert target_at(url, api_key_env="MY_KEY").model == "tiny"


def test_another_model_under_the_same_name_is_refused_and_the_same_at_another_url_is_not(
    server: Any, tmp_path: Path
) -> None:
    url, behaviour = server
    record = tmp_path / "run" / "responses" / "server_identity.json"
    target_at(url, record).check()
    before = record.read_text()
    said = json.loads(before)["next"]
    top = logits_after(tiny_tokenizer()(TEXTS[1], add_special_tokens=False)["input_ids"])[-1].log_softmax(-1).topk(TOP)
    expected = {tiny_tokenizer().decode([i]): x for i, x in zip(top.indices.tolist(), top.values.tolist(), strict=True)}
    assert said[1] == pytest.approx(expected, abs=1e-5)  # forwards of one text alone and with a token behind it
    # What a batch of another shape, another card or a replica does to logits.
    behaviour.model = copy.deepcopy(MODEL)
    with torch.no_grad():
        for weight in behaviour.model.parameters():
            weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    target_at(url.replace("127.0.0.1", "localhost"), record).check()
    assert record.read_text() == before
    behaviour.model = tiny_model(vocab_size=TOKENS, seed=4)
    text = refused(target_at(url, record).check)
    assert "is not the model that answered before" in text
    assert str(record) in text


def test_how_far_two_servers_are_apart() -> None:
    one = [{"a": -1.0, "b": -2.0}, {"c": -0.5}]
    assert difference(one, one) == 0.0
    # a is 0.2 off; b may be anything below d's -3, so it lost at least 1; d was at most -2 before: -3 is no gap; c is 0.6 off
    assert difference(one, [{"a": -1.2, "d": -3.0}, {"c": -1.1}]) == pytest.approx((0.2 + 1.0 + 0.0 + 0.6) / 4)
    assert difference([{}, {}], one) == 0.0, "a server that does not say cannot be told apart"


def test_a_foreign_tokenizer_is_refused(server: Any) -> None:
    class Other:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3]}

    target = EndpointTarget(Endpoint(urls=(server[0],)), Other(), TOKENS)
    assert "splits text into other tokens" in refused(target.check)


def test_raw_probabilities_are_refused_where_they_would_be_wrong(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.processed = False
    text = refused(lambda: made(servers_at(url), tmp_path / "a", SAMPLED))
    assert "--logprobs-mode processed_logprobs" in text
    plain = replace(SAMPLED, sampling=SamplingSettings())
    assert len(made(servers_at(url), tmp_path / "b", plain)) == 9, "raw and processed are the same there"


@pytest.mark.usefixtures("without_figures")
def test_a_whole_run_with_a_target_that_only_a_server_has(
    server: tuple[str, Behaviour], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Responses, signal, training and verdict; the folder of the target has a tokenizer and a config, and no weights."""
    from tiny_training import small_config, write_target

    from distill import respond as respond_command
    from distill import train
    from distill.run.verdict_record import load_verdict

    url, behaviour = server
    MODEL.config.save_pretrained(tmp_path / "target")
    MODEL.generation_config.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_target(tmp_path / "draft", num_hidden_layers=1)
    config = small_config(
        tmp_path,
        30,
        name="served",
        student={"init": "pretrained", "path": str(tmp_path / "draft")},
        target={"endpoint": {"urls": [url], "weights": "server", "concurrency": 4}},
        data={"heldout_count": 8},
        loss={"name": "forward_kl"},
        signal={"source": "store", "k": 16},
        optim={"lr": 0.01},
        train={"steps": 20, "batch_size": 8, "micro_batch_size": 8},
        judge={"every": 10, "prompts": 8, "live_prompts": 6},
    )
    facts = respond_command.run(config)
    assert facts is not None
    assert facts.tokens > 0
    assert train.main([str(config)]) == 0
    verdict = load_verdict(tmp_path / "served")
    assert all(row.speed_up is None for row in verdict.measured)
    checks = [record.fresh_check for record in verdict.checkpoints]
    assert [(check.prompts, check.agrees) for check in checks] == [(6, True)] * 3
    seeds = [request["seed"] for request in behaviour.requests if "seed" in request]
    assert len(set(seeds[-18:])) == 18, "other responses each time"
    assert all(record.live_check is None for record in verdict.checkpoints)
    assert f"alpha {checks[0].alpha:.3f} on 6 prompts that the server answered again (z " in capsys.readouterr().out
    assert verdict.judged(DRAFT).alpha > verdict.judged(UNDISTILLED).alpha
    assert verdict.headline.startswith("Not timed: ")
    capsys.readouterr()
    # What needs the weights says so in one line.
    assert train.main([str(config), "judge.live=end"]) == 2
    assert "set judge.live: checkpoint" in capsys.readouterr().err
