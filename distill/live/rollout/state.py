"""The state of a rollout (drafts/NAME/rollout.json), so that a killed one can resume, and its start: checks before anything is done, and
the first state.
"""

import contextlib
import fcntl
import math
import time
import uuid
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from data.responses.endpoint_keys import is_address, root_of
from data.responses.engine_http import free_ports
from distill.live.arms import ARMS, BY_FLAGS, Arms, read_arms
from distill.live.options import RolloutOptions
from distill.live.rollout.engine import Engine, engine_words
from distill.live.rollout.judgement import Served
from distill.live.stages import Stages
from distill.live.traffic.reader import Place
from distill.live.traffic.record import LOCK
from distill.live.versions import Version, list_versions, read_version
from speculative.errors import UserError

ROLLOUT_LOCK = ".rollout.lock"
ENDS = ("done", "back")


class State(Stages):
    """State of a rollout. log: the gateway's directory. share: of the new engine while comparing. before: arms.json as found.
    before_engine: started by an earlier rollout. place: end of the log when the stage began. old: what the old engine
    served during the comparison.
    blames: whether going back is the draft's fault.
    """

    FILE: ClassVar[str] = "rollout.json"
    REMEDY: ClassVar[str] = "check which engines are running, then delete it"
    version: str
    log: str
    share: float
    engine: Engine
    before: Arms
    before_engine: Engine | None = None
    place: Place | None = None
    old: Served = Field(default_factory=Served)
    blames: bool = True


def check_options(options: RolloutOptions) -> None:
    """Raises UserError for an option out of range."""
    for name, value, right, example in (
        ("share", options.share, 0 < options.share < 1, "0.1"),
        ("margin", options.margin, 0 <= options.margin < 1, "0.01"),
        ("slower", options.slower, 0 <= options.slower < math.inf, "0.05"),
    ):
        if not right:
            raise UserError(f"--{name} {value:g}: out of range; give e.g. {example}")
    if bool(options.engine_command) == bool(options.engine_url) and not options.back:
        raise UserError("give either --engine-command (starts the new engine) or --engine-url (a running one)")
    if options.engine_url and not is_address(options.engine_url):
        raise UserError(f"--engine-url {options.engine_url}: give an address such as http://127.0.0.1:8002")
    if options.engine_command:
        engine_words(options.engine_command, Path(), 0)


def wanted_version(options: RolloutOptions) -> Version:
    """The version to serve. Raises UserError if it does not exist."""
    if not (options.drafts / options.version).is_dir():
        names = ", ".join(version.name for version in list_versions(options.drafts)) or "none"
        raise UserError(f"{options.drafts / options.version}: no such version; found: {names}")
    return read_version(options.drafts / options.version)


def gateway_runs(log: Path) -> bool:
    """Whether a gateway holds the log directory's lock."""
    with contextlib.suppress(FileNotFoundError), (log / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def arms_before(log: Path) -> Arms:
    """The arms before a rollout. Raises UserError if another rollout is unfinished."""
    before = read_arms(log / ARMS)
    if before.by != BY_FLAGS and sum(arm.drafts for arm in before.arms) > 1:
        raise UserError(f"{log / ARMS}: {before.by} is not finished; run it again, or with --back, first")
    return before


def opened(options: RolloutOptions, version: Version) -> State:
    """The state of an unfinished rollout, or the stored first state of a new one.

    Raises UserError: an unfinished rollout of another version or log, no gateway, nothing to take back, the version is already served, a
    port in use.
    """
    last, log = State.stored(options.drafts), options.log
    unfinished = last if last is not None and last.stage not in ENDS else None
    if unfinished is None and options.back:
        raise UserError(f"--back: no rollout of {options.drafts} is in progress")
    if unfinished is not None and unfinished.version != options.version:
        what = f"the rollout of {unfinished.version} is not finished ({unfinished.stage})"
        raise UserError(f"{options.drafts / State.FILE}: {what}; run it again, or with --back")
    if unfinished is not None and Path(unfinished.log) != log.resolve():
        with_log = f"is being rolled out with --log {unfinished.log}; give that one"
        raise UserError(f"--log {log}: {unfinished.version} {with_log}")
    if not options.back and not gateway_runs(log):
        raise UserError(f"--log {log}: no gateway is running on it; start `understudy gateway --log {log} ...` first")
    if unfinished is not None:
        print(f"resuming: {unfinished.version} was in stage {unfinished.stage}", flush=True)
        return unfinished
    before = arms_before(log)
    if any(version.name in (arm.name, arm.draft_version) and arm.share for arm in before.arms):
        raise UserError(f"{log / ARMS}: {version.name} is already served")
    port = 0 if options.engine_url else free_ports()[0]
    mark = "" if options.engine_url else uuid.uuid4().hex
    engine = Engine(url=root_of(options.engine_url) or f"http://127.0.0.1:{port}", port=port, mark=mark)
    earlier = None
    if last is not None:
        started = last.engine if last.engine.mark else None
        earlier = started if last.stage == "done" else last.before_engine
    state = State(
        version=version.name,
        log=str(log.resolve()),
        stage="starting",
        share=options.share,
        engine=engine,
        before=before,
        before_engine=earlier,
        since=time.time(),
    )
    state.store(options.drafts)
    return state
