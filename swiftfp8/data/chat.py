"""Rows to token ids and labels, with a loss on the assistant's words only.

The tokenizer's own chat template renders the conversation; `spans.py` finds the assistant's turns
in the text; the tokenizer's offsets carry characters over to tokens. A turn is trained with the
token that ends it: the special token that follows, or the end-of-sequence token where the template
writes none after the last turn. Everything else is -100 in the labels.

A template that marks the assistant's words itself (`{% generation %}`) is taken at its word. Plain
text is trained whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from swiftfp8.data.files import BadPlace, shorten
from swiftfp8.data.formats import BadRow, Content, Message
from swiftfp8.data.lengths import MASKED, Fitted, Pair, fit_rows
from swiftfp8.data.loss_weights import Part, weigh_answers
from swiftfp8.data.processes import spread
from swiftfp8.data.spans import Span, SpanFinder
from swiftfp8.data.templates import ChatTemplate
from swiftfp8.data.words import WordEncoder, Words
from swiftfp8.errors import SwiftFP8Error

_BATCH = 256
_AHEAD = 8  # batches that may wait for one that is still being encoded
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_CHECKED = 64  # rows whose labels are decoded and compared; characters are compared in all


@dataclass(frozen=True, kw_only=True)
class Example:
    """A converted row: turns or plain text, where it came from, and the tools offered.

    Rows of other tasks have what data/task_formats.py names for content. `trained_turns`: only
    that many of the last assistant turns are trained, None trains all. `entry`: the index of the
    entry of `dataset` that the row came from.
    """

    content: Any
    where: str
    tools: list[Any] | None = None
    trained_turns: int | None = None
    entry: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """`whole` trains every token of conversations too; others as `data.loss_scale` and `_weights`.

    `loss_weights` may be empty, and then rows are given without weights.
    """

    max_length: int
    truncation: str
    system: str | None
    whole: bool
    loss_scale: str = "default"
    loss_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """What `examples` rows became: those that fit, and those that can't be used."""

    examples: int
    fitted: Fitted
    bad: tuple[BadPlace, ...]


def tokenize_rows(
    examples: Sequence[Example], tokenizer: Any, settings: TokenizeSettings, *, processes: int = 1
) -> Iterator[Tokenized]:
    """Tokenize examples a few hundred at a time, so that the caller can show progress.

    Raises:
        SwiftFP8Error: no chat template for conversations, or a mask that doesn't hold the
            assistant's words.
    """
    return spread(RowEncoder(tokenizer, settings).tokenize, examples, processes)


def encode_each(
    examples: Sequence[Example], tokenizer: Any, settings: TokenizeSettings, *, processes: int = 1
) -> Iterator[Pair | BadPlace]:
    """Whole rows, however long, or why there is none: one for each conversation, in their order.

    Raises as `tokenize_rows` does.
    """
    return spread(RowEncoder(tokenizer, settings).encode_each, examples, processes)


class _Chat(NamedTuple):
    """A conversation's text, the spans to train, and what is weighed otherwise."""

    text: str
    spans: list[Span]
    where: str
    parts: list[Part]


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    """A batch as texts: plain ones, and conversations with their spans."""

    examples: int
    texts: list[str]
    chats: list[_Chat]
    bad: list[BadPlace]


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """Ids of a batch's plain texts; of its conversations `tokenizers.Encoding` or `Words`.

    None stands for what the tokenizer's core has yet to do.
    """

    texts: list[Any]
    chats: list[Any]

    @classmethod
    def nothing(cls, batch: _Rendered) -> _Encoded:
        """All is left to the core."""
        return cls(texts=[None] * len(batch.texts), chats=[None] * len(batch.chats))


