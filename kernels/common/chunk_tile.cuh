// Pieces of a 64-token chunk that TileLang has no word for: tiles that are transposed on their way, and mma.sync on register
// fragments. Everything else in the kernels is TileLang; PTX is in ptx.cuh, which comes in front. The includer
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
// Fragments of mma.sync.

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

// ---------------------------------------------------------------------------------------------------
// The number at an address, of run-time type (0: fp32, 1: bf16, 2: fp16), from the word that holds it. Without branches: the compiler
// would make a copy for each type of all that follows.
QLA_DEVICE unsigned qla_word(long long address) { return *(const unsigned*)(address & ~3ll); }

QLA_DEVICE float qla_number(unsigned word, long long address, int type) {
  unsigned short half = address & 2 ? word >> 16 : word;
  float x = __uint_as_float((unsigned)half << 16), y = __half2float(__ushort_as_half(half));
  return type == 0 ? __uint_as_float(word) : type == 1 ? x : y;
}

QLA_DEVICE float qla_load(long long address, int type) { return qla_number(qla_word(address), address, type); }
