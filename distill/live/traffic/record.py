"""One response of live traffic: what is kept of it, the laws that its numbers obey, and its line in the log.

A line is flat JSON, its last field `crc32` the checksum of the bytes before `,"crc32"`. The directory:

    log-00001.jsonl     records, oldest file first; rotated by size
    salt                the directory's secret: prompts and ids are hashed with it
    lock                held by the one gateway that writes here
    write.lock          held for each append and for each rewrite of a file
    forgotten           keyed hashes of ids that are never written again, one on a line
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from data.files import write_bytes, writing
from speculative.errors import UserError

SALT, LOCK, WRITE_LOCK, FORGOTTEN = "salt", "lock", "write.lock", "forgotten"
LOG_FILES = f"log-{5 * '[0-9]'}.jsonl"
FINISHES = ("stop", "length", "tool_calls", "abort", "cancelled", "error", "unknown")
SANE = re.compile(r"[A-Za-z0-9._:@+/-]{1,128}")  # An id, a slice, a version: nothing that breaks a line or a label.
_CHECKSUM = b',"crc32":"'
_SALT_BYTES = 32
_MOST, _LATEST = 1 << 31, 1e11  # ids fit into a store; seconds are of a year that calendars know


class RecordError(ValueError):
    """A record that cannot be; the message names the field."""


@dataclass(frozen=True)
class TrafficRecord:
    """One response. None: not known. Shapes: B verification steps.

    time: of arrival, Unix seconds. sampling: the four of the law (temperature, top_p, top_k, min_p) and max_tokens, all as they
    were in force; None when one of them is not known. prompt_hash, conversation: keyed by the directory's salt; the latter is the same for
    all turns of a conversation. prompt_ids, response_ids: only
    where text is kept. accepted, drafted, blocks: as the engine counts them. first_token_s, total_s: since arrival.
    constrained: a grammar, a bias or a penalty stood between the target and its text.

    Raises:
        RecordError: a law is broken.
    """

    id: str
    time: float
    slice: str
    arm: str
    draft_version: str
    target_version: str
    sampling: dict[str, float | int | None] | None
    prompt_hash: str
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    accepted: int | None = None
    drafted: int | None = None
    blocks: int | None = None
    accepted_B: tuple[int, ...] = ()
    drafted_B: tuple[int, ...] = ()
    first_token_s: float | None = None
    total_s: float | None = None
    finish: str = "unknown"
    constrained: bool = False
    conversation: str | None = None

    def __post_init__(self) -> None:
        _check_words(self)
        for name in ("prompt_tokens", "response_tokens", "accepted", "drafted", "blocks"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < _MOST):
                _refuse(name, f"{value!r} is no count")
        for name in ("prompt_ids", "response_ids", "accepted_B", "drafted_B"):
            values = getattr(self, name)
            if name.endswith("_ids") and values is None:
                continue
            if not isinstance(values, list | tuple) or any(
                type(value) is not int or not 0 <= value < _MOST for value in values
            ):
                _refuse(name, "not a list of whole numbers from 0 to 2^31")
            object.__setattr__(self, name, tuple(values))
        for name in ("time", "first_token_s", "total_s"):
            value = getattr(self, name)
            if (value is None and name != "time") or (type(value) in (int, float) and 0 <= value < _LATEST):
                continue
            _refuse(name, f"{value!r} is no time")
        _check_sampling(self.sampling)
        _check_counts(self)


def _refuse(field: str, why: str) -> NoReturn:
    raise RecordError(f"{field}: {why[:160]}")


def _check_words(record: TrafficRecord) -> None:
    for name in ("id", "slice", "arm", "draft_version", "target_version", "prompt_hash", "conversation"):
        value = getattr(record, name)
        if value is None and name == "conversation":
            continue
        if not isinstance(value, str) or not SANE.fullmatch(value):
            _refuse(name, f"{value!r} is no word of up to 128 letters, digits and . _ : @ + / -")
    if record.finish not in FINISHES:
        _refuse("finish", f"{record.finish!r} is none of {', '.join(FINISHES)}")
    if type(record.constrained) is not bool:
        _refuse("constrained", f"{record.constrained!r} is neither true nor false")


def _check_sampling(sampling: Any) -> None:
    if sampling is None:
        return
    if not isinstance(sampling, dict):
        _refuse("sampling", "neither an object nor null")
    for key, value in sampling.items():
        if value is not None and not is_setting(value):
            _refuse(f"sampling.{key}", f"{value!r} is no number")


def is_setting(value: Any) -> bool:
    """Whether this is a number that a sampling setting may be."""
    return type(value) in (int, float) and abs(value) < _MOST


def _check_counts(record: TrafficRecord) -> None:
    accepted, drafted, blocks = record.accepted, record.drafted, record.blocks
    if accepted is not None and drafted is not None and accepted > drafted:
        _refuse("accepted", f"{accepted} tokens of only {drafted} drafted")
    if blocks == 0 and (accepted or drafted):
        _refuse("blocks", f"none, yet {drafted or accepted} drafted tokens")
    if len(record.accepted_B) != len(record.drafted_B):
        _refuse("accepted_B", f"{len(record.accepted_B)} steps, {len(record.drafted_B)} in drafted_B")
    if any(kept > tried for kept, tried in zip(record.accepted_B, record.drafted_B, strict=True)):
        _refuse("accepted_B", "a step accepted more tokens than it drafted")
    if record.accepted_B and (sum(record.accepted_B), sum(record.drafted_B)) != (accepted, drafted):
        _refuse("accepted_B", "the steps do not add up to accepted and drafted")
    if record.accepted_B and blocks is not None and len(record.accepted_B) != blocks:
        _refuse("blocks", f"{blocks}, yet {len(record.accepted_B)} steps are listed")
    # How many tokens came of so many steps is no law: a stop or a gate emits fewer, and engines take steps that draft nothing uncounted.
    for name, count in (("prompt_ids", record.prompt_tokens), ("response_ids", record.response_tokens)):
        ids = getattr(record, name)
        if ids is not None and count is not None and len(ids) != count:
            _refuse(name, f"{len(ids)} of {count} tokens")


def to_line(record: TrafficRecord) -> bytes:
    """The record's line, its end included."""
    values = {field.name: getattr(record, field.name) for field in _FIELDS}
    body = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()[:-1]
    return b'%s%s%08x"}\n' % (body, _CHECKSUM, zlib.crc32(body))


