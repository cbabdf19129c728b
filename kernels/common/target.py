"""What the kernels are compiled for, and whether they take given tensors. Imports no TileLang."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections.abc import Callable

import torch

# Spelled out, never "auto": the cache key then holds no fact of the compiling machine.
TARGET = {"kind": "cuda", "arch": "sm_90a"}
CHUNK = 64
HEAD_DIMS = (64, 128)
SMEM_CAPACITY = 232_448
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
DTYPES = tuple(_DTYPE_NAMES.values())


class ReadOnlyCache(UserWarning):
    """A kernel was compiled, and could not be kept for the next process."""


def dtype_name(x: torch.Tensor) -> str:
    return _DTYPE_NAMES[x.dtype]


@functools.lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.lru_cache
def num_sms(index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def on_device(index: int):
    """The launch goes to the tensors' device; the current one is put back."""
    return contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernels do not take these tensors, or None where they do."""
    if q.device.type != "cuda":
        return f"the kernels need CUDA tensors, got {q.device.type}"
    capability = _capability(q.device.index)
    if capability != (9, 0):
        return f"the kernels need a GPU of compute capability 9.0 (Hopper), got {capability[0]}.{capability[1]}"
    if q.dtype not in _DTYPE_NAMES or not q.dtype == k.dtype == v.dtype:
        return f"the kernels need q, k, v all bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    K, V = q.shape[-1], v.shape[-1]
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        return f"the kernels need head dims K, V in {HEAD_DIMS}, got K={K}, V={V}"
    return None


def compiled(build: Callable, *args: object) -> Callable:
    """The kernel of a builder: from TileLang's cache, or compiled.

    Raises:
        RuntimeError: it has to be compiled, and nvcc is missing.
    """
    try:
        return build(*args)
    except Exception as error:
        from tilelang.contrib import nvcc
        from tilelang.env import env

        try:
            found = shutil.which("nvcc") or shutil.which(nvcc.get_nvcc_compiler())
        except RuntimeError:
            found = None
        if not found:
            raise RuntimeError(
                "compiling the Hopper kernels needs CUDA's compiler nvcc, and none was found: install a CUDA toolkit "
                'and set CUDA_HOME, or install it as a package: pip install "flash_qla_tl[nvcc]"'
            ) from error
        if os.access(env.TILELANG_CACHE_DIR, os.W_OK):
            raise
    # TileLang reads from a cache that it may not write to, but fails where it would add a kernel.
    warnings.warn(
        f"TILELANG_CACHE_DIR={env.TILELANG_CACHE_DIR} cannot be written to: a kernel is compiled for this process only",
        ReadOnlyCache,
        stacklevel=2,
    )
    env.disable_cache()
    try:
        return build(*args)
    finally:
        env.enable_cache()


def launcher(build: Callable, *args: object) -> Callable:
    """The kernel of a builder as a function of its arguments.

    The function itself, and not the object that TileLang makes for it, which on every call walks the modules that it was
    linked from and looks the function up.
    """
    return compiled(build, *args).adapter.get_exportable_executable()["main"]
