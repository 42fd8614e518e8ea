"""What was retired in this release and what to use instead, for one release: config keys, values (`key: value`), options of commands."""

RETIRED: dict[str, str] = {
    "sweep --fit": "a sweep's table and frontier compare all shapes of the grid; give a short train.steps in overrides",
    "show --profile": "`understudy compare` scores two drafts on the same responses",
    "traffic review": "`understudy traffic show` lists acceptance by slice, `traffic export --quota` limits slices",
    "traffic --plot": "`understudy traffic show --json` gives the numbers over time",
    "target.others": "train one draft for each target",
    "readback --parameters": "send the parameters that you use to the engine with and without the draft, and compare the texts",
    "student.head_tokens": "for a large vocabulary use init: config with a smaller hidden_size and embeddings: target",
    "target.endpoint.api": "serve the target yourself with vLLM, and give the address of its /v1/completions",
    "signal.source: response_logprobs": "serve the target yourself with vLLM, and use signal.source: store",
    "signal.kind": "the store keeps the target's top-k probabilities (signal.k)",
    "signal.samples": "the store keeps the target's top-k probabilities (signal.k)",
    "judge.temperatures": "use `understudy probe --temperatures`",
}


def retired(*names: str) -> str | None:
    """What to use instead of the first of these names that was retired; None if none was."""
    return next((f"`{name}` is retired; {RETIRED[name]}" for name in names if name in RETIRED), None)
