"""Which engines serve an export, and the command of each: for `swiftfp8 deploy` and the card."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_json
from swiftfp8.export.locate import require_checkpoint
from swiftfp8.export.merge import ADAPTER_CONFIG
from swiftfp8.export.reload import quantization_section
from swiftfp8.export.targets import ENGINES, refusal
from swiftfp8.export.verify import format_of
from swiftfp8.models.task_model import auto_class_of
from swiftfp8.tasks import read_task_file

_FLAGS = {  # of host and port
    "vllm": ("--host", "--port"),
    "sglang": ("--host", "--port"),
    "lmdeploy": ("--server-name", "--server-port"),
    "tensorrt_llm": ("--host", "--port"),
    "transformers": ("--host", "--port"),
}
PROGRAMS: Mapping[str, Sequence[str]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "lmdeploy": ("lmdeploy", "serve", "api_server"),
    "tensorrt_llm": ("trtllm-serve",),
    "transformers": ("transformers", "serve"),
}
_OF_A_RUN = ("export", "merged")  # what an export is called within its run's directory
# engine -> why its command line takes no adapter.
_NO_ADAPTER: Mapping[str, str] = {
    "tensorrt_llm": "takes adapters by a file of options, not by its command line",
    "transformers": "takes no adapter",
}
# Engines whose servers answer with words alone.
_WORDS_ALONE = ("lmdeploy", "tensorrt_llm", "transformers")


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: a directory of a format; of an adapter, its base and its rank too.

    `static`: its activations have static scales. `speaks` is False of what puts out labels, scores
    or vectors; `lora_alone` of an adapter that replaces whole weights as well. `title` is its name
    where the directory does not tell it.
    """

    directory: Path
    format: str
    base: str | None = None
    rank: int = 0
    static: bool = False
    speaks: bool = True
    lora_alone: bool = True
    title: str | None = None

    @property
    def name(self) -> str:
        """What it is called, of an adapter in the engine too."""
        return self.title or name_of(self.directory)


def name_of(directory: Path) -> str:
    """A directory's own name; of `<run>/export` and `<run>/merged` the run's."""
    place = Path(os.path.abspath(directory))
    return place.parent.name if lies_in_run(directory) else place.name


def lies_in_run(directory: Path) -> bool:
    """Whether it is what a run's export is called, and its parent is a run."""
    place = Path(os.path.abspath(directory))
    return place.name in _OF_A_RUN and (place.parent / "resolved.yaml").is_file()


def look_at(directory: Path) -> Served:
    """What a directory is to an engine.

    Raises:
        SwiftFP8Error: no directory, or no model in it.
    """
    require_checkpoint(directory)
    name, other_task = format_of(directory), read_task_file(directory) is not None
    if name != "adapter":
        static = quantization_section(directory).get("activation_scheme") == "static"
        kind = auto_class_of(read_json(directory / "config.json").get("architectures"))
        speaks = not other_task and kind.__name__ == "AutoModelForCausalLM"
        return Served(directory=directory, format=name, static=static, speaks=speaks)
    config = read_json(directory / ADAPTER_CONFIG)
    return Served(
        directory=directory,
        format=name,
        base=config.get("base_model_name_or_path") or None,
        rank=int(config.get("r", 8)),
        speaks=not other_task,
        lora_alone=not config.get("modules_to_save"),
    )


def engines_that_serve(served: Served) -> list[str]:
    """The engines whose command line serves it."""
    return [engine for engine in ENGINES if why_not(served, engine) is None]


def why_not(served: Served, engine: str) -> str | None:
    """Why an engine's command line does not serve it; None where it does."""
    if reason := refusal(engine, served.format, static=served.static):
        return reason
    if served.format == "adapter":
        if not served.speaks or not served.lora_alone:
            return "serves LoRA on a language model, and this adapter is more than that"
        return _NO_ADAPTER.get(engine)
    if not served.speaks and engine in _WORDS_ALONE:
        return "serves models that put out words, and this one puts out labels, scores or vectors"
    return None


def serve_command(
    served: Served,
    engine: str,
    *,
    host: str | None = None,
    port: int | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The engine's command line for a directory.

    Raises:
        SwiftFP8Error: what the engine can't load, or takes by its command line.
    """
    if reason := why_not(served, engine):
        ways = [f"engine={name}" for name in engines_that_serve(served)]
        if served.format == "adapter":
            ways += [f"merge it: {_merge_command(served)}"]
        raise SwiftFP8Error(
            f"{engine} {reason}",
            where=f"dir={served.directory}",
            fix="; or ".join(ways) or "export it in another format",
        )
    arguments = _BUILD[engine](served)
    for flag, value in zip(_FLAGS[engine], (host, port), strict=True):
        if value is not None:
            arguments += [flag, str(value)]
    return [*PROGRAMS[engine], *arguments, *extra]


def _merge_command(served: Served) -> str:
    words = (f"model={served.base}", f"adapter={served.directory}", "export_dir=merged")
    return shlex.join(["swiftfp8", "merge", *words])


def _vllm(served: Served) -> list[str]:
    if served.base is None:
        pooling = [] if served.speaks else ["--runner", "pooling"]
        return [str(served.directory), *pooling]
    rank = next((size for size in (8, 16, 32, 64, 128, 256) if size >= served.rank), 512)
    lora = ["--enable-lora", "--max-lora-rank", str(rank)]
    return [served.base, *lora, "--lora-modules", f"{served.name}={served.directory}"]


def _sglang(served: Served) -> list[str]:
    model = served.base or str(served.directory)
    arguments = ["--model-path", model]
    if served.base is not None:
        arguments += ["--enable-lora", "--lora-paths", f"{served.name}={served.directory}"]
    if not served.speaks:
        arguments += ["--is-embedding"]
    if served.format == "modelopt":
        arguments += ["--quantization", "modelopt"]
    return arguments


def _lmdeploy(served: Served) -> list[str]:
    if served.base is None:
        return [str(served.directory), "--backend", "pytorch"]
    adapter = f"{served.name}={served.directory}"
    return [served.base, "--backend", "pytorch", "--adapters", adapter]


def _tensorrt_llm(served: Served) -> list[str]:
    return [str(served.directory), "--backend", "pytorch"]


def _transformers(served: Served) -> list[str]:
    return [str(served.directory)]


_BUILD: Mapping[str, Callable[[Served], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "lmdeploy": _lmdeploy,
    "tensorrt_llm": _tensorrt_llm,
    "transformers": _transformers,
}
