"""The model card: base, data, recipe, precision, checks; and no local path."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from swiftfp8.config.schema import Config
from swiftfp8.export.card import model_card
from swiftfp8.export.fidelity import Fidelity
from swiftfp8.export.gates import judge_fidelity, judge_loss
from swiftfp8.export.judge import TaskLoss
from swiftfp8.export.judge_stage import Judgement
from swiftfp8.export.report import ExportReport
from swiftfp8.export.run_facts import RunFacts, read_run_facts
from swiftfp8.export.serve import Served
from swiftfp8.export.verify import ReadBack, ReloadCheck
from swiftfp8.tasks import Trained

LOSS = TaskLoss(
    kind="evaluation", rows=4, tokens=9, adapter=True, trained=1.0, export=1.001, error=0.0
)
FIDELITY = Fidelity(
    text="held_out.txt",
    tokens=100,
    perplexity_merged=9.0,
    perplexity_export=9.09,
    perplexity_ratio=1.01,
    token_kl=0.01,
    top1_agreement=0.95,
)


def report(**changes: object) -> ExportReport:
    settings = Config().export
    values: dict[str, object] = {
        "export_dir": Path("/home/me/secret/out"),
        "format": "fp8_block",
        "format_reason": "as asked",
        "base": "Qwen/Qwen3-8B",
        "adapter": "run/checkpoint-9",
        "created": "2026-01-02 03:04 UTC",
        "versions": {"swiftfp8": "0.1.0", "torch": "2.9"},
        "source_bytes": 2**30,
        "export_bytes": 2**29,
        "shards": 1,
        "seconds": 3.0,
        "merged": 7,
        "quantized": 7,
        "kept": {"lm_head": "output head"},
        "layers": (),
        "reload": ReloadCheck(
            tokens=8, parameters=9, bit_equal=True, max_difference=0.0, transformers="5.24"
        ),
        "read_back": None,
        "warnings": ("careful | here",),
        "judgement": Judgement(
            fidelity=FIDELITY,
            loss=LOSS,
            verdicts=(*judge_fidelity(FIDELITY, 10**8, settings), judge_loss(LOSS, settings)),
            not_checked={"engine": "no vLLM"},
        ),
        "run": RunFacts(data="rows.jsonl", recipe="sft, LoRA r=8", precision="bf16", result="good"),
    }
    return ExportReport(**{**values, **changes})  # type: ignore[arg-type]


def card_of(told: ExportReport, **served: object) -> str:
    """The card of what was written in some folder, as an engine sees it."""
    folder = Path("/tmp/.partial")
    return model_card(told, Served(directory=folder, format=told.format, **served))  # type: ignore[arg-type]


def front_matter(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---")[1])


def section(card: str, heading: str) -> str:
    return card.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_card_has_what_a_reader_asks_for() -> None:
    card = card_of(report())
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-8B",
        "tags": ["swiftfp8", "fp8"],
    }
    assert card.split("---")[2].startswith("\n\n# out\n")
    assert "| data | rows.jsonl |" in section(card, "Training")
    assert "| precision | bf16 |" in section(card, "Training")
    checks = section(card, "How it was checked")
    for line in (
        "| reload | transformers 5.24, fresh process",
        "| against BF16 | perplexity 9.000 -> 9.090 on held_out.txt, 100 tokens (every one,",
        "| perplexity ratio | 1.01 (0.9709 to 1.03): passed |",
        "| top-1 agreement | 95.00% (at least 88.00%): passed |",
        "| evaluation loss | adapter 1.0000, export 1.0010 on",
        "| engine | not checked: no vLLM |",
        "| warning | careful \\| here |",
    ):
        assert line in checks
    assert "vllm, sglang, lmdeploy, tensorrt_llm, transformers" in section(card, "Use")
    assert "vllm serve out" in section(card, "Use")
    assert "licence of the base model (Qwen/Qwen3-8B) applies" in section(card, "Licence")
    assert "/home/me" not in card


def test_a_model_without_a_run_or_a_hub_id() -> None:
    card = card_of(report(run=None, base="my-model", format="bf16", quantized=0))
    assert "## Training" not in card and "base_model" not in front_matter(card)
    assert front_matter(card)["tags"] == ["swiftfp8"]
    adapter = card_of(report(format="adapter", quantized=0), base="/home/me/qwen", rank=64)
    assert front_matter(adapter)["library_name"] == "peft"
    lora = "vllm serve Qwen/Qwen3-8B --enable-lora --max-lora-rank 64 --lora-modules out=out\n"
    assert lora in adapter
    assert "Engines for this format: vllm, sglang, lmdeploy." in adapter


@pytest.mark.parametrize(
    ("given", "title", "told"),
    [
        ("output/news/export", "news", "output/news/export"),
        ("{run}/merged", "news", "news/merged"),
        ("export", "export", "export"),
        ("../runs/news/export", "news", "../runs/news/export"),
        ("output/news/../news/../export", "export", "output/news/../news/../export"),
        ("{run}/more/export", "export", "export"),
        ("{here}/served", "served", "served"),
        ("../elsewhere", "elsewhere", "../elsewhere"),
        ("my export", "my export", "'my export'"),
    ],
)
def test_the_title_is_the_runs_name_and_the_directory_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, title: str, told: str
) -> None:
    """But for what lies between a machine's root and the run; no other folder gives its name."""
    here, run = tmp_path / "work", tmp_path / "runs" / "news"
    for folder in (run, here / "output" / "news"):
        folder.mkdir(parents=True)
        (folder / "resolved.yaml").touch()
    monkeypatch.chdir(here)
    place = Path(given.format(here=here, run=run))
    card = card_of(report(export_dir=place))
    assert f"\n# {title}\n" in card and f"\nvllm serve {told}\n" in card
    assert "/home/me" not in card and str(tmp_path) not in card
    adapter = card_of(report(export_dir=place, format="adapter"), base="x")
    assert f"--lora-modules {shlex.quote(f'{title}={shlex.split(told)[0]}')}\n" in adapter


