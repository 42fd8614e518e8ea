"""On the pretend device decoding gives the CPU's tokens, and waits for the device and sends to it no more often than is written here."""

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pretend_cuda.ledger import LEDGER
from tiny_models import perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode, generate
from speculative.decoder.device_loop import DeviceLoop, open_loop
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, ParallelDrafter
from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import FixedGamma
from speculative.drafters.lookup import Lookahead, PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.engine import memory
from speculative.engine.cache import RaggedCache
from speculative.evaluate import decode_heldout, judge
from speculative.measure.cost import measure_costs
from speculative.measure.measured import Way
from speculative.measure.timing import requests_under_load, sample_ways
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree

pytestmark = pytest.mark.device

PROMPTS = prompts_of([7, 3, 12])  # Two rows: the third is seated when one of the others is done.
WARM = SamplingSettings(0.9, top_k=20, top_p=0.95)
TREE = TokenTree.from_branching((2, 1))
MOST = {"max_tokens": 6, "eos_ids": (5,)}

RULES = {
    "plain": DecodeSettings(WARM, 0, **MOST),
    "greedy": DecodeSettings(GREEDY, 3, Rule.named("greedy"), **MOST),
    "greedy-draft": DecodeSettings(WARM, 3, Rule.named("greedy-draft"), **MOST),
    "sample": DecodeSettings(WARM, 3, Rule.named("sample"), **MOST),
    "sample-untruncated": DecodeSettings(WARM, 3, Rule.named("sample-untruncated"), **MOST),
    "block": DecodeSettings(WARM, 3, Rule.named("block"), **MOST),
    "greedy tree": DecodeSettings(GREEDY, 2, Rule.named("greedy"), tree=TREE, **MOST),
    "sampled tree": DecodeSettings(WARM, 2, Rule.named("sample"), tree=TREE, **MOST),
    "rules": DecodeSettings(WARM, 2, rules=LogitsRules(1.2, bias=((3, 1.0),), banned_ids=(7,)), min_tokens=4, **MOST),
}


def marked(draft: Any) -> Any:
    draft.config.pard_token = 49
    return draft


DRAFTERS = {
    "parallel": lambda target: ParallelDrafter(marked(perturbed(small()).to(target.device))),
    "lookup": lambda target: PromptLookup(),
    "retrieval": lambda target: PastResponses(ResponseIndex.build([list(ids) for _, ids in PROMPTS], 50)),
    "jacobi": lambda target: Lookahead(),
    "early exit": lambda target: EarlyExit(target, 1),
    "cascade": lambda target: LookupDraft(PromptLookup(), ModelDrafter(perturbed(small()).to(target.device))),
}


def small() -> Any:
    return tiny_model(num_hidden_layers=1)


def on_device(model: Any) -> Any:
    return copy.deepcopy(model).to("cuda")


def outcome(target: Any, drafter: Drafter | None, settings: DecodeSettings, **options: Any) -> tuple[Any, ...]:
    responses, timing = decode(target, drafter, PROMPTS, settings, batch_size=2, **options)
    return texts(responses), [response.accepted_counts for response in responses], timing.target_calls


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_cpus_tokens(rule: str) -> None:
    target, settings = small(), RULES[rule]
    draft = perturbed(target)
    expected = outcome(target, ModelDrafter(draft), settings)
    for runner in ("eager", "graph"):
        found = outcome(on_device(target), ModelDrafter(on_device(draft)), settings, runner=runner)
        assert found[:2] == expected[:2], runner


def test_a_parallel_draft_is_recorded_as_a_whole_and_apart_from_the_same_model_token_by_token() -> None:
    target, draft = on_device(small()), marked(on_device(perturbed(small())))
    for rule in ("sample", "block"):
        for kind in (ModelDrafter, ParallelDrafter, ModelDrafter):
            expected = outcome(small(), kind(marked(perturbed(small()))), RULES[rule])
            drafter = kind(draft)
            assert DeviceLoop.serves(target, drafter, RULES[rule], "graph")
            assert outcome(target, drafter, RULES[rule], runner="graph")[:2] == expected[:2], (rule, kind)
            # A policy of another class, or a log, is served block by block: calls recorded one by one.
            heard = outcome(target, kind(draft), RULES[rule], runner="graph", policy=Hears(3))
            assert heard[:2] == expected[:2], (rule, kind)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", ["greedy", "sample"])
