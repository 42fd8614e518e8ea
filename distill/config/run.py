"""Everything about one run: the sections together, which of their values cannot go together, and what follows from them."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from distill.config.sections import (
    DataConfig,
    ExportConfig,
    JudgeConfig,
    LossConfig,
    LossName,
    OptimConfig,
    Section,
    ServingConfig,
    SignalConfig,
    StudentConfig,
    TrackingConfig,
    TrainConfig,
)
from distill.config.target import TargetConfig
from speculative.rules.rule import Rule, draft_draws

# Objective by engine rule when loss.name is null, by the rule of docs/objectives.md: a certain gain on two of three pairs, no loss.
DEFAULT_OBJECTIVE: dict[Rule, LossName] = {
    "sample": "jsd",
    "greedy-draft": "lk_hybrid",
    "greedy": "lk_hybrid",
    "block": "lk_hybrid",
}


class RunConfig(Section):
    """Everything about one run."""

    name: str = Field(description="the run's folder under `output`")
    output: str = Field("runs", description="folder of runs")
    seed: int = Field(0, ge=0, lt=2**31, description="every random choice follows from it")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto = go on from the last checkpoint of this run folder"
    )
    target: TargetConfig = Field(default_factory=TargetConfig)
    student: StudentConfig = Field(default_factory=StudentConfig)
    data: DataConfig
    serving: ServingConfig = Field(default_factory=ServingConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    signal: SignalConfig = Field(default_factory=SignalConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
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
        if train.packing is None and train.batch_size % (train.micro_batch_size or 1):
            raise ValueError("train.batch_size must be a multiple of train.micro_batch_size")
        if self.loss.weighting.name == "selected" and train.micro_batch_size is None:
            raise ValueError("loss.weighting.name: selected chooses within a micro-batch: set train.micro_batch_size")
        if self.loss.mix is not None and (not self.loss.mix or any(weight <= 0 for weight in self.loss.mix.values())):
            raise ValueError("loss.mix: weights above zero, at least one")
        if (self.judge_rule == "greedy") != (self.serving.temperature == 0):
            raise ValueError("judge.rule: greedy goes with serving.temperature: 0, and only with it")
        if len(set(self.judge.load)) < len(self.judge.load):
            raise ValueError("judge.load: each number of concurrent requests once")
        if self.judge.load and self.judge.live == "never":
            raise ValueError("judge.load is timed by decoding: it goes with judge.live: checkpoint or end")
        if self.serving.batch_size > self.serving.shard_size:
            raise ValueError(
                "serving.batch_size above serving.shard_size: a shard is decoded by itself; raise shard_size too"
            )
        if self.serving.temperature == 0 and self.serving.samples_per_prompt > 1:
            raise ValueError("serving.samples_per_prompt above 1 at serving.temperature 0 repeats one greedy response")
        self._possible_parallel()
        self._possible_signal()
        self._possible_length()
        return self

    def _possible_parallel(self) -> None:
        """Raises ValueError for what does not go with a draft that proposes whole blocks."""
        parallel, mix = self.student.parallel, self.data.mix
        if parallel is None:
            return
        if self.judge.gamma > parallel.tokens:
            raise ValueError(
                f"judge.gamma = {self.judge.gamma} above student.parallel.tokens = {parallel.tokens}: offsets behind that are not learnt"
            )
        if self.train.packing is not None:
            raise ValueError("student.parallel masks attention block by block: set train.packing to null")
        if self.loss.weighting.name == "selected":
            raise ValueError(
                "loss.weighting.name: selected picks among response tokens, of which student.parallel asks several times"
            )
        if mix.student or mix.speculative:
            raise ValueError(
                "data.mix.student and .speculative are drafted token by token, which is not how student.parallel is served; set them to 0"
            )

    def _possible_length(self) -> None:
        """Raises ValueError for what does not go with blocks along the target's own text."""
        loss, mix = self.loss, self.data.mix
        if loss.warmup is not None and loss.warmup.name == "accepted_length":
            raise ValueError(
                "loss.warmup.name: accepted_length has no gradient on a cold start; set another, e.g. forward_kl"
            )
        if loss.mix is not None and "accepted_length" in loss.mix:
            raise ValueError("loss.mix: accepted_length weighs rows itself; give it as loss.name, alone")
        if "accepted_length" not in self.objective_names():
            return
        if mix.student or mix.speculative or mix.text or self.data.responses == "reference":
            raise ValueError(
                "loss.name: accepted_length holds on the target's own text; set data.mix to target alone, data.responses: target"
            )
        if self.student.parallel is not None:
            raise ValueError(
                "loss.name: accepted_length is of blocks drafted token by token; student.parallel: another objective"
            )
        if loss.prompt_weight or loss.weighting.name != "none":
            raise ValueError(
                "loss.name: accepted_length weighs rows itself; set loss.prompt_weight: 0 and loss.weighting.name: none"
            )

    def _possible_signal(self) -> None:
        """Raises ValueError for sources of the teacher's word that cannot go together."""
        mix, weighting = self.data.mix, self.loss.weighting
        if not (mix.target or mix.student or mix.speculative or mix.text):
            raise ValueError("data.mix: at least one share above zero")
        if mix.student and self.objective_names() == {"ce"}:
            raise ValueError("data.mix.student: loss ce alone would teach the draft its own words; use a divergence")
        if (mix.text > 0) != bool(self.data.text):
            raise ValueError("data.mix.text goes with data.text, and only with it")
        if self.target.others and (self.signal.source != "store" or not mix.target or self.objective_names() == {"ce"}):
            raise ValueError(
                "target.others is learnt from what was stored of each target: set signal.source: store, data.mix.target above 0 and a "
                "loss that asks the target; first `understudy respond CONFIG --signal topk`, for each target"
            )
        made = mix.student or mix.speculative or mix.text
        if made and self.signal.source != "online":
            raise ValueError(
                f"signal.source: {self.signal.source} knows the target's responses only; data.mix with anything else needs online"
            )
        names = self.objective_names()
        if self.signal.source != "online" and self.signal.kind == "sampled" and not names <= {"forward_kl", "ce"}:
            raise ValueError(
                f"signal.kind: sampled is unbiased for forward_kl and ce only, not for {', '.join(sorted(names - {'forward_kl', 'ce'}))}; "
                "set loss.name: forward_kl, or signal.kind: topk"
            )
        if self.target.endpoint is not None:
            self._possible_endpoint()
        elif self.signal.source == "response_logprobs":
            raise ValueError("signal.source: response_logprobs goes with target.endpoint.api: chat, and only with it")
        if self.target.shard and self.target.device_map:
            raise ValueError(
                "target.device_map spreads the target over the GPUs of one process, target.shard over processes: one of the two"
            )
        if self.target.shard and self.judge.live == "checkpoint":
            raise ValueError(
                "target.shard: no rank has the whole target while the draft learns; set judge.live: end or never"
            )
        if self.target.shard and (mix.student or mix.speculative or self.signal.source == "capture"):
            raise ValueError(
                "target.shard: rollouts and capture ask the target on one rank at a time, which a sharded one cannot answer"
            )
        if (weighting.name == "selected") != (weighting.reference is not None):
            raise ValueError("loss.weighting.reference goes with loss.weighting.name: selected, and only with it")
        if self.data.synthetic is not None and self.data.responses == "reference":
            raise ValueError("data.synthetic: nobody has answered these prompts; set data.responses: target")
        if self.loss.prompt_weight and weighting.name == "selected":
            raise ValueError(
                "loss.prompt_weight: loss.weighting.name: selected chooses among response tokens; set it to 0"
            )
        if self.loss.prompt_weight and self.target.endpoint is not None:
            raise ValueError("loss.prompt_weight: a server's signal is of response tokens only; set it to 0")
        if weighting.name in ("entropy", "selected") and names == {"ce"}:
            raise ValueError(f"loss.weighting.name: {weighting.name} looks at the target, which loss ce does not use")

    def _possible_endpoint(self) -> None:
        """Raises ValueError for what needs weights that a server keeps."""
        if self.judge.live != "never":
            raise ValueError(
                "target.endpoint: the weights are elsewhere, so nothing is decoded live; set judge.live: never"
            )
        if self.student.init == "carved":
            raise ValueError(
                "target.endpoint: nothing can be carved from a server; set student.init: pretrained or config"
            )
        if self.data.responses == "reference":
            raise ValueError("target.endpoint: data.responses: reference needs the target's weights")
        chat = self.target.endpoint is not None and self.target.endpoint.api == "chat"
        source = "response_logprobs" if chat else "store"
        store = self.signal.source == source and self.signal.kind == "topk" and self.loss.temperature == 1
        if self.objective_names() != {"ce"} and not store:
            raise ValueError(
                f"target.endpoint gives signal.source: {source} with signal.kind: topk at loss.temperature: 1"
            )
        if chat and self.data.synthetic is not None and self.data.synthetic.method == "magpie":
            raise ValueError("data.synthetic.method: magpie: a chat API writes no user's turns; set it to mix")
        if chat and self.data.template.mode == "plain":
            raise ValueError("target.endpoint.api: chat applies the chat template; data.template.mode cannot be plain")
        if chat and (said := self.unreplayable(self.judge_rule)):
            raise ValueError(said)

    def unreplayable(self, rule: Rule) -> str | None:
        """Why stored responses cannot be replayed by a rule; None when they can.

        A chat API tells the probabilities of the model itself, the first few of them: what temperature and truncation make of a
        token's own cannot be known from these. Where drafts take their argmax it is not asked for.
        """
        endpoint, serving = self.target.endpoint, self.serving
        plain = (serving.temperature, serving.top_k, serving.top_p, serving.min_p) == (1.0, 0, 1.0, 0.0)
        if endpoint is None or endpoint.api != "chat" or plain or not draft_draws(rule):
            return None
        return (
            f"judge.rule: {rule} replays text by its probability under the serving settings, and target.endpoint.api: chat gives the "
            "model's own; set judge.rule: greedy-draft, or serve at temperature 1 without top_k, top_p and min_p"
        )

    @property
    def serving_rule(self) -> Rule:
        """How the engine accepts."""
        return self.serving.rule or ("greedy" if self.serving.temperature == 0 else "sample")

    @property
    def judge_rule(self) -> Rule:
        """The rule that picks the best checkpoint."""
        return self.judge.rule or self.serving_rule

    def objective_names(self) -> set[str]:
        """Every objective that some step of the run has."""
        return set(self.loss_weights()) | ({self.loss.warmup.name} if self.loss.warmup else set())

    def loss_weights(self, step: int | None = None) -> dict[str, float]:
        """Objective name -> weight, at a step (null: behind the warm-up)."""
        warmup = self.loss.warmup
        if warmup is not None and step is not None and step < round(warmup.ratio * self.train.steps):
            return {str(warmup.name): 1.0}
        if self.loss.mix:
            return {str(name): weight for name, weight in self.loss.mix.items()}
        return {str(self.loss.name or DEFAULT_OBJECTIVE[self.serving_rule]): 1.0}

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.output) / self.name
