"""Run a study of ways to train: tune each contestant's learning rate, then judge all by replay on the same prompts.

python bench/study.py bench/studies/objectives.yaml              trains; the same command resumes
python bench/study.py bench/studies/objectives.yaml --dry-run    shows what is finished and the time for the rest

output/texts-*/            prompts and responses, shared by all trainings of a target and temperature, also of other studies
output/NAME/trainings/     one file of numbers per training; no weights are kept
            study.json     finished results

All trainings run in this process, one after the other. A killed study repeats the training it was in.
"""

from distill.faults import Interrupted, exit_status, run_script

import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from data.files import write_json
from distill.commands.training_process import terminated_as_interrupted
from distill.run.provenance import describe_run
from distill.training.trainer import NotFinite
from speculative.measure.effects import standard_errors
from study_file import (
    UNTRAINED,
    Study,
    Training,
    next_lr,
    read_study,
    read_tree,
    texts_key,
    trainings,
    tuning,
)
from study_texts import Texts, alpha_tau, result_of


def run_study(study: Study, console: Console, dry_run: bool = False) -> dict[str, Any]:
    """Run the missing trainings; returns the content of study.json.

    Raises:
        Interrupted: Ctrl-C; only the current training is lost.
    """
    books = Books(study)
    console.print(books.plan(), highlight=False, soft_wrap=True)
    if dry_run:
        return books.report()
    shared: dict[str, Texts] = {}
    books.folder.mkdir(parents=True, exist_ok=True)
    try:
        for pair, contestant in itertools.product(study.pairs, study.contestants):
            while (lr := books.next_lr(pair, contestant)) is not None:
                _ensure(books, tuning(study, pair, contestant, lr), shared, console)
        for training in trainings(study, books.chosen()):
            _ensure(books, training, shared, console)
    except KeyboardInterrupt:
        raise Interrupted(f"study {study.name} has stopped; the same command continues it") from None
    finally:
        write_json(books.folder / "study.json", books.report())
    console.print(books.plan(), highlight=False, soft_wrap=True)
    return books.report()


