"""Cross entropy of one chunk of logits, whose gradient overwrites them.

    lse = log Σ_v exp z_v      loss = lse - z_y      dz = softmax(z) - onehot(y)

Rows whose label is negative are ignored: loss 0, gradient 0. dz is not divided by the number of
tokens here: that is one scalar, and the caller applies it to the much smaller dh.
"""

import torch

from swiftfp8.precision.kernels._triton import jit, runs_triton, tl


def cross_entropy_(logits_TV: torch.Tensor, labels_T: torch.Tensor, *, grad: bool) -> torch.Tensor:
    """Per-token loss [T], float32; with `grad` the logits then hold their own gradient."""
    if not runs_triton(logits_TV):
        return _reference(logits_TV, labels_T, grad)
    tokens, vocabulary = logits_TV.shape
    loss = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    _cross_entropy[(tokens,)](
        logits_TV,
        labels_T,
        loss,
        vocabulary,
        logits_TV.stride(0),
        GRAD=grad,
        BLOCK=min(8192, 1 << (vocabulary - 1).bit_length()),
        num_warps=16,
    )
    return loss


def _reference(logits_TV: torch.Tensor, labels_T: torch.Tensor, grad: bool) -> torch.Tensor:
    z = logits_TV.float()
    known = labels_T >= 0
    safe = labels_T.clamp(min=0)[:, None]
    loss = (z.logsumexp(-1) - z.gather(1, safe)[:, 0]) * known
    if grad:
        dz = z.softmax(-1)
        dz.scatter_add_(1, safe, torch.full_like(safe, -1.0, dtype=dz.dtype))
        logits_TV.copy_(dz * known[:, None])
    return loss


@jit
def _cross_entropy(Z, LABELS, LOSS, V, stride, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    z_row = Z + row * stride
    known = label >= 0
    # Read before the reductions below, whose barriers keep it ahead of the gradient's stores.
    at_label = tl.load(z_row + label, mask=known, other=0.0).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum and sum; they are joined once, after the row.
    peak = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + offsets
        z = tl.load(z_row + v, mask=v < V, other=-1e30).to(tl.float32)
        higher = tl.maximum(peak, z)
        total = total * tl.exp(peak - higher) + tl.where(v < V, tl.exp(z - higher), 0.0)
        peak = higher
    top = tl.max(peak, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    tl.store(LOSS + row, tl.where(known, lse - at_label, 0.0))
    if GRAD:
        for first in range(0, V, BLOCK):
            v = first + offsets
            z = tl.load(z_row + v, mask=v < V, other=0.0).to(tl.float32)
            dz = tl.exp(z - lse) - tl.where(v == label, 1.0, 0.0)
            tl.store(z_row + v, tl.where(known, dz, 0.0).to(Z.dtype.element_ty), mask=v < V)
