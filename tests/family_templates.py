"""Chat templates of families that no package carries, written here in the shape of their own.

Each has what its family's chat format has: the marks, where blanks and line breaks stand, what ends
an answer, and what becomes of a system prompt.
"""

from __future__ import annotations

_CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_MIMO_PROMPT = "You are MiMo, an AI assistant developed by Xiaomi."

FAMILY_TEMPLATES = {
    # the system prompt goes before the last question; a blank before each answer
    "Mistral": """{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% endif %}{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}
{{- '[INST] ' + (ns.system if loop.revindex <= 2 else '') + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}""",
    "InternLM2": "{{ bos_token }}" + _CHATML,
    "Yi": _CHATML,
    # no mark ends an answer but the next question's
    "Baichuan2": """{%- for m in messages %}{% if m.role == 'user' %}
{{- '<reserved_106>' + m.content }}{% elif m.role == 'assistant' %}
{{- '<reserved_107>' + m.content }}{% else %}{{- m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<reserved_107>' }}{% endif %}""",
    # a line break and a blank after each role
    "ChatGLM3": """{{- '[gMASK]sop' }}{% for m in messages %}
{{- '<|' + m.role + '|>\\n ' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    # a system prompt of its own where the conversation has none
    "MiMo": "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\n"
    + _MIMO_PROMPT
    + "<|im_end|>\\n' }}{% endif %}"
    + _CHATML,
}
