"""An export's generation_config.json names the chat template's end of a turn."""

import json
from pathlib import Path

import pytest
from export_kit import save_model
from model_dirs import write_tokenizer
from transformers import AutoTokenizer

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint
from swiftfp8.models.tokenizer import read_template

CHATML_ID, END_ID = 3, 2  # in the vocabulary of `write_tokenizer`


def model_with_template(directory: Path, template: str | None) -> Path:
    save_model(directory, bos_token_id=1, eos_token_id=END_ID)
    write_tokenizer(directory, mask_token="<|im_end|>")
    if template:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = read_template(template)
        tokenizer.save_pretrained(directory)
    return directory


def exported_ends(model: Path, target: Path) -> object:
    export_checkpoint(model, None, target, ExportConfig(format="bf16", verify=False))
    return json.loads((target / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("own_file", [True, False])
def test_the_turns_end_joins_the_models_own(tmp_path: Path, own_file: bool) -> None:
    model = model_with_template(tmp_path / "model", "chatml")
    if not own_file:
        (model / "generation_config.json").unlink()
    assert exported_ends(model, tmp_path / "export") == [END_ID, CHATML_ID]


def test_without_a_template_the_file_stays_as_it_is(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", None)
    assert exported_ends(model, tmp_path / "export") == END_ID


@pytest.mark.parametrize(
    ("name", "content", "where", "said"),
    [
        ("generation_config.json", b"[]", "generation_config.json", "does not hold a JSON object"),
        ("generation_config.json", b"{", "generation_config.json", "not valid JSON"),
        ("generation_config.json", b"\xff", "generation_config.json", "not valid JSON"),
        ("tokenizer.json", b"{", "", "the tokenizer can't be read"),
        ("tokenizer.json", b"{}", "", "the tokenizer can't be read"),
        ("tokenizer_config.json", b"[]", "", "the tokenizer can't be read"),
        ("chat_template.jinja", b"\xff", "", "the tokenizer can't be read"),
        ("chat_template.jinja", b"{{ range(10**9) }}", "", "the chat template fails"),
    ],
)
def test_damaged_companions_are_told_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    where: str,
    said: str,
) -> None:
    model = model_with_template(tmp_path / "model", "chatml")
    (model / name).write_bytes(content)
    monkeypatch.setattr("swiftfp8.export.export._begun", lambda *arguments: pytest.fail("begun"))
    with pytest.raises(SwiftFP8Error, match=said) as caught:
        exported_ends(model, tmp_path / "export")
    assert caught.value.where == str(model / where if where else model)
