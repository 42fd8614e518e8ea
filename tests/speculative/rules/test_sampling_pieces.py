"""What runs on an accelerator, here on CPU tensors: draws in two levels and the nucleus without a sort, against their twins."""

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from speculative.engine import memory
from speculative.rules import sampling
from speculative.rules.sampling import (
    PIECE,
    _interval,
    nucleus,
    nucleus_by_search,
    nucleus_by_sorting,
    sample_at,
    sample_by_pieces,
    search,
)

UNIT = 2.0**-53


def random_rows(seed: int, rows: int, vocab: int, scale: float = 3.0, zeros: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = (scale * torch.randn(rows, vocab, generator=generator)).softmax(-1)
    probs *= torch.rand(rows, vocab, generator=generator) >= zeros
    probs[:, generator.initial_seed() % vocab] += 1e-6
    return probs


@given(weights=st.lists(st.integers(0, 5), min_size=1, max_size=3 * PIECE + 1).filter(any))
def test_every_token_gets_its_share_of_evenly_spaced_uniforms(weights: list[int]) -> None:
    counts = torch.tensor(weights)
    total = int(counts.sum())
    points = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    for dtype in (torch.float32, torch.float64):
        ids = sample_by_pieces(counts.to(dtype)[None], points[None])[0]
        assert torch.equal(torch.bincount(ids, minlength=len(weights)), counts)
        assert torch.equal(ids, ids.sort().values)


@pytest.mark.parametrize("piece", [1, 2, 3, 128])
def test_the_uniforms_of_a_token_measure_its_probability(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-12: where a token's uniforms end is found by halving, with ids that never fall as uniforms rise."""
    monkeypatch.setattr(sampling, "PIECE", piece)
    for vocab in (1, 2, 5, 8, 9):
        probs = random_rows(vocab, 6, vocab, 1.5, 0.3).double()
        probs /= probs.sum(-1, keepdim=True)
        low, high = torch.zeros_like(probs), torch.ones_like(probs)
        for _ in range(60):
            middle = (low + high) / 2
            behind = sample_by_pieces(probs, middle) > torch.arange(vocab)
            low, high = torch.where(behind, low, middle), torch.where(behind, middle, high)
        measured = torch.diff(high, prepend=torch.zeros(6, 1, dtype=torch.float64))
        torch.testing.assert_close(measured, probs, rtol=0, atol=1e-12)


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 5 * PIECE),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    mass=st.sampled_from([1.0, 1e-9, 7.0]),
)
def test_the_token_is_that_of_one_scan_but_where_rounding_decides(seed, vocab, zeros, mass) -> None:
    probs = mass * random_rows(seed, 3, vocab, zeros=zeros)
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(3, 40, generator=generator, dtype=torch.float64)
    points[:, 0], points[:, 1] = 0.0, 1.0 - UNIT
    running = probs.cumsum(-1, dtype=torch.float64)
    points[:, 2] = (running / running[:, -1:]).gather(1, torch.randint(vocab, (3, 1), generator=generator))[:, 0]
    points.clamp_max_(1.0 - UNIT)
    ids = sample_by_pieces(probs, points)
    assert bool((probs.gather(1, ids) > 0).all())
    before = torch.nn.functional.pad(running, (1, 0))
    wanted, rounding = points * running[:, -1:], 1e-12 * running[:, -1:]
    assert bool((before.gather(1, ids) <= wanted + rounding).all())
    assert bool((wanted <= before.gather(1, ids + 1) + rounding).all())
    assert torch.equal(ids[:, 3:], search(running, points)[:, 3:])


@given(seed=st.integers(0, 10**6), size=st.integers(1, 40), zeros=st.sampled_from([0.2, 0.8]))
def test_no_interval_without_a_weight_however_a_scan_rounds(seed: int, size: int, zeros: float) -> None:
    """A parallel scan adds in another order at each place: here every sum is off by its own 2^-50, but sums of zeros."""
    weights = random_rows(seed, 20, size, zeros=zeros).double()
    exact = weights.cumsum(-1)
    ends = exact * (1 + 2.0**-50 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed)).double())
    first = (weights > 0).int().argmax(-1, keepdim=True)
    ends.scatter_(1, first, exact.gather(1, first))
    points = torch.cat((exact, exact - weights, ends, torch.zeros(20, 1)), 1)
    begins, index = _interval(ends, weights, points)
    assert bool((weights.gather(1, index) > 0).all())
    assert bool((begins <= points).all())


