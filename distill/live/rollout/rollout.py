"""`understudy rollout`: the new version's engine gets a share of the traffic, then all of it or none.

Engines share no way to swap a draft, so the new version gets its own engine. arms.json in the gateway's log directory is the only control.
Each stage is stored before its first action, and each action may be repeated, so a killed rollout resumes.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from data.files import locked
from data.responses.engine_http import answers
from distill.faults import Interrupted
from distill.live.arms import ARMS, Arm, Arms, read_arms, write_arms
from distill.live.options import RolloutOptions
from distill.live.rollout import engine as engines
from distill.live.rollout import state as states
from distill.live.rollout.judgement import SEEN, Criteria, Decision, GateGain, Served, Tally, compare, watch
from distill.live.rollout.state import State, arms_before, gateway_runs
from distill.live.traffic.reader import LogTail, end_of
from distill.live.versions import Version, current_version, make_current, reject
from speculative.errors import UserError

TAKEN_BACK = 3  # exit status
START_SECONDS = 900.0  # within which the new engine must answer
DRAIN_SECONDS = 30.0  # that the last requests of an engine may take
SILENT_POLLS = 3  # an engine that fails this number of checks in a row is treated as dead
REPORT_SECONDS = 10.0
HEED_SECONDS = 5.0  # within which a gateway must have read arms.json
# If chance is less likely than this to keep every conversation from the new engine, the gateway ignores arms.json.
_UNHEEDED = 1e-6


def rollout(options: RolloutOptions) -> int:
    """Put a version into service or take it back, or resume an interrupted rollout; return the exit status.

    Raises UserError: no such version, an unfinished rollout of another version, no gateway on the log directory or one that ignores
    arms.json, an engine that does not start, a port in use, an option out of range. Raises Interrupted: Ctrl-C; both engines stay as they
    are.
    """
    states.check_options(options)
    if not options.drafts.is_dir() and (named := Path("drafts") / options.drafts).is_dir():
        options = dataclasses.replace(options, drafts=named)
    version = states.wanted_version(options)
    busy = f"{options.drafts}: another rollout is running there; wait for it or stop it"
    with locked(options.drafts / states.ROLLOUT_LOCK, busy):
        state = states.opened(options, version)
        try:
            return Rollout(options, version, state).run()
        except KeyboardInterrupt:
            words = "run the same command to resume, or with --back to undo"
            raise Interrupted(f"{state.version} stays in stage {state.stage}; {words}") from None


class Rollout:
    """A rollout, from its stored state to its end."""

    def __init__(self, options: RolloutOptions, version: Version, state: State) -> None:
        self.options, self.version, self.state = options, version, state
        self.arms_file = Path(state.log) / ARMS
        self._reported = -math.inf
        self._process: psutil.Process | None = None

    def run(self) -> int:
        """Run all remaining stages; return the exit status."""
        stages = {
            "starting": self._start,
            "comparing": self._compare,
            "watching": self._watch,
            "finishing": self._finish,
            "returning": self._return,
        }
        if self.options.back and self.state.stage != "finishing":
            self._enter("returning", "--back was given")
        try:
            return 0 if self.state.resume(stages) == "done" else TAKEN_BACK
        except UserError as error:
            if self.state.stage not in ("finishing", "returning"):
                # Nothing would watch the new engine, so the old one serves until the user fixed the mistake.
                self.state.blames = False
                self._enter("returning", str(error))
                self._return()
            raise

    def _enter(self, stage: str, text: str) -> None:
        if stage in ("comparing", "watching"):
            self.state.place = end_of(Path(self.state.log))
        self.state.enter(self.options.drafts, stage, text)
        print(f"{time.strftime('%H:%M:%S')} {self.state.version} {stage}: {text}", flush=True)

    def _start(self) -> None:
        state = self.state
        if state.engine.mark and self._has_died():
            words = engines.engine_words(self.options.engine_command, self.version.folder, state.engine.port)
            self._process = engines.start_engine(state.engine, words, self._engine_log())
        seconds = self._wait()
        # The gateway may have been restarted meanwhile with other flags.
        state.before = arms_before(self.arms_file.parent)
        self._check_models()
        share = f"{state.share:.0%} of the conversations"
        self._enter("comparing", f"{state.engine.url} answers after {seconds:.0f} s and gets {share}")

    def _wait(self) -> float:
        """Wait for the engine; return the seconds that it took."""
        start = time.monotonic()
        while not answers(self.state.engine.url):
            if self._has_died():
                log = self._engine_log()
                raise UserError(f"--engine-command: exited before it answered: {engines.last_line(log)} (log: {log})")
            if time.monotonic() - start > START_SECONDS:
                raise UserError(f"{self.state.engine.url} does not answer within {START_SECONDS:g} s")
            time.sleep(engines.POLL_SECONDS)
        return time.monotonic() - start

    def _check_models(self) -> None:
        """Raises UserError if the new engine would refuse requests for the old engine's model."""
        names = engines.models(self.state.engine.url)
        urls = [arm.url for arm in self.state.before.arms if arm.drafts and arm.share]
        missing = {name for url in urls for name in engines.models(url)} - names
        if names and missing:
            raise UserError(
                f"{self.state.engine.url}: serves {', '.join(sorted(names))}, and requests are for {', '.join(sorted(missing))}: start it "
                "with the same target under the same name (--served-model-name)"
            )

    def _compare(self) -> None:
        if self._direct(self.state.share):
            # A run killed before this stored a start that did not happen.
            self.state.place = end_of(Path(self.state.log))
            self.state.store(self.options.drafts)
        criteria, heeds, unheeded = self._criteria(), time.monotonic() + HEED_SECONDS, 0

        def judge(new: Served, old: Served) -> Decision:
            nonlocal unheeded
            self.state.old = old
            if time.monotonic() < heeds:
                unheeded = old.conversations
            elif not new.requests + new.left:
                missed = old.conversations - unheeded
                if missed * math.log1p(-self.state.share) < math.log(_UNHEEDED):
                    raise UserError(
                        f"{self.arms_file}: the gateway ignores it: none of {missed:,} conversations reached the new engine. "
                        "Is `understudy gateway` running with this --log?"
                    )
            return compare(new, old, criteria)

        self._look(judge, "watching")

    def _watch(self) -> None:
        self._direct(1.0)
        criteria = self._criteria()
        self._look(lambda new, _: watch(new, self.state.old, criteria), "finishing")

    def _look(self, judge: Callable[[Served, Served], Decision], following: str) -> None:
        """Poll what the new engine served since the stage began, until there is a decision or it died."""
        log, url, silent, left = Path(self.state.log), self.state.engine.url, 0, 0
        tail = LogTail(log, self.state.place or end_of(log))
        mine, others = Tally(), Tally()
        tallies = {arm.name: others for arm in self.state.before.arms if arm.drafts} | {self.state.version: mine}
        while True:
            for record in tail.read():
                if record.arm in tallies:
                    tallies[record.arm].add(record)
            new = mine.served()
            # If clients left, ask for a token: an engine may be healthy and still hang.
            if answers(url) and (new.left == left or engines.generates(url)):
                silent, left = 0, new.left
            else:
                silent += 1
            if self._has_died():
                output = engines.last_line(self._engine_log()) or "nothing"
                return self._enter("returning", f"the engine died; its last output: {output}")
            if silent >= SILENT_POLLS:
                return self._enter("returning", f"{url} does not answer")
            decision = judge(new, others.served())
            if decision.action != "wait":
                return self._enter(following if decision.action == "on" else "returning", decision.reason)
            self._tell(decision)
            time.sleep(engines.POLL_SECONDS)

    def _finish(self) -> None:
        """Remove the old arms, move `current`, and stop the old engine if a rollout started it."""
        self._direct(1.0, alone=True)
        make_current(self.options.drafts, self.state.version, "rollout")
        old, urls = self.state.before_engine, [arm.url for arm in self.state.before.arms if arm.drafts]
        if old is not None and old.url in urls:
            engines.stop_engine(old, DRAIN_SECONDS)
            urls.remove(old.url)
        for url in urls:
            print(f"{url} gets no more traffic. The rollout did not start it: stop it yourself", flush=True)
        self._enter("done", f"{self.state.engine.url} serves all traffic; current -> {self.state.version}")

    def _return(self) -> None:
        """Restore the old arms, and stop the new engine if the rollout started it."""
        reason = self.state.reason
        if self._directs():
            write_arms(self.arms_file, self.state.before)
        for arm in self.state.before.arms:
            if arm.share and not answers(arm.url):
                print(f"arms.{arm.name}: {arm.url} does not answer, but gets its traffic back", flush=True)
        engines.stop_engine(self.state.engine, DRAIN_SECONDS)
        if self.state.blames:
            reject(self.options.drafts, self.state.version, f"rollout: {reason}")
            self._point_back()
        self._enter("back", reason)

    def _point_back(self) -> None:
        """Point `current` at the version that is served, if this one was approved before its rollout."""
        current = current_version(self.options.drafts)
        served = max(self.state.before.arms, key=lambda arm: arm.share).draft_version
        if current is not None and current.name == self.state.version and (self.options.drafts / served).is_dir():
            make_current(self.options.drafts, served, "rollout")

    def _directs(self) -> bool:
        """Whether arms.json was written by this rollout or is unreadable."""
        with contextlib.suppress(UserError):
            return read_arms(self.arms_file).by == self._by()
        return True

    def _by(self) -> str:
        return f"rollout {self.options.drafts.name} {self.state.version}"

    def _direct(self, share: float, alone: bool = False) -> bool:
        """Give the new engine this share and the others the rest; return whether arms.json changed. ``alone``: remove the others."""
        before = self.state.before
        left = [] if alone else [arm for arm in before.arms if arm.drafts]
        others = [dataclasses.replace(arm, share=arm.share * (1 - share)) for arm in left]
        others += [arm for arm in before.arms if not arm.drafts]
        target = next(arm for arm in before.arms if arm.drafts).target_version
        new = Arm(self.state.version, self.state.engine.url, share, self.state.version, target)
        arms = Arms(self._by(), (*others, new))
        if changed := read_arms(self.arms_file) != arms:
            write_arms(self.arms_file, arms)
        return changed

    def _has_died(self) -> bool:
        if not self.state.engine.mark:
            return False
        self._process = self._process or engines.find_engine(self.state.engine)
        return self._process is None or not engines.alive(self._process)

    def _engine_log(self) -> Path:
        return self.options.drafts / f"engine-{self.state.version}.log"

    def _criteria(self) -> Criteria:
        options, arms = self.options, self.state.before.arms
        gate = gate_of(self.version, {arm.draft_version for arm in arms if arm.drafts and arm.share})
        return Criteria(self.state.share, options.margin, options.slower, options.requests, options.watch, gate)

    def _tell(self, decision: Decision) -> None:
        """Print the progress every REPORT_SECONDS."""
        if time.monotonic() - self._reported < REPORT_SECONDS:
            return
        self._reported = time.monotonic()
        more, to_see = "", decision.to_see
        if to_see is not None and self.state.stage == "comparing":
            more = f"; a difference of {SEEN:g} shows in about {to_see:,} requests"
        more += "" if gateway_runs(Path(self.state.log)) else "; no gateway is running"
        print(f"{time.strftime('%H:%M:%S')} {self.state.stage}: {decision.reason}{more}", flush=True)


def gate_of(version: Version, served: set[str]) -> GateGain | None:
    """The gate's interval from the provenance; None for a version without a gate, or if not its parent is served."""
    if served != {version.parent}:
        return None
    try:
        expected = version.provenance["expected_gain"]
        low, high = expected["tau_ci"]
        return GateGain(int(expected["gamma"]), float(low), float(high))
    except (KeyError, TypeError, ValueError):
        return None
