"""`understudy evaluate DRAFT --losslessness`: the tests of `speculative.explain.losslessness` on a config's target and prompts."""

from typing import Any

from distill.config.run import RunConfig
from distill.run.session import open_pair
from speculative.explain import losslessness as tests
from speculative.rules.rule import Rule


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
        UserError: see `open_pair`; fewer than two samples.
    """
    pair = open_pair(config, draft, prompts, rule)
    found = tests.losslessness(
        pair.target.model,
        pair.draft,
        pair.keyed,
        pair.settings.under(rule, gamma),
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
