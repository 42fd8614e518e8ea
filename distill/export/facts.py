"""Facts of a run that an export needs, and facts of a target and its exported draft that the engine checks need."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import cache_utils

from data.hub import hub_id
from data.prompts.sources import dataset_id
from distill.config.layout import BEST_LINK, CONFIG, PROVENANCE, RESULT, STUDENT, VERDICT, run_of, step_folder
from distill.config.load import dump_config, load_trusted
from distill.config.sections import Quantization
from distill.export.load_table import GammaPlan, LoadRange, drafts_by, gamma_plan
from distill.models.files.gguf import pre_tokenizer_name
from distill.models.load import public_name, resolve, saved_dtype, without_folders
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
from distill.run.readback_record import plain_loads
from distill.run.result import Curves, load_result
from distill.run.verdict_record import WAYS, Verdict, drafting_to_serve, load_verdict
from speculative.engine.models import end_token_ids, mask_token_of, max_positions
from speculative.errors import UserError
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import DRAFT, LOOKUP, LOOKUP_DRAFT, Measured
from speculative.measure.record import Record
from speculative.rules.rule import UNTRUNCATED
from speculative.rules.sampling import SamplingSettings

LLAMA_CPP_FIRST_COMPARED_ID = 5
FULL, STATE = "all tokens", "a state"  # what a layer reads, beside a window


@dataclass(frozen=True)
class RunFacts:
    """A student and its target, their measurements, and the serving settings.

    student_dir: a Hugging Face model directory or a peft adapter directory. target: a directory, a hub id or `embedded`.
    verdict: None if nothing was measured. curves: replay's predictions under each rule.
    """

    student_dir: Path
    target: str
    verdict: Verdict | None = None
    curves: Curves | None = None
    provenance: dict[str, Any] | None = None
    sampling: SamplingSettings | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: Quantization | None = None
    plain_loads: tuple[int, ...] = ()  # see `EngineFacts`


def read_run(path: Path, trusted: bool = False) -> RunFacts:
    """Read the facts of a run's best checkpoint, or of one checkpoint. ``trusted``: see `load_trusted`.

    Raises UserError: `path` is neither a run nor a checkpoint of one, or no checkpoint was judged yet.
    """
    run = run_of(path)
    if run is None:
        raise UserError(f"{path}: neither a run (a directory with config.yaml) nor a checkpoint of one")
    folder = path if run != path else run / BEST_LINK
    if not (folder / STUDENT).exists():
        raise UserError(f"{path}: no checkpoint yet; finish the run first (the same command continues it)")
    config = load_trusted(run / CONFIG, trusted)
    verdict = load_verdict(run) if (run / VERDICT).exists() else None
    if verdict is not None and folder.resolve() != step_folder(run, verdict.drafts[-1].step or 0).resolve():
        verdict = None  # it belongs to another checkpoint
    curves = load_result(run / RESULT).curves if verdict is not None and (run / RESULT).exists() else None
    provenance = Record.read(folder / PROVENANCE, "start the run's command again").record()
    base, paths = config.student.path, [source.path for source in config.data.train]
    provenance["data"] = [dataset_id(path) or Path(path).name for path in paths]
    provenance |= {"config": dump_config(config), "base": base and public_name(base)}
    # Front matter of a card has only names of the hub.
    ids = list(filter(None, map(dataset_id, paths)))
    provenance["hub"] = {"data": ids, "base": hub_id(str(Path(resolve(base or config.target.path))))}
    provenance = json.loads(without_folders(json.dumps(provenance)))
    where = config.target
    return RunFacts(
        folder / STUDENT,
        where.path,
        verdict,
        curves,
        provenance,
        config.serving.sampling,
        where.revision,
        where.trust_remote_code,
        config.export.quantize,
        plain_loads(run, "vLLM"),
    )


class OnePass(NamedTuple):
    """Mask token, gamma and taus of a draft that proposes a block in one forward pass, if that is the faster way."""

    mask_token: int
    gamma: int
    taus: Mapping[str, float]


class Timed(NamedTuple):
    """Gammas and taus for the command of an engine that `understudy time` measured. engine: its name as `EngineCosts.engine` has it."""

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

    target: str  # hub id or directory
    draft: str  # the exported directory
    gamma: int
    target_rows: int
    draft_rows: int
    first_difference: TokenDifference | None  # over all ids of `get_vocab()`
    first_difference_from_5: TokenDifference | None
    target_quantised: bool
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
    together: Measured | None = None
    differences: Mapping[str, str] = field(default_factory=dict)  # of the pair's files by name, as text
    dtypes: tuple[str, str] = ("", "")  # of the saved weights of target and draft
    token_rows: int = 0  # rows that the target's tokenizer needs
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of `target` and `draft`
    tensor_parallel: int = 1  # GPUs that each layer is split over
    end_ids: tuple[int, ...] = ()  # tokens that ended the responses of the run
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kinds of layers of `target` and `draft`
    plain_loads: tuple[int, ...] = ()  # where a readback found vLLM's plain steps as fast as the target alone

    @property
    def sampled(self) -> bool:
        return self.sampling is not None and not self.sampling.greedy

    @property
    def sampled_drafts_win(self) -> bool:
        """Whether replay predicts more acceptance for vLLM's sampled drafts than for argmax drafts."""
        drawn, argmax = self.taus.get(self.drawn_rule, 0.0), self.taus.get("greedy-draft", math.inf)
        return self.sampled and drawn > argmax

    @property
    def drawn_rule(self) -> str:
        """The rule of vLLM's sampled drafts, which it draws at the temperature alone."""
        return UNTRUNCATED if self.sampling is not None and self.sampling.truncates else "sample"

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
    def split_cache(self) -> bool:
        """Whether vLLM puts the draft's layers into several groups of its cache."""
        target, draft = (set(self.layers.get(side, ())) for side in ("target", "draft"))
        return len(draft) > 1 or (len(target) > 1 and draft != {FULL} and draft <= target)

    @property
    def schedule(self) -> tuple[LoadRange, ...]:
        """`gamma_by_load` for vLLM: plain decoding only in ranges with a load of `plain_loads`, else gamma 1."""
        return tuple(
            (first, last, gamma or int(not any(first <= load <= last for load in self.plain_loads)))
            for first, last, gamma in self.gamma_by_load
        )

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


