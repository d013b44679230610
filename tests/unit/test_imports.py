"""Who may import what: the rules of one-way data flow, read from the source."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import swiftfp8

PACKAGE = Path(swiftfp8.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
STAGE_ORDER = ("config", "plan", "models", "data", "inject", "train", "export")
TYPES_ONLY = {"swiftfp8.models.meta"}


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Names of the modules that a file imports, anywhere or at module level only."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def users_of(library: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] == library for name in imported(path))
    }


def test_only_config_knows_hydra() -> None:
    users = users_of("hydra") | users_of("omegaconf")
    assert users and all(name.startswith("config/") for name in users)


def test_only_te_backend_and_probe_import_transformer_engine() -> None:
    allowed = {"precision/te.py", "hardware.py"}
    assert users_of("transformer_engine") | users_of("transformer_engine_torch") <= allowed


def test_nothing_reaches_back_along_the_pipeline() -> None:
    later = {stage: STAGE_ORDER[i + 1 :] for i, stage in enumerate(STAGE_ORDER)}
    for path in FILES:
        stage = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        names = {
            name
            for name in imported(path)
            if name.startswith("swiftfp8.") and not any(name.startswith(t) for t in TYPES_ONLY)
        }
        reached = {name.split(".")[1] for name in names}
        assert not reached & set(later.get(stage, ())), f"{path} imports a later stage"


@pytest.mark.parametrize(
    "module",
    [
        info.name
        for info in pkgutil.walk_packages(swiftfp8.__path__, "swiftfp8.")
        if not info.name.endswith("__main__")
    ],
)
def test_every_module_imports_without_transformer_engine(module: str) -> None:
    importlib.import_module(module)


def test_importing_a_backend_says_nothing() -> None:
    """torch warns where an operator for Triton is made without it."""
    done = subprocess.run(
        [sys.executable, "-c", "import swiftfp8.precision.torch_native"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by it, and would refuse to collect the second."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
