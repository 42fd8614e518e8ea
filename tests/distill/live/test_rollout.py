"""Rollouts from start to end, with a fake engine and traffic that follows arms.json."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_engine import FakeEngine
from gateway_server import running_gateway
from live_arms import Traffic, gateway_directory, running_traffic, steady, write_version
from processes import forked, until
from running_app import running_app

from data.files import locked
from data.responses import engine_http
from distill.faults import exit_status
from distill.live.arms import ARMS, Arm, Arms, read_arms, write_arms
from distill.live.gateway import app as gateway_app
from distill.live.options import RolloutOptions
from distill.live.rollout import engine as engines
from distill.live.rollout import rollout as module
from distill.live.rollout.engine import MARK
from distill.live.rollout.judgement import GateGain
from distill.live.rollout.rollout import TAKEN_BACK, gate_of, rollout
from distill.live.rollout.state import ROLLOUT_LOCK, State
from distill.live.traffic.record import LOCK, TrafficRecord
from distill.live.versions import current_version, history, make_current, read_version
from speculative.errors import UserError

PYTHON = shlex.quote(sys.executable)
# It has a child process, like a real one.
ENGINE = """
import http.server, os, subprocess, sys
subprocess.Popen(["sleep", "60"])
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" and os.path.isdir(sys.argv[1]) else 503); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def engines_of(options: RolloutOptions) -> list[psutil.Process]:
    """Running processes that rollouts of these drafts started, found by their mark."""
    state = State.stored(options.drafts)
    found = []
    for process in psutil.Process().children(recursive=True) if state is not None else ():
        try:
            if process.environ().get(MARK) == state.engine.mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if os.getsid(process.pid) == process.pid]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutOptions]:
    """v0001 serves, v0002 waits; started processes are stopped after the test."""
    drafts = tmp_path / "drafts" / "support"
    write_version(drafts, "v0001", None)
    write_version(drafts, "v0002", "v0001")
    make_current(drafts, "v0001", "test")
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(engines, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "START_SECONDS", 20.0)
    with gateway_directory(tmp_path / "traffic") as log:
        options = RolloutOptions(
            drafts,
            "v0002",
            log,
            f"{PYTHON} -S -E {shlex.quote(str(tmp_path / 'engine.py'))} {{draft}} {{port}}",
            share=0.3,
            watch=200,
        )
        yield options
        for process in engines_of(options):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)


def traffic_of(options: RolloutOptions, new: Any, old: Any = None) -> Traffic:
    return Traffic(options.log, {"v0001": old or steady(0.7), "v0002": new})


def shares(options: RolloutOptions) -> dict[str, float]:
    return {arm.name: arm.share for arm in read_arms(options.log / ARMS).arms}


def served(options: RolloutOptions) -> str:
    version = current_version(options.drafts)
    assert version is not None
    return version.name


def all_is_back(options: RolloutOptions) -> bool:
    """The old engine has all traffic, its version is current, and no started process runs."""
    return (shares(options), served(options), engines_of(options)) == ({"v0001": 1.0}, "v0001", [])


def state_of(options: RolloutOptions) -> State:
    state = State.stored(options.drafts)
    assert state is not None
    return state


def stages(options: RolloutOptions) -> list[str]:
    return [event.stage for event in state_of(options).events]


def test_a_better_version_gets_all_the_traffic(options: RolloutOptions, capsys: pytest.CaptureFixture[str]) -> None:
    with running_traffic(traffic_of(options, steady(0.8))) as traffic:
        assert rollout(options) == 0
    assert shares(options) == {"v0002": 1.0}
    arm = read_arms(options.log / ARMS).arms[0]
    assert (arm.draft_version, arm.target_version) == ("v0002", "t1")
    assert served(options) == "v0002"
    assert len(engines_of(options)) == 1, "it serves on"
    assert traffic.counts["v0002"] >= options.watch
    assert stages(options) == ["comparing", "watching", "finishing", "done"]
    told = capsys.readouterr().out
    assert "certainly more is accepted" in told
    assert "http://127.0.0.1:9 gets no more traffic. The rollout did not start it: stop it yourself" in told
    with pytest.raises(UserError, match="v0002 is already served"):
        rollout(options)


def test_a_worse_version_is_taken_back(options: RolloutOptions) -> None:
    """Each reason by itself: test_rollout_judgement.py."""
    with running_traffic(traffic_of(options, steady(0.55))):
        assert rollout(options) == TAKEN_BACK
    assert shares(options) == {"v0001": 1.0}
    assert read_arms(options.log / ARMS).by == "flags", "a gateway that starts again goes by its flags"
    assert served(options) == "v0001"
    assert engines_of(options) == []
    last = history(options.drafts)[-1]
    assert (last["version"], last["event"]) == ("v0002", "rejected")
    assert "certainly less is accepted" in last["by"]


