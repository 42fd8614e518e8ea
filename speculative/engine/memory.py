"""Memory checks before allocation, how many requests an engine holds, and caches that outlive a decode call with their recordings: the
next call of the same shape reuses them and captures nothing.

Shapes: R rows, C capacity (positions a row can hold), Q query tokens of one call, V vocabulary.
"""

import resource
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.cache import RaggedCache, whole_steps
from speculative.engine.fused.model import Scratch
from speculative.engine.library_state import attention_name
from speculative.engine.models import devices_of, in_eval_mode, is_recurrent, vocab_rows
from speculative.engine.recurrent_model import recurrent_bytes
from speculative.engine.runners import RECORDED, GraphRunner, Runner, make_runner
from speculative.engine.survey import survey
from speculative.engine.windows import attention_windows
from speculative.errors import TooLittleMemory, UserError

MOST_IDLE = 4  # per model: calls that alternate between a few shapes, as the loads of a verdict do, reuse their memory


class Memory:
    """A model's cache and the recordings made on it, between calls. It holds no reference to the model, so that an unused model can be
    freed with it.
    """

    def __init__(self, cache: RaggedCache, runner: str, device: torch.device, made_for: Any = None) -> None:
        """`made_for`: fingerprint of the model state that its recordings depend on."""
        self.cache, self.kind, self.made_for = cache, runner, made_for
        self.runner = make_runner(runner)
        # Kept with the cache: captured calls read it at this address.
        self.positions_C = torch.arange(cache.place.capacity, device=device)
        self.scratch: Scratch | None = None  # of fused kernels
        self._blocks: weakref.WeakKeyDictionary[Memory, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._lower: dict[int, Memory] = {}

    def another_runner(self) -> Runner:
        """A runner of the same kind with its own recordings. A memory has one user, so all its runners share one pool."""
        runner = make_runner(self.kind)
        if isinstance(runner, GraphRunner) and isinstance(self.runner, GraphRunner):
            runner.pool = self.runner.pool
        return runner

    def of_first_layers(self, layers: int) -> "Memory":
        """Memory for a model of the first `layers` layers: the same cache, with its own recordings, which are kept here."""
        if layers not in self._lower:
            self._lower[layers] = Memory(self.cache, self.kind, self.positions_C.device)
        return self._lower[layers]

    def blocks_with(self, draft: "Memory | None") -> dict[Any, Any]:
        """Recorded blocks of this target memory that use the given draft memory, by kind. None: blocks without a draft."""
        return self._blocks.setdefault(draft or self, {})


_idle: weakref.WeakKeyDictionary[PreTrainedModel, list[Memory]] = weakref.WeakKeyDictionary()


def take(model: PreTrainedModel, rows: int, capacity: int, runner: str) -> Memory:
    """Memory of R rows and at least C positions for one caller; reuses an idle one if it fits. Return it with `give_back`."""
    kept = _fitting(model, rows, capacity, (runner,)) if runner in RECORDED else None
    if kept is not None:
        _idle[model].remove(kept)
        return kept
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    made_for = _made_for(model) if runner in RECORDED else None
    return Memory(RaggedCache(layers, rows, capacity), runner, model.device, made_for)


def give_back(model: PreTrainedModel, memory: Memory) -> None:
    """Return a memory. Only memories with recordings are kept, the latest few per model."""
    if memory.kind not in RECORDED:
        return
    # Two may have the same shape: plain and speculative decoding that alternate hold one each.
    _idle[model] = [*_idle.get(model, []), memory][-MOST_IDLE:]


def holds(model: PreTrainedModel, rows: int, capacity: int) -> bool:
    """Whether `take` would find an idle memory."""
    return _fitting(model, rows, capacity, RECORDED) is not None


def release(model: PreTrainedModel | None = None) -> None:
    """Free all idle memories of one model, or of all models."""
    if model is None:
        _idle.clear()
    else:
        _idle.pop(model, None)


def idle_memories() -> list[Memory]:
    """All memories that are kept but not in use."""
    return [memory for memories in _idle.values() for memory in memories]


def _fitting(model: PreTrainedModel, rows: int, capacity: int, runners: Sequence[str]) -> Memory | None:
    """The smallest idle memory of these runners that is large enough. Memories recorded for weights that have moved are dropped."""
    if not _idle.get(model):
        return None
    made_for = _made_for(model)
    _idle[model] = [memory for memory in _idle[model] if memory.made_for == made_for]
    fitting = [
        memory
        for memory in _idle[model]
        if memory.kind in runners and memory.cache.rows == rows and memory.cache.place.capacity >= capacity
    ]
    return min(fitting, key=lambda memory: memory.cache.place.capacity, default=None)


def _made_for(model: nn.Module) -> Any:
    """The state a recording depends on: the model's, and autocast, attention function, and inference mode, whose buffers can be written
    only in it.
    """
    attention = attention_name(getattr(model, "config", None))
    autocast, precision = torch.is_autocast_enabled("cuda"), torch.get_float32_matmul_precision()
    return survey(model).state, attention, autocast, precision, torch.is_inference_mode_enabled()


GIB = 1024**3
# Of every logit of the verify call, at once: the model's own, the float32 one at the temperature, and what finds the nucleus, the
# hungriest step. To sort: logit, id, probability, sum. To search: probability, weight, key, bins twice, and a place's sums of bins.
LOGIT_BYTES = 4 + 4 + (4 + 8 + 4 + 4)
SEARCHED_LOGIT_BYTES = 4 + 4 + (4 + 8 + 8 + 8 + 8)
SEARCHED_PLACE_BYTES = 5 * 2**18  # of 4,096 bins in 32 lanes, their bounds and running sums


class CacheEntry(NamedTuple):
    """Cache of one position of a row: numbers per layer, and their dtype."""

    numbers: tuple[int, ...]
    dtype: torch.dtype


_known_entries: weakref.WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, CacheEntry]] = weakref.WeakKeyDictionary()


