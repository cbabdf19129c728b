"""The gated delta rule in chunks of 64 tokens, in torch: any device, head size and float dtype.

docs/math.md derives the formulas. Within a chunk everything is a matrix product, and only the
state walks from chunk to chunk, for all sequences and heads at once. Autograd goes through
all of it. Gates enter only through ``exp(g_i - g_j)`` with token i at or after token j, so that no
gate, however strong, overflows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_qla_tl.ops.utils import chunk_local_cumsum
from flash_qla_tl.utils.chunks import Chunks
from flash_qla_tl.utils.norm import compute_dtype


class Chunked(NamedTuple):
    """``o`` and ``ht`` as the caller sees them, the rest by chunk (``chunks.join`` undoes it).

    All in fp32, float64 for float64 inputs.
    """

    o: Tensor  # [B, T, HV, V]
    ht: Tensor  # [N, HV, K, V]
    g_cumsum: Tensor  # [NT, HV, C]
    A: Tensor  # [NT, HV, C, C]
    h: Tensor  # [NT, HV, K, V]
    chunks: Chunks


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    h0: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    g_is_cumsum: bool = False,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> Chunked:
    """The gated delta rule of checked arguments; ``h0`` is ``[N, HV, K, V]``.

    ``g_is_cumsum`` says that ``g`` is already summed within the chunks. ``operand`` is applied to
    every factor of a product that kernels run on tensor cores; testing.py rounds there.
    """
    # Autocast would run the products below in 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        return _chunked(q, k, v, g, beta, scale, h0, cu_seqlens, g_is_cumsum, operand)


def _chunked(q, k, v, g, beta, scale, h0, cu_seqlens, g_is_cumsum, operand) -> Chunked:
    dtype = compute_dtype(q)
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    chunks = Chunks.of(q, cu_seqlens)
    N = len(chunks.order)
    if g is None:
        g = torch.zeros_like(beta, dtype=dtype)
    if h0 is None:
        h0 = torch.zeros(N, HV, K, V, dtype=dtype, device=q.device)

    q, k, v, g, beta = (chunks.split(x).to(dtype) for x in (q, k, v, g, beta))
    g = chunks.hold(g) if g_is_cumsum else g.cumsum(-1)
    g_cumsum = g

    # The HV/H value heads that share a query/key head get an axis of their own: q and k
    # [NT, H, 1, C, K], v [NT, H, G, C, V], g and beta [NT, H, G, C], states [N, H, G, K, V].
    q, k = operand(q).unsqueeze(2), operand(k).unsqueeze(2)
    v, g, beta, state = (x.unflatten(1, (H, HV // H)) for x in (v, g, beta, h0.to(dtype)[chunks.order]))

    # decay[i, j] is what is left at token i of a write at token j. The difference is cut below the
    # diagonal so that the ones on it, which outweigh everything under strong gates, are constants.
    C = chunks.size
    future = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).tril(-1).masked_fill(future, -torch.inf).exp()
    from_start = g.exp()[..., None]
    last = torch.arange(len(chunks.valid), device=q.device), ..., chunks.valid.sum(1) - 1
    to_end = decay.mT[last][..., None]
    whole = from_start[..., 0][last][..., None, None]

    # (I + L)^-1 with L strictly lower: the solver takes the diagonal as ones and reads no
    # entry above it.
    eye = torch.eye(C, dtype=dtype, device=q.device)
    A = torch.linalg.solve_triangular(beta[..., None] * (k @ k.mT), eye, upper=False, unitriangular=True)
    correct = operand(decay * A * beta[..., None, :])
    attend = operand(scale * decay * (q @ k.mT))

    def step(state, k, v, correct, from_start, to_end, whole):
        v_new = correct @ operand(v - from_start * (k @ operand(state)))
        return whole * state + k.mT @ operand(to_end * v_new), v_new

    h, v_new, ht = walk(chunks, state, step, k, v, correct, from_start, to_end, whole)
    o = scale * from_start * (q @ operand(h)) + attend @ operand(v_new)
    return Chunked(chunks.join(o.flatten(1, 2)), ht.flatten(1, 2), g_cumsum, A.flatten(1, 2), h.flatten(1, 2), chunks)


def chunked_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    h0: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbeta, dg and dh0 of :func:`chunked` by autograd; dg is that of the gates before they were summed."""
    h0 = None if h0 is None else h0.to(compute_dtype(q))
    leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, beta, g_cumsum, h0)]
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q_, k_, v_, beta_, g_, h0_ = leaves
        out = _chunked(q_, k_, v_, g_, beta_, scale, h0_, cu_seqlens, True, operand)
        pairs = [(out.o, do)]
        if dht is not None and out.ht.requires_grad:
            pairs.append((out.ht, dht))
        outputs, weights = zip(*((x, d.to(x.dtype)) for x, d in pairs), strict=True)
        found = iter(torch.autograd.grad(outputs, [x for x in leaves if x is not None], weights))
    dq, dk, dv, db, dg, dh0 = (None if x is None else next(found) for x in leaves)
    if dg is not None:
        dg = chunk_local_cumsum(dg, 64, cu_seqlens, reverse=True).to(g_cumsum.dtype)
    return dq, dk, dv, db, dg, dh0


def walk(
    chunks: Chunks, state: Tensor, step: Callable[..., tuple[Tensor, Tensor]], *factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the states from chunk to chunk, those of all sequences at once.

    ``state`` is ``[N, ...]`` in the order of ``chunks.order``, every factor ``[NT, ...]``, and
    ``step(state, *factors)`` gives the states after a chunk of each sequence and its ``v_new``.
    Returns the state before and ``v_new`` of every chunk, and the last state of every sequence in
    the caller's order.
    """
    # The empty first pieces give a problem without chunks its shapes and its (zero) gradients.
    h, v_new, final = [state[:0]], [step(state[:0], *(x[:0] for x in factors))[1]], []
    steps = zip(chunks.counts, *(x.split(chunks.counts) for x in factors), strict=True)
    for n, *of_chunk in steps:
        state, ended = state.split((n, len(state) - n))
        final.append(ended)
        h.append(state)
        state, corrections = step(state, *of_chunk)
        v_new.append(corrections)
    final.append(state)
    return torch.cat(h), torch.cat(v_new), torch.cat(final[::-1])[chunks.rank]


def states_by_chunk(
    h: Tensor, chunks: Chunks, cu_seqlens: Tensor | None, num_chunks: int | None = None, state_v_first: bool = False
) -> Tensor:
    """``h`` of :class:`Chunked` as the public functions return it: ``[B, NT, HV, K, V]``.

    Packed sequences get ``num_chunks`` slots, or ``T // 64 + N`` where that is None, which needs no
    look at ``cu_seqlens``; the slots behind the last chunk are zero.
    """
    h = h[chunks.by_sequence]
    if state_v_first:
        h = h.mT
    if cu_seqlens is None:
        return h.unflatten(0, (chunks.B, -(-chunks.T // chunks.size)))
    if num_chunks is None:
        num_chunks = chunks.T // chunks.size + len(cu_seqlens) - 1
    return torch.cat((h, h.new_zeros(num_chunks - len(h), *h.shape[1:]))).unsqueeze(0)
