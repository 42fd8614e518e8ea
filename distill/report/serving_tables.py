"""Sections of a report on serving: speed under load, and how long a reader waits. Pure: a result in, text out."""

from distill.report.money import Prices, money_section
from distill.report.tables import NOTHING, Cell, Table, interval, labels_of, number, times
from distill.report.text_tables import Section
from distill.run.result import Result
from distill.run.served_record import ServedRecord
from distill.run.verdict_record import WAYS, Latency, LoadRow, Percentiles, Verdict

PERCENTILES = ("p50", "p90", "p99")
WAITED_FOR = {
    "first_token": "to the first token",
    "per_token": "per token",
    "between_commits": "between two pieces",
    "per_response": "for a whole response",
}


def serving_sections(result: Result, prices: Prices | None = None) -> list[Section]:
    """Those that this result has something for; money where prices were given."""
    money = money_section(result, prices) if prices else None
    return [section for section in (_served(result.served), _load(result), _latency(result), money) if section]


def _served(record: ServedRecord | None) -> Section | None:
    if record is None:
        return None
    rows = [[Cell(name), *(Cell(cell) for cell in cells)] for name, *cells in served_rows(record)]
    lines = [*served_lines(record), *record.causes, *record.notes]
    return Section(
        "served", f"Measured in {record.where}", lines, [Table(("", "served", "replay", "run's text"), rows)]
    )


def served_rows(record: ServedRecord) -> list[tuple[str, str, str, str]]:
    """(what, served, by replay of the served text, by replay of the run's own) of everything that served.json compares."""
    served, replay = record.served, record.replay
    places = len(served.survival or replay.survival)
    taus = (
        f"{served.tau:.2f} {interval(served.tau_ci, 2)}",
        f"{replay.tau:.2f}",
        f"{replay.expected_tau:.2f} {interval(replay.expected_tau_ci, 2)}",
    )
    rows = [("tau", *taus)]
    for place in range(places):
        own, other = (
            number(values[place]) if values and place < len(values) else NOTHING
            for values in (served.survival, replay.survival)
        )
        rows.append((f"survival {place + 1}", own, other, ""))
    rows.append(("accepted/drafted", number(served.accepted_per_drafted), number(replay.accepted_per_drafted), ""))
    if served.tokens_per_second is not None:
        rows.append(("tokens/s", f"{served.tokens_per_second:.1f} {interval(served.tokens_per_second_ci, 1)}", "", ""))
    if served.latency is not None:
        rows.append(("seconds a response", f"{served.latency:.3g} {interval(served.latency_ci, 2)}", "", ""))
    if record.speed_up is not None:
        rows.append(("speed-up", f"{times(record.speed_up)} {interval(record.speed_up_ci, 2)}", "", ""))
    return rows


def served_lines(record: ServedRecord) -> list[str]:
    """Whether the engine agrees with replay, and its texts."""
    lines = [
        f"{record.where} {'agrees' if record.agrees else 'DISAGREES'} with replay of the "
        f"{record.replay.text.removeprefix('the ')} ({WAYS[record.drafting]}, rule {record.rule}, gamma {record.asked_gamma}): z {record.z:+.1f}."
    ]
    if record.greedy is not None:
        ties = f", {record.greedy.near_ties} more part at a near-tie" if record.greedy.near_ties else ""
        lines.append(f"{record.greedy.equal} of {record.greedy.prompts} greedy texts are equal token for token{ties}.")
    law = record.text_law
    if law is not None:
        said = "cannot be told from the target's own" if law.same else "is NOT the target's own"
        lines.append(
            f"Its sampled text {said} (p {law.p:.2g}; {law.log_prob:.2f} nats a token, {law.expected:.2f} expected)."
        )
    return lines


