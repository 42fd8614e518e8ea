"""The configuration of a run: one frozen value, read from YAML and `key=value` overrides, refused when anything is odd."""

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculative.errors import UserError

LossName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "ce"]


class Section(BaseModel):
    """Frozen; an unknown key or a wrong type is an error, never a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetConfig(Section):
    """The model to be imitated (the teacher while the draft learns)."""

    path: str = Field(
        "embedded", description="directory, hub id, or `embedded`: the small Python target shipped with us"
    )
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights and forward of the target; auto = as saved on an accelerator, float32 on a CPU"
    )
    trust_remote_code: bool = Field(False, description="run model code that comes with the weights")


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning (peft)."""

    rank: int = Field(16, ge=1, description="rank of the update")
    alpha: int = Field(32, gt=0, description="scale: the update is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description="module names that get an adapter"
    )


class StudentConfig(Section):
    """The draft: where its first weights come from, and what of it is trained."""

    init: Literal["carved", "pretrained", "config"] = Field(
        "carved",
        description="carved: layers of the target; pretrained: `path`; config: random weights from `architecture`",
    )
    path: str | None = Field(None, description="directory or hub id of a ready-made draft (init: pretrained)")
    revision: str | None = Field(None, description="hub revision of `path`")
    layers: tuple[int, ...] = Field(
        (0, -1), description="which layers of the target a carved draft keeps; negative from the end"
    )
    architecture: dict[str, Any] | None = Field(
        None, description="fields of a transformers config, `model_type` among them (init: config)"
    )
    tokenizer: str | None = Field(None, description="tokenizer directory; only without a target (loss ce)")
    lora: LoraConfig | None = Field(None, description="train adapters only; null = all weights")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )


class SourceConfig(Section):
    """One place prompts come from."""

    path: str = Field(description="file, directory, glob, `datasets` hub id, or `stdlib` (the embedded Python domain)")
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "txt"] = Field("auto", description="auto = by suffix")
    split: str = Field("train", description="split of a hub id; `train` or `heldout` of stdlib")
    subset: str | None = Field(None, description="configuration name of a hub dataset")
    revision: str | None = Field(None, description="hub revision")
    prompt_column: str | None = Field(None, description="column with a plain prompt")
    reference_column: str | None = Field(None, description="column with the dataset's own answer")
    messages_column: str | None = Field(None, description="column with chat messages (role, content)")
    system: str | None = Field(None, description="system message put before every prompt (chat)")
    domain: str | None = Field(None, description="domain label of every row")
    domain_column: str | None = Field(None, description="column with the domain label")
    limit: int | None = Field(None, ge=1, description="use only this many rows, spread over the source by content hash")


class TemplateConfig(Section):
    """How a prompt becomes tokens."""

    mode: Literal["auto", "chat", "plain"] = Field(
        "auto", description="chat = the target tokenizer's chat template; auto = chat when there is one"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="e.g. {enable_thinking: false}")


class DataConfig(Section):
    """Prompts for training and for judging."""

    train: tuple[SourceConfig, ...] = Field((), description="sources of training prompts")
    heldout: tuple[SourceConfig, ...] = Field((), description="sources of held-out prompts; empty = split from train")
    heldout_count: int | None = Field(
        None, ge=2, description="prompts held out of `train` when `heldout` is empty; null = judge.prompts"
    )
    template: TemplateConfig = Field(default_factory=TemplateConfig)
    responses: Literal["target", "reference"] = Field(
        "target",
        description="train on the target's own answers (right for acceptance) or on the dataset's (reference_column)",
    )
    context_length: int | None = Field(
        None, ge=8, description="tokens of prompt + response; null = the target's own limit"
    )
    too_long: Literal["error", "drop"] = Field("error", description="a prompt that does not fit: stop, or leave it out")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="leave out longer prompts (counted in the log); null = keep all"
    )


class ServingConfig(Section):
    """How the target is served: its responses and every measurement use these settings."""

    temperature: float = Field(1.0, ge=0, description="sampling temperature of the server; 0 = greedy")
    top_k: int = Field(0, ge=0, description="keep the k most probable tokens; 0 = off")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 = off")
    min_p: float = Field(0.0, ge=0, lt=1, description="drop tokens under min_p x the largest probability; 0 = off")
    max_tokens: int = Field(128, ge=1, description="tokens of a response at most")
    samples_per_prompt: int = Field(1, ge=1, description="responses per training prompt")
    batch_size: int = Field(32, ge=1, description="prompts decoded at once")
    shard_size: int = Field(
        64, ge=1, description="responses per shard file; a killed run loses at most one shard per rank"
    )


