"""Memory as engines keep it against what our own caches hold, and against numbers worked out by hand."""

import pytest
import torch
from tiny_models import tiny_model

from speculative.engine.memory import Footprint, cache_bytes, cache_bytes_per_request, capacity


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "falcon", "gpt_neox", "gemma2"])
def test_a_request_takes_what_our_own_cache_takes(kind: str) -> None:
    model = tiny_model(kind)
    assert cache_bytes_per_request(model, torch.float32, 24) == cache_bytes(model, rows=1, capacity=24)


def test_grouped_heads_and_a_window_by_hand() -> None:
    model = tiny_model("mistral", num_hidden_layers=3, sliding_window=10)
    # 2 (keys, values) x 2 heads x 8 wide x 2 bytes.
    per_token = 2 * 2 * 8 * 2
    assert cache_bytes_per_request(model, torch.float16, 8) == 3 * 8 * per_token
    assert cache_bytes_per_request(model, torch.float16, 500) == 3 * 10 * per_token, "no more than the window"


def test_a_latent_cache_counts_as_engines_keep_it() -> None:
    model = tiny_model()
    model.config.kv_lora_rank, model.config.qk_rope_head_dim = 6, 2
    assert cache_bytes_per_request(model, torch.float16, 5) == 2 * 5 * (6 + 2) * 2


def test_capacity_by_hand() -> None:
    # 100 bytes, 90 usable: alone (90 - 30) / 5 = 12; with the draft (90 - 40) / 7 = 7.
    found = capacity(100, 7, Footprint(30, 5), Footprint(10, 2))
    assert (found.requests_alone, found.requests_with_draft, found.requests_lost) == (12, 7, 5)
    assert (found.fits, found.needed_bytes, found.usable_bytes) == (True, 89, 90)
    assert not capacity(100, 8, Footprint(30, 5), Footprint(10, 2)).fits
    nothing = capacity(20, 1, Footprint(30, 5), Footprint(10, 2))
    assert (nothing.fits, nothing.requests_alone, nothing.requests_with_draft) == (False, 0, 0)
