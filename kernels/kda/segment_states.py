"""What a segment of a sequence makes of a state, for segments that state_loop.py walks at the same time.

Each wants the state before it. A segment turns a state S into

    S' = M S + N

N is a walk over it from nothing, M^T one with v = 0 from the identity. With S^T in registers M^T is as many rows as N^T:

    W  = V - kd S          Vn = T W          S <- diag(decay) S + kr^T Vn

The first segment of a sequence begins with h0 and needs no M.

Grid (segments * HV * 2): CTA (g, head, 0 or 1) makes what is before segment g, N^T to starts[g] or M^T to transfers[g], as the sum of two
16-bit numbers: a walk over the segment in front of it, in which every chunk is whole. Before the first of a sequence there is h0 itself.
A CTA has all 128 rows: two of 64 would each read kd, kr and T of a chunk from the L2 cache.

    warps       work                                            waits on            signals
    STATE (8)   W, Vn, S of a chunk                             loaded t_ready      free
    LOAD (1)    TMA of V, kd, kr, T with P, beta, decay         free                loaded
    SPLIT (1)   T from the tile that holds both                 loaded              t_ready

Segments of packed sequences have slots as find_sequence of kernels/common/walk.py has them, and their chunks those of the workspace.
"""

import functools

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common.segment_starts import fold_segments
from flash_qla_tl.kernels.common.segments import Segments
from flash_qla_tl.kernels.common.state_pool import slot_arguments, state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, dtype_name, launcher, on_device
from flash_qla_tl.kernels.common.tensors import address
from flash_qla_tl.kernels.common.walk import advance, find_segment, find_slot, load_state
from flash_qla_tl.kernels.kda.prepare import NUM_FACTORS, Workspace
from flash_qla_tl.kernels.kda.state_loop import PASS_CONFIGS, K, V, add_product, device, device_source, product

