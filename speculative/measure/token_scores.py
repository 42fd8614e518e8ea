"""Scores of a draft on stored target responses, token by token: one forward per batch, without the target in memory.

Shapes: T tokens of one response, B rows, R tokens of a chunk, V vocabulary, J offsets of a block, N masks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.engine.arithmetic import computing_as
from speculative.engine.models import evaluating, mask_token_of, masked_pass, takes_logits_to_keep, vocab_rows
from speculative.errors import UserError
from speculative.progress import each
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings, logits_to_probs

# Logits of one forward: rows x columns x vocabulary, in the draft's dtype. A single longer response exceeds it alone.
LOGITS_PER_FORWARD = 1 << 26
# Responses of one forward. A small number, so that ranks can share the batches of one text.
ROWS_PER_FORWARD = 16
# Rows turned into float32 probabilities at once: rows x vocabulary.
PROBS_PER_CHUNK = 1 << 22
# Maximum number of masks in one pass: attention memory grows with the square of masks plus text.
MASKS_PER_FORWARD = 1024


class StoredText(Protocol):
    """A target response with the log target probability of each of its tokens; `decode.Response` is one."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def response_ids(self) -> Sequence[int]: ...

    @property
    def log_target_probs(self) -> Sequence[float]: ...


@dataclass(frozen=True)
class TokenScores:
    """Results of one draft pass over the T stored tokens of a response, enough for every rule.

    log_draft_probs: of the stored token, under the serving settings (-inf if the draft never proposes it); under greedy settings the
    draft's own, at temperature 1. log_target_probs: as stored, under the serving settings (0 when greedy). matches: the draft's argmax is
    the stored token. choice_ids: that argmax. log_whole_probs: as log_draft_probs, of a draft that truncates nothing (rule
    sample-untruncated); None where the serving settings do not truncate either. by_start: of a parallel draft, the same values as tables
    (T, J): at [i, j] token i + j of the response, proposed at offset j + 1 of the block that starts with token i; a token that is always
    kept after the end of the text. None: it drafts token by token.
    """

    log_draft_probs: np.ndarray
    log_target_probs: np.ndarray
    matches: np.ndarray
    choice_ids: np.ndarray
    by_start: "TokenScores | None" = None
    log_whole_probs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.log_draft_probs)

    def log_drafted(self, rule: Rule) -> np.ndarray:
        """Log probability with which the draft proposes the stored token under this rule."""
        if not rule.draws:
            return np.where(self.matches, 0.0, -np.inf)
        return self.log_draft_probs if rule.truncated or self.log_whole_probs is None else self.log_whole_probs

    def accept_log_probs(self, rule: Rule) -> np.ndarray:
        """`Rule.accept_log_prob` of the stored tokens (T,), without the target's probabilities where a draft takes its argmax."""
        drafted = self.log_drafted(rule)
        known = rule.draws or not rule.lossless
        return rule.accept_log_prob(self.log_target_probs, drafted) if known else drafted

    def accept_probs(self, rule: Rule) -> np.ndarray:
        """Per token (T,) the probability that it is an accepted drafted token once a block reaches it; the mean over text that the target
        wrote is an unbiased alpha. A rule that judges whole blocks has the number of the token-wise one, whose mean is also alpha.
        """
        return np.exp(self.accept_log_probs(rule))


def accepted_sums(scores: Sequence[TokenScores], rule: Rule) -> np.ndarray:
    """Sums (N,) of the acceptance probabilities of each response."""
    return np.array([text.accept_probs(rule).sum() for text in scores])


def scored_gammas(scores: Sequence[TokenScores], gammas: Iterable[int]) -> list[int]:
    """The gammas that these scores cover: all, or for a parallel draft those up to the scored offsets."""
    most = min((one.by_start.choice_ids.shape[1] for one in scores if one.by_start is not None), default=None)
    return [gamma for gamma in gammas if most is None or gamma <= most]


