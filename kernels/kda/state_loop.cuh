// Pieces of the state loop (state_loop.py) on top of chunk_tile.cuh.

// x = v^T as it lies in memory, [64 tokens, 64 values], in the layout of an operand.
QLA_DEVICE void qla_transposed_values(const void* v, void* x_) {
  unsigned* x = (unsigned*)x_;
  int thread = threadIdx.x & 127, l = thread & 31, col = (thread >> 5) * 2 + ((l >> 3) & 1), row = (l & 7) + (l >> 4) * 8;
  unsigned base = qla_smem(v);
#pragma unroll
  for (int j = 0; j < 4; j++) qla_ldmatrix_t(base + (j * 16 + row) * 128 + ((col ^ (row & 7)) << 4), x + 4 * j);
}

// x -= ks: what the state predicts, subtracted from what came.
QLA_DEVICE void qla_subtract(const float* ks, void* x_) {
  unsigned* x = (unsigned*)x_;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float2 v = qla_unpack(x[i]);
    x[i] = qla_pack(v.x - ks[2 * i], v.y - ks[2 * i + 1]);
  }
}
