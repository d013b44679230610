"""What an export was made of and how it was checked: printed and saved as JSON (`card.py` has the
model card).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiftfp8.export.calibrate import Calibration
from swiftfp8.export.fidelity import Fidelity
from swiftfp8.export.gates import FIGURES
from swiftfp8.export.judge_stage import DLOGP, SERVED, Judgement
from swiftfp8.export.layout import LayerError
from swiftfp8.export.run_facts import RunFacts
from swiftfp8.export.tp import TpVerdict, tp_text
from swiftfp8.export.verify import ReadBack, ReloadCheck, reload_text
from swiftfp8.tasks import Trained

_WORST_SHOWN = 5
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """One export. `kept` maps each linear that stayed in BF16 to its reason; `layers` are what
    quantization cost, worst first. Where transformers can't read the format, `reload` is None and
    `read_back` says what was checked in its place; with `export.verify` off both are None.
    `stages` are seconds; `reused` are files that an interrupted export had finished;
    `kv_scales` are those of an FP8 cache by tensor name. `trained` is None where nothing says what
    the model was trained for; `model_class` is the transformers class that loads it.
    """

    export_dir: Path
    format: str
    format_reason: str
    base: str
    adapter: str | None
    created: str
    versions: dict[str, str]
    source_bytes: int
    export_bytes: int
    shards: int
    seconds: float
    merged: int
    quantized: int
    kept: dict[str, str]
    layers: tuple[LayerError, ...]
    reload: ReloadCheck | None
    read_back: ReadBack | None
    warnings: tuple[str, ...]
    calibration: Calibration | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    reused: int = 0
    tensor_parallel: tuple[TpVerdict, ...] = ()
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    judgement: Judgement = field(default_factory=Judgement)
    run: RunFacts | None = None
    trained: Trained | None = None
    model_class: str = "AutoModelForCausalLM"

    def to_json(self) -> str:
        """All of it as JSON; paths as text, an infinite SQNR as null."""
        values = asdict(self) | {"export_dir": self.export_dir.name}
        values |= values.pop("judgement")
        return json.dumps(_finite(values), indent=2) + "\n"

    def __rich__(self) -> RenderableType:
        """A table of facts, and one of the layers that lost most."""
        facts = Table(
            title=Text(f"export: {self.export_dir}"), show_header=False, title_justify="left"
        )
        for key, value in self.facts():
            facts.add_row(key, Text(value))
        if not self.layers:
            return facts
        worst = Table(title="layers that lost most", title_justify="left")
        for heading in ("layer", "shape", "relative error", "SQNR dB"):
            worst.add_column(heading)
        for layer in self.layers[:_WORST_SHOWN]:
            shape = " x ".join(map(str, layer.shape))
            cells = (f"{layer.relative_error:.2%}", f"{layer.sqnr_db:.1f}")
            worst.add_row(layer.name, shape, *cells)
        return Group(facts, worst)

    def facts(self) -> list[tuple[str, str]]:
        """The report as label and text, for the table and the model card."""
        sizes = f"{self.export_bytes / _MIB:,.1f} MiB in {self.shards} file(s)"
        rows = [
            ("format", f"{self.format} ({self.format_reason})"),
            ("base", self.base),
            ("adapter", f"{self.adapter} ({self.merged} weights)" if self.adapter else "none"),
            ("size", f"{sizes}, from {self.source_bytes / _MIB:,.1f} MiB"),
            ("time", self._time_text()),
        ]
        if self.trained is not None:
            rows.insert(3, ("task", _task_text(self.trained)))
        if self.reused:
            rows.append(("resumed", f"{self.reused} file(s) of an interrupted export were kept"))
        if self.layers:
            mean = sum(layer.relative_error for layer in self.layers) / len(self.layers)
            rows.append(("FP8 linears", f"{self.quantized}, mean relative error {mean:.2%}"))
        if self.calibration:
            c = self.calibration
            rows.append(
                (
                    "calibration",
                    f"{len(c.layers)} linears on {c.tokens} tokens of {c.rows} rows: mean output "
                    f"error {c.rounded:.2%} -> {c.calibrated:.2%}",
                )
            )
        shares = [layer.survival for layer in self.layers if layer.survival is not None]
        if shares:
            mean = sum(shares) / len(shares)
            rows.append(("update left", f"{mean:.0%} of the adapter's, {min(shares):.0%} at least"))
        if self.kept:
            counts = Counter(self.kept.values()).most_common()
            reasons = "; ".join(f"{count} {reason}" for reason, count in counts)
            rows.append(("BF16 linears", f"{len(self.kept)}: {reasons}"))
        if self.kv_scales:
            largest = max(self.kv_scales.values())
            text = f"{len(self.kv_scales)} scales, measured on rows, the largest {largest:.3g}"
            rows.append(("FP8 cache", text))
        if self.tensor_parallel:
            rows.append(("tensor parallel", tp_text(self.tensor_parallel)))
        rows.append(("reload", self._reload_text()))
        rows += self._judged()
        rows += [("warning", text) for text in self.warnings]
        return rows

    def _time_text(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        text = f"{self.seconds:.1f} s" + (f" ({stages})" if stages else "")
        written = self.stages.get("write")
        if self.reused or not written:
            return text
        return f"{text}, written at {self.source_bytes / _MIB / written:,.0f} MiB/s of the base"

    def _judged(self) -> list[tuple[str, str]]:
        """Figures against their limits; of what was not checked, the reason."""
        judged = self.judgement
        verdicts = {verdict.figure: verdict for verdict in judged.verdicts}
        rows = []
        if f := judged.fidelity:
            tokens = f"{f.tokens} tokens (every one, prompts too)"
            rows.append(("against BF16", f"{_perplexity(f)} on {f.text}, {tokens}"))
            rows += [(name, str(verdicts[name])) for name in FIGURES]
        if judged.served:
            kept = ", keys and values not" if self.kv_scales else ""
            text = f"{_perplexity(judged.served)}, inputs rounded to FP8 too{kept}"
            rows.append((SERVED, text))
            served = [f"{name} {SERVED}" for name in FIGURES]
            rows += [(name, str(verdicts[name])) for name in served]
        if loss := judged.loss:
            name = f"{loss.kind} loss"
            text = f"{loss} on {loss.rows} rows, in {loss.arithmetic} (the run's own figures are "
            rows.append((name, f"{text}in its training precision); change {verdicts[name]}"))
        if e := judged.engine:
            text = (
                f"{e.engine} on {e.device}, fresh process, {e.tokens} tokens of {e.prompts} prompts"
            )
            limit = f"{verdicts[DLOGP]}; BF16 alone {e.bf16_floor:.4f}"
            rows.append(("engine", f"{text}: {DLOGP} {limit}"))
        rows += [(name, f"not checked: {why}") for name, why in judged.not_checked.items()]
        return rows

    def _reload_text(self) -> str:
        if self.read_back:
            back = self.read_back
            how = "from the files and dequantized" if self.quantized else "from the files"
            return (
                f"not by transformers: {back.obstacle}. {back.tensors} tensors read back {how} by "
                "swiftfp8, equal"
            )
        if self.reload is None:
            return "not checked (export.verify=false)"
        return reload_text(self.reload, quantized=self.quantized > 0)


def _perplexity(fidelity: Fidelity) -> str:
    return f"perplexity {fidelity.perplexity_merged:.3f} -> {fidelity.perplexity_export:.3f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _task_text(trained: Trained) -> str:
    if trained.head is None:
        return f"{trained.task}, pooling {trained.pooling}"
    return f"{trained.task}: {', '.join(trained.head.labels)}"
