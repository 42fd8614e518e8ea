"""`understudy refresh` on tiny models: reasons, gate, and resuming after a kill. A dry run changes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failures import Killed
from rich.console import Console
from traffic_log import SAMPLING, record_of, write_log

from distill.commands.training_process import TrainingFailed
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.live.alarm import alarm
from distill.live.options import RefreshOptions
from distill.live.refresh import refresh
from distill.live.refresh.plan import write_probe, write_training
from distill.live.refresh.refresh import refresh_command
from distill.live.refresh.state import State
from distill.live.rollout.rollout import gate_of
from distill.live.traffic.record import TrafficRecord
from distill.live.versions import current_version, list_versions
from speculative.errors import UserError

QUICK = [
    "train.steps=24",
    "judge.every=12",
    "judge.live=never",
    "loss.name=forward_kl",
    "train.batch_size=16",
    "train.micro_batch_size=16",
]
FIRST, HEALTHY = 90, 40  # requests before the first refresh, and before acceptance falls
LONG_PATIENCE = {"payback_days": 1e12, "margin": 0.1}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "PROBE_STEPS", 16)
    monkeypatch.setattr(refresh, "alarm", partial(alarm, false_alarms=0.2, burn_in=30))


@pytest.fixture(scope="module")
def responses(tiny_run: Path) -> list[TrafficRecord]:
    """Function heads of other modules, answered by the run's target; after 40 requests the engine accepts almost nothing."""
    import torch
    from function_heads import write_heads

    from data.prompts.prompt import PromptSource
    from data.prompts.sources import load_source
    from distill.models.target import Target
    from distill.run.responses import decode_settings
    from speculative.decode import decode

    config = load_config(tiny_run / "config.yaml")
    target = Target(config.target, torch.device("cpu"), tiny_run)
    path = tiny_run.parent / "traffic-heads.jsonl"
    write_heads(path, ["argparse", "pickle", "tarfile", "zipfile", "optparse", "doctest"], 130)
    texts = [row.text or "" for row in load_source(PromptSource(path=str(path)))]
    prompts = [(f"request-{number}", target.tokenizer(text)["input_ids"][:60]) for number, text in enumerate(texts)]
    with target.loaded() as model:
        found, _ = decode(model, None, prompts, decode_settings(config.serving, 7, target), batch_size=32)
    return [
        record_of(
            number,
            prompt_ids=tuple(one.prompt_ids),
            response_ids=tuple(one.response_ids),
            accepted=number % 2 + 20 * (number < HEALTHY),
            drafted=48,
            blocks=16,
            target_version=config.target.path,
            sampling={**SAMPLING, "max_tokens": 16},
        )
        for number, one in enumerate(found)
    ]


@pytest.fixture
def place(tmp_path: Path, tiny_run: Path, responses: list[TrafficRecord]) -> Path:
    """runs/tiny and the log traffic/."""
    shutil.copytree(tiny_run, tmp_path / "runs" / "tiny", symlinks=True)
    (tmp_path / "traffic").mkdir(mode=0o700)
    (tmp_path / "traffic" / "salt").write_text("07" * 32)  # the held-out requests depend on it
    write_log(tmp_path / "traffic", responses[:FIRST])
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, without_figures: None) -> list[str]:
    """Trainings run in this process; their names in order."""
    from tiny_training import forget_accelerators

    from distill import train

    names: list[str] = []

    def train_here(config: RunConfig, arguments: list[str], log: Path, command: list[str]) -> None:
        names.append(config.name)
        forget_accelerators()  # A test before this one may have left a state of another precision.
        if train.main(arguments):
            raise TrainingFailed("see above")

    monkeypatch.setattr(refresh, "train_apart", train_here)
    return names


def call(place: Path, **options: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=1000)
    known = {"traffic": place / "traffic", "drafts": place / "drafts", "overrides": QUICK, **LONG_PATIENCE}
    status = refresh_command(RefreshOptions(place / "runs" / "tiny", **{**known, **options}), console)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def state_of(place: Path, version: str = "v0002") -> dict[str, Any]:
    return json.loads((place / "runs" / f"tiny-refresh-{version}" / "refresh.json").read_text())


