"""Language-model head and cross entropy together, in chunks of tokens.

The logits of 8,192 tokens over 152,064 words are 2.5 GB in BF16, and a plain loss holds them three
to five times, partly in float32. Here a chunk of logits is made, turned into its own gradient in
place, multiplied back to dh, and forgotten:

    z = h Wᵀ      loss = Σ_t (log Σ_v exp z_tv - z_ty) / n      dh = (softmax(z) - onehot(y)) W / n

dh is computed in the forward pass, where z is at hand; the backward pass only scales it. A frozen
head gets no gradient, and none is computed. n is the number of labels that are not -100, or what
the caller counts over a whole accumulated batch. Nothing waits for the device.

With an FP8 head, W is held in e4m3 with a scale for each word, and both matmuls run in FP8. Under
autocast the matmuls run in its dtype, as the model's own would.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swiftfp8.loss_plan import CHUNK_ELEMENTS, TRAINED_HEAD_CHUNK, chunk_rows
from swiftfp8.models.loss_form import why_unfused
from swiftfp8.precision._backend import compute_dtype
from swiftfp8.precision.kernels.cross_entropy import cross_entropy_
from swiftfp8.precision.kernels.quantize import quantize_rows, scaled_mm
from swiftfp8.precision.kernels.rmsnorm import rmsnorm
from swiftfp8.precision.kernels.transpose import transpose8
from swiftfp8.precision.torch_native import RowwiseFrozenLinear

IGNORED = -100
_CHUNK_ELEMENTS = CHUNK_ELEMENTS["cuda"]  # of logits held at once: 512 MiB in BF16


@dataclass(frozen=True, kw_only=True)
class Fp8Head:
    """A frozen head in FP8: e4m3 [V, K] and float32 scales [V]."""

    weight8_VK: torch.Tensor
    scale_V: torch.Tensor
    split_accumulator: bool = False


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight_VK: torch.Tensor | Fp8Head,
    labels: torch.Tensor,
    *,
    items: torch.Tensor | float | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss of `hidden` [..., K] against `labels` [...], which are already shifted.

    `weights` [...] multiply the labels' losses, and the mean is over their sum. `items` replaces
    that sum, or the number of labels that are not -100, as the mean's divisor.
    """
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    flat = labels.reshape(-1).to(rows.device)
    if weights is not None:
        weights = weights.reshape(-1).to(rows.device, torch.float32)
    if items is None:
        count = _not_zero(targets(flat, weights))
    else:
        count = torch.as_tensor(items, dtype=torch.float32, device=rows.device)
    return _LinearCrossEntropy.apply(
        rows,
        weight_VK if isinstance(weight_VK, torch.Tensor) else None,
        None if isinstance(weight_VK, torch.Tensor) else weight_VK,
        flat,
        count,
        weights,
    )