def from_line(line: bytes) -> TrafficRecord:
    """The record of a line.

    Raises:
        RecordError: damaged, forged or of another format.
    """
    body, mark, rest = line.rstrip(b"\n").rpartition(_CHECKSUM)
    if not mark or rest != b'%08x"}' % zlib.crc32(body):
        _refuse("crc32", "the checksum is another, or there is none")
    try:
        values = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the line: not JSON ({error})") from error
    if odd := sorted(set(values) ^ _NAMES):
        _refuse(odd[0], "missing" if odd[0] in _NAMES else "not a field of a record")
    return TrafficRecord(**values)


_FIELDS = dataclasses.fields(TrafficRecord)
_NAMES = {field.name for field in _FIELDS}


def log_files(directory: Path) -> list[Path]:
    """The log's files, oldest first."""
    return sorted(directory.glob(LOG_FILES))


def read_salt(directory: Path) -> bytes:
    """The secret of a log directory.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        salt = bytes.fromhex((directory / SALT).read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / SALT}: cannot be read ({error}); is {directory} a log of traffic?") from error
    if len(salt) != _SALT_BYTES:
        raise UserError(f"{directory / SALT}: damaged; without it nothing of {directory} can be found again by its id")
    return salt


def prepare_directory(directory: Path) -> bytes:
    """Makes a log directory that only its owner reads, with a secret of its own; returns the secret, made or found. One at a time.

    Raises:
        UserError: it cannot be written.
    """
    with writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        if not (directory / SALT).exists():
            write_bytes(directory / SALT, secrets.token_hex(_SALT_BYTES).encode() + b"\n", 0o600)
    return read_salt(directory)


def keyed_hash(salt: bytes, purpose: str, content: Any) -> str:
    """HMAC-SHA256 of JSON with sorted keys, 64 hex digits. purpose: such as `prompt` or `priority`: hashes of one never match another's."""
    text = json.dumps([purpose, content], sort_keys=True, separators=(",", ":"))
    return hmac.new(salt, text.encode(), hashlib.sha256).hexdigest()


def priority(salt: bytes, record_id: str) -> str:
    """A record's place in its slice's sample: the k smallest keep their text."""
    return keyed_hash(salt, "priority", record_id)


def forgotten_hashes(directory: Path) -> set[str]:
    """Keyed hashes of the ids that were forgotten."""
    with contextlib.suppress(FileNotFoundError):
        return set((directory / FORGOTTEN).read_text(encoding="ascii", errors="replace").split())
    return set()
