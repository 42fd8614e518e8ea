"""Parts of the loop: child processes, clients that retry, comparison with the log, the bad version, the picture."""

import fcntl
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from loop.account import LoopResult, account, alarm_behind
from loop.clients import CONSTRAINED_EVERY, Clients
from loop.family import Family
from loop.loop import ALARMS, LOCK, LoopDemo, LoopOptions, clear_folder, loop_demo
from loop.picture import plot_loop
from loop.versions import shuffled_version
from processes import free_port, until
from running_app import running_app
from safetensors.torch import load_file, save_file
from stub_engine import StubEngine
from traffic_log import record_of, write_log
from vllm_protocol import Pages

from distill.config.target import TargetConfig
from distill.live.alarm import Alarm
from distill.live.versions import read_version
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
BENCH, CONFIG = ROOT / "bench", ROOT / "configs" / "loop.yaml"
ASKED = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.95, "top_k": -1, "min_p": 0.0}
# A process that sleeps in its own session, started by one that has ended.
PARENT = """
import sys, time
from pathlib import Path
sys.path.append(sys.argv[2])
from loop.family import Family
with Family(Path(sys.argv[1])) as family:
    family.start("sleeper", ["sh", "-c", 'setsid sleep 600 & echo $! > "$1/pid"', "sh", sys.argv[1]])
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_however_we_end_nothing_of_ours_goes_on(tmp_path: Path, number: int) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(BENCH)])
    try:
        until(lambda: parent.poll() is not None or (note.exists() and note.read_text()))
        assert parent.poll() is None
        sleeper = psutil.Process(int(note.read_text()))
    finally:
        parent.send_signal(number)
        parent.wait()
    psutil.wait_procs([sleeper], timeout=20)
    assert not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE


def test_a_family_reports_the_last_line_of_a_program(tmp_path: Path) -> None:
    with Family(tmp_path) as family:
        process = family.start("talker", ["sh", "-c", "echo first; echo last; exit 3"])
        process.wait()
        with pytest.raises(UserError, match="talker ended with exit status 3: last"):
            family.check("talker", process)


@pytest.fixture
def engine(tiny_target: Path) -> Any:
    target = Target(TargetConfig(path=str(tiny_target)), torch.device("cpu"))
    drafter = ModelDrafter(load_draft(str(tiny_target), target))
    with target.loaded() as model:
        pair = StubEngine(model, target.tokenizer, drafter, 3, "greedy-draft", name="tiny")
        with running_app(Pages(pair).app()) as url:
            yield url


def gateway_words(engine: str, log: Path, port: int) -> list[str]:
    words = ["gateway", "--engine", engine, "--draft-version", "v0001", "--log", str(log), "--port", str(port)]
    return [sys.executable, "-P", "-m", "distill.cli", *words, "--text", "--plain-engine", engine, "--shed-above", "6"]


def test_a_killed_gateway_loses_no_record_and_counts_stay_whole(engine: str, tmp_path: Path) -> None:
    """Clients use a gateway while it is killed and restarted; the log marks constrained requests and the overload."""
    port = free_port()
    clients = Clients(f"http://127.0.0.1:{port}", ASKED, {"logit_bias": {"4": -100.0}})
    clients.prompts = [[1, 40 + number, 50] for number in range(20)]
    with Family(tmp_path) as family:
        process = family.start("gateway", gateway_words(engine, tmp_path / "log", port))
        clients.at_once = 4
        clients.wait(12, lambda: family.check("gateway", process))
        process.kill()
        process.wait()
        process = family.start("gateway", gateway_words(engine, tmp_path / "log", port))
        clients.at_once = 12
        clients.wait(2 * CONSTRAINED_EVERY, lambda: family.check("gateway", process))
        clients.pause(lambda: family.check("gateway", process))
    found = account(tmp_path / "log", clients, LoopResult("stub", 10), 1.0)
    assert (found["records_lost"], found["records_doubled"]) == (0, 0)
    assert found["requests"] == len(clients.whole) >= 12 + 2 * CONSTRAINED_EVERY
    assert found["constrained"] == len(clients.constrained & clients.whole.keys()) >= 2
    assert found["shed"] > 0
    assert found["asked_again"] > 0


def test_two_loops_in_one_folder_and_an_engine_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another loop is running there"):
            loop_demo(LoopOptions(str(CONFIG), engine="stub", to=tmp_path))
    with pytest.raises(UserError, match="--engine fast: give auto, vllm or stub"):
        loop_demo(LoopOptions(str(CONFIG), engine="fast", to=tmp_path))


def test_a_loop_starts_again_with_the_same_first_draft(tmp_path: Path) -> None:
    for folder in ("run", "drafts/v0001", "traffic"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    (tmp_path / "loop.json").touch()
    (tmp_path / "drafts" / "v0001").chmod(0o555)
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "file"]


def test_several_loops_up_to_the_alarm_are_each_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages write a log instead of serving; turn 1 rings before the shift, turn 2 rings too late."""

    def before(demo: LoopDemo) -> bool:
        demo.traffic.mkdir()
        known = {"draft_version": "v0001", "drafted": 30, "blocks": 10}
        rows = [record_of(n, time=1.0 + n, accepted=15 if n < 4 else 6, **known) for n in range(8)]
        write_log(demo.traffic, rows)
        return demo.turn == 1

    def shift(demo: LoopDemo) -> None:
        demo.result.shifted_at = 5.0
        demo.result.alarm_after_requests = 40 if demo.turn < 2 else 200

    for name, stage in {"_before": before, "_shift": shift}.items():
        monkeypatch.setattr(LoopDemo, name, stage)
    for name in ("_first_draft", "_serve"):
        monkeypatch.setattr(LoopDemo, name, lambda demo: None)
    options = LoopOptions(str(CONFIG), engine="stub", to=tmp_path, alarms=1)
    assert loop_demo(options) == 0
    assert loop_demo(replace(options, alarms=3)) == 1
    found = json.loads((tmp_path / ALARMS).read_text())
    told = [(one["turn"], one["false_alarm"], one["alarm_after_requests"]) for one in found["loops"]]
    assert told == [(0, False, 40), (1, True, 40), (2, False, 200)]
    assert found["loops"][2]["acceptance"] == {"before": 0.5, "shifted": 0.2}
    assert sorted(path.name for path in tmp_path.glob("traffic*")) == ["traffic", "traffic-1", "traffic-2"]


