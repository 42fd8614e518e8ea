"""Compiled layers give the logits of plain ones, are compiled once a shape, and leave no trace on the model."""

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

from speculative.drafters.early_exit import first_layers
from speculative.engine import calls, memory
from speculative.engine.cached_model import CachedModel
from speculative.engine.runners import COMPILED_GRAPH, Runner, make_runner, resolve_runner


class StaticRunner(Runner):
    """Calls as they are captured, without the capture."""

    static = True


@pytest.fixture
def compilations(monkeypatch):
    """Dynamo as it is, without the minutes of a real backend: the graphs that it would be given."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(calls._call, dynamic=False, backend=backend)
    monkeypatch.setattr(calls, "_compiled", lambda: compiled)
    monkeypatch.setattr(
        memory, "make_runner", lambda kind: StaticRunner() if kind == COMPILED_GRAPH else make_runner(kind)
    )
    yield graphs
    torch._dynamo.reset()


def logits(model, runner):
    """Of ragged rows: two calls of four tokens and two of one."""
    cached = CachedModel(model, "model", 2, 64, runner)
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, 30))
    with torch.no_grad():
        cached.prefill(tokens, [0, 1], np.array([9, 6]))
        found = []
        for start, count in ((0, 4), (2, 4), (3, 1), (4, 1)):
            ids = torch.from_numpy(tokens[:, 10 : 10 + count]).to(model.device)
            found.append(cached.feed(ids, np.array([9, 6]) + start, count))
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compiled_layers_give_the_logits_of_plain_ones(kind, compilations):
    model = tiny_model(kind, num_hidden_layers=3)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for plain, compiled in zip(logits(model, "eager"), logits(model, COMPILED_GRAPH), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)  # a prefix of another length: other sums
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert len(compilations) == 2  # one for four tokens, one for one; not one for each of three layers

    # The next memory, and another model of the same shapes, find what was compiled.
    logits(tiny_model(kind, seed=1, num_hidden_layers=3), COMPILED_GRAPH)
    assert len(compilations) == 2


def test_layers_that_somebody_else_compiled_stay_so():
    model = tiny_model()
    kept = model.model.layers[0]._call_impl
    model.model.layers[0]._compiled_call_impl = kept
    with calls.compiled_layers(first_layers(model, 1)):
        assert model.model.layers[0]._compiled_call_impl is not kept
    assert model.model.layers[0]._compiled_call_impl is kept
    assert "_compiled_call_impl" not in vars(model.model.layers[1])


def test_on_cuda_compiled_calls_are_captured():
    assert resolve_runner("compile", torch.device("cuda")) == COMPILED_GRAPH
    assert resolve_runner("compile", torch.device("cpu")) == "compile"


@pytest.mark.gpu
def test_compiled_layers_in_a_graph_give_the_logits_of_plain_ones_on_cuda():
    model = tiny_model().cuda()
    for plain, compiled in zip(logits(model, "eager"), logits(model, COMPILED_GRAPH), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-3)  # fused kernels round differently
