"""What the operators and their kernels move and multiply: counts for the profile and the benchmarks.

Traffic is each tensor once: what a kernel reads of memory at least, and what it writes. q, k, v and their like have 16
bits; so do the inverse, T, P and the states at chunk starts. Gates and beta have 32 in the gated delta rule and 16 in Kimi
Delta Attention, states at the ends of sequences 32. FLOP are those of the products on the tensor cores, chunks being whole:
a product of m x n and n x p is 2 m n p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flash_qla_tl.kernels.common.target import CHUNK

OPS = ("gdn_fwd", "gdn_bwd", "kda_fwd")
# What an H200 was seen to do: read + write of a large copy, and a dense bf16 product.
BYTES_PER_MS = 4.25e9
FLOP_PER_MS = 790e9
# Numbers of 32 bits that chunk_intra hands on for a chunk and value head.
FACTORS = 260


@dataclass(frozen=True)
class Cost:
    bytes: int
    flop: int

    @property
    def floor_ms(self) -> float:
        """The larger of the two times on an H200."""
        return max(self.bytes / BYTES_PER_MS, self.flop / FLOP_PER_MS)


@dataclass(frozen=True)
class Workload:
    """Sequences of these lengths in one call, with an initial and a final state."""

    seqlens: Sequence[int]
    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.seqlens)

    @property
    def chunks(self) -> int:
        return sum(-(-length // CHUNK) for length in self.seqlens)

    def floor(self, op: str) -> Cost:
        """Of a whole operator: its inputs and outputs, and the products of the chunked form.

        The forward's products are K K^T, Q K^T, K S, Q S, A W, P Vn and K^T Vn, 10.49 MFLOP a chunk and value head at
        K = V = 128; the backward, which recomputes the states, has three times as many.

        Raises:
            ValueError: ``op`` is none of ``OPS``.
        """
        qk, v, gates, states, A = self._tensors()
        K, V = self.K, self.V
        flop = self.chunks * self.HV * CHUNK * (6 * K * V + 4 * CHUNK * (K + V))
        if op == "gdn_fwd":
            return Cost(qk + 2 * v + gates + 2 * states, flop)  # q k, v o, g beta, h0 ht
        if op == "gdn_bwd":
            return Cost(2 * qk + 3 * v + 2 * gates + 3 * states + A, 3 * flop)  # ... do dv, h0 dht dh0
        if op == "kda_fwd":
            return Cost(qk + 2 * v + self.tokens * self.HV * (K + 1) * 2 + 2 * states, flop)
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")

    def kernels(self, norm: bool = True, gate: bool = True) -> dict[str, Cost]:
        """Of each kernel, by the beginning of its name in a profile. docs/kernels.md says what each computes.

        ``norm``, ``gate``: the L2 norm, and the gate's activation and the sigmoid of beta, are inside.
        """
        qk, v, gates, states, A = self._tensors()
        K, V, C, HV = self.K, self.V, CHUNK, self.HV
        heads, groups = self.chunks * HV, self.chunks * self.H
        made = heads * (C * C * 2 + FACTORS * 4)  # T with P^T, and the gate factors
        h = heads * K * V * 2
        workspace = heads * (3 * C * K * 2 + C * C * 2 + (K + C) * 4)
        kda_gates = self.tokens * HV * (K + 1) * 2
        walk = heads * (6 * C * K * V + 4 * C * C * V)  # K S, Q S, K^T Vn; T W, P Vn
        return {
            "gdn_chunk_intra": Cost(qk + gates + made, groups * 4 * C * C * K),
            "gdn_chunk_fwd": Cost(qk + 2 * v + made + 2 * states, walk),
            # In: q k v do A g beta h0 dht. Out: h dh dh0.
            "gdn_chunk_states": Cost(
                qk + 2 * v + A + gates + 3 * states + 2 * h,
                heads * (10 * C * K * V + 4 * C * C * K + 2 * C * C * V) + groups * 2 * C * C * K,
            ),
            # In: q k v do A g beta h dh. Out: dq dk dv db dg.
            "gdn_chunk_bwd": Cost(
                2 * qk + 3 * v + A + 2 * gates + 2 * h,
                heads * (10 * C * K * V + 10 * C * C * V + 4 * C**3) + groups * 10 * C * C * K,
            ),
            # In: q k beta. Out: q k beta.
            "gdn_activations_fwd": Cost(norm * 2 * qk + gate * gates, 0),
            # In: q k dq dk, g dg beta db. Out: dq dk, dg db.
            "gdn_activations_bwd": Cost(norm * 3 * qk + gate * 3 * gates, 0),
            "kda_prepare": Cost(qk + kda_gates + workspace, heads * 4 * C * C * K),
            "kda_state_loop": Cost(workspace + 2 * v + 2 * states, walk),
        }

    def _tensors(self) -> tuple[int, ...]:
        """Bytes of q and k, of v, of g and beta, of one set of states, and of the inverse."""
        tokens, HV, K, V = self.tokens, self.HV, self.K, self.V
        states = len(self.seqlens) * HV * K * V * 4
        return 2 * tokens * self.H * K * 2, tokens * HV * V * 2, 2 * tokens * HV * 4, states, tokens * HV * CHUNK * 2
