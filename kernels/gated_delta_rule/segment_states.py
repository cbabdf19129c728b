"""What every segment of a sequence makes of a state, and of a gradient behind it, as if it had begun with none.

The segments of a long sequence are walked at the same time (chunk_fwd.py, chunk_states.py); each wants the state before it and, in a
backward, the gradient R with respect to the state behind it. A segment turns a state S, and in reverse an R, into

    S' = M S + N          R = M^T R' + D

N is a walk over it from nothing, M^T one with v = 0 from the identity, D one from the last chunk to the first. With S^T in registers,
64 rows a CTA, M^T is K rows more:

    W   = V - 2^G o (K S)                         Vn = T W          S <- 2^G_last S + K^T (2^(G_last - G) o Vn)
    dVn = 2^(G_last - G) o (K R) + P^T dO         dW = T^T dVn      R <- 2^G_last R - K^T (2^G o dW) + Q^T (scale 2^G o dO)

Not all of it is walked. chunk_intra.py gives with every chunk a bound of what it leaves of a state; where the last chunks of a
segment leave less than 2^LIMIT, N is a walk over these alone and M is nothing. Heads which do not decay that far take the whole
segment; the first segment of a sequence begins with h0 then and needs no M. In reverse the same holds of a segment's first chunks,
of the last segment, and of dht.

Grid (segments * HV * (V + K [+ V]) / 64), two CTAs an SM: CTA (g, head, block) makes rows of what is before segment g, N^T to starts[g],
of the M^T that leads there to transfers[g], as the sum of two 16-bit numbers, or of what is behind segment g, D^T to starts[segments + g].
exact says whether M counts (kernels/common/segment_starts.py). Slots of segments: kernels/common/segments.py.

    warps       work                                            waits on                      signals
    STATE (4)   W, Vn, S of a chunk; in reverse dVn, dW, R      loaded tp_ready q_loaded      free q_free p_free
    LOAD (1)    TMA of K, V or dO, T with P^T, gate factors     free                          loaded
    SPLIT (1)   T and P^T from the tile that holds both; in     loaded p_free                 tp_ready
                reverse zeroes rows past the sequence's end
    QUERY (1)   in reverse, TMA of Q                            q_free                        q_loaded

Three stages; in reverse two, Q lying in the third's K, and one P^T: so shared memory is the same.
"""

import functools
from pathlib import Path

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.gates import FACTORS, NUM_FACTORS
from flash_qla_tl.kernels.common.segment_starts import fold_segments
from flash_qla_tl.kernels.common.segments import Segments
from flash_qla_tl.kernels.common.state_pool import slot_arguments, state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher
from flash_qla_tl.kernels.common.tensors import address
from flash_qla_tl.kernels.common.walk import advance, find_segment, find_slot, load_state

