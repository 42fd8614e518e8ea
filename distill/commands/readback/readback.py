"""`understudy readback URL`: does a running engine accept its drafts as expected, and does it write the target's text?

With `--run RUN` what is expected is replay of that run's draft. With `--target T --prompts P` any drafter is judged, and of it nothing is
expected.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from data.files import write_json
from data.responses.endpoint_keys import key_in
from distill.commands.output import check_known, check_writable
from distill.commands.readback.asking import AnswerFile, Replies, ask
from distill.commands.readback.causes import text_causes
from distill.commands.readback.comparison import plain_row, served_row
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.source import Source, of_prompts, of_run
from distill.config.layout import ANSWERS, GREEDY_ANSWERS, PLAIN_ANSWERS, READBACK
from distill.engines.protocol.client import EngineClient
from distill.engines.protocol.engine import engine_in
from distill.models.target import Target
from distill.report.sections.readback import readback_lines, readback_tables
from distill.run.lock import held_for
from distill.run.readback_record import GreedyTexts, ReadbackRecord, TextFitRecord
from distill.run.verdict_record import WAYS
from speculative.decoder.responses import Response
from speculative.errors import UserError
from speculative.explain.text_fit import TextFit, parting, text_fit
from speculative.measure.engine_blocks import Decoded
from speculative.measure.self_checks import SelfCheckError, near_tie
from speculative.rules.rule import RULES


def readback(options: ReadbackOptions) -> int:
    """Run `readback_command` and return the exit status."""
    return 0 if readback_command(options).agrees else 1


def readback_command(options: ReadbackOptions, console: Console | None = None) -> ReadbackRecord:
    """Ask the engine, compare, print, and write readback.json into the run, or into --to.

    Raises UserError: an option out of range, no run or a run in use, no server, or a server that reports no draft counts.
    """
    _check(options)
    place = options.run or options.to
    if options.run is None:
        check_writable("--to", place / READBACK)
    opened = of_prompts(options) if options.run is None else of_run(options, options.run)
    with held_for(place / READBACK), opened as source:
        clients = _clients(options, source)
        greedily, sampled = source.settings.at_temperature_0(), not source.settings.sampling.greedy
        greedy_file, *files = (
            AnswerFile(source.folder / name, client, options.resume)
            for name, client in zip((GREEDY_ANSWERS, ANSWERS, PLAIN_ANSWERS), (clients[0], *clients), strict=False)
        )
        aside = source.greedy if sampled else []
        whole = files[0].has(source.texts, source.settings) and not options.speed
        earlier = ReadbackRecord.stored(source.folder) if whole else None
        if earlier is not None and earlier.url == options.url and greedy_file.has(aside, greedily):
            # Nothing more is asked of it, so it may be gone, or the engine without the draft may have its address.
            clients[0].engine, clients[0].version = engine_in(earlier.engine), earlier.version
            clients[0].weights = earlier.weights
        else:
            if len({client.root for client in clients}) < len(clients):
                raise UserError(
                    f"--plain {options.plain}: this is the same server; give the same engine without the draft, on another port, "
                    "or restart it without the draft after a whole readback and add --resume"
                )
            clients[0].identify()
        for client in clients[1:]:
            client.identify()
        in_greedy = ask([greedy_file], aside, greedily, source.by_request) if aside else None
        main = ask(files, source.texts, source.settings, source.by_request)
        record = _record(options, source, clients[0], main, in_greedy if sampled else main)
        if source.speed is not None:
            checks = source.speed(files, (source.texts, main.settings), record.served.rule)
            record = record.model_copy(update={"speed": checks})
        write_json(source.folder / READBACK, record.record())
    _print(console or Console(), record, source.name)
    return record


def _check(options: ReadbackOptions) -> None:
    check_known("--rule", options.rule, ("auto", *RULES))
    if options.run is None and not (options.target and options.prompts):
        raise UserError("readback: give --run RUN, or --target TARGET and --prompts FILE to judge any drafter")
    if options.draft and options.run is None:
        raise UserError(f"--draft {options.draft}: replaces the draft of a run; give it with --run")
    if options.speed and options.run is None:
        raise UserError("--speed: compares with the engine_costs.json of a run; give it with --run")
    if options.speed and not options.plain:
        raise UserError("--speed: give the same engine without the draft with --plain")
    key_in(options.api_key_env)


def _clients(options: ReadbackOptions, source: Source) -> list[EngineClient]:
    """Return clients of the server with the draft and, with --plain, of the one without; none is asked yet."""
    how: dict[str, Any] = {"concurrency": options.concurrency, "api_key_env": options.api_key_env}
    urls = [options.url, *([options.plain] if options.plain else [])]
    clients = [EngineClient(url, source.target.tokenizer, source.target.facts.vocab_rows, **how) for url in urls]
    for client in clients:
        client.label = source.label
    return clients


def _text_fit(replies: Replies, source: Source, inputs: str) -> tuple[TextFit | None, list[str]]:
    """Return (the test of the sampled text against the target, notes on why it was not run)."""
    if source.target.config.at_server:
        return None, ["the target's weights are on a server, so the distribution of the text is not tested"]
    if any(answer.ids is None for answer in replies.answers):
        instead = "" if source.by_request else ", and replay uses the run's text"
        return None, [f"the server gives no token ids, so the distribution of its text is not tested{instead}"]
    pairs = zip(replies.texts, replies.answers, strict=True)
    texts = [Decoded(own.prompt_ids, answer.ids or [], []) for own, answer in pairs]
    with source.target.loaded() as model:
        return text_fit(model, texts, replies.settings.sampling, inputs), []


def _record(
    options: ReadbackOptions, source: Source, client: EngineClient, main: Replies, greedy: Replies | None
) -> ReadbackRecord:
    inputs = client.engine.dialect.inputs_of(client.weights)
    fit, notes = _text_fit(main, source, inputs) if not main.settings.sampling.greedy else (None, [])
    try:
        judged = source.judge(main, fit, client.engine.name)
    except UserError as error:
        raise UserError(f"{client.endpoint.url}: {error}") from error
    counted = judged.counted
    if main.left_out:
        notes.append(f"{main.left_out} answers are left out: the server does not list all their token ids")
    causes = text_causes(fit) if fit is not None else []
    texts, more = _greedy_texts(greedy, source.target, inputs)
    causes += judged.causes + more + ([f"counters: {main.reset}"] if main.reset else [])
    served, speed = served_row(main, counted, judged.rule, judged.gamma, judged.tau_ci, options.concurrency)
    alone = [] if speed.plain is None else [plain_row(main, served, speed.plain)]
    return ReadbackRecord(
        format=3,
        engine=client.engine.name,
        version=client.version,
        weights=client.weights,
        inputs=inputs,
        url=options.url,
        drafting=judged.drafting,
        source=counted.source,
        target=options.target,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        sampling=main.settings.sampling.as_dict() | {"max_tokens": main.settings.max_tokens},
        measured=[served, *judged.rows[:1], *alone, *judged.rows[1:]],
        survival=judged.survival | ({} if counted.survival is None else {"served": counted.survival}),
        survival_ci=counted.survival_ci,
        tokens_per_second_ci=speed.tokens_per_second_ci,
        latency=speed.latency,
        latency_ci=speed.latency_ci,
        z=judged.z,
        agrees=not causes,
        greedy=texts,
        text_fit=None if fit is None else TextFitRecord.model_validate(fit, from_attributes=True),
        causes=causes,
        notes=notes + judged.notes,
    )


def _greedy_texts(replies: Replies | None, target: Target, inputs: str) -> tuple[GreedyTexts | None, list[str]]:
    """Return (comparison of greedy texts, the cause if they differ by more than the engine's arithmetic or near-ties)."""
    if replies is None:
        return None, []
    equal, ties, partings = 0, 0, list[tuple[float, float]]()
    worst = ""
    for text, answer in zip(replies.texts, replies.answers, strict=True):
        if answer.ids is None:
            decoded = str(target.tokenizer.decode(text.response_ids, skip_special_tokens=False))
            same = answer.text == decoded or (answer.finished and decoded.startswith(answer.text))
        else:
            same = answer.ids == text.response_ids
        if same:
            equal += 1
        elif target.config.at_server or not answer.ids:
            worst = worst or f"prompt {text.key} differs"
        else:
            served = Response(text.key, text.prompt_ids, response_ids=answer.ids)
            exact = replace(served, response_ids=text.response_ids)
            try:
                with target.loaded() as model:
                    if inputs:
                        partings.append(parting(model, exact, served, inputs))
                    else:
                        near_tie(model, exact, served)
                ties += 1
            except SelfCheckError as error:
                worst = worst or str(error)
    gap, moved = max(partings, default=(0.0,))[0], sum(one[1] for one in partings) / max(1, len(partings))
    texts = GreedyTexts(prompts=len(replies.answers), equal=equal, near_ties=ties, gap=gap, moved=moved)
    if not worst:
        return texts, []
    told = (
        f"greedy: {equal} of {texts.prompts} greedy texts equal the target's, {ties} differ after a near-tie; {worst}"
    )
    return texts, [told]


def _print(console: Console, record: ReadbackRecord, name: str) -> None:
    """Print the table of readback.json, its notes and causes, and whether the engine agrees."""
    served = record.served
    drafting = f"{WAYS[record.drafting]}, rule {served.rule}, " if record.drafting else ""
    gamma = "unknown" if served.gamma is None else served.gamma
    title = f"{name} in {record.where}: {drafting}gamma {gamma}"
    console.print(f"{title}, {served.prompts} prompts, {served.tokens:,} tokens", highlight=False, markup=False)
    for table in readback_tables(record):
        console.print(table)
    console.print(
        "tau without the first token of each response, which comes from the prefill; [95 % interval]", markup=False
    )
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for cause in record.causes:
        console.print(cause, style="yellow", highlight=False, markup=False)
    for line in readback_lines(record):
        console.print(line, style="green" if record.agrees else "yellow", highlight=False, markup=False)
