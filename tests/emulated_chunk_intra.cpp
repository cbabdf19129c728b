// One CTA's work of chunk_intra.cuh behind the products, and the walk's taking apart of the tile; test_device_code.py puts
// emulated_ptx.h, the kernels' sources and the size of a gate table in front.

struct Arguments {
  const float *kk, *qk;  // [64, 64]: keys x keys, queries x keys
  const float *norm, *table, *diagonal;  // [2, 64]: r_k, scale r_q; [TABLE]; [64]
  char *tile, *A;  // [64, 64] of 16 bits
  char *T, *P;     // what the tile is taken apart to
  float* reach;
  int split, valid;
};
static Arguments arguments;

static void copy_tile(char* to, const char* from, bool swizzle_to, bool swizzle_from) {
  for (int i = threadIdx.x; i < 512; i += THREADS) {
    int row = i / 8, col = i % 8, swizzled = row * 128 + ((col ^ (row & 7)) << 4);
    memcpy(to + (swizzle_to ? swizzled : 16 * i), from + (swizzle_from ? swizzled : 16 * i), 16);
  }
}

static void cta() {
  const Arguments& a = arguments;
  int w = threadIdx.x / 32, l = threadIdx.x % 32, g = l / 4, t = l % 4 * 2;
  int part = w % a.split, first = w - part;
  float *raw = (float*)shared, *head = (float*)(shared + (48 << 10)) + first * 512;
  float *norm = (float*)(shared + (64 << 10)), *diagonal = norm + 128;
  char *tile = shared + (96 << 10), *p = shared + (128 << 10);
  norm[threadIdx.x] = a.norm[threadIdx.x];
  if (threadIdx.x < 64) diagonal[threadIdx.x] = a.diagonal[threadIdx.x];
  for (int i = l; i < TABLE && part == 0; i += 32) head[i] = a.table[i];
  float kk[32], qk[32];
  for (int i = 0; i < 32; i++) {
    int at = (16 * w + g + i / 2 % 2 * 8) * 64 + i / 8 * 16 + i / 4 % 2 * 8 + t + i % 2;
    kk[i] = a.kk[at], qk[i] = a.qk[at];
  }
  __syncthreads();
  qla_store_products(kk, qk, norm, raw);
  qla_clear_quarters(raw + 64 * QLA_RAW + w * 1024, l);
  __syncthreads();
  float reach = qla_reach(head, raw, l);
  if (threadIdx.x == 0) *a.reach = reach;
  // As if the CTA had the same head as often as it has room for one.
  qla_chunk_head(head, norm, raw, part, a.split, a.tile, (long long)a.A, 128, a.valid);
  __syncthreads();
  for (int i = threadIdx.x; i < 8192; i += THREADS) p[i] = 0;
  copy_tile(tile, a.tile, true, false);
  __syncthreads();
  if (w == 0) qla_split_tile(tile, p, diagonal);
  __syncthreads();
  copy_tile(a.T, tile, false, true);
  copy_tile(a.P, p, false, true);
}

extern "C" __attribute__((visibility("default"))) void run(const Arguments* given) {
  arguments = *given;
  memset(shared, 0x7f, sizeof shared);  // what nobody wrote is not a number
  run_threads(cta);
}
