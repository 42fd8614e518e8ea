"""`understudy drift RUN`: is the draft still accepted as it was? Fresh prompts or a server's log against the run's baseline.

Exit status of the command: 0 no drift, 3 refresh advised, 2 a mistake.

The false alarm rate is over all requests and slices of one call (Bonferroni over slices) and holds when the requests are
independent draws like the held-out prompts. A server's traffic is neither: users come in order, repeat themselves and ask
for other things. So an alarm says that acceptance on this traffic is below the baseline, not why.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from data.files import writing
from data.prompts.split import content_hash
from data.prompts.template import check_lengths, render_prompt
from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord, read_acceptance_log
from data.traffic.reader import acceptance_of, read_traffic
from distill.commands.drift.baseline import (
    ALL,
    Baseline,
    Slice,
    engine_notes,
    gamma_of,
    other_best,
    prompts_of_result,
    redrawn_prompts,
    slices_of,
)
from distill.commands.drift.counters import Scraped, replayed_survival, scrape
from distill.commands.options import DriftOptions
from distill.commands.output import check_plot, check_writable, write_asked
from distill.config.layout import RESULT
from distill.report.plot import write_figure
from distill.report.screen_table import screen_table
from distill.report.tables import interval
from distill.run.frozen_text import FrozenText, load_frozen_text
from distill.run.prompts import asked_rows
from distill.run.responses import decode_settings
from distill.run.result import load_result
from distill.run.session import context_limit
from distill.run.verdict_record import drafting_to_serve
from speculative.decode import decode
from speculative.drafters.draft import Draft
from speculative.drafters.parallel import DRAFTINGS
from speculative.engine.models import max_positions
from speculative.engine.parallel import mask_token_of
from speculative.errors import UserError
from speculative.explain.cusum import (
    Monitored,
    change_with_interval,
    chart_for,
    monitor,
    neighbour_correlation,
    power_of,
    rate_with_interval,
)
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule

REFRESH = 3  # Exit status when a refresh is advised.
# Requests this many times longer or shorter than the baseline's lean on the model of their spread.
_OTHER_LENGTHS = 3.0


def drift(options: DriftOptions) -> int:
    """The exit status of `drift_command`, which prints."""
    return REFRESH if drift_command(options, Console())["refresh"] else 0


def drift_command(options: DriftOptions, console: Console | None = None) -> dict[str, Any]:
    """Compares, prints a table and a sentence, writes what was asked for. The exit status is REFRESH if ["refresh"].

    {run, source: {kind, path, format, requests}, baseline: {gamma, rule, drafting, from, prompts}, false_alarm_rate, drop, two_sided,
    refresh, sentence, notes, slices: [{name, compared_with, requests, drafted, accepted, rate, ci, baseline_rate, change,
    change_ci, tau, baseline_tau, level, allowance, threshold, highest, alarms: [{direction, since, at, until}],
    behind: {since, requests, rate, ci, change, change_ci, time} of the open alarm or null, power: {probability, delay,
    detectable, wanted}, neighbour_correlation, refresh, sentence}], survival: {served, replay} of --metrics-url}. Requests are
    counted from 1 in each slice.

    Raises:
        UserError: an option out of its range, no run, an unreadable log or prompt file, no place for what is asked for.
    """
    _check(options)
    console = console or Console()
    scraped: Scraped | None = None
    if options.log is not None or options.metrics_url:
        if options.log is not None and options.log.is_dir():
            log = acceptance_of(read_traffic(options.log), options.draft_version)
        elif options.log is not None:
            log = read_acceptance_log(options.log, options.format)
        else:
            scraped = scrape(options.metrics_url, options.scrapes, options.interval, options.gamma)
            log = scraped.log
        gamma, notes = gamma_of(log, options.gamma)
        baseline = _baseline(options, gamma)
        notes = log.warnings + baseline.notes + notes + engine_notes(log, baseline)
    else:
        baseline = _baseline(options, options.gamma)
        frozen = load_frozen_text(options.run, baseline.rule)
        log, notes = _decoded(options, frozen, baseline)
        notes = baseline.notes + notes
    slices, more = slices_of(log.records, baseline, sums=log.sums)
    level = options.false_alarms / len(slices)
    monitored = [_monitor(part, options, level, seed) for seed, part in enumerate(slices, start=options.seed)]
    told = [_slice_facts(part, found, log, options) for part, found in zip(slices, monitored, strict=True)]
    result = _facts(options, baseline, log, told, notes + more + _length_notes(slices, log) + _correlation_notes(told))
    if scraped is not None and scraped.survival:
        result["survival"] = {"served": scraped.survival, "replay": replayed_survival(options.run, baseline)}
    _print(console, result)
    write_asked("--out", options.out, result)
    if options.plot is not None:
        with writing(f"--plot {options.plot}"):
            plot_drift(options.plot, result, slices, monitored)
    return result


def _check(options: DriftOptions) -> None:
    if sum((options.log is not None, bool(options.prompts), bool(options.metrics_url))) != 1:
        raise UserError(
            "give one of --log FILE (a server's log), --metrics-url URL (its counters) and --prompts FILE (fresh prompts)"
        )
    if options.scrapes < 2 or not 0 <= options.interval < 1e6:
        raise UserError(
            f"--scrapes {options.scrapes} --interval {options.interval:g}: give at least 2, some seconds apart"
        )
    for option, value in (
        ("--chat", options.chat), ("--prompt-column", options.prompt_column), ("--messages-column", options.messages_column)
    ):  # fmt: skip
        if value and not options.prompts:
            raise UserError(f"{option} is for --prompts: a log is of prompts that were rendered already")
    if not 0 < options.false_alarms <= 0.5:
        raise UserError(f"--false-alarms {options.false_alarms}: give a probability between 0 and 0.5, e.g. 0.01")
    if not 0 < options.drop < 1:
        raise UserError(f"--drop {options.drop}: give a fall in accepted/drafted between 0 and 1, e.g. 0.05")
    if options.gamma is not None and not 1 <= options.gamma <= 128:
        raise UserError(f"--gamma {options.gamma}: give the server's drafted tokens per block, 1 to 128")
    if options.rule and options.rule not in get_args(Rule):
        raise UserError(f"--rule {options.rule}: one of {', '.join(get_args(Rule))}")
    if options.drafting not in ("", *DRAFTINGS):
        raise UserError(f"--drafting {options.drafting}: one of {', '.join(DRAFTINGS)}")
    check_writable("--out", options.out)
    check_plot(options.plot)


def _baseline(options: DriftOptions, gamma: int | None) -> Baseline:
    """The run's live counts where they are of its best draft and of this gamma and rule, else drawn along its frozen text."""
    path, stored, notes = options.run / RESULT, None, []
    if path.is_file():
        stored = load_result(path)
        own_rule, own_gamma, own = stored.verdict.rule, stored.verdict.gamma, stored.verdict.drafting
        notes = other_best(options.run, stored, str(path))
        same = gamma in (None, own_gamma) and options.rule in ("", own_rule)
        same = same and own == (options.drafting or drafting_to_serve(stored.verdict, True))
        if not notes and stored.live_prompts and same:
            prompts = prompts_of_result(stored.live_prompts, str(path))
            return Baseline(own_gamma, own_rule, "live", prompts, drafting=own)  # type: ignore[arg-type]
    wanted: Any = options.rule or (own_rule if stored else None)
    frozen = load_frozen_text(options.run, wanted)
    gamma = gamma or (own_gamma if stored else frozen.config.judge.gamma)
    draft = frozen.draft(str(options.run))
    parallel = mask_token_of(draft.config) is not None
    drafting: Any = options.drafting or drafting_to_serve(stored.verdict if stored else None, parallel)
    offsets = gamma if drafting == "parallel" else None
    scores = score_tokens(draft, frozen.responses, frozen.sampling, offsets=offsets)
    prompts = redrawn_prompts(frozen.responses, scores, frozen.rule, gamma, options.seed)
    return Baseline(gamma, frozen.rule, "replay", prompts, notes, drafting)


