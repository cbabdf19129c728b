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
    v, g, beta, state = (
        x.unflatten(1, (H, HV // H)) for x in (v, g, beta, h0.to(dtype)[chunks.order])
    )

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
    A = torch.linalg.solve_triangular(
        beta[..., None] * (k @ k.mT), eye, upper=False, unitriangular=True
    )
    correct = operand(decay * A * beta[..., None, :])
    attend = operand(scale * decay * (q @ k.mT))

    # The empty first pieces give a problem without chunks its shapes and its (zero) gradients.
    h, v_new, final = [state[:0]], [correct[:0] @ v[:0]], []
    factors = (k, v, correct, from_start, to_end, whole)
    steps = zip(chunks.counts, *(x.split(chunks.counts) for x in factors), strict=True)
    for n, k_i, v_i, correct_i, from_start_i, to_end_i, whole_i in steps:
        state, ended = state.split((n, len(state) - n))
        final.append(ended)
        h.append(state)
        v_i = correct_i @ operand(v_i - from_start_i * (k_i @ operand(state)))
        v_new.append(v_i)
        state = whole_i * state + k_i.mT @ operand(to_end_i * v_i)
    final.append(state)

    h, v_new = torch.cat(h), torch.cat(v_new)
    ht = torch.cat(final[::-1])[chunks.rank]
    o = scale * from_start * (q @ operand(h)) + attend @ operand(v_new)
    return Chunked(
        chunks.join(o.flatten(1, 2)),
        ht.flatten(1, 2),
        g_cumsum,
        A.flatten(1, 2),
        h.flatten(1, 2),
        chunks,
    )
