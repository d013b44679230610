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

The moments are FP32, or BF16 that is rounded stochastically (to nearest, the second moment could
not decay). On a GPU the BF16 weights of a group are stepped by one launch of a kernel
(precision/kernels/adamw_many.py) that puts masters together on the fly; one whose size or gradient
does not suit vector loads gets a launch of its own (adamw.py there). Everything else is stepped by
torch's own AdamW: masters, and FP32 copies of BF16 moments, exist for one batch of weights at a
time, so that needs at most `BATCH` x 12 bytes (20 with BF16 moments) beside the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.adamw import adamw

from swiftfp8.precision.kernels import _triton
from swiftfp8.precision.kernels.adamw import adamw_step_
from swiftfp8.precision.kernels.adamw_many import Stepped, Tiles, adamw_steps_
from swiftfp8.train.rounding import store_rounded

BATCH = 1 << 24
"""Weights whose masters exist at the same time."""
_ALIGN = 64  # elements, so that vector loads of a piece are aligned
KERNEL_SIZE = 1
"""Weights from which on a tensor is the kernel's: even a launch of its own costs a host less than
its share of the batched path, whose stochastic rounding alone is some twenty."""
_Placed = tuple[int, torch.Tensor, dict[str, Any]]  # position among all, parameter, state
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose BF16 parameters are rounded copies of exact FP32 masters.

    The state of a BF16 parameter holds its `remainder` (int16) beside `step`, `exp_avg` and
    `exp_avg_sq`, which are FP32 or, with `state_dtype="bf16"`, BF16 for every parameter. FP32
    parameters are stepped as torch's AdamW steps them. Parameters have to be contiguous.
    `foreach` and `fused` choose torch's implementation where torch steps.

    A step's rounding noise depends on `step`, the parameter's place among all, and the element; a
    loaded state goes on bit for bit on the same kind of device.

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
        state_dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        if state_dtype not in _STATE_DTYPES:
            raise ValueError(f"state_dtype is fp32 or bf16, not {state_dtype}")
        self.state_dtype = state_dtype
        self.lacked_masters = 0
        self._tiles: dict[tuple[int, int], Tiles] = {}  # by group and device
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
        place = 0
        for index, group in enumerate(self.param_groups):
            placed = [
                (i, p, self._begin(p, group))
                for i, p in enumerate(group["params"], place)
                if p.grad is not None
            ]
            kernels: list[_Placed] = []
            rest: list[_Placed] = []
            for one in placed:
                (kernels if _has_kernel(one[1]) else rest).append(one)
            if kernels:
                self._step_by_kernels(kernels, place, index)
            pieces = (piece for i, p, state in rest for piece in _split(p, state, i))
            for batch in _batches(pieces):
                _step(batch, group)
            for some in (kernels, rest):
                if some:
                    torch._foreach_add_([state["step"] for _, _, state in some], 1)
            place += len(group["params"])
        return loss

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the FP32 master of one of the parameters."""
        remainder = self.state.get(parameter, {}).get("remainder")
        weight = parameter.detach()
        return weight.float() if remainder is None else join_master(weight, remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or one of torch's AdamW, which has no masters.

        Moments of another dtype are converted; BF16 ones begin at the nearest values.

        torch's own loader casts every tensor of the state to its parameter's dtype, remainders
        and moments too, so the tensors are put in place here.

        Raises:
            ValueError: a moment or remainder that is not of its weight's shape.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.lacked_masters = 0
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (parameter, group) in zip(saved, own, strict=True):
            if index in state_dict["state"]:
                values = state_dict["state"][index]
                self.state[parameter] = self._restored(parameter, values, group)

    def _begin(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state. It has none before its first step: its master is the weight."""
        state: dict[str, Any] = self.state[parameter]
        if state:
            return state
        state["step"] = torch.zeros((), device=_step_device(parameter, group))
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, dtype=_STATE_DTYPES[self.state_dtype])
        if parameter.dtype == torch.bfloat16:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _step_by_kernels(self, placed: Sequence[_Placed], place: int, index: int) -> None:
        """AdamW on BF16 parameters of group `index`, whose first one is `place` among all.

        States' counts of steps are left as they are.
        """
        group = self.param_groups[index]
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        options["lr"] = float(options["lr"])
        together: dict[Any, list[Stepped]] = {}
        for one in _stepped(placed, place):
            if one.aligned:
                weight, _, gradient, average, _ = one.tensors
                key = (weight.get_device(), gradient.dtype, average.dtype)
                together.setdefault(key, []).append(one)
            else:
                weight, *others = one.tensors
                placed_at = {"step": one.step, "position": one.position}
                adamw_step_(weight.detach(), *others, **placed_at, **options)
        sizes = tuple([p.numel() for p in group["params"]])
        for (device, *_), some in together.items():
            tiles = self._tiles.get((index, device))
            if tiles is None or tiles.sizes != sizes:
                tiles = self._tiles[index, device] = Tiles.of(sizes, some[0].tensors[0].device)
            adamw_steps_(some, tiles, **options)

    def _restored(
        self, parameter: torch.Tensor, values: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key in ("exp_avg", "exp_avg_sq"):
            # A copy: the caller's tensors must not be trained on.
            dtype = _STATE_DTYPES[self.state_dtype]
            state[key] = values[key].to(parameter.device, dtype, copy=True).contiguous()
        step = torch.as_tensor(values["step"], dtype=torch.float32)
        state["step"] = step.to(_step_device(parameter, group), copy=True)
        if parameter.dtype == torch.bfloat16:
            remainder = values.get("remainder")
            # Any other dtype went through an optimizer that knows nothing of remainders.
            if remainder is None or remainder.dtype != torch.int16:
                self.lacked_masters += 1
                remainder = torch.zeros_like(parameter, dtype=torch.int16)
            state["remainder"] = remainder.to(parameter.device, copy=True).contiguous()
        for key, tensor in state.items():
            # A kernel would write beyond the end of a smaller one.
            if key != "step" and tensor.shape != parameter.shape:
                shapes = f"{tuple(tensor.shape)}, its weight is of {tuple(parameter.shape)}"
                raise ValueError(f"{key} of the state is of shape {shapes}")
        return state


def drop_masters(optimizer: torch.optim.Optimizer) -> int:
    """Free remainders that another optimizer loaded and can't use; returns how many."""
    return sum(state.pop("remainder", None) is not None for state in optimizer.state.values())


def _has_kernel(parameter: torch.Tensor) -> bool:
    """Whether the parameter is stepped by a kernel of ours."""
    large = parameter.dtype == torch.bfloat16 and parameter.numel() >= KERNEL_SIZE
    return large and _triton.MISSING is None and _triton.runs_triton(parameter)


def _step_device(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where the count of steps is read: by torch's fused kernel on the device, else by Python."""
    on_device = bool(group["fused"]) and not _has_kernel(parameter)
    return parameter.device if on_device else torch.device("cpu")


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
    position: int  # of the parameter among all
    start: int  # of the stretch in the parameter
    remainder: torch.Tensor | None = None  # None where the weight is FP32, its own master

    @property
    def room(self) -> int:
        """Elements that it takes of a batch."""
        return -(-self.weight.numel() // _ALIGN) * _ALIGN


def _stepped(placed: Sequence[_Placed], place: int) -> Iterator[Stepped]:
    """What the kernels take of parameters of a group, whose first one is `place` among all."""
    for position, parameter, state in placed:
        gradient = parameter.grad
        assert gradient is not None
        average, square = state["exp_avg"], state["exp_avg_sq"]
        tensors = (parameter, state["remainder"], gradient.contiguous(), average, square)
        yield Stepped.of(position - place, tensors, int(state["step"]) + 1, position)


def _split(
    parameter: torch.Tensor, state: Mapping[str, torch.Tensor], position: int
) -> Iterator[_Piece]:
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
        yield _Piece(step=state["step"].clone(), position=position, start=start, **cut)


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
    averages = [piece.exp_avg.float() for piece in batch]  # themselves, where they are FP32
    squares = [piece.exp_avg_sq.float() for piece in batch]
    adamw(
        [master_of.get(id(piece), piece.weight) for piece in batch],
        [piece.gradient.float() for piece in batch],
        averages,
        squares,
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
    for piece, average, square in zip(batch, averages, squares, strict=True):
        if piece.exp_avg.dtype == torch.bfloat16:
            pairs = ((piece.exp_avg, average), (piece.exp_avg_sq, square))
            store_rounded(pairs, piece.step, piece.position, piece.start)
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
