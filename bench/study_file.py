"""Read a study file and list its trainings: contestants on pairs, each with its own learning rate, over seeds."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from distill.commands.sweep.plan import assignment
from distill.config.load import load_config, parse_section, read_yaml
from distill.config.run import RunConfig
from distill.config.sections import Section
from distill.models.load import find_model
from speculative.errors import UserError
from speculative.rules.rule import Rule

UNTRAINED = "untrained"  # in the place of a contestant: the draft before its first step
MOST_BEYOND = 3  # learning rates tried beyond those given
Overrides = dict[str, Any]  # dotted config keys -> values


class ServedAt(Section):
    """A temperature that the target answers at, and the rules that judge a draft trained for it."""

    temperature: float = Field(ge=0)
    rules: tuple[Rule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> "ServedAt":
        if any((rule == "greedy") != (self.temperature == 0) for rule in self.rules):
            raise ValueError("rule greedy needs temperature 0, and temperature 0 needs rule greedy")
        return self


class Study(Section):
    """A study file with `contestants`. The first contestant is the reference for the others.

    Every contestant trains on every pair, at every temperature and with every seed, on the same number of sequences. Its learning
    rate is the one that has the best tau on `tune_prompts` held-out prompts that judge nothing, at `tune_at`, with the first seed: of `lr`,
    and of further ones as long as the best is the lowest or highest that was tried. `lr: []` leaves it to the config.
    """

    base: str
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    about: str = ""
    pairs: dict[str, Overrides] = Field(min_length=1)
    contestants: dict[str, Overrides] = Field(min_length=1)
    served: tuple[ServedAt, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    lr: tuple[float, ...] = ()
    tune_at: float = 1.0
    tune_prompts: int = Field(100, ge=2)
    overrides: Overrides = Field(default_factory=dict)
    _made: dict[tuple[Any, ...], "Training"] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _distinct(self) -> "Study":
        if UNTRAINED in self.contestants:
            raise ValueError(f"contestants: {UNTRAINED} is the draft before its first step; give it another name")
        for values, what in (
            (self.seeds, "seeds: each"),
            ([one.temperature for one in self.served], "served: each temperature"),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"{what} once")
        return self

    @property
    def reference(self) -> str:
        """The contestant that all others are compared with."""
        return next(iter(self.contestants))


@dataclass(frozen=True)
class Training:
    """One training. Its config describes it completely, so a digest of the config identifies its result."""

    pair: str
    contestant: str
    served: ServedAt
    seed: int
    config: RunConfig

    @property
    def lr(self) -> float | None:
        """The peak learning rate; None = by the draft's size."""
        return self.config.optim.lr

    @property
    def result(self) -> Path:
        """File of its numbers."""
        # Without defaults: a key that a later version knows changes no digest.
        said = self.config.model_dump_json(exclude={"name", "resume"}, exclude_defaults=True)
        digest = hashlib.sha256(said.encode()).hexdigest()[:12]
        return self.config.folder.parent / "trainings" / f"{self.config.name}-seed{self.seed}-{digest}.json"

    def judged_with(self, study: Study) -> dict[str, Any]:
        """What its numbers depend on besides its config: the judging responses and the tuning settings."""
        return {"responses": study.seeds[0], "tune_prompts": study.tune_prompts, "tune_rule": self.served.rules[0]}


def read_tree(path: Path, readers: Sequence[Path] = ()) -> dict[str, Any]:
    """The `key: value` lines of a study file; `like` names a file in the same folder with the missing keys,
    and to whose `overrides` its own are added.

    ``readers``: the files whose `like` led here.

    Raises:
        UserError: unreadable, or a circular `like`.
    """
    if path.resolve() in readers:
        raise UserError(f"{path}: `like` leads back to this file; take it out of one of them")
    tree = read_yaml(path)
    if (like := tree.pop("like", None)) is None:
        return tree
    other = read_tree(path.parent / str(like), (*readers, path.resolve()))
    sides = [one.get("overrides") or {} for one in (other, tree)]
    if not all(isinstance(side, dict) for side in sides):
        raise UserError(f"{path}: overrides: one value for each of some config keys")
    return other | tree | {"overrides": sides[0] | sides[1]}


