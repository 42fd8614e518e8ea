"""An outside opinion: the exported draft run by `transformers` itself, compared with plain greedy decoding.

Calls are counted by forward hooks. `model.forward` is never wrapped: a `*args, **kwargs` wrapper hides its signature
and makes the library re-read the whole sequence every round.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from distill.config.run import RunConfig
from distill.models.draft import cast_weights
from distill.models.quantized import as_served
from distill.run.session import open_pair
from speculative.decode import decode
from speculative.drafters.drafter import ModelDrafter
from speculative.measure.metrics import live_metrics


def check_with_transformers(
    target_model: Any,
    export_dir: Path,
    prompts_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    gamma: int,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Greedy `target.generate(assistant_model=draft)` against greedy `target.generate()`, prompt by prompt.

    gamma is fixed and the confidence gate is off: transformers reads both from the DRAFT's generation config
    (`num_assistant_tokens`, its schedule, `assistant_confidence_threshold`), not from generate()'s arguments. The block
    at the end of the budget is shorter: at most (tokens left - 1) are drafted.

    Args:
        target_model: causal LM, on any device; float32 if tokens are to be compared strictly, since a one-token and a
            (gamma+1)-token matrix product round differently.
        export_dir: directory of the draft; it computes in the target's dtype, from its exported weights.
        prompts_ids: token ids of each prompt.
        max_new_tokens: budget per prompt.
        gamma: drafted tokens per block.

    Returns:
        `tokens` (emitted), `equal` (prompts with the same tokens), `same_tokens`,
        `first_difference` (None, or prompt, position, plain and assisted token, and `gap`, the target's logit distance
        between the two: a gap within rounding is a tie, not a fault), `target_calls`, `drafted`, `accepted`, `tau`
        (tokens per target call), `accepted_per_drafted`, and `per_prompt` rows {tokens, target_calls, drafted, equal}.

    """
    draft = AutoModelForCausalLM.from_pretrained(export_dir, dtype="auto", trust_remote_code=trust_remote_code)
    draft = as_served(draft, target_model.device).to(target_model.device).eval()
    cast_weights(draft, target_model.dtype)
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    generation = _greedy(target_model, max_new_tokens)
    per_prompt: list[dict[str, Any]] = []
    first_difference: dict[str, Any] | None = None
    for index, prompt_ids in enumerate(prompts_ids):
        plain_ids = _continuation(target_model, prompt_ids, generation)
        with counted_calls(target_model) as target_calls, counted_calls(draft) as draft_calls:
            assisted_ids = _continuation(target_model, prompt_ids, generation, assistant_model=draft)
        equal = plain_ids == assisted_ids
        per_prompt.append(
            {
                "tokens": len(assisted_ids),
                "target_calls": target_calls[0],
                # Each call of the draft model proposes exactly one token, the first one (its prefill) included.
                "drafted": draft_calls[0],
                "equal": equal,
            }
        )
        if not equal and first_difference is None:
            first_difference = {"prompt": index, **_difference(target_model, prompt_ids, plain_ids, assisted_ids)}
    return _summary(per_prompt, first_difference)


@contextmanager
def counted_calls(model: Any) -> Iterator[list[int]]:
    """A one-element list that counts the forward calls of `model` while the context is open."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def _greedy(target_model: Any, max_new_tokens: int) -> GenerationConfig:
    own = target_model.generation_config
    eos_ids = [own.eos_token_id] if isinstance(own.eos_token_id, int) else list(own.eos_token_id or [])
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        # The library guesses the draft's attention mask and hides every pad id in the text from it, real ones too
        # (bos is often the pad id), which lowers acceptance. It does not guess when the pad id is an eos or no id.
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


def _difference(
    target_model: Any, prompt_ids: Sequence[int], plain_ids: list[int], assisted_ids: list[int]
) -> dict[str, Any]:
    """The first position where the two continuations part, and how far apart the target's logits are there."""
    pairs = zip(plain_ids, assisted_ids, strict=False)
    position = next((i for i, (plain, other) in enumerate(pairs) if plain != other), None)
    if position is None:  # one is a prefix of the other
        return {"position": min(len(plain_ids), len(assisted_ids)), "plain": None, "assisted": None, "gap": None}
    plain, other = plain_ids[position], assisted_ids[position]
    ids_BT = torch.tensor([[*prompt_ids, *plain_ids[:position]]], device=target_model.device)
    with torch.no_grad():
        logits_V = target_model(input_ids=ids_BT).logits[0, -1].float()
    return {"position": position, "plain": plain, "assisted": other, "gap": float(logits_V[plain] - logits_V[other])}


def _summary(per_prompt: list[dict[str, Any]], first_difference: dict[str, Any] | None) -> dict[str, Any]:
    tokens, target_calls, drafted = (
        sum(row[name] for row in per_prompt) for name in ("tokens", "target_calls", "drafted")
    )
    equal = sum(row["equal"] for row in per_prompt)
    # Each target call emits its accepted tokens and one token of its own.
    accepted = tokens - target_calls
    return {
        "tokens": tokens,
        "equal": equal,
        "same_tokens": equal == len(per_prompt),
        "first_difference": first_difference,
        "target_calls": target_calls,
        "drafted": drafted,
        "accepted": accepted,
        "tau": tokens / target_calls if target_calls else None,
        "accepted_per_drafted": accepted / drafted if drafted else None,
        "per_prompt": per_prompt,
    }


def outside_check(config: RunConfig, exported: Path, prompts: int, gamma: int) -> dict[str, Any]:
    """Greedy tokens and tau of `transformers` with the exported draft as assistant, and of our decoder, same prompts.

    {prompts, equal, first_difference, transformers: {tau, ...}, ours: {tau, tau_ci, ...}, within_interval}

    Raises:
        UserError: the exported draft does not fit the config's target.
    """
    pair = open_pair(config, str(exported), prompts)
    theirs = check_with_transformers(
        pair.target.model,
        exported,
        [prompt.prompt_ids for prompt in pair.prompts],
        config.serving.max_tokens,
        gamma,
        trust_remote_code=config.target.trust_remote_code,
    )
    settings = pair.settings.under("greedy", gamma)
    ours = live_metrics(decode(pair.target.model, ModelDrafter(pair.draft), pair.keyed, settings)[0], gamma)
    low, high = ours["tau_ci"]
    return {
        "prompts": len(pair.prompts),
        "equal": theirs["equal"],
        "first_difference": theirs["first_difference"],
        "transformers": theirs,
        "ours": ours,
        "within_interval": low <= theirs["tau"] <= high,
    }
