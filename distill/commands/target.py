"""Open the target of a command, on a device and in a dtype."""

import torch

from distill.config.target import TargetConfig
from distill.models.target import Target
from speculative.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def place_of(device: str) -> torch.device:
    """The device by name; by default CUDA if there is a GPU. Raises UserError for a missing device."""
    has_cuda = torch.cuda.is_available()
    try:
        place = torch.device(device or ("cuda" if has_cuda else "cpu"))
    except RuntimeError:
        raise UserError(f"--device {device}: choose cpu, cuda or cuda:N") from None
    if place.type == "cuda" and (place.index or 0) >= (torch.cuda.device_count() if has_cuda else 0):
        raise UserError(
            f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices; try --device cpu"
        )
    return place


def open_target(path: str, dtype: str, device: str) -> Target:
    """The target by directory, hub id or `embedded`.

    Raises:
        UserError: a missing target or device, an unknown dtype.
    """
    place = place_of(device)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")
    return Target(TargetConfig(path=path, dtype=dtype), place, what="target")  # type: ignore[arg-type]
