"""Kimi Delta Attention forward: prepare.py makes what a chunk needs beside the state, state_loop.py walks the chunks.

Between them lies a workspace of 56.75 KB a chunk and value head, written once and read once (twice by a head split over
two CTAs, the second time from L2).
"""

import functools

import torch

from flash_qla_tl.kernels.common.state_pool import read_slots, same_memory
from flash_qla_tl.kernels.common.target import CHUNK
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, holds_states, state_rows, tma_ready
from flash_qla_tl.kernels.kda.prepare import prepare
from flash_qla_tl.kernels.kda.state_loop import state_loop


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    *,
    h0: torch.Tensor | None = None,
    h0_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    ht: torch.Tensor | None = None,
    o: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    output_h: bool = False,
    num_chunks: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and the state before every chunk, for arguments that were checked at the door.

    ht, o: filled if given, whatever their strides; ht of any float type, and it may be h0.
    h0_indices: where in h0, a pool that holds_states, each sequence has its state.
    num_chunks: slots of h for packed input, where the caller knows the exact count; else T // 64 + N.
    """
    B, num_tokens, HV, _ = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    empty = functools.partial(torch.empty, device=v.device)
    if o is None:
        o = empty(v.shape, dtype=v.dtype)
    h = None
    if output_h:
        slots = -(-num_tokens // CHUNK)
        if cu_seqlens is not None:
            slots = num_tokens // CHUNK + N if num_chunks is None else num_chunks
        h = torch.zeros((B, slots, HV, v.shape[3], v.shape[3]), dtype=k.dtype, device=v.device)
    if N == 0 or o.numel() == 0:
        # Nothing runs: no token, or no sequence to hold one.
        o.zero_()
        if ht is not None and not same_memory(ht, h0):
            ht.zero_() if h0 is None else ht.copy_(read_slots(h0, h0_indices, pad_slot_id))
        return o, h

    workspace = prepare(
        q,
        k,
        g,
        beta,
        float(scale),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=None if lower_bound is None else float(lower_bound),
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    h0 = None if h0 is None else state_rows(h0)
    out = tma_ready(o)
    state = ht if ht is None or (ht.dtype in FLOAT_TYPE and holds_states(ht)) else empty(ht.shape, dtype=torch.float32)
    state_loop(
        workspace,
        tma_ready(v),
        out,
        h0=h0,
        h0_indices=h0_indices,
        pad_slot_id=pad_slot_id,
        ht=state,
        h=None if h is None else h.flatten(0, 1),
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )
    if out.data_ptr() != o.data_ptr():
        o.copy_(out)
    if state is not ht:
        ht.copy_(state)
    return o, h