def read_study(path: Path, tree: dict[str, Any]) -> Study:
    """Parse a study from a file's tree.

    Raises:
        UserError: an unknown key, a wrong value, a pair whose models or prompts are not there; a combination that is no config.
    """
    study = parse_section(Study, tree, str(path))
    if study.lr and study.tune_at not in [served.temperature for served in study.served]:
        raise UserError(f"{path}: tune_at = {study.tune_at}: one of the temperatures of `served`")
    for pair in study.pairs:
        config = training(study, pair, study.reference, study.served[0], study.seeds[0], None).config
        find_model(f"{path}: pairs.{pair}: target.path", config.target.path)
        if config.student.path is not None:
            find_model(f"{path}: pairs.{pair}: student.path", config.student.path)
        for source in (*config.data.train, *config.data.heldout):
            if source.path.startswith((".", "/", "~")) and not Path(source.path).expanduser().exists():
                raise UserError(
                    f"{path}: pairs.{pair}: no prompts at {source.path}; give a path from here, or take the pair out"
                )
    for _ in trainings(study, {}):
        pass
    return study


def training(study: Study, pair: str, contestant: str, served: ServedAt, seed: int, lr: float | None) -> Training:
    """A training of the study.

    Raises:
        UserError: no config.
    """
    key = (pair, contestant, served.temperature, seed, lr)
    if key in study._made:
        return study._made[key]
    name = f"{pair}-t{served.temperature:g}-{contestant}"
    values: Overrides = study.overrides | study.pairs[pair] | study.contestants.get(contestant, {})
    values = values | {"serving.temperature": served.temperature, "seed": seed}
    values |= {"name": name} | ({} if lr is None else {"optim.lr": lr})
    try:
        config = load_config(study.base, [assignment(key, value) for key, value in values.items()])
        _refuse_more_than_responses(config)
    except UserError as error:
        raise UserError(f"{study.name}: {name}: {error}") from error
    output = str(Path(config.output) / study.name)
    study._made[key] = Training(pair, contestant, served, seed, config.model_copy(update={"output": output}))
    return study._made[key]


def _refuse_more_than_responses(config: RunConfig) -> None:
    """Raises UserError for what a study's trainings, one after the other on shared responses, do not do."""
    mix = config.data.mix
    asked = {
        "student.parallel": config.student.parallel,
        "data.synthetic": config.data.synthetic,
        "train.packing": config.train.packing,
        "loss.weighting.reference": config.loss.weighting.reference,
        "target.endpoint": config.target.endpoint,
        "target.shard": config.target.shard,
        "data.mix": mix.student or mix.speculative,
        f"signal.source: {config.signal.source}": config.signal.source not in ("online", "capture"),
    }
    named = next((key for key, value in asked.items() if value), None)
    if named is not None:
        raise UserError(f"`{named}` is not for a study, which trains on the target's shared responses; use a grid")


def tuning(study: Study, pair: str, contestant: str, lr: float) -> Training:
    """A training that decides a learning rate: with the first seed, at `tune_at`."""
    served = next(one for one in study.served if one.temperature == study.tune_at)
    return training(study, pair, contestant, served, study.seeds[0], lr)


def next_lr(lr: Sequence[float], taus: Mapping[float, float]) -> float | None:
    """The learning rate to try next: what is left of `lr`, then beyond the best as long as that is at an end; None = settled.

    taus: by learning rate tried. Beyond an end by the ratio of the first two of `lr`, at most `MOST_BEYOND` times.
    """
    left = [one for one in lr if one not in taus]
    if left or len(lr) < 2 or len(taus) >= len(lr) + MOST_BEYOND:
        return left[0] if left else None
    tried, best = sorted(taus), max(taus, key=taus.__getitem__)
    ratio = max(lr[:2]) / min(lr[:2])
    if best not in (tried[0], tried[-1]):
        return None
    further = float(f"{tried[0] / ratio if best == tried[0] else tried[-1] * ratio:.2g}")
    return None if further in taus else further


def trainings(study: Study, chosen: Mapping[tuple[str, str], float]) -> Iterator[Training]:
    """All judged trainings: seeds outermost, then temperatures, so that a partial study is a smaller study. Includes the untrained drafts.

    chosen: learning rate by (pair, contestant); where it lacks one, the config's own.
    """
    for seed, served, pair in itertools.product(study.seeds, study.served, study.pairs):
        if seed == study.seeds[0]:
            yield training(study, pair, UNTRAINED, served, seed, None)
        for contestant in study.contestants:
            yield training(study, pair, contestant, served, seed, chosen.get((pair, contestant)))


def texts_key(study: Study, config: RunConfig) -> str:
    """What trainings have in common that share responses: target, prompts, serving settings, seed, what limits the length."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    student = {key: tree.get("student", {}).get(key) for key in ("path", "revision", "architecture", "extend_context")}
    parts = [
        tree.get("target"),
        tree["data"],
        tree.get("serving"),
        config.judge.prompts + study.tune_prompts,
        study.seeds[0],
    ]
    # A draft that takes less text than the target limits both, unless the limit is given.
    return json.dumps([*parts, None if config.data.context_length else student], sort_keys=True)
