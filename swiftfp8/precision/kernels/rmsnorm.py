"""RMSNorm that hands its output on in FP8, and its backward pass with the residual's gradient.

    rstd = 1 / √(mean_k x² + eps)     xhat = x rstd     h = xhat w      (all in float32)
    forward:  h8, sh = rows of h; h itself is never written
    backward: dx = d_res + rstd (w dh - xhat mean_k(w dh xhat))

A decoder layer reads its norm's output only through FP8 matmuls (LoRA's too), so the BF16 tensor
has no reader. `x` may be saved as it is in the residual stream; only rstd [T] is kept besides.
The second form of the backward also quantizes its result, as it is dy of the matmul below:
g8, sg = rows of dx * col_scale.
"""

from typing import Any

import torch

from swiftfp8.precision.kernels._triton import jit, next_power_of_2, runs_triton, tl
from swiftfp8.precision.kernels.quantize import E4M3, quantize_rows_reference, to_e4m3


def rmsnorm_quantize(
    x_TK: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 rows of the normalized x, their scales [T, 1], and rstd [T]."""
    if not runs_triton(x_TK):
        h, rstd = _normalize(x_TK, weight_K, eps)
        return (*quantize_rows_reference(h), rstd)
    tokens, features = x_TK.shape
    h8 = torch.empty(tokens, features, dtype=E4M3, device=x_TK.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x_TK.device)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x_TK.device)
    _rmsnorm[(tokens,)](
        x_TK, weight_K, h8, scale, rstd, features, eps, QUANTIZE=True, **_row_shape(features)
    )
    return h8, scale, rstd


def rmsnorm(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """The plain norm with a frozen weight, differentiable in x, output in x's dtype."""
    return _RMSNorm.apply(x, weight_K, eps)


def rmsnorm_backward(
    dh_TK: torch.Tensor,
    x_TK: torch.Tensor,
    rstd_T: torch.Tensor,
    weight_K: torch.Tensor,
    d_residual_TK: torch.Tensor | None = None,
    col_scale_K: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dx (in `out`), and with `col_scale_K` FP8 rows of dx * col_scale and their scales [T, 1]."""
    if not runs_triton(x_TK):
        dx, *rows = _backward_reference(dh_TK, x_TK, rstd_T, weight_K, d_residual_TK, col_scale_K)
        return (dx if out is None else out.copy_(dx), *rows)
    tokens, features = x_TK.shape
    dx = torch.empty_like(x_TK) if out is None else out
    g8 = scale = None
    if col_scale_K is not None:
        g8 = torch.empty(tokens, features, dtype=E4M3, device=x_TK.device)
        scale = torch.empty(tokens, 1, dtype=torch.float32, device=x_TK.device)
    _rmsnorm_backward[(tokens,)](
        dh_TK,
        x_TK,
        rstd_T,
        weight_K,
        dx if d_residual_TK is None else d_residual_TK,
        rstd_T if col_scale_K is None else col_scale_K,
        dx,
        dx if g8 is None else g8,
        rstd_T if scale is None else scale,
        features,
        RESIDUAL=d_residual_TK is not None,
        QUANTIZE=g8 is not None,
        **_row_shape(features),
    )
    return dx, g8, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight_K: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if runs_triton(x):
            y = torch.empty_like(rows)
            rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
            _rmsnorm[(rows.shape[0],)](
                rows, weight_K, y, rstd, rstd, x.shape[-1], eps, QUANTIZE=False,
                **_row_shape(x.shape[-1]),
            )  # fmt: skip
        else:
            h, rstd = _normalize(rows, weight_K, eps)
            y = h.to(x.dtype)
        ctx.save_for_backward(rows, rstd, weight_K)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        rows, rstd, weight = ctx.saved_tensors
        dx, _, _ = rmsnorm_backward(dy.reshape(rows.shape).contiguous(), rows, rstd, weight)
        return dx.view(dy.shape), None, None


def _row_shape(features: int) -> dict[str, int]:
    block = next_power_of_2(features)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 1024))}


def _normalize(
    x_TK: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x_TK.float()
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return x * rstd[:, None] * weight_K.float(), rstd


def _backward_reference(
    dh_TK: torch.Tensor,
    x_TK: torch.Tensor,
    rstd_T: torch.Tensor,
    weight_K: torch.Tensor,
    d_residual_TK: torch.Tensor | None,
    col_scale_K: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    xhat = x_TK.float() * rstd_T[:, None]
    wdh = dh_TK.float() * weight_K.float()
    dx = rstd_T[:, None] * (wdh - xhat * (wdh * xhat).mean(-1, keepdim=True))
    if d_residual_TK is not None:
        dx = dx + d_residual_TK.float()
    if col_scale_K is None:
        return dx.to(x_TK.dtype), None, None
    return (dx.to(x_TK.dtype), *quantize_rows_reference(dx, col_scale_K))


@jit
def _rmsnorm(X, W, H, S, RSTD, K, eps, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(X + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    w = tl.load(W + k, mask=k < K, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    tl.store(RSTD + row, rstd)
    h = x * rstd * w
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.abs(h), 0), 1e-30) / 448.0
        tl.store(S + row, scale)
        tl.store(H + row * K + k, to_e4m3(h * (1.0 / scale)), mask=k < K)
    else:
        tl.store(H + row * K + k, h.to(H.dtype.element_ty), mask=k < K)


@jit
def _rmsnorm_backward(
    DH, X, RSTD, W, DRES, COL, DX, G8, S, K,
    RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    rstd = tl.load(RSTD + row)
    xhat = tl.load(X + row * K + k, mask=mask, other=0.0).to(tl.float32) * rstd
    wdh = tl.load(DH + row * K + k, mask=mask, other=0.0).to(tl.float32)
    wdh = wdh * tl.load(W + k, mask=mask, other=0.0).to(tl.float32)
    dx = rstd * (wdh - xhat * (tl.sum(wdh * xhat, 0) / K))
    if RESIDUAL:
        dx += tl.load(DRES + row * K + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(DX + row * K + k, dx.to(DX.dtype.element_ty), mask=mask)
    if QUANTIZE:
        g = dx * tl.load(COL + k, mask=mask, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(g), 0), 1e-30) / 448.0
        tl.store(S + row, scale)
        tl.store(G8 + row * K + k, to_e4m3(g * (1.0 / scale)), mask=mask)
