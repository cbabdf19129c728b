"""Tensors as the kernels take them: addresses, strides and types, without a copy where one can be saved."""

import functools

import torch

# What qla_load of chunk_tile.cuh calls the types it reads.
FLOAT_TYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address(x: torch.Tensor | None) -> int:
    """Where a kernel finds an optional tensor; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x itself where TMA can walk it, else a copy: unit last stride, other strides positive and of whole 16 bytes, aligned."""
    unit = 16 // x.element_size()
    strides = x.stride()
    if x.data_ptr() % 16 == 0:
        if _walkable(strides, unit):
            return x
        # A dimension of one element has no step to take: any will do.
        strides = (*(unit if n == 1 else s for n, s in zip(x.shape[:-1], strides[:-1], strict=True)), strides[-1])
        if _walkable(strides, unit):
            return x.as_strided(x.shape, strides)
    # Not contiguous(), which returns a dense tensor at an odd address as it is.
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _walkable(strides: tuple[int, ...], unit: int) -> bool:
    return strides[-1] == 1 and all(s > 0 and s % unit == 0 for s in strides[:-1])


def readable(x: torch.Tensor | None) -> torch.Tensor | None:
    """g and beta in a type the kernel reads."""
    return x if x is None or x.dtype in FLOAT_TYPE else x.float()


def constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A zero and a one on the device."""
    # What is made while a graph is captured is the graph's, and has its value only once that has run: not to be kept.
    return _make_constants(device) if torch.cuda.is_current_stream_capturing() else _kept_constants(device)


def _make_constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, device=device), torch.ones(1, device=device)


_kept_constants = functools.lru_cache(_make_constants)


def state_rows(x: torch.Tensor) -> torch.Tensor:
    """States as the kernels read them: themselves, or a dense copy in a type that is read."""
    x = readable(x)
    return x if holds_states(x) else x.clone(memory_format=torch.contiguous_format)


def holds_states(x: torch.Tensor) -> bool:
    """Whether each state is dense and begins at a pair of numbers, which are moved at once; sequences and heads may have any stride."""
    dense = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    return dense and x.data_ptr() % (2 * x.element_size()) == 0 and x.stride(0) % 2 == x.stride(1) % 2 == 0
