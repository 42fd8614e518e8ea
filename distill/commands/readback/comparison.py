"""What an engine's answers say of acceptance, beside replay of the text it served and of the run's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from data.responses.engine_client import Answer
from distill.commands.readback.asking import Asked
from speculative.drafters.draft import Draft, drafts_of
from speculative.errors import UserError
from speculative.explain.text_law import IMPOSSIBLE, TextLaw
from speculative.measure.intervals import Interval, intervals_of_sums, ratio_interval
from speculative.measure.replay import GREEDY_BLOCK_TOLERANCE, WORRYING_Z
from speculative.measure.served import (
    Decoded,
    ServedBlocks,
    behind_prefill,
    predicted_shares,
    served_agreement,
    served_shares,
    tau_of,
)
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import draft_draws

_SPARING = ("llama.cpp",)  # Known to leave room for the target's own token at the end of a response.


@dataclass(frozen=True)
class Counted:
    """What the server counted. rows: per response, None where it gives sums of all of them only. gamma: drafted tokens per block.

    blocks, tokens: sums, tokens behind the prefill's. survival, accepted_per_drafted: None where unknown. spared: tokens at the end
    of a response that the engine never drafts. varies: how gamma does, empty where it stays.
    """

    source: str
    rows: list[ServedBlocks] | None
    blocks: int
    tokens: int
    gamma: int
    survival: list[float] | None
    accepted_per_drafted: float | None
    spared: int = 0
    varies: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens per target call that verified."""
        return self.tokens / self.blocks


@dataclass(frozen=True)
class Predicted:
    """Replay under one rule at one gamma: tau with its interval over prompts; the server's blocks against it (`served_agreement`).

    unseen: share of the blocks by which they could differ without notice.
    """

    rule: str
    gamma: int
    tau: float
    tau_ci: Interval
    z: float
    agrees: bool
    unseen: float = 0.0


class Replayer:
    """Draft passes over the served text and the run's own, from the second token on, by one way of drafting."""

    def __init__(
        self,
        draft: Draft,
        asked: Asked,
        law: TextLaw | None,
        most_gamma: int = 1,
    ) -> None:
        """Scores both texts. ``law``: of the served text, where it is known. ``most_gamma``: the largest that is asked about."""
        self.draft, self.asked, self.law, self.most_gamma = draft, asked, law, most_gamma
        sampling, texts = asked.settings.sampling, served_texts(asked, law)
        offsets = draft.offsets(most_gamma, least=most_gamma)
        own = [behind_prefill(text) for text in asked.texts]
        self.own_scores = score_tokens(draft.model, own, sampling, offsets=offsets)
        self.scores = None if texts is None else score_tokens(draft.model, texts, sampling, offsets=offsets)

    def other_way(self) -> "Replayer | None":
        """By the other way of drafting, where the draft has one."""
        others = (way for way in drafts_of(self.draft.model) if way.drafting != self.draft.drafting)
        return next((Replayer(way, self.asked, self.law, self.most_gamma) for way in others), None)

    def knows(self, rule: str) -> bool:
        """Whether the served text has a law under a rule: its ids are known, and its probabilities where the draft is sampled."""
        return self.scores is not None and (not draft_draws(rule) or self.law is not None)

    def predict(self, counted: Counted, rule: str, gamma: int) -> Predicted:
        """Of the served text where it has a law, else of the run's own with a z by prompts."""
        if self.knows(rule):
            assert self.scores is not None
            tau, ci = _tau(self.scores, rule, gamma)
            blocks = [row.blocks for row in counted.rows] if counted.rows is not None else [counted.blocks]
            predicted, z, agrees = served_agreement(self.scores, rule, blocks, gamma)
            spread = abs((counted.blocks - predicted) / z) if z and draft_draws(rule) else 0.0
            return Predicted(rule, gamma, tau, ci, z, agrees, WORRYING_Z * spread / predicted)
        if len(self.own_scores) < 2:
            raise UserError(
                "--prompts: replay of the run's own text, without the server's token ids, needs at least 2 prompts"
            )
        tau, ci = self.expect(rule, gamma)
        low, high = tau_interval(counted, tau, ci)
        spread = math.hypot(ci[1] - ci[0], high - low) / (2 * 1.96)
        spread = max(spread, GREEDY_BLOCK_TOLERANCE * tau / WORRYING_Z)
        z = (counted.tau - tau) / spread
        return Predicted(rule, gamma, tau, ci, z, abs(z) <= WORRYING_Z, WORRYING_Z * spread / tau)

    def expect(self, rule: str, gamma: int) -> tuple[float, Interval]:
        """tau of the run's own text, and its interval."""
        return _tau(self.own_scores, rule, gamma)

    def shares(self, rule: str, gamma: int, spared: int) -> tuple[list[float], float]:
        """(survival, accepted/drafted) of the text that `predict` is of."""
        scores = self.scores if self.knows(rule) and self.scores is not None else self.own_scores
        return predicted_shares(scores, rule, gamma, spared=spared)


