"""Every problem of a merged tree at once: unknown keys, wrong types, names that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedValueType,
)
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from swiftfp8.config.fields import FieldDoc, field_docs, schema_groups, unknown_key
from swiftfp8.config.model_names import missing_model
from swiftfp8.config.paths import (
    configs_dir,
    find_chat_template,
    group_options,
    model_types,
    yaml_names,
)
from swiftfp8.config.schema import Config
from swiftfp8.config.tokens import to_token
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import suggest, suggest_path, unknown

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")
FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".gz", ".zst")
_MUST_BE = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text; put it in quotes",
    "list_type": "a list: [a, b]",
    "dict_type": "a mapping: {name: value}",
}
_LIMITS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def resolve(
    tree: Mapping[str, Any], provenance: Mapping[str, str]
) -> tuple[dict[str, Any], list[SwiftFP8Error]]:
    """Fill in `${...}` references. Keys that can't be filled in are reported and left out."""
    problems: list[SwiftFP8Error] = []
    config = _created(dict(tree), provenance, problems)
    while True:
        try:
            filled = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            break
        except OmegaConfBaseException as error:
            key = str(getattr(error, "full_key", None) or "")
            where = _where(key.partition("[")[0], provenance, None)
            problems.append(_unresolved(key, error, where))
            if not _drop(config, key):
                return {}, problems
    assert isinstance(filled, dict)
    return {str(key): value for key, value in filled.items()}, problems


def _created(
    tree: dict[str, Any], provenance: Mapping[str, str], problems: list[SwiftFP8Error]
) -> DictConfig:
    """The tree without the keys that hold a broken `${` or a value that YAML has not."""
    while True:
        try:
            return OmegaConf.create(tree)
        except OmegaConfBaseException as error:
            key = str(getattr(error, "full_key", None) or "")
            problems.append(
                _unresolved(key, error, _where(key.partition("[")[0], provenance, None))
            )
            del tree[key.partition("[")[0].partition(".")[0]]


def validate(
    tree: Mapping[str, Any], provenance: Mapping[str, str], *, where: str | None = None
) -> tuple[Config | None, list[SwiftFP8Error]]:
    """The typed configuration, or every way in which `tree` is none."""
    try:
        return TypeAdapter(Config).validate_python(dict(tree)), []
    except ValidationError as error:
        problems: dict[str, SwiftFP8Error] = {}
        for detail in error.errors():
            key = _key(detail["loc"])
            problems.setdefault(key, _problem(key, detail, _where(key, provenance, where)))
        return None, list(problems.values())


def check_names(tree: Mapping[str, Any], provenance: Mapping[str, str]) -> list[SwiftFP8Error]:
    """What is named and can't be found: model, family, checkpoint, data sets, chat template."""
    return list(_missing_names(tree, provenance))


def _unresolved(key: str, error: Exception, where: str | None) -> SwiftFP8Error:
    if isinstance(error, MissingMandatoryValue):
        return SwiftFP8Error(f"{key} must be given", where=where, fix=f"add {key}=...")
    what = f"{key}: {str(error).splitlines()[0]}"
    if isinstance(error, UnsupportedValueType):
        return SwiftFP8Error(what, where=where, fix="give a number, text, a list or a dict")
    if isinstance(error, GrammarParseError):
        what = f"{key}: ${{ begins a reference to another key, which does not end"
        return SwiftFP8Error(what, where=where, fix="close it: ${key}; or leave ${ out")
    return SwiftFP8Error(what, where=where, fix="check the name between ${ and }")


def _drop(config: DictConfig, key: str) -> bool:
    """Take a dotted key (an item of a list counts as the list) out; False where there is none."""
    *parents, leaf = key.partition("[")[0].split(".")
    node: Any = config
    for parent in parents:
        node = node._get_node(parent) if isinstance(node, DictConfig) else None
    if not isinstance(node, DictConfig) or leaf not in node.keys():  # noqa: SIM118 (resolves)
        return False
    del node[leaf]
    return True


def _missing_names(
    tree: Mapping[str, Any], provenance: Mapping[str, str]
) -> Iterator[SwiftFP8Error]:
    def where(key: str) -> str | None:
        return _where(key, provenance, None)

    family = tree.get("model_type")
    if isinstance(family, str) and family.lower() not in map(str.lower, names := model_types()):
        yield unknown("model_type", family, names, where=where("model_type"))
    model = tree.get("model")
    if isinstance(model, str) and (problem := missing_model(model, where("model"))):
        yield problem
    resumed = tree.get("resume_from_checkpoint")
    if isinstance(resumed, str) and not Path(resumed).expanduser().is_dir():
        yield _missing_checkpoint(resumed, where("resume_from_checkpoint"))
    template = tree.get("template")
    if isinstance(template, str):
        try:
            find_chat_template(template, where=where("template"))
        except SwiftFP8Error as error:
            yield error
    export = tree.get("export")
    fidelity = export.get("fidelity_dataset") if isinstance(export, Mapping) else None
    for key, value in (
        ("dataset", tree.get("dataset")),
        ("val_dataset", tree.get("val_dataset")),
        ("export.fidelity_dataset", fidelity),
    ):
        entries = value.split(",") if isinstance(value, str) else value
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, str) and not _dataset_exists(entry.strip()):
                yield _missing_dataset(entry.strip(), where(key))


