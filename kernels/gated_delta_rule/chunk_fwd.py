"""The gated delta rule forward: o and the final state, a walk over the chunks; on request the state before every chunk.

Per value head and chunk of 64 tokens, with S the state before the chunk, G the in-chunk cumulative log2 decay, and T
and P as chunk_intra.py made them:

    W  = V - 2^G o (K S)                            Vn = T W
    O  = scale 2^G o (Q S) + P Vn                   S <- 2^G_last S + K^T (2^(G_last - G) o Vn)

Grid (N * HV * V / VR): a CTA carries VR rows of one head's state through one sequence. Rows run along V: a state
warpgroup keeps 64 of them, S^T [64, K], in fp32 registers for the whole sequence, and every product with S is a
wgmma with S (or W, Vn) as its register operand. Two VR: 128 where sequences x heads fill the card, 64 (the head split over
two CTAs) where they do not.

    warps            work                                          waits on                         signals
    STATE (4 VR/64)  W, Vn, O, S of a chunk                        loaded ready tp_ready o_free     free o_full
    LOAD (1)         TMA of K, Q, V, gate factors; of T with P^T   free                             loaded tp_loaded
    ROWS (1)         zeroes K and V past the sequence's end in     loaded                           ready
                     a ragged last chunk
    SPLIT (1)        T and P^T from the tile that holds both       loaded tp_loaded                 tp_ready
    STORE (1)        O, the sequence's rows of it                  o_full                           o_free

It may be launched while the kernel before it ends: LOAD waits for that, and STATE where segments have states made by it.

Rows past a sequence's end are made inert: K and V zero here, decay 1 and beta 0 in T; garbage rows of Q reach only rows of O
that are not stored. Everything that varies per call (heads, lengths, strides, types and layouts of the states, scale, which
states there are) is a run-time value.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.gates import FACTORS, NUM_FACTORS, device_source
from flash_qla_tl.kernels.common.segments import Lengths, Segments, launched_early, pick
from flash_qla_tl.kernels.common.state_pool import read_slots, slot_arguments, state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher, num_sms, on_device
from flash_qla_tl.kernels.common.tensors import address, readable, state_rows, tma_ready
from flash_qla_tl.kernels.common.walk import advance, find_segment, find_slot, load_state, store_state, store_state_as
from flash_qla_tl.kernels.gated_delta_rule.chunk_intra import chunk_intra, cu_stride
from flash_qla_tl.kernels.gated_delta_rule.segment_states import segment_starts

STAGES = 3
# On an H200 with all SMs busy: a chunk, K = V = 128, by VR; the two launches before a walk in segments.
STEP_US, BEFORE_US = {64: 1.2, 128: 1.8}, 20.0
# c = a b^T and c += a b on the tensor cores, each warp with its 16 rows; and a function of chunk_tile.cuh.
product = functools.partial(T.wgmma_gemm, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
add_product = functools.partial(T.wgmma_gemm, clear_accum=False, policy=T.GemmWarpPolicy.FullRow)
device = functools.partial(T.call_extern, "handle")
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    # Every access is guarded here by the sequence's own bounds; the pass would guard by the tensors' on top.
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}


@dataclass(frozen=True)
class Config:
    """What one compiled variant is."""

    K: int
    VR: int  # rows of the state a CTA carries: 64 a state warpgroup
    dtype: str
    emit: bool  # also the state before every chunk

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of the producers and the state warpgroups: together at most 64 Ki a CTA."""
        return (40, 232)


