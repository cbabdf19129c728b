"""The two state passes of the backward in one launch: the state before, and its gradient after, every chunk.

Per value head and chunk of 64 tokens, with G the in-chunk cumulative log decay, e = exp(G_last), A the gate-free
inverse (chunk_intra.py), S the state before the chunk and R the gradient with respect to the state after it:

    X = beta o (A^T K)              S <- e S + X^T (exp(G_last - G) o V - K (e S))              first chunk to last
    Y = A (beta o K)                Q' = scale exp(G) o dO
    L = lower(Q K^T)                R <- e R - Y^T (K (e R) + L^T Q') + Q^T Q'                  last chunk to first

Every gate has been moved to where it is at most 1: docs/math_backward.md derives both. S and R are written in the
dtype of k, as [V, K], one slot a chunk; R before the first chunk is dh0.

Grid (segments * 2 HV V / VR): of a segment's CTAs the first half makes states, the second half gradients; each carries VR rows of
one head's matrix through one segment, which is a whole sequence unless few heads would leave the card idle (segments.py). A segment
begins with what segment_starts.py made, S before it and R behind it; a sequence with h0 and dht. Rows run along V, and no row meets
another: a state warpgroup keeps 64 of them, [64, K], in fp32 registers all the way, and both products of a chunk have it as their
register operand.
Chunk i of sequence n has slot n slots_per_row + i, or, packed, bos // 64 + n + i: at most T // 64 + N, no two alike.

    warps            work                                          waits on                     signals
    STATE (4 VR/64)  the matrix                                    loaded ready x_ready h_free  free x_free h_full
    AUX (4)          X, or Y and L, ahead of the state             loaded ready x_free          x_ready free
    LOAD (1)         TMA of K, A, V or K, A, Q, dO                 free                         loaded
    GATE (1)         gate table                                    free rows                    ready
    ROWS (1)         zeroes rows past the sequence's end           loaded                       rows
    STORE (1)        S or R to its slot                            h_full                       h_free
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import tilelang
import tilelang.language as T

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.gates import LOG2E
from flash_qla_tl.kernels.common.segments import Lengths, pick
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, launcher
from flash_qla_tl.kernels.common.walk import advance, find_segment, load_state, store_state

STAGES = 3
# On an H200 with all SMs busy: a chunk, K = V = 128, by VR; the launches before a walk in segments, and a chunk and head of the first.
STEP_US, BEFORE_US, INTRA_US = {64: 1.6, 128: 2.3}, 25.0, 1.0
ROW_POLICY = T.GemmWarpPolicy.FullRow
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}
# The gate table: per token the factor of its values (-exp(G_last - G), or scale exp(G)) and -beta; exp(G_last).
VALUE, BETA, LAST = 0, 64, 128
TABLE = 132


@dataclass(frozen=True)
class Config:
    """What one compiled variant is."""

    K: int
    V: int
    VR: int  # rows a CTA carries: 64 a state warpgroup
    dtype: str

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of the producers, the auxiliary and the state warpgroups."""
        return (40, 120, 176) if self.VR == 128 else (56, 168, 232)


