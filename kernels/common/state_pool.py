"""States in a pool of slots: what a kernel is told of them, and its reads and writes in torch."""

import torch

from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE


def same_memory(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    """Whether both are the same numbers, as two slices of a larger tensor can be."""
    if y is None or x.dtype != y.dtype or x.shape != y.shape or x.stride() != y.stride():
        return False
    return x.data_ptr() == y.data_ptr()


def state_arguments(x: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Address, type, and strides of sequences (or slots) and heads."""
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), FLOAT_TYPE[x.dtype], *x.stride()[:2])


def slot_arguments(
    pool: torch.Tensor | None, indices: torch.Tensor | None, pad_slot_id: int
) -> tuple[int, int, int, int]:
    """Address of the indices, their stride in 32-bit words (of 64-bit ones the kernels read the low word), padding, slots."""
    if indices is None:
        return (0, 0, -1, 0)
    return (indices.data_ptr(), indices.stride(0) * indices.element_size() // 4, pad_slot_id, pool.shape[0])


def has_slot(pool: torch.Tensor, indices: torch.Tensor, pad_slot_id: int) -> torch.Tensor:
    """[N]: which sequences have a slot in the pool."""
    return (indices >= 0) & (indices < pool.shape[0]) & (indices != pad_slot_id)


def read_slots(pool: torch.Tensor | None, indices: torch.Tensor | None, pad_slot_id: int) -> torch.Tensor | None:
    """[N, HV, ...]: the state of each sequence, zeros where it has no slot; the pool itself without indices."""
    if indices is None:
        return pool
    states = pool.index_select(0, indices.clamp(0, pool.shape[0] - 1))
    return torch.where(has_slot(pool, indices, pad_slot_id)[:, None, None, None], states, 0)


def write_slots(
    pool: torch.Tensor,
    indices: torch.Tensor | None,
    pad_slot_id: int,
    states: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """The reverse: the states [N, HV, ...] of sequences with a slot and a token."""
    if indices is None:
        pool.copy_(states)
        return
    written = has_slot(pool, indices, pad_slot_id)
    if cu_seqlens is not None:
        written &= (cu_seqlens.diff() > 0).to(written.device)
    pool[indices[written].long()] = states[written].to(pool.dtype)
