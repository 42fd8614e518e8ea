"""Acceptance counted by an engine, compared with replay of the served text and of the run's own text."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distill.commands.readback.asking import Replies
from distill.engines.protocol.client import Answer
from distill.engines.protocol.engine import reporting_flags
from distill.run.readback_record import SERVED_TEXT
from speculative.decoder.responses import Response
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.explain.text_fit import IMPOSSIBLE, TextFit
from speculative.measure.engine_blocks import Decoded, ServedBlocks, after_prefill, survival_intervals, tau_of
from speculative.measure.intervals import Interval, intervals_of_sums, ratio_interval, sum_by_prompt
from speculative.measure.measured import DRAFT, TARGET, Measured
from speculative.measure.metrics import Waiting, ratio_with_interval, waits_of
from speculative.measure.replay import GREEDY_BLOCK_TOLERANCE, WORRYING_Z, agreement_of, shares_of, survival_sums
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import Rule


@dataclass(frozen=True)
class Counted:
    """Counts of the server. rows: per response; None if it reports only sums. gamma: drafted tokens per block.

    blocks, tokens: sums, without the prefill's token of each response. survival, accepted_per_drafted: None if unknown. spared: tokens
    at the end of a response that the engine never drafts. survival_ci: over prompts;
    None for sums only. prompts: of each row; empty: all different.
    """

    source: str
    rows: list[ServedBlocks] | None
    blocks: int
    tokens: int
    gamma: int
    survival: list[float] | None
    accepted_per_drafted: float | None
    spared: int = 0
    survival_ci: list[Interval] | None = None
    notes: list[str] = field(default_factory=list)
    prompts: Sequence[Hashable] = ()

    @property
    def tau(self) -> float:
        """Tokens per verifying target call."""
        return self.tokens / self.blocks

    @property
    def undrafted(self) -> bool:
        """Whether steps were without a draft: blocks of gamma cannot have made all tokens."""
        return self.tokens > self.blocks * (self.gamma + 1)


@dataclass(frozen=True)
class ReplayedTau:
    """Replay under one rule at one gamma: tau with its interval over prompts, and the test of the server's blocks.

    unseen: the largest difference, as a share of the blocks, that the test can miss.
    """

    rule: Rule
    gamma: int
    tau: float
    tau_ci: Interval
    z: float
    agrees: bool
    unseen: float = 0.0


class Replayer:
    """Draft scores of the served text and of the run's own, from the second token on, for one way of drafting."""

    def __init__(self, draft: Draft, replies: Replies, fit: TextFit | None, most_gamma: int = 1) -> None:
        """Score both texts up to ``most_gamma``. ``fit``: the target's probabilities of the served text, if known."""
        self.draft, self.replies, self.fit = draft, replies, fit
        sampling, texts = replies.settings.sampling, served_texts(replies, fit)
        offsets = draft.offsets(most_gamma, least=most_gamma)
        own = [after_prefill(text) for text in replies.texts]
        self.own_scores = score_tokens(draft.model, own, sampling, offsets=offsets)
        self.scores = None if texts is None else score_tokens(draft.model, texts, sampling, offsets=offsets)

    def knows(self, rule: Rule) -> bool:
        """Whether the served text can be replayed under a rule: its ids are known, and its probabilities if the draft samples."""
        return self.scores is not None and (not rule.draws or self.fit is not None)

    def rules(self, rule: Rule) -> tuple[Rule, ...]:
        """Return the rules that the served text can be replayed under, each once."""
        return rule.replayable(self.fit is not None, self.replies.settings.sampling.truncates)

    def predict(self, counted: Counted, rule: Rule, gamma: int) -> ReplayedTau:
        """Predict from the served text if it can be replayed, else from the run's own text with z over prompts."""
        if self.knows(rule):
            assert self.scores is not None
            tau, ci = self._tau(self.scores, rule, gamma)
            blocks = [row.blocks for row in counted.rows] if counted.rows is not None else [counted.blocks]
            check = agreement_of(self.scores, rule, blocks, gamma)
            predicted, gap = check.predicted_blocks, counted.blocks - check.predicted_blocks
            # Without randomness `WORRYING_Z` stands for the tolerated share of blocks.
            z = WORRYING_Z * gap / max(GREEDY_BLOCK_TOLERANCE * predicted, 1e-9) if check.z is None else check.z
            spread = abs(gap / z) if z and rule.draws else 0.0
            return ReplayedTau(rule, gamma, tau, ci, z, check.agrees, WORRYING_Z * spread / predicted)
        if len(self.own_scores) < 2:
            raise UserError(
                "--prompts: the server gives no token ids, and replay of the run's own text needs at least 2 prompts; give 2 or more"
            )
        tau, ci = self.expect(rule, gamma)
        low, high = tau_interval(counted, tau, ci)
        spread = math.hypot(ci[1] - ci[0], high - low) / (2 * 1.96)
        spread = max(spread, GREEDY_BLOCK_TOLERANCE * tau / WORRYING_Z)
        z = (counted.tau - tau) / spread
        return ReplayedTau(rule, gamma, tau, ci, z, abs(z) <= WORRYING_Z, WORRYING_Z * spread / tau)

    def expect(self, rule: Rule, gamma: int) -> tuple[float, Interval]:
        """Return tau of the run's own text and its interval."""
        return self._tau(self.own_scores, rule, gamma)

    def _tau(self, scores: list[TokenScores], rule: Rule, gamma: int) -> tuple[float, Interval]:
        tau, blocks_N = tau_of(scores, rule, gamma)
        tokens_N = np.array([len(score) for score in scores])
        return tau, ratio_with_interval(tokens_N, blocks_N, self.replies.prompts)[1]

    def shares(self, rule: Rule, gamma: int, spared: int) -> tuple[list[float], float]:
        """Return (survival, accepted/drafted) of the text that `predict` uses."""
        scores = self.scores if self.knows(rule) and self.scores is not None else self.own_scores
        return shares_of(*(sums_NJ.sum(0) for sums_NJ in survival_sums(scores, rule, gamma, spared=spared)))


