// Pieces of a 64-token chunk that TileLang has no word for: matrix loads and stores that transpose
// (ldmatrix, stmatrix), and mma.sync on register fragments. Everything else in the kernels is TileLang. The
// includer defines QLA_BF16 (1: bf16, 0: fp16 operands).
//
// Layouts. A fragment is the register image that wgmma and mma.sync share: in each 8x8 tile a lane holds
// row lane / 4, columns 2 (lane % 4) and the next; a 16-row operand is {rows 0-7, rows 8-15} x {cols 0-7, cols 8-15}.
// A 64x64 16-bit tile in shared memory has rows of 128 bytes under the 128-byte swizzle.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define QLA_DEVICE __device__ __forceinline__

QLA_DEVICE unsigned qla_half2(float lo, float hi) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Two floats as two operands of the kernel's 16-bit type, and back.
QLA_DEVICE unsigned qla_pack(float lo, float hi) {
#if QLA_BF16
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#else
  return qla_half2(lo, hi);
#endif
}

QLA_DEVICE float2 qla_unpack(unsigned x) {
#if QLA_BF16
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
  return __half22float2(*reinterpret_cast<__half2*>(&x));
#endif
}

QLA_DEVICE float qla_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// d += a b for one 16x8 tile, fp16 operands, fp32 accumulation.
QLA_DEVICE void qla_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b for one 16x16 tile.
QLA_DEVICE void qla_mma16(float* d, const unsigned* a, const unsigned* b) {
  qla_mma(d, a, b[0], b[1]);
  qla_mma(d + 4, a, b[2], b[3]);
}

QLA_DEVICE void qla_stmatrix(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d));
}

QLA_DEVICE void qla_stmatrix_t(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d));
}

QLA_DEVICE void qla_ldmatrix(unsigned p, unsigned* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p));
}

QLA_DEVICE void qla_ldmatrix_t(unsigned p, unsigned* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p));
}

QLA_DEVICE unsigned qla_smem(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A warpgroup's own barrier (TileLang numbers its own from 3 up). A constant: of a number that only the device knows ptxas does not
// see how many barriers to reserve, and the instruction is illegal.
QLA_DEVICE void qla_sync() { asm volatile("bar.sync 15, 128;" ::: "memory"); }

// The thread in its warpgroup. The compiler may not see that it is the same in every iteration of a caller's loop: it would keep
// dozens of addresses made from it, and has no registers for them.
QLA_DEVICE int qla_thread() {
  int t = threadIdx.x & 127;
  asm volatile("" : "+r"(t));
  return t;
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
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w) : "r"(tile + at));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = (first + i) * 4 + (l >> 3), at = row * 128 + (((l & 7) ^ (row & 7)) << 4);
      if (first + i < 14 && (l & 7) > (first + i) / 2) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(p + at), "r"(x[i].x), "r"(x[i].y), "r"(x[i].z), "r"(x[i].w) : "memory");
        asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(tile + at), "r"(0) : "memory");
      }
    }
  }
  // The 8x8 blocks on the diagonal, two rows a lane.
#pragma unroll
  for (int row = l; row < 64; row += 32) {
    int m = row & 7, at = row * 128 + (((row >> 3) ^ m) << 4);
    unsigned x[4], d = qla_pack(diagonal[row], 0.f) << (m & 1) * 16;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(tile + at));
    unsigned y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned below = m > 2 * j + 1 ? 0xffffffffu : m == 2 * j + 1 ? 0xffffu : 0u;
      y[j] = x[j] & ~below;
      x[j] = (x[j] & below) | (m >> 1 == j ? d : 0u);
    }
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(p + at), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]) : "memory");
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(tile + at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
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