def fake_clients(whole: dict[str, tuple[int, ...]], attempts: dict[str, int]) -> Any:
    return SimpleNamespace(whole=whole, attempts=Counter(attempts), constrained=set())


def test_lost_doubled_and_acceptance_by_hand(tmp_path: Path) -> None:
    def served(number: int, time: float, version: str, accepted: int, **more: Any) -> Any:
        known = {"time": time, "draft_version": version, "accepted": accepted, "drafted": 30, "blocks": 10}
        return record_of(number, **known | {"response_ids": (number, 7)} | more)

    records = [
        served(0, 10.0, "v0001", 12),
        served(1, 11.0, "v0001", 18),
        served(2, 12.0, "v0001", 0, constrained=True),
        served(3, 20.0, "v0001", 3),
        served(4, 40.0, "v0002", 15),
        served(4, 40.0, "v0002", 15),
        served(5, 30.0, "v0002", 30),
    ]
    (tmp_path / "log").mkdir()
    write_log(tmp_path / "log", records)
    names = [record.id for record in records]
    whole = {names[0]: (0, 7), names[1]: (1, 8), names[4]: (4, 7), "other": (1,)}
    clients = fake_clients(whole, dict.fromkeys(names, 1))
    result = LoopResult("stub", 10, shifted_at=15.0, recovered_at=35.0)
    found = account(tmp_path / "log", clients, result, 60.0)
    # Request 1 has another text in its record, `other` has none; request 4 was asked once and has two lines.
    assert (found["records_lost"], found["records_doubled"]) == (2, 1)
    assert found["acceptance"] == {"before": 30 / 60, "shifted": 3 / 30, "after": 15 / 30}
    told = " ".join(found["failures"])
    assert "2 complete responses without a matching record" in told
    assert "not taken back" in told
    for holds, behind in ((True, 1), (False, None)):
        assert alarm_behind(Alarm.model_construct(holds=holds), tmp_path / "log", 15.0) == behind


def test_the_picture_shows_each_version_and_each_event(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    known = {"accepted": 5, "drafted": 30, "blocks": 10}
    write_log(
        tmp_path / "log", [record_of(n, time=100.0 + n, draft_version=f"v000{1 + n // 40}", **known) for n in range(80)]
    )
    result = LoopResult("stub", 10, shifted_at=110.0, events=[(3.0, "the traffic shifts"), (9.0, "kill -9: gateway")])
    plot_loop(tmp_path / "loop.svg", tmp_path / "log", result, 100.0)
    text = (tmp_path / "loop.svg").read_text()
    for words in ("draft v0001", "draft v0002", "1  3 s  the traffic shifts", "2  9 s  kill -9: gateway"):
        assert f"<!-- {words} -->" in text, words


def test_the_bad_version_is_a_version_with_other_weights(tmp_path: Path) -> None:
    good = tmp_path / "v0001"
    good.mkdir()
    save_file({"w": torch.arange(40.0).view(20, 2), "norm": torch.arange(9.0)}, good / "model.safetensors")
    (good / "provenance.json").write_text(json.dumps({"version": "v0001", "parent": None}))
    good.chmod(0o555)
    name = shuffled_version(tmp_path, "v0001")
    assert (name, read_version(tmp_path / name).parent) == ("v0002", "v0001")
    before, after = (load_file(tmp_path / version / "model.safetensors") for version in ("v0001", name))
    for key, weights in before.items():
        assert not torch.equal(weights, after[key])
        assert torch.equal(weights.flatten().sort()[0], after[key].flatten().sort()[0])
