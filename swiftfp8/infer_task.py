"""Ask what other tasks trained: labels with probabilities, a number, a score, or a vector.

A prompt is a text, or a conversation as JSON: a list of turns with role and content.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from swiftfp8.data.formats import BadRow, Content, decoded, read_turn
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.infer import load_for_chat, load_tokenizer
from swiftfp8.tasks import Trained

_MANY = 2048  # tokens, where the model doesn't say how many positions it has


def judge(
    model_dir: Path,
    adapter_dir: Path | None,
    trained: Trained,
    *,
    prompt: str | None = None,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> str | None:
    """Answer `prompt`, or each line that the user types until Ctrl-D; answers are printed.

    Returns:
        The answer to `prompt`, None after the last line.

    Raises:
        SwiftFP8Error: a model or tokenizer that can't be loaded; for a reward model a prompt that
            is no conversation.
    """
    console = console or Console()
    tokenizer, _ = load_tokenizer(adapter_dir, model_dir, trust_remote_code=trust_remote_code)
    with console.status("loading the model"):
        model = load_for_chat(
            model_dir, adapter_dir, trust_remote_code=trust_remote_code, trained=trained
        )
    if prompt is not None:
        return _say(model, tokenizer, trained, prompt, console)
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if text:
            try:
                _say(model, tokenizer, trained, text, console)
            except SwiftFP8Error as error:
                console.print(str(error), style="red", markup=False)


def _say(model: Any, tokenizer: Any, trained: Trained, prompt: str, console: Console) -> str:
    import torch

    ids = _encode(tokenizer, _content(prompt, trained), trained, model)
    inputs = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model(input_ids=inputs, attention_mask=torch.ones_like(inputs))
    answer = _vector(output, trained) if trained.head is None else _scores(output, trained)
    console.print(answer, markup=False, highlight=False, soft_wrap=True)
    return answer


def _scores(output: Any, trained: Trained) -> str:
    """Labels, likeliest first, or the number."""
    head = trained.head
    assert head is not None
    logits = output.logits[0].float()
    if head.problem_type == "single_label_classification":
        shares = logits.softmax(-1).tolist()
    elif head.problem_type == "multi_label_classification":
        shares = logits.sigmoid().tolist()
    else:
        return f"{float(logits[0]):.4f}"
    ranked = sorted(zip(shares, head.labels, strict=True), reverse=True)
    return "\n".join(f"{share:.4f}  {label}" for share, label in ranked)


def _vector(output: Any, trained: Trained) -> str:
    import torch

    from swiftfp8.train.objectives.embed import pool

    hidden = output.last_hidden_state
    mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    assert trained.pooling is not None
    return json.dumps([round(x, 6) for x in pool(hidden, mask, trained.pooling)[0].tolist()])


def _content(prompt: str, trained: Trained) -> Content:
    turns = decoded(prompt)
    try:
        if isinstance(turns, list):
            return [read_turn(turn, k) for k, turn in enumerate(turns, start=1)]
    except BadRow as error:
        raise SwiftFP8Error(f"the prompt is no conversation: {error}", where="prompt") from error
    if trained.task == "reward":
        raise SwiftFP8Error(
            "a reward model judges an answer to a question",
            where="prompt",
            fix='prompt=\'[{"role": "user", "content": "..."}, {"role": "assistant", "content": '
            '"..."}]\'',
        )
    return prompt


def _encode(tokenizer: Any, content: Content, trained: Trained, model: Any) -> list[int]:
    """Token ids as training had them."""
    closed = trained.pooling == "last_token"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    options = {"truncation": True, "max_length": (positions or _MANY) - closed}
    if isinstance(content, str):
        ids = tokenizer(content, **options)["input_ids"]
    else:
        text = tokenizer.apply_chat_template(content, tokenize=False)
        if trained.task == "reward":
            text = text.rstrip()  # training ends with the token that ends the turn
        ids = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if closed and eos is not None and ids[-1:] != [eos] else ids
