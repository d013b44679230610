"""Judging tiny exports: figures, verdicts, failures, and what can't be judged."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer, tiny_model
from peft import LoraConfig, get_peft_model
from rich.console import Console

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export.export import ExportContext, export_checkpoint, find_format
from swiftfp8.export.judge import (
    Evidence,
    Findings,
    Row,
    TaskLoss,
    compare_models,
    token_logp,
    token_losses,
)
from swiftfp8.export.layout import FormatOptions, Layout
from swiftfp8.export.report import ExportReport
from swiftfp8.export.rounded_inputs import inputs_rounded
from swiftfp8.export.run_rows import RunRows
from swiftfp8.export.source import open_source
from tests.unit.export.test_engine_run import stand_in


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With preferences (a large spread of weights), so that rounding shows."""
    directory = tmp_path_factory.mktemp("judge") / "base"
    save_model(directory, "qwen3", initializer_range=0.1)
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    model = get_peft_model(
        tiny_model("qwen3", initializer_range=0.1),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    directory = base.parent / "adapter"
    model.save_pretrained(directory)
    return directory


def layout_of_one_linear(amax: float | None) -> Layout:
    return Layout(
        format="compressed_tensors",
        tensors=(),
        quantized=frozenset({"up.weight"}),
        decisions=(),
        config=None,
        input_amax=None if amax is None else {"up": amax},
    )


def rows(count: int = 6, length: int = 24) -> list[Row]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(300, (count, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 2] = -100
    return [Row(ids_T=i, labels_T=n) for i, n in zip(ids, labels, strict=True)]


def run_rows() -> RunRows:
    return RunRows(rows=rows())


def export(
    base: Path,
    target: Path,
    adapter: Path | None = None,
    read: Callable[[], RunRows] | None = run_rows,
    **options: object,
) -> ExportReport:
    settings = ExportConfig(**{"verify": False, "max_loss_increase": 1.0, **options})
    context = ExportContext(run_rows=read, console=Console(file=io.StringIO()))
    return export_checkpoint(base, adapter, target, settings, context)


def test_loss_and_log_probabilities_are_those_of_transformers(base: Path) -> None:
    model = tiny_model("qwen3", initializer_range=0.1).float().eval()
    row = rows(1)[0]
    with torch.no_grad():
        said = model(row.ids_T[None], labels=row.labels_T[None])
    losses = token_losses(model, [row])
    assert len(losses) == 12
    assert float(losses.mean()) == pytest.approx(float(said.loss), rel=1e-5)
    log_p = said.logits[0, :-1].log_softmax(-1)
    wanted = log_p.gather(-1, row.ids_T[1:, None])[:, 0]
    assert token_logp(model, row.ids_T.tolist()) == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("group", "amax", "wanted"),
    [
        (0, None, [448.0, 1.0, 0.0, -16.0]),  # one scale of 1: e4m3's own grid
        (2, None, [448.0, 1.0, 0.0, -15.9]),  # the second pair has its own scale
        (0, 28.0, [28.0, 1.0, 0.0, -16.0]),  # a fixed scale of 1/16: clipped to 28
    ],
)
def test_inputs_are_rounded_as_engines_do(
    group: int, amax: float | None, wanted: list[float]
) -> None:
    layout = layout_of_one_linear(amax)
    linear = torch.nn.Linear(4, 4, bias=False)
    linear.weight.data = torch.eye(4)
    model = torch.nn.ModuleDict({"up": linear, "other": torch.nn.Linear(4, 4)})
    given = [448.0, 0.98, 0.0, -15.9]
    with inputs_rounded(model, layout, group) as count:
        found = linear(torch.tensor([given]))
    assert count == 1
    assert found[0].tolist() == pytest.approx(wanted, rel=1e-3)
    assert linear(torch.tensor([given]))[0].tolist() == pytest.approx(given)
    with inputs_rounded(model, layout, None) as count:
        assert count == 0


def test_the_adapter_is_compared_un_merged(base: Path, adapter: Path) -> None:
    """The loss before is PEFT's own on the base; the export's is near it, not near the base's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source, export_format = open_source(base, adapter), find_format("fp8_block")
    layout = export_format.describe(source, FormatOptions())
    evidence = Evidence(windows=[row.ids_T for row in rows()], windows_from="x", rows=rows())
    found = compare_models(source, layout, export_format, evidence)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    base_loss = float(token_losses(plain, rows()).mean())
    peft = PeftModel.from_pretrained(plain, str(adapter)).eval()
    assert found.loss and found.fidelity
    wanted = token_losses(peft, rows())
    assert found.loss.trained == pytest.approx(float(wanted.mean()), rel=1e-5)
    assert 0 < found.loss.error < 0.1
    assert abs(found.loss.export - found.loss.trained) < 0.3 * abs(base_loss - found.loss.trained)
    assert found.loss.tokens == 6 * 12 and found.fidelity.tokens == 6 * 23
    assert 0 < found.fidelity.token_kl < 0.2


def test_figures_and_verdicts_are_in_report_and_card(base: Path, adapter: Path, tmp_path) -> None:
    report = export(
        base,
        tmp_path / "out",
        adapter,
        max_kl=10.0,
        fidelity="fail",
        min_top1=0.1,
        max_ppl_ratio=10.0,
    )
    saved = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert {v["figure"]: v["passed"] for v in saved["verdicts"]} == {
        "perplexity ratio": True,
        "token KL": True,
        "top-1 agreement": True,
        "perplexity ratio as served": True,
        "token KL as served": True,
        "top-1 agreement as served": True,
        "evaluation loss": True,
    }
    assert saved["fidelity"]["text"] == "6 evaluation rows"
    assert saved["loss"]["trained"] > 0 and saved["loss"]["rows"] == 6
    assert not saved["warnings"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| token KL | " in card and "(at most 10): passed" in card
    assert "inputs rounded to FP8 too" in card and "| token KL as served | " in card
    assert "| evaluation loss | adapter " in card
    facts = dict(report.facts())
    assert facts["engine"] == "not checked: export.verify=false"


@pytest.mark.parametrize("name", ["fp8_block", "compressed_tensors"])
def test_as_served_inputs_are_rounded_too(base: Path, name: str) -> None:
    """What is served is a third model, further from the merge than its weights alone are."""
    source, export_format = open_source(base), find_format(name)
    layout = export_format.describe(source, FormatOptions())
    windows = [row.ids_T for row in rows()]
    evidence = Evidence(windows=windows, windows_from="x")
    found = compare_models(source, layout, export_format, evidence)
    alone = compare_models(source, replace(layout, input_group=None), export_format, evidence)
    assert alone.served is None and found.fidelity == alone.fidelity
    assert found.fidelity and found.served
    assert found.fidelity.token_kl * 1.2 < found.served.token_kl < found.fidelity.token_kl * 4


def test_experts_that_run_as_one_module_are_not_judged_as_served(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base", "qwen3_moe"))
    report = export(base, tmp_path / "out", fidelity="fail", max_kl=10.0, min_top1=0.1)
    assert report.judgement.fidelity and report.judgement.served is None
    why = "the inputs of 24 FP8 linears can't be rounded: experts run as one module"
    assert dict(report.facts())["as served"] == f"not checked: {why}"


def test_a_limit_missed_as_served_alone_is_a_warning(base: Path, tmp_path: Path) -> None:
    report = export(base, tmp_path / "one", fidelity="fail", max_kl=10.0, min_top1=0.1)
    figures = report.judgement
    assert figures.fidelity and figures.served
    between = (figures.fidelity.token_kl + figures.served.token_kl) / 2
    with pytest.raises(RunFailed, match=r"token KL as served .*MISSED"):
        export(base, tmp_path / "two", fidelity="fail", max_kl=between, min_top1=0.1)


def test_a_missed_limit_is_a_warning(base: Path, tmp_path: Path) -> None:
    report = export(
        base, tmp_path / "out", max_kl=0.0, fidelity_dataset=[], verify=False, fidelity="warn", **{}
    )
    assert not report.judgement.verdicts  # verify=false: nothing was asked for
    text = tmp_path / "t.txt"
    text.write_text("one two three four five six seven eight nine ten " * 4)
    report = export(base, tmp_path / "two", max_kl=0.0, fidelity_dataset=[str(text)])
    assert report.judgement.fidelity and report.judgement.fidelity.text == "t.txt"
    assert any("token KL" in warning and "MISSED" in warning for warning in report.warnings)
    assert "export.max_kl" in report.warnings[-1] and report.warnings[-1].startswith("fix: ")
    assert (tmp_path / "two" / "config.json").exists()


def test_or_a_failure_that_keeps_nothing(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"token KL .*MISSED") as caught:
        export(base, tmp_path / "out", max_kl=0.0, fidelity="fail")
    assert caught.value.exit_code == 1 and "export.calibrate" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_rose_too_far_fails_too(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = TaskLoss(
        kind="evaluation",
        rows=6,
        tokens=72,
        adapter=True,
        trained=1.0,
        export=1.02,
        error=0.001,
    )
    monkeypatch.setattr(
        "swiftfp8.export.judge_stage.compare_models", lambda *_, **__: Findings(loss=loss)
    )
    options = {"fidelity": "fail", "max_loss_increase": 0.005}
    with pytest.raises(RunFailed, match=r"evaluation loss 2\.00% .*MISSED"):
        export(base, tmp_path / "out", adapter, **options)
    assert not list(tmp_path.iterdir())
    export(base, tmp_path / "out", adapter, **{**options, "max_loss_increase": 0.02})


def test_failing_needs_something_to_judge_on(base: Path, tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="nothing to judge") as caught:
        export(base, tmp_path / "out", read=None, fidelity="fail")
    assert "export.fidelity_dataset" in str(caught.value)

    def unreadable() -> RunRows:
        raise SwiftFP8Error("no such file", where="val.jsonl")

    with pytest.raises(SwiftFP8Error, match="no such file"):
        export(base, tmp_path / "out", read=unreadable, fidelity="fail")
    report = export(base, tmp_path / "out", read=unreadable, verify=True)
    why = "the run's rows can't be read (no such file: val.jsonl)"
    assert report.judgement.not_checked["evaluation loss"] == why
    assert f"not judged by its loss: {why}" in report.warnings


def test_what_is_not_checked_has_its_reason(base: Path, adapter: Path, tmp_path: Path) -> None:
    def reasons(name: str, **options: object) -> dict[str, str]:
        report = export(base, tmp_path / name, **options)
        return dict(report.judgement.not_checked)

    assert reasons("a", fidelity="off")["against BF16"] == "export.fidelity=off"
    assert reasons("b", fidelity="off", smoke="off")["engine"] == "export.smoke=off"
    assert reasons("c")["evaluation loss"] == "export.verify=false"
    found = reasons("d", adapter=adapter, format="adapter")
    assert found["evaluation loss"] == found["engine"] == "an adapter is exported as it is"
    merged = reasons("e", adapter=adapter, format="bf16", fidelity="fail")
    assert set(merged) == {"engine"}  # nothing is quantized: the export is the BF16 merge


@pytest.fixture
def no_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the reload by transformers, which takes seconds and has its own tests."""
    monkeypatch.setattr("swiftfp8.export.export._read_again", lambda *_: (None, None))


@pytest.mark.usefixtures("no_reload")
def test_an_engine_is_run_where_there_is_one(base: Path, tmp_path: Path) -> None:
    """A stand-in that takes every token for likely by e^-1, which is not what the model says."""
    cpu = {"vllm": "9.9", "torch": "2", "device": "cpu", "amx": True}
    python = stand_in(tmp_path, probe=cpu)
    options = {"engine_python": python, "fidelity": "off", "smoke": "require"}
    with pytest.raises(RunFailed, match="gives other log-probabilities"):
        export(base, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    report = export(base, tmp_path / "out", engine_python=python, verify=True, fidelity="off")
    assert report.judgement.engine and report.judgement.engine.tokens > 0
    assert any(warning.startswith("mean |dlogp|") for warning in report.warnings)
    assert "vLLM 9.9 on cpu" in dict(report.facts())["engine"]


@pytest.mark.usefixtures("no_reload")
def test_an_engine_that_can_not_run_it(base: Path, tmp_path: Path) -> None:
    python = stand_in(tmp_path, error="RuntimeError: out of something")
    options = {"engine_python": python, "fidelity": "off", "format": "compressed_tensors"}
    report = export(base, tmp_path / "a", verify=True, **options)
    assert "out of something" in report.judgement.not_checked["engine"]
    with pytest.raises(RunFailed, match="out of something"):
        export(base, tmp_path / "b", smoke="require", **options)
    block = export(base, tmp_path / "c", verify=True, engine_python=python, fidelity="off")
    assert "AMX" in block.judgement.not_checked["engine"]
    with pytest.raises(RunFailed, match="AMX"):
        export(base, tmp_path / "d", smoke="require", engine_python=python, fidelity="off")
