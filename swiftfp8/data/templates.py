"""A chat template, compiled once and rendered as often as there are rows.

transformers compiles templates for a sandbox, since they come with models from anywhere, and its
`apply_chat_template` copies and checks every conversation anew. Here the same template runs in the
same sandbox with the same filters and functions; only its look-ups are quicker: the sandbox
judges an attribute of a plain type once, not each time, and a dict's key is no failed attribute
first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from swiftfp8.errors import SwiftFP8Error

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLAIN = (str, dict, list, tuple, int, float, bool, type(None), LoopContext)
_DICT_ATTRIBUTES = frozenset(dir(dict))
_MISSING = object()


class ChatTemplate:
    """A tokenizer's chat template. `marks_answers`: it has `{% generation %}` marks."""

    def __init__(self, tokenizer: Any) -> None:
        """Compile the template; raises SwiftFP8Error where the tokenizer has none."""
        try:
            self._text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise SwiftFP8Error(
                "the tokenizer has no chat template, and the rows are conversations",
                where="template",
                fix="set template=FILE.jinja, use an instruction-tuned model, or train on plain "
                "text",
            ) from error
        self._tokens = dict(tokenizer.special_tokens_map)
        self._compiled = _compile(self._text)
        self.marks_answers = _GENERATION.search(self._text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        ask: bool = False,
    ) -> str:
        """The conversation's text, as `apply_chat_template(tokenize=False)` gives it.

        With `ask` the text ends where the assistant would begin (`add_generation_prompt`).
        """
        return self._compiled.render(
            messages=[_with_thinking(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=ask,
            **self._tokens,
        )

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text, and the spans that the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = render_jinja_template(
            conversations=[[_with_thinking(message) for message in messages]],
            tools=tools,
            chat_template=self._text,
            return_assistant_tokens_mask=True,
            **self._tokens,
        )
        return rendered[0], [tuple(span) for span in spans[0]]


def _compile(text: str) -> Template:
    """transformers' own environment for templates, with the quicker sandbox in its place."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template(text).environment
    ours = _QuickSandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.filters.update(theirs.filters)
    ours.tests.update(theirs.tests)
    ours.globals.update(theirs.globals)
    return ours.from_string(text)


class _QuickSandbox(ImmutableSandboxedEnvironment):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._judged: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's answer; for plain types it depends on type and name alone."""
        kind = type(obj)
        known = self._judged.get((kind, attr))
        if known is not None:
            return known
        safe = super().is_safe_attribute(obj, attr, value)
        if kind in _PLAIN or issubclass(kind, Namespace):
            self._judged[kind, attr] = safe
        return safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role` is `message["role"]` unless dicts have such an attribute."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if value is _MISSING else value
        return super().getattr(obj, attribute)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """gpt-oss' template reads reasoning under another name."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}
