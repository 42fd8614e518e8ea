"""The sections of a run's configuration: every key with its default, its meaning, and which pairs are impossible."""

import difflib
import types
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from data.prompts.prompt import PromptSource, Template
from speculative.rules.rule import Rule

if TYPE_CHECKING:
    from speculative.rules.sampling import SamplingSettings


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The known word that is nearest, or all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(sorted(known))}"


def _known_objective(name: str) -> str:
    from distill.loss.definitions import OBJECTIVES  # imported late: a config alone needs no torch

    if name not in OBJECTIVES:
        raise ValueError(f"no objective has this name: {did_you_mean(name, OBJECTIVES)}")
    return name


LossName = Annotated[str, AfterValidator(_known_objective)]


class Section(BaseModel):
    """Frozen; an unknown key or a wrong type is an error, never a guess."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field of this annotation holds, perhaps one of several or none."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Section) else None
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning (peft)."""

    rank: int = Field(64, ge=1)
    """rank of the update; distillation moves more than a style, so more than the usual 16"""
    alpha: int = Field(128, gt=0)
    """scale: the update is multiplied by alpha / rank"""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """module names that get an adapter; on a tied head (lm_head) it gets weights of its own, or is refused
    where serving engines read the architecture as tied only"""


class ParallelConfig(Section):
    """A draft that proposes a whole block in one forward: the known text, then copies of one mask token (PARD, arXiv 2504.18583)."""

    tokens: int = Field(8, ge=2, le=16)
    """largest offset that is learnt; a block drafts at most so many tokens"""
    mask_token: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """id that stands for a token not known yet and occurs in no text; auto = the draft's own `pard_token`,
    else a row of the vocabulary without a token, else a special token, at last any, that no prompt or
    response uses"""
    retain: float = Field(0.7, gt=0, le=1)
    """a block that is asked for an offset is asked for the next one too with this probability (conditional
    drop): about retain / (1 - retain) mask tokens a response token; 1 = always"""


class StudentConfig(Section):
    """The draft: where its first weights come from, and what of it is trained."""

    init: Literal["carved", "pretrained", "config"] = "carved"
    """carved: layers of the target; pretrained: `path`; config: random weights from `architecture`"""
    path: str | None = None
    """directory or hub id of a ready-made draft (init: pretrained)"""
    revision: str | None = None
    """hub revision of `path`"""
    layers: tuple[int, ...] | Literal["auto"] = (0, -1)
    """which layers of the target a carved draft keeps, negative from the end; auto = the `depth` layers
    without which the target's own alpha falls most, measured"""
    depth: int = Field(2, ge=1)
    """layers kept by `layers: auto`"""
    intermediate_size: int | None = Field(None, ge=1)
    """carved: keep only so many MLP channels a layer, the most active ones; null = all"""
    embeddings: Literal["random", "target"] = "random"
    """init config: target = the target's embeddings and head fitted to the draft's width (principal
    components)"""
    vocabulary: Literal["same", "transplant"] = "same"
    """init pretrained: transplant = a draft of another tokenizer gets rows for the target's tokens, made from
    its own tokens of the same text"""
    architecture: dict[str, Any] | None = None
    """fields of a transformers config, `model_type` among them (init: config)"""
    lora: LoraConfig | None = None
    """train adapters only; null = all weights"""
    parallel: ParallelConfig | None = None
    """learn to draft a block in one forward, `{}` with the defaults; null = token by token"""
    extend_context: bool = False
    """init pretrained: a draft made for shorter texts than the target's is stretched to them (YaRN); else
    refused unless data.context_length is no more than its own"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""


class SourceConfig(PromptSource, Section):
    """One place prompts come from."""


class TemplateConfig(Template, Section):
    """How a prompt becomes tokens."""


class MixConfig(Section):
    """Shares of each step's sequences; they are scaled to sum to one."""

    target: float = Field(1.0, ge=0)
    """responses of the target"""
    student: float = Field(0.0, ge=0)
    """the draft's own responses, scored by the target (on-policy, GKD's lambda)"""
    speculative: float = Field(0.0, ge=0)
    """responses decoded speculatively by the present draft: target text, rejected places known"""
    text: float = Field(0.0, ge=0)
    """windows of `data.text`, against forgetting"""


