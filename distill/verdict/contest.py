"""Who could serve this traffic, each at the gamma that is best for it, timed in turn: drafts, what costs no training, both.

Shapes: N held-out responses, K gammas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.progress import track
from transformers import PreTrainedModel

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import LOOKUP, PAST, TOGETHER
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.cascade import Cascade
from speculative.drafters.drafter import Drafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.retrieval import Datastore, Retrieval
from speculative.engine.models import vocab_rows
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import StepCosts
from speculative.measure.effects import fewest_prompts
from speculative.measure.intervals import Interval
from speculative.measure.race import ALONE, Laps, Racer, Speed, Standings, race, spread_order
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.rival_replay import (
    RivalBlocks,
    cascade_blocks,
    certain_blocks,
    kept_by_lookup,
    kept_by_retrieval,
    lookup_steps,
    tuned_cascade,
    tuned_lookup,
)
from speculative.measure.token_scores import StoredText, TokenScores, scored_gammas

# Past responses that things are looked up in, at most: about as many as an engine keeps.
MOST_PAST = 10_000
# Training responses that prompt lookup is tuned on: more change nothing but the time it takes.
TUNED_ON = 256
# A speed-up is known when its interval reaches no further up than this share of it.
PRECISION = 0.05


@dataclass(frozen=True)
class Entrant:
    """A way to serve: its gamma, the blocks it needs for each held-out response by replay, and its drafter.

    ngrams: (longest, shortest) that it looks up. tuned_on: the text that gamma and sizes were chosen on.
    then_gamma, behind: of the draft behind the lookup, and which draft that is. found: share of the blocks whose proposal took
    no model; None where a model always proposes.
    """

    name: str
    label: str
    gamma: int
    blocks_N: np.ndarray
    drafter: Callable[[], Drafter]
    ngrams: tuple[int, int] | None = None
    tuned_on: str = "the judged prompts, by replay"
    then_gamma: int | None = None
    behind: str | None = None
    found: float | None = None


@dataclass(frozen=True)
class Contest:
    """The entrants and what they were timed at."""

    entrants: tuple[Entrant, ...]
    laps: Laps
    standings: Standings

    def __getitem__(self, name: str) -> Entrant:
        return next(one for one in self.entrants if one.name == name)

    def __contains__(self, name: str) -> bool:
        return any(one.name == name for one in self.entrants)

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        """Of an entrant, or of the target alone."""
        return self.standings.speed(name, confidence)

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        """How many times the tokens per second of another, paired by prompt."""
        return self.standings.against(name, other, confidence)

    def beats(self, name: str, other: str, confidence: float = 0.95) -> bool:
        """Whether it is certainly faster."""
        interval = self.against(name, other, confidence)[1]
        return interval is not None and interval[0] > 1.0


def draft_entrant(
    name: str, label: str, drafter: Callable[[], Drafter], scores: Sequence[TokenScores], rule: str, costs: StepCosts
) -> Entrant:
    """A draft at the gamma of the highest predicted speed-up, 1 or more."""
    gammas = scored_gammas(scores, _gammas(costs))
    blocks_NK = expected_blocks_of(scores, rule, gammas)
    prices_K = np.array([_price(costs, gamma) for gamma in gammas])
    best = int((blocks_NK.sum(0) * prices_K).argmin())
    return Entrant(name, label, gammas[best], blocks_NK[:, best], drafter)


def lookup_entrant(
    frozen: Sequence[HeldoutResponse], history: Sequence[StoredText], costs: StepCosts, gammas: Sequence[int]
) -> Entrant:
    """Prompt lookup at the sizes and gamma of the highest predicted speed-up on other prompts' responses, where there are any."""
    tuned = tuned_lookup(history[:TUNED_ON] or frozen, costs, gammas)
    sizes = (tuned.max_ngram, tuned.min_ngram)
    blocks = certain_blocks([kept_by_lookup(text, tuned.gamma, *sizes) for text in frozen], (tuned.gamma,))
    return Entrant(
        LOOKUP, "prompt lookup", tuned.gamma, _blocks(blocks), lambda: PromptLookup(*sizes), sizes,
        "training prompts" if history else Entrant.tuned_on, found=_found(blocks),
    )  # fmt: skip


def cascade_entrant(
    drafter: Callable[[], Drafter],
    frozen: Sequence[HeldoutResponse],
    scores: Sequence[TokenScores],
    rule: str,
    costs: StepCosts,
    gammas: Sequence[int],
) -> Entrant:
    """Prompt lookup before a draft of these scores, at the sizes and gammas of the highest predicted speed-up."""
    tuned = tuned_cascade(frozen, scores, rule, costs, gammas)
    sizes, then = (tuned.max_ngram, tuned.min_ngram), tuned.then_gamma or tuned.gamma
    kept = [kept_by_lookup(text, tuned.gamma, *sizes) for text in frozen]
    blocks = cascade_blocks(kept, scores, rule, (tuned.gamma,), (then,))
    return Entrant(
        TOGETHER, "prompt lookup, then the draft", tuned.gamma, _blocks(blocks),
        lambda: Cascade(PromptLookup(*sizes), drafter(), then_gamma=then), sizes, then_gamma=then, found=_found(blocks),
    )  # fmt: skip


