"""AdamW on exact FP32 masters of BF16 weights, a whole step in one pass over memory.

A master is the BF16 weight and an int16 remainder of its bits (train/masters.py). A step reads the
gradient, and reads and writes everything else once: 24 bytes a parameter beside the gradient's 2
or 4, or 16 with BF16 moments. With g the gradient, all in FP32, as torch.optim.AdamW has it:

    p <- p (1 - lr decay)
    m <- m + (1 - beta1) (g - m)            v <- beta2 v + (1 - beta2) g g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The compiler contracts products and sums, which moves a master by an ulp or two of its own a step.
Root and quotient are the GPU's approximate ones (exact ones double the instructions) and
sqrt(1 - beta2^t) is multiplied with as its inverse: 2^-20 of the update at most. The root of a v
below 2^-126 is 0, which only eps = 0 could tell.

**BF16 moments** are rounded stochastically: up with the probability of the share of a BF16 step
that is cut off. Rounded to nearest, v would stay where it is whenever it loses less than 1/512 of
itself in a step, which is always so for beta2 above 0.998. The noise is a counter's: Philox keyed
by the step, counting elements and the parameter's position. So a step repeats bit for bit from
what a checkpoint holds. One draw of Philox, four words by seven rounds (the fewest that pass
BigCrush), serves four elements, which lie in four parts of a tile; a word's halves round the two
moments. The step itself uses the unrounded ones.
"""

import math

import torch

from swiftfp8.precision.kernels._triton import ceil_div, jit, tl

PART = 1024
PARTS = 4  # the words of a draw of Philox


def adamw_step_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    position: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step `step` (from 1) of one parameter, in place.

    All tensors are contiguous and of one size: weight BF16, remainder int16, gradient BF16 or FP32,
    moments both FP32 or both BF16. `position` tells parameters apart in the noise.
    """
    tensors = (weight, remainder, gradient, exp_avg, exp_avg_sq)
    size = weight.numel()
    assert all(t.is_contiguous() and t.numel() == size for t in tensors)
    assert exp_avg.dtype == exp_avg_sq.dtype
    beta1, beta2 = betas
    rounded = exp_avg.dtype == torch.bfloat16
    with torch.cuda.device_of(weight):
        _adamw[(ceil_div(size, PARTS * PART),)](
            *tensors,
            size,
            step,
            position,
            1.0 - lr * weight_decay,
            1.0 - beta1,
            float(beta2),
            1.0 - beta2,
            1.0 / math.sqrt(1.0 - beta2**step),
            float(eps),
            -lr / (1.0 - beta1**step),
            ROUND=rounded,
            PART=PART,
            # 8 or 4 elements a thread: 16 bytes of the widest tensor, and one layout for all.
            num_warps=4 if rounded else 8,
        )


# A value of 1 or a multiple of 16 must not compile another kernel in the middle of a run.
@jit(do_not_specialize=("step", "position"))
def _adamw(
    W, R, G, M, V, N, step, position,
    keep, rate1, beta2, rate2, inverse_root, eps, move,
    ROUND: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    update_tile(
        W, R, G, M, V, N, tile, step, position,
        keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND, PART,
    )  # fmt: skip


@jit
def update_tile(
    W, R, G, M, V, N, tile, step, position,
    keep, rate1, beta2, rate2, inverse_root, eps, move,
    ROUND: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One tile of a parameter of N elements."""
    k = tl.arange(0, PART)
    i = tile.to(tl.int64) * (4 * PART) + k
    # Without ROUND nothing reads the words, and the compiler leaves them out.
    a, b, c, d = tl.philox(step, k, tile, position, 0, n_rounds=7)
    _update(W, R, G, M, V, i, N, a, keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND)
    i += PART
    _update(W, R, G, M, V, i, N, b, keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND)
    i += PART
    _update(W, R, G, M, V, i, N, c, keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND)
    i += PART
    _update(W, R, G, M, V, i, N, d, keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND)


@jit
def _update(
    W, R, G, M, V, i, N, word,
    keep, rate1, beta2, rate2, inverse_root, eps, move,
    ROUND: tl.constexpr,
):  # fmt: skip
    """The elements i of a parameter."""
    mask = i < N
    w = tl.load(W + i, mask=mask, other=0.0)
    r = tl.load(R + i, mask=mask, other=0)
    g = tl.load(G + i, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(M + i, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(V + i, mask=mask, other=0.0).to(tl.float32)
    bits = (w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + r.to(tl.int32)
    p = bits.to(tl.float32, bitcast=True) * keep
    m += rate1 * (g - m)
    v = v * beta2 + rate2 * g * g
    p += move * m / (tl.sqrt(v) * inverse_root + eps)
    # A GPU's NaN, 0x7fffffff, would be carried into -0.0.
    bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
    tl.store(R + i, bits.to(tl.int16), mask=mask)
    tl.store(W + i, _upper_half(bits + 0x8000), mask=mask)
    if ROUND:
        tl.store(M + i, _rounded(m, word & 0xFFFF), mask=mask)
        tl.store(V + i, _rounded(v, word >> 16), mask=mask)
    else:
        tl.store(M + i, m, mask=mask)
        tl.store(V + i, v, mask=mask)


@jit
def _rounded(x, noise):
    """x in BF16, away from zero where the bits that are cut off and 16 bits of noise carry."""
    bits = x.to(tl.int32, bitcast=True) + noise.to(tl.int32)
    return _upper_half(tl.where(x != x, 0x7FC00000, bits))


@jit
def _upper_half(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
