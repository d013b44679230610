"""Which tokens end the assistant's turn, by the chat template.

A model that was trained on a template's conversations ends its answers with the special token that
the template writes there, `<|im_end|>` say. A base model's own end-of-sequence token is another
one, so generation has to be told. No list of templates is complete: the template is rendered around
a marker, and what follows the marker is looked at.
"""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError

_MARKER = "qzk0mark"
_TURNS = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _MARKER},
    {"role": "user", "content": "?"},
)


def turn_ends(tokenizer: Any) -> list[int]:
    """Ids of the special tokens that follow an answer, last or not, with only blanks between.

    None where the tokenizer has no chat template, or one that refuses so plain a conversation.
    """
    if not tokenizer.chat_template:
        return []
    special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    special.update(tokenizer.all_special_tokens)
    found = set()
    for turns in (_TURNS[:2], _TURNS):
        try:
            text = tokenizer.apply_chat_template(list(turns), tokenize=False)
        except TemplateError:
            continue
        after = text.rpartition(_MARKER)[2].lstrip() if _MARKER in text else ""
        ends = [token for token in special if after.startswith(token)]
        if ends:
            found.add(tokenizer.convert_tokens_to_ids(max(ends, key=len)))
    return sorted(found)
