"""RaggedCache: any sequence of writes, rollbacks, recycled rows, trees and compactions gives a fresh forward's logits."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.cache import RaggedCache
from speculative.engine.cached_model import CachedModel
from speculative.engine.models import evaluating
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY
from speculative.rules.tree import TokenTree

CAPACITY = 96
MODELS = {kind: tiny_model(kind) for kind in ("llama", "gpt2")}
MODELS["eager"] = tiny_model("llama", attn_implementation="eager")
MODELS["all layers slide"] = tiny_model("mistral", sliding_window=7)
MODELS["some layers slide"] = tiny_model(
    "gemma2", sliding_window=7, layer_types=["sliding_attention", "full_attention"]
)
TREE = TokenTree.from_branching((3, 2, 1))

steps = st.lists(
    st.tuples(
        st.integers(1, 6),  # tokens fed to each row
        st.lists(st.integers(0, 6), min_size=4, max_size=4),  # how many of them each row keeps
        st.lists(st.integers(0, 3), min_size=4, max_size=4),  # older tokens each row takes back
        st.sampled_from(["nothing", "drop", "recycle", "recycle two", "tree"]),  # what happens afterwards
    ),
    min_size=1,
    max_size=8,
)


def fresh_logits(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def padded(texts, columns=CAPACITY):
    tokens = np.zeros((len(texts), columns), dtype=np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens


def starts_of(texts):
    return np.array([len(text) for text in texts])


def assert_fresh(model, logits, texts, fed):
    for row, text in enumerate(texts):
        expected = fresh_logits(model, text + fed[row].tolist())[-fed.shape[1] :]
        # Float32 sums in another order; logits are of size 10.
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(MODELS))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(prompt_lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4), steps=steps, seed=st.integers(0, 1000))
def test_any_history_gives_the_logits_of_a_fresh_forward(kind, prompt_lengths, steps, seed):
    model, generator = MODELS[kind], torch.Generator().manual_seed(seed)

    def random_text(length):
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    texts = [random_text(length) for length in prompt_lengths]
    with evaluating(model):
        cached = CachedModel(model, "target", rows=4, capacity=CAPACITY)
        cached.prefill(padded(texts), range(4), starts_of(texts))
        for width, keeps, takes_back, then in steps:
            texts = [text[: max(1, len(text) - back)] for text, back in zip(texts, takes_back, strict=False)]
            fed = torch.randint(VOCAB, (len(texts), width), generator=generator)
            logits = cached.feed(fed, starts_of(texts), logits_kept=width)
            assert_fresh(model, logits, texts, fed)
            texts = [text + ids[:keep] for text, ids, keep in zip(texts, fed.tolist(), keeps, strict=False)]
            if then == "drop" and len(texts) > 1:
                kept = list(range(len(texts)))[:0:-1]  # drop the first row and reverse the others
                cached.keep(kept)
                texts = [texts[row] for row in kept]
            elif then.startswith("recycle"):
                rows = list(range(len(texts)))[-1:] if then == "recycle" else list(range(len(texts)))[::2]
                for row in rows:
                    texts[row] = random_text(1 + keeps[row] * 3)
                cached.prefill(padded(texts), rows, starts_of(texts)[rows])
            elif then == "tree":
                texts = _through_a_tree(model, cached, texts, generator)
        if len({len(text) for text in texts}) == 1:
            return
        fed = torch.randint(VOCAB, (len(texts), 1), generator=generator)
        assert_fresh(model, cached.feed(fed, starts_of(texts), 1), texts, fed)


def _through_a_tree(model, cached, texts, generator):
    """Feed a tree behind every row, check every node against its own path, and commit one path per row."""
    nodes = torch.randint(VOCAB, (len(texts), TREE.size + 1), generator=generator)
    logits = cached.feed_tree(nodes, starts_of(texts), TREE)
    paths = TREE.on(torch.device("cpu")).paths_N1D
    to_node = [[0, *[step for step in path if step]] for path in paths.tolist()]
    inner = {step for path in to_node for step in path[:-1]}
    for row, text in enumerate(texts):
        for path in (path for path in to_node if path[-1] not in inner):  # to the leaves: all nodes are on the way
            expected = fresh_logits(model, text + nodes[row, path].tolist())[-len(path) :]
            torch.testing.assert_close(logits[row, path], expected, rtol=1e-4, atol=1e-4)  # float32, other shapes
    chosen = torch.randint(TREE.size + 1, (len(texts),), generator=generator)
    cached.commit_path(starts_of(texts), paths[chosen])
    return [text + nodes[row, to_node[chosen[row]]].tolist() for row, text in enumerate(texts)]


def test_prefill_in_small_chunks_gives_the_same_cache():
    model, tokens = MODELS["llama"], torch.randint(VOCAB, (3, 42), generator=torch.Generator().manual_seed(0))
    following, starts = tokens[:, :2], np.array([40, 17, 1])
    results = []
    for budget in (4096, 21, 1):
        with evaluating(model):
            cached = CachedModel(model, "target", rows=3, capacity=64)
            cached.prefill_tokens = budget
            cached.prefill(tokens.numpy(), range(3), starts)
            results.append(cached.feed(following, starts, logits_kept=2))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)  # float32, other shapes
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)


def test_out_of_memory_at_prefill_is_answered_by_smaller_calls_and_then_by_one_line(monkeypatch):
    model, tokens = MODELS["llama"], np.ones((2, 90), dtype=np.int64)
    sizes = []
    feed = CachedModel.feed

    def tight(self, ids, *args, fits=130, **kwargs):
        sizes.append(ids.numel())
        if ids.numel() > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return feed(self, ids, *args, **kwargs)

    monkeypatch.setattr(CachedModel, "feed", tight)
    with evaluating(model):
        cached = CachedModel(model, "target", rows=2, capacity=CAPACITY)
        cached.prefill(tokens, range(2), np.array([90, 90]))
        assert cached.prefill_tokens == 128
        assert max(sizes[-2:]) <= 128
        monkeypatch.setattr(CachedModel, "feed", lambda self, ids, *args, **kwargs: tight(self, ids, *args, fits=0))
        with pytest.raises(
            UserError, match=r"out of memory while the target reads the prompts .* lower the batch size"
        ):
            CachedModel(model, "target", rows=2, capacity=CAPACITY).prefill(tokens, range(2), np.array([90, 90]))
        monkeypatch.setattr(CachedModel, "feed", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("shape")))
        with pytest.raises(RuntimeError, match="shape"):  # not a matter of memory: ours to see
            CachedModel(model, "target", rows=2, capacity=CAPACITY).prefill(tokens, range(2), np.array([90, 90]))


@pytest.mark.parametrize("runner", ["eager", "compile"])
def test_no_cache_outlives_its_call(runner: str) -> None:
    """Without the garbage collector: what waits for it counts as used, and on a GPU it is gigabytes."""
    target = tiny_model()
    drafter = ModelDrafter(perturbed(target))

    def alive() -> set[int]:
        return {id(thing) for thing in gc.get_objects() if type(thing) is RaggedCache}

    gc.collect()
    before = alive()
    gc.disable()
    try:
        decode(
            target,
            drafter,
            prompts_of([5, 3]),
            DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=8),
            runner=runner,
        )
        assert alive() <= before
    finally:
        gc.enable()
