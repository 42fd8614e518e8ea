"""One draft for several targets: each target's own store, a share of every step, a row of the verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tiny_models import perturbed
from tiny_training import examples_of, forget_accelerators, run_config, share_of

from data.batches.examples import as_examples
from data.signals.signal import TopKSignal, joined
from distill import respond as respond_command
from distill import train
from distill.config.load import load_config
from distill.models import target as target_module
from distill.models.load import load_model, load_tokenizer
from distill.models.target import Target
from distill.report.page import report_command
from distill.run.others import open_others
from distill.run.run import Run
from distill.run.verdict_record import load_verdict
from distill.training.batches import BatchSource
from distill.training.teacher import JoinedTeacher
from speculative.errors import UserError
from speculative.measure.measured import DRAFT, UNDISTILLED

ASKED = ["signal.source=store", "signal.k=64", "judge.live=never", "judge.gamma=3"]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_config: Path) -> Path:
    """The answered run of a target that is the first one, changed."""
    folder = tmp_path_factory.mktemp("second")
    perturbed(load_model("first", str(tiny_target)), 0.05).save_pretrained(folder / "target")
    load_tokenizer(str(tiny_target)).save_pretrained(folder / "target")
    overrides = [*ASKED, "name=second", f"output={folder}", f"target.path={folder / 'target'}"]
    assert respond_command.run(tiny_config, overrides) is not None
    return folder / "second"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The answered run of the first target, to be copied."""
    folder = tmp_path_factory.mktemp("first")
    assert respond_command.run(tiny_config, [*ASKED, "name=both", f"output={folder}"]) is not None
    return folder / "both"


def trained(tiny_config: Path, first: Path, to: Path, *overrides: str) -> int:
    shutil.copytree(first, to / "both")
    return train.main([str(tiny_config), *ASKED, "name=both", f"output={to}", *overrides])


