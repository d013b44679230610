"""What is installed is what works: the wheel's contents, and the commands that README shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from swiftfp8.config.compose import compose_sweep

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
]
TRAIN = [command for command in COMMANDS if command.startswith("swiftfp8 train config=my.yaml")]


def test_the_wheel_holds_configs_recipes_and_assets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, packaged in (("configs", "_configs"), ("recipes", "_recipes")):
        for path in (REPOSITORY / folder).rglob("*.yaml"):
            assert f"swiftfp8/{packaged}/{path.relative_to(REPOSITORY / folder)}" in names
    for path in (REPOSITORY / "swiftfp8" / "assets").rglob("*"):
        if path.is_file():
            assert str(path.relative_to(REPOSITORY)) in names


def test_readme_names_scripts_that_exist() -> None:
    scripts = {word for command in COMMANDS for word in command.split() if word.endswith(".sh")}
    assert scripts >= {"scripts/quickstart.sh", "scripts/test.sh"}
    assert all((REPOSITORY / script).is_file() for script in scripts)


def test_readme_shows_commands_that_exist() -> None:
    from swiftfp8.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    known |= {group.name for group in app.registered_groups}
    shown = {shlex.split(command)[1] for command in COMMANDS if command.startswith("swiftfp8 ")}
    assert shown and shown <= known


@pytest.mark.parametrize("command", TRAIN)
def test_readme_recipe_composes_with_the_overrides_shown(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = (text for language, text in BLOCKS if language == "yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(recipe)
    for name in yaml.safe_load(recipe)["dataset"] + yaml.safe_load(recipe)["val_dataset"]:
        (tmp_path / name).write_text("{}\n")
    tokens = [t for t in shlex.split(command)[3:] if not t.startswith("--") and "<run>" not in t]
    members = compose_sweep("my.yaml", tokens)
    assert len(members) == (2 if "1e-4,2e-4" in command else 1)
    assert all(member.config.model_type == "qwen2.5" for member in members)
