"""YAML files to one tree of values, with the file and line that each value came from.

Hydra decides which files take part and in which order (defaults lists, group choices, packages);
`create_defaults_list` is the part of its compose API that does this, called directly because the
rest (its own settings tree, plugins, a global state) costs half a second and says nothing about
where a value came from. Merging is then a walk over the files in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swiftfp8.config.paths import GROUPS, configs_dir, group_options, recipes_dir, yaml_names
from swiftfp8.config.sources import RECIPE, repository
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import suggest


@dataclass(frozen=True, kw_only=True)
class Layered:
    """Merged values (interpolations unresolved) and where each dotted key was set."""

    tree: dict[str, Any]
    provenance: dict[str, str]

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a dotted key; a mapping is merged into what is there."""
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self.set(f"{key}.{name}", item, origin)
            return
        *parents, leaf = key.split(".")
        node = self.tree
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        if isinstance(value, Mapping) and isinstance(node.get(leaf), dict):
            return  # an empty mapping adds nothing
        for stale in [known for known in self.provenance if known.startswith(f"{key}.")]:
            del self.provenance[stale]
        node[leaf] = dict(value) if isinstance(value, Mapping) else value
        self.provenance[key] = origin


def layer_files(recipe: Path | None, choices: Mapping[str, str]) -> Layered:
    """Merge the recipe's files, then the options that the command line chose differently."""
    if recipe is not None:
        _check_readable(recipe)
    repo = repository(recipe)
    root = "config" if recipe is None else RECIPE
    try:
        before = _defaults(repo, root, [])
        standing = {item.override_key: item.config_path for item in before if item.override_key}
        tokens = [
            f"{'' if group in standing else '+'}{group}={option}"
            for group, option in choices.items()
        ]
        chosen = _defaults(repo, root, tokens) if tokens else before
    except yaml.YAMLError as error:
        raise yaml_problem(error, recipe) from error
    except (HydraException, OmegaConfBaseException, OSError, RecursionError) as error:
        raise _defaults_problem(error, recipe) from error
    changed = {
        group for group, option in choices.items() if standing.get(group) != f"{group}/{option}"
    }
    late = [item for item in chosen if item.override_key in changed]
    early = [item for item in chosen if item.override_key not in changed]
    layered = Layered(tree={}, provenance={})
    for item in [*early, *late]:
        _merge(layered, repo, item, "command line, " if item in late else "")
    return layered


def yaml_problem(error: yaml.YAMLError, path: Path | None) -> SwiftFP8Error:
    """A YAML syntax error as file, line and what the parser says."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    said = getattr(error, "problem", None) or "it can't be read"
    return SwiftFP8Error(
        f"not valid YAML: {said}",
        where=f"{shown_path(path)}{line}",
        fix="check indentation, colons and quotes on this line",
    )


def _defaults(repo: CachingConfigRepository, root: str, tokens: list[str]) -> list[ResultDefault]:
    before = version.getbase()
    version.setbase("1.3")
    try:
        found = create_defaults_list(
            repo=repo,
            config_name=root,
            overrides_list=OverridesParser.create().parse_overrides(tokens),
            prepend_hydra=False,
            skip_missing=False,
        )
    finally:
        version.VersionBase.instance().version_base = before
    return list(found.defaults)


def _defaults_problem(error: Exception, recipe: Path | None) -> SwiftFP8Error:
    """What Hydra says of a defaults list, in our words where the case is a common one."""
    said = " ".join(str(error).split()).replace(RECIPE, recipe.name if recipe else "config.yaml")
    fix = "see 'Recipes that build on others' in docs/configuration.md"
    if missing := re.search(r"Could not (?:load|find) '([^']+)'", said):
        name = missing[1]
        folder, _, leaf = name.rpartition("/")
        known = group_options(folder, recipe) if folder else yaml_names(recipes_dir())
        best = suggest(leaf, [*known, "config"])
        what = f"the defaults list names '{name}', and there is no such file"
        fix = f"did you mean {best}?" if best else f"choose one of: {', '.join(known)}"
    elif lost := re.search(r"Could not override '([^']+)'", said):
        what = f"the defaults list overrides '{lost[1]}', which no other entry chooses"
        best = suggest(lost[1], GROUPS)
        fix = f"did you mean {best}?" if best and best != lost[1] else "leave out 'override'"
    elif isinstance(error, RecursionError):
        what = "recipes build on each other in a circle"
        fix = "take one of them out of the other's defaults list"
    else:
        what = said.partition(" Config search path:")[0]
    return SwiftFP8Error(what, where=shown_path(recipe), fix=fix)


def _merge(layered: Layered, repo: CachingConfigRepository, item: ResultDefault, by: str) -> None:
    assert item.config_path is not None
    result = repo.load_config(item.config_path)
    assert result is not None
    path = Path(result.path.removeprefix("file://"))
    if path.suffix not in (".yaml", ".yml"):
        path = path / f"{item.config_path}.yaml"
    lines = _key_lines(path)
    package = f"{item.package}." if item.package else ""
    content = OmegaConf.to_container(result.config, resolve=False)
    assert isinstance(content, dict)
    for key, value in _leaves(content, ""):
        line = lines.get(key)
        origin = f"{shown_path(path)}:{line}" if line else shown_path(path)
        chosen = f" ({by}{item.override_key}={path.stem})" if item.override_key else ""
        layered.set(f"{package}{key}", value, origin + chosen)


def _leaves(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _key_lines(path: Path) -> dict[str, int]:
    lines: dict[str, int] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
                walk(value, f"{prefix}{key.value}.")

    walk(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), "")
    return lines


def _check_readable(recipe: Path) -> None:
    """Fail with the file and line before Hydra gets to see the file."""
    try:
        content = OmegaConf.load(recipe)
    except yaml.YAMLError as error:
        raise yaml_problem(error, recipe) from error
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8 text"
        raise SwiftFP8Error(
            f"not UTF-8 text: {error}", where=shown_path(recipe), fix=fix
        ) from error
    except OSError as error:
        raise SwiftFP8Error(f"can't be read: {error}", where=shown_path(recipe)) from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise _content_problem(error, recipe) from error
    if not isinstance(content, DictConfig):
        raise SwiftFP8Error(
            "a recipe holds `key: value` lines, and this file does not",
            where=shown_path(recipe),
            fix="see a packaged one: swiftfp8 config copy quickstart",
        )


def _content_problem(error: Exception, recipe: Path) -> SwiftFP8Error:
    """YAML without a syntax error that is no tree of values."""
    if isinstance(error, RecursionError):
        what, fix = "a value holds itself", "write the value out instead of the alias (*name)"
    else:
        key = getattr(error, "full_key", None)
        said = str(error).splitlines()[0]
        what = f"{key}: {said}" if key else said
        fix = "a key is a plain name; in a value close each ${ with a }, or write \\${ for the text"
    return SwiftFP8Error(what, where=shown_path(recipe), fix=fix)


def shown_path(path: Path | None) -> str:
    """A path as the user knows it: from the current folder, or `configs/...` for packaged ones."""
    if path is None:
        return "configs/config.yaml"
    for base, name in ((configs_dir(), "configs"), (recipes_dir(), "recipes")):
        if path.is_relative_to(base):
            return str(name / path.relative_to(base))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
