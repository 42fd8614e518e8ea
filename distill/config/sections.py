"""The sections of a run's configuration: every key with its type, default and meaning."""

import difflib
import types
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from data.prompts.prompt import PromptSource, Section, Template
from speculative.errors import UserError
from speculative.rules.rule import RuleName

if TYPE_CHECKING:
    from speculative.rules.sampling import SamplingSettings


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Suggest the nearest known word, or list all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(sorted(known))}"


def _known_objective(name: str) -> str:
    from distill.loss.definitions import OBJECTIVES  # Imported late: reading a config needs no torch.

    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective: {did_you_mean(name, OBJECTIVES)}")
    return name


def _way_to_time(name: str) -> str:
    from distill.config.ways import way_named  # Imported late: reading a config needs no torch.

    try:
        replayed = way_named(name).replayed
    except UserError as error:
        raise ValueError(str(error)) from error
    if replayed:
        raise ValueError(f"{name} is timed in every verdict where it can be: remove it")
    return name


LossName = Annotated[str, AfterValidator(_known_objective)]


def section_in(annotation: Any) -> type[Section] | None:
    """The section class inside a field's annotation, or None."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Section) else None
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning (peft)."""

    rank: int = Field(64, ge=1)
    """rank of the update; distillation needs more than the usual 16"""
    alpha: int = Field(128, gt=0)
    """scale of the update, which is multiplied by alpha / rank"""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """names of the modules that get an adapter. A tied head (lm_head) is untied first; this is refused for
    architectures that serving engines only load tied"""


class ParallelConfig(Section):
    """A draft that proposes a whole block in one forward pass: known text, then copies of a mask token (PARD, arXiv 2504.18583)."""

    tokens: int = Field(8, ge=2, le=32)
    """largest offset to learn, which is also the largest block"""


class StudentConfig(Section):
    """The draft: where its initial weights come from, and which of its weights are trained."""

    init: Literal["carved", "pretrained", "config"] = "carved"
    """initial weights. carved: layers of the target; pretrained: the model at `path`; config: random weights of
    `architecture`"""
    path: str | None = None
    """directory or hub id of the draft to start from (init: pretrained); a peft adapter is merged into its base"""
    revision: str | None = None
    """hub revision of `path`"""
    layers: tuple[int, ...] = (0, -1)
    """layers of the target that a carved draft keeps; negative numbers count from the end"""
    intermediate_size: int | None = Field(None, ge=1)
    """carved: number of MLP channels to keep per layer, the most active ones; null = all"""
    embeddings: Literal["random", "target"] = "random"
    """init config: target = the target's embeddings and head, projected to the draft's width (principal
    components)"""
    vocabulary: Literal["same", "transplant"] = "same"
    """init pretrained: transplant = replace another tokenizer's vocabulary with the target's; each row is made
    from the draft's own tokens for the same text"""
    architecture: dict[str, Any] | None = None
    """fields of a transformers config, including `model_type` (init: config)"""
    lora: LoraConfig | None = None
    """train LoRA adapters only; null = train all weights"""
    parallel: ParallelConfig | None = None
    """learn to draft a block in one forward pass, `{}` = with defaults; null = token by token"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass; uses less memory and more time"""


class MixConfig(Section):
    """Share of each kind of sequence in a step; shares are scaled to sum to one."""

    target: float = Field(1.0, ge=0)
    """responses of the target"""
    student: float = Field(0.0, ge=0)
    """responses of the draft, scored by the target (on-policy, lambda in GKD)"""
    speculative: float = Field(0.0, ge=0)
    """responses decoded speculatively with the current draft: text of the target with known rejections"""


class RolloutConfig(Section):
    """Responses made during training, for `mix.student` and `mix.speculative`."""

    every: int = Field(50, ge=1)
    """steps between new rollouts; they are reused in between"""
    prompts: int = Field(256, ge=1)
    """training prompts answered each time, different ones each time"""


class DataConfig(Section):
    """Prompts to train on and to judge with."""

    train: tuple[PromptSource, ...] = ()
    """sources of training prompts"""
    heldout: tuple[PromptSource, ...] = ()
    """sources of held-out prompts; empty = split from train"""
    heldout_count: int | None = Field(None, ge=2)
    """prompts to hold out of `train` when `heldout` is empty, at most a fifth of all; null = 256. judge.prompts
    of them are judged"""
    template: Template = Template()
    bad_rows: Literal["error", "drop"] = "error"
    """what to do with unusable rows (an empty turn, an unknown role, a chat template error): stop, or leave them
    out and count them"""
    context_length: int | None = Field(None, ge=8)
    """maximum tokens of prompt and response together; null = the target's own limit"""
    too_long: Literal["error", "drop"] = "error"
    """what to do with prompts that do not fit: stop, or leave them out"""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """leave out prompts with more tokens (the log counts them); null = keep all"""
    responses: Literal["fresh", "logged"] = "fresh"
    """what to train on. fresh: the target answers every prompt; logged: answers that logs among `train` have are taken where
    they can be the target's own (docs/logs.md), and the target answers the rest"""
    logged_share: float = Field(1.0, gt=0, le=1)
    """responses logged: share of the prompts with a logged answer that take it; the target answers the others"""
    mix: MixConfig = MixConfig()
    rollouts: RolloutConfig = RolloutConfig()


