"""The closed loop from a first draft to a better one in service. Each process is killed once on the way.

    to/run/            the first draft's run: kept, so that another loop begins with it
    to/drafts/, to/traffic/, to/*.log   versions, the gateway's log, what each program said: made again
    to/loop.json, to/loop.png           what was seen

Exit status: 0 success, 1 something went wrong (see `failures` in loop.json), 2 a mistake.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from data.files import locked, writing
from data.responses.engine_http import answers, free_ports
from distill.commands.training_process import terminated_as_interrupted
from distill.config.command_line import Overrides
from distill.config.layout import VERDICT, list_steps
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.live.alarm import Alarm, alarm
from distill.live.rollout.rollout import TAKEN_BACK
from distill.live.traffic.reader import read_traffic
from distill.live.versions import remove_read_only
from distill.run.run import claim_folder
from loop.account import LoopResult, account, alarm_behind, rates_around
from loop.clients import Clients
from loop.engines import CONSTRAINTS, ENVIRONMENT, engine_of, engine_words
from loop.family import Family, kill
from loop.picture import plot_loop
from loop.prompts import shifted_prompts, traffic_prompts
from loop.versions import shuffled_version
from result_file import write_result
from speculative.errors import UserError

RUN, DRAFTS, TRAFFIC, RESULT, ALARMS, PICTURE, LOCK = (
    "run",
    "drafts",
    "traffic",
    "loop.json",
    "alarms.json",
    "loop.png",
    ".lock",
)
CONFIG = "configs/loop.yaml"
FIRST, SECOND, TARGET, PLAIN = "v0001", "v0002", "target", "plain"
ALARM_WITHIN = 150  # requests after the shift; a later alarm is a failure
START_SECONDS = 600.0


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop."""

    config: Annotated[
        str, typer.Argument(help="config of the first draft's run; its data.heldout is the traffic before the shift")
    ] = CONFIG
    overrides: Overrides = None
    shifted: Annotated[str, typer.Option(help="prompts after the shift; default: the library's unit tests")] = ""
    engine: Annotated[str, typer.Option(help="vllm, stub (our own decoder), or auto: vllm if installed, else stub")] = (
        "auto"
    )
    to: Annotated[Path, typer.Option(help="output folder")] = Path("runs/loop")
    fast: Annotated[bool, typer.Option("--fast", help="less than half of the requests after the shift")] = False
    clients: Annotated[int, typer.Option(min=1, max=16, help="users who ask at the same time")] = 8
    alarms: Annotated[
        int, typer.Option(min=0, help="only up to the alarm, so many times, with other traffic each time")
    ] = 0


@dataclass(frozen=True)
class Plan:
    """Numbers of requests: before the shift, after it until the refresh, with the new draft, at once, and at once during the overload.

    plain: served by the target alone, to compare speeds with. before: the alarm's baseline, and more in which it must not ring.
    """

    plain: int = 60
    before: int = 260
    shifted: int = 360
    after: int = 200
    at_once: int = 8
    rush: int = 32

    @property
    def shed_above(self) -> int:
        return (self.rush + self.at_once) // 2