class LossConfig(Section):
    """What the student minimises, per response token, averaged over all response tokens of a step."""

    name: LossName = Field("lk_hybrid", description="objective; see distill/losses.py")
    mix: dict[LossName, float] | None = Field(
        None, description="weighted sum of objectives instead of `name`, e.g. {forward_kl: 1, tv: 0.5}"
    )
    temperature: float = Field(
        1.0, gt=0, description="softens both distributions inside the loss (not the server's temperature)"
    )
    beta: float = Field(0.5, gt=0, lt=1, description="weight of the target in the mixture of jsd")
    eta: float = Field(3.0, ge=0, description="lk_hybrid: how fast KL gives way to TV as alpha rises")
    chunk_tokens: int = Field(1024, ge=1, description="response tokens whose logits exist at once")

    def weights(self) -> dict[str, float]:
        """Objective name -> weight."""
        return {str(name): weight for name, weight in self.mix.items()} if self.mix else {self.name: 1.0}


Moment = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW or Muon with linear warm-up and cosine decay."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: orthogonalised updates for the layers' matrices, AdamW for the rest"
    )
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[Moment, Moment] = Field((0.9, 0.95), description="AdamW's moments")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay on matrices")
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="share of the steps with rising learning rate")
    final_lr_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the end / peak")
    max_grad_norm: float = Field(1.0, gt=0, description="clip the gradient's norm to this")


class TrainConfig(Section):
    """The loop. One step = `batch_size` sequences however many ranks and micro-batches share them."""

    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="sequences per step, over all ranks and micro-batches")
    micro_batch_size: int = Field(32, ge=1, description="sequences per forward on one rank")
    window: int | None = Field(
        None, ge=8, description="tokens per sequence of a text corpus (loss ce without a target)"
    )
    mixed_precision: Literal["no", "bf16"] = Field(
        "no", description="autocast of the student; its weights stay float32"
    )
    log_every: int = Field(
        10, ge=1, description="steps between points sent to the trackers; metrics.jsonl has every step"
    )
    keep_states: int = Field(2, ge=1, description="checkpoints whose optimizer state is kept for resuming")


class JudgeConfig(Section):
    """Speculative decoding of held-out prompts at step 0 and at every checkpoint."""

    every: int = Field(100, ge=1, description="steps between checkpoints, each judged")
    prompts: int = Field(64, ge=2, description="held-out prompts per judgement")
    gamma: int = Field(5, ge=1, le=16, description="drafted tokens per block")
    rule: Literal["sample", "greedy-draft", "greedy"] = Field(
        "sample", description="engine rule that picks the best checkpoint"
    )
    batch_size: int = Field(32, ge=1, description="prompts decoded at once")
    patience: int = Field(0, ge=0, description="stop after this many checkpoints without a better tau; 0 = never")
    speed_prompts: int = Field(16, ge=1, description="prompts timed one at a time for the verdict's tokens/s")
    speed_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads while tokens/s and step costs are measured, for all alike; null = torch's own",
    )
    corpus_windows: int = Field(
        64, ge=1, description="held-out windows scored per checkpoint (loss ce without a target)"
    )


