// Numbers of a type known at run time (0: fp32, 1: bf16, 2: fp16). Loaded as they are and converted where they are used, so that
// a thread has many on their way at once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define QLN_DEVICE __device__ __forceinline__

// Keeps the compiler from making a copy of every loop for each type.
QLN_DEVICE int qln_opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

QLN_DEVICE unsigned qln_load(long long base, long long index, int type) {
  return qln_opaque(type) == 0 ? ((const unsigned*)base)[index] : ((const unsigned short*)base)[index];
}

QLN_DEVICE float qln_number(unsigned bits, int type) {
  float half = __half2float(__ushort_as_half((unsigned short)bits));
  type = qln_opaque(type);
  return type == 2 ? half : __uint_as_float(type == 1 ? bits << 16 : bits);
}

QLN_DEVICE void qln_store(long long base, long long index, int type, float x) {
  type = qln_opaque(type);
  unsigned short bits = type == 1 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
  if (type == 0) ((float*)base)[index] = x;
  if (type != 0) ((unsigned short*)base)[index] = bits;
}