def _decoded(options: DriftOptions, frozen: FrozenText, baseline: Baseline) -> tuple[AcceptanceLog, list[str]]:
    """Fresh prompts decoded live by target and best draft, as the run serves them; one record a prompt."""
    config, target = frozen.config, frozen.target.model
    draft = frozen.draft(str(options.run))
    rows, labelled = asked_rows(options.prompts, options.prompt_column, options.messages_column, label="domain")
    template = config.data.template
    context = context_limit(max_positions(target.config), max_positions(draft.config), config.data.context_length)
    prompts, labels = [], []
    for number, row in enumerate(rows):
        mode = "chat" if options.chat or row.messages is not None else template.mode
        ids = render_prompt(row, frozen.target.tokenizer, mode=mode, chat_template_kwargs=template.chat_template_kwargs)
        if check_lengths(ids, row.origin, context, config.serving.max_tokens, config.data.too_long):
            # Its coins belong to the prompt and its place, not to the file's name.
            prompts.append((f"{number}:{content_hash(row)}", ids))
            labels.append(row.domain if labelled else None)
    if not prompts:
        raise UserError(f"--prompts {options.prompts}: every prompt is too long for the context of {context} tokens")
    # Another seed than the run's own decoding: the same prompt under both would share its coins.
    settings = decode_settings(config.serving, config.seed, frozen.target).under(baseline.rule, baseline.gamma)
    settings = replace(settings, seed=config.seed + 3 + options.seed)
    responses, _ = decode(
        target, Draft(draft, baseline.drafting).drafter(), prompts, settings, batch_size=config.judge.batch_size
    )
    records = [
        AcceptanceRecord(order, response.drafted, response.accepted, response.blocks, label)
        for order, (response, label) in enumerate(zip(responses, labels, strict=True))
        if response.drafted
    ]
    notes = []
    if len(prompts) < len(rows):
        notes.append(f"{len(rows) - len(prompts)} of {len(rows)} prompts are too long and left out")
    known = {response.key for response in frozen.responses}
    seen = sum(content_hash(row) in known for row in rows)
    if seen:
        notes.append(f"{seen} of {len(rows)} prompts are held-out prompts of the run: they are not fresh")
    if not labelled:
        notes.append(f"{options.prompts} has no column `domain`: one slice")
    return AcceptanceLog(records, "prompts", sums=False), notes


