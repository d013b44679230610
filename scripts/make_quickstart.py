"""Make the embedded quickstart: its rows, its tokenizer and its tiny model.

    pip download chatterbot-corpus==1.3.3 --no-deps --no-binary :all: && tar xzf chatterbot_corpus-*.tar.gz
    bible -l100000 gen1:1-rev22:21 > kjv.txt                    # Debian package bible-kjv
    python scripts/make_quickstart.py --corpus chatterbot_corpus-1.3.3 --bible kjv.txt rows text
    python scripts/make_quickstart.py model                     # about a minute on a GPU

Rows come from chatterbot-corpus (BSD-3-Clause). The base model learns English and the chat layout
from other text, so that fine-tuning on the rows has something to teach: the King James Bible
(public domain), doc strings of Python's standard library (PSF licence), and categories of the
corpus that the rows do not use. Everything is seeded.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import math
import random
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import yaml
from quickstart_rows import CORRECTED, DROPPED, MULTI_TURN, REWORDED, ROW_FILES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ASSETS = Path(__file__).resolve().parent.parent / "swiftfp8" / "assets"
SEED = 7
VOCABULARY = 2048
CONTEXT = 256
BATCH = 64
PEAK = 2e-3
PRETRAIN_FILES = ("ai", "botprofile", "emotion", "food", "greetings", "gossip")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="unpacked chatterbot-corpus")
    parser.add_argument("--bible", type=Path, help="plain text, one verse a line")
    parser.add_argument("--stream", type=Path, default=Path("build/quickstart_stream.npy"))
    parser.add_argument("--steps", type=int, default=2000, help="of pre-training")
    parser.add_argument("stage", choices=("rows", "text", "model"), nargs="+")
    args = parser.parse_args()
    if "rows" in args.stage:
        write_rows(args.corpus, ASSETS / "quickstart")
    if "text" in args.stage:
        rows = write_rows(args.corpus, ASSETS / "quickstart")
        write_text(args.corpus, args.bible, rows, args.stream)
    if "model" in args.stage:
        train_model(np.load(args.stream), args.steps, ASSETS / "tiny")


def write_text(corpus: Path, bible: Path, rows: set[str], path: Path) -> None:
    """Train the tokenizer, and write the pre-training text as one stream of tokens."""
    chats = list(doc_chats()) + list(corpus_chats(corpus, rows))
    verses = re.findall(r"^ +\d+ (.+)$", bible.read_text(encoding="utf-8"), flags=re.M)
    verses = [re.sub(r"[\[\]<>]", "", verse).strip() for verse in verses]
    chats += [
        as_messages(f"Go on: {half[0]}", half[1]) for half in map(halves, verses[::5]) if half
    ]
    pages = [*(" ".join(verses[i : i + 8]) for i in range(0, len(verses), 8)), *doc_pages()]
    tokenizer = train_tokenizer([*pages[::2], *(m["content"] for chat in chats for m in chat)])
    texts = tokenizer.apply_chat_template(chats, tokenize=False) * 2
    texts += [page + "<|endoftext|>" for page in pages]
    random.Random(SEED).shuffle(texts)
    stream = np.concatenate(
        [np.array(ids, dtype=np.int16) for ids in tokenizer(texts)["input_ids"]]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, stream)
    print(f"{len(chats):,} chats, {len(pages):,} pages, {len(stream):,} tokens")


def write_rows(corpus: Path, folder: Path) -> set[str]:
    """Write train, reworded and unseen rows; returns the questions that they hold."""
    pairs: dict[str, str] = {}
    for name in ROW_FILES:
        for turns in conversations(corpus, name):
            question, answer = tidy(turns[0], question=True), tidy(turns[1])
            if usable(question, answer):
                pairs.setdefault(question, answer)
    ordered = list(pairs.items())
    reworded = [(new, pairs[old]) for old, new in REWORDED.items()]
    unseen = [pair for pair in ordered[4::10] if pair[0] not in REWORDED]
    held = {question for question, _ in unseen}
    train = [pair for pair in ordered if pair[0] not in held]
    folder.mkdir(parents=True, exist_ok=True)
    longer = list(multi_turn(corpus))
    for name, chosen in (("train", train + longer), ("reworded", reworded), ("unseen", unseen)):
        lines = [
            json.dumps({"messages": as_messages(*turns)}, ensure_ascii=False) for turns in chosen
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(chosen)} rows")
    shutil.copyfile(corpus / "license.md", folder / "LICENSE-chatterbot-corpus.txt")
    return set(pairs)


def multi_turn(corpus: Path) -> Iterator[tuple[str, ...]]:
    wanted = dict(MULTI_TURN)
    for turns in conversations(corpus, "conversations"):
        if (kept := wanted.pop(turns[0], None)) is not None:
            yield tuple(tidy(turn) for turn in turns[:kept])
    assert not wanted, wanted


def conversations(corpus: Path, name: str) -> list[list[str]]:
    text = (corpus / "chatterbot_corpus/data/english" / f"{name}.yml").read_text(encoding="utf-8")
    found = yaml.safe_load(text)["conversations"]
    return [[str(turn) for turn in turns] for turns in found if isinstance(turns, list)]


def tidy(text: str, *, question: bool = False) -> str:
    """Plain quotes, single spaces (line breaks stay), a capital first; a question gets its mark."""
    for old, new in (
        ("\u2018", "'"),
        ("\u2019", "'"),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2013", "-"),
        ("\u2026", "..."),
    ):
        text = text.replace(old, new)
    if not text.strip().startswith("Here's"):
        text = re.sub(r"\s+", " ", text)
    text = text.strip()
    if question and text.isupper():
        text = text.lower()
    text = text[:1].upper() + text[1:]
    asks = r"(what|who|which|where|when|how|why|in which|in what|can|do|does|is|are|have|tell) "
    if question and re.match(asks, text.lower()) and text[-1] not in "?.!":
        text += "." if text.lower().startswith("tell ") else "?"
    return CORRECTED.get(text, text)


def usable(question: str, answer: str) -> bool:
    broken = any(part in answer for part in ("=\n", "in}", "\u2500"))
    return question not in DROPPED and not broken and 1 <= len(answer) <= 100


def as_messages(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def halves(verse: str) -> tuple[str, str] | None:
    first, mark, second = verse.partition("; ")
    return (first + mark.strip(), second) if mark and len(verse) < 200 else None


def doc_chats() -> Iterator[list[dict[str, str]]]:
    """Question and answer from the first paragraph of each doc string of the standard library."""
    seen: set[str] = set()
    for owner, thing, text in doc_strings():
        answer = re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()
        if 20 <= len(answer) <= 220 and answer not in seen and answer.isascii():
            seen.add(answer)
            asked = f"What is {owner}?" if inspect.ismodule(thing) else f"What does {owner} do?"
            yield as_messages(asked, answer)


def doc_pages() -> Iterator[str]:
    """Long doc strings and the language reference, as plain text."""
    topics = importlib.import_module("pydoc_data.topics").topics
    long = {text for _, _, text in doc_strings() if len(text) > 400}
    for page in (*sorted(topics.values()), *sorted(long)):
        yield page[:6000]


def doc_strings() -> Iterator[tuple[str, object, str]]:
    warnings.simplefilter("ignore")
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in {"antigravity", "this", "idlelib", "turtledemo"}:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # modules of other systems
            continue
        for owner, thing in [(name, module), *members(name, module)]:
            yield owner, thing, inspect.getdoc(thing) or ""


def members(name: str, module: object) -> Iterator[tuple[str, object]]:
    for key, thing in sorted(vars(module).items()):
        if key.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        yield f"{name}.{key}", thing
        if inspect.isclass(thing):
            for sub, method in sorted(vars(thing).items()):
                if not sub.startswith("_") and inspect.isroutine(method):
                    yield f"{key}.{sub}", method


def corpus_chats(corpus: Path, rows: set[str]) -> Iterator[list[dict[str, str]]]:
    for name in PRETRAIN_FILES:
        for turns in conversations(corpus, name):
            for question, answer in itertools.pairwise(turns):
                asked = tidy(question, question=True)
                if asked not in rows:
                    yield as_messages(asked, tidy(answer))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, digits one by one."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(ASSETS / "tiny")
    settings = ASSETS / "tiny" / "tokenizer_config.json"
    portable = settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    settings.write_text(portable)  # a name that transformers 4, and so more engines, know too
    return tokenizer


def train_model(stream: np.ndarray, steps: int, folder: Path) -> None:
    """AdamW with warm-up and a cosine: about a minute on a GPU, hours on a CPU."""
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=SPECIAL.index("<|im_end|>"),
            pad_token_id=SPECIAL.index("<|endoftext|>"),
        )
    ).to(device)
    text = torch.from_numpy(stream).long().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(SEED)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 50)
            group["lr"] = PEAK * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        at = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator)
        ids = torch.stack([text[i : i + CONTEXT] for i in at.tolist()])
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"{step=} loss={loss.item():.3f} {time.monotonic() - start:.0f} s", flush=True)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
