"""What the command line asks of the export and inference stages, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """A run (its `checkpoint`), or a model with an optional adapter."""

    run: str | None = None
    model: str | None = None
    adapter: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExportRequest(SourceRequest):
    """Export or merge a run (its `checkpoint`), or a model with an optional adapter."""

    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """Check a checkpoint directory, whoever wrote it; with `reload`, by running it as well."""

    dir: str
    reload: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class DeployRequest:
    """Serve an export in an engine; `python` names an environment that has it."""

    dir: str
    engine: str = "vllm"
    python: str | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class InferRequest(SourceRequest):
    """Chat with a run, or with a model and an optional adapter.

    Without `prompt` the chat is interactive. `temperature` 0 takes the likeliest token.
    `enable_thinking` goes to the chat template, None leaves its default.
    """

    hub: Literal["hf", "modelscope"] = "hf"
    prompt: str | None = None
    system: str | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    enable_thinking: bool | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalRequest(SourceRequest):
    """Ask a run, or a model with an optional adapter, held-out questions.

    `dataset` names rows in place of the run's own evaluation rows; `limit` of them are asked (0:
    all), `batch_size` at a time. The result is written to `out` as JSON.
    """

    hub: Literal["hf", "modelscope"] = "hf"
    dataset: str | None = None
    limit: int = 200
    batch_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    out: str | None = None
    trust_remote_code: bool = False
