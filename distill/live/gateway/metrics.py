"""The gateway's Prometheus metrics, named as an engine's if they mean the same. Label values are bounded, so clients add few series."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from distill.engines.protocol.counters import PREFIX
from distill.live.traffic.record import TrafficRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BY_DRAFT = ("arm", "draft_version", "slice", "constrained")
_DRAFTS = f"{PREFIX}spec_decode_num_"


class Metrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, says: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name if ":" in name else f"understudy_{name}", says, labels, registry=registry)

        def histogram(name: str, says: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}_seconds", says, ("arm",), buckets=_SECONDS, registry=registry)

        self.in_flight = Gauge("understudy_in_flight", "Requests being answered", registry=registry)
        self.logging = Gauge("understudy_logging", "1 while records can be written", registry=registry)
        self.requests = counter("requests", "Requests by the status that the client got", ("arm", "status"))
        self.cancelled = counter("cancelled", "Requests ended because the client left or nothing moved", ("arm",))
        self.shed = counter("shed", "Requests sent to the engine without a draft because of load")
        self.not_logged = counter("not_logged", "Responses without a record, by reason", ("reason",))
        self.records = counter("records", "Records handed to the log", ("arm", "finish"))
        self.records_failed = counter("records_failed", "Records that were not on disk when the response ended")
        self.unhandled = counter("unhandled", "Requests ended by a bug in the gateway, by exception type", ("kind",))
        self.odd_counts = counter("counts_refused", "Responses with inconsistent draft counts", ("arm",))
        self.prompt = counter(f"{PREFIX}prompt_tokens", "Tokens of prompts", ("arm",))
        self.response = counter(f"{PREFIX}generation_tokens", "Tokens of responses", ("arm",))
        self.blocks = counter(f"{_DRAFTS}drafts", "Target calls that verified a draft", _BY_DRAFT)
        self.drafted = counter(f"{_DRAFTS}draft_tokens", "Drafted tokens", _BY_DRAFT)
        self.accepted = counter(f"{_DRAFTS}accepted_tokens", "Accepted tokens", _BY_DRAFT)
        self.accepted_at = counter(f"{_DRAFTS}accepted_tokens_per_pos", "The same by place", (*_BY_DRAFT, "position"))
        self.first_token = histogram("time_to_first_token", "Seconds until the first bytes of a stream")
        self.total = histogram("e2e_request_latency", "Seconds until the end of an answered completion request")

    def count(self, record: TrafficRecord) -> None:
        """Count a record. Draft counts of constrained responses have a label of their own."""
        self.records.labels(record.arm, record.finish).inc()
        self.prompt.labels(record.arm).inc(record.prompt_tokens or 0)
        self.response.labels(record.arm).inc(record.response_tokens or 0)
        if record.drafted is not None:
            labels = record.arm, record.draft_version, record.slice, str(record.constrained).lower()
            self.accepted.labels(*labels).inc(record.accepted or 0)
            self.drafted.labels(*labels).inc(record.drafted)
            self.blocks.labels(*labels).inc(record.blocks or 0)
            # Places that kept nothing have a series too.
            gamma = -(-record.drafted // record.blocks) if record.blocks else 0
            for place in range(max(gamma, *record.accepted_B) if record.accepted_B else 0):
                self.accepted_at.labels(*labels, place).inc(sum(kept > place for kept in record.accepted_B))

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)