class SyntheticConfig(Section):
    """Prompts made by us, answered by the target and trained on like the user's own; none that comes near a held-out one."""

    count: int = Field(ge=1)
    """how many; fewer where so many different ones cannot be found"""
    method: Literal["magpie", "mix"] = "magpie"
    """magpie: the target writes the user's turn behind the chat template's opening (and what the training
    prompts have before their last question); mix: beginnings and ends of the training prompts joined where
    two words are the same"""
    max_tokens: int = Field(128, ge=1)
    """magpie: a user's turn of more tokens is left out"""
    temperature: float = Field(1.0, gt=0)
    """magpie: of the sampled turns"""


class RolloutConfig(Section):
    """Responses made while training, for `mix.student` and `mix.speculative`."""

    every: int = Field(50, ge=1)
    """steps between new rollouts; in between the same ones are read"""
    prompts: int = Field(256, ge=1)
    """training prompts answered each time, other ones each time"""
    max_tokens: int | None = Field(None, ge=1)
    """tokens of a rollout at most; null = serving.max_tokens"""
    temperature: float = Field(1.0, ge=0)
    """the draft's own sampling temperature (mix.student)"""
    gamma: int = Field(4, ge=1, le=16)
    """drafted tokens per block (mix.speculative)"""
    rejected_weight: float = Field(2.0, gt=0)
    """loss weight of a position whose drafted token was rejected (mix.speculative)"""


class DataConfig(Section):
    """Prompts for training and for judging."""

    train: tuple[SourceConfig, ...] = ()
    """sources of training prompts"""
    heldout: tuple[SourceConfig, ...] = ()
    """sources of held-out prompts; empty = split from train"""
    heldout_count: int | None = Field(None, ge=2)
    """prompts held out of `train` when `heldout` is empty, at most a fifth of all; null = 256. judge.prompts
    of them are judged"""
    template: TemplateConfig = TemplateConfig()
    responses: Literal["target", "reference"] = "target"
    """train on the target's own answers (right for acceptance) or on the dataset's (reference_column)"""
    bad_rows: Literal["error", "drop"] = "error"
    """a row that is no usable prompt (an empty turn, an unknown role, what the chat template refuses): stop,
    or leave it out and count it"""
    context_length: int | None = Field(None, ge=8)
    """tokens of prompt + response; null = the target's own limit"""
    too_long: Literal["error", "drop"] = "error"
    """a prompt that does not fit: stop, or leave it out"""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """leave out longer prompts (counted in the log); null = keep all"""
    synthetic: SyntheticConfig | None = None
    """more training prompts than there are, e.g. {count: 1000}"""
    mix: MixConfig = MixConfig()
    rollouts: RolloutConfig = RolloutConfig()
    text: tuple[SourceConfig, ...] = ()
    """sources of general text for mix.text"""
    text_window: int = Field(256, ge=8)
    """tokens of a window of general text"""


class ServingConfig(Section):
    """How the target is served: its responses and every measurement use these settings."""

    rule: Rule | None = None
    """how the engine accepts (README, Words): vLLM, SGLang and llama.cpp draft greedily; null = greedy at
    temperature 0, else sample. It sets the default objective and the metric"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature of the server; 0 = greedy"""
    top_k: int = Field(0, ge=0)
    """keep the k most probable tokens; 0 = off"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling; 1 = off"""
    min_p: float = Field(0.0, ge=0, lt=1)
    """drop tokens under min_p x the largest probability; 0 = off"""
    max_tokens: int = Field(128, ge=1)
    """tokens of a response at most"""
    samples_per_prompt: int = Field(1, ge=1)
    """responses per training prompt"""
    batch_size: int = Field(32, ge=1)
    """prompts decoded at once"""
    shard_size: int = Field(64, ge=1)
    """responses per shard file; a killed run loses at most one shard per rank"""

    @property
    def sampling(self) -> "SamplingSettings":
        """How the server draws a token."""
        from speculative.rules.sampling import SamplingSettings  # late, for torch

        return SamplingSettings(self.temperature, self.top_k, self.top_p, self.min_p)