def _counts(part: Slice) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([record.accepted for record in part.records], dtype=np.float64),
        np.array([record.drafted for record in part.records], dtype=np.float64),
    )


def _monitor(part: Slice, options: DriftOptions, level: float, seed: int) -> Monitored:
    accepted_N, drafted_N = _counts(part)
    chart = chart_for(part.pool, drafted_N, level, options.drop, two_sided=options.two_sided, seed=seed)
    return monitor(part.pool, accepted_N, drafted_N, chart)


def _slice_facts(part: Slice, found: Monitored, log: AcceptanceLog, options: DriftOptions) -> dict[str, Any]:
    """One entry of ["slices"]; see `drift_command`."""
    accepted_N, drafted_N = _counts(part)
    rate, ci = rate_with_interval(part.pool, accepted_N, drafted_N)
    change, change_ci = change_with_interval(part.pool, accepted_N, drafted_N)
    power = power_of(part.pool, drafted_N, found.chart, seed=options.seed + 1)
    is_open = [alarm for alarm in found.alarms if alarm.until is None]
    first = min((alarm.since for alarm in found.alarms), default=len(accepted_N) + 1)
    quiet = slice(0, first - 1)  # A change between would make neighbours alike by itself.
    told = [record for record in part.records if record.blocks is not None]
    blocks = sum(record.blocks or 0 for record in told)
    facts: dict[str, Any] = {
        "name": part.name, "compared_with": part.of, "requests": len(accepted_N), "drafted": int(drafted_N.sum()),
        "accepted": int(accepted_N.sum()), "rate": rate, "ci": list(ci),
        "baseline_rate": sum(row.accepted for row in part.prompts) / sum(row.drafted for row in part.prompts),
        "baseline_prompts": len(part.prompts), "change": change, "change_ci": list(change_ci),
        "tau": 1 + sum(record.accepted for record in told) / blocks if blocks else None,
        "baseline_tau": 1 + sum(row.accepted for row in part.prompts) / sum(row.blocks for row in part.prompts),
        "level": found.chart.level, "allowance": found.chart.allowance,
        "threshold": found.chart.threshold, "highest": float(found.path_N.max()),
        "alarms": [asdict(alarm) for alarm in found.alarms], "behind": None,
        "power": asdict(power), "neighbour_correlation": neighbour_correlation(part.pool, accepted_N[quiet], drafted_N[quiet]),
        "refresh": any(alarm.direction == "down" for alarm in is_open),
    }  # fmt: skip
    if is_open:
        since = is_open[-1].since
        rate, ci = rate_with_interval(part.pool, accepted_N[since - 1 :], drafted_N[since - 1 :])
        change, change_ci = change_with_interval(part.pool, accepted_N[since - 1 :], drafted_N[since - 1 :])
        facts["behind"] = {
            "since": since, "requests": len(accepted_N) - since + 1, "rate": rate, "ci": list(ci), "change": change,
            "change_ci": list(change_ci), "time": part.records[since - 1].time,
        }  # fmt: skip
    return facts | {"sentence": _sentence(facts, "line" if log.sums else "request")}


