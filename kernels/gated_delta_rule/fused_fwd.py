"""The gated delta rule forward in one kernel: o and the final state; on request A, g_cumsum and the chunk states.

Per value head and chunk of 64 tokens, with S the state before the chunk, G the in-chunk cumulative log2 decay and
D[i, j] = 2^(G_i - G_j) for j <= i, else 0:

    A  = (I + strict_lower(beta K K^T))^-1          T = D o A beta          P = scale D o (Q K^T)
    W  = V - 2^G o (K S)                            Vn = T W
    O  = scale 2^G o (Q S) + P Vn                   S <- 2^G_last S + K^T (2^(G_last - G) o Vn)

Grid (N * HV * V / VR): a CTA carries VR rows of one head's state through one sequence. Rows run along V: a state
warpgroup keeps 64 of them, S^T [64, K], in fp32 registers for the whole sequence, and every product with S is a
wgmma with S (or W, Vn) as its register operand. Packed input has CTAs for one more sequence: they zero what lies past the
last sequence. Two VR: 128 where sequences x heads fill the card, 64 (the head split over two CTAs) where they do not.

    warps            work                                          waits on                            signals
    STATE (4 VR/64)  W, Vn, O, S of a chunk                        kq_loaded ready v_loaded tp_ready   free o_full
                                                                   o_free
    AUX (4)          A, T, P^T of a chunk, up to two ahead         kq_loaded ready                     tp_ready free
    LOAD (1)         TMA of K, Q, V, three chunks deep             free                                kq_loaded v_loaded
    GATE (1)         gate table                                    free rows (in a ragged chunk)       ready
    ROWS (1)         zeroes K and V past the sequence's end in     kq_loaded v_loaded                  rows
                     a ragged last chunk
    STORE (1)        O, the sequence's rows of it                  o_full                              o_free

Rows past a sequence's end are made inert: K and V zero, decay 1, beta 0; garbage rows of Q reach only rows of O
that are not stored. Everything that varies per call (heads, lengths, strides, dtypes of g, beta and the states,
layouts, scale, which states there are) is a run-time value.

The builder is long because it is one program: six roles that share buffers and barriers, each written where it runs.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.gates import LN2, ROWS, TABLE, device_source, write_gates
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, compiling, dtype_name, num_sms, on_device
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, address, constants, readable, state_rows, tma_ready
from flash_qla_tl.kernels.common.walk import advance, load_state, store_state
from flash_qla_tl.kernels.gated_delta_rule.prepare import prepare

STAGES = 3
# A chunk's time on an H200 with all SMs busy, K = V = 128, by VR.
STEP_US = {64: 2.2, 128: 3.0}
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
    V: int
    VR: int  # rows of the state a CTA carries: 64 a state warpgroup
    dtype: str
    emit: bool  # also A, g_cumsum and the chunk states

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of the producers, the auxiliary and the state warpgroups: together at most 64 Ki a CTA."""
        if self.VR == 64:
            return (56, 168, 232)
        # With 64 channels a warpgroup's state takes half as many.
        return (24, 104, 192) if self.K == 128 else (56, 120, 168)


