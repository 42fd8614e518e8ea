"""What each serving engine asks of an independent draft, and the command that starts it. Pure: facts in, verdicts out.

G = gamma, drafted tokens per block. Rules at temperature > 0 (at temperature 0 every engine is `greedy`):
`sample` = the draft samples and a token is accepted with min(1, target/draft); `greedy-draft` = the draft proposes its
argmax and the target samples.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.export.load_table import LoadRange
from distill.models.vocabulary import TokenDifference, first_string_difference, tokens_by_id, vocabulary_rows
from speculative.errors import UserError
from speculative.measure.load import MOST_LOAD

# vLLM takes the speculation method from these words anywhere in the draft's path, whatever the configuration says.
REROUTED_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
LLAMA_CPP_ROW_SLACK = 128
LLAMA_CPP_FIRST_COMPARED_ID = 5


@dataclass(frozen=True)
class EngineFacts:
    """Everything the engines' rules look at, about one target and one exported draft."""

    target: str  # hub id or directory, as the server is given it
    draft: str  # absolute path of the exported directory
    gamma: int
    target_rows: int
    draft_rows: int
    first_difference: TokenDifference | None  # over all ids: `get_vocab()` of the two tokenizers
    first_difference_from_5: TokenDifference | None
    added_tokens_equal: bool
    bos_eos_equal: bool
    tokenizer_kind_equal: bool
    target_quantised: bool
    measured_rule: str | None = None  # the rule of the run's verdict, None when not measured
    gamma_by_load: tuple[LoadRange, ...] = ()  # empty: not measured under load


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine takes the pair; `reasons` is empty when it does. `command` is shell text or Python code."""

    engine: str
    ok: bool
    reasons: list[str]
    rule_at_temperature: str
    rule_note: str
    command: str
    language: str  # "bash" or "python"
    notes: list[str]
    files: dict[str, str] = field(default_factory=dict)  # extra files the command reads: name -> text


Start = tuple[str, list[str], dict[str, str]]  # command, notes, files that it reads


@dataclass(frozen=True)
class Engine:
    """What an engine checks, how it accepts, how it is started."""

    name: str
    rule_at_temperature: str
    start: Callable[[EngineFacts], Start]
    row_slack: int = 0
    equal_strings: bool = False  # the engine, not only we, compares token strings
    language: str = "bash"


def gather_facts(
    *,
    target: str,
    draft: str,
    gamma: int,
    target_config: Any,
    target_tokenizer: Any,
    draft_config: Any,
    draft_tokenizer: Any,
    measured_rule: str | None = None,
    gamma_by_load: Sequence[LoadRange] = (),
) -> EngineFacts:
    """The facts of a pair from its loaded configs and tokenizers."""
    target_tokens, draft_tokens = tokens_by_id(target_tokenizer), tokens_by_id(draft_tokenizer)
    return EngineFacts(
        target=target,
        draft=draft,
        gamma=gamma,
        target_rows=vocabulary_rows(target_config),
        draft_rows=vocabulary_rows(draft_config),
        first_difference=first_string_difference(target_tokens, draft_tokens),
        first_difference_from_5=first_string_difference(target_tokens, draft_tokens, LLAMA_CPP_FIRST_COMPARED_ID),
        added_tokens_equal=target_tokenizer.get_added_vocab() == draft_tokenizer.get_added_vocab(),
        bos_eos_equal=(
            target_tokenizer.bos_token_id == draft_tokenizer.bos_token_id
            and target_tokenizer.eos_token_id == draft_tokenizer.eos_token_id
        ),
        tokenizer_kind_equal=type(target_tokenizer) is type(draft_tokenizer),
        target_quantised=getattr(target_config, "quantization_config", None) is not None,
        measured_rule=measured_rule,
        gamma_by_load=tuple(gamma_by_load),
    )


def check(engine: str, facts: EngineFacts) -> EngineVerdict:
    """Judge one engine; the command is given even when the verdict is no, since the reasons say what to mend.

    Raises:
        UserError: for an engine that is not in `ENGINES`.

    """
    if engine not in ENGINES:
        raise UserError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    assert facts.gamma >= 1
    asked = ENGINES[engine]
    reasons = _vocabulary_reasons(asked, facts)
    if engine == "vLLM":
        word = rerouted_word(facts.draft)
        if word is not None:
            reasons.append(f"the path holds {word!r}, which vLLM takes for another method; rename the directory")
    command, notes, files = asked.start(facts)
    return EngineVerdict(
        engine=engine,
        ok=not reasons,
        reasons=reasons,
        rule_at_temperature=asked.rule_at_temperature,
        rule_note=_rule_note(asked.rule_at_temperature, facts),
        command=command,
        language=asked.language,
        notes=notes,
        files=files,
    )


def check_all(facts: EngineFacts) -> list[EngineVerdict]:
    """`check` for every engine, in the order of `ENGINES`."""
    return [check(engine, facts) for engine in ENGINES]


def rerouted_word(path: str | Path) -> str | None:
    """The word in `path` that makes vLLM choose another speculation method, if any."""
    lowered = str(path).lower()
    return next((word for word in REROUTED_WORDS if word in lowered), None)


def check_directory_name(path: str | Path) -> None:
    """Refuse an export path that vLLM would not load as an independent draft.

    Raises:
        UserError: naming the path and the word in it.

    """
    word = rerouted_word(path)
    if word is not None:
        raise UserError(
            f"export directory {path}: vLLM takes a path with {word!r} in it for another speculation method; "
            "choose a path without it"
        )


def _vocabulary_reasons(rule: Engine, facts: EngineFacts) -> list[str]:
    reasons = []
    if abs(facts.target_rows - facts.draft_rows) > rule.row_slack:
        allowed = "the same number" if rule.row_slack == 0 else f"a difference of at most {rule.row_slack}"
        reasons.append(f"{facts.draft_rows} draft rows and {facts.target_rows} target rows; it wants {allowed}")
    difference = facts.first_difference_from_5 if rule.name == "llama.cpp" else facts.first_difference
    if difference is not None:
        token_id, target_string, draft_string = difference
        who = "it compares token strings" if rule.equal_strings else "it does not compare token strings, we do"
        reasons.append(f"id {token_id} is {target_string!r} in the target and {draft_string!r} in the draft; {who}")
    if rule.name == "SGLang" and not facts.added_tokens_equal:
        reasons.append("the added tokens differ; use the target's tokenizer")
    if rule.name == "llama.cpp":
        if not facts.bos_eos_equal:
            reasons.append("bos or eos differ; use the target's tokenizer")
        if not facts.tokenizer_kind_equal:
            reasons.append("the tokenizers are of different kinds; use the target's tokenizer")
    return reasons


def _rule_note(engine_rule: str, facts: EngineFacts) -> str:
    start = f"at temperature > 0 this engine accepts by rule {engine_rule}, at temperature 0 by rule greedy"
    if facts.measured_rule is None:
        return f"{start}; nothing was measured for this draft"
    if facts.measured_rule in (engine_rule, "greedy"):
        when = "temperature 0" if facts.measured_rule == "greedy" else "temperature > 0"
        return (
            f"{start}; the verdict was measured with rule {facts.measured_rule} and is the number to expect at {when}"
        )
    return (
        f"{start}; the verdict was measured with rule {facts.measured_rule}, so its number is not the one to expect "
        f"here: measure it with `understudy evaluate ... --rule {engine_rule}`"
    )


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _vllm(facts: EngineFacts) -> Start:
    speculative = {"method": "draft_model", "model": facts.draft, "num_speculative_tokens": facts.gamma}
    sampled = _compact_json({**speculative, "draft_sample_method": "probabilistic"})
    notes = [
        "Leave draft_tensor_parallel_size out: it must equal the target's, which is the default.",
        f"To draft by sampling (rule sample) use: --speculative-config {shlex.quote(sampled)}",
        "vLLM compares config.vocab_size only; the token strings were compared here.",
    ]
    most = max((gamma for _, _, gamma in facts.gamma_by_load), default=0)
    if most:
        table = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": facts.gamma_by_load}
        by_load = _compact_json({**speculative, **table})
        notes.append(
            f"It takes gamma per batch size, key num_speculative_tokens_per_batch_size (recent versions, not with data parallelism; "
            f"vLLM tests it with EAGLE heads): --speculative-config {shlex.quote(by_load)}"
        )
    return shlex.join(["vllm", "serve", facts.target, "--speculative-config", _compact_json(speculative)]), notes, {}


def _sglang(facts: EngineFacts) -> Start:
    words = ["python", "-m", "sglang.launch_server", "--model-path", facts.target]
    words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", facts.draft]
    words += ["--speculative-num-steps", str(facts.gamma), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(facts.gamma + 1)]
    if facts.target_quantised:
        words += ["--speculative-draft-model-quantization", "unquant"]
    notes = []
    if facts.gamma_by_load:
        notes.append(
            "It takes no gamma per batch size for an independent draft: --speculative-adaptive is for EAGLE and goes by acceptance. "
            f"{_most_requests(facts)} (--max-running-requests)."
        )
    return shlex.join(words), notes, {}


def _llama_cpp(facts: EngineFacts) -> Start:
    # Both beside the exported directory, and named after it, so that neither can overwrite the other or the target.
    target_gguf, draft_gguf = f"{facts.draft}-target.gguf", f"{facts.draft}.gguf"
    serve = ["llama-server", "-m", target_gguf, "-md", draft_gguf]
    serve += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(facts.gamma)]
    lines = [
        ["python", "convert_hf_to_gguf.py", facts.target, "--outfile", target_gguf],
        ["python", "convert_hf_to_gguf.py", facts.draft, "--outfile", draft_gguf],
        serve,
    ]
    notes = [
        "Older builds: --draft-max instead of --spec-type draft-simple --spec-draft-n-max.",
        "convert_hf_to_gguf.py (in llama.cpp's repository) wants a local directory; for a hub id add --remote.",
        "A confidence gate may end blocks early; --spec-draft-p-min 0 switches it off, as in our measurement.",
    ]
    if facts.gamma_by_load:
        notes.append(f"It takes no gamma per batch size. {_most_requests(facts)} (--parallel).")
    return "\n".join(shlex.join(words) for words in lines), notes, {}


def _transformers(facts: EngineFacts) -> Start:
    code = f"""from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({facts.target!r})
