"""A recipe and overrides to one validated `Config`, with the origin of every value.

Order, the later winning: defaults of the schema, packaged `config`, the recipe, group options
chosen on the command line, keys given on the command line. Relative paths, in a recipe and on the
command line alike, start from the current folder.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from swiftfp8.config.fields import field_docs
from swiftfp8.config.layers import Layered, layer_files, shown_path, yaml_problem
from swiftfp8.config.paths import GROUPS, group_options, recipes_dir, yaml_names
from swiftfp8.config.schema import Config, OptimConfig
from swiftfp8.config.tokens import Override, expand_sweep, parse_tokens, to_token
from swiftfp8.config.validate import FILE_SUFFIXES, check_names, resolve, validate
from swiftfp8.errors import SwiftFP8Error, raise_all
from swiftfp8.registry import suggest_path, unknown
from swiftfp8.tasks import unread_rlhf

SCHEMA_DEFAULT = "schema default"


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A configuration, and how it came about.

    `overrides` are tokens that give this configuration on top of the recipe. `provenance` says
    for each dotted key where its value was set; `notes` are remarks that the user should read.
    """

    config: Config
    overrides: tuple[str, ...]
    provenance: dict[str, str]
    recipe_path: Path | None
    notes: tuple[str, ...] = ()


def compose_config(
    config: str | None, overrides: Sequence[str] = (), *, check: bool = True
) -> Composed:
    """Compose one configuration; `check=False` does not ask whether named data sets exist."""
    members = compose_sweep(config, overrides, check=check)
    if len(members) > 1:
        raise SwiftFP8Error(
            f"a comma list is a sweep, here of {len(members)} runs, and this command takes one",
            where="command line",
            fix="write a list as key=[a,b], and a text with a comma as key='\"a,b\"'",
        )
    return members[0]


def compose_sweep(
    config: str | None, overrides: Sequence[str] = (), *, check: bool = True
) -> list[Composed]:
    """Compose every member of a sweep (one member without comma lists); report all problems."""
    recipe = find_recipe(config) if config is not None else None
    parsed, problems = parse_tokens(overrides)
    members: list[Composed] = []
    combinations = expand_sweep(parsed)
    for combination in combinations:
        try:
            members.append(_compose(recipe, combination, check=check))
        except SwiftFP8Error as error:
            problems += [p for p in getattr(error, "problems", (error,)) if _new(p, problems)]
    raise_all(problems)
    if len(members) == 1:
        return members
    hints = tuple(
        f"{first.key} makes a sweep; for all of them in one run: {first.key}=[...]"
        for first, *others in parsed
        if others and getattr(field_docs().get(first.key), "kind", None) == "names"
    )
    return _apart([replace(member, notes=(*member.notes, *hints)) for member in members])