def cache_entry(model: PreTrainedModel) -> CacheEntry:
    """Measured by one call on one token, so it holds for every architecture, also if layers share keys."""
    entries = _known_entries.setdefault(model, {})  # By dtype: a model may be cast in place.
    if model.dtype not in entries:
        cache = RaggedCache(model.config.get_text_config(decoder=True).num_hidden_layers, rows=1, capacity=1)
        zero = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        cache.begin(zero, prefix=1, shared_start=0)
        with torch.no_grad(), in_eval_mode(model):
            model(input_ids=zero, position_ids=zero, past_key_values=cache, use_cache=True)
        dtype = next((states.dtype for states in cache.buffers), None)
        if dtype is None:
            raise UserError(f"{type(model).__name__} wrote nothing to its key/value cache: use a model with one")
        entries[model.dtype] = CacheEntry(tuple(sum(map(torch.numel, own)) for own in cache.by_layer), dtype)
    return entries[model.dtype]


def cache_bytes(model: PreTrainedModel, rows: int, capacity: int) -> int:
    """Bytes of a RaggedCache for this model, or of its recurrent states."""
    if is_recurrent(model):
        return recurrent_bytes(model, rows, capacity)
    entry = cache_entry(model)
    return rows * capacity * sum(entry.numbers) * entry.dtype.itemsize


def block_bytes(model: PreTrainedModel, rows: int, query_length: int) -> int:
    """Bytes of one verify call's logits and probabilities, an upper bound."""
    logit, place = (LOGIT_BYTES, 0) if model.device.type == "cpu" else (SEARCHED_LOGIT_BYTES, SEARCHED_PLACE_BYTES)
    return rows * query_length * (vocab_rows(model) * logit + place)


