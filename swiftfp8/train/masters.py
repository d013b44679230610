"""AdamW on exact FP32 masters of BF16 weights, for two bytes a parameter more than BF16 alone.

A BF16 weight has 8 significant bits, so between 2^e and 2^(e+1) its neighbours are 2^(e-7) apart.
AdamW moves a weight by about the learning rate: at 1e-5 less than half that distance for every
weight above 0.003, and a sum rounded to BF16 is then the old weight. Nearly all of training is
lost that way. Here each update is added to an FP32 master, and the model's weight is the master
rounded to BF16.

**Bits.** BF16 is FP32's upper half. For the 32 bits m of a master, taken as an integer,

    weight    w = (m + 0x8000) >> 16        the nearest BF16 value, a tie away from zero
    remainder r = m - (w << 16)             -0x8000 <= r <= 0x7fff: a signed 16-bit integer
    master    m = (w << 16) + r             for every m: the arithmetic is modulo 2^32

Adding to the bits of a float grows its magnitude, whatever its sign, and carries into the
exponent as rounding should; r's bits are m's lower half as they are. (Ties to even would need
r = +0x8000 as well.) A NaN is made the quiet NaN 0x7fc00000 first: of a GPU's NaN, 0x7fffffff, the
carry would make -0.0. Masters above BF16's largest number round to infinity, as in any cast.

The moments are FP32. Masters exist for one batch of weights at a time, so a step needs at most
`BATCH` x 12 bytes beside its 2 + 2 + 8 bytes a parameter; the arithmetic on them is
`torch.optim.AdamW`'s own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

BATCH = 1 << 24
"""Weights whose masters exist at the same time."""
_ALIGN = 64  # elements, so that vector loads of a piece are aligned
_STATE_DTYPES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose BF16 parameters are rounded copies of exact FP32 masters.

    The state of a BF16 parameter holds its `remainder` (int16) beside `step`, `exp_avg` and
    `exp_avg_sq` (FP32). FP32 parameters are stepped as torch's AdamW steps them. Parameters have
    to be contiguous.

    `lacked_masters` tells, after `load_state_dict`, how many BF16 parameters of the state had no
    remainder: their masters begin at the BF16 weights.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.lacked_masters = 0
        super().__init__(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)
        # Gradients are in BF16, without a loss scale: no scaler may be folded into the step.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of BF16 and FP32 parameters.

        Raises:
            ValueError: a parameter of another dtype, or one that is not contiguous.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"masters are for BF16 weights, not for {parameter.dtype}")
            if not parameter.is_contiguous():
                raise ValueError(f"a weight of shape {tuple(parameter.shape)} is not contiguous")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One AdamW step on the masters; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                self._begin(parameter, on_device=bool(group["fused"]))
            pieces = (piece for p in parameters for piece in _split(p, self.state[p]))
            for batch in _batches(pieces):
                _step(batch, group)
            for parameter in parameters:
                self.state[parameter]["step"] += 1
        return loss

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the FP32 master of one of the parameters."""
        remainder = self.state.get(parameter, {}).get("remainder")
        weight = parameter.detach()
        return weight.float() if remainder is None else join_master(weight, remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or one of torch's AdamW, which has no masters.

        torch's own loader casts every tensor of the state to its parameter's dtype, remainders
        and moments too, so the tensors are put in place here.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.lacked_masters = 0
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (parameter, group) in zip(saved, own, strict=True):
            if index in state_dict["state"]:
                values = state_dict["state"][index]
                self.state[parameter] = self._restored(parameter, values, bool(group["fused"]))

    def _begin(self, parameter: torch.Tensor, *, on_device: bool) -> None:
        """The state of a parameter that has none yet: its master is the weight."""
        state = self.state[parameter]
        if state:
            return
        device = parameter.device if on_device else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.dtype == torch.bfloat16:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)

    def _restored(
        self, parameter: torch.Tensor, values: Mapping[str, Any], on_device: bool
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, dtype in _STATE_DTYPES.items():
            # A copy: the caller's tensors must not be trained on.
            state[key] = values[key].to(parameter.device, dtype, copy=True)
        step = torch.as_tensor(values["step"], dtype=torch.float32)
        state["step"] = step.to(parameter.device if on_device else "cpu", copy=True)
        if parameter.dtype == torch.bfloat16:
            remainder = values.get("remainder")
            # Any other dtype went through an optimizer that knows nothing of remainders.
            if remainder is None or remainder.dtype != torch.int16:
                self.lacked_masters += 1
                remainder = torch.zeros_like(parameter, dtype=torch.int16)
            state["remainder"] = remainder.to(parameter.device, copy=True)
        return state


def drop_masters(optimizer: torch.optim.Optimizer) -> int:
    """Free remainders that another optimizer loaded and can't use; returns how many."""
    return sum(state.pop("remainder", None) is not None for state in optimizer.state.values())


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 master of a BF16 weight and its int16 remainder."""
    master = weight.float()
    master.view(torch.int32).add_(remainder)
    return master


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The BF16 weight and int16 remainder of a contiguous FP32 master."""
    flat = master.reshape(-1).clone()
    weight = torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device)
    remainder = torch.empty(flat.shape, dtype=torch.int16, device=flat.device)
    _write_back(flat, [(0, weight, remainder)])
    return weight.view(master.shape), remainder.view(master.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """A stretch of one parameter, flat: what a step reads and writes."""

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor  # a copy, which the step counts up
    remainder: torch.Tensor | None = None  # None where the weight is FP32, its own master

    @property
    def room(self) -> int:
        """Elements that it takes of a batch."""
        return -(-self.weight.numel() // _ALIGN) * _ALIGN


def _split(parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Iterator[_Piece]:
    """Pieces of at most `BATCH` weights."""
    gradient = parameter.grad
    assert gradient is not None
    tensors = {"weight": parameter.detach()}
    tensors |= {key: tensor for key, tensor in state.items() if key != "step"}
    # What is written must be a view.
    flat = {key: tensor.view(-1) for key, tensor in tensors.items()}
    flat["gradient"] = gradient.reshape(-1)
    for start in range(0, parameter.numel(), BATCH):
        cut = {key: tensor[start : start + BATCH] for key, tensor in flat.items()}
        yield _Piece(step=state["step"].clone(), **cut)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one device, `BATCH` weights together."""
    batch: list[_Piece] = []
    filled = 0
    for piece in pieces:
        moved = bool(batch) and piece.weight.device != batch[0].weight.device
        if batch and (moved or filled + piece.room > BATCH):
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.room
    if batch:
        yield batch


def _step(batch: list[_Piece], group: Mapping[str, Any]) -> None:
    """AdamW on a batch: masters are put together, stepped, and taken apart again."""
    rounded = [piece for piece in batch if piece.remainder is not None]
    starts, size = [], 0
    for piece in rounded:
        starts.append(size)
        size += piece.room
    buffer = torch.empty(size, device=batch[0].weight.device)
    views = [
        buffer[start : start + piece.weight.numel()]
        for start, piece in zip(starts, rounded, strict=True)
    ]
    if rounded:
        torch._foreach_copy_(views, [piece.weight for piece in rounded])
    for view, piece in zip(views, rounded, strict=True):
        view.view(torch.int32).add_(piece.remainder)
    master_of = {id(piece): view for piece, view in zip(rounded, views, strict=True)}
    beta1, beta2 = group["betas"]
    adamw(
        [master_of.get(id(piece), piece.weight) for piece in batch],
        [piece.gradient.float() for piece in batch],
        [piece.exp_avg for piece in batch],
        [piece.exp_avg_sq for piece in batch],
        [],
        [piece.step for piece in batch],
        foreach=group["foreach"],
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    _write_back(
        buffer,
        [(s, piece.weight, piece.remainder) for s, piece in zip(starts, rounded, strict=True)],  # type: ignore[misc]
    )


def _write_back(masters: torch.Tensor, parts: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Split a flat buffer of masters, which is used up, into (start, weight, remainder)."""
    masters.masked_fill_(masters.isnan(), torch.nan)
    halves = masters.view(torch.int16)  # little-endian: the lower half comes first
    lower, upper = halves[0::2], halves[1::2]
    for start, _, remainder in parts:
        remainder.copy_(lower[start : start + remainder.numel()])
    masters.view(torch.int32).add_(0x8000)
    for start, weight, _ in parts:
        weight.view(torch.int16).copy_(upper[start : start + weight.numel()])
