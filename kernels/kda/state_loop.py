"""The second kernel of Kimi Delta Attention's forward: the walk over the chunks of every sequence with its state.

Per value head and chunk of 64 tokens, with S the state before the chunk, and kd, qd, kr, T, P and decay what the first
kernel (prepare.py) left in a workspace, decays, beta, scale and all (T and P^T in one tile, T's diagonal being beta):

    W = V - kd S          Vn = T W          O = qd S + P Vn          S <- diag(decay) S + kr^T Vn

Grid (segments * HV * V / VR): a CTA carries VR rows of one head's state through one segment, mostly a whole sequence, or one of those
that a long sequence is split into; then the state before it is there already (segment_states.py). Rows run along V: a state
warpgroup keeps 64 of them, S^T [64, K], in fp32 registers for the whole segment, and every product with S is a
wgmma with S (or W, Vn) as its register operand. Packed input has CTAs for one more segment: they zero what lies past
the last sequence. Two VR: 128 where segments x heads fill the card, 64 (the head split over two CTAs) where they do not.

    warps            work                                          waits on                            signals
    STATE (4 VR/64)  W, Vn, O, S of a chunk                        a_loaded b_loaded tp_ready rows     a_free b_free
                                                                   o_free                              o_full
    LOAD (1)         TMA: A = V, kd, T with P, beta; B = qd, kr,   a_free b_free a_loaded              a_loaded b_loaded
                     decay; zeroes V past the sequence's end in                                        rows
                     a ragged last chunk
    SPLIT (1)        T and P from the tile that holds both         a_loaded b_free                     tp_ready
    STORE (1)        O, the sequence's rows of it                  o_full                              o_free

It may be launched while the kernel before it ends: LOAD waits for that, and all do who read the offsets of packed chunks or the states of
segments.

Rows past a sequence's end are inert in the workspace: kd, qd, kr and P are zero there, and so are T's columns.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import tilelang
import tilelang.language as T
import torch

from flash_qla_tl.kernels.common import gates
from flash_qla_tl.kernels.common.segments import Segments
from flash_qla_tl.kernels.common.state_pool import slot_arguments, state_arguments
from flash_qla_tl.kernels.common.target import CHUNK, TARGET, launcher, on_device
from flash_qla_tl.kernels.common.tensors import address
from flash_qla_tl.kernels.common.walk import advance, find_segment, find_slot, load_state, store_state, store_state_as
from flash_qla_tl.kernels.kda.prepare import NUM_FACTORS, Workspace

K = V = 128
# c = a b^T and c += a b on the tensor cores, each warp with its 16 rows; and a function of the .cuh files.
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

    VR: int  # rows of the state a CTA carries: 64 a state warpgroup
    dtype: str
    emit: bool  # also the chunk states

    @property
    def stages(self) -> tuple[int, int]:
        """Of A and B: what fits. A's are free in the middle of a chunk, B's at its end."""
        return (3, 3) if self.VR == 64 else (2, 3)


def configs() -> list[Config]:
    """Every variant."""
    return [
        Config(VR, dtype, emit)
        for dtype in ("bfloat16", "float16")
        for VR, emit in ((64, False), (64, True), (128, False))
    ]


def device_source(dtype: str) -> str:
    return gates.device_source(dtype) + Path(__file__).with_suffix(".cuh").read_text()


@tilelang.jit(target=TARGET, pass_configs=PASS_CONFIGS)
def build(config: Config):
    VR, dtype, emit = config.VR, config.dtype, config.emit
    accum = "float32"
    NW, NS = VR // 64, V // VR
    PRODUCER = NW * 128
    THREADS = PRODUCER + 128
    AS, BS = config.stages
    B, num_tokens, HV, slots = (T.dynamic(name) for name in ("B", "num_tokens", "HV", "slots"))
    strides = {x: tuple(T.dynamic(f"{x}_stride_{i}", "int64") for i in "bth") for x in "vo"}

    @T.macro
    def store_out(packed_out, o_s, o_full, wg, lane):
        device("qla_store_transposed", T.access_ptr(packed_out, "r"), T.access_ptr(o_s[wg * 64, 0], "r"))
        T.fence_proxy_async()
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(o_full[wg])

    @T.prim_func
    def kda_state_loop_kernel(
        kd: T.Tensor((slots, HV, CHUNK, K), dtype),
        qd: T.Tensor((slots, HV, CHUNK, K), dtype),
        kr: T.Tensor((slots, HV, CHUNK, K), dtype),
        tp: T.Tensor((slots, HV, CHUNK, CHUNK), dtype),
        factors: T.Tensor((slots, HV, NUM_FACTORS), accum),
        v: T.StridedTensor((B, num_tokens, HV, V), (*strides["v"], 1), dtype),
        o: T.StridedTensor((B, num_tokens, HV, V), (*strides["o"], 1), dtype),
        o_address: T.int64, num_seqs: T.int32, cu_address: T.int64, cu_stride: T.int32, chunk_offsets_address: T.int64,
        segments: T.int32, segment_chunks: T.int32, segments_per_row: T.int32, search_steps: T.int32, starts_address: T.int64,
        h0_address: T.int64, h0_type: T.int32, h0_stride_n: T.int64, h0_stride_h: T.int64,
        indices_address: T.int64, indices_stride: T.int32, pad_slot: T.int32, num_slots: T.int32,
        ht_address: T.int64, ht_type: T.int32, ht_stride_n: T.int64, ht_stride_h: T.int64,
        state_v_first: T.int32, h_address: T.int64, h_slots: T.int32,
    ):  # fmt: skip
        with T.Kernel(HV * NS * (segments + T.if_then_else(cu_address != 0, 1, 0)), threads=THREADS) as i_x:
            T.import_source(device_source(dtype))
            kd_s = T.alloc_shared((AS, CHUNK, K), dtype)
            v_s = T.alloc_shared((AS * VR, CHUNK), dtype)
            t_s = T.alloc_shared((AS, CHUNK, CHUNK), dtype)
            qd_s = T.alloc_shared((BS, CHUNK, K), dtype)
            kr_s = T.alloc_shared((BS, CHUNK, K), dtype)
            p_s = T.alloc_shared((2, CHUNK, CHUNK), dtype)
            beta_s = T.alloc_shared((AS, CHUNK), accum)
            decay_s = T.alloc_shared((BS, K), accum)
            o_s = T.alloc_shared((VR, CHUNK), dtype)
            S = T.alloc_fragment((VR, K), accum)
            Sb = T.alloc_fragment((VR, K), dtype)
            acc = T.alloc_fragment((VR, CHUNK), accum)
            out = T.alloc_fragment((VR, CHUNK), accum)
            w = T.alloc_fragment((VR, CHUNK), dtype)
            vn = T.alloc_fragment((VR, CHUNK), dtype)
            packed_out = T.alloc_local((16,), "uint32")
            a_loaded = T.alloc_barrier([1] * AS)
            b_loaded = T.alloc_barrier([1] * BS)
            a_free = T.alloc_barrier([4 * NW] * AS)
            b_free = T.alloc_barrier([4 * NW] * BS)
            tp_ready = T.alloc_barrier([1] * AS)
            rows = T.alloc_barrier([1])
            o_full = T.alloc_barrier([4] * NW)
            o_free = T.alloc_barrier([1] * NW)
            T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x) for x in (o_s, v_s)})

            tx = T.get_thread_binding()
            lane = tx % 32
            # Every role walks the chunks with the same counters: stages of a chunk in the two rings, and the parities
            # of their barriers.
            a = T.alloc_var("int32", init=0)
            a_phase = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            b_phase = T.alloc_var("int32", init=0)
            # Variables, since an expression would be divided out anew at every use.
            i_g = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            v0 = T.alloc_var("int32")
            i_g = T.truncdiv(i_x, HV * NS)
            v0 = i_x - i_g * (HV * NS)
            i_hv = T.truncdiv(v0, NS)
            v0 = (v0 - i_hv * NS) * VR
            # The sequence, and the segment of it; its bounds, then those of the segment.
            i_n = T.alloc_var("int32", init=0)
            i_s = T.alloc_var("int32", init=0)
            bos = T.alloc_var("int32", init=0)
            eos = T.alloc_var("int32", init=num_tokens)
            slot0 = T.alloc_var("int32", init=0)
            if i_g < segments:
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
                    T.pdl_sync()
                    chunk_offsets = T.make_tensor_from_addr(chunk_offsets_address, (1 << 30,), "int32")
                    slot0 = chunk_offsets[i_n]
            else:
                # Packed input: what lies past the last sequence is zero.
                cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
                bos = T.min(T.max(cu_seqlens[num_seqs * cu_stride], 0), num_tokens)
                eos = bos
                for r in T.serial(((num_tokens - bos) * (VR // 8) + THREADS - 1) // THREADS):
                    i = r * THREADS + tx
                    if i < (num_tokens - bos) * (VR // 8):
                        row = o_address + 2 * ((bos + i // (VR // 8)) * strides["o"][1] + i_hv * strides["o"][2] + v0)
                        pad = T.make_tensor_from_addr(row, (VR,), dtype)
                        for j in T.vectorized(8):
                            pad[i % (VR // 8) * 8 + j] = T.cast(0.0, dtype)
            i_b = T.if_then_else(cu_address != 0, 0, i_n)
            slot0 += i_s * segment_chunks
            bos += i_s * (segment_chunks * CHUNK)
            length = T.alloc_var("int32")
            length = T.if_then_else(i_s < 0, 0, T.max(T.min(eos - bos, segment_chunks * CHUNK), 0))
            num_chunks = (length + CHUNK - 1) // CHUNK
            # Behind the end of a sequence there may be slots of no segment.
            exists = i_g < segments and (i_s == 0 or length > 0)
            # The sequence whose end the segment holds.
            ended = T.alloc_var("int32")
            ended = T.if_then_else(exists and eos - bos == length, i_n, -1)
            # This head's first row of o.
            o0 = o_address + 2 * (i_b * strides["o"][0] + bos * strides["o"][1] + i_hv * strides["o"][2] + v0)

            if tx < PRODUCER:
                if NW == 2:
                    T.set_max_nreg(232, 1)
                wg = tx // 128
                T.clear(S)
                slot = T.alloc_var("int32", init=-1)
                if exists:
                    if starts_address != 0:
                        T.pdl_sync()
                        first = (T.cast(i_g, "int64") * HV + i_hv) * (V * K)
                        load_state(S, starts_address, first, 0, 1, v0, K, V)
                    else:
                        find_slot(slot, i_n, indices_address, indices_stride, pad_slot, num_slots)
                        if h0_address != 0 and slot >= 0:
                            first = T.cast(slot, "int64") * h0_stride_n + i_hv * h0_stride_h
                            load_state(S, h0_address, first, h0_type, state_v_first, v0, K, V)
                # Hides from ptxas where S comes from; without it, it serializes every wgmma of the kernel (C7514).
                T.warpgroup_fence_operand(S, num_regs=K // 2)
                for i in T.serial(num_chunks):
                    T.copy(S, Sb)
                    if emit:
                        if slot0 + i < h_slots:
                            store_state(
                                Sb,
                                h_address + (T.cast(slot0 + i, "int64") * HV + i_hv) * (K * V * 2),
                                dtype,
                                state_v_first,
                                v0,
                                K,
                                V,
                            )
                    T.barrier_wait(a_loaded[a], a_phase)
                    if length - i * CHUNK < CHUNK:
                        T.barrier_wait(rows[0], 0)
                    # Before the products: a load from shared memory would wait behind them.
                    device("qla_transposed_values", T.access_ptr(v_s[a * VR + wg * 64, 0], "r"), w.data)
                    product(Sb, kd_s[a, :, :], acc)
                    T.barrier_wait(b_loaded[b], b_phase)
                    product(Sb, qd_s[b, :, :], out)
                    if i > 0:
                        # The previous chunk's O leaves the registers behind this chunk's first products.
                        T.barrier_wait(o_free[wg], i % 2)
                        store_out(packed_out, o_s, o_full, wg, lane)
                    T.wait_wgmma(1)
                    device("qla_subtract", acc.data, w.data)
                    T.barrier_wait(tp_ready[a], a_phase)
                    product(w, t_s[a, :, :], acc)
                    T.wait_wgmma(0)
                    if lane == 0:
                        T.barrier_arrive(a_free[a])
                    T.copy(acc, vn)
                    for r, c in T.Parallel(VR, K):
                        S[r, c] *= decay_s[b, c]
                    add_product(vn, p_s[i % 2, :, :], out)
                    add_product(vn, kr_s[b, :, :], S)
                    T.wait_wgmma(1)
                    device("qla_pack_tile", out.data, T.access_ptr(packed_out, "w"))
                    T.wait_wgmma(0)
                    if lane == 0:
                        T.barrier_arrive(b_free[b])
                    advance(a, a_phase, AS)
                    advance(b, b_phase, BS)
                if num_chunks > 0:
                    T.barrier_wait(o_free[wg], num_chunks % 2)
                    store_out(packed_out, o_s, o_full, wg, lane)
                # In place, a state goes back to where it came from, and without a token it stays as it is. The slot is read
                # anew: the loop has no register for it.
                slot = -1
                if ht_address != h0_address:
                    slot = ended
                elif num_chunks > 0 and ended >= 0:
                    find_slot(slot, ended, indices_address, indices_stride, pad_slot, num_slots)
                if ht_address != 0 and slot >= 0:
                    last = T.cast(slot, "int64") * ht_stride_n + i_hv * ht_stride_h
                    store_state_as(S, ht_address, last, ht_type, state_v_first, v0, K, V)
            else:
                if NW == 2:
                    T.set_max_nreg(40, 0)
                if tx < PRODUCER + 32:
                    T.pdl_sync()
                    for i in T.serial(num_chunks):
                        row = bos + i * CHUNK
                        # Within the workspace, whatever chunk_offsets holds.
                        slot = T.max(T.min(slot0 + i, slots - 1), 0)
                        T.barrier_wait(a_free[a], a_phase ^ 1)
                        T.tma_copy(kd[slot, i_hv, 0:CHUNK, 0:K], kd_s[a, :, :], barrier=a_loaded[a])
                        for p in T.unroll(NW):
                            T.tma_copy(
                                v[i_b, row : row + CHUNK, i_hv, v0 + p * 64 : v0 + p * 64 + 64],
                                v_s[a * VR + p * 64 : a * VR + p * 64 + 64, :],
                                barrier=a_loaded[a],
                            )
                        T.tma_copy(tp[slot, i_hv, 0:CHUNK, 0:CHUNK], t_s[a, :, :], barrier=a_loaded[a])
                        T.tma_copy(factors[slot, i_hv, K:NUM_FACTORS], beta_s[a, :], barrier=a_loaded[a])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(a_loaded[a])
                        T.barrier_wait(b_free[b], b_phase ^ 1)
                        T.tma_copy(qd[slot, i_hv, 0:CHUNK, 0:K], qd_s[b, :, :], barrier=b_loaded[b])
                        T.tma_copy(factors[slot, i_hv, 0:K], decay_s[b, :], barrier=b_loaded[b])
                        T.tma_copy(kr[slot, i_hv, 0:CHUNK, 0:K], kr_s[b, :, :], barrier=b_loaded[b])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(b_loaded[b])
                        advance(a, a_phase, AS)
                        advance(b, b_phase, BS)
                    if length % CHUNK != 0 and num_chunks > 0:
                        # The ragged last chunk: its stage was free before, so this is the phase that its barrier is in.
                        last = num_chunks - 1
                        T.barrier_wait(a_loaded[last % AS], last // AS % 2)
                        for r in T.serial(length % CHUNK, CHUNK):
                            for p in T.unroll(NW):
                                for j in T.vectorized(2):
                                    v_s[last % AS * VR + p * 64 + r, lane * 2 + j] = T.cast(0.0, dtype)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(rows[0])
                elif tx < PRODUCER + 64:
                    for i in T.serial(num_chunks):
                        valid = T.min(length - i * CHUNK, CHUNK)
                        for p in T.unroll(NW):
                            T.barrier_wait(o_full[p], i % 2)
                            if valid == CHUNK:
                                row = bos + i * CHUNK
                                T.copy(
                                    o_s[p * 64 : p * 64 + 64, :],
                                    o[i_b, row : row + CHUNK, i_hv, v0 + p * 64 : v0 + p * 64 + 64],
                                )
                            else:
                                # TMA would write into the next sequence.
                                for r in T.serial((valid + 3) // 4):
                                    row = r * 4 + lane // 8
                                    if row < valid:
                                        tail = T.make_tensor_from_addr(
                                            o0 + 2 * ((i * CHUNK + row) * strides["o"][1] + p * 64), (64,), dtype
                                        )
                                        for j in T.vectorized(8):
                                            tail[lane % 8 * 8 + j] = o_s[p * 64 + row, lane % 8 * 8 + j]
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(o_free[p])
                elif tx < PRODUCER + 96:
                    # P^T's part below its diagonal is written once.
                    for i in T.serial(2 * CHUNK * CHUNK // 256):
                        for j in T.vectorized(8):
                            p_s[i // (CHUNK // 4), i % (CHUNK // 4) * 4 + lane // 8, lane % 8 * 8 + j] = T.cast(
                                0.0, dtype
                            )
                    T.sync_warp()
                    for i in T.serial(num_chunks):
                        T.barrier_wait(a_loaded[a], a_phase)
                        if i > 1:
                            # P of the chunk before the last has been used.
                            T.barrier_wait(b_free[b], b_phase)
                            advance(b, b_phase, BS)
                        device(
                            "qla_split_tile",
                            T.address_of(t_s[a, 0, 0]),
                            T.address_of(p_s[i % 2, 0, 0]),
                            T.address_of(beta_s[a, 0]),
                        )
                        T.fence_proxy_async()
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(tp_ready[a])
                        advance(a, a_phase, AS)

    return kda_state_loop_kernel


def state_loop(
    config: Config,
    workspace: Workspace,
    v: torch.Tensor,
    o: torch.Tensor,
    cut: Segments,
    *,
    h0: torch.Tensor | None = None,
    h0_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    ht: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    starts: torch.Tensor | None = None,
) -> None:
    """One launch, into o [B, T, HV, V], ht [N, HV, ...] and h [slots, HV, ...], for a token and a sequence at least.

    o and v as TMA can walk them; h0 and ht of a type in FLOAT_TYPE, each state dense, and pairs of its numbers aligned.
    ht may be h0, and o may be v. h0_indices: where in h0, a pool, each sequence has its state.
    starts: of segment_starts, where sequences are split; h0 is then read no more.
    """
    B, num_tokens, HV, _ = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    cu_stride = 0
    if cu_seqlens is not None:
        # Of 64-bit counts the kernel reads the low words.
        cu_stride = cu_seqlens.stride(0) * cu_seqlens.element_size() // 4
    *tiles, chunk_offsets = workspace
    with on_device(v.device.index):
        _kernel(config)(
            *tiles, v, o,
            address(o), N, address(cu_seqlens), cu_stride, address(chunk_offsets),
            cut.number, cut.chunks, cut.per_row, cut.search_steps, address(starts),
            *state_arguments(h0), *slot_arguments(h0, h0_indices, pad_slot_id), *state_arguments(ht), int(state_v_first),
            address(h), 0 if h is None else h.shape[0],
        )  # fmt: skip


@functools.lru_cache
def _kernel(config: Config):
    """The compiled kernel: found once a process, so that a call does not walk TileLang's lookup."""
    return launcher(build, config)
