"""The target's answers: the same whatever the batch, the rank or the kill; with the right log-probabilities."""

import math
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_and_kill, run_child
from tiny_models import VOCAB, tiny_model

from data.responses.rendered import RenderedPrompt, StoredPrompts, prompts_fingerprint, write_prompts
from data.responses.respond import ResponsePlan, respond
from data.responses.store import Row, Store
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Forked children must not touch the parent's thread pool, and both sides must add in the same order.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompts_of(count: int) -> list[RenderedPrompt]:
    generator = random.Random(0)
    return [
        RenderedPrompt(
            f"prompt{index}", "odd" if index % 2 else "even", tuple(generator.choices(range(3, VOCAB), k=2 + index % 7))
        )
        for index in range(count)
    ]


def decode_settings(**sampling: Any) -> DecodeSettings:
    return DecodeSettings(SamplingSettings(**sampling), max_tokens=12, eos_ids=(2,), seed=3)


def answers(
    folder: Path,
    prompts: list[RenderedPrompt],
    settings: DecodeSettings | None = None,
    *,
    samples: int = 1,
    batch_size: int = 4,
    shard_size: int = 4,
    rank: int = 0,
    ranks: int = 1,
) -> list[Row]:
    store, plan = Store(folder), ResponsePlan(prompts, samples, shard_size, rank, ranks)
    store.open({"target": "tiny"})
    respond(store, plan, tiny_model(), settings or decode_settings(), batch_size=batch_size, show=False)
    return store.read()


def test_every_prompt_is_answered_once(tmp_path: Path) -> None:
    prompts = prompts_of(11)
    rows = answers(tmp_path / "store", prompts, samples=2)
    by_key = {(row.prompt_id, row.sample): row for row in rows}
    assert len(rows) == len(by_key) == 22
    for prompt in prompts:
        for sample in range(2):
            row = by_key[prompt.prompt_id, sample]
            assert row.domain == prompt.domain
            assert row.prompt_ids == list(prompt.prompt_ids)
            assert len(row.log_target_probs) == len(row.response_ids) == sum(row.loss_mask) <= 12
            assert row.finished == (row.response_ids[-1] == 2)
            assert row.finished or len(row.response_ids) == 12
            assert 2 not in row.response_ids[:-1]
    assert any(row.finished for row in rows)
    assert not all(row.finished for row in rows)


def test_greedy_samples_are_alike_and_carry_no_surprise(tmp_path: Path) -> None:
    settings = DecodeSettings(
        SamplingSettings(temperature=0.0), rule=Rule.named("greedy"), max_tokens=12, eos_ids=(2,), seed=3
    )
    rows = answers(tmp_path / "store", prompts_of(4), settings, samples=2)
    for prompt in prompts_of(4):
        assert len({tuple(row.response_ids) for row in rows if row.prompt_id == prompt.prompt_id}) == 1
    assert {value for row in rows for value in row.log_target_probs} == {0.0}


def test_a_response_depends_on_its_prompt_and_not_on_company(tmp_path: Path) -> None:
    whole = {row.prompt_id: row for row in answers(tmp_path / "a", prompts_of(12))}
    alone = {row.prompt_id: row for row in answers(tmp_path / "b", prompts_of(12)[::-1], batch_size=1, shard_size=5)}
    assert whole.keys() == alone.keys()
    for key, row in whole.items():
        assert row.input_ids == alone[key].input_ids
        # float32 logits of other batch shapes
        torch.testing.assert_close(
            torch.tensor(row.log_target_probs), torch.tensor(alone[key].log_target_probs), rtol=1e-4, atol=1e-5
        )


