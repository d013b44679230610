"""Run the merged model, the trained one and the export over the same tokens, and compare.

Up to three models are loaded, one after the other, in float32 on a CPU and in BF16 on a GPU:

    merged    the BF16 merge: its logits on the text wait in temporary files
    trained   the base with its adapter beside it, un-merged, as it was trained
    export    the weights that a reader of the export gets

Activations stay in high precision, so that it is the weights that are judged; and then once more
with the inputs of FP8 linears rounded as a server rounds them (`Layout.input_group`), and for the
prompts that an engine runs as that engine does (`activation_group`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.export.fidelity import Fidelity, compare_logits, summarize
from swiftfp8.export.layout import ExportFormat, Layout
from swiftfp8.export.rounded_inputs import inputs_rounded
from swiftfp8.export.source import Source, build_model, open_source
from swiftfp8.export.staging import check_space
from swiftfp8.models.quiet import quiet_peft

_MASKED = -100
_CHUNK = 64  # positions whose logits are float32 at a time


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tokenized row of the training task: ids [T], and labels [T] with -100 for no loss."""

    ids_T: Tensor
    labels_T: Tensor


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the models are run over: windows of text, rows with labels, prompts for an engine.

    `windows_from` says in words where the windows come from; `rows_kind` is "evaluation" or
    "training". For the prompts, inputs of FP8 linears are rounded to e4m3 in groups of
    `activation_group` elements: 0 is a whole token, None rounds nothing.
    """

    windows: Sequence[Tensor] = ()
    windows_from: str = ""
    rows: Sequence[Row] = ()
    rows_kind: str = "evaluation"
    prompts: Sequence[Sequence[int]] = ()
    activation_group: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """Mean loss over the labels of `rows` rows, before merging (`trained`) and of the export.

    Both are computed in `arithmetic`, and not in the precision that the run evaluated in.

    `error` is the standard error of their difference, as a share of `trained`: how far so few
    tokens can be trusted.
    """

    kind: str
    rows: int
    tokens: int
    adapter: bool
    trained: float
    export: float
    error: float
    arithmetic: str = "float32"

    @property
    def increase(self) -> float:
        """By which share of itself the loss rose."""
        return self.export / self.trained - 1 if self.trained else float(self.export > 0)

    def __str__(self) -> str:
        before = "adapter" if self.adapter else "model"
        return f"{before} {self.trained:.4f}, export {self.export:.4f}"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The figures, None where there was nothing to take them on.

    `fidelity` is that of the weights alone, `served` that with inputs rounded too, None where the
    inputs of `unrounded` FP8 linears could not be.

    `prompt_logp` has the log-probability of every token but the first, prompt by prompt, in float32
    arithmetic, and `prompt_logp_bf16` the same in BF16: how far the two lie apart is what BF16
    alone does to this model.
    """

    fidelity: Fidelity | None = None
    served: Fidelity | None = None
    unrounded: int = 0
    loss: TaskLoss | None = None
    prompt_logp: Sequence[Sequence[float]] = ()
    prompt_logp_bf16: Sequence[Sequence[float]] = ()


