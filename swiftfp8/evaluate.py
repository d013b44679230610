"""Ask a model held-out questions and compare its answers with those that were wanted.

A question is a row of the run's evaluation rows up to its last answer, in the very tokens of
training: the chat template, the system prompt and tools are those that the model learned with.
Beside the figures of `answer_metrics` stands the loss on the wanted answers, in nats a token.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from swiftfp8.answer_metrics import METRICS, compare_answers
from swiftfp8.config.fields import field_docs
from swiftfp8.config.schema import Config
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.infer import Sampling, generation_options, load_chat_tokenizer, load_for_chat
from swiftfp8.requests import EvalRequest

if TYPE_CHECKING:
    from swiftfp8.export.judge import Row

_MASKED = -100


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row: what was asked (decoded), wanted and answered, and the figures of the pair."""

    prompt: str
    wanted: str
    answer: str
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`metrics` are means over `rows`; `left_out` rows had no question, or one that is too long.

    `loss` is the mean over the wanted answers' tokens, nats. `source` says which rows they were.
    """

    source: str
    rows: int
    left_out: int
    loss: float
    metrics: dict[str, float]
    answers: tuple[Answer, ...]


def evaluate(
    config: Config,
    model_dir: Path,
    adapter_dir: Path | None = None,
    *,
    sampling: Sampling | None = None,
    limit: int = 200,
    batch_size: int = 8,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> Evaluation:
    """Generate an answer to each of at most `limit` rows (0: all), and compare.

    Raises:
        SwiftFP8Error: no rows with answers, or a model, tokenizer or rows that can't be read.
    """
    from swiftfp8.export.judge import token_losses
    from swiftfp8.export.run_rows import read_run_rows

    console, sampling = console or Console(), sampling or Sampling()
    tokenizer = load_chat_tokenizer(adapter_dir, model_dir, trust_remote_code=trust_remote_code)
    with _advice_of_this_command():
        found = read_run_rows(_answers_alone(config), model_dir, adapter_dir)
    if found.missing is not None:
        raise SwiftFP8Error(
            f"there is nothing to ask: {found.missing}", where="dataset", fix="set dataset=<rows>"
        )
    with console.status("loading the model"):
        model = load_for_chat(model_dir, adapter_dir, trust_remote_code=trust_remote_code)
    rows = _spread(found.rows, limit)
    room = _positions(model) - sampling.max_new_tokens
    if room < 1:
        raise SwiftFP8Error(
            f"the model has {_positions(model)} positions, and the answers alone may take "
            f"{sampling.max_new_tokens}",
            where="max_new_tokens",
            fix=f"set max_new_tokens below {_positions(model)}",
        )
    asked = [row for row in rows if 0 < _answer_span(row)[0] <= room]
    if not asked:
        raise SwiftFP8Error(
            f"none of {len(rows)} rows has a question of at most {room} tokens before its answer",
            where="dataset",
            fix="set dataset=<conversations>, or a smaller max_new_tokens",
        )
    losses = token_losses(model, asked)
    answers = _ask(model, tokenizer, asked, sampling, batch_size, console)
    return Evaluation(
        source=f"{found.kind} rows",
        rows=len(answers),
        left_out=len(rows) - len(answers),
        loss=float(losses.mean()),
        metrics={
            name: sum(one.metrics[name] for one in answers) / len(answers) for name in METRICS
        },
        answers=tuple(answers),
    )


def print_evaluation(found: Evaluation, console: Console, *, shown: int = 3) -> None:
    """A table of the means, and some answers: those that are furthest from what was wanted."""
    left_out = f", {found.left_out} left out" if found.left_out else ""
    table = Table(title=f"{found.rows} {found.source}{left_out}", title_justify="left")
    for heading in ("loss", "perplexity", *METRICS):
        table.add_column(heading, justify="right")
    perplexity = math.exp(min(found.loss, 700.0))
    figures = [f"{found.metrics[name]:.3f}" for name in METRICS]
    table.add_row(f"{found.loss:.4f}", f"{perplexity:.3f}", *figures)
    console.print(table)
    for one in sorted(found.answers, key=_nearness)[:shown]:
        for name, text in (("asked", one.prompt), ("wanted", one.wanted), ("answer", one.answer)):
            line = f"{name:7}{' '.join(text.split())}"
            console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
        console.print()


def _nearness(one: Answer) -> tuple[float, float]:
    return one.metrics["exact_match"], one.metrics["rougeL"]


def check_writable(path: Path) -> None:
    """Refuse, before anything is generated, a file that the result could not be written to."""
    if path.is_dir():
        raise SwiftFP8Error("is a folder", where=f"out={path}", fix="name a file: out=answers.json")
    with _writing(path) as part:
        part.touch()
        part.unlink()


def write_evaluation(found: Evaluation, path: Path) -> None:
    """All of it as JSON."""
    text = json.dumps(asdict(found), indent=2, ensure_ascii=False)
    with _writing(path) as part:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """A file beside `path`, to take its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path.with_name(f".tmp-{path.name}")
    except OSError as error:
        raise SwiftFP8Error(
            f"can't write the result: {error.strerror or error}",
            where=f"out={path}",
            fix="name a file in a folder that can be written",
        ) from error


