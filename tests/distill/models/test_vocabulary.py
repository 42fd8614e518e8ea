"""Vocabulary agreement: every difference is found and named; padded rows can never win."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from distill.models.vocabulary import (
    compare_vocabularies,
    refuse_rowless,
    repair_rows,
    require_agreement,
    vocabulary_rows,
)
from speculative.errors import UserError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = [*BYTES, "Ġd", "ef", "<|end|>", "<|pad|>"]


def make_tokenizer(words=WORDS, eos="<|end|>", pad="<|pad|>", added=()):
    """A byte-level BPE without merges whose ids are the positions in `words`; `added` follow them."""
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=pad)
    tokenizer.add_tokens(list(added))
    return tokenizer


def make_llama(rows, tied, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config).to(dtype).eval()


def make_phi(rows):
    """An untied head with a bias."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(vocab_size=rows, initializer_range=0.5, **sizes)).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def logits_of(model, ids=((3, 1, 4, 1, 5, 9, 2, 6),)):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits


def test_the_same_tokenizer_and_rows_agree():
    rows = len(WORDS)
    found = compare_vocabularies(make_tokenizer(), rows, make_tokenizer(), rows)
    assert (found.verdict, found.first_difference, found.tokens, found.token_rows) == ("agree", None, rows, rows)


@pytest.mark.parametrize(
    ("target_extra", "draft_extra", "word"), [(8, 0, "padded"), (0, 8, "trimmed"), (64, 3, "padded")]
)
def test_other_padded_rows_are_repairable(target_extra, draft_extra, word):
    tokens = len(WORDS)
    found = require_agreement(
        compare_vocabularies(make_tokenizer(), tokens + target_extra, make_tokenizer(), tokens + draft_extra)
    )
    assert found.verdict == "repair"
    assert word in found.detail
    assert (found.target_rows, found.draft_rows, found.token_rows) == (
        tokens + target_extra,
        tokens + draft_extra,
        tokens,
    )


def test_a_swapped_string_is_refused_and_named():
    swapped = list(WORDS)
    swapped[10], swapped[20] = swapped[20], swapped[10]
    found = compare_vocabularies(make_tokenizer(), len(WORDS), make_tokenizer(swapped), len(WORDS))
    assert found.verdict == "refuse"
    assert found.first_difference == (10, WORDS[10], WORDS[20])
    assert "id 10" in found.detail
    assert repr(WORDS[10]) in found.detail
    assert repr(WORDS[20]) in found.detail


@pytest.mark.parametrize(("target_added", "draft_added"), [(["<tool>"], []), ([], ["<tool>"]), (["<a>"], ["<b>"])])
def test_added_tokens_are_compared(target_added, draft_added):
    rows = len(WORDS) + 8
    found = compare_vocabularies(make_tokenizer(added=target_added), rows, make_tokenizer(added=draft_added), rows)
    expected = (len(WORDS), *(added[0] if added else None for added in (target_added, draft_added)))
    assert (found.verdict, found.first_difference) == ("refuse", expected)


def test_a_draft_without_a_row_for_a_token_is_refused():
    found = compare_vocabularies(make_tokenizer(), len(WORDS) + 4, make_tokenizer(), len(WORDS) - 1)
    assert found.verdict == "refuse"
    assert found.first_difference == (len(WORDS) - 1, WORDS[-1], None)


