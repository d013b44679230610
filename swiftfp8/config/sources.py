"""The folders that Hydra searches, and what it finds there.

Search order: the recipe's own folder, packaged groups, packaged recipes. A recipe without a
`defaults` list sits on top of packaged `config`; where it gives a group a plain name
(`precision: fp8_block`), that is a choice of the group's option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from swiftfp8.config.fields import field_docs
from swiftfp8.config.paths import GROUPS, configs_dir, group_options, recipes_dir

RECIPE = "_recipe_"
"""Hydra's name for the recipe at hand, whatever its file is called."""

_ALWAYS_CHOSEN = ("precision", "tuner")  # groups that configs/config.yaml chooses an option of


def repository(recipe: Path | None) -> CachingConfigRepository:
    """What can be loaded, and from where, for `recipe` (None: the packaged root alone)."""
    for source in (FileConfigSource, RecipeSource, PackagedRecipes):
        SourcesRegistry.instance().register(source)
    search = ConfigSearchPathImpl()
    if recipe is not None:
        search.append("recipe", f"recipe://{recipe.resolve()}")
    search.append("swiftfp8", f"file://{configs_dir()}")
    if recipes_dir().is_dir():
        search.append("swiftfp8 recipes", f"packaged://{recipes_dir()}")
    return CachingConfigRepository(ConfigRepository(search))


class RecipeSource(FileConfigSource):
    """One recipe as Hydra's primary config, and its folder as the first place to look.

    The folder's own `config.yaml`, and the recipe under its own name, stay hidden from other
    files' defaults lists: `config` always means the packaged root, and a copied recipe may build
    on the packaged one of the same name.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.recipe = Path(self.path)
        self.path = str(self.recipe.parent)

    @staticmethod
    def scheme() -> str:
        """Name that search paths use for this kind of source."""
        return "recipe"

    def is_config(self, config_path: str) -> bool:
        """Whether this source has `config_path`."""
        if config_path == RECIPE:
            return True
        return config_path not in ("config", self.recipe.stem) and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one YAML file; a recipe without defaults gets them."""
        if config_path == RECIPE:
            result = _read(self.recipe, self.provider)
        else:
            result = super().load_config(config_path)
            result.path = str(Path(self.path) / f"{config_path}.yaml")
        if "/" not in config_path:
            _give_defaults(result.config, self.recipe)
        return result


class PackagedRecipes(FileConfigSource):
    """The packaged recipes, as bases for others."""

    @staticmethod
    def scheme() -> str:
        """Name that search paths use for this kind of source."""
        return "packaged"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one recipe; one without defaults gets them."""
        result = _read(Path(self.path) / f"{config_path}.yaml", self.provider)
        _give_defaults(result.config, None)
        return result


def _read(path: Path, provider: str) -> ConfigResult:
    content = OmegaConf.load(path)
    return ConfigResult(
        config=content, path=str(path), provider=provider, header={"package": "_global_"}
    )


def _give_defaults(content: Any, recipe: Path | None) -> None:
    """Put a flat recipe on top of `config`, with its plain group names as choices."""
    if not isinstance(content, DictConfig) or "defaults" in content:
        return
    entries: list[Any] = ["config"]
    overrides: list[Any] = []  # Hydra wants them after what adds a group
    for group in GROUPS:
        option = content.get(group)
        if isinstance(option, str) and option in group_options(group, recipe):
            if group in _ALWAYS_CHOSEN:
                overrides.append({f"override {group}": option})
            else:
                entries.append({group: option})
            if group not in field_docs():
                del content[group]
    content["defaults"] = [*entries, *overrides, "_self_"]
