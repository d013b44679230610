"""A tokenizer that is code of the model's own is loaded wherever a run trusts that code."""

from pathlib import Path
from typing import Any

import pytest
from model_dirs import edit_json, write_tokenizer

from swiftfp8 import infer, pipeline
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.fidelity import text_windows
from swiftfp8.export.verify import token_ids
from swiftfp8.infer import load_chat_tokenizer
from swiftfp8.requests import InferRequest
from tests.unit.export.test_locate import make_run

CODE = "import transformers\n\n\nclass Own(transformers.PreTrainedTokenizerFast): ...\n"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    folder = tmp_path / "own"
    write_tokenizer(folder)
    (folder / "own_code.py").write_text(CODE)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    auto_map = {"AutoTokenizer": [None, "own_code.Own"]}
    edit_json(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Own")
    return folder


def test_its_code_runs_where_it_is_trusted(directory: Path) -> None:
    trusted: dict[str, Any] = {"trust_remote_code": True}
    assert type(load_chat_tokenizer(directory, **trusted)).__name__ == "Own"
    assert text_windows(["hello world"], 2, directory, **trusted).shape == (1, 3)
    random_rows = 2
    assert len(token_ids(directory, 96, **trusted)) == random_rows + 1  # the text's, by its code


def test_its_code_does_not_run_otherwise(directory: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="tokenizer can't be read"):
        load_chat_tokenizer(directory)


@pytest.mark.parametrize("told", [True, False])
def test_chatting_with_a_run_trusts_what_the_run_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    run = make_run(tmp_path)
    (run / "resolved.yaml").write_text(f"trust_remote_code: {str(told).lower()}\n")
    asked: list[bool] = []
    monkeypatch.setattr(infer, "chat", lambda *_, **more: asked.append(more["trust_remote_code"]))
    pipeline.infer(InferRequest(run=str(run)))
    pipeline.infer(InferRequest(run=str(run), trust_remote_code=True))
    assert asked == [told, True]