def test_a_special_token_that_no_text_uses_gets_a_made_up_row():
    """As Gemma-3 27b beside 1b: `<image_soft_token>` is one row beyond the small sibling's."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokens = len(WORDS)
    found = require_agreement(compare_vocabularies(tokenizer, tokens + 64, tokenizer, tokens))
    assert (found.verdict, found.rowless) == ("repair", (tokens,))
    assert "'<image>' is special and gets a made-up row" in found.detail
    draft = make_llama(tokens, tied=True)
    repair_rows(draft, tokens + 64, found.token_rows)
    assert logits_of(draft).shape[-1] == tokens + 64
    refuse_rowless(found, tokenizer, [[0, 1], [tokens - 1]])
    with pytest.raises(
        UserError, match=rf"uses '<image>', and the draft has only {tokens} rows; leave such prompts out"
    ):
        refuse_rowless(found, tokenizer, [[0, 1], [2, tokens]])


def test_a_token_of_text_or_of_a_role_needs_a_row_of_its_own():
    for tokenizer in (make_tokenizer(added=["<tool>"]), make_tokenizer([*WORDS, "<eot>"], eos="<eot>")):
        found = compare_vocabularies(tokenizer, len(WORDS) + 4, tokenizer, len(WORDS))
        assert (found.verdict, found.first_difference[0]) == ("refuse", len(WORDS))


def test_tokens_beyond_the_targets_own_rows_need_no_row():
    rows = len(WORDS) - 1  # the target itself cannot emit the last token
    found = compare_vocabularies(make_tokenizer(), rows, make_tokenizer(), rows)
    assert (found.verdict, found.token_rows) == ("agree", rows)


@pytest.mark.parametrize(("role", "change"), [("eos", {"eos": "ef"}), ("pad", {"pad": "<|end|>"})])
def test_other_roles_of_the_same_strings_are_repaired_by_name(role, change):
    found = compare_vocabularies(make_tokenizer(), len(WORDS), make_tokenizer(**change), len(WORDS))
    assert found.verdict == "repair"
    assert role in found.detail
    assert found.first_difference[1:] == ({"eos": "<|end|>", "pad": "<|pad|>"}[role], change[role])


def test_a_special_flag_that_differs_is_named():
    flagged = make_tokenizer()
    flagged.add_special_tokens({"additional_special_tokens": ["ef"]})
    found = compare_vocabularies(make_tokenizer(), len(WORDS), flagged, len(WORDS))
    assert found.verdict == "repair"
    assert "'ef' is special" in found.detail


def test_a_refusal_is_one_line_with_both_strings():
    other = ["X" + WORDS[0], *WORDS[1:]]
    with pytest.raises(UserError) as caught:
        require_agreement(compare_vocabularies(make_tokenizer(), len(WORDS), make_tokenizer(other), len(WORDS)))
    message = str(caught.value)
    assert "\n" not in message
    assert "id 0" in message
    assert repr(other[0]) in message
    assert "choose" in message


@pytest.mark.parametrize("kind", ["tied", "untied", "bias"])
def test_padding_keeps_old_logits_and_the_new_one_is_their_mean(kind):
    model = make_phi(40) if kind == "bias" else make_llama(40, kind == "tied")
    before = logits_of(model)
    repair_rows(model, 56)
    after = logits_of(model)
    assert after.shape[-1] == 56 == vocabulary_rows(model.config)
    assert model.get_input_embeddings().weight.shape[0] == 56
    torch.testing.assert_close(after[..., :40], before, atol=1e-6, rtol=1e-6)  # another matmul width, float32
    mean = before.mean(-1, keepdim=True).expand(-1, -1, 16)
    torch.testing.assert_close(
        after[..., 40:], mean, atol=1e-5, rtol=1e-4
    )  # sum of means against mean of sums, float32
    if kind != "bias":
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "tied")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_row_is_never_the_strict_maximum_nor_above_average(dtype):
    for seed in range(5):
        model = make_llama(40, tied=bool(seed % 2), seed=seed, dtype=dtype)
        repair_rows(model, 64)
        logits = logits_of(model, ids=torch.arange(40).reshape(4, 10).tolist()).float()
        assert (logits[..., 40:].amax(-1) < logits[..., :40].amax(-1)).all()
        weights = logits.softmax(-1)
        # Jensen: exp(mean) <= mean(exp). Loose by 2 % for the bfloat16 rounding of the logits.
        assert (weights[..., 40:].amax(-1) <= 1.02 * weights[..., :40].mean(-1)).all()


def test_only_real_rows_enter_the_mean():
    model = make_llama(40, tied=False)
    with torch.no_grad():
        model.lm_head.weight[30:] = 1e6
        expected = model.lm_head.weight[:30].mean(0)
    repair_rows(model, 41, token_rows=30)
    torch.testing.assert_close(model.lm_head.weight[40], expected)


@pytest.mark.parametrize("tied", [True, False])
def test_trimming_padded_rows_restores_the_model(tied):
    model = make_llama(40, tied)
    before = logits_of(model)
    repair_rows(model, 48)
    repair_rows(model, 40, token_rows=40)
    assert torch.equal(logits_of(model), before)
    assert vocabulary_rows(model.config) == 40
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("token_rows", [36, None])
def test_trimming_a_row_with_a_token_is_refused(token_rows):
    model = make_llama(40, tied=True)
    with pytest.raises(UserError, match="row 35 holds a token"):
        repair_rows(model, 35, token_rows=token_rows)
    assert model.get_input_embeddings().weight.shape[0] == 40


def test_no_rows_are_refused():
    with pytest.raises(UserError, match="0 rows"):
        repair_rows(make_llama(40, tied=True), 0)


def test_repairing_leaves_the_random_state_and_frozen_weights_alone():
    model = make_llama(40, tied=False)
    model.lm_head.requires_grad_(False)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    repair_rows(model, 48)
    assert torch.equal(torch.rand(3), expected)
    assert not model.lm_head.weight.requires_grad
    assert model.get_input_embeddings().weight.requires_grad


def test_a_repaired_model_survives_saving(tmp_path):
    model = make_llama(40, tied=True)
    repair_rows(model, 48)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
