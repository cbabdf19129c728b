"""Kimi Delta Attention of Kimi Linear (arXiv:2510.26692): the delta rule with a decay for every channel.

The public functions: checks, and the choice between the TileLang kernels and the torch path, which has the gradients.
The recurrence itself is in reference.py, its chunked form in docs/math.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_qla_tl import checks, context_parallel, custom_ops
from flash_qla_tl.dispatch import k_first, on_kernels, state_layout
from flash_qla_tl.kernels.common import target
from flash_qla_tl.kernels.common.state_pool import read_slots, same_memory, write_slots
from flash_qla_tl.reference import activate
from flash_qla_tl.torch_chunked import states_by_chunk
from flash_qla_tl.torch_kda import ChunkedKda, chunked_kda
from flash_qla_tl.utils.index import count_chunks

OPERATOR = "Kimi Delta Attention"
HEAD_DIM = 128


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
    cp_context: object | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    disable_recompute: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention, differentiable in every tensor of floats.

    For each sequence and value head, with a state S of K x V numbers::

        S = diag(exp(g)) S;  S = S + beta * k (v - S^T k)^T;  o = scale * S^T q

    Value head i uses query/key head ``i // (HV // H)``. Inputs may have any strides.

    Args:
        q, k: ``[B, T, H, K]``, bf16, fp16, fp32 or float64, all of q, k and v in one dtype.
        v: ``[B, T, HV, V]``, ``HV`` a multiple of ``H``.
        g: ``[B, T, HV, K]``, any float dtype: natural logarithm of the decay of each channel. Any
            values of at most 0, however low; positive ones are not refused, and overflow fp32 where
            their sum over a chunk exceeds about 88.
        beta: ``[B, T, HV]``, any float dtype: write strength.
        scale: factor on ``o``; None means ``K ** -0.5``, and 0.0 means 0.0.
        initial_state: ``[N, HV, K, V]``, any float dtype; None means zeros. ``N`` is ``B``, or
            the number of sequences with ``cu_seqlens``.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x**2) + 1e-6)`` first.
        use_gate_in_kernel: g is raw. The decay is ``-exp(A_log) * softplus(g + dt_bias)``, or, with
            a ``lower_bound``, ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: the write strength is ``sigmoid(beta)``.
        allow_neg_eigval: ... times 2.
        safe_gate: promises decays of at least -5 a token. Not needed here; with the gate inside,
            ``lower_bound`` must then keep the promise.
        lower_bound: of the decay, at most 0; see ``use_gate_in_kernel``.
        A_log: ``[HV]``, any float dtype; None means 0, with a ``lower_bound`` only.
        dt_bias: ``[HV, K]`` or ``[HV*K]``, any float dtype; None means 0. Like ``lower_bound`` and
            ``A_log`` read with ``use_gate_in_kernel`` only.
        return_intermediate_states: also return the state at the start of each chunk of 64 tokens.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N+1]`` int32 or int64, the sequences packed along ``T``: cumulative lengths
            from 0, repeated for an empty sequence, ``B`` = 1. Rows past ``cu_seqlens[-1]`` are
            padding, where ``o`` is 0. Contents are checked if they are on the CPU, and on a GPU
            with ``FLASH_QLA_TL_CHECK=1``; otherwise they are clamped.
        cu_seqlens_cpu: the same values on the CPU, for callers that have them.
        initial_state_indices: ``[N]`` int32 or int64: ``initial_state`` is a pool ``[slots, HV, K, V]`` of any
            slot stride, and this is where in it each sequence has its state. A sequence with a negative index
            or ``pad_slot_id`` has none: it starts from zero, and nothing of it is written to the pool. Indices
            of ``slots`` and more are refused where contents are checked (see ``cu_seqlens``), and otherwise
            taken for negative.
        pad_slot_id: an index that means no slot, besides the negative ones.
        inplace_final_state: write the final states over the initial ones, in their dtype, and return
            ``initial_state``. Other slots, and those of sequences without a token, keep every bit. Where two
            sequences share a slot, which of their states it holds in the end is not determined, nor, on a GPU,
            whether one of them starts from what the other wrote; sharing slots that are only read is fine.
        out: ``[B, T, HV, V]`` in the dtype of q, any strides: filled with ``o`` and returned for it.
        cp_context: of :func:`flash_qla_tl.build_cp_context` (FLA's, of its contiguous layout, is
            taken too): the arguments are this rank's slice of sequences that lie on several, with
            the ``cu_seqlens`` of the context, ``N`` being the pieces of sequences that lie here.
            Of a sequence that comes from the rank before, the row of ``initial_state`` is not
            read; of one that goes on to the next, the final state is that at the end of the slice.
            Every rank makes the call, and the backward if one does. docs/sequence_parallel.md.
        chunk_size: 64.
        transpose_state_layout: deprecated name of ``state_v_first``.
        disable_recompute: accepted and not needed.
        backend: "auto" runs the kernels where they apply (Hopper, bf16 or fp16, K = V = 128, no
            gradient needed) and torch otherwise, warning once for each reason if that is on a GPU;
            "torch" and "tilelang" insist.

    ``initial_state_indices``, ``inplace_final_state`` and ``out`` are of inference: no input may require a
    gradient, and torch.compile does not trace them. A pool and states that are written have dtype fp32, bf16,
    fp16 (float64 with float64 inputs), each state dense.

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of q, and the final state in the layout of
        ``initial_state``, ``[N, ...]`` in fp32 (float64 for float64 inputs), or None. With
        ``return_intermediate_states`` also ``h`` ``[B, NT, HV, K, V]`` (``V, K`` with
        ``state_v_first``) in the dtype of k, detached. NT is ``ceil(T / 64)``; packed sequences put
        their chunks one after the other into ``T // 64 + N`` slots, the rest zero, or into exactly
        as many as there are chunks with ``cu_seqlens_cpu``.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
        NotImplementedError: under torch.compile, one of the three.
    """
    state_v_first = state_layout(state_v_first, transpose_state_layout)
    context = context_parallel.accept(cp_context, q, cu_seqlens, cu_seqlens_cpu)
    if context is not None:
        cu_seqlens, cu_seqlens_cpu = context.cu_seqlens, context.cu_seqlens_cpu
    checks.kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        state_v_first=state_v_first,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        chunk_size=chunk_size,
        backend=backend,
        out=out,
        initial_state_indices=initial_state_indices,
        pad_slot_id=pad_slot_id,
        inplace_final_state=inplace_final_state,
    )
    if scale is None:
        scale = q.shape[3] ** -0.5
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    checks.inference_only(
        inputs, context, initial_state_indices=initial_state_indices, inplace_final_state=inplace_final_state, out=out
    )
    activations = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    if context is not None:
        return context_parallel.run(
            context,
            chunk_kda,
            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "backend": backend, **activations},
            initial_state=initial_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            return_intermediate_states=return_intermediate_states,
        )
    if torch.compiler.is_compiling():
        return _op(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            scale=scale,
            output_final_state=output_final_state,
            return_intermediate_states=return_intermediate_states,
            state_v_first=state_v_first,
            backend=backend,
            **activations,
        )
    num_chunks, longest = count_chunks(cu_seqlens_cpu)
    if on_kernels(OPERATOR, refusal(q, k, v, inputs), q, backend):
        from flash_qla_tl.kernels.kda.fwd import forward

        ht = None
        if inplace_final_state:
            ht = initial_state
        elif output_final_state:
            N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            ht = q.new_empty(N, v.shape[2], HEAD_DIM, HEAD_DIM, dtype=torch.float32)
        o, h = forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            h0=initial_state,
            h0_indices=initial_state_indices,
            pad_slot_id=pad_slot_id,
            ht=ht,
            o=out,
            cu_seqlens=cu_seqlens,
            state_v_first=state_v_first,
            output_h=return_intermediate_states,
            num_chunks=num_chunks,
            longest=longest,
            **activations,
        )
        return (o, ht, h) if return_intermediate_states else (o, ht)

    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    h0 = read_slots(initial_state, initial_state_indices, pad_slot_id)
    result = _in_torch(q, k, v, g, beta, scale, h0, boundaries, state_v_first, activations)
    o = result.o.to(q.dtype) if out is None else out.copy_(result.o)
    ht = k_first(result.ht, state_v_first) if output_final_state else None
    if inplace_final_state:
        write_slots(initial_state, initial_state_indices, pad_slot_id, k_first(result.ht, state_v_first), boundaries)
        ht = initial_state
    if not return_intermediate_states:
        return o, ht
    h = states_by_chunk(result.h.detach(), result.chunks, cu_seqlens, num_chunks, state_v_first)
    return o, ht, h.to(k.dtype)


