"""Facts of a target and its draft that the engines' checks and commands need."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from transformers import cache_utils

from distill.config.layout import SERVING_FILE
from distill.models.files.gguf import pre_tokenizer_name
from distill.models.load import saved_dtype
from distill.models.quantized import quantization_of
from distill.models.target import TargetSide
from distill.models.vocabulary import (
    TokenDifference,
    added_ends,
    first_string_difference,
    tokenizer_differences,
    tokens_by_id,
    vocabulary_rows,
)
from speculative.engine.models import end_token_ids, max_positions
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import Measured
from speculative.measure.record import Record
from speculative.rules.sampling import SamplingSettings

# First and last number of concurrent requests, and gamma there; 0 means plain decoding.
LoadRange = tuple[int, int, int]


class OnePass(NamedTuple):
    """Mask token, gamma and taus of a draft that proposes a block in one forward pass, if that is the faster way."""

    mask_token: int
    gamma: int
    taus: Mapping[str, float]


class Timed(NamedTuple):
    """Gammas and taus for the command of an engine that `understudy time` measured. engine: its name."""

    engine: str
    gamma: int
    taus: Mapping[str, float]
    by_load: tuple[LoadRange, ...]


# Head size, heads, key-value heads, feed-forward width, and the model type if the head has its own weights.
Shape = tuple[int, int, int, int, str | None]


@dataclass(frozen=True)
class EngineFacts:
    """The pair, its measurements and its serving settings. `taus`: tokens per target call at `gamma` for each rule, by replay.

    If `one_pass` is given, `gamma` and `taus` are those of drafting token by token.
    """

    FULL: ClassVar[str] = "all tokens"  # what a layer reads, beside a window
    STATE: ClassVar[str] = "a state"
    target: str  # hub id or directory
    draft: str  # the exported directory
    gamma: int
    revision: str | None = None  # of the target on the hub
    target_rows: int = 0
    draft_rows: int = 0
    first_difference: TokenDifference | None = None  # over all ids of `get_vocab()`
    first_difference_from_5: TokenDifference | None = None
    target_quantised: bool = False
    draft_quantised: bool = False
    pre_tokenizer: str | None = None  # llama.cpp's name for the target's pre-tokenizer
    draft_context: int | None = None  # tokens; None if it is not shorter than the target's
    measured_rule: str | None = None  # the rule of the run's verdict; None if not measured
    sampling: SamplingSettings | None = None  # of the run; None if unknown
    taus: Mapping[str, float] = field(default_factory=dict)
    gamma_by_load: tuple[LoadRange, ...] = ()  # empty if not measured under load
    one_pass: OnePass | None = None
    timed_in: Timed | None = None  # used in place of `gamma`, `taus` and `gamma_by_load` by that engine
    lookup: Measured | None = None  # timing of prompt lookup without a draft
    # timing of prompt lookup before a draft that proposes token by token, if the verdict chose that
    lookup_draft: Measured | None = None
    differences: Mapping[str, str] = field(default_factory=dict)  # of the pair's files by name, as text
    dtypes: tuple[str, str] = ("", "")  # of the saved weights of target and draft
    token_rows: int = 0  # rows that the target's tokenizer needs
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of `target` and `draft`
    tensor_parallel: int = 1  # GPUs that each layer is split over
    end_ids: tuple[int, ...] = ()  # tokens that ended the responses of the run
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kinds of layers of `target` and `draft`

    @property
    def sampled(self) -> bool:
        return self.sampling is not None and not self.sampling.greedy

    @property
    def request(self) -> dict[str, float | int]:
        """The measured settings as JSON of a request, without those that are off."""
        if self.sampling is None:
            return {}
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {"temperature": self.sampling.temperature} if self.sampling.greedy else self.sampling.as_dict()
        return {name: value for name, value in asked.items() if value != off.get(name)}

    @property
    def by_load(self) -> bool:
        """Whether gamma should follow the number of concurrent requests."""
        return len(self.gamma_by_load) > 1 and any(gamma for _, _, gamma in self.gamma_by_load)

    @property
    def load_advice(self) -> str:
        """Advice, as a sentence, for an engine whose gamma cannot follow the load."""
        if self.most_load is not None:
            return f"Drafting pays up to {self.most_load} concurrent requests, so limit the server to that number"
        if any(gamma for _, _, gamma in self.gamma_by_load):
            return "Drafting pays at every measured load, so no limit is needed"
        return "Drafting does not pay at any measured load, so serve the target alone"

    def lost_heads(self, tied: Sequence[str]) -> list[str]:
        """Return a reason for each model with a head of its own, of a type that the engine loads as tied only."""
        told = "it uses the embedding as head of this type, so the model's own head is lost; use a tied model"
        lost = [(side, shape[-1]) for side, shape in self.shapes.items() if shape[-1] in tied]
        return [f"config.json: tie_word_embeddings false in the {side}, a {kind} model; {told}" for side, kind in lost]

    def predicted(self, rule: str) -> str:
        """Return replay's tau under a rule as a phrase."""
        tau = self.taus.get(rule)
        return "tau was not predicted" if tau is None else f"replay predicts tau {tau:.2f}"

    @staticmethod
    def timed(one: Measured) -> str:
        """Return the measured speed of a way of decoding as a phrase."""
        ends = f" [{one.speed_up_ci[0]:.2f}, {one.speed_up_ci[1]:.2f}]" if one.speed_up_ci else ""
        return f"measured at {one.speed_up:.2f}x{ends} the speed of the target alone"

    @property
    def most_load(self) -> int | None:
        """The most concurrent requests at which drafting pays; None if it pays at every load or at none, or was not measured."""
        paying = [last for _, last, gamma in self.gamma_by_load if gamma]
        return paying[-1] if paying and paying[-1] < MOST_LOAD else None

    @staticmethod
    def load_words(ranges: Sequence[LoadRange]) -> str:
        """Return the ranges as text, such as `1: gamma 5; 2 to 11: gamma 3; from 12: plain decoding`."""
        parts = []
        for first, last, gamma in ranges:
            where = f"from {first}" if last == MOST_LOAD else f"{first} to {last}" if last > first else f"{first}"
            parts.append(f"{where}: {f'gamma {gamma}' if gamma else 'plain decoding'}")
        return "; ".join(parts)


