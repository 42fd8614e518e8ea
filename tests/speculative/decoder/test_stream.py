"""`generate` as a stream: events, stop strings, the commit gate, the proposal log, interrupts, hostile models."""

import functools
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
import torch
from tiny_models import perturbed, prompts_of, texts, tiny_model

from distill.models.load import EMBEDDED_FOLDER, load_tokenizer
from speculative.decode import decode, generate
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import STOP, DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.lookup import PromptLookup
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree

TOKENIZER = load_tokenizer(str(EMBEDDED_FOLDER))
# Real tokens, a random model: the text is nonsense with multi-byte pieces, spaces and line breaks in it.
TARGET = tiny_model(vocab_size=400)
DRAFT = perturbed(TARGET)
PROMPTS = prompts_of([9, 1, 23, 4, 15], vocab_size=400)
WAYS = [(GREEDY, "greedy"), (SamplingSettings(1.0), "sample"), (SamplingSettings(1.0), "block")]


def settings_of(sampling, rule, gamma, **others):
    return DecodeSettings(sampling, gamma, Rule.named(rule), **{"max_tokens": 24, **others})


def streamed(settings, **others):
    """Events by prompt, and the finished responses."""
    drafter = ModelDrafter(DRAFT) if settings.gamma else None
    events = list(generate(TARGET, drafter, PROMPTS, settings, **{"batch_size": 2, "tokenizer": TOKENIZER, **others}))
    by_prompt = {index: [event for event in events if event.index == index] for index in range(len(PROMPTS))}
    return by_prompt, [by_prompt[index][-1].response for index in range(len(PROMPTS))]


@functools.cache
def plain():
    """The target's own greedy responses."""
    return streamed(settings_of(GREEDY, "greedy", 0))[1]


@pytest.mark.parametrize(("sampling", "rule"), WAYS)
def test_events_put_together_are_the_responses(sampling, rule):
    settings = settings_of(sampling, rule, 3, eos_ids=(5, 9, 30))
    by_prompt, responses = streamed(settings)
    for index, response in enumerate(responses):
        own = by_prompt[index]
        assert [token for event in own for token in event.token_ids] == response.response_ids
        assert "".join(event.text for event in own) == response.text
        assert response.text == TOKENIZER.decode(response.response_ids, skip_special_tokens=True)
        assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == response.finish_reason
        assert len(own) == response.blocks == len(response.commit_seconds)
        assert response.commit_sizes == [len(event.token_ids) for event in own]
        assert response.commit_seconds == sorted(response.commit_seconds)
    plain, _ = decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings)
    assert texts(plain) == texts(responses)  # text, rows and refilling change no token


def stops_in(text):
    """Stop strings that occur in a text, at every place and of every length up to four characters."""
    pieces = (text[start : start + length] for length in (1, 2, 4) for start in range(0, len(text) - length, 3))
    return list(dict.fromkeys(piece for piece in pieces if "\ufffd" not in piece))[:25]


def test_stop_strings_cut_a_block_exactly_where_plain_decoding_stops():
    full = plain()
    stops = stops_in(full[0].text)
    assert len(stops) >= 8
    for one, other in list(itertools.pairwise(stops))[::5]:
        _, alone = streamed(settings_of(GREEDY, "greedy", 0, stop=(one, other)))
        for response, whole in zip(alone, full, strict=True):
            found = one in whole.text or other in whole.text
            assert (response.finish_reason == "stop") == found
            assert one not in response.text
            assert other not in response.text
            assert whole.text.startswith(response.text)
        for gamma in (1, 3, 6):
            _, drafted = streamed(settings_of(GREEDY, "greedy", gamma, stop=(one, other)))
            assert texts(drafted) == texts(alone)
            for response, expected in zip(drafted, alone, strict=True):
                assert (response.text, response.finish_reason) == (expected.text, expected.finish_reason)


