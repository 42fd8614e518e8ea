"""A running engine's counters as an acceptance log: what was counted between scrapes, and survival by place beside replay's."""

import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord
from data.responses.engine_client import counters_of, mean_length_of
from data.responses.engine_counts import CountsError
from data.responses.engine_metrics import PAGES, ServerCounts, difference
from distill.commands.drift.baseline import Baseline
from distill.run.frozen_text import load_frozen_text
from speculative.errors import UserError
from speculative.measure.served import behind_prefill, predicted_shares
from speculative.measure.token_scores import score_tokens


@dataclass(frozen=True)
class Scraped:
    """A log of one record an interval; survival by place over all of them, empty where the engine does not tell."""

    log: AcceptanceLog
    survival: list[float] = field(default_factory=list)


def scrape(url: str, scrapes: int, interval: float, gamma: int | None) -> Scraped:
    """Scrapes a server so many times. ``gamma``: drafted tokens a block of an engine that counts blocks only.

    Raises:
        UserError: no counters there, nothing drafted meanwhile, or restarted in every interval.
    """
    root = url.rstrip("/")
    for page in (*PAGES[::-1], "/v1"):
        root = root.removesuffix(page)
    key = os.environ.get("OPENAI_API_KEY", "")
    seen = []
    for number in range(scrapes):
        if number:
            time.sleep(interval)
        found = counters_of(root, key)
        if found is None or found.accepted is None:
            length = mean_length_of(root, key)
            known = (
                f" (it only tells {length:.2f} tokens a block since its start, of which no difference can be made)"
                if length
                else ""
            )
            raise UserError(
                f"--metrics-url {url}: no counters of drafts there{known}; vLLM shows them as it is, llama-server with --metrics, "
                "SGLang with --enable-metrics: or read its request files (--export-metrics-to-file) with --log"
            )
        if found.drafted is None and gamma is None:
            raise UserError(
                f"--metrics-url {url}: {found.engine} counts blocks and not their drafted tokens: give its --gamma"
            )
        seen.append(found)
    return _differences(url, seen, gamma)


def _differences(url: str, seen: list[ServerCounts], gamma: int | None) -> Scraped:
    records: list[AcceptanceRecord] = []
    kept_G: list[int] = []
    blocks, warnings = 0, []
    for number, (before, after) in enumerate(itertools.pairwise(seen), start=1):
        try:
            found = difference(before, after)
        except CountsError as error:
            warnings.append(f"between scrapes {number} and {number + 1} {error}: that interval is left out")
            continue
        drafted = found.drafted if found.drafted is not None else (found.blocks or 0) * (gamma or 0)
        if not drafted or found.accepted is None:
            continue
        if found.accepted > drafted:
            raise UserError(
                f"--metrics-url {url}: {found.accepted:,} tokens accepted of only {drafted:,} drafted; give the server's --gamma"
            )
        records.append(AcceptanceRecord(len(records), drafted, found.accepted, found.blocks))
        kept_G = [sum(pair) for pair in itertools.zip_longest(kept_G, found.accepted_G, fillvalue=0)]
        blocks += found.blocks or 0
    if not records:
        why = "; ".join(warnings) or "nothing was drafted between the scrapes: does it serve? (--interval)"
        raise UserError(f"--metrics-url {url}: {why}")
    survival = [kept / blocks for kept in kept_G] if blocks else []
    return Scraped(AcceptanceLog(records, seen[-1].engine, True, warnings), survival)


def replayed_survival(run: Path, baseline: Baseline) -> list[float] | None:
    """Survival by place of the run's own text as an engine counts it, from the second token of each response on; None without text."""
    try:
        frozen = load_frozen_text(run, baseline.rule)
        draft = frozen.draft(str(run))
    except UserError:
        return None
    offsets = baseline.gamma if baseline.drafting == "parallel" else None
    texts = [behind_prefill(text) for text in frozen.responses]
    scores = score_tokens(draft, texts, frozen.sampling, offsets=offsets)
    return predicted_shares(scores, baseline.rule, baseline.gamma)[0]
