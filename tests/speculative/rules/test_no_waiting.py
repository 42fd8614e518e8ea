"""No rule asks the device for a value on its way: none is waited for, and each can be captured."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from speculative.rules.tree import TokenTree, verify_tree, verify_tree_greedy
from speculative.rules.verify import verify, verify_block, verify_greedy

TREE = TokenTree.from_branching((3, 2, 1))


def inputs(device):
    """Target rows, draft rows, ids, coins, residual uniforms and lengths of chains of five; ids and coins of a tree."""
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.rand(4, 16, 32, generator=generator).softmax(-1) for _ in range(2))
    ids, nodes = (torch.randint(32, (4, count), generator=generator) for count in (5, TREE.size))
    coins, uniforms, of_tree = (torch.rand(4, *shape, generator=generator).double() for shape in ((5,), (6,), (3, 3)))
    drafted = torch.randint(6, (4,), generator=generator)
    TREE.on(torch.device(device))
    return [tensor.to(device) for tensor in (target, draft, ids, coins, uniforms, drafted, nodes, of_tree)]


def every_rule(target, draft, ids, coins, uniforms, drafted, nodes, coins_of_tree):
    rest, chain = (coins, uniforms, drafted), target[:, :6]
    chains = [rule(chain, ids, rows, *rest) for rule in (verify, verify_block) for rows in (draft[:, :5], None)]
    trees = [verify_tree(TREE, target, nodes, rows, coins_of_tree, uniforms[:, :4]) for rows in (draft, None)]
    greedy = [verify_greedy(chain.argmax(-1), ids, drafted), verify_tree_greedy(TREE, target.argmax(-1), nodes)]
    return [*chains, *trees, *greedy]


def test_nothing_asks_for_a_value_on_the_way():
    """Under fake tensors an operation that must know a value (item, nonzero, a branch) raises: no synchronisation."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        every_rule(*map(mode.from_tensor, inputs("cpu")))


@pytest.mark.device
@pytest.mark.gpu
def test_the_device_gives_the_same_and_is_never_waited_for():
    expected, here = every_rule(*inputs("cpu")), inputs("cuda")
    every_rule(*here)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = every_rule(*here)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outcome, wanted in zip(outcomes, expected, strict=True):
        for got, value in zip(outcome, wanted, strict=True):
            torch.testing.assert_close(got.cpu(), value)
