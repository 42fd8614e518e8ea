"""Counts of drafts in each engine's own words: what is read, and what is refused by the name of its field."""

from typing import Any

import pytest

from distill.engines.protocol.counters import difference, parse_page
from distill.engines.protocol.counts import CountsError, DraftCounts
from distill.engines.protocol.engine import counts_of, read_counts

USAGE = {"usage": {"completion_tokens": 9}}
STATS = {"num_spec_steps": 4, "num_accepted_draft_tokens": 5, "num_draft_tokens": 12, "num_spec_tokens": 3}
DETAILS = {"per_step_accepted": [3, 0, 2, 0], "per_step_drafted": [3, 3, 3, 3], "acceptance_histogram": [2, 0, 1, 1]}
FIRST = {"spec_verify_ct": 4, "spec_accept_token_num": 5, "spec_draft_token_num": 12, "completion_tokens": 9}
LAST = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12, "completion_tokens": 9}
HISTOGRAM = {"spec_correct_drafts_histogram": [2, 0, 1, 1]}
PERF = {"total_accepted_draft_tokens": 5, "total_draft_tokens": 12, "acceptance_rate": 5 / 12}


ANSWERS: dict[str, tuple[Any, DraftCounts]] = {
    "vllm-summary": (
        {"metrics": {"speculative_decoding": STATS}, **USAGE},
        DraftCounts("vllm", 5, 12, 4, 3),
    ),
    "vllm-detailed": (
        {"metrics": {"speculative_decoding": STATS | DETAILS}, **USAGE},
        DraftCounts("vllm", 5, 12, 4, 3, (3, 0, 2, 0), (3, 3, 3, 3), (2, 0, 1, 1)),
    ),
    "sglang-first-names": ({"text": "", "meta_info": FIRST}, DraftCounts("sglang", 5, 12, 4)),
    "sglang-between": (
        {"meta_info": {"spec_verify_ct": 4, "spec_accepted_drafts": 5, "spec_proposed_drafts": 12}},
        DraftCounts("sglang", 5, 12, 4),
    ),
    "sglang-choice": (
        {"choices": [{"meta_info": LAST | HISTOGRAM}]},
        DraftCounts("sglang", 5, 12, 4, histogram=(2, 0, 1, 1)),
    ),
    "sglang-sglext": ({"sglext": {"spec_tokens_details": LAST}, **USAGE}, DraftCounts("sglang", 5, 12, 4)),
    "sglang-verify-calls-alone": ({"meta_info": {"spec_verify_ct": 4}}, DraftCounts("sglang", None, None, 4)),
    "llama.cpp": (
        {"choices": [{}], "timings": {"draft_n": 12, "draft_n_accepted": 5, "predicted_n": 9}},
        DraftCounts("llama.cpp", 5, 12, None),
    ),
    "tensorrt-llm": (
        {"choices": [{"request_perf_metrics": {"speculative_decoding": PERF}}], **USAGE},
        DraftCounts("tensorrt-llm", 5, 12, None),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_engines_own_words_are_read(name: str) -> None:
    answer, counts = ANSWERS[name]
    assert read_counts(answer) == counts


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"metrics": None},
        {"metrics": {"speculative_decoding": None}},
        [],
        None,
        {"timings": {"predicted_n": 3}},
    ],
)
def test_what_says_nothing_of_drafts_is_nobodys(answer: Any) -> None:
    assert read_counts(answer) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_accepted_draft_tokens": 13}, "13 tokens accepted, but only 12 drafted"),
        ({"num_accepted_draft_tokens": -1}, "metrics.speculative_decoding.num_accepted_draft_tokens is -1"),
        ({"num_draft_tokens": 12.5}, "num_draft_tokens is 12.5"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"num_spec_steps": "4"}, "num_spec_steps is '4'"),
        ({"num_spec_steps": 0}, "12 drafted tokens in 0 blocks"),
        ({"num_spec_steps": None}, "num_spec_steps is missing"),
        ({"per_step_accepted": [3, 0, 2]}, "accepted for 3 blocks, but drafted for 4"),
        ({"per_step_accepted": [3, 0, 2, 1]}, "do not add up"),
        ({"per_step_drafted": [2, 4, 3, 3]}, "accepted more tokens than it drafted"),
        ({"per_step_accepted": [3, 0, 2, None]}, "per_step_accepted is"),
        ({"acceptance_histogram": [3, 0, 1, 1]}, "the histogram does not add up"),
        ({"acceptance_histogram": {"a": 1}}, "acceptance_histogram has the positions a"),
    ],
)
def test_counts_that_cannot_be_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CountsError, match=named):
        read_counts({"metrics": {"speculative_decoding": STATS | DETAILS | change}})


