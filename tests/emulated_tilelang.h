// What TileLang's generated CUDA C++ calls, on the CPU, on top of emulated_ptx.h: barriers, TMA, wgmma. Loads and products are done at once,
// so a missing wait for a product is not seen here; a missing wait for a barrier is, since threads run until they have to wait.
#pragma once

struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
typedef unsigned char uchar;
struct bfloat16_t {
  uint16_t x;
  bfloat16_t() {}
  explicit bfloat16_t(float f) : x(to_bf16(f)) {}
  explicit operator float() const { return from_bf16(x); }
};
struct half_t {
  uint16_t x;
  half_t() {}
  explicit half_t(float f) : x(to_half(f)) {}
  explicit operator float() const { return __half2float(x); }
};
struct __nv_bfloat162 { uint16_t x, y; };
typedef __half2 half2;
static float2 __bfloat1622float2(__nv_bfloat162 v) { return {from_bf16(v.x), from_bf16(v.y)}; }
static __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {to_bf16(v.x), to_bf16(v.y)}; }
static __half2 __float22half2_rn(float2 v) { return {to_half(v.x), to_half(v.y)}; }
static unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return a.x | (unsigned)b.x << 16; }
template <class T> static unsigned __pack_half2(T a, T b) { return a.x | (unsigned)b.x << 16; }
static uint1 make_uint1(unsigned x) { return {x}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static unsigned __float_as_uint(float x) { return as<unsigned>(x); }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static float device_exp(float x) { return std::exp(x); }
static float device_log(float x) { return std::log(x); }
#define __expf device_exp
#define __logf device_log

#define __global__
#define __device__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

// A tensor map, and a barrier of shared memory.
struct CUtensorMap {
  char* at;
  long long dims[5], strides[5];  // strides in bytes
  int box[5], size, swizzle, rank;
};
static long long spins;
struct Barrier {
  uint8_t count, pending, phase, unused;
  int32_t bytes;
  void init(int n) { count = pending = n, phase = 0, bytes = 0; }
  void turn() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
  }
  void arrive() {
    if (!pending) fprintf(stderr, "one arrival too many\n"), abort();
    pending--, turn();
  }
  void expect_transaction(int n) { bytes += n; }
  void wait(int parity) {
    while (phase == parity) {
      next_fiber();
      if (++spins > 40000000) fprintf(stderr, "thread %d waits for ever\n", current), abort();
    }
  }
};
static_assert(sizeof(Barrier) == 8);
static struct { int x; } blockIdx;

static unsigned __ballot_sync(unsigned, bool x) {
  unsigned word = x;
  return exchange(&word, 1, [&](auto& lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; i++) all |= lanes[i][0] << i;
    return all;
  });
}
static int __ffs(unsigned x) { return __builtin_ffs(x); }
template <class T> static T from_lane(T x, int lane) {
  unsigned word = as<unsigned>(x);
  return exchange(&word, 1, [&](auto& lanes) { return as<T>(lanes[lane][0]); });
}
static float __shfl_up_sync(unsigned, float x, int d, int = 32) { return from_lane(x, current % 32 >= d ? current % 32 - d : current % 32); }
static float __shfl_sync(unsigned, float x, int lane, int = 32) { return from_lane(x, lane); }
static float __shfl_down_sync(unsigned, float x, int d, int = 32) { return from_lane(x, current % 32 + d < 32 ? current % 32 + d : current % 32); }
static int __shfl_up_sync(unsigned, int x, int d, int = 32) { return from_lane(x, current % 32 >= d ? current % 32 - d : current % 32); }
static unsigned __reduce_or_sync(unsigned, unsigned x) {
  return exchange(&x, 1, [&](auto& lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; i++) all |= lanes[i][0];
    return all;
  });
}
static float __fdividef(float x, float y) { return x / y; }
static void* __cvta_shared_to_generic(unsigned p) { return shared + p; }
static void cudaGridDependencySynchronize() {}
static void cudaTriggerProgrammaticLaunchCompletion() {}

