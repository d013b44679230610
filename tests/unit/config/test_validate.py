"""Bad configurations: all problems at once, each with what, where and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftfp8.config.compose import compose_arguments, compose_config
from swiftfp8.errors import SwiftFP8Error


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(config: str | None, *tokens: str) -> dict[str, tuple[str, str]]:
    """What is wrong, with where and fix."""
    with pytest.raises(SwiftFP8Error) as caught:
        compose_config(config, tokens)
    found = getattr(caught.value, "problems", (caught.value,))
    return {problem.what: (problem.where or "", problem.fix or "") for problem in found}


def test_every_problem_of_file_and_command_line_is_reported_with_its_place() -> None:
    Path("bad.yaml").write_text(
        "lora_rnk: 8\nprecision:\n  strct: true\n  margin: -1\ntuner: lorra\nsave_steps: 4\n"
        "train: 5\nseed: true\n"
    )
    found = problems("bad", "lora_alpha=x", "precision=fp8_blok", "word")
    assert found == {
        "'word' is no key=value": ("command line", "write key=value; for a recipe: config=word"),
        "unknown precision option 'fp8_blok'": (
            "command line, precision=fp8_blok",
            "did you mean fp8_block?",
        ),
        "precision.margin must be at least 0, not -1": (
            "bad.yaml:4",
            "give a whole number >= 0, such as precision.margin=0. Delayed scaling: scale is "
            "divided by 2**margin.",
        ),
        "unknown key 'precision.strct'": ("bad.yaml:3", "did you mean precision.strict?"),
        "train is a group of keys, not 5": (
            "bad.yaml:7",
            "set its keys one by one, such as train.logging_steps",
        ),
        "unknown tuner 'lorra'": ("bad.yaml:5", "did you mean lora?"),
        "lora_alpha must be a number, not 'x'": (
            "command line, lora_alpha=x",
            "give a number > 0, such as lora_alpha=32. LoRA alpha; the update is "
            "scaled by alpha / r (alpha / sqrt(r) with `use_rslora`).",
        ),
        "seed must be a number, not true": (
            "bad.yaml:8",
            "give a whole number >= 0, such as seed=42. Seed "
            "of initialisation, data order and dropout.",
        ),
        "unknown key 'lora_rnk'": ("bad.yaml:1", "did you mean lora_rank?"),
        "unknown key 'save_steps'": ("bad.yaml:6", "did you mean train.save_steps?"),
    }


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lora_rnk", "lora_rank"),
        ("lora_r", "lora_rank"),
        ("lr", "learning_rate"),
        ("cutoff_len", "max_length"),
        ("model_name_or_path", "model"),
        ("train_type", "tuner"),
        ("strict", "precision.strict"),
        ("precison", "precision"),
        ("train.sav_steps", "train.save_steps"),
        ("precision.lora_rank", "lora_rank"),
    ],
)
def test_the_key_that_was_meant(key: str, meant: str) -> None:
    assert problems(None, f"{key}=1")[f"unknown key '{key}'"][1] == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("token", "what"),
    [
        ("lora_rank=0", "lora_rank must be at least 1, not 0"),
        ("lora_rank=8.5", "lora_rank must be a whole number, not 8.5"),
        ("lora_rank=null", "lora_rank can't be null"),
        ("lora_rank=b=c", "lora_rank must be a whole number, not 'b=c'"),
        ("lora_dropout=1", "lora_dropout must be less than 1, not 1"),
        ("lora_alpha=0", "lora_alpha must be greater than 0, not 0"),
        ("optim.adam_beta2=1", "optim.adam_beta2 must be less than 1, not 1"),
        ("learning_rate=0", "learning_rate must be greater than 0, not 0"),
        ("learning_rate=inf", "learning_rate must be a finite number, not inf"),
        (
            "gradient_checkpointing=maybe",
            "unknown gradient_checkpointing 'maybe'",
        ),
        ("dtype=fp9", "unknown dtype 'fp9'"),
        ("export_quantization_bit=4", "unknown export_quantization_bit '4'"),
        ("max_steps=0", "max_steps: must be at least 1, or -1 to go by epochs, not 0"),
        ("model=./nomodel", "no such model directory or file: ./nomodel"),
        (
            "resume_from_checkpoint=output/nope",
            "the checkpoint to resume from does not exist: output/nope",
        ),
        ("run_name=${nope}", "run_name: Interpolation key 'nope' not found"),
        ("run_name=a${b", "run_name: ${ begins a reference to another key, which does not end"),
        ("run_name=???", "run_name must be given"),
        ("model_type=qwen9", "unknown model_type 'qwen9'"),
        ("dataset=quikstart", "unknown dataset 'quikstart'"),
        ("dataset=rows.jsonl#5", "no such data set file: rows.jsonl"),
        ("val_dataset=./rows", "no such data set file: ./rows"),
        ("template=gone.jinja", "no chat template file gone.jinja"),
    ],
)
def test_a_bad_value_is_one_problem_with_its_token(token: str, what: str) -> None:
    found = problems(None, token)
    assert list(found) == [what]
    assert found[what][0] == f"command line, {token}"


def test_missing_files_are_told_with_the_other_mistakes() -> None:
    Path("bad.yaml").write_text(
        "model: ./nomodel\nresume_from_checkpoint: output/nope\ndataset: gone.jsonl\nseeed: 1\n"
    )
    places = {where for where, _ in problems("bad").values()}
    assert places == {"bad.yaml:1", "bad.yaml:2", "bad.yaml:3", "bad.yaml:4"}


@pytest.mark.parametrize(
    ("token", "fix"),
    [
        ("dataset=nope.jsonl", "paths start from the current folder"),  # bin.jsonl is no likeness
        ("dataset=tran.jsonl", "did you mean train.jsonl?"),
        ("dataset=train.json", "did you mean train.jsonl?"),
        ("model=./modle", "did you mean model?"),
        ("rlhf=grpo", "choose one of: "),
        ("dtype=fp9", "did you mean fp8?"),
        ("lora_rank=abc", "give a whole number >= 1, such as lora_rank="),
        ("packing=maybe", "give true or false, such as packing=false"),
        ("export.tp=x", "give a list of whole numbers"),
    ],
)
def test_the_way_out(token: str, fix: str) -> None:
    for name in ("bin.jsonl", "train.jsonl"):
        Path(name).touch()
    Path("model").mkdir()
    ((_, given),) = problems(None, token).values()
    assert given.startswith(fix)


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("rows.jsonl", "no recipe, another file", "dataset=rows.jsonl"),
        ("notes.md", "no recipe, another file", "a recipe is a .yaml file"),
        ("folder", "a directory without a resolved.yaml", "swiftfp8 config list"),
        ("mien.yaml", "no such recipe file", "did you mean mine.yaml?"),
    ],
)
def test_what_is_no_recipe(name: str, what: str, fix: str) -> None:
    for file in ("rows.jsonl", "notes.md", "mine.yaml"):
        Path(file).touch()
    Path("folder").mkdir()
    with pytest.raises(SwiftFP8Error) as caught:
        compose_config(name)
    assert what in caught.value.what and fix in str(caught.value.fix)


@pytest.mark.parametrize(
    "entry", ["quickstart#5", "owner/name", "owner/name:subset@test#9", "here.txt"]
)
def test_data_sets_that_may_exist(entry: str) -> None:
    Path("here.txt").touch()
    assert compose_config(None, [f"dataset={entry}"]).config.dataset == (entry,)


def test_names_have_aliases_and_no_case() -> None:
    assert compose_config(None, ["model_type=Qwen2.5"]).config.model_type == "Qwen2.5"


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("a: 1\nseed: 1\nseed: 2\n", "duplicate key", 3),
        ("a: [1\nb: 2\n", "not valid YAML", 2),
        ("- a\n", "holds `key: value` lines", None),
        ("defaults: [nope]\n", "'nope', and there is no such file", None),
        ("defaults: [config, {override precison: x}]\n", "'precison'", None),
        ("defaults: [config, config]\n", "appears more than once", None),
        ("defaults: [bad2, _self_]\n", "in a circle", None),
        ("run_name: ${seed\n", "no viable alternative at input '${seed'", None),
        ("null: 1\n", "Incompatible key type", None),
        ("dataset: &a [*a]\n", "a value holds itself", None),
    ],
)
def test_a_recipe_that_cannot_be_read(text: str, what: str, line: int | None) -> None:
    Path("bad.yaml").write_text(text)
    Path("bad2.yaml").write_text("defaults: [bad3, _self_]\n")
    Path("bad3.yaml").write_text("defaults: [bad2, _self_]\n")
    ((said, (where, _)),) = problems("bad").items()
    assert what in said and where == (f"bad.yaml:{line}" if line else "bad.yaml")


def test_a_recipe_that_does_not_exist() -> None:
    assert problems("quikstart")["unknown recipe 'quikstart'"][1] == "did you mean quickstart?"
    assert "no such recipe file: gone.yaml" in problems("gone.yaml")


def test_python_arguments_are_checked_alike() -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        compose_arguments(None, {"lora_rnk": 8, "precision": {"strct": True}})
    text = str(caught.value)
    assert "did you mean lora_rank?" in text and "did you mean precision.strict?" in text
    assert "Python argument lora_rnk=8" in text