def free_bytes(device: torch.device) -> int | None:
    """Free memory on the device; None if unknown (then nothing is refused)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    limits = [psutil.virtual_memory().available]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        # Cached files count as used but are freed on demand.
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        limits.append(int(limit.read_text()) - int(used.read_text()) + int(statistics.get("inactive_file", 0)))
    return min(limits)


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of tensors on a CUDA device, else the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # bytes there, KiB on Linux


def check_memory(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    rows: int,
    capacity: int,
    query_length: int,
    shared_cache: bool = False,
) -> None:
    """Refuse before anything is allocated. Raises TooLittleMemory: "needs X GB, Y free: lower batch or max_tokens". `shared_cache`: the
    draft writes into the target's.
    """
    capacity = capacity if target.device.type == "cpu" else whole_steps(capacity)
    models = [target] if draft is None else [target, draft]

    def asked() -> tuple[int, int | None]:
        """Bytes still to be allocated (without memory that an earlier call left), and free bytes."""
        owners = models[:1] if shared_cache else models
        caches = [cache_bytes(model, rows, capacity) for model in owners if not holds(model, rows, capacity)]
        known = [free_bytes(device) for device in devices_of(target)]
        free = None if None in known else sum(filter(None, known))
        return sum(caches) + sum(block_bytes(model, rows, query_length) for model in models), free

    needed, free = asked()
    if free is not None and needed > free and idle_memories():
        release()
        needed, free = asked()
    if free is not None and needed > free:
        raise TooLittleMemory(
            f"decoding {rows} rows of {capacity} positions needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB free on "
            f"{target.device}: lower the batch size or max_tokens"
        )


# Share of a device's memory; the rest is for the engine's own buffers, as in servers by default.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Footprint:
    """Bytes of a served model: its weights, and the cache of one request at the asked context."""

    weights: int
    cache_per_request: int


@dataclass(frozen=True)
class Capacity:
    """Requests that fit in memory next to the weights, at least 0. requests_lost: requests that the draft's weights and cache cost."""

    fits: bool
    requests_alone: int
    requests_with_draft: int
    requests_lost: int
    needed_bytes: int
    usable_bytes: int


def footprint(model: PreTrainedModel, dtype: torch.dtype, context: int) -> Footprint:
    """Footprint of a model served in this dtype; weights that are not floating-point numbers (quantised) keep their own size. Raises
    UserError as `cache_bytes_per_request`.
    """
    sizes = (
        weight.numel() * (dtype.itemsize if weight.is_floating_point() and weight.itemsize > 1 else weight.itemsize)
        for weight in model.parameters()
    )
    return Footprint(sum(sizes), cache_bytes_per_request(model, dtype, context))


def cache_bytes_per_request(model: PreTrainedModel, dtype: torch.dtype, context: int) -> int:
    """Keys and values of `context` tokens in every layer (`memory.cache_entry`); a sliding-window layer counts at most its window, and a
    compressed cache (multi-head latent attention) one latent and one rotary key per token. Raises UserError: a layer keeps a state other
    than keys and values.
    """
    if is_recurrent(model):
        raise UserError(f"{type(model).__name__} has no key/value cache: the memory of its states cannot be estimated")
    text, numbers = model.config.get_text_config(decoder=True), cache_entry(model).numbers
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        numbers = (int(latent) + int(getattr(text, "qk_rope_head_dim", 0)),) * len(numbers)
    windows = attention_windows(model) or [None] * len(numbers)
    kept = (own * min(context, window or context) for own, window in zip(numbers, windows, strict=True))
    return sum(kept) * dtype.itemsize


def capacity(device_bytes: int, concurrency: int, target: Footprint, draft: Footprint) -> Capacity:
    """Whether `concurrency` requests fit with both models, and how many fit at most with and without the draft."""
    usable = int(device_bytes * USABLE_SHARE)
    weights, per_request = target.weights + draft.weights, target.cache_per_request + draft.cache_per_request
    alone = max(0, (usable - target.weights) // target.cache_per_request)
    together = max(0, (usable - weights) // per_request)
    needed = weights + concurrency * per_request
    return Capacity(needed <= usable, alone, together, alone - together, needed, usable)
