// What one warp does for one value head of a chunk: the inverse A, and T and P^T in one tile. Included behind
// kernels/common/chunk_tile.cuh, whose fragments and mma.sync it uses.
//
//     A = (I + L)^-1,  L = strict_lower(beta K K^T)          T = r_k decay o A o beta          P = scale decay o (Q K^T)
//
// (r_k: where the L2 norm of k is asked for, its reciprocal; 1 else.)
//
// By blocks of 16: D_i the inverses of the diagonal blocks of I + L, A_ii = D_i, and along a block row from its diagonal to the left
//
//     A_ij = -(A_ii L_ij + A_i,i-1 L_i-1,j + ... + A_i,j+1 L_j+1,j) D_j
//
// as fp16 mma.sync with fp32 accumulation. What is made is always a left operand, whose registers are an accumulator's; right
// operands are L, straight from the products in shared memory, and D. So a block row needs nothing of another, and of another warp
// only D, where warps share a head. D is made by forward substitution in fp32: it keeps keys that repeat exact, where a power series cancels.
//
// Shared by the warps of a CTA, fp32:
//     norm  [2, 64]        r_k and scale r_q
//     raw   [64, QLA_RAW]  in place of K and Q once their products are done: q_i . k_j on and below the diagonal; above it k_i . k_j;
//                          behind the columns k_i . k_i (keys of length 1 where the L2 norm is asked for)
// By the warps of a head:
//     tab   its gate table (kernels/common/gates.py)
//     dt    D^T of the four blocks in fp16, each as its four 8x8 quarters of 128 bytes, row by row
// Each warp's own, behind room for a dt:
//     rows  16 rows of the tile on their way to memory, swizzled
#pragma once

// A row length that keeps a warp's reads of 8 rows off each other's banks.
#define QLA_RAW 72
#define QLA_SQUARE 64

// g (0 where there is none) and beta of this lane's two tokens, from the addresses of a chunk's first token and the bytes to the next
// one; 0 from token `valid` on. The four loads are on their way before one is waited for.
QLA_DEVICE void qla_read_gates(float* gates, float* betas, long long g, int g_type, long long g_step, long long beta, int beta_type,
                               long long beta_step, int valid, int lane) {
  long long from[4];
  unsigned word[4];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int token = min(2 * lane + j, valid - 1);
    from[j] = (g ? g : beta) + token * g_step, from[2 + j] = beta + token * beta_step;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = qla_ask(from[i] & ~3ll);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    bool inside = 2 * lane + j < valid;
    gates[j] = inside && g ? qla_number(word[j], from[j], g_type) : 0.f;
    betas[j] = inside ? qla_number(word[2 + j], from[2 + j], beta_type) : 0.f;
  }
}

// The products from the accumulators of the warpgroup (rows: kk keys, qk queries) to raw, those of keys with their norms, which
// come as reciprocals.
QLA_DEVICE void qla_store_products(const float* kk, const float* qk, const float* norm, float* raw) {
  int thread = qla_thread(), w = thread >> 5, l = thread & 31, g = l >> 2, t = (l & 3) * 2;
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int q = 0; q < 4; q++) {
      int i = 8 * j + 2 * q, row = g + 8 * (q & 1), col = t + 8 * (q >> 1);
      float2 columns = *(const float2*)(norm + 16 * j + col);
      float r = norm[16 * w + row], x = kk[i] * (r * columns.x), y = kk[i + 1] * (r * columns.y);
      bool above = j > w || (j == w && col > row), next = j > w || (j == w && col + 1 > row);
      float* to = raw + (16 * w + row) * QLA_RAW;
      *(float2*)(to + 16 * j + col) = make_float2(above ? x : qk[i], next ? y : qk[i + 1]);
      if (j == w && (col | 1) == (row | 1)) to[QLA_SQUARE] = col == row ? x : y;
    }
}

