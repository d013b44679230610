"""MB/s from files to token rows, for text, alpaca and chats of several turns.

    python scripts/bench/bench_tokenize.py --text FILE_OR_FOLDER --tokenizer FOLDER [FOLDER ...]

`--text` is real prose (.txt, UTF-8); its paragraphs become the rows, each once, so that words are
as varied as in real data. Without it the standard library's sources are taken. `--tokenizer` are
folders with a `tokenizer.json` and a chat template; the embedded one is always measured.

MB are those of the JSONL file. Wall time and CPU-seconds (all threads and processes) stand side by
side, with the load before: on a shared machine only the second says what the code costs. "free" is
the MB/s that cores without other work would give at least: this process's CPU-seconds, then one
worker's part of theirs, as if the two never overlapped.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config, DataConfig
from swiftfp8.data.dataset import load_datasets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--tokenizer", type=Path, nargs="*", default=[])
    parser.add_argument("--mb", type=float, default=20.0, help="size of each file")
    parser.add_argument("--num-proc", type=int, nargs="*", default=[1], help="data.num_proc")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    paragraphs = list(read_paragraphs(args.text, int(args.mb * 1.3e6)))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(
        f"{'tokenizer':<14} {'rows':<7} {'procs':>5} {'MB':>6} {'rows':>7} {'tokens':>10} "
        f"{'wall s':>7} {'CPU s':>7} {'MB/s':>6} {'MB/CPU s':>9} {'free':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for place in [assets_dir() / "tiny", *args.tokenizer]:
            for kind in args.kinds:
                path = Path(folder) / f"{kind}.jsonl"
                if not path.exists():
                    write_rows(path, KINDS[kind](paragraphs), int(args.mb * 1e6))
                for processes in args.num_proc:
                    tokenizer = AutoTokenizer.from_pretrained(place)
                    print(measure(path, kind, place.name, tokenizer, processes), flush=True)


def measure(path: Path, kind: str, name: str, tokenizer: Any, processes: int) -> str:
    config = Config(dataset=str(path), max_length=4096, data=DataConfig(num_proc=processes))
    began, before = time.perf_counter(), os.times()
    loaded = load_datasets(config, tokenizer, 1)
    wall, after = time.perf_counter() - began, os.times()
    own = sum(after[:2]) - sum(before[:2])
    workers = sum(after[2:4]) - sum(before[2:4])
    cpu, chain = own + workers, own + workers / processes
    mb = path.stat().st_size / 1e6
    report = loaded.report.train
    return (
        f"{name:<14} {kind:<7} {processes:>5} {mb:>6.1f} {report.rows:>7,} {report.tokens:>10,} "
        f"{wall:>7.2f} {cpu:>7.2f} {mb / wall:>6.2f} {mb / cpu:>9.2f} {mb / chain:>6.2f}"
    )


def read_paragraphs(place: Path, wanted: int) -> Iterator[str]:
    """Paragraphs of all files in their order, until there are enough bytes."""
    files = (
        sorted(p for s in ("*.txt", "*.py") for p in place.rglob(s)) if place.is_dir() else [place]
    )
    size = 0
    for file in files:
        for part in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if part.strip():
                yield part.strip()
                size += len(part)
        if size > wanted:
            return


def texts(paragraphs: list[str]) -> Iterator[dict[str, Any]]:
    for k in range(0, len(paragraphs) - 8, 8):
        yield {"text": "\n\n".join(paragraphs[k : k + 8])}


def alpacas(paragraphs: list[str]) -> Iterator[dict[str, Any]]:
    for k in range(0, len(paragraphs) - 3, 3):
        asked, *said = paragraphs[k : k + 3]
        yield {"instruction": asked, "input": "", "output": "\n\n".join(said)}


def chats(paragraphs: list[str]) -> Iterator[dict[str, Any]]:
    for k in range(0, len(paragraphs) - 6, 6):
        yield {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": said}
                for turn, said in enumerate(paragraphs[k : k + 6])
            ]
        }


KINDS = {"text": texts, "alpaca": alpacas, "chat": chats}


def write_rows(path: Path, rows: Iterator[dict[str, Any]], size: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if file.tell() > size:
                return


if __name__ == "__main__":
    main()
