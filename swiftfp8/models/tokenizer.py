"""The tokenizer, with a padding token and, where the user gives one, another chat template.

The padding token: the tokenizer's own; else a token of its vocabulary that is meant for padding or
that ends documents but not turns; else the end-of-sequence token. Padding never reaches the loss:
padded positions are masked by position, whatever their token is, so an end-of-sequence token that
serves both ends a turn in the loss all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swiftfp8.config.paths import find_chat_template
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")


def load_tokenizer(
    source: ModelSource, template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the right.

    `template` is a Jinja file, or the name of a packaged template (`chatml`, `gemma`), that
    replaces the tokenizer's own. Raises SwiftFP8Error where the tokenizer is missing or unreadable.
    """
    path = source.path
    if not _has_tokenizer(path):
        raise SwiftFP8Error(
            "the model directory has no tokenizer",
            where=str(path),
            fix="copy tokenizer.json and tokenizer_config.json from the original model",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    # tokenizers raises bare Exception for a tokenizer.json that it can't parse
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SwiftFP8Error(
            f"the tokenizer can't be read: {reason}",
            where=str(path),
            fix="copy its files again from the model that it was made from",
        ) from error
    tokenizer.padding_side = "right"
    _set_padding(tokenizer, path)
    if template is not None:
        tokenizer.chat_template = read_template(template)
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, suggested: str | None = None) -> None:
    """Raise where chat rows can't be rendered because the tokenizer has no chat template.

    `suggested` is the packaged template that fits the model's family.
    """
    if tokenizer.chat_template:
        return
    name = suggested or "chatml"
    raise SwiftFP8Error(
        "the tokenizer has no chat template, so chat rows can't be rendered",
        where=str(tokenizer.name_or_path),
        fix=f"template=<jinja file>, or a packaged one as template={name}; base models have none: "
        "use the instruct model, or task=pretrain with plain text",
    )


def read_template(template: str) -> str:
    """The text of a Jinja chat template: a file, or the name of a packaged one."""
    import jinja2

    path = find_chat_template(template)
    try:
        text = path.read_text(encoding="utf-8")
        # `generation` is a tag of transformers, which marks the assistant's tokens
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _generation_tag()]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise SwiftFP8Error(
            f"the chat template is not valid Jinja: {error.message}",
            where=f"{path}, line {error.lineno}",
        ) from error
    except UnicodeDecodeError as error:
        raise SwiftFP8Error("the chat template is not UTF-8 text", where=str(path)) from error
    if not text.strip():
        raise SwiftFP8Error("the chat template is empty", where=str(path))
    return text


def _generation_tag() -> type:
    """A Jinja extension that takes `{% generation %}...{% endgeneration %}` for a plain block."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _VOCABULARIES) or any(path.glob("*.tiktoken"))


def _set_padding(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Give the tokenizer a padding token where it has none (see the module's docstring)."""
    if tokenizer.pad_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    for token in _PADDING:
        if token in vocabulary and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return
    if tokenizer.eos_token is None:
        raise SwiftFP8Error(
            "the tokenizer has neither a padding nor an end-of-sequence token",
            where=str(path),
            fix="name them in tokenizer_config.json",
        )
    tokenizer.pad_token = tokenizer.eos_token
