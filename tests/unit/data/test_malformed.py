"""What a user with a broken file reads: what is wrong, in which file, on which line."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from swiftfp8.config.schema import Config
from swiftfp8.data.dataset import load_datasets
from swiftfp8.errors import SwiftFP8Error

GOOD = json.dumps({"instruction": "q", "output": "a"})


def turns(*pairs):
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in pairs]})


# name: file name, content, line (None where a file has none), what the message says
MALFORMED = {
    "a broken line": ("a.jsonl", f'{GOOD}\n{{"instruction": "q" "output": "a"}}\n', 2,
                      "malformed JSON: Expecting ',' delimiter at column 21"),
    "no object": ("a.jsonl", f"{GOOD}\n\n[1, 2]\n", 3, "not a JSON object: [1, 2]"),
    "an array that breaks off": ("a.json", f"[{GOOD},\n{GOOD}", 2, "the array is not closed"),
    "a comma too few": ("a.json", f"[{GOOD},\n{GOOD}\n{GOOD[:-1]}]", 3, "malformed JSON"),
    "a cell too many": ("a.csv", 'instruction,output\nq,a\n"q\nr",a,b\n', 3,
                        "3 cells under 2 columns"),
    "a quote that is not closed": ("a.csv", 'instruction,output\nq,a\n"q,a\n', 3,
                                   "malformed table"),
    "no answer": ("a.jsonl", GOOD + "\n" + json.dumps({"instruction": "q", "output": " "}), 2,
                  "no answer: an assistant turn is empty"),
    "roles out of turn": ("a.jsonl", "\n".join([turns(("user", "q"), ("assistant", "a")),
                                                turns(("user", "q"), ("user", "r"))]), 2,
                          "two user turns in a row"),
    "an unknown role": ("a.jsonl", turns(("user", "q"), ("robot", "a")), 1,
                        "unknown role 'robot'; known: system, user, assistant, tool"),
    "a number for an answer": ("a.jsonl", GOOD + "\n" + GOOD.replace('"a"', "7"), 2,
                               "output is not text: 7"),
    "unknown columns": ("a.jsonl", json.dumps({"frage": "q", "antwort": "a"}), 1,
                        "no row format fits the columns frage, antwort"),
    "not UTF-8": ("a.jsonl", b'{"instruction": "q", "output": "\xe9"}\n', None,
                  "the file is not UTF-8 text: byte 32 is 0xe9"),
    "not parquet": ("a.parquet", "rows", None, "not a parquet file"),
    "a cut gzip file": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-20], None,
                        "can't be read"),
    "empty": ("a.jsonl", "\n", None, "fix:   write one row a line"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_named_with_its_line_and_its_fault(tokenizer, tmp_path, name):
    file, content, line, said = MALFORMED[name]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SwiftFP8Error) as caught:
        load_datasets(Config(dataset=str(path)), tokenizer, 1)
    assert said in str(caught.value)
    assert caught.value.where == (str(path) if line is None else f"{path}:{line}")


def test_every_fault_has_a_message_of_its_own(tokenizer, tmp_path):
    said = {}
    for name, (file, content, _, _) in MALFORMED.items():
        path = tmp_path / f"{len(said)}-{file}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(SwiftFP8Error) as caught:
            load_datasets(Config(dataset=str(path)), tokenizer, 1)
        said[name] = str(caught.value).replace(str(path), "")
    assert len(set(said.values())) == len(MALFORMED) >= 10


def test_one_bad_row_in_100_000_is_found_in_seconds(tokenizer, tmp_path):
    path = tmp_path / "big.jsonl"
    row = turns(("user", "word " * 40), ("assistant", "word " * 60))
    lines = [row] * 100_000
    lines[77_776] = turns(("user", "q"), ("assistant", ""))
    path.write_text("\n".join(lines))
    begun = time.process_time()  # of this process: other programs may be busy
    with pytest.raises(SwiftFP8Error, match="1 bad row of 100000") as caught:
        load_datasets(Config(dataset=str(path)), tokenizer, 1)
    assert time.process_time() - begun < 10  # about 3 s
    assert caught.value.where == f"{path}:77777"
