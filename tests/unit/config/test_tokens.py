"""Command-line tokens: text as typed, numbers as numbers, commas as sweeps."""

from __future__ import annotations

from typing import Any

import pytest

from swiftfp8.config.tokens import expand_sweep, parse_tokens, take, to_token
from swiftfp8.errors import SwiftFP8Error


def values(token: str) -> list[Any]:
    parsed, problems = parse_tokens([token])
    assert not problems, problems
    return [override.value for override in parsed[0]]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("lora_rank=16", 16),
        ("learning_rate=1e-4", 1e-4),
        ("gradient_checkpointing=true", True),
        ("template=null", None),
        ("dtype=bf16", "bf16"),
        ("run_name=007", "007"),
        ("run_name=1e3", "1e3"),
        ("run_name='a,b'", "a,b"),
        ("model=it's/here", "it's/here"),
        ("output_dir=a=b", "a=b"),
        ("dataset=quickstart#500", ["quickstart#500"]),
        ("dataset=/path/a b.jsonl#500", ["/path/a b.jsonl#500"]),
        ("dataset=[a.jsonl#1, 'b,c.json']", ["a.jsonl#1", "b,c.json"]),
        ("dataset=[]", []),
        ("precision.exclude=[*.q_proj,model.layers.0.*]", ["*.q_proj", "model.layers.0.*"]),
        ("system=You're kind, and brief: a=b #1?", "You're kind, and brief: a=b #1?"),
        ("system='quoted, too'", "quoted, too"),
        ("precision={strict: true}", {"strict": True}),
        ("data.columns={question: instruction}", {"question": "instruction"}),
        ("+data.columns.question=instruction", "instruction"),
        ("lora_rank=b=c", "b=c"),  # no error of the parser: the schema says what is wrong
    ],
)
def test_one_value(token: str, expected: Any) -> None:
    assert values(token) == [expected]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("lora_rank=8,16", [8, 16]),
        ("lora_rank=range(1,4)", [1, 2, 3]),
        ("learning_rate=1e-4,2e-4", [1e-4, 2e-4]),
        ("export_quantization_bit=8,null", [8, None]),
        ("precision=fp8_block,mxfp8", ["fp8_block", "mxfp8"]),
        ("dataset=a#5,b", [["a#5"], ["b"]]),
        ("target_modules=[q_proj],[q_proj,v_proj]", [["q_proj"], ["q_proj", "v_proj"]]),
        ("system=choice('a, b',c)", ["a, b", "c"]),
    ],
)
def test_a_comma_list_is_a_sweep(token: str, expected: list[Any]) -> None:
    assert values(token) == expected


def test_a_sweep_is_every_combination() -> None:
    parsed, _ = parse_tokens(["lora_rank=1,2", "seed=7", "dtype=fp8,bf16"])
    texts = [[override.text for override in member] for member in expand_sweep(parsed)]
    assert texts == [
        ["lora_rank=1", "seed=7", "dtype=fp8"],
        ["lora_rank=1", "seed=7", "dtype=bf16"],
        ["lora_rank=2", "seed=7", "dtype=fp8"],
        ["lora_rank=2", "seed=7", "dtype=bf16"],
    ]


@pytest.mark.parametrize(
    ("token", "what", "fix"),
    [
        ("lora_rank", "no key=value", "config=lora_rank"),
        ("~template", "can't be deleted", "template=null"),
        ("~lora_rank", "can't be deleted", "another value"),
        ("+lora_rank=8", "can't be added", "write lora_rank=8"),
        ("+lora_rnk=8", "unknown key 'lora_rnk'", "lora_rank"),
        ("lora_rank=[1", "] is missing", "close it"),
        ("model='x", "' is missing", "close it"),
        ("learning_rate=interval(0,1)", "no end", "list the values"),
    ],
)
def test_what_cannot_be_read(token: str, what: str, fix: str) -> None:
    parsed, (problem,) = parse_tokens([token])
    assert not parsed
    assert what in problem.what and fix in str(problem.fix)


@pytest.mark.parametrize(
    "typed", [["lora_rank", "=", "16"], ["lora_rank", "=16"], ["seed=1", "lora_rank", "=", "16"]]
)
def test_spaces_around_the_equals_sign_are_one_mistake(typed: list[str]) -> None:
    _, (problem,) = parse_tokens(typed)
    assert "has spaces around its =" in problem.what and problem.fix == "write lora_rank=16"


def test_all_unreadable_tokens_are_reported() -> None:
    parsed, problems = parse_tokens(["one", "seed=1", "~two"])
    assert len(parsed) == 1 and len(problems) == 2
    assert all(isinstance(problem, SwiftFP8Error) for problem in problems)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("system", "it's, a test"),
        ("dataset", ["a,b", "c#5"]),
        ("template", None),
        ("gradient_checkpointing", True),
        ("learning_rate", 2e-5),
        ("run_name", "null"),
        ("run_name", "[x]"),
    ],
)
def test_a_value_survives_being_written_as_a_token(key: str, value: Any) -> None:
    assert values(to_token(key, value)) == [value]


def test_take_leaves_the_rest_as_it_is() -> None:
    taken, rest = take(["config=a b", "lora_rank=8", "run='x y'", "word"], ("config", "run"))
    assert taken == {"config": "a b", "run": "x y"}
    assert rest == ["lora_rank=8", "word"]