namespace tl {
enum class DataType { kBFloat16, kFloat16, kFloat32 };
struct GmmaDescriptor {
  unsigned start;
  int lbo, sbo;  // in 16 bytes
  GmmaDescriptor operator+(int n) const { return {start + n * 16, lbo, sbo}; }
  operator uint64_t() const { return (uint64_t)start | (uint64_t)lbo << 20 | (uint64_t)sbo << 36; }
};
template <int layout, int lbo, int sbo, class T> void initialize_wgmma_descriptor(GmmaDescriptor& d, T* p) {
  static_assert(layout == 1);  // the swizzle of 128 bytes
  d = {qla_smem(p), lbo, sbo};
}
template <class T> void increase_descriptor_offset(GmmaDescriptor& d, T bytes) { d.start += bytes; }
template <class T> void warpgroup_fence_operand(T*, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int> void wait_wgmma() {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
inline void fence_proxy_async() {}
inline void fence_barrier_init() {}
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void tma_store_arrive() {}
template <int, bool> void tma_store_wait() {}
// One thread of every `extent`, of all where it is 0: in its first warp any lane but the one that arrives.
template <int extent> bool tl_shuffle_elect() {
  int warp = current / 32;
  return current % 32 == 7 && (extent ? warp % (extent / 32) : warp) == 0;
}
inline void ptx_stmatrix_m8n8_x4(void* p, int a, int b, int c, int d) { qla_stmatrix(qla_smem(p), a, b, c, d); }
inline void __sync_thread_partial(int barrier, int threads) { named[barrier].wait(threads); }

inline float value(DataType type, uint16_t x) { return type == DataType::kBFloat16 ? from_bf16(x) : __half2float(x); }
inline float number(DataType type, unsigned p) {
  if (p + 2 > sizeof shared) fprintf(stderr, "shared address %u\n", p), abort();
  uint16_t x;
  memcpy(&x, shared + p, 2);
  return value(type, x);
}
// Number (row, k) of an operand of 16 columns: along k, or with `across` along rows, as it lies in shared memory.
inline float element(DataType type, uint64_t descriptor, bool across, int row, int k) {
  unsigned start = descriptor & 0xfffff;
  int lbo = descriptor >> 20 & 0xffff, sbo = descriptor >> 36;
  unsigned p = across ? start + row / 64 * lbo * 16 + k / 8 * (sbo * 16) + k % 8 * 128 + row % 64 * 2 : start + row / 8 * (sbo * 16) + row % 8 * 128 + k * 2;
  return number(type, p ^ (p >> 7 & 7) << 4);
}
// c += a b^T, rows of a by warps, 8 columns a step; `a` gives (row of the warp's 16, k).
template <int N, class A> void multiply(A a, DataType type, uint64_t b, bool across, float* c, bool accumulate) {
  int g = current % 32 / 4, t = current % 4 * 2;
  for (int j = 0; j < N / 8; j++)
    for (int e = 0; e < 2; e++) {
      double sum[2] = {0, 0};
      for (int k = 0; k < 16; k++) {
        double x = element(type, b, across, 8 * j + t + e, k);
        for (int h = 0; h < 2; h++) sum[h] += a(g + 8 * h, k) * x;
      }
      for (int h = 0; h < 2; h++) {
        float& d = c[4 * j + 2 * h + e];
        d = (accumulate ? d : 0) + sum[h];
      }
    }
}
template <DataType type, DataType, DataType, int M, int N, int KK, bool a_across, bool across, int a_sign, int b_sign>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, int accumulate) {
  static_assert(M == 64 && KK == 16 && !a_across && a_sign == 1 && b_sign == 1);
  exchange(a, 4, [&](auto& lanes) {
    auto number = [&](int row, int k) {
      uint16_t x = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)] >> 16 * (k % 2);
      return (double)value(type, x);
    };
    multiply<N>(number, type, b, across, (float*)c, accumulate);
    return 0;
  });
}
template <DataType type, DataType, DataType, int M, int N, int KK, bool a_across, bool across, int a_sign, int b_sign>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, int accumulate) {
  static_assert(M == 64 && KK == 16 && a_sign == 1 && b_sign == 1);
  int first = current % 128 / 32 * 16;
  multiply<N>([&](int row, int k) { return (double)element(type, a, a_across, first + row, k); }, type, b, across, (float*)c, accumulate);
}

template <class F> void each_of_box(const CUtensorMap& m, unsigned shared_at, const long long* at, F f) {
  int n = 1;
  for (int i = 0; i < m.rank; i++) n *= m.box[i];
  if (shared_at % 128) fprintf(stderr, "TMA at %u\n", shared_at), abort();
  for (int x = 0; x < n; x++) {
    int rest = x;
    long long from = 0;
    bool inside = true;
    for (int i = 0; i < m.rank; i++, rest /= m.box[i - 1]) {
      long long here = at[i] + rest % m.box[i];
      inside &= here >= 0 && here < m.dims[i], from += here * m.strides[i];
    }
    unsigned p = shared_at + x * m.size;
    if (m.swizzle) p ^= (p >> 7 & 7) << 4;
    f(shared + p, m.at + from, inside);
  }
}
template <class... C> void tma_load(const CUtensorMap& m, Barrier& barrier, void* to, C... at) {
  long long c[5] = {at...};
  int n = m.size;
  for (int i = 0; i < m.rank; i++) n *= m.box[i];
  each_of_box(m, qla_smem(to), c, [&](char* mine, char* theirs, bool inside) {
    if (inside) memcpy(mine, theirs, m.size);
    else memset(mine, 0, m.size);
  });
  barrier.bytes -= n, barrier.turn();
}
template <class... C> void tma_store(const CUtensorMap& m, const void* from, C... at) {
  long long c[5] = {at...};
  each_of_box(m, qla_smem(from), c, [&](char* mine, char* theirs, bool inside) {
    if (inside) memcpy(theirs, mine, m.size);
  });
}
}  // namespace tl
