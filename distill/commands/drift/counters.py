"""A running engine's counters as an acceptance log: the counts between scrapes, one record per interval."""

import itertools
import time

from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord
from data.responses.engine_client import counters_of, mean_length_of
from data.responses.engine_counts import CountsError
from data.responses.engine_metrics import PAGES, ServerCounts, difference
from speculative.errors import UserError


def scrape(url: str, scrapes: int, interval: float, gamma: int | None, key: str = "") -> AcceptanceLog:
    """Scrape a server several times. ``gamma``: drafted tokens per block of an engine that counts only blocks. ``key``: its API key.

    Raises UserError: no counters, nothing drafted between scrapes, or a restart in every interval.
    """
    root = url.rstrip("/")
    for page in (*PAGES[::-1], "/v1"):
        root = root.removesuffix(page)
    seen = []
    for number in range(scrapes):
        if number:
            time.sleep(interval)
        found = counters_of(root, key)
        if found is None or found.accepted is None:
            known = ""
            if length := mean_length_of(root, key):
                of = f"{length:.2f} tokens per block since its start"
                known = f" (it only gives {of}, which cannot be compared over time)"
            raise UserError(
                f"--metrics-url {url}: no counters of drafts there{known}; vLLM always has them, llama-server with --metrics, "
                "SGLang with --enable-metrics; or read SGLang's request files (--export-metrics-to-file) with --log"
            )
        if found.drafted is None and gamma is None:
            raise UserError(f"--metrics-url {url}: {found.engine} counts blocks, not drafted tokens; give its --gamma")
        seen.append(found)
    return _differences(url, seen, gamma)


def _differences(url: str, seen: list[ServerCounts], gamma: int | None) -> AcceptanceLog:
    records: list[AcceptanceRecord] = []
    warnings = []
    for number, (before, after) in enumerate(itertools.pairwise(seen), start=1):
        try:
            found = difference(before, after)
        except CountsError as error:
            warnings.append(f"between scrapes {number} and {number + 1} {error}; that interval is left out")
            continue
        drafted = found.drafted if found.drafted is not None else (found.blocks or 0) * (gamma or 0)
        if not drafted or found.accepted is None:
            continue
        if found.accepted > drafted:
            raise UserError(
                f"--metrics-url {url}: {found.accepted:,} tokens accepted of only {drafted:,} drafted tokens; give the server's --gamma"
            )
        records.append(AcceptanceRecord(len(records), drafted, found.accepted, found.blocks))
    if not records:
        idle = "nothing was drafted between the scrapes; check that it serves requests, or raise --interval"
        raise UserError(f"--metrics-url {url}: {'; '.join(warnings) or idle}")
    return AcceptanceLog(records, seen[-1].engine, True, warnings)