def _load(result: Result) -> Section | None:
    verdict = result.verdict
    if not verdict.load:
        return None
    names = labels_of(result) | {"target": "the target alone", "best": "the draft"}
    # One that could not be timed at a load is missing there alone.
    rivals = list(dict.fromkeys(one.name for row in verdict.load for one in row.rivals))
    told = any(row.run for row in verdict.load)
    rows = [
        [
            Cell(str(row.concurrency)),
            Cell(str(row.gamma)),
            Cell(number(row.plain_tokens_per_second, 0), strong=row.speed_up < 1.0),
            Cell(number(row.tokens_per_second, 0), strong=row.speed_up > 1.0),
            Cell(times(row.speed_up), interval(row.speed_up_ci, 2), "plain is faster" if row.speed_up < 1.0 else ""),
            Cell(times(row.predicted)),
            *(_rival_cell(row, name) for name in rivals),
            *([Cell(names.get(row.run or "", row.run or NOTHING))] if told else []),
        ]
        for row in verdict.load
    ]
    columns = ["concurrent requests", "best gamma", "tokens/s alone", "with the draft", "speed-up", "predicted"]
    columns += [*rivals, *(["run"] if told else [])]
    return Section("load", "Under load", load_lines(verdict), [Table(tuple(columns), rows)])


def _rival_cell(row: LoadRow, name: str) -> Cell:
    one = next((one for one in row.rivals if one.name == name), None)
    if one is None:
        return Cell(NOTHING)
    return Cell(times(one.speed_up), f"{interval(one.speed_up_ci, 2)} gamma {one.gamma}", strong=name == row.run)


def load_lines(verdict: Verdict) -> list[str]:
    """Where plain decoding wins, and where verification stops being free."""
    lines = [
        "Requests decoded at once, every row taken, prefill aside; tokens/s are of all of them together. The gamma is the best one at that "
        "load by prediction, which rests on the steps of both models and on tau of the held-out text."
    ]
    if any(row.run for row in verdict.load):
        lines.append(
            "What to run is the fastest of the draft, prompt lookup and lookup before the draft that is certainly faster than the target "
            "alone there (both only where that is 3 % faster than either); lookup's sizes and gammas are those that take the fewest target "
            "steps at that load."
        )
    most = max(row.concurrency for row in verdict.load)
    wins = verdict.plain_wins_from
    if wins is None:
        lines.append("The draft is faster than plain decoding at every load up to 4096 requests.")
    elif wins == 1:
        lines.append("Plain decoding is faster than the draft by itself at every load.")
    else:
        how = "" if wins <= most else f", by prediction beyond the {most} that were measured"
        lines.append(f"From {wins:,} concurrent requests on plain decoding is faster than the draft by itself{how}.")
    free = verdict.roofline.free_tokens if verdict.roofline else None
    if free is not None:
        lines.append(
            f"A call of the target takes twice as long for {free:,.0f} tokens as for hardly any: there verification stops being free. A block "
            "feeds it gamma + 1 tokens of every request."
        )
    return lines


def _latency(result: Result) -> Section | None:
    known = result.verdict.latency
    if not known:
        return None
    labels = labels_of(result) | {"target": "the target alone"}
    tables = [_waits(what, {labels.get(name, name): one for name, one in known.items()}) for what in WAITED_FOR]
    lines = [
        "One request at a time, in milliseconds; p50 is the median, 99 of 100 are at most p99. The first token waits for the prefill of both "
        "models. A block's tokens come together, so a reader sees pieces, not tokens."
    ]
    return Section("latency", "How long a reader waits", lines, [table for table in tables if table])


def _waits(what: str, known: dict[str, Latency]) -> Table | None:
    seen: dict[str, Percentiles] = {name: own for name, one in known.items() if (own := getattr(one, what)) is not None}
    if not seen:
        return None
    rows = [
        [Cell(name), *(Cell(_milliseconds(getattr(own, key))) for key in PERCENTILES)] for name, own in seen.items()
    ]
    return Table(("", *PERCENTILES), rows, title=WAITED_FOR[what])


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1.0 else f"{1e3 * seconds:,.0f}"