@pytest.mark.usefixtures("without_figures", "without_pictures")
def test_a_draft_of_two_targets_has_a_row_for_each_and_is_picked_by_both(
    tiny_config: Path, first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = f"target.others=[{{run: {second}, weight: 3}}]"
    assert trained(tiny_config, first, tmp_path / "two", others, "train.steps=24", "judge.every=12") == 0
    shown = capsys.readouterr().out
    assert trained(tiny_config, first, tmp_path / "one", "train.steps=24", "judge.every=12") == 0
    assert "targets" not in capsys.readouterr().out
    verdict, alone = (load_verdict(tmp_path / name / "both") for name in ("two", "one"))
    assert alone.targets == []
    (row,) = verdict.targets
    assert (row.target, row.weight) == (str(second.parent / "target"), 3.0)
    assert row.gain.gain > 0.02
    there, before = (verdict.row(way, text=row.target) for way in (DRAFT, UNDISTILLED))
    assert there.prompts == before.prompts == 10
    assert there.tau > before.tau
    assert any(line.startswith(f"On {row.target} the draft has tau") for line in verdict.facts)
    best = next(record for record in verdict.checkpoints if record.step == verdict.drafts[-1].step)
    assert best.score == pytest.approx((best.tau + 3 * there.tau) / 4)
    assert f"score {best.score:.3f} on 2 targets" in shown
    # Half of what the first target taught went to the second.
    assert verdict.judged(DRAFT).alpha < alone.judged(DRAFT).alpha
    report_command(tmp_path / "two" / "both")
    assert "Other targets" in (tmp_path / "two" / "both" / "report.html").read_text(encoding="utf-8")


def test_every_sequence_learns_from_its_own_target() -> None:
    config = run_config(
        Path("unused"), target={"others": [{"run": "other", "weight": 3}]}, signal={"source": "store"}, train={"batch_size": 8}
    )  # fmt: skip
    own, other = as_examples(examples_of([6, 7, 8, 9, 10])), as_examples(examples_of([11, 12, 13, 14], seed=1))
    source = BatchSource(share_of(config), own, others=[(3.0, other)])
    windows = [batch for step in range(6) for batch in source.micro_batches(step)]
    numbers = np.array([number for batch in windows for number in batch.indices])
    assert set(numbers.tolist()) == set(range(9))
    assert (numbers >= 5).mean() == pytest.approx(3 / 4)

    class Told:
        """A store whose example i says `base + i`."""

        kind = "topk"

        def __init__(self, base: int, lengths: Any) -> None:
            self.base, self.lengths = base, lengths

        def read(self, indices: list[int]) -> TopKSignal:
            parts = [
                TopKSignal(torch.full((int(self.lengths[i]), 2), self.base + i), torch.zeros(int(self.lengths[i]), 2), torch.zeros(int(self.lengths[i])))
                for i in indices
            ]  # fmt: skip
            return joined(parts)

    teacher = JoinedTeacher([Told(100, own.predicted_N), Told(200, other.predicted_N)], [5, 4])  # type: ignore[list-item]
    for batch in windows:
        said = teacher.signal(batch)
        told = [100 + number if number < 5 else 200 + number - 5 for number in batch.indices]
        counts = torch.bincount(batch.rows_R // batch.input_ids_BT.shape[1], minlength=len(batch.indices))
        assert said.ids_RK[:, 0].tolist() == torch.repeat_interleave(torch.tensor(told), counts).tolist()
    teacher.read_ahead(windows[:2])
    teacher.stores = ()
    for batch in windows[:2]:
        assert len(teacher.signal(batch).ids_RK) == len(batch.rows_R)


@pytest.mark.usefixtures("without_verdict")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["target.others=[{run: SECOND}]", "signal.source=online"], "signal.source: store"),
        (["target.others=[{run: nowhere}]"], "has no stored responses"),
        (["target.others=[{run: SECOND, weight: 0}]"], "target.others.0.weight"),
        (["target.others=[{run: SECOND}]", "loss.temperature=2"], "loss.temperature is 1.0 there and 2.0 here"),
        (["target.others=[{run: SECOND}]", "serving.temperature=0.5"], "serving.temperature is 0.7 there and 0.5 here"),
        (["target.others=[{run: SECOND}]", "serving.rule=block"], "judge.rule is sample there and block here"),
        (["target.others=[{run: SECOND}, {run: SECOND}]"], "its target is also that of target.others.0.run"),
        (["target.others=[{run: OWN}]"], "its target is also that of this run"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tiny_config: Path,
    first: Path,
    second: Path,
    tmp_path: Path,
    overrides: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(first, tmp_path / "own")
    asked = [word.replace("SECOND", str(second)).replace("OWN", str(tmp_path / "own")) for word in overrides]
    assert train.main([str(tiny_config), *ASKED, "name=both", f"output={tmp_path}", *asked]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("without_verdict")
@pytest.mark.parametrize(
    ("key", "said"), [("target/tokenizer.json", "another tokenizer"), ("second/target.json", "vocabulary rows")]
)
def test_a_target_of_another_family_is_refused(
    tiny_config: Path,
    first: Path,
    second: Path,
    tmp_path: Path,
    key: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    shutil.copytree(second.parent, other)
    for name in ("config.yaml", "target.json"):
        path = other / "second" / name
        path.write_text(path.read_text().replace(str(second.parent), str(other)))
    path = other / key
    tree = json.loads(path.read_text())
    if key == "second/target.json":
        tree["vocab_rows"] -= 1
    else:
        vocabulary = tree["model"]["vocab"]
        one, two = sorted(vocabulary)[-2:]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(tree))
    others = f"target.others=[{{run: {other / 'second'}}}]"
    assert trained(tiny_config, first, tmp_path / "run", others) == 2
    assert said in capsys.readouterr().err


def test_what_one_run_holds_out_the_other_may_not_train_on() -> None:
    from distill.run.others import _require_apart

    def prompts(*numbers: int) -> list[Any]:
        return [SimpleNamespace(prompt_ids=(number,), prompt_id=f"{number}") for number in numbers]

    # Another template: the same words, other ids.
    other_ids = [SimpleNamespace(prompt_ids=(100,), prompt_id="2")]
    with pytest.raises(UserError, match="this run trains on 1"):
        _require_apart("target.others.0.run", (prompts(1, 2), prompts(3)), (prompts(1), other_ids))
    _require_apart("target.others.0.run", (prompts(1, 2), prompts(3)), (prompts(1, 4), prompts(3)))
    for own, other, whose in (
        ((prompts(1, 2), prompts(3)), (prompts(4), prompts(2)), "this run trains on 1"),
        ((prompts(1), prompts(3)), (prompts(3), prompts(5)), "that run trains on 1"),
    ):
        with pytest.raises(UserError, match=whose):
            _require_apart("target.others.0.run", own, other)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if not path.is_dir()}


@pytest.mark.usefixtures("without_verdict")
@pytest.mark.parametrize("lost", ["responses/train/shard-00001.arrow", "responses/heldout"])
def test_another_run_is_read_as_it_is_and_never_answered_by_this_one(
    tiny_config: Path, first: Path, second: Path, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "half"
    shutil.copytree(second, other)
    for path in [other / lost] if (other / lost).is_file() else sorted((other / lost).iterdir()):
        path.unlink()
    before = files_of(other)
    assert trained(tiny_config, first, tmp_path, f"target.others=[{{run: {other}}}]") == 2
    said = capsys.readouterr().err
    assert "some prompts of that run have no response" in said
    assert str(other / "config.yaml") in said
    assert files_of(other) == before


@pytest.mark.usefixtures("without_verdict")
def test_a_run_does_not_go_on_from_what_it_learned_of_other_answers(
    tiny_config: Path, first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "second"
    shutil.copytree(second, other)
    asked = (f"target.others=[{{run: {other}, weight: 2}}]", "train.steps=8", "judge.every=4")
    assert trained(tiny_config, first, tmp_path, *asked) == 0
    told = json.loads((tmp_path / "both" / "checkpoints" / "step-000004" / "provenance.json").read_text())
    (named,) = told["other_targets"]
    assert (named["target"], named["weight"]) == (str(second.parent / "target"), 2.0)
    assert named["target_fingerprint"] != told["target_fingerprint"]
    again = [str(tiny_config), *ASKED, "name=both", f"output={tmp_path}", *asked]
    shutil.rmtree(tmp_path / "both" / "checkpoints" / "step-000008")
    assert train.main(again) == 0
    shutil.rmtree(tmp_path / "both" / "checkpoints" / "step-000008")
    more = [*ASKED, "name=second", f"output={tmp_path}", f"target.path={second.parent / 'target'}"]
    assert respond_command.run(tiny_config, [*more, "serving.samples_per_prompt=2"]) is not None
    capsys.readouterr()
    assert train.main(again) == 2
    assert "its responses have changed since" in capsys.readouterr().err
    (tmp_path / "both" / "checkpoints" / "step-000004" / "provenance.json").write_text("{")
    assert train.main(again) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.usefixtures("without_verdict")
def test_held_out_text_too_long_for_the_draft_is_refused(
    tiny_config: Path, first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(second.parent / "target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    words = " ".join(f"word{number}" for number in range(100))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": f"{n} {words}"}) + "\n" for n in range(3)))
    overrides = [f"target.path={tmp_path / 'target'}", f"data.heldout=[{{path: {tmp_path / 'long.jsonl'}}}]"]
    overrides += ["data.max_prompt_tokens=480", "name=long", f"output={tmp_path}"]
    assert respond_command.run(tiny_config, [*ASKED, *overrides]) is not None
    assert trained(tiny_config, first, tmp_path, f"target.others=[{{run: {tmp_path / 'long'}}}]") == 2
    assert "this run's limit is 128" in capsys.readouterr().err


def test_what_was_answered_on_a_gpu_is_known_on_one_without_the_weights(
    first: Path, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(second, tmp_path / "second")
    path = tmp_path / "second" / "target.json"
    facts = json.loads(path.read_text())
    facts["asked"]["device"] = "cuda"
    path.write_text(json.dumps(facts))
    config = load_config(first / "config.yaml", [f"target.others=[{{run: {tmp_path / 'second'}}}]"])
    own = Target(config.target, torch.device("cpu"), first)
    forget_accelerators()
    PartialState(cpu=True)
    gpu: Any = SimpleNamespace(
        device=torch.device("cuda"), is_main_process=True, num_processes=1, process_index=0, wait_for_everyone=lambda: None
    )  # fmt: skip

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(target_module, "load_model", loaded)
    (found,) = open_others(Run(config, gpu), own, (), (), 128)
    assert (len(found.heldout), found.target._model) == (10, None)