def test_answering_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    """Else a run that found its responses ready would train otherwise than one that made them."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = tiny_model()
    torch.manual_seed(1)
    store = Store(tmp_path / "store")
    store.open({})
    respond(store, ResponsePlan(prompts_of(5), 1, 4), model, decode_settings(), batch_size=4, show=False)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def processed_log_probs(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Log-probabilities as a server makes them, token by token in plain Python."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = order[:top_k] if top_k else order
    total = sum(math.exp(scaled[token]) for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= top_p:
            break
        nucleus.append(token)
        mass += math.exp(scaled[token]) / total
    least = min_p * math.exp(scaled[nucleus[0]])
    nucleus = [token for token in nucleus if math.exp(scaled[token]) >= least]
    total = sum(math.exp(scaled[token]) for token in nucleus)
    return [
        math.log(math.exp(scaled[token]) / total) if token in nucleus else -math.inf for token in range(len(scaled))
    ]


SERVED = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize(
    "sampling", SERVED, ids=lambda sampling: "-".join(f"{key}{value}" for key, value in sampling.items())
)
def test_stored_log_probabilities_are_those_of_a_fresh_forward(tmp_path: Path, sampling: dict[str, Any]) -> None:
    rows = answers(tmp_path / "store", prompts_of(6), decode_settings(**sampling))
    model = tiny_model()
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | sampling
    for row in rows:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row.input_ids])).logits[0].double()
        start = len(row.prompt_ids)
        for index, (token, stored) in enumerate(zip(row.response_ids, row.log_target_probs, strict=True)):
            expected = processed_log_probs(logits_TV[start - 1 + index].tolist(), **full)[token]
            assert stored == pytest.approx(expected, rel=1e-4, abs=1e-4), (
                row.prompt_id,
                index,
            )  # float32 forward with a cache


# --- shards and ranks --------------------------------------------------------------------------------------------------


def test_shards_are_a_function_of_the_prompts_alone() -> None:
    """Slow twin: the jobs sorted in Python."""
    prompts = prompts_of(11)
    plan, other = ResponsePlan(prompts, 3, 4), ResponsePlan(prompts[::-1], 3, 4)
    order = sorted(prompts, key=lambda prompt: (-len(prompt.prompt_ids), prompt.prompt_id))
    jobs = [(prompt, sample) for prompt in order for sample in range(3)]
    assert [plan.job(number) for number in range(33)] == [other.job(number) for number in range(33)] == jobs
    assert [list(plan.shard(number)) for number in range(len(plan))] == [
        list(range(33))[i : i + 4] for i in range(0, 33, 4)
    ]
    assert plan.keys.to_pylist() == [f"{prompt.prompt_id}:{sample}" for prompt, sample in jobs]
    assert plan.domains().to_pylist() == [prompt.domain for prompt, _ in jobs]


def test_one_more_prompt_asks_for_nothing_but_its_response(tmp_path: Path) -> None:
    """Whatever its length: it may stand first, and then every shard of the plan holds other jobs."""
    prompts = prompts_of(12)
    before = {(row.prompt_id, row.sample): row for row in answers(tmp_path / "store", prompts[:6] + prompts[7:])}
    files = {path: path.read_bytes() for path in (tmp_path / "store").glob("shard-*")}
    asked: list[str] = []

    def noted(target: Any, drafter: Any, keyed: Any, *rest: Any, **options: Any) -> Any:
        asked.extend(key for key, _ in keyed)
        return decode(target, drafter, keyed, *rest, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("data.responses.respond.decode", noted)
        after = {(row.prompt_id, row.sample): row for row in answers(tmp_path / "store", prompts)}
        assert asked == ["prompt6:0"]
        answers(tmp_path / "store", prompts, samples=2)
        assert sorted(asked[1:]) == sorted(f"prompt{index}:1" for index in range(12))
        answers(tmp_path / "store", prompts[3:], shard_size=5)
        assert len(asked) == 13, "fewer prompts, other shards: all there"
    assert after.items() >= before.items()
    assert all(path.read_bytes() == content for path, content in files.items())
    alone = {(row.prompt_id, row.sample): row for row in answers(tmp_path / "whole", prompts)}
    assert [row.input_ids for row in alone.values()] == [after[key].input_ids for key in alone]


def test_prompts_in_a_file(tmp_path: Path) -> None:
    """Slow twin: the same prompts in a list."""
    prompts = [
        replace(prompt, text=f"text {index}", turns="{}" if index % 3 else "")
        for index, prompt in enumerate(prompts_of(9))
    ]
    assert write_prompts(tmp_path / "prompts.arrow", iter(prompts)) == prompts_fingerprint(prompts)
    stored = StoredPrompts(tmp_path / "prompts.arrow")
    assert list(stored) == prompts
    assert stored[2:8:2] == prompts[2:8:2]
    assert stored[-1] == prompts[-1]
    plan, twin = ResponsePlan(stored, 2, 4), ResponsePlan(prompts, 2, 4)
    assert plan.keys.equals(twin.keys)
    assert [plan.job(number) for number in range(18)] == [twin.job(number) for number in range(18)]
    assert plan.domains().equals(twin.domains())
    write_prompts(tmp_path / "prompts.arrow", [])
    assert len(StoredPrompts(tmp_path / "prompts.arrow")) == 0
    (tmp_path / "prompts.arrow").write_bytes(b"no")
    with pytest.raises(UserError, match=r"prompts\.arrow: cannot be read"):
        StoredPrompts(tmp_path / "prompts.arrow")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_shards(tmp_path: Path, ranks: int) -> None:
    whole = answers(tmp_path / "whole", prompts_of(18))
    counts = []
    for rank in range(ranks):
        before = {path.name for path in (tmp_path / "shared").glob("shard-*")}
        answers(tmp_path / "shared", prompts_of(18), rank=rank, ranks=ranks)
        counts.append(len({path.name for path in (tmp_path / "shared").glob("shard-*")} - before))
    assert sum(counts) == 5
    assert max(counts) - min(counts) <= 1
    assert Store(tmp_path / "shared").read() == whole


def test_fingerprint_of_prompts_sees_ids_tokens_domains_and_order() -> None:
    *others, last = prompts = prompts_of(4)
    changes: list[dict[str, Any]] = [
        {"prompt_id": "other"},
        {"domain": "other"},
        {"prompt_ids": (9,)},
    ]
    changed = [prompts[::-1], others, *([*others, replace(last, **change)] for change in changes)]
    prints = {prompts_fingerprint(prompts), *map(prompts_fingerprint, changed)}
    assert len(prints) == 6
    assert prompts_fingerprint(prompts_of(4)) == prompts_fingerprint(prompts)


# --- stopped at any moment ---------------------------------------------------------------------------------------------


def _respond_in_child(folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    answers(folder, prompts_of(count), samples=2)


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    assert run_child(_respond_in_child, tmp_path / "whole", 40) == 0
    whole = Store(tmp_path / "whole").read()
    assert len(whole) == 80
    generator = random.Random(0)

    def shards() -> int:
        return len(list((tmp_path / "killed").glob("shard-*.arrow")))

    kills = tries = 0
    while kills < 4:
        tries += 1
        assert tries < 60
        code = run_and_kill(_respond_in_child, tmp_path / "killed", 40, progress=shards, generator=generator, most=4)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        found = Store(tmp_path / "killed").read()
        assert all(row in whole for row in found)
        if code == 0:  # it was ready before the kill
            shutil.rmtree(tmp_path / "killed")
    assert run_child(_respond_in_child, tmp_path / "killed", 40) == 0
    assert Store(tmp_path / "killed").read() == whole
