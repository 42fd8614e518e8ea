"""How large a simulation is: a part of it in `make test`, all of it in `make prove`. Tolerances follow from the size given."""

import os
from typing import TypeVar

Size = TypeVar("Size")


def trials(push: Size, whole: Size) -> Size:
    """``push`` on every push, ``whole`` in `make prove`; mark the test `simulation`."""
    return whole if os.environ.get("UNDERSTUDY_PROVE") == "1" else push
