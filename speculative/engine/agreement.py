"""Whether calls of ours give a model's own logits: its own call reads a text at once, without cache, mask and positions. Rounding is kept
apart from faults: both are computed in a wider dtype, or ours must be about as near to it as the model's own call is.

Shapes: R rows (2), Q query tokens, T tokens of a text, V vocabulary.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from speculative.engine.models import evaluating, max_positions, vocab_rows
from speculative.engine.survey import survey
from speculative.engine.windows import attention_windows
from speculative.errors import UserError, out_of_memory

# Tokens of a call: several, of a row that starts elsewhere, and one. A longer window than this is that of the model's own mask: see
# `attention_windows`.
CHECKED_TOKENS, LONGEST_WINDOW = 8, 64
RAGGED_TOKENS, RAGGED_START = 3, 2
TRIES = 3  # texts: a mixture of experts may choose another expert where two are nearly equal
# Allowed distance of a token's logits, relative to their size: of exact calls, of others, and of those where nothing exact can be computed.
EXACT, ROUGH = 1e-4, 0.05
ROUNDED = 2.0  # times the distance of the model's own call from exact logits
NARROW = (torch.bfloat16, torch.float16, torch.float32)
# Methods of a tensor that read no numbers.
ASKING = frozenset({"data_ptr", "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_inference"})

Feed = Callable[[torch.Tensor, np.ndarray, int], torch.Tensor]
Parts = Sequence[tuple[tuple[int, int], int]]  # calls: starts of two rows, tokens of each
_faults: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], str | None]] = weakref.WeakKeyDictionary()

_slow: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, str]] = weakref.WeakKeyDictionary()


class _Wide(TorchFunctionMode):
    """Context manager: torch computes with narrower numbers in this dtype, matrix by matrix; no weight is changed or kept twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._narrow = tuple(one for one in NARROW if one.itemsize < dtype.itemsize)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__" or name in ASKING:
            found = function(*args, **kwargs)
            return self._widened(found) if isinstance(found, torch.dtype) else found
        if name in ("bfloat16", "half"):
            return self._widened(args[0])
        if name == "embedding":  # a few rows of a large matrix
            return self._widened(function(*args, **kwargs))
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        first = args[:1] if changes else ()
        args, kwargs = tree_map(self._widened, (args[len(first) :], kwargs))
        return self._widened(function(*first, *args, **kwargs))

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtype if value in self._narrow else value
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.dtype in self._narrow:
            return value.to(self._dtype)
        return value


def _wide_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """A dtype that rounds away what the model's calls round; None if they do not round more than float32 does."""
    if torch.get_float32_matmul_precision() != "highest":
        return torch.float64
    narrow = any(weight.dtype not in (torch.float32, torch.float64) for weight in survey(model).weights)
    return torch.float32 if narrow or torch.is_autocast_enabled(model.device.type) else None


