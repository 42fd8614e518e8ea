"""An engine as a value, and the registry of all. Imports no torch: the gateway reads counts with it.

Each file in distill/engines registers one, and has a template in distill/engines/templates with two macros. `command` uses `$DRAFT` and
`$TARGET`, so it stays valid when the directory moves. `notes` is a list with a dash per entry.

Rules at temperature > 0: with `sample` the draft samples, and a token is accepted with probability min(1, target/draft). With
`greedy-draft` the draft proposes its argmax and the target samples. At temperature 0 every engine uses `greedy`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill import engines
from distill.engines.protocol.counters import Page
from distill.engines.protocol.counts import CountsFormat, DraftCounts, read_format
from speculative.rules.rule import Rule

if TYPE_CHECKING:
    from distill.config.target import TargetConfig
    from distill.engines.protocol.facts import EngineFacts
    from speculative.rules.sampling import SamplingSettings

BUILT = Path(__file__).resolve().parents[3]  # where `make engines` makes environments
# Request options with which a server streams, and ends a stream with its counts.
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Service:
    """How `understudy serve` starts an engine. The words are those of the template's macro `server`, or of `command` without one.

    The first is looked for beside the program; $PROGRAM is the program itself, $PYTHON our own.
    """

    program: str  # looked for in PATH, in our own environment and in `built`
    built: str  # the environment that `make engines` makes
    draft_options: tuple[str, ...]  # options with a value that `--alone` leaves out
    key_variable: str = ""  # environment variable of the engine's API key
    counts: tuple[str, ...] = ()  # words with which it reports the drafts of each answer
    room: str = ""  # words for many requests at a time, with places for their number and the tokens of all
    # Words and environment of a server of (target, dtype, context) that returns token ids with their log-probabilities at the sampling
    # settings: on these cores with so many bytes for its cache, or without cores on a device with this share of its memory. None: it
    # cannot.
    answering: "Callable[[TargetConfig, str, int | None, Sequence[int], float], tuple[list[str], dict[str, str]]] | None" = None


@dataclass(frozen=True)
class Dialect:
    """How a running engine is recognised, asked and read.

    owners: `owned_by` in its list of models. reports: flags with which a server reports what it drafts.
    version_pages: (path, key) of pages that only this engine has. asks: options of a request
    that return counts and token ids. timed: of a timed request with a seed instead, whose prompt no cache has. closes_streams: it closes a
    connection after every stream without announcing it, and a request at that moment would get no answer. progress: (tokens, drafted
    tokens) since the start of a response in a part of a stream. silent: it leaves its counts out where nothing was drafted.
    leaves_room: for the target's own token at the end of a response. weights_page: (path, key) of a page that states the precision
    of its weights. inputs_of: to which `speculative.engine.arithmetic` it rounds the inputs of products with such weights.
    log_lines: what it writes in its log, and what that says of slow steps; `most` in a pattern: requests at a time, which explains
    steps at higher loads only.
    """

    owners: tuple[str, ...] = ()
    reports: str = ""
    version_pages: tuple[tuple[str, str], ...] = ()
    asks: Mapping[str, Any] = field(default_factory=dict)
    timed: Callable[[int], Mapping[str, Any]] = lambda seed: {}
    closes_streams: bool = False
    progress: Callable[[Mapping[str, Any]], tuple[int, int] | None] = lambda part: None
    counts: CountsFormat | None = None
    counters: Callable[[Page], DraftCounts | None] = lambda page: None
    silent: bool = False
    leaves_room: bool = False
    weights_page: tuple[str, str] = ("", "")
    inputs_of: Callable[[str], str] = lambda weights: ""
    log_lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine: its template, refusals and acceptance rule. `version`: the version whose source was read."""

    key: str  # value of --engine, and name of its log
    name: str
    version: str
    order: int
    rules: tuple[str, ...]  # that it can run at temperature > 0, its default first
    rule: "Callable[[EngineFacts], str] | None" = None  # of the command, if it is not always the default
    refusals: "Callable[[EngineFacts], list[str]]" = lambda facts: []
    warnings: "Callable[[EngineFacts], list[str]]" = lambda facts: []  # see `EngineVerdict`
    words: "Callable[[EngineFacts], Mapping[str, Any]]" = lambda facts: {}  # more names for the template
    path_fault: Callable[[str], str] = lambda path: ""  # why a path of an export is not served; empty: it is
    truncated_rules: tuple[str, ...] = ()  # `rules` where top_k, top_p or min_p exclude tokens, if those are others
    row_slack: int = 0  # allowed difference in embedding rows
    first_compared_id: int = 0  # strings of lower token ids may differ
    equal_strings: bool = False  # the engine itself compares token strings
    language: str = "bash"
    one_pass: bool = False  # serves drafts that propose a block in one forward pass
    reads_gguf: bool = False
    reads_int8: str | None = None  # what to know of 8-bit weights in compressed-tensors format; None: not tried
    service: Service | None = None  # None: `understudy serve` cannot start it
    dialect: Dialect = Dialect()

    def rules_at(self, sampling: "SamplingSettings") -> tuple[str, ...]:
        """The rules that it can run at these settings, its default first."""
        rules = (sampling.truncates and self.truncated_rules) or self.rules
        return tuple(dict.fromkeys(Rule.named(rule).at(sampling.temperature).name for rule in rules))


UNKNOWN = Engine("unknown", "an unknown engine", "", 0, ())
_REGISTERED: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    _REGISTERED[engine.name] = engine


@cache
def known_engines() -> dict[str, Engine]:
    """Return every engine by name, in the order of SERVING.md."""
    for module in pkgutil.iter_modules(engines.__path__):
        if not module.ispkg:
            importlib.import_module(f"{engines.__name__}.{module.name}")
    return {one.name: one for one in sorted(_REGISTERED.values(), key=lambda one: one.order)}


def reporting_flags() -> str:
    """With which flags each engine reports what it drafts, as a phrase."""
    flags = ((one.name, one.dialect.reports) for one in known_engines().values())
    return "; ".join(f"{name}: {words}" for name, words in flags if words)


def engine_in(label: str) -> Engine:
    """Return the engine that a label such as `vLLM 0.32.0` names; `UNKNOWN` if none."""
    return next((one for name, one in known_engines().items() if f"{label} ".startswith(f"{name} ")), UNKNOWN)


def read_counts(answer: Any) -> DraftCounts | None:
    """The counts of an answer (JSON of a response); None without drafts; CountsError if they contradict each other."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    tops = (answer, choices[0] if isinstance(choices, list) and choices else None)
    for engine in known_engines().values():
        form = engine.dialect.counts
        if form is not None and (found := read_format(form, engine.key, tops)) is not None:
            return found
    return None


def counts_of(page: Page) -> DraftCounts | None:
    """Return the counters of the first engine whose names are on the page; None if it has no draft counters.

    Raises CountsError: a counter is not a whole number, or more tokens were accepted than drafted.
    """
    found = (engine.dialect.counters(page) for engine in known_engines().values())
    return next((counts for counts in found if counts is not None), None)
