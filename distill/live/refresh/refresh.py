"""`understudy refresh RUN --traffic DIR`: reasons, training, gate, version. Each stage writes its result, so a killed refresh can resume.

runs/NAME-refresh-v0002/refresh.json   stage, reasons and gate, which are not computed again
                        traffic/       the export of the log
                        probe/         the run that measures headroom, deleted at the end
                        refresh.yaml   the training's config; the folder is that run
"""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill.commands.training_process import (
    TrainingFailed,
    launcher_words,
    running_twin,
    terminated_as_interrupted,
    train_apart,
)
from distill.config.layout import PROMPTS, RESPONSES, TRAINING, VERDICT
from distill.config.load import load_config, load_run
from distill.live.alarm import Reason, alarm
from distill.live.arms import ARMS, read_arms
from distill.live.options import ExportTrafficOptions, RefreshOptions
from distill.live.refresh.gate import judge_gate
from distill.live.refresh.plan import adopt_stores, student_of, write_probe, write_training
from distill.live.refresh.reasons import Headroom, Payback, headroom, own_words, payback
from distill.live.refresh.state import (
    KEPT,
    NOT_NEEDED,
    PUBLISHED,
    REFUSED,
    STATUS,
    UNTRAINED,
    Reasons,
    State,
    refresh_folder,
)
from distill.live.rollout.state import State as RolloutState
from distill.live.traffic.export import export_traffic
from distill.live.traffic.reader import TrafficLog, moment_of, read_traffic, served_by
from distill.live.versions import Version, current_version, make_current, prune, publish, waiting_version
from distill.run.checkpoint import judged_scores
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from distill.run.verdict_record import drafting_to_serve, load_verdict
from speculative.errors import UserError
from speculative.measure.intervals import interval

TRAFFIC, PROBE = "traffic", "probe"
PROBE_STEPS = 30  # trial steps on fresh traffic that measure the headroom
KEPT_VERSIONS = 5  # the newest; the current one and its parent always stay
FEWEST_PROMPTS = 24  # to train on; a probe on fewer is not meaningful
OWN_KEYS = ("name", "output", "target", "serving", "data.train", "data.heldout", "student.init", "student.path")
R = TypeVar("R", bound=Reason)
# Options that must be the same when a refresh resumes.
FIXED = ("share", "margin", "payback_days", "target_version")


def refresh_command(options: RefreshOptions, console: Console) -> int:
    """Run a refresh, or resume a killed one; return the exit status.

    Raises UserError: an option out of range, a run without a verdict, unusable traffic, or a folder in use. Raises Interrupted: Ctrl-C
    during training, which stopped with a checkpoint.
    """
    _check(options)
    name = load_run(options.run, options.trust_remote_code).name
    drafts = options.drafts or Path("drafts") / name
    load_verdict(options.run)
    served = current_version(drafts)
    home = _home(options.run, served)
    load_run(home, options.trust_remote_code)  # Check it: the following steps train, judge and publish with it.
    log = _usable_log(options.traffic, options.target_version, home) if options.traffic is not None else None
    if served is None and not options.dry_run:
        served = _first(options, drafts, console)
    waiting = waiting_version(drafts)
    if waiting is not None and options.approve and not options.force:
        make_current(drafts, waiting.name, options.approve)
        _say(console, f"{waiting.folder} is current, approved by {options.approve}")
        return 0
    if log is None:
        _say(console, f"{drafts}: {served.name if served else 'no version'} is current")
        return 0
    version = served.name if served else "v0001"
    if served is not None and served.parent is not None and home == options.run:
        _say(console, f"note: {served.provenance['run']} is missing, so {version} is compared with the text of {home}")
    served_by(log, version)  # refused here, before a folder is made
    with refresh_folder(options, options.run.parent / f"{name}-refresh-", drafts, version, console) as folder:
        if folder is None:
            return 0
        try:
            with terminated_as_interrupted():
                return _Refresh(options, console, folder, drafts, home, served, version, log).run()
        except TrainingFailed as failed:
            kept = "" if options.dry_run else f" (log: {folder}.log); the same command resumes"
            print(f"understudy: {folder}: {failed}{kept}", file=sys.stderr)
            return 1


