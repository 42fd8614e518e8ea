"""Responses of a live run token by token: which model wrote each token, and both models' most probable tokens there.

Shapes: T tokens of a response.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from distill.run.result import ResponseSeen, TokenSeen, TokenView, Writer
from speculative.decoder.responses import DecodeSettings, Response
from speculative.explain.target_view import top_tokens
from speculative.explain.token_class import token_pieces, token_text
from speculative.measure.token_scores import score_tokens

LONGEST_PROMPT = 1200  # characters of a prompt that are shown


def writers(response: Response) -> list[tuple[Writer, int]]:
    """(writer, number of the block) of each of the T tokens.

    draft: a drafted token that the target accepted. target: the correction after a rejected one. bonus: the target's token
    after a fully accepted block (or one that drafted nothing).
    """
    tokens: list[tuple[Writer, int]] = []
    for block, (drafted, accepted) in enumerate(zip(response.drafted_counts, response.accepted_counts, strict=True)):
        tokens += [("draft", block)] * accepted
        tokens.append(("bonus" if accepted == drafted else "target", block))
    # The end token or the budget cut the last block.
    return tokens[: len(response.response_ids)]


def token_view(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    responses: Sequence[Response],
    domains: Sequence[str],
    tokenizer: Any,
    settings: DecodeSettings,
    *,
    name: str,
    top: int = 5,
) -> TokenView:
    """The token view of these responses.

    Probabilities are those at the serving settings, which decide acceptance. At temperature 0 those are only 0 and 1, so the
    probabilities at temperature 1 are shown.
    """
    sampling = settings.sampling
    models, shown_at = {"target": target, "draft": draft}, None if sampling.greedy else sampling
    scores = {who: score_tokens(model, responses, sampling) for who, model in models.items()}
    tops = {who: top_tokens(model, responses, top, shown_at) for who, model in models.items()}
    shown = []
    for index, (response, domain) in enumerate(zip(responses, domains, strict=True)):
        special = set(tokenizer.all_special_ids)
        known = zip(response.response_ids, token_pieces(tokenizer, response.response_ids), strict=True)
        pieces = [token_text(tokenizer, one) if one in special else piece for one, piece in known]
        probs = {who: np.exp(of[index].log_draft_probs) for who, of in scores.items()}
        listed = {who: _listed(tokenizer, *of[index]) for who, of in tops.items()}
        tokens = [
            TokenSeen(
                text=pieces[place],
                id=int(token_id),
                by=by,
                block=block,
                target_prob=float(probs["target"][place]),
                draft_prob=float(probs["draft"][place]),
                target_top=listed["target"][place],
                draft_top=listed["draft"][place],
            )
            for place, (token_id, (by, block)) in enumerate(zip(response.response_ids, writers(response), strict=True))
        ]
        prompt = tokenizer.decode(response.prompt_ids)
        shown.append(
            ResponseSeen(
                key=response.key,
                domain=domain,
                prompt=prompt if len(prompt) <= LONGEST_PROMPT else "... " + prompt[-LONGEST_PROMPT:],
                tokens=tokens,
                tokens_count=len(tokens),
                blocks=response.blocks,
                drafted=sum(response.drafted_counts),
                accepted=sum(response.accepted_counts),
            )
        )
    return TokenView(way=name, rule=settings.rule.name, gamma=settings.gamma, responses=shown)


def _listed(tokenizer: Any, ids_TK: np.ndarray, probs_TK: np.ndarray) -> list[list[tuple[str, float]]]:
    texts = {int(token_id): token_text(tokenizer, int(token_id)) for token_id in np.unique(ids_TK)}
    return [
        [(texts[int(token_id)], float(prob)) for token_id, prob in zip(ids, probs, strict=True)]
        for ids, probs in zip(ids_TK, probs_TK, strict=True)
    ]


def spread_over(responses: Sequence[Response], domains: Sequence[str], count: int) -> list[int]:
    """Indices of ``count`` responses, taken from the domains in turn; empty responses are left out."""
    queues: dict[str, list[int]] = {}
    for index, (response, domain) in enumerate(zip(responses, domains, strict=True)):
        if response.response_ids:
            queues.setdefault(domain, []).append(index)
    chosen: list[int] = []
    while len(chosen) < count and any(queues.values()):
        for queue in queues.values():
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return chosen
