"""What a readback asks, and what it expects. A run has its held-out prompts and expects replay; prompts alone expect nothing of a draft."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.responses.store import Store
from distill.commands.readback.asking import Replies
from distill.commands.readback.causes import acceptance_causes, few_note
from distill.commands.readback.comparison import Counted, ReplayedTau, Replayer, count, own_interval, tau_interval
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.speed import speed_checks
from distill.commands.target import check_room, open_target
from distill.config.layout import EXPORT, HELDOUT_GREEDY, RESPONSES, VERDICT
from distill.export.load_table import drafts_by, gamma_plan
from distill.models.files.gguf import GGUF
from distill.models.target import Target
from distill.run.heldout_set import HeldoutSet, load_heldout_set
from distill.run.prompts import command_rows, render_rows
from distill.run.readback_record import SERVED_TEXT, SpeedCheck
from distill.run.responses import decode_settings, heldout_responses
from distill.run.verdict_record import Drafting, Verdict, drafting_to_serve, load_verdict
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.engine.models import mask_token_of
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, decode_heldout
from speculative.explain.text_fit import TextFit
from speculative.measure.intervals import Interval
from speculative.measure.measured import DRAFT, HELD_OUT, Measured
from speculative.measure.record import Record
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

_SEED = 4  # Added to the run's seed, so that it differs from the seeds of the run's own responses.
_MOST_GAMMA = 128  # For engines that report only tokens: calls are then the tokens that were not accepted.


@dataclass(frozen=True)
class Judged:
    """Counts of the engine, and what is expected of them. rows, z and drafting: empty or None if nothing is expected."""

    counted: Counted
    rule: str
    tau_ci: Interval | None
    gamma: int | None
    rows: list[Measured] = field(default_factory=list)
    survival: dict[str, list[float]] = field(default_factory=dict)
    z: float | None = None
    drafting: Drafting | None = None
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Prompts to send under `settings`. texts, greedy: of the target, at these settings and greedily; without a run, `texts` are prompts.

    folder: for answers and the result. label: of the target in errors. by_request: count each request by the server's counters if its
    answers have no counts. judge: compares the counts of an engine with what is expected, given the fit of the sampled text. speed: with
    --speed, as `speed_checks`.
    """

    name: str
    folder: Path
    target: Target
    label: str
    texts: list[HeldoutResponse]
    greedy: list[HeldoutResponse]
    settings: DecodeSettings
    judge: Callable[[Replies, TextFit | None, str], Judged]
    by_request: bool = False
    speed: Callable[..., list[SpeedCheck]] | None = None


@contextlib.contextmanager
def of_prompts(options: ReadbackOptions) -> Iterator[Source]:
    """Prompts of a file, and the target's greedy texts, decoded here.

    Raises UserError: no target, prompts or settings, or a prompt that is too long.
    """
    rows = command_rows(options.prompts)
    target = open_target(options.target, "auto", "")
    with target.single_load():
        prompts = render_rows(rows[: options.count], target.tokenizer, options.chat)
        check_room(prompts, options.max_tokens, target.facts.context_length)
        # The content is in the key, so that --resume never takes an answer to another prompt.
        keyed = [(f"{key} {zlib.crc32(repr(ids).encode()):08x}", ids) for key, ids in prompts]
        sampling = SamplingSettings(options.temperature)
        rule = Rule.usual(sampling.temperature)
        settings = DecodeSettings(sampling, 0, rule, options.max_tokens, target.facts.eos_ids, 0)
        with target.loaded() as model:
            greedy = decode_heldout(model, keyed, settings.at_temperature_0(), "")
        texts = greedy if sampling.greedy else [replace(text, response_ids=[], log_target_probs=[]) for text in greedy]

        def judge(replies: Replies, *_: Any) -> Judged:
            return counted_alone(replies, options.gamma, options.rule)

        name = f"{options.prompts} for {options.target}"
        yield Source(name, options.to, target, "--target", texts, greedy, settings, judge, True)


