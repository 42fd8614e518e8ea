"""What a serving engine asks of an independent draft, and the command that starts it. Pure: facts in, verdicts out.

An engine is a file in distill/export/engines that registers itself and a template in distill/export/templates with two macros:
`command`, which speaks of `$DRAFT` and `$TARGET` so that it survives a move, and `notes`, a line each.

Rules at temperature > 0 (at temperature 0 every engine is `greedy`): `sample` = the draft samples and a token is accepted
with min(1, target/draft); `greedy-draft` = the draft proposes its argmax and the target samples.
"""

import importlib
import json
import pkgutil
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from distill.export import engines
from distill.export.facts import EngineFacts
from speculative.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
# vLLM takes the speculation method from these words anywhere in the draft's path, whatever the configuration says.
REROUTED_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
# A shell's word takes them; the JSON and YAML around the path in the commands do not.
UNQUOTABLE = ('"', "\\", "\n")


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


def _nothing(facts: EngineFacts) -> list[str]:
    return []


@dataclass(frozen=True)
class Engine:
    """An engine: its template, what it refuses, how it accepts. `version`: what that was read in."""

    name: str
    version: str
    template: str
    order: int
    rule: Callable[[EngineFacts], str]
    refusals: Callable[[EngineFacts], list[str]] = field(default=_nothing)
    row_slack: int = 0  # by how much the rows of the two embeddings may differ
    first_compared_id: int = 0  # token strings before it may differ
    equal_strings: bool = False  # the engine, not only we, compares token strings
    language: str = "bash"
    one_pass: bool = False  # it serves drafts that propose a block in one forward


_REGISTERED: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    """Makes an engine known."""
    _REGISTERED[engine.name] = engine


@cache
def known_engines() -> dict[str, Engine]:
    """Every engine by name, in the order of SERVING.md."""
    for module in pkgutil.iter_modules(engines.__path__):
        importlib.import_module(f"{engines.__name__}.{module.name}")
    return {one.name: one for one in sorted(_REGISTERED.values(), key=lambda one: one.order)}


def check(name: str, facts: EngineFacts) -> EngineVerdict:
    """Judge one engine; the command is given even when the verdict is no, since the reasons say what to mend."""
    assert facts.gamma >= 1
    engine = known_engines()[name]
    if facts.one_pass is not None:
        if engine.one_pass:
            facts = replace(facts, gamma=facts.one_pass.gamma, taus=facts.one_pass.taus)
        else:
            facts = replace(facts, one_pass=None, gamma_by_load=())
    reasons = [*_vocabulary_reasons(engine, facts), *engine.refusals(facts)]
    rule = "greedy" if facts.sampling is not None and facts.sampling.greedy else engine.rule(facts)
    page: Any = environment().get_template(engine.template).make_module({"facts": facts})
    return EngineVerdict(
        engine=engine.name,
        version=engine.version,
        ok=not reasons,
        reasons=reasons,
        rule=rule,
        rule_note=_rule_note(rule, facts),
        command=str(page.command()).strip(),
        language=engine.language,
        notes=lines_of(str(page.notes())),
    )


def check_all(facts: EngineFacts) -> list[EngineVerdict]:
    """`check` for every engine."""
    return [check(name, facts) for name in known_engines()]


def others(facts: EngineFacts) -> list[str]:
    """A line for each engine that is told of and not judged."""
    return lines_of(environment().get_template("others.j2").render(facts=facts))


def places(draft: str, target: str) -> str:
    """The line that tells a shell where the pair is; `draft` and `target` are shell words."""
    return f"export DRAFT={draft} TARGET={target}"


def with_places(command: str, language: str, draft: str, target: str) -> str:
    """A command that needs nothing before it."""
    if language == "python":
        return command.replace('os.environ["DRAFT"]', repr(draft)).replace('os.environ["TARGET"]', repr(target))
    return f"{places(shlex.quote(draft), shlex.quote(target))}\n{command}"


@cache
def environment() -> jinja2.Environment:
    """Templates of commands and of Markdown pages: nothing is escaped, numbers and quoted words go in."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["json"] = lambda value: json.dumps(value, separators=(",", ":"))
    return made


def lines_of(text: str) -> list[str]:
    """The entries of a list in a template: each begins with a dash at the start of a line and may go on in the next."""
    return [" ".join(entry.split()) for entry in f"\n{text}".split("\n- ")[1:]]


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


def _vocabulary_reasons(engine: Engine, facts: EngineFacts) -> list[str]:
    reasons = []
    if abs(facts.target_rows - facts.draft_rows) > engine.row_slack:
        allowed = f"a difference of at most {engine.row_slack}" if engine.row_slack else "the same number"
        reasons.append(f"{facts.draft_rows} draft rows and {facts.target_rows} target rows; it wants {allowed}")
    difference = facts.first_difference_from_5 if engine.first_compared_id else facts.first_difference
    if difference is not None:
        token_id, target_string, draft_string = difference
        who = "it compares token strings" if engine.equal_strings else "it does not compare token strings, we do"
        reasons.append(f"id {token_id} is {target_string!r} in the target and {draft_string!r} in the draft; {who}")
    return reasons


def _rule_note(rule: str, facts: EngineFacts) -> str:
    accepts = f"accepts by rule {rule} at temperature {'0' if rule == 'greedy' else '> 0'}"
    if rule in facts.taus:
        return f"{accepts}: {facts.predicted(rule)} at gamma {facts.gamma}"
    if facts.measured_rule is None:
        return f"{accepts}; nothing was measured for this draft"
    if facts.measured_rule == rule:
        return f"{accepts}, the verdict's own"
    return (
        f"{accepts}, and the verdict was measured under {facts.measured_rule}: measure it with "
        f"`understudy evaluate ... --rule {rule}`"
    )
