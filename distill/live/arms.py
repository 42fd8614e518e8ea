"""Arms: engines with their shares and draft versions, and the choice of an arm for each conversation.

arms.json in the log directory holds them: the gateway writes it from its flags and watches it, and a rollout edits it.
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from data.files import write_bytes, writing
from data.responses.endpoint_keys import is_address, root_of
from distill.live.traffic.record import Word, first_fault
from speculative.errors import UserError

ARMS = "arms.json"
BY_FLAGS = "flags"
_TOLERANCE = 1e-6


def _root(url: str) -> str:
    if not is_address(url):
        raise ValueError("give an address such as http://127.0.0.1:8000")
    return root_of(url)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arm:
    """One engine. url: without /v1. share: of the conversations. drafts: False for the engine without a draft, used under load."""

    name: Word
    url: Annotated[str, AfterValidator(_root)]
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
    draft_version: Word = "unknown"
    target_version: Word = "unknown"
    drafts: bool = True


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arms:
    """All engines. by: origin of the arms, `flags` or `rollout NAME vN`. Raises ValueError for no draft, shares that do not add up to 1, or
    a duplicate name (pydantic's ValidationError).
    """

    by: str
    arms: tuple[Arm, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError("two arms have the same name; give each its own")
        total = sum(arm.share for arm in self.arms if arm.drafts)
        if abs(total - 1) > _TOLERANCE:
            raise ValueError(f"the shares of the arms with a draft add up to {total:g}; they must add up to 1")
        return self

    def choose(self, conversation: bytes, key: bytes, shed: bool = False) -> Arm:
        """The arm of a conversation; with ``shed`` the arm without a draft, if there is one.

        Weighted rendezvous hashing: a stable hash gives each arm an exponential time with rate `share`, and the smallest wins. So arms get
        their shares, and an arm whose share grows takes conversations from others and loses none. ``key``: the log's secret: clients
        cannot predict their arm.
        """
        if shed and (plain := [arm for arm in self.arms if not arm.drafts]):
            return plain[0]
        drafting = [arm for arm in self.arms if arm.drafts and arm.share]
        return min(drafting, key=lambda arm: (_exponential(arm.name, conversation, key) / arm.share, arm.name))


def _exponential(name: str, conversation: bytes, key: bytes) -> float:
    digest = hashlib.blake2b(name.encode() + b"\0" + conversation, digest_size=8, key=key).digest()
    return -math.log((int.from_bytes(digest, "big") + 0.5) / 2**64)


def read_arms(path: Path) -> Arms:
    """The arms of a file. Raises UserError: missing, damaged, an unknown key, or invalid arms; the message names file and key."""
    try:
        return TypeAdapter(Arms).validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {first_fault(error)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def write_arms(path: Path, arms: Arms) -> None:
    """Write the arms atomically. Raises UserError if the file cannot be written."""
    with writing(path):
        write_bytes(path, (json.dumps(dataclasses.asdict(arms), indent=2) + "\n").encode(), 0o600)
