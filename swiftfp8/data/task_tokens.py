"""Rows of the tasks that are no language modelling, tokenized.

Texts get the special tokens that the tokenizer adds by itself (`[CLS]` and `[SEP]`, a first token);
conversations are rendered with the chat template. A text over `max_length` is cut at its end, its
last special token kept; an answer is cut too, and a preference of which one side then has no answer
left is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError

from swiftfp8.data.chat import Example, TokenizeSettings, encode_each
from swiftfp8.data.files import BadPlace, shorten
from swiftfp8.data.formats import BadRow, Message
from swiftfp8.data.labels import to_target
from swiftfp8.data.lengths import MASKED, Pair
from swiftfp8.data.processes import count_processes
from swiftfp8.data.task_formats import Preference, Rated, Related
from swiftfp8.data.task_rows import Ragged, RelatedRows, TaskRows, pairs_to_rows, rated_to_rows
from swiftfp8.data.templates import ChatTemplate
from swiftfp8.tasks import Head, rates_answers

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class TaskTokens:
    """What the rows became; `rows` is None where none is left. Tokens are of all sequences.

    `pairs` are those sequences, each with the labels that say what of it is scored.
    """

    rows: TaskRows | RelatedRows | None
    pairs: tuple[Pair, ...]
    bad: tuple[BadPlace, ...]
    dropped: Mapping[str, int]
    truncated: int
    tokens: int
    trained_tokens: int
    longest: int


def tokenize_task(
    examples: Sequence[Example],
    tokenizer: Any,
    config: Config,
    *,
    head: Head | None,
    pooling: str | None,
) -> TaskTokens:
    """Tokenize the rows of `config.task`, which is neither `sft` nor `pretrain`."""
    if config.task == "seq_cls":
        assert head is not None
        return _labelled(examples, tokenizer, config, head)
    if config.task == "embedding":
        return _related(examples, tokenizer, config, closed=pooling == "last_token")
    if rates_answers(config):
        return _rated(examples, tokenizer, config)
    return _preferences(examples, tokenizer, config)


class _Fitter:
    """Brings sequences to `max_length` and counts what that took."""

    def __init__(self, config: Config) -> None:
        self._limit = config.max_length
        self._delete = config.data.truncation == "delete"
        self.dropped: Counter[str] = Counter()
        self.bad: list[BadPlace] = []
        self.truncated = 0

    def fit(self, pairs: Sequence[Pair | BadPlace], *, answers: bool = True) -> list[Pair] | None:
        """A row's sequences, all of them or none; those with `answers` have something to learn."""
        made: list[Pair] = []
        cut = False
        for pair in pairs:
            if isinstance(pair, BadPlace):
                self.bad.append(pair)
                return None
            ids, labels = pair
            if len(ids) > self._limit and self._delete:
                self.dropped[f"longer than max_length={self._limit}"] += 1
                return None
            cut = cut or len(ids) > self._limit
            ids, labels = ids[: self._limit], labels[: self._limit]
            if answers and np.all(labels[1:] == MASKED):
                self.dropped[f"no answer within max_length={self._limit}"] += 1
                return None
            if not len(ids):
                self.dropped["no token"] += 1
                return None
            made.append((ids, labels))
        self.truncated += cut
        return made

    def result(self, rows: TaskRows | RelatedRows | None, pairs: Iterable[Pair]) -> TaskTokens:
        pairs = tuple(pairs)
        lengths = [(len(ids), int(np.count_nonzero(labels != MASKED))) for ids, labels in pairs]
        return TaskTokens(
            rows=rows,
            pairs=pairs,
            bad=tuple(self.bad),
            dropped=self.dropped,
            truncated=self.truncated,
            tokens=sum(size for size, _ in lengths),
            trained_tokens=sum(trained for _, trained in lengths),
            longest=max((size for size, _ in lengths), default=0),
        )


def _preferences(examples: Sequence[Example], tokenizer: Any, config: Config) -> TaskTokens:
    fitter = _Fitter(config)
    chosen: list[Pair] = []
    rejected: list[Pair] = []
    sides = [
        _conversation(example, example.content.prompt, answer)
        for example in examples
        for answer in (example.content.chosen, example.content.rejected)
    ]
    encoded = _encode(sides, tokenizer, config)
    for first, second in zip(encoded[::2], encoded[1::2], strict=True):
        fitted = fitter.fit([first, second])
        if fitted is not None:
            chosen.append(fitted[0])
            rejected.append(fitted[1])
    rows = pairs_to_rows(chosen, rejected) if chosen else None
    return fitter.result(rows, [*chosen, *rejected])


def _rated(examples: Sequence[Example], tokenizer: Any, config: Config) -> TaskTokens:
    """Single answers; a preference is two of them."""
    fitter = _Fitter(config)
    rated: list[tuple[Example, Rated]] = []
    for example in examples:
        content = example.content
        if isinstance(content, Preference):
            for answer, good in ((content.chosen, True), (content.rejected, False)):
                one = Rated(prompt=content.prompt, completion=answer, good=good)
                rated.append((example, one))
        else:
            rated.append((example, content))
    sides = [_conversation(example, one.prompt, one.completion) for example, one in rated]
    pairs: list[Pair] = []
    good: list[bool] = []
    for (_, one), encoded in zip(rated, _encode(sides, tokenizer, config), strict=True):
        fitted = fitter.fit([encoded])
        if fitted is not None:
            pairs += fitted
            good.append(one.good)
    rows = rated_to_rows(pairs, good, limit=config.max_length, seed=config.seed) if pairs else None
    return fitter.result(rows, pairs)


