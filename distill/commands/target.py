"""Open the target of a command, on a device and in a dtype."""

import re
from collections.abc import Sequence

import torch

from distill.commands.output import check_known
from distill.config.target import TargetConfig
from distill.models.target import Target
from speculative.decoder.responses import Prompt
from speculative.errors import UserError


def open_target(path: str, dtype: str, device: str) -> Target:
    """The target by directory, hub id or `embedded`; by default on CUDA if there is a GPU.

    Raises UserError: a missing target or device, an unknown dtype.
    """
    has_cuda = torch.cuda.is_available()
    if not re.fullmatch(r"(cpu|cuda(:\d+)?)?", device):
        raise UserError(f"--device {device}: choose cpu, cuda or cuda:N")
    place = torch.device(device or ("cuda" if has_cuda else "cpu"))
    if place.type == "cuda" and (place.index or 0) >= (torch.cuda.device_count() if has_cuda else 0):
        raise UserError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices; try --device cpu")
    check_known("--dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    return Target(TargetConfig(path=path, dtype=dtype), place, what="target")  # type: ignore[arg-type]


def check_room(prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    """Raise UserError if a prompt and its response do not fit the target's context."""
    for key, ids in prompts:
        if context is not None and len(ids) + max_tokens > context:
            raise UserError(
                f"prompt {key} has {len(ids)} tokens; with --max-tokens {max_tokens} that exceeds the target's context of {context}: "
                "shorten the prompt or lower --max-tokens"
            )