@torch.no_grad()
def kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = -5.0,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """The forward for inference, everything inside and into the caller's tensors; not differentiable.

    :func:`chunk_kda` with ``use_qk_l2norm_in_kernel``, ``use_gate_in_kernel``,
    ``use_beta_sigmoid_in_kernel`` and ``state_v_first``: g is raw, beta are logits, and states are
    ``[N, HV, V, K]``. Arguments not listed are those of :func:`chunk_kda`.

    Args:
        out: ``[B, T, HV, V]`` in the dtype of q, any strides: filled with the result, zeros past
            ``cu_seqlens[-1]``; None allocates it.
        final_state: ``[N, HV, V, K]``, any float dtype and strides: filled with the state after the
            last token. May be ``initial_state``, which it then replaces; with ``initial_state_indices``
            that is ``inplace_final_state`` of :func:`chunk_kda`. Under torch.compile it must then be the very same
            object, not another view of its memory.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
    """
    traced = torch.compiler.is_compiling()
    # Traced tensors have no addresses.
    same = final_state is not None and (
        final_state is initial_state if traced else same_memory(final_state, initial_state)
    )
    # A pool in place, rather than a tensor for these sequences alone.
    in_place = initial_state_indices is not None and same
    checks.kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        out=out,
        final_state=None if in_place else final_state,
        initial_state_indices=initial_state_indices,
        pad_slot_id=pad_slot_id,
        inplace_final_state=in_place,
    )
    if scale is None:
        scale = q.shape[3] ** -0.5
    if traced:
        out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
        _kda_fwd_op(
            q,
            k,
            v,
            g,
            beta,
            scale,
            out,
            A_log,
            dt_bias,
            lower_bound,
            None if same else initial_state,
            final_state,
            cu_seqlens,
            initial_state_indices,
            pad_slot_id,
            same,
        )
        return out
    activations = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
        "use_beta_sigmoid_in_kernel": True,
    }
    if on_kernels(OPERATOR, refusal(q, k, v), q, "auto"):
        from flash_qla_tl.kernels.kda.fwd import forward

        o, _ = forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            h0=initial_state,
            h0_indices=initial_state_indices,
            pad_slot_id=pad_slot_id,
            ht=final_state,
            o=out,
            cu_seqlens=cu_seqlens,
            state_v_first=True,
            **activations,
        )
        return o

    h0 = read_slots(initial_state, initial_state_indices, pad_slot_id)
    result = _in_torch(q, k, v, g, beta, scale, h0, cu_seqlens, True, activations)
    if final_state is not None:
        indices = initial_state_indices if in_place else None
        write_slots(final_state, indices, pad_slot_id, result.ht.mT, cu_seqlens)
    return result.o.to(q.dtype) if out is None else out.copy_(result.o)


