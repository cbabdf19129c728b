// Pieces of the chunk gradient kernel (chunk_bwd.py) on top of chunk_tile.cuh. Two warpgroups share every product: a [64, N]
// accumulator has warp w in rows 16 (w % 4) and in the left (warps 0-3) or right (4-7) half of the columns.

// d += a b for one 16x8 tile, operands of the kernel's type.
QLA_DEVICE void qlg_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
#if QLA_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  qla_mma(d, a, b0, b1);
#endif
}

QLA_DEVICE float qlg_warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// factor times the sum of h o dh over this warp's 16 of ROWS rows, to *out: the diagonal of h dh^T. Rows of COLS numbers, in panels of 64.
template <int ROWS, int COLS>
QLA_DEVICE void qlg_inner_product(const void* h_, const void* dh_, const float* factor, float* out) {
  unsigned h = qla_smem(h_), dh = qla_smem(dh_);
  int thread = threadIdx.x & 255, w = thread >> 5, l = thread & 31;
  float d[8];
  qla_clear_tile(d);
#pragma unroll
  for (int j = 0; j < COLS / 16; j++) {
    unsigned at = (j >> 2) * (ROWS * 128) + (qla_block(0, l, w, j & 3)), a[4], b[4];
    qla_ldmatrix(h + at, a);
    qla_ldmatrix(dh + at, b);
    qlg_mma(d, a, b[0], b[2]);
    qlg_mma(d + 4, a, b[1], b[3]);
  }
  int g = l >> 2, t = (l & 3) * 2;
  float sum = g == t ? d[0] + d[6] : g == t + 1 ? d[1] + d[7] : 0.f;
  sum = qlg_warp_sum(sum);
  if (l == 0) out[w] = *factor * sum;
}

// [64 values, 64 tokens] operands of this warpgroup as [64 tokens, 64 values].
QLA_DEVICE void qlg_store_transposed(const void* operand, void* tile) { qla_store_transposed((const unsigned*)operand, tile); }

// sums += factor o the dot products of the rows of an accumulator [64, 32 BLOCKS] with those of a tile (rows g and g + 8; a lane's
// own columns).
template <int BLOCKS>
QLA_DEVICE void qlg_row_dots(const float* acc, const void* tile, const float* factor, float sign, float* sums) {
  int thread = threadIdx.x & 255, w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float lo = 0.f, hi = 0.f;
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    int block = half * BLOCKS + j;
    unsigned x[4];
    qla_ldmatrix(qla_block(qla_smem(tile) + (block >> 2) * 8192, l, w, block & 3), x);
    const float* y = acc + 8 * j;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 a = qla_unpack(x[2 * i]), b = qla_unpack(x[2 * i + 1]);
      lo += a.x * y[4 * i] + a.y * y[4 * i + 1];
      hi += b.x * y[4 * i + 2] + b.y * y[4 * i + 3];
    }
  }
  sums[0] += sign * factor[w * 16 + (l >> 2)] * lo;
  sums[1] += sign * factor[w * 16 + (l >> 2) + 8] * hi;
}

// sums += the rows of a [64, 64] accumulator (a lane's own columns).
QLA_DEVICE void qlg_row_sums(const float* acc, float* sums) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[0] += acc[4 * i] + acc[4 * i + 1];
    sums[1] += acc[4 * i + 2] + acc[4 * i + 3];
  }
}

// Those sums over all columns of this half to out[half][64].
QLA_DEVICE void qlg_store_rows(const float* sums, float* out) {
  int thread = threadIdx.x & 255, w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float lo = sums[0], hi = sums[1];
  lo += __shfl_xor_sync(0xffffffffu, lo, 1), hi += __shfl_xor_sync(0xffffffffu, hi, 1);
  lo += __shfl_xor_sync(0xffffffffu, lo, 2), hi += __shfl_xor_sync(0xffffffffu, hi, 2);
  if ((l & 3) == 0) out[half * 64 + w * 16 + (l >> 2)] = lo, out[half * 64 + w * 16 + (l >> 2) + 8] = hi;
}

// The column sums of a [64, 64] accumulator over this warp's 16 rows to out[w % 4][64]. Each exchange halves the columns a lane has.
QLA_DEVICE void qlg_store_columns(const float* acc, float* out) {
  int thread = threadIdx.x & 255, w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float c[8];
#pragma unroll
  for (int i = 0; i < 8; i++) c[i] = acc[(i >> 1) * 4 + (i & 1)] + acc[(i >> 1) * 4 + (i & 1) + 2];
  int at = 0;
#pragma unroll
  for (int n = 4; n; n >>= 1) {
    int bit = n == 4 ? 16 : n == 2 ? 8 : 4, up = (l & bit) != 0;
#pragma unroll
    for (int i = 0; i < n; i++) {
      float mine = up ? c[n + i] : c[i], other = up ? c[i] : c[n + i];
      c[i] = mine + __shfl_xor_sync(0xffffffffu, other, bit);
    }
    at += up ? n : 0;
  }
  out[w * 64 + half * 32 + (at >> 1) * 8 + (l & 3) * 2 + (at & 1)] = c[0];
}