ROWS = 128
STAGES = 3
PRODUCER, THREADS = 256, 384
REGISTERS = (40, 232)


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(dtype: str):
    accum = "float32"
    B, num_tokens, HV, slots, segments = (T.dynamic(name) for name in ("B", "num_tokens", "HV", "slots", "segments"))
    strides = tuple(T.dynamic(f"v_stride_{i}", "int64") for i in "bth")

    @T.prim_func
    def kda_segment_states_kernel(
        kd: T.Tensor((slots, HV, CHUNK, K), dtype),
        kr: T.Tensor((slots, HV, CHUNK, K), dtype),
        tp: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides, 1), dtype),
        starts: T.Tensor((segments, HV, V, K), accum),
        transfers: T.Tensor((segments, HV, 2, K, K), dtype),
        exact: T.Tensor((segments, HV), "int32"),
        num_seqs: T.int32, cu_address: T.int64, cu_stride: T.int32, chunk_offsets_address: T.int64,
        segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        indices_address: T.int64, indices_stride: T.int32, pad_slot: T.int32, num_slots: T.int32, state_v_first: T.int32,
    ):  # fmt: skip
        with T.Kernel(segments * HV * 2, threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            T.pdl_trigger()
            kd_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            kr_s = T.alloc_shared((STAGES, CHUNK, K), dtype)
            v_s = T.alloc_shared((STAGES * ROWS, CHUNK), dtype)
            t_s = T.alloc_shared((STAGES, CHUNK, CHUNK), dtype)
            p_s = T.alloc_shared((CHUNK, CHUNK), dtype)  # nobody reads
            beta_s = T.alloc_shared((STAGES, CHUNK), accum)
            decay_s = T.alloc_shared((STAGES, K), accum)
            S = T.alloc_fragment((ROWS, K), accum)
            Sb = T.alloc_fragment((ROWS, K), dtype)
            acc = T.alloc_fragment((ROWS, CHUNK), accum)
            w = T.alloc_fragment((ROWS, CHUNK), dtype)
            vn = T.alloc_fragment((ROWS, CHUNK), dtype)
            loaded = T.alloc_barrier([1] * STAGES)
            t_ready = T.alloc_barrier([1] * STAGES)
            free = T.alloc_barrier([PRODUCER // 32] * STAGES)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (v_s, p_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            s = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            # Variables, since an expression would be divided out anew at every use.
            i_g = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            transfer = T.alloc_var("int32")
            i_g = T.truncdiv(i_x, HV * 2)
            transfer = i_x - i_g * (HV * 2)
            i_hv = transfer // 2
            transfer %= 2
            # The sequence, and the segment of it.
            i_n = T.alloc_var("int32", init=0)
            i_s = T.alloc_var("int32")
            bos = T.alloc_var("int32", init=0)
            eos = T.alloc_var("int32", init=num_tokens)
            slot0 = T.alloc_var("int32")
            # For prepare's offsets and workspace.
            T.pdl_sync()
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
            slot0 = i_n * ((num_tokens + CHUNK - 1) // CHUNK)
            if cu_address != 0:
                chunk_offsets = T.make_tensor_from_addr(chunk_offsets_address, (1 << 30,), "int32")
                slot0 = chunk_offsets[i_n]
            i_b = T.if_then_else(cu_address != 0, 0, i_n)
            # The segment in front is walked, with h0 where that is a sequence's first; where this one is the first, no chunk is. Behind
            # the end of a sequence there may be slots of no segment.
            num_chunks = T.alloc_var("int32", init=0)
            wanted = T.alloc_var("bool")
            wanted = i_s == 0 and transfer == 0
            if i_s > transfer and bos + i_s * (segment_chunks * CHUNK) < eos:
                wanted = True
                num_chunks = segment_chunks
            slot0 += (i_s - 1) * segment_chunks
            bos += (i_s - 1) * (segment_chunks * CHUNK)

            if tx < PRODUCER:
                T.set_max_nreg(REGISTERS[1], 1)
                wg = tx // 128
                T.clear(S)
                if transfer != 0:
                    for r, c in T.Parallel(ROWS, K):
                        S[r, c] = T.if_then_else(r == c, T.float32(1.0), T.float32(0.0))
                elif i_s <= 1:
                    slot = T.alloc_var("int32")
                    find_slot(slot, i_n, indices_address, indices_stride, pad_slot, num_slots)
                    if h0_address != 0 and slot >= 0:
                        first = T.cast(slot, "int64") * h0_stride_n + i_hv * h0_stride_h
                        load_state(S, h0_address, first, h0_type, state_v_first, 0, K, V)
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                for _ in T.serial(num_chunks):
                    T.copy(S, Sb)
                    T.barrier_wait(loaded[s], phase)
                    # Before the products: a load from shared memory would wait behind them.
                    device("qla_transposed_values", T.access_ptr(v_s[s * ROWS + wg * 64, 0], "r"), w.data)
                    product(Sb, kd_s[s, :, :], acc)
                    T.wait_wgmma(0)
                    device("qla_subtract", acc.data, w.data)
                    T.barrier_wait(t_ready[s], phase)
                    product(w, t_s[s, :, :], acc)
                    for r, c in T.Parallel(ROWS, K):
                        S[r, c] *= decay_s[s, c]
                    T.wait_wgmma(0)
                    T.copy(acc, vn)
                    add_product(vn, kr_s[s, :, :], S)
                    T.wait_wgmma(0)
                    if lane == 0:
                        T.barrier_arrive(free[s])
                    advance(s, phase, STAGES)
                if wanted:
                    if transfer != 0:
                        T.copy(S, Sb)
                        for r, c in T.Parallel(ROWS, K):
                            transfers[i_g, i_hv, 0, r, c] = Sb[r, c]
                        for r, c in T.Parallel(ROWS, K):
                            transfers[i_g, i_hv, 1, r, c] = T.cast(S[r, c] - T.cast(Sb[r, c], accum), dtype)
                    else:
                        for r, c in T.Parallel(ROWS, K):
                            starts[i_g, i_hv, r, c] = S[r, c]
                        if tx == 0:
                            exact[i_g, i_hv] = 1
            else:
                T.set_max_nreg(REGISTERS[0], 0)
                if tx < PRODUCER + 32:
                    if transfer != 0:
                        # M knows no values.
                        for i in T.serial(STAGES * ROWS // 4):
                            for j in T.vectorized(8):
                                v_s[i * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(0.0, dtype)
                        T.sync_warp()
                    for i in T.serial(num_chunks):
                        row = bos + i * CHUNK
                        # Within the workspace, whatever chunk_offsets holds.
                        at = T.max(T.min(slot0 + i, slots - 1), 0)
                        T.barrier_wait(free[s], phase ^ 1)
                        T.tma_copy(kd[at, i_hv, 0:CHUNK, 0:K], kd_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(tp[at, i_hv, 0:CHUNK, 0:CHUNK], t_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(factors[at, i_hv, K:NUM_FACTORS], beta_s[s, :], barrier=loaded[s])
                        T.tma_copy(kr[at, i_hv, 0:CHUNK, 0:K], kr_s[s, :, :], barrier=loaded[s])
                        T.tma_copy(factors[at, i_hv, 0:K], decay_s[s, :], barrier=loaded[s])
                        if transfer == 0:
                            for p in T.unroll(V // 64):
                                T.tma_copy(
                                    v[i_b, row : row + CHUNK, i_hv, p * 64 : p * 64 + 64],
                                    v_s[s * ROWS + p * 64 : s * ROWS + p * 64 + 64, :],
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
                            T.address_of(beta_s[s, 0]),
                        )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(t_ready[s])
                        advance(s, phase, STAGES)

    return kda_segment_states_kernel


def segment_starts(
    workspace: Workspace,
    v: torch.Tensor,
    cut: Segments,
    *,
    h0: torch.Tensor | None,
    h0_indices: torch.Tensor | None,
    pad_slot_id: int,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
) -> torch.Tensor:
    """-> [segments, HV, V, K] fp32: the state before each segment, h0 before the first of a sequence. Two launches."""
    B, num_tokens, HV, _ = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    cu_stride = 0 if cu_seqlens is None else cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    starts = v.new_empty((cut.number, HV, V, K), dtype=torch.float32)
    transfers = v.new_empty((cut.number, HV, 2, K, K))
    exact = v.new_empty((cut.number, HV), dtype=torch.int32)
    with on_device(v.device.index):
        _kernel(dtype_name(v))(
            workspace.kd, workspace.kr, workspace.TP, workspace.factors, v, starts, transfers, exact,
            N, address(cu_seqlens), cu_stride, address(workspace.chunk_offsets), cut.chunks, cut.per_row, cut.search_steps,
            *state_arguments(h0), *slot_arguments(h0, h0_indices, pad_slot_id), int(state_v_first),
        )  # fmt: skip
        fold_segments(starts, transfers, exact, cut, num_seqs=N, num_tokens=num_tokens, cu_seqlens=cu_seqlens)
    return starts


@functools.lru_cache
def _kernel(dtype: str):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, dtype)
