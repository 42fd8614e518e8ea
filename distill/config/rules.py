"""Which values of a run's keys cannot go together: one row a rule, what is refused and the words that say why.

The words are formatted with the config: `{0.judge.gamma}`. Rows are read from the top; the first that holds is told.
"""

import re
from collections.abc import Callable
from typing import Any

Config = Any  # a RunConfig, which imports this table
Rule = tuple[Callable[[Config], object], str]


def _own_words(config: Config) -> bool:
    """Whether the draft learns from texts that it has a part in."""
    return config.data.mix.student > 0 or config.data.mix.speculative > 0


def _only_ce(config: Config) -> bool:
    """Whether no objective asks the target."""
    return config.objective_names() == {"ce"}


def _endpoint(config: Config, api: str | None = None) -> bool:
    """Whether the target is behind a server, of this API where one is given."""
    asked = config.target.endpoint
    return asked is not None and api in (None, asked.api)


def _unserved_signal(config: Config, source: str) -> bool:
    """Whether the objective wants of a server what it cannot give but by one source."""
    signal = config.signal
    given = signal.source == source and signal.kind == "topk" and config.loss.temperature == 1
    return not _only_ce(config) and not given


def _lengths(config: Config) -> bool:
    """Whether an objective is of blocks along the target's own text."""
    return "accepted_length" in config.objective_names()


def _selected(config: Config) -> bool:
    return config.loss.weighting.name == "selected"


# fmt: off
GENERAL: tuple[Rule, ...] = (
    (lambda c: not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.name),
     "name: letters, digits, '.', '_' and '-' only, it becomes a folder"),
    (lambda c: not c.data.train,
     "data.train: at least one source"),
    (lambda c: (c.student.init == "pretrained") != (c.student.path is not None),
     "student.path goes with student.init: pretrained, and only with it"),
    (lambda c: (c.student.init == "config") != (c.student.architecture is not None),
     "student.architecture goes with student.init: config, and only with it"),
    (lambda c: c.train.packing is None and c.train.batch_size % (c.train.micro_batch_size or 1),
     "train.batch_size must be a multiple of train.micro_batch_size"),
    (lambda c: _selected(c) and c.train.micro_batch_size is None,
     "loss.weighting.name: selected chooses within a micro-batch: set train.micro_batch_size"),
    (lambda c: c.loss.mix is not None and (not c.loss.mix or min(c.loss.mix.values()) <= 0),
     "loss.mix: weights above zero, at least one"),
    (lambda c: (c.judge_rule == "greedy") != (c.serving.temperature == 0),
     "judge.rule: greedy goes with serving.temperature: 0, and only with it"),
    (lambda c: len(set(c.judge.load)) < len(c.judge.load),
     "judge.load: each number of concurrent requests once"),
    (lambda c: c.judge.load and c.judge.live == "never",
     "judge.load is timed by decoding: it goes with judge.live: checkpoint or end"),
    (lambda c: c.serving.batch_size > c.serving.shard_size,
     "serving.batch_size above serving.shard_size: a shard is decoded by itself; raise shard_size too"),
    (lambda c: c.serving.temperature == 0 and c.serving.samples_per_prompt > 1,
     "serving.samples_per_prompt above 1 at serving.temperature 0 repeats one greedy response"),
)

# A draft that proposes whole blocks.
PARALLEL: tuple[Rule, ...] = (
    (lambda c: c.student.parallel and c.judge.gamma > c.student.parallel.tokens,
     "judge.gamma = {0.judge.gamma} above student.parallel.tokens = {0.student.parallel.tokens}: offsets behind that are not learnt"),
    (lambda c: c.student.parallel and c.train.packing is not None,
     "student.parallel masks attention block by block: set train.packing to null"),
    (lambda c: c.student.parallel and _selected(c),
     "loss.weighting.name: selected picks among response tokens, of which student.parallel asks several times"),
    (lambda c: c.student.parallel and _own_words(c),
     "data.mix.student and .speculative are drafted token by token, which is not how student.parallel is served; set them to 0"),
)