def counted_alone(replies: Replies, gamma: int | None, rule: str = "auto") -> Judged:
    """The counts with the calls in which nothing was drafted, as with n-grams. Engines do not count those; each emits one token."""
    counts = [answer.counts for answer in replies.answers]
    counted = count(replies, gamma or _MOST_GAMMA)
    notes = list[str]()
    if counted.rows is not None:
        taken = [(each and each.accepted) or 0 for each in counts]
        rows = [
            replace(row, blocks=max(row.blocks, row.tokens - own)) for row, own in zip(counted.rows, taken, strict=True)
        ]
        total = replace(counted, rows=rows, blocks=sum(row.blocks for row in rows))
        knows_gamma = any(each is not None and (each.gamma or each.drafted) for each in counts)
    else:
        server = replies.server
        assert server is not None
        total = replace(counted, blocks=max(counted.blocks, counted.tokens - (server.accepted or 0)))
        knows_gamma = server.drafted is not None
        notes.append(
            "sums only, so there are no intervals; use --concurrency 1, or make the engine report each request"
        )
    if total.blocks > counted.blocks:
        notes.append(
            f"nothing was drafted in {1 - counted.blocks / total.blocks:.0%} of the calls; they count in tau, not "
            "in survival. Tokens accepted "
            "after the end of a response can hide such a call, so tau is slightly high"
        )
    rule = replies.settings.rule.name if replies.settings.sampling.greedy else "unknown" if rule == "auto" else rule
    gamma = total.gamma if knows_gamma else gamma
    return Judged(total, rule, own_interval(total), gamma, notes=total.notes + notes)


@contextlib.contextmanager
def of_run(options: ReadbackOptions, run: Path) -> Iterator[Source]:
    """The run's held-out prompts at its own sampling settings, with replay of its best draft.

    Raises UserError: no run, or one without held-out responses.
    """
    if options.prompts:
        raise UserError(
            f"--prompts {options.prompts}: --run {run} has its own; remove one of the two (--count N sends N of the run's prompts)"
        )
    heldout, greedy = _heldout(options, run)
    verdict = load_verdict(run) if (run / VERDICT).is_file() else None
    settings = decode_settings(heldout.config.serving, heldout.config.seed + _SEED, heldout.target)
    settings = replace(settings, max_tokens=heldout.manifest["max_tokens"])
    settings = settings if not heldout.rule.greedy else settings.at_temperature_0()
    target, path = heldout.target, options.target
    if heldout.config.target.path.endswith(GGUF) and target.facts.dtype != "float32":
        path = path or heldout.config.target.path
    if path:
        target = open_target(path, "auto", "")
        target.tokenizer = heldout.target.tokenizer
        # The draft is rounded as it was exported, for the run's target.
        heldout = heldout if options.target else replace(heldout, target=target)
    judge = functools.partial(_judge, options, heldout, verdict)
    speed = None
    if options.speed:
        if verdict is None or verdict.engine is None:
            raise UserError(f"--speed: {run} has no engine_costs.json; make it with `understudy time {run}`")
        if (count := len(heldout.responses)) < (most := max(verdict.engine.ratios)):
            raise UserError(f"--speed: {count} prompts for {most} concurrent requests; give more prompts")
        speed = functools.partial(speed_checks, verdict, run)
    texts = heldout.responses
    with target.single_load():
        if path:
            prompts = [(text.key, text.prompt_ids) for text in texts]
            with target.loaded() as model:
                greedy = decode_heldout(model, prompts, settings.at_temperature_0(), "")
            texts = greedy if heldout.rule.greedy else texts
        yield Source(str(run), run, target, "target.path", texts, greedy, settings, judge, speed=speed)


def _judge(
    options: ReadbackOptions,
    heldout: HeldoutSet,
    verdict: Verdict | None,
    main: Replies,
    fit: TextFit | None,
    engine: str,
) -> Judged:
    sampled, model = not heldout.rule.greedy, heldout.draft(options.draft or _served(heldout.run))
    way = drafting_to_serve(verdict, mask_token_of(model.config) is not None)
    draft = Draft(model, way)
    gammas = _gammas(options, heldout, verdict, draft, engine)
    counted = count(main, gammas[0])
    wanted = counted.gamma if counted.gamma in gammas else gammas[0]
    replayer = Replayer(draft, main, fit, max(wanted, counted.gamma))
    prediction = _rule(options, counted, replayer, wanted, sampled)
    shown = replayer.predict(counted, prediction.rule, counted.gamma)
    survival, rate = replayer.shares(prediction.rule, prediction.gamma, counted.spared)
    return Judged(
        counted,
        prediction.rule.name,
        tau_interval(counted, shown.tau, shown.tau_ci),
        counted.gamma,
        _rows(replayer, prediction, rate),
        {"replay": survival},
        prediction.z,
        draft.drafting,
        acceptance_causes(counted, replayer, prediction),
        counted.notes + few_note(counted, prediction),
    )


