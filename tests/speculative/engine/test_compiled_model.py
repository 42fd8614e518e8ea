"""Compiled code gives a plain decoder's own logits; a token's have the same bits however it is decoded; whatever is otherwise is
called as it is.
"""

import contextlib
import ctypes
import mmap
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from processes import run_child
from tiny_models import VOCAB, prompts_of, texts, tiny_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from distill.models.quantized import Int8Linear
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.architectures import ARCHITECTURES, is_plain
from speculative.engine.cached_model import CachedModel
from speculative.engine.compiled.library import library
from speculative.engine.compiled.model import CompiledModel
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings
from speculative.rules.tree import TokenTree

TOKENS = torch.from_numpy(np.random.default_rng(0).integers(1, VOCAB, (2, 40)))
# Both add up in their own order; the largest logits are about 10.
SUMS = {"rtol": 1e-4, "atol": 1e-4}


def opened(model, runner: str = "compile", rows: int = 2, capacity: int = 64) -> CachedModel:
    cached = CachedModel(model, "model", rows, capacity, runner)
    assert (cached.compiled is not None) == (runner == "compile")
    return cached


def alone_until() -> ctypes.c_int64:
    """The time until which calls use one thread, because another process took a core. 0: they use all."""
    return ctypes.c_int64.in_dll(library(), "alone_until")


def logits(model, runner: str) -> list[torch.Tensor]:
    """Of rows of one length, of ragged ones, of one row among others, behind a compaction, and of a token tree."""
    cached = opened(model, runner)
    with torch.no_grad():
        cached.prefill(TOKENS.numpy(), [0, 1], np.array([9, 9]))
        found = [
            cached.feed(TOKENS[:, 10 : 10 + count], np.array(starts), count)
            for count, starts in ((1, [9, 9]), (4, [10, 10]), (1, [14, 11]), (3, [15, 12]), (21, [16, 14]))
        ]
        found.append(cached.feed(TOKENS[:1, 20:22], np.array([18]), 1, rows=[1]))
        tree = TokenTree.from_branching((2, 1))
        found.append(cached.feed_tree(TOKENS[:, : tree.size + 1], np.array([19, 20]), tree))
        cached.commit_path(np.array([19, 20]), torch.tensor([[2, 4], [1, 3]]))
        found.append(cached.feed(TOKENS[:, 5:7], np.array([21, 22]), 2))
        cached.keep([1])
        found.append(cached.feed(TOKENS[1:, 30:33], np.array([24]), 2))
    cached.close()
    return [one.float() for one in found]


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 36, "intermediate_size": 46, "head_dim": 10},
        {"attention_bias": True, "mlp_bias": True},
        {"sliding_window": 12, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=["even", "odd", "biased", "window"],
)
def test_the_logits_are_those_of_the_models_own_call(kind: str, shape: dict) -> None:
    model = tiny_model(kind, **shape)
    for ours, own in zip(logits(model, "compile"), logits(model, "eager"), strict=True):
        torch.testing.assert_close(ours, own, **SUMS)


def test_positions_after_the_context_are_those_of_its_last_token() -> None:
    """Drafted tokens may overshoot; they are cut from the response."""
    model = tiny_model(max_position_embeddings=24)
    found = []
    for runner in ("compile", "eager"):
        cached = opened(model, runner, capacity=30)
        with torch.no_grad():
            cached.prefill(TOKENS.numpy(), [0, 1], np.array([20, 20]))
            found.append(cached.feed(TOKENS[:, 20:26], np.array([20, 20]), 6))
    torch.testing.assert_close(*found, **SUMS)


def test_bfloat16_differs_by_what_the_models_own_call_rounds() -> None:
    model, exact = tiny_model(dtype=torch.bfloat16), tiny_model(dtype=torch.bfloat16).float()
    found = logits(model, "compile"), logits(model, "eager"), logits(exact, "eager")
    for ours, own, right in zip(*found, strict=True):
        # Activations are rounded nowhere, keys and values are: nearer to float32 than the model's own call.
        assert (ours - right).abs().mean() < 0.6 * (own - right).abs().mean()


