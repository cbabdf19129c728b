"""What callers may pass: one function per operator, called once, before anything is allocated.

A refusal names the argument, what was expected in letters and numbers, and what came. Nothing
below the public functions checks again.
"""

import math
import os
from numbers import Real

import torch
from torch import Tensor

from flash_qla_tl.kernels.common.tensors import holds_states

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
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
) -> None:
    """Check a call of the gated delta rule.

    Raises:
        TypeError: an argument is no tensor (or, for ``scale`` and ``pad_slot_id``, no number), or its dtype is wrong.
        ValueError: a shape, device, stride or option, or the contents of ``cu_seqlens`` or ``initial_state_indices`` are wrong.
    """
    _options(scale, chunk_size, backend, allow_neg_eigval, use_beta_sigmoid_in_kernel)
    if use_gate_in_kernel and g is None:
        raise ValueError("g must be a tensor with use_gate_in_kernel=True, got None")
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log must be a tensor with use_gate_in_kernel=True, got None")

    B, T, H, K, HV, V = _heads(q, k, v)
    if g is not None:
        _argument("g", g, q, "B, T, HV", [B, T, HV])
    _argument("beta", beta, q, "B, T, HV", [B, T, HV])
    N = sequences(cu_seqlens, cu_seqlens_cpu, q)
    sizes = [N, HV, K, V]
    _initial_state(initial_state, q, sizes, state_v_first, initial_state_indices, pad_slot_id, inplace_final_state)
    _state("dht", dht, q, sizes, state_v_first)
    if use_gate_in_kernel:
        _argument("A_log", A_log, q, "HV", [HV])
        if dt_bias is not None:
            _argument("dt_bias", dt_bias, q, "HV", [HV])
    _out(out, q, [B, T, HV, V])


def gated_delta_rule_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A: Tensor, do: Tensor, **others
) -> None:
    """Check a call of its backward; ``others`` and errors as for :func:`gated_delta_rule`."""
    gated_delta_rule(q, k, v, g, beta, **others)
    B, T, HV, V = v.shape
    _argument("A", A, q, "B, T, HV, 64", [B, T, HV, 64])
    _argument("do", do, q, "B, T, HV, V", [B, T, HV, V])


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inplace_final_state: bool = False,
) -> None:
    """Check a call of Kimi Delta Attention; errors as for :func:`gated_delta_rule`."""
    _options(scale, chunk_size, backend, allow_neg_eigval, use_beta_sigmoid_in_kernel)
    if use_gate_in_kernel:
        _lower_bound(lower_bound, safe_gate, A_log)

    B, T, H, K, HV, V = _heads(q, k, v)
    _argument("g", g, q, "B, T, HV, K", [B, T, HV, K])
    _argument("beta", beta, q, "B, T, HV", [B, T, HV])
    N = sequences(cu_seqlens, cu_seqlens_cpu, q)
    sizes = [N, HV, K, V]
    _initial_state(initial_state, q, sizes, state_v_first, initial_state_indices, pad_slot_id, inplace_final_state)
    _state("final_state", final_state, q, sizes, state_v_first)
    if use_gate_in_kernel:
        if A_log is not None:
            _argument("A_log", A_log, q, "HV", [HV])
        if dt_bias is not None:
            _tensor("dt_bias", dt_bias, FLOATS, q.device)
            if list(dt_bias.shape) not in ([HV, K], [HV * K]):
                raise ValueError(
                    f"dt_bias must have shape [HV, K] or [HV*K] = {[HV, K]} or {[HV * K]}, got {list(dt_bias.shape)}"
                )
    _out(out, q, [B, T, HV, V])


def inference_only(inputs: tuple[Tensor | None, ...], context: object, **given: object) -> None:
    """Refuse arguments of inference where a gradient would be needed, with a cp_context, and where torch.compile traces.

    Raises:
        NotImplementedError: under torch.compile.
        ValueError: an input requires a gradient, or there is a context.
    """
    names = [name for name, x in given.items() if x is not None and x is not False]
    if not names:
        return
    untraced = [name for name in names if name != "return_intermediate_states"]
    if untraced and torch.compiler.is_compiling():
        raise NotImplementedError(f"torch.compile does not take {untraced[0]}: call it outside of what is compiled")
    if context is not None:
        raise ValueError(f"{names[0]} must not be given with cp_context")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError(f"{names[0]} must not be given where an input requires a gradient: there is none through it")


