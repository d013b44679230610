"""Recipes, groups and overrides to one configuration: what wins, and where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftfp8.config.compose import (
    Composed,
    apply_overrides,
    compose_arguments,
    compose_config,
    compose_sweep,
    config_from_mapping,
    read_resolved,
    require_inputs,
    to_yaml,
)
from swiftfp8.config.paths import recipes_dir, yaml_names
from swiftfp8.errors import SwiftFP8Error, SwiftFP8Errors


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", yaml_names(recipes_dir()))
def test_every_packaged_recipe_composes(name: str) -> None:
    composed = compose_config(name)
    require_inputs(composed)
    first = (recipes_dir() / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith(f"# swiftfp8 train config={name}")


def test_nothing_given_is_the_schema_and_the_packaged_choices() -> None:
    composed = compose_config(None)
    assert (composed.config.dtype, composed.config.tuner) == ("fp8", "lora")
    assert composed.provenance["lora_rank"] == "schema default"
    assert composed.provenance["tuner"].startswith("configs/tuner/lora.yaml:")


def test_a_flat_recipe_chooses_any_groups_together() -> None:
    write("mine.yaml", "# mine\ntuner: full\ntrain: short\nrlhf: simpo\nprecision: bf16\n")
    config = compose_config("mine").config
    assert (config.tuner, config.train.logging_steps, config.rlhf.beta) == ("full", 1, 2.0)
    assert config.dtype == "bf16"


def test_a_flat_recipe_sits_on_packaged_config_and_chooses_groups_by_name() -> None:
    write("mine.yaml", "# mine\ntuner: full\nprecision: fp8_current\ntrain:\n  save_steps: 7\n")
    composed = compose_config("mine")
    config = composed.config
    assert (config.tuner, config.precision.recipe, config.train.save_steps) == (
        "full",
        "fp8_current",
        7,
    )
    assert config.learning_rate == 1e-5  # tuner/full.yaml's, since the recipe names none
    assert composed.provenance["train.save_steps"] == "mine.yaml:5"
    assert composed.provenance["tuner"] == "mine.yaml:2"
    assert composed.recipe_path == Path("mine.yaml").resolve()


def test_a_recipe_may_use_a_defaults_list_even_when_called_config() -> None:
    text = "defaults:\n  - config\n  - override precision: fp8_delayed\n  - _self_\nlora_rank: 4\n"
    write("config.yaml", text)
    config = compose_config("config.yaml").config
    assert (config.precision.recipe, config.lora_rank) == ("fp8_delayed", 4)


def test_recipes_build_on_siblings_and_on_packaged_ones() -> None:
    write("base.yaml", "lora_rank: 3\nseed: 7\n")
    write("child.yaml", "defaults: [base, _self_]\nseed: 8\n")
    write("quickstart.yaml", "defaults: [quickstart, _self_]\nlora_rank: 5\n")
    child = compose_config("child").config
    assert (child.lora_rank, child.seed, child.precision.recipe) == (3, 8, "auto")
    own = compose_config("quickstart.yaml").config
    assert (own.lora_rank, own.model_type) == (5, "tiny")


def test_the_recipes_folder_shadows_packaged_options() -> None:
    write("mine.yaml", "seed: 1\n")
    write("precision/fp8_block.yaml", "recipe: fp8_block\nmargin: 2\n")
    write("precision/own.yaml", "recipe: fp8_current\nmargin: 3\n")
    assert compose_config("mine", ["precision=fp8_block"]).config.precision.margin == 2
    assert compose_config("mine", ["precision=own"]).config.precision.margin == 3
    assert compose_config(None, ["precision=fp8_block"]).config.precision.margin == 0


def test_a_choice_on_the_command_line_beats_the_recipe_and_a_key_beats_the_choice() -> None:
    write("mine.yaml", "dtype: bf16\nlearning_rate: 3e-4\nprecision:\n  recipe: mxfp8\n")
    tokens = ["learning_rate=5e-5", "precision=fp8_block", "tuner=full", "train=short"]
    composed = compose_config("mine", tokens)
    config = composed.config
    assert (config.dtype, config.precision.recipe) == ("fp8", "fp8_block")
    assert (config.tuner, config.learning_rate) == ("full", 5e-5)
    assert config.train.logging_steps == 1
    assert composed.provenance["learning_rate"] == "command line, learning_rate=5e-5"
    assert "command line, precision=fp8_block" in composed.provenance["precision.recipe"]


def test_repeating_the_recipes_own_choice_changes_nothing() -> None:
    write("mine.yaml", "tuner: full\nlearning_rate: 3e-4\n")
    assert compose_config("mine", ["tuner=full"]).config.learning_rate == 3e-4


def test_null_and_references_and_dotted_keys_in_a_recipe() -> None:
    write("mine.yaml", "run_name: r-${lora_rank}\nsystem: hello\nprecision.margin: 2\n")
    config = compose_config("mine", ["system=null", "lora_rank=6"]).config
    assert (config.run_name, config.system, config.precision.margin) == ("r-6", None, 2)


def test_a_sweep_gives_each_member_its_own_directories() -> None:
    members = compose_sweep(None, ["lora_rank=4,8", "run_name=x", "export_dir=out"])
    assert [m.config.lora_rank for m in members] == [4, 8]
    assert [m.config.run_name for m in members] == ["x-1", "x-2"]
    assert [m.config.export_dir for m in members] == ["out-1", "out-2"]
    for member in members:
        assert compose_config(None, member.overrides).config == member.config


def test_a_sweep_over_a_list_says_how_to_mean_the_list() -> None:
    (first, _) = compose_sweep(None, ["dataset=quickstart,quickstart-unseen"])
    assert first.config.dataset == ("quickstart",)
    assert any("dataset=[...]" in note for note in first.notes)


def test_one_configuration_is_no_sweep() -> None:
    with pytest.raises(SwiftFP8Error, match="sweep"):
        compose_config(None, ["lora_rank=4,8"])


def test_the_yaml_of_a_configuration_gives_it_back(folder: Path) -> None:
    config = compose_config("quickstart", ["precision.exclude=[a,b]", "system=x: y #1"]).config
    write("run/resolved.yaml", to_yaml(config))
    assert read_resolved(folder / "run") == config
    assert compose_config("run").config == config


def test_a_finished_configuration_does_not_ask_for_its_files() -> None:
    config = config_from_mapping({"dataset": ["gone.jsonl"], "lora_rank": 4})
    assert apply_overrides(config, ["export.format=bf16"]).export.format == "bf16"
    assert config.export.format == "auto"
    with pytest.raises(SwiftFP8Error, match="lora_rnk"):
        apply_overrides(config, ["lora_rnk=4"])


def test_python_arguments_are_the_same_configuration() -> None:
    arguments = {
        "dataset": ["quickstart"],
        "precision": {"strict": True, "exclude": ("a", "b")},
        "tuner": "full",
        "output_dir": Path("a, b"),
    }
    composed = compose_arguments("quickstart", arguments)
    assert composed.config.learning_rate == 1e-5  # what `tuner=full` brings
    assert composed.config.precision.strict
    assert compose_config("quickstart", composed.overrides).config == composed.config


def test_interval_is_noted() -> None:
    composed: Composed = compose_config(None, ["precision.interval=1"])
    assert "no longer" in composed.notes[0] and "command line" in composed.notes[0]


@pytest.mark.parametrize(
    ("bits", "form", "said"),
    [(8, "compressed_tensors", False), (8, "bf16", True), (16, "fp8", True), (16, "bf16", False)],
)
def test_bits_that_a_format_contradicts_are_noted(bits: int, form: str, said: bool) -> None:
    notes = compose_config(None, [f"export_quantization_bit={bits}", f"export.format={form}"]).notes
    assert any(f"export.format={form}" in note for note in notes) == said


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_preference_loss_without_a_task_is_refused(loss: str) -> None:
    with pytest.raises(SwiftFP8Error, match=r"rlhf\.loss_type is read by task=dpo") as caught:
        require_inputs(compose_config("quickstart", [f"rlhf={loss}"]))
    assert f"command line, rlhf={loss}" in str(caught.value.where)
    Path("mine.yaml").write_text(f"model_type: tiny\ndataset: quickstart\nrlhf: {loss}\n")
    with pytest.raises(SwiftFP8Error, match="and this is task=sft") as caught:
        require_inputs(compose_config("mine", []))
    undone = str(caught.value.fix).partition("(")[2].partition(" undoes")[0].split()
    require_inputs(compose_config("mine", undone))  # as it is advised
    other = compose_config("dpo_quickstart", ["task=sft", "rlhf=sigmoid"])
    require_inputs(other)  # a recipe's loss is undone so
    Path("resolved.yaml").write_text(to_yaml(compose_config("quickstart").config))
    require_inputs(compose_config("resolved.yaml", []))


@pytest.mark.parametrize("schedule", ["cosine", "cosine_with_min_lr"])
def test_a_lowest_rate_that_the_schedule_does_not_know_is_noted(schedule: str) -> None:
    tokens = ["optim.min_lr_ratio=0.2", f"optim.lr_scheduler_type={schedule}"]
    notes = compose_config(None, tokens).notes
    assert any("min_lr_ratio=0.2" in note for note in notes) == (schedule == "cosine")
    without = compose_config(None, tokens[1:])
    assert without.notes == ()
    Path("resolved.yaml").write_text(to_yaml(without.config))
    assert compose_config("resolved.yaml", []).notes == ()  # as a resumed run reads it


def test_missing_inputs_are_named_together() -> None:
    with pytest.raises(SwiftFP8Errors) as caught:
        require_inputs(compose_config(None))
    assert [problem.what.split()[1] for problem in caught.value.problems] == ["model", "dataset"]


@pytest.mark.parametrize(
    "token",
    ["seed=4294967296", "data.loss_weights={prompt:1e-40}", "data.loss_weights={prompt:1e39}"],
)
def test_numbers_that_nothing_could_use_are_refused(token: str) -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        compose_config("quickstart", [token])
    assert token.partition("=")[0] in str(caught.value)