@torch.library.custom_op("flash_qla_tl::kda_fwd", mutates_args=("out", "final_state"))
def _kda_fwd_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state_indices: Tensor | None,
    pad_slot_id: int,
    same: bool,
) -> None:
    """:func:`kda_fwd` where it is traced. ``same``: the initial state is ``final_state``, for an op may not be given what it
    writes a second time."""
    kda_fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        final_state if same else initial_state,
        final_state,
        cu_seqlens,
        initial_state_indices=initial_state_indices,
        pad_slot_id=pad_slot_id,
    )


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of device memory that the kernels of :func:`kda_fwd` need, at most, beside its arguments.

    They are allocated by the call, and free again when it is done. Inputs that a kernel cannot read
    where they are (see docs/kernels.md) are copied, which comes on top; and so do, where long sequences
    are split into segments, 128 KiB a segment and head, segments having at least eight chunks of 64 tokens.

    Args:
        T_total: tokens of all sequences.
        H: value heads.
        N: sequences.
    """
    if T_total == 0 or N == 0:
        return 0
    # For every chunk and head three tiles [64, 128] and one [64, 64] of 16 bits and 128 decays and 64 betas
    # of 32; and where the chunks of each sequence begin.
    chunk = 3 * 64 * HEAD_DIM * 2 + 64 * 64 * 2 + (HEAD_DIM + 64) * 4
    return (T_total // 64 + N) * H * chunk + 4 * (N + 1)


def refusal(q: Tensor, k: Tensor, v: Tensor, inputs: tuple[Tensor | None, ...] = ()) -> str | None:
    """Why the kernels do not take these tensors, or None where they do; ``inputs`` are all that may need a gradient."""
    K, V = q.shape[3], v.shape[3]
    if not K == V == HEAD_DIM:
        return f"the kernels need head dims K = V = {HEAD_DIM}, got K={K}, V={V}"
    reason = target.refusal(q, k, v)
    if reason is None and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        reason = "there is no kernel of its backward yet, and an input requires a gradient"
    return reason


_op = custom_ops.define("chunk_kda", chunk_kda, refusal, lower_bound="float?")


def _in_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    activations: dict[str, object],
) -> ChunkedKda:
    q, k, g, beta = activate(q, k, g, beta, cu_seqlens=cu_seqlens, **activations)
    return chunked_kda(q, k, v, g, beta, scale, k_first(initial_state, state_v_first), cu_seqlens)