// log2 of the most that the chunk leaves of a state: of a token, its decay times |I - beta k k^T|, which is |1 - beta |k|^2| or 1.
QLA_DEVICE float qla_reach(const float* tab, const float* raw, int l) {
  float growth = 0.f;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int token = 2 * l + e;
    float x = fabsf(1.f - tab[QLA_BETA + token] * raw[token * QLA_RAW + QLA_SQUARE]);
    growth += x <= 1.f ? 0.f : __log2f(x);  // a NaN stays one: nothing behind it is dropped
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) growth += __shfl_xor_sync(0xffffffffu, growth, i);
  return tab[QLA_G + 63] + growth;
}

// The 8x8 quarters of D^T below its diagonal, which nothing writes.
QLA_DEVICE void qla_clear_quarters(const float* dt_, int l) {
  const unsigned dt = qla_smem(dt_);
  qla_store4(dt + (l >> 3) * 512 + 256 + (l & 7) * 16, 0, 0, 0, 0);
}

// D^T of the diagonal blocks of PAIRS pairs from `first` on. D = {{D1, 0}, {-D2 L21 D1, D2}}, D1 and D2 by forward substitution: a lane
// takes column l % 8 of one of the four of a pair.
template <int PAIRS>
QLA_DEVICE void qla_diagonal_inverses(const float* tab, const float* raw, unsigned dt, int first, int l) {
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    int b = 2 * (first + p) + (l >> 4), h = (l >> 3) & 1, c = l & 7;
    const float *own = raw + (b * 16 + 8 * h) * (QLA_RAW + 1);
    float s[8], u[8] = {0, 0, 0, 0, 0, 0, 0, 0}, beta[8];
    *(float4*)beta = *(const float4*)(tab + QLA_BETA + 16 * b + 8 * h);
    *(float4*)(beta + 4) = *(const float4*)(tab + QLA_BETA + 16 * b + 8 * h + 4);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      s[k] = fmaf(-beta[k], u[k], k == c ? 1.f : 0.f);
#pragma unroll
      for (int q = (k + 1) / 4; q < 2; q++) {
        float4 x = *(const float4*)(own + k * QLA_RAW + 4 * q);
        if (4 * q > k) u[4 * q] = fmaf(x.x, s[k], u[4 * q]);
        if (4 * q + 1 > k) u[4 * q + 1] = fmaf(x.y, s[k], u[4 * q + 1]);
        if (4 * q + 2 > k) u[4 * q + 2] = fmaf(x.z, s[k], u[4 * q + 2]);
        if (4 * q + 3 > k) u[4 * q + 3] = fmaf(x.w, s[k], u[4 * q + 3]);
      }
    }
    qla_store4(dt + b * 512 + h * 384 + c * 16, qla_half2(s[0], s[1]), qla_half2(s[2], s[3]), qla_half2(s[4], s[5]), qla_half2(s[6], s[7]));
  }
  __syncwarp();
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    // Two blocks' quarters are the diagonal of one 16x16 operand. (Four are read and written, each twice.)
    int i = 2 * (first + p), g = l >> 2, t = (l & 3) * 2;
    unsigned place = dt + (i + ((l >> 3) & 1)) * 512 + (l & 7) * 16, d1[4], d2[4], l21[2];
    qla_ldmatrix(place, d1);
    qla_ldmatrix_t(place + 384, d2);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float2 y = *(const float2*)(raw + (16 * (i + e) + g) * QLA_RAW + 16 * (i + e) + 8 + t);
      float2 beta = *(const float2*)(tab + QLA_BETA + 16 * (i + e) + 8 + t);
      l21[e] = qla_half2(y.x * beta.x, y.y * beta.y);
    }
    float z[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
    unsigned left[4] = {d2[0], 0, 0, d2[1]};
    qla_mma(z, left, l21[0], l21[1]);
    left[0] = qla_half2(-z[0], -z[1]), left[3] = qla_half2(-z[2], -z[3]);
    qla_mma(y, left, d1[0], d1[1]);
    unsigned x0 = qla_half2(y[0], y[1]), x1 = qla_half2(y[2], y[3]);
    qla_stmatrix_t(place + 128, x0, x1, x0, x1);
  }
  __syncwarp();
}

