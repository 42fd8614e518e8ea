"""A sweep file with contestants: what it plans, how it tunes, that it goes on after a kill, and the effects that are made of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from tiny_models import tiny_model
from tiny_training import examples_of, forget_accelerators

from data.batches.collate import collate
from distill.commands.sweep import study as study_module
from distill.commands.sweep import texts as texts_module
from distill.commands.sweep.plan import read_tree
from distill.commands.sweep.study import Books
from distill.commands.sweep.study_file import Study, Training, next_lr, read_study, texts_key, trainings, tuning
from distill.commands.sweep.sweep import run_sweep
from distill.commands.sweep.texts import result_of
from distill.faults import Interrupted
from distill.loss.definitions import DIVERGENCES
from distill.training.teacher import RememberingTeacher, Teacher
from speculative.errors import UserError
from speculative.measure.token_scores import TokenScores

ROOT = Path(__file__).resolve().parents[3]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def study_of(tmp_path: Path, tiny_config: Path, **sections: Any) -> tuple[Path, Study]:
    """A study file of two contestants on the tiny pair, and what it says."""
    tree = {
        "base": str(tiny_config),
        "name": "race",
        "pairs": {"tiny": {}},
        "contestants": {"kl": {"loss.name": "forward_kl"}, "tv": {"loss.name": "tv"}},
        "served": [{"temperature": 1.0, "rules": ["sample", "greedy-draft"]}, {"temperature": 0.0, "rules": ["greedy"]}],
        "seeds": [0, 1],
        "lr": [1e-3],
        "tune_prompts": 2,
        "overrides": {
            "output": str(tmp_path / "runs"), "serving.max_tokens": 6, "judge": {"prompts": 3, "live": "never"},
            "train": {"steps": 2, "batch_size": 4}, "data.heldout_count": 5,
        },
    }  # fmt: skip
    path = tmp_path / "race.yaml"
    path.write_text(yaml.safe_dump(tree | sections, sort_keys=False), encoding="utf-8")
    return path, read_study(path, read_tree(path))


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
    path, _ = study_of(tmp_path, tiny_config, served=served, contestants=contestants)
    done: list[str] = []

    def one_more(training: Training, texts: Any) -> dict[str, Any]:
        if len(done) == stop_after:
            raise KeyboardInterrupt
        done.append(training.result.name)
        return result_of(training, texts)

    monkeypatch.setattr(study_module, "result_of", one_more)
    stop_after = 1
    with pytest.raises(Interrupted, match="goes on"):
        run_sweep(path, console=quiet())
    stop_after = 99
    result = run_sweep(path, console=quiet())
    # Tunings of one learning rate are the first seed's judged trainings too; once, nothing is trained.
    assert len(done) == len(set(done)) == 4 + 1
    assert result == json.loads((tmp_path / "runs" / "race" / "study.json").read_text())
    cells = {(c["rule"], c["temperature"], c["objective"], c["seed"]): c for c in result["cells"]}
    rules = [("sample", 1.0), ("greedy-draft", 1.0)]
    places = {(*rule, name, seed) for rule in rules for name in ("kl", "tv") for seed in (0, 1)}
    assert set(cells) == places
    assert [cell["rule"] for cell in result["untrained"]] == ["sample", "greedy-draft"]
    assert result["untrained"][0]["alpha"] != cells[("sample", 1.0, "kl", 0)]["alpha"]
    assert result["trained_tokens"][0] > 0
    assert {(row["objective"], row["lr"]) for row in result["tuning"]} == {("kl", 1e-3), ("tv", 1e-3)}
    assert [(one["rule"], one["objective"], one["seeds"], one["prompts"]) for one in result["paired"]] == [
        ("sample", "tv", [0, 1], 3), ("greedy-draft", "tv", [0, 1], 3)
    ]  # fmt: skip
    assert all(one["alpha_error"] >= 0 for one in result["paired"])
    console = quiet()
    assert run_sweep(path, dry_run=True, console=console) == result
    assert "5 trainings finished, at least 0 to do" in console.file.getvalue()  # type: ignore[attr-defined]


def scores_of(accepted: list[float]) -> TokenScores:
    zeros = np.zeros(len(accepted))
    return TokenScores(np.log(accepted), zeros, zeros > 0, zeros.astype(np.int64), zeros)


def test_prompts_that_tune_do_not_judge_and_prompts_that_judge_do_not_tune(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, study = study_of(tmp_path, tiny_config)
    scores = [scores_of([a, a]) for a in (0.9, 0.8, 0.7, 0.2, 0.4)]
    monkeypatch.setattr(texts_module, "train", lambda training, texts: (None, 7))
    monkeypatch.setattr(texts_module, "score_tokens", lambda draft, heldout, sampling: scores)
    result = result_of(next(trainings(study, {})), SimpleNamespace(heldout=(), sampling=None))  # type: ignore[arg-type]
    assert result["tuning"]["alpha"] == pytest.approx(0.3)
    assert result["judged"]["sample"]["accepted"] == [1.8, 1.6, 1.4]


def test_the_learning_rate_is_chosen_by_the_tuning_prompts_between_others(tmp_path: Path, tiny_config: Path) -> None:
    _, study = study_of(tmp_path, tiny_config, lr=[1e-3, 3e-3])
    books, tried = Books(study), []
    taus = {1e-3: 2.0, 3e-3: 2.1, 9e-3: 2.2, 0.027: 0.0}
    while (lr := books.next_lr("tiny", "kl")) is not None:
        tried.append(lr)
        training = tuning(study, "tiny", "kl", lr)
        sums = {"tokens": [10], "accepted": [9.0 if lr == 1e-3 else 5.0], "blocks": [5.0]}
        result = {"judged": {"sample": sums, "greedy-draft": sums}, "tuning": {"alpha": 0.5, "tau": taus[lr]}}
        result |= {"seconds": {"train": 60.0, "judge": 0.0}, "trained_tokens": 7}
        training.result.parent.mkdir(parents=True, exist_ok=True)
        training.result.write_text(json.dumps(result if taus[lr] else {"error": "nan"}))
        books = Books(study)
    assert tried == list(taus)
    assert books.chosen() == {("tiny", "kl"): 9e-3}
    cells = books.report()["cells"]
    assert [(cell["alpha"], cell["lr"]) for cell in cells] == [(0.5, 9e-3)] * 2, (
        "the seed and temperature of the tuning"
    )
    # Of tv three tunings and three more trainings, of kl three trainings, two untrained drafts.
    assert books.plan().endswith("4 trainings finished, at least 11 to do, 11 CPU minutes")


@pytest.mark.parametrize(
    ("taus", "wanted"),
    [
        ({}, 1e-3),
        ({1e-3: 1.0}, 3e-3),
        ({1e-3: 2.0, 3e-3: 1.0}, 3.3e-4),
        ({1e-3: 1.0, 3e-3: 2.0}, 9e-3),
        ({1e-3: 2.0, 3e-3: 1.0, 3.3e-4: 1.5}, None),
        ({1e-3: 2.0, 3e-3: 1.0, 3.3e-4: 2.5}, 1.1e-4),
        ({1e-3: 2.0, 3e-3: 1.0, 3.3e-4: 2.5, 1.1e-4: 2.6, 3.7e-5: 2.7}, None),  # enough
    ],
)
def test_learning_rates_go_on_until_the_best_lies_between_others(
    taus: dict[float, float], wanted: float | None
) -> None:
    assert next_lr([1e-3, 3e-3], taus) == (None if wanted is None else pytest.approx(wanted))
    assert next_lr([1e-3, 1e-3], {1e-3: 1.0}) is None, "no other to go on to"


def test_seeds_are_outermost_and_every_contestant_sees_the_same(tmp_path: Path, tiny_config: Path) -> None:
    _, study = study_of(tmp_path, tiny_config)
    planned = list(trainings(study, {("tiny", "tv"): 0.5}))
    assert [(one.seed, one.served.temperature, one.contestant, one.lr) for one in planned[:4]] == [
        (0, 1.0, "untrained", 3e-3), (0, 1.0, "kl", 3e-3), (0, 1.0, "tv", 0.5), (0, 0.0, "untrained", 3e-3)
    ]  # fmt: skip
    assert len({one.result for one in planned}) == len(planned) == 2 + 8
    assert len({texts_key(study, one.config) for one in planned}) == 2


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"pairs": {"far": {"target.path": "../nowhere"}}},
            r"pairs\.far: target\.path '../nowhere': no config\.json there",
        ),
        ({"pairs": {"far": {"student": {"init": "pretrained", "path": "./no"}}}}, r"pairs\.far: student\.path './no'"),
        ({"pairs": {"far": {"data.train.0.path": "./no.jsonl"}}}, r"pairs\.far: no prompts at \./no\.jsonl"),
        ({"contestants": {"kl": {"loss.nmae": "tv"}}}, r"did you mean `name`"),
        ({"contestants": {}}, "contestants"),
        ({"seed": [0]}, "unknown key `seed`: did you mean `seeds`"),
        ({"contestants": {"kl": {"data.mix": {"student": 0.5}}}}, r"`data\.mix` is not for a study"),
        ({"contestants": {"kl": {"signal.source": "store"}}}, "`signal.source: store` is not for a study"),
        ({"seeds": [0, 0]}, "seeds: each once"),
        ({"contestants": {"untrained": {"loss.name": "tv"}}}, "untrained is the draft before its first step"),
        ({"served": [{"temperature": 1.0, "rules": [rule]} for rule in ("sample", "block")]}, "each temperature once"),
        ({"tune_at": 0.5}, "one of the temperatures of `served`"),
        ({"served": [{"temperature": 1.0, "rules": ["greedy"]}]}, "greedy goes with temperature 0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, tiny_config: Path, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        study_of(tmp_path, tiny_config, **sections)
    assert "\n" not in str(error.value)


def test_other_files_of_a_study_that_cannot_be(tmp_path: Path, tiny_config: Path) -> None:
    path, _ = study_of(tmp_path, tiny_config)
    path.write_text("like: again.yaml\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    again = tmp_path / "again.yaml"
    again.write_text("like: race.yaml\n", encoding="utf-8")
    with pytest.raises(UserError, match="`like` leads back"):
        run_sweep(path, console=quiet())
    again.write_text("overrides: [seed]\n", encoding="utf-8")
    with pytest.raises(UserError, match="overrides: one value"):
        run_sweep(path, console=quiet())
    again.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="leave --launcher out"):
        run_sweep(path, "accelerate launch", console=quiet())


def test_a_changed_study_trains_again_what_was_judged_otherwise(tmp_path: Path, tiny_config: Path) -> None:
    served = {"temperature": 1.0, "rules": ["sample"]}
    _, study = study_of(tmp_path, tiny_config, served=[served], contestants={"kl": {}}, lr=[])
    sums = {"tokens": [10], "accepted": [5.0], "blocks": [5.0]}
    for training in trainings(study, {}):
        Books(study).keep(training, {"judged": {"sample": sums}, "trained_tokens": 7})

    def finished(**sections: Any) -> list[tuple[str, int]]:
        sections = {"served": [served], "contestants": {"kl": {}}, "lr": []} | sections
        return [(c["rule"], c["seed"]) for c in Books(study_of(tmp_path, tiny_config, **sections)[1]).report()["cells"]]

    assert finished() == finished(seeds=[0, 1, 2]) == [("sample", 0), ("sample", 1)]
    assert finished(seeds=[1, 0]) == [], "the prompts' responses are of the first seed"
    assert finished(tune_prompts=3) == []
    assert finished(served=[served | {"rules": ["sample", "block"]}]) == []
    both = {"rules": ["sample", "block"]}
    _, wider = study_of(tmp_path, tiny_config, served=[served | both], contestants={"kl": {}}, lr=[])
    for training in trainings(wider, {}):
        Books(wider).keep(training, {"judged": {"sample": sums, "block": sums}, "trained_tokens": 7})
    assert finished() == [("sample", 0), ("sample", 1)], "a rule that nobody asks for any more"


def test_what_is_remembered_of_the_target_is_what_it_says() -> None:
    target = tiny_model(vocab_size=50)
    examples = examples_of([5, 9, 7], vocab=50)
    one, other = collate(examples[:2], 0, [0, 1]), collate([examples[1], examples[0]], 0, [1, 0])
    remembering, asked = RememberingTeacher(target), Teacher(target)
    for batch in (one, other, collate(examples, 0, [0, 1, 2])):
        assert torch.allclose(remembering.signal(batch).hidden_RD, asked.signal(batch).hidden_RD, atol=1e-5)
    with torch.no_grad():
        target.get_input_embeddings().weight.zero_()
    assert torch.allclose(remembering.signal(one).hidden_RD, remembering.signal(one).hidden_RD)
    assert not torch.allclose(remembering.signal(one).hidden_RD, asked.signal(one).hidden_RD), "nobody was asked again"


@pytest.mark.parametrize("name", ["objectives", "longer", "optimizers", "layers", "saturation", "signals"])
def test_the_shipped_studies_can_be_planned(name: str) -> None:
    path = ROOT / "configs" / "sweeps" / f"{name}.yaml"
    tree = read_tree(path)
    # The others' weights lie outside the repository.
    own = {name: pair for name, pair in tree["pairs"].items() if name.startswith("embedded")}
    study = read_study(path, tree | {"base": str(ROOT / tree["base"]), "pairs": own})
    assert len(own) == 1
    assert len({training.result for training in trainings(study, {})}) == len(list(trainings(study, {}))) > 0
    if name == "objectives":
        configs = [training.config for training in trainings(study, {})][1 : 1 + len(study.contestants)]
        names = [(config.objective_names().pop(), config.loss.eta) for config in configs]
        assert names[0] == ("lk_hybrid", 3.0), "what the others are compared with is the default"
        assert {name for name, _ in names} == {*DIVERGENCES}
        assert {eta for name, eta in names if name == "lk_hybrid"} == {1.0, 3.0, 10.0}
