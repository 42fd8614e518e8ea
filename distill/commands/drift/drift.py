"""`understudy drift RUN`: compare acceptance on fresh prompts, a server's log or its counters with the run's verdict.

The test statistic is accepted/drafted now minus that of the run's held-out prompts, by replay at the same gamma and rule. The draft has
drifted if the interval of the difference is wholly below zero. This assumes independent requests like the held-out prompts. Users repeat
themselves and ask for other things, so the test says that acceptance on this traffic is lower, but not why.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from rich.console import Console

from data.prompts.split import content_hash
from data.prompts.template import check_lengths, render_prompt
from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord, read_acceptance_log
from data.responses.endpoint_keys import key_in
from distill.commands.drift.baseline import Baseline, baseline_of, engine_notes, gamma_of, slices_of
from distill.commands.drift.counters import scrape
from distill.commands.options import DriftOptions
from distill.commands.output import check_known, check_writable, write_asked
from distill.run.frozen_text import load_frozen_text
from distill.run.prompts import asked_rows
from distill.run.responses import decode_settings
from distill.run.session import context_limit
from speculative.decode import decode
from speculative.drafters.draft import DRAFTINGS, Draft
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.explain.rate_change import rate_change
from speculative.measure.intervals import Interval, interval
from speculative.measure.measured import DRAFT, HELD_OUT, How, Measured, Row
from speculative.measure.record import Record
from speculative.rules.rule import RULES

REFRESH = 3  # Exit status when a refresh is advised.


class Drift(Record):
    """The result: two rows with accepted/drafted, now and as judged at the same mix of labels. source: the file or url; log: its
    format. ci: of `change`, the difference of the two.
    """

    format: Literal[2]
    run: str
    source: str
    log: str
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

    Raises UserError: an option out of range, no run, an unreadable log or prompt file, or a file that cannot be written.
    """
    _check(options)
    console = console or Console()
    if options.prompts:
        baseline = baseline_of(options, options.gamma)
        log = _decoded(options, baseline)
        notes = log.warnings
    else:
        if options.log is not None:
            log = read_acceptance_log(options.log, options.format)
        else:
            key = key_in(options.api_key_env)
            log = scrape(options.metrics_url, options.scrapes, options.interval, options.gamma, key)
        gamma, notes = gamma_of(log, options.gamma)
        baseline = baseline_of(options, gamma)
        notes = log.warnings + notes + engine_notes(log, baseline)
    found = _compared(options, log, baseline, notes)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(found.sentence, style="yellow" if found.refresh else "green", highlight=False, markup=False)
    write_asked("--out", options.out, found.record())
    return found


def _check(options: DriftOptions) -> None:
    if sum((options.log is not None, bool(options.prompts), bool(options.metrics_url))) != 1:
        raise UserError("give one of --log FILE, --metrics-url URL (its counters) and --prompts FILE (fresh prompts)")
    if options.log is not None and options.log.is_dir():
        raise UserError(f"--log {options.log}: a directory; for a gateway's give `understudy traffic show DIR`")
    if options.scrapes < 2 or not 0 <= options.interval < 1e6:
        raise UserError(f"--scrapes {options.scrapes} --interval {options.interval:g}: give at least 2, seconds apart")
    for option, value in (
        ("--chat", options.chat),
        ("--prompt-column", options.prompt_column),
        ("--messages-column", options.messages_column),
    ):
        if value and not options.prompts:
            raise UserError(f"{option} is for --prompts: a log contains rendered prompts")
    if not 0.5 <= options.confidence < 1:
        raise UserError(f"--confidence {options.confidence}: give a probability of at least 0.5 and below 1, e.g. 0.95")
    check_known("--rule", options.rule, ("", *RULES))
    check_known("--drafting", options.drafting, ("", *DRAFTINGS))
    check_writable("--out", options.out)


