"""The target's section of a configuration: one model, behind a server perhaps, and others that the same draft is for."""

from typing import Literal

from pydantic import Field

from data.responses.endpoint_keys import Endpoint
from distill.config.sections import Section


class EndpointConfig(Endpoint, Section):
    """The target behind an OpenAI-compatible server (vLLM; SGLang gives responses only)."""


class OtherTargetConfig(Section):
    """Another target that the draft is to be good for: a run of that target, answered and stored (`understudy respond --signal`)."""

    run: str
    """its run's folder; same tokenizer, data and serving"""
    weight: float = Field(1.0, gt=0)
    """share of every step, and of the score, relative to this run's own target"""


class TargetConfig(Section):
    """The model to be imitated (the teacher while the draft learns)."""

    path: str = "embedded"
    """directory, hub id, or `embedded`: the small Python target shipped with us"""
    revision: str | None = None
    """hub revision"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """weights and forward of the target; auto = as saved on an accelerator, float32 on a CPU"""
    trust_remote_code: bool = False
    """run model code that comes with the weights"""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """a target larger than one GPU: its layers spread over all GPUs of one process, in accelerate's way of
    this name (balanced_low_0 leaves room for the draft); null = whole on each process's own device"""
    shard: bool = False
    """cut the target's layers over the ranks while the draft learns (torch's fully_shard), never whole on a
    device; with judge.live: end the main process loads the whole for the verdict, when the draft's training
    is out of memory"""
    endpoint: EndpointConfig | None = None
    """a server answers and scores; `path` names the same model, its weights are never loaded"""
    others: tuple[OtherTargetConfig, ...] = ()
    """one draft for several targets: the others, each from what its own run has stored; signal.source:
    store"""