def ordinary_text(model: PreTrainedModel, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids (rows, tokens) among which control tokens, first or last in a vocabulary, are rare; behind a BOS
    token, if there is one.
    """
    known, generator = vocab_rows(model), torch.Generator().manual_seed(seed)
    ids = torch.randint(min(known // 8, 1000), max(known // 2, 1), (rows, tokens), generator=generator)
    first = getattr(model.config.get_text_config(decoder=True), "bos_token_id", None)
    if isinstance(first, int) and 0 <= first < known:
        ids[:, 0] = first
    return ids.to(model.device)


@dataclass(frozen=True)
class Check:
    """open_calls: a function of a number of positions; it returns calls of two rows, which give logits (2, Q, V) of ids (2, Q), starts and
    Q. parts: by default several tokens, ragged ones of a row that is rewound too, and one; longer than the smallest window. own: logits
    (2, T, V) of a text, by default from the model's own call. allowed: distance, relative to the size of a token's logits.
    """

    what: str
    open_calls: Callable[[int], Feed]
    parts: Parts = ()
    own: Callable[[torch.Tensor], torch.Tensor] | None = None
    allowed: float = EXACT
    rounds: bool = False  # whether the calls are code that cannot compute in a wider dtype


def agrees(model: PreTrainedModel, what: str, open_calls: Callable[[int], Feed]) -> bool:
    """Whether our code, by this name, gives the model's own logits; tested at the first use and again once the model has changed."""
    return disagreement(model, Check(what, open_calls, rounds=True)) is None


def disagreement(model: PreTrainedModel, check: Check) -> str | None:
    """How far the logits of the check's calls are from the model's own, in words; None if only rounding is between them. Remembered until
    the model changes.
    """
    faults, key = _faults.setdefault(model, {}), (check.what, survey(model).fingerprint)
    if key in faults:
        return faults[key]
    parts = check.parts or _ragged_parts(model)
    tokens, fault = max(at + count for starts, count in parts for at in starts), None
    if tokens > (max_positions(model.config) or tokens):
        return None  # a context too short for any text
    for seed in range(TRIES):
        with evaluating(model):
            fault = _difference(model, replace(check, parts=parts), ordinary_text(model, 2, tokens, seed))
        if fault is None:
            break
    if fault == "":
        return None  # no finite number to compare yet
    faults[check.what, survey(model).fingerprint] = fault  # fused kernels have moved weights
    if fault is not None and check.rounds:
        refuse(model, check.what, f"gives other logits than the model itself ({fault})")
    return fault


def fault_of(model: PreTrainedModel, check: Check) -> str | None:
    """As `disagreement`; calls that the model's code cannot make are a fault too. Too little memory and UserErrors are raised."""
    try:
        return disagreement(model, check)
    except (AttributeError, TypeError, LookupError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or out_of_memory(error):
            raise
        return (str(error).splitlines() or [type(error).__name__])[0]


def speed_warning(model: PreTrainedModel) -> str | None:
    """Why this model, as it is, runs in slower code than others of its kind; None if it does not."""
    return _slow.get(model, {}).get(survey(model).fingerprint)


def refuse(model: PreTrainedModel, what: str, why: str) -> None:
    """Remember that our code, by its name, does not compute this model, and warn."""
    words = f"{type(model).__name__} runs eagerly, which is slower, because {what} {why}"
    _slow.setdefault(model, {})[survey(model).fingerprint] = words
    _faults.setdefault(model, {})[what, survey(model).fingerprint] = words
    warnings.warn(words, stacklevel=3)


def _difference(
    model: PreTrainedModel, check: Check, ids_2T: torch.Tensor, wide: torch.dtype | None = None
) -> str | None:
    """As `disagreement`, on one text; "" if there is no finite number. `wide`: compute in this dtype, by default as `_wide_dtype`."""
    feed, dtype, allowed = check.open_calls(ids_2T.shape[1]), wide or _wide_dtype(model), check.allowed
    coarse = False

    def reference() -> torch.Tensor:
        logits_2TV = check.own(ids_2T) if check.own else model(input_ids=ids_2T, use_cache=False).logits
        return torch.cat([_part(logits_2TV.float(), *part).flatten(0, 1) for part in check.parts])

    try:
        whole = torch.autocast(model.device.type, enabled=False) if dtype else nullcontext()
        with whole, _Wide(dtype) if dtype else nullcontext():
            own_NV = reference()
            fed_NV = None if check.rounds and dtype else _fed(feed, ids_2T, check.parts)
    except Exception:  # weights of another class, which a wider dtype does not reach
        if dtype is None:
            raise
        own_NV, fed_NV = reference(), _fed(check.open_calls(ids_2T.shape[1]), ids_2T, check.parts)
        coarse, allowed = True, allowed if wide else ROUGH
    finite_NV = own_NV.isfinite()

    def size(logits_NV: torch.Tensor) -> float:
        # NaN in the model's own logits does not count as a difference; the loop reports it.
        return float(torch.where(finite_NV, logits_NV, 0.0).square().mean(-1).sqrt().max())

    if not finite_NV.any():
        return ""
    limit = allowed * size(own_NV)
    if fed_NV is None:
        fed_NV, limit = _fed(feed, ids_2T, check.parts), max(limit, ROUNDED * size(reference() - own_NV))
    distance = size(fed_NV - own_NV)
    if distance > limit and check.rounds and dtype is None:
        return _difference(model, check, ids_2T, torch.float64)  # float32 rounds much in some models
    if distance > limit and coarse and check.own is None and not check.rounds:
        # Rounding alone may choose other experts, and there is no slower code to run.
        warnings.warn(
            f"{type(model).__name__}: {check.what} may give other logits than the model itself; only rounded ones can be compared",
            stacklevel=3,
        )
        return None
    return None if distance <= limit else f"{distance / max(size(own_NV), 1e-30):.2g} of their size apart"


def _ragged_parts(model: PreTrainedModel) -> Parts:
    windows = [window for window in attention_windows(model) if window and window <= LONGEST_WINDOW]
    start = max(CHECKED_TOKENS, min(windows, default=0) + RAGGED_TOKENS)
    start = min(start, (max_positions(model.config) or start + RAGGED_TOKENS) - RAGGED_TOKENS)
    return ((0, 0), start), ((RAGGED_START, start), RAGGED_TOKENS), ((start, start), 1)


def _fed(feed: Feed, ids_2T: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Logits (N, V) of all tokens of all calls."""
    logits = [feed(_part(ids_2T, starts, tokens), np.array(starts), tokens).float() for starts, tokens in parts]
    return torch.cat([logits_2QV.flatten(0, 1) for logits_2QV in logits])


def _part(both_2T: torch.Tensor, starts: tuple[int, int], tokens: int) -> torch.Tensor:
    return torch.stack([row_T[at : at + tokens] for row_T, at in zip(both_2T, starts, strict=True)])
