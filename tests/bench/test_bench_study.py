"""A study: what it plans, how it tunes, that it goes on after a kill, and that its numbers become cells."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bench_modules import bench
from refusals import refused
from rich.console import Console
from tiny_models import tiny_model
from tiny_training import examples_of, forget_accelerators

from data.batches.collate import collate
from distill.faults import Interrupted
from distill.loss.definitions import OBJECTIVES
from distill.training.teacher import Teacher
from speculative.measure.token_scores import TokenScores

ROOT = Path(__file__).resolve().parents[2]
study = bench("study")
import study_file  # noqa: E402
import study_texts  # noqa: E402


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def study_of(tmp_path: Path, tiny_config: Path, **sections: Any) -> tuple[Path, Any]:
    """A study file of two contestants on the tiny pair, and what it says."""
    tree = {
        "base": str(tiny_config),
        "name": "race",
        "pairs": {"tiny": {}},
        "contestants": {"kl": {"loss.name": "forward_kl"}, "tv": {"loss.name": "tv"}},
        "served": [
            {"temperature": 1.0, "rules": ["sample", "greedy-draft"]},
            {"temperature": 0.0, "rules": ["greedy"]},
        ],
        "seeds": [0, 1],
        "lr": [1e-3],
        "tune_prompts": 2,
        "overrides": {
            "output": str(tmp_path / "runs"),
            "serving.max_tokens": 6,
            "judge": {"prompts": 3, "live": "never"},
            "train": {"steps": 2, "batch_size": 4},
            "data.heldout_count": 5,
        },
    }
    path = tmp_path / "race.yaml"
    path.write_text(yaml.safe_dump(tree | sections, sort_keys=False), encoding="utf-8")
    return path, study_file.read_study(path, study_file.read_tree(path))


@pytest.fixture
def fresh() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


@pytest.mark.usefixtures("fresh")
def test_a_study_from_file_to_cells_and_on_after_a_kill(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They ask stores, of which one is of its seed alone, and one chooses its layers.
    served = [{"temperature": 1.0, "rules": ["sample", "greedy-draft"]}]
    contestants = {
        "kl": {"loss.name": "forward_kl", "signal": {"source": "capture", "kind": "sampled", "samples": 8}},
        "tv": {"loss.name": "tv", "signal": {"source": "capture", "k": 8}, "student": {"layers": "auto", "depth": 1}},
    }
    _, planned = study_of(tmp_path, tiny_config, served=served, contestants=contestants)
    done: list[str] = []

    def one_more(training: Any, texts: Any) -> dict[str, Any]:
        if len(done) == stop_after:
            raise KeyboardInterrupt
        done.append(training.result.name)
        found: dict[str, Any] = study_texts.result_of(training, texts)
        return found

    monkeypatch.setattr(study, "result_of", one_more)
    stop_after = 1
    with pytest.raises(Interrupted, match="continues it"):
        study.run_study(planned, quiet())
    stop_after = 99
    result = study.run_study(planned, quiet())
    # Tunings of one learning rate are the first seed's judged trainings too; once, nothing is trained.
    assert len(done) == len(set(done)) == 4 + 1
    assert result == json.loads((tmp_path / "runs" / "race" / "study.json").read_text())
    cells = {(c["rule"], c["temperature"], c["objective"], c["seed"]): c for c in result["cells"]}
    rules = [("sample", 1.0), ("greedy-draft", 1.0)]
    assert set(cells) == {(*rule, name, seed) for rule in rules for name in ("kl", "tv") for seed in (0, 1)}
    assert result["untrained"][0]["alpha"] != cells[("sample", 1.0, "kl", 0)]["alpha"]
    assert [(one["rule"], one["objective"], one["seeds"], one["prompts"]) for one in result["paired"]] == [
        ("sample", "tv", [0, 1], 3),
        ("greedy-draft", "tv", [0, 1], 3),
    ]
    console = quiet()
    assert study.run_study(planned, console, dry_run=True) == result
    assert "5 trainings finished, at least 0 to do" in console.file.getvalue()  # type: ignore[attr-defined]


def test_prompts_that_tune_do_not_judge_and_prompts_that_judge_do_not_tune(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, planned = study_of(tmp_path, tiny_config)
    zeros = np.zeros(2)
    scores = [
        TokenScores(np.log([a, a]), zeros, zeros > 0, zeros.astype(np.int64), zeros) for a in (0.9, 0.8, 0.7, 0.2, 0.4)
    ]
    monkeypatch.setattr(study_texts, "train", lambda training, texts: (None, 7))
    monkeypatch.setattr(study_texts, "score_tokens", lambda draft, heldout, sampling: scores)
    texts = SimpleNamespace(heldout=(), sampling=None)
    result = study_texts.result_of(next(study_file.trainings(planned, {})), texts)
    assert result["tuning"]["alpha"] == pytest.approx(0.3)
    assert result["judged"]["sample"]["accepted"] == [1.8, 1.6, 1.4]


def test_the_learning_rate_is_chosen_by_the_tuning_prompts_between_others(tmp_path: Path, tiny_config: Path) -> None:
    _, planned = study_of(tmp_path, tiny_config, lr=[1e-3, 3e-3])
    books, tried = study.Books(planned), []
    taus = {1e-3: 2.0, 3e-3: 2.1, 9e-3: 2.2, 0.027: 0.0}
    while (lr := books.next_lr("tiny", "kl")) is not None:
        tried.append(lr)
        training = study_file.tuning(planned, "tiny", "kl", lr)
        sums = {"tokens": [10], "accepted": [9.0 if lr == 1e-3 else 5.0], "blocks": [5.0]}
        result = {"judged": {"sample": sums, "greedy-draft": sums}, "tuning": {"alpha": 0.5, "tau": taus[lr]}}
        result |= {"seconds": {"train": 60.0, "judge": 0.0}, "trained_tokens": 7}
        training.result.parent.mkdir(parents=True, exist_ok=True)
        training.result.write_text(json.dumps(result if taus[lr] else {"error": "nan"}))
        books = study.Books(planned)
    assert tried == list(taus)
    assert books.chosen() == {("tiny", "kl"): 9e-3}
    assert [(cell["alpha"], cell["lr"]) for cell in books.report()["cells"]] == [(0.5, 9e-3)] * 2
    # Of tv three tunings and three more trainings, of kl three trainings, two untrained drafts.
    assert books.plan().endswith("4 trainings finished, at least 11 to do, 11 CPU minutes")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pairs": {"far": {"target.path": "../nowhere"}}}, r"pairs\.far: target\.path '../nowhere': no config\.json"),
        ({"pairs": {"far": {"data.train.0.path": "./no.jsonl"}}}, r"pairs\.far: no prompts at \./no\.jsonl"),
        ({"contestants": {"kl": {"loss.nmae": "tv"}}}, r"did you mean `name`"),
        ({"seed": [0]}, "unknown key `seed`: did you mean `seeds`"),
        ({"contestants": {"kl": {"data.mix": {"student": 0.5}}}}, r"`data\.mix` is not for a study"),
        ({"seeds": [0, 0]}, "seeds: each once"),
        ({"contestants": {"untrained": {"loss.name": "tv"}}}, "untrained is the draft before its first step"),
        ({"tune_at": 0.5}, "one of the temperatures of `served`"),
        ({"served": [{"temperature": 1.0, "rules": ["greedy"]}]}, "rule greedy needs temperature 0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, tiny_config: Path, sections: dict[str, Any], words: str) -> None:
    assert re.search(words, refused(study_of, tmp_path, tiny_config, **sections))


def test_what_is_remembered_of_the_target_is_what_it_says() -> None:
    target = tiny_model(vocab_size=50)
    examples = examples_of([5, 9, 7], vocab=50)
    one, other = collate(examples[:2], 0, [0, 1]), collate([examples[1], examples[0]], 0, [1, 0])
    remembering, asked = study_texts.RememberingTeacher(target), Teacher(target)
    for batch in (one, other, collate(examples, 0, [0, 1, 2])):
        assert torch.allclose(remembering.signal(batch).hidden_RD, asked.signal(batch).hidden_RD, atol=1e-5)
    with torch.no_grad():
        target.get_input_embeddings().weight.zero_()
    assert not torch.allclose(remembering.signal(one).hidden_RD, asked.signal(one).hidden_RD), "nobody was asked again"


@pytest.mark.parametrize("name", ["objectives", "longer", "optimizers", "layers", "saturation", "signals"])
def test_the_shipped_studies_can_be_planned(name: str) -> None:
    path = ROOT / "bench" / "studies" / f"{name}.yaml"
    tree = study_file.read_tree(path)
    # The others' weights lie outside the repository.
    own = {name: pair for name, pair in tree["pairs"].items() if name.startswith("embedded")}
    planned = study_file.read_study(path, tree | {"base": str(ROOT / tree["base"]), "pairs": own})
    trainings = list(study_file.trainings(planned, {}))
    assert len({training.result for training in trainings}) == len(trainings) > 0
    if name == "objectives":
        configs = [training.config for training in trainings][1 : 1 + len(planned.contestants)]
        names = [(config.objective_names().pop(), config.loss.eta) for config in configs]
        assert names[0] == ("lk_hybrid", 3.0), "what the others are compared with is the default"
        assert {name for name, _ in names} == OBJECTIVES.keys() - {"ce", "accepted_length"}
