"""The gateway's Prometheus metrics. Label values are bounded, so clients cannot create series without limit."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from distill.live.traffic.record import TrafficRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BY_DRAFT = ("arm", "draft_version", "slice")


class Metrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, says: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"understudy_{name}", says, labels, registry=registry)

        def histogram(name: str, says: str) -> Histogram:
            return Histogram(f"understudy_{name}_seconds", says, ("arm",), buckets=_SECONDS, registry=registry)

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
        self.tokens = counter("tokens", "Tokens", ("arm", "kind"))
        self.accepted = counter("served_accepted_tokens", "Drafted tokens that were accepted", _BY_DRAFT)
        self.drafted = counter("served_drafted_tokens", "Drafted tokens", _BY_DRAFT)
        self.blocks = counter("served_blocks", "Target calls that verified a draft", _BY_DRAFT)
        self.first_token = histogram("first_token", "Seconds until the first bytes of a response")
        self.total = histogram("request", "Seconds until the end of a response")

    def count(self, record: TrafficRecord) -> None:
        """Count a record. Constrained responses count as tokens, not for acceptance."""
        self.records.labels(record.arm, record.finish).inc()
        for kind, tokens in (("prompt", record.prompt_tokens), ("response", record.response_tokens)):
            self.tokens.labels(record.arm, kind).inc(tokens or 0)
        if record.drafted is not None and not record.constrained:
            labels = record.arm, record.draft_version, record.slice
            self.accepted.labels(*labels).inc(record.accepted or 0)
            self.drafted.labels(*labels).inc(record.drafted)
            self.blocks.labels(*labels).inc(record.blocks or 0)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)
