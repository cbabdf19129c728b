"""What the public functions share: the choice of a backend, and the two layouts of a state."""

from __future__ import annotations

import warnings
from functools import cache

from torch import Tensor


def on_kernels(operator: str, refusal: str | None, q: Tensor, backend: str) -> bool:
    """Whether a call runs in the kernels, which for the reason ``refusal`` do not take it.

    Raises:
        ValueError: ``backend="tilelang"`` insists, and there is such a reason.
    """
    if backend == "torch":
        return False
    if refusal is not None and backend == "tilelang":
        raise ValueError(f"backend must be 'auto' or 'torch' for these tensors, got 'tilelang': {refusal}")
    if refusal is not None and q.is_cuda:
        _say_why(operator, refusal)
    return refusal is None


@cache
def _say_why(operator: str, refusal: str) -> None:
    warnings.warn(f"{operator} runs in torch instead of its kernels: {refusal}", stacklevel=4)


def state_layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """``state_v_first``, also where the caller knows it by its former name.

    Raises:
        ValueError: both were given.
    """
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout must be None with state_v_first, got both")
    warnings.warn("transpose_state_layout is deprecated, use state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def k_first(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """A state between the caller's layout and [.., K, V]; the swap undoes itself."""
    return state.mT if state_v_first and state is not None else state
