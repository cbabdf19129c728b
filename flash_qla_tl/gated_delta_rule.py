"""The gated delta rule of Yang et al., Gated Delta Networks (arXiv:2412.06464).

Checks, the choice between the TileLang kernels and the torch path, and autograd. The recurrence
itself is in reference.py, its chunked form in docs/math.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_qla_tl import checks, context_parallel, custom_ops
from flash_qla_tl.affine import OnKernels
from flash_qla_tl.dispatch import k_first, on_kernels, state_layout
from flash_qla_tl.kernels.common import target
from flash_qla_tl.kernels.common.state_pool import read_slots, write_slots
from flash_qla_tl.reference import activate
from flash_qla_tl.torch_chunked import chunked, chunked_bwd, states_by_chunk
from flash_qla_tl.utils.index import count_chunks

OPERATOR = "the gated delta rule"


class ChunkGatedDeltaRuleFwd(NamedTuple):
    """What :func:`chunk_gated_delta_rule_fwd` returns."""

    g_cumsum: Tensor
    A: Tensor
    o: Tensor
    h: Tensor | None
    final_state: Tensor | None


class ChunkGatedDeltaRuleBwd(NamedTuple):
    """What :func:`chunk_gated_delta_rule_bwd` returns."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    db: Tensor
    dg: Tensor | None
    dh0: Tensor | None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: bool = True,
    chunk_size: int = 64,
    cp_context: object | None = None,
    head_first: bool = False,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated delta rule attention, differentiable in every tensor of floats.

    For each sequence and value head, with a state S of K x V numbers::

        S = exp(g) * S;  S = S + beta * k (v - S^T k)^T;  o = scale * S^T q

    Value head i uses query/key head ``i // (HV // H)``. Inputs may have any strides.

    Args:
        q, k: ``[B, T, H, K]``, bf16, fp16, fp32 or float64, all of q, k and v in one dtype.
        v: ``[B, T, HV, V]``, ``HV`` a multiple of ``H``.
        g: ``[B, T, HV]``, any float dtype: natural logarithm of the decay, meant to be at most
            0 (a chunk whose sum exceeds about 88 overflows fp32). None means no decay.
        beta: ``[B, T, HV]``, any float dtype: write strength.
        scale: factor on ``o``; None means ``K ** -0.5``, and 0.0 means 0.0.
        initial_state: ``[N, HV, K, V]``, any float dtype; None means zeros. ``N`` is ``B``, or
            the number of sequences with ``cu_seqlens``.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x**2) + 1e-6)`` first.
        cu_seqlens: ``[N+1]`` int32 or int64, the sequences packed along ``T``: cumulative lengths
            from 0, repeated for an empty sequence, ``B`` = 1. Rows past ``cu_seqlens[-1]`` are
            padding, where ``o`` is 0. Contents are checked if they are on the CPU, and on a GPU
            with ``FLASH_QLA_TL_CHECK=1``; otherwise they are clamped.
        cu_seqlens_cpu: the same values on the CPU, for callers that have them: the lengths then have a say in how
            the work is laid over the card.
        chunk_indices: accepted and not needed.
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
        return_intermediate_states: also return the state at the start of each chunk of 64 tokens.
        state_v_first: states are ``[N, HV, V, K]``.
        use_gate_in_kernel: the decay is ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: ``[HV]``, any float dtype, read with ``use_gate_in_kernel`` only;
            ``dt_bias`` None means 0.
        use_beta_sigmoid_in_kernel: the write strength is ``sigmoid(beta)``.
        allow_neg_eigval: ... times 2.
        auto_cp: let long sequences be split into segments that run at the same time, where that is faster. Exact
            but for rounding, which then depends on what else is in the call; with False a sequence's result does
            not, bit for bit. No effect on the torch path.
        chunk_size: 64.
        cp_context: of :func:`flash_qla_tl.build_cp_context` (FLA's, of its contiguous layout, is
            taken too): the arguments are this rank's slice of sequences that lie on several, with
            the ``cu_seqlens`` of the context, ``N`` being the pieces of sequences that lie here.
            Of a sequence that comes from the rank before, the row of ``initial_state`` is not
            read; of one that goes on to the next, the final state is that at the end of the slice.
            Every rank makes the call, and the backward if one does. docs/sequence_parallel.md.
        head_first: not available; the layout is ``[B, T, H, ...]``.
        transpose_state_layout: deprecated name of ``state_v_first``.
        backend: "auto" runs the kernels where they apply (Hopper, bf16 or fp16, K and V of 64 or
            128) and torch otherwise, warning once for each reason if that is on a GPU; "torch"
            and "tilelang" insist.

    ``initial_state_indices``, ``inplace_final_state``, ``out`` and ``return_intermediate_states`` are of
    inference: no input may require a gradient, and torch.compile traces only the last of them. A pool and states
    that are written have dtype fp32, bf16, fp16 (float64 with float64 inputs), each state dense.

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of q, and the final state in the layout of
        ``initial_state``, ``[N, ...]`` in fp32 (float64 for float64 inputs), or None. With
        ``return_intermediate_states`` also ``h``, as from :func:`chunk_gated_delta_rule_fwd`.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
        NotImplementedError: under torch.compile, an argument that it does not trace.
    """
    if head_first:
        raise ValueError("head_first must be False (layout [B, T, H, K]), got True")
    state_v_first = state_layout(state_v_first, transpose_state_layout)
    context = context_parallel.accept(cp_context, q, cu_seqlens, cu_seqlens_cpu)
    if context is not None:
        cu_seqlens, cu_seqlens_cpu = context.cu_seqlens, context.cu_seqlens_cpu
    checks.gated_delta_rule(
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
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        chunk_size=chunk_size,
        backend=backend,
        initial_state_indices=initial_state_indices,
        pad_slot_id=pad_slot_id,
        inplace_final_state=inplace_final_state,
        out=out,
    )
    if scale is None:
        scale = q.shape[3] ** -0.5
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    checks.inference_only(
        inputs,
        context,
        initial_state_indices=initial_state_indices,
        inplace_final_state=inplace_final_state,
        out=out,
        return_intermediate_states=return_intermediate_states,
    )
    if context is not None:
        return context_parallel.run(
            context,
            chunk_gated_delta_rule,
            {
                "q": q,
                "k": k,
                "v": v,
                "g": g,
                "beta": beta,
                "scale": scale,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "use_gate_in_kernel": use_gate_in_kernel,
                "A_log": A_log,
                "dt_bias": dt_bias,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                "allow_neg_eigval": allow_neg_eigval,
                "auto_cp": auto_cp,
                "backend": backend,
            },
            initial_state=initial_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            kernels=_MAPS if on_kernels(OPERATOR, target.refusal(q, k, v), q, backend) else None,
        )
    if torch.compiler.is_compiling():
        return _op(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            scale=scale,
            output_final_state=output_final_state,
            return_intermediate_states=return_intermediate_states,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            auto_cp=auto_cp,
            backend=backend,
        )
    num_chunks, longest = count_chunks(cu_seqlens_cpu)
    in_kernels = on_kernels(OPERATOR, target.refusal(q, k, v), q, backend)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    if in_kernels and not needs_grad:
        from flash_qla_tl.kernels.gated_delta_rule.chunk_fwd import chunk_fwd

        result = chunk_fwd(
            q,
            k,
            v,
            g,
            beta,
            scale,
            h0=initial_state,
            cu_seqlens=cu_seqlens,
            h0_indices=initial_state_indices,
            pad_slot_id=pad_slot_id,
            inplace_final_state=inplace_final_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            o=out,
            output_h=return_intermediate_states,
            num_chunks=num_chunks,
            longest=longest,
            auto_cp=auto_cp,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )
        return (result.o, result.ht, result.h) if return_intermediate_states else (result.o, result.ht)

    if in_kernels:
        options = _Options.of(
            num_chunks,
            longest,
            scale=scale,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            auto_cp=auto_cp,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )
        return _ChunkGatedDeltaRule.apply(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, options)

    dtype = q.dtype
    q, k, g, beta = activate(
        q,
        k,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    h0 = read_slots(initial_state, initial_state_indices, pad_slot_id)
    result = chunked(q, k, v, g, beta, scale, k_first(h0, state_v_first), boundaries)
    o = result.o.to(dtype) if out is None else out.copy_(result.o)
    ht = k_first(result.ht, state_v_first) if output_final_state else None
    if inplace_final_state:
        write_slots(initial_state, initial_state_indices, pad_slot_id, k_first(result.ht, state_v_first), boundaries)
        ht = initial_state
    if not return_intermediate_states:
        return o, ht
    return o, ht, states_by_chunk(result.h, result.chunks, cu_seqlens, num_chunks, state_v_first).to(k.dtype)


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> ChunkGatedDeltaRuleFwd:
    """The forward alone, with what :func:`chunk_gated_delta_rule_bwd` needs; not differentiable.

    Arguments as for :func:`chunk_gated_delta_rule`.

    Returns:
        g_cumsum: ``[B, T, HV]`` fp32, the gates summed from the start of each chunk of 64 tokens,
            natural logarithm.
        A: ``[B, T, HV, 64]`` in the dtype of k, one 64 x 64 block a chunk:
            ``(I + strict_lower(diag(beta) K K^T))^-1``, with no gate in it. Row t belongs to token
            t, column j to the j-th token of its chunk. Zero in rows and columns that a chunk,
            being the last of its sequence, does not have.
        o: ``[B, T, HV, V]`` in the dtype of q.
        h: ``[B, NT, HV, K, V]`` (``V, K`` with ``state_v_first``) in the dtype of k, the state at
            the start of each chunk, or None without ``output_h``. NT is ``ceil(T / 64)``; packed
            sequences put their chunks one after the other into ``T // 64 + N`` slots, the rest
            zero, or into exactly as many as there are chunks with ``cu_seqlens_cpu``.
        final_state: as from :func:`chunk_gated_delta_rule`.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
    """
    checks.gated_delta_rule(
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
    )
    if scale is None:
        scale = q.shape[3] ** -0.5
    num_chunks, longest = count_chunks(cu_seqlens_cpu)

    if on_kernels(OPERATOR, target.refusal(q, k, v), q, "auto"):
        from flash_qla_tl.kernels.gated_delta_rule.chunk_fwd import chunk_fwd

        out = chunk_fwd(
            q,
            k,
            v,
            g,
            beta,
            scale,
            h0=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            output_A=True,
            output_h=output_h,
            num_chunks=num_chunks,
            longest=longest,
            auto_cp=auto_cp,
        )
        return ChunkGatedDeltaRuleFwd(out.g_cumsum, out.A, out.o, out.h, out.ht)

    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    h0 = k_first(initial_state, state_v_first)
    out = chunked(q, k, v, g, beta, scale, h0, boundaries)
    h = None
    if output_h:
        h = states_by_chunk(out.h, out.chunks, cu_seqlens, num_chunks, state_v_first).to(k.dtype)
    return ChunkGatedDeltaRuleFwd(
        out.chunks.join(out.g_cumsum),
        out.chunks.join(out.A).to(k.dtype),
        out.o.to(q.dtype),
        h,
        k_first(out.ht, state_v_first) if output_final_state else None,
    )


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> ChunkGatedDeltaRuleBwd:
    """The backward of :func:`chunk_gated_delta_rule_fwd`.

    Args:
        g: ``[B, T, HV]``: the ``g_cumsum`` of the forward, or None where it had no gate.
        A: ``[B, T, HV, 64]``: that of the forward. It saves the kernels an inverse; the torch
            path, which differentiates the inverse itself, recomputes it.
        do: ``[B, T, HV, V]``, any strides: gradient with respect to ``o``.
        dht: gradient with respect to the final state, in its layout; None means zero.

        The others as in the forward.

    Returns:
        dq, dk, dv, db, dg in the shapes and dtypes of q, k, v, beta and g, dg being with respect
        to the gates before they were summed (None without g); rows past ``cu_seqlens[-1]`` are
        zero. dh0 with respect to the initial state, in its layout, fp32 (float64 for float64
        inputs), or None without one.

    Raises:
        TypeError, ValueError: an argument does not fit; see the message.
    """
    checks.gated_delta_rule_bwd(
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        state_v_first=state_v_first,
        dht=dht,
    )
    if scale is None:
        scale = q.shape[3] ** -0.5

    if on_kernels(OPERATOR, target.refusal(q, k, v), q, "auto"):
        from flash_qla_tl.kernels.gated_delta_rule.chunk_bwd import chunk_bwd

        num_chunks, longest = count_chunks(cu_seqlens_cpu)
        out = chunk_bwd(
            q,
            k,
            v,
            g,
            beta,
            A,
            do,
            dht=dht,
            scale=scale,
            h0=initial_state,
            cu_seqlens=cu_seqlens,
            state_v_first=state_v_first,
            num_chunks=num_chunks,
            longest=longest,
            auto_cp=auto_cp,
        )
        return ChunkGatedDeltaRuleBwd(*out)

    h0, dht = k_first(initial_state, state_v_first), k_first(dht, state_v_first)
    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    dq, dk, dv, db, dg, dh0 = chunked_bwd(q, k, v, g, beta, do, dht, scale, h0, boundaries)
    return ChunkGatedDeltaRuleBwd(dq, dk, dv, db, dg, k_first(dh0, state_v_first))


def _beta_range(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> float:
    """The factor of beta's sigmoid, 0 for none."""
    return (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0


class _Options(NamedTuple):
    """What a call of the kernels is told besides its tensors."""

    scale: float
    output_final_state: bool
    state_v_first: bool
    num_chunks: int | None
    longest: int | None
    auto_cp: bool
    use_qk_l2norm: bool
    beta_range: float  # _beta_range

    @classmethod
    def of(
        cls,
        num_chunks,
        longest,
        *,
        scale,
        output_final_state,
        state_v_first,
        auto_cp,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        **_,
    ):
        activations = use_qk_l2norm_in_kernel, _beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        return cls(scale, output_final_state, state_v_first, num_chunks, longest, auto_cp, *activations)


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """The kernels with a gradient.

    Kept in between are the inputs as they came, which cost nothing where somebody else holds them; activated q, k and beta
    are made again.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, h0, A_log, dt_bias, cu_seqlens, options):
        o, ht, g_cumsum, A = _training_fwd(q, k, v, g, beta, h0, A_log, dt_bias, cu_seqlens, options)
        # A gate that is not activated has no part in the backward but by its sums.
        raw_g = None if A_log is None else g
        ctx.save_for_backward(g_cumsum, A, q, k, v, raw_g, beta, h0, A_log, dt_bias, cu_seqlens)
        ctx.options = options
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, beta, h0, A_log, dt_bias)]
        # A loss on one of the two outputs only must not cost a tensor of zeros for the other.
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dht):
        grads = _training_bwd(do, dht, *ctx.saved_tensors, ctx.options, any(ctx.needs_input_grad[6:8]))
        grads = zip(grads, ctx.dtypes, strict=True)
        return *(None if x is None or dtype is None else x.to(dtype) for x, dtype in grads), None, None


def _training_fwd(q, k, v, g, beta, h0, A_log, dt_bias, cu_seqlens, options):
    """o, ht, and for the backward g_cumsum (None without a gate) and A."""
    from flash_qla_tl.kernels.gated_delta_rule.chunk_fwd import chunk_fwd

    q, k, beta = _activated(q, k, beta, cu_seqlens, options)
    out = chunk_fwd(
        q,
        k,
        v,
        g,
        beta,
        options.scale,
        h0=h0,
        cu_seqlens=cu_seqlens,
        output_final_state=options.output_final_state,
        state_v_first=options.state_v_first,
        output_A=True,
        num_chunks=options.num_chunks,
        longest=options.longest,
        auto_cp=options.auto_cp,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return out.o, out.ht, None if g is None else out.g_cumsum, out.A


def _training_bwd(do, dht, g_cumsum, A, q, k, v, g, beta, h0, A_log, dt_bias, cu_seqlens, options, sums=True):
    """Gradients of the eight inputs, those of A_log and dt_bias with ``sums``; g is read with A_log only."""
    from flash_qla_tl.kernels.gated_delta_rule.chunk_bwd import chunk_bwd

    if do is None:
        do = torch.zeros_like(v)
    active = _activated(q, k, beta, cu_seqlens, options)
    dq, dk, dv, db, dg, dh0 = chunk_bwd(
        active[0],
        active[1],
        v,
        g_cumsum,
        active[2],
        A,
        do,
        dht=dht,
        scale=options.scale,
        h0=h0,
        cu_seqlens=cu_seqlens,
        state_v_first=options.state_v_first,
        num_chunks=options.num_chunks,
        longest=options.longest,
        auto_cp=options.auto_cp,
    )
    del active
    dA_log = ddt_bias = None
    if options.use_qk_l2norm or options.beta_range or A_log is not None:
        from flash_qla_tl.kernels.gated_delta_rule.activations import activations_bwd

        dq, dk, dg, db, dA_log, ddt_bias = activations_bwd(
            q,
            k,
            None if A_log is None else g,
            beta,
            dq,
            dk,
            dg,
            db,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=options.use_qk_l2norm,
            A_log=A_log,
            dt_bias=dt_bias,
            beta_range=options.beta_range,
            sums=sums,
        )
    return dq, dk, dv, dg, db, dh0, dA_log, ddt_bias


def _activated(q, k, beta, cu_seqlens, options):
    """q, k and beta as the recurrence takes them."""
    if not options.use_qk_l2norm and not options.beta_range:
        return q, k, beta
    from flash_qla_tl.kernels.gated_delta_rule.activations import activations_fwd

    return activations_fwd(
        q, k, beta, cu_seqlens=cu_seqlens, use_qk_l2norm=options.use_qk_l2norm, beta_range=options.beta_range
    )


def _state_map(
    *, q, k, v, g, beta, use_qk_l2norm_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, **_
):
    """N and M of a call on whole chunks (affine.py); with A_log, g is the raw gate."""
    from flash_qla_tl.kernels.gated_delta_rule.affine import state_map

    return state_map(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        beta_range=_beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval),
    )


def _state_gradient(
    do,
    dht,
    *,
    q,
    k,
    v,
    g,
    beta,
    scale,
    use_qk_l2norm_in_kernel,
    A_log,
    dt_bias,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    **_,
):
    """D of the same (affine.py)."""
    from flash_qla_tl.kernels.gated_delta_rule.affine import gradient

    if use_qk_l2norm_in_kernel or use_beta_sigmoid_in_kernel:
        from flash_qla_tl.kernels.gated_delta_rule.activations import activations_fwd

        beta_range = _beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        q, k, beta = activations_fwd(
            q, k, beta, cu_seqlens=None, use_qk_l2norm=use_qk_l2norm_in_kernel, beta_range=beta_range
        )
    return gradient(q, k, v, g, beta, do, dht, scale, A_log=A_log, dt_bias=dt_bias)


_MAPS = OnKernels(target.CHUNK, _state_map, _state_gradient)


def _op_fwd(*, cu_seqlens, cu_seqlens_cpu, **given):
    """:func:`_training_fwd` with the arguments of the traced call, whose contents were not checked yet."""
    checks.sequences(cu_seqlens, cu_seqlens_cpu, given["q"])
    tensors = [given.pop(x) for x in custom_ops.TENSORS]
    return _training_fwd(*tensors, cu_seqlens, _Options.of(*count_chunks(cu_seqlens_cpu), **given))


def _op_bwd(do, dht, g_cumsum, A, *, cu_seqlens, cu_seqlens_cpu, **given):
    tensors = [given.pop(x) for x in custom_ops.TENSORS]
    return _training_bwd(
        do, dht, g_cumsum, A, *tensors, cu_seqlens, _Options.of(*count_chunks(cu_seqlens_cpu), **given)
    )


_op = custom_ops.define(
    "chunk_gated_delta_rule",
    chunk_gated_delta_rule,
    lambda q, k, v, _: target.refusal(q, k, v),
    custom_ops.Training(_op_fwd, _op_bwd),
    auto_cp="bool",
)
