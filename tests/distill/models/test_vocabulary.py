"""Vocabulary agreement: every difference is found and named; padded rows can never win."""

import pytest
import torch
from refusals import refused
from tiny_models import logits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from distill.models.vocabulary import (
    compare_vocabularies,
    refuse_rowless,
    repair_rows,
    require_agreement,
    vocabulary_rows,
)

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


SWAPPED = [*WORDS[:10], WORDS[20], *WORDS[11:20], WORDS[10], *WORDS[21:]]
OTHER = ["X" + WORDS[0], *WORDS[1:]]


def compared(target=None, draft=None, target_rows=0, draft_rows=0):
    """Tokenizers of these options; rows beyond the words."""
    made, rows = [make_tokenizer(**(options or {})) for options in (target, draft)], len(WORDS)
    return compare_vocabularies(made[0], rows + target_rows, made[1], rows + draft_rows)


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (compared(), "agree", [f"{len(WORDS)} rows are the same"]),
        # The target itself cannot emit the last token.
        (compared(target_rows=-1, draft_rows=-1), "agree", []),
        (compared(target_rows=8), "repair", ["padded"]),
        (compared(draft_rows=8), "repair", ["trimmed"]),
        (compared(target_rows=64, draft_rows=3), "repair", ["padded"]),
        (compared(draft={"eos": "ef"}), "repair", ["eos is '<|end|>' in the target and 'ef' in the draft"]),
        (compared(draft={"pad": "<|end|>"}), "repair", ["pad is '<|pad|>' in the target and '<|end|>' in the draft"]),
        (compared(draft={"words": SWAPPED}), "refuse", ["token id 10 ", repr(WORDS[10]), repr(WORDS[20])]),
        (compared(draft={"words": OTHER}), "refuse", ["token id 0 ", repr(OTHER[0])]),
        (
            compared({"added": ["<tool>"]}, {}, 8, 8),
            "refuse",
            [f"token id {len(WORDS)} is '<tool>'", "no token in the draft"],
        ),
        (compared({}, {"added": ["<tool>"]}, 8, 8), "refuse", ["no token in the target", "'<tool>'"]),
        (compared({"added": ["<a>"]}, {"added": ["<b>"]}, 8, 8), "refuse", ["'<a>'", "'<b>'"]),
        (compared(target_rows=4, draft_rows=-1), "refuse", [f"token id {len(WORDS) - 1} is '<|pad|>'", "has only"]),
        # A token of text, or of a role, needs a row of its own.
        (compared({"added": ["<tool>"]}, {"added": ["<tool>"]}, 4), "refuse", [f"token id {len(WORDS)} is '<tool>'"]),
        (
            compared(*[{"words": [*WORDS, "<eot>"], "eos": "<eot>"}] * 2, 4),
            "refuse",
            [f"token id {len(WORDS)} is '<eot>'"],
        ),
    ],
)
def test_agreement_of_two_vocabularies(found, verdict, said):
    assert found.verdict == verdict
    assert all(part in found.detail for part in said), found.detail
    if verdict == "refuse":
        assert "choose a draft of the target's family" in refused(lambda: require_agreement(found))
    else:
        assert require_agreement(found) is found


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
    assert logits(draft).shape[-1] == tokens + 64
    refuse_rowless(found, tokenizer, [[0, 1], [tokens - 1]])
    text = refused(lambda: refuse_rowless(found, tokenizer, [[0, 1], [2, tokens]]))
    assert f"uses '<image>', and the draft has only {tokens} rows; leave such prompts out" in text


def test_a_special_flag_that_differs_is_named():
    flagged = make_tokenizer()
    flagged.add_special_tokens({"additional_special_tokens": ["ef"]})
    found = compare_vocabularies(make_tokenizer(), len(WORDS), flagged, len(WORDS))
    assert found.verdict == "repair"
    assert "'ef' is special" in found.detail


@pytest.mark.parametrize("kind", ["tied", "untied", "bias"])
def test_padding_keeps_old_logits_and_the_new_one_is_their_mean(kind):
    model = make_phi(40) if kind == "bias" else make_llama(40, kind == "tied")
    before = logits(model)
    repair_rows(model, 56, 40)
    after = logits(model)
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
        repair_rows(model, 64, 40)
        scores = logits(model, range(40)).float()
        assert (scores[..., 40:].amax(-1) < scores[..., :40].amax(-1)).all()
        weights = scores.softmax(-1)
        # Jensen: exp(mean) <= mean(exp). Loose by 2 % for the bfloat16 rounding of the logits.
        assert (weights[..., 40:].amax(-1) <= 1.02 * weights[..., :40].mean(-1)).all()


def test_only_real_rows_enter_the_mean():
    model = make_llama(40, tied=False)
    with torch.no_grad():
        model.lm_head.weight[30:] = 1e6
        expected = model.lm_head.weight[:30].mean(0)
    repair_rows(model, 41, token_rows=30)
    torch.testing.assert_close(model.lm_head.weight[40], expected)


def test_trimming_a_row_with_a_token_is_refused():
    model = make_llama(40, tied=True)
    assert "row 35 belongs to a token" in refused(lambda: repair_rows(model, 35, 36))
    assert model.get_input_embeddings().weight.shape[0] == 40


def test_repairing_leaves_the_random_state_and_frozen_weights_alone():
    model = make_llama(40, tied=False)
    model.lm_head.requires_grad_(False)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    repair_rows(model, 48, 40)
    assert torch.equal(torch.rand(3), expected)
    assert not model.lm_head.weight.requires_grad
    assert model.get_input_embeddings().weight.requires_grad
