// PTX that neither TileLang nor CUDA C++ has a word for, a function for each instruction; the only place of it for what stands on
// chunk_tile.cuh. tests/emulated_ptx.h has the same functions for a CPU. The includer defines QLA_BF16 (1: bf16, 0: fp16 operands).
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
QLA_DEVICE int qla_opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

QLA_DEVICE int qla_thread() { return qla_opaque(threadIdx.x & 127); }

// 16 bytes of shared memory.
QLA_DEVICE uint4 qla_load4(unsigned p) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(p));
  return x;
}

QLA_DEVICE void qla_store4(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A word of global memory, asked for here and not, as the compiler would have it, where it is used.
QLA_DEVICE unsigned qla_ask(long long address) {
  unsigned x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(address));
  return x;
}

// One 8x8 tile: from the rows that lanes 0 to 7 point to, transposed on the way or not; to them, transposed; transposed in registers.
QLA_DEVICE unsigned qla_ldmatrix1(unsigned p) {
  unsigned x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(p));
  return x;
}

QLA_DEVICE unsigned qla_ldmatrix1_t(unsigned p) {
  unsigned x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(p));
  return x;
}

QLA_DEVICE void qla_stmatrix1_t(unsigned p, unsigned x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(p), "r"(x) : "memory");
}

QLA_DEVICE unsigned qla_transpose(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a b for one tile of 16x8: bf16, 16 deep; tf32, 8 deep.
QLA_DEVICE void qla_mma_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

QLA_DEVICE void qla_mma_tf32(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

QLA_DEVICE unsigned qla_tf32(float x) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// Two bf16 numbers, times two.
QLA_DEVICE unsigned qla_times_bf16(unsigned x, unsigned y) {
  unsigned r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// Of an input, 4 bytes and 16; 0 unless wanted. Volatile: they are on their way in the order in which they are written, before one of
// them is waited for.
QLA_DEVICE unsigned qla_ask_if(long long from, int wanted) {
  unsigned v = 0;
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc.b32 %0, [%1];}" : "+r"(v) : "l"(from), "r"(wanted));
  return v;
}

QLA_DEVICE uint4 qla_ask4_if(long long from, int wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"(wanted));
  return v;
}

QLA_DEVICE void qla_write4(long long to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