def _sentence(facts: dict[str, Any], unit: str) -> str:
    """What one slice says."""
    where = "" if facts["name"] == ALL else f"{facts['name']}: "
    baseline = facts["baseline_rate"]
    behind, alarms = facts["behind"], facts["alarms"]
    if behind is not None:
        alarm = next(alarm for alarm in reversed(alarms) if alarm["until"] is None)
        verb = "fell" if alarm["direction"] == "down" else "rose"
        words = (
            f"{where}accepted/drafted {verb} from {baseline:.3f} to {behind['rate']:.3f} "
            f"({behind['change']:+.3f} {interval(behind['change_ci'], sign=True)}) since {unit} {alarm['since']:,} of "
            f"{facts['requests']:,}{' (' + behind['time'] + ')' if behind['time'] else ''}, seen at {unit} {alarm['at']:,}"
        )
        if alarm["since"] == 1:
            words += (
                f"; it was so from the first {unit} on: see that the server's template, temperature, rule and gamma are "
                "the run's"
            )
        return words
    power = facts["power"]
    seen = (
        f"a drop of {power['detectable']:.3f} from the first {unit} on would have been seen with "
        f"{100 * power['wanted']:g} % probability"
        if power["detectable"] is not None
        else f"but {facts['requests']:,} {unit}s are too few to see any drop with {100 * power['wanted']:g} % probability"
    )
    words = (
        f"{where}accepted/drafted {facts['rate']:.3f} {interval(facts['ci'])} against {baseline:.3f} "
        f"({facts['change']:+.3f} {interval(facts['change_ci'], sign=True)}); {seen}"
    )
    if alarms:
        past = alarms[-1]
        words += (
            f"; between {unit} {past['since']:,} and {past['until']:,} it "
            f"{'fell' if past['direction'] == 'down' else 'rose'} and came back"
        )
    return words


def _length_notes(slices: list[Slice], log: AcceptanceLog) -> list[str]:
    if log.sums:
        return []
    notes = []
    for part in slices:
        here = float(np.median([record.drafted for record in part.records]))
        there = float(np.median(part.pool.drafted_P))
        if not 1 / _OTHER_LENGTHS <= here / there <= _OTHER_LENGTHS:
            notes.append(
                f"{part.name}: a request drafts {here:.0f} tokens here and {there:.0f} in the baseline: its spread is "
                "carried over by a model, and acceptance may differ by length alone"
            )
    return notes


def _correlation_notes(told: list[dict[str, Any]]) -> list[str]:
    return [
        f"{facts['name']}: neighbouring requests resemble each other (correlation {facts['neighbour_correlation']:.2f}): "
        "false alarms come more often than stated"
        for facts in told
        if facts["requests"] >= 30 and (facts["neighbour_correlation"] or 0) > max(0.1, 3 / facts["requests"] ** 0.5)
    ]


