"""The target's section of the config: a local model or one at a server."""

from typing import Literal

from data.prompts.prompt import Section
from data.responses.endpoint_keys import Endpoint


class TargetConfig(Section):
    """The model that the draft imitates."""

    path: str = "embedded"
    """directory or hub id of the target (a peft adapter is merged into its base); `embedded` = the small model of Python
    code in the package"""
    revision: str | None = None
    """hub revision"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the target; auto = as saved on an accelerator, float32 on a CPU"""
    trust_remote_code: bool = False
    """run model code that comes with the weights"""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """spread a target that is larger than one GPU over all GPUs of one process; the value is a device map of
    Accelerate (balanced_low_0 leaves space for the draft). null = all of it on each process's own device"""
    shard: bool = False
    """shard the target over the ranks during training (torch's fully_shard). The main process loads the whole target
    to decode at a checkpoint and for the verdict; with judge.live: end only for the verdict, after training has freed its memory"""
    endpoint: Endpoint | None = None
    """servers that answer in place of local weights; `path` names the same model"""

    @property
    def at_server(self) -> bool:
        """Whether only servers have the weights."""
        return self.endpoint is not None and self.endpoint.weights == "server"