class LoopDemo:
    """One loop; `run` executes all stages."""

    def __init__(self, options: LoopOptions, config: RunConfig, engine: str, family: Family, turn: int = 0) -> None:
        """``turn``: among several loops; each has its own order of prompts and its own log."""
        self.options, self.config, self.engine, self.family, self.turn = options, config, engine, family, turn
        fewer = {"shifted": 150, "after": 80} if options.fast else {}
        self.to, self.plan = options.to, Plan(at_once=options.clients, **fewer)
        self.traffic, self.drafts = self.to / (f"{TRAFFIC}-{turn}" if turn else TRAFFIC), self.to / DRAFTS
        self.ports = dict(zip(("engine", "plain", "gateway"), free_ports(3), strict=True))
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.result = LoopResult(engine, ALARM_WITHIN)
        self.started = self.began = time.time()
        serving = config.serving
        asked = {
            "max_tokens": serving.max_tokens,
            "temperature": serving.temperature,
            "top_p": serving.top_p,
            "top_k": serving.top_k or -1,
            "min_p": serving.min_p,
        }
        self.clients = Clients(f"http://127.0.0.1:{self.ports['gateway']}", asked, CONSTRAINTS[engine])

    def run(self) -> None:
        """All stages.

        Raises:
            UserError: a program failed; the message has its last line.
        """
        self._first_draft()
        self.began = time.time()
        self._serve()
        if self._before():
            raise UserError(f"{self.traffic}: the alarm rang before the traffic shifted")
        self._shift()
        if self.result.alarm_after_requests is None:
            raise UserError(f"{self.traffic}: no alarm within {2 * ALARM_WITHIN} requests after the shift")
        self._more_shifted()
        self._refresh()
        self._rollout()
        self._bad_version()
        self.clients.pause(self._check)
        self.note("end")

    def run_to_alarm(self) -> dict[str, Any]:
        """Only up to the alarm. Returns {turn, false_alarm, alarm_after_requests, seconds, acceptance: {before, shifted}}; no number of
        requests if the alarm was not heard.

        Raises:
            UserError: a program failed.
        """
        self._first_draft()
        self.began = time.time()
        self._serve()
        rang = self._before()
        self._shift()
        self.clients.pause(self._check)
        for name in list(self.alive):
            kill(self.alive.pop(name))
        return {
            "turn": self.turn,
            "false_alarm": rang,
            "alarm_after_requests": self.result.alarm_after_requests,
            "seconds": time.time() - self.began,
            "acceptance": rates_around(self.traffic, self.result),
        }

    def note(self, event: str) -> None:
        """Record an event for the picture and print it."""
        seconds = time.time() - self.began
        self.result.events.append((seconds, event))
        print(f"{seconds:6.1f} s  {len(self.clients.whole):5d} answers  {event}", flush=True)

    # The parts.

    def _first_draft(self) -> None:
        run = self.config.folder
        if not (run / VERDICT).exists():
            print(f"training the first draft: {run}, log in {self.to / 'train.log'}", flush=True)
            words = ["-P", "-m", "distill.train", self.options.config, *self._overrides()]
            self._finish("train", self.family.start("train", [sys.executable, *words]))
        self._command("refresh", str(run), "--drafts", str(self.drafts))

    def _serve(self) -> None:
        for name in ("engine", "plain"):
            self.alive[name] = self._start_engine(name)
        for name in ("engine", "plain"):
            self._answering(name)
        self._start_gateway(drafting=False)
        self.note(f"{self.engine} serves the target alone")

    def _before(self) -> bool:
        """Traffic of the draft's own domain, first without a draft; returns whether the alarm rang. The gateway is killed, and killed again
        halfway, and a short overload follows.
        """
        clients, plan = self.clients, self.plan
        clients.prompts, clients.at_once = traffic_prompts(self.config, self.turn), plan.at_once
        clients.wait(plan.plain, self._check)
        with self._killed("gateway"):
            self._start_gateway()
        self.note(f"{FIRST} serves")
        clients.wait(plan.before // 2, self._check)
        with self._killed("gateway"):
            self._start_gateway()
        clients.wait(plan.before // 4, self._check)
        clients.at_once = plan.rush
        clients.wait(plan.rush, self._check)
        clients.at_once = plan.at_once
        clients.wait(plan.before // 4, self._check)
        clients.pause(self._check)
        return self._alarm().holds

    def _shift(self) -> None:
        """Traffic of another domain until the alarm rings; it is checked repeatedly."""
        clients, plan, rung = self.clients, self.plan, False
        clients.prompts, clients.at_once = shifted_prompts(self.config, self.options.shifted, self.turn), plan.at_once
        self.result.shifted_at = time.time()
        self.note("the traffic shifts")
        begun = len(clients.whole)
        while not rung:
            clients.wait(15, self._check)
            self.result.alarm_after_requests = alarm_behind(self._alarm(), self.traffic, self.result.shifted_at)
            rung = self.result.alarm_after_requests is not None
            if len(clients.whole) - begun > 2 * ALARM_WITHIN:
                break
        after = self.result.alarm_after_requests
        self.note(
            f"the alarm rings, {after} requests later" if rung else f"no alarm within {2 * ALARM_WITHIN} requests"
        )

    def _more_shifted(self) -> None:
        """More of the shifted traffic, for the refresh. The engine is killed."""
        with self._killed("engine"):
            self.alive["engine"] = self._start_engine("engine")
            self._answering("engine")
        served = sum(record.time >= self.result.shifted_at for record in read_traffic(self.traffic).records)
        self.clients.wait(max(1, self.plan.shifted - served), self._check)

    def _refresh(self) -> None:
        """Retrain the draft while traffic continues. The trainer is killed once."""
        self.clients.at_once = 1
        words = (
            "refresh",
            str(self.config.folder),
            "judge.live=never",
            "--traffic",
            str(self.traffic),
            "--drafts",
            str(self.drafts),
            "--target-version",
            TARGET,
            "--margin",
            "0.02",
        )
        self.note("refresh begins")
        folder = self.config.folder.with_name(f"{self.config.name}-refresh-{SECOND}")
        first = self._start(*words)
        self._reach("refresh", first, lambda: bool(list_steps(folder)[1:]))
        note = folder.with_name(f"{folder.name}.pid")
        with self._killed("trainer"), contextlib.suppress(OSError, ValueError):
            _kill_number(json.loads(note.read_text(encoding="utf-8"))[0])
            first.wait()
        self._command(*words)
        self.note("the gate passes: v0002 is published")

    def _rollout(self) -> None:
        """Roll the new draft out. The rollout is killed once."""
        words = self._rollout_words(SECOND, share=0.5)
        first = self._start_rollout(SECOND, words)
        with self._killed("rollout"):
            _kill_number(first.pid)
            first.wait()
        self._command(*words)
        self.note(f"{SECOND} serves all traffic")
        self.result.recovered_at = time.time()
        kill(self.alive.pop("engine"))
        self.clients.wait(self.plan.after, self._check)

    def _start_rollout(self, what: str, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start a rollout; keep the traffic low until the engines are compared."""
        self.note(f"rollout of {what} begins")
        self.clients.at_once = 1
        process = self._start(*words)
        said, version = self.to / "rollout.log", words[2]
        self._reach("rollout", process, lambda: f"{version} comparing" in said.read_text(encoding="utf-8"))
        self.clients.at_once = self.plan.at_once
        return process

    def _bad_version(self) -> None:
        """Roll out a draft with shuffled weights, which must be taken back."""
        name = shuffled_version(self.drafts, SECOND)
        process = self._start_rollout(f"{name}, with shuffled weights,", self._rollout_words(name, share=0.5))
        self._finish("rollout", process, status=TAKEN_BACK)
        told = json.loads((self.drafts / "rollout.json").read_text(encoding="utf-8"))
        self.result.rolled_back.append({"version": name, "stage": told["stage"], "reason": told["reason"]})
        self.note(f"{name} is taken back")
        self.clients.wait(max(1, self.plan.after // 4), self._check)

    # Helpers of the stages.

    def _alarm(self) -> Alarm:
        return alarm(read_traffic(self.traffic), FIRST)

    def _overrides(self) -> list[str]:
        return [*(self.options.overrides or []), f"output={self.to}", f"name={RUN}"]

    def _start_engine(self, name: str) -> subprocess.Popen[bytes]:
        draft = str((self.drafts / FIRST).resolve()) if name == "engine" else "none"
        words = self._engine_words(draft, str(self.ports[name]))
        return self.family.start(name, words, **ENVIRONMENT)

    def _engine_words(self, draft: str, port: str) -> list[str]:
        return engine_words(self.engine, self.config, draft, port, str((self.drafts / FIRST).resolve()))

    def _start_gateway(self, drafting: bool = True) -> None:
        words = [
            "gateway",
            "--target-version",
            TARGET,
            "--log",
            str(self.traffic),
            "--text",
            "--port",
            str(self.ports["gateway"]),
        ]
        if drafting:
            words += ["--engine", self._url("engine"), "--draft-version", FIRST]
            words += ["--plain-engine", self._url("plain"), "--shed-above", str(self.plan.shed_above)]
        else:
            words += ["--engine", self._url("plain"), "--draft-version", PLAIN]
        self.alive["gateway"] = self._start(*words)
        self._answering("gateway")

    def _rollout_words(self, version: str, share: float) -> tuple[str, ...]:
        command = shlex.join(self._engine_words("{draft}", "{port}"))
        watch = str(self.plan.after // 2)
        return (
            "rollout",
            str(self.drafts),
            version,
            "--log",
            str(self.traffic),
            "--engine-command",
            command,
            "--share",
            str(share),
            "--watch",
            watch,
            "--slower",
            "1",
        )

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def _answering(self, name: str) -> None:
        """Wait until a server answers.

        Raises:
            UserError: it ended, or does not answer.
        """
        start = time.monotonic()
        while not answers(self._url(name)):
            self.family.check(name, self.alive[name])
            if time.monotonic() - start > START_SECONDS:
                raise UserError(f"{name} does not answer within {START_SECONDS:g} s: {self.to / f'{name}.log'}")
            time.sleep(0.1)

    def _check(self) -> None:
        for name, process in self.alive.items():
            self.family.check(name, process)

    @contextlib.contextmanager
    def _killed(self, name: str) -> Iterator[None]:
        """Kill a server, or what the block kills, with SIGKILL. The block restarts it."""
        self.note(f"kill -9: {name}")
        moment = time.time()
        if name in self.alive:
            kill(self.alive.pop(name))
        yield
        self.result.kills.append({"what": name, "seconds": moment - self.began, "down_seconds": time.time() - moment})

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start one of the understudy commands."""
        return self.family.start(words[0], [sys.executable, "-P", "-m", "distill.cli", *words], **ENVIRONMENT)

    def _reach(self, name: str, process: subprocess.Popen[bytes], place: Callable[[], bool]) -> None:
        """Wait until a command reaches the point where it is to be killed."""

        def check() -> None:
            self._check()
            self.family.check(name, process)

        self.clients.wait_until(place, check)

    def _command(self, *words: str, status: int = 0) -> None:
        self._finish(words[0], self._start(*words), status)

    def _finish(self, name: str, process: subprocess.Popen[bytes], status: int = 0) -> None:
        self.clients.wait_until(lambda: process.poll() is not None, self._check)
        if process.returncode != status:
            said = f"{self.family.last_line(name)} (all in {self.to / f'{name}.log'})"
            raise UserError(f"{name}: exit status {process.returncode}, not {status}: {said}")


def loop_demo(options: LoopOptions) -> int:
    """Run the loop and write loop.json and loop.png; return the exit status.

    Raises:
        UserError: a missing engine, or a program that failed.
    """
    engine = engine_of(options.engine)
    with writing(options.to):
        options.to.mkdir(parents=True, exist_ok=True)
    config = load_config(options.config, [*(options.overrides or []), f"output={options.to}", f"name={RUN}"])
    claim_folder(config)
    busy = f"{options.to}: another loop is running there; wait for it, or give another --to"
    with locked(options.to / LOCK, busy), terminated_as_interrupted(), Family(options.to) as family:
        clear_folder(options.to)
        if options.alarms:
            return _alarms(options, config, engine, family)
        demo = LoopDemo(options, config, engine, family)
        demo.run()
        found = account(demo.traffic, demo.clients, demo.result, time.time() - demo.started)
    with writing(options.to):
        write_result(options.to / RESULT, found)
        plot_loop(options.to / PICTURE, demo.traffic, demo.result, demo.began)
    for line in found["failures"]:
        print(f"understudy: {line}", file=sys.stderr)
    print(f"{options.to / RESULT}, {options.to / PICTURE}")
    return 1 if found["failures"] else 0


def _alarms(options: LoopOptions, config: RunConfig, engine: str, family: Family) -> int:
    """Several loops up to the alarm; writes alarms.json after each. Returns 1 if one rang before the shift or too late."""
    loops: list[dict[str, Any]] = []
    while len(loops) < options.alarms:
        loops.append(LoopDemo(options, config, engine, family, turn=len(loops)).run_to_alarm())
        with writing(options.to):
            write_result(options.to / ALARMS, {"engine": engine, "alarm_within": ALARM_WITHIN, "loops": loops})
        print(f"loop {len(loops)} of {options.alarms}: {loops[-1]}", flush=True)
    wrong = [
        loop
        for loop in loops
        if loop["false_alarm"] or (loop["alarm_after_requests"] or ALARM_WITHIN + 1) > ALARM_WITHIN
    ]
    print(
        f"{len(wrong)} of {len(loops)} loops rang before the shift or later than {ALARM_WITHIN} requests: {options.to / ALARMS}"
    )
    return 1 if wrong else 0


def clear_folder(to: Path) -> None:
    """Delete what an earlier loop left, except the first draft's run."""
    for path in to.iterdir():
        if path.name in (RUN, LOCK):
            continue
        if path.is_dir():
            remove_read_only(path)
        else:
            path.unlink()


def _kill_number(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
