"""The gate table: every scalar factor of one chunk, made once by one warp.

With G the in-chunk cumulative log2 decay, e(b) the G of the last token of block b (16 tokens) and r the reciprocal
norms of the rows of k and q (1 where no L2 norm is asked for), per token of the chunk, in shared memory:

    G          the sum itself
    BETA       beta                rows of L = beta K K^T, columns of T
    ROW        2^(G - e(b - 1))    rows of block row b, and
    COL1..3    2^(e(b - 1) - G)    columns before block row b: decay below the diagonal blocks, each factor at most 1

and, for the walk over the chunks, in global memory:

    NGAMMA     -2^G r_k            K S   -> what the state predicts
    QGAMMA     scale 2^G r_q       Q S   -> its part of the output
    DECAY      2^(G_last - G)      Vn    -> what is left of it at the chunk's end
    BETA       beta r_k            the diagonal of T
    LAST[0]    2^G_last            the state
    REACH[0]   G_last + growth     log2 of what is left of a state behind the chunk, at most: growth is the sum of
                                   log2 max(1, |1 - beta |k|^2|) over its tokens, 0 for beta |k|^2 from 0 to 2

With T's rows scaled by r_k, Vn comes out as r_k Vn, which is what both of its uses want: so q and k themselves stay as they are.
"""

from pathlib import Path

import tilelang.language as T

ROWS = {
    "G": 0,
    "BETA": 64,
    "ROW": 128,
    "COL1": 192,  # 16 tokens
    "COL2": 208,  # 32 tokens
    "COL3": 240,  # 48 tokens
}
TABLE = 288
FACTORS = {"NGAMMA": 0, "QGAMMA": 64, "DECAY": 128, "BETA": 192, "LAST": 256, "REACH": 257}
# Rows of whole 16 bytes, for TMA.
NUM_FACTORS = 260

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def device_source(dtype: str) -> str:
    """ptx.cuh and chunk_tile.cuh for operands of one 16-bit type."""
    files = (Path(__file__).parent / name for name in ("ptx.cuh", "chunk_tile.cuh"))
    return f"#define QLA_BF16 {int(dtype == 'bfloat16')}\n" + "".join(file.read_text() for file in files)


@T.macro
def warp_cumsum(x, lane):
    """Inclusive sum over the lanes of a warp, in place: x[0] of each lane."""
    for step in T.unroll(5):
        below = T.shfl_up(x[0], 1 << step)
        if lane >= (1 << step):
            x[0] += below


@T.macro
def write_gates(table, s, g, beta, lane):
    """One warp writes table[s] from g (log decay) and beta of tokens 2 lane and 2 lane + 1."""
    total = T.alloc_local((1,), "float32")
    G = T.alloc_local((2,), "float32")
    before = T.alloc_local((1,), "float32")
    pair = g[0] + g[1]
    total[0] = pair * LOG2E
    warp_cumsum(total, lane)
    # Not total - g[1]: what a strong gate leaves of a difference is another number, and a token's decay is not to know the next one's.
    below = T.shfl_up(total[0], 1)
    G[1] = total[0]
    G[0] = T.if_then_else(lane == 0, 0.0, below) + g[0] * LOG2E
    before[0] = 0.0
    for b in T.unroll(1, 4):
        end = T.shfl_sync(total[0], 8 * b - 1)
        if lane // 8 == b:
            before[0] = end
        if lane < 8 * b:
            for i in T.vectorized(2):
                table[s, ROWS["COL1"] + 8 * b * (b - 1) + 2 * lane + i] = T.exp2(end - G[i])
    for i in T.vectorized(2):
        table[s, ROWS["G"] + 2 * lane + i] = G[i]
    for i in T.vectorized(2):
        table[s, ROWS["BETA"] + 2 * lane + i] = beta[i]
    for i in T.vectorized(2):
        table[s, ROWS["ROW"] + 2 * lane + i] = T.exp2(G[i] - before[0])


@T.macro
def write_factors(table, s, factors, slot, i_hv, norm_k, scale_q, reach, lane):
    """A warp writes factors[slot, i_hv] from table[s], norm_k and scale_q = scale norm_q of tokens 2 lane and 2 lane + 1."""
    G = T.alloc_local((2,), "float32")
    last = table[s, ROWS["G"] + 63]
    for i in T.vectorized(2):
        G[i] = table[s, ROWS["G"] + 2 * lane + i]
    for i in T.vectorized(2):
        factors[slot, i_hv, FACTORS["NGAMMA"] + 2 * lane + i] = -T.exp2(G[i]) * norm_k[i]
    for i in T.vectorized(2):
        factors[slot, i_hv, FACTORS["QGAMMA"] + 2 * lane + i] = T.exp2(G[i]) * scale_q[i]
    for i in T.vectorized(2):
        factors[slot, i_hv, FACTORS["DECAY"] + 2 * lane + i] = T.exp2(last - G[i])
    for i in T.vectorized(2):
        factors[slot, i_hv, FACTORS["BETA"] + 2 * lane + i] = table[s, ROWS["BETA"] + 2 * lane + i] * norm_k[i]
    if lane < 4:
        factors[slot, i_hv, FACTORS["LAST"] + lane] = T.if_then_else(lane == 0, T.exp2(last), reach)