@contextmanager
def _advice_of_this_command() -> Iterator[None]:
    """Where reading rows advises a recipe's options, which are not taken here, advise ours."""
    try:
        yield
    except RunFailed:
        raise
    except SwiftFP8Error as error:
        for problem in getattr(error, "problems", (error,)):
            if _advises_others(problem.fix or ""):
                problem.fix = "correct the rows, or name others: dataset=<rows>"
        raise


def _advises_others(fix: str) -> bool:
    """Whether it names options of a recipe: they are written `key=`, or are no plain words.

    A template is what the model was trained with: there other rows are no way out.
    """
    ours = {field.name for field in fields(EvalRequest)}
    named = set(re.findall(r"[a-z_.]+(?==)|[a-z]+(?:[._][a-z]+)+", fix))
    return bool(named & (set(field_docs()) - ours - {"template"}))


def rows_of(config: Config, entries: Sequence[str]) -> Config:
    """The configuration with other rows to ask, whatever the run was trained on."""
    if not entries:
        return config
    data = replace(config.data, format="auto", columns={}, interleave_prob=())
    task = "sft" if config.task == "dpo" else config.task
    return replace(config, task=task, val_dataset=tuple(entries), data=data)


def _answers_alone(config: Config) -> Config:
    """The configuration with answers marked in its rows, whatever else the run was trained on.

    Rows that chose the rounding of an export may be asked: none is rounded here.
    """
    data, usual = config.data, type(config.data)()
    scale = usual.loss_scale if data.loss_scale == "all" else data.loss_scale
    data = replace(data, loss_scale=scale, loss_weights=usual.loss_weights)
    task = "sft" if config.task == "pretrain" else config.task
    export = replace(config.export, calibrate=False)
    return replace(config, task=task, data=data, export=export)


def _ask(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    sampling: Sampling,
    batch_size: int,
    console: Console,
) -> list[Answer]:
    """Answers in the rows' order, generated in batches of like lengths."""
    import torch

    torch.manual_seed(sampling.seed)
    order = sorted(range(len(rows)), key=lambda k: _answer_span(rows[k])[0])
    batches = [order[k : k + batch_size] for k in range(0, len(order), batch_size)]
    made: dict[int, str] = {}
    for batch in track(batches, "answering", console=console, transient=True):
        prompts = [rows[k].ids_T[: _answer_span(rows[k])[0]].tolist() for k in batch]
        made |= zip(batch, _generate(model, tokenizer, prompts, sampling), strict=True)
    return [_answer(tokenizer, row, made[k]) for k, row in enumerate(rows)]


def _generate(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> Iterator[str]:
    """What follows each prompt; shorter ones are padded on the left, under a mask."""
    import torch

    options = generation_options(model, tokenizer, sampling)
    pad, longest = options["pad_token_id"] or 0, max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            **options,
        )
    for row in output[:, longest:]:
        yield tokenizer.decode(row, skip_special_tokens=True)


def _answer(tokenizer: Any, row: Row, said: str) -> Answer:
    start, end = _answer_span(row)
    wanted = tokenizer.decode(row.ids_T[start:end], skip_special_tokens=True)
    return Answer(
        prompt=tokenizer.decode(row.ids_T[:start], skip_special_tokens=True),
        wanted=wanted,
        answer=said,
        metrics=compare_answers(said, wanted),
    )


def _answer_span(row: Row) -> tuple[int, int]:
    """Where the last unbroken run of trained tokens begins and ends; (0, 0) where there is none."""
    trained = (row.labels_T != _MASKED).nonzero()[:, 0].tolist()
    if not trained:
        return 0, 0
    start = end = trained[-1]
    known = set(trained)
    while start - 1 in known:
        start -= 1
    return start, end + 1


def _spread(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows, from all over them; 0 takes all."""
    if not limit or len(rows) <= limit:
        return list(rows)
    return [rows[k * len(rows) // limit] for k in range(limit)]


def _positions(model: Any) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
