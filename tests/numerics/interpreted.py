"""Triton's CPU interpreter, mended where it rounds wrongly, for running kernels in these tests.

Triton 3.6's interpreter loses the carry when it rounds to FP8 (126 becomes 64) and multiplies
BF16 and FP8 matrices by their bit patterns. Both are replaced by PyTorch's conversions.
With NumPy 2.4 it can't use a computed loop bound either, an array of one element.
"""

from typing import Any

import numpy as np
import torch

_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_TORCH = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}


def _convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    dtype, bits = _TORCH[str(source)]
    raw = np.ascontiguousarray(data).view(np.dtype(f"i{source.primitive_bitwidth // 8}"))
    if source.primitive_bitwidth == 8:
        raw = raw.view(np.uint8)
    values = torch.from_numpy(raw.copy()).view(dtype)
    dtype, bits = _TORCH[str(target)]
    out = values.to(dtype).view(bits).numpy()
    return out.view(_BITS[target.primitive_bitwidth]).reshape(data.shape)


def mend() -> None:
    """Replace the interpreter's conversions and matrix product."""
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        def widen(x: Any) -> np.ndarray:
            if x.dtype.scalar in (tl.bfloat16, tl.float8e4nv):
                return _convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
            return x.data

        return interpreter.TensorHandle(np.matmul(widen(a), widen(b)) + d.data, d.dtype.scalar)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, *args: Any) -> None:
        patch_tensor(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = create_dot