def pick_config(K: int, V: int, dtype: str, heads: int, num_sms: int, emit: bool) -> Config:
    """heads: sequences x value heads. A head is split over two CTAs where the waves over the card then take less time."""
    if V == 64:
        return Config(K, V, 64, dtype, emit)
    whole = STEP_US[128] * -(-heads // num_sms)
    split = STEP_US[64] * -(-2 * heads // num_sms)
    return Config(K, V, 64 if split < whole else 128, dtype, emit)


def configs() -> list[Config]:
    """Every variant that pick_config can return."""
    return [
        Config(K, V, VR, dtype, emit)
        for dtype in ("bfloat16", "float16")
        for emit in (False, True)
        for K in (64, 128)
        for V in (64, 128)
        for VR in (64, 128)
        if VR <= V
    ]


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    K, V, VR, dtype, emit = config.K, config.V, config.VR, config.dtype, config.emit
    accum = "float32"
    NW, NS = VR // 64, V // VR
    AUX = NW * 128
    PRODUCER = AUX + 128
    THREADS = PRODUCER + 128
    AUX_BARRIER = 15  # TileLang numbers its own from 3 up
    # One state warpgroup alone has the registers to keep Q S in flight behind K S.
    early = NW == 1
    B, num_tokens, H, HV = (T.dynamic(name) for name in ("B", "num_tokens", "H", "HV"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "qkvo"}

    @T.macro
    def read_pair(out, at: T.Ref, stride, step, valid):
        """out[0], out[1] = the numbers at an address and `stride` further, as far as valid; the address moves by step."""
        x = T.make_tensor_from_addr(at, (1 << 30,), accum)
        for j in T.unroll(2):
            if j < valid:
                out[j] = x[j * stride]
        at += step

    @T.macro
    def store_out(packed_out, o_s, o_full, wg, lane):
        device("qla_store_transposed", T.access_ptr(packed_out, "r"), T.address_of(o_s[wg * 64, 0]))
        T.fence_proxy_async()
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(o_full[wg])

    @T.prim_func
    def gdn_fused_fwd_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        o: T.StridedTensor((B, num_tokens, HV, V), (*strides["o"], 1), dtype),
        g_address: T.int64, g_stride_b: T.int64, g_stride_t: T.int32, g_stride_h: T.int64,
        beta_address: T.int64, beta_stride_b: T.int64, beta_stride_t: T.int32, beta_stride_h: T.int64,
        k_norms_address: T.int64, q_norms_address: T.int64, norm_stride: T.int32,
        o_address: T.int64, num_seqs: T.int32, group: T.int32, cu_address: T.int64, cu_stride: T.int32, scale: T.float32,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        ht_address: T.int64, state_v_first: T.int32,
        A_address: T.int64, g_cumsum_address: T.int64, h_address: T.int64, h_slots: T.int32, h_stride_n: T.int32, chunk_offsets_address: T.int64,
    ):  # fmt: skip
        with T.Kernel(HV * NS * (num_seqs + T.if_then_else(cu_address != 0, 1, 0)), threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            k_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            q_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            v_s = T.alloc_shared((STAGES * VR, CHUNK), dtype)
            t_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            o_s = T.alloc_shared((VR, CHUNK), dtype)
            x_s = T.alloc_shared((CHUNK, CHUNK), "float16")
            diag = T.alloc_shared((4 * 144,), accum, scope="shared")
            table = T.alloc_shared((STAGES, TABLE), accum, scope="shared")
            S = T.alloc_fragment((VR, K), accum)
            Sb = T.alloc_fragment((VR, K), dtype)
            acc = T.alloc_fragment((VR, CHUNK), accum)
            out = T.alloc_fragment((VR, CHUNK), accum)
            w = T.alloc_fragment((VR, CHUNK), dtype)
            vn = T.alloc_fragment((VR, CHUNK), dtype)
            vn_decayed = T.alloc_fragment((VR, CHUNK), dtype)
            packed_out = T.alloc_local((16,), "uint32")
            kk = T.alloc_fragment((CHUNK, CHUNK), accum)
            kq = T.alloc_fragment((CHUNK, CHUNK), accum)
            gates = T.alloc_local((2,), accum)
            betas = T.alloc_local((2,), accum)
            norm_k = T.alloc_local((2,), accum)
            scale_q = T.alloc_local((2,), accum)
            kq_loaded = T.alloc_barrier([1] * STAGES)
            v_loaded = T.alloc_barrier([1] * STAGES)
            ready = T.alloc_barrier([1] * STAGES)
            rows = T.alloc_barrier([1])
            tp_ready = T.alloc_barrier([4] * STAGES)
            free = T.alloc_barrier([4 * NW + 4] * STAGES)
            o_full = T.alloc_barrier([4] * NW)
            o_free = T.alloc_barrier([1] * NW)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (o_s, v_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            # Every role walks the chunks with the same counters: the stage of a chunk and the parity of its barriers.
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            i_n = T.truncdiv(i_x, HV * NS)
            i_hv = (i_x - i_n * HV * NS) // NS
            v0 = (i_x - i_n * HV * NS) % NS * VR
            i_h = T.truncdiv(i_hv, group)
            i_b = T.if_then_else(cu_address != 0, 0, i_n)
            # The contents of cu_seqlens are the caller's: whatever they are, no row outside [0, num_tokens) is touched.
            bos = T.alloc_var("int32", init=0)
            eos = T.alloc_var("int32", init=num_tokens)
            if cu_address != 0:
                cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
                bos = T.min(T.max(cu_seqlens[i_n * cu_stride], 0), num_tokens)
                if i_n < num_seqs:
                    eos = T.min(T.max(cu_seqlens[(i_n + 1) * cu_stride], bos), num_tokens)
            length = eos - bos
            num_chunks = T.if_then_else(i_n < num_seqs, (length + CHUNK - 1) // CHUNK, 0)
            row0 = T.cast(i_b, "int64") * num_tokens + bos

            if i_n == num_seqs:
                # Packed input: what lies past the last sequence is zero.
                pad = T.make_tensor_from_addr(o_address + (row0 * HV + i_hv) * (V * 2), (1 << 60,), dtype)
                for r in T.serial((length * (VR // 8) + THREADS - 1) // THREADS):
                    i = r * THREADS + tx
                    if i < length * (VR // 8):
                        for j in T.vectorized(8):
                            pad[T.cast(i // (VR // 8), "int64") * (HV * V) + v0 + i % (VR // 8) * 8 + j] = T.cast(
                                0.0, dtype
                            )
                if emit:
                    if v0 == 0:
                        A = T.make_tensor_from_addr(A_address, (1 << 60,), dtype)
                        g_cumsum = T.make_tensor_from_addr(g_cumsum_address, (1 << 60,), accum)
                        for r in T.serial((length * CHUNK + THREADS - 1) // THREADS):
                            i = r * THREADS + tx
                            if i < length * CHUNK:
                                A[((row0 + i // CHUNK) * HV + i_hv) * CHUNK + i % CHUNK] = T.cast(0.0, dtype)
                            if i < length:
                                g_cumsum[(row0 + i) * HV + i_hv] = 0.0

            if tx < AUX:
                T.set_max_nreg(config.registers[2], 1)
                wg = tx // 128
                T.clear(S)
                if h0_address != 0 and i_n < num_seqs:
                    first = T.cast(i_n, "int64") * h0_stride_n + i_hv * h0_stride_h
                    load_state(S, h0_address, first, h0_type, state_v_first, v0, K, V)
                h_slot = T.alloc_var("int32")
                h_slot = i_n * h_stride_n
                if emit:
                    if chunk_offsets_address != 0 and i_n < num_seqs:
                        chunk_offsets = T.make_tensor_from_addr(chunk_offsets_address, (1 << 30,), "int32")
                        h_slot = chunk_offsets[i_n]
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
                    T.barrier_wait(kq_loaded[s], phase)
                    T.barrier_wait(ready[s], phase)
                    product(Sb, k_s[s, :, :], acc)
                    if early:
                        product(Sb, q_s[s, :, :], out)
                    if i > 0:
                        # The previous chunk's O leaves the registers behind this chunk's first products.
                        T.barrier_wait(o_free[wg], i % 2)
                        store_out(packed_out, o_s, o_full, wg, lane)
                    T.barrier_wait(v_loaded[s], phase)
                    T.wait_wgmma(1 if early else 0)
                    device(
                        "qla_residual",
                        acc.data,
                        T.address_of(table[s, 0]),
                        T.address_of(v_s[s * VR + wg * 64, 0]),
                        w.data,
                    )
                    T.barrier_wait(tp_ready[s], phase)
                    product(w, t_s[s, :, :], acc)
                    if early:
                        T.wait_wgmma(1)
                        for a, b in T.Parallel(VR, CHUNK):
                            out[a, b] *= table[s, ROWS["QGAMMA"] + b]
                    T.wait_wgmma(0)
                    if not early:
                        product(Sb, q_s[s, :, :], out)
                    T.copy(acc, vn)
                    for a, b in T.Parallel(VR, CHUNK):
                        vn_decayed[a, b] = acc[a, b] * table[s, ROWS["DECAY"] + b]
                    for a, b in T.Parallel(VR, K):
                        S[a, b] *= table[s, ROWS["LAST"]]
                    if not early:
                        T.wait_wgmma(0)
                        for a, b in T.Parallel(VR, CHUNK):
                            out[a, b] *= table[s, ROWS["QGAMMA"] + b]
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
                if ht_address != 0 and i_n < num_seqs:
                    store_state(
                        S, ht_address + (T.cast(i_n, "int64") * HV + i_hv) * (K * V * 4), accum, state_v_first, v0, K, V
                    )
            elif tx < PRODUCER:
                T.set_max_nreg(config.registers[1], 0)
                for j in T.serial(STAGES):
                    device("qla_zero_triangle", T.address_of(t_s[j, 0, 0]), 1)
                    device("qla_zero_triangle", T.address_of(p_s[j, 0, 0]), 0)
                if num_chunks > 0:
                    T.barrier_wait(kq_loaded[0], 0)
                    T.barrier_wait(ready[0], 0)
                # Unconditional, and so is the one at the loop's end: an accumulator written on one branch only would
                # serialize every wgmma of the kernel (C7514). What no chunk backs is not used.
                product(k_s[0, :, :], k_s[0, :, :], kk)
                T.wait_wgmma(0)
                for i in T.serial(num_chunks):
                    device(
                        "qla_solve_diagonal",
                        kk.data,
                        T.address_of(table[s, 0]),
                        T.address_of(x_s[0, 0]),
                        T.address_of(diag[0]),
                        AUX_BARRIER,
                    )
                    device("qla_solve_rows", T.address_of(table[s, 0]), T.address_of(x_s[0, 0]), T.address_of(t_s[s, 0, 0]), AUX_BARRIER,
                        T.if_then_else(v0 == 0, A_address + ((row0 + i * CHUNK) * HV + i_hv) * (CHUNK * 2), T.int64(0)) if emit else T.int64(0), HV * CHUNK, length - i * CHUNK,
                    )  # fmt: skip
                    # Cleared, though the product overwrites it: else its registers stay taken all along.
                    T.clear(kq)
                    product(k_s[s, :, :], q_s[s, :, :], kq)
                    done = T.alloc_var("int32")
                    done = s
                    advance(s, phase, STAGES)
                    if i + 1 < num_chunks:
                        T.barrier_wait(kq_loaded[s], phase)
                        T.barrier_wait(ready[s], phase)
                    product(k_s[s, :, :], k_s[s, :, :], kk)
                    T.wait_wgmma(1)
                    device("qla_scores", kq.data, T.address_of(table[done, 0]), T.address_of(p_s[done, 0, 0]))
                    T.fence_proxy_async()
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(tp_ready[done])
                        T.barrier_arrive(free[done])
                    T.wait_wgmma(0)
            else:
                T.set_max_nreg(config.registers[0], 0)
                if tx < PRODUCER + 32:
                    for i in T.serial(num_chunks):
                        t = bos + i * CHUNK
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(k[i_b, t : t + CHUNK, i_h, 0:K], k_s[s, :, :], barrier=kq_loaded[s])
                        T.tma_copy(q[i_b, t : t + CHUNK, i_h, 0:K], q_s[s, :, :], barrier=kq_loaded[s])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(kq_loaded[s])
                        if NW == 1:
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, v0 : v0 + 64],
                                v_s[s * 64 : s * 64 + 64, :],
                                barrier=v_loaded[s],
                            )
                        else:
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, 0:64], v_s[s * 128 : s * 128 + 64, :], barrier=v_loaded[s]
                            )
                            T.tma_copy(
                                v[i_b, t : t + CHUNK, i_hv, 64:128],
                                v_s[s * 128 + 64 : s * 128 + 128, :],
                                barrier=v_loaded[s],
                            )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(v_loaded[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 64:
                    # Addresses of this lane's two tokens; they move on by a chunk at a time.
                    g_step = T.cast(4 * CHUNK, "int64") * g_stride_t
                    beta_step = T.cast(4 * CHUNK, "int64") * beta_stride_t
                    norm_step = T.cast(4 * CHUNK, "int64") * norm_stride
                    t = T.cast(bos + 2 * lane, "int64")
                    g_at = T.alloc_var("int64")
                    beta_at = T.alloc_var("int64")
                    k_norm_at = T.alloc_var("int64")
                    q_norm_at = T.alloc_var("int64")
                    g_at = g_address + 4 * (i_b * g_stride_b + t * g_stride_t + i_hv * g_stride_h)
                    beta_at = beta_address + 4 * (i_b * beta_stride_b + t * beta_stride_t + i_hv * beta_stride_h)
                    # The norms are dense [B, T, H], or one number for all (stride 0).
                    norm0 = 4 * (
                        (T.cast(i_b, "int64") * num_tokens + t) * norm_stride + T.if_then_else(norm_stride != 0, i_h, 0)
                    )
                    k_norm_at = k_norms_address + norm0
                    q_norm_at = q_norms_address + norm0
                    for i in T.serial(num_chunks):
                        valid = T.min(length - i * CHUNK, CHUNK)
                        for j in T.unroll(2):
                            gates[j] = 0.0
                            betas[j] = 0.0
                            norm_k[j] = 1.0
                            scale_q[j] = 1.0
                        read_pair(gates, g_at, g_stride_t, g_step, valid - 2 * lane)
                        read_pair(betas, beta_at, beta_stride_t, beta_step, valid - 2 * lane)
                        read_pair(norm_k, k_norm_at, norm_stride, norm_step, valid - 2 * lane)
                        read_pair(scale_q, q_norm_at, norm_stride, norm_step, valid - 2 * lane)
                        for j in T.unroll(2):
                            scale_q[j] *= scale
                        T.barrier_wait(free[s], phase ^ 1)
                        if valid < CHUNK:
                            T.barrier_wait(rows[0], 0)
                        write_gates(table, s, gates, betas, norm_k, scale_q, lane)
                        if emit:
                            for j in T.unroll(2):
                                if v0 == 0 and 2 * lane + j < valid:
                                    g_cumsum = T.make_tensor_from_addr(g_cumsum_address, (1 << 60,), accum)
                                    g_cumsum[(row0 + i * CHUNK + 2 * lane + j) * HV + i_hv] = (
                                        table[s, ROWS["G"] + 2 * lane + j] * LN2
                                    )
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(ready[s])
                        advance(s, phase, STAGES)
                elif tx < PRODUCER + 96:
                    for i in T.serial(num_chunks):
                        # Every chunk is waited for: a barrier's parity means nothing to who has not seen the phase before.
                        T.barrier_wait(kq_loaded[s], phase)
                        T.barrier_wait(v_loaded[s], phase)
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
                                T.barrier_arrive(rows[0])
                        advance(s, phase, STAGES)
                else:
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
                                tail = T.make_tensor_from_addr(
                                    o_address + ((row0 + i * CHUNK) * HV + i_hv) * (V * 2), (1 << 30,), dtype
                                )
                                for r in T.serial((valid + 3) // 4):
                                    row = r * 4 + lane // 8
                                    if row < valid:
                                        for j in T.vectorized(8):
                                            tail[row * (HV * V) + v0 + wo * 64 + lane % 8 * 8 + j] = o_s[
                                                wo * 64 + row, lane % 8 * 8 + j
                                            ]
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(o_free[wo])

    return gdn_fused_fwd_kernel


class FusedFwd(NamedTuple):
    """What one forward gives; None where not asked for."""

    o: torch.Tensor
    ht: torch.Tensor | None
    A: torch.Tensor | None
    g_cumsum: torch.Tensor | None
    h: torch.Tensor | None


def fused_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    *,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    output_A: bool = False,
    output_h: bool = False,
    num_chunks: int | None = None,
    use_qk_l2norm: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> FusedFwd:
    """One launch for arguments that were checked at the door.

    num_chunks: slots of h for packed input, where the caller knows the exact count; else T // 64 + N.
    A_log (and dt_bias): g is the raw gate input, activated inside.
    """
    B, num_tokens, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    emit = output_A or output_h
    # The gate-free A of a chunk with the L2 norm folded in is R^-1 A R: what is handed out needs plain k.
    assert not (emit and use_qk_l2norm)
    q, k, v = (tma_ready(x) for x in (q, k, v))
    g, beta = readable(g), readable(beta)
    if A_log is not None:
        A_log = A_log.float().contiguous()
        dt_bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias.float().contiguous()
    h0 = None if h0 is None else state_rows(h0)
    empty = functools.partial(torch.empty, device=q.device)
    state_shape = (HV, V, K) if state_v_first else (HV, K, V)
    o = empty(v.shape, dtype=v.dtype)
    ht = empty((N, *state_shape), dtype=torch.float32) if output_final_state else None
    A = empty((B, num_tokens, HV, CHUNK), dtype=k.dtype) if emit else None
    g_cumsum = empty((B, num_tokens, HV), dtype=torch.float32) if emit else None
    h, chunk_offsets, slots = None, None, 0
    if output_h:
        slots = -(-num_tokens // CHUNK)
        if cu_seqlens is not None:
            slots = num_tokens // CHUNK + N if num_chunks is None else num_chunks
            chunk_offsets = _chunk_offsets(cu_seqlens, num_tokens)
        h = torch.zeros((B, slots, *state_shape), dtype=k.dtype, device=q.device)
    if N == 0 or o.numel() == 0:
        # Nothing runs: no token, or no sequence to hold one.
        o.zero_()
        if ht is not None:
            ht.zero_() if h0 is None else ht.copy_(h0)
        if emit:
            A.zero_(), g_cumsum.zero_()
        return FusedFwd(o, ht, A if output_A else None, g_cumsum if output_A else None, h)
    cu_stride = 0
    if cu_seqlens is not None:
        # Of 64-bit counts the kernel reads the low words.
        cu_stride = cu_seqlens.stride(0) * cu_seqlens.element_size() // 4

    q_norms = k_norms = None
    plain = all(x is None or x.dtype == torch.float32 for x in (g, beta)) and A_log is None
    if use_qk_l2norm or use_beta_sigmoid or not plain:
        beta_range = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else 0.0
        g, beta, q_norms, k_norms = prepare(
            q, k, g, beta, norms=use_qk_l2norm, A_log=A_log, dt_bias=dt_bias, beta_range=beta_range
        )
    zeros, ones = constants(q.device)
    # What is absent is read as a constant: the kernel has no branch for it.
    g = zeros.expand(beta.shape) if g is None else g
    q_norms, k_norms, norm_stride = (ones, ones, 0) if q_norms is None else (q_norms, k_norms, H)
    config = pick_config(K, V, dtype_name(q), N * HV, num_sms(q.device.index), emit)
    with on_device(q.device.index):
        _kernel(config)(
            q, k, v, o,
            address(g), *g.stride(), address(beta), *beta.stride(), address(k_norms), address(q_norms), norm_stride,
            address(o), N, HV // H, address(cu_seqlens), cu_stride, scale,
            address(h0), 0 if h0 is None else FLOAT_TYPE[h0.dtype], *((0, 0) if h0 is None else h0.stride()[:2]),
            address(ht), int(state_v_first),
            address(A), address(g_cumsum), address(h), B * slots, slots, address(chunk_offsets),
        )  # fmt: skip
    return FusedFwd(o, ht, A if output_A else None, g_cumsum if output_A else None, h)


@functools.lru_cache
def _kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    with compiling():
        return build(config)


def _chunk_offsets(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """First slot of h of each sequence, on the device, with the bounds that the kernel sees."""
    bounds = cu_seqlens.clamp(0, num_tokens)
    counts = ((bounds[1:] - bounds[:-1]).clamp_min(0) + CHUNK - 1) // CHUNK
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