def test_a_gate_sees_every_token_in_order_before_it_is_streamed():
    seen: dict[str, list[int]] = {}
    streamed_ids: dict[str, list[int]] = {}

    def gate(key, position, token_id, so_far):
        assert position == len(so_far) == len(seen.setdefault(key, []))
        assert list(so_far) == seen[key]
        assert len(streamed_ids.get(key, [])) <= position
        seen[key].append(token_id)

    settings = settings_of(GREEDY, "greedy", 3)
    plain, _ = decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings)
    for event in generate(TARGET, ModelDrafter(DRAFT), PROMPTS, settings, gate=gate, batch_size=2):
        streamed_ids.setdefault(event.response.key, []).extend(event.token_ids)
    assert list(seen.values()) != []
    assert [seen[key] for key, _ in PROMPTS] == texts(plain) == [streamed_ids[key] for key, _ in PROMPTS]


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("place", range(9))
def test_a_gate_stops_a_response_before_any_token_of_a_block(gamma, place):
    def gate(key, position, token_id, so_far):
        return STOP if position == place else None

    _, stopped = streamed(settings_of(GREEDY, "greedy", gamma), gate=gate)
    assert texts(stopped) == [text[:place] for text in texts(plain())]
    for response, whole in zip(stopped, plain(), strict=True):
        assert response.finish_reason == "gate"
        assert response.finished
        last = response.gate_log[-1]
        assert (last.position, last.token_id, last.answer) == (place, whole.response_ids[place], "stop")
        assert [record.token_id for record in response.gate_log[:-1]] == response.response_ids


@pytest.mark.parametrize("place", range(7))
def test_what_follows_a_replaced_token_is_what_the_target_says_after_it(place):
    def gate(key, position, token_id, so_far):
        return 77 if position == place else token_id  # the same id again is no replacement

    starts = [[*whole.response_ids[:place], 77] for whole in plain()]
    continued = [(key, [*prompt, *start]) for (key, prompt), start in zip(PROMPTS, starts, strict=True)]
    rest, _ = decode(TARGET, None, continued, settings_of(GREEDY, "greedy", 0, max_tokens=24 - place - 1))
    for gamma in (0, 1, 4):
        _, replaced = streamed(settings_of(GREEDY, "greedy", gamma), gate=gate)
        assert texts(replaced) == [start + after for start, after in zip(starts, texts(rest), strict=True)]
        for response, whole in zip(replaced, plain(), strict=True):
            assert response.proposed_mask[place] == 0
            assert response.gate_log[place] == (place, whole.response_ids[place], "77")
            assert len(response.response_ids) == len(response.log_target_probs) == len(response.proposed_mask) == 24


@pytest.mark.parametrize(("sampling", "rule"), WAYS)
def test_the_proposal_log_holds_every_drafted_token(tmp_path, sampling, rule):
    settings = settings_of(sampling, rule, 3, eos_ids=(5, 9))
    with ProposalLog(tmp_path / "log.parquet") as log:
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings, batch_size=2, log=log)
    rows = pq.read_table(tmp_path / "log.parquet").to_pylist()
    for response in responses:
        own = [row for row in rows if row["prompt"] == response.key]
        assert len(own) == response.drafted
        assert sum(row["accepted"] for row in own) == response.accepted
        assert {row["source"] for row in own} == {"draft"}
        for row in own:
            inside = row["position"] < len(response.response_ids)
            if row["accepted"] and inside:
                assert response.response_ids[row["position"]] == row["drafted"]
                assert response.proposed_mask[row["position"]] == 1
            if rule != "greedy" and row["accepted"]:
                assert row["target_prob"] > 0
            assert (row["draft_prob"] is None) if rule == "greedy" else (0 < row["draft_prob"] <= 1)
    if rule != "greedy":
        taken = [row for row in rows if row["accepted"] and row["prompt"] == responses[0].key]
        logged = {row["position"]: row["target_prob"] for row in taken}
        for position, log_prob in enumerate(responses[0].log_target_probs):
            if position in logged:
                assert logged[position] == pytest.approx(torch.tensor(log_prob).exp().item(), rel=1e-5)  # float32