def compose_arguments(config: str | None, arguments: Mapping[str, Any]) -> Composed:
    """Compose from Python values in place of tokens; groups may be dicts or option names."""
    recipe = find_recipe(config) if config is not None else None
    overrides = [
        override
        for key, value in arguments.items()
        for override in _from_python(key, _plain(value))
    ]
    return _compose(recipe, overrides, check=True)


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A finished configuration (a run's, say) with some keys set anew."""
    parsed, problems = parse_tokens(overrides)
    layered = Layered(tree=_plain(dataclasses.asdict(config)), provenance={})
    for alternatives in parsed:
        if len(alternatives) > 1:
            fix = "write a list as key=[a,b]"
            problems.append(
                SwiftFP8Error("a sweep is for training", where=alternatives[0].origin, fix=fix)
            )
    choices, values, unknown_options = _split_choices([first for first, *_ in parsed], None)
    problems += unknown_options
    for override in [*_keys_of_options(choices), *values]:
        layered.set(override.key, override.value, override.origin)
    result, found = validate(layered.tree, layered.provenance)
    raise_all([*problems, *found])
    assert result is not None
    return result


def require_inputs(composed: Composed) -> None:
    """Fail where a run has no model or no rows to learn from, before anything is loaded.

    A loss for preferences beside no `task` is refused too: the usual one would pass for no loss.
    """
    config, problems = composed.config, []
    where = shown_path(composed.recipe_path) if composed.recipe_path else "command line"
    if config.model is None and config.model_type is None:
        fix = "add model=<directory or hub id>, or model_type=<family>; or start: config=quickstart"
        problems.append(SwiftFP8Error("no model to train", where=where, fix=fix))
    if not config.dataset:
        fix = "add dataset=<file, hub id or registered name>"
        problems.append(SwiftFP8Error("no dataset to train on", where=where, fix=fix))
    named, task = (composed.provenance[key] for key in ("rlhf.loss_type", "task"))
    if task == SCHEMA_DEFAULT != named:
        problem = unread_rlhf(config.task, "loss_type", config.rlhf.loss_type)
        problem.where = named
        problems.append(problem)
    raise_all(problems)


@contextmanager
def sources_named(composed: Composed) -> Iterator[None]:
    """Name the file and line, or the token, that set the key which a problem found inside concerns.

    For what is found once a configuration is composed: against the model, rows and hardware.
    """
    try:
        yield
    except SwiftFP8Error as error:
        for problem in getattr(error, "problems", (error,)):
            problem.where = _with_source(problem.where, composed.provenance)
        raise


def config_from_mapping(mapping: Mapping[str, Any], *, where: str | None = None) -> Config:
    """Validate a finished tree of values, such as a run's `resolved.yaml`."""
    result, problems = validate(dict(mapping), {}, where=where)
    raise_all(problems)
    assert result is not None
    return result


def read_resolved(path: Path) -> Config:
    """The configuration of a run directory, or of its `resolved.yaml`."""
    file = path / "resolved.yaml" if path.is_dir() else path
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "give a directory that `swiftfp8 train` wrote"
        raise SwiftFP8Error("no resolved.yaml to read", where=str(path), fix=fix) from error
    except yaml.YAMLError as error:
        raise yaml_problem(error, file) from error
    if not isinstance(content, dict):
        raise SwiftFP8Error("resolved.yaml holds no keys", where=str(file))
    return config_from_mapping(content, where=str(file))


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that composes to itself."""
    tree = _plain(dataclasses.asdict(config))
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def flatten(config: Config) -> dict[str, Any]:
    """Values by dotted key, in the schema's order."""
    tree = dataclasses.asdict(config)
    flat: dict[str, Any] = {}
    for key in field_docs():
        node: Any = tree
        for part in key.split("."):
            node = node[part]
        flat[key] = _plain(node)
    return flat


def find_recipe(config: str) -> Path:
    """The file that `config=` names: a path, a file of the current folder, or a packaged recipe."""
    path = Path(config).expanduser()
    if path.is_dir() and (path / "resolved.yaml").is_file():
        return path.resolve() / "resolved.yaml"
    if path.is_dir() and not Path(f"{path}.yaml").is_file():
        fix = "give a YAML file, a packaged recipe (swiftfp8 config list) or a run directory"
        raise SwiftFP8Error(
            f"a directory without a resolved.yaml: {config}", where=f"config={config}", fix=fix
        )
    for candidate in (path, Path(f"{path}.yaml"), recipes_dir() / f"{config}.yaml"):
        if candidate.is_file() and candidate.suffix in (".yaml", ".yml"):
            return candidate.resolve()
    if path.is_file():
        fix = "a recipe is a .yaml file"
        if path.suffix in FILE_SUFFIXES:
            fix = f"for rows to train on write dataset={config}"
        raise SwiftFP8Error(f"no recipe, another file: {config}", where=f"config={config}", fix=fix)
    if path.suffix in (".yaml", ".yml") or path.is_absolute():
        near = suggest_path(path)
        fix = "paths start from the current folder; packaged recipes: swiftfp8 config list"
        fix = f"did you mean {near}?" if near else fix
        raise SwiftFP8Error(f"no such recipe file: {config}", where=f"config={config}", fix=fix)
    names = {*yaml_names(recipes_dir()), *yaml_names(Path.cwd())}
    raise unknown("recipe", config, names, where=f"config={config}")


def _compose(recipe: Path | None, overrides: Sequence[Override], *, check: bool) -> Composed:
    choices, values, problems = _split_choices(overrides, recipe)
    layered = layer_files(recipe, choices)
    for override in values:
        layered.set(override.key, override.value, override.origin)
    tree, unresolved = resolve(layered.tree, layered.provenance)
    config, found = validate(tree, layered.provenance)
    problems += [*unresolved, *found]
    if check:
        problems += check_names(tree, layered.provenance)
    raise_all(problems)
    assert config is not None
    provenance = {key: layered.provenance.get(key, SCHEMA_DEFAULT) for key in field_docs()}
    for key, origin in layered.provenance.items():
        provenance.setdefault(key, origin)
    return Composed(
        config=config,
        overrides=tuple(override.text for override in overrides),
        provenance=provenance,
        recipe_path=recipe,
        notes=_notes(config, provenance),
    )


def _from_python(key: str, value: Any) -> Iterator[Override]:
    """A Python value as overrides, one for each leaf, with the tokens that mean the same."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _from_python(f"{key}.{name}", item)
    else:
        origin = f"Python argument {key}={value!r}"
        yield Override(key=key, value=value, text=to_token(key, value), origin=origin)


def _split_choices(
    overrides: Sequence[Override], recipe: Path | None
) -> tuple[dict[str, str], list[Override], list[SwiftFP8Error]]:
    """Choices of group options (the last of each group counts), plain keys, unknown options."""
    choices: dict[str, str] = {}
    values: list[Override] = []
    problems: list[SwiftFP8Error] = []
    for override in overrides:
        key, value = override.key, override.value
        own = recipe is not None and bool(yaml_names(recipe.parent / key))
        if not isinstance(value, str) or not (key in GROUPS or (own and key not in field_docs())):
            values.append(override)
        elif value in (options := group_options(key, recipe)):
            choices[key] = value
        else:
            problems.append(unknown(f"{key} option", value, options, where=override.origin))
    return choices, values, problems


def _keys_of_options(choices: Mapping[str, str]) -> Iterator[Override]:
    """The keys that chosen group options set, as overrides."""
    if not choices:
        return
    before, chosen = layer_files(None, {}).provenance, layer_files(None, choices)
    for key, origin in chosen.provenance.items():
        if before.get(key) != origin:
            value: Any = chosen.tree
            for part in key.split("."):
                value = value[part]
            yield Override(key=key, value=value, text=to_token(key, value), origin=origin)


def _notes(config: Config, provenance: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    if config.precision.interval is not None:
        notes.append(
            f"precision.interval={config.precision.interval} ({provenance['precision.interval']}) "
            "has no effect: Transformer Engine no longer has this option"
        )
    optim, origin = config.optim, provenance["optim.min_lr_ratio"]
    chosen = optim.min_lr_ratio != OptimConfig.min_lr_ratio  # resolved.yaml names defaults too
    if chosen and optim.lr_scheduler_type != "cosine_with_min_lr":
        notes.append(
            f"optim.min_lr_ratio={optim.min_lr_ratio} ({origin}) has no effect: only "
            f"lr_scheduler_type=cosine_with_min_lr has a lowest rate, not {optim.lr_scheduler_type}"
        )
    bits, form = config.export_quantization_bit, config.export.format
    if form != "auto" and bits is not None and (bits == 16) != (form == "bf16"):
        notes.append(
            f"export_quantization_bit={bits} ({provenance['export_quantization_bit']}) does not "
            f"say the format: export.format={form} ({provenance['export.format']}) counts"
        )
    return tuple(notes)


def _with_source(where: str | None, provenance: Mapping[str, str]) -> str | None:
    """`where`, of keys with or without their values, as the places that set these keys."""
    places = []
    for part in (where or "").split(", "):
        key = re.split("[= ]", part, maxsplit=1)[0]
        origin = provenance.get(key, SCHEMA_DEFAULT)
        if origin == SCHEMA_DEFAULT:
            places.append(part)
        else:
            places.append(origin if key in origin else f"{origin} ({part})")
    return ", ".join(places) or None


def _apart(members: list[Composed]) -> list[Composed]:
    """Number the run names and export directories that members of a sweep would share."""
    for key in ("run_name", "export_dir"):
        given = [value for member in members if (value := getattr(member.config, key))]
        if len(set(given)) < len(given):
            members = [_numbered(member, key, place) for place, member in enumerate(members, 1)]
    return members


def _numbered(member: Composed, key: str, place: int) -> Composed:
    value = getattr(member.config, key)
    if not value:
        return member
    changed: dict[str, Any] = {key: f"{value}-{place}"}
    rest = [text for text in member.overrides if not text.startswith(f"{key}=")]
    return replace(
        member,
        config=replace(member.config, **changed),
        overrides=(*rest, f"{key}={value}-{place}"),
    )


def _new(problem: SwiftFP8Error, problems: Sequence[SwiftFP8Error]) -> bool:
    return str(problem) not in {str(known) for known in problems}


def _plain(value: Any) -> Any:
    """Dicts, lists and scalars only, as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