@functools.lru_cache(maxsize=4096)
def pick_config(
    K: int, V: int, dtype: str, HV: int, lengths: Lengths, num_sms: int, emit: bool, split: bool
) -> tuple[Config, int]:
    """-> the variant, and the chunks of a segment. `split`: whether sequences may be cut into segments."""
    step_us = {64: STEP_US[64]} if V == 64 or emit else STEP_US
    VR, chunks = pick(step_us, HV * V, BEFORE_US, HV * (K + V) // 64, lengths, num_sms, split)
    return Config(K, VR, dtype, emit), chunks


def configs() -> list[Config]:
    """Every variant that pick_config can return."""
    return [
        Config(K, VR, dtype, emit)
        for dtype in ("bfloat16", "float16")
        for K in (64, 128)
        for VR, emit in ((64, False), (64, True), (128, False))
    ]


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    K, VR, dtype, emit = config.K, config.VR, config.dtype, config.emit
    accum = "float32"
    NW = VR // 64
    PRODUCER = NW * 128
    THREADS = PRODUCER + 128
    B, num_tokens, H, HV, slots = (T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "slots"))
    V = T.dynamic("V")
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "qkvo"}

    @T.macro
    def store_out(packed_out, o_s, o_full, wg, lane):
        device("qla_store_transposed", T.access_ptr(packed_out, "r"), T.address_of(o_s[wg * 64, 0]))
        T.fence_proxy_async()
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(o_full[wg])

    @T.prim_func
    def gdn_chunk_fwd_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        o: T.StridedTensor((B, num_tokens, HV, V), (*strides["o"], 1), dtype),
        TPs: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        o_address: T.int64, num_seqs: T.int32, group: T.int32, cu_address: T.int64, cu_stride: T.int32, slots_per_row: T.int32,
        segments: T.int32, segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32, starts_address: T.int64,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        indices_address: T.int64, indices_stride: T.int32, pad_slot: T.int32, num_slots: T.int32,
        ht_address: T.int64, ht_type: T.int32, ht_stride_n: T.int64, ht_stride_h: T.int64, state_v_first: T.int32,
        h_address: T.int64, h_slots: T.int32, h_stride_n: T.int32, chunk_offsets_address: T.int64,
    ):  # fmt: skip
        with T.Kernel(HV * (V // VR) * segments, threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            k_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            q_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            v_s = T.alloc_shared((STAGES * VR, CHUNK), dtype)
            t_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            o_s = T.alloc_shared((VR, CHUNK), dtype)
            # TMA wants a stage to begin at a multiple of 128 bytes.
            table = T.alloc_shared((STAGES, 288), accum)
            S = T.alloc_fragment((VR, K), accum)
            Sb = T.alloc_fragment((VR, K), dtype)
            acc = T.alloc_fragment((VR, CHUNK), accum)
            out = T.alloc_fragment((VR, CHUNK), accum)
            w = T.alloc_fragment((VR, CHUNK), dtype)
            vn = T.alloc_fragment((VR, CHUNK), dtype)
            vn_decayed = T.alloc_fragment((VR, CHUNK), dtype)
            packed_out = T.alloc_local((16,), "uint32")
            loaded = T.alloc_barrier([1] * STAGES)
            ready = T.alloc_barrier([1] * STAGES)
            tp_loaded = T.alloc_barrier([1] * STAGES)
            tp_ready = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([4 * NW] * STAGES)
            o_full = T.alloc_barrier([4] * NW)
            o_free = T.alloc_barrier([1] * NW)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (o_s, v_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            # Every role walks the chunks with the same counters: the stage of a chunk and the parity of its barriers.
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            i_g = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            v0 = T.alloc_var("int32")
            i_g = T.truncdiv(i_x, HV * (V // VR))
            v0 = i_x - i_g * HV * (V // VR)
            i_hv = T.truncdiv(v0, V // VR)
            v0 = (v0 - i_hv * (V // VR)) * VR
            i_h = T.truncdiv(i_hv, group)
            # The sequence, and the segment of it.
            i_n = T.alloc_var("int32", init=0)
            i_s = T.alloc_var("int32")
            bos = T.alloc_var("int32", init=0)
            eos = T.alloc_var("int32", init=num_tokens)
            find_segment(
                i_n,
                i_s,
                bos,
                eos,
                i_g,
                cu_address,
                cu_stride,
                segment_chunks,
                segments_per_row,
                num_tokens,
                num_seqs,
                search_steps,
            )
            i_b = T.if_then_else(cu_address != 0, 0, i_n)
            slot0 = T.alloc_var("int32")
            slot0 = T.if_then_else(cu_address != 0, bos // CHUNK + i_n, i_n * slots_per_row) + i_s * segment_chunks
            # Of a segment: its first token, its length, and whether it holds the end of its sequence. Behind that there may be
            # slots of no segment.
            length = T.alloc_var("int32")
            ends = T.alloc_var("bool")
            bos += i_s * (segment_chunks * CHUNK)
            length = T.if_then_else(i_s < 0, 0, T.max(T.min(eos - bos, segment_chunks * CHUNK), 0))
            ends = eos - bos == length and (i_s == 0 or length > 0)
            num_chunks = (length + CHUNK - 1) // CHUNK
            row0 = T.cast(i_b, "int64") * num_tokens + bos

            if tx < PRODUCER:
                T.set_max_nreg(config.registers[1], 1)
                wg = tx // 128
                T.clear(S)
                slot = T.alloc_var("int32")
                if starts_address != 0:
                    T.pdl_sync()
                    if length > 0 or i_s == 0:
                        first = (T.cast(i_g, "int64") * HV + i_hv) * (V * K)
                        load_state(S, starts_address, first, 0, 1, v0, K, V)
                else:
                    find_slot(slot, i_n, indices_address, indices_stride, pad_slot, num_slots)
                    if h0_address != 0 and slot >= 0:
                        first = T.cast(slot, "int64") * h0_stride_n + i_hv * h0_stride_h
                        load_state(S, h0_address, first, h0_type, state_v_first, v0, K, V)
                h_slot = T.alloc_var("int32")
                h_slot = i_n * h_stride_n + i_s * segment_chunks
                if emit:
                    if chunk_offsets_address != 0:
                        chunk_offsets = T.make_tensor_from_addr(chunk_offsets_address, (1 << 30,), "int32")
                        h_slot = chunk_offsets[i_n] + i_s * segment_chunks
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                for i in T.serial(num_chunks):
                    T.copy(S, Sb)
                    if emit:
                        if h_address != 0 and h_slot + i < h_slots:
                            store_state(
                                Sb,
                                h_address + (T.cast(h_slot + i, "int64") * HV + i_hv) * (K * V * 2),
                                dtype,
                                state_v_first,
                                v0,
                                K,
                                V,
                            )
                    T.barrier_wait(loaded[s], phase)
                    T.barrier_wait(ready[s], phase)
                    product(Sb, k_s[s, :, :], acc)
                    product(Sb, q_s[s, :, :], out)
                    if i > 0:
                        # The previous chunk's O leaves the registers behind this chunk's first products.
                        T.barrier_wait(o_free[wg], i % 2)
                        store_out(packed_out, o_s, o_full, wg, lane)
                    T.wait_wgmma(1)
                    device(
                        "qla_residual",
                        acc.data,
                        T.address_of(table[s, FACTORS["NGAMMA"]]),
                        T.address_of(v_s[s * VR + wg * 64, 0]),
                        w.data,
                    )
                    T.barrier_wait(tp_ready[s], phase)
                    product(w, t_s[s, :, :], acc)
                    T.wait_wgmma(1)
                    for a, b in T.Parallel(VR, CHUNK):
                        out[a, b] *= table[s, FACTORS["QGAMMA"] + b]
                    for a, b in T.Parallel(VR, K):
                        S[a, b] *= table[s, FACTORS["LAST"]]
                    T.wait_wgmma(0)
                    T.copy(acc, vn)
                    for a, b in T.Parallel(VR, CHUNK):
                        vn_decayed[a, b] = acc[a, b] * table[s, FACTORS["DECAY"] + b]
                    add_product(vn, p_s[s, :, :], out)
                    add_product(vn_decayed, k_s[s, :, :], S)
                    T.wait_wgmma(1)
                    device("qla_pack_tile", out.data, T.access_ptr(packed_out, "w"))
                    T.wait_wgmma(0)
                    if lane == 0:
                        T.barrier_arrive(free[s])
                    advance(s, phase, STAGES)
                if num_chunks > 0:
                    T.barrier_wait(o_free[wg], num_chunks % 2)
                    store_out(packed_out, o_s, o_full, wg, lane)
                # In place, a state goes back to where it came from, and without a token it stays as it is. The slot is read
                # anew: the loop has no register for it.
                if ht_address == h0_address:
                    find_slot(slot, i_n, indices_address, indices_stride, pad_slot, num_slots)
                    if length == 0:
                        slot = -1
                else:
                    slot = i_n
                if ht_address != 0 and slot >= 0 and ends:
                    last = T.cast(slot, "int64") * ht_stride_n + i_hv * ht_stride_h
                    store_state_as(S, ht_address, last, ht_type, state_v_first, v0, K, V)
            else:
                T.set_max_nreg(config.registers[0], 0)
                if tx < PRODUCER + 32:
                    T.pdl_sync()
                    for i in T.serial(num_chunks):
                        t = bos + i * CHUNK
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(k[i_b, t : t + CHUNK, i_h, 0:K], k_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(q[i_b, t : t + CHUNK, i_h, 0:K], q_s[s, :, :], barrier=loaded[s])
                        for first in (0, 256):  # a box has at most 256 numbers
                            end = min(first + 256, NUM_FACTORS)
                            T.tma_copy(factors[slot0 + i, i_hv, first:end], table[s, first:end], barrier=loaded[s])
                        for wv in T.unroll(NW):
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, v0 + wv * 64 : v0 + wv * 64 + 64],
                                v_s[s * VR + wv * 64 : s * VR + wv * 64 + 64, :],
                                barrier=loaded[s],
                            )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(loaded[s])
                        T.tma_copy(TPs[slot0 + i, i_hv, 0:CHUNK, 0:CHUNK], t_s[s, :, :], barrier=tp_loaded[s])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(tp_loaded[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 64:
                    for i in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        if length - i * CHUNK < CHUNK:
                            for r in T.serial(length - i * CHUNK, CHUNK):
                                for j in T.vectorized(K // 32):
                                    k_s[s, r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                for wv in T.unroll(NW):
                                    for j in T.vectorized(2):
                                        v_s[s * VR + wv * 64 + r, lane * 2 + j] = T.cast(0.0, dtype)
                            T.fence_proxy_async()
                            T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(ready[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 96:
                    for i in T.serial(num_chunks):
                        valid = T.min(length - i * CHUNK, CHUNK)
                        for wo in T.unroll(NW):
                            T.barrier_wait(o_full[wo], i % 2)
                            if valid == CHUNK:
                                t = bos + i * CHUNK
                                T.copy(
                                    o_s[wo * 64 : wo * 64 + 64, :],
                                    o[i_b, t : t + CHUNK, i_hv, v0 + wo * 64 : v0 + wo * 64 + 64],
                                )
                            else:
                                # TMA would write into the next sequence.
                                for r in T.serial((valid + 3) // 4):
                                    row = r * 4 + lane // 8
                                    if row < valid:
                                        tail = T.make_tensor_from_addr(
                                            o_address + (((row0 + i * CHUNK + row) * HV + i_hv) * V + v0 + wo * 64) * 2,
                                            (64,),
                                            dtype,
                                        )
                                        for j in T.vectorized(8):
                                            tail[lane % 8 * 8 + j] = o_s[wo * 64 + row, lane % 8 * 8 + j]
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(o_free[wo])
                else:
                    # P^T's part below its diagonal is written once.
                    for i in T.serial(STAGES * CHUNK * CHUNK // 256):
                        for j in T.vectorized(8):
                            p_s[i // (CHUNK // 4), i % (CHUNK // 4) * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(
                                0.0, dtype
                            )
                    T.sync_warp()
                    for _ in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        T.barrier_wait(tp_loaded[s], phase)
                        device(
                            "qla_split_tile",
                            T.address_of(t_s[s, 0, 0]),
                            T.address_of(p_s[s, 0, 0]),
                            T.address_of(table[s, FACTORS["BETA"]]),
                        )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(tp_ready[s])
                        advance(s, phase, STAGES)

    return gdn_chunk_fwd_kernel


class ChunkFwd(NamedTuple):
    """What one forward gives; None where not asked for."""

    o: torch.Tensor
    ht: torch.Tensor | None
    A: torch.Tensor | None
    g_cumsum: torch.Tensor | None
    h: torch.Tensor | None


def chunk_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    *,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    h0_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    inplace_final_state: bool = False,
    output_final_state: bool = False,
    state_v_first: bool = False,
    o: torch.Tensor | None = None,
    output_A: bool = False,
    output_h: bool = False,
    num_chunks: int | None = None,
    longest: int | None = None,
    auto_cp: bool = True,
    use_qk_l2norm: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> ChunkFwd:
    """Two launches, four where sequences are split into segments (auto_cp), for arguments that were checked at the door.

    h0_indices: where in h0, a pool, each sequence has its state. inplace_final_state: ht is h0. Both with a h0 that holds_states.
    o: filled if given, whatever its strides.
    num_chunks, longest: of packed input, chunks of all sequences and of the longest one, where the caller knows them.
    A_log (and dt_bias): g is the raw gate input, activated inside.
    """
    B, num_tokens, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    # The gate-free A of a chunk with the L2 norm folded in is R^-1 A R: what is handed out needs plain k.
    assert not (output_A and use_qk_l2norm)
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    g, beta = readable(g), readable(beta)
    if A_log is not None:
        A_log = A_log.float().contiguous()
        dt_bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias.float().contiguous()
    h0 = None if h0 is None else state_rows(h0)
    state_shape = (HV, V, K) if state_v_first else (HV, K, V)
    # new_empty and empty_like cost half of torch.empty.
    fp32 = functools.partial(q.new_empty, dtype=torch.float32)
    if o is None:
        o = out = torch.empty_like(v, memory_format=torch.contiguous_format)
    else:
        out = tma_ready(o) if o.is_contiguous() else torch.empty_like(o, memory_format=torch.contiguous_format)
    ht = h0 if inplace_final_state else fp32((N, *state_shape)) if output_final_state else None
    A = q.new_empty((B, num_tokens, HV, CHUNK)) if output_A else None
    g_cumsum = fp32((B, num_tokens, HV)) if output_A else None
    h, chunk_offsets, h_slots = None, None, 0
    slots_per_row = -(-num_tokens // CHUNK)
    slots = B * slots_per_row if cu_seqlens is None else num_tokens // CHUNK + N
    if output_h:
        h_slots = slots_per_row
        if cu_seqlens is not None:
            h_slots = slots if num_chunks is None else num_chunks
            chunk_offsets = _chunk_offsets(cu_seqlens, num_tokens)
        h = torch.zeros((B, h_slots, *state_shape), dtype=k.dtype, device=q.device)
    if N == 0 or o.numel() == 0:
        # Nothing runs: no token, or no sequence to hold one.
        o.zero_()
        if ht is not None and ht is not h0:
            ht.zero_() if h0 is None else ht.copy_(read_slots(h0, h0_indices, pad_slot_id))
        if output_A:
            A.zero_(), g_cumsum.zero_()
        return ChunkFwd(o, ht, A, g_cumsum, h)

    device = q.device.index
    lengths = Lengths.of(N, num_tokens, cu_seqlens is not None, num_chunks, longest)
    config, chunks = pick_config(K, V, dtype_name(q), HV, lengths, num_sms(device), output_h, auto_cp)
    cut = Segments.of(chunks, lengths, num_tokens, cu_seqlens is not None)
    starts = None
    with on_device(device):
        TPs, factors = chunk_intra(
            q,
            k,
            g,
            beta,
            scale,
            out,
            slots=slots,
            cu_seqlens=cu_seqlens,
            A=A,
            g_cumsum=g_cumsum,
            use_qk_l2norm=use_qk_l2norm,
            A_log=A_log,
            dt_bias=dt_bias,
            beta_range=(2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else 0.0,
            early=not cut.split and launched_early(N * HV * V // config.VR, config.VR, num_sms(device)),
        )
        if cut.split:
            starts = segment_starts(
                k, v, TPs, factors,
                cut=cut, h0=h0, h0_indices=h0_indices, pad_slot_id=pad_slot_id, cu_seqlens=cu_seqlens,
                state_v_first=state_v_first,
            )  # fmt: skip
        _kernel(config)(
            q, k, v, out, TPs, factors,
            address(out), N, HV // H, address(cu_seqlens), cu_stride(cu_seqlens), slots_per_row,
            cut.number, cut.chunks, cut.per_row, cut.search_steps, address(starts),
            *state_arguments(h0), *slot_arguments(h0, h0_indices, pad_slot_id), *state_arguments(ht), int(state_v_first),
            address(h), B * h_slots, h_slots, address(chunk_offsets),
        )  # fmt: skip
    if out.data_ptr() != o.data_ptr():
        o.copy_(out)
    return ChunkFwd(o, ht, A, g_cumsum, h)


@functools.lru_cache
def _kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, config)


def _chunk_offsets(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """First slot of h of each sequence, on the device, with the bounds that the kernel sees."""
    bounds = cu_seqlens.clamp(0, num_tokens)
    counts = ((bounds[1:] - bounds[:-1]).clamp_min(0) + CHUNK - 1) // CHUNK
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
