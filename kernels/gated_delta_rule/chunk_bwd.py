"""The gradients of the gated delta rule: every chunk at once, from the states and state gradients of chunk_states.py.

Per value head and chunk of 64 tokens, with S the state before the chunk, R the gradient with respect to the state after
it, G the in-chunk cumulative log decay, D[i, j] = exp(G_i - G_j) for j <= i, else 0, and A the gate-free inverse:

    T  = D o A beta                       P  = scale D o (Q K^T)                        recomputed
    W  = V - exp(G) o (K S)               Vn = T W
    dVn = exp(G_last - G) o (K R) + P^T dO
    dV = T^T dVn                          dT = dVn W^T             dP = dO Vn^T
    E  = D o A o dT                       dL = -strict_lower(A^T strict_lower(D o dT beta) A^T)
    dQ = scale exp(G) o (dO S^T) + (scale D o dP) K
    dK = exp(G_last - G) o (Vn R^T) - exp(G) o (dV S^T) + (scale D o dP)^T Q + (beta dL + (beta dL)^T) K
    db = columns of E + rows of dL o (K K^T)
    dG = rows - columns of strict_lower(E beta + P o dP) + exp(G) o rows of (scale Q o (dO S^T) - K o (dV S^T)) - x
    x  = exp(G_last - G) o rows of K o (Vn R^T), 0 at the last token; there dG has the sum of x and exp(G_last) <S, R> more
    dg = what of dG lies at or after each token of the chunk

docs/math_backward.md derives them, and the builder is as long as they are. A CTA takes one chunk of one key head at a time and walks the value heads of its group:
dQ and dK, and the inner gradients scale D o dP and beta dL they need, are summed over the group in registers.

    warps            work                                        waits on                              signals
    COMPUTE (8)      the products                                kq_full, full[], ready, dv_free,      free[], dv_full,
                                                                 red_free                              red_full, dqk_full
    LOAD (1)         TMA of K, Q a chunk; A, S, R, V, dO a head  kq_free, free[]                       kq_full, full[]
    GATE (1)         gate table; zeroes rows past the end        free[A], in a ragged chunk kq_full    ready
                                                                 full[]
    FINISH (1)       db, dg from partial sums                    red_full                              red_free
    STORE (1)        dV a head; dQ, dK a chunk                   dv_full, dqk_full                     dv_free, kq_free
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.gates import LOG2E
from flash_qla_tl.kernels.common.segments import Lengths, Segments
from flash_qla_tl.kernels.common.state_pool import state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher, num_sms, on_device
from flash_qla_tl.kernels.common.tensors import address, constants, state_rows, tma_ready
from flash_qla_tl.kernels.gated_delta_rule import chunk_states
from flash_qla_tl.kernels.gated_delta_rule.chunk_intra import chunk_intra, cu_stride
from flash_qla_tl.kernels.gated_delta_rule.segment_states import segment_starts

ROW_POLICY = T.GemmWarpPolicy.FullRow
PASS_CONFIGS = {
    **chunk_states.PASS_CONFIGS,
    # The barriers are written out below; the pass would add one before every tile that is stored.
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}
COMPUTE = 256
THREADS = COMPUTE + 128
COMPUTE_BARRIER = 8
# The gate table: per token G (log2), -exp(G), scale exp(G), exp(G_last - G), beta; exp(G_last).
G, NGAMMA, QGAMMA, DECAY, BETA, LAST = 0, 64, 128, 192, 256, 320
TABLE = 324
# Partial sums: rows by half of the columns, columns by 16 rows, the inner product by warp.
ROW_SUMS, X_SUMS, DL_SUMS, M_SUMS, E_SUMS, PRODUCT = 0, 128, 256, 384, 640, 896
PARTIALS = 904
# What a head's loads are called in full[] and free[].
A_TILE, S_TILE, R_TILE, V_TILE = range(4)


@dataclass(frozen=True)
class Config:
    """What one compiled variant is."""

    K: int
    V: int
    dtype: str


def configs() -> list[Config]:
    """Every variant."""
    return [Config(K, V, dtype) for dtype in ("bfloat16", "float16") for K in (64, 128) for V in (64, 128)]


def device_source(dtype: str) -> str:
    rows = f"#define QLG_G {G}\n#define QLG_BETA {BETA}\n"
    return gates.device_source(dtype) + rows + (Path(gates.__file__).parent / "grad_tile.cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    K, V, dtype = config.K, config.V, config.dtype
    accum = "float32"
    # Each of the two compute warpgroups owns 64 values, and 64 columns of dQ and dK. Tiles of smaller heads are filled up with
    # zeros: a warpgroup's share of a product cannot be narrower than the 128 bytes of a swizzled row.
    KT = VT = 128
    B, num_tokens, H, HV, slots = (T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "slots"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}") for i in "bth") for x in ("q", "k", "v", "do", "g", "beta")}

    @T.macro
    def locate(work, i_b: T.Ref, t0: T.Ref, valid: T.Ref, chunks_address, slots_per_row):
        slot = T.truncdiv(work, H)
        if chunks_address != 0:
            chunks = T.make_tensor_from_addr(chunks_address, (1 << 30,), "int32")
            i_b = 0
            t0 = T.min(T.max(chunks[2 * slot], 0), num_tokens)
            valid = T.min(T.min(chunks[2 * slot + 1], CHUNK), num_tokens - t0)
        else:
            i_b = T.truncdiv(slot, slots_per_row)
            t0 = (slot - i_b * slots_per_row) * CHUNK
            valid = T.min(num_tokens - t0, CHUNK)  # noqa: F841

    @T.macro
    def store_rows(tile, out, i_b, t0, i_h, D, valid, lane):
        # TMA would write into the next sequence.
        for r in T.serial((valid * (D // 8) + 31) // 32):
            i = r * 32 + lane
            if i < valid * (D // 8):
                for j in T.vectorized(8):
                    out[i_b, T.cast(t0 + i // (D // 8), "int64"), i_h, i % (D // 8) * 8 + j] = tile[
                        i // (D // 8), i % (D // 8) * 8 + j
                    ]

    @T.macro
    def clear(tile, rows, tx):
        for r in T.serial((rows * 128 + THREADS - 1) // THREADS):
            i = r * THREADS + tx
            if i < rows * 128:
                tile[i // 128, i % 128] = T.cast(0.0, dtype)

    @T.macro
    def zero_row(out, t, heads, D, tx):
        for c in T.serial((heads * (D // 8) + THREADS - 1) // THREADS):
            i = c * THREADS + tx
            if i < heads * (D // 8):
                for j in T.vectorized(8):
                    out[0, t, i // (D // 8), i % (D // 8) * 8 + j] = T.cast(0.0, dtype)

    @T.prim_func
    def gdn_chunk_bwd_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        do: T.StridedTensor((B, num_tokens, HV, V), (*strides["do"], 1), dtype),
        A: T.Tensor((B, num_tokens, HV, CHUNK), dtype),
        g: T.StridedTensor((B, num_tokens, HV), strides["g"], accum),
        beta: T.StridedTensor((B, num_tokens, HV), strides["beta"], accum),
        h: T.Tensor((slots, HV, V, K), dtype),
        dh: T.Tensor((slots, HV, V, K), dtype),
        dq: T.Tensor((B, num_tokens, H, K), dtype),
        dk: T.Tensor((B, num_tokens, H, K), dtype),
        dv: T.Tensor((B, num_tokens, HV, V), dtype),
        db: T.Tensor((B, num_tokens, HV), accum),
        dg: T.Tensor((B, num_tokens, HV), accum),
        ctas: T.int32, group: T.int32, scale: T.float32, slots_per_row: T.int32, chunks_address: T.int64,
        end_address: T.int64,
    ):  # fmt: skip
        with T.Kernel(ctas, threads=THREADS) as i_cta:
            T.import_source(device_source(dtype))
            k_s = T.alloc_shared((CHUNK, KT), dtype)
            q_s = T.alloc_shared((CHUNK, KT), dtype)
            h_s = T.alloc_shared((VT, KT), dtype)
            dh_s = T.alloc_shared((VT, KT), dtype)
            w_s = T.alloc_shared((CHUNK, VT), dtype)  # V, then W in its place
            do_s = T.alloc_shared((CHUNK, VT), dtype)
            a_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            t_s = T.alloc_shared((CHUNK, CHUNK), dtype)  # T, then the transpose of D o dT beta; at last beta dL
            p_s = T.alloc_shared((CHUNK, CHUNK), dtype)  # P, then A^T (D o dT beta); at last scale D o dP
            kk_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            qk_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            vn_s = T.alloc_shared((CHUNK, VT), dtype)
            dvn_s = T.alloc_shared((CHUNK, VT), dtype)
            dv_s = T.alloc_shared((CHUNK, VT), dtype)
            table = T.alloc_shared((TABLE,), accum, scope="shared")
            partial = T.alloc_shared((PARTIALS,), accum, scope="shared")
            dq_sum = T.alloc_fragment((CHUNK, KT), accum)
            dk_sum = T.alloc_fragment((CHUNK, KT), accum)
            x = T.alloc_fragment((CHUNK, KT), accum)
            u = T.alloc_fragment((VT, CHUNK), accum)
            dvn = T.alloc_fragment((VT, CHUNK), accum)
            w_op = T.alloc_fragment((VT, CHUNK), dtype)
            vn_op = T.alloc_fragment((VT, CHUNK), dtype)
            dvn_op = T.alloc_fragment((VT, CHUNK), dtype)
            dv_op = T.alloc_fragment((VT, CHUNK), dtype)
            dp_sum = T.alloc_local((16,), accum)
            dl_sum = T.alloc_local((16,), accum)
            dt = T.alloc_fragment((CHUNK, CHUNK), accum)
            dp = T.alloc_fragment((CHUNK, CHUNK), accum)
            row = T.alloc_local((2,), accum)
            once = T.alloc_local((2,), accum)
            gate = T.alloc_local((2,), accum)
            betas = T.alloc_local((2,), accum)
            sums = T.alloc_local((2,), accum)
            kq_full = T.alloc_barrier([1])
            kq_free = T.alloc_barrier([1])
            full = T.alloc_barrier([1] * 4)
            free = T.alloc_barrier([8] * 4)
            ready = T.alloc_barrier([1])
            dv_full = T.alloc_barrier([8])
            dv_free = T.alloc_barrier([1])
            red_full = T.alloc_barrier([8])
            red_free = T.alloc_barrier([1])
            dqk_full = T.alloc_barrier([8])

            T.annotate_layout(
                {
                    x: tilelang.layout.make_swizzled_layout(x)
                    for x in (k_s, q_s, h_s, dh_s, w_s, do_s, a_s, t_s, p_s, kk_s, qk_s, vn_s, dvn_s, dv_s)
                }
            )

            tx = T.get_thread_binding()
            lane = tx % 32
            # Parities of the barriers that turn once a head, and once a chunk.
            turn = T.alloc_var("int32", init=0)
            chunk_turn = T.alloc_var("int32", init=0)
            i_b = T.alloc_var("int32", init=0)
            t0 = T.alloc_var("int32", init=0)
            valid = T.alloc_var("int32", init=0)
            works = T.truncdiv(slots * H - i_cta + ctas - 1, ctas)

            if K < KT or V < VT:
                for tile, rows in ((k_s, CHUNK), (q_s, CHUNK), (w_s, CHUNK), (do_s, CHUNK), (h_s, VT), (dh_s, VT)):
                    clear(tile, rows, tx)
                T.fence_proxy_async()
                T.sync_threads()
            if end_address != 0:
                # Packed input: what lies past the last sequence is zero.
                ends = T.make_tensor_from_addr(end_address, (1,), "int32")
                end = T.min(T.max(ends[0], 0), num_tokens)
                for r in T.serial((num_tokens - end - i_cta + ctas - 1) // ctas):
                    t = T.cast(end + i_cta + r * ctas, "int64")
                    zero_row(dq, t, H, K, tx)
                    zero_row(dk, t, H, K, tx)
                    zero_row(dv, t, HV, V, tx)
                    for c in T.serial((HV + THREADS - 1) // THREADS):
                        if c * THREADS + tx < HV:
                            db[0, t, c * THREADS + tx] = 0.0
                            dg[0, t, c * THREADS + tx] = 0.0

            if tx < COMPUTE:
                T.set_max_nreg(232, 1)
                wg = tx // 128
                # Addresses as numbers: where a call is given the tile itself, TileLang fences the proxies before the next product.
                table_at = T.alloc_var("uint32")
                table_at = T.call_extern("uint32", "qla_smem", T.address_of(table[0]))
                partial_at = T.alloc_var("uint32")
                partial_at = T.call_extern("uint32", "qla_smem", T.address_of(partial[0]))
                k_at = T.alloc_var("uint32")
                k_at = T.call_extern("uint32", "qla_smem", T.address_of(k_s[0, 0]))
                q_at = T.alloc_var("uint32")
                q_at = T.call_extern("uint32", "qla_smem", T.address_of(q_s[0, 0]))
                h_at = T.alloc_var("uint32")
                h_at = T.call_extern("uint32", "qla_smem", T.address_of(h_s[0, 0]))
                dh_at = T.alloc_var("uint32")
                dh_at = T.call_extern("uint32", "qla_smem", T.address_of(dh_s[0, 0]))
                w_at = T.alloc_var("uint32")
                w_at = T.call_extern("uint32", "qla_smem", T.address_of(w_s[0, 0]))
                a_at = T.alloc_var("uint32")
                a_at = T.call_extern("uint32", "qla_smem", T.address_of(a_s[0, 0]))
                t_at = T.alloc_var("uint32")
                t_at = T.call_extern("uint32", "qla_smem", T.address_of(t_s[0, 0]))
                p_at = T.alloc_var("uint32")
                p_at = T.call_extern("uint32", "qla_smem", T.address_of(p_s[0, 0]))
                kk_at = T.alloc_var("uint32")
                kk_at = T.call_extern("uint32", "qla_smem", T.address_of(kk_s[0, 0]))
                qk_at = T.alloc_var("uint32")
                qk_at = T.call_extern("uint32", "qla_smem", T.address_of(qk_s[0, 0]))
                vn_at = T.alloc_var("uint32")
                vn_at = T.call_extern("uint32", "qla_smem", T.address_of(vn_s[0, 0]))
                dvn_at = T.alloc_var("uint32")
                dvn_at = T.call_extern("uint32", "qla_smem", T.address_of(dvn_s[0, 0]))
                dv_at = T.alloc_var("uint32")
                dv_at = T.call_extern("uint32", "qla_smem", T.address_of(dv_s[0, 0]))
                for n in T.serial(works):
                    work = i_cta + n * ctas
                    locate(work, i_b, t0, valid, chunks_address, slots_per_row)
                    if valid > 0:
                        T.barrier_wait(kq_full[0], chunk_turn)
                        T.barrier_wait(ready[0], turn)
                        T.wgmma_gemm(k_s, k_s, dt, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                        T.wgmma_gemm(q_s, k_s, dp, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                        T.clear(dq_sum)
                        T.clear(dk_sum)
                        for i in T.unroll(16):
                            dp_sum[i] = 0.0
                            dl_sum[i] = 0.0
                        T.wait_wgmma(0)
                        T.call_extern("handle", "qlg_store_accumulator", dt.data, kk_at)
                        T.call_extern("handle", "qlg_store_accumulator", dp.data, qk_at)
                        T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                        for _ in T.serial(group):
                            T.barrier_wait(ready[0], turn)
                            T.barrier_wait(full[S_TILE], turn)
                            T.wgmma_gemm(h_s, k_s, u, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.barrier_wait(full[R_TILE], turn)
                            T.wgmma_gemm(dh_s, k_s, dvn, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.barrier_wait(full[A_TILE], turn)
                            T.call_extern("handle", "qlg_factors", table_at, a_at, qk_at, scale, t_at, p_at)
                            T.fence_proxy_async()
                            T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                            T.barrier_wait(full[V_TILE], turn)
                            T.wait_wgmma(1)
                            T.call_extern(
                                "handle", "qlg_residual", u.data, table_at + 4 * NGAMMA, w_at + wg * 8192, w_op.data
                            )
                            T.call_extern("handle", "qlg_store_transposed", w_op.data, w_at + wg * 8192)
                            T.wait_wgmma(0)
                            for a, b in T.Parallel(VT, CHUNK):
                                dvn[a, b] *= table[DECAY + b]
                            T.wgmma_gemm(w_op, t_s, u, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.wgmma_gemm(do_s, p_s, dvn, transpose_A=True, clear_accum=False, policy=ROW_POLICY)
                            T.barrier_wait(red_free[0], turn ^ 1)
                            T.call_extern(
                                "handle",
                                f"qlg_inner_product<{VT}, {KT}>",
                                h_at,
                                dh_at,
                                table_at + 4 * LAST,
                                partial_at + 4 * PRODUCT,
                            )
                            T.wait_wgmma(1)
                            T.copy(u, vn_op)
                            T.call_extern("handle", "qlg_store_transposed", vn_op.data, vn_at + wg * 8192)
                            T.wait_wgmma(0)
                            T.copy(dvn, dvn_op)
                            T.wgmma_gemm(dvn_op, t_s, u, clear_accum=True, policy=ROW_POLICY)
                            T.call_extern("handle", "qlg_store_transposed", dvn_op.data, dvn_at + wg * 8192)
                            T.barrier_wait(dv_free[0], turn ^ 1)
                            T.wait_wgmma(0)
                            T.copy(u, dv_op)
                            T.call_extern("handle", "qlg_store_transposed", dv_op.data, dv_at + wg * 8192)
                            T.fence_proxy_async()
                            T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                            if lane == 0:
                                T.barrier_arrive(dv_full[0])

                            T.wgmma_gemm(dvn_s, w_s, dt, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.wgmma_gemm(do_s, vn_s, dp, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.wgmma_gemm(vn_s, dh_s, x, clear_accum=True, policy=ROW_POLICY)
                            T.wait_wgmma(1)
                            T.call_extern(
                                "handle", "qlg_inner", table_at, a_at, qk_at, scale,
                                dt.data, dp.data, T.access_ptr(dp_sum, "rw"), t_at,
                            )  # fmt: skip
                            T.call_extern("handle", "qlg_store_columns", dt.data, partial_at + 4 * E_SUMS)
                            T.call_extern("handle", "qlg_row_sums", dp.data, T.access_ptr(row, "rw"))
                            T.call_extern("handle", "qlg_store_columns", dp.data, partial_at + 4 * M_SUMS)
                            T.fence_proxy_async()
                            T.wait_wgmma(0)
                            once[0] = 0.0
                            once[1] = 0.0
                            T.call_extern(
                                "handle",
                                f"qlg_row_dots<{KT // 32}>",
                                x.data,
                                k_at,
                                table_at + 4 * DECAY,
                                T.access_ptr(once, "rw"),
                            )
                            T.call_extern("handle", "qlg_store_rows", T.access_ptr(once, "r"), partial_at + 4 * X_SUMS)
                            for i, j in T.Parallel(CHUNK, KT):
                                dk_sum[i, j] += x[i, j] * table[DECAY + i]
                            if lane == 0:
                                T.barrier_arrive(free[R_TILE])
                            T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                            T.wgmma_gemm(
                                a_s, t_s, dt, transpose_A=True, transpose_B=True, clear_accum=True, policy=ROW_POLICY
                            )
                            T.wgmma_gemm(do_s, h_s, x, clear_accum=True, policy=ROW_POLICY)
                            T.wait_wgmma(1)
                            T.call_extern("handle", "qlg_store_accumulator", dt.data, p_at)
                            T.fence_proxy_async()
                            T.wait_wgmma(0)
                            T.call_extern(
                                "handle",
                                f"qlg_row_dots<{KT // 32}>",
                                x.data,
                                q_at,
                                table_at + 4 * QGAMMA,
                                T.access_ptr(row, "rw"),
                            )
                            for i, j in T.Parallel(CHUNK, KT):
                                dq_sum[i, j] += x[i, j] * table[QGAMMA + i]
                            T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                            T.wgmma_gemm(p_s, a_s, dt, transpose_B=True, clear_accum=True, policy=ROW_POLICY)
                            T.wgmma_gemm(dv_s, h_s, x, clear_accum=True, policy=ROW_POLICY)
                            T.wait_wgmma(1)
                            T.call_extern(
                                "handle",
                                "qlg_inverse",
                                table_at,
                                kk_at,
                                dt.data,
                                T.access_ptr(dl_sum, "rw"),
                                T.access_ptr(once, "rw"),
                            )
                            T.call_extern("handle", "qlg_store_rows", T.access_ptr(once, "r"), partial_at + 4 * DL_SUMS)
                            T.wait_wgmma(0)
                            T.call_extern(
                                "handle",
                                f"qlg_row_dots<{KT // 32}>",
                                x.data,
                                k_at,
                                table_at + 4 * NGAMMA,
                                T.access_ptr(row, "rw"),
                            )
                            for i, j in T.Parallel(CHUNK, KT):
                                dk_sum[i, j] += x[i, j] * table[NGAMMA + i]
                            T.call_extern("handle", "qlg_store_rows", T.access_ptr(row, "r"), partial_at + 4 * ROW_SUMS)
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(red_full[0])
                                T.barrier_arrive(free[A_TILE])
                                T.barrier_arrive(free[S_TILE])
                                T.barrier_arrive(free[V_TILE])
                            turn ^= 1
                        # Every warp is past its products with t_s and p_s once all have met here.
                        T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                        T.call_extern("handle", "qlg_store_accumulator", T.access_ptr(dp_sum, "rw"), p_at)
                        T.call_extern("handle", "qlg_store_accumulator", T.access_ptr(dl_sum, "rw"), t_at)
                        T.fence_proxy_async()
                        T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                        T.wgmma_gemm(p_s, k_s, dq_sum, clear_accum=False, policy=ROW_POLICY)
                        T.wgmma_gemm(p_s, q_s, dk_sum, transpose_A=True, clear_accum=False, policy=ROW_POLICY)
                        T.wgmma_gemm(t_s, k_s, dk_sum, clear_accum=False, policy=ROW_POLICY)
                        T.wgmma_gemm(t_s, k_s, dk_sum, transpose_A=True, clear_accum=False, policy=ROW_POLICY)
                        T.wait_wgmma(0)
                        T.sync_threads(COMPUTE_BARRIER, COMPUTE)
                        T.copy(dq_sum, q_s)
                        T.copy(dk_sum, k_s)
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(dqk_full[0])
                        chunk_turn ^= 1
            else:
                T.set_max_nreg(40, 0)
                if tx < COMPUTE + 32:
                    for n in T.serial(works):
                        work = i_cta + n * ctas
                        locate(work, i_b, t0, valid, chunks_address, slots_per_row)
                        i_h = T.truncmod(work, H)
                        slot = T.truncdiv(work, H)
                        if valid > 0:
                            for e in T.serial(group):
                                i_hv = i_h * group + e
                                T.barrier_wait(free[R_TILE], turn ^ 1)
                                for p in T.unroll(K // 64):
                                    T.tma_copy(
                                        dh[slot, i_hv, 0:V, p * 64 : p * 64 + 64],
                                        dh_s[0:V, p * 64 : p * 64 + 64],
                                        barrier=full[R_TILE],
                                    )
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(full[R_TILE])
                                T.barrier_wait(free[S_TILE], turn ^ 1)
                                for p in T.unroll(K // 64):
                                    T.tma_copy(
                                        h[slot, i_hv, 0:V, p * 64 : p * 64 + 64],
                                        h_s[0:V, p * 64 : p * 64 + 64],
                                        barrier=full[S_TILE],
                                    )
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(full[S_TILE])
                                T.barrier_wait(free[A_TILE], turn ^ 1)
                                T.tma_copy(A[i_b, t0 : t0 + CHUNK, i_hv, 0:CHUNK], a_s, barrier=full[A_TILE])
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(full[A_TILE])
                                T.barrier_wait(free[V_TILE], turn ^ 1)
                                T.tma_copy(v[i_b, t0 : t0 + CHUNK, i_hv, 0:V], w_s[:, 0:V], barrier=full[V_TILE])
                                T.tma_copy(do[i_b, t0 : t0 + CHUNK, i_hv, 0:V], do_s[:, 0:V], barrier=full[V_TILE])
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(full[V_TILE])
                                if e == 0:
                                    # Last: the previous chunk's dQ and dK are still leaving these tiles.
                                    T.barrier_wait(kq_free[0], chunk_turn ^ 1)
                                    T.tma_copy(k[i_b, t0 : t0 + CHUNK, i_h, 0:K], k_s[:, 0:K], barrier=kq_full[0])
                                    T.tma_copy(q[i_b, t0 : t0 + CHUNK, i_h, 0:K], q_s[:, 0:K], barrier=kq_full[0])
                                    T.sync_warp()
                                    if lane == 0:
                                        T.barrier_arrive(kq_full[0])
                                turn ^= 1
                            chunk_turn ^= 1
                elif tx < COMPUTE + 64:
                    for n in T.serial(works):
                        work = i_cta + n * ctas
                        locate(work, i_b, t0, valid, chunks_address, slots_per_row)
                        i_h = T.truncmod(work, H)
                        if valid > 0:
                            for e in T.serial(group):
                                i_hv = i_h * group + e
                                t = T.cast(t0, "int64")
                                last = g[i_b, t + valid - 1, i_hv] * LOG2E
                                for j in T.unroll(2):
                                    gate[j] = last
                                    betas[j] = 0.0
                                    if 2 * lane + j < valid:
                                        gate[j] = g[i_b, t + 2 * lane + j, i_hv] * LOG2E
                                        betas[j] = beta[i_b, t + 2 * lane + j, i_hv]
                                T.barrier_wait(free[A_TILE], turn ^ 1)
                                for j in T.unroll(2):
                                    table[G + 2 * lane + j] = gate[j]
                                    table[NGAMMA + 2 * lane + j] = -T.exp2(gate[j])
                                    table[QGAMMA + 2 * lane + j] = scale * T.exp2(gate[j])
                                    table[DECAY + 2 * lane + j] = T.exp2(last - gate[j])
                                    table[BETA + 2 * lane + j] = betas[j]
                                if lane == 0:
                                    table[LAST] = T.exp2(last)
                                if valid < CHUNK:
                                    # What the rows past the sequence's end hold is anybody's.
                                    T.barrier_wait(full[A_TILE], turn)
                                    T.barrier_wait(full[V_TILE], turn)
                                    if e == 0:
                                        T.barrier_wait(kq_full[0], chunk_turn)
                                    for r in T.serial(valid, CHUNK):
                                        if e == 0:
                                            for j in T.vectorized(K // 32):
                                                k_s[r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                            for j in T.vectorized(K // 32):
                                                q_s[r, lane * (K // 32) + j] = T.cast(0.0, dtype)
                                        for j in T.vectorized(2):
                                            a_s[r, lane * 2 + j] = T.cast(0.0, dtype)
                                        for j in T.vectorized(V // 32):
                                            w_s[r, lane * (V // 32) + j] = T.cast(0.0, dtype)
                                        for j in T.vectorized(V // 32):
                                            do_s[r, lane * (V // 32) + j] = T.cast(0.0, dtype)
                                    T.fence_proxy_async()
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(ready[0])
                                turn ^= 1
                            chunk_turn ^= 1
                elif tx < COMPUTE + 96:
                    for n in T.serial(works):
                        work = i_cta + n * ctas
                        locate(work, i_b, t0, valid, chunks_address, slots_per_row)
                        i_h = T.truncmod(work, H)
                        if valid > 0:
                            for e in T.serial(group):
                                T.barrier_wait(red_full[0], turn)
                                for j in T.unroll(2):
                                    i = 2 * lane + j
                                    x_i = partial[X_SUMS + i] + partial[X_SUMS + 64 + i]
                                    betas[j] = partial[DL_SUMS + i] + partial[DL_SUMS + 64 + i]
                                    gate[j] = partial[ROW_SUMS + i] + partial[ROW_SUMS + 64 + i]
                                    for w in T.unroll(4):
                                        betas[j] += partial[E_SUMS + 64 * w + i]
                                        gate[j] -= partial[M_SUMS + 64 * w + i]
                                    sums[j] = T.if_then_else(i < valid - 1, x_i, 0.0)
                                    gate[j] = T.if_then_else(i < valid, gate[j], 0.0) - sums[j]
                                sums[0] += sums[1]
                                if lane < 8:
                                    sums[0] += partial[PRODUCT + lane]
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(red_free[0])
                                for m in T.unroll(5):
                                    sums[0] += T.shfl_xor(sums[0], 1 << m)
                                # The suffix sums of this lane's pair, then those of the lanes after it; the last token's share is in all.
                                gate[0] += gate[1]
                                sums[1] = gate[0]
                                for m in T.unroll(5):
                                    above = T.shfl_down(sums[1], 1 << m)
                                    if lane + (1 << m) < 32:
                                        sums[1] += above
                                after = sums[1] - gate[0] + sums[0]
                                for j in T.unroll(2):
                                    if 2 * lane + j < valid:
                                        t = T.cast(t0 + 2 * lane + j, "int64")
                                        dg[i_b, t, i_h * group + e] = gate[j] + after
                                        db[i_b, t, i_h * group + e] = betas[j]
                                turn ^= 1
                else:
                    for n in T.serial(works):
                        work = i_cta + n * ctas
                        locate(work, i_b, t0, valid, chunks_address, slots_per_row)
                        i_h = T.truncmod(work, H)
                        if valid > 0:
                            for e in T.serial(group):
                                T.barrier_wait(dv_full[0], turn)
                                if valid == CHUNK:
                                    T.copy(dv_s[:, 0:V], dv[i_b, t0 : t0 + CHUNK, i_h * group + e, 0:V])
                                else:
                                    store_rows(dv_s, dv, i_b, t0, i_h * group + e, V, valid, lane)
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(dv_free[0])
                                turn ^= 1
                            T.barrier_wait(dqk_full[0], chunk_turn)
                            if valid == CHUNK:
                                T.copy(q_s[:, 0:K], dq[i_b, t0 : t0 + CHUNK, i_h, 0:K])
                                T.copy(k_s[:, 0:K], dk[i_b, t0 : t0 + CHUNK, i_h, 0:K])
                            else:
                                store_rows(q_s, dq, i_b, t0, i_h, K, valid, lane)
                                store_rows(k_s, dk, i_b, t0, i_h, K, valid, lane)
                                # The next chunk's loads overwrite what was read here.
                                T.fence_proxy_async()
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(kq_free[0])
                            chunk_turn ^= 1

    return gdn_chunk_bwd_kernel


class ChunkBwd(NamedTuple):
    """Gradients with respect to the inputs of the forward; None for those that were not there."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    db: torch.Tensor
    dg: torch.Tensor | None
    dh0: torch.Tensor | None


