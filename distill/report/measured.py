"""Tables of every way to decode: the same figures on the screen, in the report and in an exported directory."""

from collections.abc import Sequence
from dataclasses import replace

from distill.report.table import Cell, Column, Table
from distill.run.verdict_record import Verdict
from speculative.measure.measured import DRAFT, HELD_OUT, TARGET, Measured

PREDICTED = " Predicted: from the engine's step times and tau by replay."
HOW = 'Speed is timed. tau is counted live, or computed from stored text ("by replay"). Brackets: 95 % interval.'
TOO_FEW_TIMED = "too few prompts for an interval"


def timed_rows(verdict: Verdict, concurrency: int = 1) -> list[Measured]:
    """Rows of every way timed at a load, the target first."""
    rows = [one for one in verdict.measured if one.concurrency == concurrency and one.text == HELD_OUT]
    return sorted((one for one in rows if one.speed_up is not None), key=lambda one: one.way != TARGET)


def ways_tables(verdict: Verdict) -> list[Table]:
    """Tables of the timed ways, each at its own best gamma, and of the drafts at the judged gamma."""
    text = f"{verdict.prompts:,} held-out prompts ({verdict.tokens:,} tokens), rule {verdict.rule}"
    timed, engine = timed_rows(verdict), engine_ways(verdict)
    run, caption = verdict.to_run(), HOW
    if engine:
        run, caption = max(engine, key=lambda row: row.speed_up or 0.0).way, HOW + PREDICTED
    judged = [row for one in verdict.drafts if (row := verdict.judged(one.way)) is not None]
    tables = [timed_table([*timed, *engine], run, text, caption)] if timed or engine else []
    if judged:
        tables.append(judged_table(judged, f"The drafts at gamma {verdict.gamma}" if timed else text))
    return tables


def timed_table(rows: Sequence[Measured], run: str | None, title: str = "", caption: str = HOW) -> Table:
    """One row per way, the one to run in bold."""
    table = Table(
        [
            "way",
            Column("gamma", "d"),
            Column("alpha", ".3f"),
            Column("tau", ".2f"),
            Column("tokens/s", ",.0f"),
            Column("speed-up", ".2f", "x"),
        ],
        title=title,
        caption=caption,
    )
    for row in rows:
        timed = row.speed_up is not None and not row.how.get("speed_up", "timed").startswith("predicted")
        few = TOO_FEW_TIMED if timed and row.speed_up_ci is None and row.way != TARGET else ""
        table.add(
            Cell(row.way, note=row.sizes, mark="run this" if row.way == run else ""),
            row.gamma or None,
            Cell(row.alpha, row.alpha_ci),
            _figure(row, "tau"),
            row.tokens_per_second,
            _figure(row, "speed_up", few),
            strong=row.way == run,
        )
    return table


def judged_table(rows: Sequence[Measured], title: str = "") -> Table:
    """One row per draft: alpha, tau and accepted/drafted at one gamma."""
    columns = (Column("alpha", ".3f"), Column("tau", ".2f"), Column("accepted / drafted", ".3f"))
    table = Table(["draft", *columns], title=title)
    for row in rows:
        table.add(row.way, Cell(row.alpha, row.alpha_ci), _figure(row, "tau"), row.accepted_per_drafted)
    return table


def load_table(verdict: Verdict) -> Table:
    """One row per load: tokens/s of the target alone, the speed-up of every timed way, and the way to run."""
    timed = {load: {row.way: row for row in timed_rows(verdict, load)} for load in verdict.concurrencies}
    ways = list(dict.fromkeys(way for rows in timed.values() for way in rows if way != TARGET))
    table = Table(
        [
            Column("concurrent requests", ","),
            Column("target alone, tokens/s", ",.0f"),
            *(Column(way, ".2f", "x") for way in ways),
            "run",
        ]
    )
    for load, rows in timed.items():
        run = verdict.to_run(load)
        cells = [
            Cell(row.speed_up, row.speed_up_ci, note=f"gamma {row.gamma}", strong=way == run)
            if (row := rows.get(way))
            else None
            for way in ways
        ]
        alone = rows[TARGET].tokens_per_second if TARGET in rows else None
        table.add(load, Cell(alone, strong=run == TARGET), *cells, run)
    return table


