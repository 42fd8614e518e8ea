"""Templates: ids of prompts and answers, their border, their masks, and what is refused."""

import logging
from datetime import date

import pytest
from refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.prompts.prompt import PromptRow, Template
from data.prompts.template import (
    check_learnable,
    check_lengths,
    loss_mask,
    on_day,
    render_prompt,
    template_fingerprint,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A thinking template: the last answer keeps its thoughts, the generation prompt closes them when thinking is off.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
CORPUS = [
    "def add(first, second):\n    return first + second\n",
    "hello world, what is the answer?\n",
    "assistant user",
] * 8
PLAIN, CHAT, AUTO = (Template(mode=mode) for mode in ("plain", "chat", "auto"))


def make_tokenizer(template: str | None = None, around: str | None = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=specials, initial_alphabet=alphabet)
    )
    if around:
        pairs = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single=around, special_tokens=pairs)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>" if template is None else "<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def plain_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    return make_tokenizer(CHATML)


def text_row(text: str) -> PromptRow:
    return PromptRow(text, None, None, "d", "rows.jsonl:7")


def chat_row(*turns: tuple[str, str]) -> PromptRow:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return PromptRow(None, messages, None, "d", "rows.jsonl:7")


@pytest.mark.parametrize(
    ("around", "front"), [(None, []), ("<s> $A", ["<s>"]), ("<s> $A </s>", ["<s>"]), ("$A </s>", [])]
)
def test_plain_prompt_has_the_tokenizers_front_and_no_end(around, front):
    tokenizer = make_tokenizer(around=around)
    ids = render_prompt(text_row("hello world"), tokenizer, PLAIN)
    assert tokenizer.convert_ids_to_tokens(ids)[: len(front)] == front
    assert tokenizer.decode(ids[len(front) :]) == "hello world"
    assert ids == render_prompt(text_row("hello world"), tokenizer, AUTO)


def test_plain_prompt_keeps_an_end_token_that_the_user_wrote():
    tokenizer = make_tokenizer(around="<s> $A </s>")
    assert tokenizer.decode(render_prompt(text_row("hello</s>"), tokenizer, PLAIN)) == "<s>hello</s>"


def test_chat_prompt_is_the_template_and_text_becomes_a_user_turn(chat_tokenizer):
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for row in (text_row("hello"), chat_row(("user", "hello"))):
        for mode in (CHAT, AUTO):
            ids = render_prompt(row, chat_tokenizer, mode)
            assert chat_tokenizer.decode(ids) == expected
    assert chat_tokenizer.decode(render_prompt(text_row("hello"), chat_tokenizer, PLAIN)) == "hello"


def test_chat_without_a_template_is_refused_with_the_way_out(plain_tokenizer):
    message = refused(render_prompt, text_row("a"), plain_tokenizer, CHAT)
    assert "has no chat template" in message
    assert "data.template.mode: plain" in message
    assert "chat_template.jinja" in message
    # A conversation has no plain form: auto and plain must not invent one.
    assert "plain text" in refused(render_prompt, chat_row(("user", "a")), plain_tokenizer, AUTO)
    assert "data.template.mode: chat" in refused(render_prompt, chat_row(("user", "a")), plain_tokenizer, PLAIN)


def test_a_prompt_without_a_token_is_refused(plain_tokenizer):
    for mode in (CHAT, AUTO):
        assert "no token" in refused(render_prompt, text_row("a"), make_tokenizer("{{ '' }}"), mode)
    assert "no token" in refused(render_prompt, text_row(""), plain_tokenizer, PLAIN)


def test_template_that_refuses_a_row_names_it():
    tokenizer = make_tokenizer("{{ raise_exception('Roles must\nalternate') }}")
    message = refused(render_prompt, text_row("a"), tokenizer, CHAT)
    assert message.startswith("rows.jsonl:7: ")
    assert "Roles must alternate" in message


