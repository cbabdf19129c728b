"""The state at the end of every segment of a sequence, as if it had begun with none, and what the segment makes of a state.

chunk_fwd walks the segments of a long sequence at the same time; each wants the state before it. A segment turns a state S into

    S' = M S + N

N is a walk over it from nothing, M^T one with v = 0 from the identity. With S^T in registers, 64 rows a CTA, M^T is K rows more:

    W  = V - 2^G o (K S)          Vn = T W          S <- 2^G_last S + K^T (2^(G_last - G) o Vn)

Not all of it is walked. chunk_intra.py gives with every chunk a bound of what it leaves of a state; where the last chunks of a
segment leave less than 2^LIMIT, N is a walk over these alone and M is nothing. Heads which do not decay that far take the whole
segment; the first segment of a sequence begins with h0 then and needs no M.

Grid (segments * HV * (V + K) / 64), two CTAs an SM: CTA (g, head, block) makes rows of what is before segment g: N^T to starts[g], and M^T
to transfers[g] as the sum of two 16-bit numbers. exact[g] says whether M counts (kernels/common/segment_starts.py). Segments have slots
as chunks do.

    warps       work                                            waits on            signals
    STATE (4)   W, Vn, S of a chunk                             loaded tp_ready     free
    LOAD (1)    TMA of K, V, T with P^T, gate factors           free                loaded
    SPLIT (1)   T from the tile that holds both                 loaded              tp_ready
"""

import functools
from pathlib import Path

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.gates import FACTORS, NUM_FACTORS
from flash_qla_tl.kernels.common.segment_starts import fold_segments
from flash_qla_tl.kernels.common.state_pool import slot_arguments, state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher
from flash_qla_tl.kernels.common.tensors import address
from flash_qla_tl.kernels.common.walk import advance, find_sequence, find_slot, load_state

