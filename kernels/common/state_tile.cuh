// Pieces of the chunk state passes (chunk_states.py) on top of chunk_tile.cuh: operand fragments made from 16-bit tiles, and
// fragments stored as tiles. A tile of more than 64 columns is a row of 64-column panels of 8 KB.
// The includer defines the QLS_* rows of the passes' gate table.

// Transposed values: 64 tokens x 64 values in memory, [64 values, 64 tokens] in registers.
QLA_DEVICE void qls_transposed(const void* tile, int j, unsigned* x) {
  int thread = threadIdx.x & 127, l = thread & 31, col = (thread >> 5) * 2 + ((l >> 3) & 1), row = j * 16 + (l & 7) + (l >> 4) * 8;
  qla_ldmatrix_t(qla_smem(tile) + row * 128 + ((col ^ (row & 7)) << 4), x);
}

// An accumulator's first value: factor o v^T, a factor per token.
QLA_DEVICE void qls_scaled_values(const void* tile, const float* factor, float* acc) {
  int t = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned x[4];
    qls_transposed(tile, j, x);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 c = *(const float2*)(factor + j * 16 + n * 8 + t);
      float2 lo = qla_unpack(x[2 * n]), hi = qla_unpack(x[2 * n + 1]);
      float* y = acc + 8 * j + 4 * n;
      y[0] = c.x * lo.x, y[1] = c.y * lo.y, y[2] = c.x * hi.x, y[3] = c.y * hi.y;
    }
  }
}

// The same as an operand.
QLA_DEVICE void qls_scaled_operand(const void* tile, const float* factor, void* operand) {
  unsigned* a = (unsigned*)operand;
  int t = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned x[4];
    qls_transposed(tile, j, x);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 c = *(const float2*)(factor + j * 16 + n * 8 + t);
      float2 lo = qla_unpack(x[2 * n]), hi = qla_unpack(x[2 * n + 1]);
      a[4 * j + 2 * n] = qla_pack(c.x * lo.x, c.y * lo.y);
      a[4 * j + 2 * n + 1] = qla_pack(c.x * hi.x, c.y * hi.y);
    }
  }
}

// A diag(factor), or its transpose, as an operand: [64, 64], own rows of the product.
template <bool TRANSPOSED>
QLA_DEVICE void qls_scaled_inverse(const void* tile, const float* factor, void* operand) {
  unsigned* a = (unsigned*)operand;
  int thread = threadIdx.x & 127, w = thread >> 5, l = thread & 31, g = l >> 2, t = (l & 3) * 2;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned x[4];
    if (TRANSPOSED)
      qla_ldmatrix_t(qla_block(qla_smem(tile), l, j, w), x);
    else
      qla_ldmatrix(qla_block(qla_smem(tile), l, w, j), x);
    // x: {rows 0-7, rows 8-15} x {columns 0-7, columns 8-15} of the block in memory, rows fastest.
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = TRANSPOSED ? i >> 1 : i & 1, half = TRANSPOSED ? i & 1 : i >> 1;
      float2 y = qla_unpack(x[i]), c;
      if (TRANSPOSED)
        c.x = c.y = factor[w * 16 + row * 8 + g];
      else
        c = *(const float2*)(factor + j * 16 + half * 8 + t);
      a[4 * j + 2 * half + row] = qla_pack(y.x * c.x, y.y * c.y);
    }
  }
}

// A 64-row fragment of 16-bit pairs as 64 of the ROWS rows of a tile of PANELS panels.
template <int PANELS, int ROWS>
QLA_DEVICE void qls_store_operand(const void* operand, void* tile) {
  const unsigned* a = (const unsigned*)operand;
  int thread = threadIdx.x & 127, w = thread >> 5, l = thread & 31;
#pragma unroll
  for (int j = 0; j < 4 * PANELS; j++)
    qla_stmatrix(qla_block(qla_smem(tile) + (j >> 2) * (ROWS * 128), l, w, j & 3), a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]);
}

// A 64-row accumulator as PANELS panels.
template <int PANELS>
QLA_DEVICE void qls_store_accumulator(const float* acc, void* tile) {
  int thread = threadIdx.x & 127, w = thread >> 5, l = thread & 31;
#pragma unroll
  for (int j = 0; j < 4 * PANELS; j++) {
    const float* y = acc + 8 * j;
    qla_stmatrix(qla_block(qla_smem(tile) + (j >> 2) * 8192, l, w, j & 3), qla_pack(y[0], y[1]), qla_pack(y[2], y[3]),
                 qla_pack(y[4], y[5]), qla_pack(y[6], y[7]));
  }
}

// The lower triangle with its diagonal of a 64x64 accumulator, zero above it.
QLA_DEVICE void qls_store_lower(const float* acc, void* tile) {
  int thread = threadIdx.x & 127, w = thread >> 5, l = thread & 31, r = w * 16 + (l >> 2), t = (l & 3) * 2;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int row = r + ((i >> 1) & 1) * 8, col = j * 16 + (i >> 2) * 8 + t + (i & 1);
      y[i] = col <= row ? acc[8 * j + i] : 0.f;
    }
    qla_stmatrix(qla_block(qla_smem(tile), l, w, j), qla_pack(y[0], y[1]), qla_pack(y[2], y[3]), qla_pack(y[4], y[5]),
                 qla_pack(y[6], y[7]));
  }
}
