"""A block in compiled code gives what the same block gives in Python: texts, counts, probabilities, with every drafter."""

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, perturbed, prompts_of, texts, tiny_model
from tiny_training import tiny_tokenizer

from speculative.decode import decode, generate
from speculative.decoder import compiled_loop
from speculative.decoder.compiled_loop import CompiledLoop
from speculative.decoder.device_loop import open_loop
from speculative.decoder.responses import DecodeSettings, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import AdaptiveGamma, FixedGamma
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.engine.compiled import library as library_module
from speculative.engine.compiled import model as compiled_model
from speculative.errors import UserError
from speculative.explain.losslessness import losslessness
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model("qwen3", seed=3, num_hidden_layers=2)
DRAFT = perturbed(TARGET, 0.03)
PROMPTS = prompts_of([1, 2, 9, 30, 17])
RULES = {
    "greedy": DecodeSettings(GREEDY, 3, Rule.named("greedy"), 24),
    "sample": DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), 24),
    "cut off": DecodeSettings(SamplingSettings(0.8, 20, 0.9, 0.02), 4, Rule.named("sample"), 24),
    "whole draft": DecodeSettings(SamplingSettings(0.8, 20, 0.9, 0.02), 4, Rule.named("sample-untruncated"), 24),
    "greedy draft": DecodeSettings(SamplingSettings(1.2, 0, 0.95), 3, Rule.named("greedy-draft"), 24),
    "lenient": DecodeSettings(SamplingSettings(0.9), 3, Rule.named("sample").lenient(2.0), 24),
    "plain": DecodeSettings(SamplingSettings(0.9), 0, Rule.named("sample"), 24),
}
SAID = {
    rule: [
        one.response_ids
        for one in decode(TARGET, None, PROMPTS, replace(RULES[rule], gamma=0), batch_size=5, runner="eager")[0]
    ]
    for rule in ("greedy", "plain")
}
PAST = ResponseIndex.build(SAID["plain"], VOCAB)
DRAFTERS = {
    "model": lambda: ModelDrafter(DRAFT),
    "lookup": lambda: PromptLookup(min_ngram=1, max_ngram=2),
    "cascade": lambda: LookupDraft(PromptLookup(min_ngram=2, max_ngram=3), ModelDrafter(DRAFT)),
    "nested": lambda: LookupDraft(
        PromptLookup(3, 3), LookupDraft(PromptLookup(2, 2), ModelDrafter(DRAFT), then_gamma=2), then_gamma=3
    ),
    "past before a draft": lambda: LookupDraft(PastResponses(PAST), ModelDrafter(DRAFT), then_gamma=2),
    "early exit": lambda: EarlyExit(TARGET, 1),
    "past responses": lambda: PastResponses(PAST),
    "short n-grams are unknown": lambda: PastResponses(
        ResponseIndex.build(SAID["plain"], VOCAB, min_ngram=2, max_ngram=3)
    ),
    "hashes of other n-grams": lambda: PastResponses(replace(PAST, starts_M=np.roll(PAST.starts_M, 1))),
}


@pytest.fixture
def in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the blocks that ran there."""
    counted, returned = [], CompiledLoop._next
    monkeypatch.setattr(CompiledLoop, "_next", lambda self: counted.append(1) or returned(self))
    return counted


@pytest.mark.parametrize(("batch_size", "prompts"), [(1, PROMPTS[1:3]), (3, PROMPTS)], ids=["alone", "3"])
@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name in DRAFTERS for rule in RULES if rule != "plain" or name == "model"]
)
def test_a_block_is_what_it_is_in_python(
    name: str, rule: str, batch_size: int, prompts: list, in_compiled_code: list[int]
) -> None:
    settings = replace(RULES[rule], max_tokens=16)

    def said(runner: str) -> tuple[list, int]:
        return decode(TARGET, DRAFTERS[name](), prompts, settings, batch_size=batch_size, runner=runner)

    (ours, timing), (theirs, _) = said("compile"), said("eager")
    assert len(in_compiled_code) == timing.target_calls
    for own, other in zip(ours, theirs, strict=True):
        assert own.response_ids == other.response_ids
        assert own.accepted_counts == other.accepted_counts
        assert own.drafted_counts == other.drafted_counts
        assert own.sources == other.sources
        assert (own.tested, own.proposed_mask, own.finish_reason) == (
            other.tested,
            other.proposed_mask,
            other.finish_reason,
        )
        # Sums of float32 probabilities in another order.
        np.testing.assert_allclose(own.log_target_probs, other.log_target_probs, rtol=1e-4, atol=1e-4)


def test_a_draft_that_strayed_is_called_back_in_python_first() -> None:
    """Where one row took found tokens, Python's draft has read its own: compiled code would take them for text."""
    drafter = LookupDraft(PromptLookup(3, 2), ModelDrafter(DRAFT))
    loop = open_loop(TARGET, drafter, 2, 100, DecodeSettings(GREEDY, 4, Rule.named("greedy"), 60), runner="compile")
    loop.admit(range(2), [("as before", [3, 7, 5, 9, 3, 7, 5]), ("new", [11, 12])])
    assert drafter.plan() is not None
    with patch.object(drafter, "plan", lambda: None):
        loop.run_block()  # in Python
    assert drafter.plan() is None
    loop.active_R[0] = False
    loop.run_block()
    assert drafter.plan() is not None
    loop.close()