def past_entrant(
    target: PreTrainedModel,
    frozen: Sequence[HeldoutResponse],
    history: Sequence[StoredText],
    costs: StepCosts,
    gammas: Sequence[int],
) -> Entrant | None:
    """Past responses to look things up in, at the gamma of the highest predicted speed-up; None where there are none."""
    said = [text.response_ids for text in history[:MOST_PAST] if text.response_ids]
    if not any(len(ids) > 1 for ids in said):
        return None
    datastore = Datastore.build(said, vocab_rows(target))
    kept = [kept_by_retrieval(text, max(gammas), datastore) for text in frozen]
    blocks = certain_blocks(kept, gammas)
    best = int(lookup_steps(blocks, gammas, costs).sum(0).argmin())
    past = RivalBlocks(blocks.found_NK[:, best : best + 1], blocks.others_NK[:, best : best + 1])
    return Entrant(
        PAST, "past responses", gammas[best], _blocks(past), lambda: Retrieval(datastore), found=_found(past)
    )


def hold(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    entrants: Sequence[Entrant],
    question: str,
    frozen: Sequence[HeldoutResponse],
) -> Contest:
    """Times everybody on held-out prompts in turn, until the speed-ups are known or judge.speed_seconds are spent.

    question: the entrant that is timed until its own speed-up is known; who certainly loses to another is timed no further.
    """
    first_of_prompt = list({text.prompt: text for text in reversed(frozen)}.values())[::-1]
    chosen = [first_of_prompt[index] for index in spread_order(len(first_of_prompt))][: judging.speed_prompts]
    fewest = fewest_prompts(0.95)
    tokens_N, keys = np.array([len(text.response_ids) for text in frozen]), [text.prompt for text in frozen]
    blocks = {one.name: one.blocks_N for one in entrants}

    def standings(laps: Laps) -> Standings:
        return Standings(laps, keys, tokens_N, blocks, fewest)

    def still(laps: Laps) -> list[str]:
        now = standings(laps)
        return worth_timing(now, [one.name for one in entrants], question)

    laps = race(
        target,
        [Racer(one.name, one.gamma, one.drafter) for one in entrants],
        track([(text.key, text.prompt_ids) for text in chosen], "timing", transient=True),
        settings,
        still=still,
        seconds=judging.speed_seconds,
        least=min(fewest, len(chosen)),
    )
    return Contest(tuple(entrants), laps, standings(laps))


def worth_timing(standings: Standings, names: Sequence[str], question: str) -> list[str]:
    """Whose speed-up is not known well enough yet; not of those whom somebody certainly beats, but always of the question."""
    intervals = {name: standings.against(name, ALONE)[1] for name in names}
    sure = max((interval[0] for interval in intervals.values() if interval is not None), default=0.0)
    wanted = []
    for name, interval in intervals.items():
        beaten = interval is not None and interval[1] < sure and name != question
        if not beaten and not standings.known(name, PRECISION):
            wanted.append(name)
    return wanted


def steps_by_response(contest: Contest) -> dict[str, np.ndarray]:
    """Expected seconds (N,) of each held-out response in steps of the target alone, its prompt read, by entrant."""
    return {one.name: contest.standings.block_steps(one.name) * one.blocks_N for one in contest.entrants}


def entrants_of(
    settings: DecodeSettings,
    target: PreTrainedModel,
    drafts: Mapping[str, tuple[str, Callable[[], Drafter]]],
    frozen: Sequence[HeldoutResponse],
    scores: Mapping[str, Sequence[TokenScores]],
    costs: Mapping[str, StepCosts],
    history: Sequence[StoredText],
    same: Sequence[str] = (),
) -> list[Entrant]:
    """The drafts, {name: (label, how its drafter is made)}, the one in question last, and then everybody's rivals: prompt lookup,
    past responses where there are any, lookup before the draft.

    history: responses of the target to other prompts, at the settings of the frozen text; may be empty.
    same: names of the last draft drafting otherwise; behind the lookup stands what needs the fewest target steps of these and itself.
    """
    rule = law_of(settings.rule, settings.sampling)
    found = [
        draft_entrant(name, label, drafter, scores[name], rule, costs[name])
        for name, (label, drafter) in drafts.items()
    ]
    *_, last = drafts
    steps = {one.name: one.blocks_N.sum() * _price(costs[one.name], one.gamma) for one in found}
    behind = min((last, *same), key=steps.__getitem__)
    price, gammas = costs[behind], _gammas(costs[behind])
    past = past_entrant(target, frozen, history, price, gammas)
    both = cascade_entrant(drafts[behind][1], frozen, scores[behind], rule, price, gammas)
    lookup = lookup_entrant(frozen, history, price, gammas)
    return [*found, lookup, *([past] if past is not None else []), replace(both, behind=behind)]


def _price(costs: StepCosts, gamma: int) -> float:
    """Of a block, in target steps."""
    return gamma * costs.cost_ratio_at(gamma) + costs.verify_ratio(gamma)


def _gammas(costs: StepCosts) -> range:
    return range(1, max(costs.verify_seconds) + 1)


def _blocks(blocks: RivalBlocks) -> np.ndarray:
    """(N,) of the only gamma."""
    return np.asarray(blocks.found_NK + blocks.others_NK, dtype=np.float64)[:, 0]


def _found(blocks: RivalBlocks) -> float:
    """The share of all blocks for which something was found."""
    found = float(blocks.found_NK.sum())
    return found / max(found + float(blocks.others_NK.sum()), 1.0)
