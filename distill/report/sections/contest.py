"""The numbers: every way to decode side by side, one request at a time and under load, and how long a reader waits."""

from distill.report.section import Made, Part, Piece, fine, section
from distill.report.table import NOTHING, Cell, Column, Table
from distill.report.view import View
from distill.run.verdict_record import WAYS, Effects, Latency, LoadRow, Percentiles, Rival, Verdict
from speculative.measure.effects import words

TOO_FEW_TIMED = "too few prompts timed for an interval"
PERCENTILES = ("p50", "p90", "p99")
WAITED_FOR = {
    "first_token": "to the first token",
    "per_token": "per token",
    "between_commits": "between two pieces",
    "per_response": "for a whole response",
}
DRAFTS = {"baseline": "undistilled", "served": "served today", "best": "distilled"}


@section("numbers", "The numbers", order=10)
def numbers(view: View) -> Made:
    """What could be run, and how sure the gain is."""
    return [ways_table(view.verdict, view.labels), *map(fine, effect_lines(view.verdict)), Piece("nav", None)]


def ways_table(verdict: Verdict, labels: dict[str, str] | None = None) -> Table:
    """The target alone, the drafts, what costs no training: each at its own best gamma."""
    table = Table(
        [
            "run", Column("gamma", "d"), Column("alpha", ".3f"), Column("tau", ".2f"), Column("accepted / drafted", ".3f"),
            Column("tokens/s", ".0f"), Column("speed-up", ".2f", "x"),
        ],
        title=f"{verdict.prompts} held-out prompts ({verdict.tokens:,} tokens), rule {verdict.rule}, gamma {verdict.gamma}",
        caption="alpha: acceptance rate; tau: tokens per target call; [95 % interval]; gamma: the one that the speed is of",
    )  # fmt: skip
    if verdict.target_tokens_per_second is not None:
        target = (NOTHING, NOTHING, 1.0, NOTHING, verdict.target_tokens_per_second, 1.0)
        table.add("target alone", *target, strong=verdict.run == "target")
    known = DRAFTS | ({} if verdict.baseline else {"best": "the draft"}) | (labels or {})
    for name in DRAFTS:
        row = {"baseline": verdict.baseline, "served": verdict.served, "best": verdict.best}[name]
        if row is None:
            continue
        timed, ends = (verdict.speed_up or {}).get(name), (verdict.speed_up_ci or {}).get(name)
        notes = [
            part
            for part in (f"step {row.step}" if row.step is not None else "", way_of(verdict) if name == "best" else "")
            if part
        ]
        table.add(
            Cell(known[name], note=", ".join(notes)), row.speed_gamma, Cell(row.alpha, row.alpha_ci),
            Cell(row.tau, row.tau_ci, note="" if row.tau_ci else "by replay"), row.accepted_per_drafted, row.tokens_per_second,
            Cell(timed, ends, note="" if ends or timed is None else TOO_FEW_TIMED), strong=name == (verdict.run or "best"),
        )  # fmt: skip
    for rival in verdict.rivals:
        _add_rival(table, rival, verdict.run == rival.name)
    return table


def _add_rival(table: Table, rival: Rival, chosen: bool) -> None:
    note = f"n-grams of {rival.ngrams[1]} to {rival.ngrams[0]}" if rival.ngrams else ""
    note += f", then a draft of {rival.then_gamma}" if rival.then_gamma else ""
    note += f" ({rival.behind})" if rival.behind not in (None, "best") else ""
    change = rival.alpha_change
    alpha = f"{change.gain:+.3f} [{change.ci[0]:+.3f}, {change.ci[1]:+.3f}]" if change else None
    table.add(
        Cell(rival.name, note=note), rival.gamma, alpha, Cell(rival.tau, note="by replay"), None, rival.tokens_per_second,
        Cell(rival.speed_up, rival.speed_up_ci, note="" if rival.speed_up_ci else TOO_FEW_TIMED), strong=chosen,
    )  # fmt: skip


def way_of(verdict: Verdict) -> str:
    """How the best drafts, in words; empty where it can only draft token by token."""
    both = verdict.drafting == "parallel" or any(rival.name in WAYS.values() for rival in verdict.rivals)
    return WAYS[verdict.drafting] if both else ""