class InTurn(FixedGamma):
    """Gammas that change from block to block."""

    def __init__(self, gamma: int = 4) -> None:
        super().__init__(gamma)
        self._blocks = 0

    def choose(self, active_R: np.ndarray) -> int:
        self._blocks += 1
        return min(self.max_gamma, (4, 4, 1, 4, 0, 3, 4)[self._blocks % 7])


@pytest.mark.parametrize("rule", ["greedy", "cut off", "greedy draft"])
@pytest.mark.parametrize("name", ["model", "lookup", "cascade", "short cascade"])
def test_blocks_of_python_and_of_compiled_code_take_turns(name: str, rule: str) -> None:
    """Each knows what the other's blocks have read, drafted and committed."""
    made = DRAFTERS | {"short cascade": lambda: LookupDraft(PromptLookup(2, 1), ModelDrafter(DRAFT), then_gamma=2)}
    settings = replace(RULES[rule], gamma=4, max_tokens=48)
    prompts = [("3 as before", [3, 7, 5, 9, 3, 7, 5]), ("new", [11, 12]), ("loop", [4, 4, 4]), *PROMPTS[2:4]]
    found = []
    for runner in ("compile", "eager"):
        drafter, blocks = made[name](), itertools.count()
        plan = drafter.plan
        with patch.object(drafter, "plan", lambda plan=plan, blocks=blocks: plan() if next(blocks) % 4 < 2 else None):
            found.append(decode(TARGET, drafter, prompts, settings, policy=InTurn(), batch_size=2, runner=runner)[0])
    for told in ("response_ids", "accepted_counts", "drafted_counts", "sources", "tested"):
        assert [getattr(one, told) for one in found[0]] == [getattr(one, told) for one in found[1]]


def test_text_is_the_same_bits_whatever_the_block() -> None:
    """At temperature 0, with and without a draft, of any gamma, alone and among others: no near-tie can part them."""
    found = [
        decode(
            TARGET,
            ModelDrafter(DRAFT),
            PROMPTS,
            DecodeSettings(GREEDY, gamma, Rule.named("greedy"), 60),
            batch_size=rows,
        )[0]
        for gamma, rows in ((0, 1), (0, 5), (1, 1), (4, 1), (4, 3), (9, 5))
    ]
    assert all(texts(one) == texts(found[0]) for one in found)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of compiled code that run blocks."""
    counted, run = [], CompiledLoop._run
    monkeypatch.setattr(CompiledLoop, "_run", lambda self, *given: counted.append(1) or run(self, *given))
    return counted


@pytest.mark.parametrize(
    ("rule", "name"),
    [("plain", "model"), *((rule, name) for rule in ("greedy", "sample") for name in ("model", "lookup", "cascade"))],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_short_blocks_run_several_in_a_call(
    rule: str, name: str, rows: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the end of a response: by an end token, by the budget, also if another row goes on."""
    monkeypatch.setattr(compiled_loop, "LAST_START_NANOSECONDS", 10**12)
    ended = decode(TARGET, None, PROMPTS, RULES["plain"])[0][0].response_ids[7]  # an id that one of them says
    settings = replace(RULES[rule], eos_ids=(3, ended))

    def said(most: int) -> tuple[list, Timing, int]:
        monkeypatch.setattr(compiled_loop, "MOST_BLOCKS", most)
        calls.clear()
        drafter = DRAFTERS[name]() if settings.gamma else None
        return *decode(TARGET, drafter, PROMPTS, settings, batch_size=rows), len(calls)

    (one_by_one, timing, alone), (ours, own_timing, together) = said(1), said(5)
    times = {"commit_seconds": []}
    assert [vars(response) | times for response in ours] == [vars(response) | times for response in one_by_one]
    assert {response.finish_reason for response in ours} >= ({"end", "length"} if rule != "sample" else {"length"})
    assert own_timing.target_calls == timing.target_calls == alone > 1.5 * together
    stages = own_timing.draft_seconds + own_timing.verify_seconds + own_timing.accept_seconds
    assert 0.0 < stages < own_timing.total_seconds