// Block (i, j) of L, below the diagonal, as a right operand: beta_row k_row . k_column.
QLA_DEVICE void qla_lower_block(const float* tab, const float* raw, int i, int j, int g, int t, unsigned* b) {
  const float *x = raw + (16 * j + g) * QLA_RAW + 16 * i + t, *beta = tab + QLA_BETA + 16 * i + t;
  float2 b0 = *(const float2*)beta, b1 = *(const float2*)(beta + 8);
#pragma unroll
  for (int h = 0; h < 2; h++, x += 8 * QLA_RAW) {
    float2 y0 = *(const float2*)x, y1 = *(const float2*)(x + 8);
    b[2 * h] = qla_half2(y0.x * b0.x, y0.y * b0.y), b[2 * h + 1] = qla_half2(y1.x * b1.x, y1.y * b1.y);
  }
}

// 16 rows of a tile from shared to global memory, the first `valid` of them.
QLA_DEVICE void qla_flush_rows(unsigned rows, long long to, int stride, int valid, int l) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = 4 * i + (l >> 3), col = l & 7;
    uint4 x = qla_load4(rows + row * 128 + ((col ^ (row & 7)) << 4));
    if (row < valid) *(uint4*)(to + (long long)row * stride + col * 16) = x;
  }
  __syncwarp();
}

