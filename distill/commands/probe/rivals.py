"""What a probe says of the rivals of a draft: prompt lookup, the draft, and prompt lookup before the draft."""

from collections.abc import Mapping, Sequence
from typing import Any

from speculative.evaluate import HeldoutResponse
from speculative.explain.repetition import repetition

LOOKUP = "lookup"
_CHOICE = ("gamma", "tau", "speed_up")


def rival_rows(lookup: Mapping[float, dict[str, Any]], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a rival and temperature, under the temperature's own law (`sample`, or `greedy` at 0).

    {temperature, name, draft, max_ngram, min_ngram, gamma, tau, speed_up, speed_up_ci, distilled}: name is `lookup`, a
    draft's name, or `lookup+` and it; gamma 0: none pays; distilled: speed-up when the draft is distilled as far as
    others from there, null for lookup. All by replay, at the first batch size.
    """
    rows = []
    for temperature, facts in lookup.items():
        tau = facts["tau"][facts["gammas"].index(facts["gamma"])] if facts["gamma"] else 1.0
        rows.append(_row(temperature, LOOKUP, None, {**facts, "tau": tau}, None))
        for record in records:
            cell = next((cell for cell in record.get("cells", ()) if _has_both(cell, temperature)), None)
            if cell is None:
                continue
            name, together = record["name"], cell["together"]
            rows.append(_row(temperature, name, name, cell["now"], cell["reachable"]["speed_up"]))
            distilled = together["reachable"]["speed_up"]
            rows.append(_row(temperature, f"{LOOKUP}+{name}", name, together["now"], distilled))
    return rows


def _has_both(cell: dict[str, Any], temperature: float) -> bool:
    return cell["temperature"] == temperature and cell["together"] is not None


def _row(
    temperature: float, name: str, draft: str | None, facts: dict[str, Any], distilled: float | None
) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "name": name,
        "draft": draft,
        "max_ngram": facts.get("max_ngram"),
        "min_ngram": facts.get("min_ngram"),
        **{key: facts[key] for key in _CHOICE},
        "speed_up_ci": facts.get("speed_up_ci"),
        "distilled": distilled,
    }


def repetition_of(responses: Sequence[HeldoutResponse]) -> dict[str, Any]:
    """{repeated, looping, warning} of the target's answers."""
    found = repetition(responses)
    return {key: found[key] for key in ("repeated", "looping", "warning")}
