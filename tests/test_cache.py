"""RaggedCache: any sequence of writes, rollbacks and compactions gives the logits of a fresh forward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, tiny_model
from transformers import MambaConfig, MambaForCausalLM

from speculative import cache as cache_module
from speculative.cache import CachedModel, check_decodable, check_same_vocabulary, evaluating
from speculative.errors import UserError

CAPACITY = 96
MODELS = {kind: tiny_model(kind) for kind in ("llama", "gpt2")}
MODELS["eager"] = tiny_model("llama", attn_implementation="eager")

steps = st.lists(
    st.tuples(
        st.integers(1, 6),  # tokens fed to each row
        st.lists(st.integers(0, 6), min_size=4, max_size=4),  # how many of them each row keeps
        st.lists(st.integers(0, 3), min_size=4, max_size=4),  # older tokens each row takes back
        st.booleans(),  # drop the first row afterwards
    ),
    min_size=1,
    max_size=8,
)


def fresh_logits(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", list(MODELS))
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(prompt_lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4), steps=steps, seed=st.integers(0, 1000))
def test_any_history_gives_the_logits_of_a_fresh_forward(kind, prompt_lengths, steps, seed):
    model, generator = MODELS[kind], torch.Generator().manual_seed(seed)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in prompt_lengths]
    with evaluating(model):
        cached = CachedModel(model, "target", rows=4, capacity=CAPACITY, needed=CAPACITY)
        padded = torch.zeros(4, 20, dtype=torch.int64)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = torch.tensor(text)
        cached.prefill(padded, max(prompt_lengths))
        for width, keeps, takes_back, drops in steps:
            texts = [text[: max(1, len(text) - back)] for text, back in zip(texts, takes_back, strict=False)]
            fed = torch.randint(VOCAB, (len(texts), width), generator=generator)
            starts = torch.tensor([len(text) for text in texts])
            logits = cached.feed(fed, starts, int(starts.max()) + width, logits_kept=width)
            for row, text in enumerate(texts):
                expected = fresh_logits(model, text + fed[row].tolist())[-width:]
                # Float32 sums in another order; logits are of size 10.
                torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
            texts = [text + ids[:keep] for text, ids, keep in zip(texts, fed.tolist(), keeps, strict=False)]
            if drops and len(texts) > 1:
                kept = torch.arange(len(texts)).flip(0)[:-1]  # drop the first row and reverse the others
                cached.keep(kept)
                texts = [texts[row] for row in kept.tolist()]


def test_prefill_in_small_chunks_gives_the_same_cache(monkeypatch):
    model, tokens = MODELS["llama"], torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    following, starts = tokens[:, :2], torch.tensor([40, 17, 1])
    results = []
    for budget in (4096, 21, 1):
        monkeypatch.setattr(cache_module, "PREFILL_TOKENS", budget)
        with evaluating(model):
            cached = CachedModel(model, "target", rows=3, capacity=64, needed=64)
            cached.prefill(tokens, 40)
            results.append(cached.feed(following, starts, 42, logits_kept=2))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)  # float32, other shapes
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)


def test_the_prefix_handed_to_attention_is_rounded_up_and_bounded():
    cached = CachedModel(MODELS["llama"], "target", rows=1, capacity=150, needed=150)
    for used, prefix in ((1, 64), (64, 64), (65, 128), (129, 150), (150, 150)):
        cached.cache.begin(torch.tensor([[used - 1]]), used)
        assert cached.cache.prefix == prefix


def test_sliding_windows_are_fine_while_everything_fits_and_refused_beyond():
    model = tiny_model("mistral", sliding_window=40)
    check_decodable(model, "target", needed=40)
    with pytest.raises(UserError, match=r"target \(MistralForCausalLM\).*40 positions and 41 are needed"):
        check_decodable(model, "target", needed=41)


def test_models_that_cannot_be_rolled_back_are_refused_by_name():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UserError, match=r"draft \(MambaForCausalLM\).*recurrent state"):
        check_decodable(mamba, "draft", needed=10)
    linear = tiny_model("llama")
    linear.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match=r"target \(LlamaForCausalLM\) has LinearAttentionLayer layers"):
        check_decodable(linear, "target", needed=10)
    bloom = tiny_model("bloom", n_head=4, n_layer=1)
    with pytest.raises(UserError, match=r"BloomForCausalLM.*position ids"):
        check_decodable(bloom, "target", needed=10)
    flash = tiny_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="attn_implementation='sdpa'"):
        check_decodable(flash, "target", needed=10)


def test_vocabularies_of_different_size_are_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"48 token ids and the target 50"):
        check_same_vocabulary(tiny_model(vocab_size=50), tiny_model(vocab_size=48))


def test_evaluating_restores_each_models_mode_and_keeps_gradients_off():
    training, evaluated = tiny_model().train(), tiny_model()
    with evaluating(training, None, evaluated):
        assert not training.training
        assert not torch.is_grad_enabled()
    assert training.training
    with pytest.raises(KeyError), evaluating(training):
        raise KeyError
    assert training.training
    assert not evaluated.training
    assert torch.is_grad_enabled()
