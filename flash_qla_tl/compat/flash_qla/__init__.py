"""FlashQLA's functions as of flash-qla 0.1.3: ``from flash_qla_tl.compat import flash_qla``.

Names, the order of arguments and of returned tuples are FlashQLA's, so that code written for it runs
here with another import; :mod:`flash_qla_tl.compat.flash_qla.utils` has its helpers. What FlashQLA
refuses and this takes (head dims, float dtypes, 16-bit gates, strides, any device) is in the docstring
of :func:`flash_qla_tl.chunk_gated_delta_rule`. Two things differ: bad arguments raise ValueError or
TypeError, not AssertionError, and a ``scale`` of 0 is 0, not the default.

Its splitting of long sequences within a GPU is a matter of speed. Of the arguments that steer it ``auto_cp``
changes rounding, and ``enable_fwd_cp_cache``, ``force_intra_cp`` and ``is_train`` change nothing. ``cp_context``,
for sequences over several GPUs, is taken by :func:`chunk_gated_delta_rule` alone (docs/sequence_parallel.md).
"""

from __future__ import annotations

from torch import Tensor

import flash_qla_tl
from flash_qla_tl.compat.flash_qla import utils
from flash_qla_tl.gated_delta_rule import ChunkGatedDeltaRuleBwd

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "chunk_gated_delta_rule_fwd", "utils"]

# Of the interface, for callers that ask before they use it.
__version__ = "0.1.3"


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    cp_context: object | None = None,
    force_intra_cp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_qla_tl.chunk_gated_delta_rule` with the arguments of FlashQLA."""
    return flash_qla_tl.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        head_first=head_first,
        state_v_first=state_v_first,
        auto_cp=auto_cp,
        cp_context=cp_context,
    )


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context: object | None = None,
    is_train: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, None]:
    """:func:`flash_qla_tl.chunk_gated_delta_rule_fwd` with the arguments and the six results of FlashQLA.

    Returns:
        ``g_cumsum, A, o, h, final_state`` and None, the ``cp_cache``. With ``cu_seqlens``, ``h`` has
        exactly as many chunks as there are, for which ``output_h`` waits for the device.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
        NotImplementedError: ``cp_context`` was given.
    """
    _between_gpus(cp_context)
    out = flash_qla_tl.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        output_h,
        auto_cp,
        state_v_first,
        cu_seqlens_cpu=cu_seqlens.cpu() if output_h and cu_seqlens is not None else None,
    )
    return *out, None


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: object | None = None,
    cp_context: object | None = None,
) -> ChunkGatedDeltaRuleBwd:
    """:func:`flash_qla_tl.chunk_gated_delta_rule_bwd` with the arguments of FlashQLA.

    ``g`` and ``A`` are those that the forward returned.

    Returns:
        ``dq, dk, dv, db, dg, dh0``; see there.

    Raises:
        TypeError, ValueError: an argument does not fit, ``cp_cache`` being other than the None that
            the forward returned included; see the message.
        NotImplementedError: ``cp_context`` was given.
    """
    _between_gpus(cp_context)
    if cp_cache is not None:
        raise ValueError(f"cp_cache must be None, as the forward returns it here, got {type(cp_cache).__name__}")
    return flash_qla_tl.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, A, do, dht, scale, initial_state, cu_seqlens, state_v_first, auto_cp
    )


def _between_gpus(cp_context: object) -> None:
    if cp_context is not None:
        raise NotImplementedError("cp_context must be None: it is taken by chunk_gated_delta_rule alone")