def chunk_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor | None,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    *,
    dht: torch.Tensor | None = None,
    scale: float,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    num_chunks: int | None = None,
    longest: int | None = None,
    auto_cp: bool = True,
) -> ChunkBwd:
    """Two launches, five where sequences are split into segments (auto_cp), for arguments that were checked at the door.

    g_cumsum and A are the forward's; dg is with respect to the gates before they were summed; dh0 is fp32.
    num_chunks, longest: of packed input, chunks of all sequences and of the longest one, where the caller knows them.
    """
    B, num_tokens, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v, do, A = (tma_ready(x) for x in (q, k, v, do.to(v.dtype), A.contiguous()))
    empty = functools.partial(torch.empty, device=q.device)
    dq, dk, dv = (empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    db, dg = (empty(beta.shape, dtype=torch.float32) for _ in range(2))
    dh0 = None if h0 is None else _state(q, v, N, state_v_first)
    if N == 0 or dv.numel() == 0:
        for x in (dq, dk, dv, db, dg):
            x.zero_()
        if dh0 is not None:
            dh0.zero_() if dht is None else dh0.copy_(dht)
        return ChunkBwd(dq, dk, dv, db.to(beta.dtype), None if g_cumsum is None else dg.to(g_cumsum.dtype), dh0)
    # What is absent is read as a constant: the kernels have no branch for it.
    g = constants(q.device)[0].expand(beta.shape) if g_cumsum is None else g_cumsum.float()
    slots_per_row = -(-num_tokens // CHUNK)
    end = None if cu_seqlens is None else cu_seqlens[-1:]
    lengths = Lengths.of(N, num_tokens, cu_seqlens is not None, num_chunks, longest)
    beta_ = beta.float()
    with on_device(q.device.index):
        walks = _walk(
            q, k, v, g, beta_, A, do,
            dht=dht, scale=scale, h0=h0, dh0=dh0, dv=dv, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
            lengths=lengths, auto_cp=auto_cp,
        )  # fmt: skip
        kernel(Config(K, V, dtype_name(q)))(
            q, k, v, do, A, g, beta_, walks.h, walks.dh, dq, dk, dv, db, dg,
            min(num_sms(q.device.index), len(walks.h) * H), HV // H, scale, slots_per_row, address(walks.chunks), address(end),
        )  # fmt: skip
    return ChunkBwd(dq, dk, dv, db.to(beta.dtype), None if g_cumsum is None else dg.to(g_cumsum.dtype), dh0)


def state_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """dh0 [B, HV, K, V] of :func:`chunk_bwd` for dense input of a token at least, without its last launch."""
    q, k, v, do, A = (tma_ready(x) for x in (q, k, v, do.to(v.dtype), A.contiguous()))
    B, num_tokens = q.shape[:2]
    dh0 = _state(q, v, B, False)
    lengths = Lengths.of(B, num_tokens, False, None, None)
    with on_device(q.device.index):
        _walk(
            q, k, v, g_cumsum.float(), beta.float(), A, do,
            # Dense input has no rows of no sequence.
            dht=dht, scale=scale, h0=None, dh0=dh0, dv=v, cu_seqlens=None, state_v_first=False, lengths=lengths, auto_cp=True,
        )  # fmt: skip
    return dh0


def _state(q: torch.Tensor, v: torch.Tensor, N: int, state_v_first: bool) -> torch.Tensor:
    K, (HV, V) = q.shape[3], v.shape[2:]
    return q.new_empty((N, HV, V, K) if state_v_first else (N, HV, K, V), dtype=torch.float32)


class _Walks(NamedTuple):
    h: torch.Tensor  # the state before each chunk, by slot
    dh: torch.Tensor  # the gradient behind it
    chunks: torch.Tensor | None  # which tokens a slot holds, of packed input


def _walk(q, k, v, g, beta, A, do, *, dht, scale, h0, dh0, dv, cu_seqlens, state_v_first, lengths, auto_cp) -> _Walks:
    """The launches up to chunk_states, which also fills dh0 where there is one. Of dv rows of no sequence are written, if any."""
    num_tokens, H, K = q.shape[1:]
    HV, V = v.shape[2:]
    h0 = None if h0 is None else state_rows(h0)
    dht = None if dht is None else state_rows(dht)
    slots_per_row = -(-num_tokens // CHUNK)
    packed = cu_seqlens is not None
    slots = num_tokens // CHUNK + lengths.number if packed else lengths.number * slots_per_row
    h, dh = (q.new_empty((slots, HV, V, K)) for _ in range(2))
    chunks = q.new_empty((slots, 2), dtype=torch.int32) if packed else None
    config, segment = chunk_states.pick_config(K, V, dtype_name(q), HV, lengths, num_sms(q.device.index), auto_cp)
    cut = Segments.of(segment, lengths, num_tokens, packed)
    starts = None
    if cut.split:
        # The rows of dv of no sequence become zero here too: chunk_intra's is a forward, with an output.
        TPs, factors = chunk_intra(
            q,
            k,
            g,
            beta,
            scale,
            dv,
            slots=slots,
            cu_seqlens=cu_seqlens,
            A=None,
            g_cumsum=None,
            use_qk_l2norm=False,
            A_log=None,
            dt_bias=None,
            beta_range=0.0,
            g_summed=True,
        )
        starts = segment_starts(
            k, v, TPs, factors,
            cut=cut, h0=h0, cu_seqlens=cu_seqlens, state_v_first=state_v_first, q=q, do=do, dht=dht,
        )  # fmt: skip
    chunk_states.kernel(config)(
        q, k, v, do, A, g, beta, h, dh,
        lengths.number, HV // H, address(cu_seqlens), cu_stride(cu_seqlens), scale, slots_per_row,
        cut.number, cut.chunks, cut.per_row, cut.search_steps, address(starts),
        *state_arguments(h0), *state_arguments(dht), address(dh0), int(state_v_first), address(chunks),
    )  # fmt: skip
    return _Walks(h, dh, chunks)


@functools.lru_cache
def kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, config)
