"""Whether each engine supports an independent draft, and the command that starts it. Pure functions from facts to verdicts."""

import json
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from data.hub import hub_id
from distill.engines.protocol.engine import Engine, known_engines
from distill.engines.protocol.facts import EngineFacts
from speculative.errors import UserError
from speculative.rules.rule import Rule

TEMPLATES = Path(__file__).parents[1] / "templates"
# A quoted shell word can hold these characters, but the JSON and YAML around the path in the commands cannot.
UNQUOTABLE = ('"', "\\", "\n")


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine supports the pair. `reasons` is empty if it does. `command` is shell text or Python code."""

    engine: str
    version: str  # the engine version whose source was read
    ok: bool
    reasons: list[str]
    rule: str  # acceptance rule of this command at the run's temperature (temperature > 0 if it is unknown)
    rule_note: str
    command: str  # uses $DRAFT and $TARGET
    language: str  # "bash" or "python"
    notes: list[str]
    warnings: list[str]  # what it serves, but not as measured, or may not start


def check(name: str, facts: EngineFacts) -> EngineVerdict:
    """Judge one engine. A refused pair gets a command too, since the reasons say what to fix first."""
    assert facts.gamma >= 1
    engine = known_engines()[name]
    facts = _facts_of(engine, facts)
    rule = engine.rules[0] if engine.rule is None else engine.rule(facts)
    if facts.sampling is not None:
        rule = Rule.named(rule).at(facts.sampling.temperature).name
    reasons = [*_vocabulary_reasons(engine, facts), *engine.refusals(facts)]
    page = _page(engine, facts)
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
        warnings=engine.warnings(facts),
    )


def server_command(engine: Engine, facts: EngineFacts) -> str:
    """Return the shell text that `understudy serve` starts; it uses $DRAFT, $TARGET and the places of a `Service`."""
    page = _page(engine, _facts_of(engine, facts))
    return str(getattr(page, "server", page.command)()).strip()


def _page(engine: Engine, facts: EngineFacts) -> Any:
    """The macros of an engine's template: the file is named for the module that registers the engine."""
    name = engine.key.replace(".", "_").replace("-", "_")
    return environment(TEMPLATES).get_template(f"{name}.j2").make_module({"facts": facts, **engine.words(facts)})


def _facts_of(engine: Engine, facts: EngineFacts) -> EngineFacts:
    """Return the facts for the way of drafting that the engine has, with its own gammas if it was timed."""
    if facts.timed_in is not None and facts.timed_in.engine == engine.name:
        _, gamma, taus, by_load = facts.timed_in
        one_pass = facts.one_pass and facts.one_pass._replace(gamma=gamma, taus=taus)
        facts = replace(facts, gamma=gamma, taus=taus, gamma_by_load=by_load, one_pass=one_pass)
    if facts.one_pass is None:
        return facts
    if engine.one_pass:
        return replace(facts, gamma=facts.one_pass.gamma, taus=facts.one_pass.taus)
    return replace(facts, one_pass=None, gamma_by_load=())


def check_all(facts: EngineFacts) -> list[EngineVerdict]:
    return [check(name, facts) for name in known_engines()]


def others(facts: EngineFacts) -> list[str]:
    """Return a line for each engine that is listed without a verdict."""
    return lines_of(environment(TEMPLATES).get_template("others.j2").render(facts=facts))


def places(draft: str, target: str) -> str:
    """Return the shell line that sets $DRAFT and $TARGET; `draft` and `target` are shell words."""
    return f"export DRAFT={draft} TARGET={target}"


def place_of(target: str, revision: str | None) -> str:
    """Return a target as a shell word. Not every engine takes a revision, so one is fetched and named by its folder."""
    name = shlex.quote(target)
    return (
        f'"$(hf download {name} --revision {shlex.quote(revision)} --quiet)"' if revision and hub_id(target) else name
    )


def with_places(command: str, language: str, draft: str, target: str, revision: str | None = None) -> str:
    """Return a command with the places filled in, which runs on its own."""
    if language == "python":
        fetched = f'__import__("huggingface_hub").snapshot_download({target!r}, revision={revision!r})'
        place = fetched if revision and hub_id(target) else repr(target)
        return command.replace('os.environ["DRAFT"]', repr(draft)).replace('os.environ["TARGET"]', place)
    return f"{places(shlex.quote(draft), place_of(target, revision))}\n{command}"


@cache
def environment(folder: Path, escaping: bool = False) -> jinja2.Environment:
    """Return the environment of the templates in a folder. Unless it is ``escaping``, values are numbers or quoted words."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=escaping,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["json"] = lambda value: json.dumps(value, separators=(",", ":"))
    return templates


def lines_of(text: str) -> list[str]:
    """Return the entries of a Markdown list. An entry begins with a dash and may span lines."""
    return [" ".join(entry.split()) for entry in f"\n{text}".split("\n- ")[1:]]


def check_directory_name(path: str | Path) -> None:
    """Refuse an export path that an engine would not load as an independent draft, or that a command cannot hold.

    Raises UserError: with the path and the word or character in it.
    """
    for engine in known_engines().values():
        if fault := engine.path_fault(str(path)):
            raise UserError(f"export directory {path}: {fault}; choose a path without it")
    unquotable = next((letter for letter in UNQUOTABLE if letter in str(path)), None)
    if unquotable is not None:
        raise UserError(f"export directory {path}: JSON cannot hold {unquotable!r} unescaped; choose a path without it")


def _vocabulary_reasons(engine: Engine, facts: EngineFacts) -> list[str]:
    reasons = []
    for side, rows in (("target", facts.target_rows), ("draft", facts.draft_rows)):
        if rows < facts.token_rows:
            effect = "an id without a row crashes the engine or reads foreign memory; export the draft with the target's rows"
            reasons.append(
                f"config.json: vocab_size {rows} in the {side}, tokenizer.json needs {facts.token_rows}; {effect}"
            )
    if abs(facts.target_rows - facts.draft_rows) > engine.row_slack:
        allowed = f"a difference of at most {engine.row_slack}" if engine.row_slack else "the same number"
        reasons.append(
            f"{facts.draft_rows} draft rows and {facts.target_rows} target rows (config.json: vocab_size); it needs {allowed}; "
            "`understudy export` pads or trims the draft's rows"
        )
    difference = facts.first_difference_from_5 if engine.first_compared_id else facts.first_difference
    if difference is not None:
        token_id, target_string, draft_string = difference
        effect = "it refuses such a pair"
        if not engine.equal_strings:
            effect = "it compares only sizes, so proposals mean other text and are rejected"
        reasons.append(
            f"token id {token_id} is {target_string!r} in the target and {draft_string!r} in the draft (tokenizer.json: model.vocab); "
            f"{effect}; use a draft with the target's tokenizer"
        )
    return reasons


def _rule_note(rule: str, facts: EngineFacts) -> str:
    accepts = f"accepts by rule {rule} at temperature {'0' if Rule.named(rule).greedy else '> 0'}"
    if rule in facts.taus:
        return f"{accepts}: {facts.predicted(rule)} at gamma {facts.gamma}"
    if facts.measured_rule is None:
        return f"{accepts}; acceptance of this draft was not measured"
    if facts.measured_rule == rule:
        return f"{accepts}, the rule of the run's verdict"
    return (
        f"{accepts}; the verdict was measured under {facts.measured_rule}, so measure this rule with "
        f"`understudy evaluate ... --rule {rule}`"
    )