class ServingConfig(Section):
    """How the target is served. Its responses and all measurements use these settings."""

    engine: str | None = None
    """engine that the draft is made for: vllm, sglang, llama.cpp, openvino, tensorrt-llm or transformers. It sets the
    rule, refuses what it cannot serve, and is timed at the end of the run if it is installed. null = none"""
    rule: RuleName | None = None
    """acceptance rule of the engine, which also sets the default objective: sample, sample-untruncated
    (drafts sampled at the temperature alone), greedy-draft (the default of most engines), greedy or block. null = the
    default of `engine`; without one greedy at temperature 0, else sample"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature of the server; 0 = greedy"""
    top_k: int = Field(0, ge=0)
    """keep the k most probable tokens; 0 = off"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling; 1 = off"""
    min_p: float = Field(0.0, ge=0, lt=1)
    """drop tokens below min_p times the largest probability; 0 = off"""
    max_tokens: int = Field(128, ge=1)
    """maximum tokens per response"""
    samples_per_prompt: int = Field(1, ge=1)
    """responses per training prompt"""
    batch_size: int = Field(32, ge=1)
    """prompts decoded at once; at a checkpoint at most 8"""
    shard_size: int = Field(64, ge=1)
    """responses per shard file; an interrupted run loses at most one shard per rank"""

    @property
    def sampling(self) -> "SamplingSettings":
        """Sampling settings of the server."""
        from speculative.rules.sampling import SamplingSettings  # Imported late: it needs torch.

        return SamplingSettings(self.temperature, self.top_k, self.top_p, self.min_p)


class WarmupConfig(Section):
    """Another objective for the first steps."""

    name: LossName = "forward_kl"
    """objective of the first steps"""
    ratio: float = Field(0.2, gt=0, lt=1)
    """share of train.steps that use it"""


class LossConfig(Section):
    """The training loss, averaged over all response tokens of a step."""

    name: LossName | None = None
    """training objective, one of distill/loss/definitions.py. null = jsd for rules that draw by token, else lk_hybrid
    (docs/studies.md)"""
    warmup: WarmupConfig | None = None
    """another objective for the first steps, e.g. {name: forward_kl, ratio: 0.2}"""
    prompt_weight: float = Field(0.0, ge=0)
    """weight of prompt tokens in the loss, where a response token has 1; the loss is still divided by the number
    of response tokens. 0 = responses only"""
    prompt_share: float = Field(1.0, gt=0, le=1)
    """share of the prompt tokens that a step learns, drawn again for each step, with their weight divided by it: the
    same loss on average in less time"""
    mix: dict[LossName, float] | None = None
    """weighted sum of objectives instead of `name`, e.g. {forward_kl: 1, tv: 0.5}"""
    temperature: float = Field(1.0, gt=0)
    """temperature of both distributions inside the loss (not the sampling temperature)"""
    eta: float = Field(3.0, ge=0)
    """lk_hybrid: how fast it moves from KL to TV as alpha rises"""
    chunk_tokens: int | None = Field(None, ge=1)
    """response tokens whose logits are in memory at once; null = as many as fit the cache or 256 MB"""


class SignalConfig(Section):
    """Where the target's probabilities come from during training."""

    source: Literal["online", "store", "capture"] = "online"
    """online: the target runs in every step. store: read what `understudy respond --signal` stored; the target is
    not in memory. capture: the target runs once per sequence, later epochs read what was kept"""
    k: int = Field(64, ge=1, le=4096)
    """most probable tokens that are stored per token (4 bytes each, plus the id bits above 16), beside the total
    probability of the rest"""


class OptimConfig(Section):
    """AdamW or Muon with linear warm-up and cosine decay to a tenth of the peak."""

    name: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    """optimizer. muon: orthogonalised updates for the matrices of the layers, AdamW for the rest; adamw8bit:
    moments in 8 bits (torchao)"""
    lr: float | None = Field(None, gt=0)
    """peak learning rate; null = chosen by the size of the draft (distill/training/optim.py)"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay of all matrices; norms and biases never decay"""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """share of the steps in which the learning rate rises"""
    max_grad_norm: float = Field(1.0, gt=0)
    """clip the gradient norm to this value"""