def served_texts(replies: Replies, fit: TextFit | None = None) -> list[Decoded] | None:
    """Return the served responses from their second token on; None if one has no token ids."""
    texts = []
    for index, (text, answer) in enumerate(zip(replies.texts, replies.answers, strict=True)):
        if answer.ids is None:
            return None
        logs = [0.0] * len(answer.ids)
        if fit is not None:
            # A faulty engine emits tokens with probability 0 in both models; they must not count as accepted.
            logs = np.maximum(fit.log_target_probs[index], IMPOSSIBLE).tolist()
        texts.append(after_prefill(Decoded(text.prompt_ids, answer.ids, logs)))
    return texts


def count(replies: Replies, gamma: int) -> Counted:
    """Return the server's counts: per response if it reports them, else the difference of its counters.

    gamma: the requested one, which gives the blocks if an engine counts only tokens.

    Raises UserError: the server reports no draft counts.
    """
    server, tokens = replies.server, sum(max(0, answer.tokens - 1) for answer in replies.answers)
    gamma = _gamma_without_blocks(replies.answers) or gamma
    rows = [_row(answer, gamma) for answer in replies.answers]
    if replies.engine.dialect.silent and any(answer.counts is not None for answer in replies.answers):
        # Without counts nothing was drafted: then each token is a call.
        whole = [max(0, answer.tokens - 1) for answer in replies.answers]
        rows = [row or ServedBlocks(tokens, tokens) for row, tokens in zip(rows, whole, strict=True)]
    if all(row is not None for row in rows) and any(row.blocks for row in rows if row is not None):
        return _by_response([row for row in rows if row is not None], replies)
    if replies.reset:
        raise UserError(f"its counters cannot be used: {replies.reset}; keep it running and repeat the readback")
    if server is None or not server.blocks:
        raise UserError(
            "reports no draft counts, neither in its answers nor on /metrics; check that it uses a draft, and start it with counts "
            f"({reporting_flags()})"
        )
    ours = sum(answer.tokens for answer in replies.answers)
    # An engine may count tokens that it cut off after the end of a response.
    if server.tokens is not None and not ours <= server.tokens <= ours + 128 * len(replies.answers):
        raise UserError(
            f"it generated {server.tokens:,} tokens, but ours are {ours:,}, so its counters include other clients; repeat without other "
            "clients, or make it report each request"
        )
    notes = ["the server reports only sums, so its survival includes tokens drafted after the end of a response"]
    mean = server.drafted / server.blocks if server.drafted is not None else gamma
    survival = [accepted / server.blocks for accepted in server.accepted_G] or None
    rate = server.accepted / server.drafted if server.drafted and server.accepted is not None else None
    return Counted("metrics", None, server.blocks, tokens, max(1, round(mean)), survival, rate, notes=notes)


