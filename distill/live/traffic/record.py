"""A record of live traffic: its fields, the conditions that they satisfy, and its line in the log.

A line is flat JSON. Its last field `crc32` is the checksum of the bytes before `,"crc32"`. The directory:

    log-00001.jsonl     records, oldest file first; rotated by size
    salt                the directory's secret, the key of all hashes of prompts and ids
    lock                held by the gateway that writes here
    write.lock          held for each append and for each rewrite of a file
    swept               time of the last sweep, Unix seconds
    forgotten           keyed hashes of forgotten ids, and of conversations whose text is not stored, one per line
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import re
import secrets
import zlib
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from data.files import write_bytes, writing
from distill.engines.protocol.counts import CountsError, DraftCounts
from speculative.errors import UserError

SALT, LOCK, WRITE_LOCK, SWEPT, FORGOTTEN = "salt", "lock", "write.lock", "swept", "forgotten"
CONVERSATION = "forgotten conversation"  # purpose of a hash in the file FORGOTTEN
LOG_FILES = f"log-{5 * '[0-9]'}.jsonl"
SANE = re.compile(r"[A-Za-z0-9._:@+/-]{1,128}")  # an id, slice or version; no character that breaks a line or a label
_CHECKSUM = b',"crc32":"'
_SALT_BYTES = 32
_MOST, _LATEST = 1 << 31, 1e11  # ids fit into a store; times are valid calendar dates


class RecordError(ValueError):
    """A line that is not a valid record; the message names the field."""


Word = Annotated[str, Field(pattern=rf"\A{SANE.pattern}\z")]
Count = Annotated[int, Field(ge=0, lt=_MOST)]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]  # a list too
Seconds = Annotated[float, Field(ge=0, lt=_LATEST, allow_inf_nan=False)]
Setting = Annotated[int | float, Field(gt=-_MOST, lt=_MOST)]
Finish = Literal["stop", "length", "tool_calls", "abort", "cancelled", "error", "unknown"]
FINISHES = get_args(Finish)


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TrafficRecord:
    """One response. None: not known. Shapes: B verification steps.

    time: of arrival, Unix seconds. sampling: temperature, top_p, top_k, min_p and max_tokens in effect; None if one of the first four is
    unknown. prompt_hash, conversation: keyed with the directory's salt; the latter is the same for all turns of a conversation. prompt_ids,
    response_ids: only if text is kept. accepted, drafted, blocks: as counted by the engine. first_token_s, total_s: since arrival.
    constrained: a grammar, a bias or a penalty shaped the text.

    Raises ValueError: an inconsistent record (pydantic's ValidationError).
    """

    id: Word
    time: Seconds
    slice: Word
    arm: Word
    draft_version: Word
    target_version: Word
    sampling: dict[str, Setting | None] | None
    prompt_hash: Word
    prompt_tokens: Count | None = None
    response_tokens: Count | None = None
    prompt_ids: Counts | None = None
    response_ids: Counts | None = None
    accepted: Count | None = None
    drafted: Count | None = None
    blocks: Count | None = None
    accepted_B: Counts = ()
    drafted_B: Counts = ()
    first_token_s: Seconds | None = None
    total_s: Seconds | None = None
    finish: Finish = "unknown"
    constrained: bool = False
    conversation: Word | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        # Tokens per step are not checked: a stop or a gate emits fewer, and engines do not count steps without drafts.
        try:
            DraftCounts("", self.accepted, self.drafted, self.blocks, None, self.accepted_B, self.drafted_B)
        except CountsError as error:
            raise ValueError(f"accepted: {error}") from error
        steps, blocks = len(self.accepted_B), self.blocks
        if steps and blocks not in (None, steps):
            raise ValueError(f"blocks: {blocks}, but {steps} steps are listed")
        for side in ("prompt", "response"):
            ids, count = getattr(self, f"{side}_ids"), getattr(self, f"{side}_tokens")
            if ids is not None and count not in (None, len(ids)):
                raise ValueError(f"{side}_ids: not {count} tokens")
        return self

    def without_text(self) -> Self:
        """The record without token ids."""
        if self.prompt_ids is None and self.response_ids is None:
            return self
        return dataclasses.replace(self, prompt_ids=None, response_ids=None)  # type: ignore[type-var]


def is_setting(value: Any) -> bool:
    """Whether this is a valid number for a sampling setting."""
    return type(value) in (int, float) and abs(value) < _MOST


_SCHEMA = TypeAdapter(TrafficRecord)


def to_line(record: TrafficRecord) -> bytes:
    """The record's line, with its newline."""
    body = _SCHEMA.dump_json(record)[:-1]
    return b'%s%s%08x"}\n' % (body, _CHECKSUM, zlib.crc32(body))


def from_line(line: bytes) -> TrafficRecord:
    """The record of a line. Raises RecordError if it is damaged, forged or of another format."""
    body, mark, rest = line.rstrip(b"\n").rpartition(_CHECKSUM)
    if not mark or rest != b'%08x"}' % zlib.crc32(body):
        raise RecordError("crc32: the checksum is wrong or missing")
    try:
        return _SCHEMA.validate_json(body + b"}")
    except ValidationError as error:
        raise RecordError(first_fault(error)) from error


def first_fault(error: ValidationError) -> str:
    """The first fault in words, with its key and value."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in ("int", "float"))
    value = f" (not {str(first['input'])[:100]!r})" if key else ""
    return ": ".join(filter(None, (key, first["msg"].removeprefix("Value error, ") + value)))


def log_files(directory: Path) -> list[Path]:
    """The log's files, oldest first."""
    return sorted(directory.glob(LOG_FILES))


def read_salt(directory: Path) -> bytes:
    """The secret of a log directory. Raises UserError if it is missing or damaged."""
    try:
        salt = bytes.fromhex((directory / SALT).read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / SALT}: cannot be read ({error}); is {directory} a traffic log?") from error
    if len(salt) != _SALT_BYTES:
        raise UserError(f"{directory / SALT}: damaged; without it no request in {directory} can be found by its id")
    return salt


def make_directory(directory: Path) -> None:
    """Make a directory that only its owner can read. An existing one keeps its mode, because the log's files are private anyway. Raises
    UserError: it belongs to another user and others can read it, or it cannot be made.
    """
    with writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    if found.st_uid != os.geteuid() and found.st_mode & 0o077:
        raise UserError(
            f"{directory}: belongs to another user (uid {found.st_uid}) and others can read it; give a --log of your own, for example "
            f"{directory / 'traffic'}"
        )


def prepare_directory(directory: Path) -> bytes:
    """Make a log directory with its own secret if needed; return the secret. Not for concurrent use. Raises UserError: it cannot be
    written, or see `make_directory`.
    """
    make_directory(directory)
    with writing(directory):
        if not (directory / SALT).exists():
            write_bytes(directory / SALT, secrets.token_hex(_SALT_BYTES).encode() + b"\n", 0o600, synced=True)
    return read_salt(directory)


def keyed_hash(salt: bytes, purpose: str, content: Any) -> str:
    """HMAC-SHA256 of JSON with sorted keys, 64 hex digits. purpose: such as `prompt`; hashes of different purposes never match."""
    text = json.dumps([purpose, content], sort_keys=True, separators=(",", ":"))
    return hmac.new(salt, text.encode(), hashlib.sha256).hexdigest()


def priority(salt: bytes, record_id: str) -> str:
    """A record's rank in its slice's sample; the k smallest keep their text."""
    return keyed_hash(salt, "priority", record_id)


def remembered(record: TrafficRecord, salt: bytes, forgotten: Set[str]) -> TrafficRecord | None:
    """The part of a record that may be kept: None if forgotten, no text if its conversation is forgotten."""
    if keyed_hash(salt, FORGOTTEN, record.id) in forgotten:
        return None
    hidden = bool(forgotten) and keyed_hash(salt, CONVERSATION, record.conversation) in forgotten
    return record.without_text() if hidden else record


def add_forgotten(directory: Path, hashes: Set[str]) -> set[str]:
    """Add hashes to the forgotten ones and return all of them. The caller holds the write lock."""
    known = forgotten_hashes(directory) | hashes
    write_bytes(directory / FORGOTTEN, "".join(f"{one}\n" for one in sorted(known)).encode(), 0o600, synced=True)
    return known


def forgotten_hashes(directory: Path) -> set[str]:
    """Keyed hashes of the forgotten ids and conversations."""
    with contextlib.suppress(FileNotFoundError):
        return set((directory / FORGOTTEN).read_text(encoding="ascii", errors="replace").split())
    return set()
