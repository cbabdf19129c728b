"""The first kernel of Kimi Delta Attention's forward: what a chunk needs beside the state, every chunk at once.

Per value head and chunk of 64 tokens, with G the in-chunk cumulative log2 decay by token and channel, after the gate:

    kd = k 2^G        qd = scale q 2^G        kr = k 2^(G_last - G)        decay = 2^G_last
    KK[i, j] = sum_c k_ic k_jc 2^(G_ic - G_jc) for j < i                   QK[i, j] likewise with q_i for j <= i
    T  = (I + beta KK)^-1 beta                                             P  = scale QK

and on the way the L2 norms of q and k, the gate and the sigmoid of beta. state_loop.py walks the chunks with these. Written are
tiles [64, 128] of kd, qd, kr, one [64, 64] with T below its diagonal and P^T (rows are keys) on and above it, and decay and beta, which is
T's diagonal, for each (slot, value head): dense input has slot ceil(T / 64) b + i for chunk i, packed input slot chunk_offsets[n] + i.
Slots without a chunk are left as they are.

Grid (slots * HV), slots from the last to the first: a CTA of four warps makes one chunk of one head, warp w the rows of its block w:

    gates        decays of own rows: activation and scan, in registers
    tables       G at the ends of blocks, and the powers of two that blocks meet with; thread c has channel c
    operands     own rows of kd, qd, kr, and of the operands R and C of KK and QK (kda_tile.cuh)
    diagonal     own rows with own rows; twice over where a channel fades by more than a float's exponents hold
    across       the three blocks of KK and QK^T in own rows
    solve        own rows of T, and of P^T beside it

Decays are never divided: C and R have whole exponents taken out, so that no later token changes a digit of an earlier row, and a product
of blocks puts them back as powers of two. Rows past a sequence's end are zero and fade by nothing. What varies per call (heads, lengths,
strides, types of g and beta, the gate, norms, scale) is a run-time value.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher, on_device
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, address, readable, tma_ready

K = 128
THREADS = 128
PANEL = 64  # 128 bytes of 16-bit numbers
# What a walk wants in fp32 of a chunk: decay by channel, beta by token.
NUM_FACTORS = K + CHUNK
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    # Every access is guarded here by the sequence's own bounds; the pass would guard by the tensors' on top.
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    # Warps meet where it is written out below; the pass would part them at every access.
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}
# What kda_tile.cuh calls the gates.
PLAIN, SOFTPLUS, LOWER_BOUND = range(3)
device = functools.partial(T.call_extern, "handle")


@dataclass(frozen=True)
class Config:
    """What one compiled variant is."""

    dtype: str

    @property
    def panels(self) -> int:
        """Panels of 128 bytes in a row of an operand: bf16, or tf32 for fp16."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def factor(self) -> int:
        """Bytes of a power of two."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def ctas(self) -> int:
        """CTAs an SM: what their shared memory allows."""
        return 4 if self.dtype == "bfloat16" else 2


def configs() -> list[Config]:
    """Every variant."""
    return [Config(dtype) for dtype in ("bfloat16", "float16")]


def device_source(dtype: str) -> str:
    common = Path(gates.__file__).parent
    files = common / "ptx.cuh", common / "chunk_tile.cuh", Path(__file__).parent / "kda_tile.cuh"
    return f"#define QLA_BF16 {int(dtype == 'bfloat16')}\n" + "".join(file.read_text() for file in files)


def smem(x):
    """The shared address of a buffer's element."""
    return T.call_extern("uint32", "qla_smem", T.address_of(x))


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    dtype, panels = config.dtype, config.panels
    accum = "float32"
    B, num_tokens, H = (T.dynamic(name) for name in ("B", "num_tokens", "H"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "qk"}
    # Operands, in rows of a panel. The inputs land where a thread replaces what it reads: in R itself, or, where that is twice as
    # wide, in C, both of them.
    RQ, RK, C = (i * panels * CHUNK for i in range(3))
    Q_IN, K_IN = (RQ, RK) if panels == 2 else (C, C + 2 * CHUNK)

    @T.prim_func
    def kda_prepare_kernel(
        q: T.StridedTensor((B, num_tokens, H, K), (*strides["q"], 1), dtype),
        k: T.StridedTensor((B, num_tokens, H, K), (*strides["k"], 1), dtype),
        q_address: T.int64, k_address: T.int64, slots: T.int32, slots_per_row: T.int32, HV: T.int32, group: T.int32, scale: T.float32, norms: T.int32,
        g_address: T.int64, g_type: T.int32, g_stride_b: T.int64, g_stride_t: T.int64, g_stride_h: T.int64,
        gate: T.int32, lower_bound: T.float32, A_log_address: T.int64, dt_bias_address: T.int64,
        beta_address: T.int64, beta_type: T.int32, beta_stride_b: T.int64, beta_stride_t: T.int64, beta_stride_h: T.int64,
        beta_range: T.float32,
        cu_address: T.int64, cu_stride: T.int32, num_seqs: T.int32, chunk_offsets_address: T.int64,
        kd_address: T.int64, qd_address: T.int64, kr_address: T.int64, TP_address: T.int64, factors_address: T.int64, early: T.int32,
    ):  # fmt: skip
        with T.Kernel(slots * HV, threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            T.annotate_min_blocks_per_sm(config.ctas)
            tiles = T.alloc_shared((3 * panels * CHUNK, PANEL), dtype)
            start = T.alloc_shared((4, K), accum, scope="shared")
            to_end = T.alloc_shared((4, K), accum, scope="shared")
            lift = T.alloc_shared((4, K * config.factor), "uint8", scope="shared")
            cross = T.alloc_shared((6, K * config.factor), "uint8", scope="shared")
            row_norms = T.alloc_shared((2 * CHUNK,), accum, scope="shared")
            betas = T.alloc_shared((CHUNK,), accum, scope="shared")
            strong = T.alloc_shared((8,), "uint32", scope="shared")
            x = T.alloc_local((64,), accum)
            own_lower = T.alloc_local((8,), accum)
            own_upper = T.alloc_local((8,), accum)
            place = T.alloc_local((2,), "int32")
            loaded = T.alloc_barrier([1])
            T.annotate_layout({tiles: tilelang.layout.make_swizzled_layout(tiles)})

            tx = T.get_thread_binding()
            # Variables, since an expression would be divided out anew at every use.
            slot = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            i_h = T.alloc_var("int32")
            i_b = T.alloc_var("int32", init=0)
            t0 = T.alloc_var("int32")
            valid = T.alloc_var("int32")
            slot = T.truncdiv(i_x, HV)
            i_hv = i_x - slot * HV
            i_h = T.truncdiv(i_hv, group)
            # From the last to the first: what the walk begins with is then what was written last, and is still in the L2 cache.
            slot = slots - 1 - slot
            if cu_address != 0:
                device("qlk_locate", cu_address, cu_stride, num_seqs, num_tokens, slot,
                    T.if_then_else(i_x == 0, chunk_offsets_address, T.int64(0)), smem(row_norms[0]), T.access_ptr(place, "w"),
                )  # fmt: skip
                t0 = place[0]
                valid = place[1]
            else:
                i_b = T.truncdiv(slot, slots_per_row)
                t0 = (slot - i_b * slots_per_row) * CHUNK
                valid = T.min(num_tokens - t0, CHUNK)
            if valid > 0:
                if tx < 32:
                    for p in T.unroll(2):
                        at = p * CHUNK
                        T.tma_copy(
                            q[i_b, t0 : t0 + CHUNK, i_h, p * PANEL : p * PANEL + PANEL],
                            tiles[Q_IN + at : Q_IN + at + CHUNK, :],
                            barrier=loaded[0],
                        )
                        T.tma_copy(
                            k[i_b, t0 : t0 + CHUNK, i_h, p * PANEL : p * PANEL + PANEL],
                            tiles[K_IN + at : K_IN + at + CHUNK, :],
                            barrier=loaded[0],
                        )
                    T.sync_warp()
                    if tx == 0:
                        T.barrier_arrive(loaded[0])
                t = T.cast(t0, "int64")
                chunk = T.cast(slot, "int64") * HV + i_hv
                beta_from = T.alloc_var("int64")
                beta_word = T.alloc_var("uint32")
                beta_from = beta_address + (
                    i_b * beta_stride_b + (t + tx) * beta_stride_t + i_hv * beta_stride_h
                ) * T.if_then_else(beta_type == 0, 4, 2)
                beta_word = T.call_extern("uint32", "qla_ask_if", beta_from & T.int64(-4), T.cast(tx < valid, "int32"))
                device("qlk_gates", g_address + (i_b * g_stride_b + t * g_stride_t + i_hv * g_stride_h) * T.if_then_else(g_type == 0, 4, 2),
                    g_type, g_stride_t, valid, gate, lower_bound, A_log_address, dt_bias_address, i_hv,
                    T.access_ptr(x, "w"), smem(start[0, 0]),
                )  # fmt: skip
                if tx < CHUNK:
                    y = T.alloc_var(accum, init=0.0)
                    if tx < valid:
                        y = T.call_extern(accum, "qla_number", beta_word, beta_from, beta_type)
                        if beta_range != 0.0:
                            y = beta_range / (1.0 + T.exp(-y))
                    betas[tx] = y
                    factors = T.make_tensor_from_addr(factors_address, (1 << 60,), accum)
                    factors[chunk * NUM_FACTORS + K + tx] = y
                T.sync_threads()
                device("qlk_tables", smem(start[0, 0]), smem(to_end[0, 0]), smem(lift[0, 0]), smem(cross[0, 0]), smem(strong[0]),
                    factors_address + chunk * (NUM_FACTORS * 4),
                )  # fmt: skip
                T.sync_threads()
                T.barrier_wait(loaded[0], 0)
                if early != 0:
                    # The kernel behind this one may come as soon as there is room; it waits for what it reads.
                    T.pdl_trigger()
                if valid < CHUNK:
                    device("qlk_zero_rows", smem(tiles[Q_IN, 0]), valid)
                    device("qlk_zero_rows", smem(tiles[K_IN, 0]), valid)
                device("qlk_norms", smem(tiles[K_IN, 0]), smem(tiles[Q_IN, 0]), smem(row_norms[0]), norms)
                tile = chunk * (CHUNK * K * 2)
                device("qlk_operands", T.access_ptr(x, "r"), smem(start[0, 0]), smem(to_end[0, 0]), smem(lift[0, 0]),
                    smem(row_norms[0]), scale, smem(tiles[K_IN, 0]), smem(tiles[Q_IN, 0]), smem(tiles[RK, 0]), smem(tiles[RQ, 0]), smem(tiles[C, 0]),
                    kd_address + tile, qd_address + tile, kr_address + tile,
                )  # fmt: skip
                device("qlk_diagonal", smem(tiles[RK, 0]), smem(tiles[RQ, 0]), smem(tiles[C, 0]),
                    T.access_ptr(own_lower, "w"), T.access_ptr(own_upper, "w"),
                )  # fmt: skip
                if T.call_extern("int32", "qlk_is_strong", smem(strong[0])) != 0:
                    device("qlk_strong", T.access_ptr(x, "r"), smem(start[0, 0]), smem(to_end[0, 0]), smem(row_norms[0]), scale,
                        k_address + (i_b * k.strides[0] + t * k.strides[1] + i_h * k.strides[2]) * 2, k.strides[1],
                        q_address + (i_b * q.strides[0] + t * q.strides[1] + i_h * q.strides[2]) * 2, q.strides[1],
                        valid, smem(tiles[C, 0]), kr_address + tile, T.access_ptr(own_lower, "rw"), T.access_ptr(own_upper, "rw"),
                    )  # fmt: skip
                T.sync_threads()
                # From here on warps write where no other reads: own rows of R of k, which become L, and T with P^T.
                device(
                    "qlk_across",
                    smem(tiles[RK, 0]),
                    smem(tiles[RQ, 0]),
                    smem(tiles[C, 0]),
                    smem(cross[0, 0]),
                    T.address_of(betas[0]),
                )
                device("qlk_solve", T.access_ptr(own_lower, "r"), T.access_ptr(own_upper, "r"), T.address_of(betas[0]), smem(tiles[RK, 0]),
                    smem(start[0, 0]), TP_address + chunk * (CHUNK * CHUNK * 2),
                )  # fmt: skip

    return kda_prepare_kernel


class Workspace(NamedTuple):
    """What prepare leaves for the walk, by (slot, value head); chunk_offsets None for dense input."""

    kd: torch.Tensor  # [slots, HV, 64, 128]
    qd: torch.Tensor
    kr: torch.Tensor
    TP: torch.Tensor  # [slots, HV, 64, 64]: T below the diagonal, P^T (rows are keys) on and above it
    factors: torch.Tensor  # [slots, HV, NUM_FACTORS] fp32: decay, and beta, T's diagonal
    chunk_offsets: torch.Tensor | None  # [N + 1] int32: the first slot of each sequence


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    early: bool = False,
) -> Workspace:
    """One launch for arguments that were checked at the door, with something in them.

    use_gate: g is the raw gate input, activated inside; A_log, dt_bias and lower_bound are read with it only.
    early: the next launch waits for this one by itself, and may come before its end.
    """
    B, num_tokens, H, _ = q.shape
    HV = g.shape[2]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, g = tma_ready(q), tma_ready(k), tma_ready(readable(g))
    beta = readable(beta)
    gate = PLAIN
    if use_gate:
        gate = SOFTPLUS if lower_bound is None else LOWER_BOUND
        A_log = None if A_log is None else A_log.float().contiguous()
        dt_bias = None if dt_bias is None else tma_ready(dt_bias.float().contiguous())
    else:
        A_log = dt_bias = None
    slots_per_row = -(-num_tokens // CHUNK)
    slots = B * slots_per_row if cu_seqlens is None else num_tokens // CHUNK + N
    empty = functools.partial(torch.empty, device=q.device)
    kd, qd, kr = (empty((slots, HV, CHUNK, K), dtype=q.dtype) for _ in range(3))
    triangles = empty((slots, HV, CHUNK, CHUNK), dtype=q.dtype)
    factors = empty((slots, HV, NUM_FACTORS), dtype=torch.float32)
    chunk_offsets, cu_stride = None, 0
    if cu_seqlens is not None:
        chunk_offsets = empty((N + 1,), dtype=torch.int32)
        # Of 64-bit counts the kernel reads the low words.
        cu_stride = cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    with on_device(q.device.index):
        _kernel(Config(dtype_name(q)))(
            q, k, address(q), address(k), slots, slots_per_row, HV, HV // H, scale, int(use_qk_l2norm),
            address(g), FLOAT_TYPE[g.dtype], *g.stride()[:3],
            gate, lower_bound or 0.0, address(A_log), address(dt_bias),
            address(beta), FLOAT_TYPE[beta.dtype], *beta.stride(), (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else 0.0,
            address(cu_seqlens), cu_stride, N, address(chunk_offsets),
            *(address(x) for x in (kd, qd, kr, triangles, factors)), int(early),
        )  # fmt: skip
    return Workspace(kd, qd, kr, triangles, factors, chunk_offsets)


@functools.lru_cache
def _kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, config)