def _check(options: RefreshOptions) -> None:
    for name, value, most in (("share", options.share, 1.0), ("margin", options.margin, 1.0)):
        if not 0 < value <= most:
            raise UserError(f"--{name} {value:g}: give a number above 0 and at most 1")
    if options.payback_days <= 0:
        raise UserError(f"--payback-days {options.payback_days:g}: give a number above 0")
    for word in options.overrides or ():
        if word.startswith(OWN_KEYS):
            raise UserError(f"{word}: a refresh sets this key itself; remove the override")
    if options.dry_run and options.approve:
        raise UserError("--dry-run publishes nothing that --approve could make current; use one of the two")


def _first(options: RefreshOptions, drafts: Path, console: Console) -> Version:
    """Publish RUN's best draft as v0001 and make it current; complete what a killed call left."""
    version = publish(options.run.resolve(), drafts, {"approved_by": options.approve or None}, name="v0001")
    make_current(drafts, version.name, options.approve or "refresh: the draft of the run")
    _say(console, f"{version.folder}: the first version, from the best draft of {options.run}; `current` points to it")
    return version


def _home(run: Path, served: Version | None) -> Path:
    """The run that made the served version if it still has its text, else ``run``."""
    own = run if served is None or served.parent is None else Path(served.provenance["run"])
    return own if (own / PROMPTS / TRAIN_FILE).exists() and (own / VERDICT).exists() else run


def _usable_log(traffic: Path, target_version: str, home: Path) -> TrafficLog:
    log = read_traffic(traffic)
    texts = [record for record in log.records if record.response_ids]
    if not texts:
        raise UserError(f"{traffic}: {len(log.records):,} requests, none with text; start the gateway with --text")
    target = str(Store(home / RESPONSES / TRAINING).manifest()["target"])
    versions = {target_version} if target_version else {target, load_run(home, True).target.path}
    others = sorted({record.target_version for record in texts} - versions)
    if all(record.target_version in others for record in texts):
        raise UserError(
            f"{traffic}: all text comes from another target version ({', '.join(others)[:200]}) than {home} "
            f"({', '.join(sorted(versions))}); give its name in the log with --target-version, or train a run for the new target"
        )
    if len(texts) < FEWEST_PROMPTS:
        raise UserError(f"{traffic}: {len(texts)} requests with text; at least {FEWEST_PROMPTS} are needed; log more")
    return log


