// Pieces of a 64-token chunk that TileLang has no word for: tiles that are transposed on their way, and the 64x64 triangular inverse on
// mma.sync and register fragments. Everything else in the kernels is TileLang; PTX is in ptx.cuh, which comes in front. The includer
// defines the QLA_* rows of the gate table (kernels/common/gates.py).
//
// Layouts. A fragment is the register image that wgmma and mma.sync share: in each 8x8 tile a lane holds
// row lane / 4, columns 2 (lane % 4) and the next; a 16-row operand is {rows 0-7, rows 8-15} x {cols 0-7, cols 8-15}.
// A 64x64 16-bit tile in shared memory has rows of 128 bytes under the 128-byte swizzle.
#pragma once

// d += a b for one 16x16 tile.
QLA_DEVICE void qla_mma16(float* d, const unsigned* a, const unsigned* b) {
  qla_mma(d, a, b[0], b[1]);
  qla_mma(d + 4, a, b[2], b[3]);
}

// This lane's row address for an x4 matrix access to the 16x16 block (bi, bj) of a 64x64 tile.
QLA_DEVICE unsigned qla_block(unsigned tile, int lane, int bi, int bj) {
  int row = lane & 15, col = bj * 2 + (lane >> 4);
  return tile + (bi * 16 + row) * 128 + ((col ^ (row & 7)) << 4);
}

// ---------------------------------------------------------------------------------------------------
// V-first tiles: a state warpgroup holds [64 values, 64 tokens], memory holds [64 tokens, 64 values].

// w = v^T + factor * ks, a factor per token: what the state predicts, subtracted from what came. v: this warpgroup's 64 columns.
QLA_DEVICE void qla_residual(const float* ks, const float* factor, const void* v, void* w_) {
  unsigned* w = (unsigned*)w_;
  int thread = threadIdx.x & 127, l = thread & 31, t = (l & 3) * 2, col = (thread >> 5) * 2 + ((l >> 3) & 1), row = (l & 7) + (l >> 4) * 8;
  unsigned base = qla_smem(v);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned x[4];
    qla_ldmatrix_t(base + (j * 16 + row) * 128 + ((col ^ (row & 7)) << 4), x);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 c = *(const float2*)(factor + j * 16 + n * 8 + t);
      float2 lo = qla_unpack(x[2 * n]), hi = qla_unpack(x[2 * n + 1]);
      const float* s = ks + 8 * j + 4 * n;
      w[4 * j + 2 * n] = qla_pack(fmaf(s[0], c.x, lo.x), fmaf(s[1], c.y, lo.y));
      w[4 * j + 2 * n + 1] = qla_pack(fmaf(s[2], c.x, hi.x), fmaf(s[3], c.y, hi.y));
    }
  }
}

// A [64, 64] fp32 accumulator, packed; and its transpose stored as [64 tokens, 64 values].
QLA_DEVICE void qla_pack_tile(const float* acc, unsigned* o) {
#pragma unroll
  for (int i = 0; i < 16; i++) o[i] = qla_pack(acc[2 * i], acc[2 * i + 1]);
}

QLA_DEVICE void qla_store_transposed(const unsigned* o, void* tile) {
  int thread = threadIdx.x & 127, l = thread & 31, col = (thread >> 5) * 2 + ((l >> 3) & 1), row = (l & 7) + (l >> 4) * 8;
  unsigned base = qla_smem(tile);
#pragma unroll
  for (int j = 0; j < 4; j++)
    qla_stmatrix_t(base + (j * 16 + row) * 128 + ((col ^ (row & 7)) << 4), o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
}

// ---------------------------------------------------------------------------------------------------
// T and P^T in one tile: T below the diagonal, P^T on and above it.

// One warp: the tile becomes T, with `diagonal`; P^T goes to p, whose 8x8 blocks below the diagonal are zero and stay it.
QLA_DEVICE void qla_split_tile(void* tile_, void* p_, const float* diagonal) {
  int l = qla_thread() & 31;
  unsigned tile = qla_smem(tile_), p = qla_smem(p_);
#pragma unroll
  for (int first = 0; first < 14; first += 4) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = (first + i) * 4 + (l >> 3), at = row * 128 + (((l & 7) ^ (row & 7)) << 4);
      if (first + i < 14 && (l & 7) > (first + i) / 2)
        x[i] = qla_load4(tile + at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = (first + i) * 4 + (l >> 3), at = row * 128 + (((l & 7) ^ (row & 7)) << 4);
      if (first + i < 14 && (l & 7) > (first + i) / 2) {
        qla_store4(p + at, x[i].x, x[i].y, x[i].z, x[i].w);
        qla_store4(tile + at, 0, 0, 0, 0);
      }
    }
  }
  // The 8x8 blocks on the diagonal, two rows a lane.
#pragma unroll
  for (int row = l; row < 64; row += 32) {
    int m = row & 7, at = row * 128 + (((row >> 3) ^ m) << 4);
    uint4 both = qla_load4(tile + at);
    unsigned x[4] = {both.x, both.y, both.z, both.w}, y[4], d = qla_pack(diagonal[row], 0.f) << (m & 1) * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned below = m > 2 * j + 1 ? 0xffffffffu : m == 2 * j + 1 ? 0xffffu : 0u;
      y[j] = x[j] & ~below;
      x[j] = (x[j] & below) | (m >> 1 == j ? d : 0u);
    }
    qla_store4(p + at, y[0], y[1], y[2], y[3]);
    qla_store4(tile + at, x[0], x[1], x[2], x[3]);
  }
}

