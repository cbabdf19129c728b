// Pieces of the chunk gradient kernel (chunk_bwd.py) on top of chunk_tile.cuh. Two warpgroups share every product: a [64, N]
// accumulator has warp w in rows 16 (w % 4) and in the left (warps 0-3) or right (4-7) half of the columns. Tiles and tables are given
// by their shared address. The includer defines QLG_G and QLG_BETA, rows of the gate table.

// The thread among the two warpgroups, as qla_thread.
QLA_DEVICE int qlg_thread() { return qla_opaque(threadIdx.x & 255); }

// Numbers in shared memory by their shared address.
QLA_DEVICE float* qlg_floats(unsigned at) { return (float*)__cvta_shared_to_generic(at); }

// d += a b for one 16x8 tile, operands of the kernel's type.
QLA_DEVICE void qlg_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
#if QLA_BF16
  qla_mma_bf16(d, a, b0, b1);
#else
  qla_mma(d, a, b0, b1);
#endif
}

QLA_DEVICE float qlg_warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// A [64, 64] accumulator as a tile.
QLA_DEVICE void qlg_store_accumulator(const float* acc, unsigned tile) {
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float* y = acc + 8 * j;
    qla_stmatrix(qla_block(tile, l, w, half * 2 + j), qla_pack(y[0], y[1]), qla_pack(y[2], y[3]), qla_pack(y[4], y[5]),
                 qla_pack(y[6], y[7]));
  }
}

// factor times the sum of h o dh over this warp's 16 of ROWS rows, to *out: the diagonal of h dh^T. Rows of COLS numbers, in panels of 64.
template <int ROWS, int COLS>
QLA_DEVICE void qlg_inner_product(unsigned h, unsigned dh, unsigned factor, unsigned out) {
  int thread = qlg_thread(), w = thread >> 5, l = thread & 31;
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
  if (l == 0) qlg_floats(out)[w] = *qlg_floats(factor) * sum;
}

// qla_residual for a tile by its shared address.
QLA_DEVICE void qlg_residual(const float* ks, unsigned factor, unsigned v, void* w) {
  qla_residual(ks, qlg_floats(factor), (const void*)__cvta_shared_to_generic(v), w);
}

// [64 values, 64 tokens] operands of this warpgroup as [64 tokens, 64 values].
QLA_DEVICE void qlg_store_transposed(const void* operand, unsigned tile) {
  const unsigned* o = (const unsigned*)operand;
  int thread = qla_thread(), l = thread & 31, col = (thread >> 5) * 2 + ((l >> 3) & 1), row = (l & 7) + (l >> 4) * 8;
  unsigned p = tile + row * 128 + ((col ^ (row & 7)) << 4);
#pragma unroll
  for (int j = 0; j < 4; j++) qla_stmatrix_t(p + j * 2048, o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
}

// sums += factor o the dot products of the rows of an accumulator [64, 32 BLOCKS] with those of a tile (rows g and g + 8; a lane's
// own columns).
template <int BLOCKS>
QLA_DEVICE void qlg_row_dots(const float* acc, unsigned tile, unsigned factor_at, float* sums) {
  const float* factor = qlg_floats(factor_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float lo = 0.f, hi = 0.f;
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    int block = half * BLOCKS + j;
    unsigned x[4];
    qla_ldmatrix(qla_block(tile + (block >> 2) * 8192, l, w, block & 3), x);
    const float* y = acc + 8 * j;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 a = qla_unpack(x[2 * i]), b = qla_unpack(x[2 * i + 1]);
      lo += a.x * y[4 * i] + a.y * y[4 * i + 1];
      hi += b.x * y[4 * i + 2] + b.y * y[4 * i + 3];
    }
  }
  sums[0] += factor[w * 16 + (l >> 2)] * lo;
  sums[1] += factor[w * 16 + (l >> 2) + 8] * hi;
}

// The sums of the rows of a [64, 64] accumulator (a lane's own columns).
QLA_DEVICE void qlg_row_sums(const float* acc, float* sums) {
  sums[0] = sums[1] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[0] += acc[4 * i] + acc[4 * i + 1];
    sums[1] += acc[4 * i + 2] + acc[4 * i + 3];
  }
}

