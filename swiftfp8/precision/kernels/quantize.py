"""Row-wise e4m3: one float32 scale for each token's row, one for each output channel of a weight.

    s[t] = max(max_k |x[t, k]|, tiny) / 448        x8 = e4m3(clamp(x / s))       x = x8 * s

Why rows: the scale is known as soon as a row has been read, so that a kernel which produces a row
quantizes it in the same pass; an outlier token costs the others nothing; and the FP8 GEMM takes
such scales at no cost. A weight W [N, K] with scales s_w [N] serves forward and backward with one
copy: for dx = dy W the channel scale is folded into dy before dy is quantized,

    dx = (dy * s_w) W8 = s_g * (g8 W8)             g8, s_g = rows of dy * s_w
"""

import torch

from swiftfp8.precision.kernels._triton import (
    ceil_div,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Smallest amax a scale is made from. Gradients times a weight's scale may be 1e-12 and mean it.
TINY = 1e-30


def quantize_rows(
    x_TK: torch.Tensor,
    col_scale_K: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows of x * col_scale, and their float32 scales [T, 1], none below `floor` [1]."""
    if not runs_triton(x_TK):
        return quantize_rows_reference(x_TK, col_scale_K, floor)
    tokens, features = x_TK.shape
    assert x_TK.stride(1) == 1
    x8 = torch.empty_like(x_TK, dtype=E4M3, memory_format=torch.contiguous_format)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x_TK.device)
    block = min(next_power_of_2(features), 4096)
    _quantize_rows[(tokens,)](
        x_TK,
        scale if col_scale_K is None else col_scale_K,
        scale if floor is None else floor,
        x8,
        scale,
        features,
        x_TK.stride(0),
        FOLD=col_scale_K is not None,
        FLOOR=floor is not None,
        BLOCK=block,
        CHUNKS=ceil_div(features, block),
        num_warps=max(1, min(8, block // 1024)),
    )
    return x8, scale


def quantize_rows_reference(
    x_TK: torch.Tensor,
    col_scale_K: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch."""
    x = x_TK.float() if col_scale_K is None else x_TK.float() * col_scale_K
    scale = x.abs().amax(-1, keepdim=True).clamp(min=TINY) / E4M3_MAX
    if floor is not None:
        scale = torch.maximum(scale, floor)
    return (x * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def quantize_weight(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weight [N, K] and its float32 channel scales [N], without a float32 copy of it all.

    Scales are rounded up to powers of two, which costs e4m3 nothing but makes 1 / s_w, and s_w in
    BF16, exact. None is below 2^-6 of their median: values of a channel that small still keep all
    their bits, and the gradient of an adapter's B, which sees dy * s_w, keeps its own.
    """
    slabs = [slice(start, start + 4096) for start in range(0, w_NK.shape[0], 4096)]
    amax = torch.cat([w_NK[rows].abs().amax(-1).float() for rows in slabs])
    scale = _power_of_two(amax.clamp(min=TINY) / E4M3_MAX)
    scale = torch.maximum(scale, scale.median() / 64)
    data = torch.empty(w_NK.shape, dtype=E4M3, device=w_NK.device)
    for rows in slabs:
        data[rows] = (w_NK[rows].float() / scale[rows, None]).to(E4M3)
    return data, scale


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def dequantize_rows(x8_TK: torch.Tensor, scale_T1: torch.Tensor) -> torch.Tensor:
    """x8 * scale in float32."""
    return x8_TK.float() * scale_T1.reshape(-1, 1)


def scaled_mm(
    a8_TK: torch.Tensor,
    sa_T1: torch.Tensor,
    b8_NK: torch.Tensor,
    sb_N: torch.Tensor,
    *,
    split_accumulator: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """(a8 * sa) (b8 * sb)ᵀ, [T, N]: FP8 tensor cores on a GPU, dequantized on a CPU."""
    if not a8_TK.is_cuda:
        y = dequantize_rows(a8_TK, sa_T1) @ dequantize_rows(b8_NK, sb_N).t()
        return y.to(dtype)
    return torch._scaled_mm(
        a8_TK,
        b8_NK.t(),
        sa_T1,
        sb_N.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=not split_accumulator,
    )


@jit
def _quantize_rows(
    X, COL, LEAST, X8, S, K, stride,
    FOLD: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row a program. A long row is read twice, the second time from cache."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = _load_row(X + row * stride, COL, k, K, FOLD)
    peak = tl.abs(x)
    for chunk in tl.static_range(1, CHUNKS):
        more = _load_row(X + row * stride, COL, chunk * BLOCK + k, K, FOLD)
        peak = tl.maximum(peak, tl.abs(more))
    scale = tl.maximum(tl.max(peak, 0), 1e-30) / 448.0
    if FLOOR:
        scale = tl.maximum(scale, tl.load(LEAST))
    tl.store(S + row, scale)
    inverse = 1.0 / scale
    tl.store(X8 + row * K + k, to_e4m3(x * inverse), mask=k < K)
    for chunk in tl.static_range(1, CHUNKS):
        i = chunk * BLOCK + k
        x = _load_row(X + row * stride, COL, i, K, FOLD)
        tl.store(X8 + row * K + i, to_e4m3(x * inverse), mask=i < K)


@jit
def _load_row(X, COL, k, K, FOLD: tl.constexpr):
    x = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)
    if FOLD:
        x = x * tl.load(COL + k, mask=k < K, other=0.0).to(tl.float32)
    return x


@jit
def to_e4m3(x):
    """Cast to e4m3. The GPU's cast saturates; values under an exact scale don't exceed 448."""
    return x.to(tl.float8e4nv)