class Serving(Record):
    """What programs read of serving.json; its other keys are for people."""

    FILE: ClassVar[str] = SERVING_FILE
    REMEDY: ClassVar[str] = "export again"
    format: Literal["understudy-serving"]
    facts: EngineFacts


def gather_facts(target: TargetSide, draft: TargetSide, path: str, **served: Any) -> EngineFacts:
    """Return the facts of a pair from its configs and tokenizers. path: the draft's. served: `gamma`, and fields that have defaults."""
    target_tokens, draft_tokens = tokens_by_id(target.tokenizer), tokens_by_id(draft.tokenizer)
    context, limit = max_positions(draft.config), max_positions(target.config)
    return EngineFacts(
        target=target.name,
        draft=path,
        revision=target.revision,
        target_rows=vocabulary_rows(target.config),
        draft_rows=vocabulary_rows(draft.config),
        first_difference=first_string_difference(target_tokens, draft_tokens),
        first_difference_from_5=first_string_difference(target_tokens, draft_tokens, 5),
        target_quantised=quantization_of(target.config) is not None,
        draft_quantised=quantization_of(draft.config) is not None,
        pre_tokenizer=pre_tokenizer_name(target.tokenizer),
        draft_context=context if context and limit and context < limit else None,
        differences=tokenizer_differences(target.tokenizer, draft.tokenizer) | _first_tokens(target, draft),
        dtypes=(str(saved_dtype(target.config)), str(saved_dtype(draft.config))),
        token_rows=max(target_tokens, default=-1) + 1,
        shapes={"target": _shape(target.config), "draft": _shape(draft.config)},
        end_ids=end_token_ids(target, target.tokenizer),
        layers={"target": _layer_kinds(target.config), "draft": _layer_kinds(draft.config)},
        **served,
    )


def _first_tokens(target: TargetSide, draft: TargetSide) -> dict[str, str]:
    """Return, as `tokenizer_differences`, where the draft's bos differs, if the target's tokenizer adds tokens to a text."""
    ours, theirs = (
        {
            "tokenizer_config.json: bos_token": getattr(side.tokenizer, "bos_token", None),
            "config.json (read where the tokenizer's files have no bos): bos_token_id": getattr(
                side.config.get_text_config(), "bos_token_id", None
            ),
        }
        for side in (target, draft)
    )
    differing = [
        f"{place}: {ours[place]} in the target, {theirs[place]} in the draft"
        for place in ours
        if None not in (ours[place], theirs[place]) and ours[place] != theirs[place]
    ]
    return {"bos": " and ".join(differing)} if differing and added_ends(target.tokenizer) else {}


def _layer_kinds(config: Any) -> tuple[str, ...]:
    """Return what the layers of a model read: `EngineFacts.FULL`, `a window of N tokens` or `EngineFacts.STATE`;
    each kind once, none if it is unknown.
    """
    kinds, layers = set(), list[Any]()
    with contextlib.suppress(AttributeError, KeyError):  # a model's own code may have other layers
        layers = cache_utils.DynamicCache(config=config.get_text_config(decoder=True)).layers
    for layer in layers:
        if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
            kinds.add(EngineFacts.STATE)
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            kinds.add(f"a window of {layer.sliding_window} tokens")
        elif isinstance(layer, cache_utils.DynamicLayer):
            kinds.add(EngineFacts.FULL)
    return tuple(sorted(kinds))


def _shape(config: Any) -> Shape:
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: widths of heads differ between layers
        text = text.per_layer_config[0]
    heads = getattr(text, "num_attention_heads", None) or 1
    size = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", None) or 0) // heads
    kv_heads, width = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "intermediate_size", None) or 0
    width = math.gcd(*width) if isinstance(width, list | tuple) else width  # Gemma 3n: one width a layer
    return (size, heads, kv_heads, width, None if getattr(text, "tie_word_embeddings", True) else text.model_type)
