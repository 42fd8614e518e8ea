"""Every rule from logits to tokens fits into a CUDA graph, gives the CPU's tokens on whatever is there at a replay, and asks little."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend_cuda.ledger import LEDGER

from speculative.rules.sampling import (
    GREEDY,
    SamplingSettings,
    logits_to_probs,
    most_likely_and_peak,
    sample,
    sample_at,
)
from speculative.rules.tree import TokenTree, verify_tree, verify_tree_greedy
from speculative.rules.verify import verify, verify_block, verify_greedy

pytestmark = pytest.mark.device

TREE = TokenTree.from_branching((3, 2, 1))
GAMMA, V = 3, 300  # Three pieces of the vocabulary, the last one short.
SETTINGS = {
    "greedy": GREEDY,
    "plain": SamplingSettings(1.0),
    "top-k": SamplingSettings(0.7, top_k=20),
    "top-p": SamplingSettings(0.7, top_p=0.9),
    "min-p": SamplingSettings(0.7, min_p=0.05),
    "all": SamplingSettings(0.7, top_k=50, top_p=0.9, min_p=0.02),
}
Given = dict[str, torch.Tensor]


def given(batch: int, seed: int) -> Given:
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(batch, GAMMA + 1, V, generator=generator)
    draft = target[:, :GAMMA] + torch.randn(batch, GAMMA, V, generator=generator)
    return {
        "target": target,
        "draft": draft,
        "uniforms": torch.rand(batch, GAMMA + 1, 3, generator=generator, dtype=torch.float64),
        "counts": torch.randint(1, GAMMA + 1, (batch,), generator=generator),
        "nodes": torch.randint(V, (batch, TREE.size), generator=generator),
        "rows": torch.randn(batch, TREE.size + 1, V, generator=generator),
        "coins": torch.rand(batch, TREE.depth, TREE.max_children, generator=generator, dtype=torch.float64),
    }


def drawn(given: Given, settings: SamplingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    probs = logits_to_probs(given["draft"], settings)
    return sample(probs, given["uniforms"][:, :GAMMA, 0]), probs


def block(rule: Any, settings: SamplingSettings, draws: bool, counted: bool) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        ids, probs = drawn(given, settings if draws else GREEDY)
        coins, uniforms = given["uniforms"][:, :GAMMA, 1], given["uniforms"][..., 2]
        target = logits_to_probs(given["target"], settings)
        return rule(target, ids, probs if draws else None, coins, uniforms, given["counts"] if counted else None)

    return run


def greedy(counted: bool) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        ids, _ = most_likely_and_peak(given["target"])
        return verify_greedy(ids, most_likely_and_peak(given["draft"])[0], given["counts"] if counted else None)

    return run


def tree(draws: bool) -> Callable[[Given], Any]:
    def run(given: Given) -> Any:
        target = (3 * given["rows"]).softmax(-1)
        draft = given["rows"].softmax(-1) if draws else None
        return verify_tree(TREE, target, given["nodes"], draft, given["coins"], given["uniforms"][..., 2])

    return run


CASES: dict[str, Callable[[Given], Any]] = {
    f"{name}, {settings}": block(rule, SETTINGS[settings], draws, counted)
    for settings in SETTINGS
    for name, rule, draws, counted in (
        ("verify", verify, True, True),
        ("verify fixed", verify, False, False),
        ("block", verify_block, True, False),
        ("block fixed", verify_block, False, True),
    )
}
CASES |= {"greedy": greedy(False), "greedy, counted": greedy(True)}
CASES |= {"tree, drawn": tree(True), "tree, fixed": tree(False)}
CASES |= {"tree, greedy": lambda given: verify_tree_greedy(TREE, given["rows"].argmax(-1), given["nodes"])}
CASES |= {"peaks": lambda given: most_likely_and_peak(given["target"].bfloat16())}
CASES |= {"points": lambda given: sample_at(given["target"].softmax(-1), given["uniforms"])}
CASES |= {f"probs, {name}": lambda given, s=s: (logits_to_probs(given["target"], s),) for name, s in SETTINGS.items()}


def tensors(outcome: Any) -> tuple[torch.Tensor, ...]:
    return (outcome,) if isinstance(outcome, torch.Tensor) else tuple(outcome)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_captured_and_replayed_on_other_numbers(case: str, batch: int) -> None:
    here = {name: tensor.to("cuda") for name, tensor in given(batch, 0).items()}
    TREE.on(here["nodes"].device)  # copied there once
    graph = torch.cuda.CUDAGraph()
    LEDGER.clear()
    with torch.cuda.graph(graph):
        found = tensors(CASES[case](here))
    assert not LEDGER.failed_captures
    for seed in (1, 2):
        for name, tensor in given(batch, seed).items():
            here[name].copy_(tensor)
        graph.replay()
        for got, expected in zip(found, tensors(CASES[case](given(batch, seed))), strict=True):
            torch.testing.assert_close(got.cpu(), expected)  # Ids exactly; float32 sums of 300 in another order.


def kernels(run: Callable[[], Any]) -> int:
    LEDGER.clear()
    run()
    return LEDGER.kernels


def test_what_a_draw_and_a_nucleus_ask_of_the_device() -> None:
    """As many kernels for many rows as for two. (A sort of several rows, here one call, is a loop over them on a GPU.)"""
    here = {name: tensor.to("cuda") for name, tensor in given(16, 0).items()}
    probs, uniforms = here["target"].softmax(-1), here["uniforms"][..., 0]
    whole = probs[..., :256].contiguous()  # Nothing to pad.
    assert kernels(lambda: sample(whole, uniforms)) <= 20
    assert kernels(lambda: sample(probs, uniforms)) <= 22
    few, many = (
        kernels(lambda rows=rows: logits_to_probs(here["target"][:rows], SETTINGS["top-p"])) for rows in (1, 16)
    )
    assert few == many <= 46
