"""Answers with tool calls and reasoning in fields of their own, on templates that treat them as the
families in use do. The templates are written here; only their behaviour is taken from elsewhere."""

from __future__ import annotations

import pytest
from test_chat import CHATML, trained_runs

from swiftfp8.data.chat import Example, TokenizeSettings, tokenize_rows
from swiftfp8.data.formats import BadRow, choose_format, read_tools

# Drops reasoning before the last question, adds an empty one to a last answer without; tools in a
# system turn; results of tools within the user's turns.
THINKING = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- for t in tools %}{{ t | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else
  (m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}
{{- ('\\n' if said or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501

# Contents trimmed; a call replaces the content and ends with another token than an answer.
TRIMMING = """{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|im_start|>assistant\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' + '<|endoftext|>' }}
{%- else %}{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\\n\\n' + m.content | trim + '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"""  # noqa: E501

# No roles; refuses results of tools that nobody called.
BRACKETED = """{%- set ns = namespace(called=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '[TOOL_RESULTS] ' + m.content + ' [/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{% set ns.called = true %}
{{- '[TOOL_CALLS] [{"name": "' + m.tool_calls[0].function.name + '", "arguments": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}]<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}"""

# Reasoning and answer in channels with special tokens between, in the last answer only.
CHANNELS = """{%- for m in messages %}
{%- if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- else %}
{%- if m.thinking and loop.last %}{{ '<|im_start|>assistant to=analysis\\n' + m.thinking + '<|im_end|>' }}{% endif %}
{{- '<|im_start|>assistant to=final\\n' + m.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""  # noqa: E501

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]


def call(city, **more):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"role": "assistant", "content": "", **more,
            "tool_calls": [{"type": "function", "function": function}]}  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text):
    return {"role": "tool", "content": text}


def trained(tokenizer, template, messages, tools=None):
    tokenizer.chat_template = template
    settings = TokenizeSettings(max_length=4096, truncation="right", system=None, whole=False)
    example = Example(content=messages, where="file:1", tools=tools)
    (part,) = tokenize_rows([example], tokenizer, settings)
    assert not part.bad, part.bad
    ((ids, labels),) = part.fitted.pairs
    return trained_runs(tokenizer, labels), tokenizer.decode(ids)


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [user("q"), answer("a", reasoning_content="why")],
            ["<think>\nwhy\n</think>\n\na<|im_end|>"],
        ),
        # the template's empty reasoning belongs to the prompt
        ([user("q"), answer("a")], ["a<|im_end|>"]),
        (
            [user("q"), answer("a", reasoning_content="dropped"), user("r"),
             answer("b", reasoning_content="kept")],
            ["a<|im_end|>", "<think>\nkept\n</think>\n\nb<|im_end|>"],
        ),
        ([user("q"), call("Paris"), result("sun"), answer("Sunny.")], [PARIS, "Sunny.<|im_end|>"]),
        (
            [user("q"), call("Paris", content="Let me see."), result("sun"), answer("Sunny.")],
            ["Let me see.\n" + PARIS, "Sunny.<|im_end|>"],
        ),
        (
            [user("q"), call("Paris", reasoning_content="ask"), result("sun"),
             answer("Sunny.", reasoning_content="so")],
            ["<think>\nask\n</think>\n\n" + PARIS, "<think>\nso\n</think>\n\nSunny.<|im_end|>"],
        ),
        ([user("q"), call("Paris")], [PARIS]),
    ],
    ids=["reasoning", "empty", "earlier dropped", "call", "words and call", "both", "call last"],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_a_thinking_template(tokenizer, messages, expected, tools):
    runs, text = trained(tokenizer, THINKING, messages, tools)
    assert runs == expected
    assert ('{"city": "string"}' in text) == (tools is not None)


def test_a_system_turn_with_tools_is_not_trained(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, user("q"), answer("a")]
    runs, text = trained(tokenizer, THINKING, messages, TOOLS)
    assert runs == ["a<|im_end|>"] and "Be brief.\n{" in text


def test_a_call_that_ends_with_another_token(tokenizer):
    messages = [user(" q "), call("Paris"), result("sun"), answer(" Sunny. ")]
    runs, _ = trained(tokenizer, TRIMMING, messages)
    assert runs == [
        '{"name": "weather", "parameters": {"city": "Paris"}}<|endoftext|>',
        "Sunny.<|im_end|>",
    ]


def test_a_template_without_roles_that_refuses_a_result_without_a_call(tokenizer):
    messages = [user("q"), call("Paris"), result("sun"), answer("Sunny.")]
    runs, _ = trained(tokenizer, BRACKETED, messages)
    assert [run.strip() for run in runs] == [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]<|im_end|>',
        "Sunny.<|im_end|>",
    ]


def test_channels(tokenizer):
    messages = [user("q"), answer("a", reasoning_content="old"), user("r"),
                answer("b", reasoning_content="why")]  # fmt: skip
    runs, _ = trained(tokenizer, CHANNELS, messages)
    assert runs[-1] == (" to=analysis\nwhy<|im_end|><|im_start|>assistant to=final\nb<|im_end|>")
    assert runs[0].endswith("a<|im_end|>") and "old" not in runs[0]


@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_template_that_knows_no_tools_makes_bad_rows_of_calls(tokenizer, content):
    tokenizer.chat_template = CHATML
    messages = [user("q"), call("Paris", content=content), result("sun"), answer("Sunny.")]
    settings = TokenizeSettings(max_length=4096, truncation="right", system=None, whole=False)
    (part,) = tokenize_rows([Example(content=messages, where="file:1")], tokenizer, settings)
    assert "leaves out a tool call of turn 2" in part.bad[0].reason


def test_random_conversations_decode_to_what_the_assistant_said(tokenizer):
    """Against an independent way: what a growing conversation adds after the question."""
    import random

    rng = random.Random(5)
    tokenizer.chat_template = TRIMMING
    for _ in range(30):
        messages, expected = [user("start")], []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.5:
                messages += [call(rng.choice(["Paris", "a{b", '"}}'])), result("r")]
            messages += [answer(rng.choice(["x", "{}", "a <b>", "}}"])), user("next")]
        messages.pop()
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = tokenizer.apply_chat_template(
                    messages[:k], tokenize=False, add_generation_prompt=True
                )
                full = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False)
                expected.append(full.removeprefix(asked))
        assert trained(tokenizer, TRIMMING, messages)[0] == expected


def convert(row):
    form, _ = choose_format(row, "auto", where="")
    return form.convert(row)


def test_messages_keep_reasoning_and_calls():
    turns = [
        {"role": "user", "content": "q", "tool_calls": None, "reasoning_content": None},
        {"role": "assistant", "content": None, "reasoning_content": "why",
         "tool_calls": [{"id": "1", "type": "function", "function":
                         {"name": "f", "arguments": '{"a": 1}', "unused": None}}]},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "a", "tool_calls": []},
    ]  # fmt: skip
    assert convert({"messages": turns}) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "why",
         "tool_calls": [{"type": "function", "id": "1",
                         "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    ]  # fmt: skip


def test_sharegpt_calls_become_tool_calls():
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert convert({"conversations": turns})[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def test_tools_are_a_list_or_its_json():
    assert read_tools({"tools": '[{"name": "f", "x": null}]'}) == [{"name": "f"}]
    assert read_tools({"tools": TOOLS}) == TOOLS
    assert read_tools({}) is read_tools({"tools": ""}) is read_tools({"tools": []}) is None


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"content": "", "tool_calls": None}, "an assistant turn is empty"),
        ({"content": "", "tool_calls": ["f"]}, "not a list of calls"),
        ({"content": "", "tool_calls": [{"function": {}}]}, "names no function"),
        (
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of a tool call of turn 2: not JSON",
        ),
        ({"content": "a", "reasoning_content": 7}, "reasoning_content of turn 2 is not text"),
    ],
)
def test_bad_calls_are_bad_rows(turn, reason):
    with pytest.raises(BadRow, match=reason):
        convert({"messages": [user("q"), {"role": "assistant", **turn}]})
    with pytest.raises(BadRow, match="'tools' is not a list of functions"):
        read_tools({"tools": {"name": "f"}})
    with pytest.raises(BadRow, match="tools: not JSON"):
        read_tools({"tools": "[{"})


def test_the_quick_sandbox_renders_and_refuses_as_the_library_does(tokenizer):
    from jinja2.exceptions import SecurityError, TemplateError

    from swiftfp8.data.templates import ChatTemplate

    messages = [user("q"), call("Paris"), result("sun"), answer("Sunny.")]
    for template in (CHATML, THINKING, TRIMMING, BRACKETED):
        tokenizer.chat_template = template
        for ask in (False, True):
            expected = tokenizer.apply_chat_template(
                messages, tools=TOOLS, tokenize=False, add_generation_prompt=ask
            )
            assert ChatTemplate(tokenizer).render(messages, TOOLS, ask=ask) == expected
    tokenizer.chat_template = "{{ messages[0].nothing }}|{{ messages[0]['nothing'] }}"
    assert ChatTemplate(tokenizer).render(messages) == "|"
    tokenizer.chat_template = "{{ messages.append(1) }}"
    for _ in range(2):  # the second time from memory
        with pytest.raises(SecurityError):
            ChatTemplate(tokenizer).render(messages)
    for attack in ("messages[0].__class__.__mro__", "messages[0].content.__class__.__base__"):
        tokenizer.chat_template = "{{ " + attack + " }}"
        with pytest.raises(TemplateError):
            ChatTemplate(tokenizer).render(messages)
