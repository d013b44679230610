"""What other tasks train is exported, loads in plain transformers, and answers as the run does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors import safe_open
from task_kit import CASES, run_task, write_decoder, write_encoder
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from swiftfp8 import pipeline
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.request import locate
from swiftfp8.infer_task import judge
from swiftfp8.requests import ExportRequest, SourceRequest, VerifyRequest
from swiftfp8.tasks import read_task_file

TEXT = "bread we take now"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "decoder": write_decoder(folder / "decoder", hidden=256),
        "encoder": write_encoder(folder / "encoder", hidden=256),
    }


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def train(tmp_path: Path, models: dict[str, Path], name: str, **options) -> Path:
    case = CASES[name]
    rare = {"max_steps": 6, "train": {"eval_steps": 0, "save_steps": 0}, "learning_rate": 0.003}
    options = {**case.options, "dtype": "fp32", **rare, **options}
    result, _ = run_task(tmp_path, models[case.model], case.rows, **options)
    return result.run_dir


def outputs(model, tokenizer) -> torch.Tensor:
    inputs = {k: v for k, v in tokenizer(TEXT, return_tensors="pt").items() if "type" not in k}
    with torch.no_grad():
        output = model.eval()(**inputs)
    return (output.logits if "logits" in output else output.last_hidden_state).float()


def export(run: Path, *overrides: str):
    request = ExportRequest(run=str(run), overrides=tuple(overrides))
    return pipeline.export(request, console=Console(quiet=True))


@pytest.mark.parametrize("name", ["seq_cls", "seq_cls-encoder", "reward", "embedding"])
def test_an_adapter_is_merged_with_its_score_kept_in_bf16(tmp_path, models, name):
    run = train(tmp_path, models, name)
    report = export(run, "export.format=fp8_block")
    target = run / "export"
    assert report.reload and report.reload.bit_equal
    assert not list(run.glob(".swiftfp8-base-*"))
    config = json.loads((target / "config.json").read_text())
    listed = config["quantization_config"]["modules_to_not_convert"]
    with safe_open(str(target / "model.safetensors"), framework="pt") as file:
        dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    heads = {"seq_cls": "score", "seq_cls-encoder": "classifier", "reward": "score"}
    if name in heads:
        head = heads[name]
        assert head in listed and dtypes[f"{head}.weight"] == "BF16"
        assert "score head" in report.kept[head]
        labels = {"seq_cls": ["animal", "food"], "reward": ["reward"]}[name.split("-")[0]]
        assert list(config["id2label"].values()) == labels
    if name == "seq_cls-encoder":
        assert "bert.pooler.dense" in listed
    assert report.quantized == {"seq_cls-encoder": 12}.get(name, 14)
    assert read_task_file(target) == read_task_file(run / "last")
    card = (target / "README.md").read_text()
    kind = "feature-extraction" if name == "embedding" else "text-classification"
    assert f"pipeline_tag: {kind}" in card and "--runner pooling" in card
    assert json.loads((target / "export_report.json").read_text())["trained"]["task"] in card
    assert pipeline.verify(VerifyRequest(dir=str(target)), console=Console(quiet=True))


@pytest.mark.parametrize("name", ["seq_cls", "seq_cls-encoder", "embedding"])
def test_a_merged_adapter_answers_as_plain_peft_does(tmp_path, models, name):
    run = train(tmp_path, models, name)
    request = ExportRequest(run=str(run))
    pipeline.merge(request, console=Console(quiet=True))
    model_class = AutoModel if name == "embedding" else AutoModelForSequenceClassification
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    merged = model_class.from_pretrained(run / "merged", dtype=torch.float32)
    kind = {} if name == "embedding" else {"num_labels": 2}
    base = model_class.from_pretrained(models[CASES[name].model], dtype=torch.float32, **kind)
    base.config.pad_token_id = tokenizer.pad_token_id
    expected = outputs(PeftModel.from_pretrained(base, run / "last"), tokenizer)
    found = outputs(merged, tokenizer)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert "score" not in dict(merged.named_modules()) or merged.config.id2label[1] == "food"


def test_a_fully_trained_classifier_is_exported(tmp_path, models):
    run = train(tmp_path, models, "seq_cls-encoder", tuner="full", learning_rate=1e-3)
    report = export(run, "export.format=compressed_tensors")
    assert report.reload and report.quantized == 12
    assert "classifier" in report.kept


def test_an_adapter_is_exported_as_it_is(tmp_path, models):
    run = train(tmp_path, models, "seq_cls")
    report = export(run, "export.format=adapter")
    files = {path.name for path in (run / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "swiftfp8_task.json"} <= files
    assert any("score" in warning for warning in report.warnings)
    assert "No engine serves this adapter" in (run / "export" / "README.md").read_text()


def test_what_needs_a_language_model_is_refused(tmp_path, models):
    run = train(tmp_path, models, "seq_cls")
    with pytest.raises(SwiftFP8Error, match="as a language model does"):
        export(run, "export.calibrate=true")


def ask(prompt: str, **where: str) -> str:
    output = io.StringIO()
    model_dir, adapter_dir = locate(SourceRequest(**where))
    trained = read_task_file(adapter_dir or model_dir)
    assert trained is not None
    console = Console(file=output, width=200)
    answer = judge(model_dir, adapter_dir, trained, prompt=prompt, console=console)
    assert answer is not None and answer in output.getvalue()
    return answer


def test_a_run_and_its_export_are_asked(tmp_path, models):
    run = train(tmp_path, models, "seq_cls", max_steps=12, learning_rate=0.01)
    export(run, "export.format=fp8_block")
    for where in ({"run": str(run)}, {"model": str(run / "export")}):
        first, second = ask(TEXT, **where).splitlines()
        share, label = first.split()
        assert label == "food" and float(share) > 0.8
        assert float(share) + float(second.split()[0]) == pytest.approx(1.0, abs=1e-3)


def test_a_reward_model_scores_an_answer_to_a_question(tmp_path, models):
    run = train(tmp_path, models, "reward", max_steps=12)
    scores = [
        float(ask(json.dumps([{"role": "user", "content": TEXT},
                              {"role": "assistant", "content": answer}]), run=str(run)))
        for answer in ("yes yes", "never")
    ]  # fmt: skip
    assert scores[0] > scores[1]
    with pytest.raises(SwiftFP8Error, match="judges an answer to a question"):
        ask("yes yes", run=str(run))


def test_an_embedding_is_a_unit_vector_near_its_positive(tmp_path, models):
    run = train(tmp_path, models, "embedding", max_steps=12, learning_rate=0.01)
    cat, meow, bark = (torch.tensor(json.loads(ask(x, run=str(run))))
                       for x in ("cat", "meow", "bark"))  # fmt: skip
    assert cat.norm() == pytest.approx(1.0, abs=1e-3)
    assert cat @ meow > cat @ bark
