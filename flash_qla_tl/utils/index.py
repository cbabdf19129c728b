"""Packed sequences: between padded and packed, and the tables of their chunks.

Everything here is computed from the present values of ``cu_seqlens``; nothing is cached. Results
whose size depends on those values (all but the offsets) wait for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Drop the padding: the first tokens of every row, one after the other.

    Args:
        x: ``[N, T_max, ...]``, one sequence a row.
        cu_seqlens: ``[N+1]`` int32 or int64, cumulative lengths from 0.

    Returns:
        ``[1, T, ...]`` with ``T = cu_seqlens[-1]``.

    Raises:
        ValueError: ``x`` has another number of rows, or a sequence is longer than ``T_max``.
    """
    lengths = cu_seqlens.diff()
    N, T_max = lengths.numel(), _longest(lengths)
    if x.ndim < 2 or x.shape[0] != N or x.shape[1] < T_max:
        raise ValueError(f"x must have shape [N, T_max, ...] = [{N}, >= {T_max}, ...], got {list(x.shape)}")
    return x[_valid(lengths, x.shape[1])].unsqueeze(0)


def unpack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The reverse of :func:`pack`: one sequence a row, padded with zeros to the longest.

    Args:
        x: ``[1, T, ...]`` with ``T >= cu_seqlens[-1]``; rows past it are dropped.
        cu_seqlens: ``[N+1]`` int32 or int64, cumulative lengths from 0.

    Returns:
        ``[N, T_max, ...]`` with ``T_max`` the longest sequence.

    Raises:
        ValueError: ``x`` is not one packed row, or is shorter than ``cu_seqlens[-1]``.
    """
    lengths = cu_seqlens.diff()
    total = int(cu_seqlens[-1])
    if x.ndim < 2 or x.shape[0] != 1 or x.shape[1] < total:
        raise ValueError(f"x must have shape [1, T, ...] = [1, >= {total}, ...], got {list(x.shape)}")
    T_max = _longest(lengths)
    out = x.new_zeros(lengths.numel(), T_max, *x.shape[2:])
    out[_valid(lengths, T_max)] = x[0, :total]
    return out


def count_chunks(cu_seqlens_cpu: Tensor | None) -> tuple[int | None, int | None]:
    """Of packed sequences whose lengths the host knows: all chunks of 64 tokens, and those of the longest."""
    if cu_seqlens_cpu is None:
        return None, None
    counts = (cu_seqlens_cpu.diff() + 63) // 64
    return int(counts.sum()), int(counts.max()) if len(counts) else 0


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Exclusive sum of the chunk counts: ``[N+1]``, dtype of ``cu_seqlens``."""
    counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    return F.pad(counts.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """``[NT, 2]``: for every chunk its sequence, and its place among that sequence's chunks."""
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    sequence = torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())
    place = torch.arange(len(sequence), device=offsets.device) - offsets[sequence]
    return torch.stack((sequence, place), dim=1).to(cu_seqlens.dtype)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _valid(lengths: Tensor, T_max: int) -> Tensor:
    return torch.arange(T_max, device=lengths.device) < lengths[:, None]
