"""Judge a draft on held-out prompts: held-out responses for alpha and every gamma, live decoding for tau."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.draft import Draft
from speculative.engine.cached_model import speed_warnings
from speculative.errors import UserError
from speculative.measure.effects import Gain
from speculative.measure.intervals import Interval
from speculative.measure.metrics import CURVE_GAMMAS, live_metrics, ratio_with_interval
from speculative.measure.record import Record, Text
from speculative.measure.replay import (
    ReplayCheck,
    agreement,
    agreement_of,
    agreement_warning,
    expected_blocks_of,
    predicted_blocks,
    shares_of,
    survival_sums,
)
from speculative.measure.token_scores import TokenScores, score_tokens, scored_gammas

# Of a comparison of new responses with stored ones: fewest prompts, and standard errors that can be chance.
FEWEST_COMPARED, MOST_ERRORS = 16, 4.0


@dataclass(frozen=True)
class HeldoutResponse:
    """A held-out response of the target, sampled at the serving settings, with its log target probabilities."""

    key: str
    domain: str
    prompt_ids: list[int]
    response_ids: list[int]
    log_target_probs: list[float]  # NaN if the server does not return them

    @property
    def prompt(self) -> Hashable:
        """Key of the prompt, the resampling unit of every interval."""
        return tuple(self.prompt_ids)


class PerResponse(Record):
    """Sums by held-out response, so that two judgements on the same text can be paired without running a model."""

    accept_sums: list[float] = Field(description="of the acceptance probabilities")
    tokens: list[int] = Field(description="of each response")
    blocks: list[float] | None = Field(None, description="expected at the judged gamma")


class OnText(Record):
    """Numbers of a draft on a text. Null: needs live decoding, and nothing was decoded."""

    alpha: float = Field(description="acceptance rate on the held-out responses")
    alpha_ci: Interval | None = Field(None, description="its 95 % interval")
    tau: float | None = Field(None, description="tokens per target call at the judged gamma")
    tau_ci: Interval | None = Field(None, description="its 95 % interval")
    accepted_per_drafted: float | None = Field(None, description="accepted over drafted tokens")
    survival: list[float] | None = Field(
        None, description="share of blocks whose first j tokens are all accepted, j from 1; live, else by replay"
    )
    prompts: int | None = Field(None, description="held-out prompts")
    tokens: int | None = Field(None, description="tokens of their held-out responses")
    replay: dict[int, float] = Field({}, description="tau by gamma, from the held-out responses")


class LiveCheck(Record):
    """Some held-out prompts decoded live, to prove what replay predicts."""

    prompts: int = Field(description="prompts decoded")
    tokens: int = Field(description="tokens of the responses")
    tau: float = Field(description="tokens per target call, counted")
    tau_ci: Interval = Field(description="its 95 % interval")
    accepted_per_drafted: float = Field(description="accepted over drafted tokens")
    replay: ReplayCheck | None = Field(None, description="counted blocks against replay of the same text")


class FreshCheck(Record):
    """Some held-out prompts that the target's server answered again, to prove that the stored responses are still its own."""

    prompts: int = Field(description="prompts answered")
    tokens: int = Field(description="tokens of the new responses")
    alpha: float = Field(description="acceptance rate on them, by replay")
    stored_alpha: float = Field(description="the same on the stored responses to these prompts")
    z: float = Field(description="difference in standard errors, paired by prompt")
    agrees: bool = Field(description="whether the difference can be chance")