def test_chat_template_kwargs_reach_the_template_and_typos_do_not():
    tokenizer = make_tokenizer(THINKING)
    with_thoughts = tokenizer.decode(render_prompt(text_row("a"), tokenizer, CHAT))
    quiet = Template(mode="chat", chat_template_kwargs={"enable_thinking": False})
    without = tokenizer.decode(render_prompt(text_row("a"), tokenizer, quiet))
    assert with_thoughts.endswith("<think>\n")
    assert without.endswith("</think>\n\n")

    typo = Template(mode="chat", chat_template_kwargs={"enable_thinkng": False})
    assert "did you mean enable_thinking?" in refused(render_prompt, text_row("a"), tokenizer, typo)
    reserved = Template(mode="chat", chat_template_kwargs={"add_generation_prompt": False})
    assert "set by Understudy" in refused(render_prompt, text_row("a"), tokenizer, reserved)


def test_kwargs_are_checked_in_a_template_with_transformers_own_tag():
    template = "{% generation %}{{ messages[0].content }}{{ tone }}{% endgeneration %}"
    tokenizer = make_tokenizer(template)
    ids = render_prompt(text_row("a"), tokenizer, Template(mode="chat", chat_template_kwargs={"tone": "!"}))
    assert tokenizer.decode(ids) == "a!"
    bad = Template(mode="chat", chat_template_kwargs={"tune": "!"})
    assert "did you mean tone?" in refused(render_prompt, text_row("a"), tokenizer, bad)


def test_loss_mask_covers_the_response_only():
    assert loss_mask(2, 5) == [False, False, True, True, True]
    assert loss_mask(2, 2) == [False, False]
    with pytest.raises(AssertionError):
        loss_mask(3, 2)


def test_a_set_with_nothing_to_learn():
    check_learnable(3, 4, 1, "train")
    assert refused(check_learnable, 2, 3, 0, "train").startswith("train: 2 rows with 3 tokens have no response token")


def test_lengths():
    assert check_lengths([1] * 6, "r:1", 10, 4, "error")
    assert not check_lengths([1] * 7, "r:1", 10, 4, "drop")
    message = refused(check_lengths, [1] * 7, "r:1", 10, 4, "error")
    assert message.startswith("r:1: a prompt of 7 tokens and 4 new ones")
    assert "no space for a prompt" in refused(check_lengths, [1], "r:1", 10, 10, "drop")


def test_fingerprint_changes_with_what_changes_prompts(plain_tokenizer, chat_tokenizer, caplog):
    thinking = make_tokenizer(THINKING)
    prints = [
        template_fingerprint(plain_tokenizer, PLAIN),
        template_fingerprint(make_tokenizer(around="<s> $A"), PLAIN),
        template_fingerprint(chat_tokenizer, PLAIN),
        template_fingerprint(chat_tokenizer, CHAT),
        template_fingerprint(thinking, CHAT),
        template_fingerprint(thinking, Template(mode="chat", chat_template_kwargs={"enable_thinking": False})),
    ]
    assert len(set(prints)) == len(prints)
    assert all(len(value) == 64 for value in prints)
    assert template_fingerprint(make_tokenizer(), AUTO) == prints[0]
    assert template_fingerprint(make_tokenizer(CHATML), AUTO) == prints[3]
    assert "no chat template" in refused(template_fingerprint, plain_tokenizer, CHAT)

    caplog.set_level(logging.WARNING, logger="data.prompts.template")
    template_fingerprint(plain_tokenizer, Template(mode="plain", chat_template_kwargs={"enable_thinking": False}))
    assert "are ignored" in caplog.text


def test_a_template_writes_the_given_day():
    tokenizer = make_tokenizer(
        '{% if strftime_now is defined %}{% set day = strftime_now( "%d %b %Y") %}{% endif %}{{ day }}'
        "{{ strftime_now('%Y') | int + 1 }}"
    )
    dated = on_day(tokenizer, date(2024, 2, 29))
    ids = render_prompt(text_row("x"), dated, CHAT)
    assert dated.decode(ids) == "29 Feb 2024" + "2025"
    assert "strftime_now" in tokenizer.chat_template, "what is saved with a draft asks for the day as before"
    assert template_fingerprint(dated, PLAIN) == template_fingerprint(tokenizer, PLAIN)
    for other in (make_tokenizer(CHATML), make_tokenizer()):
        assert on_day(other, date(2024, 2, 29)) is other