def _rows(replayer: Replayer, prediction: ReplayedTau, rate: float) -> list[Measured]:
    """Replay of the served text if it is known, and of the run's own text."""
    replayable = replayer.knows(prediction.rule)
    row = Measured(
        DRAFT,
        prediction.rule.name,
        text=SERVED_TEXT if replayable else HELD_OUT,
        prompts=len(replayer.replies.answers),
        gamma=prediction.gamma,
        tau=prediction.tau,
        tau_ci=prediction.tau_ci,
        accepted_per_drafted=rate,
        how=dict.fromkeys(("tau", "accepted_per_drafted"), "replay"),
    )
    if not replayable:
        return [row]
    tau, tau_ci = replayer.expect(prediction.rule, prediction.gamma)
    own = replace(row, text=HELD_OUT, tau=tau, tau_ci=tau_ci, accepted_per_drafted=None, how={"tau": "replay"})
    return [row, own]


def _heldout(options: ReadbackOptions, run: Path) -> tuple[HeldoutSet, list[HeldoutResponse]]:
    """Return (the run's text for the rule, its greedy text or an empty list), limited to the requested prompts."""
    wanted: Any = None if options.rule == "auto" else options.rule
    heldout = load_heldout_set(run, wanted, options.trust_remote_code)
    heldout = replace(heldout, responses=heldout.responses[: options.count])
    if not heldout.responses:
        raise UserError(f"{run}: no held-out responses; give a run that has judged its draft")
    if heldout.rule.greedy:
        return heldout, heldout.responses
    store = run / RESPONSES / HELDOUT_GREEDY
    return heldout, heldout_responses(Store(store).read())[: options.count] if store.is_dir() else []


def _served(run: Path) -> str:
    """Return what `understudy serve` serves: the export if it is 8-bit, else the run's draft itself."""
    config = run / EXPORT / "config.json"
    quantised = config.is_file() and "quantization_config" in Record.read(config, "export again").record()
    return str(run / EXPORT if quantised else run)


def _gammas(
    options: ReadbackOptions, heldout: HeldoutSet, verdict: Verdict | None, draft: Draft, engine: str = ""
) -> tuple[int, ...]:
    """Return the gammas that the server may use: --gamma, else the exported one at --concurrency, the others, then the judged one."""
    if options.gamma is not None:
        return (options.gamma,)
    own = drafts_by(verdict)[draft.drafting]
    plans = [gamma_plan(verdict, *of) for of in ((own, engine), (own,), (DRAFT,))]
    judged = verdict.gamma if verdict else heldout.config.judge.gamma
    ranges = plans[0].by_load
    at_load = [gamma for first, last, gamma in ranges if first <= options.concurrency <= last]
    gammas = *at_load, *(plan.gamma for plan in plans), max(1, judged), *(gamma for _, _, gamma in ranges)
    return tuple(dict.fromkeys(gamma for gamma in gammas if gamma))


def _rule(options: ReadbackOptions, counted: Counted, replayer: Replayer, gamma: int, sampled: bool) -> ReplayedTau:
    """Return the prediction under --rule; by default under the closest of the rules that engines use."""
    if not sampled or options.rule != "auto":
        return replayer.predict(counted, Rule.named(options.rule) if sampled else Rule.usual(0), gamma)
    truncated = replayer.replies.settings.sampling.truncates
    usual = [rule for rule in Rule.usual(1).replayable(truncates=truncated) if not rule.joint]
    near = {rule: replayer.predict(counted, rule, counted.gamma) for rule in usual}
    rule = min(usual, key=lambda rule: abs(near[rule].tau - counted.tau))
    return replayer.predict(counted, rule, gamma)
