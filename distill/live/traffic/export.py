"""`understudy traffic export`: writes requests of a log as prompts and a token store that a run can train from."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from data.files import MANIFEST, Manifest, read_manifest, write_manifest, writing
from data.prompts.template import loss_mask
from data.responses.rendered import RenderedPrompt, StoredPrompts, write_prompts
from data.responses.store import Row, Store
from distill.config.layout import PROMPTS, TRAINING
from distill.config.layout import RESPONSES as RUN_RESPONSES
from distill.config.load import load_run
from distill.config.run import RunConfig
from distill.live.options import ExportTrafficOptions
from distill.live.traffic.reader import read_traffic
from distill.live.traffic.record import TrafficRecord, forgotten_hashes, keyed_hash, priority, read_salt
from distill.live.traffic.selection import Wanted, capped, fault_of, groups_of, near_hash, split_by_time
from distill.models.target import Target
from distill.models.vocabulary import vocabulary_rows
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from distill.run.verdict_record import Record
from speculative.errors import UserError

MADE_WITH = ("tokenizer", "template", "context_length", "max_tokens")
PROMPT_FILES, RESPONSES = ("prompts/train.arrow", "prompts/heldout.arrow"), "responses/train"
EXPORT_SHARD = 512


@dataclass(frozen=True)
class _Run:
    """What an export needs of a run. made_with: of its prompts; manifest: of its responses."""

    folder: Path
    config: RunConfig
    made_with: dict[str, Any]
    manifest: Manifest
    tokenizer: Any
    vocab_rows: int

    def texts(self, name: str) -> set[str]:
        """Hashes of the decoded prompts in one of its files."""
        stored = StoredPrompts(self.folder / PROMPTS / name)
        return {near_hash(self.tokenizer.decode(prompt.prompt_ids)) for prompt in stored}


class _Request(NamedTuple):
    """A request that may be exported: its decoded prompt, the prompt's hash, and its group (`groups_of`)."""

    record: TrafficRecord
    text: str
    near: str
    group: int

    def prompt(self, salt: bytes) -> RenderedPrompt:
        name, ids = row_id(salt, self.record.id), self.record.prompt_ids or ()
        return RenderedPrompt(name, self.record.slice, ids, self.text, group=f"traffic{self.group}")


class Exported(Record):
    """Summary of an export. slices: by name, requests [to train on, held out]. Times are Unix seconds; `border`: time of the earliest
    held-out request. left_out: requests, by reason.
    """

    log: str
    run: str
    folder: str
    requests: int
    train: int
    heldout: int
    train_tokens: int
    slices: dict[str, list[int]]
    since: float
    border: float
    until: float
    left_out: dict[str, int]
    warnings: list[str]


def export_command(options: ExportTrafficOptions, console: Console) -> None:
    """Export, and print what was left out and why."""
    summary = export_traffic(options)
    lines = [f"note: {warning}" for warning in summary.warnings]
    train = f"{summary.train:,} to train on ({summary.train_tokens:,} tokens)"
    lines += [f"{summary.requests:,} requests: {train}, {summary.heldout:,} held out"]
    lines += [f"  {train:,} and {heldout:,} of slice {name}" for name, (train, heldout) in summary.slices.items()]
    lines += [f"  {count:,} left out: {why}" for why, count in summary.left_out.items()]
    lines += [f"{summary.folder}: prompts/ and responses/train/ (docs/traffic.md says how to train from them)"]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def export_traffic(options: ExportTrafficOptions) -> Exported:
    """Make the export folder.

    Raises UserError: no log, a forged line, an unusable run, nothing left to train on or hold out, or an existing folder.
    """
    log, to = options.log, options.to
    salt, run, forgotten = read_salt(log), _read_run(options.run, options.trust_remote_code), forgotten_hashes(log)
    if to.exists():
        raise UserError(f"--to {to}: already exists; give a new folder, or delete this one first")
    traffic = read_traffic(log)
    requests, left_out = _usable(traffic.records, run, options.target_version)
    heldout_texts, train_texts = run.texts(HELDOUT_FILE), run.texts(TRAIN_FILE)
    judged = {request.group for request in requests if request.near in heldout_texts}
    free = [request for request in requests if request.group not in judged]
    left_out["held out by the run"] += len(requests) - len(free)
    groups = [request.group for request in free]
    past, latest = split_by_time(
        groups, options.heldout, {request.group for request in free if request.near in train_texts}
    )
    left_out["as new as what is held out, or of its prompts"] += len(free) - len(past) - len(latest)
    chosen = capped(past, groups, [priority(salt, request.record.id) for request in free])
    left_out["asked too often"] += len(past) - len(chosen)
    if not chosen or len(latest) < 2:
        reasons = "; ".join(f"{count:,} {why}" for why, count in (+left_out).most_common())
        raise UserError(
            f"{log}: too few requests: of {len(traffic.records):,}, {len(chosen)} are left to train on and {len(latest)} to hold out (from "
            f"the latest fifth at most). Left out: {reasons or 'none'}; log more with --text, or see --target-version"
        )
    train, heldout = ([free[number] for number in numbers] for numbers in (chosen, latest))
    longest = run.config.serving.max_tokens
    summary = Exported(
        log=str(log.resolve()),
        run=str(options.run),
        folder=str(to),
        requests=len(traffic.records),
        train=len(train),
        heldout=len(heldout),
        train_tokens=sum(min(len(request.record.response_ids or ()), longest) for request in train),
        slices={
            name: [sum(request.record.slice == name for request in side) for side in (train, heldout)]
            for name in sorted({request.record.slice for request in (*train, *heldout)})
        },
        since=train[0].record.time,
        border=heldout[0].record.time,
        until=heldout[-1].record.time,
        left_out=dict((+left_out).most_common()),
        warnings=traffic.warnings,
    )
    _write(to, run, salt, (train, heldout), summary, forgotten)
    return summary