def test_every_drafter_gives_the_cpus_tokens(name: str, rule: str) -> None:
    target = tiny_model() if name == "early exit" else small()
    moved = on_device(target)
    expected = outcome(target, DRAFTERS[name](target), RULES[rule])
    found = outcome(moved, DRAFTERS[name](moved), RULES[rule], runner="graph")
    assert found[:2] == expected[:2]


def test_what_a_block_asks_of_the_device_call_by_call() -> None:
    """One read and one event that are waited for, and uploads that nobody waits for: seven or eight at gamma 3."""
    target, draft = on_device(small()), on_device(perturbed(small()))
    outcome(target, ModelDrafter(draft), RULES["sample"], runner="eager")  # what a model is asked once
    LEDGER.clear()
    _, _, blocks = outcome(target, ModelDrafter(draft), RULES["sample"], runner="eager")
    prefills = 2  # two rows at once, then the third prompt
    assert sum(LEDGER.reads.values()) == blocks
    assert sum(LEDGER.synchronized.values()) <= blocks + prefills
    assert LEDGER.blocking_uploads == 0
    of_a_prefill = 2 * 3  # ids, positions and rows, of both models
    assert sum(LEDGER.uploads.values()) <= 8 * blocks + prefills * of_a_prefill


class Hears(FixedGamma):
    """A policy that wants to know of each block: its calls are recorded one by one."""


@pytest.mark.parametrize("policy", [None, Hears(3)])
def test_the_next_call_records_nothing(policy: FixedGamma | None) -> None:
    """Nor does one with a shorter text or with other prompts; weights that changed in place are read as they are."""
    target, draft = on_device(small()), on_device(perturbed(small()))
    longer = replace(RULES["sample"], max_tokens=9, eos_ids=())

    def decoded(settings: DecodeSettings, runner: str = "graph") -> tuple[int, Any, int]:
        """What was recorded, the texts, and how many drafted tokens were accepted."""
        found, timing = decode(
            target, ModelDrafter(draft), PROMPTS, settings, batch_size=2, runner=runner, policy=policy
        )
        return timing.recording_calls, texts(found), sum(response.accepted for response in found)

    assert decoded(longer)[0] > 0
    recorded, _, before = decoded(longer)
    assert recorded == 0
    assert decoded(replace(longer, seed=1, max_tokens=6))[0] == 0
    with torch.no_grad():
        draft.get_output_embeddings().weight.mul_(-1.0)
    recorded, *after = decoded(longer)
    assert recorded == 0
    assert after == list(decoded(longer, "eager")[1:])
    assert after[1] < before
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach().clone())
    assert decoded(replace(longer, max_tokens=4))[0] > 0


def test_a_capture_is_on_a_stream_of_its_own_and_leaves_other_threads_alone() -> None:
    LEDGER.clear()
    outcome(on_device(small()), None, RULES["plain"], runner="graph")
    assert set(LEDGER.captures) == {(True, "thread_local")}


@pytest.mark.parametrize(
    ("kind", "options", "asks"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "synchronizing"),
        ("falcon", {}, "synchronizing"),
    ],
)
def test_a_capture_that_would_fail_is_never_begun(kind: str, options: dict[str, Any], asks: str) -> None:
    """On a GPU torch's allocator believes in a failed capture ever after."""
    target = tiny_model(kind, **options)
    expected = outcome(target, None, RULES["plain"])
    LEDGER.clear()
    with pytest.warns(UserWarning, match=f"cannot be captured in a CUDA graph .*{asks}") as seen:
        found = outcome(on_device(target), None, RULES["plain"], runner="graph")
    assert len(seen) == 1
    assert (LEDGER.captures, LEDGER.failed_captures) == ([], [])
    assert torch.cuda.get_sync_debug_mode() == 0
    assert found[0] == expected[0]


def test_memory_that_nobody_uses_any_more_goes() -> None:
    """Without waiting for the garbage collector: what a draft that is gone had, and more than the latest few of a model."""
    target = on_device(small())
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            draft = ModelDrafter(on_device(perturbed(small())))
            decode(
                target, draft, PROMPTS * (1 + number % 3), RULES["greedy"], batch_size=2 + number % 6, runner="graph"
            )
            del draft
        kept = memory.idle_memories()
        assert 1 <= len(kept) <= memory.MOST_IDLE
        assert sum(type(thing) is RaggedCache for thing in gc.get_objects()) == len(kept)
        del kept
        memory.release()
        assert not any(type(thing) is RaggedCache for thing in gc.get_objects())
    finally:
        gc.enable()


def judged(target: Any, draft: Any) -> None:
    settings = RULES["sample"]
    judge(target, Draft(draft), decode_heldout(target, PROMPTS, settings, "all"), settings)


