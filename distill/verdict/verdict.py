"""Make the verdict of a run from its evidence. The record's shape is in distill/run/verdict_record.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distill.run.verdict_record import WAYS, Costs, DraftOf, Roofline, Verdict
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import Evidence
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.sentence import conclude, within
from speculative.evaluate import Judgement, OnText
from speculative.explain.repetition import repetition
from speculative.measure.cost import StepCosts, break_even_alpha, near_best_gammas
from speculative.measure.effects import Effects, Gain, paired_effects
from speculative.measure.intervals import ratio_interval, sum_by_prompt
from speculative.measure.load import LoadCurve
from speculative.measure.measured import HELD_OUT, SERVED, TARGET, TRAINING, UNDISTILLED, How, Measured, largest_load
from speculative.measure.metrics import alpha_with_interval, ratio_with_interval
from speculative.measure.record import VERSION
from speculative.measure.replay import expected_blocks_of
from speculative.measure.timing import spread_order
from speculative.measure.token_scores import TokenScores, score_tokens

TRAINING_TEXTS = 128  # responses that are enough to see alpha differ by a few points
OVERFIT = 0.02  # alpha; a smaller lead on learned text is no reason to look for more prompts


def describe_costs(costs: StepCosts, setup: JudgingSetup) -> Costs:
    """The measured costs as plain numbers."""
    gamma = setup.gamma
    gammas = sorted(costs.verify_seconds)
    return Costs(
        target_step_seconds=costs.target_seconds,
        draft_step_seconds=costs.draft_step_seconds,
        cost_ratio=costs.cost_ratio,
        cost_ratio_at={g: costs.cost_ratio_at(g) for g in gammas},
        verify_ratio={g: costs.verify_ratio(g) for g in gammas},
        break_even_alpha=break_even_alpha(gamma, costs.paying_tau(gamma)),
        batch_size=costs.batch_size,
        context=costs.context,
        threads=setup.judge.speed_threads or torch.get_num_threads(),
        steps=costs.steps,
    )


def verdict_of(
    evidence: Evidence,
    *,
    checkpoints: Sequence[Judgement],
    self_checks: dict[str, Any],
    learned: Measured | None = None,
) -> Verdict:
    """Make the verdict from evidence alone: the last draft compared with the undistilled and the served draft, if any.

    `seconds` is left empty. checkpoints: every judged one, from which the last draft was picked. learned: its `training_row`.
    """
    setup, best = evidence.setup, evidence.judged[evidence.best.name]
    costs = evidence.best_costs
    gain, against_served = (_effects(evidence, name) for name in (UNDISTILLED, SERVED))
    conclusion = conclude(evidence, gain, against_served)
    repeated = repetition(setup.heldout)
    judged = judged_rows(evidence)
    lacking = _lacking_text(learned, next(row for row in judged if row.way == evidence.best.name))
    measured = [
        *judged,
        *([learned] if learned else []),
        *(row for timing in evidence.timings for row in timing.rows(evidence.scores[setup.rule])),
    ]
    limits = {str(name): most for name, most in setup.judge.latency_ms.items()} if evidence.timings else {}
    loads = {way: largest_load(measured, way, limits) for way in (TARGET, evidence.best.name) if limits}
    facts = [*conclusion.facts, *lacking, *_lighter(evidence), *within(limits, loads)]
    curve = evidence.loads.curve
    return Verdict(
        format=2,
        version=VERSION,
        measured=measured,
        drafts=[
            DraftOf(way=one.name, path=one.path, step=one.step, drafting=one.draft.drafting) for one in evidence.drafts
        ],
        run={str(one.concurrency): one.to_run() for one in evidence.timings},
        outcome=conclusion.outcome,
        pays=conclusion.pays,
        headline=conclusion.headline,
        facts=facts,
        gain=gain,
        against_served=against_served,
        survival=best.survival,
        live_tokens=best.live_tokens,
        replay_check=best.replay_check,
        rule=setup.rule.name,
        gamma=setup.gamma,
        prompts=best.prompts or 0,
        tokens=best.tokens or 0,
        replay=best.replay,
        best_gamma_range=near_best_gammas(costs.timed(best.replay), costs) if costs else None,
        costs=describe_costs(costs, setup) if costs is not None else None,
        latency_loads=loads,
        plain_wins_from=curve.plain_wins_from() if curve else None,
        roofline=_roofline(curve) if curve else None,
        checkpoints=with_gains(checkpoints, setup.keys),
        self_checks=self_checks,
        repetition=repeated,
        warnings=[
            *best.warnings,
            *([repeated.warning] if repeated.warning else []),
            *(warning for timing in evidence.timings for warning in timing.warnings),
            *evidence.loads.warnings,
        ],
        seconds={},
    )


def training_row(setup: JudgingSetup, draft: NamedDraft) -> Measured | None:
    """alpha of a draft on some of the target's responses to training prompts, from one draft pass; None without any."""
    chosen = (setup.history[place] for place in spread_order(len(setup.history))[:TRAINING_TEXTS])
    texts = [text for text in chosen if len(text.response_ids) == len(text.log_target_probs) > 0]
    if not texts:
        return None
    scores = score_tokens(draft.draft.model, texts, setup.settings.sampling)
    probs = [own.accept_probs(setup.rule) for own in scores]
    alpha, ends = alpha_with_interval(probs, [tuple(text.prompt_ids) for text in texts])
    tokens = sum(map(len, scores))
    how: dict[str, How] = {"alpha": "replay"}
    return Measured(
        draft.name,
        setup.rule.name,
        text=TRAINING,
        prompts=len(texts),
        tokens=tokens,
        alpha=alpha,
        alpha_ci=ends,
        how=how,
    )


