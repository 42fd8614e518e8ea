"""A target behind a hosted chat API: text and top log-probabilities of its own response, against a local server of a real tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_server import MODEL, TEMPLATE, logits_after
from tiny_training import TOKENS, tiny_tokenizer, write_prompts, write_target

from data.responses.chat import ChatTarget
from data.responses.endpoint_keys import Endpoint
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan
from data.responses.store import Row, Store
from data.signals.signal import TopKSignal
from data.signals.store import SHARDS, SignalStore, signal_manifest
from distill import respond as respond_command
from distill import train
from distill.config.load import parse_config
from distill.models.transplant import token_bytes
from distill.run.frozen_text import load_frozen_text
from distill.run.result import load_result
from distill.run.verdict_record import load_verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure.measured import DRAFT, UNDISTILLED
from speculative.rules.sampling import SamplingSettings

PLAIN = DecodeSettings(SamplingSettings(), max_tokens=10, rule="sample", eos_ids=(2,), seed=5)


def kept_signal(k: int) -> dict[str, Any]:
    return signal_manifest("topk", k, temperature=1.0, vocab_rows=TOKENS, target="t", target_dtype="d", seed=0)


def chat_at(url: str, top: int = 5) -> ChatTarget:
    endpoint = Endpoint(url=url, api="chat", concurrency=4, timeout=20.0, retries=2)
    target = ChatTarget(endpoint, tiny_tokenizer(), TOKENS, token_bytes=lambda: token_bytes(tiny_tokenizer()))
    target.kept = kept_signal(top) if top else None
    return target


def prompts(count: int = 6) -> list[RenderedPrompt]:
    """Plain ones and conversations with a system message, by turns."""
    found = []
    for index in range(count):
        turns = [{"role": "user", "content": f"def f{index}(a):"}]
        if index % 2:
            turns.insert(0, {"role": "system", "content": "Code."})
        ids = tiny_tokenizer().apply_chat_template(
            turns, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
        )
        said = json.dumps({"messages": turns}) if index % 2 else ""
        found.append(RenderedPrompt(f"prompt-{index}", "code", tuple(ids), turns[-1]["content"], None, said))
    return found


def made(target: ChatTarget, folder: Path, settings: DecodeSettings = PLAIN) -> list[Row]:
    store = Store(folder)
    store.open({"a": 1})
    target.respond(store, ResponsePlan(prompts(), 1, 4), settings, show=False)
    return store.read()


def opened(folder: Path, rows: list[Row], k: int) -> SignalStore:
    store = SignalStore(folder)
    store.open(kept_signal(k), [len(row.response_ids) for row in rows], [row.key for row in rows])
    return store


def test_text_its_probabilities_and_the_signal_are_the_models_own(server: Any, tmp_path: Path) -> None:
    target = chat_at(server[0])
    rows = made(target, tmp_path / "responses")
    store = opened(tmp_path / "responses", rows, 5)
    target.require_kept(store)
    assert store.missing() == []
    assert {row.prompt_id: tuple(row.prompt_ids) for row in rows} == {
        one.prompt_id: one.prompt_ids for one in prompts()
    }
    assert sum(len(row.response_ids) for row in rows) > 30
    for index, row in enumerate(rows):
        logs = logits_after(list(row.input_ids))[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        # float32 forwards over texts of other lengths
        torch.testing.assert_close(torch.tensor(row.log_target_probs), own, atol=1e-4, rtol=0)
        found, wanted = store.read([index]), logs[:, : len(tiny_tokenizer())].topk(5)
        assert isinstance(found, TopKSignal)
        assert torch.equal(found.ids_RK.sort().values, wanted.indices.sort().values)
        # to the rounding of the store's codec
        torch.testing.assert_close(found.log_tail_R.exp(), 1 - wanted.values.exp().sum(-1), atol=2e-3, rtol=0)


def test_probabilities_under_other_settings_are_not_known(server: Any, tmp_path: Path) -> None:
    warm = replace(PLAIN, sampling=SamplingSettings(temperature=0.7))
    rows = made(chat_at(server[0]), tmp_path / "warm", warm)
    assert all(math.isnan(value) for row in rows for value in row.log_target_probs)
    greedy = replace(PLAIN, sampling=SamplingSettings(temperature=0.0), rule="greedy")
    rows = made(chat_at(server[0]), tmp_path / "greedy", greedy)
    assert all(value == 0 for row in rows for value in row.log_target_probs)


def test_another_template_and_another_vocabulary_are_refused(server: Any, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.template = "Today. " + TEMPLATE
    with pytest.raises(UserError, match=r"so its chat template differs from that of target.path"):
        made(chat_at(url), tmp_path / "a")
    behaviour.template = TEMPLATE
    target = chat_at(url)
    target._token_bytes = lambda: {}
    with pytest.raises(UserError, match=r"the vocabulary of target.path does not have"):
        made(target, tmp_path / "b")


def test_more_than_the_api_gives_and_responses_without_a_signal_are_one_line(server: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"returns at most 20 top_logprobs.*lower signal.k"):
        made(chat_at(server[0], top=64), tmp_path / "a")
    rows = made(chat_at(server[0], top=0), tmp_path / "b")
    with pytest.raises(UserError, match="6 responses were stored without their 5 most probable tokens"):
        chat_at(server[0]).require_kept(opened(tmp_path / "b", rows, 5))


def chat_config(folder: Path, url: str, **overrides: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "output": str(folder),
        "target": {"path": str(folder / "target"), "endpoint": {"url": url, "api": "chat", "concurrency": 4}},
        "student": {"init": "pretrained", "path": str(folder / "draft")},
        "data": {"train": [{"path": str(folder / "prompts.jsonl"), "prompt_column": "prompt"}], "heldout_count": 8},
        "serving": {"max_tokens": 8, "temperature": 0.8, "rule": "greedy-draft"},
        "loss": {"name": "forward_kl"},
        "signal": {"source": "response_logprobs", "k": 16},
        "optim": {"lr": 0.01},
        "train": {"steps": 12, "batch_size": 8, "micro_batch_size": 8},
        "judge": {"every": 12, "prompts": 8, "gamma": 2, "live": "never"},
        **overrides,
    }


def test_what_the_law_does_not_allow_is_refused(tmp_path: Path) -> None:
    warm = chat_config(tmp_path, "http://x/v1", serving={"temperature": 0.8})
    with pytest.raises(
        UserError, match=r"judge.rule: sample replays text by its probability.*set judge.rule: greedy-draft"
    ):
        parse_config(warm, "test")
    parse_config({**warm, "judge": {"rule": "greedy-draft", "live": "never"}}, "test")
    parse_config({**warm, "serving": {"temperature": 1.0}}, "test")
    with pytest.raises(UserError, match=r"signal.source: response_logprobs"):
        parse_config({**warm, "signal": {"source": "store"}, "serving": {"temperature": 1.0}}, "test")
    with pytest.raises(UserError, match=r"needs target\.endpoint\.api: chat"):
        parse_config({**warm, "target": {}}, "test")


@pytest.mark.usefixtures("without_figures")
def test_a_whole_run_on_a_hosted_chat_model(server: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    MODEL.config.save_pretrained(tmp_path / "target")
    MODEL.generation_config.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    write_target(tmp_path / "draft", num_hidden_layers=1)
    write_prompts(tmp_path / "prompts.jsonl", 24)
    config, run = tmp_path / "chat.yaml", tmp_path / "chat"
    config.write_text(json.dumps(chat_config(tmp_path, server[0])))
    facts = respond_command.run(config)
    assert facts is not None
    assert facts.tokens > 100
    assert [path.parent.name for path in run.rglob(SHARDS)] == ["train"] * 1
    assert train.main([str(config)]) == 0
    verdict = load_verdict(run)
    assert verdict.judged(DRAFT).alpha >= verdict.judged(UNDISTILLED).alpha
    curves = load_result(run / "result.json").curves
    assert {one.rule for one in curves.rules} == {"greedy-draft", "greedy"}
    assert {
        rule: "its server returns only the model's unmodified ones" in why for rule, why in curves.refused.items()
    } == {"sample": True, "sample-untruncated": True, "block": True}
    with pytest.raises(UserError, match=r"judge.rule: sample replays"):
        load_frozen_text(run, "sample")
