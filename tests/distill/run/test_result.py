"""result.json as a type: what is written is what was read, whatever a later or an earlier version put into it."""

import json

import pytest
from result_example import bare, example_result, no_baseline, not_timed, typed

from speculative.evaluate import Judgement


@pytest.mark.parametrize("variant", [lambda tree: tree, bare, no_baseline, not_timed])
def test_what_is_written_is_what_was_read(variant) -> None:
    tree = json.loads(json.dumps(variant(example_result())))
    assert json.loads(json.dumps(typed(tree).record())) == tree


def test_a_key_of_another_version_is_kept() -> None:
    tree = example_result() | {"later": {"x": 1}}
    tree["verdict"]["replay_check"]["later"] = 2
    written = typed(tree).record()
    assert (written["later"], written["verdict"]["replay_check"]["later"]) == ({"x": 1}, 2)


def test_text_that_no_utf8_has_is_text_all_the_same() -> None:
    assert typed(example_result() | {"name": "\ud800"}).record()["name"] == "\ud800"


def test_lists_by_response_stay_out_of_the_verdict() -> None:
    sums = {"accept_sums": [0.5], "tokens": [1]}
    record = {"step": 0, "alpha": 0.5, "tau": 1.0, "per_response": sums, "greedy": {"alpha": 0.5, "per_response": sums}}
    judgement = Judgement.model_validate(record)
    assert judgement.without_sums().record() == {"step": 0, "alpha": 0.5, "tau": 1.0, "greedy": {"alpha": 0.5}}
    assert judgement.per_response is not None
