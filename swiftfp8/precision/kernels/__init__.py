"""Triton kernels of the FP8 LoRA engine, each beside a plain PyTorch reference of the same numbers.

A public function here runs its kernel on a GPU and its reference on a CPU. The references are what
the tests compare with float64, and what the engine's hand-written backward pass is checked on
without a GPU. Names of tensors end in their axes: T tokens, K a linear's input features, N its
output features, R LoRA's total rank, D head dimension; `x8` is e4m3, `sx` its float32 row scales,
and x = x8 * sx.
"""
