"""Kimi Delta Attention in chunks of 64 tokens, in torch: any device, head size and float dtype.

The walk over the chunks is that of torch_chunked.py, and so is what a chunk does to the state; what
differs is the decay, which here is another one for every channel of the key and therefore has its
place inside the products of queries and keys. docs/math.md derives how they are made from halves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_qla_tl.torch_chunked import walk
from flash_qla_tl.utils.chunks import Chunks
from flash_qla_tl.utils.norm import compute_dtype


class ChunkedKda(NamedTuple):
    """``o`` and ``ht`` as the caller sees them, ``h`` by chunk; fp32, float64 for float64 inputs."""

    o: Tensor  # [B, T, HV, V]
    ht: Tensor  # [N, HV, K, V]
    h: Tensor  # [NT, HV, K, V]
    chunks: Chunks


def chunked_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    h0: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> ChunkedKda:
    """Kimi Delta Attention of checked arguments, ``g`` being log decays; ``h0`` is ``[N, HV, K, V]``.

    ``operand`` is applied to every factor of a product that kernels run on tensor cores; testing.py
    rounds there.
    """
    # Autocast would run the products below in 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        return _chunked_kda(q, k, v, g, beta, scale, h0, cu_seqlens, operand)


def _chunked_kda(q, k, v, g, beta, scale, h0, cu_seqlens, operand) -> ChunkedKda:
    dtype = compute_dtype(q)
    K = q.shape[3]
    HV, V = v.shape[2:]
    chunks = Chunks.of(q, cu_seqlens)
    if h0 is None:
        h0 = torch.zeros(len(chunks.order), HV, K, V, dtype=dtype, device=q.device)
    # q, k and g [NT, HV, C, K], v [NT, HV, C, V], beta [NT, HV, C].
    q, k, v, g, beta = (chunks.split(x).to(dtype) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(HV // x.shape[1], dim=1) for x in (q, k))

    qk, kk, from_start, to_end = _decayed_products(q, k, g, operand)
    # (I + L)^-1 with L strictly lower: the solver takes the diagonal as ones and reads no
    # entry above it.
    eye = torch.eye(chunks.size, dtype=dtype, device=q.device)
    A = torch.linalg.solve_triangular(beta[..., None] * kk, eye, upper=False, unitriangular=True)
    correct = operand(A * beta[..., None, :])
    q_start, k_start, k_end = operand(q * from_start.exp()), operand(k * from_start.exp()), operand(k * to_end.exp())
    whole = from_start[..., -1, :, None].exp()

    def step(state, v, correct, k_start, k_end, whole):
        v_new = correct @ operand(v - k_start @ operand(state))
        return whole * state + k_end.mT @ operand(v_new), v_new

    h, v_new, ht = walk(chunks, h0.to(dtype)[chunks.order], step, v, correct, k_start, k_end, whole)
    o = scale * (q_start @ operand(h)) + operand(scale * qk) @ operand(v_new)
    return ChunkedKda(chunks.join(o), ht, h, chunks)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor, operand: Callable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inner products of the rows of a chunk, each channel faded from the earlier row to the later.

    Returns ``qk`` and ``kk`` ``[..., C, C]``, zero above the diagonal, and for every token the log
    decays ``[..., C, K]`` from the start of the chunk to it, its own included, and from it to the end.

    Blocks of one token are joined two by two until one block is the chunk. What fades from a token j
    of an earlier block to a token i of the later one fades from j to the end of its block and then
    from the start of the other to i. All of these sums are of gates alone: none is a difference, so
    for gates of at most 0 no exponential exceeds 1, and none loses digits behind a gate of -1000.
    And none knows of a token after i.
    """
    rows = torch.stack((q, k))
    products = (operand(rows) * operand(k)).sum(-1)[..., None, None]
    from_start = g.unsqueeze(-2)
    to_end = torch.zeros_like(from_start)
    while (size := products.shape[-1]) < g.shape[-2]:
        _, later_rows = _halves(rows.unflatten(-2, (-1, size)))
        earlier_k, _ = _halves(k.unflatten(-2, (-1, size)))
        earlier_start, later_start = _halves(from_start)
        earlier_end, later_end = _halves(to_end)
        earlier, later = _halves(products)
        cross = operand(later_rows * later_start.exp()) @ operand(earlier_k * earlier_end.exp()).mT
        upper = torch.cat((earlier, torch.zeros_like(cross)), dim=-1)
        products = torch.cat((upper, torch.cat((cross, later), dim=-1)), dim=-2)
        from_start = torch.cat((earlier_start, earlier_start[..., -1:, :] + later_start), dim=-2)
        to_end = torch.cat((earlier_end + later_start[..., -1:, :], later_end), dim=-2)
    qk, kk = products.squeeze(-3)
    return qk, kk, from_start.squeeze(-3), to_end.squeeze(-3)


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second block of every two along the third axis from the end."""
    return blocks.unflatten(-3, (-1, 2)).unbind(-3)
