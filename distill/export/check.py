"""Compare the exported draft in transformers' assisted generation (the reference implementation) with greedy decoding.

Forward hooks count the calls. `model.forward` is not wrapped: a `*args, **kwargs` wrapper hides its signature, and
transformers then processes the whole sequence again in every round.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from distill.models.draft import cast_weights
from distill.models.load import load_model
from distill.models.quantized import as_served
from distill.run.session import Pair
from speculative.decode import decode
from speculative.decoder.responses import Response
from speculative.drafters.drafter import ModelDrafter
from speculative.measure.metrics import live_metrics
from speculative.measure.self_checks import SelfCheckError, near_tie


@dataclass
class Assisted:
    """Counts of assisted generation per prompt, and where it first differs from the target alone, in words; empty: nowhere."""

    tokens_N: list[int] = field(default_factory=list)
    target_calls_N: list[int] = field(default_factory=list)
    drafted_N: list[int] = field(default_factory=list)
    equal_N: list[bool] = field(default_factory=list)
    first_difference: str = ""

    @property
    def accepted(self) -> int:
        """Accepted tokens: each target call emits its accepted tokens and one more."""
        return sum(self.tokens_N) - sum(self.target_calls_N)

    @property
    def tau(self) -> float:
        return sum(self.tokens_N) / sum(self.target_calls_N)


def check_with_transformers(
    target_model: Any,
    export_dir: Path,
    prompts_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    gamma: int,
    *,
    trust_remote_code: bool = False,
) -> Assisted:
    """Compare greedy `target.generate(assistant_model=draft)` with greedy `target.generate()`, prompt by prompt.

    gamma is fixed and the confidence gate is off. transformers reads both from the draft's generation config
    (`num_assistant_tokens`, its schedule, `assistant_confidence_threshold`), not from the arguments of generate().
    The last block is shorter: at most (tokens left - 1) tokens are drafted.

    The draft computes in the target's dtype from its exported weights. Use float32 for a strict comparison, since matrix products of one
    token and of gamma + 1 tokens round differently.
    """
    draft: Any = load_model("draft", str(export_dir), dtype="auto", trust_remote_code=trust_remote_code)
    draft = as_served(draft, target_model.device).to(target_model.device).eval()
    cast_weights(draft, target_model.dtype)
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    generation, assisted = _greedy(target_model, max_new_tokens), Assisted()
    for index, prompt_ids in enumerate(prompts_ids):
        plain_ids = _continuation(target_model, prompt_ids, generation)
        with counted_calls(target_model) as target_calls, counted_calls(draft) as draft_calls:
            assisted_ids = _continuation(target_model, prompt_ids, generation, assistant_model=draft)
        assisted.tokens_N.append(len(assisted_ids))
        assisted.target_calls_N.append(target_calls[0])
        # Each call of the draft, including its prefill, proposes exactly one token.
        assisted.drafted_N.append(draft_calls[0])
        assisted.equal_N.append(plain_ids == assisted_ids)
        if plain_ids != assisted_ids and not assisted.first_difference:
            sides = [Response(str(index), list(prompt_ids), response_ids=ids) for ids in (plain_ids, assisted_ids)]
            assisted.first_difference = difference(target_model, *sides)
    return assisted


# This warning is about how transformers itself calls the draft.
logging.getLogger("transformers.generation.utils").addFilter(
    lambda record: not record.getMessage().startswith("Passing `generation_config` together")
)


@contextmanager
def counted_calls(model: Any) -> Iterator[list[int]]:
    """Yield a one-element list that counts the forward calls of `model` inside the context."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def _greedy(target_model: Any, max_new_tokens: int) -> GenerationConfig:
    config = target_model.generation_config
    eos_ids = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        # transformers infers the draft's attention mask and hides every pad id in the text (often bos), which lowers
        # acceptance. It does not infer a mask if the pad id is an eos or not a token id.
        pad_token_id=eos_ids[0] if eos_ids else -1,
    )


def _continuation(
    target_model: Any, prompt_ids: Sequence[int], generation: GenerationConfig, **kwargs: Any
) -> list[int]:
    ids_BT = torch.tensor([list(prompt_ids)], device=target_model.device)
    with torch.no_grad():
        output_BT = target_model.generate(
            input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=generation, **kwargs
        )
    return output_BT[0, ids_BT.shape[1] :].tolist()


def difference(target_model: Any, plain: Response, assisted: Response) -> str:
    """Where two greedy texts differ, and whether that is more than rounding."""
    try:
        tie = near_tie(target_model, plain, assisted)
    except SelfCheckError as error:
        return str(error)
    return f"a near-tie at token {tie['position']} of prompt {tie['prompt']}, {tie['gap']:.1e} apart (relative)"


@dataclass(frozen=True)
class OutsideCheck:
    """The result in transformers, and tau of our decoder on the same prompts with its 95 % interval."""

    theirs: Assisted
    tau: float
    tau_ci: Sequence[float]

    @property
    def agrees(self) -> bool:
        """Whether every token equals the target's and transformers' tau lies in the interval of ours."""
        return all(self.theirs.equal_N) and self.tau_ci[0] <= self.theirs.tau <= self.tau_ci[1]


def outside_check(pair: Pair, exported: Path, gamma: int) -> OutsideCheck:
    """Run greedy decoding with the exported draft in transformers and in our decoder, on the same prompts."""
    theirs = check_with_transformers(
        pair.model,
        exported,
        [prompt.prompt_ids for prompt in pair.prompts],
        pair.settings.max_tokens,
        gamma,
        trust_remote_code=pair.target.config.trust_remote_code,
    )
    settings = pair.settings.at_temperature_0(gamma)
    ours = live_metrics(decode(pair.model, ModelDrafter(pair.draft), pair.keyed, settings)[0], gamma)
    return OutsideCheck(theirs, ours["tau"], ours["tau_ci"])
