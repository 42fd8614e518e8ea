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
from distill.config.layout import CONFIG, PROMPTS, TRAINING
from distill.config.layout import RESPONSES as RUN_RESPONSES
from distill.config.load import load_trusted
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


class _Found(NamedTuple):
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
    made = export_traffic(options)
    lines = [f"note: {warning}" for warning in made.warnings]
    train = f"{made.train:,} to train on ({made.train_tokens:,} tokens)"
    lines += [f"{made.requests:,} requests: {train}, {made.heldout:,} held out"]
    lines += [f"  {own:,} and {held:,} of slice {name}" for name, (own, held) in made.slices.items()]
    lines += [f"  {count:,} left out: {why}" for why, count in made.left_out.items()]
    for line in [*lines, f"{made.folder}: prompts/ and responses/train/ (docs/traffic.md says how to train from them)"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _quotas(words: list[str] | None) -> dict[str, int]:
    found = {}
    for word in words or ():
        name, _, count = word.rpartition("=")
        if not count.isdecimal() or not int(count):
            raise UserError(f"--quota {word}: give a number of requests, 5000 or SLICE=5000")
        found[name] = int(count)
    return found


def export_traffic(options: ExportTrafficOptions) -> Exported:
    """Make the export folder.

    Raises UserError: no log, a forged line, an unusable run, nothing left to train on or hold out, or an existing folder.
    """
    log, to, quotas = options.log, options.to, _quotas(options.quota)
    salt, known, forgotten = read_salt(log), _read_run(options.run, options.trust_remote_code), forgotten_hashes(log)
    if to.exists():
        raise UserError(f"--to {to}: already exists; give a new folder, or delete this one first")
    traffic, serving = read_traffic(log), known.config.serving
    own = {known.manifest["target"], known.config.target.path}
    versions = {options.target_version} if options.target_version else own
    most = known.config.data.max_prompt_tokens or 1 << 30
    longest = min(known.made_with["context_length"] - serving.max_tokens, most)
    wanted = Wanted(known.manifest["sampling"], versions, longest, known.vocab_rows, options.assume_sampling)
    faults = [fault_of(record, wanted) for record in traffic.records]
    left_out = Counter(fault for fault in faults if fault)
    usable = [record for record, fault in zip(traffic.records, faults, strict=True) if not fault]
    texts = [known.tokenizer.decode(record.prompt_ids) for record in usable]
    found = [_Found(*one) for one in zip(usable, texts, map(near_hash, texts), groups_of(usable, texts), strict=True)]
    held, learnt = known.texts(HELDOUT_FILE), known.texts(TRAIN_FILE)
    judged = {one.group for one in found if one.near in held}
    mine = [one for one in found if one.group not in judged]
    left_out["held out by the run"] += len(found) - len(mine)
    groups, slices = [one.group for one in mine], [one.record.slice for one in mine]
    past, latest = split_by_time(groups, options.heldout, {one.group for one in mine if one.near in learnt})
    left_out["as new as what is held out, or of its prompts"] += len(mine) - len(past) - len(latest)
    order = [priority(salt, one.record.id) for one in mine]
    kept, more = capped(past, groups, slices, order, options.alike, quotas)
    left_out = +(left_out + more)
    if not kept or len(latest) < 2:
        reasons = "; ".join(f"{count:,} {why}" for why, count in left_out.most_common())
        raise UserError(
            f"{log}: too few requests: of {len(traffic.records):,}, {len(kept)} are left to train on and {len(latest)} to hold out (from the "
            f"latest fifth at most). Left out: {reasons or 'none'}; log more with --text, or see --target-version and --assume-sampling"
        )
    train, heldout = ([mine[number] for number in numbers] for numbers in (kept, latest))
    made = Exported(
        log=str(log.resolve()),
        run=str(options.run),
        folder=str(to),
        requests=len(traffic.records),
        train=len(train),
        heldout=len(heldout),
        train_tokens=sum(min(len(one.record.response_ids or ()), serving.max_tokens) for one in train),
        slices={
            name: [sum(one.record.slice == name for one in side) for side in (train, heldout)]
            for name in sorted({one.record.slice for one in (*train, *heldout)})
        },
        since=train[0].record.time,
        border=heldout[0].record.time,
        until=heldout[-1].record.time,
        left_out=dict(left_out.most_common()),
        warnings=traffic.warnings,
    )
    _write(to, known, salt, (train, heldout), made, forgotten)
    return made


def _read_run(run: Path, trusted: bool) -> _Run:
    if not (run / CONFIG).is_file():
        raise UserError(f"--run {run}: no config.yaml there; give the folder of a run, e.g. runs/demo")
    config, store = load_trusted(run / CONFIG, trusted), Store(run / RUN_RESPONSES / TRAINING)
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
    known: _Run,
    salt: bytes,
    sides: tuple[list[_Found], list[_Found]],
    made: Exported,
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
                write_prompts(partial / name, (one.prompt(salt) for one in side))
            write_rows(Store(partial / RESPONSES), known.manifest, [_row(salt, one.record, known) for one in sides[0]])
            write_manifest(partial / PROMPTS, {"made_with": known.made_with, "traffic": made.record()})
            if forgotten_hashes(Path(made.log)) == forgotten:
                partial.rename(to)
    except UserError:
        if forgotten_hashes(Path(made.log)) == forgotten:  # else `forget` removed what was written so far
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.umask(before)
    if not to.exists():
        raise UserError(f"{made.log}: requests were forgotten during the export; run the command again")


def _row(salt: bytes, record: TrafficRecord, known: _Run) -> Row:
    """A row without probabilities, which no log has. Responses are cut at the run's serving.max_tokens."""
    response = (record.response_ids or ())[: known.config.serving.max_tokens]
    ids = [*(record.prompt_ids or ()), *response]
    mask = loss_mask(len(ids) - len(response), len(ids))
    return Row(row_id(salt, record.id), 0, record.slice, ids, mask, (), response[-1] in known.manifest["eos_ids"])


def row_id(salt: bytes, record_id: str) -> str:
    """The id of an exported row, which replaces its request's id."""
    return keyed_hash(salt, "row", record_id)[:16]


def write_rows(store: Store, manifest: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write rows into an empty store."""
    store.open(manifest)
    for number, start in enumerate(range(0, len(rows), EXPORT_SHARD)):
        store.write_shard(number, rows[start : start + EXPORT_SHARD])
