"""FlashKDA's two functions: ``from flash_qla_tl.compat import flash_kda``.

All that FlashKDA takes means the same here. What it refuses and this takes (head dims, grouped value
heads, strides, other dtypes, int32 boundaries, no ``A_log``) is in the docstring of
:func:`flash_qla_tl.kda_fwd`. Bad arguments raise ValueError or TypeError, not RuntimeError.
"""

from torch import Tensor

from flash_qla_tl.kda import get_workspace_size, kda_fwd

__all__ = ["fwd", "get_workspace_size"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """:func:`flash_qla_tl.kda_fwd` with the arguments of FlashKDA; fills ``out`` and ``final_state``."""
    kda_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
