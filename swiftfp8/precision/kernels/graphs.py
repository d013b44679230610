"""CUDA graphs of fused layers: one launch for a layer's forward pass, one for its backward pass.

A fused layer is some 40 kernels each way, and a host takes longer to start one than a small model's
GPU takes to run it: a 0.5B model on 4,096 tokens keeps an H200 busy for a quarter of the time. A
graph starts all of them at once. It is recorded when a shape of input comes for the third time, and
serves every later call of that shape.

What a graph reads and writes lies at fixed addresses. Layers hand their outputs to each other as
they are; only the first layer's input, the rotary embedding and the gradient that enters from above
are copied in. Memory is shared as it is without graphs: one pool serves all layers, where a graph
takes over what those before it have freed. That is right as long as graphs run in the order in
which they were recorded, forward through the layers and back, one shape at a time. A call that
would break the order (a second forward pass before the first one's backward) runs without graphs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from swiftfp8.precision.kernels import decoder
from swiftfp8.precision.kernels.decoder import Attention, DecoderWeights

Rotary = tuple[torch.Tensor, torch.Tensor]
Key = tuple[Any, ...]
_WARM_UP = 2  # calls that compile kernels and let libraries choose theirs
_MOST_SHAPES = 4


class GraphPool:
    """What the layers of one model share: memory, a stream to record on, inputs, and order."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._stream: Any = None
        self._shared: dict[Key, list[torch.Tensor]] = {}
        self._shared_seen: dict[str, tuple[torch.Tensor, ...]] = {}
        self._gradients: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outputs: set[int] = set()  # addresses of layers' outputs
        self._open: dict[Key, weakref.WeakSet[_Pass]] = {}
        self.shapes: set[Key] = set()
        self.recorded = 0
        self.replayed = 0

    def admits(self, key: Key) -> bool:
        """Whether another shape may be recorded."""
        return key in self.shapes or len(self.shapes) < _MOST_SHAPES

    def is_free(self, key: Key) -> bool:
        """Whether no forward pass of another shape still waits for its backward pass."""
        return not any(passes for other, passes in self._open.items() if other != key and passes)

    def begin(self, key: Key) -> _Pass:
        """Mark a forward pass as waiting for its backward pass."""
        one = _Pass()
        self._open.setdefault(key, weakref.WeakSet()).add(one)
        return one

    def end(self, key: Key, one: _Pass) -> None:
        """The backward pass has come."""
        self._open[key].discard(one)

    def is_open(self, key: Key, one: _Pass | None) -> bool:
        """Whether that forward pass still waits."""
        return one is not None and one in self._open[key]

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of what `work` launches, and what it returned (not computed yet)."""
        if self._memory is None:
            torch.cuda.empty_cache()  # what the calls before have left would be held twice
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self.recorded += 1
        return graph, result

    def hold_rotary(self, rotary: Rotary) -> Rotary:
        """(cos, sin) of this pass, [P, D] each, at fixed addresses."""
        cos, sin = self._hold("rotary", rotary)
        return cos.view(-1, cos.shape[-1]), sin.view(-1, sin.shape[-1])

    def hold_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The attention mask of this pass at a fixed address."""
        return self._hold("mask", (mask,))[0]

    def _hold(self, name: str, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """What every layer of a pass is given: the first one copies it."""
        key = (name, tensors[0].shape, tensors[0].dtype)
        seen = self._shared_seen.get(name)
        if seen is None or seen[0] is not tensors[0]:
            if key in self._shared:
                torch._foreach_copy_(self._shared[key], list(tensors))
            else:
                self._shared[key] = [
                    part.detach().clone(memory_format=torch.contiguous_format) for part in tensors
                ]
            self._shared_seen[name] = tensors
        return self._shared[key]

    def hold_input(self, x: torch.Tensor) -> torch.Tensor:
        """x where it is, if a layer's graph wrote it there, or a place of its own for it."""
        return x.detach() if x.data_ptr() in self._outputs else x.detach().clone()

    def add_output(self, y: torch.Tensor) -> None:
        """Remember that a graph writes this tensor."""
        self._outputs.add(y.data_ptr())

    def gradient_buffer(self, key: Key, like: torch.Tensor) -> torch.Tensor:
        """Where dx goes: one of two buffers by turns, that which does not hold `like`, the dy."""
        if key not in self._gradients:
            self._gradients[key] = (torch.empty_like(like), torch.empty_like(like))
        first, second = self._gradients[key]
        return second if like.data_ptr() == first.data_ptr() else first

    def hold_gradient(self, key: Key, dy: torch.Tensor) -> torch.Tensor:
        """dy where it is, if it lies in one of those buffers, or a place of its own for it."""
        held = [buffer.data_ptr() for buffer in self._gradients.get(key, ())]
        return dy.detach() if dy.data_ptr() in held else dy.detach().clone()


class _Pass:
    """A forward pass that waits for its backward pass; gone when its graph of autograd is."""


class LayerGraphs:
    """One fused layer's graphs, by shape of input."""

    def __init__(self, weights: DecoderWeights, pool: GraphPool) -> None:
        self.weights = weights
        self.pool = pool
        self._pairs: dict[Key, _Pair] = {}
        self._calls: Counter[Key] = Counter()

    def run(
        self,
        x_BSK: torch.Tensor,
        rotary: Rotary | None,
        mask: torch.Tensor | None,
        make_attention: Callable[[Rotary | None, torch.Tensor | None], Attention],
        *,
        rotate: bool,
    ) -> torch.Tensor | None:
        """The layer's output, or None where this call has to run without a graph.

        `rotary` is the (cos, sin), `mask` the attention mask that all layers of this pass are
        given; `make_attention` takes both at fixed addresses, cos and sin as [P, D]; with `rotate`
        the layer itself rotates q and k.
        """
        if not x_BSK.requires_grad and not self._trains():
            return None  # no backward pass will come: what a graph keeps for it would stay
        turns = None if rotary is None else rotary[0].shape
        hidden = None if mask is None else (mask.shape, mask.dtype)
        shape = (x_BSK.shape, x_BSK.dtype, turns, hidden, self.weights.recompute)
        key = (shape, x_BSK.requires_grad)  # the first layer's input needs no gradient
        pair = self._pairs.get(key)
        if pair is None and not self._warm(shape):
            return None
        if not self.pool.is_free(shape):
            return None
        if pair is not None and (pair.is_open() or not pair.still_reads()):
            return None
        held = None if rotary is None else self.pool.hold_rotary(rotary)
        held_mask = None if mask is None else self.pool.hold_mask(mask)
        if pair is None:
            self.pool.shapes.add(shape)
            pair = self._pairs[key] = _Pair(
                shape,
                self.pool,
                self.weights,
                held if rotate else None,
                make_attention(held, held_mask),
                need_dx=x_BSK.requires_grad,
            )
        return _Graphed.apply(x_BSK, pair, *self.weights.adapter_tensors())

    def _trains(self) -> bool:
        return any(tensor.requires_grad for tensor in self.weights.adapter_tensors())

    def _warm(self, shape: Key) -> bool:
        self._calls[shape] += 1
        return self._calls[shape] > _WARM_UP and self.pool.admits(shape)


class _Pair:
    """The two graphs of one layer and shape."""

    def __init__(
        self,
        key: Key,
        pool: GraphPool,
        weights: DecoderWeights,
        rotary: Rotary | None,
        attention: Attention,
        *,
        need_dx: bool,
    ) -> None:
        self.key, self.pool, self.weights = key, pool, weights
        self.rotary, self.attention, self.need_dx = rotary, attention, need_dx
        self.reads = self._addresses(weights)
        self.parameters = weights.adapter_tensors()
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # Weak: a pass that is never walked back must go with its graph of autograd.
        self._open: weakref.ref[_Pass] | None = None
        self.forward_graph: Any = None
        self.backward_graph: Any = None

    def is_open(self) -> bool:
        """Whether a forward pass of this pair waits for its backward pass."""
        return self.pool.is_open(self.key, self.newest)

    @property
    def newest(self) -> _Pass | None:
        """The last forward pass, while its graph of autograd lives."""
        return None if self._open is None else self._open()

    def still_reads(self) -> bool:
        """Whether the weights lie where the graphs read them."""
        return self.reads == self._addresses(self.weights)

    @staticmethod
    def _addresses(weights: DecoderWeights) -> list[int]:
        frozen = [group.weight8_NK for group in weights.groups]
        return [tensor.data_ptr() for tensor in (*frozen, *weights.adapter_tensors())]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, _Pass]:
        """The output, at its fixed address."""
        if self.forward_graph is None:
            self.x = self.pool.hold_input(x)
            self.forward_graph, (self.y, self.kept) = self.pool.record(self._forward)
            self.pool.add_output(self.y)
        elif x.data_ptr() != self.x.data_ptr():
            self.x.copy_(x)
        self.forward_graph.replay()
        self.pool.replayed += 1
        one = self.pool.begin(self.key)
        self._open = weakref.ref(one)
        return self.y.view(x.shape), one

    def _forward(self) -> Any:
        keep = self.weights.recompute != "full"
        y, kept = decoder.forward(self.x, self.weights, self.rotary, self.attention, keep=keep)
        return y, kept

    def backward(self, dy: torch.Tensor) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """dx and the adapters' gradients, at their fixed addresses."""
        if self.backward_graph is None:
            self.dy = self.pool.hold_gradient(self.key, dy)
            out = self.pool.gradient_buffer(self.key, self.dy) if self.need_dx else None
            self.backward_graph, result = self.pool.record(lambda: self._backward(out))
            self.dx, self.flat = result
            self.kept = None
        elif dy.data_ptr() != self.dy.data_ptr():
            self.dy.copy_(dy)
        self.backward_graph.replay()
        self.pool.replayed += 1
        # Gradients are handed out as parts of one copy: one kernel, not one for each of them.
        gradients = () if self.flat is None else self.flat.clone().split(self.sizes)
        parts = [part.view(p.shape) for part, p in zip(gradients, self.parameters, strict=True)]
        return None if self.dx is None else self.dx.view(dy.shape), parts

    def _backward(
        self, out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        kept = self.kept
        if kept is None:
            _, kept = decoder.forward(
                self.x, self.weights, self.rotary, self.attention, keep=True, output=False
            )
        assert kept is not None
        dx, gradients = decoder.backward(
            self.dy, kept, self.weights, self.rotary, need_dx=self.need_dx, out=out
        )
        return dx, torch.cat([g.reshape(-1) for g in gradients]) if gradients else None


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_BSK: torch.Tensor, pair: _Pair, *adapters: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(x_BSK.device.type, enabled=False):
            y, ctx.one = pair.forward(x_BSK)
        ctx.pair = pair
        # An alias of its own: autograd writes into the tensor that it is handed.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy_BSK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        pair, one = ctx.pair, ctx.one
        assert one is not None, "a layer's graph can be walked back only once"
        assert pair.newest is one, "another forward pass has written over what this one kept"
        with torch.autocast(dy_BSK.device.type, enabled=False):
            dx, gradients = pair.backward(dy_BSK.contiguous())
        pair.pool.end(pair.key, one)
        ctx.one = None
        return (None if dx is None else dx.detach(), None, *gradients)
