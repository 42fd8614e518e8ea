"""Read the config of a run from YAML and `key=value` overrides, and validate it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from distill.config.layout import CONFIG
from distill.config.origin import anchored
from distill.config.retired import retired
from distill.config.run import RunConfig
from distill.config.sections import Section, did_you_mean, section_in
from speculative.errors import UserError

MOST_ALIASES = 16
Checked = TypeVar("Checked", bound=Section)
# `configs/` of the repository, under its name in the wheel.
SHIPPED = Path(__file__).parent / "shipped"


class YamlLoader(yaml.SafeLoader):
    """Reads YAML 1.2 floats (PyYAML takes `1e-4` for a string), no key twice, few aliases: nested ones can fill the memory."""

    _aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._aliases += self.check_event(yaml.AliasEvent)
        if self._aliases > MOST_ALIASES:
            raise yaml.YAMLError(f"more than {MOST_ALIASES} aliases (*name); write the values out")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, lines = super().compose_mapping_node(anchor), dict[Any, int]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                problem = f"the key `{key.value}` is also in line {lines[key.value]}; keep one of the two"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text which `YamlLoader` would read as a number, such as a revision `12e5`."""


for _side in (YamlLoader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"
        ),
        list("-+0123456789."),
    )


def _set(tree: dict[str, Any], assignment: str) -> None:
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        raise UserError(f"override {assignment!r}: write it as key=value, e.g. optim.lr=3e-4")
    try:
        value = yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"override {assignment!r}: the value is not YAML ({str(error).splitlines()[0]})") from error
    parts = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parts):
        in_list = isinstance(node, list) and part.isdecimal() and int(part) < len(node)
        if not in_list and not isinstance(node, dict):
            raise UserError(f"override {assignment!r}: {'.'.join(parts[:depth])} has no keys below it")
        place: Any = int(part) if in_list else part
        if depth == len(parts) - 1:
            node[place] = value
        elif not in_list and node.get(part) is None:
            node[part] = {}
        node = node[place]


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: frozen values have no lists, and strict validation does not convert."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _known_keys(location: Sequence[str | int], section: type[Section]) -> list[str]:
    """Keys of the section at an error's location, which is relative to ``section``."""
    for part in location[:-1]:
        if isinstance(part, str) and part in section.model_fields:
            section = section_in(section.model_fields[part].annotation) or section
    return sorted(section.model_fields)


def _explain(error: ValidationError, origin: str, kind: type[Section]) -> str:
    # A key that is misspelt or retired, before the one that is missing instead of it.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    # Pydantic adds the branch of a union, or `[key]`, to the location as if it were a key.
    key = ".".join(part for part in map(str, location) if "[" not in part and not part.startswith("constrained-"))
    unnumbered = re.sub(r"\.\d+", "", key)
    if instead := retired(key, f"{unnumbered}: {first['input']}"):
        return f"{origin}: {instead}"
    if first["type"] == "extra_forbidden":
        return f"{origin}: unknown key `{key}`: {did_you_mean(str(location[-1]), _known_keys(location, kind))}"
    if first["type"] == "missing":
        return f"{origin}: `{key}` is missing"
    message = re.sub(r"valid dictionary or instance of \w+", "section of `key: value` lines", first["msg"])
    message = message.removeprefix("Value error, ").replace("valid tuple", "list")
    if first["type"] == "literal_error":
        message = did_you_mean(str(first["input"]), re.findall("'([^']+)'", first["ctx"]["expected"]))
    if not key:
        return f"{origin}: {message}"
    return f"{origin}: `{key}` = {json.dumps(first['input'], default=str, skipkeys=True)[:80]}: {message[0].lower()}{message[1:]}"


def config_file(path: Path) -> Path:
    """The path itself, or the shipped file if it is `configs/...` and missing in the working directory."""
    shipped = SHIPPED.joinpath(*path.parts[1:])
    return shipped if path.parts[:1] == ("configs",) and not path.exists() and shipped.exists() else path


def read_yaml(path: Path) -> dict[str, Any]:
    """The `key: value` lines of a YAML file (`config_file`); UserError if it is unreadable or something else."""
    try:
        text = config_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, so not YAML") from error
    except OSError as error:
        near = ", ".join(sorted(f"configs/{one.name}" for one in SHIPPED.glob("*.yaml")))
        raise UserError(f"{path}: cannot read the config ({error.strerror}); shipped ones: {near}") from error
    try:
        tree = yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        said = str(getattr(error, "problem", error)).splitlines()[0]
        raise UserError(f"{path}:{where} is not YAML: {said}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines, found {type(tree).__name__}")
    return tree


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `a.b=value` overrides and validate.

    Raises UserError: missing or unreadable file, unknown key (with the nearest valid one), wrong type, impossible combination.
    """
    tree = anchored(read_yaml(Path(path)), Path(path).parent)
    for assignment in overrides:
        _set(tree, assignment)
    if isinstance(name := tree.get("name"), str):  # Another start of a run that began elsewhere.
        tree = anchored(tree, Path(str(tree.get("output", "runs"))) / name)
    count = f" (with {len(overrides)} override{'s' if len(overrides) > 1 else ''})" if overrides else ""
    return parse_config(tree, f"{path}{count}")


def load_trusted(path: str | Path, trusted: bool, overrides: Sequence[str] = ()) -> RunConfig:
    """Like `load_config`, for commands that load models of a config which somebody else may have written.

    UserError: the file asks for code that comes with the weights, and the command line does not allow it (``trusted``).
    """
    config = load_config(path, overrides)
    said = trusted or any(one.startswith("target.trust_remote_code=") for one in overrides)
    if config.target.trust_remote_code and not said:
        raise UserError(
            f"{path}: target.trust_remote_code is true, so code that comes with the model would run; if you trust it, add "
            "--trust-remote-code (target.trust_remote_code=true)"
        )
    return config


def load_run(run: Path, trusted: bool, option: str = "") -> RunConfig:
    """The config of a run, as `load_trusted`. ``option``: that named the run. UserError: no run there."""
    if not (run / CONFIG).is_file():
        raise UserError(f"{option}{run}: no config.yaml there; give the folder of a run, e.g. runs/demo")
    return load_trusted(run / CONFIG, trusted)


def parse_config(tree: dict[str, Any], origin: str) -> RunConfig:
    """`parse_section` of a whole config."""
    return parse_section(RunConfig, tree, origin)


def parse_section(kind: type[Checked], tree: dict[str, Any], origin: str) -> Checked:
    """Validate a tree of plain values. UserError, starting with ``origin``: unknown key, wrong type, impossible combination."""
    try:
        return kind.model_validate(_tuples(tree))
    except RecursionError as error:
        raise UserError(f"{origin}: an alias (*name) contains itself or nests too deep; write values out") from error
    except ValidationError as error:
        raise UserError(_explain(error, origin, kind)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; `load_config` reads it back to an equal value."""
    return yaml.dump(json.loads(config.model_dump_json()), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