def targets(labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """What a mean loss is divided by: the labels that are not -100, or the sum of their weights."""
    counted = labels != IGNORED
    return counted.sum() if weights is None else (counted * weights).sum()


def _not_zero(count: torch.Tensor) -> torch.Tensor:
    """A divisor of a sum that is zero where the count is."""
    return count.float().clamp(min=torch.finfo(torch.float32).tiny)


def weigh_loss(model: nn.Module) -> None:
    """Make a causal language model take `loss_weights` [B, T] beside labels, of logits held whole.

    The loss is what `linear_cross_entropy` gives; the logits are returned as well.
    """
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain_forward = causal.forward

    @functools.wraps(plain_forward)
    def forward(
        *args: Any,
        labels: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None or loss_weights is None:
            return plain_forward(*args, labels=labels, **kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        outputs = plain_forward(*args, **kwargs)
        aimed, weights = _shift(labels, IGNORED).flatten(), _shift(loss_weights, 0.0).flatten()
        logits = outputs.logits.float().flatten(0, -2)
        losses = functional.cross_entropy(logits, aimed, ignore_index=IGNORED, reduction="none")
        divisor = _not_zero(targets(aimed, weights)) if items is None else items
        outputs.loss = (losses * weights).sum() / divisor
        return outputs

    causal.forward = forward


def _shift(row: torch.Tensor, fill: float) -> torch.Tensor:
    """Each place's next value [B, T]."""
    return functional.pad(row, (0, 1), value=fill)[..., 1:]


def fuse_loss(model: nn.Module) -> str | None:
    """Make a causal language model compute its loss from chunks; returns why it can't, or None.

    Called with labels, the model then returns a loss and no logits; without, it is as before.
    A head that was converted to row-wise FP8 runs its two matmuls in FP8.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    reason = why_unfused(causal, (RowwiseFrozenLinear,))
    if reason is not None:
        return reason
    plain_forward = causal.forward
    _fuse_final_norm(causal.base_model)

    @functools.wraps(plain_forward)
    def forward(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain_forward(*args, **kwargs)
        return _forward_with_loss(causal, labels, args, kwargs)

    causal.forward = forward  # type: ignore[method-assign]
    return None


def _fuse_final_norm(body: nn.Module) -> None:
    norm = getattr(body, "norm", None)
    plain = norm is not None and type(norm).__name__ in (
        "Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm",
    )  # fmt: skip
    if plain and not norm.weight.requires_grad and norm.weight.is_cuda:
        norm.forward = lambda x: rmsnorm(x, norm.weight, norm.variance_epsilon)


def _forward_with_loss(
    causal: Any, labels: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    items = kwargs.pop("num_items_in_batch", None)
    kwargs.pop("logits_to_keep", None)
    shifted = kwargs.pop("shift_labels", None)
    kwargs.pop("return_dict", None)
    weights = kwargs.pop("loss_weights", None)
    outputs = causal.base_model(*args, return_dict=True, **kwargs)
    if shifted is None:
        shifted = _shift(labels, IGNORED)
    if weights is not None:
        weights = _shift(weights, 0.0)
    hidden = outputs.last_hidden_state
    weight = _head_weight(causal.lm_head, hidden)
    loss = linear_cross_entropy(hidden, weight, shifted, items=items, weights=weights)
    return CausalLMOutputWithPast(
        loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )


def _head_weight(head: Any, hidden: torch.Tensor) -> torch.Tensor | Fp8Head:
    """What the head multiplies with now, counted for the measured coverage where it is FP8."""
    if not isinstance(head, RowwiseFrozenLinear):
        return head.weight
    if not head.enabled:
        head.ran_high += 1
        return head.dequantize().to(compute_dtype(hidden))
    head.ran_fp8 += 1
    return Fp8Head(
        weight8_VK=head.weight,
        scale_V=head.weight_scale,
        split_accumulator=head.split_accumulator,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_TK: torch.Tensor,
        weight_VK: torch.Tensor | None,
        head: Fp8Head | None,
        labels_T: torch.Tensor,
        count: torch.Tensor,
        weights_T: torch.Tensor | None,
    ) -> torch.Tensor:
        need_dh, need_dw = ctx.needs_input_grad[:2]
        with torch.autocast(hidden_TK.device.type, enabled=False):
            loss, dh, dw = _loss_and_gradients(
                hidden_TK, weight_VK, head, labels_T, weights_T, need_dh=need_dh, need_dw=need_dw
            )
        ctx.save_for_backward(dh, dw, count)
        return loss / count

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        dh, dw, count = ctx.saved_tensors
        scale = d_loss / count
        dh = None if dh is None else (dh * scale).to(dh.dtype)
        dw = None if dw is None else (dw * scale).to(dw.dtype)
        return dh, dw, None, None, None, None


def _loss_and_gradients(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor | None,
    head: Fp8Head | None,
    labels_T: torch.Tensor,
    weights_T: torch.Tensor | None,
    *,
    need_dh: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    hidden = hidden_TK.detach()
    tokens = hidden.shape[0]
    vocabulary = (weight_VK if head is None else head.weight8_VK).shape[0]  # type: ignore[union-attr]
    elements = _CHUNK_ELEMENTS if hidden.is_cuda else min(_CHUNK_ELEMENTS, CHUNK_ELEMENTS["cpu"])
    if need_dw and hidden.is_cuda:
        elements *= TRAINED_HEAD_CHUNK
    step = chunk_rows(vocabulary, elements)
    weight = None if weight_VK is None else weight_VK.detach().to(hidden.dtype)
    grad = need_dh or need_dw
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    dh = torch.empty_like(hidden) if need_dh else None
    dw: torch.Tensor | None = None
    transposed = transpose8(head.weight8_VK) if head is not None and need_dh else None
    for start in range(0, tokens, step):
        h, labels = hidden[start : start + step], labels_T[start : start + step]
        if head is None:
            assert weight is not None
            z = h @ weight.t()
        else:
            z = scaled_mm(
                *quantize_rows(h), head.weight8_VK, head.scale_V,
                split_accumulator=head.split_accumulator, dtype=h.dtype,
            )  # fmt: skip
        losses = cross_entropy_(z, labels, grad=grad)
        # Weights go where a token's row is short: a loss, a row of dh, of h in dw; not into dz.
        w = None if weights_T is None else weights_T[start : start + step]
        total += losses.sum() if w is None else losses @ w
        if dh is not None:
            part = _dh(z, weight, head, transposed)
            dh[start : start + step] = part if w is None else part * w[:, None]
        if need_dw:
            h = h if w is None else (h * w[:, None]).to(h.dtype)
            part = z.t() @ h
            if dw is not None:
                dw += part
            elif step >= tokens:  # there is nothing to add to it
                dw = part
            else:
                dw = part.float()
            del part
        del z  # or the next chunk would be made beside it
    return total, dh, dw


def _dh(
    dz_TV: torch.Tensor,
    weight_VK: torch.Tensor | None,
    head: Fp8Head | None,
    transposed_KV: torch.Tensor | None,
) -> torch.Tensor:
    if head is None:
        assert weight_VK is not None
        return dz_TV @ weight_VK
    assert transposed_KV is not None
    g8, sg = quantize_rows(dz_TV, head.scale_V)
    ones = torch.ones(transposed_KV.shape[0], device=dz_TV.device)
    return scaled_mm(
        g8, sg, transposed_KV, ones, split_accumulator=head.split_accumulator, dtype=dz_TV.dtype
    )