def test_closing_the_stream_restores_the_models_and_frees_the_caches():
    target, draft = tiny_model(vocab_size=400).train(), perturbed(TARGET).train()
    freed: list[weakref.ref] = []
    drafter = ModelDrafter(draft)
    events = generate(target, drafter, PROMPTS, settings_of(GREEDY, "greedy", 3), batch_size=2)
    next(events)
    assert not target.training
    assert torch.is_grad_enabled()  # the consumer's own code is not ours to change
    loop = events.gi_frame.f_locals["blocks"].gi_frame.f_locals["loop"]
    freed.append(weakref.ref(loop.target.cache))
    del loop
    events.close()
    del events
    gc.collect()
    assert target.training
    assert draft.training
    assert freed[0]() is None


def test_a_long_prompt_gets_what_the_context_leaves_and_costs_its_neighbours_nothing():
    prompts = [("short", [1, 2, 3]), ("long", list(range(1, 251))), ("full", list(range(1, 256)))]  # context 256
    settings = settings_of(GREEDY, "greedy", 3, max_tokens=40, fit_context=True)
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings)
    assert [len(response.response_ids) for response in responses] == [40, 6, 1]
    assert {response.finish_reason for response in responses} == {"length"}
    alone, _ = decode(TARGET, None, prompts[:1], settings_of(GREEDY, "greedy", 0, max_tokens=40))
    assert responses[0].response_ids == alone[0].response_ids
    with pytest.raises(UserError, match="'over' has 256 tokens but the target's context is 256: shorten it"):
        decode(TARGET, None, [("over", [1] * 256)], settings_of(GREEDY, "greedy", 0, fit_context=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_end_the_stream_with_one_line_and_leave_nothing_behind(value):
    broken = tiny_model(vocab_size=400)
    with torch.no_grad():
        broken.lm_head.weight[7] = value
    for sampling, rule in WAYS:
        settings = settings_of(sampling, rule, 2)
        for tree in (None, TokenTree.from_branching((2, 1))):
            if tree is not None and rule == "block":
                continue
            asked = settings_of(sampling, rule, 2, tree=tree)
            with pytest.raises(UserError, match="the draft returned NaN or infinite logits for prompt 'prompt-"):
                decode(TARGET, ModelDrafter(broken), PROMPTS, asked)
        with pytest.raises(UserError, match="the target returned NaN"):
            decode(broken, ModelDrafter(TARGET), PROMPTS, settings)
        with pytest.raises(UserError, match="the target returned NaN"):
            decode(broken, PromptLookup(), PROMPTS, settings)
    assert texts(decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings_of(GREEDY, "greedy", 2))[0])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_two_threads_decode_with_one_model_in_training_mode(kind):
    """Each gets its own text; the model's attention and mode are afterwards what they were."""
    model, prompts = tiny_model(kind).train(), prompts_of([5, 9, 3])
    settings = DecodeSettings(GREEDY, 2, Rule.named("greedy"), 12)
    expected = texts(decode(model, EarlyExit(model, 1), prompts, settings, runner="eager")[0])

    def work(_):
        return [texts(decode(model, EarlyExit(model, 1), prompts, settings, runner="eager")[0]) for _ in range(12)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[expected] * 12] * 2
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_streams_of_one_model_may_be_read_in_turns_and_closed_by_another_thread():
    settings, prompts = DecodeSettings(GREEDY, 0, Rule.named("greedy"), 8), prompts_of([5, 9])
    model = tiny_model("gpt2", attn_pdrop=0.5).train()
    one, two = (generate(model, None, prompts, settings) for _ in range(2))
    together = [[list(event.token_ids) for event in pair] for pair in zip(one, two, strict=True)]
    assert all(first == second for first, second in together)
    assert model.training
    third = generate(model, None, prompts, settings)
    next(third)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(third.close).result(timeout=60)
    assert model.training