def sampled(target: Any, draft: Any) -> None:
    ways = [Way("draft", drafter=lambda: ModelDrafter(draft), gamma=3)]
    samples, _ = sample_ways(target, ways, [[prompt] for prompt in PROMPTS[:2]], RULES["sample"])
    assert all(sample.seconds > 0 for of in samples.values() for sample in of.values())


def timed(target: Any, draft: Any) -> None:
    costs = measure_costs(target, Draft(draft), gammas=(2,), context=16, repeats=1, seconds=0.0)
    assert min(costs.target_seconds, costs.draft_seconds[2], costs.verify_seconds[2]) > 0


def filled(target: Any, draft: Any) -> None:
    requests = list(requests_under_load([(list(ids), list(ids)) for _, ids in PROMPTS], 2))
    ways = [Way("draft", drafter=lambda: ModelDrafter(draft), gamma=3)]
    samples, _ = sample_ways(target, ways, requests[:2], RULES["sample"], load=2)
    assert {len(of) for of in samples.values()} == {2}


@pytest.mark.parametrize("measure", [judged, sampled, timed, filled])
def test_verdicts_are_measured_with_graphs(measure: Any) -> None:
    """As the models are served: a call that says nothing of runners takes graphs on CUDA."""
    target, draft = on_device(small()), on_device(perturbed(small()))
    LEDGER.clear()
    measure(target, draft)
    assert LEDGER.replays > 0


def test_an_early_exit_finds_its_recordings_again() -> None:
    """Though it is made again for every response, as a race does."""
    target = on_device(tiny_model())

    def recorded() -> int:
        options = {"batch_size": 2, "runner": "graph"}
        return decode(target, EarlyExit(target, 1), PROMPTS, RULES["greedy"], **options)[1].recording_calls

    assert recorded() > 0
    assert recorded() == 0


def test_what_was_recorded_under_other_conditions_is_not_found() -> None:
    """Another attention, weights that were exchanged during the call itself."""
    target = on_device(small())

    def recorded() -> int:
        return decode(target, None, PROMPTS, RULES["plain"], batch_size=2, runner="graph")[1].recording_calls

    assert recorded() > 0
    assert recorded() == 0
    target.config._attn_implementation = "eager"
    assert recorded() > 0
    stream = generate(target, None, PROMPTS, RULES["plain"], batch_size=2, runner="graph")
    next(stream)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach().clone())
    stream.close()
    assert recorded() > 0


def test_what_was_recorded_with_another_module_or_adapter_is_not_found() -> None:
    """A module without weights, whose addresses would tell."""
    adapted = get_peft_model(on_device(small()), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    target = adapted.get_base_model()

    def recorded() -> int:
        (found, timing), (eager, _) = (
            decode(target, None, PROMPTS, RULES["plain"], batch_size=2, runner=how) for how in ("graph", "eager")
        )
        assert texts(found) == texts(eager)
        return timing.recording_calls

    assert recorded() > 0
    assert recorded() == 0
    with adapted.disable_adapter():
        assert recorded() > 0
    assert recorded() > 0
    target.model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert recorded() > 0
    assert recorded() == 0


def test_recordings_of_a_memory_share_a_pool_and_a_stream_and_no_cast_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool keeps the workspace of its largest recording; autocast lets go of the weights that it cast."""
    seen, target = [], on_device(small())

    def entered(*args: Any, **options: Any) -> Any:
        seen.append((options["pool"], options["stream"], torch.is_autocast_cache_enabled()))
        return honest(*args, **options)

    honest = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", entered)
    for rule in ("greedy", "sample"):
        decode(target, None, PROMPTS, replace(RULES[rule], gamma=0), batch_size=2, runner="graph")
    assert len(seen) == 2
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] is seen[1][1]
    assert not any(cached for *_, cached in seen)


def test_a_recording_for_a_block_that_nobody_reads_is_accounted_for() -> None:
    """Its seconds are no decoding; what is still on its way is no reading of prompts."""
    target = on_device(small())
    loop = open_loop(target, None, 1, 20, RULES["plain"], runner="graph")
    with torch.no_grad():
        loop.admit([0], PROMPTS[:1])
        loop.run_block()
        before = loop.timing.recording_calls
        assert isinstance(loop, DeviceLoop)
        assert loop._flight is not None
        loop._flight = loop._flight._replace(recording_seconds=5.0)
        loop.close()
    assert loop.timing.recording_calls == before + 1
    assert loop.timing.recording_seconds >= 5.0
