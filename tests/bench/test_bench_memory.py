"""bench/memory.py: what is counted as alive."""

import gc

import pytest
import torch
from bench_modules import bench
from torch._subclasses.fake_tensor import FakeTensorMode


def test_alive_is_what_nobody_has_let_go_and_views_count_once() -> None:
    with FakeTensorMode(), bench("memory").Alive() as alive:
        first = torch.zeros(1000)
        assert alive.now == 4000
        view, second = first.view(10, 100), first + 1
        assert alive.now == 8000
        del first, second
        gc.collect()
        assert alive.now == 4000, "the view holds the first"
        third = view * 2
        assert (alive.now, alive.peak) == (8000, 8000)
        del third, view
        gc.collect()
        assert alive.now == 0
        assert alive.peak == 8000


def test_the_readmes_pair_has_its_published_sizes() -> None:
    memory = bench("memory")
    sizes = {name: sum(weight.numel() for weight in memory.shaped(name).parameters()) for name in memory.PAIRS[0]}
    # Published: 4.0 B and 0.6 B (0.44 B without the embeddings of 151,936 x 1,024).
    assert sizes == {"Qwen3-4B": 4_022_468_096, "Qwen3-0.6B": 596_049_920}


def test_a_step_of_two_sequences_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bench("memory")
    tiny = memory.SHAPES["Qwen3-0.6B"] | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    monkeypatch.setitem(memory.SHAPES, "tiny", tiny)
    config = memory.config_of("tiny")
    (weights, one), (_, two) = (memory.step_bytes(config, config, sequences, 32) for sequences in (1, 2))
    parameters = sum(weight.numel() for weight in memory.shaped("tiny").parameters())
    assert weights == pytest.approx(6 * parameters, rel=1e-3), "and the rotary frequencies"
    assert weights < one < two
