"""Frozen FP8 linears that read one input, merged, with the LoRA adapters on them.

q, k, v (and gate, up) read the same x, so x is quantized once, multiplied once, and projected by
all their A's at once. The merged weight is the only copy: each linear's own weight is a view of its
rows. The adapters' parameters stay PEFT's; a forward pass packs copies of them in the compute dtype
(see lora.py), which its backward pass uses too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swiftfp8.precision.kernels.lora import add_product_, gather_columns
from swiftfp8.precision.kernels.quantize import scaled_mm
from swiftfp8.precision.kernels.thin import PackedAdapter, pack_adapter, project_rows
from swiftfp8.precision.kernels.transpose import transpose8


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA's A [r, K] and B [N_i, r] on each linear of a group, all with one scaling."""

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    scaling: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All A's, then all B's."""
        return self.a + self.b


@dataclass(kw_only=True)
class Group:
    """W8 [N, K] with channel scales s_w [N]; `ends` are where each linear's rows end."""

    weight8_NK: torch.Tensor
    scale_N: torch.Tensor
    ends: tuple[int, ...]
    bias_N: torch.Tensor | None = None
    adapter: Adapter | None = None
    split_accumulator: bool = False
    _constants: "_Constants | None" = field(default=None, repr=False)

    @torch.no_grad()
    def pack(self, dtype: torch.dtype) -> PackedAdapter | None:
        """The adapter's values of this moment in `dtype`; None without an adapter.

        Made anew in every forward pass, for an optimizer need not leave a trace: a fused AdamW
        does not even advance a parameter's version.
        """
        if self.adapter is None:
            return None
        adapter = self.adapter
        return pack_adapter(
            adapter.a, adapter.b, adapter.scaling, self._constants_NK.inverse_scale_N, dtype
        )

    def matmul(self, x8_TK: torch.Tensor, sx_T1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The frozen part alone, x Wᵀ, [T, N]."""
        return scaled_mm(
            x8_TK,
            sx_T1,
            self.weight8_NK,
            self.scale_N,
            split_accumulator=self.split_accumulator,
            dtype=dtype,
        )

    def project(
        self, x8_TK: torch.Tensor, sx_T1: torch.Tensor, packed: PackedAdapter | None
    ) -> torch.Tensor | None:
        """Xa = x Aᵀ, [T, R]; None without an adapter."""
        return None if packed is None else project_rows(x8_TK, sx_T1, packed.a8, packed.a_RK.dtype)

    def forward(
        self,
        x8_TK: torch.Tensor,
        sx_T1: torch.Tensor,
        packed: PackedAdapter | None,
        dtype: torch.dtype,
        residual_TN: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Y = x Wᵀ + xa Bᵀ (+ residual), without the bias; and xa for the backward pass."""
        y = self.matmul(x8_TK, sx_T1, dtype)
        xa = self.project(x8_TK, sx_T1, packed)
        if xa is not None and packed is not None:
            add_product_(y, xa, packed.b_Nr, self.ends, residual_TN)
        elif residual_TN is not None:
            y += residual_TN
        return y, xa

    def backward(
        self,
        g8_TN: torch.Tensor,
        sg_T1: torch.Tensor,
        xa_TR: torch.Tensor | None,
        packed: PackedAdapter | None,
        dtype: torch.dtype,
        *,
        need_dx: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """dx [T, K], gb = dy B [T, R] (for `gradients`), dB [N, r]. g8, sg are rows of dy * s_w."""
        gb = db = dx = None
        if packed is not None and xa_TR is not None:
            gb = project_rows(g8_TN, sg_T1, packed.b8, dtype)
            inverse = self._constants_NK.inverse_scale_N
            db = gather_columns(g8_TN, sg_T1, xa_TR, self.ends, inverse, packed.scaling)
        if need_dx:
            dx = scaled_mm(
                g8_TN,
                sg_T1,
                transpose8(self.weight8_NK),
                self._constants_NK.ones_K,
                split_accumulator=self.split_accumulator,
                dtype=dtype,
            )
            if gb is not None and packed is not None:
                add_product_(dx, gb, packed.a_RK.t())
        return dx, gb, db

    def gradients(
        self,
        x8_TK: torch.Tensor,
        sx_T1: torch.Tensor,
        gb_TR: torch.Tensor | None,
        db_Nr: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """The adapter's gradients, in the order of `Adapter.tensors`; [] without an adapter."""
        if self.adapter is None or gb_TR is None or db_Nr is None:
            return []
        da = gather_columns(x8_TK, sx_T1, gb_TR, transposed=True)
        das = da.split(self.adapter.a[0].shape[0])
        dbs = [db_Nr[lo:hi] for lo, hi in zip((0, *self.ends[:-1]), self.ends, strict=True)]
        tensors = self.adapter.tensors
        return [grad.to(t.dtype) for grad, t in zip((*das, *dbs), tensors, strict=True)]

    @property
    def fold_N(self) -> torch.Tensor:
        """s_w in BF16, which holds powers of two exactly: the factors of dy before its cast."""
        return self._constants_NK.fold_N

    @property
    def _constants_NK(self) -> "_Constants":
        if self._constants is None:
            self._constants = _Constants(
                inverse_scale_N=self.scale_N.reciprocal(),
                ones_K=torch.ones(self.weight8_NK.shape[1], device=self.weight8_NK.device),
                fold_N=self.scale_N.bfloat16(),
            )
        return self._constants


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """Of s_w: 1 / s_w, itself in BF16; and the scales of Wᵀ's rows once s_w is folded into dy."""

    inverse_scale_N: torch.Tensor
    ones_K: torch.Tensor
    fold_N: torch.Tensor


def merge_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows; for e4m3 too, whose concatenation PyTorch lacks on some devices."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].element_size() == 1:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))
