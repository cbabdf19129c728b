"""L2 normalisation, and the precision in which the torch path computes."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 tensors, fp32 for every other dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x * rsqrt(sum(x**2) + eps)`` over the last axis.

    Args:
        x: any shape and float dtype; the sum is taken in fp32 (float64 for float64).
        eps: added to the sum of squares, so that a row of zeros stays zero.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    wide = x.to(compute_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