# The teacher's word, and the texts that it is of.
SIGNAL: tuple[Rule, ...] = (
    (lambda c: not (c.data.mix.target or _own_words(c) or c.data.mix.text),
     "data.mix: at least one share above zero"),
    (lambda c: c.data.mix.student and _only_ce(c),
     "data.mix.student: loss ce alone would teach the draft its own words; use a divergence"),
    (lambda c: (c.data.mix.text > 0) != bool(c.data.text),
     "data.mix.text goes with data.text, and only with it"),
    (lambda c: c.target.others and (c.signal.source != "store" or not c.data.mix.target or _only_ce(c)),
     "target.others is learnt from what was stored of each target: set signal.source: store, data.mix.target above 0 and a "
     "loss that asks the target; first `understudy respond CONFIG --signal topk`, for each target"),
    (lambda c: (_own_words(c) or c.data.mix.text) and c.signal.source != "online",
     "signal.source: {0.signal.source} knows the target's responses only; data.mix with anything else needs online"),
    (lambda c: c.signal.source != "online" and c.signal.kind == "sampled" and c.biased_by_samples,
     "signal.kind: sampled is unbiased for forward_kl and ce only, not for {0.biased_by_samples}; "
     "set loss.name: forward_kl, or signal.kind: topk"),
)

ENDPOINT: tuple[Rule, ...] = (
    (lambda c: _endpoint(c) and c.judge.live != "never",
     "target.endpoint: the weights are elsewhere, so nothing is decoded live; set judge.live: never"),
    (lambda c: _endpoint(c) and c.student.init == "carved",
     "target.endpoint: nothing can be carved from a server; set student.init: pretrained or config"),
    (lambda c: _endpoint(c) and c.data.responses == "reference",
     "target.endpoint: data.responses: reference needs the target's weights"),
    (lambda c: _endpoint(c, "chat") and _unserved_signal(c,
     "response_logprobs"),
     "target.endpoint gives signal.source: response_logprobs with signal.kind: topk at loss.temperature: 1"),
    (lambda c: _endpoint(c) and not _endpoint(c, "chat") and _unserved_signal(c,
     "store"),
     "target.endpoint gives signal.source: store with signal.kind: topk at loss.temperature: 1"),
    (lambda c: _endpoint(c, "chat") and c.data.synthetic and c.data.synthetic.method == "magpie",
     "data.synthetic.method: magpie: a chat API writes no user's turns; set it to mix"),
    (lambda c: _endpoint(c, "chat") and c.data.template.mode == "plain",
     "target.endpoint.api: chat applies the chat template; data.template.mode cannot be plain"),
    (lambda c: not _endpoint(c) and c.signal.source == "response_logprobs",
     "signal.source: response_logprobs goes with target.endpoint.api: chat, and only with it"),
)

SHARED: tuple[Rule, ...] = (
    (lambda c: c.target.shard and c.target.device_map,
     "target.device_map spreads the target over the GPUs of one process, target.shard over processes: one of the two"),
    (lambda c: c.target.shard and c.judge.live == "checkpoint",
     "target.shard: no rank has the whole target while the draft learns; set judge.live: end or never"),
    (lambda c: c.target.shard and (_own_words(c) or c.signal.source == "capture"),
     "target.shard: rollouts and capture ask the target on one rank at a time, which a sharded one cannot answer"),
)

LOSS: tuple[Rule, ...] = (
    (lambda c: _selected(c) != (c.loss.weighting.reference is not None),
     "loss.weighting.reference goes with loss.weighting.name: selected, and only with it"),
    (lambda c: c.data.synthetic and c.data.responses == "reference",
     "data.synthetic: nobody has answered these prompts; set data.responses: target"),
    (lambda c: c.loss.prompt_weight and _selected(c),
     "loss.prompt_weight: loss.weighting.name: selected chooses among response tokens; set it to 0"),
    (lambda c: c.loss.prompt_weight and _endpoint(c),
     "loss.prompt_weight: a server's signal is of response tokens only; set it to 0"),
    (lambda c: c.loss.weighting.name in ("entropy", "selected") and _only_ce(c),
     "loss.weighting.name: {0.loss.weighting.name} looks at the target, which loss ce does not use"),
    (lambda c: c.loss.warmup and c.loss.warmup.name == "accepted_length",
     "loss.warmup.name: accepted_length has no gradient on a cold start; set another, e.g. forward_kl"),
    (lambda c: c.loss.mix and "accepted_length" in c.loss.mix,
     "loss.mix: accepted_length weighs rows itself; give it as loss.name, alone"),
    (lambda c: _lengths(c) and (_own_words(c) or c.data.mix.text or c.data.responses == "reference"),
     "loss.name: accepted_length holds on the target's own text; set data.mix to target alone, data.responses: target"),
    (lambda c: _lengths(c) and c.student.parallel,
     "loss.name: accepted_length is of blocks drafted token by token; student.parallel: another objective"),
    (lambda c: _lengths(c) and (c.loss.prompt_weight or c.loss.weighting.name != "none"),
     "loss.name: accepted_length weighs rows itself; set loss.prompt_weight: 0 and loss.weighting.name: none"),
)
# fmt: on

RULES = (*GENERAL, *PARALLEL, *SIGNAL, *ENDPOINT, *SHARED, *LOSS)
