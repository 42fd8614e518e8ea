"""The baseline of `understudy drift`: the best draft of a run on its held-out prompts, one row per prompt.

The rows come from replay: blocks are drawn along the run's held-out responses at the server's gamma and rule. The target is not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.commands.drift.options import DriftOptions
from distill.commands.drift.sources import AcceptanceLog, AcceptanceRecord
from distill.config.layout import VERDICT
from distill.run.heldout_set import load_heldout_set
from distill.run.verdict_record import drafting_to_serve, load_verdict
from speculative.drafters.draft import Draft, Drafting
from speculative.engine.models import mask_token_of
from speculative.errors import UserError
from speculative.explain.rate_change import FEWEST_REQUESTS
from speculative.measure.engine_blocks import after_prefill
from speculative.measure.replay import texts_of
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import Rule

_VARYING = 0.05  # A mean draft length this far from a whole number is no fixed gamma.


@dataclass(frozen=True)
class Baseline:
    """The blocks of the run's draft on its held-out prompts, as a server would have counted them. drafting: how it is served."""

    gamma: int
    rule: Rule
    prompts: list[AcceptanceRecord]
    drafting: Drafting = "autoregressive"


def baseline_of(options: DriftOptions, gamma: int | None = None) -> Baseline:
    """The run's best draft on its held-out responses. gamma and rule are by default the verdict's, or the config's if there is none.

    Raises UserError: no run, a rule that cannot be replayed, or too few held-out prompts.
    """
    run = options.run
    verdict = load_verdict(run) if (run / VERDICT).is_file() else None
    asked: Any = options.rule or (verdict.rule if verdict else None)
    heldout = load_heldout_set(run, asked, options.trust_remote_code)
    draft, gamma = heldout.draft(str(run)), gamma or (verdict.gamma if verdict else heldout.config.judge.gamma)
    way = drafting_to_serve(verdict, mask_token_of(draft.config) is not None)
    offsets = Draft(draft, way).offsets(gamma, least=gamma)
    # A server takes the first token of a response from the prefill.
    texts = [after_prefill(response) for response in heldout.responses]
    scores = score_tokens(draft, texts, heldout.sampling, offsets=offsets)
    prompts = drawn_prompts([response.domain for response in heldout.responses], scores, heldout.rule, gamma)
    if len(prompts) < FEWEST_REQUESTS:
        raise UserError(
            f"{run}: {len(prompts)} held-out prompts are too few to know their spread, at least {FEWEST_REQUESTS} are needed; raise "
            "judge.prompts and judge the run again"
        )
    return Baseline(gamma, heldout.rule, prompts, way)


def drawn_prompts(
    domains: Sequence[str], scores: Sequence[TokenScores], rule: Rule, gamma: int, seed: int = 0
) -> list[AcceptanceRecord]:
    """Draw the blocks of each scored response once, as a server with this gamma and rule would have counted them.

    A block that starts at token t keeps its first j drafted tokens with probability exp(-max(0, S_1, .., S_j)), S_j the
    cost of the j tokens from t (`speculative.measure.replay`): as many as stay at or below one exponential draw. Servers also
    count a block's tokens after the end of the text. For those the mean acceptance of all text is used; for a parallel draft the mean at
    the same place of a block.
    """
    rng = np.random.default_rng(seed)
    beyond_G = _beyond(scores, rule, gamma)
    rows: list[AcceptanceRecord] = []
    for domain, score, (costs_T, *_) in zip(domains, scores, texts_of(scores, rule), strict=True):
        start = blocks = accepted = 0
        while start < len(score):
            own_G = (costs_T[start] if costs_T.ndim == 2 else costs_T[start:])[: min(gamma, len(score) - start)]
            highest_G = np.maximum.accumulate(np.concatenate([own_G, beyond_G[len(own_G) :]]).cumsum())
            here = int((highest_G <= rng.exponential()).sum())
            start, blocks, accepted = start + here + 1, blocks + 1, accepted + here
        if blocks:
            rows.append(AcceptanceRecord(blocks * gamma, accepted, blocks, domain))
    return rows


def _beyond(scores: Sequence[TokenScores], rule: Rule, gamma: int) -> np.ndarray:
    """Cost (G,) of a token after the end of a text at each place of a block, from the mean acceptance within the texts."""
    accepted_G, tokens_G = np.zeros(gamma), np.zeros(gamma)
    for score in scores:
        if score.by_start is None:
            accepted_G, tokens_G = accepted_G + score.accept_probs(rule).sum(), tokens_G + len(score)
        else:
            inside_TG = np.arange(len(score))[:, None] + np.arange(gamma) < len(score)
            accepted_G += (score.by_start.accept_probs(rule)[:, :gamma] * inside_TG).sum(0)
            tokens_G += inside_TG.sum(0)
    with np.errstate(divide="ignore"):
        return -np.log(accepted_G / np.maximum(1, tokens_G))


def gamma_of(log: AcceptanceLog, asked: int | None) -> tuple[int | None, list[str]]:
    """(the server's drafted tokens per block: the requested number, else the log's, else None; notes for the reader)."""
    counted = [(record.drafted, record.blocks) for record in log.records if record.blocks is not None]
    if not counted:
        unsaid = "the log does not give its blocks, so the verdict's gamma is assumed (set another with --gamma)"
        return asked, [unsaid] if asked is None else []
    mean = sum(drafted for drafted, _ in counted) / sum(blocks for _, blocks in counted)
    gamma = asked or max(1, round(mean))
    if abs(mean - gamma) <= _VARYING * gamma:
        return gamma, []
    return gamma, [
        f"the server drafts {mean:.2f} tokens per block on average but is compared with a fixed gamma of {gamma}; this alone "
        "makes a difference (does it use a confidence stop?)"
    ]


def slices_of(
    records: Sequence[AcceptanceRecord], prompts: Sequence[AcceptanceRecord]
) -> tuple[list[int], np.ndarray, list[str]]:
    """(domain of each record as a row, (S, P) the prompts that each domain is compared with, notes for the reader).

    A domain with fewer than FEWEST_REQUESTS held-out prompts is compared with all of them.
    """
    domains, notes = list(dict.fromkeys(record.domain for record in records)), []
    members_SP = np.array([[prompt.domain == domain for prompt in prompts] for domain in domains])
    for domain, members_P in zip(domains, members_SP, strict=True):
        if (count := members_P.sum()) < FEWEST_REQUESTS:
            members_P[:] = True
            if domain is not None:
                notes.append(
                    f"{domain}: {count} held-out prompts of that domain, so it is compared with all {len(prompts)}"
                )
    return [domains.index(record.domain) for record in records], members_SP, notes