def _ensure(books: "Books", training: Training, shared: dict[str, Texts], console: Console) -> None:
    if books.result(training) is not None:
        return
    started, key = time.perf_counter(), texts_key(books.study, training.config)
    if key not in shared:
        shared[key] = Texts(books.study, training.config)
    try:
        result = result_of(training, shared[key])
        numbers = ", ".join(f"{rule} tau {alpha_tau(sums)['tau']:.3f}" for rule, sums in result["judged"].items())
    except NotFinite as error:
        result = {"error": str(error)}  # as a learning rate it has lost; as a contestant it has no numbers
        numbers = f"diverged: {error}"
    books.keep(training, result)
    said = f"{training.config.name}, lr {training.lr or 'default'}, seed {training.seed}: {numbers}"
    line = f"{said} ({time.perf_counter() - started:.0f} s)"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class Books:
    """Finished results of a study, read from its folder."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.folder = next(trainings(study, {})).config.folder.parent
        self._found: dict[Path, dict[str, Any]] = {}

    def result(self, training: Training) -> dict[str, Any] | None:
        """The numbers of a training; None if it is not finished or was judged with other settings."""
        path = training.result
        if path not in self._found and path.exists():
            self._found[path] = json.loads(path.read_text(encoding="utf-8"))
        found, wanted = self._found.get(path), training.judged_with(self.study)
        if found is None or found.get("judged_with", wanted) != wanted:
            return None
        return found if "error" in found or {*training.served.rules} <= found["judged"].keys() else None

    def keep(self, training: Training, result: dict[str, Any]) -> None:
        """Writes the numbers of a training, in place of what an earlier file of the study had there."""
        result = self._found[training.result] = result | {"judged_with": training.judged_with(self.study)}
        training.result.parent.mkdir(parents=True, exist_ok=True)
        write_json(training.result, result)

    def tuned(self, pair: str, contestant: str) -> dict[float, dict[str, float]]:
        """{alpha, tau} on the tuning prompts by learning rate, in the order in which they are tried; tau 0 where it diverged."""
        found: dict[float, dict[str, float]] = {}
        while (lr := next_lr(self.study.lr, {key: value["tau"] for key, value in found.items()})) is not None:
            result = self.result(tuning(self.study, pair, contestant, lr))
            if result is None:
                break
            found[lr] = result.get("tuning", {"alpha": 0.0, "tau": 0.0})
        return found

    def next_lr(self, pair: str, contestant: str) -> float | None:
        """The learning rate to try next; None if it is chosen."""
        return next_lr(self.study.lr, {lr: told["tau"] for lr, told in self.tuned(pair, contestant).items()})

    def chosen(self) -> dict[tuple[str, str], float]:
        """The learning rate of the best tau on the tuning prompts, by (pair, contestant), if it is chosen."""
        places = itertools.product(self.study.pairs, self.study.contestants) if self.study.lr else ()
        by = {place: self.tuned(*place) for place in places if self.next_lr(*place) is None}
        return {place: max(told, key=lambda lr: told[lr]["tau"]) for place, told in by.items()}

    def judged(self) -> list[tuple[Training, dict[str, Any]]]:
        """The finished trainings whose learning rate is chosen, with their numbers for the requested rules."""
        chosen = self.chosen()
        planned = trainings(self.study, chosen)
        fixed = (*chosen, *((pair, UNTRAINED) for pair in self.study.pairs))
        settled = (one for one in planned if not self.study.lr or (one.pair, one.contestant) in fixed)
        found = ((training, self.result(training)) for training in settled)
        return [
            (training, result | {"judged": {rule: result["judged"][rule] for rule in training.served.rules}})
            for training, result in found
            if result is not None and "error" not in result
        ]

    def report(self) -> dict[str, Any]:
        """Content of study.json: facts, cells, paired errors, and how the learning rates were chosen."""
        study, judged = self.study, self.judged()
        facts = {
            key: value for key, value in describe_run(0).items() if key not in ("argv", "uncommitted_changes", "seed")
        }
        config, tokens = (
            next(trainings(study, {})).config,
            [found["trained_tokens"] for _, found in judged if found["trained_tokens"]],
        )
        cells = [cell for one in judged for cell in _cells(*one)]
        tuned = [
            {"pair": pair, "objective": contestant, "lr": lr, **told}
            for pair, contestant in itertools.product(study.pairs, study.contestants)
            for lr, told in self.tuned(pair, contestant).items()
        ]
        return {
            "study": study.name,
            "about": study.about,
            "reference": study.reference,
            "contestants": study.contestants,
            "pairs": list(study.pairs),
            "seeds": list(study.seeds),
            "served": [served.model_dump(mode="json") for served in study.served],
            "lr": list(study.lr),
            "prompts": config.judge.prompts,
            "tune_prompts": study.tune_prompts,
            "tune_at": study.tune_at,
            "gamma": config.judge.gamma,
            "steps": config.train.steps,
            "batch_size": config.train.batch_size,
            "trained_tokens": [min(tokens, default=0), max(tokens, default=0)],
            "machine": facts,
            "tuning": tuned,
            "untrained": [cell for cell in cells if cell["objective"] == UNTRAINED],
            "cells": [cell for cell in cells if cell["objective"] != UNTRAINED],
            "paired": _paired(judged, study.reference),
        }

    def plan(self) -> str:
        """Finished trainings, and the estimated time for the rest."""
        study, judged = self.study, list(trainings(self.study, self.chosen()))
        places = list(itertools.product(study.pairs, study.contestants)) if study.lr else []
        tried = [tuning(study, *place, lr) for place in places for lr in self.tuned(*place)]
        known = {one.result: found for one in (*tried, *judged) if (found := self.result(one)) is not None}
        paces = [sum(result["seconds"].values()) for result in known.values() if "seconds" in result]
        # Three learning rates settle a contestant at best; of a pair's contestant one of them is a judged training too.
        open_places = [place for place in places if self.next_lr(*place) is not None]
        to_try = sum(max(3 - len(self.tuned(*place)), 1) for place in open_places)
        left = to_try + sum(one.result not in known for one in judged) - len(open_places)
        time_left = (
            f", {left * sum(paces) / len(paces) / 60:.0f} CPU minutes"
            if paces
            else "; what they take is known after the first"
        )
        return (
            f"study {study.name}: {len(study.contestants)} contestants x {len(study.pairs)} pairs x {len(study.served)} temperatures x "
            f"{len(study.seeds)} seeds, {len(known)} trainings finished, at least {left} to do{time_left}"
        )


def _cells(training: Training, result: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for rule, sums in result["judged"].items():
        numbers = {name: round(value, 6) for name, value in alpha_tau(sums).items()}
        yield {
            "pair": training.pair,
            "rule": rule,
            "temperature": training.served.temperature,
            "objective": training.contestant,
            "seed": training.seed,
            "lr": training.lr,
            **numbers,
        }


def _paired(judged: Iterable[tuple[Training, dict[str, Any]]], reference: str) -> list[dict[str, Any]]:
    """Standard error over prompts of a contestant's gain over the reference, over the seeds that both have."""
    sums: dict[tuple[Any, ...], dict[str, dict[int, dict[str, list[float]]]]] = {}
    for training, result in judged:
        for rule, own in result["judged"].items():
            there = sums.setdefault((training.pair, rule, training.served.temperature), {})
            there.setdefault(training.contestant, {})[training.seed] = own
    rows = []
    for place, contestants in sums.items():
        base = contestants.get(reference, {})
        for name, ours in contestants.items():
            seeds = sorted(ours.keys() & base.keys())
            if name in (reference, UNTRAINED) or not seeds:
                continue
            columns = [(ours, "tokens"), (ours, "accepted"), (base, "accepted"), (ours, "blocks"), (base, "blocks")]
            sums_PC = np.stack([np.sum([side[seed][key] for seed in seeds], 0) for side, key in columns], 1)
            errors = dict(zip(("alpha_error", "tau_error"), standard_errors(sums_PC), strict=True))
            named = dict(zip(("pair", "rule", "temperature"), place, strict=True)) | {"objective": name}
            rows.append(named | {"seeds": seeds, "prompts": len(sums_PC)} | {k: round(v, 7) for k, v in errors.items()})
    return rows


def main(
    file: Annotated[Path, typer.Argument(help="study file, e.g. bench/studies/objectives.yaml")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is finished, and stop")] = False,
) -> None:
    """Run the missing trainings of a study."""
    try:
        with terminated_as_interrupted():
            run_study(read_study(file, read_tree(file)), Console(), dry_run)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


if __name__ == "__main__":
    run_script(main)