def counted(page: str) -> Any:
    return counts_of(parse_page(page))


def vllm_page(drafts: float, drafted: float, accepted: float, places: tuple[float, ...], total: str = "_total") -> str:
    label = '{engine="0",model_name="m \\"x\\" {y}"}'
    lines = [f"# TYPE vllm:spec_decode_num_drafts{total} counter", 'vllm:request_latency_bucket{le="+Inf"} NaN']
    counts = {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
    lines += [f"vllm:spec_decode_num_{name}{total}{label} {value}" for name, value in counts.items()]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos{total}{{engine="0",position="{place}"}} {value} 1700000000'
        for place, value in enumerate(places)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("total", ["_total", ""])
def test_two_scrapes_of_vllm_with_and_without_total(total: str) -> None:
    before = counted(vllm_page(10.0, 30.0, 12.0, (8.0, 4.0), total))
    found = difference(before, counted(vllm_page(1e2, 3e2, 1.2e2, (70, 40, 10), total)))
    assert (found.blocks, found.drafted, found.accepted, found.accepted_G) == (90, 270, 108, (62, 36, 10))


def test_counters_that_were_reset_are_noticed() -> None:
    after = counted(vllm_page(10, 30, 12, (8, 4)))
    # A restarted server that has overtaken the old counters says when they were made.
    first, second = (
        counted(f"{vllm_page(5 * times, 15 * times, 6 * times, ())}\nvllm:spec_decode_num_drafts_created {times}e9\n")
        for times in (1, 2)
    )
    for before, now, named in (
        (counted(vllm_page(11, 33, 13, (8, 4))), after, "accepted fell from 13 to 12: the server was restarted"),
        (counted(vllm_page(9, 27, 10, (1, 9))), after, "position 1 fell from 9 to 4"),
        (first, second, "new start time"),
    ):
        with pytest.raises(CountsError, match=named):
            difference(before, now)


@pytest.mark.parametrize(
    ("page", "named"),
    [
        (vllm_page(10, 30, 31, ()), "31 tokens accepted, but only 30 drafted"),
        (vllm_page(10, 30.5, 3, ()), "draft_tokens is 30.5"),
        (vllm_page(10, float("nan"), 3, ()), "draft_tokens is nan"),
        (vllm_page(-1, 30, 3, ()), "drafts is -1"),
    ],
)
def test_counters_that_cannot_be_are_refused_by_name(page: str, named: str) -> None:
    with pytest.raises(CountsError, match=named):
        counted(page)


def test_the_counters_of_other_engines() -> None:
    llama = (
        "llamacpp:spec_decode_num_drafts_total 4\nllamacpp:spec_decode_num_draft_tokens_total "
        "12\nllamacpp:spec_decode_num_accepted_tokens_total 5\nllamacpp:tokens_predicted_total 9\n"
    )
    found = counted(llama)
    assert (found.engine, found.blocks, found.drafted, found.accepted, found.tokens) == ("llama.cpp", 4, 12, 5, 9)
    places = "".join(
        f'trtllm_spec_decode_{what}_tokens_total{{token_position="{place}",worker="{worker}"}} {count}\n'
        for what, counts in (("drafted", (2, 2, 2)), ("accepted", (2, 1, 0)))
        for worker in (0, 1)
        for place, count in enumerate(counts)
    )
    found = counted(places)
    assert (found.engine, found.blocks, found.drafted, found.accepted, found.accepted_G) == (
        "tensorrt-llm",
        4,
        12,
        6,
        (4, 2, 0),
    )
    found = counted("trtllm_spec_decode_num_draft_tokens_total 12\ntrtllm_spec_decode_num_accepted_tokens_total 5\n")
    assert (found.blocks, found.drafted, found.accepted) == (None, 12, 5)
    sglang = (
        'sglang:spec_verify_calls_total{tp_rank="0"} 4\nsglang:generation_tokens_total '
        "11\nsglang:num_requests_total 2\nsglang:spec_accept_length 2.25\n"
    )
    found = counted(sglang)
    assert (found.engine, found.blocks, found.drafted, found.accepted) == ("sglang", 4, None, 5)
    assert counted(sglang.replace("} 4", "} 0")).blocks == 0
    assert counted("up 1\n") is None