// Those sums over all columns of this half to out[half][64].
QLA_DEVICE void qlg_store_rows(const float* sums, unsigned out_at) {
  float* out = qlg_floats(out_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float lo = sums[0], hi = sums[1];
  lo += __shfl_xor_sync(0xffffffffu, lo, 1), hi += __shfl_xor_sync(0xffffffffu, hi, 1);
  lo += __shfl_xor_sync(0xffffffffu, lo, 2), hi += __shfl_xor_sync(0xffffffffu, hi, 2);
  if ((l & 3) == 0) out[half * 64 + w * 16 + (l >> 2)] = lo, out[half * 64 + w * 16 + (l >> 2) + 8] = hi;
}

// One exchange of a sum over lanes that splits the columns: of 2 N columns a lane keeps the half that `bit` of its number says.
template <int N>
QLA_DEVICE void qlg_exchange(float* c, int lane, int bit) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    float mine = lane & bit ? c[N + i] : c[i], other = lane & bit ? c[i] : c[N + i];
    c[i] = mine + __shfl_xor_sync(0xffffffffu, other, bit);
  }
}

// The column sums of a [64, 64] accumulator over this warp's 16 rows to out[w % 4][64].
QLA_DEVICE void qlg_store_columns(const float* acc, unsigned out_at) {
  float* out = qlg_floats(out_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
  float c[8];
#pragma unroll
  for (int i = 0; i < 8; i++) c[i] = acc[(i >> 1) * 4 + (i & 1)] + acc[(i >> 1) * 4 + (i & 1) + 2];
  qlg_exchange<4>(c, l, 16);
  qlg_exchange<2>(c, l, 8);
  qlg_exchange<1>(c, l, 4);
  // Lane bits 4 and 3 chose the group of 8 columns, bit 2 the column of the lane's pair.
  out[w * 64 + half * 32 + (l >> 3) * 8 + (l & 3) * 2 + ((l >> 2) & 1)] = c[0];
}

// What a lane needs of the gate table for one 16x16 block of rows w and columns b: G and beta of its rows and columns.
struct QlgBlock {
  float rows[2];
  float2 cols[2];
  int below;  // how far its first element lies below the diagonal

  QLA_DEVICE QlgBlock(const float* tab, int w, int b, int l) {
    int r = w * 16 + (l >> 2), c = b * 16 + (l & 3) * 2;
    rows[0] = tab[QLG_G + r], rows[1] = tab[QLG_G + r + 8];
    cols[0] = *(const float2*)(tab + QLG_G + c), cols[1] = *(const float2*)(tab + QLG_G + c + 8);
    below = r - c;
  }
  // Elements are numbered as in an accumulator: pair, row half, column half.
  QLA_DEVICE int depth(int i) const { return below + ((i >> 1) & 1) * 8 - (i >> 2) * 8 - (i & 1); }
  // The decay between the element's tokens, 0 above the diagonal.
  QLA_DEVICE float decay(int i) const {
    float2 c = cols[i >> 2];
    return depth(i) >= 0 ? qla_exp2(rows[(i >> 1) & 1] - (i & 1 ? c.y : c.x)) : 0.f;
  }
};

// The pairs of a 16x16 block that ldmatrix has loaded, in the order of an accumulator.
QLA_DEVICE void qlg_unpack_block(const unsigned* x, float* y) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 p = qla_unpack(x[i]);
    y[2 * i] = p.x, y[2 * i + 1] = p.y;
  }
}

QLA_DEVICE void qlg_beta_columns(const float* tab, int b, int l, float* beta) {
  float2 lo = *(const float2*)(tab + QLG_BETA + b * 16 + (l & 3) * 2), hi = *(const float2*)(tab + QLG_BETA + b * 16 + (l & 3) * 2 + 8);
  beta[0] = lo.x, beta[1] = lo.y, beta[2] = hi.x, beta[3] = hi.y;
}

