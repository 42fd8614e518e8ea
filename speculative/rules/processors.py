"""Rules that change logits before they become probabilities. An acceptance rule compares the two models' final distributions, so it stays
lossless only if both are changed by the same rule on the same text: a rule here is a function of logits and text, without state.

Shapes: R rows, Q positions scored in one row, V vocabulary, C columns of the token buffer, E end tokens.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from speculative.errors import UserError


class _Constants(NamedTuple):
    """Constants of the rules for one device and vocabulary; None if off. ceiling_V: -inf for forbidden tokens, +inf for the others."""

    bias_V: torch.Tensor | None
    ceiling_V: torch.Tensor | None
    eos_E: torch.Tensor | None


@dataclass(frozen=True)
class LogitsRules:
    """Changes to the logits, in the order of the fields, which is that of transformers' `generate`, before temperature and truncation.

    repetition_penalty: logits of tokens in the text (prompt included) are divided by it when positive and multiplied
        when negative, once a token (1909.05858, section 4.1); 1 is off, below 1 encourages repetition.
    bias: (token id, number added to its logit) pairs, added before the penalty as transformers does.
    allowed_ids: only these tokens are allowed; () allows all. banned_ids: forbidden tokens.
    min_tokens: no id of `eos_ids` before this many response tokens. Stop strings are not affected.

    Raises UserError for a value outside its range and for rules that together forbid every token.
    """

    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    # Created once: copying from the host in every call would stall a GPU and is not allowed in a captured graph.
    _constants: dict[tuple[torch.device, int], _Constants] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("allowed_ids", "banned_ids", "eos_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        object.__setattr__(self, "bias", _bias_pairs(self.bias))
        if not (isinstance(self.repetition_penalty, int | float) and 0.0 < self.repetition_penalty < math.inf):
            raise UserError(f"repetition_penalty = {self.repetition_penalty!r}: must be a positive number (1 = off)")
        if not isinstance(self.min_tokens, int) or self.min_tokens < 0:
            raise UserError(f"min_tokens = {self.min_tokens!r}: must be 0 (off) or a positive number of tokens")
        if self.allowed_ids:
            self._check_something_is_left(set(self.allowed_ids))

    @property
    def active(self) -> bool:
        """Whether any rule is on."""
        told = self.allowed_ids or self.banned_ids or (self.min_tokens > 0 and self.eos_ids)
        return bool(told or self.repetition_penalty != 1.0 or any(value != 0.0 for _, value in self.bias))

    def check(self, vocab_size: int) -> None:
        """Raises UserError for a token id outside the vocabulary, and if every token is forbidden."""
        biased = tuple(token for token, _ in self.bias)
        for name, ids in (("bias", biased), *((name, getattr(self, name)) for name in _ID_FIELDS)):
            if ids and max(ids) >= vocab_size:
                raise UserError(f"{name} has token id {max(ids)} but the model knows ids 0..{vocab_size - 1}")
        self._check_something_is_left(set(self.allowed_ids or range(vocab_size)))

    def __call__(
        self, logits_RV: torch.Tensor, tokens_RC: torch.Tensor, lengths_R: torch.Tensor, prompt_lengths_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits (R, V) after the rules: a new tensor, float32 (float64 stays float64).

        Row r's text is tokens_RC[r, :lengths_R[r]], of which the first prompt_lengths_R[r] are its prompt; the rest of the row may be
        anything. Lengths are at least 1. Several positions of a row at once: logits (R, Q, V) with lengths (R, Q), position q of row r
        having the text tokens_RC[r, :lengths_RQ[r, q]] (so drafted tokens must be written after the committed ones). `tokens_RC` may be
        cut after the longest text, which makes the penalty cheaper. All tensors are on one device, and nothing waits for it.
        """
        dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        scores = logits_RV.to(dtype, copy=True, memory_format=torch.contiguous_format)
        constants = self._on(scores.device, scores.shape[-1])
        if constants.bias_V is not None:
            scores += constants.bias_V
        if self.repetition_penalty != 1.0:
            _penalise_repetition(scores, tokens_RC, lengths_R, self.repetition_penalty)
        if constants.eos_E is not None:
            # One prompt length per row, but possibly several lengths.
            said = lengths_R - prompt_lengths_R.view(-1, *(1,) * (lengths_R.dim() - 1))
            too_short = (said < self.min_tokens).unsqueeze(-1)
            held_back = scores.index_select(-1, constants.eos_E).masked_fill(too_short, -math.inf)
            scores.index_copy_(-1, constants.eos_E, held_back)
        if constants.ceiling_V is not None:
            # Twenty times as fast on a CPU as masked_fill_ with a mask that is broadcast; NaN stays NaN and is found.
            torch.minimum(scores, constants.ceiling_V, out=scores)
        return scores

    def _on(self, device: torch.device, vocab_size: int) -> _Constants:
        known = self._constants.get((device, vocab_size))
        if known is not None:
            return known
        bias_V = ceiling_V = eos_E = None
        if self.bias:
            bias_V = torch.zeros(vocab_size)
            bias_V[[token for token, _ in self.bias]] = torch.tensor([value for _, value in self.bias])
        if self.allowed_ids or self.banned_ids:
            ceiling_V = torch.full((vocab_size,), -math.inf if self.allowed_ids else math.inf)
            ceiling_V[list(self.allowed_ids)] = math.inf
            ceiling_V[list(self.banned_ids)] = -math.inf
        if self.min_tokens > 0 and self.eos_ids:
            eos_E = torch.tensor(self.eos_ids)
        made = _Constants(*(None if tensor is None else tensor.to(device) for tensor in (bias_V, ceiling_V, eos_E)))
        self._constants[device, vocab_size] = made
        return made

    def _check_something_is_left(self, possible: set[int]) -> None:
        left = possible.difference(self.banned_ids)
        if not left:
            raise UserError("banned_ids forbids every allowed token: ban fewer ids, or allow more")
        if self.min_tokens > 0 and not left.difference(self.eos_ids):
            raise UserError(
                f"min_tokens = {self.min_tokens} forbids the end tokens and no other token is allowed: "
                "allow more ids, ban fewer, or set min_tokens to 0"
            )