STAGES = 3
PRODUCER, THREADS = 128, 256
# Per thread of the producers and the state warpgroup, by K.
REGISTERS = {64: (72, 184), 128: (48, 208)}
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
    tiles = Path(gates.__file__).parent / "state_tile.cuh"
    return gates.device_source(dtype) + tiles.read_text() + Path(__file__).with_suffix(".cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(K: int, dtype: str):
    accum = "float32"
    B, num_tokens, H, HV, V, slots, segments, states = (
        T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "V", "slots", "segments", "states")
    )
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in ("q", "k", "v", "do")}

    @T.macro
    def within_reach(factors, slot, i_hv, ahead, count):
        """From chunk `slot` back, or ahead, of `count` chunks: see qla_within_reach."""
        return T.call_extern(
            "int32",
            "qla_within_reach",
            T.address_of(factors[slot, i_hv, FACTORS["REACH"]]),
            T.cast(T.if_then_else(ahead, -HV * NUM_FACTORS, HV * NUM_FACTORS), "int64"),
            count,
            T.float32(LIMIT),
        )

    @T.prim_func
    def gdn_segment_states_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        do: T.StridedTensor((B, num_tokens, HV, V), (*strides["do"], 1), dtype),
        TPs: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        starts: T.Tensor((states, HV, V, K), accum),
        transfers: T.Tensor((segments, HV, 2, K, K), dtype),
        exact: T.Tensor((states, HV), "int32"),
        group: T.int32, num_seqs: T.int32, cu_address: T.int64, cu_stride: T.int32, slots_per_row: T.int32,
        segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32, whole: T.int32,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        indices_address: T.int64, indices_stride: T.int32, pad_slot: T.int32, num_slots: T.int32,
        dht_address: T.int64, dht_type: T.int32, dht_stride_n: T.int64, dht_stride_h: T.int64, state_v_first: T.int32,
    ):  # fmt: skip
        with T.Kernel(HV * (states * (V // 64) + segments * (K // 64)), threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            T.pdl_trigger()
            k_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            v_s = T.alloc_shared((STAGES * CHUNK, 64), dtype)
            t_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_s = T.alloc_shared((CHUNK, CHUNK), dtype)  # read in reverse alone
            table = T.alloc_shared((STAGES, 288), accum)
            S = T.alloc_fragment((64, K), accum)
            Sb = T.alloc_fragment((64, K), dtype)
            acc = T.alloc_fragment((64, CHUNK), accum)
            from_do = T.alloc_fragment((64, CHUNK), accum)
            do_t = T.alloc_fragment((64, CHUNK), dtype)
            do_scaled = T.alloc_fragment((64, CHUNK), dtype)
            w = T.alloc_fragment((64, CHUNK), dtype)
            vn = T.alloc_fragment((64, CHUNK), dtype)
            loaded = T.alloc_barrier([1] * STAGES)
            tp_ready = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([4] * STAGES)
            q_loaded = T.alloc_barrier([1])
            q_free = T.alloc_barrier([4])
            p_free = T.alloc_barrier([4])
            T.annotate_min_blocks_per_sm(2)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (v_s, p_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            stages = T.alloc_var("int32")
            i_g = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            block = T.alloc_var("int32")
            # Of a segment and head first the blocks of N^T, then those of M^T, then those of the gradient.
            blocks = T.alloc_var("int32")
            blocks = (V + K + T.if_then_else(states > segments, V, 0)) // 64
            i_g = T.truncdiv(i_x, HV * blocks)
            block = i_x - i_g * HV * blocks
            i_hv = T.truncdiv(block, blocks)
            block -= i_hv * blocks
            i_h = T.truncdiv(i_hv, group)
            reverse = T.alloc_var("bool")
            transfer = T.alloc_var("bool")
            r0 = T.alloc_var("int32")
            reverse = block * 64 >= V + K
            stages = T.if_then_else(reverse, 2, STAGES)
            transfer = block * 64 >= V and block * 64 < V + K
            r0 = block * 64 - T.if_then_else(reverse, V + K, T.if_then_else(transfer, V, 0))
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
            i_state = T.alloc_var("int32")
            i_state = i_g + T.if_then_else(reverse, segments, 0)
            # The segment that is walked, the one before or in reverse the one behind, has `count` chunks. `edge`: it is the sequence's
            # first, or in reverse its last, or there is none, so that what it begins with is known, h0 or dht.
            slot = T.alloc_var("int32")
            behind = T.alloc_var("int32")
            count = T.alloc_var("int32")
            edge = T.alloc_var("bool")
            slot = T.if_then_else(cu_address != 0, bos // CHUNK + i_n, i_n * slots_per_row) + i_s * segment_chunks
            bos += i_s * (segment_chunks * CHUNK)
            # For chunk_intra's bounds, tiles and factors.
            T.pdl_sync()
            behind = (eos - bos + (CHUNK - 1)) // CHUNK - segment_chunks
            count = T.if_then_else(
                reverse,
                T.min(T.max(behind, 0), segment_chunks),
                T.if_then_else(i_s > 0, T.min(behind + 2 * segment_chunks, segment_chunks), 0),
            )
            edge = T.if_then_else(reverse, behind <= segment_chunks, i_s <= 1 and whole == 0)
            num_chunks = T.alloc_var("int32", init=0)
            begins = T.alloc_var("bool", init=False)
            wanted = T.alloc_var("bool", init=False)
            if i_s == 0 or (i_s > 0 and bos - whole * (segment_chunks * CHUNK) < eos):
                found = T.alloc_var("int32")
                found = within_reach(
                    factors,
                    slot + T.if_then_else(reverse, segment_chunks, count - segment_chunks - 1),
                    i_hv,
                    reverse,
                    count,
                )
                num_chunks = count
                if transfer:
                    if states > segments and found <= count:
                        found = within_reach(factors, slot - segment_chunks, i_hv, True, count)
                    wanted = found > count and not edge
                    if not wanted:
                        num_chunks = 0
                else:
                    wanted = True
                    begins = found > count and edge
                    num_chunks = T.min(found, count)
                    if tx == 0 and r0 == 0:
                        exact[i_state, i_hv] = T.if_then_else(found > count and not edge, 1, 0)
            # Of these chunks the first.
            slot += T.if_then_else(reverse, segment_chunks, count - segment_chunks - num_chunks)
            bos += T.if_then_else(reverse, segment_chunks, count - segment_chunks - num_chunks) * CHUNK

            if tx < PRODUCER:
                T.set_max_nreg(REGISTERS[K][1], 1)
                T.clear(S)
                if transfer:
                    for a, b in T.Parallel(64, K):
                        S[a, b] = T.if_then_else(r0 + a == b, T.float32(1.0), T.float32(0.0))
                if begins:
                    at = T.alloc_var("int32")
                    find_slot(
                        at,
                        i_n,
                        T.if_then_else(reverse, T.int64(0), indices_address),
                        indices_stride,
                        pad_slot,
                        num_slots,
                    )
                    state = T.if_then_else(reverse, dht_address, h0_address)
                    if state != 0 and at >= 0:
                        first = T.cast(at, "int64") * T.if_then_else(
                            reverse, dht_stride_n, h0_stride_n
                        ) + i_hv * T.if_then_else(reverse, dht_stride_h, h0_stride_h)
                        load_state(S, state, first, T.if_then_else(reverse, dht_type, h0_type), state_v_first, r0, K, V)
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                if reverse:
                    for i in T.serial(num_chunks):
                        T.copy(S, Sb)
                        T.barrier_wait(loaded[s], phase)
                        T.barrier_wait(tp_ready[s], phase)
                        product(Sb, k_s[s, :, :], acc)
                        device("qla_transposed_operand", T.address_of(v_s[s * CHUNK, 0]), do_t.data)
                        product(do_t, p_s, from_do)
                        T.wait_wgmma(0)
                        if lane == 0:
                            T.barrier_arrive(p_free[0])
                        for a, b in T.Parallel(64, CHUNK):
                            vn[a, b] = acc[a, b] * table[s, FACTORS["DECAY"] + b] + from_do[a, b]
                        T.wgmma_gemm(vn, t_s[s, :, :], acc, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                        for a, b in T.Parallel(64, K):
                            S[a, b] *= table[s, FACTORS["LAST"]]
                        device(
                            "qls_scaled_operand",
                            T.address_of(v_s[s * CHUNK, 0]),
                            T.address_of(table[s, FACTORS["QGAMMA"]]),
                            do_scaled.data,
                        )
                        T.barrier_wait(q_loaded[0], i % 2)
                        add_product(do_scaled, k_s[2, :, :], S)
                        T.wait_wgmma(1)
                        for a, b in T.Parallel(64, CHUNK):
                            w[a, b] = acc[a, b] * table[s, FACTORS["NGAMMA"] + b]
                        add_product(w, k_s[s, :, :], S)
                        T.wait_wgmma(0)
                        if lane == 0:
                            T.barrier_arrive(q_free[0])
                            T.barrier_arrive(free[s])
                        advance(s, phase, 2)
                else:
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
                if wanted:
                    if transfer:
                        T.copy(S, Sb)
                        for a, b in T.Parallel(64, K):
                            transfers[i_g, i_hv, 0, r0 + a, b] = Sb[a, b]
                        for a, b in T.Parallel(64, K):
                            transfers[i_g, i_hv, 1, r0 + a, b] = T.cast(S[a, b] - T.cast(Sb[a, b], accum), dtype)
                    else:
                        for a, b in T.Parallel(64, K):
                            starts[i_state, i_hv, r0 + a, b] = S[a, b]
            else:
                T.set_max_nreg(REGISTERS[K][0], 0)
                if tx < PRODUCER + 32:
                    if transfer:
                        # M knows no values.
                        for i in T.serial(STAGES * CHUNK // 4):
                            for j in T.vectorized(8):
                                v_s[i * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(0.0, dtype)
                        T.sync_warp()
                    c = T.alloc_var("int32")
                    c = T.if_then_else(reverse, num_chunks - 1, 0)
                    for _ in T.serial(num_chunks):
                        t = bos + c * CHUNK
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(k[i_b, t : t + CHUNK, i_h, 0:K], k_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(TPs[slot + c, i_hv, 0:CHUNK, 0:CHUNK], t_s[s, :, :], barrier=loaded[s])
                        for first in (0, 256):  # a box has at most 256 numbers
                            end = min(first + 256, NUM_FACTORS)
                            T.tma_copy(factors[slot + c, i_hv, first:end], table[s, first:end], barrier=loaded[s])
                        if reverse:
                            T.tma_copy(
                                do[i_b, t : t + CHUNK, i_hv, r0 : r0 + 64],
                                v_s[s * CHUNK : s * CHUNK + CHUNK, :],
                                barrier=loaded[s],
                            )
                        elif not transfer:
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, r0 : r0 + 64],
                                v_s[s * CHUNK : s * CHUNK + CHUNK, :],
                                barrier=loaded[s],
                            )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(loaded[s])
                        c += T.if_then_else(reverse, -1, 1)
                        advance(s, phase, stages)
                elif tx < PRODUCER + 64:
                    if reverse:
                        # P^T's part below its diagonal is written once.
                        for i in T.serial(CHUNK // 4):
                            for j in T.vectorized(8):
                                p_s[i * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(0.0, dtype)
                        T.sync_warp()
                    for i in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        if reverse:
                            T.barrier_wait(p_free[0], i % 2 ^ 1)
                            valid = eos - bos - (num_chunks - 1) * CHUNK
                            if i == 0 and valid < CHUNK:
                                # The sequence's last chunk: what lies behind is anybody's.
                                T.barrier_wait(q_loaded[0], 0)
                                for r in T.serial(valid, CHUNK):
                                    for j in T.vectorized(K // 32):
                                        k_s[s, r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                    for j in T.vectorized(K // 32):
                                        k_s[2, r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                    for j in T.vectorized(2):
                                        v_s[s * CHUNK + r, lane * 2 + j] = T.cast(0.0, dtype)
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
                        advance(s, phase, stages)
                elif tx < PRODUCER + 96:
                    if reverse:
                        for i in T.serial(num_chunks):
                            t = bos + (num_chunks - 1 - i) * CHUNK
                            T.barrier_wait(q_free[0], i % 2 ^ 1)
                            T.tma_copy(q[i_b, t : t + CHUNK, i_h, 0:K], k_s[2, :, :], barrier=q_loaded[0])
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(q_loaded[0])

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
    cut: Segments,
    h0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
    h0_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    q: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> [segments, HV, V, K] fp32: the state before each segment, h0 before the first of a sequence; with q and do, in as many
    more, the gradient with respect to the state behind each, dht behind the last of a sequence. Two launches."""
    B, num_tokens, H, K = k.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    stride = 0 if cu_seqlens is None else cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    states = cut.number if do is None else 2 * cut.number
    starts = k.new_empty((states, HV, V, K), dtype=torch.float32)
    transfers = k.new_empty((cut.number, HV, 2, K, K))
    exact = k.new_empty((states, HV), dtype=torch.int32)
    _kernel(K, dtype_name(k))(
        # What is not given is not read.
        k if q is None else q, k, v, v if do is None else do, TPs, factors, starts, transfers, exact,
        HV // H, N, address(cu_seqlens), stride, -(-num_tokens // CHUNK), cut.chunks, cut.per_row, cut.search_steps, 0,
        *state_arguments(h0), *slot_arguments(h0, h0_indices, pad_slot_id), *state_arguments(dht), int(state_v_first),
    )  # fmt: skip
    fold_segments(starts, transfers, exact, cut, num_seqs=N, num_tokens=num_tokens, cu_seqlens=cu_seqlens)
    return starts


def affine_map(
    k: torch.Tensor, v: torch.Tensor, TPs: torch.Tensor, factors: torch.Tensor, num_sms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one dense sequence makes of a state, S' = M S + N, as N^T [HV, V, K] and M^T [HV, K, K] in fp32. One launch, and products of
    the maps of segments."""
    _, num_tokens, H, K = k.shape
    HV, V = v.shape[2:]
    chunks = -(-num_tokens // CHUNK)
    # As many as the card takes at once, two CTAs an SM.
    parts = max(2 * num_sms * 64 // (HV * (V + K)), 1)
    segment = -(-chunks // parts)
    parts = -(-chunks // segment)
    maps = k.new_empty((parts + 1, HV, V, K), dtype=torch.float32)
    transfers = k.new_empty((parts + 1, HV, 2, K, K))
    exact = k.new_empty((parts + 1, HV), dtype=torch.int32)
    _kernel(K, dtype_name(k))(
        k, k, v, v, TPs, factors, maps, transfers, exact,
        HV // H, 1, 0, 0, chunks, segment, parts + 1, 0, 1,
        *state_arguments(None), *slot_arguments(None, None, -1), *state_arguments(None), 1,
    )  # fmt: skip
    # M is written where something of a state is left.
    M = transfers[1:].float().sum(2).where(exact[1:, :, None, None] != 0, 0)
    N, whole = maps[1], M[0]
    for n, m in zip(maps[2:], M[1:], strict=True):
        N, whole = torch.baddbmm(n, N, m), whole @ m
    return N, whole
