"""Read prompts from local files, a hub dataset or the Python standard library into a list of ``PromptRow``.

``datasets`` decides which files of a directory belong to a split, and reads hub datasets.
"""

import csv
import glob
import heapq
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.hub import hub_id, reach_hub
from data.prompts.columns import columns_of, near, prompt_row
from data.prompts.lines import Rows, bare_name, csv_rows, json_rows, one_line, refuse_packed, text_rows
from data.prompts.logs import Exchanges, is_log
from data.prompts.prompt import PromptRow, PromptSource, rendered_row
from data.prompts.split import content_hash
from speculative.errors import UserError

log = logging.getLogger(__name__)

STDLIB = "stdlib"
# Suffix -> builder of `datasets`; the suffix of a compression is ignored.
FORMATS = {"jsonl": "json", "json": "json", "parquet": "parquet", "txt": "text", "csv": "csv", "arrow": "arrow"}
UNREADABLE = (OSError, pa.ArrowException, csv.Error, KeyError, UnicodeDecodeError)
BATCH_ROWS = 1000  # Rows of a columnar file that are read at once.
# Columns of prompts that were rendered earlier; there are also `text` or `turns`, and `domain`.
RENDERED = {"prompt_id", "prompt_ids"}


@dataclass(frozen=True)
class _Table:
    """Rows with named columns. `rows` gives (row number as a user counts, values), with at least the columns asked for."""

    name: str
    columns: list[str]
    rows: Callable[[Sequence[str]], Rows]


def _arrow_table(schema: pa.Schema, batches: Callable[[list[str]], Iterable[pa.RecordBatch]], name: str) -> _Table:
    def rows(wanted: Sequence[str]) -> Rows:
        values: Iterable[dict[str, Any]] = (values for batch in batches(list(wanted)) for values in batch.to_pylist())
        chosen = pa.schema([schema.field(column) for column in wanted])
        if any("arrow.json" in str(one) for one in chosen.types):  # Objects with different keys, stored as JSON.
            import datasets

            values = map(datasets.Features.from_arrow_schema(chosen).decode_example, values)
        return enumerate(values, start=1)

    return _Table(name, schema.names, rows)


def load_source(
    source: PromptSource, preferred: str | None = None, bad_rows: list[UserError] | None = None
) -> list[PromptRow]:
    """Read the prompts of one source, in their order.

    ``path`` is a file (jsonl, json, parquet, csv, txt, also compressed), a glob of files, a directory as ``datasets`` reads it
    (README configs, splits by file name: a dataset repository copied from the hub works), a hub id, or ``stdlib``.
    A text file holds one prompt per line; blank lines are skipped. ``split`` and ``subset`` are for directories and hub ids;
    for ``stdlib`` the split is ``train`` or ``heldout``. A ``format`` other than ``auto`` means that the path is local.

    Without a prompt or messages column, a column with a common name is used if there is exactly one, or if one of them is
    ``preferred``. Of questions of Spec-Bench and SPEED-Bench, the first of ``turns`` is the prompt and ``category`` the domain.
    ``system`` becomes the first turn of every conversation without one, and turns a plain prompt into a conversation.
    ``domain`` is the label of all rows (default: the file stem, folder name or last part of the hub id);
    ``domain_column`` has priority. ``limit`` takes rows by content hash, so that they come from the whole source. With
    ``bad_rows``, unusable rows are left out and their errors are added to it; if all rows are unusable, the first error is raised.

    Raises UserError: a missing or unreadable source, a missing column, a row without a usable prompt, no rows.
    """
    if source.prompt_column and source.messages_column:
        raise UserError(f"{source.path}: prompt_column and messages_column exclude each other; set only one of them")
    if source.path == STDLIB:
        rows = _limited(_stdlib_rows(source), source.limit)
    else:
        tables, domain = _open(source)
        faults: list[UserError] | None = None if bad_rows is None else []
        exchanges = Exchanges(source, source.domain or domain)
        parts = (_table_rows(table, source, exchanges, preferred, faults) for table in tables)
        try:
            rows = _limited(chain(chain.from_iterable(parts), exchanges.rest(faults)), source.limit)
        except UNREADABLE as error:
            raise UserError(f"{source.path}: cannot be read to its end: {one_line(error)}") from error
        if faults and not rows:
            raise faults[0]
        if bad_rows is not None:
            bad_rows += faults or []
    if not rows:
        raise UserError(f"{source.path}: the source is empty; it must have at least one prompt")
    return rows


