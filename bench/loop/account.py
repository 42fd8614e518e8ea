"""Results of a loop: acceptance before the shift, after it and with the new draft; the log compared with what clients received."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.live.alarm import Alarm
from distill.live.traffic.reader import accepts, read_traffic
from distill.live.traffic.record import TrafficRecord, from_line, log_files
from loop.clients import Clients

COMPARED = 120  # requests before the overload


@dataclass
class LoopResult:
    """Filled while the loop runs. events: (seconds since the start, what happened). shifted_at, recovered_at: Unix seconds."""

    engine: str
    alarm_within: int
    events: list[tuple[float, str]] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    rolled_back: list[dict[str, Any]] = field(default_factory=list)
    alarm_after_requests: int | None = None
    shifted_at: float = 0.0
    recovered_at: float = 0.0


def alarm_behind(found: Alarm, traffic: Path, shifted_at: float) -> int | None:
    """Requests since the shift if the alarm rings now, else None. There is one slice and one draft version."""
    records = counted(read_traffic(traffic).records, "v0001")
    return sum(record.time >= shifted_at for record in records) if found.holds else None


def counted(records: Sequence[TrafficRecord], version: str) -> list[TrafficRecord]:
    """Records that count for the acceptance of a draft version."""
    return [record for record in records if accepts(record) and record.draft_version == version]


def account(traffic: Path, clients: Clients, result: LoopResult, seconds: float) -> dict[str, Any]:
    """loop.json: {engine, seconds, requests, acceptance: {before, shifted, after}, tokens_per_second, saved_seconds,
    alarm_after_requests, alarm_within, records_lost,
    records_doubled, kills, rolled_back, constrained, shed, asked_again, events, failures}.

    records_lost: complete responses without a record, or with a record of different text. records_doubled: lines beyond one per time
    that a request was sent, and ids that were never sent. acceptance: accepted / drafted, without constrained requests.
    tokens_per_second, saved_seconds: see `saved`.
    """
    log = read_traffic(traffic)
    records = {record.id: record for record in log.records}
    lost = [name for name, ids in clients.whole.items() if name not in records or records[name].response_ids != ids]
    lines = Counter(from_line(line).id for path in log_files(traffic) for line in path.read_bytes().splitlines())
    doubled = sum(max(0, count - clients.attempts[name]) for name, count in lines.items())
    second = counted(log.records, "v0002")
    found: dict[str, Any] = {
        "engine": result.engine,
        "seconds": seconds,
        "requests": len(clients.whole),
        "acceptance": rates_around(traffic, result)
        | {"after": _rate([record for record in second if record.time >= result.recovered_at])},
        **saved(log.records),
        "alarm_after_requests": result.alarm_after_requests,
        "alarm_within": result.alarm_within,
        "records_lost": len(lost),
        "records_doubled": doubled,
        "kills": result.kills,
        "rolled_back": result.rolled_back,
        "constrained": sum(record.constrained for record in log.records),
        "shed": sum(record.draft_version == "none" for record in log.records),
        "asked_again": sum(count > 1 for count in clients.attempts.values()),
        "events": result.events,
    }
    return found | {"failures": _failures(found, clients)}


def rates_around(traffic: Path, result: LoopResult) -> dict[str, float | None]:
    """Accepted / drafted of the first draft {before, shifted}: before the shift and after it."""
    first = counted(read_traffic(traffic).records, "v0001")
    return {
        "before": _rate([record for record in first if record.time < result.shifted_at]),
        "shifted": _rate([record for record in first if record.time >= result.shifted_at]),
    }


def saved(records: Sequence[TrafficRecord]) -> dict[str, Any]:
    """{tokens_per_second: of the first COMPARED requests to the target alone and to v0001, saved_seconds: of the waiting of the latter}.

    Later requests come from another number of clients at once, so their speeds say nothing about the draft.
    """
    firsts = {
        version: [one for one in records if one.draft_version == version][:COMPARED] for version in ("plain", "v0001")
    }
    sums = {
        version: (sum(one.response_tokens or 0 for one in own), sum(one.total_s or 0.0 for one in own))
        for version, own in firsts.items()
    }
    rates = {version: tokens / seconds for version, (tokens, seconds) in sums.items() if seconds}
    tokens, seconds = sums["v0001"]
    return {
        "tokens_per_second": rates,
        "saved_seconds": tokens / rates["plain"] - seconds if "plain" in rates else None,
    }


def _rate(records: Sequence[TrafficRecord]) -> float | None:
    drafted = sum(record.drafted or 0 for record in records)
    return sum(record.accepted or 0 for record in records) / drafted if drafted else None


def _failures(found: dict[str, Any], clients: Clients) -> list[str]:
    """What went wrong, in words."""
    rates, rung = found["acceptance"], found["alarm_after_requests"]
    fell = None not in rates.values() and rates["shifted"] < min(rates["before"], rates["after"])
    sent_back = [entry["version"] for entry in found["rolled_back"] if entry["stage"] == "back"]
    checks = (
        (found["records_lost"] == 0, f"{found['records_lost']} complete responses without a matching record"),
        (found["records_doubled"] == 0, f"{found['records_doubled']} surplus records"),
        (fell, f"acceptance did not fall and rise again: {rates}"),
        (
            rung is not None and rung <= found["alarm_within"],
            f"the alarm rang after {rung} requests, not within {found['alarm_within']}",
        ),
        (bool(sent_back), "the bad version was not taken back"),
        (
            found["constrained"] == len(clients.constrained & clients.whole.keys()),
            "constrained requests are not all marked",
        ),
        (found["shed"] > 0, "no request went to the engine without a draft"),
    )
    return [words for holds, words in checks if not holds]