def _gamma_without_blocks(answers: Sequence[Answer]) -> int:
    """Return gamma of an engine that does not report blocks, from responses cut at max_tokens, whose calls are
    known; 0 if there is none.
    """
    longest = 0
    for answer in answers:
        counts = answer.counts
        if answer.finished or counts is None or counts.blocks is not None or counts.accepted is None:
            continue
        if (blocks := answer.tokens - 1 - counts.accepted) > 0:
            longest = max(longest, math.ceil((counts.drafted or 0) / blocks))
    return longest


def _row(answer: Answer, gamma: int) -> ServedBlocks | None:
    """Return the blocks of one answer. If an engine counts only tokens: each call emits one token more than it accepts."""
    counts, tokens = answer.counts, max(0, answer.tokens - 1)
    if counts is None:
        return ServedBlocks(0, 0) if not tokens else None
    blocks = counts.blocks
    if blocks is None and counts.accepted is not None:
        blocks = tokens - counts.accepted
        if answer.finished and counts.drafted is not None:  # Tokens accepted after the end token are counted too.
            blocks = max(blocks, math.ceil(counts.drafted / gamma))
    return None if blocks is None else ServedBlocks(tokens, blocks, counts.accepted_B, counts.drafted_B)


def _by_response(rows: list[ServedBlocks], replies: Replies) -> Counted:
    counts = [answer.counts for answer in replies.answers if answer.counts is not None]
    notes = []
    drafted, accepted = sum(each.drafted or 0 for each in counts), sum(each.accepted or 0 for each in counts)
    blocks, tokens = sum(row.blocks for row in rows), sum(row.tokens for row in rows)
    server = replies.server
    if server is not None and counts[0].blocks is not None and server.blocks not in (None, blocks):
        notes.append(
            f"its counters report {server.blocks:,} blocks, its answers {blocks:,}; it serves other clients too"
        )
    gammas = [each.gamma for each in counts if each.gamma]
    survival: list[float] | None = None
    ends: list[Interval] | None = None
    if any(row.accepted_B for row in rows):
        gamma = max(max(row.drafted_B, default=0) for row in rows)
        broken = sum(not row.whole for row in rows)
        if broken:
            notes.append(
                f"the blocks of {broken} of {len(rows)} responses do not add up to the response; some calls are not counted"
            )
        blocks_NJ, kept_NJ = (np.array(sums) for sums in zip(*(each.sums(gamma) for each in rows), strict=True))
        survival, rate = shares_of(blocks_NJ.sum(0), kept_NJ.sum(0))
        ends, spared = survival_intervals(blocks_NJ, kept_NJ, replies.prompts), _spared(rows, gamma)
        return Counted("responses", rows, blocks, tokens, gamma, survival, rate, spared, ends, notes, replies.prompts)
    gamma = max(gammas) if gammas else max(1, math.ceil(drafted / blocks - 1e-9))
    if all(each.histogram for each in counts):
        kept_NJ = np.array([[sum(each.histogram[j:]) for j in range(1, gamma + 1)] for each in counts])
        survival = (kept_NJ.sum(0) / blocks).tolist()
        blocks_N = np.array([sum(each.histogram) for each in counts])
        ends = survival_intervals(np.repeat(blocks_N[:, None], gamma, 1), kept_NJ, replies.prompts)
    if survival is None and server is not None and server.blocks and server.drafted == drafted:
        survival = [accepted / server.blocks for accepted in server.accepted_G] or None
    notes.append("the server reports sums per response, so survival includes tokens drafted after its end")
    spared = int(replies.engine.dialect.leaves_room)
    rate = accepted / drafted if drafted else 0.0
    return Counted("responses", rows, blocks, tokens, gamma, survival, rate, spared, ends, notes, replies.prompts)


def _spared(rows: list[ServedBlocks], gamma: int) -> int:
    """Return 1 if every block that reaches the end of its response drafts one token less than remains; else 0."""
    ends = [(row.inside()[-1][0], row.drafted_B[-1], row.tokens) for row in rows if row.drafted_B]
    short = [(drafted, min(gamma, tokens - start)) for start, drafted, tokens in ends if tokens - start <= gamma]
    return int(bool(short) and all(drafted == left - 1 for drafted, left in short))


