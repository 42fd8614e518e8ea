"""`understudy compare URL ... runs/mine`: served drafters beside drafts of ours, on a run's held-out prompts, paired by prompt.

Shapes: P prompts, 4 sums of each: tokens after the prefill's, target calls, all tokens, seconds.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from rich.console import Console

from distill.commands.compare.comparison import way_of
from distill.commands.compare.options import CompareOptions
from distill.commands.output import write_asked
from distill.commands.readback.asking import AnswerFile, ask
from distill.commands.readback.comparison import served_row
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.source import Source, counted_alone, of_run
from distill.engines.protocol.client import EngineClient
from distill.report.measured import timed_table
from distill.run.heldout_set import HeldoutSet
from distill.run.lock import held_for
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.measure.effects import Gain
from speculative.measure.engine_blocks import after_prefill, tau_of
from speculative.measure.intervals import intervals_of_sums, sum_by_prompt
from speculative.measure.measured import Measured, Row
from speculative.measure.metrics import predicted_row
from speculative.measure.record import Record
from speculative.measure.token_scores import score_tokens


class ServedDifference(Record):
    """What a way gains over the first, paired by prompt. tokens_per_second: per request; null: one of the two is not served."""

    way: str
    tau: Gain
    tokens_per_second: Gain | None


Sums = tuple[float, float, float, float]  # of a response: see above


class ServedComparison(Record):
    """A row for each way, as served or by replay of the text of the run `on`, and what the others gain over the first."""

    format: Literal[1] = 1
    kind: Literal["served comparison"] = "served comparison"
    made: str
    on: str
    measured: list[Row]
    differences: list[ServedDifference]


def compare_served(options: CompareOptions, text: HeldoutSet, console: Console) -> int:
    """Ask the servers, replay the drafts on the same prompts, print and write --out.

    Raises UserError: an option that needs replay of all ways, no server, or one that does not count each request.
    """
    if options.fail_below:
        raise UserError("--fail-below: needs drafts, not URLs; use --out and its differences")
    if names := [name for name in options.drafts if not is_url(name) and way_of(name).recipe.looks_up]:
        raise UserError(f"{names[0]}: lookup is not replayed beside URLs; remove it")
    rule: Any = options.rule or "auto"
    asked = ReadbackOptions("", text.run, rule=rule, trust_remote_code=options.trust_remote_code)
    with of_run(asked, text.run) as source:
        # Drafts first: one that cannot be loaded must not cost the answers of a server.
        ours = {
            name: Draft(text.draft(str(way_of(name).draft)), way_of(name).drafting)
            for name in options.drafts
            if not is_url(name)
        }
        with held_for(source.folder / "served"):
            served = {
                number: _served(name, source, number) for number, name in enumerate(options.drafts) if is_url(name)
            }
    gammas = {row.gamma for row, _ in served.values()}
    gamma = options.gamma or (len(gammas) == 1 and gammas.pop()) or text.config.judge.gamma
    sides = [
        served.get(number) or _replayed(name, ours[name], text, gamma) for number, name in enumerate(options.drafts)
    ]
    keys = [key for key in sides[0][1] if all(key in of for _, of in sides)]
    if not keys:
        raise UserError("no prompt has token ids and counts from every way, so nothing can be compared")
    if missing := max(len(of) for _, of in sides) - len(keys):
        console.print(f"{missing} prompts are not compared: a server did not list all token ids", highlight=False)
    prompt_of = {one.key: one.prompt for one in text.responses}
    prompts = [prompt_of[key] for key in keys]
    (first, base), *others = [
        (row, np.stack([sum_by_prompt(prompts, own_N) for own_N in np.array([of[key] for key in keys]).T], 1))
        for row, of in sides
    ]
    gains = [
        ServedDifference(
            way=row.way,
            tau=_gain(sums_P4, base, 0),
            tokens_per_second=_gain(sums_P4, base, 2) if row.tokens_per_second and first.tokens_per_second else None,
        )
        for row, sums_P4 in others
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    result = ServedComparison(made=now, on=str(text.run), measured=[row for row, _ in sides], differences=gains)
    write_asked("--out", options.out, result.record())
    _print(result, console)
    return 0


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _served(url: str, source: Source, number: int) -> tuple[Measured, dict[str, Sums]]:
    client = EngineClient(url, source.target.tokenizer, source.target.facts.vocab_rows)
    client.identify()
    file = AnswerFile(source.folder / f"server-{number}.jsonl", client, resume=False)
    replies = ask([file], source.texts, source.settings, by_request=True)
    try:
        judged = counted_alone(replies, None)
    except UserError as error:
        raise UserError(f"{url}: {error}") from error
    rows = judged.counted.rows
    if rows is None:
        raise UserError(f"{url}: reports only sums of all requests; make it report each request (docs/readback.md)")
    sums: dict[str, Sums] = {
        text.key: (row.tokens, row.blocks, one.tokens, one.seconds)
        for text, row, one in zip(replies.texts, rows, replies.answers, strict=True)
    }
    row, _ = served_row(replies, judged.counted, judged.rule, judged.gamma, judged.tau_ci, 1)
    return replace(row, way=url), sums


def _replayed(name: str, draft: Draft, text: HeldoutSet, gamma: int) -> tuple[Measured, dict[str, Sums]]:
    texts = [after_prefill(item) for item in text.responses]
    scores = score_tokens(draft.model, texts, text.sampling, offsets=draft.offsets(gamma))
    (_, blocks_N), tokens_N = tau_of(scores, text.rule, gamma), np.array([len(item) for item in scores])
    prompts = [item.prompt for item in text.responses]
    row = predicted_row(Measured(name, text.rule.name, gamma=gamma), prompts, tokens_N, blocks_N)
    row = replace(row, tokens=int(tokens_N.sum()) + len(texts))
    rows = zip(tokens_N.tolist(), blocks_N.tolist(), tokens_N.tolist(), [0.0] * len(texts), strict=True)
    return row, {item.key: of for item, of in zip(text.responses, rows, strict=True)}


def _gain(ours_P4: np.ndarray, base_P4: np.ndarray, column: int) -> Gain:
    """The difference of the rates column / (column + 1), with its interval over prompts."""

    def apart(sums_C: np.ndarray) -> np.ndarray:
        return sums_C[..., :1] / sums_C[..., 1:2] - sums_C[..., 2:3] / sums_C[..., 3:]

    sums_PC = np.concatenate((ours_P4[:, column : column + 2], base_P4[:, column : column + 2]), 1)
    return Gain(gain=float(apart(sums_PC.sum(0))[0]), ci=intervals_of_sums(sums_PC, apart)[0])


def _print(result: ServedComparison, console: Console) -> None:
    title = f"{result.measured[0].prompts} held-out prompts of {result.on}"
    console.print(timed_table(result.measured, None, title, "tau as served, or by replay. Brackets: 95 % interval."))
    for one in result.differences:
        speed = "" if one.tokens_per_second is None else f", tokens/s {one.tokens_per_second:+.1f}"
        console.print(f"{one.way} compared with {result.measured[0].way}: tau {one.tau:+.3f}{speed}", markup=False)