// Block rows `part`, part + split, ... (in the order 3, 2, 0, 1) of a value head: T below the diagonal and P^T on and above it go to
// `tile`, and, where A_address is not 0, A's `valid` rows there, A_stride bytes apart. (T's diagonal is beta r_k, which the walk has.)
// Warps that share a head make its D together, and meet once: with split > 1 all warps of a CTA call this.
QLA_DEVICE void qla_chunk_head(const float* tab, const float* norm, const float* raw, int part, int split, void* tile_,
                               long long A_address, int A_stride, int valid) {
  int w = qla_thread() >> 5, l = qla_thread() & 31, g = l >> 2, t = (l & 3) * 2;
  unsigned own = qla_smem(raw + 64 * QLA_RAW), dt = own + (w - part) * 4096, rows = own + w * 4096 + 2048;
  long long tile = (long long)tile_;
  if (split == 1) {
    qla_diagonal_inverses<2>(tab, raw, dt, 0, l);
  } else {
    if (part < 2) qla_diagonal_inverses<1>(tab, raw, dt, part, l);
    __syncthreads();
  }
#pragma unroll 1
  for (int n = part; n < 4; n += split) {
    int i = n < 2 ? 3 - n : n - 2, r = 16 * i + g, c = 16 * i + t;
    unsigned a[4][4];  // A_ii, A_i,i-1, ...
    qla_ldmatrix_t(dt + i * 512 + l * 16, a[0]);
    {
      // The diagonal block: below its diagonal T's, on and above it P^T's, with one exponential of a number that is at most 0.
      float2 d[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        int row = r + 8 * (q & 1), col = c + 8 * (q >> 1);
        float y[2];
        float2 f = __half22float2(*reinterpret_cast<__half2*>(&a[0][q]));
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float G_row = tab[QLA_G + row], G_col = tab[QLA_G + col + e];
          bool below = q == 1 || (q != 2 && t + e < g);
          float x = below ? (e ? f.y : f.x) * (tab[QLA_BETA + col + e] * norm[row]) : raw[(col + e) * QLA_RAW + row] * norm[64 + col + e];
          y[e] = x * qla_exp2(below ? G_row - G_col : G_col - G_row);
        }
        d[q] = make_float2(y[0], y[1]);
      }
      qla_stmatrix(qla_block(rows, l, 0, i), qla_pack(d[0].x, d[0].y), qla_pack(d[1].x, d[1].y), qla_pack(d[2].x, d[2].y), qla_pack(d[3].x, d[3].y));
    }
    // Below the diagonal: A along the row, and T.
    const float *col = tab + (i == 3 ? QLA_COL3 : i == 2 ? QLA_COL2 : QLA_COL1) + t, *beta = tab + QLA_BETA + t;
    float e0 = -tab[QLA_ROW + r] * norm[r], e1 = -tab[QLA_ROW + r + 8] * norm[r + 8];
#pragma unroll
    for (int m = 1; m < 4; m++)
      if (m <= i) {
        float z[8], y[8];
        unsigned b[4];
        qla_clear_tile(z), qla_clear_tile(y);
#pragma unroll
        for (int p = 0; p < m; p++) {
          qla_lower_block(tab, raw, i - p, i - m, g, t, b);
          qla_mma16(z, a[p], b);
        }
        qla_half2_tile(z, a[m]);
        qla_ldmatrix(dt + (i - m) * 512 + l * 16, b);
        qla_mma16(y, a[m], b);
        float2 c0 = *(const float2*)(col + 16 * (i - m)), c1 = *(const float2*)(col + 16 * (i - m) + 8);
        float2 b0 = *(const float2*)(beta + 16 * (i - m)), b1 = *(const float2*)(beta + 16 * (i - m) + 8);
        c0.x *= b0.x, c0.y *= b0.y, c1.x *= b1.x, c1.y *= b1.y;
        qla_stmatrix(qla_block(rows, l, 0, i - m), qla_pack(y[0] * (e0 * c0.x), y[1] * (e0 * c0.y)), qla_pack(y[2] * (e1 * c0.x), y[3] * (e1 * c0.y)),
                     qla_pack(y[4] * (e0 * c1.x), y[5] * (e0 * c1.y)), qla_pack(y[6] * (e1 * c1.x), y[7] * (e1 * c1.y)));
        qla_half2_tile(y, a[m]);
        qla_negate(a[m], a[m]);
      }
    // Above it: P^T, from its transpose.
#pragma unroll
    for (int j = 1; j < 4; j++)
      if (j > i) {
        const float *x = raw + (16 * j + g) * QLA_RAW + c, *key = tab + (j == 3 ? QLA_COL3 : j == 2 ? QLA_COL2 : QLA_COL1) + c;
        const float *query = tab + QLA_ROW + 16 * j + g, *scale = norm + 64 + 16 * j + g;
        float2 k0 = *(const float2*)key, k1 = *(const float2*)(key + 8);
        float q0 = query[0] * scale[0], q1 = query[8] * scale[8];
        float2 x00 = *(const float2*)x, x01 = *(const float2*)(x + 8);
        float2 x10 = *(const float2*)(x + 8 * QLA_RAW), x11 = *(const float2*)(x + 8 * QLA_RAW + 8);
        qla_stmatrix_t(qla_block(rows, l, 0, j), qla_pack(x00.x * (q0 * k0.x), x00.y * (q0 * k0.y)), qla_pack(x01.x * (q0 * k1.x), x01.y * (q0 * k1.y)),
                       qla_pack(x10.x * (q1 * k0.x), x10.y * (q1 * k0.y)), qla_pack(x11.x * (q1 * k1.x), x11.y * (q1 * k1.y)));
      }
    qla_flush_rows(rows, tile + i * 2048, 128, 16, l);
    if (A_address) {
#pragma unroll
      for (int m = 0; m < 4; m++)
        if (m <= i) {
          float2 y[4];
#pragma unroll
          for (int q = 0; q < 4; q++) y[q] = __half22float2(*reinterpret_cast<__half2*>(&a[m][q]));
          qla_stmatrix(qla_block(rows, l, 0, i - m), qla_pack(y[0].x, y[0].y), qla_pack(y[1].x, y[1].y), qla_pack(y[2].x, y[2].y), qla_pack(y[3].x, y[3].y));
        }
      for (int j = i + 1; j < 4; j++) qla_stmatrix(qla_block(rows, l, 0, j), 0, 0, 0, 0);
      qla_flush_rows(rows, A_address + (long long)(16 * i) * A_stride, A_stride, valid - 16 * i, l);
    }
  }
}