_ID_FIELDS = ("allowed_ids", "banned_ids", "eos_ids")


def _penalise_repetition(
    scores: torch.Tensor, tokens_RC: torch.Tensor, lengths: torch.Tensor, repetition_penalty: float
) -> None:
    """In place: (R, V) scores with (R,) lengths, or (R, Q, V) with (R, Q)."""
    columns_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    tokens = tokens_RC if lengths.dim() == 1 else tokens_RC.unsqueeze(1)
    # Scratch is replaced by the row's first token, which is text: a repeated index writes the same value again.
    said = torch.where(columns_C < lengths.unsqueeze(-1), tokens, tokens[..., :1])
    values = scores.gather(-1, said)
    values = torch.where(values < 0, values * repetition_penalty, values / repetition_penalty)
    scores.scatter_(-1, said, values)


def _token_ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Distinct ids in the order given."""
    try:
        plain = tuple(operator.index(token) for token in ids)
    except TypeError as error:
        raise UserError(f"{name} = {ids!r}: must be a list of token ids") from error
    if plain and min(plain) < 0:
        raise UserError(f"{name} has {min(plain)}: token ids start at 0")
    return tuple(dict.fromkeys(plain))


def _bias_pairs(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        plain = tuple((operator.index(token), float(value)) for token, value in pairs)
    except (TypeError, ValueError) as error:
        raise UserError(f"bias = {pairs!r}: must be a list of (token id, number) pairs") from error
    if len(_token_ids("bias", (token for token, _ in plain))) < len(plain):
        tokens = [token for token, _ in plain]
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise UserError(f"bias has token id {twice} more than once: give each id one value")
    for token, value in plain:
        if not math.isfinite(value):
            raise UserError(f"bias of token id {token} is {value}: must be finite (use banned_ids to forbid a token)")
    return plain