def _tau(scores: list[TokenScores], rule: str, gamma: int) -> tuple[float, Interval]:
    tau, blocks_N = tau_of(scores, rule, gamma)
    return tau, ratio_interval(np.array([len(score) for score in scores]), blocks_N)


def served_texts(asked: Asked, law: TextLaw | None = None) -> list[Decoded] | None:
    """The served responses from their second token on; None where the ids of one are not known."""
    texts = []
    for index, (own, answer) in enumerate(zip(asked.texts, asked.answers, strict=True)):
        if answer.ids is None:
            return None
        logs = [0.0] * len(answer.ids)
        if law is not None:  # A broken engine says tokens that neither model can: such a one is no kept draft.
            logs = np.maximum(law.log_target_probs[index], IMPOSSIBLE).tolist()
        texts.append(behind_prefill(Decoded(own.prompt_ids, answer.ids, logs)))
    return texts


def count(asked: Asked, gamma: int) -> Counted:
    """The server's counts: of each response where it gives them, else the difference of its counters.

    gamma: as asked for, to tell blocks where an engine counts tokens only.

    Raises:
        UserError: the server says nothing of drafts.
    """
    gamma = _llama_cpp_gamma(asked.answers) or gamma
    rows = [_row(answer, gamma) for answer in asked.answers]
    if all(row is not None for row in rows) and any(row.blocks for row in rows if row is not None):
        return _by_response([row for row in rows if row is not None], asked)
    server = asked.server
    if asked.reset:
        raise UserError(f"its counters cannot be read: {asked.reset}; leave it running and ask again")
    if server is None or not server.blocks:
        raise UserError(
            "says nothing of drafts, neither in its answers nor on /metrics: it may decode without a draft; vLLM tells with "
            "--per-request-spec-decode-metrics detailed, SGLang with --enable-metrics, llama-server with --metrics"
        )
    tokens = sum(max(0, answer.tokens - 1) for answer in asked.answers)
    said = sum(answer.tokens for answer in asked.answers)
    # An engine may count what it cut off behind the end of each response.
    if server.tokens is not None and not said <= server.tokens <= said + 128 * len(asked.answers):
        raise UserError(
            f"it made {server.tokens:,} tokens meanwhile and ours are {said:,}: it answers others too, and its counters are of all; ask "
            "while nobody else does, or have it tell of each request (vLLM: --per-request-spec-decode-metrics detailed)"
        )
    notes = ["the server gives sums only: tokens drafted behind the end of a response are in its survival"]
    mean = server.drafted / server.blocks if server.drafted is not None else gamma
    survival = [accepted / server.blocks for accepted in server.accepted_G] or None
    rate = server.accepted / server.drafted if server.drafted and server.accepted is not None else None
    return Counted("metrics", None, server.blocks, tokens, max(1, round(mean)), survival, rate, notes=notes)


def _llama_cpp_gamma(answers: Sequence[Answer]) -> int:
    """The longest drafts of an engine that tells no blocks, from responses cut at their length, whose calls are known; 0: none."""
    longest = 0
    for one in answers:
        counts = one.counts
        if one.finished or counts is None or counts.blocks is not None or counts.accepted is None:
            continue
        if (blocks := one.tokens - 1 - counts.accepted) > 0:
            longest = max(longest, math.ceil((counts.drafted or 0) / blocks))
    return longest


def _row(answer: Answer, gamma: int) -> ServedBlocks | None:
    """One answer's blocks; of an engine that counts tokens only, from those: each call emits one token more than it accepts."""
    counts, tokens = answer.counts, max(0, answer.tokens - 1)
    if counts is None:
        return ServedBlocks(0, 0) if not tokens else None
    blocks = counts.blocks
    if blocks is None and counts.accepted is not None:
        blocks = tokens - counts.accepted
        if answer.finished and counts.drafted is not None:  # What it accepted behind the end token is counted too.
            blocks = max(blocks, math.ceil(counts.drafted / gamma))
    return None if blocks is None else ServedBlocks(tokens, blocks, counts.accepted_B, counts.drafted_B)