def compare_models(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    evidence: Evidence,
    *,
    device: str = "cpu",
) -> Findings:
    """Take the figures that `evidence` allows.

    Raises:
        SwiftFP8Error: no disk space for the logits, tensors that the architecture does not have.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    windows = list(evidence.windows) if layout.quantized else []
    rows = evidence.rows
    with tempfile.TemporaryDirectory(prefix="swiftfp8-judge-") as folder:
        stored: list[Tensor] = []
        trained: Tensor | None = None
        adapter = source.checkpoint.adapter
        if windows or (rows and adapter is None):
            check_space(Path(folder), _logit_bytes(source, windows, dtype))
            model = _merged_model(source, dtype, device)
            stored = [
                _keep(_logits(model, window), Path(folder) / f"{n}.bin")
                for n, window in enumerate(windows)
            ]
            trained = token_losses(model, rows) if rows and adapter is None else None
            del model
        if rows and adapter is not None:
            trained = token_losses(_trained_model(source, adapter.directory, dtype, device), rows)
        model = build_model(
            source, export_format.reference(source, layout), dtype=dtype, device=device
        )
        fidelity = _fidelity(model, windows, stored, evidence.windows_from) if windows else None
        loss = None
        if trained is not None and len(trained):
            loss = _task_loss(
                trained,
                token_losses(model, rows),
                evidence,
                adapter=adapter is not None,
                arithmetic=str(dtype).removeprefix("torch."),
            )
        served, unrounded = None, 0
        if fidelity and layout.input_group is not None:
            with inputs_rounded(model, layout, layout.input_group) as count:
                unrounded = len(layout.quantized) - count
                if not unrounded:
                    served = _fidelity(model, windows, stored, evidence.windows_from)
        with inputs_rounded(model, layout, evidence.activation_group):
            exact, rounded = _prompt_logp(model, evidence.prompts)
    return Findings(
        fidelity=fidelity,
        served=served,
        unrounded=unrounded,
        loss=loss,
        prompt_logp=exact,
        prompt_logp_bf16=rounded,
    )


def token_losses(model: Any, rows: Sequence[Row]) -> Tensor:
    """Cross entropy (nats) of every label, each row run on its own; float64 [labels]."""
    found = []
    for row in rows:
        logits_TV = _logits(model, row.ids_T)[:-1]
        targets_T = row.labels_T[1:].to(logits_TV.device)
        wanted = (targets_T != _MASKED).nonzero()[:, 0]
        for part in torch.split(wanted, _CHUNK):
            losses = torch.nn.functional.cross_entropy(
                logits_TV[part].float(), targets_T[part], reduction="none"
            )
            found.append(losses.double().cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _task_loss(
    trained: Tensor, export: Tensor, evidence: Evidence, *, adapter: bool, arithmetic: str
) -> TaskLoss:
    count, before = len(trained), float(trained.mean())
    spread = float((export - trained).std()) if count > 1 else 0.0
    return TaskLoss(
        kind=evidence.rows_kind,
        rows=len(evidence.rows),
        tokens=count,
        adapter=adapter,
        trained=before,
        export=float(export.mean()),
        error=spread / math.sqrt(count) / before if before else 0.0,
        arithmetic=arithmetic,
    )


def token_logp(model: Any, ids: Sequence[int]) -> list[float]:
    """The log-probability of every token but the first."""
    ids_T = torch.tensor(list(ids))
    log_p = _logits(model, ids_T)[:-1].float().log_softmax(-1)
    found: list[float] = log_p.gather(-1, ids_T[1:, None].to(log_p.device))[:, 0].tolist()
    return found


def _prompt_logp(
    model: Any, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[float]], list[list[float]]]:
    """`token_logp` of all prompts in float32 and in BF16; the model is left in BF16."""
    if not prompts:
        return [], []
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for parameter in model.parameters():  # buffers (rotary frequencies) stay as they are
            parameter.data = parameter.data.to(dtype)
        found.append([token_logp(model, prompt) for prompt in prompts])
    return found[0], found[1]


def _merged_model(source: Source, dtype: torch.dtype, device: str) -> Any:
    tensors = ((name, source.merged(name)) for name in source.tensors)
    return build_model(source, tensors, dtype=dtype, device=device)


def _trained_model(source: Source, adapter_dir: Path, dtype: torch.dtype, device: str) -> Any:
    """The base with the adapter beside its weights, which are not changed."""
    from peft import PeftModel

    base = open_source(source.directory, trust_remote_code=source.trust_remote_code)
    with quiet_peft():
        model = PeftModel.from_pretrained(_merged_model(base, dtype, device), str(adapter_dir))
    return model.to(device).eval()


def _fidelity(
    model: Any, windows: Sequence[Tensor], stored: Sequence[Tensor], text: str
) -> Fidelity:
    sums = torch.zeros(5, dtype=torch.float64)
    for window_T, merged_TV in zip(windows, stored, strict=True):
        logits_TV = _logits(model, window_T)
        sums += compare_logits(merged_TV.to(logits_TV.device), logits_TV, window_T)
    return summarize(sums, sum(len(window) - 1 for window in windows), text)


def _logits(model: Any, ids_T: Tensor) -> Tensor:
    """Logits [T, V] in the model's dtype."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids_T[None].to(model.device), use_cache=False).logits[0]
    return logits


def _keep(logits_TV: Tensor, file: Path) -> Tensor:
    """Move logits to a file-backed tensor, so that they cost no memory for long."""
    kept = torch.from_file(
        str(file), shared=True, size=logits_TV.numel(), dtype=logits_TV.dtype
    ).view(logits_TV.shape)
    return kept.copy_(logits_TV)


def _logit_bytes(source: Source, windows: Sequence[Tensor], dtype: torch.dtype) -> int:
    config = source.layers.config
    vocab = (config.get("text_config") or config).get("vocab_size", 1 << 18)
    return sum(map(len, windows)) * int(vocab) * dtype.itemsize
