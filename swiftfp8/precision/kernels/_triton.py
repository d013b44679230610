"""Triton where it is installed; without it every module here still imports, and says why not."""

import os
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    MISSING: str | None = None
except ImportError as error:  # a CPU build of PyTorch comes without Triton
    triton = None
    MISSING = f"Triton can't be imported: {error}"

    class tl:  # type: ignore[no-redef]
        """Stands in for triton.language in the kernels' annotations."""

        constexpr = object


# Triton itself reads this when a kernel is defined.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, or the bare function where there is no Triton to launch it."""
    if kernel is None:
        return lambda kernel: jit(kernel, **options)
    return kernel if triton is None else triton.jit(kernel, **options)


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a launcher one operator to torch.compile; without Triton, what it is: a function."""
    if MISSING is not None:
        return lambda function: function
    return torch.library.triton_op(f"swiftfp8::{name}", mutates_args={})


def traced(kernel: Any) -> Any:
    """The kernel for the body of an `operator`, which torch.compile looks into."""
    return kernel if MISSING or INTERPRETED else torch.library.wrap_triton(kernel)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def runs_triton(x: torch.Tensor) -> bool:
    """Whether x's kernels run in Triton: on a GPU, or anywhere under Triton's interpreter."""
    return x.is_cuda or INTERPRETED


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
