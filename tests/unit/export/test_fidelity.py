"""Figures of fidelity against hand-made distributions; text from every kind of file."""

import json
import math
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.fidelity import compare_logits, read_texts, summarize


def test_figures_of_two_known_distributions() -> None:
    """Token 0 has probability 1/2 in one model, 1/4 in the other; all else follows by hand."""
    p = torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(3, 1)
    q = torch.tensor([[0.25, 0.5, 0.25]]).log().repeat(3, 1)
    sums = compare_logits(p, q, torch.tensor([0, 0, 1]))  # predicts token 0, then token 1
    result = summarize(sums, 2)
    assert result.perplexity_merged == pytest.approx(math.sqrt(2 * 4))
    assert result.perplexity_export == pytest.approx(math.sqrt(4 * 2))
    assert result.perplexity_ratio == pytest.approx(1.0)
    assert result.token_kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-6)
    assert result.top1_agreement == 0.0
    assert result.ratio_error == pytest.approx(math.log(2) / math.sqrt(2))  # log 2, then -log 2
    same = summarize(compare_logits(p, p, torch.tensor([0, 0, 1])), 2)
    assert (same.token_kl, same.top1_agreement) == (0.0, 1.0)


def test_texts_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    rows = [
        {"text": "t"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"instruction": "i", "input": "", "output": "o", "id": 7},
        "bare",
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "c.json").write_text(json.dumps(rows[:1]))
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.json")]
    assert read_texts(files) == ["plain", "t", "q\na", "i\n\no", "bare", "t"]


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{oops\n')
    with pytest.raises(SwiftFP8Error) as caught:
        read_texts([tmp_path / "a.jsonl"])
    assert str(caught.value.where).endswith("a.jsonl:2")
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(SwiftFP8Error, match="can't be read"):
        read_texts([tmp_path / "a.pdf"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", '{"text": "one"}\n{bad', "not JSON"),
        ("deep.jsonl", "[" * 100_000, "not JSON"),
        ("half.json", '"one \\ud800 two"', "no Unicode: surrogates"),
        ("empty.txt", " \n", "no text to compare on"),
        ("one.txt", "one", "no text to compare on"),
    ],
)
def test_text_that_can_not_be_used_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, said: str
) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    text = tmp_path / name
    text.write_text(content)
    monkeypatch.setattr("swiftfp8.export.export._begun", lambda *arguments: pytest.fail("begun"))
    settings = ExportConfig(format="bf16", fidelity_dataset=[str(text)])
    with pytest.raises(SwiftFP8Error, match=said):
        export_checkpoint(base, None, tmp_path / "export", settings)
