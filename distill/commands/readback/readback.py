"""`understudy readback URL --run RUN`: does a running engine accept this run's draft as replay predicts, and write the target's text?

Exit status: 0 it does, 1 it does not, 2 a mistake in the command or no server.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from data.files import write_json
from data.responses.endpoint_keys import key_in
from data.responses.engine_client import EngineClient
from data.responses.store import Store
from distill.commands.options import ReadbackOptions
from distill.commands.output import check_known, check_writable, write_asked
from distill.commands.readback.asking import AnswerFile, Asked, ask
from distill.commands.readback.causes import acceptance_causes, end_note, few_note, text_causes
from distill.commands.readback.comparison import Counted, Predicted, Replayer, count, pace, tau_interval, waits
from distill.config.layout import (
    ANSWERS,
    EXPORT,
    GREEDY_ANSWERS,
    HELDOUT_GREEDY,
    PLAIN_ANSWERS,
    READBACK,
    RESPONSES,
    VERDICT,
)
from distill.export.load_table import drafts_by, gamma_plan
from distill.report.sections.served import served_lines, served_tables
from distill.run.frozen_text import FrozenText, load_frozen_text
from distill.run.lock import held_for
from distill.run.responses import decode_settings, frozen_responses_of
from distill.run.served_record import SERVED_TEXT, GreedyTexts, ServedRecord, TextLawRecord
from distill.run.verdict_record import WAYS, Verdict, drafting_to_serve, load_verdict
from speculative.decoder.responses import Response
from speculative.drafters.draft import DRAFTINGS, Draft
from speculative.engine.models import mask_token_of
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.text_law import TextLaw, text_law
from speculative.measure.measured import DRAFT, HELD_OUT, TARGET, Measured
from speculative.measure.record import Record
from speculative.measure.self_checks import SelfCheckError, near_tie
from speculative.measure.served import Decoded
from speculative.rules.rule import RULES, rules_of_text

_SEED = 4  # Added to the run's seed, so that it differs from the seeds of the run's own responses.


def readback(options: ReadbackOptions) -> int:
    """Run `readback_command` and return the exit status."""
    return 0 if readback_command(options).agrees else 1


def readback_command(options: ReadbackOptions, console: Console | None = None) -> ServedRecord:
    """Ask the engine, compare, print, and write served.json into the run.

    Raises:
        UserError: an option out of range, no run or a run in use, no server, or a server that reports no draft counts.
    """
    _check(options)
    with held_for(options.run / READBACK):
        frozen, greedy = _frozen(options)
        verdict = load_verdict(options.run) if (options.run / VERDICT).is_file() else None
        clients = _clients(options, frozen)
        settings = decode_settings(frozen.config.serving, frozen.config.seed + _SEED + options.seed, frozen.target)
        settings = replace(settings, max_tokens=frozen.manifest["max_tokens"])
        greedily, sampled = settings.under("greedy", 0), frozen.rule != "greedy"
        greedy_file, *files = (
            AnswerFile(options.run / name, client, options.resume)
            for name, client in zip((GREEDY_ANSWERS, ANSWERS, PLAIN_ANSWERS), (clients[0], *clients), strict=False)
        )
        in_greedy = ask([greedy_file], greedy, greedily) if greedy and sampled else None
        main = ask(files, frozen.responses, settings if sampled else greedily)
        record = _record(options, frozen, clients[0], main, main if not sampled else in_greedy, verdict)
        write_json(options.run / READBACK, record.record())
    write_asked("--out", options.out, record.record())
    if options.json:
        print(json.dumps(record.record(), indent=2))
    else:
        _print(console or Console(), record, options.run)
    return record


def _check(options: ReadbackOptions) -> None:
    check_known("--rule", options.rule, ("auto", *RULES))
    check_known("--drafting", options.drafting, ("", *DRAFTINGS))
    if not 0 < options.timeout < math.inf:
        raise UserError(f"--timeout {options.timeout:g}: give a positive number of seconds")
    key_in(options.api_key_env)
    check_writable("--out", options.out)


def _frozen(options: ReadbackOptions) -> tuple[FrozenText, list[HeldoutResponse]]:
    """Return (the run's text for the rule, its greedy text or an empty list), limited to the requested prompts."""
    wanted: Any = None if options.rule == "auto" else options.rule
    frozen = load_frozen_text(options.run, wanted, options.trust_remote_code)
    frozen = replace(frozen, responses=frozen.responses[: options.prompts])
    if not frozen.responses:
        raise UserError(f"{options.run}: no held-out responses; give a run that has judged its draft")
    if frozen.rule == "greedy":
        return frozen, frozen.responses
    store = options.run / RESPONSES / HELDOUT_GREEDY
    return frozen, frozen_responses_of(Store(store).read())[: options.prompts] if store.is_dir() else []


def _served(run: Path) -> str:
    """Return what `understudy serve` serves: the export if it is 8-bit, else the run's draft itself."""
    config = run / EXPORT / "config.json"
    quantised = config.is_file() and "quantization_config" in Record.read(config, "export again").record()
    return str(run / EXPORT if quantised else run)


def _gammas(options: ReadbackOptions, frozen: FrozenText, verdict: Verdict | None, draft: Draft) -> tuple[int, ...]:
    """Return the gammas that the server may use: --gamma, else the exported one at --concurrency, the others, then the judged one."""
    if options.gamma is not None:
        return (options.gamma,)
    plans = [gamma_plan(verdict, way) for way in (drafts_by(verdict)[draft.drafting], DRAFT)] if verdict else []
    judged = verdict.gamma if verdict else frozen.config.judge.gamma
    ranges = plans[0].by_load if plans else ()
    at_load = [gamma for first, last, gamma in ranges if first <= options.concurrency <= last]
    gammas = *at_load, *(plan.gamma for plan in plans), max(1, judged), *(gamma for _, _, gamma in ranges)
    return tuple(dict.fromkeys(gamma for gamma in gammas if gamma))


def _clients(options: ReadbackOptions, frozen: FrozenText) -> list[EngineClient]:
    """Return clients of the server with the draft and, with --plain, of the one without."""
    tokenizer, rows = frozen.target.tokenizer, frozen.target.facts.vocab_rows
    how: dict[str, Any] = {
        "model": options.model or None,
        "timeout": options.timeout,
        "concurrency": options.concurrency,
        "api_key_env": options.api_key_env,
    }
    urls = [options.url, *([options.plain] if options.plain else [])]
    clients = [EngineClient(url, tokenizer, rows, **how) for url in urls]
    if len({client.root for client in clients}) < len(clients):
        raise UserError(
            f"--plain {options.plain}: this is the same server; give the same engine without the draft, on another port"
        )
    for client in clients:
        client.identify()
    return clients


def _law(asked: Asked, frozen: FrozenText) -> tuple[TextLaw | None, list[str]]:
    """Return (the test of the sampled text against the target, notes on why it was not run)."""
    if frozen.target.config.endpoint is not None:
        return None, ["the target's weights are on a server, so the distribution of the text is not tested"]
    if any(answer.ids is None for answer in asked.answers):
        without = "the server gives no token ids, so the distribution of its text is not tested, and replay uses the run's text"
        return None, [without]
    pairs = zip(asked.texts, asked.answers, strict=True)
    texts = [Decoded(own.prompt_ids, answer.ids or [], []) for own, answer in pairs]
    return text_law(frozen.target.model, texts, asked.settings.sampling), []


def _record(
    options: ReadbackOptions,
    frozen: FrozenText,
    client: EngineClient,
    main: Asked,
    greedy: Asked | None,
    verdict: Verdict | None,
) -> ServedRecord:
    sampled, model = frozen.rule != "greedy", frozen.draft(_served(options.run))
    way: Any = options.drafting or drafting_to_serve(verdict, mask_token_of(model.config) is not None)
    draft = Draft(model, way)
    gammas = _gammas(options, frozen, verdict, draft)
    law, notes = _law(main, frozen) if sampled else (None, [])
    try:
        counted = count(main, gammas[0])
    except UserError as error:
        raise UserError(f"{client.endpoint.url}: {error}") from error
    wanted = counted.gamma if counted.gamma in gammas else gammas[0]
    replayer = Replayer(draft, main, law, max(wanted, counted.gamma))
    found = _rule(options, counted, replayer, wanted, sampled)
    causes = text_causes(law, main, frozen.target) if law is not None and not law.same else []
    causes += acceptance_causes(counted, replayer, found)
    texts, more = _greedy_texts(greedy, frozen)
    causes += more + ([f"counters: {main.reset}"] if main.reset else [])
    return ServedRecord(
        format=2, engine=client.engine, version=client.version, url=options.url, drafting=draft.drafting, source=counted.source,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        sampling=main.settings.sampling.as_dict() | {"max_tokens": main.settings.max_tokens},
        **_measured(options, main, counted, replayer, found), z=found.z, agrees=not causes, greedy=texts,
        text_law=None if law is None else TextLawRecord.model_validate(law, from_attributes=True),
        causes=causes, notes=notes + counted.notes + few_note(counted, found) + end_note(counted, client.engine),
    )  # fmt: skip


def _measured(
    options: ReadbackOptions, asked: Asked, counted: Counted, replayer: Replayer, found: Predicted
) -> Mapping[str, Any]:
    """Return the numeric keys of `ServedRecord`."""
    speed, shown = pace(asked.answers, asked.plain), replayer.predict(counted, found.rule, counted.gamma)
    survival, rate = replayer.shares(found.rule, found.gamma, counted.spared)
    tokens, known = sum(answer.tokens for answer in asked.answers), replayer.knows(found.rule)
    served = Measured(
        DRAFT, found.rule, options.concurrency, SERVED_TEXT, len(asked.answers), tokens, counted.gamma, tau=counted.tau,
        tau_ci=tau_interval(counted, shown.tau, shown.tau_ci), accepted_per_drafted=counted.accepted_per_drafted,
        tokens_per_second=speed.tokens_per_second, speed_up=speed.speed_up, speed_up_ci=speed.speed_up_ci, **waits(asked.answers),
        how=dict.fromkeys(("tau", "accepted_per_drafted", "tokens_per_second", "speed_up", "first_token_ms", "per_token_ms"), "served"),
    )  # fmt: skip
    of_text = replace(Measured(DRAFT, found.rule), text=SERVED_TEXT if known else HELD_OUT, prompts=served.prompts)
    predicted = replace(
        of_text, gamma=found.gamma, tau=found.tau, tau_ci=found.tau_ci, accepted_per_drafted=rate,
        how=dict.fromkeys(("tau", "accepted_per_drafted"), "replay"),
    )  # fmt: skip
    rows = [served, predicted]
    if speed.plain is not None:
        rows.append(
            replace(
                served, way=TARGET, tokens=sum(answer.tokens for answer in asked.plain), gamma=0, tau=1.0, tau_ci=None,
                accepted_per_drafted=None, tokens_per_second=speed.plain, speed_up=1.0, speed_up_ci=None,
                how=dict.fromkeys(("tokens_per_second", "first_token_ms", "per_token_ms"), "served"), **waits(asked.plain),
            )
        )  # fmt: skip
    if known:
        tau, tau_ci = replayer.expect(found.rule, found.gamma)
        rows.append(
            replace(predicted, text=HELD_OUT, tau=tau, tau_ci=tau_ci, accepted_per_drafted=None, how={"tau": "replay"})
        )
    return {
        "measured": rows, "survival": {"replay": survival} | ({} if counted.survival is None else {"served": counted.survival}),
        "tokens_per_second_ci": speed.tokens_per_second_ci,
        "latency": speed.latency, "latency_ci": speed.latency_ci,
    }  # fmt: skip


def _rule(options: ReadbackOptions, counted: Counted, replayer: Replayer, gamma: int, sampled: bool) -> Predicted:
    """Return the prediction under --rule; by default under the closest of the rules that engines use."""
    if not sampled or options.rule != "auto":
        return replayer.predict(counted, "greedy" if not sampled else options.rule, gamma)
    usual = [rule for rule in rules_of_text("sample") if rule != "block"]
    near = {rule: replayer.predict(counted, rule, counted.gamma) for rule in usual}
    rule = min(usual, key=lambda rule: abs(near[rule].tau - counted.tau))
    return replayer.predict(counted, rule, gamma)


def _greedy_texts(asked: Asked | None, frozen: FrozenText) -> tuple[GreedyTexts | None, list[str]]:
    """Return (comparison of greedy texts, the cause if they differ beyond near-ties)."""
    if asked is None:
        return None, []
    equal = ties = 0
    worst = ""
    for own, answer in zip(asked.texts, asked.answers, strict=True):
        if answer.ids is None:
            decoded = str(frozen.target.tokenizer.decode(own.response_ids, skip_special_tokens=False))
            same = answer.text == decoded or (answer.finished and decoded.startswith(answer.text))
        else:
            same = answer.ids == own.response_ids
        if same:
            equal += 1
        elif frozen.target.config.endpoint is not None or not answer.ids:
            worst = worst or f"prompt {own.key} differs"
        else:
            said = Response(own.key, own.prompt_ids, response_ids=answer.ids)
            try:
                near_tie(frozen.target.model, replace(said, response_ids=own.response_ids), said)
                ties += 1
            except SelfCheckError as error:
                worst = worst or str(error)
    texts = GreedyTexts(prompts=len(asked.answers), equal=equal, near_ties=ties)
    if not worst:
        return texts, []
    told = f"greedy: {equal} of {texts.prompts} greedy texts equal the run's, {ties} differ after a near-tie; {worst}"
    return texts, [told]


def _print(console: Console, record: ServedRecord, run: Path) -> None:
    """Print the table of served.json, its notes and causes, and whether the engine agrees."""
    own = record.served
    title = f"{run} in {record.where}: {WAYS[record.drafting]}, rule {own.rule}, gamma {own.gamma}"
    console.print(f"{title}, {own.prompts} prompts, {own.tokens:,} tokens", highlight=False, markup=False)
    for table in served_tables(record):
        console.print(table)
    console.print(
        "tau without the first token of each response, which comes from the prefill; [95 % interval]", markup=False
    )
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for cause in record.causes:
        console.print(cause, style="yellow", highlight=False, markup=False)
    for line in served_lines(record):
        console.print(line, style="green" if record.agrees else "yellow", highlight=False, markup=False)
