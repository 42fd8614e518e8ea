"""`understudy refresh RUN --traffic DIR`: reasons, training, gate, version. Each stage writes what it found, so a killed one goes on.

runs/NAME-refresh-v0002/refresh.json   reasons, decision, gate, outcome; then the same is not asked again
                        traffic/       what was exported of the log
                        probe/         the run that looks for headroom, while it is needed
                        refresh.yaml   the training's config; the folder is that run's own

Exit status: 0 published, or not needed; 1 the gate keeps the old draft, or the training failed; 2 a mistake.
"""

import datetime
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from data.files import write_json, writing
from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill.commands.training_process import TrainingFailed, running_twin, terminated_as_interrupted, train_apart
from distill.config.layout import CHECKPOINTS, PROMPTS, RESPONSES, TRAINING, VERDICT
from distill.config.run import RunConfig
from distill.live.alarm.alarm import Alarm, Reason, alarm
from distill.live.arms import ARMS, read_arms
from distill.live.refresh.folder import NOT_NEEDED, REFUSED, STATE, UNTRAINED, read_state, refresh_folder
from distill.live.refresh.gate import judge_gate
from distill.live.refresh.options import RefreshOptions
from distill.live.refresh.plan import (
    PROBE,
    adopt_stores,
    probe_config,
    refresh_config,
    run_config,
    student_of,
    write_config,
)
from distill.live.refresh.reasons import Headroom, OwnText, Payback, headroom, own_words, payback
from distill.live.rollout.state import read_state as read_rollout
from distill.live.traffic.export import export_traffic
from distill.live.traffic.exported import drop_export, note_use
from distill.live.traffic.options import ExportTrafficOptions
from distill.live.traffic.reader import TrafficLog, acceptance_of, read_traffic
from distill.live.versions import (
    Version,
    current_version,
    make_current,
    prune,
    publish,
    waiting_version,
)
from distill.run.checkpoint import judged_scores
from distill.run.folder import load_verdict
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from distill.run.verdict_record import drafting_to_serve
from speculative.errors import UserError

TRAFFIC = "traffic"
KEPT, PUBLISHED = "kept the old one", "published"
FEWEST_PROMPTS = 24  # to train on; a probe of fewer tells nothing
OWN_KEYS = (
    "name",
    "output",
    "resume",
    "target",
    "serving",
    "data.train",
    "data.heldout",
    "student.init",
    "student.path",
)
R = TypeVar("R", bound=Reason)
# Options that decide what a refresh is: one that goes on must be asked for with the same.
ASKED = ("share", "probe_steps", "margin", "false_alarms", "drop", "payback_days", "target_version", "assume_sampling")


def refresh_command(options: RefreshOptions, console: Console) -> int:
    """Does what the reasons say, or goes on with what a kill has left; returns the exit status.

    Raises:
        UserError: an option out of range, a run without a verdict, traffic that nothing can be learnt from, a folder that is in use.
        Interrupted: Ctrl-C while training, which has stopped with its checkpoint.
    """
    _check(options)
    config, drafts = run_config(options.run), options.drafts
    drafts = drafts or Path("drafts") / config.name
    load_verdict(options.run)
    served = current_version(drafts)
    home = _home(options.run, served)
    log = _usable_log(options, home) if options.traffic is not None else None
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
        _say(console, f"note: {served.provenance['run']} is gone, so {version} is compared with the text of {home}")
    acceptance_of(log, version)  # refused here, before there is a folder
    with refresh_folder(options, config, drafts, version, console) as folder:
        if folder is None:
            return 0
        refresh = _Refresh(options, console, folder, drafts, home, served, version, log)
        try:
            with terminated_as_interrupted():
                return refresh.run()
        except TrainingFailed as failed:
            print(f"understudy: {folder}: {failed} (its log: {folder}.log); the same command goes on", file=sys.stderr)
            return 1


