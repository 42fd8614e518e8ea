"""`understudy probe --server 80GB,64,8k`: whether the pair fits, and how many requests the draft costs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from speculative.engine.memory import USABLE_SHARE, Capacity, Footprint, capacity, footprint
from speculative.errors import UserError

BYTES_OF = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
GB = 1e9
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)\s*")
_TOKENS = re.compile(r"\s*(\d+)\s*([kK]?)\s*")


@dataclass(frozen=True)
class Device:
    """The planned server: bytes of memory, concurrent requests, and tokens of prompt and response per request."""

    memory: int
    concurrency: int
    context: int


def device_of(server: str) -> Device | None:
    """`80GB,64,8k`; None if it is empty. Raises UserError for a value that cannot be read."""
    if not server:
        return None
    parts = [part.strip() for part in server.split(",")]
    if len(parts) != 3 or not parts[1].isdigit() or int(parts[1]) < 1:
        raise UserError(f"--server {server}: give device memory, concurrent requests and tokens, e.g. 80GB,64,8k")
    return Device(parse_bytes(parts[0]), int(parts[1]), parse_tokens(parts[2]))


def parse_bytes(text: str) -> int:
    """80GB is 80e9, 80GiB is 80 * 2^30. Raises UserError for anything else."""
    found = _SIZE.fullmatch(text)
    unit = BYTES_OF.get(found.group(2).upper()) if found else None
    size = float(found.group(1)) * unit if found and unit else 0.0
    if not (size >= 1 and math.isfinite(size)):
        raise UserError(f"--server {text}: give a size such as 80GB, 80GiB or 512MiB")
    return int(size)


def parse_tokens(text: str) -> int:
    """8k is 8192 tokens; a plain number is a number of tokens. Raises UserError for anything else."""
    found = _TOKENS.fullmatch(text)
    tokens = int(found.group(1)) * (1024 if found.group(2) else 1) if found else 0
    if tokens < 1:
        raise UserError(f"--server {text}: give a number of tokens such as 8192 or 8k")
    return tokens


@dataclass(frozen=True)
class DraftMemory:
    """A draft's bytes, and the requests that fit with it."""

    name: str
    footprint: Footprint
    capacity: Capacity


@dataclass(frozen=True)
class Memory:
    """Bytes of the target and of each draft on a device, and the requests that fit. dtype: the one that both are served in."""

    device: Device
    dtype: str
    target: Footprint
    drafts: list[DraftMemory]

    def lines(self) -> list[str]:
        lines = [
            f"memory at {self.dtype}, {self.device.context:,} tokens per request, {USABLE_SHARE:.0%} of {self.device.memory / GB:.3g} GB "
            f"usable: the target's weights take {_size(self.target.weights)}, each request's cache {_size(self.target.cache_per_request)}"
        ]
        for draft in self.drafts:
            capacity_of = draft.capacity
            needs = f"do not fit (they need {_size(capacity_of.needed_bytes)} of {_size(capacity_of.usable_bytes)})"
            lines.append(
                f"memory with {draft.name} (weights {_size(draft.footprint.weights)}, "
                f"cache {_size(draft.footprint.cache_per_request)} per request): "
                f"{self.device.concurrency:,} requests {'fit' if capacity_of.fits else needs}. "
                f"{capacity_of.requests_alone:,} requests fit without the draft and "
                f"{capacity_of.requests_with_draft:,} with it, so the draft costs {capacity_of.requests_lost:,} requests."
            )
        return lines


def memory_of(
    device: Device, dtype: torch.dtype, target: PreTrainedModel, drafts: Sequence[tuple[str, PreTrainedModel]]
) -> Memory:
    """Memory of the pair. Raises UserError for a model whose layers cache something other than keys and values."""
    own = footprint(target, dtype, device.context)
    each = [(name, footprint(draft, dtype, device.context)) for name, draft in drafts]
    rows = [DraftMemory(name, of, capacity(device.memory, device.concurrency, own, of)) for name, of in each]
    return Memory(device, str(dtype).removeprefix("torch."), own, rows)


def _size(count: int) -> str:
    return f"{count / GB:.3g} GB" if count >= GB else f"{count / 1e6:.3g} MB"
