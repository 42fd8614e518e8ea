"""`understudy traffic review`: the requests in which the draft cost most, and what a person says of them.

reviews.json of a log directory: {keyed hash of a request's id: `good`, `bad` or `ignore`}, so that it lists no ids.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter
from rich.console import Console

from data.files import write_bytes, writing
from distill.live.options import ReviewOptions
from distill.live.traffic.exported import row_id
from distill.live.traffic.reader import accepts, read_traffic
from distill.live.traffic.record import TrafficRecord, read_salt
from distill.live.traffic.retention import write_lock
from distill.models.load import load_tokenizer
from distill.report.table import Cell, Column, Table
from speculative.errors import UserError
from speculative.measure.record import Record

REVIEWS = "reviews.json"
Review = Literal["good", "bad", "ignore"]
_KNOWN = TypeAdapter(dict[str, Review])
SHOWN_CHARACTERS = 60


class Disagreement(Record):
    """A request in which the draft cost steps. lost: accepted tokens, and so calls of the target, that the slice's average has more in as many
    drafted tokens. prompt, response: its last and first characters, with --tokenizer and where text is kept. review: empty if not reviewed.
    """

    id: str
    slice: str
    draft_version: str
    drafted: int
    accepted: int
    lost: float
    prompt: str
    response: str
    review: str


def review_traffic(options: ReviewOptions, console: Console) -> list[Disagreement]:
    """Store what a person says of requests, or print the costliest ones.

    Raises UserError: no log, an id that is not in it, an unknown verdict, or a damaged reviews.json.
    """
    if bool(options.say) != bool(options.id):
        raise UserError("--as and --id belong together: --as bad --id ID --id ID")
    if options.say and options.say not in get_args(Review):
        raise UserError(f"--as {options.say}: choose {', '.join(get_args(Review))}")
    log = read_traffic(options.log)
    salt, records = read_salt(options.log), {record.id: record for record in log.records}
    if options.say:
        if unknown := [one for one in options.id or () if one not in records]:
            raise UserError(f"--id {unknown[0]}: no request of {options.log}; `understudy traffic review` lists ids")
        _change(options.log, {row_id(salt, one): options.say for one in options.id or ()})
        console.print(f"{options.log / REVIEWS}: {len(options.id or ())} requests are {options.say}", markup=False)
        return []
    tokenizer = load_tokenizer(str(options.tokenizer)) if options.tokenizer else None
    known, found = read_reviews(options.log), []
    for record, lost in costliest(log.records)[: options.most]:
        texts = (record.prompt_ids, record.response_ids)
        sides = [str(tokenizer.decode(list(ids or ()))) if tokenizer else "" for ids in texts]
        found.append(
            Disagreement(
                id=record.id, slice=record.slice, draft_version=record.draft_version, drafted=record.drafted or 0,
                accepted=record.accepted or 0, lost=lost, review=known.get(row_id(salt, record.id), ""),
                prompt=sides[0][-SHOWN_CHARACTERS:], response=sides[1][:SHOWN_CHARACTERS],
            )
        )  # fmt: skip
    if options.as_json:
        console.print_json(data=[one.model_dump() for one in found])
        return found
    columns: list[Column | str] = ["id", "slice", *(Column(name, ",") for name in ("drafted", "accepted"))]
    columns += [Column("lost", ",.1f"), "review", *(["end of the prompt", "response"] if tokenizer else [])]
    caption = "lost: accepted tokens below the slice's average, each a further call of the target"
    table = Table(columns, caption=caption)
    for one in found:
        shown = [Cell(one.prompt, code=True), Cell(one.response, code=True)] if tokenizer else []
        table.add(one.id, one.slice, one.drafted, one.accepted, one.lost, one.review, *shown)
    console.print(table)
    return found


def costliest(records: Sequence[TrafficRecord]) -> list[tuple[TrafficRecord, float]]:
    """(record, lost tokens) of the requests with fewer accepted tokens than their slice's average, most lost first."""
    told = [record for record in records if accepts(record)]
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in told:
        sums[record.slice][0] += record.accepted or 0
        sums[record.slice][1] += record.drafted or 0
    rates = {name: accepted / drafted for name, (accepted, drafted) in sums.items()}
    lost = [(record, rates[record.slice] * (record.drafted or 0) - (record.accepted or 0)) for record in told]
    return sorted((one for one in lost if one[1] > 0), key=lambda one: (-one[1], one[0].id))


def read_reviews(directory: Path) -> dict[str, Review]:
    """What was said of requests, by `row_id`. Raises UserError if the file is damaged."""
    path = directory / REVIEWS
    try:
        return _KNOWN.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); repair it, or delete it to review again") from error


def drop_reviews(directory: Path, row_ids: Collection[str]) -> None:
    """Remove what was said of forgotten requests. Raises UserError if the file is damaged or cannot be written."""
    if not set(row_ids).isdisjoint(read_reviews(directory)):
        _change(directory, dict.fromkeys(row_ids))


def _change(directory: Path, said: Mapping[str, str | None]) -> None:
    """Add entries; None removes one."""
    path = directory / REVIEWS
    with writing(path), write_lock(directory):
        known = {**read_reviews(directory), **said}
        kept = {name: word for name, word in sorted(known.items()) if word is not None}
        write_bytes(path, (json.dumps(kept, indent=2) + "\n").encode(), 0o600)