class WarmupConfig(Section):
    """Another objective for the first steps."""

    name: LossName = "forward_kl"
    """objective of the first steps"""
    ratio: float = Field(0.2, gt=0, lt=1)
    """share of train.steps that it has"""


class WeightingConfig(Section):
    """Which response tokens count how much. The denominator stays the number of response tokens."""

    name: Literal["none", "entropy", "position", "selected"] = "none"
    """entropy: 1 - exp(-target entropy in nats); position: later tokens count less; selected: only the tokens
    where the draft is furthest behind `reference` (AdaSPEC)"""
    half_life: float = Field(64.0, gt=0)
    """position: response tokens after which the weight has halved"""
    keep: float = Field(0.4, gt=0, le=1)
    """selected: share of the response tokens of a micro-batch that is kept"""
    reference: str | None = None
    """selected: a distilled draft (run folder or model directory) to compare with"""


class LossConfig(Section):
    """What the student minimises, per response token, averaged over all response tokens of a step."""

    name: LossName | None = None
    """objective, see distill/loss/definitions.py (accepted_length: of blocks of judge.gamma,
    distill/loss/accepted.py); null = by serving.rule (jsd for sample, lk_hybrid for the others;
    docs/studies.md)"""
    warmup: WarmupConfig | None = None
    """another objective first, e.g. {name: forward_kl, ratio: 0.2}"""
    weighting: WeightingConfig = WeightingConfig()
    prompt_weight: float = Field(0.0, ge=0)
    """learn from the prompt's tokens too, each with this weight (a response token has 1, the denominator
    stays the number of response tokens); 0 = responses only"""
    mix: dict[LossName, float] | None = None
    """weighted sum of objectives instead of `name`, e.g. {forward_kl: 1, tv: 0.5}"""
    temperature: float = Field(1.0, gt=0)
    """softens both distributions inside the loss (not the server's temperature)"""
    beta: float = Field(0.5, gt=0, lt=1)
    """weight of the target in the mixture of jsd"""
    eta: float = Field(3.0, ge=0)
    """lk_hybrid: how fast KL gives way to TV as alpha rises"""
    chunk_tokens: int | None = Field(None, ge=1)
    """response tokens whose logits exist at once; null = as many as the cache or 256 MB hold"""


class SignalConfig(Section):
    """Where the teacher's distributions come from while the draft learns."""

    source: Literal["online", "store", "capture", "response_logprobs"] = "online"
    """online: the target runs in every step; store: written before by `understudy respond --signal`, the
    target is not in memory; capture: the target runs once per sequence, later epochs read what was kept;
    response_logprobs: what a hosted chat API says of its own responses' tokens (target.endpoint.api: chat),
    kept by `understudy respond`"""
    kind: Literal["topk", "sampled"] = "topk"
    """topk: the k most probable tokens and the rest's mass; sampled: unbiased importance samples"""
    k: int = Field(64, ge=1, le=4096)
    """topk: entries per token (4 bytes each, and the bits of an id above 16)"""
    samples: int = Field(50, ge=1, le=255)
    """sampled: draws per token (some of them repeat)"""


Moment = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW or Muon with linear warm-up and cosine decay."""

    name: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    """muon: orthogonalised updates for the layers' matrices, AdamW for the rest; adamw8bit: moments in 8 bits
    (torchao)"""
    lr: float | None = Field(None, gt=0)
    """peak learning rate; null = by the draft's size (distill/training/optim.py)"""
    betas: tuple[Moment, Moment] = (0.9, 0.95)
    """AdamW's moments"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay on the layers' matrices"""
    embedding_weight_decay: float | None = Field(None, ge=0)
    """the same on embeddings and head; null = weight_decay; vectors (norms, biases) never decay"""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """share of the steps with rising learning rate"""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """learning rate at the end / peak"""
    max_grad_norm: float = Field(1.0, gt=0)
    """clip the gradient's norm to this"""
    spike_factor: float = Field(10.0, ge=0)
    """skip an update whose gradient norm is this many times the median of the last 64; 0 = never"""
    ema: float = Field(0.0, ge=0, lt=1)
    """keep an exponential average of the weights, judged beside the raw ones; 0 = off, try 0.99"""


