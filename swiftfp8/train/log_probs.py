"""Log-probabilities of a row's tokens, without the logits of a whole batch.

    z = h Wᵀ      log p_t = z_ty - log Σ_v exp z_tv      dh_t = g_t (onehot(y) - softmax(z_t)) W

Losses on preferences need Σ_t log p_t of each answer, not one mean over all tokens, so what flows
back into token t, g_t, is known only in the backward pass. A chunk of logits is therefore made
twice, once in each pass, and forgotten both times: kept are h and nothing of the vocabulary's size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swiftfp8.loss_plan import CHUNK_ELEMENTS, chunk_rows
from swiftfp8.precision._backend import compute_dtype
from swiftfp8.precision.kernels.cross_entropy import cross_entropy_
from swiftfp8.train.losses import IGNORED


def linear_log_probs(
    hidden: torch.Tensor, weight_VK: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Log-probability of every label [...], already shifted, given `hidden` [..., K]; float32.

    It is 0 where the label is -100.
    """
    rows = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype(hidden))
    flat = labels.reshape(-1).to(rows.device)
    log_probs: torch.Tensor = _LinearLogProbs.apply(rows, weight_VK, flat)
    return log_probs.view(labels.shape)


def offer_log_probs(model: nn.Module, *, chunked: bool) -> None:
    """Let a causal language model be called with `score_labels` [B, T].

    It then returns the log-probability [B, T - 1] of each row's labels from the second on, 0 where
    a label is -100. Called without, it is as before. `chunked` is for models whose logits are the
    head's output and nothing else.
    """
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain_forward = causal.forward

    @functools.wraps(plain_forward)
    def forward(*args: Any, score_labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if score_labels is None:
            return plain_forward(*args, **kwargs)
        shifted = score_labels[:, 1:]
        if not chunked:
            logits = plain_forward(*args, **kwargs).logits[:, :-1]
            return _gather(logits, shifted)
        hidden = causal.base_model(*args, **kwargs).last_hidden_state
        return linear_log_probs(hidden[:, :-1], causal.lm_head.weight, shifted)

    causal.forward = forward


def _gather(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(labels.shape)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_TK: torch.Tensor, weight_VK: torch.Tensor, labels_T: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TK, weight_VK, labels_T)
        with torch.autocast(hidden_TK.device.type, enabled=False):
            parts = [
                cross_entropy_(_logits(hidden_TK[a:b], weight_VK), labels_T[a:b], grad=False)
                for a, b in _chunks(hidden_TK, weight_VK)
            ]
        return -torch.cat(parts)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        hidden, weight, labels = ctx.saved_tensors
        need_dh, need_dw = ctx.needs_input_grad[:2]
        dh = torch.empty_like(hidden) if need_dh else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if need_dw else None
        with torch.autocast(hidden.device.type, enabled=False):
            for a, b in _chunks(hidden, weight):
                h = hidden[a:b]
                z = _logits(h, weight)
                cross_entropy_(z, labels[a:b], grad=True)
                z.mul_(-grad_T[a:b, None].to(z.dtype))
                if dh is not None:
                    dh[a:b] = z @ weight.to(z.dtype)
                if dw is not None:
                    dw += z.t() @ h
        return dh, None if dw is None else dw.to(weight.dtype), None


def _logits(hidden_TK: torch.Tensor, weight_VK: torch.Tensor) -> torch.Tensor:
    return hidden_TK.detach() @ weight_VK.detach().to(hidden_TK.dtype).t()


def _chunks(hidden_TK: torch.Tensor, weight_VK: torch.Tensor) -> list[tuple[int, int]]:
    tokens = hidden_TK.shape[0]
    step = chunk_rows(weight_VK.shape[0], CHUNK_ELEMENTS[hidden_TK.device.type])
    return [(a, min(a + step, tokens)) for a in range(0, tokens, step)]