def _usable(records: Sequence[TrafficRecord], run: _Run, version: str) -> tuple[list[_Request], Counter[str]]:
    """(requests that the run may train on, counts of the others by reason). ``version``: the target's; empty: the run's own."""
    versions = {version} if version else {run.manifest["target"], run.config.target.path}
    most = run.config.data.max_prompt_tokens or 1 << 30
    longest = min(run.made_with["context_length"] - run.config.serving.max_tokens, most)
    wanted = Wanted(run.manifest["sampling"], versions, longest, run.vocab_rows)
    faults = [fault_of(record, wanted) for record in records]
    usable = [record for record, fault in zip(records, faults, strict=True) if not fault]
    texts = [run.tokenizer.decode(record.prompt_ids) for record in usable]
    rows = zip(usable, texts, map(near_hash, texts), groups_of(usable, texts), strict=True)
    return [_Request(*row) for row in rows], Counter(filter(None, faults))


def _read_run(run: Path, trusted: bool) -> _Run:
    config, store = load_run(run, trusted, "--run "), Store(run / RUN_RESPONSES / TRAINING)
    for folder in (run / PROMPTS, store.folder):
        if not (folder / MANIFEST).exists():
            raise UserError(f"{folder}: missing; finish the run first (or run `understudy respond` with its config)")
    manifest = store.manifest()
    target = Target(config.target, torch.device("cpu"), run)
    made_with = read_manifest(run / PROMPTS)["made_with"]
    rows = vocabulary_rows(target.side.config)
    return _Run(run, config, {key: made_with[key] for key in MADE_WITH}, manifest, target.tokenizer, rows)


def _write(
    to: Path,
    run: _Run,
    salt: bytes,
    sides: tuple[list[_Request], list[_Request]],
    summary: Exported,
    forgotten: set[str],
) -> None:
    """Write the folder atomically, readable only by its owner. ``forgotten``: the hashes before the log was read."""
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    before = os.umask(0o077)
    try:
        with writing(to):
            partial.mkdir(parents=True)
            for name, side in zip(PROMPT_FILES, sides, strict=True):
                write_prompts(partial / name, (request.prompt(salt) for request in side))
            write_rows(Store(partial / RESPONSES), run.manifest, [_row(salt, one.record, run) for one in sides[0]])
            write_manifest(partial / PROMPTS, {"made_with": run.made_with, "traffic": summary.record()})
            if forgotten_hashes(Path(summary.log)) != forgotten:
                raise UserError(f"{summary.log}: requests were forgotten during the export; run the command again")
            partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.umask(before)


def _row(salt: bytes, record: TrafficRecord, run: _Run) -> Row:
    """A row without probabilities, which no log has. Responses are cut at the run's serving.max_tokens."""
    response = (record.response_ids or ())[: run.config.serving.max_tokens]
    ids = [*(record.prompt_ids or ()), *response]
    mask = loss_mask(len(ids) - len(response), len(ids))
    return Row(row_id(salt, record.id), 0, record.slice, ids, mask, (), response[-1] in run.manifest["eos_ids"])


def row_id(salt: bytes, record_id: str) -> str:
    """The id of an exported row, which replaces its request's id."""
    return keyed_hash(salt, "row", record_id)[:16]


def write_rows(store: Store, manifest: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write rows into an empty store."""
    store.open(manifest)
    for number, start in enumerate(range(0, len(rows), EXPORT_SHARD)):
        store.write_shard(number, rows[start : start + EXPORT_SHARD])
