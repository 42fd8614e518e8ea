"""The pretend device refuses what a GPU refuses; else nothing that runs on it would prove anything."""

from types import SimpleNamespace

import pytest
import torch
from pretend_cuda import library
from pretend_cuda.ledger import LEDGER

on_device = pytest.mark.device


@pytest.mark.parametrize(
    ("arguments", "asked"), [(["-m", "device"], True), (["-m", "not alone and not device"], False), (["device"], False)]
)
def test_it_is_there_when_its_tests_are_chosen(arguments: list[str], asked: bool) -> None:
    assert library.asked_for(["pytest", *arguments]) is asked


def test_where_no_compiler_is_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "shutil", SimpleNamespace(which=lambda name: None))
    assert library.why_not() == "the pretend device needs a C++ compiler (g++)"


@on_device
def test_its_memory_is_its_own() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert (there.device, there.is_cuda) == (torch.device("cuda:0"), True)
    with pytest.raises(RuntimeError, match="on the same device"):
        here + there
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="indices should be on the CPU"):
        here[torch.tensor([0], device="cuda")]
    assert (there * torch.tensor(2.0)).cpu().tolist() == [2.0] * 3  # a number is read, as by a kernel


@on_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_what_is_waited_for_is_counted_or_refused() -> None:
    there = torch.arange(3, device="cuda")
    asks = (
        there.sum().item,
        there.cpu,
        there.nonzero,
        lambda: there[there > 1],
        there.tolist,
        lambda: bool(there.any()),
    )
    LEDGER.clear()
    for ask in asks:
        ask()
    assert sum(LEDGER.reads.values()) == len(asks)
    assert {site.split(":")[0] for _, site in LEDGER.reads} == {"test_pretend_device.py"}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ask in asks:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                ask()
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            torch.ones(3).to("cuda")
        torch.ones(3).to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
def test_a_graph_runs_when_it_is_replayed_on_what_is_there_then() -> None:
    given, kept = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = given * 2
        kept += doubled
    assert doubled.isnan().all()
    assert kept.tolist() == [0.0, 0.0]
    given.fill_(5.0)
    graph.replay()
    graph.replay()
    assert (doubled.tolist(), kept.tolist()) == ([10.0, 10.0], [20.0, 20.0])


@on_device
@pytest.mark.parametrize(
    "forbidden",
    [lambda tensor: tensor.sum().item(), lambda tensor: tensor + torch.ones(2).to("cuda", non_blocking=True)],
)
def test_no_capture_contains_a_wait_or_a_copy_from_unpinned_memory(forbidden) -> None:
    given = torch.ones(2, device="cuda")
    LEDGER.clear()
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        forbidden(given)
    assert len(LEDGER.failed_captures) == 1
