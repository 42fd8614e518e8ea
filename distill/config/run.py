"""Everything about one run: the sections together, which of their values cannot go together, and what follows from them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

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
from speculative.rules.rule import Rule, draft_draws

# Objective by engine rule when loss.name is null, by the rule of docs/studies.md: a certain gain on two of three pairs, no loss.
DEFAULT_OBJECTIVE: dict[Rule, str] = {
    "sample": "jsd",
    "greedy-draft": "lk_hybrid",
    "greedy": "lk_hybrid",
    "block": "lk_hybrid",
}
# What is refused, and the words that say why, formatted with the config: `{0.judge.gamma}`.
Impossible = tuple[Callable[["RunConfig"], object], str]


# fmt: off
IMPOSSIBLE: tuple[Impossible, ...] = (  # read from the top; the first that holds is told
    (lambda c: not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.name),
     "name: letters, digits, '.', '_' and '-' only, it becomes a folder"),
    (lambda c: not c.data.train,
     "data.train: at least one source"),
    (lambda c: (c.student.init == "pretrained") != (c.student.path is not None),
     "student.path goes with student.init: pretrained, and only with it"),
    (lambda c: (c.student.init == "config") != (c.student.architecture is not None),
     "student.architecture goes with student.init: config, and only with it"),
    (lambda c: c.train.packing is None and c.train.batch_size % (c.train.micro_batch_size or 1),
     "train.batch_size must be a multiple of train.micro_batch_size"),
    (lambda c: c.selects and c.train.micro_batch_size is None,
     "loss.weighting.name: selected chooses within a micro-batch: set train.micro_batch_size"),
    (lambda c: c.loss.mix is not None and (not c.loss.mix or min(c.loss.mix.values()) <= 0),
     "loss.mix: weights above zero, at least one"),
    (lambda c: (c.judge_rule == "greedy") != (c.serving.temperature == 0),
     "judge.rule: greedy goes with serving.temperature: 0, and only with it"),
    (lambda c: len(set(c.judge.load)) < len(c.judge.load),
     "judge.load: each number of concurrent requests once"),
    (lambda c: c.judge.load and c.judge.live == "never",
     "judge.load is timed by decoding: it goes with judge.live: checkpoint or end"),
    (lambda c: c.serving.batch_size > c.serving.shard_size,
     "serving.batch_size above serving.shard_size: a shard is decoded by itself; raise shard_size too"),
    (lambda c: c.serving.temperature == 0 and c.serving.samples_per_prompt > 1,
     "serving.samples_per_prompt above 1 at serving.temperature 0 repeats one greedy response"),
    # A draft that proposes whole blocks.
    (lambda c: c.student.parallel and c.judge.gamma > c.student.parallel.tokens,
     "judge.gamma = {0.judge.gamma} above student.parallel.tokens = {0.student.parallel.tokens}: offsets behind that are not learnt"),
    (lambda c: c.student.parallel and c.train.packing is not None,
     "student.parallel masks attention block by block: set train.packing to null"),
    (lambda c: c.student.parallel and c.selects,
     "loss.weighting.name: selected picks among response tokens, of which student.parallel asks several times"),
    (lambda c: c.student.parallel and c.own_words,
     "data.mix.student and .speculative are drafted token by token, which is not how student.parallel is served; set them to 0"),
    # The teacher's word, and the texts that it is of.
    (lambda c: not (c.data.mix.target or c.own_words or c.data.mix.text),
     "data.mix: at least one share above zero"),
    (lambda c: c.data.mix.student and c.only_ce,
     "data.mix.student: loss ce alone would teach the draft its own words; use a divergence"),
    (lambda c: (c.data.mix.text > 0) != bool(c.data.text),
     "data.mix.text goes with data.text, and only with it"),
    (lambda c: c.target.others and (c.signal.source != "store" or not c.data.mix.target or c.only_ce),
     "target.others is learnt from what was stored of each target: set signal.source: store, data.mix.target above 0 and a "
     "loss that asks the target; first `understudy respond CONFIG --signal topk`, for each target"),
    (lambda c: (c.own_words or c.data.mix.text) and c.signal.source != "online",
     "signal.source: {0.signal.source} knows the target's responses only; data.mix with anything else needs online"),
    (lambda c: c.signal.source != "online" and c.signal.kind == "sampled" and c.biased_by_samples,
     "signal.kind: sampled is unbiased for forward_kl and ce only, not for {0.biased_by_samples}; "
     "set loss.name: forward_kl, or signal.kind: topk"),
    # A target behind a server.
    (lambda c: c.behind() and c.judge.live != "never",
     "target.endpoint: the weights are elsewhere, so nothing is decoded live; set judge.live: never"),
    (lambda c: c.behind() and c.student.init == "carved",
     "target.endpoint: nothing can be carved from a server; set student.init: pretrained or config"),
    (lambda c: c.behind() and c.data.responses == "reference",
     "target.endpoint: data.responses: reference needs the target's weights"),
    (lambda c: c.behind("chat") and c.asks_more_than("response_logprobs"),
     "target.endpoint gives signal.source: response_logprobs with signal.kind: topk at loss.temperature: 1"),
    (lambda c: c.behind() and not c.behind("chat") and c.asks_more_than("store"),
     "target.endpoint gives signal.source: store with signal.kind: topk at loss.temperature: 1"),
    (lambda c: c.behind("chat") and c.data.synthetic and c.data.synthetic.method == "magpie",
     "data.synthetic.method: magpie: a chat API writes no user's turns; set it to mix"),
    (lambda c: c.behind("chat") and c.data.template.mode == "plain",
     "target.endpoint.api: chat applies the chat template; data.template.mode cannot be plain"),
    (lambda c: not c.behind() and c.signal.source == "response_logprobs",
     "signal.source: response_logprobs goes with target.endpoint.api: chat, and only with it"),
    # A target that is spread.
    (lambda c: c.target.shard and c.target.device_map,
     "target.device_map spreads the target over the GPUs of one process, target.shard over processes: one of the two"),
    (lambda c: c.target.shard and c.judge.live == "checkpoint",
     "target.shard: no rank has the whole target while the draft learns; set judge.live: end or never"),
    (lambda c: c.target.shard and (c.own_words or c.signal.source == "capture"),
     "target.shard: rollouts and capture ask the target on one rank at a time, which a sharded one cannot answer"),
    # What counts how much.
    (lambda c: c.selects != (c.loss.weighting.reference is not None),
     "loss.weighting.reference goes with loss.weighting.name: selected, and only with it"),
    (lambda c: c.data.synthetic and c.data.responses == "reference",
     "data.synthetic: nobody has answered these prompts; set data.responses: target"),
    (lambda c: c.loss.prompt_weight and c.selects,
     "loss.prompt_weight: loss.weighting.name: selected chooses among response tokens; set it to 0"),
    (lambda c: c.loss.prompt_weight and c.behind(),
     "loss.prompt_weight: a server's signal is of response tokens only; set it to 0"),
    (lambda c: c.loss.weighting.name in ("entropy", "selected") and c.only_ce,
     "loss.weighting.name: {0.loss.weighting.name} looks at the target, which loss ce does not use"),
    (lambda c: c.loss.warmup and c.loss.warmup.name == "accepted_length",
     "loss.warmup.name: accepted_length has no gradient on a cold start; set another, e.g. forward_kl"),
    (lambda c: c.loss.mix and "accepted_length" in c.loss.mix,
     "loss.mix: accepted_length weighs rows itself; give it as loss.name, alone"),
    (lambda c: c.credits_blocks and (c.own_words or c.data.mix.text or c.data.responses == "reference"),
     "loss.name: accepted_length holds on the target's own text; set data.mix to target alone, data.responses: target"),
    (lambda c: c.credits_blocks and c.student.parallel,
     "loss.name: accepted_length is of blocks drafted token by token; student.parallel: another objective"),
    (lambda c: c.credits_blocks and (c.loss.prompt_weight or c.loss.weighting.name != "none"),
     "loss.name: accepted_length weighs rows itself; set loss.prompt_weight: 0 and loss.weighting.name: none"),
)
# fmt: on


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
        for refused, words in IMPOSSIBLE:
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
        serving = self.serving
        plain = (serving.temperature, serving.top_k, serving.top_p, serving.min_p) == (1.0, 0, 1.0, 0.0)
        if not self.behind("chat") or plain or not draft_draws(rule):
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

    @property
    def own_words(self) -> bool:
        """Whether the draft learns from texts that it has a part in."""
        return self.data.mix.student > 0 or self.data.mix.speculative > 0

    @property
    def only_ce(self) -> bool:
        """Whether no objective asks the target."""
        return self.objective_names() == {"ce"}

    @property
    def credits_blocks(self) -> bool:
        """Whether an objective is of blocks along the target's own text."""
        return "accepted_length" in self.objective_names()

    @property
    def selects(self) -> bool:
        """Whether only some response tokens train."""
        return self.loss.weighting.name == "selected"

    def behind(self, api: str | None = None) -> bool:
        """Whether the target is behind a server, of this API where one is given."""
        return self.target.endpoint is not None and api in (None, self.target.endpoint.api)

    def asks_more_than(self, source: str) -> bool:
        """Whether the objective wants of a server what it cannot give but by one source."""
        given = self.signal.source == source and self.signal.kind == "topk" and self.loss.temperature == 1
        return not self.only_ce and not given

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
