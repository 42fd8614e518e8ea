"""The mask token of a parallel draft: found where nothing else is, trained under adapters too, named where engines read it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, run_config, tiny_tokenizer

from data.batches.collate import Batch
from distill.loss.definitions import Objective
from distill.models.load import load_model
from distill.models.mask_token import free_token, give_mask_token
from distill.models.student import make_student, with_adapters
from distill.training.module import DraftModule
from speculative.engine.models import mask_token_of

FULL = len(tiny_tokenizer())  # rows of a vocabulary without padding


def student_of(folder: Path, rows: int = FULL, texts: Any = (), **parallel: Any) -> Any:
    config = run_config(folder, student={"parallel": parallel, "layers": [0]})
    notes: dict[str, Any] = {}
    student = make_student(config.student, tiny_model(vocab_size=rows), tiny_tokenizer(), notes=notes, texts=texts)
    assert notes["parallel"]["mask_token"] == student.config.pard_token == mask_token_of(student.config)
    return student


def test_a_row_without_a_token_comes_first_and_starts_as_the_mean(tmp_path: Path) -> None:
    student = student_of(tmp_path, FULL + 4)
    assert student.config.pard_token == FULL
    before, table = tiny_model(vocab_size=FULL + 4).get_input_embeddings().weight, student.get_input_embeddings().weight
    torch.testing.assert_close(table[FULL], before.mean(0))
    others = torch.arange(FULL + 4) != FULL
    assert torch.equal(table[others], before[others])


def test_then_a_special_token_that_no_text_uses(tmp_path: Path) -> None:
    assert student_of(tmp_path, texts=[[5, 0, 7], [2]]).config.pard_token == 1
    assert free_token(tiny_tokenizer(), FULL, [[0, 1], [2, FULL - 1]]) == FULL - 2
    text = refused(free_token, tiny_tokenizer(), FULL, [range(FULL)])
    assert "student.parallel: your texts use all 299 tokens" in text


def test_a_draft_that_has_one_keeps_it_with_its_embedding() -> None:
    student = tiny_model(vocab_size=TOKENS)
    student.config.ptd_token_id = 9
    before = student.get_input_embeddings().weight.clone()
    assert give_mask_token(student, tiny_tokenizer(), ()) == {
        "mask_token": 9,
        "token": tiny_tokenizer().convert_ids_to_tokens(9),
    }
    assert torch.equal(student.get_input_embeddings().weight, before)


def test_a_recurrent_draft_is_refused() -> None:
    mamba = tiny_model("mamba", hidden_size=32, num_hidden_layers=1, state_size=4)
    assert "recurrent state" in refused(give_mask_token, mamba, tiny_tokenizer(), ())


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_train_the_mask_row_and_no_other(tmp_path: Path, tied: bool) -> None:
    config = run_config(tmp_path, student={"parallel": {}, "layers": [0], "lora": {"rank": 2, "alpha": 4}})
    target = tiny_model(vocab_size=TOKENS, tie_word_embeddings=tied)
    target.config.pard_token = 1
    student = with_adapters(make_student(config.student, target, tiny_tokenizer()), config.student.lora)
    module = DraftModule(student, Objective({"ce": 1.0}))
    first = module.exported()
    first.save_pretrained(tmp_path / "base")
    before = first.get_input_embeddings().weight.clone()
    optimizer = torch.optim.SGD([weight for weight in module.parameters() if weight.requires_grad], lr=1.0)
    loss, _, _ = module(Batch(torch.tensor([[1, 5, 1, 9]]), torch.arange(4), torch.tensor([5, 1, 9, 4])))
    loss.backward()
    optimizer.step()
    merged = module.exported()
    merged.save_pretrained(tmp_path / "merged")
    loaded = load_model("draft", str(tmp_path / "merged"))
    assert mask_token_of(loaded.config) == 1
    change_V = (loaded.get_input_embeddings().weight - before).abs().amax(-1)
    assert change_V[1] > 1e-3
    assert change_V[torch.arange(TOKENS) != 1].max() == 0.0
    ids = torch.tensor([[3, 1, 8]])
    with torch.no_grad():
        expected = module.student.eval()(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)
    # The adapters kept apart hold the row too, and their base names the token.
    apart = module.adapter()
    assert apart is not None
    apart.save_pretrained(str(tmp_path / "adapter"))
    base = load_model("base", str(tmp_path / "base"))
    joined = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    assert mask_token_of(joined.config) == 1
    with torch.no_grad():
        torch.testing.assert_close(joined(ids).logits, expected, rtol=1e-4, atol=1e-4)
