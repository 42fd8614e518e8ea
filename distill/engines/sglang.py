"""SGLang: drafts the argmax and compares vocabularies, including added tokens.

Counts as read in pull requests 11441 (first names) and 33518 (`sglext`), main of 2026-09. The counter is `sglang:spec_verify_calls`.
"""

from typing import TYPE_CHECKING

from distill.engines.protocol.counters import Page, started, sum_of
from distill.engines.protocol.counts import CountsFormat, DraftCounts
from distill.engines.protocol.engine import Dialect, Engine, register

if TYPE_CHECKING:
    from distill.engines.protocol.facts import EngineFacts


def _refusals(facts: "EngineFacts") -> list[str]:
    told = "it refuses such a pair; older versions emitted wrong text without an error (sglang#24051); use the target's tokenizer files"
    return [f"{facts.differences['added']}; {told}"] if "added" in facts.differences else []


def _counters(page: Page) -> DraftCounts | None:
    blocks, tokens, requests = (
        sum_of(page, f"sglang:{name}") for name in ("spec_verify_calls", "generation_tokens", "num_requests")
    )
    if blocks is None:
        return None
    # The first token of a response comes from the prefill; each block emits one token more than it accepts.
    accepted = None if tokens is None or requests is None else max(0, tokens - requests - blocks)
    return DraftCounts("sglang", accepted, None, blocks, tokens=tokens, started=started(page))


register(
    Engine(
        "sglang",
        "SGLang",
        "0.5",
        2,
        ("greedy-draft",),
        refusals=_refusals,
        equal_strings=True,
        dialect=Dialect(
            owners=("sglang",),
            reports="--enable-metrics",
            version_pages=(("/server_info", "version"), ("/get_server_info", "version")),
            asks={"return_spec_tokens_details": True},
            counts=CountsFormat(
                "spec_verify_ct",
                ("meta_info", "sglext.spec_tokens_details"),
                ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens"),
                ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
                ("spec_verify_ct",),
                optional=True,
                sums_miscount=True,
            ),
            counters=_counters,
        ),
    )
)
