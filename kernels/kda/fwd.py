"""Kimi Delta Attention forward: prepare.py makes what a chunk needs beside the state, state_loop.py walks the chunks.

Between them lies a workspace of 56.75 KB a chunk and value head, written once and read once (twice by a head split over
two CTAs, the second time from L2). Long sequences with few heads are split into segments that are walked at the same time; then
segment_states.py, and kernels/common/segment_starts.py, make the states before them, and read most of the workspace once more.
"""

import functools

import torch

from flash_qla_tl.kernels.common.segments import (
    MAX_PARTS,
    MIN_SEGMENT,
    Lengths,
    Segments,
    launched_early,
    segments_us,
    whole_us,
)
from flash_qla_tl.kernels.common.state_pool import read_slots, same_memory
from flash_qla_tl.kernels.common.target import CHUNK, dtype_name, num_sms
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, holds_states, state_rows, tma_ready
from flash_qla_tl.kernels.kda.prepare import prepare
from flash_qla_tl.kernels.kda.segment_states import segment_starts
from flash_qla_tl.kernels.kda.state_loop import Config, V, state_loop

# Times on an H200. state_loop: a chunk by VR, where memory is not the limit; of a chunk and head at memory's rate.
STEP_US, MEMORY_US = {64: 1.1, 128: 1.5}, 0.024
# The states before segments: two launches and the ends of the first; a chunk, likewise; a segment in segment_starts.
BEFORE_US, BEFORE_STEP_US, BEFORE_MEMORY_US, FOLD_US = 20.0, 1.0, 0.015, 2.9
# What segments must gain at least, as these are estimates.
GAIN = 1.1


@functools.lru_cache(maxsize=4096)
def pick_config(dtype: str, HV: int, lengths: Lengths, num_sms: int, emit: bool) -> tuple[Config, int]:
    """-> the variant of state_loop, and the chunks of a segment: what takes least time.

    A head is split over two CTAs where that fills the card better, a sequence into segments where that gains more than the states
    before them cost.
    """
    step_us = {64: STEP_US[64]} if emit else STEP_US
    memory = MEMORY_US * lengths.total * HV
    walk, VR = min((whole_us(us, HV * V // x, lengths, num_sms), x) for x, us in step_us.items())
    best = max(walk, memory), VR, max(lengths.longest, 1)
    for parts in range(2, MAX_PARTS + 1):
        segment = -(-lengths.longest // parts)
        if segment < MIN_SEGMENT:
            break
        walk, VR = min((segments_us(us, HV * V // x, lengths, segment, num_sms), x) for x, us in step_us.items())
        best = min(best, (GAIN * (max(walk, memory) + _before_us(HV, lengths, segment, num_sms)), VR, segment))
    _, VR, segment = best
    return Config(VR, dtype, emit), segment


def _before_us(HV: int, lengths: Lengths, segment: int, num_sms: int) -> float:
    """Of the states before segments: N and M of all but a sequence's last one, M not of its first."""
    parts = -(-lengths.longest // segment)
    if lengths.equal:
        walks = lengths.number * HV * (2 * parts - 3)
        walk = BEFORE_STEP_US * segment * -(-walks // num_sms)
    else:
        walk = BEFORE_STEP_US * (2 * lengths.total * HV / num_sms + segment)
    fold = FOLD_US * parts * -(-2 * lengths.number * HV // num_sms)
    return BEFORE_US + max(walk, BEFORE_MEMORY_US * lengths.total * HV) + fold


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
    longest: int | None = None,
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
    num_chunks, longest: of packed input, chunks of all sequences and of the longest one, where the caller knows them; h has so many
    slots then, and else T // 64 + N.
    """
    B, num_tokens, HV, _ = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    empty = functools.partial(torch.empty, device=v.device)
    if o is None:
        o = empty(v.shape, dtype=v.dtype)
    slots_per_row = -(-num_tokens // CHUNK)
    h = None
    if output_h:
        slots = slots_per_row
        if cu_seqlens is not None:
            slots = num_tokens // CHUNK + N if num_chunks is None else num_chunks
        h = torch.zeros((B, slots, HV, v.shape[3], v.shape[3]), dtype=k.dtype, device=v.device)
    if N == 0 or o.numel() == 0:
        # Nothing runs: no token, or no sequence to hold one.
        o.zero_()
        if ht is not None and not same_memory(ht, h0):
            ht.zero_() if h0 is None else ht.copy_(read_slots(h0, h0_indices, pad_slot_id))
        return o, h

    # Copies come first: the walk may begin while the launch in front of it, which is to be prepare's, has not ended.
    h0 = None if h0 is None else state_rows(h0)
    v, out = tma_ready(v), tma_ready(o)
    state = ht if ht is None or (ht.dtype in FLOAT_TYPE and holds_states(ht)) else empty(ht.shape, dtype=torch.float32)
    sms = num_sms(v.device.index)
    lengths = Lengths.of(N, num_tokens, cu_seqlens is not None, num_chunks, longest)
    config, segment = pick_config(dtype_name(v), HV, lengths, sms, h is not None)
    cut = Segments.of(segment, lengths, num_tokens, cu_seqlens is not None)
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
        early=not cut.split and launched_early(N * HV * V // config.VR, config.VR, sms),
    )
    before = {
        "h0": h0,
        "h0_indices": h0_indices,
        "pad_slot_id": pad_slot_id,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    starts = segment_starts(workspace, v, cut, **before) if cut.split else None
    state_loop(
        config, workspace, v, out, cut, ht=state, h=None if h is None else h.flatten(0, 1), starts=starts, **before
    )
    if out.data_ptr() != o.data_ptr():
        o.copy_(out)
    if state is not ht:
        ht.copy_(state)
    return o, h