def effect_lines(verdict: Verdict) -> list[str]:
    """How sure the gain is, and what these prompts could have seen."""
    effects, against_served = verdict.effects, verdict.against_served
    served = (
        [f"Against the served draft, paired by prompt: {words(against_served.record())}."] if against_served else []
    )
    if not effects:
        return served
    return [
        f"Gain over the baseline, paired by prompt: {words(effects.record())}.",
        *served,
        f"Both drafts on the same {effects.prompts:,} prompts ({effects.tokens:,} tokens), tau and speed-up by replay: so a gain can "
        f"differ from the difference of two live runs. {effects.method[0].upper()}{effects.method[1:]}; {_confidence(effects)}.",
    ]


def _confidence(effects: Effects) -> str:
    if effects.looks <= 1:
        return f"intervals of {100 * effects.confidence:.0f} %"
    return (
        f"intervals of {100 * effects.corrected_confidence:.2f} % each, {100 * effects.confidence:.0f} % over all looks"
    )


@section("load", "Under load", order=50)
def load(view: View) -> Made:
    """What each way gives at each number of concurrent requests."""
    rows = view.verdict.load
    return [*load_lines(view.verdict), load_table(rows, view.labels)] if rows else None


def load_table(rows: list[LoadRow], labels: dict[str, str]) -> Table:
    """A row a load: both rates, the speed-up of the draft and of every rival that was timed there."""
    names = labels | {"target": "the target alone", "best": "the draft"}
    rivals = list(dict.fromkeys(one.name for row in rows for one in row.rivals))
    told = ["run"] if any(row.run for row in rows) else []
    table = Table(
        [
            Column("concurrent requests", ","), Column("best gamma", "d"), Column("tokens/s alone", ".0f"),
            Column("tokens/s with the draft", ".0f"), Column("speed-up", ".2f", "x"),
            *(Column(name, ".2f", "x") for name in rivals), *told,
        ]
    )  # fmt: skip
    for row in rows:
        others = {one.name: one for one in row.rivals}
        table.add(
            row.concurrency, row.gamma, Cell(row.plain_tokens_per_second, strong=row.speed_up < 1.0),
            Cell(row.tokens_per_second, strong=row.speed_up > 1.0),
            Cell(row.speed_up, row.speed_up_ci, mark="plain is faster" if row.speed_up < 1.0 else ""),
            *(
                Cell(one.speed_up, one.speed_up_ci, note=f"gamma {one.gamma}", strong=name == row.run)
                if (one := others.get(name)) else None
                for name in rivals
            ),
            *([names.get(row.run or "", row.run)] if told else []),
        )  # fmt: skip
    return table


def load_lines(verdict: Verdict) -> list[str]:
    """Where plain decoding wins, and where verification stops being free."""
    lines = [
        "Requests decoded at once, every row taken, prefill aside; tokens/s are of all of them together. The gamma is the best one at that "
        "load by prediction, which rests on the steps of both models and on tau of the held-out text."
    ]
    wins, most = verdict.plain_wins_from, max(row.concurrency for row in verdict.load)
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


@section("latency", "How long a reader waits", order=52)
def latency(view: View) -> Made:
    """Milliseconds to the first token, between pieces, for a whole response."""
    known = view.verdict.latency
    if not known:
        return None
    names = view.labels | {"target": "the target alone"}
    tables: list[Part] = [
        table
        for what in WAITED_FOR
        if (table := _waits(what, {names.get(name, name): one for name, one in known.items()})).cells
    ]
    line = (
        "One request at a time; p50 is the median, 99 of 100 are at most p99. The first token waits for the prefill of both "
        "models. A block's tokens come together, so a reader sees pieces, not tokens."
    )
    return [line, *tables]


def _waits(what: str, known: dict[str, Latency]) -> Table:
    table = Table(["", *(Column(f"{key}, ms", ".4g") for key in PERCENTILES)], title=WAITED_FOR[what])
    for name, one in known.items():
        own: Percentiles | None = getattr(one, what)
        if own is not None:
            table.add(name, *(1e3 * getattr(own, key) for key in PERCENTILES))
    return table
