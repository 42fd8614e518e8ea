"""`understudy evaluate DRAFT --losslessness`: the tests of `speculative.explain.losslessness` on a config's target and prompts."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from data.responses.respond import RenderedPrompt
from distill.config.run import RunConfig
from distill.models.draft import load_draft, served_copy
from distill.models.target import ServedTarget
from distill.run.prompts import load_prompts
from distill.run.responses import decode_settings
from distill.run.session import context_limit, new_accelerator, positions_of
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.explain import losslessness as tests
from speculative.rules.verify import Rule


@dataclass(frozen=True)
class Pair:
    """A draft beside its target as they would be served, and the held-out prompts to decode."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: Any
    prompts: list[RenderedPrompt]
    settings: DecodeSettings

    @property
    def keyed(self) -> list[tuple[str, tuple[int, ...]]]:
        """The prompts as the decoder takes them."""
        return [(prompt.prompt_id, prompt.prompt_ids) for prompt in self.prompts]


def load_pair(config: RunConfig, path: str, rule: Rule, gamma: int, prompts: int) -> Pair:
    """A config's target, a draft for it, and its first held-out prompts by content hash.

    Raises:
        UserError: the target's weights elsewhere, a rule that contradicts the temperature, no draft there.
    """
    if rule != "greedy" and config.serving.temperature == 0:
        raise UserError(f"--rule {rule} samples from the target, but serving.temperature is 0; use --rule greedy")
    if prompts < 1:
        raise UserError(f"--prompts {prompts}: give at least 1")
    served = ServedTarget(config.target, new_accelerator().device)
    target, tokenizer = served.model, served.tokenizer
    draft = served_copy(load_draft(path, target, tokenizer), served.saved_dtype, target)
    context = context_limit(config, positions_of(target), positions_of(draft))
    sets = load_prompts(config.data, tokenizer, context, config.serving.max_tokens, prompts, heldout_only=True)
    return Pair(target, draft, tokenizer, sets.heldout, decode_settings(config, target, gamma, rule))


def losslessness(
    config: RunConfig,
    draft: str,
    *,
    rule: Rule,
    gamma: int,
    prompts: int = 32,
    samples: int = 16,
    control: bool = True,
) -> dict[str, Any]:
    """Result of `speculative.explain.losslessness.losslessness` at the serving settings; `passed` False means exit status 1.

    control: decode once more at 1.1 times the temperature, to show that the tests would have seen that.

    Raises:
        UserError: see `load_pair`; fewer than two samples.
    """
    pair = load_pair(config, draft, rule, gamma, prompts)
    found = tests.losslessness(
        pair.target,
        pair.draft,
        pair.keyed,
        pair.settings,
        samples=samples,
        batch_size=config.judge.batch_size,
        control=control,
    )
    return {"draft": draft, "dtype": str(pair.target.dtype).removeprefix("torch."), **found}


def lossless_lines(result: dict[str, Any]) -> list[str]:
    """What a person reads: every test with its numbers, then the answer."""
    greedy, sampled = result["greedy"], result["sampled"]
    lines = [
        f"greedy text       {greedy['equal']} of {greedy['prompts']} prompts equal ({greedy['tokens']:,} tokens), "
        f"{len(greedy['near_ties'])} part at a near-tie ({result['dtype']}), {len(greedy['differences'])} differ",
        *(f"  {line}" for line in greedy["differences"][:5]),
    ]
    if sampled is not None:
        parts = ", ".join(f"{name} {p_value:.2g}" for name, p_value in sampled["parts"].items())
        lines += [
            f"with and without  p = {sampled['p_value_permutation']:.2g} ({sampled['prompts']} prompts x {sampled['samples']}, "
            f"{sampled['permutations']:,} relabellings; alone: {parts})",
            *(
                f"{name:<17} p = {test['p_value']:.2g} (chi-square of {test['tokens']:,} against the target's probabilities"
                + (f", {test['impossible']} of probability 0" if test["impossible"] else "")
                + (")" if test["judged"] else f"; not judged: {result['dtype']} rounds at the edge of top-p and top-k)")
                for name, test in (("first tokens", result["first_token"]), ("every token", result["every_token"]))
            ),
            f"a decoder without fault fails this check at most about once in {round(1 / result['level']):,} uses",
        ]
    return [*lines, result["sentence"]]