def _limited(rows: Iterable[PromptRow], limit: int | None) -> list[PromptRow]:
    """The rows with the smallest content hashes, in their order, with only those in memory; all rows without a limit."""
    if limit is None:
        return list(rows)
    chosen = heapq.nsmallest(limit, enumerate(rows), key=lambda numbered: content_hash(numbered[1]))
    return [row for _, row in sorted(chosen)]


def source_state(source: PromptSource) -> list[Any]:
    """Names, sizes and times of the files of a source, which show a change, or the Python version. Empty for a hub id."""
    if source.path == STDLIB:
        return [sys.version]
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in _files(source.path)]


def _files(path: str) -> list[Path]:
    """Files of a local path: the file itself, all files below a folder, or the matches of a pattern."""
    local = Path(os.path.expanduser(path))  # unchanged for a user that does not exist
    if local.exists():
        found = [local, *local.rglob("*")]
    else:
        found = [Path(name) for name in glob.glob(str(local), recursive=True)]
    return sorted(one for one in found if one.is_file())


def _stdlib_rows(source: PromptSource) -> list[PromptRow]:
    if source.prompt_column or source.messages_column or source.reference_column or source.domain_column:
        raise UserError("stdlib has no columns; remove prompt, messages, reference and domain columns")
    if source.split not in ("train", "heldout"):
        raise UserError(f"stdlib has no split {source.split!r}; its splits are train and heldout")
    from data.prompts.stdlib import function_head_rows

    return [
        prompt_row(head, None, source.domain or STDLIB, f"{STDLIB}/{module}:{number}", source.system)
        for number, (module, head) in enumerate(function_head_rows(heldout=source.split == "heldout"), start=1)
    ]


def _open(source: PromptSource) -> tuple[Iterator[_Table], str]:
    """The tables of a source, read lazily, and their default domain."""
    path, split = source.path, source.split
    local = Path(os.path.expanduser(path))  # unchanged for a user that does not exist
    if source.streaming and (local.exists() or glob.has_magic(path)):
        raise UserError(f"{path}: streaming is for hub datasets; local files are read row by row anyway; remove it")
    if local.is_dir():
        return _directory_tables(local, split, source.subset), local.resolve().name
    if local.is_file():
        return _file_tables([local], source.format, split), Path(bare_name(local)).stem
    if glob.has_magic(path):
        if not (files := _files(path)):
            raise UserError(f"{path}: the pattern matches no file; check the folder and the suffix")
        return _file_tables(files, source.format, split), files[0].resolve().parent.name
    if source.format != "auto" or dataset_id(path) is None:
        folder = local.parent
        there = f"in {folder.resolve()}{_near_files(local)}" if folder.is_dir() else f"nor a folder {folder}"
        raise UserError(f"{local}: no such file {there}; check the path")
    return iter([_hub_table(source)]), path.split("/")[-1]


def dataset_id(path: str) -> str | None:
    """The name of a source on the hub, see `hub_id`; None for local files and `stdlib`."""
    # "OpenHermes-2.5" is a hub id and "prompts.jsnl" a misspelt file: a file suffix has only letters.
    return None if path == STDLIB or re.search(r"\.[A-Za-z]{2,7}$|\.bz2$", path) else hub_id(path)


