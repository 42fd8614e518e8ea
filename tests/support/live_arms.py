"""A gateway's log directory without a gateway: traffic that goes where arms.json says, and records of what engines would have said."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distill.live.arms import ARMS, BY_FLAGS, Arm, Arms, read_arms, write_arms
from distill.live.rollout.judgement import Served, Tally
from distill.live.traffic.record import LOCK, TrafficRecord, to_line

GAMMA = 4
# Of a request behind `number` others of its arm: (chance that a drafted token is accepted, seconds a token, chance of an error).
Behaviour = Callable[[int], tuple[float, float, float]]


def steady(ease: float, seconds: float = 0.01, errors: float = 0.0) -> Behaviour:
    return lambda number: (ease, seconds, errors)


def served_of(records: Iterable[TrafficRecord]) -> Served:
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.served()


def write_version(drafts: Path, name: str, parent: str | None, **provenance: Any) -> None:
    """As `publish` leaves it, without weights."""
    (drafts / name).mkdir(parents=True)
    told = {"version": name, "parent": parent, **provenance}
    (drafts / name / "provenance.json").write_text(json.dumps(told))


class Traffic:
    """Requests in a thread. behaviour: by arm. heeds: whether arms.json is read. held: no request while it is set."""

    def __init__(self, directory: Path, behaviour: dict[str, Behaviour], seed: int = 0) -> None:
        self.directory, self.behaviour = directory, behaviour
        self.heeds, self.held, self.counts = True, threading.Event(), dict.fromkeys(behaviour, 0)
        self._rng, self._ended, self._number = np.random.default_rng(seed), threading.Event(), 0

    def record(self, arms: Arms) -> TrafficRecord:
        self._number += 1
        arm = arms.choose(f"conversation {self._number}".encode(), b"key")
        number = self.counts[arm.name] = self.counts.get(arm.name, 0) + 1
        ease, seconds, errors = self.behaviour[arm.name](number)
        blocks = int(self._rng.integers(10, 30))
        chance = min(self._rng.beta(20 * ease, 20 * (1 - ease)), 1 - 1e-9)
        kept = np.minimum(self._rng.geometric(1 - chance, blocks) - 1, GAMMA)
        tokens = int(kept.sum()) + blocks
        failed = self._rng.random() < errors
        told = {} if failed else {"accepted": int(kept.sum()), "drafted": blocks * GAMMA, "blocks": blocks}
        return TrafficRecord(
            id=f"request-{self._number}",
            time=time.time(),
            slice="all",
            arm=arm.name,
            draft_version=arm.draft_version,
            target_version="t1",
            sampling=None,
            prompt_hash=f"{self._number:064x}",
            response_tokens=None if failed else tokens,
            total_s=float(tokens * seconds * self._rng.lognormal(0, 0.3)),
            finish="error" if failed else "stop",
            **told,
        )

    def run(self) -> None:
        first = read_arms(self.directory / ARMS)
        while not self._ended.is_set():
            if not self.held.is_set():
                arms = read_arms(self.directory / ARMS) if self.heeds else first
                lines = b"".join(to_line(self.record(arms)) for _ in range(20))
                with (self.directory / "log-00001.jsonl").open("ab") as file:
                    file.write(lines)
            self._ended.wait(0.002)


@contextmanager
def gateway_directory(directory: Path, url: str = "http://127.0.0.1:9") -> Iterator[Path]:
    """A log directory whose lock is held, all traffic with v0001."""
    directory.mkdir()
    write_arms(directory / ARMS, Arms(BY_FLAGS, (Arm("v0001", url, 1.0, "v0001", "t1"),)))
    with (directory / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


@contextmanager
def running_traffic(traffic: Traffic) -> Iterator[Traffic]:
    thread = threading.Thread(target=traffic.run, daemon=True)
    thread.start()
    try:
        yield traffic
    finally:
        traffic._ended.set()
        thread.join()