// T = D o A beta and P = scale D o (Q K^T), as tiles.
QLA_DEVICE void qlg_factors(unsigned tab_at, unsigned a, unsigned qk, float scale, unsigned t, unsigned p) {
  const float* tab = qlg_floats(tab_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int b = half * 2 + j;
    unsigned at = qla_block(0, l, w, b), to[4] = {0, 0, 0, 0}, po[4] = {0, 0, 0, 0};
    if (b <= w) {
      QlgBlock block(tab, w, b, l);
      unsigned x[4];
      float y[8], z[8], beta[4];
      qla_ldmatrix(a + at, x);
      qlg_unpack_block(x, y);
      qla_ldmatrix(qk + at, x);
      qlg_unpack_block(x, z);
      qlg_beta_columns(tab, b, l, beta);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float d = block.decay(i);
        y[i] *= d * beta[(i >> 2) * 2 + (i & 1)];
        z[i] *= d * scale;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] = qla_pack(y[2 * i], y[2 * i + 1]), po[i] = qla_pack(z[2 * i], z[2 * i + 1]);
    }
    qla_stmatrix(t + at, to[0], to[1], to[2], to[3]);
    qla_stmatrix(p + at, po[0], po[1], po[2], po[3]);
  }
}

// From dT and dP: dt becomes E = D o A o dT, dp becomes E beta + P o dP below the diagonal, dp_sum has scale D o dP more, and
// da is the transpose of D o dT beta below the diagonal, as a tile.
QLA_DEVICE void qlg_inner(unsigned tab_at, unsigned a, unsigned qk, float scale, float* dt, float* dp, float* dp_sum, unsigned da) {
  const float* tab = qlg_floats(tab_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int b = half * 2 + j;
    unsigned at = qla_block(0, l, w, b), x[4];
    float *e = dt + 8 * j, *m = dp + 8 * j, *sum = dp_sum + 8 * j, y[8], z[8], beta[4];
    unsigned to[4] = {0, 0, 0, 0};
    if (b <= w) {
      QlgBlock block(tab, w, b, l);
      qla_ldmatrix(a + at, x);
      qlg_unpack_block(x, y);
      qla_ldmatrix(qk + at, x);
      qlg_unpack_block(x, z);
      qlg_beta_columns(tab, b, l, beta);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float d = block.decay(i), bt = beta[(i >> 2) * 2 + (i & 1)];
        float t = e[i] * d, s = m[i] * (d * scale);
        sum[i] += s;
        e[i] = t * y[i];
        m[i] = block.depth(i) > 0 ? e[i] * bt + s * z[i] : 0.f;
        y[i] = block.depth(i) > 0 ? t * bt : 0.f;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] = qla_pack(y[2 * i], y[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) e[i] = m[i] = 0.f;
    }
    qla_stmatrix_t(qla_block(da, l, b, w), to[0], to[2], to[1], to[3]);
  }
}

// From A^T (D o dT beta) A^T: dl_sum has beta dL more, and sums the rows of dL o (K K^T).
QLA_DEVICE void qlg_inverse(unsigned tab_at, unsigned kk, const float* acc, float* dl_sum, float* sums) {
  const float* tab = qlg_floats(tab_at);
  int thread = qlg_thread(), w = (thread >> 5) & 3, half = thread >> 7, l = thread & 31, r = w * 16 + (l >> 2);
  float beta[2] = {tab[QLG_BETA + r], tab[QLG_BETA + r + 8]};
  sums[0] = sums[1] = 0.f;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int b = half * 2 + j, below = r - b * 16 - (l & 3) * 2;
    if (b <= w) {
      unsigned x[4];
      float y[8];
      qla_ldmatrix(qla_block(kk, l, w, b), x);
      qlg_unpack_block(x, y);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int h = (i >> 1) & 1;
        float dl = below + h * 8 - (i >> 2) * 8 - (i & 1) > 0 ? -acc[8 * j + i] : 0.f;
        dl_sum[8 * j + i] += beta[h] * dl;
        sums[h] += dl * y[i];
      }
    }
  }
}