@pytest.mark.parametrize(
    ("base", "served"),
    [("tiny", False), ("Owner/Model-GGUF/model.gguf", False), ("my-model", True)],
)
def test_an_adapter_on_a_base_that_is_no_repository(base: str, served: bool) -> None:
    card = card_of(report(format="adapter", quantized=0, base=base), base="/home/me/it")
    use = section(card, "Use")
    assert f"swiftfp8 infer model={base} adapter=out\n" in use
    assert ("vllm serve" in use) == served
    assert "base_model" not in front_matter(card)


def test_an_adapter_that_no_engine_serves() -> None:
    """Of another task, or with weights that it replaces whole."""
    trained = Trained(task="seq_cls", head=None, pooling=None)
    for told, served in (
        (report(format="adapter", quantized=0, trained=trained), {"speaks": False}),
        (report(format="adapter", quantized=0), {"lora_alone": False}),
    ):
        use = section(card_of(told, base="/home/me/qwen", **served), "Use")
        assert "No engine serves this adapter" in use and "swiftfp8 merge" in use
        assert "swiftfp8 infer model=Qwen/Qwen3-8B adapter=out" in use and "vllm" not in use


@pytest.mark.parametrize(
    ("model_class", "kind"),
    [
        ("AutoModelForSequenceClassification", "text-classification"),
        ("AutoModel", "feature-extraction"),
        ("AutoModelForCausalLM", "text-generation"),
    ],
)
def test_a_checkpoint_of_others_is_filed_by_its_class(model_class: str, kind: str) -> None:
    speaks = kind == "text-generation"
    card = card_of(report(run=None, adapter=None, model_class=model_class), speaks=speaks)
    assert front_matter(card)["pipeline_tag"] == kind
    assert ("vllm serve out --runner pooling" in card) == (not speaks)
    assert ("format: vllm, sglang.\n" in card) == (not speaks)


def test_dequantized_is_said_of_fp8_alone() -> None:
    back = ReadBack(tensors=56, obstacle="an adapter is no model by itself")
    for quantized in (7, 0):
        for changes in ({}, {"reload": None, "read_back": back}):
            card = card_of(report(quantized=quantized, format="bf16", **changes))
            assert ("dequantized" in card) == (quantized > 0)


def test_facts_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "precision_report.json").write_text(
        json.dumps(
            {
                "compute_dtype": "bf16",
                "backend": "te",
                "recipe": {"recipe": "fp8_block"},
                "measured": {"measured": 0.931},
            }
        )
    )
    (tmp_path / "result.json").write_text(
        json.dumps({"last_loss": 0.5, "eval_loss": None, "steps": 7})
    )
    config = Config(
        dataset=[str(tmp_path / "rows.jsonl"), "owner/set#50"],
        split_dataset_ratio=0.1,
        lora_rank=16,
        packing=True,
        max_steps=7,
    )
    facts = read_run_facts(tmp_path, config)
    assert facts.data == "rows.jsonl, owner/set#50; evaluated on 10% of it, set aside"
    assert facts.recipe and "LoRA r=16 alpha=32, on all-linear, 7 steps" in facts.recipe
    assert "2048 tokens, packed" in facts.recipe
    assert facts.precision == (
        "FP8 (fp8_block, te) for 93.1% of the linears' FLOPs (measured), bf16 elsewhere"
    )
    assert facts.result == "loss 0.5000 after 7 steps"


def test_a_fallback_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "precision_report.json").write_text(
        json.dumps(
            {
                "compute_dtype": "bf16",
                "asked_dtype": "fp8",
                "recipe": None,
                "fallbacks": [{"reason": "there is no GPU"}],
            }
        )
    )
    facts = read_run_facts(tmp_path, Config(tuner="full", num_train_epochs=2))
    assert facts.precision == "bf16 (fp8 asked: there is no GPU)"
    assert facts.recipe and "all weights trained, 2 epochs" in facts.recipe
    assert facts.data is None and facts.result is None
