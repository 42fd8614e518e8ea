"""Sequences made while training: whose text they are, which positions were rejected, and that a resumed run reads the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failures import full_disk
from processes import killed_often, rank_statuses
from refusals import refused
from tiny_models import perturbed, prompts_of, tiny_model
from tiny_training import TOKENS, fresh_accelerator, run_config, tiny_tokenizer
from transformers import PreTrainedModel

from data.batches.collate import Example
from data.responses.rendered import RenderedPrompt
from data.responses.respond import rejected_tokens
from distill.config.run import RunConfig
from distill.models.draft import cast_copy
from distill.run import checkpoint
from distill.run.run import Run
from distill.training.rollouts import (
    Rollouts,
    chosen_prompts,
)
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

END = 2


@dataclass
class Rank:
    """What rollouts ask of a run; one process plays several ranks, one after another."""

    config: Any
    rank: int = 0
    ranks: int = 1

    @property
    def folder(self) -> Path:
        return self.config.folder

    def seen(self, look: Callable[[], Any]) -> Any:
        return look()

    def wait(self) -> None:
        pass

    def await_seen(self, *_: Any) -> None:
        pass


class Draft:
    """A draft that counts how often it is asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.asked = model, 0

    def __call__(self) -> PreTrainedModel:
        self.asked += 1
        return self.model


def target_model(**options: Any) -> PreTrainedModel:
    return tiny_model(vocab_size=TOKENS, eos_token_id=END, **options)


def draft_model(**options: Any) -> PreTrainedModel:
    return perturbed(target_model(**options), 0.03).train()


def rendered(count: int) -> list[RenderedPrompt]:
    keyed = prompts_of([2 + index % 5 for index in range(count)], vocab_size=TOKENS)
    return [RenderedPrompt(key, "any", tuple(ids)) for key, ids in keyed]


def config_of(
    folder: Path, temperature: float = 1.0, rollouts: dict[str, Any] | None = None, rule: str | None = None
) -> RunConfig:
    return run_config(
        folder,
        data={
            "mix": {"student": 1.0, "speculative": 1.0},
            "rollouts": {"every": 10, "prompts": 6, **(rollouts or {})},
        },
        serving={"temperature": temperature, "max_tokens": 14, "batch_size": 2, "shard_size": 2, "rule": rule},
    )


def rollouts_of(config: RunConfig, rank: int = 0, ranks: int = 1, target: PreTrainedModel | None = None) -> Rollouts:
    run: Any = Rank(config, rank, ranks)
    return Rollouts(run, target or target_model(), tiny_tokenizer(), rendered(16))


def same(found: list[Example], expected: list[Example]) -> bool:
    assert len(found) == len(expected)
    return all(
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and (one.weights is other.weights is None or np.array_equal(one.weights, other.weights))
        for one, other in zip(found, expected, strict=True)
    )


def response_of(example: Example) -> list[int]:
    return example.input_ids[example.loss_mask].tolist()


def prompt_of(example: Example) -> tuple[int, ...]:
    return tuple(example.input_ids[~example.loss_mask].tolist())


def test_student_rollouts_are_responses_of_the_draft(tmp_path: Path) -> None:
    rollouts = rollouts_of(config_of(tmp_path))
    draft = draft_model()
    examples = rollouts.examples("student", 2, Draft(draft))
    asked = {prompt.prompt_ids: prompt.prompt_id for prompt in chosen_prompts(rendered(16), 6, 0, 2)}
    assert {prompt_of(example) for example in examples} == set(asked)
    settings = DecodeSettings(
        SamplingSettings(1.0), max_tokens=14, eos_ids=(END,), seed=2**32 * 5, rule=Rule.named("sample")
    )
    for example in examples:
        prompt = prompt_of(example)
        alone, _ = decode(draft, None, [(f"{asked[prompt]}:0", prompt)], settings)
        assert response_of(example) == alone[0].response_ids
        assert example.weights is None


