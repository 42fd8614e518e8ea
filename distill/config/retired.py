"""What was retired in this release and what to use instead, for one release: config keys, values (`key: value`), options of commands."""

_TABLE = """
report -> `understudy show RUN --page FILE` writes the page; its numbers are in result.json
sweep --fit -> a sweep's table and frontier compare all shapes of the grid; give a short train.steps in overrides
show --trust-remote-code -> show loads no model
show --profile -> `understudy compare` scores two drafts on the same responses
traffic review -> `understudy traffic show` lists acceptance by slice
traffic --plot -> `understudy traffic show --json` gives the numbers over time
generate --tree -> use --drafter token-tree
generate --drafting -> use --drafter parallel
generate --datastore -> use --past
generate --log -> `understudy evaluate` writes every drafted token next to its result
generate --numbers -> they are on standard error
generate --prompt-column, generate --messages-column, generate --system -> call `speculative.decode.generate`, as in docs/decoder.md
generate --exit-layers, generate --stop-below, generate --min-p -> call `speculative.decode.generate`, as in docs/decoder.md
generate --repetition-penalty, generate --min-tokens, generate --stop -> call `speculative.decode.generate`, as in docs/decoder.md
generate --runner -> call `speculative.decode.generate`, as in docs/decoder.md
evaluate --json -> --out holds everything
evaluate --drafting -> a draft that can draft a block in one pass does
evaluate --samples -> 16 samples for --losslessness, 1 for --scorer
evaluate --control, evaluate --no-control -> it is always run
compare --plot -> plot `ways` of --out FILE
compare --fail-if-worse -> write --fail-below others
compare lookup+DRAFT -> write lookup+draft:DRAFT, parallel:DRAFT or lookup+parallel:DRAFT
probe --t-target, probe --t-draft -> write --times 25ms,3ms
probe --t-verify -> write --times 25ms,3ms,28ms
probe --engine-costs -> write --times FILE
probe --device-memory, probe --concurrency, probe --context -> write --server 80GB,64,8k
probe --seed -> prompts and samples are the same in every probe
probe --prompt-column, readback --prompt-column -> name the column `prompt`
probe --messages-column, readback --messages-column -> name the column `messages`
way: lookup -> write prompt-lookup
way: jacobi -> write lookahead
way: retrieval -> write past-responses
way: cascade -> write lookup+draft
way: token tree -> write token-tree
way: early exit -> write early-exit
way: adaptive draft, way: adaptive lookup + draft -> `understudy generate --gamma auto` chooses gamma while it decodes
judge.dial_every -> write judge.replay_every
target.others -> train one draft for each target
readback --parameters -> send the parameters that you use to the engine with and without the draft, and compare the texts
student.head_tokens -> for a large vocabulary use init: config with a smaller hidden_size and embeddings: target
target.endpoint.url -> write target.endpoint.urls: [ADDRESS]; if only the server has the weights, add weights: server
target.endpoint.retries -> a request is repeated five times, and a server that still fails leaves its share to the others
target.endpoint.api -> serve the target yourself with vLLM, and give the address of its /v1/completions
signal.source: response_logprobs -> serve the target yourself with vLLM, and use signal.source: store
signal.kind, signal.samples -> the store keeps the target's top-k probabilities (signal.k)
data.synthetic -> collect more prompts of your users, e.g. with `understudy gateway`; generated ones did not help (docs/studies.md)
data.mix.text, data.text -> general text is not the target's own; add prompts of the domains that the draft serves
optim.ema -> leave it out; averaged weights were no better in the study
tracking.project -> set WANDB_PROJECT
tracking.trackers: mlflow, tracking.trackers: trackio -> use wandb or tensorboard; metrics.jsonl has every number
check-export -> use `understudy export RUN --check FOLDER`
export --dry-run -> look at the folder that `understudy export --to` writes, then run it with --push
export --engine -> `understudy serve` converts what is missing
export --weights -> give them to `understudy serve --engine llama.cpp -- --weights q8_0 --draft-weights q4_k_m`
serve --log -> the log is ENGINE.log beside the export
time --out -> the file is engine_costs.json in the run
time --repeats -> each load and gamma is timed five times
drift --prompts -> send them to the engine with `understudy readback --target T --prompts FILE`
drift --prompt-column, drift --messages-column -> send prompts to the engine with `understudy readback --target T --prompts FILE`
drift --chat -> send prompts to the engine with `understudy readback --target T --prompts FILE --chat`
drift --format -> --log reads JSON lines; for an engine's own log use --metrics-url
drift --drafting -> the baseline drafts as the run's verdict says
drift --confidence -> the interval has 95 %
readback --top-p, readback --top-k -> give --run RUN, whose sampling settings are used
readback --dtype -> the target is loaded as it is saved
readback --device -> the target is loaded on the GPU if there is one
readback --drafting -> the way of drafting is the verdict's
readback --model -> serve one model at that address
readback --timeout -> a request may take 600 seconds
readback --seed -> the seed is the run's
readback --json, readback --out -> the result is readback.json in the run, or in --to
loss.name: accepted_length -> leave loss.name out; it gained less than jsd (docs/studies.md)
loss.warmup.name: accepted_length -> set another, e.g. forward_kl
judge.typical -> use judge.lenience: [2.0], whose distance from the target is measured too
judge.temperatures -> use `understudy probe --temperatures`
optim.betas -> AdamW's moments decay by 0.9 and 0.95
optim.embedding_weight_decay -> optim.weight_decay holds for all matrices
optim.final_lr_ratio -> the learning rate falls to a tenth of optim.lr
optim.spike_factor -> an update is skipped if its gradient norm is ten times the recent median
resume -> a run's folder is continued; give another name to start again
student.layers: auto -> list the layers to keep, e.g. [0, -1]
student.depth -> list the layers to keep in student.layers
student.extend_context -> set data.context_length to the draft's own limit, or start from another draft
student.parallel.mask_token -> a token that no text uses is chosen
student.parallel.retain -> it is 0.7
loss.weighting -> all response tokens weigh the same; no study found a gain
loss.beta -> jsd weighs target and draft alike
data.rollouts.max_tokens -> set serving.max_tokens
data.rollouts.temperature -> the draft's responses are sampled at temperature 1
data.rollouts.gamma -> rollouts draft 4 tokens per block
data.rollouts.rejected_weight -> rejected positions count twice
judge.scorer -> use `understudy evaluate --scorer`
judge.allow_lossy -> the verdict never says to run a LOSSY way; its row has the speed
train.pause_at -> Ctrl-C saves a checkpoint and the same command continues; for a trial set train.steps
train.log_every -> trackers get every tenth step, metrics.jsonl has every step
train.keep_states -> the last two checkpoints keep the optimizer state
train.profile_steps -> run torch's profiler around `python -m distill.train`
gateway --share -> `understudy rollout` gives a second engine its share, or write it into arms.json
gateway --reservoir -> 10,000 responses per slice keep their text
gateway --trust-clock -> delete the file `swept` in the log directory
gateway --exclude-tenant -> send `x-understudy-no-log: 1` with these requests
gateway --max-body -> bodies may have 64 MB
gateway --max-connections -> 2,048 clients are served at once; set `ulimit -n` for fewer
gateway --idle-seconds -> an exchange ends after 600 seconds without a byte
traffic --bins -> `understudy traffic show` prints 24 intervals
traffic --draft-version -> the alarm watches the version that served last
traffic --alike -> at most 8 near-equal prompts, and prompts of one conversation, are exported
traffic --quota -> the log keeps the text of at most 10,000 responses per slice
traffic --assume-sampling, refresh --assume-sampling -> give the engine's defaults to `understudy gateway --sampling`
refresh --probe-steps -> the probe takes 30 steps
refresh --false-alarms -> the probability of a false alarm is at most 1 % in 1,000 requests
refresh --drop -> a measured fall below 0.03 does not ring
refresh --burn-in -> a baseline begins with 150 requests
refresh --keep -> the newest 5 versions, the current one and its parent stay
rollout --port -> the engine gets a free port; start it yourself and give --engine-url for another one
rollout --false-alarms -> the probability that an equally good version is called worse is at most 5 %
rollout --start-timeout -> the engine has 900 seconds; start a slower one yourself and give --engine-url
rollout --drain -> the last requests of an engine have 30 seconds
"""
RETIRED = {
    name: instead
    for names, instead in (line.split(" -> ") for line in _TABLE.strip().splitlines())
    for name in names.split(", ")
}


def retired(*names: str) -> str | None:
    """What to use instead of the first of these names that was retired; None if none was."""
    return next((f"`{name}` is retired; {RETIRED[name]}" for name in names if name in RETIRED), None)
