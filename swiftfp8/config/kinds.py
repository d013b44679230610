"""What the schema's values can be, and how they may be written."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    coerce_numbers_to_str=True,
    validate_default=True,
    allow_inf_nan=False,
)

FREE_TEXT = "free text"
"""Marks a field whose command-line value is taken as typed: a comma in it is no sweep."""


def _as_list(value: Any) -> Any:
    """Take a single value, or a comma-separated string, for a list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _frozen(value: list[str]) -> tuple[str, ...]:
    return tuple(value)


def _unchanging(value: list[float]) -> tuple[float, ...]:
    return tuple(value)


def _zero_or_some(value: float) -> float:
    """Keep out what float32's sums of a loss can't hold."""
    if 0 < value < 1e-3:
        raise ValueError("must be 0, or from 0.001 to 1000")
    return value


def _in_32_bits(value: int) -> int:
    if value >= 1 << 32:
        raise ValueError("must be below 2**32, which is what NumPy takes")
    return value


def _no_bool(value: Any) -> Any:
    """Keep `true` from passing for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _on_off(value: Any) -> Any:
    """YAML reads `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _checkpointing(value: Any) -> Any:
    """Flags, as this key was once: true is `full`, false `none`."""
    flags = {"true": "full", "false": "none"}
    return flags.get(str(value).lower(), value) if isinstance(value, bool | str) else value


def _expand_user(value: str | None) -> str | None:
    return os.path.expanduser(value) if value else value


def _expand_users(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(name) for name in value)


def _as_sizes(value: Any) -> Any:
    """Take a single number, or a comma-separated string, for a list."""
    return [value] if isinstance(value, int) else _as_list(value)


def some_steps(value: int) -> int:
    """Keep 0 from passing for no limit."""
    if value == 0:
        raise ValueError("must be at least 1, or -1 to go by epochs")
    return value


def _ascending(value: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(value)))


Names = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_frozen)]
Sources = Annotated[Names, AfterValidator(_expand_users)]
PathText = Annotated[str, AfterValidator(_expand_user)]
Checkpointing = Annotated[
    Literal["auto", "none", "selective", "full"], BeforeValidator(_checkpointing)
]
OnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Real = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[Whole, Field(ge=1)]
Sizes = Annotated[list[Positive], BeforeValidator(_as_sizes), AfterValidator(_ascending)]
NonNegative = Annotated[Whole, Field(ge=0)]
Share = Annotated[Real, Field(gt=0.0)]
Shares = Annotated[list[Share], BeforeValidator(_as_list), AfterValidator(_unchanging)]
Fraction = Annotated[Real, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[Real, Field(ge=0.0, lt=1.0)]
Seed = Annotated[NonNegative, AfterValidator(_in_32_bits)]
LossWeight = Annotated[Real, Field(ge=0.0, le=1000.0), AfterValidator(_zero_or_some)]
NonNegativeFloat = Annotated[Real, Field(ge=0.0)]


def _off(value: Any) -> Any:
    """Take YAML's `off`, which is read as false, for the word."""
    return "off" if value is False else value


def null_for_auto(value: Any) -> Any:
    """Take the word `auto` for what is left to the plan."""
    return None if isinstance(value, str) and value.lower() == "auto" else value


def whole_schedule_name(value: Any) -> Any:
    """A schedule's short name."""
    return "warmup_stable_decay" if value == "wsd" else value


Judging = Annotated[Literal["warn", "fail", "off"], BeforeValidator(_off)]
Smoke = Annotated[Literal["auto", "require", "off"], BeforeValidator(_off)]