class RowEncoder:
    """Rows to tokens by one tokenizer; it remembers words, so one is kept for as many as may be."""

    def __init__(self, tokenizer: Any, settings: TokenizeSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        added = {index: str(t) for index, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = set(added) | set(tokenizer.all_special_ids)
        self.special_texts = {*added.values(), *tokenizer.all_special_tokens}
        self.core = getattr(tokenizer, "backend_tokenizer", None)
        if self.core is not None:
            self.core.no_truncation()  # now: two threads will read it
            self.core.no_padding()
        self.words = WordEncoder.of(self.core) if self.core is not None else None
        self._template: ChatTemplate | None = None
        self._finder: SpanFinder | None = None
        self.seen = 0

    def tokenize(self, examples: Sequence[Example]) -> Iterator[Tokenized]:
        """See `tokenize_rows`."""
        waiting: deque[tuple[_Rendered, Future[_Encoded]]] = deque()
        with ThreadPoolExecutor(1) as worker:
            for start in range(0, len(examples), _BATCH):
                rendered = self.render(examples[start : start + _BATCH])
                known = self.look_up(rendered)
                waiting.append((rendered, worker.submit(self.encode, rendered, known)))
                while waiting and (waiting[0][1].done() or len(waiting) > _AHEAD):
                    done, future = waiting.popleft()
                    yield self.finish(done, future.result())
            for done, future in waiting:
                yield self.finish(done, future.result())

    def encode_each(self, examples: Sequence[Example]) -> Iterator[Pair | BadPlace]:
        """See the function of this name."""
        for start in range(0, len(examples), _BATCH):
            rendered = [self.render([example]) for example in examples[start : start + _BATCH]]
            chats = [chat for one in rendered for chat in one.chats]
            batch = _Rendered(examples=len(rendered), texts=[], chats=chats, bad=[])
            made = iter(self.pairs(batch, self.encode(batch, _Encoded.nothing(batch))))
            yield from (one.bad[0] if one.bad else next(made) for one in rendered)

    def render(self, examples: Sequence[Example]) -> _Rendered:
        """Texts of a batch; rows that the template refuses are among the bad."""
        texts: list[str] = []
        chats: list[_Chat] = []
        bad: list[BadPlace] = []
        for example in examples:
            if isinstance(example.content, str):
                texts.append(example.content)
                continue
            parts: list[Part] = []
            weights = self.settings.loss_weights
            try:
                rendered, spans = self._spans(self._with_system(example.content), example.tools)
                if weights:
                    parts = weigh_answers(example.content, rendered, spans, weights)
            except (BadRow, TemplateError) as error:
                bad.append(BadPlace(where=example.where, reason=_reason(error)))
                continue
            spans = self._scaled(example.content, rendered, spans)
            if example.trained_turns is not None:
                spans = spans[-example.trained_turns :]
            chats.append(_Chat(rendered, spans, example.where, parts))
        return _Rendered(examples=len(examples), texts=texts, chats=chats, bad=bad)

    def _scaled(self, messages: list[Message], rendered: str, spans: list[Span]) -> list[Span]:
        """The spans that `loss_scale` leaves to train."""
        if self.settings.loss_scale == "last_round":
            last = max(k for k, message in enumerate(messages) if message["role"] == "user")
            answers = sum(message["role"] == "assistant" for message in messages[last:])
            return spans[-answers:]
        if self.settings.loss_scale == "ignore_empty_think":
            begun = [(_after_empty_thought(rendered, a, b), b) for a, b in spans]
            return [(a, b) for a, b in begun if rendered[a:b].strip()]
        return spans

    def look_up(self, batch: _Rendered) -> _Encoded:
        """Tokens of what can be done by remembered words."""
        if self.words is None:
            return _Encoded.nothing(batch)
        around = self.words.around
        texts: list[Any] = [None] * len(batch.texts)
        if around is not None:
            before, after = around
            for k, known in enumerate(self.words.encode_batch(batch.texts)):
                if known is not None:
                    texts[k] = np.concatenate([before, known.ids, after]).astype(np.int32)
        return _Encoded(
            texts=texts, chats=self.words.encode_batch([chat.text for chat in batch.chats])
        )

    def encode(self, batch: _Rendered, known: _Encoded) -> _Encoded:
        """The tokens that are not known yet, by the tokenizer's core. Runs beside `render`."""
        return _Encoded(
            texts=self._fill(batch.texts, known.texts, plain=True),
            chats=self._fill([chat.text for chat in batch.chats], known.chats),
        )

    def _fill(self, texts: Sequence[str], known: list[Any], *, plain: bool = False) -> list[Any]:
        left = [k for k, found in enumerate(known) if found is None]
        if not left:
            return known
        filled = [*known]
        encoded = self._encode([texts[k] for k in left], plain=plain)
        for k, encoding in zip(left, encoded, strict=True):
            filled[k] = encoding
        return filled

    def finish(self, batch: _Rendered, encoded: _Encoded) -> Tokenized:
        """Masks, and rows of the right length."""
        pairs = self.pairs(batch, encoded)
        bos = self.tokenizer.bos_token_id
        fitted = fit_rows(pairs, self.settings.max_length, self.settings.truncation, bos=bos)
        return Tokenized(examples=batch.examples, fitted=fitted, bad=tuple(batch.bad))

    def pairs(self, batch: _Rendered, encoded: _Encoded) -> list[Pair]:
        """Ids and labels, and weights where they differ: the batch's texts, its conversations."""
        pairs = [self._whole(ids) for ids in encoded.texts]
        for chat, chars in zip(batch.chats, encoded.chats, strict=True):
            wanted = [*chat.spans, *(part.span for part in chat.parts)]
            ranges = chars.token_ranges(wanted) if isinstance(chars, Words) else None
            if ranges is None and isinstance(chars, Words):  # a turn begins or ends within a word
                (chars,) = self._encode([chat.text])
            view = _View(ids=chars.ids, chars=chars, text=chat.text)
            if ranges is None:
                ranges = [view.token_range(span) for span in wanted]
            pairs.append(self._mask(view, chat, ranges))
        return pairs

    def _whole(self, ids: Sequence[int] | np.ndarray) -> Pair:
        eos = self.tokenizer.eos_token_id
        row = np.asarray(ids, dtype=np.int32)
        if eos is not None and (not len(row) or row[-1] != eos):
            row = np.append(row, np.int32(eos))
        if self.settings.loss_weights:
            return row, row.copy(), np.ones(len(row), dtype=np.float32)
        return row, row.copy()

    def _spans(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer)
            self._finder = SpanFinder(self._template.render, sorted(self.special_texts))
        assert self._finder is not None
        if self._template.marks_answers:
            rendered, spans = self._template.render_marked(messages, tools)
            return rendered, [(a, b) for a, b in spans if rendered[a:b].strip()]
        rendered = self._template.render(messages, tools)
        return rendered, self._finder.find(messages, rendered, tools)

    def _mask(self, view: _View, chat: _Chat, ranges: list[Span]) -> Pair:
        """Ids up to the end of the last turn (templates may go on), and their labels.

        `ranges` are the tokens of the chat's spans, then of its parts.
        """
        row = np.asarray(view.ids, dtype=np.int32)
        labels = np.full(len(row), MASKED, dtype=np.int32)
        weights = np.full(len(row) + 1, self.settings.loss_weights.get("prompt", 1.0), np.float32)
        for part, (first, last) in zip(chat.parts, ranges[len(chat.spans) :], strict=True):
            weights[first:last] = part.weight
        ends = {part.span[1]: part.weight for part in chat.parts if part.whole}
        stop = 0
        for span, (first, last) in zip(chat.spans, ranges, strict=False):
            if self.seen < _CHECKED or not isinstance(view.chars, Words):  # words end where it does
                self._check(view, span, first, last, chat.where)
            closed = view.ids[last - 1] in self.special  # `{% generation %}` may hold the end
            stop = last if closed else self._end_of_turn(view, span[1], last)
            labels[first:stop] = row[first:stop]
            weights[last : stop + 1] = ends.get(span[1], 1.0)  # one more, should an end be added
        if self.settings.whole:
            labels[:stop] = row[:stop]
        row, labels = row[:stop], labels[:stop]
        eos = self.tokenizer.eos_token_id
        if stop and row[-1] not in self.special and eos is not None:
            row, labels = np.append(row, np.int32(eos)), np.append(labels, np.int32(eos))
        if not self.settings.loss_weights:
            return row, labels
        weights = weights[: len(row)]
        labels[weights == 0] = MASKED
        return row, labels, weights

    def _end_of_turn(self, view: _View, end: int, last: int) -> int:
        """One past the special token that follows the turn with only blanks between, or `last`."""
        for at in range(last, min(last + 3, len(view.ids))):
            if view.ids[at] in self.special:
                chars = view.chars.token_to_chars(at)
                between = view.text[end : chars[0]] if chars else ""
                return last if between.strip() else at + 1
        return last

    def _check(self, view: _View, span: Span, first: int, last: int, where: str) -> None:
        """The chosen tokens hold the turn, and beyond it nothing but blanks."""
        wanted = view.text[span[0] : span[1]].strip()
        start, _ = view.chars.token_to_chars(first)
        _, end = view.chars.token_to_chars(last - 1)
        got = view.text[start:end].strip()
        if got == wanted and self.seen < _CHECKED:
            self.seen += 1
            decoded = self.tokenizer.decode(
                list(map(int, view.ids[first:last])),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            got = wanted if _same(decoded, wanted) else decoded
        if got != wanted:
            raise SwiftFP8Error(
                f"the loss mask would train `{shorten(got)}` for the answer `{shorten(wanted)}`",
                where=where,
                fix="the tokenizer joins the answer with the template's text: change the template "
                "(template=FILE), so that a special token or a line break stands between",
            )

    def _with_system(self, content: Content) -> list[Message]:
        assert not isinstance(content, str)
        if self.settings.system is None or content[0]["role"] == "system":
            return content
        return [{"role": "system", "content": self.settings.system}, *content]

    def _encode(self, texts: list[str], *, plain: bool = False) -> list[Any]:
        """Ids of plain texts, with the tokenizer's own first token; of others, encodings.

        The tokenizer's core is called itself: what transformers puts around it costs as much.
        """
        core = self.core
        if core is None and not plain:
            raise SwiftFP8Error(
                f"{type(self.tokenizer).__name__} does not say which characters a token covers",
                where="tokenizer",
                fix="use the model's fast tokenizer (a tokenizer.json in its folder)",
            )
        if core is None:
            return self.tokenizer(texts, verbose=False)["input_ids"]
        if plain:  # without offsets it is faster
            return [made.ids for made in core.encode_batch_fast(texts, add_special_tokens=True)]
        return core.encode_batch(texts, add_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class _View:
    """A tokenized text: its ids, its characters' tokens (an `Encoding` or `Words`), itself."""

    ids: Sequence[int] | np.ndarray
    chars: Any
    text: str

    def token_range(self, span: Span) -> tuple[int, int]:
        """First and one past the last token that cover characters of the span.

        A tokenizer that trims offsets gives blanks no token, so the search moves inwards.
        """
        start, end = span
        to_token = self.chars.char_to_token
        first = next((t for at in range(start, end) if (t := to_token(at)) is not None), None)
        if first is None:
            raise SwiftFP8Error(f"no token covers the answer `{shorten(self.text[start:end])}`")
        last = next(t for at in range(end - 1, start - 1, -1) if (t := to_token(at)) is not None)
        stop = last + 1  # a character of several bytes may be several tokens
        while stop < len(self.ids) and self._starts_before(stop, end):
            stop += 1
        return first, stop

    def _starts_before(self, token: int, end: int) -> bool:
        chars = self.chars.token_to_chars(token)
        return chars is not None and chars[0] < end


def _after_empty_thought(text: str, start: int, end: int) -> int:
    """Where an answer goes on after a reasoning that holds nothing."""
    found = _EMPTY_THOUGHT.match(text, start, end)
    return found.end() if found else start


def _same(decoded: str, wanted: str) -> bool:
    """Equal but for blanks and characters that the tokenizer's normalizer changes."""
    import unicodedata

    plain = [unicodedata.normalize("NFKC", "".join(text.split())) for text in (decoded, wanted)]
    return plain[0] == plain[1]


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateError):
        return f"the chat template refuses the row: {shorten(str(error), 120)}"
    return str(error)