// ---------------------------------------------------------------------------------------------------
// The triangular inverse. A = (I + L)^-1 with L = strict_lower(beta K K^T), 64x64, by one warpgroup: warp w owns the
// 16 rows of block row w. With D the inverses of the four 16x16 diagonal blocks and N = D L below them,
//     A = (I + N)^-1 D = (I - N + N^2 - N^3) D          (N is block-nilpotent: N^4 = 0)
// D is by forward substitution in fp32: it keeps keys that repeat exact, where a power series cancels. The block
// products are three dependent mma rounds for the longest row (a round waits for the tensor cores behind wgmma).

// The diagonal block of this warp's rows of a 64x64 accumulator.
QLA_DEVICE void qla_own_block(const float* acc, int w, float* own) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float lo = w & 1 ? acc[8 + i] : acc[i], hi = w & 1 ? acc[24 + i] : acc[16 + i];
    own[i] = w & 2 ? hi : lo;
  }
}

// A 16x16 accumulator as an fp16 operand, and back; the negative of an operand.
QLA_DEVICE void qla_half2_tile(const float* z, unsigned* a) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = qla_half2(z[2 * i], z[2 * i + 1]);
}

QLA_DEVICE void qla_clear_tile(float* z) {
#pragma unroll
  for (int i = 0; i < 8; i++) z[i] = 0.f;
}

QLA_DEVICE void qla_float_tile(const unsigned* a, float* z) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 y = __half22float2(*reinterpret_cast<const __half2*>(&a[i]));
    z[2 * i] = y.x, z[2 * i + 1] = y.y;
  }
}

QLA_DEVICE void qla_negate(const unsigned* a, unsigned* m) {
#pragma unroll
  for (int i = 0; i < 4; i++) m[i] = a[i] ^ 0x80008000u;
}

// Own rows of L: blocks left of the diagonal as fp16 into x; of the diagonal block the strict lower triangles of its two diagonal
// 8x8 quarters as fp32 into diag (2 x 64 floats, by columns), and the quarter below as the operand that is returned.
QLA_DEVICE unsigned qla_store_lower(const float* kk, float b0, float b1, unsigned x, float* diag, int w, int l) {
  int g = l >> 2, t = (l & 3) * 2;
  float own[8];
  qla_own_block(kk, w, own);
#pragma unroll
  for (int j = 0; j < 3; j++) {
    const float* y = kk + 8 * j;
    if (j < w)
      qla_stmatrix(qla_block(x, l, w, j), qla_half2(y[0] * b0, y[1] * b0), qla_half2(y[2] * b1, y[3] * b1),
                   qla_half2(y[4] * b0, y[5] * b0), qla_half2(y[6] * b1, y[7] * b1));
  }
  float* column = diag + 8 * t + g;
  if (t < g) column[0] = own[0] * b0, column[64] = own[6] * b1;
  if (t + 1 < g) column[8] = own[1] * b0, column[72] = own[7] * b1;
  return qla_half2(own[2] * b1, own[3] * b1);
}