def gain_by_hand(place: Path) -> float:
    """Mean acceptance of the new draft minus that of the served one, over all tokens of the new text."""
    import numpy as np

    from distill.run.heldout_set import load_heldout_set
    from speculative.measure.token_scores import score_responses

    run = place / "runs" / "tiny"
    old = {response.key for response in load_heldout_set(run).responses}
    text = load_heldout_set(run.with_name("tiny-refresh-v0002"))
    new = [response for response in text.responses if response.key not in old]
    means = [
        np.concatenate(score_responses(text.draft(str(path)), new, text.sampling)).mean() for path in (text.run, run)
    ]
    return float(means[0] - means[1])


def test_a_good_refresh_killed_after_each_stage_is_the_next_version(
    place: Path, responses: list[TrafficRecord], trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Callable[..., None] = State.store
    stages: list[str] = []

    def store_and_die(self: State, folder: Path) -> None:
        store(self, folder)
        stages.append(self.stage)
        if self.stage != "published":
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(State, "store", store_and_die)
        for _ in range(20):
            try:
                status, words = call(place)
                break
            except Killed:
                if len(stages) == 1:  # begun with another value of an option
                    state = state_of(place)
                    state["options"]["margin"] = 0.2
                    (place / "runs" / "tiny-refresh-v0002" / "refresh.json").write_text(json.dumps(state))
    state = state_of(place)
    assert (status, state["stage"]) == (0, "published"), words
    assert [*dict.fromkeys(stages)] == ["deciding", "training", "judging", "publishing", "published"]
    assert {name: found["holds"] for name, found in state["reasons"].items()} == dict.fromkeys(
        ("alarm", "text", "headroom", "payback"), True
    )
    assert trained == ["probe", "tiny-refresh-v0002"]
    _, second = list_versions(place / "drafts")
    assert (second.name, second.parent) == ("v0002", "v0001")
    told = second.provenance
    assert told["run"] == str(place / "runs" / "tiny-refresh-v0002")
    assert told["data_window"] is not None
    assert told["verdict"]
    gain = gate_of(second, {"v0001"})
    assert gain is not None
    whole = state["gate"]["new"][0]
    assert (gain.gamma, gain.tau_low, gain.tau_high) == (state["gate"]["gamma"], *whole["tau"]["ci"])
    assert gain.tau_low < whole["tau"]["gain"] < gain.tau_high
    # Only a rollout or --approve moves `current`.
    assert (current_version(place / "drafts") or second).name == "v0001"
    assert "is waiting for its rollout" in call(place)[1]
    # With --approve, the version is current as soon as it is published.
    (place / "runs" / "tiny-refresh-v0002" / "refresh.json").write_text(json.dumps(state | {"stage": "publishing"}))
    assert call(place, drafts=place / "approved", approve="Ann")[0] == 0
    approved = current_version(place / "approved")
    assert approved is not None
    assert (approved.name, approved.provenance["approved_by"]) == ("v0002", "Ann")
    assert len(trained) == 2
    # Old and new text was judged, and the training used the requested share of new prompts.
    gate = state["gate"]
    assert gate["new"][0]["certain"] == "gain"
    assert gate["old"][0]["prompts"] == 10
    assert gate["new"][0]["alpha"]["gain"] == pytest.approx(
        gain_by_hand(place), abs=1e-6
    )  # other batches round otherwise
    config = (place / "runs" / "tiny-refresh-v0002" / "config.yaml").read_text()
    assert "runs/tiny/prompts/train.arrow" in config
    assert "traffic/prompts/train.arrow" in config
    # The new version's acceptance is compared with its own first requests, which have not come.
    assert "is current, approved by Ann" in call(place, approve="Ann", traffic=None)[1]
    assert (current_version(place / "drafts") or second).name == "v0002"
    with pytest.raises(UserError, match=r"no requests with draft counts for version v0002"):
        call(place)
    assert len(trained) == 2
    assert not (place / "runs" / "tiny-refresh-v0003").exists()
    # The second refresh starts from the first one's draft and treats its new data as old.
    write_log(place / "traffic", responses[:FIRST], [replace(one, draft_version="v0002") for one in responses[FIRST:]])
    monkeypatch.setattr(refresh, "PROBE_STEPS", 1)
    assert call(place, force=True, overrides=[*QUICK, "train.steps=2"])[0] in (0, 1)
    state = state_of(place, "v0003")
    assert (state["parent"], state["home"]) == ("v0002", str(place / "runs" / "tiny-refresh-v0002"))
    assert (state["reasons"]["alarm"]["version"], state["reasons"]["alarm"]["holds"]) == ("v0002", False)
    assert state["window"]["left_out"]["held out by the run"] > 0
    assert {part["name"] for part in state["gate"]["old"]} == {"stdlib", "code"}


def test_a_bad_refresh_is_stopped_at_the_gate(place: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "PROBE_STEPS", 1)
    overrides = [*QUICK, "loss.name=ce", "optim.lr=0.1", "train.steps=6", "judge.every=6"]
    status, words = call(place, overrides=overrides, force=True, approve="Ann", share=1.0)
    state = state_of(place)
    assert (status, state["stage"], state["gate"]["passed"]) == (1, "kept the old one", False), words
    assert "gate: keep the old draft" in words
    assert [version.name for version in list_versions(place / "drafts")] == ["v0001"]
    assert (current_version(place / "drafts") or pytest.fail("none")).name == "v0001"


def test_nothing_is_trained_on_mixed_up_text(place: Path, responses: list[TrafficRecord], trained: list[str]) -> None:
    mixed_up = [
        replace(one, response_ids=other.response_ids, response_tokens=other.response_tokens)
        for one, other in zip(responses, [*responses[7:], *responses[:7]], strict=True)
    ]
    write_log(place / "traffic", mixed_up)
    status, words = call(place, dry_run=True)
    assert (status, "refresh.json" in words) == (1, False), "its folder is gone afterwards"
    status, words = call(place, force=True)
    assert (status, trained, state_of(place)["stage"]) == (1, [], "refused the text"), words
    assert "not the target's own text" in words
    write_log(place / "traffic", responses)
    assert call(place, dry_run=True)[1].count("text: ") == 1


def test_a_dry_run_changes_nothing(place: Path, trained: list[str]) -> None:
    def seen() -> dict[str, str]:
        files = [path for path in place.rglob("*") if path.is_file() and path.name != "write.lock"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = seen()
    status, words = call(place, dry_run=True)
    assert (status, trained) == (0, ["probe"])
    assert "headroom: alpha" in words
    assert "GPU-hours" in words
    assert "decision: train" in words, words
    assert seen() == before


def test_without_an_alarm_nothing_is_trained(place: Path, responses: list[TrafficRecord], trained: list[str]) -> None:
    write_log(place / "traffic", [replace(one, accepted=12) for one in responses])
    status, words = call(place)
    assert (status, trained, state_of(place)["stage"]) == (0, [], "not needed")
    assert "do not train (no alarm)" in words
    assert call(place)[0] == 0  # the same number again: no version was made


def test_no_headroom_is_no_refresh(place: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "PROBE_STEPS", 1)
    status, words = call(place, overrides=[*QUICK, "optim.lr=1e-12"])
    assert (status, trained, state_of(place)["stage"]) == (0, ["probe"], "not needed")
    assert "do not train (no headroom" in words
    assert "no certain gain" in words
    folder = place / "runs" / "tiny-refresh-v0002"
    assert not (folder / "traffic").exists()
    assert not (folder / "probe").exists()


def test_a_probe_of_a_run_with_lossy_ways_times_none(place: Path) -> None:
    """It decodes nothing."""
    home = place / "runs" / "tiny"
    ways = ["judge.lenience=[2]", "judge.latency_ms={per_token: 30}"]
    (home / "config.yaml").write_text(dump_config(load_config(home / "config.yaml", ways)))
    judge = load_config(write_probe(home, home, home, place / "probe", 3, [])).judge
    assert (judge.lenience, judge.latency_ms, judge.live) == ((), {}, "never")


def test_one_response_a_prompt_takes_as_many_epochs_as_several_did(place: Path) -> None:
    home = place / "runs" / "tiny"
    steps = {}
    for samples in (1, 2):
        keys = [f"serving.samples_per_prompt={samples}", "train.epochs=8", "train.steps=0"]
        (home / "config.yaml").write_text(dump_config(load_config(home / "config.yaml", keys)))
        (place / f"v{samples}").mkdir()
        path = write_training(home, home, home, place / f"v{samples}", 0.5, [])
        steps[samples] = load_config(path).train.steps
    assert abs(steps[1] - steps[2]) <= 1, "steps are whole"
