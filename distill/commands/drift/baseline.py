"""What acceptance is compared with: the best draft of a run on its held-out prompts, one row a prompt, in pools by slice.

The rows are those of the run's live judging. For another gamma or rule than that one's, the block process is drawn anew
along the run's frozen text (`redrawn_prompts`): no target is needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord
from distill.config.layout import BEST_LINK
from distill.run.result import LivePrompt, Result
from speculative.drafters.parallel import Drafting
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.cusum import FEWEST_REQUESTS, Pool, pool_of
from speculative.measure.replay import costs_of
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule, draft_draws

ALL = "all"  # The slice of requests without a label, and the pool of every held-out prompt.
OTHERS = "others"
MOST_SLICES = 20  # Each takes its share of the false alarm rate; more would leave none of them any power.
_ARGMAX_ENGINES = ("vllm", "sglang", "llama.cpp")
_VARYING = 0.05  # A mean draft length this far from a whole number is no fixed gamma.


@dataclass(frozen=True)
class Baseline:
    """source: `live` (the run's own judging) or `replay` (drawn along its frozen text). notes: what a reader must know. drafting: how the
    draft is served.
    """

    gamma: int
    rule: Rule
    source: str
    prompts: list[LivePrompt]
    notes: list[str] = field(default_factory=list)
    drafting: Drafting = "autoregressive"


@dataclass(frozen=True)
class Slice:
    """Requests of one label, in order, and the pool that they are compared with; `of`: its name."""

    name: str
    records: list[AcceptanceRecord]
    pool: Pool
    of: str
    prompts: list[LivePrompt]


def prompts_of_result(live_prompts: Sequence[LivePrompt], name: str) -> list[LivePrompt]:
    """The rows of result.json's `live_prompts`; those that drafted nothing are left out.

    Raises:
        UserError: more accepted than drafted; `name` is the file's.
    """
    if any(row.accepted > row.drafted for row in live_prompts):
        raise UserError(
            f"{name}: live_prompts: more tokens accepted than drafted; start the run's own command again, which judges it anew"
        )
    return [row for row in live_prompts if row.drafted]


def other_best(run: Path, result: Result, name: str) -> list[str]:
    """A note when RUN/best is by now another checkpoint than the one that the result judged, [] otherwise; `name` is the file's."""
    folder = (run / BEST_LINK).resolve().name
    judged = result.contestants[-1].step
    if judged is None or not folder.removeprefix("step-").isdecimal() or int(folder.removeprefix("step-")) == judged:
        return []
    return [
        f"{name} is of step {judged} and the best draft is {folder} by now: the baseline is of {folder}; the run's own "
        "command, started again, judges it live"
    ]


def redrawn_prompts(
    texts: Sequence[HeldoutResponse], scores: Sequence[TokenScores], rule: Rule, gamma: int, seed: int = 0
) -> list[LivePrompt]:
    """The block process drawn once along each frozen response, as a server with this gamma and rule would have counted it.

    A block that starts at token t keeps its first j drafted tokens with probability exp(-max(0, S_1, .., S_j)), S_j the
    cost of the j tokens from t (`speculative.measure.replay`): as many as stay at or below one exponential draw. Servers count a
    block's tokens behind the end of the text too; there the mean acceptance of all text stands in, of a parallel draft that at the
    same place of a block.
    """
    rng = np.random.default_rng(seed)
    beyond_G = _beyond(scores, rule, gamma)
    rows = []
    for response, score in zip(texts, scores, strict=True):
        costs_T = costs_of(score, rule).costs_T
        start = blocks = kept = 0
        while start < len(score):
            own_G = (costs_T[start] if costs_T.ndim == 2 else costs_T[start:])[: min(gamma, len(score) - start)]
            highest_G = np.maximum.accumulate(np.concatenate([own_G, beyond_G[len(own_G) :]]).cumsum())
            here = int((highest_G <= rng.exponential()).sum())
            start, blocks, kept = start + here + 1, blocks + 1, kept + here
        if blocks:
            rows.append(
                LivePrompt(
                    key=response.key, domain=response.domain, drafted=blocks * gamma, accepted=kept, blocks=blocks
                )
            )
    return rows


def _beyond(scores: Sequence[TokenScores], rule: Rule, gamma: int) -> np.ndarray:
    """Cost (G,) of a token behind the end of a text at each place of a block, by the mean acceptance within the texts."""
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
    """(the server's drafted tokens per block: as asked, else the log's, else None; what a reader must know of that)."""
    mean = log.gamma()
    if mean is None:
        unsaid = "the log does not tell its blocks: the run's own gamma is assumed (--gamma says otherwise)"
        return asked, [unsaid] if asked is None else []
    gamma = asked or max(1, round(mean))
    if abs(mean - gamma) <= _VARYING * gamma:
        return gamma, []
    return gamma, [
        f"the server drafts {mean:.2f} tokens a block on average and is compared with a fixed gamma of {gamma}: the two "
        "differ by that alone (a confidence stop?)"
    ]


def engine_notes(log: AcceptanceLog, baseline: Baseline) -> list[str]:
    """A warning where an engine's own rule is probably not the baseline's."""
    if log.format not in _ARGMAX_ENGINES or not draft_draws(baseline.rule):
        return []
    return [
        f"{log.format} drafts the argmax unless told otherwise, and the baseline is of rule {baseline.rule}: if the "
        "server was not told, compare with --rule greedy-draft"
    ]


def slices_of(
    records: Sequence[AcceptanceRecord], baseline: Baseline, *, sums: bool = False
) -> tuple[list[Slice], list[str]]:
    """(the records by label with the pool of each, what a reader must know of that).

    A label with fewer than FEWEST_REQUESTS held-out prompts is compared with all of them. Beyond MOST_SLICES labels the
    rarest go together.

    Raises:
        UserError: too few held-out prompts altogether.
    """
    if len(baseline.prompts) < FEWEST_REQUESTS:
        raise UserError(
            f"the baseline has {len(baseline.prompts)} held-out prompts and {FEWEST_REQUESTS} are the fewest to tell their "
            "spread: raise judge.prompts and judge the run again"
        )
    counts = Counter(record.slice or ALL for record in records)
    kept = {name for name, _ in counts.most_common(MOST_SLICES if len(counts) <= MOST_SLICES else MOST_SLICES - 1)}
    notes = []
    if len(counts) > len(kept):
        notes.append(f"{len(counts) - len(kept)} rare labels are taken together as `{OTHERS}`")
    by_name: dict[str, list[AcceptanceRecord]] = {}
    for record in records:
        label = record.slice or ALL
        by_name.setdefault(label if label in kept else OTHERS, []).append(record)
    pools: dict[str, Pool] = {}
    slices = []
    for name, own in by_name.items():
        prompts = [row for row in baseline.prompts if row.domain == name]
        of = name if len(prompts) >= FEWEST_REQUESTS else ALL
        if of != name and name != OTHERS:
            few = f"only {len(prompts)} held-out prompts" if prompts else "no held-out prompts"
            notes.append(f"{name}: {few} of that label, so it is compared with all {len(baseline.prompts)} together")
        prompts = prompts if of == name and name != ALL else baseline.prompts
        if of not in pools:
            pools[of] = pool_of(
                np.array([row.accepted for row in prompts]),
                np.array([row.drafted for row in prompts]),
                baseline.gamma,
                sums=sums,
            )
        slices.append(Slice(name, own, pools[of], of, prompts))
    return slices, notes
