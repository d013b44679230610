"""Every kernel against its reference, in Triton's interpreter; prints {name: relative error}.

A program of its own, since Triton decides when a kernel is defined whether to interpret it. Run by
test_kernels_interpreted.py with TRITON_INTERPRET=1.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import interpreted
import torch

interpreted.mend()

from swiftfp8.precision.kernels import (  # noqa: E402
    cross_entropy,
    lora,
    quantize,
    rmsnorm,
    rope,
    swiglu,
    thin,
    transpose,
)

MODULES = (cross_entropy, lora, quantize, rmsnorm, rope, swiglu, thin, transpose)
TOKENS, FEATURES, OUTPUTS, RANK = 40, 96, 160, 4
BF16 = torch.bfloat16
errors: dict[str, float] = {}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BF16)


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_contiguous() else value


def compare(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run kernel and reference on equal inputs; returns what each did with its first argument."""
    ours, theirs = [clone(a) for a in args], [clone(a) for a in args]
    result = function(*ours, **kwargs)
    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "runs_triton", lambda x: False))
        expected = function(*theirs, **kwargs)
    record(name, result, expected)
    return ours[0], theirs[0], expected


def record(name: str, result: Any, expected: Any) -> None:
    if isinstance(result, swiglu.GateUp):
        result = (result.data_TI2, result.scale_T2)
        expected = (expected.data_TI2, expected.scale_T2)
    if isinstance(result, thin.Thin8):
        result, expected = result.dequantize(), expected.dequantize()
    if isinstance(result, tuple):
        for index, pair in enumerate(zip(result, expected, strict=True)):
            record(f"{name}[{index}]", *pair)
    elif expected is not None:
        error = (result.float() - expected.float()).norm() / expected.float().norm()
        errors[name] = error.item()


def main() -> None:
    torch.manual_seed(0)
    x, columns = randn(TOKENS, FEATURES), torch.rand(FEATURES)
    x[3] *= 100  # an outlier token
    x[:, 7] *= 30  # an outlier channel
    compare("quantize", quantize.quantize_rows, x)
    compare("quantize folded", quantize.quantize_rows, x, columns)
    compare("quantize long", quantize.quantize_rows, randn(2, 5000))
    compare("transpose", transpose.transpose8, randn(OUTPUTS, FEATURES).to(quantize.E4M3))
    compare("cast and turn", transpose.cast_transpose_op, x, torch.rand(TOKENS) * 100)
    compare("quantize, least scale", quantize.quantize_rows, x, None, torch.tensor(0.05))
    weight = torch.rand(FEATURES).to(BF16) + 0.5
    compare("norm", rmsnorm.rmsnorm_quantize, x, weight, 1e-6)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    back = rmsnorm.rmsnorm_backward
    compare("norm back", back, randn(*x.shape), x, rstd, weight)
    compare("norm back +", back, randn(*x.shape), x, rstd, weight, randn(*x.shape), columns)
    check_swiglu()
    check_lora(x)
    check_rope()
    logits, labels = randn(TOKENS, 300) * 3, torch.randint(0, 300, (TOKENS,))
    labels[5] = -100
    pair = compare("loss", cross_entropy.cross_entropy_, logits, labels, grad=True)
    record("loss gradient", *pair[:2])
    print(json.dumps(errors))


def check_swiglu() -> None:
    gate_up = randn(TOKENS, 2 * FEATURES) * 2
    adapter = (randn(TOKENS, 2 * RANK), randn(2 * FEATURES, RANK))
    for lora_up in (adapter, None):
        for fp8 in (True, False):
            name = f"swiglu lora={lora_up is not None} fp8={fp8}"
            run = compare(name, swiglu.swiglu_quantize, gate_up, lora_up, keep=True, keep_fp8=fp8)
            _, sm, kept = run[2]
            scales = torch.rand(2 * FEATURES)
            dm = randn(TOKENS, FEATURES)
            compare(f"{name} back", swiglu.swiglu_backward, dm, kept, sm, scales)
    compare("swiglu rows", swiglu.swiglu_rows_op, gate_up)
    compare("swiglu only", swiglu.swiglu_quantize, gate_up, adapter, keep=False, keep_fp8=True)


def check_lora(x: torch.Tensor) -> None:
    x8, sx = quantize.quantize_rows_reference(x)
    g8, sg = quantize.quantize_rows_reference(randn(TOKENS, OUTPUTS))
    a, b, ends = randn(3 * RANK, FEATURES), randn(OUTPUTS, RANK), (64, 128, OUTPUTS)
    z, y, residual = randn(TOKENS, 3 * RANK), randn(TOKENS, OUTPUTS), randn(TOKENS, OUTPUTS)
    bs = [part.float() for part in b.split([64, 64, OUTPUTS - 128])]
    inverse = 2.0 ** torch.randint(-3, 4, (OUTPUTS,))
    run = compare("pack", pack, list(a.float().split(RANK)), bs, 2.0, inverse, BF16)
    a8, b8 = run[2][-2:]
    compare("project", thin.project_rows, x8, sx, a8, BF16)
    compare("project blocks", thin.project_rows, g8, sg, b8, BF16)
    compare("add blocks", lora.add_product_, y, z, b, ends)
    compare("add residual", lora.add_product_, y, z, b, ends, residual)
    compare("add transposed", lora.add_product_, randn(*x.shape), z, a.t())
    compare("gather blocks", lora.gather_columns, g8, sg, z, ends, torch.rand(OUTPUTS), 2.0)
    compare("gather transposed", lora.gather_columns, x8, sx, z, transposed=True)


def pack(*args: Any) -> tuple[Any, ...]:
    packed = thin.pack_adapter(*args)
    return packed.a_RK, packed.b_Nr, packed.a8, packed.b8


def check_rope() -> None:
    heads = rope.Heads(query=3, key_value=1, width=32)
    width = heads.ends[-1]
    angles = torch.rand(20, 16) * 6
    cos, sin = (torch.cat([part, part], -1).to(BF16) for part in (angles.cos(), angles.sin()))
    qkv, bias = randn(TOKENS, width), randn(width)
    adapter = (randn(TOKENS, 3 * RANK), randn(width, RANK))
    compare("qkv", rope.finish_qkv_, qkv, adapter, bias, cos, sin, heads)
    compare("qkv bias", rope.finish_qkv_, qkv, None, bias, None, None, heads)
    compare("qkv turned", rope.finish_qkv_, qkv, None, None, cos, sin, heads)
    dq = randn(2, 20, 3, 32).transpose(1, 2)
    dk, dv = randn(2, 1, 20, 32), randn(2, 20, 1, 32).transpose(1, 2)
    gradient = rope.quantize_qkv_gradient
    compare("qkv back", gradient, dq, dk, dv, cos, sin, torch.rand(width))
    compare("qkv back unturned", gradient, dq, dk, dv, None, None, torch.rand(width))


if __name__ == "__main__":
    main()
