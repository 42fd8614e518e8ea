"""Turns as engines render them, and the notes about what a chat template does not show."""

import json
import logging

import pytest
from refusals import refused
from test_template import CHATML, make_tokenizer

from data.prompts import conversation
from data.prompts.notes import render_notes
from data.prompts.prompt import PromptRow, PromptSource, Template
from data.prompts.sources import load_source
from data.prompts.template import render_prompt, render_text

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}<call>{{ f.name }} {{ f.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template as of a small model: two roles, without special tokens.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
    "[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{% endif %}{% endfor %}"
)
AUTO = Template()


def row_of(*turns, tools=None):
    return PromptRow(None, turns, None, "d", "rows.jsonl:7", tools)


def notes_of(row, tokenizer, template=AUTO):
    return list(render_notes(row, render_prompt(row, tokenizer, template), tokenizer, template))


def call(arguments, flat=False):
    function = {"name": "clock", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [function if flat else {"type": "function", "function": function}],
    }


@pytest.mark.parametrize("flat", [False, True])
def test_arguments_of_tool_calls_are_objects_for_the_template(flat):
    tokenizer, asked = make_tokenizer(TOOLS), {"role": "user", "content": "What time is it?"}
    texts = [
        render_text(row_of(asked, call(given, flat)), tokenizer, AUTO) for given in ('{"zone": "CET"}', {"zone": "CET"})
    ]
    assert texts[0] == texts[1]
    assert '<call>clock {"zone": "CET"}</call>' in texts[0]
    assert "<call>clock {}</call>" in (render_text(row_of(asked, call("", flat)), tokenizer, AUTO) or "")
    for wrong in (call("{zone: CET}", flat), {**call({}), "tool_calls": '[{"name": "clock"}]'}):
        text = refused(lambda wrong=wrong: render_prompt(row_of(asked, wrong), tokenizer, AUTO))
        assert text.startswith("rows.jsonl:7: arguments of a tool call are not JSON")


def test_a_thought_is_rendered_under_each_of_its_names():
    tokenizer, asked = make_tokenizer(TOOLS), {"role": "user", "content": "What time is it?"}
    rows = [
        row_of(asked, {"role": "assistant", "content": "Noon.", key: "I look."}, asked)
        for key in conversation.REASONING_KEYS
    ]
    assert len({tuple(render_prompt(row, tokenizer, AUTO)) for row in rows}) == 1
    assert "<think>I look.</think>Noon." in (render_text(rows[0], tokenizer, AUTO) or "")
    assert notes_of(rows[0], tokenizer) == []
    (note,) = notes_of(rows[2], make_tokenizer(CHATML))
    assert note == "the chat template does not read `thinking` of the role `assistant`, so it is left out"


def test_a_developer_is_the_system_unless_the_template_knows_the_role():
    turns = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    known = CHATML.replace("{% for m", "{% if messages[0].role == 'developer' %}!{% endif %}{% for m", 1)
    assert "<|im_start|>developer\nBe brief." in (render_text(row_of(*turns), make_tokenizer(known), AUTO) or "")
    assert notes_of(row_of(*turns), make_tokenizer(known)) == []
    assert "<|im_start|>system\nBe brief." in (render_text(row_of(*turns), make_tokenizer(CHATML), AUTO) or "")
    assert ["`developer`" in note for note in notes_of(row_of(*turns), make_tokenizer(CHATML))] == [True]


def test_parts_of_text_are_joined_and_other_roles_and_keys_are_read(tmp_path, caplog):
    parts = [{"type": "text", "text": "Look", "image_url": None}, "here."]
    turns = [
        {"role": "user", "content": parts, "id": "7"},
        {"role": "model", "content": None, "tool_calls": [{"name": "f"}], "weight": 1},
        {"role": "ipython", "content": "4"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[:1]}) + "\n")
    conversation._named_keys.difference_update({"id", "weight"})
    with caplog.at_level(logging.WARNING):
        first, _ = load_source(PromptSource(path=str(path)))
    assert [(turn["role"], turn["content"]) for turn in first.messages] == [
        ("user", "Look\nhere."),
        ("assistant", ""),
        ("tool", "4"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"warning: {path}:1: turn 1 of 'messages': no chat template gets id, so it is left out",
        f"warning: {path}:1: turn 2 of 'messages': no chat template gets weight, so it is left out",
    ]


def test_markup_in_a_prompt_and_a_bos_twice_are_noted():
    rendered = PromptRow("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", None, None, "d", "rows.jsonl:7")
    (note,) = notes_of(rendered, make_tokenizer(CHATML))
    assert "'<|im_start|>' in it, which is markup of the chat template; if the row is rendered already" in note
    assert notes_of(rendered, make_tokenizer(CHATML), Template(mode="plain")) == []
    assert [
        "'[/INST]'" in note
        for note in notes_of(PromptRow("[INST] Hello [/INST]", None, None, "d", "x"), make_tokenizer(BARE))
    ] == [True]
    twice = make_tokenizer(around="<s> $A")
    (note,) = notes_of(PromptRow("<s>Hello", None, None, "d", "x"), twice, Template(mode="plain"))
    assert note.startswith("the prompt begins with '<s>' twice")
    assert notes_of(PromptRow("Hello", None, None, "d", "x"), twice, Template(mode="plain")) == []


def test_what_the_template_does_not_show_is_noted():
    asked = {"role": "user", "content": "What time is it?"}
    row = row_of(
        {"role": "system", "content": "Be brief."},
        asked,
        call({}),
        {"role": "tool", "content": "noon", "name": "clock"},
        tools=({"name": "clock"},),
    )
    assert sorted(notes_of(row, make_tokenizer(BARE))) == [
        "the chat template does not read `name` of the role `tool`, so it is left out",
        "the chat template does not read `tool_calls` of the role `assistant`, so it is left out",
        "the chat template does not read `tools`, so they are left out",
        "the chat template does not show the text of the role `system`, so it is left out",
        "the chat template does not show the text of the role `tool`, so it is left out",
    ]

    encoded = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | tojson }}")
    assert notes_of(row_of({"role": "user", "content": 'Say "aye".'}), make_tokenizer(encoded)) == []
