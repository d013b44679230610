"""An export's generation_config.json names the chat template's end of a turn."""

import json
from pathlib import Path

import pytest
from export_kit import save_model
from model_dirs import write_tokenizer
from transformers import AutoTokenizer

from swiftfp8.config.schema import ExportConfig
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
