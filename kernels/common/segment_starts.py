"""The state before every segment of a sequence, and the gradient behind it, from what an operator's segment_states.py made of the segments.

    S_g = M_g S_g-1 + N_g       where exact says that M counts; else S_g = N_g is there already
    R_g = M_g+2^T R_g+1 + D_g   in reverse; M_g leads from segment g - 1 to g, so M_g+2 is what segment g + 1 makes

Those before segments 0 and 1 are there already: M and exact of these two are not looked at.

Grid ([2 *] sequences * HV * V / 64): a CTA of one warpgroup goes through the segments of a sequence with 64 rows of S^T and writes them
over N^T, or with R^T, from the last on, over D^T. The product is made of 16-bit halves of both, three of four: to 2^-16 of a number in
bf16, and to 2^-25 of 1 in fp16, whose exponents end there.
"""

import functools

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.segments import Segments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher
from flash_qla_tl.kernels.common.tensors import address
from flash_qla_tl.kernels.common.walk import advance, bounds_of

THREADS, STAGES = 128, 2
add_product = functools.partial(T.wgmma_gemm, clear_accum=False, policy=T.GemmWarpPolicy.FullRow)


@tilelang.jit(
    target=TARGET,
    pass_configs={
        tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
        tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
    },
)
def build(K: int, dtype: str):
    accum = "float32"
    HV, V, segments, states = (T.dynamic(name) for name in ("HV", "V", "segments", "states"))

    @T.prim_func
    def segment_starts_kernel(
        starts: T.Tensor((states, HV, V, K), accum),
        transfers: T.Tensor((segments, HV, 2, K, K), dtype),
        exact: T.Tensor((states, HV), "int32"),
        num_seqs: T.int32, num_tokens: T.int32, cu_address: T.int64, cu_stride: T.int32,
        segment_chunks: T.int32, segments_per_row: T.int32,
    ):  # fmt: skip
        with T.Kernel(T.truncdiv(states, segments) * num_seqs * HV * (V // 64), threads=THREADS) as i_x:
            T.pdl_trigger()
            # Of two segments: the two halves of M^T, and N^T by 32 columns.
            m_s = T.alloc_shared((2 * STAGES, K, K), dtype)
            n_s = T.alloc_shared((STAGES * K // 32 * 64, 32), accum)
            T.annotate_layout({n_s: tilelang.layout.make_swizzled_layout(n_s)})
            S = T.alloc_fragment((64, K), accum)
            acc = T.alloc_fragment((64, K), accum)
            high = T.alloc_fragment((64, K), dtype)
            low = T.alloc_fragment((64, K), dtype)
            loaded = T.alloc_barrier([1] * STAGES)
            tx = T.get_thread_binding()
            i_n = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            r0 = T.alloc_var("int32")
            reverse = T.alloc_var("bool")
            i_n = T.truncdiv(i_x, HV * (V // 64))
            r0 = i_x - i_n * HV * (V // 64)
            reverse = i_n >= num_seqs
            i_n -= T.if_then_else(reverse, num_seqs, 0)
            i_hv = T.truncdiv(r0, V // 64)
            r0 = (r0 - i_hv * (V // 64)) * 64
            # Slots of the sequence's segments: in `starts` the j-th that is gone through is `first` + j, in reverse `first` - j; the M that
            # leads there has slot `m` + j or `m` - j.
            first = T.alloc_var("int32")
            count = T.alloc_var("int32")
            m = T.alloc_var("int32")
            step = T.alloc_var("int32")
            first = i_n * segments_per_row
            count = segments_per_row
            if cu_address != 0:
                cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
                bos = T.alloc_var("int32")
                eos = T.alloc_var("int32")
                bounds_of(i_n, bos, eos, cu_seqlens, cu_stride, num_tokens)
                first = T.truncdiv(bos, segment_chunks * CHUNK) + i_n
                count = T.truncdiv(eos - bos + segment_chunks * CHUNK - 1, segment_chunks * CHUNK)
            step = T.if_then_else(reverse, -1, 1)
            m = first + T.if_then_else(reverse, count + 1, 0)
            first += T.if_then_else(reverse, segments + count - 1, 0)
            held = T.alloc_var("int32", init=0)  # S is the state before the last segment
            asked = T.alloc_var("int32", init=0)
            stage = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            T.pdl_sync()
            for j in T.serial(1, count):
                # The next segment's M and N come while this one's are used: the stage's last user is the segment before.
                if j + 1 < count:
                    if exact[first + step * (j + 1), i_hv] != 0:
                        if tx < 32:
                            for half in T.unroll(2):
                                T.tma_copy(
                                    transfers[m + step * (j + 1), i_hv, half, 0:K, 0:K],
                                    m_s[asked * 2 + half, :, :],
                                    barrier=loaded[asked],
                                )
                            for b in T.unroll(K // 32):
                                row = (asked * (K // 32) + b) * 64
                                T.tma_copy(
                                    starts[first + step * (j + 1), i_hv, r0 : r0 + 64, b * 32 : b * 32 + 32],
                                    n_s[row : row + 64, :],
                                    barrier=loaded[asked],
                                )
                            T.sync_warp()
                            if tx == 0:
                                T.barrier_arrive(loaded[asked])
                        asked ^= 1
                if j > 1:
                    if exact[first + step * j, i_hv] != 0:
                        if held == 0:
                            for a, b in T.Parallel(64, K):
                                S[a, b] = starts[first + step * (j - 1), i_hv, r0 + a, b]
                        held = 1
                        T.copy(S, high)
                        for a, b in T.Parallel(64, K):
                            low[a, b] = T.cast(S[a, b] - T.cast(high[a, b], accum), dtype)
                        T.barrier_wait(loaded[stage], phase)
                        for a, b in T.Parallel(64, K):
                            acc[a, b] = n_s[(stage * (K // 32) + b // 32) * 64 + a, b % 32]
                        if reverse:
                            for x, half in ((high, 0), (low, 0), (high, 1)):
                                add_product(x, m_s[stage * 2 + half, :, :], acc, transpose_B=True)
                        else:
                            for x, half in ((high, 0), (low, 0), (high, 1)):
                                add_product(x, m_s[stage * 2 + half, :, :], acc)
                        T.wait_wgmma(0)
                        advance(stage, phase, STAGES)
                        for a, b in T.Parallel(64, K):
                            S[a, b] = acc[a, b]
                            starts[first + step * j, i_hv, r0 + a, b] = acc[a, b]
                    else:
                        held = 0
                    # All have read the stage that is filled next.
                    T.sync_threads()

    return segment_starts_kernel


@functools.lru_cache
def _kernel(K: int, dtype: str):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, K, dtype)


def fold_segments(
    starts: torch.Tensor,
    transfers: torch.Tensor,
    exact: torch.Tensor,
    cut: Segments,
    *,
    num_seqs: int,
    num_tokens: int,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """One launch: starts [segments, HV, V, K] fp32 comes as N^T and goes as S^T; transfers [segments, HV, 2, K, K] are M^T as the sum of
    two 16-bit numbers, exact [segments, HV] int32. starts and exact may have twice as many, the second half in reverse."""
    cu_stride = 0 if cu_seqlens is None else cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    _kernel(transfers.shape[-1], dtype_name(transfers))(
        starts, transfers, exact, num_seqs, num_tokens, address(cu_seqlens), cu_stride, cut.chunks, cut.per_row
    )
