"""The helpers of ``flash_qla.utils``, with its arguments and results.

``tensor_cache`` and ``input_guard`` are missing: nothing here is cached by the identity of a tensor,
and no function needs its inputs contiguous.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flash_qla_tl.utils import index
from flash_qla_tl.utils.index import pack, prepare_chunk_indices, unpack
from flash_qla_tl.utils.norm import compute_dtype, l2norm
from flash_qla_tl.utils.profile import profile

__all__ = [
    "fill_last_chunk_of_g",
    "l2norm",
    "l2norm_bwd",
    "l2norm_fwd",
    "pack",
    "pad_and_reshape",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_varlen_metadata",
    "profile",
    "unpack",
]


def l2norm_fwd(x: Tensor, eps: float = 1e-6, dim: int = -1) -> tuple[Tensor, Tensor]:
    """:func:`flash_qla_tl.utils.l2norm` and the factor it used.

    Args:
        x: any shape and float dtype.
        eps: added to the sum of squares.
        dim: the last axis.

    Returns:
        A tensor of the shape and dtype of ``x``, and ``rsqrt(sum(x**2) + eps)`` without the last
        axis, fp32 (float64 for float64).

    Raises:
        ValueError: ``dim`` is another axis.
    """
    _last_axis(dim, x)
    rstd = (x.to(compute_dtype(x)).square().sum(-1) + eps).rsqrt()
    return l2norm(x, eps), rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6, dim: int = -1) -> Tensor:
    """The gradient of :func:`l2norm_fwd` with respect to ``x``, in the dtype of ``rstd``.

    Args:
        y, rstd: what the forward returned.
        dy: gradient with respect to ``y``, any float dtype.
        eps: accepted; ``rstd`` has it.
        dim: the last axis.

    Raises:
        ValueError: ``dim`` is another axis.
    """
    _last_axis(dim, y)
    y, dy = y.to(rstd.dtype), dy.to(rstd.dtype)
    return (dy - (dy * y).sum(-1, keepdim=True) * y) * rstd[..., None]


def pad_and_reshape(x: Tensor, dim: int, chunk_size: int = 64) -> Tensor:
    """Cut axis ``dim`` into chunks, the last one padded with zeros.

    Args:
        x: ``[..., T, ...]`` with ``T`` at ``dim``, counted from the front.

    Returns:
        ``[..., ceil(T / chunk_size), chunk_size, ...]``.
    """
    padding = -x.shape[dim] % chunk_size
    padded = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, padding))
    return padded.unflatten(dim, (padded.shape[dim] // chunk_size, chunk_size))


def fill_last_chunk_of_g(
    g: Tensor, num_tokens: int, cu_seqlens: Tensor | None, chunk_size: int = 64, reverse: bool = False
) -> Tensor:
    """Give the padding of each last chunk the gate of the token before it, in place.

    Args:
        g: ``[N, NT, chunk_size, HV]``, of each sequence its chunks: gates summed within them.
        num_tokens: of every sequence, where ``cu_seqlens`` is None.
        cu_seqlens: ``[N+1]``, cumulative lengths from 0.
        reverse: of a gradient instead: the last row of such a chunk is added to that of its last token.

    Returns:
        ``g``.
    """
    lengths = [num_tokens] * len(g) if cu_seqlens is None else cu_seqlens.diff().tolist()
    for chunks, length in zip(g, lengths, strict=True):
        full, tail = divmod(length, chunk_size)
        if tail and reverse:
            chunks[full, tail - 1] += chunks[full, -1]
        elif tail:
            chunks[full, tail:] = chunks[full, tail - 1]
    return g


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """:func:`flash_qla_tl.utils.prepare_chunk_offsets`, and the count of all chunks, which waits for the device."""
    offsets = index.prepare_chunk_offsets(cu_seqlens, chunk_size)
    return offsets, int(offsets[-1])


def prepare_varlen_metadata(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> Tensor:
    """``cu_seqlens``: no call needs more than its present values."""
    return cu_seqlens


def _last_axis(dim: int, x: Tensor) -> None:
    if dim not in (-1, x.ndim - 1):
        raise ValueError(f"dim must be the last axis, -1 or {x.ndim - 1}, got {dim}")
