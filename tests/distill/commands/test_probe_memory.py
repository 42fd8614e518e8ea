"""The options of `understudy probe` on memory: how they are read, and what is said."""

import pytest
import torch
from tiny_models import tiny_model

from distill.commands.probe.memory import Device, device_of, memory_of, parse_bytes, parse_tokens
from speculative.errors import UserError


def test_sizes_and_contexts_are_read() -> None:
    assert device_of("80GB, 64, 8k") == Device(80 * 10**9, 64, 8192)
    assert device_of("") is None
    assert (parse_bytes("80GiB"), parse_bytes("1.5 tb"), parse_bytes("512MiB")) == (80 * 2**30, 15 * 10**11, 2**29)
    assert (parse_tokens("8192"), parse_tokens("32K")) == (8192, 32768)


@pytest.mark.parametrize(
    "text", ["80GB", "80GB,64", "80GB,0,8k", "80,64,8k", "0GB,64,8k", "-1GB,64,8k", "80 apples,64,8k", "80GB,64,8m"]
)
def test_a_server_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--server "):
        device_of(text)


def test_the_answer_in_words_follows_from_its_numbers() -> None:
    model = tiny_model()
    found = memory_of(Device(10**6, 100, 64), torch.float32, model, [("small", tiny_model(num_hidden_layers=1))])
    row = found.drafts[0].capacity
    assert row.requests_lost == row.requests_alone - row.requests_with_draft > 0
    line = found.lines()[1]
    assert f"the draft costs {row.requests_lost} requests" in line
    assert ("do not fit" in line) is not row.fits