def engine_ways(verdict: Verdict) -> list[Measured]:
    """The target alone and the draft in the engine that was timed, at its first load: at the gamma to run, else the fastest one."""
    if (costs := verdict.engine) is None or not verdict.engine_runs:
        return []
    load, run = min(verdict.engine_runs.items())
    measured = [row for row in verdict.engine_rows if row.concurrency == load and row.gamma]
    alone = costs.row(costs.costs[0], 0, 1.0, verdict.rule, verdict.response_tokens)
    rows = [alone, run if run.gamma else max(measured, key=lambda row: row.speed_up or 0.0, default=run)]
    at = f", {load} requests" if load > 1 else ""
    return [replace(row, way=f"{way} in {costs.engine}{at}") for way, row in zip((TARGET, DRAFT), rows, strict=True)]


def engine_parts(verdict: Verdict) -> list[str | Table]:
    """What engine_costs.json predicts, beside the draft timed in our loop: a title, tables with a row per load, and a sentence."""
    costs = verdict.engine
    if costs is None:
        return []
    gammas, rows = list(costs.costs[0].verify_seconds), verdict.engine_rows
    each = [Column(f"{what} {gamma}", ".2f", unit) for what, unit in (("v", ""), ("gamma", "x")) for gamma in gammas]
    heads = Column("load", "d"), Column("step", ".2f", " ms"), Column("c", ".3f")
    ends = Column("run gamma", "d"), Column("tokens/s", ",.0f"), Column("our loop", ".2f", "x")
    table, runs = Table([*heads, *each]), Table([heads[0], *ends])
    for steps, (load, ratios) in zip(costs.costs, costs.ratios.items(), strict=True):
        *measured, run = (row for row in rows if row.concurrency == load)
        speeds = {row.gamma: Cell(row.speed_up, row.speed_up_ci) for row in measured}
        timed = verdict.row(DRAFT, load)
        loop = Cell(timed.speed_up, timed.speed_up_ci, f"gamma {timed.gamma}") if timed and timed.speed_up else None
        v = (steps.verify_ratio(gamma) for gamma in gammas)
        step, c = steps.target_seconds * 1e3, Cell(ratios["c"][0], ratios["c"][1:])
        table.add(load, step, c, *v, *map(speeds.get, gammas))  # none at a gamma beyond those of replay
        runs.add(load, run.gamma, run.tokens_per_second, loop)
    wins = costs.plain_wins_from(verdict.replay, verdict.response_tokens)
    return [
        f"{costs.engine}: plain step, c, v(gamma), and speed-up at each gamma, {costs.label}, rule {verdict.rule}",
        table,
        runs,
        f"plain decoding is faster {f'from {wins} requests on' if wins else 'at no load up to 4096'}",
    ]


def waits_table(rows: Sequence[Measured]) -> Table:
    """Waits for the first and for every further token, for each row that was clocked."""
    table = Table(["way", Column("requests", ","), "to the first token, ms", "per token, ms"], title="p50 / p90 / p99")
    for row in rows:
        if row.first_token_ms:
            waits = (row.first_token_ms, row.per_token_ms or {})
            table.add(row.way, row.concurrency, *(" / ".join(f"{ms:.3g}" for ms in one.values()) for one in waits))
    return table


def stages_table(rows: Sequence[Measured]) -> Table:
    """Milliseconds and share of each stage of a block, for each row that was clocked."""
    names = list(dict.fromkeys(name for row in rows for name in row.stages_ms or ()))
    table = Table(["way", Column("requests", ","), *names], title="stages of a block, ms and share")
    for row in rows:
        if spent := row.stages_ms:
            shown = {name: f"{ms:.3g} ({ms / sum(spent.values()):.0%})" for name, ms in spent.items()}
            table.add(row.way, row.concurrency, *map(shown.get, names))
    return table


def _figure(row: Measured, key: str, note: str = "") -> Cell:
    """A figure with its interval, and a note if it was neither counted live nor timed."""
    short = {"replay": "by replay", "predicted": "predicted", "predicted (engine)": "predicted", "served": "served"}
    how = short.get(row.how.get(key, ""), "")
    return Cell(getattr(row, key), getattr(row, f"{key}_ci"), note=" ".join(part for part in (how, note) if part))
