"""Where prompts come from: local files, a hub dataset, or the embedded standard-library domain.

Everything becomes a list of ``PromptRow``. Files are read by ``datasets`` in a throw-away cache, so that nothing is
left in the user's home; a hub dataset goes through its ordinary cache, so that it is downloaded once.
"""

import datetime
import difflib
import glob
import gzip
import json
import logging
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.prompts.conversation import conversation_prompts, tools_of
from data.prompts.prompt import PromptRow, PromptSource
from data.prompts.split import content_hash
from speculative.errors import UserError

log = logging.getLogger(__name__)

STDLIB = "stdlib"
PROMPT_NAMES = ("prompt", "question", "instruction", "text", "input", "nl")
MESSAGES_NAMES = ("messages", "conversations")
# Suffix -> the `datasets` builder that reads it; a trailing .gz is looked through.
FORMATS = {"jsonl": "json", "json": "json", "parquet": "parquet", "txt": "text", "csv": "csv", "arrow": "arrow"}
TOOLS_NAME = "tools"
RENDERED = {
    "prompt_id",
    "prompt_ids",
}  # columns of prompts that were rendered before; `text` or `turns`, `domain` beside them


@dataclass(frozen=True)
class _Table:
    """One loaded dataset, its name for messages, and row index -> the number a user would count to."""

    dataset: Any
    name: str
    number: Callable[[int], int]


def load_source(
    source: PromptSource, preferred: str | None = None, bad_rows: list[UserError] | None = None
) -> list[PromptRow]:
    """Read the prompts of one source, in their order.

    ``path`` is a file (jsonl, json, parquet, csv, txt, also .gz), a glob of files, a directory as ``datasets`` reads it
    (README configs, splits by file name: a dataset repository copied from the hub works), a hub id, or ``stdlib``.
    A text file holds one prompt per line, its blank lines skipped. ``split`` and ``subset`` concern directories and hub
    ids; for ``stdlib`` the split is ``train`` or ``heldout``. ``format`` other than ``auto`` says that path is local.

    With neither prompt nor messages column, a usual name is taken when exactly one is present, or ``preferred`` is among
    them. ``system`` becomes the
    first turn of every conversation without one, and turns a plain prompt into a conversation. ``domain`` is the
    constant label (default: the file stem, folder name or last part of the hub id); ``domain_column`` comes before it.
    A ``limit`` takes rows by content hash, so that they come from all over the source. Rows without a usable prompt are left
    out where ``bad_rows`` is given, which takes what is wrong with them; when all of them are, the first is told.

    Raises:
        UserError: nothing there, unreadable, a column that does not exist, a row without a usable prompt, no rows.
    """
    if source.prompt_column and source.messages_column:
        raise UserError(f"{source.path}: prompt_column and messages_column exclude each other: give one of them")
    if source.path == STDLIB:
        rows = _stdlib_rows(source)
    else:
        tables, domain = _open(source)
        own: list[UserError] | None = None if bad_rows is None else []
        rows = [row for table in tables for row in _table_rows(table, source, source.domain or domain, preferred, own)]
        if own and not rows:
            raise own[0]
        if bad_rows is not None:
            bad_rows += own or []
    if not rows:
        raise UserError(f"{source.path}: no rows: the source is empty, give one that holds at least one prompt")
    if source.limit is None or source.limit >= len(rows):
        return rows
    chosen = {id(row) for row in sorted(rows, key=content_hash)[: source.limit]}
    return [row for row in rows if id(row) in chosen]


def source_state(source: PromptSource) -> list[Any]:
    """What tells, without reading them, that a source's files are others: names, sizes and times, or the Python version.

    Of a hub dataset nothing is known without asking for it: it counts as the same.
    """
    if source.path == STDLIB:
        return [sys.version]
    local = Path(source.path).expanduser()
    if local.is_dir():
        paths = sorted(path for path in local.rglob("*") if path.is_file())
    elif glob.has_magic(source.path):
        paths = sorted(Path(name) for name in glob.glob(str(local), recursive=True) if Path(name).is_file())
    else:
        paths = [local] if local.is_file() else []
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _stdlib_rows(source: PromptSource) -> list[PromptRow]:
    if source.prompt_column or source.messages_column or source.reference_column or source.domain_column:
        raise UserError("stdlib has no columns: leave prompt, messages, reference and domain columns out")
    if source.split not in ("train", "heldout"):
        raise UserError(f"stdlib has no split {source.split!r}: its splits are train and heldout")
    from data.prompts.stdlib import function_head_rows

    return [
        prompt_row(head, None, source.domain or STDLIB, f"{STDLIB}/{module}:{number}", source.system)
        for number, (module, head) in enumerate(function_head_rows(heldout=source.split == "heldout"), start=1)
    ]


