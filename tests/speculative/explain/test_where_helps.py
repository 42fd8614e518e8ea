"""Which way to decode helps where: by hand, against resampling by hand, and how often it is wrong when all are equal."""

import numpy as np
import pytest
from simulation import trials

from speculative.evaluate import HeldoutResponse
from speculative.explain.where_helps import where_each_helps

LOOP, FRESH = [5] * 20, list(range(20))


def text_of(number, said, domain="x"):
    return HeldoutResponse(f"k{number}", domain, [1000 + number], list(said), [0.0] * len(said))


def test_rows_by_hand():
    texts = [text_of(row, LOOP if row < 4 else FRESH, "a" if row % 2 else "b") for row in range(12)]
    texts.append(text_of(99, []))
    lookup = np.array([4.0] * 4 + [20.0] * 8 + [0.0])
    draft = np.full(13, 10.0)
    rows = where_each_helps(texts, {"lookup": lookup, "draft": draft})
    assert [(row.dimension, row.name) for row in rows] == [
        ("domain", "a"), ("domain", "b"), ("repetition", "up to 0 % repeated"), ("repetition", "more than 0 % repeated"),
    ]  # fmt: skip
    for row in rows[:2]:
        assert (row.tokens, row.prompts) == (120, 6)
        assert row.speed_up == {"lookup": pytest.approx(120 / (8 + 80)), "draft": pytest.approx(2.0)}
        assert row.best == "draft"
    fresh, looping = rows[2:]
    assert (fresh.repeated, fresh.looping, fresh.prompts) == (0.0, 0.0, 8)
    assert fresh.speed_up == {"lookup": 1.0, "draft": 2.0}
    assert (fresh.best, fresh.certain) == ("draft", True)
    assert looping.looping == pytest.approx(19 / 20)
    assert looping.repeated == pytest.approx(19 / 20)
    assert looping.speed_up == {"lookup": 5.0, "draft": 2.0}
    # Four prompts are too few to be certain of anything, however clear.
    assert (looping.best, looping.certain) == ("lookup", False)


def test_the_target_alone_wins_where_nobody_is_faster():
    texts = [text_of(row, FRESH) for row in range(20)]
    (row, other) = where_each_helps(texts, {"slow": np.full(20, 30.0), "even": np.full(20, 20.0)})
    assert (row.best, row.certain) == ("target alone", False), "one is just as fast"
    assert row.speed_up_ci["slow"] == pytest.approx([2 / 3, 2 / 3])
    (row, other) = where_each_helps(texts, {"slow": np.full(20, 30.0)})
    assert (row.best, row.certain) == ("target alone", True)
    assert other.dimension == "repetition"
    single = where_each_helps(texts[:1], {"slow": np.full(1, 10.0)})[0]
    assert (single.speed_up_ci["slow"], single.certain, single.best) == (None, False, "slow")


def test_thirds_part_the_responses_by_how_much_they_repeat():
    rng = np.random.default_rng(0)
    texts = [text_of(row, [*(LOOP * row)[: 2 * row], *rng.integers(10, 1000, 40 - 2 * row)]) for row in range(15)]
    rows = [row for row in where_each_helps(texts, {"a": np.full(15, 10.0)}) if row.dimension == "repetition"]
    assert sum(row.prompts for row in rows) == 15
    assert [row.repeated for row in rows] == sorted(row.repeated for row in rows)
    assert len(rows) == 3


def test_samples_of_one_prompt_are_one_prompt():
    texts = [text_of(row // 4, FRESH) for row in range(20)]
    rows = where_each_helps(texts, {"a": np.random.default_rng(0).uniform(5, 15, 20)})
    assert {row.prompts for row in rows} == {5}
    assert not any(row.certain for row in rows)


@pytest.mark.simulation
def test_equals_are_rarely_called_certain_and_a_real_lead_is():
    rng, runs = np.random.default_rng(3), trials(40, 400)
    texts = [text_of(row, FRESH, "ab"[row % 2]) for row in range(40)]
    wrong = right = 0
    for _ in range(runs):
        noise = rng.normal(10, 2, (3, 40))
        rows = where_each_helps(texts, dict(zip("uvw", noise, strict=True)))
        wrong += any(row.certain for row in rows if row.dimension == "domain")
        rows = where_each_helps(texts, {"u": noise[0] - 3, "v": noise[1]})
        right += all(row.certain and row.best == "u" for row in rows if row.dimension == "domain")
    # Three standard errors of so many runs. 5 % at most are promised.
    assert wrong / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert right / runs >= 0.9 - 3 * (0.9 * 0.1 / runs) ** 0.5


def test_a_way_timed_on_other_texts_is_refused():
    with pytest.raises(ValueError, match="'a' has 3 numbers for 2 responses"):
        where_each_helps([text_of(0, FRESH), text_of(1, FRESH)], {"a": np.ones(3)})
