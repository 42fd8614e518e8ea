"""`understudy drift RUN`: compare the acceptance of a running engine, by its counters or answers, with the run's verdict.

The test statistic is accepted/drafted now minus that of the run's held-out prompts, by replay at the same gamma and rule. The draft has
drifted if the interval of the difference is wholly below zero. This assumes independent requests like the held-out prompts. Users repeat
themselves and ask for other things, so the test says that acceptance on this traffic is lower, but not why.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from rich.console import Console

from data.responses.endpoint_keys import key_in
from distill.commands.drift.baseline import Baseline, baseline_of, gamma_of, slices_of
from distill.commands.drift.options import DriftOptions
from distill.commands.drift.sources import AcceptanceLog, read_answers, scrape
from distill.commands.output import check_known, check_writable, write_asked
from speculative.errors import UserError
from speculative.explain.rate_change import rate_change
from speculative.measure.intervals import Interval, interval
from speculative.measure.measured import DRAFT, HELD_OUT, How, Measured, Row
from speculative.measure.record import Record
from speculative.rules.rule import RULES

REFRESH = 3  # Exit status when a refresh is advised.
CONFIDENCE = 0.95  # of the interval that decides


class Drift(Record):
    """The result: two rows with accepted/drafted, now and as judged at the same mix of labels. source: the file or url. ci: of `change`,
    the difference of the two.
    """

    format: Literal[3]
    run: str
    source: str
    drafting: str
    measured: list[Row]
    change: float
    ci: Interval
    confidence: float
    refresh: bool
    sentence: str
    notes: list[str]

    @property
    def now(self) -> Measured:
        """The row of the requests."""
        return self.measured[0]

    @property
    def judged(self) -> Measured:
        """The row of the run's held-out prompts."""
        return self.measured[1]


def drift(options: DriftOptions) -> int:
    """Run `drift_command` and return the exit status."""
    return REFRESH if drift_command(options).refresh else 0


def drift_command(options: DriftOptions, console: Console | None = None) -> Drift:
    """Compare, print a sentence and write --out. The exit status is REFRESH if ``refresh`` is true.

    Raises UserError: an option out of range, no run, an unreadable log, or a file that cannot be written.
    """
    _check(options)
    console = console or Console()
    if options.log is not None:
        log = read_answers(options.log)
    else:
        key = key_in(options.api_key_env)
        log = scrape(options.metrics_url, options.scrapes, options.interval, options.gamma, key)
    gamma, notes = gamma_of(log, options.gamma)
    baseline = baseline_of(options, gamma)
    notes = log.warnings + notes
    if not options.rule and baseline.rule.draws:
        notes.append(
            f"the baseline is under rule {baseline.rule}; if the engine drafts its argmax, as most do by default, add --rule greedy-draft"
        )
    result = _compared(options, log, baseline, notes)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(result.sentence, style="yellow" if result.refresh else "green", highlight=False, markup=False)
    write_asked("--out", options.out, result.record())
    return result


def _check(options: DriftOptions) -> None:
    if (options.log is None) == (not options.metrics_url):
        raise UserError("give --metrics-url URL (an engine's counters) or --log FILE (answers of a readback)")
    if options.log is not None and options.log.is_dir():
        raise UserError(f"--log {options.log}: a directory; for a gateway's give `understudy traffic show DIR`")
    if options.scrapes < 2 or not 0 <= options.interval < 1e6:
        raise UserError(f"--scrapes {options.scrapes} --interval {options.interval:g}: give at least 2, seconds apart")
    check_known("--rule", options.rule, ("", *RULES))
    check_writable("--out", options.out)


def _compared(options: DriftOptions, log: AcceptanceLog, baseline: Baseline, notes: list[str]) -> Drift:
    labels, members_SP, more = slices_of(log.records, baseline.prompts)
    now, judged = (
        np.array([[record.accepted, record.drafted] for record in records]).T
        for records in (log.records, baseline.prompts)
    )
    change = rate_change(now, labels, judged, members_SP, sums=log.sums, confidence=CONFIDENCE)
    refresh, requests = change.ci[1] < 0, len(log.records)
    sentence = (
        f"{'Refresh the draft' if refresh else 'No drift'}: accepted/drafted is {change.rate:.3f}, and {change.baseline:.3f} in the run at "
        f"gamma {baseline.gamma}, rule {baseline.rule}. The change is {change.change:+.3f} {interval(change.ci, '+.3f')} over {requests:,} "
        f"{'intervals' if log.sums else 'requests'}."
    )
    source, way = str(options.log or options.metrics_url), Measured(DRAFT, baseline.rule.name)
    kinds: tuple[tuple[str, int, float, How], ...] = (
        (source, requests, change.rate, "served"),
        (HELD_OUT, len(baseline.prompts), change.baseline, "replay"),
    )
    rows = [
        replace(
            way,
            text=text,
            prompts=count,
            gamma=baseline.gamma,
            accepted_per_drafted=rate,
            how={"accepted_per_drafted": how},
        )
        for text, count, rate, how in kinds
    ]
    return Drift(
        format=3,
        run=str(options.run),
        source=source,
        drafting=baseline.drafting,
        measured=rows,
        change=change.change,
        ci=change.ci,
        confidence=CONFIDENCE,
        refresh=refresh,
        sentence=sentence,
        notes=notes + more,
    )
