"""What was retired in this release and what to use instead, for one release: config keys, values (`key: value`), options of commands."""

RETIRED: dict[str, str] = {
    "report": "`understudy show RUN --page FILE` writes the page; its numbers are in result.json",
    "sweep --fit": "a sweep's table and frontier compare all shapes of the grid; give a short train.steps in overrides",
    "show --profile": "`understudy compare` scores two drafts on the same responses",
    "traffic review": "`understudy traffic show` lists acceptance by slice, `traffic export --quota` limits slices",
    "traffic --plot": "`understudy traffic show --json` gives the numbers over time",
    "generate --tree": "use --drafter token-tree",
    "generate --drafting": "use --drafter parallel",
    "generate --datastore": "use --past",
    "generate --log": "`understudy evaluate` writes every drafted token next to its result",
    "generate --numbers": "they are on standard error",
    **dict.fromkeys(
        [
            f"generate --{option}"
            for option in (
                *("prompt-column", "messages-column", "system", "exit-layers", "stop-below"),
                *("min-p", "repetition-penalty", "min-tokens", "stop", "runner"),
            )
        ],
        "call `speculative.decode.generate`, as in docs/decoder.md",
    ),
    "way: lookup": "write prompt-lookup",
    "way: jacobi": "write lookahead",
    "way: retrieval": "write past-responses",
    "way: cascade": "write lookup+draft",
    "way: token tree": "write token-tree",
    "way: early exit": "write early-exit",
    "way: adaptive draft": "write adaptive-draft",
    "way: adaptive lookup + draft": "write adaptive-lookup+draft",
    "judge.dial_every": "write judge.replay_every",
    "target.others": "train one draft for each target",
    "readback --parameters": "send the parameters that you use to the engine with and without the draft, and compare the texts",
    "student.head_tokens": "for a large vocabulary use init: config with a smaller hidden_size and embeddings: target",
    "target.endpoint.api": "serve the target yourself with vLLM, and give the address of its /v1/completions",
    "signal.source: response_logprobs": "serve the target yourself with vLLM, and use signal.source: store",
    "signal.kind": "the store keeps the target's top-k probabilities (signal.k)",
    "signal.samples": "the store keeps the target's top-k probabilities (signal.k)",
    "data.synthetic": "collect more prompts of your users, e.g. with `understudy gateway`; generated ones did not help (docs/studies.md)",
    "data.responses": "a draft trains on the target's own responses",
    "optim.ema": "leave it out; averaged weights were no better in the study",
    "tracking.trackers: mlflow": "use wandb or tensorboard; metrics.jsonl has every number",
    "tracking.trackers: trackio": "use wandb or tensorboard; metrics.jsonl has every number",
    "judge.temperatures": "use `understudy probe --temperatures`",
    "optim.betas": "AdamW's moments decay by 0.9 and 0.95",
    "optim.embedding_weight_decay": "optim.weight_decay holds for all matrices",
    "optim.final_lr_ratio": "the learning rate falls to a tenth of optim.lr",
    "optim.spike_factor": "an update is skipped if its gradient norm is ten times the recent median",
    "resume": "a run's folder is continued; give another name to start anew",
    "student.layers: auto": "list the layers to keep, e.g. [0, -1]",
    "student.depth": "list the layers to keep in student.layers",
    "student.extend_context": "set data.context_length to the draft's own limit, or start from another draft",
    "student.parallel.mask_token": "a token that no text uses is chosen",
    "student.parallel.retain": "it is 0.7",
    "data.rollouts.max_tokens": "set serving.max_tokens",
    "data.rollouts.temperature": "the draft's responses are sampled at temperature 1",
    "data.rollouts.gamma": "rollouts draft 4 tokens per block",
    "data.rollouts.rejected_weight": "rejected positions count twice",
    "data.text_window": "general text is cut into windows of 256 tokens, or of the context if that is shorter",
    "judge.scorer": "use `understudy evaluate --scorer`",
    "judge.allow_lossy": "the verdict never says to run a LOSSY way; its row has the speed",
    "train.pause_at": "Ctrl-C saves a checkpoint and the same command continues; for a trial set train.steps",
    "train.log_every": "trackers get every tenth step, metrics.jsonl has every step",
    "train.keep_states": "the last two checkpoints keep the optimizer state",
    "train.profile_steps": "run torch's profiler around `python -m distill.train`",
}


def retired(*names: str) -> str | None:
    """What to use instead of the first of these names that was retired; None if none was."""
    return next((f"`{name}` is retired; {RETIRED[name]}" for name in names if name in RETIRED), None)
