"""What a training step does to its inputs before the delta rule, and the way back through it: two elementwise kernels.

    q, k  = x r,  r = (sum x^2 + 1e-6)^-1/2 over a row        dx    = r (dy - x r^2 (x . dy))
    beta  = range sigmoid(x)                                  dx    = db range sigmoid(x) sigmoid(-x)
    g     = -exp(A_log) softplus(y),  y = x + dt_bias         dx    = -dg exp(A_log) sigmoid(y)
                                                              dA_log    = sum of dg g over the tokens
                                                              ddt_bias  = sum of dx over the tokens

The gate itself is activated in chunk_intra.py, once a chunk. q, k and beta are activated here in the forward, and again in
the backward: kept in between are the inputs alone, often views of a tensor that is kept anyway, and no norm, which costs nothing
beside the row it is the norm of. dq and dk are overwritten in place. The sums over tokens are taken in a fixed order: a thread its tokens,
a CTA its warps, and torch the CTAs.

Grid (gate CTAs + row CTAs) of 256 threads, those of the gate first, as they are few and wait longer:

    CTA     tile                                          a thread
    gate    64 tokens x 32 value heads of g and beta      a head, every eighth token
    row     512 / (K / 8) rows (token, head) of q and k   16 bytes of two rows of both; K / 8 lanes hold a row

Rows past the last sequence are not read: whatever they hold, activated they are zero, and so are their gradients.
"""

import functools
from pathlib import Path

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.target import TARGET, dtype_name, launcher, on_device
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, address, readable

THREADS = 256
WARPS = THREADS // 32
ROWS = 2
TOKENS = 64
HEADS = 32
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}
accum = "float32"
device = functools.partial(T.call_extern, "handle")
SOURCE = Path(__file__).with_suffix(".cuh").read_text()


@T.macro
def last_token(end: T.Ref, end_address, num_tokens):
    """Tokens of a row that belong to a sequence."""
    end = num_tokens
    if end_address != 0:
        # The contents of cu_seqlens are the caller's.
        ends = T.make_tensor_from_addr(end_address, (1,), "int32")
        end = T.min(T.max(ends[0], 0), num_tokens)  # noqa: F841


