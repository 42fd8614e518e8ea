"""A program: fused kernels in Triton's interpreter on the CPU, beside the model's own layers. Its environment has TRITON_INTERPRET=1."""

import torch
from cpu_graphs import CpuGraphRunner
from tiny_models import perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine import cached_model, memory
from speculative.engine.cache import RaggedCache
from speculative.engine.fused import kernels, products
from speculative.engine.fused import model as fused
from speculative.engine.fused.products import Matrix, Products, Tile, Workspace
from speculative.engine.fused.weights import Weights
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY


def opened(model, cache):
    weights = Weights(model)
    return fused.FusedModel(weights, cache, fused.Scratch(model, weights, cache.place.capacity))


def logits_are_the_models_own(kind, length=24, **sizes):
    """Of many tokens at once (torch's products), few, and one."""
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20}
    model = tiny_model(kind, **{**few, **sizes})
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(generator=torch.Generator().manual_seed(1))
    ids = torch.randint(1, 20, (2, length), generator=torch.Generator().manual_seed(0))
    own, call = model(input_ids=ids, use_cache=False).logits, opened(model, RaggedCache(1, 2, 128))
    for start, stop, kept in ((0, length - 4, length - 4), (length - 4, length - 1, 1), (length - 1, length, 1)):
        positions = torch.arange(start, stop).repeat(2, 1)
        found = call(ids[:, start:stop].contiguous(), positions, kept)
        # The same sums in another order.
        torch.testing.assert_close(found, own[:, stop - kept : stop], rtol=1e-4, atol=1e-4)
    assert int(call.product.work.counters.sum()) == 0


def a_layer_is_six_kernels():
    """As bench/gpu_model.py counts; the head is one more."""
    model, launched = tiny_model("qwen3", num_hidden_layers=2, vocab_size=20), []
    call, kind = opened(model, RaggedCache(2, 1, 32)), type(kernels.product)
    usual = kind.__getitem__
    kind.__getitem__ = lambda kernel, grid: launched.append(kernel) or usual(kernel, grid)
    call(torch.ones((1, 1), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64), 1)
    kind.__getitem__ = usual
    assert len(launched) == 6 * 2 + 1


def products_do_not_depend_on_their_division():
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    call = Products(device, torch.float32, 1e-6, Workspace(device))
    x_MK, w_NK = torch.randn(2, 96, generator=generator), torch.randn(40, 96, generator=generator)
    add_MN = torch.randn(2, 40, generator=generator)
    for tile in (Tile(16, 32, split=3, stages=2), Tile(16, 64), Tile(8, 32, rows=True), Tile(8, 128, rows=True)):
        found = call(x_MK, Matrix(w_NK, None), add=add_MN, tile=tile)
        torch.testing.assert_close(found, x_MK @ w_NK.T + add_MN, rtol=1e-4, atol=1e-4)


def texts_are_those_of_eager_calls():
    target = tiny_model("qwen3", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=20)
    draft, prompts = perturbed(target), prompts_of([5, 1], vocab_size=20)
    settings = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=3)
    memory.make_runner = lambda kind: CpuGraphRunner()
    eager, _ = decode(target, ModelDrafter(draft), prompts, settings, batch_size=2, runner="eager")
    cached_model.fused_weights = fused.agreeing_weights
    found, _ = decode(target, ModelDrafter(draft), prompts, settings, batch_size=2, runner="graph")
    for model in (target, draft):
        fused.agreeing_weights(model)  # as the next call does
    # The weights stayed where they were when they were first packed, so that call finds the recordings.
    assert memory.holds(target, rows=2, capacity=1)
    assert memory.holds(draft, rows=2, capacity=1)
    assert texts(found) == texts(eager)
    assert [one.blocks for one in found] == [one.blocks for one in eager]  # the draft proposed the same


if __name__ == "__main__":
    fused.LONG = 16  # Programs share the longer texts.
    products.FEW_TOKENS = 8  # The interpreter takes milliseconds a program.
    with torch.no_grad():
        logits_are_the_models_own("qwen3", 70)  # Two programs of attention have positions.
        logits_are_the_models_own("mistral", sliding_window=12, num_key_value_heads=2)
        logits_are_the_models_own(
            "llama", num_attention_heads=3, hidden_size=24, head_dim=12, mlp_bias=True, attention_bias=True
        )
        a_layer_is_six_kernels()
        products_do_not_depend_on_their_division()
    texts_are_those_of_eager_calls()
    print("equal")