def test_a_block_runs_alone_where_somebody_waits_for_it(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string, a gate, a reader of the stream, a policy that asks for every block; and a block that takes long."""
    plain, drafted, drafter = RULES["plain"], RULES["sample"], ModelDrafter(DRAFT)
    for settings, options in (
        (replace(plain, stop=("never said",)), {"tokenizer": tiny_tokenizer()}),
        (plain, {"gate": lambda *_: None}),
        (plain, {"on_commit": lambda *_: None}),
        (drafted, {"policy": InTurn(3)}),
    ):
        calls.clear()
        _, timing = decode(TARGET, drafter if settings.gamma else None, PROMPTS[:1], settings, **options)
        assert len(calls) == timing.target_calls
    calls.clear()
    for seen, _ in enumerate(generate(TARGET, None, PROMPTS[:1], plain), 1):
        assert len(calls) == seen
    monkeypatch.setattr(compiled_loop, "LAST_START_NANOSECONDS", 0)
    calls.clear()
    _, timing = decode(TARGET, None, PROMPTS[:1], plain)
    assert len(calls) == timing.target_calls


class ByLaw(AdaptiveGamma):
    """Blocks take the seconds of a law. Notes what is chosen, and the blocks' widths and own seconds."""

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self.choices, self.widths, self.seconds = list[int](), list[int](), list[float]()

    def choose(self, active_R: np.ndarray) -> int:
        self.choices.append(super().choose(active_R))
        return self.choices[-1]

    def record(self, width: int, *rows: np.ndarray, seconds: float | None = None) -> None:
        *rows, seconds = rows
        self.widths.append(width)
        self.seconds.append(seconds)
        super().record(width, *rows, 1.0 + 0.1 * width)


@pytest.mark.parametrize("kind", ["good", "hopeless"])
def test_a_choice_of_gamma_holds_for_some_blocks(kind: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four if it drafts; a plain one until the draft is looked at again, after 16, 32, ... blocks."""
    monkeypatch.setattr(compiled_loop, "LAST_START_NANOSECONDS", 10**12)
    draft = TARGET if kind == "good" else tiny_model("qwen3", seed=9, num_hidden_layers=2)
    policy, settings = ByLaw(3), DecodeSettings(GREEDY, 3, Rule.named("greedy"), 120)
    plain = texts(decode(TARGET, None, PROMPTS[:1], replace(settings, gamma=0))[0])
    calls.clear()
    (response,), timing = decode(TARGET, ModelDrafter(draft), PROMPTS[:1], settings, policy=policy)
    assert texts([response]) == plain
    assert len(policy.widths) == timing.target_calls == sum(policy.chosen.values())
    assert len(calls) == len(policy.choices) < timing.target_calls / 2
    # A block's own time, the same whoever ran with it in a call; reading the prompt is not part of it.
    np.testing.assert_allclose(sum(policy.seconds), timing.decoding_seconds, rtol=1e-6)
    assert min(policy.seconds) > 0
    if kind == "good":
        assert set(policy.widths[-12:]) == {3}
    else:
        plainly = [len(list(blocks)) for width, blocks in groupby(policy.widths) if width == 0]
        assert (sum(plainly[:-2]), plainly[-2]) == (16, 32)


def test_broken_logits_in_a_later_block_of_a_call_are_refused() -> None:
    said = decode(TARGET, None, PROMPTS[:1], RULES["plain"])[0][0].response_ids
    new = next(place for place in range(2, 24) if said[place] not in (*PROMPTS[0][1], *said[:place]))
    target = tiny_model("qwen3", seed=3, num_hidden_layers=2)
    decode(target, None, PROMPTS[:1], RULES["plain"])  # compared with its own logits while they are whole
    with torch.no_grad():
        target.get_input_embeddings().weight[said[new]] = torch.nan
    with pytest.raises(UserError, match="the target returned NaN or infinite logits for prompt 'prompt-0'"):
        decode(target, None, PROMPTS[:1], RULES["plain"])
    untouched = replace(RULES["plain"], max_tokens=new)
    assert decode(target, None, PROMPTS[:1], untouched)[0][0].response_ids == said[:new]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_block_returns_does_not_change_with_the_next(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loop, "MOST_BLOCKS", 2)
    loop = open_loop(TARGET, ModelDrafter(DRAFT), 2, 60, RULES["sample"], runner="compile")
    loop.may_run = 64 if ahead else 1
    loop.admit([0, 1], PROMPTS[2:4])
    first = loop.run_block()
    kept = [array.copy() if isinstance(array, np.ndarray) else array for array in first]
    for _ in range(3):
        loop.run_block()
    for before, now in zip(kept, first, strict=True):
        assert before is None or np.array_equal(before, now)
    loop.close()


# What somebody could get wrong there: file, what is right, what is not. `FAULT(i)`: the i-th of them is asked for.
FAULTS = {
    "accepts too much": (
        "block.cpp",
        "uniforms[COIN] * draft_prob <",
        "(uniforms[COIN] - 0.05 * FAULT(0)) * draft_prob <",
    ),
    "corrects from the target": (
        "block.cpp",
        "std::max(target[v] - own[v], 0.0f)",
        "(FAULT(1) ? target[v] : std::max(target[v] - own[v], 0.0f))",
    ),
    "draws twice with one number": ("block.cpp", "uniforms[RESIDUAL]", "uniforms[FAULT(2) ? COIN : RESIDUAL]"),
    "keeps the first token unseen": (
        "block.cpp",
        "!= next) return place",
        "!= next && (place || !FAULT(3))) return place",
    ),
    "sees the token after": ("step.cpp", "inside <= token))", "inside <= token + FAULT(4)))"),
}
NONE = "none"
ASKED = "#include <cstdlib>\n#define FAULT(i) (*std::getenv(\"FAULT\") == '0' + i)\n"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL | None]:
    """The library with all faults, each of which happens when it is asked for: one compilation."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("SOURCES", "HEADERS"):
            paths = getattr(library_module, name)
            for path in paths:
                text = path.read_text()
                for file, right, wrong in FAULTS.values():
                    assert path.name != file or text.count(right) == 1
                    text = text.replace(right, wrong) if path.name == file else text
                (folder / path.name).write_text(ASKED * (path.suffix == ".cpp") + text)
            patched.setattr(library_module, name, tuple(folder / path.name for path in paths))
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        flags = tuple("-O1" if flag == "-O3" else flag for flag in library_module.FLAGS)
        patched.setattr(library_module, "FLAGS", flags)
        yield library_module.library.__wrapped__()


@pytest.mark.parametrize("fault", [*FAULTS, NONE])
def test_a_fault_in_compiled_code_is_heard(
    fault: str, faulty: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the proof of losslessness, or before the first token by the model's own logits."""
    monkeypatch.setenv("FAULT", str([*FAULTS, NONE].index(fault)))
    monkeypatch.setattr(compiled_model, "library", lambda: faulty)
    target = tiny_model()  # met for the first time
    drafter = ModelDrafter(perturbed(target, 0.2))
    if fault == "sees the token after":
        with pytest.warns(UserWarning, match="compiled code gives other logits than the model itself"):
            decode(target, None, PROMPTS[:1], DecodeSettings(GREEDY, 0, Rule.named("greedy"), 4))
        return
    settings = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=32)
    asked = {"samples": 96, "batch_size": 384, "control": False}
    found = losslessness(target, drafter, prompts_of([5, 9, 3, 7]), settings, **asked)
    assert bool(found.failed) == (fault != NONE)
    assert ("NOT lossless" in found.sentence) == (fault != NONE)