@dataclass
class _Refresh:
    """One refresh, stage by stage. home: the run of the served version; version: its name in the log."""

    options: RefreshOptions
    console: Console
    folder: Path
    drafts: Path
    home: Path
    served: Version | None
    version: str
    log: TrafficLog
    state: State = field(init=False)

    def run(self) -> int:
        """Run all unfinished stages; return the exit status."""
        self._begin()
        stages = {
            "deciding": self._decide,
            "training": self._train,
            "judging": self._judge,
            "publishing": self._publish,
        }
        if self.options.dry_run:
            stages = {"deciding": self._decide}
        last = self.state.resume(stages)
        if last in UNTRAINED or self.options.dry_run:
            shutil.rmtree(self.folder / TRAFFIC, ignore_errors=True)
        if last in STATUS:
            shutil.rmtree(self.folder / PROBE, ignore_errors=True)
            if not self.options.dry_run:
                self._say(f"{last}: {self.folder / State.FILE}")
        return STATUS.get(last, 0)

    def _begin(self) -> None:
        """Load the state of a killed refresh, or make a new one; first wait for a training that it left, which uses the folder. Reasons
        found with other options are dropped.
        """
        if (twin := running_twin(self._training_log)) is not None:
            self._say(f"process {twin.pid} of a killed refresh is still training: waiting for it")
            twin.wait()
        chosen = {name: getattr(self.options, name) for name in FIXED} | {
            "overrides": list(self.options.overrides or [])
        }
        self.state = State.stored(self.folder) or State(
            stage="deciding",
            home=str(self.home),
            parent=self.version,
            version=self.folder.name.rpartition("-")[2],
            options=chosen,
        )
        before = self.state.options
        changed = [key for key, value in chosen.items() if before.get(key) != value]
        if changed and self.state.stage != "deciding":
            key = changed[0]
            raise UserError(
                f"{self.folder}: a refresh with {key} {before.get(key)} (not {chosen[key]}) has already begun to train there; "
                "give the same value, or delete the folder"
            )
        if changed:
            for name in (TRAFFIC, PROBE):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.state.options, self.state.reasons, self.state.window = chosen, Reasons(), None

    def _say(self, words: str) -> None:
        _say(self.console, words)

    def _enter(self, stage: str, words: str) -> None:
        self._say(words)
        self.state.enter(self.folder, stage, words)

    def _reason(self, name: str, find: Callable[[], R]) -> R:
        """Compute a reason, or take it from the state; print it."""
        if getattr(self.state.reasons, name) is None:
            self.state.reasons = self.state.reasons.model_copy(update={name: find()})
            self.state.store(self.folder)
        reason: R = getattr(self.state.reasons, name)
        self._say(reason.sentence)
        return reason

    def _decide(self) -> None:
        """Decide whether to train. Without an alarm, the other reasons are computed only with --force or --dry-run."""
        options = self.options
        needed = self._reason("alarm", lambda: alarm(self.log, self.version)).holds
        if needed or options.force or options.dry_run:
            needed = self._worth_it() and needed
        missing = self.state.reasons.missing()
        words = "decision: train" if needed else f"decision: do not train (no {', no '.join(missing)})"
        if "text" in missing:
            self._enter(REFUSED, f"{words}; such text is never trained on, not even with --force")
        elif needed or options.force:
            self._enter("training", words + ("" if needed else "; training anyway (--force)"))
        else:
            self._enter(NOT_NEEDED, words)

    def _worth_it(self) -> bool:
        """Compute text check, headroom and payback; whether all hold."""
        if not self._reason("text", lambda: own_words(self.home, self._export())).holds:
            return False
        gain = self._reason("headroom", self._headroom)
        return self._reason("payback", lambda: self._payback(gain)).holds and gain.holds

    def _headroom(self) -> Headroom:
        export, probe = self._export(), self.folder / PROBE
        student, overrides = student_of(self.served, self.home), self.options.overrides or []
        path = write_probe(self.home, student, export, probe, PROBE_STEPS, overrides)
        adopt_stores(probe, [export])
        self._apart(path)
        return headroom(load_verdict(probe), PROBE_STEPS)

    def _export(self) -> Path:
        """Export the traffic once; later requests belong to the next refresh."""
        export, traffic = self.folder / TRAFFIC, self.log.directory
        if self.state.window is None:
            shutil.rmtree(export, ignore_errors=True)
            version = self.options.target_version
            window = export_traffic(ExportTrafficOptions(traffic, self.home, export, target_version=version))
            if window.train < FEWEST_PROMPTS:
                why = "; ".join(f"{count:,} {reason}" for reason, count in window.left_out.items())
                raise UserError(f"{traffic}: {window.train} requests to train on; {FEWEST_PROMPTS} are needed ({why})")
            self.state.window = window
            self.state.store(self.folder)
        return export

    def _payback(self, gain: Headroom) -> Payback:
        verdict, steps = load_verdict(self.home), load_config(self._config()).train.steps
        processes = re.search(r"--num[_-]processes[ =](\d+)", self.options.launcher)
        others = sum(verdict.seconds.get(stage, 0.0) for stage in ("self_checks", "judge", "verdict"))
        seconds = (int(processes[1]) if processes else 1) * (gain.train_seconds / gain.steps * steps + others)
        records = [record for record in self.log.records if record.draft_version == self.version]
        costs = verdict.costs or load_verdict(self.options.run).costs  # models of the same shapes
        return payback(costs, records, gain.tau, gain.tau_gain, seconds, self.options.payback_days)

    def _config(self) -> Path:
        """Write the training's config and return its path."""
        student, overrides = student_of(self.served, self.home), self.options.overrides or []
        return write_training(self.home, student, self._export(), self.folder, self.options.share, overrides)

    def _train(self) -> None:
        if not (self.folder / VERDICT).exists():
            path = self._config()
            adopt_stores(self.folder, [self.home, self.folder / TRAFFIC, self.folder / PROBE])
            self._say(f"training {self.folder}: {load_config(path).train.steps} steps, log in {self.folder}.log")
            self._apart(path)
        self._enter("judging", f"{self.folder} is trained")

    def _apart(self, path: Path) -> None:
        """Train in a separate process unless finished."""
        config = load_config(path)
        if not (config.folder / VERDICT).exists():
            train_apart(config, [str(path)], self._training_log, launcher_words(self.options.launcher))

    @property
    def _training_log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def _judge(self) -> None:
        old = StoredPrompts(self.home / PROMPTS / HELDOUT_FILE).column("prompt_id").to_pylist()
        looks = max(1, len(judged_scores(self.folder)) - 1)
        verdict = load_verdict(self.home)
        parallel = drafting_to_serve(verdict, verdict.drafts[-1].drafting == "parallel") == "parallel"
        served = str(student_of(self.served, self.home))
        gate = self.state.gate = judge_gate(self.folder, served, set(old), self.options.margin, looks, parallel)
        for side, parts in (("new", gate.new), ("old", gate.old)):
            for part in parts:
                assert part.alpha is not None
                alpha = f"alpha {part.alpha.gain:+.4f} {interval(part.alpha.ci, '+.4f')}"
                self._say(f"gate, {side} {part.name}: {alpha}, tau {part.tau.gain:+.3f}, {part.prompts} prompts")
        if gate.passed:
            self._enter("publishing", "gate: passed")
        else:
            self._enter(KEPT, f"gate: keep the old draft: {'; '.join(gate.failures)}")

    def _publish(self) -> None:
        state, options, gate, window = self.state, self.options, self.state.gate, self.state.window
        assert gate is not None
        assert window is not None
        provenance = {
            "data_window": [moment_of(window.since), moment_of(window.until)],
            "traffic": str(options.traffic),
            "traffic_requests": window.train,
            "share": options.share,
            "approved_by": options.approve or None,
            "gate": {
                side: {part.name: part.alpha.gain for part in parts if part.alpha}
                for side, parts in (("new", gate.new), ("old", gate.old))
            },
            "expected_gain": {"gamma": gate.gamma, "tau_ci": gate.new[0].tau.ci},  # the rollout compares with it
        }
        version = publish(self.folder.resolve(), self.drafts, provenance, parent=state.parent, name=state.version)
        state.published = str(version.folder)
        if options.approve:
            make_current(self.drafts, state.version, options.approve)
        prune_unused(self.drafts, KEPT_VERSIONS, options.traffic, state.version, self.console)
        self._enter(PUBLISHED, f"{version.folder}: published")


def prune_unused(drafts: Path, keep: int, traffic: Path | None, name: str, console: Console) -> None:
    """Remove old versions, except those in arms.json or being rolled out, which may not be in arms.json yet."""
    arms, rolled = traffic / ARMS if traffic else None, RolloutState.stored(drafts)
    used = {arm.draft_version for arm in read_arms(arms).arms} if arms is not None and arms.exists() else set()
    used |= {name} | ({rolled.version} if rolled is not None else set())
    if gone := prune(drafts, keep, used):
        _say(console, f"pruned: {', '.join(gone)}")


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False, soft_wrap=True)