class TrainConfig(Section):
    """The training loop. One step is `batch_size` sequences, however many ranks and micro-batches share them."""

    steps: int = Field(0, ge=0)
    """optimizer steps; 0 = as many as `epochs` takes"""
    epochs: float = Field(3.0, ge=0, le=100_000)
    """passes over the training responses, which give the number of steps; not used if `steps` is set"""
    batch_size: int = Field(32, ge=1)
    """sequences per step, summed over all ranks and micro-batches"""
    micro_batch_size: int | None = Field(None, ge=1)
    """sequences per forward pass on one rank; null = as many as fit, found by a trial step on a GPU"""
    mixed_precision: Literal["auto", "native", "no", "bf16"] = "auto"
    """autocast of the draft, whose weights stay float32. auto = bf16 on a GPU or if the launcher says so; native
    = also on a CPU whose bfloat16 products are faster (AMX, AMD's AVX-512)"""
    packing: int | None = Field(None, ge=8)
    """pack sequences into rows of this many tokens instead of padding; sequences do not attend to each other.
    null = pad"""
    compile: bool = False
    """use torch.compile for the draft's layers and the loss: starts a minute later, then faster steps"""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        """train.steps alone replaces the default epochs."""
        alone = isinstance(values, dict) and values.get("steps") and "epochs" not in values
        return {**values, "epochs": 0.0} if alone else values


class JudgeConfig(Section):
    """How held-out prompts are judged, at step 0 and at every checkpoint."""

    every: int = Field(100, ge=1)
    """steps between checkpoints; each is judged"""
    prompts: int = Field(64, ge=2)
    """held-out prompts per judgement"""
    gamma: int = Field(5, ge=1, le=32)
    """drafted tokens per block"""
    rule: RuleName | None = None
    """acceptance rule that picks the best checkpoint; null = serving.rule"""
    live: Literal["checkpoint", "end", "never"] = "checkpoint"
    """when prompts are decoded live. Replay always picks the best checkpoint. checkpoint: some prompts at every
    checkpoint prove what replay says, and a target that is not in memory is loaded for that (one at a server answers them
    again); end: only for the verdict; never: no decoding and no speeds"""
    live_prompts: int = Field(32, ge=1)
    """prompts that each checkpoint decodes live, other ones each time until all had a turn"""
    replay_every: int = Field(0, ge=0)
    """steps between replays of held-out alpha and tau without a checkpoint; 0 = none"""
    served: str | tuple[str, ...] | None = None
    """draft that is served today, to be judged too: run, checkpoint, directory (also of a peft adapter) or hub id;
    or a list of drafts, e.g. adapters of one base"""
    batch_size: int = Field(32, ge=1)
    """prompts decoded at once; in a run's verdict at most 8, or an eighth of the prompts if that is more"""
    patience: int = Field(0, ge=0)
    """stop after this many checkpoints without a better tau; 0 = never"""
    speed_prompts: int = Field(64, ge=1)
    """maximum prompts that are timed, one at a time, for tokens/s in the verdict"""
    speed_seconds: float = Field(120.0, gt=0)
    """maximum seconds of that timing, which ends earlier when the speed-up is known within 5 %; at least 6
    prompts are timed"""
    speed_threads: int | None = Field(None, ge=1)
    """CPU threads while speed is measured, the same for all; null = torch's default"""
    load: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """numbers of concurrent requests at which decoding is timed with and without the draft; empty = not measured"""
    latency_ms: dict[Literal["first_token", "per_token"], Annotated[float, Field(gt=0)]] = Field({})
    """limits in milliseconds, e.g. {first_token: 300, per_token: 30}: the verdict says the largest of the loads 1 and
    `load` at which the p90 of both waits is within them, with and without the draft"""
    ways: tuple[Annotated[str, AfterValidator(_way_to_time)], ...] = ()
    """more ways to decode that the verdict times, besides the drafts, prompt-lookup, past-responses and lookup+draft:
    token-tree, early-exit, lookahead; their tau is counted live"""
    lenience: tuple[Annotated[float, Field(gt=1)], ...] = ()
    """LOSSY ways to time: a drafted token is kept with min(1, lenience * target / draft); docs/verdict.md"""

    @property
    def served_paths(self) -> tuple[str, ...]:
        return (self.served,) if isinstance(self.served, str) else self.served or ()


Quantization = Literal["int8", "int8-dynamic", "fp8"]


class ExportConfig(Section):
    """What `understudy export` writes. The verdict judges it too."""

    quantize: Quantization | None = None
    """8-bit weights: int8, int8-dynamic or fp8 (docs/serving.md); judged in addition to the draft"""


class TrackingConfig(Section):
    """Where metrics go in addition to metrics.jsonl, which is always written."""

    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """any of wandb and tensorboard; wandb runs offline without a login"""
