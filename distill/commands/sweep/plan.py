"""Read a sweep file, and name and validate its training runs before the first one starts."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from distill.config.layout import CONFIG, VERDICT
from distill.config.load import load_config, parse_section, read_yaml
from distill.config.run import RunConfig
from distill.config.sections import Section
from distill.engines.protocol.serving_engine import for_engine
from speculative.errors import UserError

SEED = "seed"
_LONGEST_NAME = 96


class SweepFile(Section):
    """A sweep file. `overrides` maps dotted config keys to values, `grid` to lists of values. `price_per_hour`: of
    the device, for the price
    of tokens.
    """

    base: str
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    grid: dict[str, tuple[Any, ...]] = Field(min_length=1)
    overrides: dict[str, Any] = Field(default_factory=dict)
    metric: Literal["alpha", "tau", "speed_up"] = "tau"
    price_per_hour: float | None = Field(None, gt=0)

    @field_validator("grid")
    @classmethod
    def _several(cls, grid: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"{key}: give a list with at least one value")
            if len({_as_json(key, value) for value in values}) < len(values):
                raise ValueError(f"{key}: a value is listed twice")
        return grid

    @field_validator("overrides")
    @classmethod
    def _plain(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for key, value in overrides.items():
            _as_json(key, value)
        return overrides

    @model_validator(mode="after")
    def _distinct(self) -> "SweepFile":
        if any(key in self.grid for key in ("name", "output")) or "name" in self.overrides:
            raise ValueError("`name` and `output` cannot be in the grid: the sweep names its runs itself")
        if twice := self.grid.keys() & self.overrides.keys():
            raise ValueError(f"`{min(twice)}` is both in grid and in overrides")
        return self


def _as_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError as error:  # YAML reads 2024-01-01 as a date.
        raise ValueError(f"{key}: {error}; write keys and dates in quotes") from error


@dataclass(frozen=True)
class Trial:
    """One combination and its run: `values` by grid key, `overrides` in the form of the command line."""

    values: dict[str, Any]
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def group(self) -> str:
        """A key that is equal for trials that differ only in their seed."""
        return json.dumps({key: value for key, value in self.values.items() if key != SEED}, sort_keys=True)

    @property
    def answers_key(self) -> str:
        """Everything that affects the manifest of its responses: target, prompts, length limits, settings, seed."""
        tree = self.config.model_dump(mode="json")
        data = {key: value for key, value in tree["data"].items() if key not in ("mix", "rollouts", "text")}
        for source in data["train"]:  # A store holds answers by prompt, so fewer or more prompts fit it too.
            del source["limit"]
        serving = {key: value for key, value in tree["serving"].items() if key not in ("engine", "rule", "batch_size")}
        student = {key: tree["student"][key] for key in ("init", "path", "revision")}
        # Of an architecture only the context length counts.
        fields = tree["student"]["architecture"] or {}
        student |= {key: value for key, value in fields.items() if key == "model_type" or "position" in key}
        parts = [tree["target"], data, serving, student, tree["judge"]["prompts"], tree["seed"]]
        return json.dumps(parts, sort_keys=True)


def plan(path: Path) -> tuple[SweepFile, list[Trial]]:
    """A sweep file and its combinations, validated, with seeds in the outer loop: after the first pass each combination has one run.

    Raises UserError: unreadable, an unknown key (the message gives the nearest one), an empty grid, or a combination that is not a valid
    config.
    """
    sweep = parse_section(SweepFile, read_yaml(path), str(path))
    keys = sorted(sweep.grid, key=lambda key: key != SEED)
    fixed = [assignment(key, value) for key, value in sweep.overrides.items()]
    grid = itertools.product(*(sweep.grid[key] for key in keys))
    combinations = [dict(zip(keys, values, strict=True)) for values in grid]
    names = [_name(sweep, values) for values in combinations]
    trials = []
    for name, values in zip(names, combinations, strict=True):
        if names.count(name) > 1 or len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
            name = f"{name[:_LONGEST_NAME]}-{digest}"
        overrides = (*fixed, *(assignment(key, value) for key, value in values.items()), f"name={name}")
        try:
            config = for_engine(load_config(sweep.base, overrides))
        except UserError as error:
            raise UserError(f"{path}: {name}: {error}") from error
        trials.append(Trial(values, overrides, config))
    folder = trials[0].config.folder.parent / sweep.name
    if (folder / CONFIG).exists():
        raise UserError(f"{folder}: contains a training run; give the sweep another name")
    return sweep, trials


def assignment(key: str, value: Any) -> str:
    """An override in the form of the command line."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _name(sweep: SweepFile, values: Mapping[str, Any]) -> str:
    """A readable run name: a word for every key that has several values."""
    varied = [key for key in sweep.grid if len(sweep.grid[key]) > 1] or list(sweep.grid)[:1]
    return "-".join([sweep.name, *(_word(key, values[key]) for key in varied)])


def _word(key: str, value: Any) -> str:
    leaf = key.split(".")[-1].replace("_", "")
    text = value.rstrip("/").split("/")[-1] if isinstance(value, str) else leaf + json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or leaf


def finished(trial: Trial) -> bool:
    """Whether the trial's run has its verdict. Raises UserError: the folder contains a run of another config."""
    folder = trial.config.folder
    if not (folder / VERDICT).exists():
        return False
    found = load_config(folder / CONFIG)
    if found != trial.config:
        raise UserError(
            f"{folder}: finished with another config than the sweep's; rename the sweep, or delete the folder"
        )
    return True
