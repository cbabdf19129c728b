"""The chunk layout of the torch path: tokens cut into chunks that can be walked in parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_qla_tl.utils.index import prepare_chunk_indices


@dataclass(frozen=True)
class Chunks:
    """Where every token lies when sequences are cut into chunks of ``size`` tokens.

    Chunks are ordered by their place in their sequence, then from the longest sequence to the
    shortest. So the i-th chunks of all sequences are one slice of ``counts[i]`` chunks, and the
    sequences that go on after it are a prefix of that slice: a state walks all sequences at once,
    and a sequence that ends just drops off the end.
    """

    B: int
    T: int
    size: int
    counts: list[int]  # chunks at each place
    slot: Tensor  # [tokens] row of each token in the flattened chunks
    order: Tensor  # [N] sequences from the longest to the shortest
    rank: Tensor  # [N] the inverse of order
    by_sequence: Tensor  # [NT] the chunk that comes i-th when they are ordered by sequence
    valid: Tensor  # [NT, size] False on the padding of a last chunk

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, size: int = 64) -> Chunks:
        """The layout of ``x`` ``[B, T, ...]``; reads ``cu_seqlens`` on the host.

        Contents that are no cumulative lengths are clamped to the nearest that are: where they can
        be checked before, they were.
        """
        B, T = x.shape[:2]
        if cu_seqlens is None:
            cu = torch.arange(B + 1) * T
        else:
            cu = cu_seqlens.cpu().long().clamp(0, T).cummax(0).values
            cu[0] = 0
        lengths = cu.diff()
        num = (lengths + size - 1) // size
        order = num.argsort(descending=True, stable=True)
        rank = order.argsort()
        longest = int(num.max()) if num.numel() else 0
        counts = (num > torch.arange(longest)[:, None]).sum(1)
        first = F.pad(counts.cumsum(0), (1, 0))

        sequence = torch.arange(len(num)).repeat_interleave(lengths)
        t = torch.arange(len(sequence)) - cu[sequence]
        slot = (first[t // size] + rank[sequence]) * size + t % size
        i_n, i_t = prepare_chunk_indices(cu, size).unbind(1)
        valid = torch.zeros(int(first[-1]) * size, dtype=torch.bool)
        valid[slot] = True
        return cls(
            B,
            T,
            size,
            counts.tolist(),
            slot.to(x.device),
            order.to(x.device),
            rank.to(x.device),
            (first[i_t] + rank[i_n]).to(x.device),
            valid.view(-1, size).to(x.device),
        )

    def split(self, x: Tensor) -> Tensor:
        """``[B, T, heads, ...]`` to ``[NT, heads, size, ...]``, zero on the padding."""
        tokens = x.flatten(0, 1)[: len(self.slot)]
        # Every slot is written once, so that this and its backward are deterministic.
        flat = x.new_zeros(self.valid.numel(), *tokens.shape[1:]).index_copy(0, self.slot, tokens)
        return flat.unflatten(0, self.valid.shape).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """The reverse of :meth:`split`; rows that belong to no sequence are zero."""
        tokens = x.transpose(1, 2).flatten(0, 1).index_select(0, self.slot)
        missing = self.B * self.T - len(tokens)
        tokens = torch.cat((tokens, tokens.new_zeros(missing, *tokens.shape[1:])))
        return tokens.unflatten(0, (self.B, self.T))

    def hold(self, x: Tensor) -> Tensor:
        """``[NT, heads, size]`` with the padding set to the last value before it."""
        last = self.valid.sum(1) - 1
        held = x.gather(2, last.view(-1, 1, 1).expand(-1, x.shape[1], 1))
        return torch.where(self.valid[:, None], x, held)
