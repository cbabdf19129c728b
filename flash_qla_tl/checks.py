"""What callers may pass: one function per operator, called once, before anything is allocated.

A refusal names the argument, what was expected in letters and numbers, and what came. Nothing
below the public functions checks again.
"""

import os
from numbers import Real

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
BACKENDS = ("auto", "torch", "tilelang")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
    dht: Tensor | None = None,
) -> None:
    """Check a call of the gated delta rule.

    Raises:
        TypeError: an argument is no tensor (or, for ``scale``, no number), or its dtype is wrong.
        ValueError: a shape, device, option or the contents of ``cu_seqlens`` are wrong.
    """
    if chunk_size != 64:
        raise ValueError(f"chunk_size must be 64, got {chunk_size!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got False")
    if use_gate_in_kernel and g is None:
        raise ValueError("g must be a tensor with use_gate_in_kernel=True, got None")
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log must be a tensor with use_gate_in_kernel=True, got None")
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens must be a tensor with cu_seqlens_cpu, got None")

    _tensor("q", q, FLOATS, None)
    if q.ndim != 4 or min(q.shape[2:]) < 1:
        raise ValueError(f"q must have shape [B, T, H, K] with H and K at least 1, got {list(q.shape)}")
    B, T, H, K = q.shape
    _tensor("k", k, (q.dtype,), q.device)
    _shape("k", k, "B, T, H, K", [B, T, H, K])
    _tensor("v", v, (q.dtype,), q.device)
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or min(v.shape[2:]) < 1:
        raise ValueError(
            f"v must have shape [B, T, HV, V] = [{B}, {T}, HV, V] with HV and V at least 1, got {list(v.shape)}"
        )
    HV, V = v.shape[2:]
    if HV % H:
        raise ValueError(f"v must have shape [B, T, HV, V] with HV a multiple of H = {H}, got {list(v.shape)}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None or name == "beta":
            _tensor(name, x, FLOATS, q.device)
            _shape(name, x, "B, T, HV", [B, T, HV])

    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, cu_seqlens_cpu, q)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1

    state = ("N, HV, V, K", [N, HV, V, K]) if state_v_first else ("N, HV, K, V", [N, HV, K, V])
    activation = ("HV", [HV])
    optional = [("initial_state", initial_state, *state), ("dht", dht, *state)]
    if use_gate_in_kernel:
        optional += [("A_log", A_log, *activation), ("dt_bias", dt_bias, *activation)]
    for name, x, letters, numbers in optional:
        if x is not None:
            _tensor(name, x, FLOATS, q.device)
            _shape(name, x, letters, numbers)


def gated_delta_rule_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A: Tensor, do: Tensor, **others
) -> None:
    """Check a call of its backward; ``others`` and errors as for :func:`gated_delta_rule`."""
    gated_delta_rule(q, k, v, g, beta, **others)
    B, T, HV, V = v.shape
    _tensor("A", A, FLOATS, q.device)
    _shape("A", A, "B, T, HV, 64", [B, T, HV, 64])
    _tensor("do", do, FLOATS, q.device)
    _shape("do", do, "B, T, HV, V", [B, T, HV, V])


def _tensor(name: str, x: object, dtypes: tuple, device: torch.device | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {expected}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on device {device} as q is, got {x.device}")


def _shape(name: str, x: Tensor, letters: str, numbers: list[int]) -> None:
    if list(x.shape) != numbers:
        raise ValueError(f"{name} must have shape [{letters}] = {numbers}, got {list(x.shape)}")


def _cu_seqlens(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, q: Tensor) -> None:
    B, T = q.shape[:2]
    if B != 1:
        raise ValueError(f"q must have B = 1 with cu_seqlens, got B = {B}")
    _tensor("cu_seqlens", cu_seqlens, INTEGERS, q.device)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"cu_seqlens must have shape [N+1] with N at least 0, got {list(cu_seqlens.shape)}")
    if cu_seqlens_cpu is not None:
        _tensor("cu_seqlens_cpu", cu_seqlens_cpu, INTEGERS, None)
        if not cu_seqlens_cpu.is_cpu:
            raise ValueError(f"cu_seqlens_cpu must be on device cpu, got {cu_seqlens_cpu.device}")
        _shape("cu_seqlens_cpu", cu_seqlens_cpu, "N+1", [len(cu_seqlens)])
        _boundaries("cu_seqlens_cpu", cu_seqlens_cpu, T)
    # Reading a tensor on the GPU waits for it, so that is done on request only.
    if cu_seqlens.is_cpu or os.environ.get("FLASH_QLA_TL_CHECK") == "1":
        _boundaries("cu_seqlens", cu_seqlens, T)
        if cu_seqlens_cpu is not None and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
            raise ValueError(
                f"cu_seqlens_cpu must have the values of cu_seqlens = {_values(cu_seqlens)}, "
                f"got {_values(cu_seqlens_cpu)}"
            )


def _boundaries(name: str, cu_seqlens: Tensor, T: int) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    for i, (bos, eos) in enumerate(zip(values, values[1:], strict=False)):
        if eos < bos:
            raise ValueError(f"{name} must not decrease, got {bos} then {eos} at {i + 1}")
    if values[-1] > T:
        raise ValueError(f"{name} must end at most at T = {T}, got {values[-1]}")


def _values(cu_seqlens: Tensor) -> str:
    values = cu_seqlens.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
