"""What the chunks of a sequence need that does not depend on the state, all chunks at once: T, P and the gate factors.

Per value head and chunk of 64 tokens, with G the in-chunk cumulative log2 decay and D[i, j] = 2^(G_i - G_j) for
j <= i, else 0:

    A = (I + strict_lower(beta K K^T))^-1       T = D o A beta       P = scale D o (Q K^T)

T and P^T go to one scratch of 16 bits, [slots, HV, 64, 64]: T below the diagonal, P^T on and above it (T's own diagonal is
beta). The factors a state needs (common/gates.py) go to one of fp32; chunk_fwd.py takes them from there. A and the sums of g are
written on request. Done here, once a head, and not in front of every use: the L2 norm of q and k, the activations of g
and beta, and their conversion to fp32.

Grid (at least slots [+ 1] * HV / heads): a CTA of one warpgroup takes `heads` value heads of one key head in one chunk. Chunk i of
sequence n has slot n slots_per_row + i, or, packed, bos // 64 + n + i: at most T // 64 + N, no two alike. Packed input has one
slot more: those behind the last sequence's zero the rows of the outputs that no sequence has.

    step            warps
    K, Q by TMA     1 asks, all wait; rows past the sequence's end become zero
    gate table      of each value head one warp, while K and Q are on their way
    norms           two threads a row
    K K^T, Q K^T    all (wgmma); to shared memory in fp32, over K and Q
    a value head    one warp (two, four where the CTA has two heads, one: they share its block rows): A, T, P^T, and their way to
                    memory (chunk_intra.cuh). No head waits for another.
"""

import functools
from pathlib import Path

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.gates import LN2, NUM_FACTORS, ROWS, TABLE, write_factors, write_gates
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher, num_sms
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, address
from flash_qla_tl.kernels.common.walk import find_sequence

