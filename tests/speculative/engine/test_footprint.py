"""Memory from configs against what the models' own caches hold, and against numbers worked out by hand."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoConfig

from speculative.engine.footprint import Footprint, cache_bytes_per_request, capacity, footprint
from speculative.engine.memory import cache_bytes
from speculative.errors import UserError


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "falcon", "gpt_neox", "gemma2"])
def test_the_config_says_what_the_cache_takes(kind: str) -> None:
    model = tiny_model(kind)
    assert cache_bytes_per_request(model.config, torch.float32, 24) == cache_bytes(model, rows=1, capacity=24)


def test_an_8b_model_with_grouped_heads_by_hand() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    # 2 (keys, values) x 8 heads x 128 wide x 2 bytes x 32 layers = 131,072 bytes a token.
    assert cache_bytes_per_request(config, torch.bfloat16, 8192) == 131_072 * 8192


def test_a_sliding_window_holds_no_more_than_itself() -> None:
    config = AutoConfig.for_model(
        "mistral", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, sliding_window=10
    )
    per_token = 2 * 2 * 16 * 2
    assert cache_bytes_per_request(config, torch.float16, 8) == 3 * 8 * per_token
    assert cache_bytes_per_request(config, torch.float16, 500) == 3 * 10 * per_token


def test_a_layer_that_keeps_no_keys_is_refused() -> None:
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(UserError, match="keep no keys and values"):
        cache_bytes_per_request(config, torch.float32, 8)


def test_weights_count_in_the_served_dtype_and_tied_ones_once() -> None:
    model = tiny_model(tie_word_embeddings=True)
    numbers = sum(weight.numel() for weight in model.parameters())
    assert footprint(model, torch.bfloat16, 4).weights == 2 * numbers


def test_capacity_by_hand() -> None:
    # 100 bytes, 90 usable: alone (90 - 30) / 5 = 12; with the draft (90 - 40) / 7 = 7.
    found = capacity(100, 7, Footprint(30, 5), Footprint(10, 2))
    assert (found.requests_alone, found.requests_with_draft, found.requests_lost) == (12, 7, 5)
    assert (found.fits, found.needed_bytes, found.usable_bytes) == (True, 89, 90)
    assert not capacity(100, 8, Footprint(30, 5), Footprint(10, 2)).fits
    nothing = capacity(20, 1, Footprint(30, 5), Footprint(10, 2))
    assert (nothing.fits, nothing.requests_alone, nothing.requests_with_draft) == (False, 0, 0)