def _conversation(example: Example, prompt: list[Message], answer: list[Message]) -> Example:
    turns = sum(message["role"] == "assistant" for message in answer)
    return Example(
        content=[*prompt, *answer], where=example.where, tools=example.tools, trained_turns=turns
    )


def _encode(examples: Sequence[Example], tokenizer: Any, config: Config) -> list[Pair | BadPlace]:
    settings = TokenizeSettings(
        max_length=_UNLIMITED, truncation="right", system=config.system, whole=False
    )
    processes = count_processes(config.data.num_proc, examples)
    return list(encode_each(examples, tokenizer, settings, processes=processes))


def _labelled(
    examples: Sequence[Example], tokenizer: Any, config: Config, head: Head
) -> TaskTokens:
    fitter = _Fitter(config)
    targets: list[np.ndarray] = []
    kept: list[Example] = []
    for example in examples:
        try:
            targets.append(to_target(example.content.label, head))
            kept.append(example)
        except BadRow as error:
            fitter.bad.append(BadPlace(where=example.where, reason=str(error)))
    texts = _Texts(tokenizer, config)
    contents = [example.content.content for example in kept]
    encoded = texts.encode(contents, [example.where for example in kept], _tools(kept))
    ids: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for one, target in zip(encoded, targets, strict=True):
        fitted = fitter.fit([one], answers=False)
        if fitted is not None:
            ids.append(fitted[0][0])
            values.append(target)
    fitter.truncated += texts.truncated
    rows = TaskRows({"ids": Ragged(ids)}, {"target": np.stack(values)}) if ids else None
    return fitter.result(rows, [(one, one) for one in ids])


def _related(
    examples: Sequence[Example], tokenizer: Any, config: Config, *, closed: bool
) -> TaskTokens:
    fitter = _Fitter(config)
    texts = _Texts(tokenizer, config, closed=closed)
    options = config.embedding
    flat: list[str] = []
    places: list[str] = []
    for example in examples:
        content: Related = example.content
        passages = (content.positive, *content.negatives)
        flat.append(options.query_prefix + content.anchor)
        flat += [options.passage_prefix + passage for passage in passages]
        places += [example.where] * (1 + len(passages))
    encoded = iter(texts.encode(flat, places, [None] * len(flat)))
    kept: list[list[np.ndarray]] = []
    for example in examples:
        parts = [next(encoded) for _ in range(2 + len(example.content.negatives))]
        fitted = fitter.fit(parts, answers=False)
        if fitted is not None:
            kept.append([ids for ids, _ in fitted])
    fitter.truncated += texts.truncated
    rows = None
    if kept:
        anchors, positives = Ragged([row[0] for row in kept]), Ragged([row[1] for row in kept])
        rows = RelatedRows(anchors, positives, [Ragged(row[2:]) for row in kept])
    return fitter.result(rows, [(ids, ids) for row in kept for ids in row])


def _tools(examples: Sequence[Example]) -> list[list[Any] | None]:
    return [example.tools for example in examples]


class _Texts:
    """Whole texts or conversations to ids, cut to `max_length` with their special tokens."""

    def __init__(self, tokenizer: Any, config: Config, *, closed: bool = False) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._template: ChatTemplate | None = None
        self._closed = closed  # with the end-of-sequence token, from which the vector is read
        self.truncated = 0

    def encode(
        self,
        contents: Sequence[str | list[Message]],
        places: Sequence[str],
        tools: Sequence[list[Any] | None],
    ) -> list[Pair | BadPlace]:
        """For each content its ids (as their own labels, none masked), or why there are none."""
        made: list[Pair | BadPlace | None] = [None] * len(contents)
        plain: list[int] = []
        chats: dict[int, str] = {}
        for k, content in enumerate(contents):
            if isinstance(content, str):
                plain.append(k)
                continue
            try:
                chats[k] = self._render(content, tools[k])
            except TemplateError as error:
                reason = f"the chat template refuses the row: {shorten(str(error), 120)}"
                made[k] = BadPlace(where=places[k], reason=reason)
        self._fill(made, plain, lambda k: str(contents[k]), special=True)
        self._fill(made, list(chats), chats.__getitem__, special=False)
        assert all(one is not None for one in made)
        return [one for one in made if one is not None]

    def _render(self, messages: list[Message], tools: list[Any] | None) -> str:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        if self._config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system}, *messages]
        return self._template.render(messages, tools)

    def _fill(
        self, made: list[Any], which: list[int], text: Callable[[int], str], *, special: bool
    ) -> None:
        if not which:
            return
        texts = [text(k) for k in which]
        found = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        limit = self._config.max_length
        room = limit - self._closed
        for k, words, ids in zip(which, texts, found, strict=True):
            if len(ids) > room and self._config.data.truncation == "right":
                self.truncated += 1
                ids = self._tokenizer(
                    words, add_special_tokens=special, truncation=True, max_length=room
                )["input_ids"]
            ids = self._end(ids)
            row = np.asarray(ids, dtype=np.int32)
            made[k] = (row, row)

    def _end(self, ids: list[int]) -> list[int]:
        eos = self._tokenizer.eos_token_id
        if not self._closed or eos is None or (ids and ids[-1] == eos):
            return ids
        return [*ids, eos]