def _compared(options: DriftOptions, log: AcceptanceLog, baseline: Baseline, notes: list[str]) -> Drift:
    slices, more = slices_of(log.records, baseline.prompts)
    members_SP = np.zeros((len(slices), len(baseline.prompts)), dtype=bool)
    for number, part in enumerate(slices):
        members_SP[number, part.prompts] = True
    ordered = [(record, number) for number, part in enumerate(slices) for record in part.records]
    now, judged = (
        np.array([[record.accepted, record.drafted] for record in records]).T
        for records in ([record for record, _ in ordered], baseline.prompts)
    )
    labels = [number for _, number in ordered]
    found = rate_change(now, labels, judged, members_SP, sums=log.sums, confidence=options.confidence)
    refresh, requests = found.ci[1] < 0, len(log.records)
    sentence = (
        f"{'Refresh the draft' if refresh else 'No drift'}: accepted/drafted is {found.rate:.3f}, and {found.baseline:.3f} in the run at "
        f"gamma {baseline.gamma}, rule {baseline.rule}. The change is {found.change:+.3f} {interval(found.ci, '+.3f')} over {requests:,} "
        f"{'log lines' if log.sums else 'requests'}."
    )
    source, way = str(options.log or options.metrics_url or options.prompts), Measured(DRAFT, baseline.rule)
    kinds: tuple[tuple[str, int, float, How], ...] = (
        (source, requests, found.rate, "live" if options.prompts else "served"),
        (HELD_OUT, len(baseline.prompts), found.baseline, "replay"),
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
        format=2,
        run=str(options.run),
        source=source,
        log=log.format,
        drafting=baseline.drafting,
        measured=rows,
        change=found.change,
        ci=found.ci,
        confidence=options.confidence,
        refresh=refresh,
        sentence=sentence,
        notes=notes + more,
    )


def _decoded(options: DriftOptions, baseline: Baseline) -> AcceptanceLog:
    """Decode fresh prompts live with target and best draft at the run's serving settings: one record per prompt."""
    frozen = load_frozen_text(options.run, baseline.rule, options.trust_remote_code)
    config, target = frozen.config, frozen.target.model
    draft = frozen.draft(str(options.run))
    rows, labelled = asked_rows(options.prompts, options.prompt_column, options.messages_column, label="domain")
    context = context_limit(max_positions(target.config), max_positions(draft.config), config.data.context_length)
    prompts, labels = [], []
    for number, row in enumerate(rows):
        chat = {"mode": "chat"} if options.chat or row.messages is not None else {}
        ids = render_prompt(row, frozen.target.tokenizer, config.data.template.model_copy(update=chat))
        if check_lengths(ids, row.origin, context, config.serving.max_tokens, config.data.too_long):
            # Its coins belong to the prompt and its place, not to the file's name.
            prompts.append((f"{number}:{content_hash(row)}", ids))
            labels.append(row.domain if labelled else None)
    if not prompts:
        raise UserError(f"--prompts {options.prompts}: every prompt is too long for the context of {context} tokens")
    # Another seed than the run's own decoding: the same prompt under both would share its coins.
    settings = decode_settings(config.serving, config.seed, frozen.target).under(baseline.rule, baseline.gamma)
    settings = replace(settings, seed=config.seed + 3)
    drafter = Draft(draft, baseline.drafting).drafter()
    responses, _ = decode(target, drafter, prompts, settings, batch_size=config.judge.batch_size)
    records = [
        AcceptanceRecord(order, response.drafted, response.accepted, response.blocks, label)
        for order, (response, label) in enumerate(zip(responses, labels, strict=True))
        if response.drafted
    ]
    notes = []
    if len(prompts) < len(rows):
        notes.append(f"{len(rows) - len(prompts)} of {len(rows)} prompts are too long and are left out")
    known = {response.key for response in frozen.responses}
    if seen := sum(content_hash(row) in known for row in rows):
        notes.append(f"{seen} of {len(rows)} prompts are held-out prompts of the run, so they are not fresh")
    if not labelled:
        notes.append(f"{options.prompts} has no column `domain`, so it is compared with all held-out prompts")
    return AcceptanceLog(records, "prompts", sums=False, warnings=notes)