def ways_to_serve(
    verdict: Verdict | None, curves: Curves | None, draft_config: Any
) -> tuple[GammaPlan, dict[str, Any]]:
    """Return the gammas of the way to serve, and the fields of `EngineFacts` that come from the measurements."""
    mask_token, names = mask_token_of(draft_config), drafts_by(verdict)

    def served(plan: GammaPlan, way: str) -> tuple[int, Mapping[str, float]]:
        return plan.gamma, curves.taus_at(plan.gamma, way) if curves else {}

    plan = gamma_plan(verdict, names["autoregressive"])
    gamma, taus = served(plan, names["autoregressive"])
    found: dict[str, Any] = {"gamma": gamma, "taus": taus, **_lookups_of(verdict)}
    if mask_token is not None and drafting_to_serve(verdict, True) == "parallel":
        plan = gamma_plan(verdict, names["parallel"])
        found["one_pass"] = OnePass(mask_token, *served(plan, names["parallel"]))
    if verdict and verdict.engine and (verdict.drafts[-1].drafting == "parallel") == ("one_pass" in found):
        engine = verdict.engine.engine.split()[0]
        own = gamma_plan(verdict, engine=engine)
        found["timed_in"] = Timed(engine, *served(own, DRAFT), own.by_load)
    return plan, found | {"gamma_by_load": plan.by_load, "measured_rule": verdict.rule if verdict else None}


def _lookups_of(verdict: Verdict | None) -> dict[str, Measured | None]:
    """Return the fields `lookup` and `together` of `EngineFacts` from a verdict."""
    if verdict is None:
        return {}
    lookup, both = verdict.row(LOOKUP), verdict.row(LOOKUP_DRAFT)
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), "autoregressive")
    single = both is not None and (
        both.behind == WAYS["autoregressive"] or (own == "autoregressive" and both.behind != WAYS["parallel"])
    )
    return {"lookup": lookup, "together": both if single and verdict.to_run() == LOOKUP_DRAFT else None}


def gather_facts(target: TargetSide, draft: TargetSide, path: str, **served: Any) -> EngineFacts:
    """Return the facts of a pair from its configs and tokenizers. path: the draft's. served: `gamma`, and fields that have defaults."""
    target_tokens, draft_tokens = tokens_by_id(target.tokenizer), tokens_by_id(draft.tokenizer)
    context, limit = max_positions(draft.config), max_positions(target.config)
    return EngineFacts(
        target=target.name,
        draft=path,
        target_rows=vocabulary_rows(target.config),
        draft_rows=vocabulary_rows(draft.config),
        first_difference=first_string_difference(target_tokens, draft_tokens),
        first_difference_from_5=first_string_difference(target_tokens, draft_tokens, LLAMA_CPP_FIRST_COMPARED_ID),
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
            "tokenizer_config.json: bos_token": getattr(one.tokenizer, "bos_token", None),
            "config.json (read where the tokenizer's files have no bos): bos_token_id": getattr(
                one.config.get_text_config(), "bos_token_id", None
            ),
        }
        for one in (target, draft)
    )
    found = [
        f"{place}: {ours[place]} in the target, {theirs[place]} in the draft"
        for place in ours
        if None not in (ours[place], theirs[place]) and ours[place] != theirs[place]
    ]
    return {"bos": " and ".join(found)} if found and added_ends(target.tokenizer) else {}


def _layer_kinds(config: Any) -> tuple[str, ...]:
    """Return what the layers of a model read: `FULL`, `a window of N tokens` or `STATE`; each kind once, none if it is unknown."""
    kinds, layers = set(), list[Any]()
    with contextlib.suppress(AttributeError, KeyError):  # a model's own code may have other layers
        layers = cache_utils.DynamicCache(config=config.get_text_config(decoder=True)).layers
    for layer in layers:
        if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
            kinds.add(STATE)
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            kinds.add(f"a window of {layer.sliding_window} tokens")
        elif isinstance(layer, cache_utils.DynamicLayer):
            kinds.add(FULL)
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
