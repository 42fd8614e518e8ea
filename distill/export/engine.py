"""Whether each serving engine supports an independent draft, and the command that starts it. Pure functions from facts to verdicts.

Each engine has a file in distill/export/engines, which registers it, and a template in distill/export/templates with two macros.
`command` uses `$DRAFT` and `$TARGET`, so it stays valid when the directory moves. `notes` is a list with a dash per entry.

Rules at temperature > 0: with `sample` the draft samples, and a token is accepted with probability min(1, target/draft). With
`greedy-draft` the draft proposes its argmax and the target samples. At temperature 0 every engine uses `greedy`.
"""

import importlib
import json
import pkgutil
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from distill.export import engines
from distill.export.facts import EngineFacts
from speculative.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
# If the draft's path contains one of these words, vLLM selects another speculation method and ignores the configuration.
REROUTED_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
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


@dataclass(frozen=True)
class Service:
    """How `understudy serve` starts an engine. The words are those of the template's macro `server`, or of `command` without one.

    The first is looked for beside the program; $PROGRAM is the program itself, $PYTHON our own.
    """

    option: str  # value of --engine
    program: str  # looked for in PATH, in our own environment and in `built`
    built: str  # the environment that `make engines` makes
    draft_options: tuple[str, ...]  # options with a value that `--alone` leaves out
    script: Path | None = None  # $SERVER in the words
    key_variable: str = ""  # environment variable of the engine's API key
    counts: tuple[str, ...] = ()  # words with which it reports the drafts of each answer
    room: str = ""  # words for many requests at a time, with places for their number and the tokens of all


@dataclass(frozen=True)
class Engine:
    """An engine: its template, refusals and acceptance rule. `version`: the version whose source was read."""

    name: str
    version: str
    template: str
    order: int
    rule: Callable[[EngineFacts], str]
    refusals: Callable[[EngineFacts], list[str]] = lambda facts: []
    row_slack: int = 0  # allowed difference in embedding rows
    first_compared_id: int = 0  # strings of lower token ids may differ
    equal_strings: bool = False  # the engine itself compares token strings
    language: str = "bash"
    one_pass: bool = False  # serves drafts that propose a block in one forward pass
    reads_gguf: bool = False
    warnings: Callable[[EngineFacts], list[str]] = lambda facts: []  # see `EngineVerdict`
    service: Service | None = None  # None: `understudy serve` cannot start it


_REGISTERED: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    _REGISTERED[engine.name] = engine


@cache
def known_engines() -> dict[str, Engine]:
    """Return every engine by name, in the order of SERVING.md."""
    for module in pkgutil.iter_modules(engines.__path__):
        importlib.import_module(f"{engines.__name__}.{module.name}")
    return {one.name: one for one in sorted(_REGISTERED.values(), key=lambda one: one.order)}


def check(name: str, facts: EngineFacts) -> EngineVerdict:
    """Judge one engine. A refused pair gets a command too, since the reasons say what to fix first."""
    assert facts.gamma >= 1
    engine = known_engines()[name]
    facts = _facts_of(engine, facts)
    rule = "greedy" if facts.sampling is not None and facts.sampling.greedy else engine.rule(facts)
    reasons = [*_vocabulary_reasons(engine, facts), *engine.refusals(facts)]
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
        warnings=engine.warnings(facts),
    )


def server_command(engine: Engine, facts: EngineFacts) -> str:
    """Return the shell text that `understudy serve` starts; it uses $DRAFT, $TARGET and the places of a `Service`."""
    page: Any = environment().get_template(engine.template).make_module({"facts": _facts_of(engine, facts)})
    return str(getattr(page, "server", page.command)()).strip()


def _facts_of(engine: Engine, facts: EngineFacts) -> EngineFacts:
    """Return the facts for the way of drafting that the engine has, with its own gammas if it was timed."""
    if facts.timed_in is not None and facts.timed_in.engine == engine.name.lower().split()[0]:
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
    return lines_of(environment().get_template("others.j2").render(facts=facts))


def places(draft: str, target: str) -> str:
    """Return the shell line that sets $DRAFT and $TARGET; `draft` and `target` are shell words."""
    return f"export DRAFT={draft} TARGET={target}"


def with_places(command: str, language: str, draft: str, target: str) -> str:
    """Return a command with the places filled in, which runs on its own."""
    if language == "python":
        return command.replace('os.environ["DRAFT"]', repr(draft)).replace('os.environ["TARGET"]', repr(target))
    return f"{places(shlex.quote(draft), shlex.quote(target))}\n{command}"


@cache
def environment() -> jinja2.Environment:
    """Return the template environment. It escapes nothing: values are numbers or quoted words."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["json"] = lambda value: json.dumps(value, separators=(",", ":"))
    return made


def lines_of(text: str) -> list[str]:
    """Return the entries of a Markdown list. An entry begins with a dash and may span lines."""
    return [" ".join(entry.split()) for entry in f"\n{text}".split("\n- ")[1:]]


def rerouted_word(path: str | Path) -> str | None:
    """Return the word in `path` that makes vLLM select another speculation method, or None."""
    lowered = str(path).lower()
    return next((word for word in REROUTED_WORDS if word in lowered), None)


def check_directory_name(path: str | Path) -> None:
    """Refuse an export path that vLLM would not load as an independent draft, or that a command cannot hold.

    Raises UserError: with the path and the word or character in it.
    """
    word = rerouted_word(path)
    if word is not None:
        raise UserError(
            f"export directory {path}: vLLM selects another speculation method for a path with {word!r} in it; "
            "choose a path without it"
        )
    unquotable = next((letter for letter in UNQUOTABLE if letter in str(path)), None)
    if unquotable is not None:
        raise UserError(f"export directory {path}: JSON cannot hold {unquotable!r} unescaped; choose a path without it")


def _vocabulary_reasons(engine: Engine, facts: EngineFacts) -> list[str]:
    reasons = []
    for side, rows in (("target", facts.target_rows), ("draft", facts.draft_rows)):
        if rows < facts.token_rows:
            told = "an id without a row crashes the engine or reads foreign memory; export the draft with the target's rows"
            reasons.append(
                f"config.json: vocab_size {rows} in the {side}, tokenizer.json needs {facts.token_rows}; {told}"
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
        told = "it refuses such a pair"
        if not engine.equal_strings:
            told = "it compares only sizes, so proposals mean other text and are rejected"
        reasons.append(
            f"token id {token_id} is {target_string!r} in the target and {draft_string!r} in the draft (tokenizer.json: model.vocab); "
            f"{told}; use a draft with the target's tokenizer"
        )
    return reasons


def _rule_note(rule: str, facts: EngineFacts) -> str:
    accepts = f"accepts by rule {rule} at temperature {'0' if rule == 'greedy' else '> 0'}"
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
