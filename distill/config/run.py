"""The config of a run: all sections, which combinations of values are refused, and values derived from them."""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, model_validator

from distill.config.sections import (
    DataConfig,
    ExportConfig,
    JudgeConfig,
    LossConfig,
    OptimConfig,
    Section,
    ServingConfig,
    SignalConfig,
    StudentConfig,
    TrackingConfig,
    TrainConfig,
)
from distill.config.target import TargetConfig
from speculative.rules.rule import Rule

NEED_EACH_OTHER = "{} and {} need each other; set both or neither"


def default_objective(rule: Rule) -> str:
    """The objective that loss.name: null stands for. docs/studies.md has the comparison: a certain gain on two of three pairs, no loss."""
    return "jsd" if rule.draws and not rule.joint else "lk_hybrid"


def _of_training(c: "RunConfig") -> Iterator[str]:
    """The rules between keys of any run: yields the message of each rule that the config breaks."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.name):
        yield "name: it becomes a folder: use letters, digits, '.', '_' and '-' only, and start with a letter or digit"
    if not c.data.train:
        yield "data.train: is empty; add at least one source"
    if (c.student.init == "pretrained") != (c.student.path is not None):
        yield NEED_EACH_OTHER.format("student.path", "student.init: pretrained")
    if (c.student.init == "config") != (c.student.architecture is not None):
        yield NEED_EACH_OTHER.format("student.architecture", "student.init: config")
    if c.train.packing is None and c.train.batch_size % (c.train.micro_batch_size or 1):
        yield "train.batch_size must be a multiple of train.micro_batch_size"
    if bool(c.train.steps) == bool(c.train.epochs):
        yield "train.steps and train.epochs: set one of them, and the other to 0"
    if c.loss.mix is not None and (not c.loss.mix or min(c.loss.mix.values()) <= 0):
        yield "loss.mix: needs at least one objective, and all weights above zero"
    if c.judge_rule.greedy != (c.serving.temperature == 0):
        yield NEED_EACH_OTHER.format("judge.rule: greedy", "serving.temperature: 0")
    if len(set(c.judge.load)) < len(c.judge.load):
        yield "judge.load: each number of concurrent requests may be listed once"
    if (c.judge.load or c.judge.latency_ms) and not c.decodes:
        yield (
            "judge.load and judge.latency_ms are timed by decoding; set judge.live: checkpoint or end, without "
            "target.endpoint.weights: server"
        )
    if c.judge.lenience and (c.serving.temperature == 0 or not c.decodes):
        yield (
            "judge.lenience times sampled text; set serving.temperature above 0 and "
            "judge.live: checkpoint or end, without target.endpoint.weights: server"
        )
    if c.serving.batch_size > c.serving.shard_size:
        yield (
            "serving.batch_size is above serving.shard_size, but each shard is decoded on its own; raise shard_size too"
        )
    if c.serving.temperature == 0 and c.serving.samples_per_prompt > 1:
        yield "serving.samples_per_prompt above 1 repeats one greedy response at serving.temperature: 0; set it to 1"


def _of_blocks(c: "RunConfig") -> Iterator[str]:
    """The same for a draft that proposes whole blocks, and for the texts to learn."""
    if c.student.parallel and c.judge.gamma > c.student.parallel.tokens:
        yield (
            f"judge.gamma = {c.judge.gamma} above student.parallel.tokens = {c.student.parallel.tokens}: later "
            "offsets are not trained; lower judge.gamma"
        )
    if c.student.parallel and c.train.packing is not None:
        yield "student.parallel masks attention block by block and cannot pack; set train.packing to null"
    if c.student.parallel and c.own_words:
        yield (
            "data.mix.student and .speculative draft token by token, which is not how student.parallel is "
            "served; set them to 0"
        )
    # The target's probabilities, and the texts they belong to.
    if not (c.data.mix.target or c.own_words):
        yield "data.mix: set at least one share above zero"
    if c.data.mix.student and c.only_ce:
        yield (
            "data.mix.student: loss ce alone would train the draft on its own text; set another loss.name, "
            "e.g. forward_kl"
        )
    if c.own_words and c.signal.source != "online":
        yield (
            f"signal.source: {c.signal.source} has only the target's responses; for other shares of data.mix "
            "set signal.source: online"
        )


def _of_targets(c: "RunConfig") -> Iterator[str]:
    """The same for targets that are not whole in this process, and for weights of the loss."""
    # A target that only servers have.
    if c.target.at_server and c.judge.live == "end":
        yield (
            "target.endpoint.weights: server: without the target's weights nothing can be decoded for the verdict; set "
            "judge.live: checkpoint (new responses of the server prove the stored ones) or never"
        )
    if c.target.at_server and c.student.init == "carved":
        yield (
            "target.endpoint.weights: server: a draft cannot be carved without the target's weights; set student.init: "
            "pretrained or config"
        )
    if c.target.at_server and not c.only_ce and (c.signal.source != "store" or c.loss.temperature != 1):
        yield "target.endpoint.weights: server only supports signal.source: store and loss.temperature: 1"
    if c.target.at_server and c.data.responses == "logged":
        yield (
            "target.endpoint.weights: server: logged answers are checked with the target's weights; set data.responses: "
            "fresh"
        )
    # A target on several devices.
    if c.target.shard and c.target.device_map:
        yield (
            "target.device_map spreads the target over the GPUs of one process, target.shard over processes; "
            "set only one of the two"
        )
    if c.target.shard and (c.own_words or c.signal.source == "capture"):
        yield (
            "target.shard: rollouts and signal.source: capture call the target on one rank, which a sharded "
            "target cannot do; set data.mix.student and .speculative to 0 and another signal.source"
        )
    # Loss weights.
    if c.loss.prompt_weight and c.target.at_server:
        yield "loss.prompt_weight: a server returns probabilities of response tokens only; set it to 0"


class RunConfig(Section):
    """All settings of one run."""

    name: str
    """name of the run and of its folder under `output`"""
    output: str = "runs"
    """folder that holds the runs"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of all random choices"""
    target: TargetConfig = TargetConfig()
    student: StudentConfig = StudentConfig()
    data: DataConfig
    serving: ServingConfig = ServingConfig()
    loss: LossConfig = LossConfig()
    signal: SignalConfig = SignalConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    judge: JudgeConfig = JudgeConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        if message := next(itertools.chain(_of_training(self), _of_blocks(self), _of_targets(self)), None):
            raise ValueError(message)
        return self

    @property
    def serving_rule(self) -> Rule:
        """The acceptance rule of the engine."""
        return Rule.named(self.serving.rule) if self.serving.rule else Rule.usual(self.serving.temperature)

    @property
    def judge_rule(self) -> Rule:
        """The rule that picks the best checkpoint."""
        return Rule.named(self.judge.rule) if self.judge.rule else self.serving_rule

    @property
    def own_words(self) -> bool:
        """Whether the draft trains on text that it helped to write."""
        return self.data.mix.student > 0 or self.data.mix.speculative > 0

    @property
    def only_ce(self) -> bool:
        """Whether no objective uses the target's probabilities."""
        return self.objective_names() == {"ce"}

    @property
    def decodes(self) -> bool:
        """Whether anything is decoded with the target, at checkpoints or at the end."""
        return self.judge.live != "never" and not self.target.at_server

    def objective_names(self) -> set[str]:
        """Names of all objectives that the run uses in some step."""
        return set(self.loss_weights()) | ({self.loss.warmup.name} if self.loss.warmup else set())

    def loss_weights(self, step: int | None = None) -> dict[str, float]:
        """Objective name -> weight, at a step (None: after the warm-up)."""
        warmup = self.loss.warmup
        if warmup is not None and step is not None and step < round(warmup.ratio * self.train.steps):
            return {warmup.name: 1.0}
        if self.loss.mix:
            return dict(self.loss.mix)
        return {self.loss.name or default_objective(self.serving_rule): 1.0}

    def sequences(self, steps: int) -> float:
        """Responses of the target that so many steps train on, or of the draft where the mix has none of the target's."""
        mix = self.data.mix
        share = mix.target / (mix.target + mix.student + mix.speculative) or 1.0
        return steps * self.train.batch_size * share

    def settled(self, prompts: int) -> "RunConfig":
        """The config with train.steps instead of train.epochs, for so many training prompts."""
        if self.train.steps:
            return self
        wanted = self.train.epochs * prompts * self.serving.samples_per_prompt
        train = self.train.model_copy(update={"steps": math.ceil(wanted / self.sequences(1)), "epochs": 0.0})
        return self.model_copy(update={"train": train})

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name