target = AutoModelForCausalLM.from_pretrained({facts.target!r}, dtype="auto")
draft = AutoModelForCausalLM.from_pretrained({facts.draft!r}, dtype="auto")
draft.generation_config.num_assistant_tokens = {facts.gamma}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
inputs = tokenizer("Hello", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))"""
    notes = [
        "Batch size 1 only.",
        "A pad id inside the text (bos is often the pad id) is hidden from the draft and lowers acceptance; "
        "pass pad_token_id=tokenizer.eos_token_id to generate() then.",
        (
            "These settings are read from the draft's generation config, not from generate()'s arguments; the exported "
            "directory already holds them."
        ),
    ]
    return code, notes, {}


def _tensorrt_llm(facts: EngineFacts) -> Start:
    most = _last_load_that_pays(facts)
    # JSON strings are YAML strings, so a path with any character in it stays one value.
    text = (
        "speculative_config:\n  decoding_type: Draft_Target\n"
        f"  max_draft_len: {facts.gamma}\n  speculative_model: {json.dumps(facts.draft)}\n"
        + (f"  max_concurrency: {most}\n" if most else "")
        + "disable_overlap_scheduler: true\n"
    )
    name = "tensorrt_llm.yaml"
    notes = [
        "Older versions: --extra_llm_api_options instead of --config.",
        (
            "It samples from the target and keeps drafted tokens that match; rejection sampling is off unless enabled "
            "(use_rejection_sampling in speculative_config)."
        ),
        "No vocabulary check was found in it; rows and token strings were compared here.",
    ]
    if facts.gamma_by_load:
        notes.append(
            "max_concurrency switches speculation off above so many requests. Gamma per batch size is draft_len_schedule, whose keys have "
            "meant `from` and `up to` in different versions: look it up in yours."
        )
    command = shlex.join(["trtllm-serve", facts.target, "--config", str(Path(facts.draft) / name)])
    return command, notes, {name: text}


def _last_load_that_pays(facts: EngineFacts) -> int | None:
    """The most concurrent requests at which drafting pays; None where it pays at all or at none, or was not measured."""
    paying = [last for _, last, gamma in facts.gamma_by_load if gamma]
    return paying[-1] if paying and paying[-1] < MOST_LOAD else None


def _most_requests(facts: EngineFacts) -> str:
    """What to do where gamma cannot follow the load."""
    most = _last_load_that_pays(facts)
    if most is not None:
        return f"Drafting pays up to {most} concurrent requests: cap a server with the draft there"
    pays = any(gamma for _, _, gamma in facts.gamma_by_load)
    return (
        "Drafting pays at every load: no cap is needed" if pays else "Drafting pays at no load: serve the target alone"
    )


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vLLM", "greedy-draft", _vllm),
        Engine("SGLang", "sample", _sglang, equal_strings=True),
        Engine("llama.cpp", "greedy-draft", _llama_cpp, LLAMA_CPP_ROW_SLACK, equal_strings=True),
        Engine("transformers", "sample", _transformers, language="python"),
        Engine("TensorRT-LLM", "greedy-draft", _tensorrt_llm),
    )
}