THREADS = 128
CTAS_PER_SM = 5
MAX_ROWS = 32  # sequences whose chunks are made side by side
# fp32 numbers in shared memory (chunk_intra.cuh): the products of a chunk, and what each warp has of its own.
RAW = 64 * 72
OWN = 1024
# c = a b^T on the tensor cores, each warp with its 16 rows; and a function of chunk_tile.cuh.
product = functools.partial(T.wgmma_gemm, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
device = functools.partial(T.call_extern, "handle")
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


def device_source(dtype: str) -> str:
    """chunk_intra.cuh and what it stands on, with the rows of the gate table."""
    rows = "".join(f"#define QLA_{name} {at}\n" for name, at in ROWS.items())
    return rows + gates.device_source(dtype) + Path(__file__).with_suffix(".cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(K: int, dtype: str):
    accum = "float32"
    B, num_tokens, H, HV, slots = (T.dynamic(name) for name in ("B", "num_tokens", "H", "HV", "slots"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "qk"}

    @T.macro
    def norm_of_rows(stage, which, norm, tx):
        """norm[0] of two threads a row = (sum x^2 + 1e-6)^-1/2."""
        values = T.alloc_local((8,), dtype)
        norm[0] = 0.0
        for i in T.serial(K // 16):
            for j in T.vectorized(8):
                values[j] = stage[which, tx // 2, tx % 2 * (K // 2) + i * 8 + j]
            for j in T.unroll(8):
                norm[0] += T.cast(values[j], accum) * T.cast(values[j], accum)
        norm[0] += T.shfl_xor(norm[0], 1)
        norm[0] = T.rsqrt(norm[0] + 1e-6)

    @T.macro
    def make_table(
        tables, warp, i_b, t0, valid, i_hv, lane,
        g_address, g_type, g_strides, g_summed, A_log_address, dt_bias_address, beta_address, beta_type, beta_strides, beta_range,
    ):  # fmt: skip
        """The gate table of a value head, by one warp: g (each by itself, where sums are read) and beta, activated where asked for."""
        gates = T.alloc_local((2,), accum)
        betas = T.alloc_local((2,), accum)
        g_bytes = T.if_then_else(g_type == 0, 4, 2)
        beta_bytes = T.if_then_else(beta_type == 0, 4, 2)
        device(
            "qla_read_gates",
            gates.data,
            betas.data,
            T.if_then_else(
                g_address != 0,
                g_address + (i_b * g_strides[0] + t0 * g_strides[1] + i_hv * g_strides[2]) * g_bytes,
                T.int64(0),
            ),
            g_type,
            g_strides[1] * g_bytes,
            beta_address + (i_b * beta_strides[0] + t0 * beta_strides[1] + i_hv * beta_strides[2]) * beta_bytes,
            beta_type,
            beta_strides[1] * beta_bytes,
            valid,
            lane,
        )
        if g_summed != 0:
            before = T.shfl_up(gates[1], 1)
            gates[1] = T.if_then_else(2 * lane + 1 < valid, gates[1] - gates[0], 0.0)
            gates[0] = T.if_then_else(2 * lane < valid, gates[0] - T.if_then_else(lane == 0, 0.0, before), 0.0)
        if A_log_address != 0:
            A_log = T.make_tensor_from_addr(A_log_address, (1 << 30,), accum)
            dt_bias = T.make_tensor_from_addr(dt_bias_address, (1 << 30,), accum)
            rate = T.alloc_var(accum)
            rate = -T.exp(A_log[i_hv])
            for j in T.unroll(2):
                x = gates[j] + dt_bias[i_hv]
                gates[j] = T.if_then_else(
                    2 * lane + j < valid, rate * (T.max(x, 0.0) + T.log(1.0 + T.exp(-T.abs(x)))), 0.0
                )
        if beta_range != 0.0:
            for j in T.unroll(2):
                betas[j] = T.if_then_else(2 * lane + j < valid, beta_range / (1.0 + T.exp(-betas[j])), 0.0)
        write_gates(tables, warp, gates, betas, lane)

    @T.macro
    def zero_rows(out_address, width, first, rows, hv0, heads, tx):
        """Zeroes `rows` tokens of the heads hv0 .. of a dense [tokens, HV, width] of 32-bit words."""
        for r in T.serial(rows):
            out = T.make_tensor_from_addr(out_address + ((first + r) * HV + hv0) * width * 4, (1 << 60,), "uint32")
            for i in T.serial((heads * width + THREADS - 1) // THREADS):
                if i * THREADS + tx < heads * width:
                    out[i * THREADS + tx] = T.uint32(0)

    @T.prim_func
    def gdn_chunk_intra_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        TPs: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        g_address: T.int64, g_type: T.int32, g_stride_b: T.int64, g_stride_t: T.int64, g_stride_h: T.int64, g_summed: T.int32,
        A_log_address: T.int64, dt_bias_address: T.int64,
        beta_address: T.int64, beta_type: T.int32, beta_stride_b: T.int64, beta_stride_t: T.int64, beta_stride_h: T.int64,
        beta_range: T.float32, norms: T.int32, scale: T.float32,
        num_seqs: T.int32, search_steps: T.int32, group: T.int32, heads: T.int32, split: T.int32, parts: T.int32, rows: T.int32, depth: T.int32, early: T.int32,
        cu_address: T.int64, cu_stride: T.int32, slots_per_row: T.int32,
        A_address: T.int64, g_cumsum_address: T.int64, o_address: T.int64, o_width: T.int32,
    ):  # fmt: skip
        with T.Kernel(parts * depth * rows, threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            stage = T.alloc_shared((2, CHUNK, K), dtype)
            # In the place of K and Q: their products; the inverses of a head's diagonal blocks, and a block row of the tile, by warp.
            raw = T.alloc_shared((RAW + 4 * OWN,), accum)
            tables = T.alloc_shared((4, TABLE), accum, scope="shared")
            norm_s = T.alloc_shared((2, CHUNK), accum, scope="shared")
            kk = T.alloc_fragment((CHUNK, CHUNK), accum)
            qk = T.alloc_fragment((CHUNK, CHUNK), accum)
            norm_k = T.alloc_local((2,), accum)
            scale_q = T.alloc_local((2,), accum)
            norm = T.alloc_local((1,), accum)
            loaded = T.alloc_barrier([1])
            T.annotate_min_blocks_per_sm(CTAS_PER_SM)
            T.annotate_layout({stage: tilelang.layout.make_swizzled_layout(stage)})

            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            # Variables, since an expression would be divided out anew at every use.
            slot = T.alloc_var("int32")
            hv0 = T.alloc_var("int32")
            i_h = T.alloc_var("int32")
            slot = T.truncdiv(i_x, parts)
            hv0 = (i_x - slot * parts) * heads
            i_h = T.truncdiv(hv0, group)
            # From the last chunks of the sequences to the first: what the walk begins with is then what was written last, and is still in
            # the L2 cache.
            back = T.alloc_var("int32")
            back = T.truncdiv(slot, rows)
            slot = (slot - back * rows) * depth + depth - 1 - back
            i_b = T.alloc_var("int32", init=0)
            t0 = T.alloc_var("int32", init=0)
            valid = T.alloc_var("int32", init=0)
            if cu_address == 0:
                i_b = T.truncdiv(slot, slots_per_row)
                t0 = (slot - i_b * slots_per_row) * CHUNK
                valid = T.min(num_tokens - t0, CHUNK)
            else:
                cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
                i_n = T.alloc_var("int32", init=0)
                bos = T.alloc_var("int32")
                eos = T.alloc_var("int32")
                find_sequence(i_n, bos, eos, cu_seqlens, cu_stride, slot, CHUNK, num_tokens, num_seqs, search_steps)
                t0 = bos + (slot - bos // CHUNK - i_n) * CHUNK
                if t0 >= bos:
                    valid = T.min(eos - t0, CHUNK)
                if i_n == num_seqs - 1 and slot >= eos // CHUNK + num_seqs:
                    first = T.alloc_var("int32")
                    count = T.alloc_var("int32")
                    first = eos + (slot - eos // CHUNK - num_seqs) * CHUNK
                    count = T.max(T.min(num_tokens - first, CHUNK), 0)
                    zero_rows(o_address, o_width, T.cast(first, "int64"), count, hv0, heads, tx)
                    if A_address != 0:
                        zero_rows(A_address, CHUNK // 2, T.cast(first, "int64"), count, hv0, heads, tx)
                        zero_rows(g_cumsum_address, 1, T.cast(first, "int64"), count, hv0, heads, tx)

            if valid > 0:
                row0 = T.cast(i_b, "int64") * num_tokens + t0
                if warp == 0:
                    T.tma_copy(k[i_b, t0 : t0 + CHUNK, i_h, 0:K], stage[0, :, :], barrier=loaded[0])
                    T.tma_copy(q[i_b, t0 : t0 + CHUNK, i_h, 0:K], stage[1, :, :], barrier=loaded[0])
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(loaded[0])
                # This warp's value head, of those that the four take at once, and its part of it.
                at_once = T.alloc_var("int32")
                e = T.alloc_var("int32")
                part = T.alloc_var("int32")
                at_once = T.truncdiv(4, split)
                e = T.truncdiv(warp, split)
                part = warp - e * split
                if part == 0 and e < heads:
                    make_table(tables, warp, i_b, t0, valid, hv0 + e, lane, g_address, g_type, (g_stride_b, g_stride_t, g_stride_h), g_summed,
                        A_log_address, dt_bias_address, beta_address, beta_type, (beta_stride_b, beta_stride_t, beta_stride_h), beta_range)  # fmt: skip
                T.barrier_wait(loaded[0], 0)
                if valid < CHUNK:
                    # What the rows past the sequence's end hold is anybody's.
                    for row in T.serial(valid, CHUNK):
                        if tx < K:
                            stage[0, row, tx] = T.cast(0.0, dtype)
                            stage[1, row, tx] = T.cast(0.0, dtype)
                    T.fence_proxy_async()
                    T.sync_threads()
                norm[0] = 1.0
                if norms != 0:
                    norm_of_rows(stage, 0, norm, tx)
                norm_s[0, tx // 2] = norm[0]
                if norms != 0:
                    norm_of_rows(stage, 1, norm, tx)
                norm_s[1, tx // 2] = norm[0] * scale
                product(stage[0, :, :], stage[0, :, :], kk)
                product(stage[1, :, :], stage[0, :, :], qk)
                T.wait_wgmma(0)
                T.sync_threads()
                device("qla_store_products", kk.data, qk.data, T.address_of(norm_s[0, 0]), T.address_of(raw[0]))
                T.sync_threads()
                if early != 0:
                    # The kernel behind this one may come as soon as there is room; it waits for what it reads.
                    T.pdl_trigger()
                device("qla_clear_quarters", T.address_of(raw[RAW + warp * OWN]), lane)
                for j in T.unroll(2):
                    norm_k[j] = norm_s[0, 2 * lane + j]
                    scale_q[j] = norm_s[1, 2 * lane + j]
                while e < heads:
                    i_hv = hv0 + e
                    if part == 0:
                        reach = T.alloc_var(accum)
                        reach = T.call_extern(
                            accum, "qla_reach", T.address_of(tables[warp, 0]), T.address_of(raw[0]), lane
                        )
                        write_factors(tables, warp, factors, slot, i_hv, norm_k, scale_q, reach, lane)
                        if g_cumsum_address != 0:
                            g_cumsum = T.make_tensor_from_addr(g_cumsum_address, (1 << 60,), accum)
                            for j in T.unroll(2):
                                if 2 * lane + j < valid:
                                    g_cumsum[(row0 + 2 * lane + j) * HV + i_hv] = (
                                        tables[warp, ROWS["G"] + 2 * lane + j] * LN2
                                    )
                    device(
                        "qla_chunk_head",
                        T.address_of(tables[warp - part, 0]),
                        T.address_of(norm_s[0, 0]),
                        T.address_of(raw[0]),
                        part,
                        split,
                        T.address_of(TPs[slot, i_hv, 0, 0]),
                        T.if_then_else(A_address != 0, A_address + (row0 * HV + i_hv) * (CHUNK * 2), T.int64(0)),
                        HV * CHUNK * 2,
                        valid,
                    )
                    T.sync_warp()
                    # More heads than warps, none of which then shares its head.
                    e += at_once
                    if e < heads:
                        make_table(tables, warp, i_b, t0, valid, hv0 + e, lane, g_address, g_type, (g_stride_b, g_stride_t, g_stride_h), g_summed,
                            A_log_address, dt_bias_address, beta_address, beta_type, (beta_stride_b, beta_stride_t, beta_stride_h), beta_range)  # fmt: skip
                        T.sync_warp()

    return gdn_chunk_intra_kernel


@functools.lru_cache
def _kernel(K: int, dtype: str):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, K, dtype)


def heads_per_cta(group: int, chunk_heads: int, num_sms: int) -> int:
    """Value heads a CTA takes: one, whose work its warps share, where all then run at once; else the whole group."""
    return 1 if chunk_heads <= CTAS_PER_SM * num_sms else group


def chunk_intra(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    o: torch.Tensor,
    *,
    slots: int,
    cu_seqlens: torch.Tensor | None,
    A: torch.Tensor | None,
    g_cumsum: torch.Tensor | None,
    use_qk_l2norm: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    beta_range: float,
    g_summed: bool = False,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> T with P^T, and the gate factors, by slot. Fills A and g_cumsum where given, and rows of o, A and g_cumsum of no sequence.

    g (or None: no decay) and beta are fp32, bf16 or fp16 in any strides; A_log and dt_bias fp32 [HV] together or None; beta_range
    is the factor of beta's sigmoid, 0 for none. g_summed: g is the g_cumsum of an earlier call. early: the next launch waits
    for this one by itself, and may come before its end.
    """
    B, num_tokens, H, K = q.shape
    HV = beta.shape[2]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    TPs = q.new_empty((slots, HV, CHUNK, CHUNK))
    factors = q.new_empty((slots, HV, NUM_FACTORS), dtype=torch.float32)
    heads = heads_per_cta(HV // H, slots * HV, num_sms(q.device.index))
    # Sequences side by side, and the share of each in the slots, were they all as long; one slot behind the last has rows of no sequence.
    # Of many sequences that would be many slots too many.
    rows = N if N <= MAX_ROWS else 1
    depth = -(-(slots + (cu_seqlens is not None)) // rows)
    _kernel(K, dtype_name(q))(
        q, k, TPs, factors,
        address(g), 0 if g is None else FLOAT_TYPE[g.dtype], *((0, 0, 0) if g is None else g.stride()), int(g_summed),
        address(A_log), address(dt_bias),
        address(beta), FLOAT_TYPE[beta.dtype], *beta.stride(), beta_range, int(use_qk_l2norm), scale,
        N, N.bit_length(), HV // H, heads, {1: 4, 2: 2}.get(heads, 1), HV // heads, rows, depth, int(early),
        address(cu_seqlens), cu_stride(cu_seqlens), -(-num_tokens // CHUNK),
        address(A), address(g_cumsum), address(o), o.shape[3] // 2,
    )  # fmt: skip
    return TPs, factors


def cu_stride(cu_seqlens: torch.Tensor | None) -> int:
    """Between its numbers, in 32-bit words: of 64-bit ones the kernels read the low word."""
    return 0 if cu_seqlens is None else cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
