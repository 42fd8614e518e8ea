"""The tables of all keys that `understudy config` prints."""

import re

from distill.config.run import RunConfig
from distill.config.table import COMMON, config_table


def test_the_most_used_keys_come_first_and_are_marked() -> None:
    common, every = config_table().split("## All keys")
    assert re.findall(r"^\| \*\*`(.+?)`\*\* \|", common, re.M) == list(COMMON)
    assert len(COMMON) == 15
    assert set(re.findall(r"^\| \*\*`(.+?)`\*\* \|", every, re.M)) == set(COMMON)


def test_every_key_has_one_row_with_a_meaning() -> None:
    rows = re.findall(r"^\| \**`(.+?)`\** \| (.*?) \| (.*) \|$", config_table().split("## All keys")[1], re.M)
    keys = [key for key, *_ in rows]
    assert len(set(keys)) == len(keys)
    assert {key.partition(".")[0] for key in keys} == set(RunConfig.model_fields)
    assert all(meaning for *_, meaning in rows)
    assert "| `student.lora` | null | train LoRA adapters only" in config_table(), "an optional section has a row"
    assert [key for key in keys if key.endswith("*")] == ["data.heldout.N.*"], "and a source's keys one table"
