"""The sections on the target's text: what they show is what the result holds, on the page and in Markdown."""

from __future__ import annotations

from typing import Any

import pytest
from result_example import bare, example_result, not_timed, typed

from distill.report.markdown import markdown
from distill.report.page import render_page
from distill.report.tables import Table, measured_times
from distill.report.text_tables import text_sections


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result()


def sections_of(tree: dict[str, Any]) -> dict[str, Any]:
    return {section.id: section for section in text_sections(typed(tree))}


def column(table: Table, name: str) -> list[Any]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_where_shows_each_contestant_and_marks_the_certain_leader(result: dict[str, Any]) -> None:
    domains, thirds = sections_of(result)["where"].tables
    assert [cell.text for cell in column(domains, "domain")] == ["python", "gsm8k", "chat"]
    # A contestant that is a draft has its label, a rival its own name.
    assert domains.columns == ("domain", "distilled", "lookup", "repeated", "tokens")
    assert [cell.text for cell in column(domains, "lookup")] == ["0.90x", "1.20x", "1.50x"]
    assert [cell.strong for cell in column(domains, "distilled")] == [True, True, False]
    assert [cell.mark for cell in column(domains, "distilled")] == ["", "certain", ""]
    assert [cell.mark for cell in column(domains, "lookup")] == ["", "", "certain"]
    assert column(domains, "lookup")[2].note == "[1.40, 1.61]"
    assert [cell.text for cell in column(thirds, "repeated")] == ["12 %", "16 %"]
    alone = [dict(row, best="target") for row in result["where"]]
    assert column(sections_of({**result, "where": alone})["where"].tables[0], "domain")[0].mark == "nothing helps"


def test_repetition_is_shown_whole_and_by_domain(result: dict[str, Any]) -> None:
    (table,) = sections_of(result)["repetition"].tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["all", "15.5 %", "0.8 %", "1,580"], ["python", "30.0 %", "2.0 %", "600"], ["gsm8k", "11.0 %", "0.0 %", "500"],
        ["chat", "2.1 %", "0.0 %", "480"],
    ]  # fmt: skip
    only = dict(result["verdict"]["repetition"], by_domain={"python": {"repeated": 0.3, "looping": 0.0, "tokens": 600}})
    one = {**result, "verdict": {**result["verdict"], "repetition": only}}
    assert len(sections_of(one)["repetition"].tables[0].rows) == 1, "one domain is the whole"


def test_page_and_markdown_have_the_same_sections(result: dict[str, Any]) -> None:
    typed_result = typed(result)
    page, text = render_page(typed_result), markdown(typed_result, measured_times(typed_result))
    for section in text_sections(typed_result):
        assert f'<section id="{section.id}">\n<h2>{section.title}</h2>' in page
        assert f"## {section.title}" in text
    assert "nothing helps" not in page


@pytest.mark.parametrize(("variant", "left"), [(not_timed, {"repetition"}), (bare, set())])
def test_what_is_not_there_has_no_section(variant: Any, left: set[str], result: dict[str, Any]) -> None:
    assert set(sections_of(variant(result))) >= left
    assert "where" not in sections_of(variant(result))


def with_proofs(result: dict[str, Any]) -> dict[str, Any]:
    def row(temperature: float, alpha: float, best: int | None) -> dict[str, Any]:
        return {
            "temperature": temperature, "rule": "sample" if temperature else "greedy", "prompts": 16, "tokens": 700,
            "alpha": alpha, "alpha_ci": [alpha - 0.1, alpha + 0.1], "gamma": 4, "tau": 3 * alpha, "tau_ci": [1.0, 3.0],
            "best_gamma": best, "predicted_speed_up": None if best is None else 1.0 + best / 10, "looping": 0.31 - temperature / 4,
        }  # fmt: skip

    score, no_difference = {"score": 0.5, "ci": [0.4, 0.6]}, {"value": 0.0, "ci": [-0.01, 0.01]}
    return {
        **result,
        "temperatures": [row(0.0, 0.8, 3), row(0.7, 0.6, 0)],
        "losslessness": {"draft": "d", "rule": "sample", "gamma": 4, "passed": True, "sentence": "The same <text>."},
        "scores": [
            {
                "scorer": "exact-match", "rule": "sample", "gamma": 4, "prompts": 32, "samples": 1, "speculative": score,
                "alone": score, "difference": no_difference, "passed": False, "sentence": "The scores DIFFER.",
            }
        ],
    }  # fmt: skip


def test_temperatures_are_a_row_each_and_the_served_one_is_marked(result: dict[str, Any]) -> None:
    (table,) = sections_of(with_proofs(result))["temperatures"].tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0", "0.800", "2.40", "3: 1.30x", "31.0 %"], ["0.7", "0.600", "1.80", "none pays", "13.5 %"],
    ]  # fmt: skip
    assert table.columns[2] == "tau at gamma 4"
    assert [row[0].strong for row in table.rows] == [False, True], "served at 0.7"
    untimed = with_proofs(result)
    untimed["temperatures"] = [dict(row, best_gamma=None) for row in untimed["temperatures"]]
    assert "best gamma" not in sections_of(untimed)["temperatures"].tables[0].columns


def test_proofs_are_told_and_a_failed_one_is_marked(result: dict[str, Any]) -> None:
    tree = with_proofs(result)
    section = sections_of(tree)["proofs"]
    assert section.lines == ["Passed (rule sample, gamma 4): The same <text>.", "exact-match: The scores DIFFER."]
    assert (section.tables[0].rows[0][0].text, section.tables[0].rows[0][0].mark) == ("exact-match", "differs")
    failed = {**tree, "losslessness": dict(tree["losslessness"], passed=False), "scores": []}
    assert sections_of(failed)["proofs"].lines[0].startswith("FAILED (rule sample, gamma 4)")
    assert "The same &lt;text&gt;." in render_page(typed(tree))
    assert not {"temperatures", "proofs"} & set(sections_of(result))