@functools.lru_cache(maxsize=4096)
def pick_config(K: int, V: int, dtype: str, HV: int, lengths: Lengths, num_sms: int, split: bool) -> tuple[Config, int]:
    """-> the variant, and the chunks of a segment. `split`: whether sequences may be cut into segments."""
    step_us = {64: STEP_US[64]} if V == 64 else STEP_US
    before_us = BEFORE_US + INTRA_US * lengths.total * HV / num_sms
    VR, chunks = pick(step_us, 2 * HV * V, before_us, HV * (K + 2 * V) // 64, lengths, num_sms, split)
    return Config(K, V, VR, dtype), chunks


def configs() -> list[Config]:
    """Every variant that pick_config can return."""
    return [
        Config(K, V, VR, dtype)
        for dtype in ("bfloat16", "float16")
        for K in (64, 128)
        for V in (64, 128)
        for VR in (64, 128)
        if VR <= V
    ]


def device_source(dtype: str) -> str:
    return gates.device_source(dtype) + (Path(gates.__file__).parent / "state_tile.cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    K, V, VR, dtype = config.K, config.V, config.VR, config.dtype
    accum = "float32"
    NW, NS, PANELS = VR // 64, V // VR, K // 64
    AUX = NW * 128
    PRODUCER = AUX + 128
    THREADS = PRODUCER + 128
    # X has two stages where shared memory allows.
    XS = 2 if NW == 1 else 1
    # Two state warpgroups have no registers to hold what they emit until tensor cores are busy.
    early = NW == 2
    B, num_tokens, H, HV, slots = (T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "slots"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}") for i in "bth") for x in ("q", "k", "v", "do", "g", "beta")}

    @T.macro
    def emit(x, h_s, wg, h_full, h_free, i):
        T.barrier_wait(h_free[0], i % 2 ^ 1)
        T.call_extern("handle", f"qls_store_operand<{PANELS}, {VR}>", x.data, T.address_of(h_s[wg * 64, 0]))
        T.fence_proxy_async()
        T.sync_warp()
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(h_full[0])

    @T.prim_func
    def gdn_chunk_states_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        do: T.StridedTensor((B, num_tokens, HV, V), (*strides["do"], 1), dtype),
        A: T.Tensor((B, num_tokens, HV, CHUNK), dtype),
        g: T.StridedTensor((B, num_tokens, HV), strides["g"], accum),
        beta: T.StridedTensor((B, num_tokens, HV), strides["beta"], accum),
        h: T.Tensor((slots, HV, V, K), dtype),
        dh: T.Tensor((slots, HV, V, K), dtype),
        num_seqs: T.int32, group: T.int32, cu_address: T.int64, cu_stride: T.int32, scale: T.float32, slots_per_row: T.int32,
        segments: T.int32, segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32, starts_address: T.int64,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        dht_address: T.int64, dht_type: T.int32, dht_stride_n: T.int64, dht_stride_h: T.int64,
        dh0_address: T.int64, state_v_first: T.int32, chunks_address: T.int64,
    ):  # fmt: skip
        with T.Kernel(2 * HV * NS * segments, threads=THREADS) as i_cta:
            T.import_source(device_source(dtype))
            k_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            q_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            a_s = T.alloc_shared((STAGES * CHUNK, CHUNK), dtype)
            v_s = T.alloc_shared((STAGES * VR, CHUNK), dtype)
            x_s = T.alloc_shared((XS, CHUNK, K), dtype)
            l_s = T.alloc_shared((XS, CHUNK, CHUNK), dtype)
            h_s = T.alloc_shared((VR, K), dtype)
            table = T.alloc_shared((STAGES, TABLE), accum, scope="shared")
            S = T.alloc_fragment((VR, K), accum)
            Sb = T.alloc_fragment((VR, K), dtype)
            Sh = T.alloc_fragment((VR, K), dtype)
            y_acc = T.alloc_fragment((VR, CHUNK), accum)
            y = T.alloc_fragment((VR, CHUNK), dtype)
            do_t = T.alloc_fragment((VR, CHUNK), dtype)
            a_op = T.alloc_fragment((CHUNK, CHUNK), dtype)
            x_acc = T.alloc_fragment((CHUNK, K), accum)
            l_acc = T.alloc_fragment((CHUNK, CHUNK), accum)
            gate = T.alloc_local((2,), accum)
            betas = T.alloc_local((2,), accum)
            loaded = T.alloc_barrier([1] * STAGES)
            ready = T.alloc_barrier([1] * STAGES)
            rows = T.alloc_barrier([1])
            x_ready = T.alloc_barrier([4] * XS)
            x_free = T.alloc_barrier([4 * NW] * XS)
            free = T.alloc_barrier([4 * NW + 4] * STAGES)
            h_full = T.alloc_barrier([4 * NW])
            h_free = T.alloc_barrier([1])
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (h_s, v_s, a_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            wg = tx // 128
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            i_g = T.alloc_var("int32")
            i_x = T.alloc_var("int32")
            i_g = T.truncdiv(i_cta, 2 * HV * NS)
            i_x = i_cta - i_g * 2 * HV * NS
            reverse = i_x >= HV * NS
            i_hs = i_x - T.if_then_else(reverse, HV * NS, 0)
            i_hv = T.truncdiv(i_hs, NS)
            v0 = T.truncmod(i_hs, NS) * VR
            i_h = T.truncdiv(i_hv, group)
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
            # Of a segment: its first token, and its length.
            length = T.alloc_var("int32")
            bos += i_s * (segment_chunks * CHUNK)
            length = T.if_then_else(i_s < 0, 0, T.max(T.min(eos - bos, segment_chunks * CHUNK), 0))
            num_chunks = (length + CHUNK - 1) // CHUNK

            if tx < AUX:
                T.set_max_nreg(config.registers[2], 1)
                T.clear(S)
                start = T.alloc_var("int64")
                start_type = T.alloc_var("int32")
                start_v_first = T.alloc_var("int32")
                first = T.alloc_var("int64")
                if starts_address != 0:
                    start = starts_address
                    start_type = 0
                    start_v_first = 1
                    first = (T.cast(i_g + T.if_then_else(reverse, segments, 0), "int64") * HV + i_hv) * (V * K)
                else:
                    start = T.if_then_else(reverse, dht_address, h0_address)
                    start_type = T.if_then_else(reverse, dht_type, h0_type)
                    start_v_first = state_v_first
                    first = T.cast(i_n, "int64") * T.if_then_else(
                        reverse, dht_stride_n, h0_stride_n
                    ) + i_hv * T.if_then_else(reverse, dht_stride_h, h0_stride_h)
                if start != 0 and (length > 0 or i_s == 0):
                    load_state(S, start, first, start_type, start_v_first, v0, K, V)
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                if reverse:
                    for i in T.serial(num_chunks):
                        T.copy(S, Sh)
                        if early:
                            emit(Sh, h_s, wg, h_full, h_free, i)
                        T.barrier_wait(ready[s], phase)
                        for a, b in T.Parallel(VR, K):
                            S[a, b] *= table[s, LAST]
                        T.copy(S, Sb)
                        T.barrier_wait(loaded[s], phase)
                        T.call_extern(
                            "handle",
                            "qls_scaled_operand",
                            T.address_of(v_s[s * VR + wg * 64, 0]),
                            T.address_of(table[s, VALUE]),
                            do_t.data,
                        )
                        T.wgmma_gemm(Sb, k_s[s, :, :], y_acc, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                        T.barrier_wait(x_ready[i % XS], i // XS % 2)
                        T.wgmma_gemm(do_t, l_s[i % XS, :, :], y_acc, clear_accum=False, policy=ROW_POLICY)
                        T.wgmma_gemm(do_t, q_s[s, :, :], S, clear_accum=False, policy=ROW_POLICY)
                        T.wait_wgmma(1)
                        T.copy(y_acc, y)
                        T.wgmma_gemm(y, x_s[i % XS, :, :], S, clear_accum=False, policy=ROW_POLICY)
                        if not early:
                            emit(Sh, h_s, wg, h_full, h_free, i)
                        T.wait_wgmma(0)
                        if lane == 0:
                            T.barrier_arrive(x_free[i % XS])
                            T.barrier_arrive(free[s])
                        advance(s, phase, STAGES)
                    if dh0_address != 0 and i_s == 0:
                        store_state(
                            S,
                            dh0_address + (T.cast(i_n, "int64") * HV + i_hv) * (K * V * 4),
                            accum,
                            state_v_first,
                            v0,
                            K,
                            V,
                        )
                else:
                    for i in T.serial(num_chunks):
                        T.copy(S, Sh)
                        if early:
                            emit(Sh, h_s, wg, h_full, h_free, i)
                        T.barrier_wait(ready[s], phase)
                        for a, b in T.Parallel(VR, K):
                            S[a, b] *= table[s, LAST]
                        T.copy(S, Sb)
                        T.barrier_wait(loaded[s], phase)
                        T.call_extern(
                            "handle",
                            "qls_scaled_values",
                            T.address_of(v_s[s * VR + wg * 64, 0]),
                            T.address_of(table[s, VALUE]),
                            y_acc.data,
                        )
                        T.wgmma_gemm(Sb, k_s[s, :, :], y_acc, transpose_B=True, clear_accum=False, policy=ROW_POLICY)
                        T.wait_wgmma(0)
                        T.copy(y_acc, y)
                        T.barrier_wait(x_ready[i % XS], i // XS % 2)
                        T.wgmma_gemm(y, x_s[i % XS, :, :], S, clear_accum=False, policy=ROW_POLICY)
                        if not early:
                            emit(Sh, h_s, wg, h_full, h_free, i)
                        T.wait_wgmma(0)
                        if lane == 0:
                            T.barrier_arrive(x_free[i % XS])
                            T.barrier_arrive(free[s])
                        advance(s, phase, STAGES)
            elif tx < PRODUCER:
                T.set_max_nreg(config.registers[1], 0)
                if reverse:
                    for i in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        T.barrier_wait(ready[s], phase)
                        T.call_extern(
                            "handle",
                            "qls_scaled_inverse<false>",
                            T.address_of(a_s[s * CHUNK, 0]),
                            T.address_of(table[s, BETA]),
                            a_op.data,
                        )
                        T.wgmma_gemm(a_op, k_s[s, :, :], x_acc, clear_accum=True, policy=ROW_POLICY)
                        T.wait_wgmma(0)
                        T.barrier_wait(x_free[i % XS], i // XS % 2 ^ 1)
                        T.call_extern(
                            "handle", f"qls_store_accumulator<{PANELS}>", x_acc.data, T.address_of(x_s[i % XS, 0, 0])
                        )
                        T.wgmma_gemm(
                            q_s[s, :, :], k_s[s, :, :], l_acc, transpose_B=True, clear_accum=True, policy=ROW_POLICY
                        )
                        T.wait_wgmma(0)
                        T.call_extern("handle", "qls_store_lower", l_acc.data, T.address_of(l_s[i % XS, 0, 0]))
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(x_ready[i % XS])
                            T.barrier_arrive(free[s])
                        advance(s, phase, STAGES)
                else:
                    for i in T.serial(num_chunks):
                        T.barrier_wait(loaded[s], phase)
                        T.barrier_wait(ready[s], phase)
                        T.call_extern(
                            "handle",
                            "qls_scaled_inverse<true>",
                            T.address_of(a_s[s * CHUNK, 0]),
                            T.address_of(table[s, BETA]),
                            a_op.data,
                        )
                        T.wgmma_gemm(a_op, k_s[s, :, :], x_acc, clear_accum=True, policy=ROW_POLICY)
                        T.wait_wgmma(0)
                        T.barrier_wait(x_free[i % XS], i // XS % 2 ^ 1)
                        T.call_extern(
                            "handle", f"qls_store_accumulator<{PANELS}>", x_acc.data, T.address_of(x_s[i % XS, 0, 0])
                        )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(x_ready[i % XS])
                            T.barrier_arrive(free[s])
                        advance(s, phase, STAGES)
            else:
                T.set_max_nreg(config.registers[0], 0)
                if tx < PRODUCER + 32:
                    for i in T.serial(num_chunks):
                        t = bos + T.if_then_else(reverse, num_chunks - 1 - i, i) * CHUNK
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(k[i_b, t : t + CHUNK, i_h, 0:K], k_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(
                            A[i_b, t : t + CHUNK, i_hv, 0:CHUNK],
                            a_s[s * CHUNK : s * CHUNK + CHUNK, :],
                            barrier=loaded[s],
                        )
                        if reverse:
                            T.tma_copy(q[i_b, t : t + CHUNK, i_h, 0:K], q_s[s, :, :], barrier=loaded[s])
                            T.tma_copy(
                                do[i_b, t : t + CHUNK, i_hv, v0 : v0 + 64],
                                v_s[s * VR : s * VR + 64, :],
                                barrier=loaded[s],
                            )
                            if NW == 2:
                                T.tma_copy(
                                    do[i_b, t : t + CHUNK, i_hv, 64:128],
                                    v_s[s * VR + 64 : s * VR + 128, :],
                                    barrier=loaded[s],
                                )
                        else:
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, v0 : v0 + 64],
                                v_s[s * VR : s * VR + 64, :],
                                barrier=loaded[s],
                            )
                            if NW == 2:
                                T.tma_copy(
                                    v[i_b, t : t + CHUNK, i_hv, 64:128],
                                    v_s[s * VR + 64 : s * VR + 128, :],
                                    barrier=loaded[s],
                                )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(loaded[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 64:
                    for i in T.serial(num_chunks):
                        c = T.if_then_else(reverse, num_chunks - 1 - i, i)
                        valid = T.min(length - c * CHUNK, CHUNK)
                        t = T.cast(bos + c * CHUNK, "int64")
                        last = g[i_b, t + valid - 1, i_hv] * LOG2E
                        for j in T.unroll(2):
                            gate[j] = last
                            betas[j] = 0.0
                            if 2 * lane + j < valid:
                                gate[j] = g[i_b, t + 2 * lane + j, i_hv] * LOG2E
                                betas[j] = beta[i_b, t + 2 * lane + j, i_hv]
                        T.barrier_wait(free[s], phase ^ 1)
                        if valid < CHUNK:
                            T.barrier_wait(rows[0], 0)
                        for j in T.unroll(2):
                            table[s, VALUE + 2 * lane + j] = T.if_then_else(
                                reverse, scale * T.exp2(gate[j]), -T.exp2(last - gate[j])
                            )
                            table[s, BETA + 2 * lane + j] = -betas[j]
                        if lane == 0:
                            table[s, LAST] = T.exp2(last)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(ready[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 96:
                    if chunks_address != 0 and i_x == 0 and i_s == 0:
                        # Packed: which tokens a slot holds, for the kernel that takes all chunks at once.
                        chunks = T.make_tensor_from_addr(chunks_address, (1 << 30,), "int32")
                        end = T.if_then_else(i_n + 1 < num_seqs, eos // CHUNK + i_n + 1, slots)
                        for r in T.serial((end - slot0 + 31) // 32):
                            c = r * 32 + lane
                            if slot0 + c < end:
                                chunks[2 * (slot0 + c)] = bos + c * CHUNK
                                chunks[2 * (slot0 + c) + 1] = T.max(T.min(eos - bos - c * CHUNK, CHUNK), 0)
                    if length % CHUNK != 0:
                        ragged = T.if_then_else(reverse, 0, num_chunks - 1)
                        for i in T.serial(ragged + 1):
                            # Every chunk up to it is waited for: a parity means nothing to who has not seen the phase before.
                            T.barrier_wait(loaded[s], phase)
                            if i == ragged:
                                for r in T.serial(length % CHUNK, CHUNK):
                                    for j in T.vectorized(K // 32):
                                        k_s[s, r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                    if reverse:
                                        for j in T.vectorized(K // 32):
                                            q_s[s, r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                    for j in T.vectorized(2):
                                        a_s[s * CHUNK + r, lane * 2 + j] = T.cast(0.0, dtype)
                                    for wv in T.unroll(NW):
                                        for j in T.vectorized(2):
                                            v_s[s * VR + wv * 64 + r, lane * 2 + j] = T.cast(0.0, dtype)
                                T.fence_proxy_async()
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(rows[0])
                            advance(s, phase, STAGES)
                else:
                    for i in T.serial(num_chunks):
                        slot = slot0 + T.if_then_else(reverse, num_chunks - 1 - i, i)
                        T.barrier_wait(h_full[0], i % 2)
                        if reverse:
                            T.copy(h_s, dh[slot, i_hv, v0 : v0 + VR, 0:K])
                        else:
                            T.copy(h_s, h[slot, i_hv, v0 : v0 + VR, 0:K])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(h_free[0])

    return gdn_chunk_states_kernel


@functools.lru_cache
def kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, config)
