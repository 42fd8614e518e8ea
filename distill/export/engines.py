"""What each serving engine asks of an independent draft, and the command that starts it. Pure: facts in, verdicts out.

Rules at temperature > 0 (at temperature 0 every engine is `greedy`): `sample` = the draft samples and a token is accepted
with min(1, target/draft); `greedy-draft` = the draft proposes its argmax and the target samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distill.export import commands
from distill.export.commands import Start
from distill.export.facts import EngineFacts
from speculative.errors import UserError

# vLLM takes the speculation method from these words anywhere in the draft's path, whatever the configuration says.
REROUTED_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
# A shell's word takes them; the JSON and YAML around the path in the commands do not.
UNQUOTABLE = ('"', "\\", "\n")
LLAMA_CPP_ROW_SLACK = 128


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine takes the pair; `reasons` is empty when it does. `command` is shell text or Python code."""

    engine: str
    version: str  # that this was read in
    ok: bool
    reasons: list[str]
    rule: str  # how it accepts, started so, at the run's temperature (at temperature > 0 where that is not known)
    rule_note: str
    command: str  # of $DRAFT and $TARGET
    language: str  # "bash" or "python"
    notes: list[str]


@dataclass(frozen=True)
class Engine:
    """What an engine checks, and how it is started; `version`: what that was read in."""

    name: str
    version: str
    start: Callable[[EngineFacts], Start]
    row_slack: int = 0
    equal_strings: bool = False  # the engine, not only we, compares token strings
    language: str = "bash"
    one_pass: bool = False  # it serves drafts that propose a block in one forward


def check(engine: str, facts: EngineFacts) -> EngineVerdict:
    """Judge one engine of `ENGINES`; the command is given even when the verdict is no, since the reasons say what to mend."""
    assert facts.gamma >= 1
    asked = ENGINES[engine]
    if facts.one_pass is not None:
        if asked.one_pass:
            facts = replace(facts, gamma=facts.one_pass.gamma, taus=facts.one_pass.taus)
        else:
            facts = replace(facts, one_pass=None, gamma_by_load=())
    reasons = _vocabulary_reasons(asked, facts) + (_vllm_reasons(facts) if engine == "vLLM" else [])
    start = asked.start(facts)
    rule = "greedy" if facts.sampling is not None and facts.sampling.greedy else start.rule
    return EngineVerdict(
        engine=engine,
        version=asked.version,
        ok=not reasons,
        reasons=reasons,
        rule=rule,
        rule_note=_rule_note(rule, facts),
        command=start.command,
        language=asked.language,
        notes=start.notes,
    )


def check_all(facts: EngineFacts) -> list[EngineVerdict]:
    """`check` for every engine, in the order of `ENGINES`."""
    return [check(engine, facts) for engine in ENGINES]


def rerouted_word(path: str | Path) -> str | None:
    """The word in `path` that makes vLLM choose another speculation method, if any."""
    lowered = str(path).lower()
    return next((word for word in REROUTED_WORDS if word in lowered), None)


def check_directory_name(path: str | Path) -> None:
    """Refuse an export path that vLLM would not load as an independent draft, or that no command can hold.

    Raises:
        UserError: naming the path and what is in it.

    """
    word = rerouted_word(path)
    if word is not None:
        raise UserError(
            f"export directory {path}: vLLM takes a path with {word!r} in it for another speculation method; "
            "choose a path without it"
        )
    unquotable = next((letter for letter in UNQUOTABLE if letter in str(path)), None)
    if unquotable is not None:
        raise UserError(f"export directory {path}: engines' JSON cannot hold {unquotable!r}; choose a path without it")


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
        if not facts.added_ends_equal:
            reasons.append("the bos or eos that is put around a text differs; use the target's tokenizer")
        if not facts.tokenizer_kind_equal:
            reasons.append("the tokenizers are of different kinds; use the target's tokenizer")
    return reasons


def _vllm_reasons(facts: EngineFacts) -> list[str]:
    reasons = []
    word = rerouted_word(facts.draft)
    if word is not None:
        reasons.append(f"the path holds {word!r}, which vLLM takes for another method; rename the directory")
    if facts.rerouted_type is not None:
        reasons.append(
            f"the draft's model_type is {facts.rerouted_type!r}, which vLLM loads as prediction heads of the target whatever `method` "
            "says; choose a student of another architecture"
        )
    if facts.sampled and facts.sampling is not None and facts.sampling.min_p:
        reasons.append(
            f"it refuses requests with min_p beside speculation, and this run serves at min_p {facts.sampling.min_p}"
        )
    return reasons


def _rule_note(rule: str, facts: EngineFacts) -> str:
    when = "temperature 0" if rule == "greedy" else "temperature > 0"
    tau = facts.taus.get(rule)
    if tau is not None:
        return f"accepts by rule {rule} at {when}: replay predicts tau {tau:.2f} at gamma {facts.gamma}"
    if facts.measured_rule is None:
        return f"accepts by rule {rule} at {when}; nothing was measured for this draft"
    if facts.measured_rule == rule:
        return f"accepts by rule {rule} at {when}, the verdict's own"
    return (
        f"accepts by rule {rule} at {when}, and the verdict was measured under {facts.measured_rule}: measure it with "
        f"`understudy evaluate ... --rule {rule}`"
    )


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vLLM", "0.32", commands.vllm, one_pass=True),
        Engine("SGLang", "0.5", commands.sglang, equal_strings=True),
        Engine("llama.cpp", "v0.5.0", commands.llama_cpp, LLAMA_CPP_ROW_SLACK, equal_strings=True),
        Engine("transformers", "5", commands.transformers, language="python"),
        Engine("TensorRT-LLM", "1.3", commands.tensorrt_llm, one_pass=True),
    )
}
