"""Lines of text, CSV and JSON files, read lazily, also compressed ones; an error gives file and line."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from speculative.errors import UserError

Rows = Iterable[tuple[int, dict[str, Any]]]


SUFFIXES = (".gz", ".bz2", ".zst")  # of compressed files
# Compressed files and archives that are not read, by their first bytes.
_NOT_READ = {b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z", b"Rar!": "rar", b"\x04\x22\x4d\x18": "lz4"}
_NAMELESS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}  # read by their suffix only


def bare_name(path: Path) -> str:
    """The name of a file without the suffix of a compression."""
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


def refuse_packed(path: Path) -> None:
    """Raise UserError for an archive, an unknown compression, and a compressed file whose name does not say so."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    kind = next((kind for first, kind in _NOT_READ.items() if head.startswith(first)), "")
    if kind or ".tar" in path.suffixes:
        raise UserError(
            f"{path}: {kind or 'tar'} files are not read; unpack it, or compress it as {', '.join(SUFFIXES)}"
        )
    suffix = next((suffix for first, suffix in _NAMELESS.items() if head.startswith(first)), "")
    if suffix and path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: a compressed file; rename it to {path.name}{suffix}")


def _lines(path: Path, ends: bool = False) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, with or without its line end: a line feed, a carriage return or both."""
    number = 0
    try:
        with io.BufferedReader(pa.input_stream(str(path), compression="detect")) as file:
            for number, line in enumerate((one for some in file for one in some.splitlines(ends)), start=1):
                yield number, line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x}"
        raise UserError(f"{path}:{number}: not UTF-8 ({byte}); save the file as UTF-8") from error
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None):
            raise
        raise UserError(f"{path}: damaged file ({error}); copy or compress it again") from error


def _filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in _lines(path) if line.strip())


def text_rows(path: Path) -> Rows:
    """(line number, {text}) of each line that is not blank."""
    return ((number, {"text": line}) for number, line in _filled_lines(path))


def csv_rows(path: Path) -> Rows:
    """(row number, cells) of each row after the header."""
    csv.field_size_limit(sys.maxsize)  # The default limit of a cell is 131,072 characters.
    for number, row in enumerate(csv.DictReader((line for _, line in _lines(path, ends=True)), strict=True), start=1):
        if None in row:
            raise UserError(f"{path}:{number}: more cells than columns; fix or remove this row")
        yield number, row


def json_rows(path: Path) -> Rows:
    """(line, object) of each line, or (place, object) of each item if the file is one list."""
    values: Iterable[tuple[int, Any]]
    if next(_filled_lines(path), (1, ""))[1].lstrip().startswith("["):
        listed = _parsed("\n".join(line for _, line in _lines(path)), path, 1)
        if all(isinstance(value, str) for value in listed):
            listed = [{"text": value} for value in listed]
        values = enumerate(listed, start=1)
    else:
        values = ((number, _parsed(text, path, number)) for number, text in _filled_lines(path))
    for number, value in values:
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise UserError(f"{path}:{number}: a line must be a JSON object with named columns, not a {kind}")
        yield number, value


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is specified twice")
    return value


_STRICT_JSON = json.JSONDecoder(object_pairs_hook=_named_once)


def _parsed(text: str, path: Path, number: int) -> Any:
    """The JSON value of a text that starts in this line."""
    try:
        value = _STRICT_JSON.decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = "half of a surrogate pair, written \\ud8.."
        raise UserError(f"{path}:{number}: not valid Unicode ({half}); fix or remove this line") from error
    except (ValueError, RecursionError) as error:  # Also a repeated key, a huge number, or deep nesting.
        what = one_line(error)
        if isinstance(error, json.JSONDecodeError):
            what, number = f"{error.msg}, column {error.colno}", number + error.lineno - 1
        raise UserError(f"{path}:{number}: not valid JSON ({what}); fix or remove this line") from error
    return value


def one_line(error: BaseException) -> str:
    """The message of a library's error on one line; its cause is preferred to its summary."""
    message = str(error.__cause__ or error).strip() or type(error).__name__
    return " ".join(message.split())[:300]