class Judgement(OnText):
    """judgement.json of a checkpoint: replay of the held-out responses, and some prompts decoded live. In a verdict: all decoded live."""

    step: int | None = Field(None, description="of the checkpoint; null: none of this run")
    score: float | None = Field(
        None,
        description="selects the best checkpoint: tau under the configured rule",
    )
    tau: float = Field(description="tokens per target call: counted live, else by replay")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    domains: dict[str, OnText] = Field({}, description="the same numbers by domain")
    live: bool = Field(True, description="whether tau was counted on all prompts, decoded live; false: by replay")
    live_check: LiveCheck | None = Field(None, description="the prompts that a checkpoint decoded live; null: none")
    fresh_check: FreshCheck | None = Field(None, description="the same where the target is at a server; null: none")
    live_tokens: int | None = Field(None, description="tokens of the live run")
    replay_check: ReplayCheck | None = Field(None, description="live blocks compared with replay of their text")
    warnings: list[Text] = Field([], description="differences between live decoding and replay")
    per_response: PerResponse | None = Field(None, description="sums by response; in judgement.json only")
    ranks: int | None = Field(None, description="processes that judged; the numbers do not depend on it")
    gain: Gain | None = Field(
        None,
        description="in a verdict: gain in alpha over step 0, paired by prompt on the same text; the interval is not corrected",
    )

    def without_sums(self) -> "Judgement":
        """The judgement without its lists by response, those under other rules included."""
        plain = self.model_dump(exclude_unset=True, exclude={"per_response": True, "greedy": {"per_response"}})
        return Judgement.model_validate(plain)


@dataclass
class ReplaySums:
    """What a judgement needs of each response: N responses, K gammas, the last one the judged gamma. Plain numbers, so that parts
    computed in different places can be stored as JSON and joined.
    """

    accepted_N: list[float]  # sums of acceptance probabilities
    tokens_N: list[int]
    gammas: list[int]
    blocks_NK: list[list[float]]  # expected target calls
    drafted_NJ: list[list[float]]  # expected blocks that draft j tokens within the text, j up to the judged gamma
    kept_NJ: list[list[float]]  # those of them that keep all j


def replay_sums(
    draft: Draft,
    texts: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    *,
    scores: Sequence[TokenScores] | None = None,
) -> ReplaySums:
    """The sums of these responses from one draft pass, or from `scores` if that pass was made."""
    if scores is None:
        scores = score_tokens(draft.model, texts, settings.sampling, offsets=draft.offsets(settings.gamma))
    rule = settings.rule
    gammas = [*scored_gammas(scores, CURVE_GAMMAS), settings.gamma]
    accepted_N = [float(own.accept_probs(rule).sum()) for own in scores]
    blocks_NK = expected_blocks_of(scores, rule, gammas)
    drafted_NJ, kept_NJ = survival_sums(scores, rule, settings.gamma)
    return ReplaySums(
        accepted_N, list(map(len, scores)), gammas, blocks_NK.tolist(), drafted_NJ.tolist(), kept_NJ.tolist()
    )


def judge_by_replay(
    draft: Draft,
    heldout: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    *,
    scores: Sequence[TokenScores] | None = None,
) -> Judgement:
    """The cheap part of `judge`: alpha (of a block's first token) and tau at the scored gammas from one draft pass over held-out responses,
    without the target in memory. scores: of this draft on this text, if already known; then no model runs.
    """
    require_text(heldout)
    return judge_sums(heldout, settings, replay_sums(draft, heldout, settings, scores=scores))


def require_text(heldout: Sequence[HeldoutResponse]) -> None:
    """Raise UserError if there is no token to judge on."""
    if not any(response.response_ids for response in heldout):
        raise UserError("no held-out response to evaluate on: give held-out prompts with non-empty responses")


