"""The pretend device refuses what a GPU refuses; else nothing that runs on it would prove anything."""

from types import SimpleNamespace

import pytest
import torch
from pretend_cuda import library
from pretend_cuda.ledger import LEDGER

on_device = pytest.mark.device


@pytest.mark.parametrize(
    ("arguments", "asked"), [(["-m", "device"], True), (["-m", "not ranks and not device"], False), (["device"], False)]
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
    LEDGER.clear()
    given.fill_(5.0)
    graph.replay()
    graph.replay()
    assert (graph.kernels, LEDGER.kernels, LEDGER.replays) == (2, 1, 2)
    assert (doubled.tolist(), kept.tolist()) == ([10.0, 10.0], [20.0, 20.0])


@on_device
@pytest.mark.parametrize(
    "forbidden",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor + torch.ones(2).to("cuda", non_blocking=True),
        lambda tensor: torch.where(tensor > 0, tensor, torch.tensor(0.0)),
    ],
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


@on_device
def test_a_download_arrives_with_an_event_after_it() -> None:
    there = torch.arange(3, device="cuda")
    early, late = torch.cuda.Event(), torch.cuda.Event()
    LEDGER.clear()
    early.record()
    here = there.to("cpu", non_blocking=True)
    late.record()
    there += 1  # behind the copy
    moved = (there / 2).to("cpu", non_blocking=True)
    assert (sum(LEDGER.downloads.values()), sum(LEDGER.reads.values())) == (2, 0)
    early.synchronize()
    assert here.tolist() == [torch.iinfo(torch.int64).max] * 3
    assert not late.query()
    assert here.max() > 2
    assert late.query()
    assert late.query()
    assert here.tolist() == [0, 1, 2]
    assert moved.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert moved.tolist() == [0.5, 1.0, 1.5]
    assert sum(LEDGER.synchronized.values()) == 2


@on_device
def test_seconds_between_events_are_there_when_both_are_done() -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        events[0].elapsed_time(events[1])
    events[1].synchronize()
    assert events[0].elapsed_time(events[1]) >= 0