def score_tokens(
    draft: PreTrainedModel,
    texts: Sequence[StoredText],
    settings: SamplingSettings,
    *,
    offsets: int | None = None,
) -> list[TokenScores]:
    """`TokenScores` of every text, in order, from one pass.

    settings: how the texts were sampled. offsets: the largest gamma needed of a parallel draft; fills `by_start`, which feeds `offsets` - 1
    more tokens per response token. Raises UserError when the draft returns NaN or infinite logits, or if offsets are requested for a draft
    that is not parallel.
    """
    sampling = SamplingSettings() if settings.greedy else settings
    width = 3 if sampling.truncates else 2

    def columns(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        probs_RV = logits_to_probs(logits_RV, sampling)
        log_probs_R = probs_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1).double().log()
        parts = [log_probs_R, logits_RV.float().argmax(-1).double()]
        if sampling.truncates:
            warm_RV = logits_RV.float() / sampling.temperature
            parts.append((warm_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1) - warm_RV.logsumexp(-1)).double())
        return torch.stack(parts, 1)

    scores = []
    values = values_by_text(draft, texts, columns, width, "draft")
    for text, values_TK in zip(texts, values, strict=True):
        choices = values_TK[:, 1].astype(np.int64)
        log_target_probs = np.asarray(text.log_target_probs, dtype=np.float64)
        matches = choices == np.asarray(text.response_ids, dtype=np.int64)
        whole_T = values_TK[:, 2] if width > 2 else None
        scores.append(TokenScores(values_TK[:, 0], log_target_probs, matches, choices, log_whole_probs=whole_T))
    if offsets is None:
        return scores
    tables = _values_by_start(draft, texts, columns, offsets, width)
    return [
        replace(sampling, by_start=_in_tables(text, sampling, table_TJK))
        for text, sampling, table_TJK in zip(texts, scores, tables, strict=True)
    ]


def _in_tables(text: StoredText, scores: TokenScores, values_TJK: np.ndarray) -> TokenScores:
    """`TokenScores.by_start` from the columns (T, J, K) of every (start, offset): log draft probability, choice, and the whole draft's log
    probability where K is 3.
    """
    tokens, offsets = len(scores), values_TJK.shape[1]
    # The first offset is that of the text itself.
    firsts = scores.log_draft_probs, scores.choice_ids, scores.log_whole_probs
    values_TJK[:, 0] = np.stack([one for one in firsts if one is not None], 1)
    places_TJ = np.arange(tokens)[:, None] + np.arange(offsets)
    inside_TJ = places_TJ < tokens
    places_TJ = np.minimum(places_TJ, max(tokens - 1, 0))
    ids_T = np.asarray(text.response_ids, dtype=np.int64)
    choices_TJ = values_TJK[..., 1].astype(np.int64)
    return TokenScores(
        np.where(inside_TJ, values_TJK[..., 0], 0.0),
        np.where(inside_TJ, scores.log_target_probs[places_TJ], 0.0),
        (choices_TJ == ids_T[places_TJ]) | ~inside_TJ,
        choices_TJ,
        log_whole_probs=np.where(inside_TJ, values_TJK[..., 2], 0.0) if scores.log_whole_probs is not None else None,
    )


def score_responses(
    draft: PreTrainedModel, texts: Sequence[StoredText], settings: SamplingSettings, rule: Rule | None = None
) -> list[np.ndarray]:
    """`TokenScores.accept_probs` of every text, in order. rule: None is the usual one. Raises UserError when the draft returns NaN."""
    rule = (rule or Rule.usual(1.0)).at(settings.temperature)
    return [scores.accept_probs(rule) for scores in score_tokens(draft, texts, settings)]


def values_by_text(
    model: PreTrainedModel,
    texts: Sequence[StoredText],
    values_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    width: int,
    who: str,
    inputs: str = "",
) -> list[np.ndarray]:
    """Values (T, K = width) per text, in order, from `values_of` (logits_RV, token_ids_R) -> (R, K) float64. inputs: the logits are then
    (R, 2V), those of the model and after them those of `computing_as`. Raises UserError, with `who`
    as the name of the model, if it returns NaN or infinite logits.
    """
    values: list[np.ndarray] = [np.zeros((0, width)) for _ in texts]
    for batch in each(score_batches(texts, model), "scoring"):
        # Not around `values_of`, whose own code might want gradients.
        with evaluating(model):
            logits_RV, ids_R = _response_logits(model, [texts[index] for index in batch])
            if inputs:
                with computing_as(model, inputs):
                    served_RV, _ = _response_logits(model, [texts[index] for index in batch])
                logits_RV = torch.cat([logits_RV, served_RV], -1)
        flat_RK = _finite_values(values_of, logits_RV, ids_R, who)
        ends = np.cumsum([len(texts[index].response_ids) for index in batch])
        for index, values_TK in zip(batch, np.split(flat_RK, ends[:-1]), strict=True):
            values[index] = values_TK
    return values