def _check(options: RefreshOptions) -> None:
    for name, value, most in (("share", options.share, 1.0), ("margin", options.margin, 1.0)):
        if not 0 < value <= most:
            raise UserError(f"--{name} {value:g}: give a number above 0, at most 1")
    if options.probe_steps < 1 or options.keep < 1 or options.payback_days <= 0:
        raise UserError("--probe-steps, --keep and --payback-days: give numbers above 0")
    for word in options.overrides or ():
        if word.startswith(OWN_KEYS):
            raise UserError(f"{word}: a refresh sets this key itself; leave it out")
    if options.dry_run and options.approve:
        raise UserError("--dry-run writes nothing, so there is nothing to --approve: leave one of them out")


def _first(options: RefreshOptions, drafts: Path, console: Console) -> Version:
    """RUN's best draft as the first version, which it is: it is what is served. One that a killed call has left is taken up."""
    told = {"approved_by": options.approve or None}
    version = publish(options.run.resolve(), drafts, told, name="v0001")
    make_current(drafts, version.name, options.approve or "refresh: the draft of the run")
    _say(console, f"{version.folder}: the first version, the best draft of {options.run}; `current` points to it")
    return version


def _home(run: Path, served: Version | None) -> Path:
    """The run that the served version was made by, as long as it has its text; else the one that is named."""
    own = run if served is None or served.parent is None else Path(served.provenance["run"])
    return own if (own / PROMPTS / TRAIN_FILE).exists() and (own / VERDICT).exists() else run


def _usable_log(options: RefreshOptions, home: Path) -> TrafficLog:
    assert options.traffic is not None
    log = read_traffic(options.traffic)
    texts = [record for record in log.records if record.response_ids]
    if not texts:
        raise UserError(
            f"{options.traffic}: {len(log.records):,} requests and no text of any: start the gateway with --text, which keeps token ids"
        )
    store = Store(home / RESPONSES / TRAINING)
    own = {options.target_version} - {""} or {str(store.manifest()["target"]), run_config(home).target.path}
    others = sorted({record.target_version for record in texts} - own)
    if all(record.target_version in others for record in texts):
        raise UserError(
            f"{options.traffic}: all text is of another target version ({', '.join(others)[:200]}) than that of {home} "
            f"({', '.join(sorted(own))}); say with --target-version what the log calls it, or train a run for the new target"
        )
    if len(texts) < FEWEST_PROMPTS:
        raise UserError(
            f"{options.traffic}: {len(texts)} requests with text, and {FEWEST_PROMPTS} are the fewest; log more"
        )
    return log