// D^T, D the inverse of the 16x16 unit lower triangle, as fp16 into block (w, w) of x. The inverses D1 and D2 of its diagonal quarters
// by forward substitution in fp32, lane c (and c + 16) column c, column by column, so that the updates of a step do not wait for
// each other; below them -D2 L21 D1, L21 the operand from qla_store_lower.
QLA_DEVICE void qla_diag_inverse(const float* diag, unsigned l21, unsigned x, int w, int l) {
  int c = l & 7, second = (l >> 3) & 1;
  float s[8];
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = i == c ? 1.f : 0.f;
#pragma unroll
  for (int k = 0; k < 7; k++) {
#pragma unroll
    for (int q = (k + 1) / 4; q < 2; q++) {
      float4 p = *(const float4*)(diag + 64 * second + 8 * k + 4 * q);
      if (4 * q > k) s[4 * q] -= p.x * s[k];
      if (4 * q + 1 > k) s[4 * q + 1] -= p.y * s[k];
      if (4 * q + 2 > k) s[4 * q + 2] -= p.z * s[k];
      s[4 * q + 3] -= p.w * s[k];
    }
  }
  // Rows of D^T: zeros left of its second half, whose quarter right of the first half comes last.
  unsigned row = x + (w * 16 + (l & 15)) * 128, left = row + (((2 * w) ^ (l & 7)) << 4), right = row + (((2 * w + 1) ^ (l & 7)) << 4);
  unsigned h0 = qla_half2(s[0], s[1]), h1 = qla_half2(s[2], s[3]), h2 = qla_half2(s[4], s[5]), h3 = qla_half2(s[6], s[7]);
  if (l < 16) {
    qla_store4(second ? right : left, h0, h1, h2, h3);
    if (second) qla_store4(left, 0, 0, 0, 0);
  }
  __syncwarp();
  unsigned d1, d2[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0}, b;
  float z[4] = {0, 0, 0, 0};
  d1 = qla_ldmatrix1(left);  // rows 0 to 7 from lanes 0 to 7
  d2[0] = qla_ldmatrix1_t(x + (w * 16 + 8 + c) * 128 + (((2 * w + 1) ^ c) << 4));
  b = qla_transpose(l21);
  qla_mma(z, d2, b, 0);
  y[0] = qla_half2(-z[0], -z[1]);
  z[0] = z[1] = 0.f;
  qla_mma(z, y, d1, 0);
  qla_stmatrix1_t(right, qla_half2(z[0], z[1]));
}

// Own rows of A from the own rows of L and the other warps' N and D; T = decay * A * beta, the lower triangle of tile; with keep, A
// itself, the lower triangle of x. One code for all four warps, with branches a warp takes as one: four unrolled copies overflow
// the instruction cache.
QLA_DEVICE void qla_rows(const float* tab, unsigned x, unsigned tile, int keep) {
  int thread = qla_thread(), w = thread >> 5, l = thread & 31, g = l >> 2, t = (l & 3) * 2, r = w * 16 + g, c = w * 16 + t;
  unsigned d[4], n[3][4], y[4];
  float g0 = tab[QLA_G + r], g1 = tab[QLA_G + r + 8];
  float2 x0 = *(const float2*)(tab + QLA_G + c), x1 = *(const float2*)(tab + QLA_G + c + 8);
  float2 b0 = *(const float2*)(tab + QLA_BETA + c), b1 = *(const float2*)(tab + QLA_BETA + c + 8);
  qla_ldmatrix_t(qla_block(x, l, w, w), y);
  d[0] = y[0], d[1] = y[2], d[2] = y[1], d[3] = y[3];
  float z[3][8];
  if (w) {
    // Blocks at or right of the diagonal come out as garbage that nothing uses.
    unsigned lower[3][4];
#pragma unroll
    for (int j = 0; j < 3; j++) qla_ldmatrix_t(qla_block(x, l, w, j), lower[j]);
#pragma unroll
    for (int j = 0; j < 3; j++) {
      qla_clear_tile(z[j]);
      qla_mma16(z[j], d, lower[j]);
    }
  }
  // Meanwhile T's diagonal block: D * beta * exp2(g_row - g_col) on and below the diagonal.
  float f[8];
  qla_float_tile(d, f);
  qla_stmatrix(qla_block(tile, l, w, w),
               qla_pack(t <= g ? f[0] * b0.x * qla_exp2(g0 - x0.x) : 0.f, t + 1 <= g ? f[1] * b0.y * qla_exp2(g0 - x0.y) : 0.f),
               qla_pack(f[2] * b0.x * qla_exp2(g1 - x0.x), f[3] * b0.y * qla_exp2(g1 - x0.y)), 0,
               qla_pack(t <= g ? f[6] * b1.x * qla_exp2(g1 - x1.x) : 0.f, t + 1 <= g ? f[7] * b1.y * qla_exp2(g1 - x1.y) : 0.f));
  if (w) {
#pragma unroll
    for (int j = 0; j < 3; j++) {
      qla_half2_tile(z[j], n[j]);
      if (j < w) qla_stmatrix(qla_block(x, l, w, j), n[j][0], n[j][1], n[j][2], n[j][3]);
    }
  }
  qla_sync();
  if (w == 0) {
    if (keep) {
      qla_sync();
      qla_stmatrix(qla_block(x, l, 0, 0), qla_pack(f[0], f[1]), qla_pack(f[2], f[3]), 0, qla_pack(f[6], f[7]));
    }
    return;
  }
  if (w > 1) {
    // n becomes N - N^2 + N^3, which is -(I + N)^-1 off the diagonal.
    unsigned n10[4], n20[4], n21[4], m[4];
    qla_ldmatrix_t(qla_block(x, l, 1, 0), n10);
    qla_float_tile(n[0], z[0]);
    qla_clear_tile(z[1]);
    if (w == 3) {
      qla_ldmatrix_t(qla_block(x, l, 2, 1), n21);
      qla_ldmatrix_t(qla_block(x, l, 2, 0), n20);
      qla_mma16(z[1], n[2], n21);
      qla_negate(n[2], m);
      qla_mma16(z[0], m, n20);
    }
    qla_negate(n[1], m);
    qla_mma16(z[0], m, n10);
    if (w == 3) {
      qla_half2_tile(z[1], m);
      qla_mma16(z[0], m, n10);
      qla_float_tile(n[1], f);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] -= z[1][i];
      qla_half2_tile(f, n[1]);
    }
    qla_half2_tile(z[0], n[0]);
  }
  unsigned diag[3][4];
