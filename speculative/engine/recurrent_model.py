"""A causal LM with recurrent layers (state space, linear attention) with the interface of `CachedModel`. A recurrent state cannot be cut
back: a rejected token is undone by restoring a copy of an earlier state and reading the committed text again, row by row. This is correct,
but slower than an engine that keeps the state of every drafted token.

Shapes: R rows, K rows of one call, Q query tokens, C capacity (positions a row can hold), V vocabulary.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.engine.agreement import ROUGH, Check, Feed, Parts, disagreement, fault_of
from speculative.engine.models import forward_parameters, is_recurrent, state_name, takes_logits_to_keep
from speculative.engine.runners import Runner
from speculative.errors import UserError
from speculative.rules.tree import TokenTree

CHECKPOINT_STEP = 32  # Maximum number of tokens to read again; then the copy is renewed.
REREAD = 2  # Number of committed tokens that a drafter may feed again.
# Tokens of the calls that test a state: what a call of several tokens forgets may matter only behind a long text.
PROBE = (32, 3, 2)


class _Row:
    """Text of a row, the state after its first `length` tokens, and the copy to restore."""

    def __init__(self, capacity: int, device: torch.device):
        self.tokens_C = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.state: Any = None
        self.length = 0
        self.kept: Any = None
        self.kept_length = 0

    def keep(self) -> None:
        self.kept, self.kept_length = copy.deepcopy(self.state), self.length

    def go_back(self) -> None:
        self.state, self.length = copy.deepcopy(self.kept), self.kept_length


class RecurrentModel:
    """The interface of `CachedModel`, without token trees."""

    how = "eager calls"

    def __init__(self, model: PreTrainedModel, name: str, rows: int, capacity: int):
        self.model, self.name, self.device = model, name, model.device
        self.runner = Runner()
        self._capacity = capacity
        self._rows = [_Row(capacity, self.device) for _ in range(rows)]
        self._state_name = state_name(model)
        self._keeps_logits = takes_logits_to_keep(model)
        self._takes_positions = "position_ids" in forward_parameters(model)
        self._goes_on = True
        self._goes_on = self._in_several_tokens()

    def feed(
        self,
        ids_KQ: torch.Tensor,
        starts_K: np.ndarray,
        logits_kept: int,
        rows: Sequence[int] | None = None,
        once: bool = False,
    ) -> torch.Tensor:
        """Logits (K, logits_kept, V) after the last `logits_kept` of Q tokens, written from each row's start on."""
        logits = []
        for place, row in enumerate(self._rows if rows is None else [self._rows[row] for row in rows]):
            start = int(starts_K[place])
            self._rewind(row, start)
            row.tokens_C[start : start + ids_KQ.shape[1]] = ids_KQ[place]
            logits.append(self._read(row, start + ids_KQ.shape[1], logits_kept))
        return torch.stack(logits)

    def close(self) -> None:
        """End the decode call; nothing is kept."""

    def feed_tree(self, ids_RN1: torch.Tensor, starts_R: np.ndarray, tree: TokenTree) -> torch.Tensor:
        """Always raises UserError: a state cannot branch."""
        raise UserError(f"the {self.name} keeps a recurrent state, which does not support token trees: use a chain")

    def commit_path(self, starts_R: np.ndarray, path_RD: torch.Tensor) -> None:
        """Never reached: see `feed_tree`."""
        raise NotImplementedError

    def prefill(self, tokens_RC: np.ndarray, rows: Sequence[int], lengths_K: np.ndarray) -> None:
        """Read the first `lengths_K` tokens of these rows."""
        for index, length in zip(rows, lengths_K.tolist(), strict=True):
            row = self._rows[index] = _Row(self._capacity, self.device)
            if length:
                row.tokens_C[:length] = torch.from_numpy(tokens_RC[index, :length]).to(self.device)
                self._read(row, length, 1)
                row.keep()

    def keep(self, rows: Sequence[int]) -> None:
        """Compact to these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]

    def _rewind(self, row: _Row, start: int) -> None:
        """Restore a state of the row's first `start` tokens or fewer."""
        if row.length <= start:
            return
        if row.kept_length > start:
            row.kept, row.kept_length = None, 0
        row.go_back()
        if start - row.length > CHECKPOINT_STEP:
            self._read(row, start - REREAD, 1)
            row.keep()

    def _read(self, row: _Row, stop: int, logits_kept: int) -> torch.Tensor:
        """Read the row's text up to `stop`; returns logits (logits_kept, V) after the last tokens."""
        parts = []
        while row.length < stop:
            tokens = stop - row.length if self._goes_on or row.length == 0 else 1
            parts.append(self._call(row, row.tokens_C[row.length : row.length + tokens], logits_kept))
        return torch.cat(parts)[-logits_kept:]

    def _call(self, row: _Row, ids_Q: torch.Tensor, logits_kept: int) -> torch.Tensor:
        options: dict[str, Any] = {} if row.state is None else {self._state_name: row.state}
        if self._takes_positions:  # some models count them from 0 in every call
            options["position_ids"] = torch.arange(row.length, row.length + len(ids_Q), device=self.device).unsqueeze(0)
        if self._keeps_logits:
            options["logits_to_keep"] = min(logits_kept, len(ids_Q))
        output = self.model(input_ids=ids_Q.unsqueeze(0), use_cache=True, **options)
        row.state, row.length = getattr(output, self._state_name, None), row.length + len(ids_Q)
        if row.state is None:
            raise UserError(
                f"{self.name} ({type(self.model).__name__}) does not return its state, so rows cannot have one each: use another model"
            )
        return output.logits[0, -logits_kept:]

    def _in_several_tokens(self) -> bool:
        """Whether the model continues from a state with several tokens per call; some restart in such a call. Raises UserError if it does
        not continue with one token either, as its own call of the whole text does.
        """

        def open_calls(capacity: int) -> Feed:
            rows = [_Row(capacity, self.device) for _ in range(2)]
            return lambda ids_2Q, _, tokens: torch.stack(
                [self._call(row, ids_Q, tokens) for row, ids_Q in zip(rows, ids_2Q, strict=True)]
            )

        def calls(widths: Sequence[int]) -> Parts:
            return [((start, start), width) for start, width in zip((0, *accumulate(widths)), widths, strict=False)]

        singly = Check("one token", open_calls, calls([PROBE[0], *[1] * sum(PROBE[1:])]), allowed=ROUGH)
        fault = fault_of(self.model, singly)
        if fault is not None:
            raise UserError(
                f"the {self.name} ({type(self.model).__name__}) does not continue from its own state as it reads a whole text ({fault}): "
                "use another model"
            )

        def one_by_one(ids_2T: torch.Tensor) -> torch.Tensor:
            feed = open_calls(ids_2T.shape[1])
            return torch.cat(
                [feed(ids_2T[:, at : at + count], np.array([at, at]), count) for (at, _), count in singly.parts], 1
            )

        return disagreement(self.model, Check("several tokens", open_calls, calls(PROBE), one_by_one)) is None


def recurrent_bytes(model: PreTrainedModel, rows: int, capacity: int) -> int:
    """Upper bound of the bytes of `rows` rows: the state, its copy, and a second copy while it is made."""
    probe = RecurrentModel(model, "model", 1, 1)
    with torch.no_grad():
        probe.feed(torch.zeros((1, 1), dtype=torch.int64, device=model.device), np.zeros(1, dtype=np.int64), 1)
    total = 0
    for layer in probe._rows[0].state.layers:
        growing = [getattr(layer, name, None) for name in ("keys", "values")]
        fixed = [state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()]
        total += sum(tensor.nbytes * capacity for tensor in growing if tensor is not None)
        total += sum(tensor.nbytes for tensor in fixed if tensor is not None)
    return 3 * rows * total


def recurrence_warning(model: PreTrainedModel) -> str | None:
    """Warning that speeds of a recurrent model here differ from other engines; None for other models."""
    if not is_recurrent(model):
        return None
    return (
        f"{type(model).__name__} keeps a recurrent state: acceptance is the same as in other engines, but speeds and c are not, "
        "because this decoder undoes rejected tokens by reading the text again, row by row"
    )