def _by_response(rows: list[ServedBlocks], asked: Asked) -> Counted:
    counts = [answer.counts for answer in asked.answers if answer.counts is not None]
    notes = []
    drafted, accepted = sum(one.drafted or 0 for one in counts), sum(one.accepted or 0 for one in counts)
    blocks, tokens = sum(row.blocks for row in rows), sum(row.tokens for row in rows)
    if asked.server is not None and asked.server.blocks not in (None, blocks):
        notes.append(
            f"its own counters say {asked.server.blocks:,} blocks meanwhile and its answers {blocks:,}: it answers others too"
        )
    said = [one.gamma for one in counts if one.gamma]
    survival: list[float] | None = None
    if any(row.accepted_B for row in rows):
        gamma = max(max(row.drafted_B, default=0) for row in rows)
        survival, rate = served_shares(rows, gamma)
        short = sum(sum(one < gamma for one in row.drafted_B[:-1]) for row in rows)
        varies = f"{short:,} of {blocks:,} blocks inside responses draft fewer than {gamma} tokens" if short else ""
        broken = sum(not row.whole for row in rows)
        if broken:
            notes.append(
                f"{broken} of {len(rows)} responses are not what their blocks add up to: some calls are not counted"
            )
        return Counted("responses", rows, blocks, tokens, gamma, survival, rate, _spared(rows, gamma), varies, notes)
    gamma = max(said) if said else max(1, math.ceil(drafted / blocks - 1e-9))
    if all(one.histogram for one in counts):
        survival = [sum(sum(one.histogram[j:]) for one in counts) / blocks for j in range(1, gamma + 1)]
    notes.append("the server gives sums of a response: tokens drafted behind its end are in its survival")
    spared = int(counts[0].engine in _SPARING)
    rate = accepted / drafted if drafted else 0.0
    return Counted("responses", rows, blocks, tokens, gamma, survival, rate, spared, notes=notes)


def _spared(rows: list[ServedBlocks], gamma: int) -> int:
    """1 where every block that reaches the end of its response drafts one token less than is left of it."""
    ends = [(row.inside()[-1][0], row.drafted_B[-1], row.tokens) for row in rows if row.drafted_B]
    short = [(drafted, min(gamma, tokens - start)) for start, drafted, tokens in ends if tokens - start <= gamma]
    return int(bool(short) and all(drafted == left - 1 for drafted, left in short))


def tau_interval(counted: Counted, tau: float, predicted: Interval) -> Interval:
    """95 % interval of the served tau over prompts; of sums only, as wide for its size as that of replay's tau."""
    if counted.rows is None:
        return predicted[0] * counted.tau / tau, predicted[1] * counted.tau / tau
    tokens_N, blocks_N = (
        np.array(counts) for counts in zip(*((row.tokens, row.blocks) for row in counted.rows), strict=True)
    )
    return ratio_interval(tokens_N, blocks_N)


@dataclass(frozen=True)
class Pace:
    """Over prompts, with 95 % intervals. tokens_per_second: of one request. latency: seconds of a response, mean. plain: tokens per
    second of the server without the draft; None, as the speed-up, where there is none.
    """

    tokens_per_second: float
    tokens_per_second_ci: Interval
    latency: float
    latency_ci: Interval
    plain: float | None = None
    speed_up: float | None = None
    speed_up_ci: Interval | None = None


def pace(answers: Sequence[Answer], plain: Sequence[Answer]) -> Pace:
    """How fast these answers came, and how much faster than those to the same prompts without the draft."""
    sums_PC = np.array([[one.tokens, one.seconds] for one in answers], dtype=np.float64)
    if plain:
        sums_PC = np.concatenate((sums_PC, [[one.tokens, one.seconds] for one in plain]), 1)

    def rates(sums_C: np.ndarray) -> np.ndarray:
        own = sums_C[..., :1] / sums_C[..., 1:2]
        return np.concatenate((own, own / sums_C[..., 2:3] * sums_C[..., 3:4]), -1) if plain else own

    values, ends = rates(sums_PC.sum(0)).tolist(), [(low, high) for low, high in intervals_of_sums(sums_PC, rates)]
    seconds_P = sums_PC[:, 1]
    found = Pace(values[0], ends[0], float(seconds_P.mean()), ratio_interval(seconds_P, np.ones(len(seconds_P))))
    return replace(found, plain=values[0] / values[1], speed_up=values[1], speed_up_ci=ends[1]) if plain else found