def _facts(
    options: DriftOptions, baseline: Baseline, log: AcceptanceLog, told: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """The result of `drift_command`."""
    refresh = [facts for facts in told if facts["refresh"]]
    source = options.log or options.metrics_url or options.prompts
    requests, unit = len(log.records), "log lines" if log.sums else "requests"
    rate = f"false alarm rate {100 * options.false_alarms:g} % over {requests:,} {unit}"
    if len(told) > 1:
        rate += f" in {len(told)} slices"
    if refresh:
        sentence = f"Refresh the draft: {'; '.join(facts['sentence'] for facts in refresh)} ({rate})."
    else:
        risen = any(facts["behind"] for facts in told)
        # Many slices are in the table; the one that has fallen most stands for them.
        shown = told if len(told) <= 3 else [min(told, key=lambda facts: facts["change"])]
        words = "; ".join(facts["sentence"] for facts in shown)
        sentence = f"{'No refresh needed' if risen else 'No drift seen'}: {words} ({rate})."
    if baseline.source == "replay":
        notes = [
            f"the baseline at gamma {baseline.gamma}, rule {baseline.rule} is drawn by replay along the run's frozen text, "
            "not counted live",
            *notes,
        ]
    return {
        "run": str(options.run),
        "source": {
            "kind": "log" if options.log else "metrics" if options.metrics_url else "prompts", "path": str(source), "format": log.format, "requests": requests,
        },
        "baseline": {
            "gamma": baseline.gamma, "rule": baseline.rule, "drafting": baseline.drafting, "from": baseline.source,
            "prompts": len(baseline.prompts),
        },
        "false_alarm_rate": options.false_alarms, "drop": options.drop, "two_sided": options.two_sided,
        "refresh": bool(refresh), "sentence": sentence, "notes": notes, "slices": told,
    }  # fmt: skip


def _print(console: Console, result: dict[str, Any]) -> None:
    """The table, the notes and the sentence."""
    baseline = result["baseline"]
    table = screen_table(
        f"{result['source']['path']} against {result['run']} (gamma {baseline['gamma']}, rule {baseline['rule']})",
        ("slice", "requests", "accepted\n/drafted", "change", "length", "sum"),
        words=("slice",),
        no_wrap=True,
        caption="(baseline), [95 % interval]; length: 1 + accepted per block; sum: highest over its threshold, 1 = alarm",
    )
    table.columns[0].no_wrap = False
    for facts in result["slices"]:
        other = "" if facts["compared_with"] == facts["name"] else f"\n(against {facts['compared_with']})"
        table.add_row(
            facts["name"] + other,
            f"{facts['requests']:,}",
            f"{facts['rate']:.3f}\n({facts['baseline_rate']:.3f})",
            f"{facts['change']:+.3f}\n{interval(facts['change_ci'], sign=True)}",
            f"{'?' if facts['tau'] is None else format(facts['tau'], '.2f')}\n({facts['baseline_tau']:.2f})",
            f"{facts['highest'] / facts['threshold']:.2f}",
            style="bold" if facts["refresh"] else "",
        )
    console.print(table)
    for who, survival in result.get("survival", {}).items():
        values = (
            "not known, the run has no such text"
            if survival is None
            else " ".join(f"{value:.3f}" for value in survival)
        )
        console.print(f"survival by place, {who}: {values}", highlight=False, markup=False)
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(result["sentence"], style="yellow" if result["refresh"] else "green", highlight=False, markup=False)


def plot_drift(path: Path, result: dict[str, Any], slices: list[Slice], monitored: list[Monitored]) -> None:
    """The sum of each slice over its threshold, request by request; png or svg by the file's name."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for part, found in zip(slices, monitored, strict=True):
        counts = np.arange(1, len(found.path_N) + 1)
        (line,) = axis.plot(counts, found.path_N / found.chart.threshold, label=part.name, linewidth=1.2)
        if found.up_path_N is not None:
            axis.plot(
                counts, -found.up_path_N / found.chart.threshold, color=line.get_color(), linestyle=":", linewidth=1
            )
        for alarm in found.alarms:
            axis.plot([alarm.at], [1 if alarm.direction == "down" else -1], marker="o", color=line.get_color())
    for height in (1, -1) if result["two_sided"] else (1,):
        axis.axhline(height, linestyle="--", color="grey")
    axis.set(
        xlabel="request of its slice", ylabel="CUSUM over its threshold",
        title=f"a drop of {result['drop']:g}, false alarm rate {100 * result['false_alarm_rate']:g} %",
    )  # fmt: skip
    axis.legend(fontsize=8, loc="upper left")
    axis.grid(alpha=0.3)
    write_figure(figure, path)