@pytest.mark.parametrize("keeper", ["torchao", "Int8Linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_weights_are_read_as_they_are(keeper: str, dtype: torch.dtype) -> None:
    model, full = tiny_model(dtype=dtype, hidden_size=64), tiny_model(dtype=dtype, hidden_size=64).float()
    quantize_(model, Int8WeightOnlyConfig(version=2))
    for (name, packed), own in zip(model.named_modules(), full.modules(), strict=True):
        if not hasattr(getattr(packed, "weight", None), "qdata"):
            continue
        values, scale_N1 = packed.weight.qdata, packed.weight.scale
        if keeper == "Int8Linear":
            parent, _, last = name.rpartition(".")
            linear = Int8Linear(values, scale_N1.view(-1), None)
            setattr(model.get_submodule(parent), last, linear)
            scale_N1 = linear.scale.view(-1, 1)
        own.weight.data = values.float() * scale_N1.float()
    rounding = SUMS if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}  # keys and values in bfloat16
    for ours, own in zip(logits(model, "compile"), logits(full, "eager"), strict=True):
        torch.testing.assert_close(ours, own, **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_however_it_is_decoded(dtype: torch.dtype) -> None:
    """One by one, several at once, among other rows, by threads among which heads can be divided (2) or not (3)."""
    model = tiny_model("qwen3", dtype=dtype, hidden_size=72, intermediate_size=90, head_dim=24)
    alone = opened(model, rows=1)
    with torch.no_grad():
        one_by_one = torch.cat([alone.feed(TOKENS[:1, i : i + 1], np.array([i]), 1) for i in range(40)], 1)
        for threads in (1, 2, 3):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                for width in (2, 3, 5, 8, 40):
                    several = opened(model, rows=3)
                    found = []
                    for i, part in enumerate(TOKENS[[1, 0, 1]].split(width, 1)):
                        alone_until().value = 0
                        found.append(several.feed(part, np.array([i * width, i * width, 0]), part.shape[1])[1])
                    assert torch.equal(torch.cat(found), one_by_one[0]), (threads, width)
            finally:
                torch.set_num_threads(before)


def test_a_call_that_somebody_listens_to_or_has_replaced_is_made() -> None:
    model = tiny_model()
    assert is_plain(model)
    for module in (model, model.model, model.model.layers[0].mlp.up_proj):
        hook = module.register_forward_hook(lambda *args: None)
        assert not is_plain(model)
        hook.remove()
        before = module.register_forward_pre_hook(lambda *args: None)
        assert not is_plain(model)
        before.remove()
        module.forward = module.forward
        assert not is_plain(model)
        del module.forward
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain(model)
    assert is_plain(model)
    model.model.compile()
    assert not is_plain(model)
    assert not is_plain(torch.compile(tiny_model()))
    assert not is_plain(get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("itself", [False, True])
def test_one_that_gives_other_logits_is_never_trusted(itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release of transformers might that puts something between the layers and the head; also as its own draft."""
    prompts, settings = prompts_of([5, 9]), DecodeSettings(SamplingSettings(0.7), 3, max_tokens=20)

    def pair():
        target = tiny_model(seed=3)
        return target, target if itself else tiny_model(seed=4)

    def said(target, draft):
        return texts(decode(target, ModelDrafter(draft), prompts, settings)[0])

    own, changed, called = said(*pair()), pair(), CompiledModel.__call__
    monkeypatch.setattr(CompiledModel, "__call__", lambda self, *args, **kwargs: called(self, *args, **kwargs) * 1.5)
    with pytest.warns(
        UserWarning, match="runs eagerly, which is slower, because compiled code gives other logits"
    ) as warned:
        assert [said(*changed), said(*changed)] == [own, own]
    assert len(warned) == (1 if itself else 2)


def in_a_new_thread(run: Callable[[], None]) -> None:
    """A fork has none of the threads that OpenMP started for the thread that forked, and OpenMP would wait for them."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def feed_behind_a_guard() -> None:
    """Heads of 2 numbers on 2 threads, and a page that nobody may read before the weights of queries, keys and values."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    model = tiny_model("llama", head_dim=2, hidden_size=32)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            own = linear.weight.data
            memory = mmap.mmap(-1, page + own.nbytes)
            linear.weight.data = torch.frombuffer(memory, dtype=own.dtype, offset=page).view(own.shape).copy_(own)
            assert libc.mprotect(ctypes.c_void_p(linear.weight.data_ptr() - page), page, 0) == 0
    torch.set_num_threads(2)
    cached, alone_until().value = opened(model, rows=1), 0
    with torch.no_grad():
        cached.feed(TOKENS[:1, :4], np.array([0]), 4)


def test_a_thread_reads_nothing_before_its_weights() -> None:
    """A product has at least 4 outputs, so a share of 2 would begin before the first."""
    assert run_child(lambda: in_a_new_thread(feed_behind_a_guard)) == 0


def test_a_share_of_less_than_a_tile_leaves_the_neighbours_outputs_alone() -> None:
    """6 keys on 2 threads: one thread's last tile starts among the other's outputs, which have their bias already."""
    model = tiny_model("qwen2", num_attention_heads=3, num_key_value_heads=1, hidden_size=18, head_dim=6)
    with torch.no_grad():
        for layer in model.model.layers:  # made of zeros
            layer.self_attn.k_proj.bias.normal_()
            layer.self_attn.v_proj.bias.normal_()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = opened(model, rows=1)
        with torch.no_grad():
            expected = alone.feed(TOKENS[:1, :20], np.zeros(1, dtype=np.int64), 20)
            torch.set_num_threads(2)
            for _ in range(500):
                alone_until().value = 0
                assert torch.equal(alone.feed(TOKENS[:1, :20], np.zeros(1, dtype=np.int64), 20), expected)
    finally:
        torch.set_num_threads(before)


def _moved(model: torch.nn.Module) -> None:
    other = tiny_model(seed=6).state_dict()
    model.load_state_dict({name: weight.clone() for name, weight in other.items()}, assign=True)


def _changed_in_place(model: torch.nn.Module) -> None:
    model.load_state_dict(tiny_model(seed=6).state_dict())


def _adapted(model: torch.nn.Module) -> None:
    """peft's layers have their base layer's weight and bias."""
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False), model)


def _wrapped(model: torch.nn.Module) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def _swapped(model: torch.nn.Module) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _other_frequencies(model: torch.nn.Module) -> None:
    model.model.rotary_emb.inv_freq /= 3.0


def _other_scaling(model: torch.nn.Module) -> None:
    model.model.rotary_emb.attention_scaling = 3.0


def _cast_and_back(model: torch.nn.Module) -> None:
    model.bfloat16().float()


def _other_scores(model: torch.nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 3.0


def _hooked(model: torch.nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: output * 2)


def _fewer_layers(model: torch.nn.Module) -> None:
    model.config.num_hidden_layers = 1


def _fewer_tokens(model: torch.nn.Module) -> None:
    for module in (model.lm_head, model.model.embed_tokens):
        module.weight = torch.nn.Parameter(module.weight[:35])


def _wider_layer(model: torch.nn.Module) -> None:
    mlp = model.model.layers[1].mlp
    for name, shape in (("gate_proj", (400, 32)), ("up_proj", (400, 32)), ("down_proj", (32, 400))):
        getattr(mlp, name).weight = torch.nn.Parameter(torch.randn(shape) * 0.1)


def _view(model: torch.nn.Module) -> None:
    head = model.lm_head
    head.weight = torch.nn.Parameter(-torch.cat((head.weight, head.weight), 1)[:, :32])


CHANGES = [_moved, _changed_in_place, _adapted, _wrapped, _swapped, _other_frequencies, _other_scaling, _other_scores]
CHANGES += [_cast_and_back, _hooked, _fewer_layers, _fewer_tokens, _wider_layer, _view]


@pytest.mark.parametrize("decoded_before", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:LlamaForCausalLM runs eagerly")
def test_what_changes_between_decode_calls_is_heard(change: Callable, decoded_before: bool) -> None:
    model, settings = tiny_model(seed=5), DecodeSettings(SamplingSettings(0.7), 0, max_tokens=30)

    def said(runner: str) -> list[list[int]]:
        return texts(decode(model, None, prompts_of([9, 30], vocab_size=35), settings, runner=runner)[0])

    before = said("auto" if decoded_before else "eager")
    with torch.no_grad():
        change(model)
    assert said("auto") == said("eager") != before


@pytest.mark.parametrize("spare", [0, 2**20, 2**22])
def test_memory_that_ends_inside_threads_is_reported_too(spare: int) -> None:
    """An exception that leaves a parallel region, and a thread that cannot be started, would end the process."""
    vocab, prompts = 400_000, [("a", [1, 2, 3]), ("b", [4, 5, 6])]
    sizes = {"vocab_size": vocab, "hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    settings = DecodeSettings(SamplingSettings(1.0, top_p=0.9), 1, Rule.named("sample"), 2)

    def run() -> None:
        target, drafter = tiny_model(**sizes), ModelDrafter(tiny_model(**sizes))
        decode(target, drafter, prompts, settings)
        torch.set_num_threads(2)
        ctypes.CDLL(None).mallopt(-3, 1 << 16)
        ctypes.CDLL(None).malloc_trim(0)
        # 32 MiB less would refuse it before compiled code begins.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**24 + spare
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        with contextlib.suppress(RuntimeError, MemoryError):
            decode(target, drafter, prompts, settings)

    assert run_child(lambda: in_a_new_thread(run)) == 0