def prompt_row(text: str, reference: str | None, domain: str, origin: str, system: str | None) -> PromptRow:
    """A plain prompt, or with a system message the conversation that begins with it."""
    if system is None:
        return PromptRow(text, None, reference, domain, origin)
    turns = ({"role": "system", "content": system}, {"role": "user", "content": text})
    return PromptRow(None, turns, reference, domain, origin)


def _open(source: PromptSource) -> tuple[Iterator[_Table], str]:
    """The tables of a source, read one by one as they are asked for, and the domain they have by default."""
    path, split = source.path, source.split
    local = Path(path).expanduser()
    if local.is_dir():
        return _directory_tables(local, split, source.subset), local.resolve().name
    if local.is_file():
        return _file_tables([local], source.format, split), Path(local.name.removesuffix(".gz")).stem
    if glob.has_magic(path):
        files = sorted(Path(name) for name in glob.glob(str(local), recursive=True) if Path(name).is_file())
        if not files:
            raise UserError(f"{path}: the pattern matches no file: check the folder and the suffix")
        return _file_tables(files, source.format, split), files[0].resolve().parent.name
    if source.format != "auto" or not _looks_like_hub_id(path):
        raise UserError(_missing_file(local))
    return iter([_hub_table(path, split, source.subset, source.revision)]), path.split("/")[-1]


def _looks_like_hub_id(path: str) -> bool:
    # "OpenHermes-2.5" is a name and "prompts.jsnl" a misspelt file: only letters make a file suffix.
    shaped_as_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    return shaped_as_id and re.search(r"\.[A-Za-z]{2,7}$|\.gz$", path) is None


def _near(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (near: {', '.join(found)})" if found else ""


def _missing_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path}: no such file: the folder {path.parent} does not exist either, check the path"
    return f"{path}: no such file in {path.parent.resolve()}{_near_files(path)}: check the name"