def judge_sums(heldout: Sequence[HeldoutResponse], settings: DecodeSettings, sums: ReplaySums) -> Judgement:
    """`judge_by_replay` from its sums by response."""
    *gammas, _ = sums.gammas
    accepted_N, tokens_N, blocks_NK = (np.array(own) for own in (sums.accepted_N, sums.tokens_N, sums.blocks_NK))
    drafted_NJ, kept_NJ = np.array(sums.drafted_NJ), np.array(sums.kept_NJ)

    def numbers(indices: Sequence[int]) -> OnText:
        keys = [heldout[index].prompt for index in indices]
        alpha, alpha_ci = ratio_with_interval(accepted_N[indices], tokens_N[indices], keys)
        tokens = int(tokens_N[indices].sum())
        return OnText(
            alpha=alpha,
            alpha_ci=alpha_ci,
            survival=shares_of(drafted_NJ[indices].sum(0), kept_NJ[indices].sum(0))[0],
            prompts=len(set(keys)),
            tokens=tokens,
            replay=dict(zip(gammas, (tokens / blocks_NK[indices, : len(gammas)].sum(0)).tolist(), strict=True)),
        )

    whole = numbers(range(len(heldout)))
    return Judgement(
        **whole.record(),
        tau=whole.replay[settings.gamma],
        tau_ci=ratio_with_interval(tokens_N, blocks_NK[:, -1], [one.prompt for one in heldout])[1],
        rule=settings.rule.name,
        gamma=settings.gamma,
        # A domain of empty responses has nothing to judge.
        domains={name: numbers(indices) for name, indices in _by_domain(heldout).items() if tokens_N[indices].any()},
        per_response=PerResponse(accept_sums=sums.accepted_N, tokens=sums.tokens_N, blocks=blocks_NK[:, -1].tolist()),
        live=False,
        warnings=[],
    )


@dataclass
class LiveSums:
    """What a `LiveCheck` needs of one decoded response. predicted, variance: by replay, if that predicts them."""

    key: str
    tokens: int
    blocks: int
    drafted: int
    accepted: int
    predicted: float | None = None
    variance: float | None = None


def decode_live(
    target: PreTrainedModel,
    draft: Draft,
    prompts: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    batch_size: int,
) -> list[LiveSums]:
    """Decode these prompts with the draft and replay the text that comes out. Raises UserError for everything that `decode` refuses."""
    asked = [(one.key, one.prompt_ids) for one in prompts]
    responses, _ = decode(target, draft.drafter(), asked, settings, batch_size=batch_size)
    sums_of = [LiveSums(one.key, len(one.response_ids), one.blocks, one.drafted, one.accepted) for one in responses]
    if _replay_predicts(settings):
        own = score_tokens(draft.model, responses, settings.sampling, offsets=draft.offsets(settings.gamma, 1))
        predicted_N, variance_N = predicted_blocks(own, settings.rule, settings.gamma)
        for sums, predicted, variance in zip(sums_of, predicted_N.tolist(), variance_N.tolist(), strict=True):
            sums.predicted, sums.variance = predicted, variance
    return sums_of


def live_check(sums: Sequence[LiveSums]) -> LiveCheck:
    """Join decoded responses. Each prompt was decoded once."""
    tokens_N, blocks_N = (np.array([getattr(item, name) for item in sums]) for name in ("tokens", "blocks"))
    tau, tau_ci = ratio_with_interval(tokens_N, blocks_N, [item.key for item in sums])
    predicted_N = [item.predicted for item in sums if item.predicted is not None]
    variance_N = [item.variance for item in sums if item.variance is not None]
    return LiveCheck(
        prompts=len(sums),
        tokens=int(tokens_N.sum()),
        tau=tau,
        tau_ci=tau_ci,
        accepted_per_drafted=sum(item.accepted for item in sums) / max(1, sum(item.drafted for item in sums)),
        replay=agreement(predicted_N, variance_N, blocks_N.tolist()) if predicted_N else None,
    )


def fresh_check(new_P2: np.ndarray, stored_P2: np.ndarray) -> FreshCheck:
    """Compare the draft on new and stored responses to the same P prompts: (accepted, tokens) of each. The error of each rate is
    linearised, as of a ratio estimator. Below FEWEST_COMPARED prompts any difference can be chance.
    """
    (alpha, off_P), (stored, stored_off_P) = (
        (
            rate := sums_P2[:, 0].sum() / sums_P2[:, 1].sum(),
            (sums_P2[:, 0] - rate * sums_P2[:, 1]) / sums_P2[:, 1].sum(),
        )
        for sums_P2 in (new_P2, stored_P2)
    )
    prompts = len(new_P2)
    error = float(np.sqrt(prompts / max(1, prompts - 1) * ((off_P - stored_off_P) ** 2).sum()))
    z = float(alpha - stored) / error if error > 0.0 else 0.0
    agrees = prompts < FEWEST_COMPARED or abs(z) <= MOST_ERRORS
    return FreshCheck(
        prompts=prompts,
        tokens=int(new_P2[:, 1].sum()),
        alpha=float(alpha),
        stored_alpha=float(stored),
        z=z,
        agrees=agrees,
    )


