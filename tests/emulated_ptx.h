// A CTA on the CPU: kernels/common/ptx.cuh's functions, and CUDA's own that the .cuh files use, for threads (EMULATED_THREADS, or one
// warpgroup) that are fibers of one. They take turns where they meet: an exchange within a warp, or a barrier. Shared memory is an array,
// an address in it an index.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::max;
using std::min;

#define QLA_DEVICE inline

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct __half2 { uint16_t x, y; };

static float2 make_float2(float x, float y) { return {x, y}; }

template <class To, class From> static To as(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  memcpy(&y, &x, sizeof y);
  return y;
}

static float __uint_as_float(unsigned x) { return as<float>(x); }
static uint16_t __ushort_as_half(uint16_t x) { return x; }
static float __half2float(uint16_t x) { return (float)as<_Float16>(x); }
static float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
static uint16_t to_half(float x) { return as<uint16_t>((_Float16)x); }
static float from_bf16(uint16_t x) { return as<float>((unsigned)x << 16); }
static uint16_t to_bf16(float x) {
  unsigned bits = as<unsigned>(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float device_log2(float x) { return std::log2(x); }
#define __log2f device_log2

// ---------------------------------------------------------------------------------------------------
// Threads.

#ifndef EMULATED_THREADS
#define EMULATED_THREADS 128
#endif
const int THREADS = EMULATED_THREADS;
static struct { ucontext_t context; std::vector<char> stack; bool done; } fibers[THREADS];
static ucontext_t caller;
static int current;
struct Index { int x; };
static Index this_thread() { return {current}; }
#define threadIdx this_thread()

static void next_fiber() {
  int me = current, next = me;
  do next = (next + 1) % THREADS;
  while (fibers[next].done && next != me);
  if (next == me) {
    fprintf(stderr, "a thread waits for others that have ended\n");
    abort();
  }
  current = next;
  swapcontext(&fibers[me].context, &fibers[next].context);
  current = me;
}

struct MeetingPoint {
  int waiting = 0, generation = 0;
  void wait(int count) {
    int mine = generation;
    if (++waiting == count) waiting = 0, generation++;
    else while (generation == mine) next_fiber();
  }
};
static MeetingPoint warp_barriers[THREADS / 32], barrier, named[16];
static void __syncwarp() { warp_barriers[current / 32].wait(32); }
static void __syncthreads() { barrier.wait(THREADS); }

// What the lanes of a warp show each other.
static unsigned shown[THREADS / 32][32][8];
template <class F> static auto exchange(const unsigned* mine, int words, F read) {
  auto& lanes = shown[current / 32];
  memcpy(lanes[current % 32], mine, 4 * words);
  __syncwarp();
  auto result = read(lanes);
  __syncwarp();
  return result;
}

static float __shfl_xor_sync(unsigned, float x, int mask, int = 32) {
  unsigned word = as<unsigned>(x);
  return exchange(&word, 1, [&](auto& lanes) { return as<float>(lanes[current % 32 ^ mask][0]); });
}

// Runs a function in all threads.
static void (*body)();
static void run_body() {
  body();
  fibers[current].done = true;
  for (int i = 1; i <= THREADS; i++)
    if (int next = (current + i) % THREADS; !fibers[next].done) {
      current = next;
      setcontext(&fibers[next].context);
    }
  setcontext(&caller);
}

static void run_threads(void (*function)()) {
  body = function;
  for (auto& b : warp_barriers) b = MeetingPoint();
  for (auto& b : named) b = MeetingPoint();
  barrier = MeetingPoint();
  for (auto& fiber : fibers) {
    fiber.done = false;
    fiber.stack.resize(1 << 16);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, run_body, 0);
  }
  current = 0;
  swapcontext(&caller, &fibers[0].context);
}

// ---------------------------------------------------------------------------------------------------
// Shared memory.

alignas(1024) static char shared[232448];

static char* at(unsigned p) {
  if (p % 16 || p + 16 > sizeof shared) {
    fprintf(stderr, "shared address %u\n", p);
    abort();
  }
  return shared + p;
}

static unsigned qla_smem(const void* p) { return (const char*)p - shared; }
static int qla_opaque(int x) { return x; }
static int qla_thread() { return current % 128; }
static void qla_sync() { named[15].wait(128); }
static unsigned qla_ask(long long address) { return *(const unsigned*)address; }
static unsigned qla_ask_if(long long address, int wanted) { return wanted ? qla_ask(address) : 0; }
static uint4 qla_ask4_if(long long address, int wanted) { return wanted ? *(const uint4*)address : uint4{0, 0, 0, 0}; }
static void qla_write4(long long address, uint4 x) { *(uint4*)address = x; }
static uint4 qla_load4(unsigned p) { return *(const uint4*)at(p); }
static void qla_store4(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) { *(uint4*)at(p) = {a, b, c, d}; }

// Tiles of 8x8 numbers of 16 bits: lane l points to row l % 8 of tile l / 8, and holds columns 2 (l % 4) and the next of row l / 4.
static void load_tiles(unsigned p, unsigned* x, int tiles, bool transposed) {
  exchange(&p, 1, [&](auto& lanes) {
    int row = current % 32 / 4, col = current % 4 * 2;
    for (int i = 0; i < tiles; i++) {
      uint16_t pair[2];
      for (int e = 0; e < 2; e++) {
        int r = transposed ? col + e : row, c = transposed ? row : col + e;
        memcpy(&pair[e], at(lanes[8 * i + r][0]) + 2 * c, 2);
      }
      memcpy(&x[i], pair, 4);
    }
    return 0;
  });
}

static void store_tiles(unsigned p, const unsigned* x, int tiles, bool transposed) {
  exchange(&p, 1, [&](auto& lanes) {
    int row = current % 32 / 4, col = current % 4 * 2;
    for (int i = 0; i < tiles; i++)
      for (int e = 0; e < 2; e++) {
        int r = transposed ? col + e : row, c = transposed ? row : col + e;
        uint16_t number = x[i] >> 16 * e;
        memcpy(at(lanes[8 * i + r][0]) + 2 * c, &number, 2);
      }
    return 0;
  });
}

static void qla_ldmatrix(unsigned p, unsigned* x) { load_tiles(p, x, 4, false); }
static void qla_ldmatrix_t(unsigned p, unsigned* x) { load_tiles(p, x, 4, true); }
static unsigned qla_ldmatrix1(unsigned p) { unsigned x; load_tiles(p, &x, 1, false); return x; }
static unsigned qla_ldmatrix1_t(unsigned p) { unsigned x; load_tiles(p, &x, 1, true); return x; }
static void qla_stmatrix1_t(unsigned p, unsigned x) { store_tiles(p, &x, 1, true); }
static void qla_stmatrix(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned x[] = {a, b, c, d};
  store_tiles(p, x, 4, false);
}
static void qla_stmatrix_t(unsigned p, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned x[] = {a, b, c, d};
  store_tiles(p, x, 4, true);
}
static unsigned qla_transpose(unsigned x) {
  return exchange(&x, 1, [&](auto& lanes) {
    int row = current % 32 / 4, col = current % 4 * 2;
    auto number = [&](int r, int c) { return lanes[4 * r + c / 2][0] >> 16 * (c % 2) & 0xffffu; };
    return number(col, row) | number(col + 1, row) << 16;
  });
}

// ---------------------------------------------------------------------------------------------------
// Numbers and products.

static unsigned qla_half2(float lo, float hi) { return to_half(lo) | (unsigned)to_half(hi) << 16; }
static unsigned qla_pack(float lo, float hi) { return QLA_BF16 ? to_bf16(lo) | (unsigned)to_bf16(hi) << 16 : qla_half2(lo, hi); }
static float2 qla_unpack(unsigned x) {
  return QLA_BF16 ? float2{from_bf16(x), from_bf16(x >> 16)} : float2{__half2float(x), __half2float(x >> 16)};
}
static float qla_exp2(float x) {
  float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}

// d += a b of 16xKs and Ksx8 numbers of 4 / E bytes, E of them a register: register 2 h + i of a has rows 8 i .. and columns K / 2 h ..,
// register h of b rows K / 2 h .. (pairs along them).
template <int E, class F> static void multiply_tiles(float* d, const unsigned* a, unsigned b0, unsigned b1, F number) {
  unsigned mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  exchange(mine, 6, [&](auto& lanes) {
    for (int i = 0; i < 4; i++) {
      int row = current % 32 / 4 + i / 2 * 8, col = current % 4 * 2 + i % 2;
      double sum = d[i];
      for (int k = 0; k < 8 * E; k++) {
        int lane = k % (4 * E) / E, half = k / (4 * E), e = k % E;
        sum += (double)number(lanes[row % 8 * 4 + lane][row / 8 + half * 2], e) * number(lanes[col * 4 + lane][4 + half], e);
      }
      d[i] = sum;
    }
    return 0;
  });
}
static void qla_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_tiles<2>(d, a, b0, b1, [](unsigned x, int e) { return __half2float(x >> 16 * e); });
}
static void qla_mma_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_tiles<2>(d, a, b0, b1, [](unsigned x, int e) { return from_bf16(x >> 16 * e); });
}
static void qla_mma_tf32(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_tiles<1>(d, a, b0, b1, [](unsigned x, int) { return as<float>(x); });
}
static unsigned qla_tf32(float x) {
  unsigned bits = as<unsigned>(x);
  return x != x ? bits : (bits + 0x1000) & ~0x1fffu;
}
static unsigned qla_times_bf16(unsigned x, unsigned y) {
  return to_bf16(from_bf16(x) * from_bf16(y)) | (unsigned)to_bf16(from_bf16(x >> 16) * from_bf16(y >> 16)) << 16;
}