def _lacking_text(learned: Measured | None, heldout: Measured) -> list[str]:
    """A sentence if the draft is certainly better on text that it learned: then text is what lacks; steps may lack too."""
    if learned is None or learned.alpha_ci is None or heldout.alpha_ci is None:
        return []
    if learned.alpha_ci[0] <= heldout.alpha_ci[1] + OVERFIT:
        return []
    return [
        f"On responses that it learned, alpha is {learned.alpha:.3f}, on held-out ones {heldout.alpha:.3f}: "
        "more prompts would help. `understudy sweep configs/sweeps/prompts.yaml`, with your config as `base`, "
        "says how much."
    ]


def with_gains(records: Sequence[Judgement], keys: Sequence[Any]) -> list[Judgement]:
    """Give each checkpoint its gain over the first one, paired by prompt on the same text; drop the sums by response."""
    first, judgements = records[0].per_response, []
    for record in records:
        own, plain = record.per_response, record.without_sums()
        if first is not None and own is not None and record is not records[0] and own.tokens == first.tokens:
            gains_P = sum_by_prompt(keys, np.subtract(own.accept_sums, first.accept_sums))
            tokens_P = sum_by_prompt(keys, np.array(own.tokens))
            gain = Gain(gain=float(gains_P.sum() / tokens_P.sum()), ci=ratio_interval(gains_P, tokens_P))
            plain = plain.model_copy(update={"gain": gain})
        judgements.append(plain)
    return judgements


def judged_rows(evidence: Evidence) -> list[Measured]:
    """Every draft at the judged gamma, on the held-out text and on its domains."""
    rows = []
    for draft in evidence.drafts:
        judged = evidence.judged[draft.name]
        own = _row(evidence, draft.name, judged, HELD_OUT, judged.live)
        rows.append(_widened(evidence, own) if draft is evidence.best and evidence.setup.looks > 1 else own)
        rows += [
            _row(evidence, draft.name, part, domain, judged.live and part.tau is not None)
            for domain, part in judged.domains.items()
        ]
    return rows


def _row(evidence: Evidence, way: str, score: OnText, text: str, live: bool) -> Measured:
    gamma = evidence.setup.gamma
    return Measured(
        way,
        evidence.setup.rule.name,
        text=text,
        prompts=score.prompts,
        tokens=score.tokens,
        gamma=gamma,
        alpha=score.alpha,
        alpha_ci=score.alpha_ci,
        tau=score.tau if score.tau is not None else score.replay.get(gamma),
        tau_ci=score.tau_ci,
        accepted_per_drafted=score.accepted_per_drafted,
        how={"alpha": "replay", "tau": "live" if live else "replay"},
    )


def _widened(evidence: Evidence, row: Measured) -> Measured:
    """Widen the picked draft's intervals as its gain's are: it was picked because it looked good."""
    setup = evidence.setup
    confidence = setup.confidence(True)
    probs = [own.accept_probs(setup.rule) for own in evidence.own_scores(row.way)]
    row = replace(row, alpha_ci=alpha_with_interval(probs, setup.keys, confidence)[1])
    if evidence.responses:
        keys = [one.key for one in evidence.responses]
        said_N = np.array([float(len(one.response_ids)) for one in evidence.responses])
        blocks_N = np.array([float(one.blocks) for one in evidence.responses])
    else:
        keys, said_N = setup.keys, setup.tokens_N
        blocks_N = expected_blocks_of(evidence.own_scores(row.way), setup.rule, (setup.gamma,))[:, 0]
    return replace(row, tau_ci=ratio_with_interval(said_N, blocks_N, keys, confidence)[1])


def _effects(evidence: Evidence, against: str) -> Effects | None:
    if all(one.name != against for one in evidence.drafts):
        return None
    setup, ours = evidence.setup, evidence.own_scores(evidence.best.name)
    return effects_of(setup, ours, evidence.own_scores(against), setup.looks)


def _lighter(evidence: Evidence) -> list[str]:
    """A sentence on how quantization changes alpha, if export.quantize is set."""
    setup, ours = evidence.setup, evidence.own_scores(evidence.best.name)
    sentences = []
    for one in evidence.others:
        if one.name not in WAYS.values():
            change = effects_of(setup, evidence.own_scores(one.name), ours, 1).alpha
            sentences.append(f"The {one.name} changes alpha by {change:+.4f} compared with the unquantized draft.")
    return sentences


def effects_of(setup: JudgingSetup, ours: Sequence[TokenScores], other: Sequence[TokenScores], looks: int) -> Effects:
    """The paired gain of one draft over another on the held-out text, widened for the looks."""
    return paired_effects(ours, other, setup.keys, rule=setup.rule, gamma=setup.gamma, looks=looks)


def _roofline(curve: LoadCurve) -> Roofline:
    target, draft = curve.roofline.target, curve.roofline.draft
    return Roofline(
        target_fixed_seconds=target.fixed,
        target_seconds_per_token=target.per_token,
        draft_fixed_seconds=draft.fixed,
        draft_seconds_per_token=draft.per_token,
        free_tokens=target.free_tokens,
    )