STAGES = 3
PRODUCER, THREADS = 128, 256
REGISTERS = (40, 216)
# fp32 rounds at 2^-24 of a state.
LIMIT = -32.0
product = functools.partial(T.wgmma_gemm, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
add_product = functools.partial(T.wgmma_gemm, clear_accum=False, policy=T.GemmWarpPolicy.FullRow)
device = functools.partial(T.call_extern, "handle")
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def device_source(dtype: str) -> str:
    return gates.device_source(dtype) + Path(__file__).with_suffix(".cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(K: int, dtype: str):
    accum = "float32"
    B, num_tokens, H, HV, V, slots, segments = (
        T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "V", "slots", "segments")
    )
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "kv"}

    @T.prim_func
    def gdn_segment_states_kernel(
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        TPs: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        starts: T.Tensor((segments, HV, V, K), accum),
        transfers: T.Tensor((segments, HV, 2, K, K), dtype),
        exact: T.Tensor((segments, HV), "int32"),
        group: T.int32, num_seqs: T.int32, cu_address: T.int64, cu_stride: T.int32, slots_per_row: T.int32,
        segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        indices_address: T.int64, indices_stride: T.int32, pad_slot: T.int32, num_slots: T.int32, state_v_first: T.int32,
    ):  # fmt: skip
        with T.Kernel(segments * HV * ((V + K) // 64), threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            T.pdl_trigger()
            k_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            v_s = T.alloc_shared((STAGES * CHUNK, 64), dtype)
            t_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_s = T.alloc_shared((CHUNK, CHUNK), dtype)  # nobody reads
            table = T.alloc_shared((STAGES, 288), accum)
            S = T.alloc_fragment((64, K), accum)
            Sb = T.alloc_fragment((64, K), dtype)
            acc = T.alloc_fragment((64, CHUNK), accum)
            w = T.alloc_fragment((64, CHUNK), dtype)
            vn = T.alloc_fragment((64, CHUNK), dtype)
            loaded = T.alloc_barrier([1] * STAGES)
            tp_ready = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([4] * STAGES)
            T.annotate_min_blocks_per_sm(2)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (v_s, p_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            i_g = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            block = T.alloc_var("int32")
            i_g = T.truncdiv(i_x, HV * ((V + K) // 64))
            block = i_x - i_g * HV * ((V + K) // 64)
            i_hv = T.truncdiv(block, (V + K) // 64)
            block -= i_hv * ((V + K) // 64)
            i_h = T.truncdiv(i_hv, group)
            # Rows r0 .. of N^T, or of M^T.
            transfer = T.alloc_var("bool")
            r0 = T.alloc_var("int32")
            transfer = block * 64 >= V
            r0 = T.if_then_else(transfer, block * 64 - V, block * 64)
            i_n = T.alloc_var("int32", init=0)
            i_s = T.alloc_var("int32")
            bos = T.alloc_var("int32", init=0)
            eos = T.alloc_var("int32", init=num_tokens)
            if cu_address != 0:
                cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
                find_sequence(
                    i_n,
                    bos,
                    eos,
                    cu_seqlens,
                    cu_stride,
                    i_g,
                    segment_chunks * CHUNK,
                    num_tokens,
                    num_seqs,
                    search_steps,
                )
                i_s = i_g - T.truncdiv(bos, segment_chunks * CHUNK) - i_n
            else:
                i_n = T.truncdiv(i_g, segments_per_row)
                i_s = i_g - i_n * segments_per_row
            i_b = T.if_then_else(cu_address != 0, 0, i_n)
            # The chunks of the segment before, of which the last `num_chunks` are walked; none of segment 0, before which there is h0.
            slot = T.alloc_var("int32")
            num_chunks = T.alloc_var("int32", init=0)
            begins = T.alloc_var("int32", init=0)
            wanted = T.alloc_var("int32", init=0)
            slot = T.if_then_else(cu_address != 0, bos // CHUNK + i_n, i_n * slots_per_row) + i_s * segment_chunks
            bos += i_s * (segment_chunks * CHUNK)
            # For chunk_intra's bounds, tiles and factors.
            T.pdl_sync()
            if i_s == 0:
                if not transfer:
                    begins = 1
                    wanted = 1
            elif i_s > 0 and bos < eos:
                num_chunks = T.call_extern(
                    "int32",
                    "qla_reach_back",
                    T.address_of(factors[slot - 1, i_hv, FACTORS["REACH"]]),
                    T.cast(HV * NUM_FACTORS, "int64"),
                    segment_chunks,
                    T.float32(LIMIT),
                )
                wanted = 1
                if num_chunks > segment_chunks:
                    num_chunks = segment_chunks
                    begins = T.if_then_else(i_s == 1, 1, 0)
                    if transfer and i_s == 1:
                        wanted = 0
                    if tx == 0 and block == 0:
                        exact[i_g, i_hv] = T.if_then_else(i_s == 1, 0, 1)
                else:
                    if transfer:
                        wanted = 0
                    if tx == 0 and block == 0:
                        exact[i_g, i_hv] = 0
            num_chunks *= wanted
            slot -= num_chunks
            bos -= num_chunks * CHUNK

            if tx < PRODUCER:
                T.set_max_nreg(REGISTERS[1], 1)
                T.clear(S)
                if transfer:
                    for a, b in T.Parallel(64, K):
                        S[a, b] = T.if_then_else(r0 + a == b, T.float32(1.0), T.float32(0.0))
                if begins != 0:
                    i_state = T.alloc_var("int32")
                    find_slot(i_state, i_n, indices_address, indices_stride, pad_slot, num_slots)
                    if h0_address != 0 and i_state >= 0:
                        first = T.cast(i_state, "int64") * h0_stride_n + i_hv * h0_stride_h
                        load_state(S, h0_address, first, h0_type, state_v_first, r0, K, V)
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                for _ in T.serial(num_chunks):
                    T.copy(S, Sb)
                    T.barrier_wait(loaded[s], phase)
                    product(Sb, k_s[s, :, :], acc)
                    T.wait_wgmma(0)
                    device(
                        "qla_residual",
                        acc.data,
                        T.address_of(table[s, FACTORS["NGAMMA"]]),
                        T.address_of(v_s[s * CHUNK, 0]),
                        w.data,
                    )
                    T.barrier_wait(tp_ready[s], phase)
                    product(w, t_s[s, :, :], acc)
                    for a, b in T.Parallel(64, K):
                        S[a, b] *= table[s, FACTORS["LAST"]]
                    T.wait_wgmma(0)
                    for a, b in T.Parallel(64, CHUNK):
                        vn[a, b] = acc[a, b] * table[s, FACTORS["DECAY"] + b]
                    add_product(vn, k_s[s, :, :], S)
                    T.wait_wgmma(0)
                    if lane == 0:
                        T.barrier_arrive(free[s])
                    advance(s, phase, STAGES)
                if wanted != 0:
                    if transfer:
                        T.copy(S, Sb)
                        for a, b in T.Parallel(64, K):
                            transfers[i_g, i_hv, 0, r0 + a, b] = Sb[a, b]
                        for a, b in T.Parallel(64, K):
                            transfers[i_g, i_hv, 1, r0 + a, b] = T.cast(S[a, b] - T.cast(Sb[a, b], accum), dtype)
                    else:
                        for a, b in T.Parallel(64, K):
                            starts[i_g, i_hv, r0 + a, b] = S[a, b]
            else:
                T.set_max_nreg(REGISTERS[0], 0)
                if tx < PRODUCER + 32:
                    if transfer:
                        # M knows no values.
                        for i in T.serial(STAGES * CHUNK // 4):
                            for j in T.vectorized(8):
                                v_s[i * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(0.0, dtype)
                        T.sync_warp()
                    for i in T.serial(num_chunks):
                        t = bos + i * CHUNK
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(k[i_b, t : t + CHUNK, i_h, 0:K], k_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(TPs[slot + i, i_hv, 0:CHUNK, 0:CHUNK], t_s[s, :, :], barrier=loaded[s])
                        for first in (0, 256):  # a box has at most 256 numbers
                            end = min(first + 256, NUM_FACTORS)
                            T.tma_copy(factors[slot + i, i_hv, first:end], table[s, first:end], barrier=loaded[s])
                        if not transfer:
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, r0 : r0 + 64],
                                v_s[s * CHUNK : s * CHUNK + CHUNK, :],
                                barrier=loaded[s],
                            )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(loaded[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 64:
                    for _ in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        device(
                            "qla_split_tile",
                            T.address_of(t_s[s, 0, 0]),
                            T.address_of(p_s[0, 0]),
                            T.address_of(table[s, FACTORS["BETA"]]),
                        )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(tp_ready[s])
                        advance(s, phase, STAGES)

    return gdn_segment_states_kernel


@functools.lru_cache
def _kernel(K: int, dtype: str):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, K, dtype)


def segment_starts(
    k: torch.Tensor,
    v: torch.Tensor,
    TPs: torch.Tensor,
    factors: torch.Tensor,
    *,
    segments: int,
    segment_chunks: int,
    h0: torch.Tensor | None,
    h0_indices: torch.Tensor | None,
    pad_slot_id: int,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
) -> torch.Tensor:
    """-> [segments, HV, V, K] fp32: the state before each segment, h0 before the first of a sequence. Two launches."""
    B, num_tokens, H, K = k.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    stride = 0 if cu_seqlens is None else cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    slots_per_row = -(-num_tokens // CHUNK)
    segments_per_row = -(-slots_per_row // segment_chunks)
    empty = functools.partial(torch.empty, device=k.device)
    starts = empty((segments, HV, V, K), dtype=torch.float32)
    transfers = empty((segments, HV, 2, K, K), dtype=k.dtype)
    exact = empty((segments, HV), dtype=torch.int32)
    _kernel(K, dtype_name(k))(
        k, v, TPs, factors, starts, transfers, exact,
        HV // H, N, address(cu_seqlens), stride, slots_per_row, segment_chunks, segments_per_row, N.bit_length(),
        *state_arguments(h0), *slot_arguments(h0, h0_indices, pad_slot_id), int(state_v_first),
    )  # fmt: skip
    fold_segments(
        starts,
        transfers,
        exact,
        num_seqs=N,
        num_tokens=num_tokens,
        cu_seqlens=cu_seqlens,
        segment_chunks=segment_chunks,
        segments_per_row=segments_per_row,
    )
    return starts
