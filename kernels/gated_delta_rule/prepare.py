"""What an elementwise pass can take off the delta rule kernels: norms, gate activation, types.

    q_norms, k_norms = (sum x^2 + 1e-6)^-1/2 over the rows of q and k
    g    = -exp(A_log) softplus(g_raw + dt_bias)     or g_raw
    beta = beta_range sigmoid(beta_raw)              or beta_raw

all fp32. Grid (B * token blocks): a CTA takes TOKENS tokens; K / 8 lanes read a row, 16 bytes each, and add up its squares
by shuffles. It reads q and k once and writes 8 bytes a token and head; inside the fused kernel the same norms cost more
than this pass, since every value head and every half of a split head would take them again.
"""

import functools

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.gates import device_source
from flash_qla_tl.kernels.common.target import TARGET, compiling, dtype_name, on_device
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, address

THREADS = 256
TOKENS = 8


@tilelang.jit(
    target=TARGET,
    pass_configs={
        tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
        tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    },
)
def build(K: int, dtype: str):
    B, num_tokens, HV, num_rows = (T.dynamic(name) for name in ("B", "num_tokens", "HV", "num_rows"))
    lanes = K // 8
    accum = "float32"

    @T.macro
    def row_norms(address, stride_t, stride_h, out, first, rows, H, tx):
        """out[first + i] of the rows (token, head) from the token at an address on."""
        values = T.alloc_local((8,), dtype)
        total = T.alloc_local((1,), accum)
        for i in T.serial(T.ceildiv(rows * lanes, THREADS)):
            row = (i * THREADS + tx) // lanes
            total[0] = 0.0
            if row < rows:
                at = address + (T.truncdiv(row, H) * stride_t + T.truncmod(row, H) * stride_h) * 2
                x = T.make_tensor_from_addr(at, (K,), dtype)
                for j in T.vectorized(8):
                    values[j] = x[tx % lanes * 8 + j]
                for j in T.unroll(8):
                    total[0] += T.cast(values[j], accum) * T.cast(values[j], accum)
            for step in T.unroll((lanes - 1).bit_length()):
                total[0] += T.shfl_xor(total[0], 1 << step)
            if row < rows and tx % lanes == 0:
                out[first + row] = T.rsqrt(total[0] + 1e-6)

    @T.prim_func
    def gdn_prepare_kernel(
        q_norms: T.Tensor((num_rows,), accum),
        k_norms: T.Tensor((num_rows,), accum),
        g: T.Tensor((B, num_tokens, HV), accum),
        beta: T.Tensor((B, num_tokens, HV), accum),
        H: T.int32, norms: T.int32,
        q_address: T.int64, q_stride_b: T.int64, q_stride_t: T.int64, q_stride_h: T.int64,
        k_address: T.int64, k_stride_b: T.int64, k_stride_t: T.int64, k_stride_h: T.int64,
        g_address: T.int64, g_type: T.int32, g_stride_b: T.int64, g_stride_t: T.int64, g_stride_h: T.int64,
        A_log_address: T.int64, dt_bias_address: T.int64,
        beta_address: T.int64, beta_type: T.int32, beta_stride_b: T.int64, beta_stride_t: T.int64, beta_stride_h: T.int64,
        beta_range: T.float32,
    ):  # fmt: skip
        with T.Kernel(B * T.ceildiv(num_tokens, TOKENS), threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            tx = T.get_thread_binding()
            i_b = T.truncdiv(i_x, T.ceildiv(num_tokens, TOKENS))
            t0 = (i_x - i_b * T.ceildiv(num_tokens, TOKENS)) * TOKENS
            tokens = T.min(num_tokens - t0, TOKENS)
            if norms != 0:
                first = (T.cast(i_b, "int64") * num_tokens + t0) * H
                q0 = q_address + (i_b * q_stride_b + t0 * q_stride_t) * 2
                k0 = k_address + (i_b * k_stride_b + t0 * k_stride_t) * 2
                row_norms(q0, q_stride_t, q_stride_h, q_norms, first, tokens * H, H, tx)
                row_norms(k0, k_stride_t, k_stride_h, k_norms, first, tokens * H, H, tx)
            for i in T.serial(T.ceildiv(tokens * HV, THREADS)):
                e = i * THREADS + tx
                if e < tokens * HV:
                    t = T.cast(t0 + T.truncdiv(e, HV), "int64")
                    i_hv = T.truncmod(e, HV)
                    x = T.alloc_var(accum, init=0.0)
                    if g_address != 0:
                        at = (i_b * g_stride_b + t * g_stride_t + i_hv * g_stride_h) * T.if_then_else(g_type == 0, 4, 2)
                        x = T.call_extern(accum, "qla_load", g_address + at, g_type)
                        if A_log_address != 0:
                            A_log = T.make_tensor_from_addr(A_log_address, (1 << 30,), accum)
                            dt_bias = T.make_tensor_from_addr(dt_bias_address, (1 << 30,), accum)
                            x += dt_bias[i_hv]
                            x = -T.exp(A_log[i_hv]) * (T.max(x, 0.0) + T.log(1.0 + T.exp(-T.abs(x))))
                    g[T.cast(i_b, "int64"), t, i_hv] = x
                    at_beta = (i_b * beta_stride_b + t * beta_stride_t + i_hv * beta_stride_h) * T.if_then_else(
                        beta_type == 0, 4, 2
                    )
                    y = T.alloc_var(accum)
                    y = T.call_extern(accum, "qla_load", beta_address + at_beta, beta_type)
                    if beta_range != 0.0:
                        y = beta_range / (1.0 + T.exp(-y))
                    beta[T.cast(i_b, "int64"), t, i_hv] = y

    return gdn_prepare_kernel


@functools.lru_cache
def _kernel(K: int, dtype: str):
    with compiling():
        return build(K, dtype)


def prepare(q, k, g, beta, *, norms: bool, A_log=None, dt_bias=None, beta_range: float = 0.0):
    """-> g, beta, q_norms, k_norms, all fp32; the norms None without `norms`.

    g or None (no decay) and beta [B, T, HV] of fp32, bf16 or fp16 in any strides; A_log and dt_bias [HV] fp32 together or
    None; beta_range: the factor of the sigmoid, 0 for none.
    """
    B, num_tokens, H, K = q.shape
    HV = beta.shape[2]
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    q_norms, k_norms = empty((B, num_tokens, H)), empty((B, num_tokens, H))
    g_out, beta_out = empty((B, num_tokens, HV)), empty((B, num_tokens, HV))
    with on_device(q.device.index):
        _kernel(K, dtype_name(q))(
            q_norms.view(-1), k_norms.view(-1), g_out, beta_out, H, int(norms),
            address(q), *q.stride()[:3], address(k), *k.stride()[:3],
            address(g), 0 if g is None else FLOAT_TYPE[g.dtype], *((0, 0, 0) if g is None else g.stride()),
            address(A_log), address(dt_bias),
            address(beta), FLOAT_TYPE[beta.dtype], *beta.stride(), beta_range,
        )  # fmt: skip
    return g_out, beta_out, *((q_norms, k_norms) if norms else (None, None))