def tau_interval(counted: Counted, tau: float, predicted: Interval) -> Interval:
    """Return the 95 % interval of the served tau over prompts; for sums only, replay's interval scaled to the served tau."""
    return own_interval(counted) or (predicted[0] * counted.tau / tau, predicted[1] * counted.tau / tau)


def own_interval(counted: Counted) -> Interval | None:
    """Return the 95 % interval of the served tau over prompts; None for sums only."""
    if (rows := counted.rows) is None:
        return None
    tokens_N, blocks_N = np.array([[row.tokens, row.blocks] for row in rows]).T
    return ratio_with_interval(tokens_N, blocks_N, counted.prompts or range(len(rows)))[1]


def waits(answers: Sequence[Answer]) -> Waiting:
    """Waits of streamed answers, as `metrics.waits_of`."""
    times = [
        ([one.first_seconds, one.seconds], [1, one.tokens - 1]) for one in answers if one.first_seconds is not None
    ]
    return waits_of([Response("", [], commit_seconds=seconds, commit_sizes=sizes) for seconds, sizes in times])


@dataclass(frozen=True)
class Pace:
    """Served speed over prompts, with 95 % intervals. tokens_per_second: per request. latency: mean seconds per response. plain: tokens
    per second without the draft. plain and speed_up are None if there is no such server.
    """

    tokens_per_second: float
    tokens_per_second_ci: Interval
    latency: float
    latency_ci: Interval
    plain: float | None = None
    speed_up: float | None = None
    speed_up_ci: Interval | None = None


def served_row(
    replies: Replies, counted: Counted, rule: str, gamma: int | None, tau_ci: Interval | None, load: int
) -> tuple[Measured, Pace]:
    """(the row of an engine's answers, their speed). load: requests sent at once."""
    speed, tokens = pace(replies.answers, replies.plain, replies.prompts), sum(one.tokens for one in replies.answers)
    row = Measured(
        DRAFT,
        rule,
        load,
        SERVED_TEXT,
        len(set(replies.prompts)),
        tokens,
        gamma,
        tau=counted.tau,
        tau_ci=tau_ci,
        accepted_per_drafted=counted.accepted_per_drafted,
        tokens_per_second=speed.tokens_per_second,
        speed_up=speed.speed_up,
        speed_up_ci=speed.speed_up_ci,
        **waits(replies.answers),
        how=dict.fromkeys(
            ("tau", "accepted_per_drafted", "tokens_per_second", "speed_up", "first_token_ms", "per_token_ms"), "served"
        ),
    )
    return row, speed


def plain_row(replies: Replies, served: Measured, tokens_per_second: float) -> Measured:
    """The row of the same engine without the draft."""
    return Measured(
        TARGET,
        served.rule,
        served.concurrency,
        SERVED_TEXT,
        served.prompts,
        sum(answer.tokens for answer in replies.plain),
        0,
        tau=1.0,
        tokens_per_second=tokens_per_second,
        speed_up=1.0,
        **waits(replies.plain),
        how=dict.fromkeys(("tokens_per_second", "first_token_ms", "per_token_ms"), "served"),
    )


def pace(answers: Sequence[Answer], plain: Sequence[Answer], prompts: Sequence[Hashable]) -> Pace:
    """Return the speed of these answers to these prompts, and the speed-up over the answers without the draft."""
    sums_NC = np.array([[1.0, one.tokens, one.seconds] for one in answers])
    if plain:
        sums_NC = np.concatenate((sums_NC, [[one.tokens, one.seconds] for one in plain]), 1)
    count_P, *sums_CP = (sum_by_prompt(prompts, own_N) for own_N in sums_NC.T)
    sums_PC = np.stack(sums_CP, 1)

    def rates(sums_C: np.ndarray) -> np.ndarray:
        own = sums_C[..., :1] / sums_C[..., 1:2]
        return np.concatenate((own, own / sums_C[..., 2:3] * sums_C[..., 3:4]), -1) if plain else own

    values, ends = rates(sums_PC.sum(0)).tolist(), [(low, high) for low, high in intervals_of_sums(sums_PC, rates)]
    seconds_P = sums_PC[:, 1]
    latency = float(seconds_P.sum() / count_P.sum()), ratio_interval(seconds_P, count_P)
    found = Pace(values[0], ends[0], *latency)
    return replace(found, plain=values[0] / values[1], speed_up=values[1], speed_up_ci=ends[1]) if plain else found