class TrackingConfig(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    trackers: tuple[Literal["wandb", "tensorboard"], ...] = Field((), description="wandb runs offline without a login")
    project: str = Field("understudy", description="wandb project")


class RunConfig(Section):
    """Everything about one run."""

    name: str = Field(description="the run's folder under `output`")
    output: str = Field("runs", description="folder of runs")
    seed: int = Field(0, ge=0, lt=2**31, description="every random choice follows from it")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto = go on from the last checkpoint of this run folder"
    )
    target: TargetConfig | None = Field(
        default_factory=TargetConfig, description="null = train from text alone (loss ce)"
    )
    student: StudentConfig = Field(default_factory=StudentConfig)
    data: DataConfig
    serving: ServingConfig = Field(default_factory=ServingConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        student, train = self.student, self.train
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError("name: letters, digits, '.', '_' and '-' only, it becomes a folder")
        if not self.data.train:
            raise ValueError("data.train: at least one source")
        if (student.init == "pretrained") != (student.path is not None):
            raise ValueError("student.path goes with student.init: pretrained, and only with it")
        if (student.init == "config") != (student.architecture is not None):
            raise ValueError("student.architecture goes with student.init: config, and only with it")
        if train.batch_size % train.micro_batch_size:
            raise ValueError("train.batch_size must be a multiple of train.micro_batch_size")
        if self.target is None and (
            set(self.loss.weights()) != {"ce"} or train.window is None or student.init == "carved"
        ):
            raise ValueError("target: null needs loss.name: ce, train.window, and a student that is not carved")
        if self.target is not None and (train.window is not None or student.tokenizer is not None):
            raise ValueError("train.window and student.tokenizer go with target: null")
        if self.loss.mix is not None and (not self.loss.mix or any(weight <= 0 for weight in self.loss.mix.values())):
            raise ValueError("loss.mix: weights above zero, at least one")
        if (self.judge.rule == "greedy") != (self.serving.temperature == 0):
            raise ValueError("judge.rule: greedy goes with serving.temperature: 0, and only with it")
        if self.serving.batch_size > self.serving.shard_size:
            raise ValueError(
                "serving.batch_size above serving.shard_size: a shard is decoded by itself; raise shard_size too"
            )
        if self.target is None and student.lora is not None:
            raise ValueError("student.lora goes with a target; target: null trains all weights")
        if self.target is None and any(s.path == "stdlib" and s.limit for s in (*self.data.train, *self.data.heldout)):
            raise ValueError("data: limit counts prompts; the stdlib corpus of target: null has none")
        if self.serving.temperature == 0 and self.serving.samples_per_prompt > 1:
            raise ValueError("serving.samples_per_prompt above 1 at serving.temperature 0 repeats one greedy response")
        return self

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.output) / self.name


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML alone reads `1e-4` as a string."""


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number, such as a revision `12e5`."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"
        ),
        list("-+0123456789."),
    )


def _set(tree: dict[str, Any], assignment: str) -> None:
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        raise UserError(f"override {assignment!r}: write it as key=value, e.g. optim.lr=3e-4")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"override {assignment!r}: the value is not YAML ({str(error).splitlines()[0]})") from error
    *parents, leaf = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            continue
        if not isinstance(node, dict):
            raise UserError(f"override {assignment!r}: {'.'.join(parents[:depth])} has no keys below it")
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
    if isinstance(node, list) and leaf.isdigit() and int(leaf) < len(node):
        node[int(leaf)] = value
    elif isinstance(node, dict):
        node[leaf] = value
    else:
        raise UserError(f"override {assignment!r}: {'.'.join(parents)} has no keys below it")


def _tuples(value: Any) -> Any:
    """Lists as tuples: a frozen value has no lists, and strict validation does not convert."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys of the section that an error's location points into."""
    section: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int) or not hasattr(section, "model_fields") or part not in section.model_fields:
            continue
        annotation = str(section.model_fields[part].annotation)
        section = next((s for s in Section.__subclasses__() if s.__name__ in re.findall(r"\w+", annotation)), section)
    return sorted(section.model_fields)


def _explain(error: ValidationError, origin: str) -> str:
    first = error.errors()[0]
    location = first["loc"]
    # pydantic names the branch of a union, or `[key]`, as if it were a key.
    key = ".".join(part for part in map(str, location) if "[" not in part)
    if first["type"] == "extra_forbidden":
        known = _known_keys(location)
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
        return f"{origin}: unknown key `{key}`: {hint}"
    if first["type"] == "missing":
        return f"{origin}: `{key}` is missing"
    message = re.sub(r"valid dictionary or instance of \w+", "section of `key: value` lines", first["msg"])
    message = message.removeprefix("Value error, ").replace("valid tuple", "list")
    if not key:
        return f"{origin}: {message}"
    return f"{origin}: `{key}` = {json.dumps(first['input'], default=str)[:80]}: {message[0].lower()}{message[1:]}"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file, applies `a.b=value` overrides, validates.

    Raises:
        UserError: missing or unreadable file, unknown key (the nearest is named), wrong type, impossible combination.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, so not YAML") from error
    except OSError as error:
        near = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise UserError(
            f"{path}: cannot read the config ({error.strerror}); shipped ones: {', '.join(near) or 'none here'}"
        ) from error
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{path}:{where} is not YAML: {str(getattr(error, 'problem', error)).splitlines()[0]}"
        ) from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines, found {type(tree).__name__}")
    for assignment in overrides:
        _set(tree, assignment)
    origin = (
        str(path) if not overrides else f"{path} (with {len(overrides)} override{'s' if len(overrides) > 1 else ''})"
    )
    return parse_config(tree, origin)


def parse_config(tree: dict[str, Any], origin: str) -> RunConfig:
    """Validates a tree of plain values; ``origin`` is named in errors.

    Raises:
        UserError: unknown key, wrong type, impossible combination.
    """
    try:
        return RunConfig.model_validate(_tuples(tree))
    except ValidationError as error:
        raise UserError(_explain(error, origin)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to the same value."""
    return yaml.dump(json.loads(config.model_dump_json()), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
