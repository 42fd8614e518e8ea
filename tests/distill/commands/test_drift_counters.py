"""`understudy drift --metrics-url`: two scrapes of a running engine's counters against a run."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Pair
from page_server import page_server
from prometheus_client import generate_latest
from rich.console import Console
from tiny_models import perturbed

from distill.commands.drift import baseline
from distill.commands.drift.baseline import baseline_of
from distill.commands.drift.drift import Drift, drift_command
from distill.commands.drift.options import DriftOptions
from distill.run.frozen_text import FrozenText, load_frozen_text
from distill.run.verdict_record import WAYS, load_verdict
from speculative.errors import UserError


def engine_with(*pages: str) -> AbstractContextManager[str]:
    """A server whose /metrics is the next of these pages each time."""
    left = list(pages)
    return page_server(lambda path: left.pop(0) if path == "/metrics" and left else None)


def page(blocks: int, *places: int, gamma: int = 3) -> str:
    counts = {"drafts": blocks, "draft_tokens": gamma * blocks, "accepted_tokens": sum(places)}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0' for name, value in counts.items()]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return "\n".join(
        lines + [f'{name}{{engine="0",position="{place}"}} {value}.0' for place, value in enumerate(places)]
    )


def drifted(run: Path, url: str, **options: Any) -> Drift:
    console = Console(file=io.StringIO(), width=200)
    return drift_command(DriftOptions(run, metrics_url=url, **{"interval": 0.0, **options}), console)


def test_differences_are_compared_with_the_run(tiny_run: Path) -> None:
    """What the run's own greedy blocks are is what the counters grow by: no drift."""
    prompts = baseline_of(DriftOptions(tiny_run, rule="greedy"), 3).prompts
    blocks, kept = sum(one.blocks for one in prompts), sum(one.accepted for one in prompts)
    with engine_with(page(1000, 500, 300, 100), page(1000 + blocks, 500 + kept, 300, 100)) as url:
        found = drifted(tiny_run, f"{url}/metrics", rule="greedy")
    assert (found.source, found.now.prompts) == (f"{url}/metrics", 1)
    assert (found.now.accepted_per_drafted, found.change) == (pytest.approx(kept / (3 * blocks)), pytest.approx(0.0))
    assert found.refresh is False


def test_the_baseline_is_of_the_way_of_drafting_that_is_served(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that proposes a block in one pass is less often right at later places: no drift, where that is what was chosen."""
    frozen = load_frozen_text(tiny_run, "greedy")
    draft = perturbed(frozen.target.model, 0.01)
    draft.config.pard_token = 1
    monkeypatch.setattr(FrozenText, "draft", lambda own, path: draft)
    prompts = [text.prompt_ids for text in frozen.responses]
    engine = FakeEngine(Pair(frozen.target.model, draft, 3, drafting="parallel", prompts=prompts))
    asked = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [], "max_tokens": 20}
    pages = []
    for prompt in 4 * prompts:
        ids, *counts = engine.text(asked | {"prompt": prompt})
        engine.count(*counts, len(ids))
        pages.append(generate_latest(engine.counts.registry).decode())
    chosen = load_verdict(tiny_run).model_copy(update={"run": {"1": WAYS["parallel"]}})
    monkeypatch.setattr(baseline, "load_verdict", lambda run: chosen)
    with engine_with(*pages) as url:
        found = drifted(tiny_run, url, scrapes=len(pages), rule="greedy")
    assert (found.drafting, found.refresh) == ("parallel", False)


def test_a_fall_in_the_counters_advises_a_refresh(tiny_run: Path) -> None:
    pages = [page(2000 * number, 20 * number, 0, 0) for number in (1, 2, 3)]
    with engine_with(*pages, *pages) as url:
        result, unsaid = drifted(tiny_run, url, scrapes=3), drifted(tiny_run, url, scrapes=3, rule="sample")
    assert result.refresh is True
    assert result.now.prompts == 2
    hint = "add --rule greedy-draft"
    assert [any(hint in note for note in one.notes) for one in (result, unsaid)] == [True, False]


def test_a_restart_between_scrapes_is_noticed(tiny_run: Path) -> None:
    with (
        engine_with(page(100, 50, 30, 10), page(10, 5, 3, 1)) as url,
        pytest.raises(UserError, match="the server was restarted"),
    ):
        drifted(tiny_run, url, rule="sample")
    with engine_with(page(100, 50, 30, 10), page(10, 5, 3, 1), page(110, 55, 33, 11)) as url:
        result = drifted(tiny_run, url, scrapes=3, rule="sample")
    assert any("that interval is left out" in note for note in result.notes)
    assert result.now.prompts == 1


@pytest.mark.parametrize(
    ("pages", "options", "words"),
    [
        ((), {}, "no counters of drafts there"),
        (
            ("sglang:spec_verify_calls_total 5\nsglang:generation_tokens_total 20\nsglang:num_requests_total 2",),
            {},
            "give its --gamma",
        ),
        ((page(5, 4, 2, 1), page(5, 4, 2, 1)), {}, "nothing was drafted between the scrapes"),
        ((page(5, 40, 2, 1),), {}, "43 tokens accepted, but only 15 drafted"),
        ((), {"scrapes": 1}, "--scrapes 1"),
        ((), {"interval": float("nan")}, "--interval nan"),
    ],
)
def test_counters_that_say_nothing_are_one_line(
    tiny_run: Path, pages: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    with engine_with(*pages) as url, pytest.raises(UserError, match=words):
        drifted(tiny_run, url, **options)
