"""The target of a run. Its weights are in memory only while they are needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedModel

from data.files import write_json
from data.prompts.prompt import Template
from data.prompts.template import turn_end
from data.responses.servers import Servers
from distill.config.layout import RESPONSES, SERVER_IDENTITY, TARGET_FACTS
from distill.config.target import TargetConfig
from distill.models.load import (
    base_of_adapter,
    dtype_of,
    find_model,
    has_weights,
    load_model,
    load_tokenizer,
    model_files,
    read_config,
    resolve,
    saved_dtype,
    source_fingerprint,
)
from distill.models.text_model import without_weights
from distill.models.vocabulary import vocabulary_rows
from speculative.engine.models import end_token_ids, max_positions
from speculative.errors import UserError
from speculative.measure.record import Record
from speculative.rules.sampling import SamplingSettings


class TargetFacts(Record):
    """Facts of a target that a run needs without the weights. source: the config keys and files of the model that they are about."""

    source: dict[str, Any]
    path: str
    revision: str | None
    fingerprint: str
    dtype: str  # of the weights in memory
    saved_dtype: str  # of the weights on disk, in which drafts are served
    eos_ids: tuple[int, ...]
    context_length: int | None
    vocab_rows: int
    parameters: int


class Target:
    """The target model: the tokenizer is loaded at once, weights in a block of `loaded`. Its facts are stored in the run."""

    def __init__(
        self, config: TargetConfig, device: torch.device, run: Path | None = None, what: str = "target.path"
    ) -> None:
        """Read the tokenizer, and facts stored in ``run`` if they have the same path, revision and dtype; UserError without a tokenizer.

        ``what``: the path's name in errors.
        """
        self.config, self.device, self._what = config, device, what
        find_model(what, config.path)
        self._how: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        self.tokenizer = load_tokenizer(config.path, **self._how)
        self._run = run
        self._model: PreTrainedModel | None = None
        self._blocks = 0  # open ones, of which the last to end frees the weights
        stored = self._stored()
        self._facts = stored if stored is not None and stored.source == self._source() else None

    @contextlib.contextmanager
    def loaded(self, on_host: bool = False) -> Iterator[PreTrainedModel]:
        """The whole target inside the block: on its device, where blocks inside each other share it.

        ``on_host``: to read weights from, not to run it; in host memory if it is not on its device.

        Raises UserError: it cannot be loaded, or is another one than that of the stored facts.
        """
        with self.single_load():
            if self._model is None and not on_host:
                self._model = self._load(self.device)
            yield self._load(None) if self._model is None else self._model

    @contextlib.contextmanager
    def single_load(self) -> Iterator[None]:
        """Blocks of `loaded` in this block share one load; nothing is loaded before the first of them."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._model = None
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _load(self, device: torch.device | None) -> PreTrainedModel:
        if self.config.at_server:
            raise UserError(
                f"target.endpoint.weights: server: this step needs the weights of {self.config.path}; set it to local"
            )
        if self.config.endpoint is not None and not has_weights(self.config.path):
            raise UserError(
                f"{self._what} {self.config.path!r}: no weights there; give the whole model, or set target.endpoint.weights: server"
            )
        dtype = dtype_of(self.config.dtype, self.device)
        if device is None:
            return load_model(self._what, self.config.path, dtype=dtype, **self._how)
        spread = self.config.device_map
        if spread is not None and PartialState().num_processes > 1:
            raise UserError(
                f"target.device_map: {spread} gives one process all GPUs, and {PartialState().num_processes} were started; start "
                "one process (`understudy respond`), then train on several from signal.source: store with judge.live: never"
            )
        model = load_model(self._what, self.config.path, dtype=dtype, device=device, device_map=spread, **self._how)
        known = (self._facts.fingerprint, self._facts.dtype) if self._facts is not None else None
        if known is not None and known != (self._fingerprint(model), dtype_name(model.dtype)):
            raise UserError(
                f"{self.config.path}: its weights, config or dtype differ from those in {self._run}/{TARGET_FACTS}; give the run "
                "another name, or delete its folder"
            )
        return model

    @property
    def facts(self) -> TargetFacts:
        """Facts of the target; the weights are loaded for them if no facts are stored."""
        if self._facts is None and self.config.at_server:
            saved, dtype = saved_dtype(self.side.config), dtype_of(self.config.dtype, self.device)
            name = f"endpoint {self.endpoint.model}"
            self._facts = self._facts_of(self.side, name, saved if isinstance(dtype, str) else dtype, 0)
        elif self._facts is None:
            with self.loaded() as model:
                self._refuse_no_numbers(model)
                self._facts = self._facts_of(model, self._fingerprint(model), model.dtype, model.num_parameters())
        return self._facts

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights in memory."""
        return getattr(torch, self.facts.dtype)

    @property
    def saved_dtype(self) -> torch.dtype:
        """dtype of the weights on disk."""
        return getattr(torch, self.facts.saved_dtype)

    def remember(self) -> None:
        """Write the facts into the run, unless it has responses of another target. Call it on one rank only."""
        if self._run is None:
            return
        stored = self._stored()
        others = stored is not None and stored.fingerprint != self.facts.fingerprint
        if not (others and (self._run / RESPONSES).exists()):
            write_json(self._run / TARGET_FACTS, self.facts.record())

    def _facts_of(
        self, side: PreTrainedModel | TargetSide, fingerprint: str, dtype: torch.dtype, parameters: int
    ) -> TargetFacts:
        return TargetFacts(
            source=self._source(),
            path=self.config.path,
            revision=self.config.revision,
            fingerprint=fingerprint,
            dtype=dtype_name(dtype),
            saved_dtype=dtype_name(saved_dtype(self.side.config)),
            eos_ids=end_token_ids(side, self.tokenizer),
            context_length=max_positions(side.config),
            vocab_rows=vocabulary_rows(side.config),
            parameters=parameters,
        )

    @torch.no_grad()
    def _refuse_no_numbers(self, model: PreTrainedModel) -> None:
        """Raise UserError if a logit is NaN or infinite; -inf is legal, since a head may forbid tokens."""
        ids_BT = torch.arange(min(8, vocabulary_rows(model.config)), device=model.device).unsqueeze(0)
        logits_BTV = model(input_ids=ids_BT).logits
        if not (logits_BTV < torch.inf).all() or (logits_BTV == -torch.inf).all(-1).any():
            raise UserError(
                f"{self._what} {self.config.path!r}: its logits in {dtype_name(model.dtype)} are not numbers; its weights are damaged, "
                "or too large for that dtype (target.dtype: float32 is the widest)"
            )

    def _fingerprint(self, model: PreTrainedModel) -> str:
        return source_fingerprint(self._what, self.config.path, self.config.revision, model)

    def outline(self) -> TargetFacts:
        """The facts that need neither weights nor a server, without a fingerprint; from now on the target's."""
        saved, dtype = saved_dtype(self.side.config), dtype_of(self.config.dtype, self.device)
        parameters = without_weights(self.side.config, self.config.trust_remote_code).num_parameters()
        self._facts = self._facts_of(self.side, "", saved if isinstance(dtype, str) else dtype, parameters)
        return self._facts

    @functools.cached_property
    def side(self) -> TargetSide:
        """Config, tokenizer and generation config: the target without its weights."""
        return load_target_side(self.config.path, self.config.trust_remote_code, self.config.revision, self.tokenizer)

    @functools.cached_property
    def endpoint(self) -> Servers:
        """The servers that answer."""
        assert self.config.endpoint is not None
        rows = vocabulary_rows(self.side.config)
        record = self._run / RESPONSES / SERVER_IDENTITY if self._run and self.config.at_server else None
        return Servers(self.config.endpoint, self.tokenizer, rows, record)

    def _source(self) -> dict[str, object]:
        """Return what stored facts must match: the config keys, and size and time of the model's files."""
        files = model_files(self.config.path, self.config.revision)
        return {
            "path": self.config.path,
            "revision": self.config.revision,
            "dtype": self.config.dtype,
            "device": self.device.type,
            # The address may change. data/responses/server_identity.py checks the identity of the served model on each use.
            "endpoint": {"model": self.config.endpoint.model}
            if self.config.endpoint and self.config.at_server
            else None,
            "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        }

    def _stored(self) -> TargetFacts | None:
        """What an earlier start wrote; None if it cannot be read, since the weights give it again."""
        with contextlib.suppress(UserError):
            return TargetFacts.stored(self._run / TARGET_FACTS) if self._run else None
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TargetSide:
    """The target without weights, as an export needs it."""

    name: str  # hub id, or the absolute path of a directory
    config: Any
    tokenizer: Any
    generation_config: GenerationConfig
    revision: str | None = None  # on the hub


def load_target_side(
    target: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    tokenizer: Any = None,
    what: str = "target",
) -> TargetSide:
    """Load config, tokenizer (unless given) and generation config of the target; UserError if they cannot be read. what: in errors."""
    name = resolve(target)
    name = str(Path(name).resolve()) if Path(name).is_dir() else name
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    config = read_config(what, name, **how)
    if tokenizer is None:
        tokenizer = load_tokenizer(name, **how)
    base = base_of_adapter(name, revision, what)
    place, version = (name, revision) if base is None else (base.path, base.revision)
    try:
        generation = GenerationConfig.from_pretrained(place, revision=version or "main")
    except (OSError, ValueError):  # many targets have none; their model config holds the ids
        generation = GenerationConfig.from_model_config(config)
    return TargetSide(name, config, tokenizer, generation, revision)


# What engines and converters read from a generation_config.json, and the values that change nothing.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def target_notes(side: TargetSide, sampling: SamplingSettings | None, template: Template | None = None) -> list[str]:
    """Lines about what a server of this target may do otherwise than a measurement with these settings; None: any settings."""
    ids, closing = end_token_ids(side, side.tokenizer), turn_end(side.tokenizer, template or Template())

    def words(*tokens: int) -> str:
        return ", ".join(f"{side.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)

    notes = []
    if set(ids) != set(end_token_ids(side)):
        advice = "its config.json, generation_config.json and tokenizer differ on that"
        notes.append(f"responses end at {words(*ids)}; {advice}")
    if closing is not None and closing not in ids:
        advice = "responses do not end there, and can run on; add it to eos_token_id in generation_config.json"
        notes.append(f"the chat template ends a turn with {words(closing)}, but {advice}")
    ours = NEUTRAL | sampling.as_dict() if sampling else {}
    compared = ("temperature", "repetition_penalty") if sampling and sampling.greedy else tuple(ours)
    theirs = [(name, getattr(side.generation_config, name, None)) for name in compared]
    differing = [
        f"{name} {value:g} (here {ours[name]:g})" for name, value in theirs if value not in (None, -1, ours[name])
    ]
    if differing:
        advice = "servers apply it by default; measure with the same settings, or serve with the exported commands, which do not read it"
        notes.append(f"generation_config.json sets {', '.join(differing)}; {advice}")
    return [f"{side.name}: {note}" for note in notes]