@dataclass
class _Refresh:
    """One refresh, stage by stage. home: the run of the served version; version: what it is called in the log."""

    options: RefreshOptions
    console: Console
    folder: Path
    drafts: Path
    home: Path
    served: Version | None
    version: str
    log: TrafficLog
    state: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """All stages that are not done; the exit status."""
        options = self.options
        asked = {name: getattr(options, name) for name in ASKED} | {"overrides": list(options.overrides or [])}
        self.state = read_state(self.folder) or {
            "format": 1, "kind": "refresh", "run": str(options.run), "home": str(self.home), "traffic": str(options.traffic),
            "drafts": str(self.drafts), "parent": self.version, "version": self.folder.name.rpartition("-")[2], "asked": asked,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "reasons": {}, "outcome": None,
        }  # fmt: skip
        other = [key for key, value in asked.items() if self.state["asked"][key] != value]
        if other and (self.folder / CHECKPOINTS).exists():
            raise UserError(
                f"{self.folder}: a refresh with another {other[0]} ({self.state['asked'][other[0]]}, now {asked[other[0]]}) has begun to train "
                "there; give the same, or delete the folder"
            )
        if other:
            self._drop_traffic()
            shutil.rmtree(self.folder / PROBE, ignore_errors=True)
            for key in ("window", "decision"):
                self.state.pop(key, None)
            self.state |= {"asked": asked, "reasons": {}}
        needed = self._decide()
        if not self.state["reasons"].get("text", {"holds": True})["holds"]:
            _say(self.console, "gate: keep the old one: nothing is trained on such text, --force or not")
            return self._end(REFUSED, 1)
        if not needed:
            return self._end(NOT_NEEDED, 0)
        if options.dry_run:
            return 0
        self._train()
        if not self._passes():
            return self._end(KEPT, 1)
        self._publish()
        return self._end(PUBLISHED, 0)

    def _keep(self, **found: Any) -> None:
        self.state |= found
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.folder):
            write_json(self.folder / STATE, self.state)

    def _reason(self, name: str, kind: type[R], find: Callable[[], R]) -> R:
        """What is found, or was before a kill; said either way."""
        if name not in self.state["reasons"]:
            self._keep(reasons=self.state["reasons"] | {name: find().record()})
        found = kind.model_validate(self.state["reasons"][name])
        _say(self.console, found.sentence)
        return found

    def _end(self, outcome: str, status: int) -> int:
        """Nothing of the traffic stays that nobody needs: of a refresh that was not needed nothing does."""
        if outcome in UNTRAINED:
            self._drop_traffic()
        shutil.rmtree(self.folder / PROBE, ignore_errors=True)
        if not self.options.dry_run:
            self._keep(outcome=outcome)
            _say(self.console, f"{outcome}: {self.folder / STATE}")
        return status

    def _drop_traffic(self) -> None:
        if self.options.traffic is not None and (self.folder / TRAFFIC).exists():
            drop_export(self.options.traffic, self.folder / TRAFFIC)

    def _decide(self) -> bool:
        """Whether to train; the reasons are told either way. Without an alarm the others are looked for only where asked to."""
        options = self.options
        if "decision" not in self.state:
            needed = self._reason(
                "alarm", Alarm, lambda: alarm(self.log, self.version, self.home, options.false_alarms, options.drop)
            ).holds
            if needed or options.force or options.dry_run:
                needed = self._worth_it() and needed
            missing = [name for name, found in self.state["reasons"].items() if not found["holds"]]
            words = "do it" if needed else f"do not (no {', no '.join(missing)})"
            forced = options.force and not needed and "text" not in missing
            words += "; done all the same (--force)" if forced else ""
            self._keep(decision={"refresh": needed, "forced": forced, "sentence": words})
        _say(self.console, f"decision: {self.state['decision']['sentence']}")
        return bool(self.state["decision"]["refresh"] or self.state["decision"]["forced"])

    def _worth_it(self) -> bool:
        """The text, headroom and payback."""
        try:
            text = self._reason("text", OwnText, lambda: own_words(run_config(self.home), self.home, self._export()))
            if not text.holds:
                return False
            found = self._reason("headroom", Headroom, self._headroom)
            return self._reason("payback", Payback, lambda: self._payback(found)).holds and found.holds
        finally:
            if self.options.dry_run:
                self._drop_traffic()

    def _headroom(self) -> Headroom:
        export, steps, path = self._export(), self.options.probe_steps, self.folder / f"{PROBE}.yaml"
        tree = probe_config(run_config(self.home), student_of(self.served, self.home), export, self.folder, steps)
        probe = write_config(path, tree, self.options.overrides or [], [f"train.steps={steps}", f"judge.every={steps}"])
        adopt_stores(probe.folder, [export])
        self._apart(probe, path)
        return headroom(load_verdict(probe.folder), steps)

    def _export(self) -> Path:
        """The traffic of this refresh, taken once: later requests are the next one's."""
        export = self.folder / TRAFFIC
        assert self.options.traffic is not None
        if "window" not in self.state:
            shutil.rmtree(export, ignore_errors=True)
            asked = ExportTrafficOptions(
                self.options.traffic, self.home, export, target_version=self.options.target_version,
                assume_sampling=self.options.assume_sampling,
            )  # fmt: skip
            made = export_traffic(asked)
            if made.train < FEWEST_PROMPTS:
                why = "; ".join(f"{count:,} {reason}" for reason, count in made.left_out.items())
                raise UserError(
                    f"{self.options.traffic}: {made.train} requests to train on, {FEWEST_PROMPTS} are the fewest ({why})"
                )
            note_use(export, self.folder)
            self._keep(window=made.record())
        return export

    def _payback(self, found: Headroom) -> Payback:
        verdict = load_verdict(self.home)
        told = re.search(r"--num[_-]processes[ =](\d+)", self.options.launcher)
        devices = int(told[1]) if told else 1
        others = sum(verdict.seconds.get(stage, 0.0) for stage in ("self_checks", "judge", "verdict"))
        seconds = devices * (found.train_seconds / found.steps * self._config().train.steps + others)
        records = [record for record in self.log.records if record.draft_version == self.version]
        costs = verdict.costs or load_verdict(self.options.run).costs  # of models of the same shapes
        return payback(costs, records, found.tau, found.tau_gain, seconds, self.options.payback_days)

    def _config(self) -> RunConfig:
        """The training's config, written."""
        student = student_of(self.served, self.home)
        tree = refresh_config(
            run_config(self.home), self.home, student, self.folder / TRAFFIC, self.folder, self.options.share
        )
        return write_config(self.folder / "refresh.yaml", tree, self.options.overrides or [])

    def _train(self) -> None:
        if (self.folder / VERDICT).exists():
            return
        config = self._config()
        adopt_stores(self.folder, [self.home, self.folder / TRAFFIC, self.folder / PROBE])
        _say(self.console, f"training {self.folder}: {config.train.steps} steps, log in {self.folder}.log")
        self._apart(config, self.folder / "refresh.yaml")

    def _apart(self, config: RunConfig, path: Path) -> None:
        """Trains in a process of its own, unless it is finished; one that a killed refresh has left is waited for."""
        log = self.folder.with_name(f"{self.folder.name}.log")
        if (twin := running_twin(log)) is not None:
            _say(self.console, f"process {twin.pid} of a refresh that was killed still trains: waiting for it")
            twin.wait()
        if not (config.folder / VERDICT).exists():
            command = shlex.split(self.options.launcher) or [sys.executable]
            train_apart(config, [str(path)], log, command)

    def _passes(self) -> bool:
        if "gate" not in self.state:
            old = StoredPrompts(self.home / PROMPTS / HELDOUT_FILE).column("prompt_id").to_pylist()
            looks = max(1, len(judged_scores(self.folder)) - 1)
            verdict = load_verdict(self.home)
            parallel = drafting_to_serve(verdict, verdict.drafts[-1].drafting == "parallel") == "parallel"
            served = str(student_of(self.served, self.home))
            found = judge_gate(self.folder, served, set(old), self.options.margin, looks, parallel)
            self._keep(gate=found.record())
        gate = self.state["gate"]
        for part in (*gate["new"], *gate["old"]):
            side = "new" if part in gate["new"] else "old"
            low, high = part["alpha_ci"]
            _say(
                self.console,
                f"gate, {side} {part['name']}: alpha {part['alpha']:+.4f} [{low:+.4f}, {high:+.4f}], tau {part['tau']:+.3f}, "
                f"{part['prompts']} prompts",
            )
        _say(
            self.console, "gate: passed" if gate["passed"] else f"gate: keep the old one: {'; '.join(gate['failures'])}"
        )
        return bool(gate["passed"])

    def _publish(self) -> None:
        name, options = self.state["version"], self.options
        gate, window = self.state["gate"], self.state["window"]
        told = {
            "data_window": [_moment(window["since"]), _moment(window["until"])], "traffic": str(options.traffic),
            "traffic_requests": window["train"], "share": options.share, "approved_by": options.approve or None,
            "gate": {side: {part["name"]: part["alpha"] for part in gate[side]} for side in ("new", "old")},
            "expected_gain": {"gamma": gate["gamma"], "tau_ci": gate["new"][0]["tau_ci"]},  # a rollout goes by it
        }  # fmt: skip
        version = publish(self.folder.resolve(), self.drafts, told, parent=self.state["parent"], name=name)
        self.state["published"] = str(version.folder)
        _say(self.console, f"{version.folder}: published")
        if options.approve:
            make_current(self.drafts, name, options.approve)
        arms = options.traffic / ARMS if options.traffic else None
        named = {arm.draft_version for arm in read_arms(arms).arms} if arms is not None and arms.exists() else set()
        if (rolled := read_rollout(self.drafts)) is not None:  # It may have begun and be in no arms yet.
            named.add(rolled.version)
        gone = prune(self.drafts, options.keep, {*named, name})
        if gone:
            _say(self.console, f"pruned: {', '.join(gone)}")


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False, soft_wrap=True)
