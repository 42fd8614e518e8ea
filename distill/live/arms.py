"""Arms: engines with their shares and draft versions, and the choice of an arm for each conversation.

arms.json in the log directory holds them: the gateway writes it from its flags and watches it, and a rollout edits it.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import write_bytes, writing
from data.responses.endpoint_keys import is_address, root_of
from distill.live.traffic.record import SANE
from speculative.errors import UserError

ARMS = "arms.json"
BY_FLAGS = "flags"
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Arm:
    """One engine. url: without /v1. share: of the conversations. drafts: False for the engine without a draft, used under load."""

    name: str
    url: str
    share: float
    draft_version: str = "unknown"
    target_version: str = "unknown"
    drafts: bool = True


@dataclass(frozen=True)
class Arms:
    """All engines. by: origin of the arms, `flags` or `rollout NAME vN`. Raises UserError, naming arm and key, for shares that do not add
    up to 1, a duplicate name or no address.
    """

    by: str
    arms: tuple[Arm, ...]

    def __post_init__(self) -> None:
        drafting = [arm for arm in self.arms if arm.drafts]
        if not drafting:
            raise UserError("arms: no engine has a draft; give at least one with a draft")
        for arm in self.arms:
            for key in ("name", "draft_version", "target_version"):
                if not SANE.fullmatch(str(getattr(arm, key))):
                    raise UserError(
                        f"arms.{arm.name}.{key} = {getattr(arm, key)!r}: use only letters, digits and . _ : @ + / -"
                    )
            if not is_address(arm.url):
                raise UserError(f"arms.{arm.name}.url = {arm.url!r}: give an address such as http://127.0.0.1:8000")
            if not 0 <= arm.share <= 1 or not math.isfinite(arm.share):
                raise UserError(f"arms.{arm.name}.share = {arm.share}: give a share between 0 and 1")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise UserError("arms: two arms have the same name; give each its own")
        if abs(sum(arm.share for arm in drafting) - 1) > _TOLERANCE:
            raise UserError(f"arms: the shares add up to {sum(arm.share for arm in drafting):g}; they must add up to 1")

    def choose(self, conversation: bytes, key: bytes, shed: bool = False) -> Arm:
        """The arm of a conversation; with ``shed`` the arm without a draft, if there is one.

        Weighted rendezvous hashing: a stable hash gives each arm an exponential time with rate `share`, and the smallest wins. So arms get
        their shares, and an arm whose share grows takes conversations from others and loses none. ``key``: the log's secret, so that clients
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
        found = json.loads(path.read_text(encoding="utf-8"))
        return Arms(str(found["by"]), tuple(_arm(arm) for arm in found["arms"]))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as arms ({type(error).__name__}: {error})") from error


def write_arms(path: Path, arms: Arms) -> None:
    """Write the arms atomically. Raises UserError if the file cannot be written."""
    with writing(path):
        write_bytes(path, (json.dumps(dataclasses.asdict(arms), indent=2) + "\n").encode(), 0o600)


def _arm(values: dict[str, Any]) -> Arm:
    kinds = {"name": str, "url": str, "draft_version": str, "target_version": str, "drafts": bool}
    for key, value in values.items():
        if key == "share" and type(value) in (int, float):
            continue
        if not isinstance(value, kinds.get(key, ())):
            raise UserError(f"arms.{values.get('name')}.{key} = {value!r}: unknown key, or a value of the wrong type")
    return Arm(**{**values, "url": root_of(values["url"])})
