"""Everything about one run: the sections together, and what follows from them."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from distill.config.rules import RULES
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
from speculative.rules.rule import Rule, draft_draws

# Objective by engine rule when loss.name is null, by the rule of docs/objectives.md: a certain gain on two of three pairs, no loss.
DEFAULT_OBJECTIVE: dict[Rule, str] = {
    "sample": "jsd",
    "greedy-draft": "lk_hybrid",
    "greedy": "lk_hybrid",
    "block": "lk_hybrid",
}


class RunConfig(Section):
    """Everything about one run."""

    name: str
    """the run's folder under `output`"""
    output: str = "runs"
    """folder of runs"""
    seed: int = Field(0, ge=0, lt=2**31)
    """every random choice follows from it"""
    resume: Literal["auto", "never"] = "auto"
    """auto = go on from the last checkpoint of this run folder"""
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
        for refused, words in RULES:
            if refused(self):
                raise ValueError(words.format(self))
        if said := self.unreplayable(self.judge_rule):
            raise ValueError(said)
        return self

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

    @property
    def biased_by_samples(self) -> str:
        """The objectives of the run for which a sampled signal is biased."""
        return ", ".join(sorted(self.objective_names() - {"forward_kl", "ce"}))

    def loss_weights(self, step: int | None = None) -> dict[str, float]:
        """Objective name -> weight, at a step (null: behind the warm-up)."""
        warmup = self.loss.warmup
        if warmup is not None and step is not None and step < round(warmup.ratio * self.train.steps):
            return {warmup.name: 1.0}
        if self.loss.mix:
            return dict(self.loss.mix)
        return {self.loss.name or DEFAULT_OBJECTIVE[self.serving_rule]: 1.0}

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.output) / self.name