class TrainConfig(Section):
    """The loop. One step = `batch_size` sequences however many ranks and micro-batches share them."""

    steps: int = Field(300, ge=1)
    """optimizer steps"""
    batch_size: int = Field(32, ge=1)
    """sequences per step, over all ranks and micro-batches"""
    micro_batch_size: int | None = Field(None, ge=1)
    """sequences per forward on one rank; null = as many as fit, found by a trial step on a GPU"""
    mixed_precision: Literal["auto", "native", "no", "bf16"] = "auto"
    """autocast of the student, whose weights stay float32; auto = bf16 on a GPU or where the launcher says
    so; native = also on a CPU with bfloat16 instructions"""
    log_every: int = Field(10, ge=1)
    """steps between points sent to the trackers; metrics.jsonl has every step"""
    keep_states: int = Field(2, ge=1)
    """checkpoints whose optimizer state is kept for resuming"""
    packing: int | None = Field(None, ge=8)
    """pack sequences into rows of so many tokens (documents do not see each other) instead of padding; null =
    pad"""
    compile: bool = False
    """torch.compile the draft's layers and the loss: a minute first, faster steps after"""
    profile_steps: int = Field(0, ge=0)
    """trace so many steps with torch's profiler into profile/; 0 = none"""


Temperature = Annotated[float, Field(ge=0, le=100)]


class JudgeConfig(Section):
    """Speculative decoding of held-out prompts at step 0 and at every checkpoint."""

    every: int = Field(100, ge=1)
    """steps between checkpoints, each judged"""
    prompts: int = Field(64, ge=2)
    """held-out prompts per judgement"""
    gamma: int = Field(5, ge=1, le=16)
    """drafted tokens per block"""
    rule: Rule | None = None
    """engine rule that picks the best checkpoint; null = serving.rule"""
    live: Literal["checkpoint", "end", "never"] = "checkpoint"
    """when held-out prompts are decoded for real: at every checkpoint; only for the verdict (replay picks the
    best, and with signal.source: store the target is not in memory while training); or never (no speeds)"""
    dial_every: int = Field(0, ge=0)
    """steps between readings of held-out alpha and tau by replay alone, between checkpoints; 0 = none"""
    served: str | None = None
    """the draft that is served today (run, checkpoint, directory, hub id): judged beside the new one"""
    batch_size: int = Field(32, ge=1)
    """prompts decoded at once"""
    temperatures: tuple[Temperature, ...] = ()
    """measure acceptance at these too (0 = greedy), e.g. [0, 0.3, 0.7, 1]: the target answers 16 held-out
    prompts at each in the end"""
    patience: int = Field(0, ge=0)
    """stop after this many checkpoints without a better tau; 0 = never"""
    speed_prompts: int = Field(64, ge=1)
    """prompts timed one at a time for the verdict's tokens/s, at most"""
    speed_seconds: float = Field(120.0, gt=0)
    """that timing ends when the speed-up is known within 5 %, or after so long (6 prompts are timed in any
    case)"""
    speed_threads: int | None = Field(None, ge=1)
    """CPU threads while tokens/s and step costs are measured, for all alike; null = torch's own"""
    load: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """numbers of concurrent requests at which decoding with and without the draft is timed for the verdict;
    empty = not measured"""
    ways: tuple[Literal["token tree", "early exit", "lookahead"], ...] = ()
    """ways to decode that the verdict times beside the drafts, prompt lookup, past responses and lookup +
    draft; tau of these is counted live"""


Quantization = Literal["int8", "int8-dynamic", "fp8"]


class ExportConfig(Section):
    """What `understudy export` writes, and the verdict judges beside the draft as it is."""

    quantize: Quantization | None = None
    """weights in 8 bits: int8, int8-dynamic or fp8 (docs/serving.md), judged beside the draft"""


class TrackingConfig(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """wandb runs offline without a login"""
    project: str = "understudy"
    """wandb project"""
