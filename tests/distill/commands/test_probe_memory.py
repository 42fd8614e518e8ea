"""The options of `understudy probe` on memory: how they are read, and what is said."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from distill.commands.options import ProbeOptions
from distill.commands.probe.memory import Device, device_of, memory_of, parse_bytes, parse_tokens
from speculative.errors import UserError

ASKED = ProbeOptions("embedded", device_memory="80GB", concurrency=64, context="8k")


def test_sizes_and_contexts_are_read() -> None:
    assert device_of(ASKED) == Device(80 * 10**9, 64, 8192)
    assert device_of(ProbeOptions("embedded")) is None
    assert (parse_bytes("80GiB"), parse_bytes("1.5 tb"), parse_bytes("512MiB")) == (80 * 2**30, 15 * 10**11, 2**29)
    assert (parse_tokens("8192"), parse_tokens("32K")) == (8192, 32768)


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80 apples", "nanGB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--device-memory .*80GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "8m", "k", "-8k", "8.5k"])
def test_a_context_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--context .*8k"):
        parse_tokens(text)


@pytest.mark.parametrize("missing", [{"device_memory": ""}, {"concurrency": 0}, {"context": ""}])
def test_the_three_options_go_together(missing: dict) -> None:
    with pytest.raises(UserError, match="give --device-memory, --concurrency and --context together"):
        device_of(replace(ASKED, **missing))


def test_the_answer_in_words_follows_from_its_numbers() -> None:
    model = tiny_model()
    found = memory_of(Device(10**6, 100, 64), torch.float32, model, [("small", tiny_model(num_hidden_layers=1))])
    row = found.drafts[0].capacity
    assert row.requests_lost == row.requests_alone - row.requests_with_draft > 0
    line = found.lines()[1]
    assert f"the draft costs {row.requests_lost} requests" in line
    assert ("do not fit" in line) is not row.fits
