from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_dirs import edit_json, write_model
from model_kit import plan_for
from transformers import AutoConfig

from swiftfp8.config.schema import Config
from swiftfp8.inject import plain_state_dict
from swiftfp8.models.load import load_model
from swiftfp8.models.source import resolve_source
from swiftfp8.train.weights import save_weights


@pytest.mark.parametrize("cached", [True, False, None])
def test_a_full_checkpoint_generates_with_the_cache_as_its_base_does(
    tmp_path: Path, cached: bool | None
) -> None:
    base = write_model(tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    raw.pop("use_cache", None)
    (base / "config.json").write_text(json.dumps(raw))
    if cached is not None:
        edit_json(base / "config.json", use_cache=cached)
    model = load_model(resolve_source(Config(model=str(base))), "fp32")
    plan = plan_for(model, recipe=None, backend=None, tuner="full")
    save_weights(model, None, tmp_path / "saved", plain_state_dict, plan)
    assert AutoConfig.from_pretrained(tmp_path / "saved").use_cache is (cached is not False)
    assert model.config.use_cache is False  # training goes on without it
