"""A sweep file and the training runs it stands for: read, named, validated, before the first of them starts."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from distill.config.layout import CONFIG, VERDICT
from distill.config.load import YamlLoader, did_you_mean, load_config
from distill.config.run import RunConfig
from distill.run.verdict_record import JudgedDraft, Verdict
from speculative.errors import UserError

KEYS = ("base", "name", "grid", "overrides", "metric", "direction")
SEED = "seed"
MEASURES = {"alpha": "best.alpha", "tau": "best.tau", "speed_up": "speed_up.best"}
MADE_BY_THE_SWEEP = ("name", "output", "resume")
_LONGEST_NAME = 96


@dataclass(frozen=True)
class SweepFile:
    """What a sweep file says: `grid` and `overrides` map dotted config keys to values (a list of them in the grid)."""

    path: Path
    base: str
    name: str
    grid: dict[str, list[Any]]
    overrides: dict[str, Any] = field(default_factory=dict)
    metric: str = MEASURES["tau"]
    direction: Literal["maximize", "minimize"] = "maximize"


@dataclass(frozen=True)
class Trial:
    """One combination with the run that it is: `values` by grid key, `overrides` as the command line takes them."""

    values: dict[str, Any]
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def group(self) -> str:
        """What trials have in common that differ in their seed alone."""
        return json.dumps({key: value for key, value in self.values.items() if key != SEED}, sort_keys=True)


def read_tree(path: Path, readers: Sequence[Path] = ()) -> dict[str, Any]:
    """The `key: value` lines of a sweep file; `like` names a file beside it that says what this one leaves out,
    and to whose `overrides` its own are added.

    ``readers``: the files whose `like` led here.

    Raises:
        UserError: unreadable, a `like` that leads in a circle.
    """
    if path.resolve() in readers:
        raise UserError(f"{path}: `like` leads back to this file; take it out of one of them")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot read the sweep ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines with {', '.join(KEYS)}")
    if (like := tree.pop("like", None)) is None:
        return tree
    other = read_tree(path.parent / str(like), (*readers, path.resolve()))
    sides = [one.get("overrides") or {} for one in (other, tree)]
    if not all(isinstance(side, dict) for side in sides):
        raise UserError(f"{path}: overrides: one value for each of some config keys")
    return other | tree | {"overrides": sides[0] | sides[1]}


def load_sweep(path: Path) -> SweepFile:
    """Reads a sweep file.

    Raises:
        UserError: unreadable, an unknown key (the nearest is named), an empty grid, a metric that no verdict has.
    """
    tree = read_tree(path)
    for key in tree:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key `{key}`: {did_you_mean(str(key), KEYS)}")
    for key in ("base", "name", "grid"):
        if key not in tree:
            raise UserError(f"{path}: `{key}` is missing")
    if not isinstance(tree["base"], str):
        raise UserError(f"{path}: base: the path of a config")
    sweep = SweepFile(path, **tree)
    if not isinstance(sweep.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", sweep.name):
        raise UserError(f"{path}: name: letters, digits, '.', '_' and '-' only, it becomes a folder")
    if not isinstance(sweep.grid, dict) or not sweep.grid:
        raise UserError(
            f"{path}: grid: a list of values for each of some config keys, e.g. loss.name: [forward_kl, tv]"
        )
    for key, values in sweep.grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key}: a list with at least one value")
        if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
            raise UserError(f"{path}: grid.{key}: a value stands there twice")
    if not isinstance(sweep.overrides, dict):
        raise UserError(f"{path}: overrides: one value for each of some config keys")
    for key in (*sweep.grid, *sweep.overrides):
        if key in MADE_BY_THE_SWEEP and (key in sweep.grid or key == "name"):
            raise UserError(f"{path}: `{key}` is not for the grid; the sweep names its runs itself")
        if key in sweep.grid and key in sweep.overrides:
            raise UserError(f"{path}: `{key}` is both in grid and in overrides")
    if sweep.direction not in ("maximize", "minimize"):
        raise UserError(f"{path}: direction = {sweep.direction}: maximize or minimize")
    _check_metric(sweep)
    return sweep


def _check_metric(sweep: SweepFile) -> None:
    head, *rest = str(sweep.metric).split(".")
    known: Sequence[str] = tuple(Verdict.model_fields)
    if head in ("best", "baseline") and rest:
        head, known = rest[0], tuple(JudgedDraft.model_fields)
    if head not in known:
        raise UserError(f"{sweep.path}: metric = {sweep.metric}: no verdict has it; {did_you_mean(head, known)}")


def plan(sweep: SweepFile) -> list[Trial]:
    """Every combination, validated, seeds outermost: after the first pass there is one run of each.

    Raises:
        UserError: a combination that is no config (unknown key, wrong type, impossible pair).
    """
    keys = sorted(sweep.grid, key=lambda key: key != SEED)
    fixed = [assignment(key, value) for key, value in sweep.overrides.items()]
    combinations = [
        dict(zip(keys, values, strict=True)) for values in itertools.product(*(sweep.grid[k] for k in keys))
    ]
    names = _names(sweep, [{key: values[key] for key in sweep.grid} for values in combinations])
    trials = []
    for name, values in zip(names, combinations, strict=True):
        overrides = (*fixed, *(assignment(key, value) for key, value in values.items()), f"name={name}")
        try:
            config = load_config(sweep.base, overrides)
        except UserError as error:
            raise UserError(f"{sweep.path}: {name}: {error}") from error
        trials.append(Trial(values, overrides, config))
    folder = trials[0].config.folder.parent / sweep.name
    if (folder / CONFIG).exists():
        raise UserError(f"{folder}: holds a training run; give the sweep another name")
    return trials


def assignment(key: str, value: Any) -> str:
    """An override as the command line takes it."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _names(sweep: SweepFile, combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A readable, distinct run name for each combination: a word for every key that has several values."""
    varied = [key for key, values in sweep.grid.items() if len(values) > 1] or list(sweep.grid)[:1]
    plain = ["-".join([sweep.name, *(_word(key, values[key]) for key in varied)]) for values in combinations]
    names = []
    for name, values in zip(plain, combinations, strict=True):
        if plain.count(name) > 1 or len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
            name = f"{name[:_LONGEST_NAME]}-{digest}"
        names.append(name)
    return names


def _word(key: str, value: Any) -> str:
    leaf = key.split(".")[-1].replace("_", "")
    if isinstance(value, str):
        word = value.rstrip("/").split("/")[-1]
    elif value is None or value is False:
        word = f"no{leaf}"
    elif value is True:
        word = leaf
    elif isinstance(value, Mapping):
        word = "-".join(f"{name}{_plain(item)}" for name, item in value.items()) or f"no{leaf}"
    else:
        word = f"{leaf}{_plain(value)}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-") or leaf


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(_plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def finished(trial: Trial) -> bool:
    """Whether the trial's run has its verdict.

    Raises:
        UserError: the folder holds a run of another config.
    """
    folder = trial.config.folder
    if not (folder / VERDICT).exists():
        return False
    found = load_config(folder / CONFIG)
    if found.model_copy(update={"resume": trial.config.resume}) != trial.config:
        raise UserError(
            f"{folder}: finished with another config than the sweep asks for now; give the sweep another name, or delete it"
        )
    return True