def _near_files(path: Path) -> str:
    return near(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""


def _file_tables(files: list[Path], format: str, split: str) -> Iterator[_Table]:
    if split != "train":
        log.warning("%s: split %r is ignored: a single file or a glob has no splits", files[0], split)
    formats = [(file, format_of(file) if format == "auto" else format) for file in files]
    for file, kind in formats:
        if kind not in ("parquet", "arrow"):
            refuse_packed(file)
        if kind is None:
            raise UserError(f"{file}: the suffix gives no format; rename it or set format to {', '.join(FORMATS)}")
    return (table for file, kind in formats for table in _read_file(file, FORMATS[str(kind)]))


def format_of(file: Path) -> str | None:
    """The format of a file by its suffix before that of a compression; None if unknown."""
    suffix = bare_name(file).rpartition(".")[2].lower()
    return suffix if suffix in FORMATS else None


def _directory_tables(folder: Path, split: str, subset: str | None) -> Iterator[_Table]:
    """The files that ``datasets`` assigns to this split, read one by one so that errors can give file and line."""
    import datasets

    with tempfile.TemporaryDirectory(prefix="understudy-source-") as cache:  # Leave nothing in the user's home.
        try:
            builder = datasets.load_dataset_builder(str(folder), name=subset, cache_dir=cache)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: {one_line(error)}; give a file, a glob or a subset") from error
    files = {str(name): found for name, found in (builder.config.data_files or {}).items()}
    if split not in files:
        raise UserError(f"{folder}: no split {split!r}{near(split, files)}; it has {', '.join(files)}")
    log.info("%s: split %s is %s", folder, split, ", ".join(str(Path(file).name) for file in files[split]))
    return (table for file in files[split] for table in _read_file(Path(file), builder.name))


def _read_file(path: Path, builder: str) -> Iterator[_Table]:
    """One table, or none if the file is empty."""
    try:
        if builder == "parquet":
            with pq.ParquetFile(path) as file:
                yield _arrow_table(
                    file.schema_arrow, lambda wanted: file.iter_batches(BATCH_ROWS, columns=wanted), str(path)
                )
            return
        if builder == "arrow":
            with pa.memory_map(str(path)) as source:
                stream = source.read(6) != b"ARROW1"
                source.seek(0)
                opened = pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)
                table = opened.read_all()
                table.validate(full=True)  # Otherwise pyarrow would follow damaged offsets.
                yield _arrow_table(table.schema, lambda wanted: table.select(wanted).to_batches(BATCH_ROWS), str(path))
            return
        # Read twice, first for the columns, so that the rows need not stay in memory.
        read = {"json": json_rows, "csv": csv_rows, "text": text_rows}[builder]
        columns = list(dict.fromkeys(name for _, values in read(path) for name in values))
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read as {builder}: {one_line(error)}") from error
    if columns:
        yield _Table(str(path), columns, lambda _: read(path))


def _hub_table(source: PromptSource) -> _Table:
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    path, split, subset = source.path, source.split, source.subset
    no_file = f"there is no local file or folder of that name either{_near_files(Path(path))}"
    reach_hub(constants.ENDPOINT)
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE
    try:
        dataset = datasets.load_dataset(
            path, name=subset, split=split, revision=source.revision, streaming=source.streaming
        )
        columns = dataset.column_names or list(next(iter(dataset), {}))
    except datasets.exceptions.DatasetNotFoundError as error:
        login = "check the id, or run `hf auth login` if it is gated or private"
        raise UserError(f"{path}: {one_line(error)}; {no_file}; {login}") from error
    except (ConnectionError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{path}: the hub cannot be reached and the dataset is not in the cache; {no_file}. Offline: on a "
            f"connected machine run `hf download {path} --repo-type dataset --local-dir DIR`, copy DIR here and "
            "give it as path; or copy that machine's HF_HOME cache and set HF_HUB_OFFLINE=1"
        ) from error
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{path}: {one_line(error)} (subset={subset}, split={split})") from error
    return _Table(f"{path}[{split}]", columns, lambda wanted: enumerate(dataset.select_columns(list(wanted)), start=1))


def _table_rows(
    table: _Table, source: PromptSource, exchanges: Exchanges, preferred: str | None, bad_rows: list[UserError] | None
) -> Iterator[PromptRow]:
    read: Callable[[dict[str, Any], str], list[PromptRow]]
    if set(table.columns) >= RENDERED and not (source.prompt_column or source.messages_column):
        yield from _rendered_rows(table, source)
        return
    if is_log(table.columns, source):
        read, wanted = exchanges.rows, table.columns
    else:
        columns = columns_of(table.name, table.columns, source, preferred)
        read, wanted = partial(columns.rows, exchanges.domain), columns.wanted
    for number, values in table.rows(wanted):
        try:
            rows = read(values, f"{table.name}:{number}")
        except UserError as error:
            if bad_rows is None:
                raise
            bad_rows.append(error)
            continue
        yield from rows


def _rendered_rows(table: _Table, source: PromptSource) -> Iterator[PromptRow]:
    """Rows in the format of `data/responses/rendered.py`."""
    for number, values in table.rows(table.columns):
        domain, origin = source.domain or values.get("domain") or "prompts", f"{table.name}:{number}"
        try:
            yield rendered_row(values, domain, origin)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{origin}: {one_line(error)}; export or render these prompts again") from error