def _near_files(path: Path) -> str:
    return _near(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""


@contextmanager
def _private_reading() -> Iterator[tuple[Any, str]]:
    """(datasets, a cache folder that disappears): silent, because we report its errors ourselves in one line."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    had_bars = not datasets.are_progress_bars_disabled()
    verbosity, hub_verbosity = datasets.logging.get_verbosity(), hub_logging.get_verbosity()
    if had_bars:
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="understudy-source-") as cache:
            yield datasets, cache
    finally:
        if had_bars:
            datasets.enable_progress_bars()
        datasets.logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)


def _file_tables(files: list[Path], format: str, split: str) -> Iterator[_Table]:
    if split != "train":
        log.warning("%s: split %r is not used: a single file or a glob has no splits", files[0], split)
    builders = [(file, _builder_of(file, format)) for file in files]
    return (table for file, builder in builders for table in _read_file(file, builder))


def format_of(file: Path) -> str | None:
    """The format that a file's suffix tells, `.gz` aside; None when it tells none."""
    suffix = file.name.removesuffix(".gz").rpartition(".")[2].lower()
    return suffix if suffix in FORMATS else None


def _builder_of(file: Path, format: str) -> str:
    told = format_of(file) if format == "auto" else format
    if told is None:
        raise UserError(f"{file}: the suffix tells no format: rename it or set format to one of {', '.join(FORMATS)}")
    return FORMATS[told]


def _directory_tables(folder: Path, split: str, subset: str | None) -> Iterator[_Table]:
    """The files that ``datasets`` takes for this split, read one by one so that a message can name file and line."""
    with _private_reading() as (datasets, cache):
        try:
            builder = datasets.load_dataset_builder(str(folder), name=subset, cache_dir=cache)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: {_one_line(error)}: name a file, a glob or a subset") from error
    files = {str(name): found for name, found in (builder.config.data_files or {}).items()}
    if split not in files:
        raise UserError(f"{folder}: no split {split!r}{_near(split, files)}: it has {', '.join(files)}")
    log.info("%s: split %s is %s", folder, split, ", ".join(str(Path(file).name) for file in files[split]))
    return (table for file in files[split] for table in _read_file(Path(file), builder.name))


def _read_file(path: Path, builder: str) -> Iterator[_Table]:
    """One table, or none when the file holds nothing."""
    line_numbers = _filled_lines(path) if builder in ("json", "text") else None
    if line_numbers is not None and not line_numbers:
        return
    options = {"encoding": "utf-8-sig"} if builder == "text" else {}
    with _private_reading() as (datasets, cache):
        try:
            dataset = datasets.load_dataset(
                builder, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            fault = _line_fault(path, as_json=True) if builder == "json" else None
            raise UserError(fault or f"{path}: cannot be read as {builder}: {_one_line(error)}") from error

    if builder == "text" and line_numbers is not None:
        dataset = dataset.select([number - 1 for number in line_numbers])
    # One JSON object a line, blank lines aside: only then is a row's number a line's number.
    if line_numbers is not None and len(line_numbers) == len(dataset):
        yield _Table(dataset, str(path), line_numbers.__getitem__)
    else:
        yield _Table(dataset, str(path), lambda index: index + 1)


def _filled_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines that are not blank; lines end where ``datasets`` ends them."""
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            return [number for number, line in enumerate(lines, start=1) if line.strip()]
    except UnicodeDecodeError as error:
        # The JSON reader would let it pass and fail much later.
        raise UserError(_line_fault(path, as_json=False) or f"{path}: not UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}): copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _line_fault(path: Path, as_json: bool) -> str | None:
    """The first line that is not UTF-8, or no JSON object, in words; None when the fault is none of these."""
    content = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    one_value = as_json and content.lstrip().startswith(b"[")
    for number, line in enumerate([content] if one_value else content.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig")
            value = json.loads(text) if as_json and text.strip() else {}
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            number += line.count(b"\n", 0, error.start)
            return f"{path}:{number}: not UTF-8 (byte {line[error.start]:#04x}): save the file as UTF-8"
        except UnicodeEncodeError:
            return f"{path}:{number}: not valid Unicode (half of a surrogate pair, written \\ud8..): mend or remove this line"
        except json.JSONDecodeError as error:
            number += error.lineno - 1
            return f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno}): mend or remove this line"
        if value == []:
            return f"{path}: no rows: the file holds an empty list"
        if not isinstance(value, dict) and not one_value:
            return f"{path}:{number}: a line must be a JSON object with named columns, not a {type(value).__name__}"
    return None


def _one_line(error: BaseException) -> str:
    """What a library said, its cause before its summary, on one line."""
    message = str(error.__cause__ or error).strip() or type(error).__name__
    return " ".join(message.split())[:300]


def _hub_table(path: str, split: str, subset: str | None, revision: str | None) -> _Table:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    no_file = f"there is no local file or folder of that name either{_near_files(Path(path))}"
    try:
        dataset = datasets.load_dataset(path, name=subset, split=split, revision=revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"{path}: {_one_line(error)}; {no_file}: check the id, or `hf auth login` when it is gated or private"
        ) from error
    except (ConnectionError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{path}: the hub cannot be reached and the dataset is not in its cache; {no_file}. Offline: on a "
            f"connected machine run `hf download {path} --repo-type dataset --local-dir DIR`, copy DIR here and "
            "give it as path; or copy that machine's HF_HOME cache and set HF_HUB_OFFLINE=1"
        ) from error
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: {_one_line(error)} (subset={subset}, split={split})") from error
    return _Table(dataset, f"{path}[{split}]", lambda index: index + 1)


def _table_rows(
    table: _Table, source: PromptSource, domain: str, preferred: str | None, bad_rows: list[UserError] | None
) -> Iterator[PromptRow]:
    if set(table.dataset.column_names) >= RENDERED and not (source.prompt_column or source.messages_column):
        yield from _rendered_rows(table, source)
        return
    prompt, messages = _content_columns(table, source, preferred)
    named, tools = source.reference_column, source.tools_column
    if tools is None and messages and TOOLS_NAME in table.dataset.column_names:
        tools = TOOLS_NAME
    wanted = sorted({column for column in (prompt, messages, named, source.domain_column, tools) if column})
    for column in wanted:
        _require_column(table, column)
    for index, values in enumerate(_rows_of(table.dataset.select_columns(wanted))):
        origin = f"{table.name}:{table.number(index)}"
        try:
            reference = _filled(values[named], named, origin) if named else None
            label = _domain_of(values, source.domain_column, domain, origin)
            if messages:
                asked = conversation_prompts(values[messages], messages, origin, source.system, source.turns == "all")
                found = [PromptRow(None, turns, reference or own, label, at) for turns, own, at in asked]
            else:
                assert prompt is not None
                found = [prompt_row(_filled(values[prompt], prompt, origin), reference, label, origin, source.system)]
            given = tools_of(values[tools], tools, origin) if tools else None
        except UserError as error:
            if bad_rows is None:
                raise
            bad_rows.append(error)
            continue
        yield from (replace(row, tools=given) for row in found) if given else found


def _rendered_rows(table: _Table, source: PromptSource) -> Iterator[PromptRow]:
    """Rows as `data/responses/rendered.py` writes them."""
    for index, values in enumerate(_rows_of(table.dataset)):
        turns = json.loads(values.get("turns") or "{}")
        origin, label = f"{table.name}:{table.number(index)}", source.domain or values.get("domain") or "prompts"
        messages = tuple(turns["messages"]) if turns else None
        row = PromptRow(None if turns else values.get("text") or "", messages, None, label, origin)
        tools = tuple(turns["tools"]) if turns.get("tools") else None
        if not values["prompt_ids"] or not values["prompt_id"]:
            raise UserError(f"{origin}: no prompt_ids or no prompt_id: export or render these prompts again")
        yield replace(row, tools=tools, prompt_ids=tuple(values["prompt_ids"]), prompt_id=values["prompt_id"])


def _rows_of(dataset: Any) -> Iterator[dict[str, Any]]:
    # Decoding a thousand rows at once is many times faster than row by row.
    for batch in dataset.iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _content_columns(table: _Table, source: PromptSource, preferred: str | None) -> tuple[str | None, str | None]:
    """(prompt column, None) or (None, messages column): the named one, the preferred or only usual name there is."""
    if source.prompt_column or source.messages_column:
        return source.prompt_column, source.messages_column
    columns = table.dataset.column_names
    # A column that has another role cannot be the prompt too.
    taken = (source.reference_column, source.domain_column)
    usual = [name for name in (*PROMPT_NAMES, *MESSAGES_NAMES) if name in columns and name not in taken]
    if preferred in usual:
        usual = [preferred]
    if len(usual) != 1:
        found = f"{len(usual)} columns could be it ({', '.join(usual)})" if usual else "no column has a usual name"
        raise UserError(
            f"{table.name}: which column holds the prompt? {found}: set prompt_column or messages_column to one of "
            f"{', '.join(columns)}"
        )
    is_prompt = usual[0] in PROMPT_NAMES
    log.info("%s: taking column %r as the %s", table.name, usual[0], "prompt" if is_prompt else "messages")
    return (usual[0], None) if is_prompt else (None, usual[0])


def _require_column(table: _Table, column: str) -> None:
    columns = table.dataset.column_names
    if column not in columns:
        raise UserError(f"{table.name}: no column {column!r}{_near(column, columns)}: it has {', '.join(columns)}")


def _filled(value: Any, column: str, origin: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if value is None or isinstance(value, str):
        raise UserError(f"{origin}: column {column!r} is empty: fill it or remove the row")
    hint = "name it as messages_column if it holds a conversation" if isinstance(value, list) else "write it as text"
    if isinstance(value, datetime.date):
        hint = "datasets reads a JSON column of dates only as timestamps, so add a word to them"
    raise UserError(f"{origin}: column {column!r} holds a {type(value).__name__}, not a string: {hint}")


def _domain_of(values: dict[str, Any], column: str | None, default: str, origin: str) -> str:
    """The label of a row; a list of strings (several services of one dialogue) is joined by ``+``."""
    value = values[column] if column else None
    if value is None or value == "" or value == []:
        return default
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "+".join(value)
    if isinstance(value, str | int):
        return str(value)
    raise UserError(f"{origin}: domain column {column!r} holds a {type(value).__name__}: a label is a string")
