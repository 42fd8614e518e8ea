"""Query heads attended in groups give what transformers' own attention gives, and nothing of the model stays changed."""

import pytest
import torch
from tiny_models import generated, prompts_of, texts, tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.early_exit import EarlyExit
from speculative.engine import cached_model, calls
from speculative.engine.calls import GROUPED, grouped_attention, grouped_queries
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


@pytest.fixture
def copies(monkeypatch):
    """Which calls our function left to transformers'."""
    left = []

    def spy(module, query, *args, **kwargs):
        left.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(calls, "sdpa_attention_forward", spy)
    yield left
    calls._folded_masks.clear()


def states(rows, heads, key_heads, queries, prefix, width, value_width=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, queries, heads, width, generator=generator).transpose(1, 2).to(dtype)
    # As the cache hands them over: a part of longer buffers.
    key = torch.randn(rows, key_heads, prefix + 3, width, generator=generator).to(dtype)[:, :, :prefix]
    value = torch.randn(rows, key_heads, prefix + 3, value_width or width, generator=generator).to(dtype)[:, :, :prefix]
    return query, key, value


def ragged_mask(rows, queries, prefix, dtype, window=None):
    """Row r's tokens stand r places before the end of the prefix."""
    own = prefix - queries + torch.arange(queries)[None, :, None] - torch.arange(rows)[:, None, None]
    seen = torch.arange(prefix)
    visible = (seen <= own) & (seen > own - (window or prefix + rows))
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])  # 8 bits of mantissa
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("queries", "window"), [(1, None), (5, None), (5, 4)])
def test_groups_are_attended_as_by_transformers(copies, key_heads, queries, window, dtype, tolerance):
    given = states(3, 4, key_heads, queries, 24, 16, 8, dtype)
    mask = ragged_mask(3, queries, 24, dtype, window)
    theirs, _ = sdpa_attention_forward(Layer(4 // key_heads), *given, mask, scaling=0.3)
    ours, _ = grouped_attention(Layer(4 // key_heads), *given, mask, scaling=0.3, sliding_window=window)
    assert ours.shape == theirs.shape == (3, queries, 4, 8)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert bool(copies) == (key_heads == 4)


def test_a_mask_is_folded_once_for_all_layers_and_once_for_rows_that_share_it():
    mask = ragged_mask(1, 3, 9, torch.float32).expand(5, -1, -1, -1)
    model = tiny_model()
    with grouped_queries(model, CPU):
        folded = calls._folded_mask(mask, 2)
        assert folded.stride(0) == 0
        assert calls._folded_mask(mask, 2) is folded
    assert not calls._folded_masks
    assert folded.tolist() == torch.cat([mask, mask], 2).tolist()


@pytest.mark.parametrize(
    ("queries", "more"),
    [(5, {"position_bias": torch.randn(2, 4, 5, 9)}), (5, {"attention_mask": torch.zeros(2, 4, 5, 9)}), (200, {})],
)
def test_what_is_more_than_one_mask_for_all_heads_is_left_to_transformers(copies, queries, more):
    given = states(2, 4, 2, queries, 9, 8)
    mask = more.pop("attention_mask", torch.zeros(2, 1, queries, 9))
    theirs, _ = sdpa_attention_forward(Layer(2), *given, mask, **more)
    ours, _ = grouped_attention(Layer(2), *given, mask, **more)
    assert torch.equal(ours, theirs)
    assert copies == [(2, 4, queries, 8)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_decoding_gives_the_text_of_transformers_and_leaves_the_model_alone(kind, monkeypatch):
    called = []
    monkeypatch.setitem(
        calls.AttentionInterface._global_mapping,
        GROUPED,
        lambda *args, **kwargs: called.append(args[1].shape[2]) or grouped_attention(*args, **kwargs),
    )
    target = tiny_model(kind, **({"sliding_window": 6} if kind in ("mistral", "gemma2") else {}))
    before = {name: dict(vars(module)) for name, module in target.named_modules()}
    prompts = prompts_of([9, 1, 23])
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=12)
    responses, _ = decode(target, EarlyExit(target, 1), prompts, settings, batch_size=3, runner="eager")
    assert texts(responses) == generated(target, prompts, 12)
    assert {name: dict(vars(module)) for name, module in target.named_modules()} == before
    implementation = target.config._attn_implementation
    assert implementation == ("eager" if kind == "gemma2" else "sdpa")  # Its softcap is no matter of SDPA.
    assert {1, 4} <= set(called) if implementation == "sdpa" else not called


@pytest.mark.parametrize(
    ("kind", "overrides"), [("falcon", {"alibi": False}), ("llama", {"attn_implementation": "eager"})]
)
def test_models_with_a_way_of_their_own_keep_it(kind, overrides):
    model = tiny_model(kind, **overrides)
    before = model.config._attn_implementation
    with grouped_queries(model, CPU):
        assert model.config._attn_implementation == before


def test_a_fresh_prompt_is_read_without_a_mask(monkeypatch):
    """What starts at position 0 is causal by itself; a window, or text before, needs the mask."""
    masked = []
    call = cached_model.CachedModel._call
    monkeypatch.setattr(
        cached_model.CachedModel,
        "_call",
        lambda self, ids, positions, masks, kept: (
            masked.append(masks is not None) or call(self, ids, positions, masks, kept)
        ),
    )
    target = tiny_model()
    settings = DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=8)
    monkeypatch.setattr(cached_model, "PREFILL_TOKENS", 16)
    prompts = prompts_of([31])
    responses, _ = decode(target, None, prompts, settings, runner="eager")
    assert texts(responses) == generated(target, prompts, 8)
    assert masked[:3] == [False, True, False]  # 16 tokens, the other 14, then one that sees all