@T.macro
def load_tile(bits, insides, base, kind, stride_b, stride_t, stride_h, first, i_hv, tokens, HV, num_tokens, end, tx):
    """This thread's tokens of head i_hv of g or beta, as they are: for qln_number. insides[i]: some sequence has the token."""
    token = T.alloc_var("int32")
    i_b = T.alloc_var("int32")
    t = T.alloc_var("int32")
    for i in T.unroll(TOKENS // WARPS):
        token = first * TOKENS + i * WARPS + tx // 32
        i_b = T.truncdiv(token, num_tokens)
        t = token - i_b * num_tokens
        bits[i] = T.uint32(0)
        insides[i] = T.if_then_else(token < tokens and i_hv < HV and t < end, 1, 0)
        if insides[i] != 0:
            bits[i] = T.call_extern("uint32", "qln_load", base, i_b * stride_b + t * stride_t + i_hv * stride_h, kind)


@T.macro
def logistic(x, e: T.Ref, s: T.Ref):
    """e = exp(-|x|) and s = sigmoid(|x|): neither overflows, and e s s is sigmoid's derivative."""
    e = T.exp(-T.abs(x))
    s = 1.0 / (1.0 + e)  # noqa: F841


@T.macro
def load_row(x, i, inside, base, stride_b, stride_t, stride_h, i_b, t, i_h, column, dtype):
    """x[i, :] = 8 numbers of a row from a column on, zeros where it is not inside."""
    if inside:
        row = T.make_tensor_from_addr(base + (i_b * stride_b + t * stride_t + i_h * stride_h) * 2, (128,), dtype)
        for j in T.vectorized(8):
            x[i, j] = row[column + j]
    else:
        for j in T.vectorized(8):
            x[i, j] = T.cast(0.0, dtype)


@T.macro
def products(sums, at, x, y, i, lanes):
    """sums[at] = x[i, :] . y[i, :] over the lanes that hold the row."""
    sums[at] = 0.0
    for j in T.unroll(8):
        sums[at] += T.cast(x[i, j], accum) * T.cast(y[i, j], accum)
    for step in T.unroll(4):
        other = T.alloc_var(accum)
        other = T.shfl_xor(sums[at], 1 << step)
        sums[at] += T.if_then_else(lanes > 1 << step, other, 0.0)


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build_fwd(dtype: str):
    tokens, HV = T.dynamic("tokens"), T.dynamic("HV")

    @T.macro
    def store_normalised(base, x, total, i, row, column, lanes):
        values = T.alloc_local((8,), dtype)
        norm = T.alloc_var(accum)
        norm = T.rsqrt(total + 1e-6)
        out = T.make_tensor_from_addr(base + T.cast(row, "int64") * (lanes * 16), (128,), dtype)
        for j in T.unroll(8):
            values[j] = T.cast(T.cast(x[i, j], accum) * norm, dtype)
        for j in T.vectorized(8):
            out[column + j] = values[j]

    @T.prim_func
    def gdn_activations_fwd_kernel(
        beta_out: T.Tensor((tokens, HV), accum),
        q_out_address: T.int64, k_out_address: T.int64,
        num_tokens: T.int32, H: T.int32, lanes: T.int32, gate_ctas: T.int32, row_ctas: T.int32, end_address: T.int64,
        q_address: T.int64, q_stride_b: T.int64, q_stride_t: T.int64, q_stride_h: T.int64,
        k_address: T.int64, k_stride_b: T.int64, k_stride_t: T.int64, k_stride_h: T.int64,
        beta_address: T.int64, beta_type: T.int32, beta_stride_b: T.int64, beta_stride_t: T.int64, beta_stride_h: T.int64,
        beta_range: T.float32,
    ):  # fmt: skip
        with T.Kernel(gate_ctas + row_ctas, threads=THREADS) as i_x:
            T.import_source(SOURCE)
            # Loads under way are what hides memory's latency; ptxas would take registers that leave room for four CTAs.
            T.annotate_min_blocks_per_sm(5)
            q_x = T.alloc_local((ROWS, 8), dtype)
            k_x = T.alloc_local((ROWS, 8), dtype)
            sums = T.alloc_local((2 * ROWS,), accum)
            rows = T.alloc_local((ROWS,), "int32")
            bits = T.alloc_local((TOKENS // WARPS,), "uint32")
            insides = T.alloc_local((TOKENS // WARPS,), "int32")
            tx = T.get_thread_binding()
            end = T.alloc_var("int32")
            token = T.alloc_var("int32")
            i_b = T.alloc_var("int32")
            t = T.alloc_var("int32")
            last_token(end, end_address, num_tokens)
            if i_x < gate_ctas:
                head_blocks = T.ceildiv(HV, HEADS)
                i_hv = T.alloc_var("int32")
                first = T.alloc_var("int32")
                first = T.truncdiv(i_x, head_blocks)
                i_hv = (i_x - first * head_blocks) * HEADS + tx % 32
                e = T.alloc_var(accum)
                s = T.alloc_var(accum)
                x = T.alloc_var(accum)
                load_tile(bits, insides, beta_address, beta_type, beta_stride_b, beta_stride_t, beta_stride_h,
                    first, i_hv, tokens, HV, num_tokens, end, tx)  # fmt: skip
                for i in T.unroll(TOKENS // WARPS):
                    token = first * TOKENS + i * WARPS + tx // 32
                    x = T.call_extern(accum, "qln_number", bits[i], beta_type)
                    if beta_range != 0.0:
                        logistic(x, e, s)
                        x = beta_range * T.if_then_else(x < 0.0, e * s, s)
                    if token < tokens and i_hv < HV:
                        beta_out[token, i_hv] = T.if_then_else(insides[i] != 0, x, 0.0)
            else:
                column = (tx & (lanes - 1)) * 8
                i_h = T.alloc_var("int32")
                for i in T.unroll(ROWS):
                    rows[i] = T.truncdiv(((i_x - gate_ctas) * ROWS + i) * THREADS + tx, lanes)
                    token = T.truncdiv(rows[i], H)
                    i_h = rows[i] - token * H
                    i_b = T.truncdiv(token, num_tokens)
                    t = token - i_b * num_tokens
                    inside = token < tokens and t < end
                    load_row(q_x, i, inside, q_address, q_stride_b, q_stride_t, q_stride_h, i_b, t, i_h, column, dtype)
                    load_row(k_x, i, inside, k_address, k_stride_b, k_stride_t, k_stride_h, i_b, t, i_h, column, dtype)
                for i in T.unroll(ROWS):
                    products(sums, 2 * i, q_x, q_x, i, lanes)
                    products(sums, 2 * i + 1, k_x, k_x, i, lanes)
                    if rows[i] < tokens * H:
                        store_normalised(q_out_address, q_x, sums[2 * i], i, rows[i], column, lanes)
                        store_normalised(k_out_address, k_x, sums[2 * i + 1], i, rows[i], column, lanes)

    return gdn_activations_fwd_kernel


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build_bwd(dtype: str):
    tokens, HV = T.dynamic("tokens"), T.dynamic("HV")

    @T.macro
    def store_gradient(base, x, dy, sum_xx, sum_xy, i, row, column, lanes):
        """The row at base = r (dy - x r^2 (x . dy)), factor by factor: r^3 would leave fp32 for large rows."""
        values = T.alloc_local((8,), dtype)
        norm = T.alloc_var(accum)
        along = T.alloc_var(accum)
        norm = T.rsqrt(sum_xx + 1e-6)
        along = norm * sum_xy * norm
        for j in T.unroll(8):
            values[j] = T.cast(norm * (T.cast(dy[i, j], accum) - T.cast(x[i, j], accum) * along), dtype)
        out = T.make_tensor_from_addr(base + T.cast(row, "int64") * (lanes * 16), (128,), dtype)
        for j in T.vectorized(8):
            out[column + j] = values[j]

    @T.prim_func
    def gdn_activations_bwd_kernel(
        db: T.Tensor((tokens, HV), accum),
        dq_address: T.int64, dk_address: T.int64,
        num_tokens: T.int32, H: T.int32, lanes: T.int32, gate_ctas: T.int32, row_ctas: T.int32, end_address: T.int64,
        q_address: T.int64, q_stride_b: T.int64, q_stride_t: T.int64, q_stride_h: T.int64,
        k_address: T.int64, k_stride_b: T.int64, k_stride_t: T.int64, k_stride_h: T.int64,
        g_address: T.int64, g_type: T.int32, g_stride_b: T.int64, g_stride_t: T.int64, g_stride_h: T.int64,
        A_log_address: T.int64, dt_bias_address: T.int64, dg_address: T.int64, dg_out_address: T.int64, sums_address: T.int64,
        beta_address: T.int64, beta_type: T.int32, beta_stride_b: T.int64, beta_stride_t: T.int64, beta_stride_h: T.int64,
        beta_range: T.float32, db_out_address: T.int64,
    ):  # fmt: skip
        with T.Kernel(gate_ctas + row_ctas, threads=THREADS) as i_x:
            T.import_source(SOURCE)
            q_x = T.alloc_local((ROWS, 8), dtype)
            k_x = T.alloc_local((ROWS, 8), dtype)
            q_dy = T.alloc_local((ROWS, 8), dtype)
            k_dy = T.alloc_local((ROWS, 8), dtype)
            dots = T.alloc_local((4,), accum)
            rows = T.alloc_local((ROWS,), "int32")
            bits = T.alloc_local((TOKENS // WARPS,), "uint32")
            insides = T.alloc_local((TOKENS // WARPS,), "int32")
            dy = T.alloc_local((TOKENS // WARPS,), accum)
            totals = T.alloc_local((2,), accum)
            totals_s = T.alloc_shared((2, WARPS, HEADS), accum, scope="shared")
            tx = T.get_thread_binding()
            end = T.alloc_var("int32")
            token = T.alloc_var("int32")
            i_b = T.alloc_var("int32")
            t = T.alloc_var("int32")
            last_token(end, end_address, num_tokens)
            if i_x < gate_ctas:
                head_blocks = T.ceildiv(HV, HEADS)
                i_hv = T.alloc_var("int32")
                first = T.alloc_var("int32")
                first = T.truncdiv(i_x, head_blocks)
                i_hv = (i_x - first * head_blocks) * HEADS + tx % 32
                e = T.alloc_var(accum)
                s = T.alloc_var(accum)
                x = T.alloc_var(accum)
                dx = T.alloc_var(accum)
                if g_address != 0:
                    rate = T.alloc_var(accum, init=0.0)
                    bias = T.alloc_var(accum, init=0.0)
                    load_tile(bits, insides, g_address, g_type, g_stride_b, g_stride_t, g_stride_h,
                        first, i_hv, tokens, HV, num_tokens, end, tx)  # fmt: skip
                    dg = T.make_tensor_from_addr(dg_address, (1 << 60,), accum)
                    for i in T.unroll(TOKENS // WARPS):
                        token = first * TOKENS + i * WARPS + tx // 32
                        dy[i] = 0.0
                        if insides[i] != 0:
                            dy[i] = dg[T.cast(token, "int64") * HV + i_hv]
                    if i_hv < HV:
                        A_log = T.make_tensor_from_addr(A_log_address, (1 << 30,), accum)
                        rate = -T.exp(A_log[i_hv])
                        if dt_bias_address != 0:
                            dt_bias = T.make_tensor_from_addr(dt_bias_address, (1 << 30,), accum)
                            bias = dt_bias[i_hv]
                    for n in T.unroll(2):
                        totals[n] = 0.0
                    for i in T.unroll(TOKENS // WARPS):
                        token = first * TOKENS + i * WARPS + tx // 32
                        x = T.call_extern(accum, "qln_number", bits[i], g_type)
                        x += bias
                        logistic(x, e, s)
                        dy[i] *= rate
                        dx = T.if_then_else(insides[i] != 0, dy[i] * T.if_then_else(x < 0.0, e * s, s), 0.0)
                        # log(1 + e), to its last digits where e is small.
                        few = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
                        if insides[i] != 0:
                            totals[0] += dy[i] * (T.max(x, 0.0) + T.if_then_else(e < 0.01, few, T.log(1.0 + e)))
                        totals[1] += dx
                        if token < tokens and i_hv < HV:
                            device("qln_store", dg_out_address, T.cast(token, "int64") * HV + i_hv, g_type, dx)
                if beta_address != 0:
                    load_tile(bits, insides, beta_address, beta_type, beta_stride_b, beta_stride_t, beta_stride_h,
                        first, i_hv, tokens, HV, num_tokens, end, tx)  # fmt: skip
                    for i in T.unroll(TOKENS // WARPS):
                        token = first * TOKENS + i * WARPS + tx // 32
                        dy[i] = 0.0
                        if insides[i] != 0:
                            dy[i] = db[token, i_hv]
                    for i in T.unroll(TOKENS // WARPS):
                        token = first * TOKENS + i * WARPS + tx // 32
                        x = T.call_extern(accum, "qln_number", bits[i], beta_type)
                        logistic(x, e, s)
                        dx = T.if_then_else(insides[i] != 0, dy[i] * beta_range * (e * s * s), 0.0)
                        if token < tokens and i_hv < HV:
                            device("qln_store", db_out_address, T.cast(token, "int64") * HV + i_hv, beta_type, dx)
                if sums_address != 0:
                    for n in T.unroll(2):
                        totals_s[n, tx // 32, tx % 32] = totals[n]
                    T.sync_threads()
                    if tx < 2 * HEADS and i_hv < HV:
                        # Threads of the first two warps, one for each of the two sums; the head is the same.
                        total = T.alloc_var(accum, init=0.0)
                        for w in T.unroll(WARPS):
                            total += totals_s[tx // 32, w, tx % 32]
                        sums = T.make_tensor_from_addr(sums_address, (1 << 60,), accum)
                        sums[(T.cast(first, "int64") * 2 + tx // 32) * HV + i_hv] = total
            else:
                column = (tx & (lanes - 1)) * 8
                i_h = T.alloc_var("int32")
                for i in T.unroll(ROWS):
                    rows[i] = T.truncdiv(((i_x - gate_ctas) * ROWS + i) * THREADS + tx, lanes)
                    token = T.truncdiv(rows[i], H)
                    i_h = rows[i] - token * H
                    i_b = T.truncdiv(token, num_tokens)
                    t = token - i_b * num_tokens
                    insides[i] = T.if_then_else(token < tokens and t < end, 1, 0)
                    inside = insides[i] != 0
                    load_row(q_x, i, inside, q_address, q_stride_b, q_stride_t, q_stride_h, i_b, t, i_h, column, dtype)
                    load_row(k_x, i, inside, k_address, k_stride_b, k_stride_t, k_stride_h, i_b, t, i_h, column, dtype)
                    row = T.cast(rows[i], "int64")
                    load_row(q_dy, i, inside, dq_address, 0, 0, lanes * 8, 0, 0, row, column, dtype)
                    load_row(k_dy, i, inside, dk_address, 0, 0, lanes * 8, 0, 0, row, column, dtype)
                for i in T.unroll(ROWS):
                    products(dots, 0, q_x, q_x, i, lanes)
                    products(dots, 1, q_x, q_dy, i, lanes)
                    products(dots, 2, k_x, k_x, i, lanes)
                    products(dots, 3, k_x, k_dy, i, lanes)
                    # Gradients of rows outside are zero as they come.
                    if insides[i] != 0:
                        store_gradient(dq_address, q_x, q_dy, dots[0], dots[1], i, rows[i], column, lanes)
                        store_gradient(dk_address, k_x, k_dy, dots[2], dots[3], i, rows[i], column, lanes)

    return gdn_activations_bwd_kernel


@functools.lru_cache
def _kernel(backward: bool, dtype: str):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build_bwd if backward else build_fwd, dtype)


def activations_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None,
    use_qk_l2norm: bool,
    beta_range: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> q and k, in their dtype, normalised where asked for and else as they are, and beta, activated, in fp32.

    beta_range: the factor of beta's sigmoid, 0 for none.
    """
    B, num_tokens, H, K = q.shape
    beta = readable(beta)
    beta_out = torch.empty(beta.shape, dtype=torch.float32, device=q.device)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)) if use_qk_l2norm else (q, k)
    if beta_out.numel() == 0:
        return q_out, k_out, beta_out
    q, k = (_aligned(x) if use_qk_l2norm else x for x in (q, k))
    with on_device(q.device.index):
        _kernel(False, dtype_name(q))(
            beta_out.flatten(0, 1), address(q_out), address(k_out),
            num_tokens, H, K // 8, *_grid(q, beta, use_qk_l2norm), _end(cu_seqlens),
            address(q), *q.stride()[:3], address(k), *k.stride()[:3],
            address(beta), FLOAT_TYPE[beta.dtype], *beta.stride(), beta_range,
        )  # fmt: skip
    return q_out, k_out, beta_out


def activations_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dg: torch.Tensor | None,
    db: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None,
    use_qk_l2norm: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    beta_range: float,
    sums: bool = True,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]:  # fmt: skip
    """-> gradients of the inputs as they came: dq, dk (overwritten), dg, db, dA_log, ddt_bias.

    dq .. db are those of chunk_bwd.py, dense and zero past the last sequence, dg and db in fp32; what is not activated keeps its
    own. Without A_log, or without `sums`, the last two are None; else they are fp32.
    """
    B, num_tokens, H, K = q.shape
    HV = beta.shape[2]
    dA_log = ddt_bias = None
    if db.numel() == 0:
        if A_log is not None and sums:
            dA_log, ddt_bias = db.new_zeros((2, HV))
        return dq, dk, dg, db, dA_log, ddt_bias
    q, k = (_aligned(x) if use_qk_l2norm else x for x in (q, k))
    g, beta = readable(g) if A_log is not None else None, readable(beta) if beta_range else None
    empty = functools.partial(torch.empty, device=q.device)
    dg_out = dg if g is None else empty(g.shape, dtype=g.dtype)
    db_out = db if beta is None else empty(beta.shape, dtype=beta.dtype)
    partial = None
    if g is not None:
        A_log = A_log.float().contiguous()
        dt_bias = None if dt_bias is None else dt_bias.float().contiguous()
        if sums:
            partial = empty((-(-db.shape[0] * num_tokens // TOKENS), 2, HV), dtype=torch.float32)
    with on_device(q.device.index):
        _kernel(True, dtype_name(q))(
            db.flatten(0, 1), address(dq), address(dk),
            num_tokens, H, K // 8, *_grid(q, db, use_qk_l2norm), _end(cu_seqlens),
            address(q), *q.stride()[:3], address(k), *k.stride()[:3],
            *_strided(g), address(A_log), address(dt_bias), address(dg), address(dg_out), address(partial),
            *_strided(beta), beta_range, address(db_out),
        )  # fmt: skip
    if partial is not None:
        dA_log, ddt_bias = partial.sum(0)
    return dq, dk, dg_out, db_out, dA_log, ddt_bias


def _grid(q: torch.Tensor, beta: torch.Tensor, rows: bool) -> tuple[int, int]:
    """CTAs for the tiles of beta, and for the rows of q and k."""
    B, num_tokens, H, K = q.shape
    gate_ctas = -(-B * num_tokens // TOKENS) * -(-beta.shape[2] // HEADS)
    return gate_ctas, -(-B * num_tokens * H * (K // 8) // (ROWS * THREADS)) if rows else 0


def _end(cu_seqlens: torch.Tensor | None) -> int:
    """Where the end of the last sequence is found: of 64-bit numbers the kernels read the low word."""
    return 0 if cu_seqlens is None else address(cu_seqlens[-1:])


def _strided(x: torch.Tensor | None) -> tuple[int, int, int, int, int]:
    """Address, type and strides of an optional [B, T, HV]."""
    return (0, 0, 0, 0, 0) if x is None else (address(x), FLOAT_TYPE[x.dtype], *x.stride())


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself where its rows can be read 16 bytes at a time, else a copy."""
    unit = 16 // x.element_size()
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n == 1 or s % unit == 0 for n, s in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)