#pragma unroll
  for (int j = 0; j < 3; j++) {
    qla_ldmatrix(qla_block(x, l, j, j), y);
    diag[j][0] = y[0], diag[j][1] = y[2], diag[j][2] = y[1], diag[j][3] = y[3];
  }
#pragma unroll
  for (int j = 0; j < 3; j++) {
    qla_clear_tile(z[j]);
    qla_mma16(z[j], n[j], diag[j]);
  }
  if (keep) {
    qla_sync();  // N and D have been read
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (j < w)
        qla_stmatrix(qla_block(x, l, w, j), qla_pack(-z[j][0], -z[j][1]), qla_pack(-z[j][2], -z[j][3]), qla_pack(-z[j][4], -z[j][5]),
                     qla_pack(-z[j][6], -z[j][7]));
    qla_float_tile(d, f);
    qla_stmatrix(qla_block(x, l, w, w), qla_pack(f[0], f[1]), qla_pack(f[2], f[3]), qla_pack(f[4], f[5]), qla_pack(f[6], f[7]));
  }
  const float *columns = tab + (w == 3 ? QLA_COL3 : w == 2 ? QLA_COL2 : QLA_COL1) + t, *beta = tab + QLA_BETA + t;
  float e0 = -tab[QLA_ROW + r], e1 = -tab[QLA_ROW + r + 8];
#pragma unroll
  for (int j = 0; j < 3; j++) {
    float2 c0 = *(const float2*)(columns + 16 * j), c1 = *(const float2*)(columns + 16 * j + 8);
    b0 = *(const float2*)(beta + 16 * j), b1 = *(const float2*)(beta + 16 * j + 8);
    c0.x *= b0.x, c0.y *= b0.y, c1.x *= b1.x, c1.y *= b1.y;
    n[j][0] = qla_pack(z[j][0] * (e0 * c0.x), z[j][1] * (e0 * c0.y)), n[j][1] = qla_pack(z[j][2] * (e1 * c0.x), z[j][3] * (e1 * c0.y));
    n[j][2] = qla_pack(z[j][4] * (e0 * c1.x), z[j][5] * (e0 * c1.y)), n[j][3] = qla_pack(z[j][6] * (e1 * c1.x), z[j][7] * (e1 * c1.y));
  }
#pragma unroll
  for (int j = 0; j < 3; j++)
    if (j < w) qla_stmatrix(qla_block(tile, l, w, j), n[j][0], n[j][1], n[j][2], n[j][3]);
}

// The number at an address, of run-time type (0: fp32, 1: bf16, 2: fp16), from the word that holds it. Without branches: the compiler
// would make a copy for each type of all that follows.
QLA_DEVICE unsigned qla_word(long long address) { return *(const unsigned*)(address & ~3ll); }

QLA_DEVICE float qla_number(unsigned word, long long address, int type) {
  unsigned short half = address & 2 ? word >> 16 : word;
  float x = __uint_as_float((unsigned)half << 16), y = __half2float(__ushort_as_half(half));
  return type == 0 ? __uint_as_float(word) : type == 1 ? x : y;
}

QLA_DEVICE float qla_load(long long address, int type) { return qla_number(qla_word(address), address, type); }