def greedy_text(target: PreTrainedModel, prompt: tuple[int, ...], most: int) -> list[int]:
    """Plain decoding with transformers' own forward, no cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] != END):
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def replayed_rejections(draft: PreTrainedModel, prompt: tuple[int, ...], text: list[int], gamma: int) -> list[int]:
    """By hand: behind an accepted prefix the draft has read the text itself, so one forward tells what it drafted."""
    with torch.no_grad():
        drafted = draft.eval()(torch.tensor([[*prompt, *text]])).logits[0].argmax(-1)[len(prompt) - 1 :].tolist()
    rejected, start = [], 0
    while start < len(text):
        block = range(start, min(start + gamma, len(text)))
        wrong = next((place for place in block if drafted[place] != text[place]), None)
        if wrong is None:
            start += gamma + 1  # all accepted, and the bonus token
        else:
            rejected.append(wrong)
            start = wrong + 1
    return rejected


def test_speculative_rollouts_at_temperature_0_are_the_targets_greedy_text_with_its_corrections_marked(
    tmp_path: Path,
) -> None:
    rollouts, draft = rollouts_of(config_of(tmp_path, temperature=0.0)), draft_model()
    examples = rollouts.examples("speculative", 0, Draft(draft))
    marked = accepted = 0
    for example in examples:
        text = response_of(example)
        assert text == greedy_text(rollouts.target, prompt_of(example), 14)
        assert example.weights is not None
        weights = example.weights[example.loss_mask]
        rejected = replayed_rejections(draft, prompt_of(example), text, gamma=4)
        assert np.flatnonzero(weights == 2.0).tolist() == rejected
        assert np.count_nonzero(weights == 1.0) == len(text) - len(rejected)
        assert (example.weights[~example.loss_mask] == 1.0).all()
        marked, accepted = marked + len(rejected), accepted + len(text) - len(rejected)
    assert marked > 5
    assert accepted > 5, "both kinds of position occur"


def test_rejections_of_blocks_by_hand() -> None:
    def rejections(tokens: int, drafted: list[int], accepted: list[int]) -> list[int]:
        counts = {"drafted_counts": drafted, "accepted_counts": accepted}
        rejected = rejected_tokens(Response("key", [1], response_ids=list(range(tokens)), **counts))
        return np.flatnonzero(rejected).tolist()

    # 0 1 | 2 corrects, 3 4 5 | 6 is a bonus, 7 corrects, 8 is plain decoding
    assert rejections(9, [3, 3, 3, 0], [2, 3, 0, 0]) == [2, 7]
    assert rejections(3, [3], [3]) == [], "cut by the budget before the bonus"
    assert rejections(2, [3], [2]) == [], "an end token among the accepted: the correction was cut away"
    assert rejections(4, [2, 2], [1, 1]) == [1, 3]


def test_generations_go_through_all_prompts_before_one_comes_again() -> None:
    prompts = rendered(10)
    asked = [chosen_prompts(prompts, 4, 7, generation) for generation in range(5)]
    assert all(len({prompt.prompt_id for prompt in some}) == 4 for some in asked)
    flat = [prompt.prompt_id for some in asked for prompt in some]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(prompt.prompt_id for prompt in prompts)
    assert flat[:10] != sorted(flat[:10]), "shuffled"
    assert chosen_prompts(prompts, 99, 7, 3) != chosen_prompts(prompts, 99, 8, 3)
    assert len(chosen_prompts(prompts, 99, 7, 3)) == 10


@pytest.mark.parametrize("kind", ["student", "speculative"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_any_number_of_ranks_makes_the_same(tmp_path: Path, kind: Any, ranks: int) -> None:
    expected = rollouts_of(config_of(tmp_path / "one")).examples(kind, 1, Draft(draft_model()))
    config = config_of(tmp_path / "many")
    shards = set()
    for rank in range(ranks):
        rollouts = rollouts_of(config, rank, ranks)
        if rank < min(ranks, 3) - 1:
            with pytest.raises(
                UserError, match="responses missing"
            ):  # in earnest, the barrier waits for the other ranks
                rollouts.examples(kind, 1, Draft(draft_model()))
        else:
            found = rollouts.examples(kind, 1, Draft(draft_model()))
        there = {path.name for path in (config.folder / "rollouts").rglob("shard-*.arrow")}
        if rank < 3:
            assert len(there - shards) == len(range(rank, 3, ranks)), "each rank makes its share"
        shards = there
    assert same(found, expected)


def test_a_killed_run_reads_the_same_rollouts_as_one_that_was_not(tmp_path: Path) -> None:
    target, draft = target_model(), draft_model()

    def make(config: RunConfig) -> None:
        for kind in ("student", "speculative"):
            rollouts_of(config, target=target).examples(kind, 0, Draft(draft))

    plain, killed = config_of(tmp_path / "plain"), config_of(tmp_path / "killed")
    make(plain)

    def shards() -> int:
        return len(list((killed.folder / "rollouts").rglob("*.arrow")))

    assert killed_often(make, killed, progress=shards, times=4, most=2, seed=3) > 0
    other = Draft(tiny_model(vocab_size=TOKENS, seed=5))
    for kind in ("student", "speculative"):
        pair = [rollouts_of(config, target=target).examples(kind, 0, other) for config in (plain, killed)]
        assert same(*pair)
    assert other.asked == 0


def test_a_generation_goes_when_no_resume_can_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, draft = config_of(tmp_path, rollouts={"prompts": 2}), Draft(draft_model())
    resumable: list[int | None] = [None]
    monkeypatch.setattr(checkpoint, "last_resumable", lambda run: resumable[0])
    rollouts = rollouts_of(config)

    def left() -> list[int]:
        return sorted(int(path.name[-5:]) for path in (config.folder / "rollouts").glob("student-g*"))

    for generation in range(3):
        rollouts.examples("student", generation, draft)
    assert left() == [1, 2], "the one before is kept"
    resumable[0] = 25  # every = 10: it reads generation 2
    for generation in (3, 4, 5):
        rollouts.examples("student", generation, draft)
    assert left() == [2, 3, 4, 5]
    resumable[0] = 50
    rollouts.examples("student", 6, draft)
    assert left() == [5, 6]
    rollouts.examples("speculative", 9, draft)
    assert left() == [5, 6], "each kind deletes its own"


def test_the_draft_trains_on_as_it_did_before(tmp_path: Path) -> None:
    rollouts, model = rollouts_of(config_of(tmp_path)), draft_model()
    model.model.layers[0].eval()  # a frozen part stays as it was
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    for kind in ("student", "speculative"):
        rollouts.examples(kind, 0, Draft(model))
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.is_grad_enabled()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_dropout_is_off_while_decoding(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    target = tiny_model("gpt2", vocab_size=TOKENS, eos_token_id=END)
    calm = rollouts_of(config, target=target).examples("student", 0, Draft(perturbed(target).eval()))
    restless = rollouts_of(config_of(tmp_path / "train"), target=target).examples(
        "student", 0, Draft(perturbed(target).train())
    )
    assert same(restless, calm)


def test_a_draft_is_asked_in_the_dtype_that_it_is_served_in(tmp_path: Path) -> None:
    draft, half = draft_model(), target_model(dtype=torch.bfloat16)
    for kind in ("student", "speculative"):
        rounded, trained = (
            rollouts_of(config_of(tmp_path / f"{kind}-{name}"), target=half).examples(kind, 0, Draft(one))
            for name, one in (("rounded", cast_copy(draft, [torch.bfloat16], draft.device)), ("trained", draft))
        )
        assert same(trained, rounded)
    assert draft.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in draft.parameters())


@pytest.mark.parametrize("kind", ["student", "speculative"])
def test_a_full_disk_is_one_line_and_leaves_nothing_in_part(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.shards.write_bytes", full_disk)
    config = config_of(tmp_path)
    assert "No space left" in refused(lambda: rollouts_of(config).examples(kind, 0, Draft(draft_model())))
    assert not [*(config.folder / "rollouts").rglob("*.tmp"), *(config.folder / "rollouts").rglob("*.arrow")]


def _asked_of_another_target(rank: int, config: RunConfig) -> None:
    run = Run(config, fresh_accelerator(config.folder))
    Rollouts(run, target_model(seed=9), tiny_tokenizer(), rendered(16)).examples("student", 0, Draft(draft_model()))


def test_rollouts_of_another_target_are_refused_before_any_rank_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    rollouts_of(config).examples("student", 0, Draft(draft_model()))
    folder = config.folder / "rollouts" / "student-g00000"
    next(folder.glob("shard-00001-*")).unlink()  # the second rank's share
    before = sorted(folder.iterdir())
    first, second = rank_statuses(_asked_of_another_target, config)
    assert first == 1
    assert second not in (0, None)
    assert "made with another target" in capfd.readouterr().err
    assert sorted(folder.iterdir()) == before