def _replay_predicts(settings: DecodeSettings) -> bool:
    """Whether replay can predict blocks at these settings."""
    return settings.active_rules is None and settings.tree is None and settings.rule.lossless


def judge(
    target: PreTrainedModel,
    draft: Draft,
    heldout: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    *,
    batch_size: int = 16,
    scores: Sequence[TokenScores] | None = None,
    decoded: Callable[[Sequence[Prompt]], list[Response]] | None = None,
) -> tuple[Judgement, list[Response]]:
    """Return (all numbers of one draft, responses of the live run): `judge_by_replay`, and each held-out prompt decoded live once.

    Adds {tau, tau_ci, accepted_per_drafted, survival, live_tokens, blocks, replay_check}, the live numbers
    also per domain. `replay_check` replays the text of the live run: |z| above 4 means a fault. scores: as for `judge_by_replay`. decoded:
    decodes prompts at these settings; default: here. Raises UserError when gamma is 0, for empty input, and for everything that `decode`
    refuses.
    """
    if settings.gamma < 1:
        raise UserError("gamma = 0: judging a draft needs at least one drafted token per block")
    result = judge_by_replay(draft, heldout, settings, scores=scores)
    chosen = sorted(one_per_prompt(heldout), key=lambda response: (len(response.prompt_ids), response.key))
    prompts = [(response.key, response.prompt_ids) for response in chosen]
    if decoded is None:
        responses, _ = decode(target, draft.drafter(), prompts, settings, batch_size=batch_size)
    else:
        responses = decoded(prompts)
    domains = dict(result.domains)
    for name, indices in _by_domain(chosen).items():
        if name in domains:
            live = live_metrics([responses[index] for index in indices], settings.gamma)
            domains[name] = domains[name].model_copy(update=dict(live))
    check = None
    if _replay_predicts(settings):
        own = score_tokens(draft.model, responses, settings.sampling, offsets=draft.offsets(settings.gamma, 1))
        check = agreement_of(own, settings.rule, [response.blocks for response in responses], settings.gamma)
    warnings = (agreement_warning(check), *speed_warnings(target, draft.model))
    numbers: dict[str, Any] = {
        **live_metrics(responses, settings.gamma),
        "domains": domains,
        "live": True,
        "replay_check": check,
        "warnings": [warning for warning in dict.fromkeys(warnings) if warning],
    }
    return result.model_copy(update=numbers), responses


def one_per_prompt(heldout: Sequence[HeldoutResponse]) -> list[HeldoutResponse]:
    """The first response to each prompt."""
    return list({response.prompt: response for response in reversed(heldout)}.values())


def _by_domain(heldout: Sequence[HeldoutResponse]) -> dict[str, list[int]]:
    domains: dict[str, list[int]] = {}
    for index, response in enumerate(heldout):
        domains.setdefault(response.domain, []).append(index)
    return domains


def decode_heldout(
    target: PreTrainedModel, prompts: Sequence[Prompt], settings: DecodeSettings, domain: str, batch_size: int = 16
) -> list[HeldoutResponse]:
    """Decode the target alone; its responses are the held-out responses to judge drafts on."""
    responses, _ = decode(target, None, prompts, replace(settings, gamma=0), batch_size=batch_size)
    return [
        HeldoutResponse(text.key, domain, text.prompt_ids, text.response_ids, text.log_target_probs)
        for text in responses
    ]
