"""Inputs of products are rounded as an engine rounds them: against llama.cpp's own format and against models in 16 bits."""

import gguf
import pytest
import torch
from tiny_models import tiny_model

from speculative.engine.arithmetic import computing_as, rounded


def test_blocks_of_8_bits_are_those_of_the_format() -> None:
    """Q8_0, whose scale has 16 bits."""
    values = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 3, 5)[:, None]
    eight = gguf.GGMLQuantizationType.Q8_0
    stored = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), eight), eight))
    largest = values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(-2)
    ours = rounded(values, "8 bits by 32")
    assert ((ours - stored).abs() <= 2**-11 * largest).all()
    assert ((ours - values).abs() <= 0.5001 / 127 * largest).all()
    assert ours.ne(values).float().mean() > 0.9


def test_a_width_that_has_no_whole_blocks_is_one_block_and_zeros_stay() -> None:
    values = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    scale = values.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(rounded(values, "8 bits by 32"), (values / scale).round() * scale)
    assert not rounded(torch.zeros(2, 512), "8 bits by 256").any()


@pytest.mark.parametrize(("inputs", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_16_bits_move_logits_as_a_model_in_16_bits_does(inputs: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(), torch.arange(1, 40)[None]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        exact, whole = model(ids).logits, tiny_model().to(dtype)(ids).logits.float()
        with computing_as(model, inputs):
            served = model(ids).logits
        torch.testing.assert_close(model(ids).logits, exact, rtol=0, atol=0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    sizes = [float((logits - exact).std()) for logits in (served, whole)]
    assert 0.2 < sizes[0] / sizes[1] < 1.5, "a model in 16 bits rounds sums and norms too"


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, ids = tiny_model(), torch.arange(1, 9)[None]
    exact = model(ids).logits
    with pytest.raises(ZeroDivisionError), computing_as(model, "float16"):
        raise ZeroDivisionError
    assert torch.equal(model(ids).logits, exact)
