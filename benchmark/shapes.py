"""Named workloads of the gated delta rule, and how fast the hardware could run them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from flash_qla_tl import testing
from flash_qla_tl.costs import Workload


@dataclass(frozen=True)
class Shape:
    """One call: sequences packed along T, or without ``packed`` a batch of equal lengths."""

    seqlens: tuple[int, ...]
    H: int
    HV: int
    K: int = 128
    V: int = 128
    packed: bool = True

    @property
    def tokens(self) -> int:
        return sum(self.seqlens)

    def __str__(self) -> str:
        runs = [(length, len(list(run))) for length, run in groupby(self.seqlens)]
        if len(runs) > 3:
            lengths = f"{len(self.seqlens)} of {self.tokens}"
        else:
            lengths = "+".join(f"{n}x{length}" for length, n in runs)
        return f"{lengths} ({self.H},{self.HV}){'' if self.packed else ' dense'}"

    def inputs(self, device: str) -> dict:
        """Random arguments of the operator by keyword, with an initial state, and bf16 q, k, v."""
        lengths = list(self.seqlens)
        size = {"lengths": lengths} if self.packed else {"B": len(lengths), "T": lengths[0]}
        heads = {"H": self.H, "HV": self.HV, "K": self.K, "V": self.V}
        return testing.inputs(**size, **heads, h0_dtype=torch.float32, device=device)

    def floor_ms(self, mode: str) -> float:
        """Milliseconds that no kernel for an H200 beats; see flash_qla_tl/costs.py."""
        work = Workload(self.seqlens, self.H, self.HV, self.K, self.V)
        if mode == "step":
            return work.floor("gdn_fwd").floor_ms + work.floor("gdn_bwd").floor_ms
        return work.floor(mode if mode.startswith("kda") else f"gdn_{mode}").floor_ms


def _of(rows: list[tuple]) -> list[Shape]:
    return [Shape(tuple(seqlens), H, HV) for seqlens, H, HV in rows]


# One prompt or a batch of them, in the head counts of Qwen3-Next-like models and their shards.
PREFILL = _of(
    [
        ([32768], 16, 64),
        ([8192], 16, 64),
        ([8192] * 4, 16, 64),
        ([32768], 16, 32),
        ([8192], 16, 32),
        ([2048], 16, 32),
        ([8192] * 4, 16, 32),
        ([4096] * 8, 16, 32),
        ([8192], 16, 48),
        ([32768], 2, 8),
        ([4096] * 8, 2, 8),
    ]
)
TRAINING = _of([([8192], 16, 32), ([32768], 16, 32), ([1024] * 8, 16, 32), ([8192], 8, 16), ([8192], 16, 64)])
# What FlashKDA is measured on, with fewer heads too.
KDA = _of(
    [
        ([8192], 96, 96),
        ([1300, 547, 2048, 963, 271, 3063], 96, 96),
        ([1024] * 8, 96, 96),
        ([8192], 64, 64),
        ([1024] * 8, 64, 64),
        ([8192], 32, 32),
        ([32768], 8, 8),
    ]
)
# Enough for every line of a script, on a CPU.
SMOKE = _of([([130, 70], 2, 4)]) + [Shape((96, 96), 1, 1, packed=False)]
KDA_SMOKE = _of([([130, 70], 2, 2), ([100], 1, 1)])

# Boundaries of packed requests as a server sees them: 16384 tokens in pieces.
_SERVED = (
    "0 268 1139 1179 1212 1476 2792 3202 3611 3726 3820 4096 4882 6417 8130 8192 8328 9426 10473"
    " 11002 11754 12288 14085 15370 16384",
    "0 3393 4096 4153 5636 5853 6318 6777 8192 8320 8931 9163 9494 10040 10113 10363 10561 11061"
    " 11388 11634 12288 14545 16288 16384",
    "0 4096 6111 6485 6589 7118 8192 9056 10448 12288 14032 14525 15884 16012 16384",
    "0 177 4096 8192 12288 12805 13171 13298 16055 16384",
    "0 308 1128 1678 4096 4748 8192 8506 9657 10252 12113 12288 16384",
    "0 4096 6893 7665 8192 12288 16384",
    "0 410 841 1135 2126 2512 4096 4682 5022 5375 6259 6335 6580 6648 7308 8192 10450 12058 12288"
    " 14215 15280 15701 16384",
    "0 2048 4096 6144 8192 10240 12288 14336 16384",
)
# What FlashQLA publishes times of, with every one of these head counts.
_PUBLISHED = (
    (32768,), (16384,), (8192,), (4096,), (2048,),
    (28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672),
    (12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168),
    (8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8,
)  # fmt: skip
_PUBLISHED_HEADS = ((2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32))
SETS = ("prefill", "training", "develop", "varlen", "short", "profile", "product", "published", "smoke")


def random_lengths(total: int, n: int) -> tuple[int, ...]:
    """``total`` cut into n positive lengths, the same ones every time."""
    cuts = sorted(random.Random(total * n).sample(range(1, total), n - 1))
    return tuple(b - a for a, b in pairwise((0, *cuts, total)))


def shapes(name: str, num_heads: int = 32) -> list[Shape]:
    """The workloads of a set; ``num_heads`` is HV = 2 H where the set itself names no heads.

    - "prefill", "training": those that results are recorded for.
    - "develop": one long sequence, from few heads to many.
    - "varlen": batches and packed sequences of awkward lengths.
    - "short": many sequences of half a chunk and of one, with a token more or less.
    - "profile": one sequence, from short to long.
    - "product": the packings of a server.
    - "published": those that FlashQLA publishes times of.
    - "smoke": tiny.
    """
    H, HV = max(1, num_heads // 2), num_heads
    if name == "prefill":
        return PREFILL
    if name == "training":
        return TRAINING
    if name == "smoke":
        return SMOKE
    if name == "develop":
        return [Shape((32768,), heads, heads, packed=False) for heads in (4, 8, 16)]
    if name == "varlen":
        dense = [Shape((T,) * B, H, HV, packed=False) for B, T in ((11, 33), (7, 4321))]
        packed = ((3, 16789), (5, 8192), (10, 1024), (20, 512))
        return dense + [Shape(random_lengths(B * T, B), H, HV) for B, T in packed]
    if name == "short":
        return [Shape((length,) * 1024, H, HV) for length in (31, 32, 63, 64, 65)]
    if name == "profile":
        return [Shape((T,), H, HV, packed=False) for T in (4096, 8192, 16384, 32768)]
    if name == "product":
        served = [[int(x) for x in boundaries.split()] for boundaries in _SERVED]
        return [Shape(tuple(b - a for a, b in pairwise(cu)), H, HV) for cu in served]
    if name == "published":
        return [Shape(seqlens, *heads) for heads in _PUBLISHED_HEADS for seqlens in _PUBLISHED]
    raise ValueError(f"set must be one of {', '.join(SETS)}, got {name!r}")
