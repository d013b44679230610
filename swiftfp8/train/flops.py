"""Model FLOPs per token and the peak of known devices, for MFU (model FLOPs utilisation).

A matmul y = x Wᵀ with W [out, in] costs, per token,
    2 · in · out   for y,
    2 · in · out   for dx,
    2 · in · out   for dW, only where W is trained.
So a frozen weight counts 4 FLOPs a token and a trained one 6. A LoRA adapter of rank r adds
6 · r · (in + out). Attention scores, norms and recomputation are not counted, nor are the first
layer's dx and padding: MFU is useful work over the device's dense 16-bit peak, in FP8 runs too, so
that runs of different precision compare.
"""

from __future__ import annotations

from swiftfp8.plan import Plan

# Dense BF16 (FP16 before Ampere) tensor-core TFLOP/s, from the vendor's data sheets. More specific
# names come first: the first that is part of the device's name is taken.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("GH200", 989.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def flops_per_token(plan: Plan) -> float:
    """FLOPs of one token's forward and backward pass through the planned matmuls."""
    total = 0.0
    for layer in plan.layers:
        size = layer.in_features * layer.out_features * layer.count
        total += (6 if layer.trainable else 4) * size
        if layer.lora and plan.lora is not None:
            features = layer.in_features + layer.out_features
            total += 6 * (layer.lora_rank or plan.lora.rank) * features * layer.count
    return total


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of a GPU by its name, None where it is not known."""
    name = device_name.upper()
    for part, tflops in _PEAK_TFLOPS:
        if part.upper() in name:
            return tflops * 1e12
    return None
