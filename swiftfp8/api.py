"""The Python face of the pipeline: the same configuration, plan, training and export.

from swiftfp8 import SftArguments, Trainer

arguments = SftArguments(model_type="qwen3", dataset="rows.jsonl", dtype="fp8", lora_rank=64)
trainer = Trainer(arguments)
trainer.train()
trainer.export_model()
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftfp8.config.compose import Composed, compose_arguments, require_inputs
from swiftfp8.config.fields import unknown_key
from swiftfp8.config.schema import Config
from swiftfp8.config.tokens import to_token
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.requests import ExportRequest

if TYPE_CHECKING:
    from swiftfp8.export.report import ExportReport
    from swiftfp8.plan import Plan
    from swiftfp8.train.trainer import TrainResult


class SftArguments:
    """The options of a run: read, and set, as attributes; checked whenever one is given.

    Args:
        config: a recipe to start from: a packaged name or a path.
        arguments: any key of the configuration (`swiftfp8 config explain KEY`); groups as dicts
            (`precision={"strict": True}`) or as the name of an option (`precision="fp8_block"`).

    Raises:
        SwiftFP8Error: unknown or ill-typed arguments, all of them at once.
    """

    def __init__(self, config: str | Path | None = None, **arguments: Any) -> None:
        if config is not None and not isinstance(config, str | Path):
            raise SwiftFP8Error(
                f"a recipe is named by text or a path, not by {type(config).__name__}",
                where=f"SftArguments({config!r})",
                fix='name it first, and options by their keys: SftArguments("quickstart", '
                "lora_rank=16)",
            )
        config = None if config is None else str(config)
        self._give(config, arguments)

    @property
    def config(self) -> Config:
        """Every option, typed, with its default where it was not given."""
        return self.composed.config

    @property
    def composed(self) -> Composed:
        """The configuration, with the origin of every value."""
        composed: Composed = self.__dict__["composed"]
        return composed

    def __getattr__(self, key: str) -> Any:
        """The value of an option, such as `lora_rank`, or a group of them, such as `train`."""
        if not key.startswith("_") and hasattr(self.config, key):
            return getattr(self.config, key)
        raise AttributeError(unknown_key(key, where=None).what)

    def __setattr__(self, key: str, value: Any) -> None:
        """Give an argument anew, as if it had been given at first."""
        recipe, arguments = self.__dict__["given"]
        self._give(recipe, {**arguments, key: value})

    def _give(self, recipe: str | None, arguments: dict[str, Any]) -> None:
        composed = compose_arguments(recipe, arguments)  # raises before anything is changed
        self.__dict__.update(composed=composed, given=(recipe, arguments))

    def __repr__(self) -> str:
        recipe, arguments = self.__dict__["given"]
        named = {"config": recipe} if recipe is not None else {}
        shown = (f"{key}={value!r}" for key, value in {**named, **arguments}.items())
        return f"SftArguments({', '.join(shown)})"


class Trainer:
    """Plans, trains and exports what the arguments describe."""

    def __init__(self, arguments: SftArguments) -> None:
        if not isinstance(arguments, SftArguments):
            raise SwiftFP8Error(
                f"Trainer takes SftArguments, not {type(arguments).__name__}",
                where="Trainer",
                fix="Trainer(SftArguments(model_type=..., dataset=...))",
            )
        require_inputs(arguments.composed)
        self.arguments = arguments
        self.run_dir: Path | None = None
        self._seen: Composed | None = None  # what the user has seen this machine's plan of

    def plan(self, hardware: str | None = None) -> Plan:
        """Print and return what each layer gets here, or on `hardware` (such as "h200")."""
        from swiftfp8 import pipeline

        composed = self.arguments.composed
        made = pipeline.plan(composed, hardware)
        self._seen = composed if hardware is None else self._seen
        return made

    def train(self) -> TrainResult:
        """Train, and leave the export to `export_model`."""
        from swiftfp8 import pipeline
        from swiftfp8.export.request import check_export_after_training, check_export_of_model
        from swiftfp8.models.source import resolve_source

        config = self.arguments.config
        check_export_after_training(config)
        check_export_of_model(config, resolve_source(config).path)
        config = replace(config, export_dir=None, export_quantization_bit=None)
        composed = self.arguments.composed
        result = pipeline.train(
            replace(composed, config=config), shows_plan=composed is not self._seen
        )
        self.run_dir = result.run_dir
        return result

    def export_model(self, run_dir: str | Path | None = None) -> ExportReport:
        """Export what was trained (or `run_dir`) as the arguments say, and verify it."""
        from swiftfp8 import pipeline

        run = run_dir or self.run_dir
        if run is None:
            fix = "call train() first, or give run_dir"
            raise SwiftFP8Error("nothing to export yet", where="export_model", fix=fix)
        config = self.arguments.config
        values = {
            "export_dir": config.export_dir,
            "export_quantization_bit": config.export_quantization_bit,
            "export.format": config.export.format,
        }
        overrides = tuple(to_token(key, value) for key, value in values.items())
        return pipeline.export(ExportRequest(run=str(run), overrides=overrides))
