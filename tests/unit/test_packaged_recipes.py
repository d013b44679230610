"""Every packaged recipe is planned for an H200, and the table of docs/recipes.md says what came."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftfp8.config.compose import compose_config
from swiftfp8.config.paths import recipes_dir, yaml_names
from swiftfp8.hardware import parse_hardware
from swiftfp8.models.meta import ModelMeta
from swiftfp8.plan import build_plan
from tests.plan_kit import decoder_meta, qwen_7b, qwen_half_b

TABLE = Path(__file__).parents[2] / "docs" / "recipes.md"


def eight_billion(architecture: str, **changes: Any) -> ModelMeta:
    shape = {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8}
    meta = decoder_meta(**{**shape, "vocab": 128256, "tied": False, **changes})
    return replace(meta, architecture=architecture)


# Shapes that are known without a hub; other models' recipes are composed only.
SHAPES = {
    "Qwen/Qwen2.5-7B-Instruct": qwen_7b(),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen_half_b(),
    "Qwen/Qwen2.5-1.5B": decoder_meta(
        hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocab=151936, tied=True
    ),
    "meta-llama/Llama-3.1-8B-Instruct": eight_billion("LlamaForCausalLM"),
    "mistralai/Mistral-7B-Instruct-v0.3": eight_billion("MistralForCausalLM", vocab=32768),
    "Qwen/Qwen3-8B": eight_billion("Qwen3ForCausalLM", intermediate=12288, layers=36, vocab=151936),
}


def rows() -> dict[str, list[str]]:
    """The table's rows by recipe."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_table_has_every_recipe() -> None:
    assert set(rows()) == set(yaml_names(recipes_dir()))


@pytest.mark.parametrize("name", yaml_names(recipes_dir()))
def test_a_recipe_is_planned_and_the_table_says_its_memory(name: str) -> None:
    config = compose_config(name).config
    if config.model not in SHAPES:
        return
    plan = build_plan(config, parse_hardware("h200"), SHAPES[config.model])
    assert plan.recipe is not None and plan.decoder_coverage == 1.0
    assert plan.memory.total < plan.memory.available
    planned = re.search(r"([0-9.]+) planned", rows()[name][4])
    assert planned, f"{name}: {plan.memory.total:.0f} GiB are planned"
    assert float(planned[1]) == pytest.approx(plan.memory.total, abs=0.6)