def cu_seqlens_global(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Check the boundaries of all sequences of a process group; errors as for :func:`gated_delta_rule`."""
    for name, x in (("cu_seqlens_global", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None:
            _tensor(name, x, INTEGERS, None)
            if x.ndim != 1 or len(x) < 2:
                raise ValueError(f"{name} must have shape [N+1] with N at least 1, got {list(x.shape)}")
    if cu_seqlens_cpu is None:
        return _boundaries("cu_seqlens_global", cu_seqlens)
    if not cu_seqlens_cpu.is_cpu:
        raise ValueError(f"cu_seqlens_cpu must be on device cpu, got {cu_seqlens_cpu.device}")
    _shape("cu_seqlens_cpu", cu_seqlens_cpu, "N+1", [len(cu_seqlens)])
    return _boundaries("cu_seqlens_cpu", cu_seqlens_cpu)


def _options(
    scale: float | None, chunk_size: int, backend: str, allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool
) -> None:
    if chunk_size != 64:
        raise ValueError(f"chunk_size must be 64, got {chunk_size!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got False")


def _lower_bound(lower_bound: float | None, safe_gate: bool, A_log: Tensor | None) -> None:
    if lower_bound is None:
        if safe_gate:
            raise ValueError("lower_bound must be at least -5 and below 0 with safe_gate=True, got None")
        if A_log is None:
            raise ValueError("A_log must be a tensor with use_gate_in_kernel=True and no lower_bound, got None")
        return
    if not isinstance(lower_bound, Real):
        raise TypeError(f"lower_bound must be a number or None, got {type(lower_bound).__name__}")
    if safe_gate and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound must be at least -5 and below 0 with safe_gate=True, got {lower_bound}")
    if not -math.inf < lower_bound <= 0:
        raise ValueError(f"lower_bound must be finite and at most 0, got {lower_bound}")


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    """B, T, H, K, HV, V."""
    _tensor("q", q, FLOATS, None)
    B, T, H, K = q.shape if q.ndim == 4 else (0,) * 4
    if H < 1 or K < 1:
        raise ValueError(f"q must have shape [B, T, H, K] with H and K at least 1, got {list(q.shape)}")
    _tensor("k", k, (q.dtype,), q.device)
    _shape("k", k, "B, T, H, K", [B, T, H, K])
    _tensor("v", v, (q.dtype,), q.device)
    *tokens, HV, V = v.shape if v.ndim == 4 else (0,) * 4
    if tokens != [B, T] or HV < 1 or V < 1:
        raise ValueError(
            f"v must have shape [B, T, HV, V] = [{B}, {T}, HV, V] with HV and V at least 1, got {list(v.shape)}"
        )
    if HV % H:
        raise ValueError(f"v must have shape [B, T, HV, V] with HV a multiple of H = {H}, got {list(v.shape)}")
    return B, T, H, K, HV, V


def sequences(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, q: Tensor) -> int:
    """Check the boundaries of packed sequences -> N; errors as for :func:`gated_delta_rule`."""
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, cu_seqlens_cpu, q)
        return len(cu_seqlens) - 1
    if cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens must be a tensor with cu_seqlens_cpu, got None")
    return q.shape[0]


def _state(name: str, x: Tensor | None, q: Tensor, sizes: list[int], state_v_first: bool, rows: str = "N") -> None:
    if x is not None:
        N, HV, K, V = sizes
        letters, numbers = ("V, K", [V, K]) if state_v_first else ("K, V", [K, V])
        _argument(name, x, q, f"{rows}, HV, {letters}", [N, HV, *numbers])


def _initial_state(
    x: Tensor | None,
    q: Tensor,
    sizes: list[int],
    state_v_first: bool,
    indices: Tensor | None,
    pad_slot_id: int,
    in_place: bool,
) -> None:
    """``initial_state``, which may be a pool that ``indices`` look up, and be written."""
    if type(pad_slot_id) is not int:
        raise TypeError(f"pad_slot_id must be an int, got {type(pad_slot_id).__name__}")
    if not -(1 << 31) <= pad_slot_id < 1 << 31:
        raise ValueError(f"pad_slot_id must fit in 32 bits, got {pad_slot_id}")
    if indices is None and not in_place:
        return _state("initial_state", x, q, sizes, state_v_first)
    reason = "inplace_final_state=True" if indices is None else "initial_state_indices"
    if x is None:
        raise ValueError(f"initial_state must be a tensor with {reason}, got None")
    if indices is None:
        _state("initial_state", x, q, sizes, state_v_first)
    else:
        _tensor("initial_state", x, FLOATS, q.device)
        slots = max(x.shape[0], 1) if x.ndim else 1
        _state("initial_state", x, q, [slots, *sizes[1:]], state_v_first, "slots")
        _tensor("initial_state_indices", indices, INTEGERS, q.device)
        _shape("initial_state_indices", indices, "N", sizes[:1])
    if x.dtype == torch.float64 and q.dtype != torch.float64:
        raise TypeError(
            f"initial_state must have dtype torch.float32, bfloat16 or float16 with {reason}, got {x.dtype}"
        )
    traced = torch.compiler.is_compiling()
    if not traced and not holds_states(x):
        raise ValueError(
            f"initial_state must hold each state densely, an even number of elements apart and aligned to two of them, "
            f"with {reason}, got strides {x.stride()}"
        )
    if in_place:
        _written("initial_state", x)
    if indices is not None and not traced and _readable(indices):
        _slots(indices, x.shape[0])


def _slots(indices: Tensor, slots: int) -> None:
    for n, slot in enumerate(indices.tolist()):
        if slot >= slots:
            raise ValueError(f"initial_state_indices must be below slots = {slots}, got {slot} at {n}")


def _out(out: Tensor | None, q: Tensor, numbers: list[int]) -> None:
    if out is not None:
        _tensor("out", out, (q.dtype,), q.device)
        _shape("out", out, "B, T, HV, V", numbers)
        _written("out", out)


def _written(name: str, x: Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"{name} must have an element of memory for each of its own, got strides {x.stride()}")


def _argument(name: str, x: object, q: Tensor, letters: str, numbers: list[int]) -> None:
    """Of any float dtype, on the device of q."""
    _tensor(name, x, FLOATS, q.device)
    _shape(name, x, letters, numbers)


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
        if not torch.compiler.is_compiling():
            _boundaries("cu_seqlens_cpu", cu_seqlens_cpu, T)
    # A traced tensor has no contents; the op that is traced checks them when it runs.
    if torch.compiler.is_compiling():
        return
    if _readable(cu_seqlens):
        _boundaries("cu_seqlens", cu_seqlens, T)
        if cu_seqlens_cpu is not None and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
            raise ValueError(
                f"cu_seqlens_cpu must have the values of cu_seqlens = {_values(cu_seqlens)}, "
                f"got {_values(cu_seqlens_cpu)}"
            )


def _readable(x: Tensor) -> bool:
    """Whether the contents are looked at. Reading a tensor on the GPU waits for it, so that is done on request only."""
    return x.is_cpu or os.environ.get("FLASH_QLA_TL_CHECK") == "1"


def _boundaries(name: str, cu_seqlens: Tensor, T: int | None = None) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    for i, (bos, eos) in enumerate(zip(values, values[1:], strict=False)):
        if eos < bos:
            raise ValueError(f"{name} must not decrease, got {bos} then {eos} at {i + 1}")
    if T is not None and values[-1] > T:
        raise ValueError(f"{name} must end at most at T = {T}, got {values[-1]}")


def _values(cu_seqlens: Tensor) -> str:
    values = cu_seqlens.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