def test_one_that_slipped_through_is_taken_back_while_it_is_watched(options: RolloutOptions) -> None:
    """Good while compared, bad with all the traffic."""
    with running_traffic(traffic_of(options, lambda _: (0.85 if shares(options).get("v0001") else 0.4, 0.01, 0.0))):
        assert rollout(replace(options, watch=20_000)) == TAKEN_BACK
    assert stages(options) == ["comparing", "watching", "returning", "back"]
    assert "certainly less is accepted than before" in state_of(options).reason
    assert all_is_back(options)


def test_the_gate_promises_a_gain_over_the_parent_only(options: RolloutOptions) -> None:
    version = read_version(options.drafts / "v0002")
    assert gate_of(version, {"v0001"}) is None
    version.provenance["expected_gain"] = {"gamma": 4, "tau_ci": [1.2, 1.6]}
    assert gate_of(version, {"v0001"}) == GateGain(4, 1.2, 1.6)
    assert gate_of(version, {"v0003"}) is gate_of(version, {"v0001", "v0003"}) is None


@pytest.mark.parametrize("stage", ["comparing", "watching"])
def test_an_engine_that_dies_gives_back(options: RolloutOptions, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as soon as the stage has begun."""
    enter = module.Rollout._enter

    def killing(self: Any, entered: Any, text: str) -> None:
        enter(self, entered, text)
        if entered == stage:
            os.kill(engines_of(options)[0].pid, signal.SIGKILL)

    monkeypatch.setattr(module.Rollout, "_enter", killing)
    with running_traffic(traffic_of(options, steady(0.85))):
        assert rollout(options) == TAKEN_BACK
    assert "the engine died" in state_of(options).reason
    assert (shares(options), served(options)) == ({"v0001": 1.0}, "v0001")


def hang_behind(name: str) -> None:
    """Run the function or stage of this name once, then hang."""

    def hangs(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            found = work(*arguments)
            if name in (work.__name__, *arguments[1:2]):
                time.sleep(60)
            return found

        return wrapped

    module.Rollout._enter = hangs(module.Rollout._enter)  # type: ignore[method-assign]
    for owner, act in (
        (engines, "start_engine"),
        (module, "make_current"),
        (engines, "stop_engine"),
        (module, "reject"),
    ):
        setattr(owner, act, hangs(getattr(owner, act)))


def run_apart(options: RolloutOptions, behind: str, reached: Path) -> None:
    """A rollout in its own process that hangs after an action."""
    sys.stdout = sys.stderr = reached.open("w")
    hang_behind(behind)
    os._exit(rollout(options))


def kill_behind(act: str, options: RolloutOptions, tmp_path: Path) -> None:
    with forked(run_apart, options, act, tmp_path / "out") as child:
        time.sleep(0.05)
        frames = {
            "start_engine": lambda: engines_of(options),
            "make_current": lambda: served(options) == "v0002",
            "stop_engine": lambda: (
                (state := State.stored(options.drafts)) and state.stage == "returning" and not engines_of(options)
            ),
            "reject": lambda: history(options.drafts)[-1]["event"] == "rejected",
        }
        stage = lambda: (state := State.stored(options.drafts)) is not None and state.stage == act  # noqa: E731
        until(frames.get(act, stage))
        child.kill()


@pytest.mark.parametrize("act", ["start_engine", "comparing", "watching", "finishing", "make_current"])
def test_killed_it_goes_on_when_it_is_given_again(options: RolloutOptions, tmp_path: Path, act: str) -> None:
    with running_traffic(traffic_of(options, steady(0.8))):
        kill_behind(act, options, tmp_path)
        before = engines_of(options)
        assert len(before) == 1, "the engine serves on without us"
        assert rollout(options) == 0
    assert engines_of(options) == before, "the very same, and no second one"
    assert (shares(options), served(options)) == ({"v0002": 1.0}, "v0002")
    assert [event["event"] for event in history(options.drafts)] == ["current", "current"]


@pytest.mark.parametrize("act", ["returning", "stop_engine", "reject"])
def test_killed_on_its_way_back_it_goes_on_back(options: RolloutOptions, tmp_path: Path, act: str) -> None:
    with running_traffic(traffic_of(options, steady(0.5))):
        kill_behind(act, options, tmp_path)
        assert rollout(options) == TAKEN_BACK
    assert all_is_back(options)


def test_back_undoes_an_unfinished_rollout(options: RolloutOptions, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rollout of .*support is in progress"):
        rollout(replace(options, back=True))
    kill_behind("comparing", options, tmp_path)
    write_version(options.drafts, "v0003", "v0001")
    with pytest.raises(UserError, match=r"rollout\.json: the rollout of v0002 is not finished \(comparing\)"):
        rollout(replace(options, version="v0003"))
    with pytest.raises(UserError, match="v0002 is being rolled out with"):
        rollout(replace(options, log=tmp_path))
    assert rollout(replace(options, back=True)) == TAKEN_BACK
    assert all_is_back(options)


def test_after_a_rollback_the_engine_of_the_earlier_rollout_is_still_managed(options: RolloutOptions) -> None:
    with running_traffic(traffic_of(options, steady(0.8))):
        assert rollout(options) == 0
    (first,) = engines_of(options)
    for name in ("v0003", "v0004"):
        write_version(options.drafts, name, "v0002")
    worse, better = replace(options, version="v0003"), replace(options, version="v0004")
    with running_traffic(Traffic(options.log, {"v0002": steady(0.7), "v0003": steady(0.4), "v0004": steady(0.8)})):
        assert rollout(worse) == TAKEN_BACK
        assert engines.alive(first)
        assert rollout(better) == 0
    assert not engines.alive(first), "it gets no more traffic"
    assert shares(better) == {"v0004": 1.0}
    assert len(engines_of(better)) == 1


def test_a_rollout_of_another_draft_that_has_not_ended_comes_first(options: RolloutOptions, tmp_path: Path) -> None:
    with running_traffic(traffic_of(options, steady(0.8))):
        kill_behind("watching", options, tmp_path)
        other = replace(options, drafts=tmp_path / "drafts" / "other", version="v0001")
        write_version(other.drafts, "v0001", None)
        with pytest.raises(UserError, match=r"arms\.json: rollout support v0002 is not finished; run it again"):
            rollout(other)
        assert rollout(replace(options, back=True)) == TAKEN_BACK


def test_arms_that_changed_meanwhile_are_kept(options: RolloutOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway restarted with other flags, and a rollout that resumes or goes back."""
    wait, now = module.Rollout._wait, Arms("flags", (Arm("v0001", "http://127.0.0.1:19", 1.0, "v0001", "t1"),))

    def changing(self: Any) -> float:
        write_arms(options.log / ARMS, now)
        if self.state.version == "v0003":
            raise UserError("it does not start")
        return wait(self)

    monkeypatch.setattr(module.Rollout, "_wait", changing)
    with running_traffic(traffic_of(options, steady(0.4))):
        assert rollout(options) == TAKEN_BACK
    assert read_arms(options.log / ARMS) == now
    now = replace(now, arms=(replace(now.arms[0], url="http://127.0.0.1:29"),))
    write_version(options.drafts, "v0003", "v0001")
    with pytest.raises(UserError, match="it does not start"):
        rollout(replace(options, version="v0003"))
    assert read_arms(options.log / ARMS) == now


def test_one_that_was_approved_before_is_current_no_more_when_it_is_taken_back(options: RolloutOptions) -> None:
    make_current(options.drafts, "v0002", "Ann")
    with running_traffic(traffic_of(options, steady(0.4))):
        assert rollout(options) == TAKEN_BACK
    assert served(options) == "v0001"


def test_an_engine_with_another_model_gets_no_request(options: RolloutOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "models", lambda url: {"ours"} if url.endswith(":9") else {"theirs"})
    with pytest.raises(UserError, match="serves theirs, and requests are for ours: start it with the same target"):
        rollout(options)
    assert (shares(options), engines_of(options)) == ({"v0001": 1.0}, [])
    assert "rejected" not in {event["event"] for event in history(options.drafts)}


@pytest.mark.parametrize("fails", [False, True])
def test_behind_the_real_gateway(
    tmp_path: Path, options: RolloutOptions, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(gateway_app, "WATCH_SECONDS", 0.02)
    # Five of six drafted tokens are accepted, against three with the other engine; or it fails.
    more = {"num_accepted_draft_tokens": 5, "per_step_accepted": [3, 2], "acceptance_histogram": [0, 0, 1, 1]}
    engine = FakeEngine(name="a", usage=True, wrong=more, fails=fails)
    ended, log = threading.Event(), tmp_path / "log"

    def ask(url: str) -> None:
        with httpx.Client(verify=False) as client:
            for number in range(100_000):
                if ended.is_set():
                    return
                client.post(f"{url}/v1/completions", json={"model": "m", "prompt": f"say {number}"})

    with (
        running_app(FakeEngine(name="a", usage=True).app()) as old,
        running_app(engine.app()) as new,
        running_gateway(log, old) as url,
    ):
        client = threading.Thread(target=ask, args=(url,), daemon=True)
        client.start()
        try:
            # Both share a process with the client, so their speed means nothing.
            asked = replace(options, log=log, engine_command="", engine_url=new, share=0.5, watch=20, slower=10.0)
            assert rollout(asked) == (TAKEN_BACK if fails else 0)
            assert httpx.get(f"{new}/v1/models").is_success, "an engine that runs already is left alone"
        finally:
            ended.set()
            client.join()
    assert {arm.url: arm.share for arm in read_arms(log / ARMS).arms} == {old if fails else new: 1.0}
    assert served(options) == ("v0001" if fails else "v0002")


def test_an_engine_that_hangs_has_died(options: RolloutOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "_HEALTH_SECONDS", 0.05)
    direct = module.Rollout._direct

    def stopping(self: Any, *arguments: Any) -> bool:
        os.kill(engines_of(options)[0].pid, signal.SIGSTOP)
        return direct(self, *arguments)

    monkeypatch.setattr(module.Rollout, "_direct", stopping)
    monkeypatch.setattr(engines, "GRACE_SECONDS", 0.1)
    assert rollout(options) == TAKEN_BACK
    assert "does not answer" in state_of(options).reason
    assert all_is_back(options)


class Leaving(Traffic):
    """The first clients of the new arm leave before the first byte."""

    most = 30

    def record(self, arms: Arms) -> TrafficRecord:
        record = super().record(arms)
        if record.arm != "v0002" or self.counts["v0002"] > self.most:
            return record
        return replace(record, finish="cancelled", accepted=None, drafted=None, blocks=None, response_tokens=None)


def test_an_engine_that_is_healthy_and_hangs_has_died(
    options: RolloutOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_TOKEN_TIMEOUT", 0.1)
    hanging = ENGINE.replace("    def do_GET", "    def do_POST(self): import time; time.sleep(30)\n    def do_GET")
    (tmp_path / "engine.py").write_text(hanging.replace("http.server.HTTPServer", "http.server.ThreadingHTTPServer"))
    traffic = Leaving(options.log, {"v0001": steady(0.7), "v0002": steady(0.7)})
    traffic.most = 10**9
    with running_traffic(traffic):
        assert rollout(options) == TAKEN_BACK
    assert "does not answer" in state_of(options).reason
    assert all_is_back(options)


def test_a_gateway_that_ignores_arms_is_an_error(options: RolloutOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEED_SECONDS", 0.1)
    traffic = traffic_of(options, steady(0.8))
    traffic.heeds = False
    with running_traffic(traffic), pytest.raises(UserError, match=r"arms\.json: the gateway ignores it: none of"):
        rollout(options)
    assert (shares(options), engines_of(options)) == ({"v0001": 1.0}, [])
    assert "rejected" not in {event["event"] for event in history(options.drafts)}, "the draft is not to blame"


def test_a_forged_line_is_named_and_the_old_engine_gets_the_traffic(options: RolloutOptions) -> None:
    with (options.log / "log-00001.jsonl").open("a") as file:
        file.write('{"accepted": 5}\n')
    with (
        running_traffic(traffic_of(options, steady(0.8))),
        pytest.raises(UserError, match=r"log-00001\.jsonl:1: crc32"),
    ):
        rollout(options)
    assert all_is_back(options)
    assert "rejected" not in {event["event"] for event in history(options.drafts)}, "the draft is not to blame"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "v0009"}, "v0009: no such version; found: v0001, v0002"),
        ({"engine_command": "no-such-program {draft} {port}"}, "--engine-command no-such-program: cannot be started"),
        (
            {"engine_command": f"{PYTHON} -S -c 'raise ValueError(7)' {{draft}} {{port}}"},
            "exited before it answered: ValueError: 7",
        ),
        ({"engine_command": "vllm serve {port}"}, "it must contain {draft}"),
        ({"engine_command": "vllm 'serve"}, "No closing quotation"),
        ({"engine_command": ""}, "give either --engine-command"),
        ({"engine_url": "ftp://x", "engine_command": ""}, "give an address"),
        ({"share": 1.0}, "--share 1: out of range"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_invalid_options_are_refused(options: RolloutOptions, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        rollout(replace(options, **change))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert exit_status(refused.value) == 2
    assert (shares(options), engines_of(options)) == ({"v0001": 1.0}, [])


def test_without_a_gateway_nothing_begins(options: RolloutOptions, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="no gateway is running on it"):
        rollout(replace(options, log=other))
    (other / LOCK).touch()
    with pytest.raises(UserError, match="no gateway is running on it"):
        rollout(replace(options, log=other))
    assert State.stored(options.drafts) is None


def test_two_rollouts_of_one_draft_at_once_are_refused(options: RolloutOptions) -> None:
    with locked(options.drafts / ROLLOUT_LOCK), pytest.raises(UserError, match="another rollout is running"):
        rollout(options)
