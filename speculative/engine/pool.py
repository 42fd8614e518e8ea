"""Caches and their recordings that outlive a decode call: the next call of the same shape finds them and captures nothing.

Shapes: R rows, C capacity (positions a row can hold).
"""

import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.cache import RaggedCache
from speculative.engine.runners import RECORDED, GraphRunner, Runner, make_runner

MOST_IDLE = 4  # of one model: shapes that come in turn, as the loads of a verdict do, each find theirs again


class Memory:
    """What a model keeps from call to call: its cache, and what was recorded on exactly this cache.

    It knows no model, so that a model which nobody uses any more goes, and its memory with it.
    """

    def __init__(self, cache: RaggedCache, runner: str, device: torch.device, made_for: Any = None) -> None:
        """`made_for`: what its recordings take for granted of the model."""
        self.cache, self.kind, self.made_for = cache, runner, made_for
        self.runner = make_runner(runner)
        # Beside the cache: captured calls read it at this address.
        self.positions_C = torch.arange(cache.place.capacity, device=device)
        self._blocks: weakref.WeakKeyDictionary[Memory, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._lower: dict[int, Memory] = {}

    def another_runner(self) -> Runner:
        """Of the same kind, with recordings of its own: a memory has one user, so all of it record into the same pool."""
        runner = make_runner(self.kind)
        if isinstance(runner, GraphRunner) and isinstance(self.runner, GraphRunner):
            runner.pool = self.runner.pool
        return runner

    def of_first_layers(self, layers: int) -> "Memory":
        """For a model that is this one's up to so many layers: the same cache, recordings of its own that stay with these."""
        if layers not in self._lower:
            self._lower[layers] = Memory(self.cache, self.kind, self.positions_C.device)
        return self._lower[layers]

    def blocks_with(self, draft: "Memory | None") -> dict[Any, Any]:
        """The whole blocks of this target memory that draft into another one, by what they do; None: that draft nothing."""
        return self._blocks.setdefault(draft or self, {})


_idle: weakref.WeakKeyDictionary[PreTrainedModel, list[Memory]] = weakref.WeakKeyDictionary()


def take(model: PreTrainedModel, rows: int, capacity: int, runner: str) -> Memory:
    """Memory of R rows and at least C positions for this caller alone, an idle one where it fits; bring it back by `give_back`."""
    kept = _fitting(model, rows, capacity, runner) if runner in RECORDED else None
    if kept is not None:
        _idle[model].remove(kept)
        return kept
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    made_for = _fingerprint(model) if runner in RECORDED else None
    return Memory(RaggedCache(layers, rows, capacity), runner, model.device, made_for)


def give_back(model: PreTrainedModel, memory: Memory) -> None:
    """The caller is done with it. Only what recordings were made for is worth keeping, the latest few of a model."""
    if memory.kind not in RECORDED:
        return
    # Of one shape there may be two: plain and speculative decoding that take turns hold theirs at once.
    _idle[model] = [*_idle.get(model, []), memory][-MOST_IDLE:]


def holds(model: PreTrainedModel, rows: int, capacity: int) -> bool:
    """Whether `take` would find an idle memory."""
    return any(_fitting(model, rows, capacity, runner) is not None for runner in RECORDED)


def release(model: PreTrainedModel | None = None) -> None:
    """Let go of everything idle, of one model or of all."""
    if model is None:
        _idle.clear()
    else:
        _idle.pop(model, None)


def idle_memories() -> list[Memory]:
    """Everything that is kept and not in use."""
    return [memory for memories in _idle.values() for memory in memories]


def _fitting(model: PreTrainedModel, rows: int, capacity: int, runner: str) -> Memory | None:
    """The smallest idle memory that is large enough; those of weights that have moved since are dropped."""
    if model not in _idle:
        return None
    made_for = _fingerprint(model)
    _idle[model] = [memory for memory in _idle[model] if memory.made_for == made_for]
    fitting = [
        memory
        for memory in _idle[model]
        if (memory.kind, memory.cache.rows) == (runner, rows) and memory.cache.place.capacity >= capacity
    ]
    return min(fitting, key=lambda memory: memory.cache.place.capacity, default=None)


def _fingerprint(model: nn.Module) -> Any:
    """What a recording took for granted: where the weights are, which adapters were on, how numbers were cast, who attends.

    Buffers that were made in inference mode are written nowhere else.

    Weights that change where they are, as in training, are read anew by every replay.
    """
    places = [(tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())]
    adapters = [
        (
            str(getattr(module, "active_adapters", "")),
            module.disable_adapters,
            str(getattr(module, "merged_adapters", "")),
        )
        for module in model.modules()
        if hasattr(module, "disable_adapters")
    ]
    modes = (
        getattr(getattr(model, "config", None), "_attn_implementation", None),
        torch.is_autocast_enabled("cuda"),
        torch.get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),
    )
    return hash((tuple(places), str(adapters), modes))