def _values_by_start(
    draft: PreTrainedModel,
    texts: Sequence[StoredText],
    values_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    offsets: int,
    width: int,
) -> list[np.ndarray]:
    """Values from `values_of` at offsets 2.. of the block from every start: (T, J, K = width), else zeros."""
    mask_token = mask_token_of(draft.config)
    if mask_token is None:
        raise UserError("the draft's config.json has no mask token (pard_token): it can draft token by token only")
    most = max(1, min(MASKS_PER_FORWARD, LOGITS_PER_FORWARD // vocab_rows(draft)) // max(1, offsets - 1))
    tables = [np.zeros((len(text.response_ids), offsets, width)) for text in texts]
    for text, table_TJK in each(zip(texts, tables, strict=True), "scoring blocks", len(texts)):
        tokens, first = len(text.response_ids), len(text.prompt_ids) - 1
        ids_T = torch.tensor([*text.prompt_ids, *text.response_ids], device=draft.device)
        # The last token has no further offset, so no block starts there.
        for begin in range(0, tokens - 1 if offsets > 1 else 0, most):
            starts_S = torch.arange(begin, min(begin + most, tokens - 1), device=draft.device)
            depths_1T = ids_T.new_zeros((1, first + int(starts_S[-1]) + 1))
            depths_1T[0, first + starts_S] = (tokens - starts_S).clamp_max(offsets)
            masked = masked_pass(draft, ids_T[None, : depths_1T.shape[1]], depths_1T, mask_token)
            masks = len(masked.columns_N)
            keep = {"logits_to_keep": masks} if takes_logits_to_keep(draft) else {}
            with evaluating(draft):
                logits_NV = draft(**masked.inputs, **keep).logits[0, -masks:]
            said_N = ids_T[masked.starts_N + masked.offsets_N]
            places_N = (masked.starts_N - first).cpu().numpy(), (masked.offsets_N - 1).cpu().numpy()
            table_TJK[places_N] = _finite_values(values_of, logits_NV, said_N, "draft")
    return tables


def _finite_values(
    values_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    who: str,
) -> np.ndarray:
    """Of at most PROBS_PER_CHUNK entries at once."""
    rows = max(1, PROBS_PER_CHUNK // logits_RV.shape[-1])
    parts = [
        values_of(own_RV, own_R).where(own_RV.amax(-1, keepdim=True).isfinite(), torch.nan)
        for own_RV, own_R in zip(logits_RV.split(rows), ids_R.split(rows), strict=True)
    ]
    flat_RK = torch.cat(parts).cpu().numpy()
    if np.isnan(flat_RK).any():
        raise UserError(f"the {who} returned NaN or infinite logits on stored text: check its weights and dtype")
    return flat_RK


def score_batches(texts: Sequence[StoredText], model: PreTrainedModel) -> list[list[int]]:
    """Indices of texts with a response, in the batches of one forward each: similar length, logits within LOGITS_PER_FORWARD; alone, a
    batch gives the same bits.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    order = sorted(
        (index for index, text in enumerate(texts) if text.response_ids),
        key=lambda index: len(texts[index].prompt_ids) + len(texts[index].response_ids),
    )
    batches: list[list[int]] = []
    for index in order:
        total = len(texts[index].prompt_ids) + len(texts[index].response_ids)  # length of the longest text so far
        most = min(ROWS_PER_FORWARD, max(1, LOGITS_PER_FORWARD // (total * vocab_size)))
        if not batches or len(batches[-1]) + 1 > most:
            batches.append([])
        batches[-1].append(index)
    return batches


def _response_logits(draft: PreTrainedModel, texts: Sequence[StoredText]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (rows, V) that predict the response tokens of right-padded texts, text after text; and those tokens."""
    longest = max(len(text.prompt_ids) + len(text.response_ids) for text in texts)
    ids_BT = torch.zeros((len(texts), longest), dtype=torch.int64)
    scored_BT = torch.zeros((len(texts), longest), dtype=torch.bool)
    for row, text in enumerate(texts):
        prompt, total = len(text.prompt_ids), len(text.prompt_ids) + len(text.response_ids)
        ids_BT[row, :total] = torch.tensor([*text.prompt_ids, *text.response_ids])
        scored_BT[row, prompt - 1 : total - 1] = True
    ids_BT, scored_BT = ids_BT.to(draft.device), scored_BT.to(draft.device)
    columns = longest - min(len(text.prompt_ids) for text in texts) + 1
    keep = {"logits_to_keep": columns} if takes_logits_to_keep(draft) else {}
    # No padding mask: a causal model never looks right, where the padding is.
    logits_BTV = draft(input_ids=ids_BT, use_cache=False, **keep).logits
    return logits_BTV[:, -columns:][scored_BT[:, -columns:]], ids_BT[scored_BT.roll(1, 1)]