def test_broken_rows_still_give_legal_ids() -> None:
    probs = random_rows(0, 4, 2 * PIECE + 7)
    probs[0], probs[1], probs[2, 5] = torch.nan, 0.0, torch.nan
    ids = sample_by_pieces(probs, torch.tensor([0.0, 0.5, 1.0 - UNIT], dtype=torch.float64).expand(4, 3))
    assert int(ids.min()) >= 0
    assert int(ids.max()) < probs.shape[1]
    assert sample_by_pieces(probs[:0], torch.zeros(0, 3)).shape == (0, 3)


def kept_by_stable_sort(scores: torch.Tensor, top_p: float) -> tuple[torch.Tensor, float]:
    """Which ids of a row stay, with sums in float64 and of equal probabilities the later ids; and how close a sum came."""
    probs = scores.softmax(-1)
    order = probs.sort(stable=True).indices
    running = probs[order].double().cumsum(-1)
    border = float(np.float32(1.0 - top_p))
    removed = running <= border
    removed[-1] = False
    return order[~removed].sort().values, float((running - border).abs().min())


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 700),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    coarse=st.booleans(),
    top_p=st.one_of(st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.95, 0.9999999]), st.floats(0.001, 0.999)),
)
def test_the_nucleus_is_that_of_a_stable_sort(seed, vocab, scale, coarse, top_p) -> None:
    scores = scale * torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    scores = scores.bfloat16().float() if coarse else scores  # many ties
    scores[1, : vocab // 2] = -torch.inf  # top-k came first
    together = nucleus_by_search(scores, top_p)
    for row, found in zip(scores, together, strict=True):
        expected, distance = kept_by_stable_sort(row, top_p)
        kept = found.isfinite().nonzero()[:, 0]
        assert torch.equal(found[kept], row[kept])
        if distance > 1e-12 or (scale == 0.0 and math.log2(vocab).is_integer()):  # Else the order of a sum decides.
            assert kept.tolist() == expected.tolist()
        twin = nucleus_by_sorting(row, top_p).isfinite()
        if distance > 1e-5:  # Sums of the twin are in float32.
            torch.testing.assert_close(row[kept].sort().values, row[twin].sort().values, rtol=1e-6, atol=1e-6)


def test_the_nucleus_of_broken_rows_is_broken_and_one_token_always_stays() -> None:
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    scores[0, 3], scores[1, 3], scores[2] = torch.nan, torch.inf, 0.0
    kept = nucleus_by_search(scores, 1e-9)
    assert kept.softmax(-1).isnan().all(-1).tolist() == [True, True, False, False]
    assert kept[2:].isfinite().sum(-1).tolist() == [1, 1]
    assert int(kept[3].argmax()) == int(scores[3].argmax())


@pytest.mark.device
@pytest.mark.gpu
def test_a_gpu_draws_and_cuts_as_a_cpu_does() -> None:
    for vocab in (300, 151_936):
        probs = random_rows(vocab, 6, vocab)
        points = torch.rand(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert torch.equal(sample_at(probs.cuda(), points.cuda()).cpu(), sample_at(probs, points))
        kept = nucleus(probs.log().cuda(), 0.9).cpu().isfinite()
        assert int((kept != nucleus(probs.log(), 0.9).isfinite()).sum()) <= 6  # a token a row, where float32 decides


class _Taken(TorchDispatchMode):
    """Most bytes that what was made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, dict[int, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for storage in [tensor.untyped_storage() for tensor in (out if isinstance(out, tuple) else [out])]:
            if storage._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata)
        self.most = max(self.most, sum(self._held.values()))
        return out


@pytest.mark.parametrize("vocab", [32_000, 151_936])
def test_the_memory_that_a_nucleus_takes_is_planned(vocab: int) -> None:
    """Beside the model's own logits and those at the temperature, eight bytes of a logit."""
    rows, scores = 2, torch.randn(2, vocab)
    for find, planned in (
        (nucleus_by_sorting, vocab * (memory.LOGIT_BYTES - 8)),
        (nucleus_by_search, vocab * (memory.SEARCHED_LOGIT_BYTES - 8) + memory.SEARCHED_PLACE_BYTES),
    ):
        with _Taken() as taken:
            find(scores, 0.95)
        assert 0.8 * planned < taken.most / rows <= planned, (find, taken.most / rows / vocab)