def _dataset_exists(entry: str) -> bool:
    name = _without_sample(entry)
    if name in yaml_names(configs_dir() / "dataset") or Path(name).expanduser().exists():
        return True
    looks_like_file = name.startswith((".", "/", "~")) or name.endswith(FILE_SUFFIXES)
    return bool(_HUB_ID.fullmatch(name)) and not looks_like_file


def _missing_dataset(entry: str, where: str | None) -> SwiftFP8Error:
    name = _without_sample(entry)
    path = Path(name).expanduser()
    if "/" in name or path.suffix:
        near = suggest_path(path)
        fix = "paths start from the current folder; a hub id is written owner/name"
        fix = f"did you mean {near}?" if near else fix
        return SwiftFP8Error(f"no such data set file: {name}", where=where, fix=fix)
    names = yaml_names(configs_dir() / "dataset")
    best = suggest(name, names)
    others = f"a registered name ({', '.join(names)}), a file, or a hub id owner/name"
    fix = f"did you mean {best}?" if best else f"give {others}"
    return SwiftFP8Error(f"unknown dataset '{name}'", where=where, fix=fix)


def _missing_checkpoint(path: str, where: str | None) -> SwiftFP8Error:
    near = suggest_path(Path(path).expanduser())
    fix = "give a run directory or one of its checkpoint-N directories"
    return SwiftFP8Error(
        f"the checkpoint to resume from does not exist: {path}",
        where=where,
        fix=f"did you mean {near}?" if near else fix,
    )


def _without_sample(entry: str) -> str:
    """A data set's name without the `#N` that samples N rows."""
    return re.sub(r"#\d+$", "", entry)


def _key(loc: tuple[int | str, ...]) -> str:
    """The dotted key of an error's place; an index into a list is left out."""
    return ".".join(part for part in loc if isinstance(part, str) and part != "[key]")


def _where(key: str, provenance: Mapping[str, str], otherwise: str | None) -> str | None:
    if key in provenance:
        return provenance[key]
    inside = (origin for name, origin in provenance.items() if name.startswith(f"{key}."))
    return next(inside, otherwise)


def _problem(key: str, detail: ErrorDetails, where: str | None) -> SwiftFP8Error:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(key, where=where)
    if key in schema_groups():
        return _no_group(key, value, where)
    doc = field_docs().get(key)
    help_text = _way_out(key, doc) if doc else None
    if value is None:
        return SwiftFP8Error(f"{key} can't be null", where=where, fix=help_text)
    if kind == "literal_error" and doc:
        return unknown(key, str(value), doc.choices, where=where)
    limit = next(((name, context[name]) for name in _LIMITS if name in context), None)
    if kind in _MUST_BE:
        what = f"{key} must be {_MUST_BE[kind]}, not {_quoted(value)}"
    elif limit:
        what = f"{key} must be {_LIMITS[limit[0]]} {limit[1]:g}, not {value}"
    elif isinstance(value, bool):
        what = f"{key} must be a number, not {_quoted(value)}"
    else:
        said = detail["msg"].removeprefix("Value error, ")
        what = f"{key}: {said[:1].lower()}{said[1:]}, not {_quoted(value)}"
    return SwiftFP8Error(what, where=where, fix=help_text)


def _way_out(key: str, doc: FieldDoc) -> str:
    """What the key takes, by example, and what it means."""
    article = "" if doc.kind in ("flag", "text", "choice") else "a "
    usual = f", such as {to_token(key, doc.default)}" if doc.default not in (None, (), {}) else ""
    return f"give {article}{doc.type_text}{usual}. {doc.help}"


def _no_group(key: str, value: Any, where: str | None) -> SwiftFP8Error:
    options = group_options(key)
    if isinstance(value, str) and options:
        return unknown(f"{key} option", value, options, where=where)
    example = next(name for name in field_docs() if name.startswith(f"{key}."))
    what = f"{key} is a group of keys, not {_quoted(value)}"
    return SwiftFP8Error(what, where=where, fix=f"set its keys one by one, such as {example}")


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return str(value).lower() if isinstance(value, bool) else str(value)
