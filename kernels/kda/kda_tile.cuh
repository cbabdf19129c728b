// Pieces of a chunk of Kimi Delta Attention (prepare.py) on top of chunk_tile.cuh, for a CTA of four warps: warp w owns the rows
// of block w (16 tokens), in every step and in every tile, and thread t owns channel t of the tables. Tiles and tables are given by
// their shared address.
//
// Where a warp works by elements, lane l has the channels 8 (l % 16) to 8 (l % 16) + 7 of the eight rows from 16 w + 8 (l / 16) on:
// 16 bytes of a 16-bit row, and a scan over rows that never leaves a thread but once.
//
// The products inside a chunk run in bf16 for bf16 inputs, and in tf32, which has the digits of fp16 and the range of fp32, for fp16.
// Their operands are tiles of 64 rows in panels of 128 bytes under the 128-byte swizzle: two panels of bf16 or four of fp32.
//
// With G the in-chunk cumulative log2 decay and e_a the integer part of G at the end of the rows before block a:
//     R = k 2^(G - e_a + QLK_SHIFT), q 2^(G - e_a + QLK_SHIFT)        C = k 2^(e_a - G - QLK_SHIFT)
// The shift centres both on the exponents of a float: they hold whatever a block fades by up to 2^-QLK_RANGE. A channel that fades
// by more within a block has a C that overflows, and qlk_strong mends all that came of it.
#define QLK_SHIFT 60
#define QLK_RANGE 140
#define QLK_PANEL 8192
#if QLA_BF16
#define QLK_WORDS 4   // registers of eight channels, steps of 32 bytes through a row, bytes of a table of factors
#define QLK_STEPS 8
#define QLK_FACTORS 256
#else
#define QLK_WORDS 8
#define QLK_STEPS 16
#define QLK_FACTORS 512
#endif
// Below 2^QLK_LOW a decay is 0 for every use: the scan stops counting there, so that it keeps its digits for what follows.
#define QLK_LOW -256.f
#define QLK_LOG2E 1.4426950408889634f

QLA_DEVICE float* qlk_floats(unsigned at) { return (float*)__cvta_shared_to_generic(at); }

// d += a b for one 16x8 tile, 32 bytes deep.
QLA_DEVICE void qlk_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
#if QLA_BF16
  qla_mma_bf16(d, a, b0, b1);
#else
  qla_mma_tf32(d, a, b0, b1);
#endif
}

// The same with operands of the inputs' type.
QLA_DEVICE void qlk_mma_input(float* d, const unsigned* a, unsigned b0, unsigned b1) {
#if QLA_BF16
  qlk_mma(d, a, b0, b1);
#else
  qla_mma(d, a, b0, b1);
#endif
}

// Operands times a power of two.
QLA_DEVICE unsigned qlk_times(unsigned x, unsigned factor) {
#if QLA_BF16
  return qla_times_bf16(x, factor);
#else
  return __float_as_uint(__uint_as_float(x) * __uint_as_float(factor));
#endif
}

// 2^n for a whole n, 0 where a float has none so small; and stored as number i of a table of factors.
QLA_DEVICE unsigned qlk_power(float n) { return (unsigned)max((int)n + 127, 0) << 23; }

QLA_DEVICE void qlk_store_factor(unsigned table, int i, unsigned power) {
#if QLA_BF16
  ((unsigned short*)qlk_floats(table))[i] = power >> 16;
#else
  ((unsigned*)qlk_floats(table))[i] = power;
#endif
}

// Where a table of factors has a channel for fragments: what a lane needs of a step lies together.
QLA_DEVICE int qlk_fragment_place(int c) {
#if QLA_BF16
  return (c & ~15) + ((c & 6) << 1) + ((c >> 2) & 2) + (c & 1);
#else
  return (c & ~7) + ((c & 3) << 1) + ((c >> 2) & 1);
#endif
}

// The 16 bytes number c of a row of a tile; for 16-bit numbers, a lane's eight channels.
QLA_DEVICE unsigned qlk_at(unsigned tile, int row, int c) { return tile + (c >> 3) * QLK_PANEL + row * 128 + (((c & 7) ^ (row & 7)) << 4); }

// This lane's address for an x4 matrix access to step k of the rows of block b.
QLA_DEVICE unsigned qlk_step(unsigned tile, int l, int b, int k) { return qla_block(tile, l, b, k & 3) + (k >> 2) * QLK_PANEL; }

// The lane in whose place one reads a right operand: so that what an mma takes of it are neighbours, {0, 1} and {2, 3}.
QLA_DEVICE int qlk_right(int l) { return (l & 7) | (l & 8) << 1 | (l & 16) >> 1; }

QLA_DEVICE void qlk_read8(unsigned at, float* v) {
  const float4 a = *(const float4*)qlk_floats(at), b = *(const float4*)qlk_floats(at + 16);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

QLA_DEVICE void qlk_unpack8(uint4 x, float* v) {
  const float2 a = qla_unpack(x.x), b = qla_unpack(x.y), c = qla_unpack(x.z), d = qla_unpack(x.w);
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
}

// A lane's eight channels of a row as operands, and into a tile.
QLA_DEVICE void qlk_put(unsigned tile, int row, int m, const float* v, unsigned* op) {
#if QLA_BF16
#pragma unroll
  for (int i = 0; i < 4; i++) op[i] = qla_pack(v[2 * i], v[2 * i + 1]);
  qla_store4(qlk_at(tile, row, m), op[0], op[1], op[2], op[3]);
#else
#pragma unroll
  for (int i = 0; i < 8; i++) op[i] = qla_tf32(v[i]);
  qla_store4(qlk_at(tile, row, 2 * m), op[0], op[1], op[2], op[3]);
  qla_store4(qlk_at(tile, row, 2 * m + 1), op[4], op[5], op[6], op[7]);
#endif
}

// Operands times factors as 16-bit numbers.
QLA_DEVICE uint4 qlk_scaled(const unsigned* op, const unsigned* factor) {
  uint4 y;
#if QLA_BF16
  y.x = qlk_times(op[0], factor[0]), y.y = qlk_times(op[1], factor[1]), y.z = qlk_times(op[2], factor[2]), y.w = qlk_times(op[3], factor[3]);
#else
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __uint_as_float(qlk_times(op[i], factor[i]));
  y.x = qla_half2(v[0], v[1]), y.y = qla_half2(v[2], v[3]), y.z = qla_half2(v[4], v[5]), y.w = qla_half2(v[6], v[7]);
#endif
  return y;
}

// ---------------------------------------------------------------------------------------------------
// Packed input. place[0], place[1] = the first token of the chunk with a given slot, and how many of its 64 rows its sequence has (0:
// no chunk has the slot). Sequences have their slots one after the other; `offsets`, if given, gets the first of each and their number.
QLA_DEVICE int qlk_chunks(const int* cu, int stride, int num_tokens, int n, int* bos) {
  // The contents of cu_seqlens are the caller's: whatever they are, no row outside [0, num_tokens) is touched.
  *bos = min(max(cu[(long long)n * stride], 0), num_tokens);
  return min(max(cu[(long long)(n + 1) * stride], *bos), num_tokens) - *bos;
}

QLA_DEVICE void qlk_locate(long long cu_address, int stride, int num_seqs, int num_tokens, int slot, long long offsets_address, unsigned scratch,
                           int* place) {
  const int *cu = (const int*)cu_address, t = threadIdx.x, l = t & 31, w = t >> 5;
  int *offsets = (int*)offsets_address, *found = (int*)qlk_floats(scratch);
  int each = (num_seqs + 127) >> 7, first = min(t * each, num_seqs), last = min(first + each, num_seqs), bos, sum = 0;
  for (int n = first; n < last; n++) sum += (qlk_chunks(cu, stride, num_tokens, n, &bos) + 63) >> 6;
  int below = sum;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    int y = __shfl_up_sync(0xffffffffu, below, i);
    if (l >= i) below += y;
  }
  if (l == 31) found[2 + w] = below;
  if (t == 0) found[1] = 0;
  __syncthreads();
  below -= sum;
  for (int i = 0; i < w; i++) below += found[2 + i];
  if (offsets && t == 127) offsets[num_seqs] = below + sum;
  if (offsets || (slot >= below && slot < below + sum))
    for (int n = first; n < last; n++) {
      int length = qlk_chunks(cu, stride, num_tokens, n, &bos), i = slot - below;
      if (offsets) offsets[n] = below;
      if (i >= 0 && i * 64 < length) found[0] = bos + i * 64, found[1] = min(length - i * 64, 64);
      below += (length + 63) >> 6;
    }
  __syncthreads();
  place[0] = found[0], place[1] = found[1];
}

// ---------------------------------------------------------------------------------------------------
// Gates. x[8 r + c] = what this thread's channel c fades by (log2) from the first of its eight rows up to row r, inclusive.

// Rates of decay: KIND 0: g log2(e); 1: -rate softplus(g + bias); 2: bound sigmoid(rate (g + bias)), which is never below QLK_LOW;
// 3: the same where it may be. Rows past the sequence's end have g = 0 and fade by nothing.
template <int KIND>
QLA_DEVICE void qlk_scan(float* x, int rows, float rate, float bound, const uint4* bias_) {
  const unsigned bias[8] = {bias_[0].x, bias_[0].y, bias_[0].z, bias_[0].w, bias_[1].x, bias_[1].y, bias_[1].z, bias_[1].w};
  float sum[8], b[8];
  const float slope = KIND == 1 ? QLK_LOG2E : -QLK_LOG2E * rate;
#pragma unroll
  for (int c = 0; c < 8; c++) sum[c] = 0.f, b[c] = KIND ? slope * __uint_as_float(bias[c]) : 0.f;
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const float factor = r >= rows ? 0.f : KIND == 1 ? -rate : bound * QLK_LOG2E;
#pragma unroll
    for (int c = 0; c < 8; c++) {
      float v = x[8 * r + c];
      if (KIND == 0) {
        v *= QLK_LOG2E;
      } else {
        v = fmaf(v, slope, b[c]);
        if (KIND == 1)
          v = factor * (fmaxf(v, 0.f) + __log2f(1.f + qla_exp2(-fabsf(v))));
        else
          v = factor * __fdividef(1.f, 1.f + qla_exp2(v));
      }
      if (KIND != 2) v = fmaxf(v, QLK_LOW);
      x[8 * r + c] = sum[c] += v;
    }
  }
}

// What the rows of the block before the own eight fade by.
QLA_DEVICE void qlk_below(const float* x, float* below) {
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float y = __shfl_up_sync(0xffffffffu, x[56 + c], 16);
    below[c] = threadIdx.x & 16 ? y : 0.f;
  }
}

// kind: 0: g is a log decay, 1: softplus, 2: lower bound. g_address: of the chunk's first row.
QLA_DEVICE void qlk_gates(long long g_address, int type, long long stride, int valid, int kind, float bound, long long A_log, long long dt_bias,
                          int head, float* x, unsigned totals) {
  const int t = threadIdx.x, w = t >> 5, h = (t >> 4) & 1, m = t & 15, rows = valid - 16 * w - 8 * h;
  const long long step = stride * (type == 0 ? 4 : 2), from = g_address + (16 * w + 8 * h) * step + m * (type == 0 ? 32 : 16);
  const unsigned A = qla_ask_if(A_log + 4 * head, A_log != 0);
  const uint4 bias[2] = {qla_ask4_if(dt_bias + head * 512 + 32 * m, dt_bias != 0), qla_ask4_if(dt_bias + head * 512 + 32 * m + 16, dt_bias != 0)};
  if (type == 0) {
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const uint4 a = qla_ask4_if(from + r * step, r < rows), b = qla_ask4_if(from + r * step + 16, r < rows);
      const unsigned y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; i++) x[8 * r + i] = __uint_as_float(y[i]);
    }
  } else {
    uint4 raw[8];
#pragma unroll
    for (int r = 0; r < 8; r++) raw[r] = qla_ask4_if(from + r * step, r < rows);
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const unsigned y[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 v = make_float2(__uint_as_float(y[i] << 16), __uint_as_float(y[i] & 0xffff0000u));
        if (type == 2) v = __half22float2(*reinterpret_cast<const __half2*>(&y[i]));
        x[8 * r + 2 * i] = v.x, x[8 * r + 2 * i + 1] = v.y;
      }
    }
  }
  const float rate = qla_exp2(__uint_as_float(A) * QLK_LOG2E);
  if (kind == 0)
    qlk_scan<0>(x, rows, 0.f, 0.f, bias);
  else if (kind == 1)
    qlk_scan<1>(x, rows, rate, 0.f, bias);
  else if (bound * QLK_LOG2E >= QLK_LOW)
    qlk_scan<2>(x, rows, rate, bound, bias);
  else
    qlk_scan<3>(x, rows, rate, bound, bias);
  float below[8];
  qlk_below(x, below);
  if (h) {
    float* total = qlk_floats(totals) + 128 * w + 8 * m;
    *(float4*)total = make_float4(x[56] + below[0], x[57] + below[1], x[58] + below[2], x[59] + below[3]);
    *(float4*)(total + 4) = make_float4(x[60] + below[4], x[61] + below[5], x[62] + below[6], x[63] + below[7]);
  }
}

// By block a or pair (a, b < a) of blocks and channel, from what the blocks fade by:
//     start    G before block a, less e_a                       in place of the totals
//     to_end   2^(G_C - e_a + shift), to make kr of C           where the block is too strong for the channel: G_C - e_a, below 0
//     lift     2^(e_a - shift), to make kd, qd of R
//     cross    2^(e_a - e_b + shift), to make C of block b meet R of block a; too strong blocks have anchored C at their end
// and decay = 2^G_C to memory. strong[w]: bit b if block b is too strong for one of the 32 channels of a warp.
QLA_DEVICE void qlk_tables(unsigned start, unsigned to_end, unsigned lift, unsigned cross, unsigned strong, long long decay) {
  const int c = threadIdx.x;
  float *total = qlk_floats(start) + c, *end = qlk_floats(to_end) + c, fade[4], e[4], anchor[4], G = 0.f;
  unsigned mask = 0;
#pragma unroll
  for (int b = 0; b < 4; b++) {
    fade[b] = total[128 * b];
    anchor[b] = e[b] = floorf(G);
    const float part = G - e[b], whole = part + fade[b];
    total[128 * b] = part;
    if (whole < -QLK_RANGE) anchor[b] += floorf(whole), mask |= 1 << b;
    G += fade[b];
    qlk_store_factor(lift + QLK_FACTORS * b, c, qlk_power(e[b] - QLK_SHIFT));
  }
#pragma unroll
  for (int b = 0; b < 4; b++) end[128 * b] = (mask >> b) & 1 ? G - e[b] : qla_exp2(G - e[b] + QLK_SHIFT);
#pragma unroll
  for (int a = 1; a < 4; a++)
#pragma unroll
    for (int b = 0; b < a; b++)
      qlk_store_factor(cross + QLK_FACTORS * (a * (a - 1) / 2 + b), qlk_fragment_place(c), qlk_power(e[a] - anchor[b] + QLK_SHIFT));
  ((float*)decay)[c] = qla_exp2(G);
  mask = __reduce_or_sync(0xffffffffu, mask);
  if ((c & 31) == 0) ((unsigned*)qlk_floats(strong))[c >> 5] = mask;
}

// Whether the own block is too strong for any channel.
QLA_DEVICE int qlk_is_strong(unsigned strong) {
  const uint4 y = qla_load4(strong);
  return ((y.x | y.y | y.z | y.w) >> (threadIdx.x >> 5)) & 1;
}

// ---------------------------------------------------------------------------------------------------
// Norms and operands.

// norms[16 i + r] = (sum x^2 + 1e-6)^-1/2, or 1, of the own rows of two 16-bit tiles, k and q: the diagonal of a product with itself.
// Made whether wanted or not: of a branch the compiler would make two copies of all that follows.
QLA_DEVICE void qlk_norms(unsigned k, unsigned q, unsigned norms_, int wanted) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31, g = l >> 2;
  float* norms = qlk_floats(norms_) + 32 * w;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    float d[8];
    qla_clear_tile(d);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      unsigned a[4];
      qla_ldmatrix(qlk_step(i ? q : k, l, w, j), a);
      qlk_mma_input(d, a, a[0], a[2]);
      qlk_mma_input(d + 4, a, a[1], a[3]);
    }
    if ((l & 3) == g >> 1) {
      norms[16 * i + g] = wanted ? rsqrtf((g & 1 ? d[1] : d[0]) + 1e-6f) : 1.f;
      norms[16 * i + 8 + g] = wanted ? rsqrtf((g & 1 ? d[7] : d[6]) + 1e-6f) : 1.f;
    }
  }
  __syncwarp();
}

// Zero the own rows of a 16-bit tile past the sequence's end, which hold anything.
QLA_DEVICE void qlk_zero_rows(unsigned tile, int valid) {
  const int t = threadIdx.x, w = t >> 5, h = (t >> 4) & 1, m = t & 15;
  for (int r = max(valid - 16 * w - 8 * h, 0); r < 8; r++) qla_store4(qlk_at(tile, 16 * w + 8 * h + r, m), 0, 0, 0, 0);
  __syncwarp();
}

// A lane's eight tokens as R of k and q and C in tiles, and kd, qd, kr in memory (addresses of the chunk). Own rows of the 16-bit tiles
// k_in and q_in are read; they may lie where the own rows of the others come to be.
QLA_DEVICE void qlk_operands(const float* x, unsigned start, unsigned to_end, unsigned lift_, unsigned norms, float scale,
                             unsigned k_in, unsigned q_in, unsigned rk, unsigned rq, unsigned ck, long long kd, long long qd, long long kr) {
  const int t = threadIdx.x, w = t >> 5, h = (t >> 4) & 1, m = t & 15;
  float offset[8], end[8], below[8];
  unsigned lift[QLK_WORDS];
  qlk_below(x, below);
  qlk_read8(start + 512 * w + 32 * m, offset);
  qlk_read8(to_end + 512 * w + 32 * m, end);
#pragma unroll
  for (int i = 0; i < QLK_WORDS; i += 4) {
    const uint4 y = qla_load4(lift_ + QLK_FACTORS * w + QLK_WORDS * 4 * m + 4 * i);
    lift[i] = y.x, lift[i + 1] = y.y, lift[i + 2] = y.z, lift[i + 3] = y.w;
  }
#pragma unroll
  for (int c = 0; c < 8; c++) offset[c] = offset[c] + QLK_SHIFT + below[c];
  const long long place = (16 * w + 8 * h) * 256 + 16 * m;
  uint4 k_raw = qla_load4(qlk_at(k_in, 16 * w + 8 * h, m)), q_raw = qla_load4(qlk_at(q_in, 16 * w + 8 * h, m));
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const int row = 16 * w + 8 * h + r;
    const float k_norm = qlk_floats(norms)[32 * w + 8 * h + r], q_norm = qlk_floats(norms)[32 * w + 16 + 8 * h + r] * scale;
    float k[8], q[8], c[8], f[8];
    unsigned op[QLK_WORDS];
    qlk_unpack8(k_raw, k);
    qlk_unpack8(q_raw, q);
    if (r < 7) k_raw = qla_load4(qlk_at(k_in, row + 1, m)), q_raw = qla_load4(qlk_at(q_in, row + 1, m));
#if !QLA_BF16
    __syncwarp();
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float y = x[8 * r + i] + offset[i];
      k[i] *= k_norm;
      f[i] = qla_exp2(y);
      c[i] = k[i] * qla_exp2(-y);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) k[i] *= f[i], q[i] = q[i] * q_norm * f[i];
    qlk_put(rk, row, m, k, op);
    qla_write4(kd + place + r * 256, qlk_scaled(op, lift));
    qlk_put(rq, row, m, q, op);
    qla_write4(qd + place + r * 256, qlk_scaled(op, lift));
    qlk_put(ck, row, m, c, op);
#pragma unroll
    for (int i = 0; i < 8; i++) c[i] *= end[i];
    uint4 y;
    y.x = qla_pack(c[0], c[1]), y.y = qla_pack(c[2], c[3]), y.z = qla_pack(c[4], c[5]), y.w = qla_pack(c[6], c[7]);
    qla_write4(kr + place + r * 256, y);
  }
  __syncwarp();
}

// ---------------------------------------------------------------------------------------------------
// Products: blocks of KK, and of QK^T, of which keys are rows.

// Own rows with own rows.
QLA_DEVICE void qlk_diagonal(unsigned rk, unsigned rq, unsigned ck, float* lower, float* upper) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31, right = qlk_right(l);
  qla_clear_tile(lower);
  qla_clear_tile(upper);
#pragma unroll
  for (int k = 0; k < QLK_STEPS; k++) {
    unsigned a[4], b[4], c[4];
    qla_ldmatrix(qlk_step(rk, l, w, k), a);
    qla_ldmatrix(qlk_step(rq, right, w, k), b);
    qla_ldmatrix(qlk_step(ck, l, w, k), c);
    qlk_mma(lower, a, c[0], c[2]);
    qlk_mma(lower + 4, a, c[1], c[3]);
    qlk_mma(upper, c, b[0], b[1]);
    qlk_mma(upper + 4, c, b[2], b[3]);
  }
}

// The own rows of a tile as left operands.
QLA_DEVICE void qlk_own_rows(unsigned tile, unsigned* own) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31;
#pragma unroll
  for (int k = 0; k < QLK_STEPS; k++) qla_ldmatrix(qlk_step(tile, l, w, k), own + 4 * k);
  __syncwarp();
}

// 2^shift (own rows of one tile) (rows of block b of another)^T: the factors belong to C, which is the first or the second.
template <bool FIRST>
QLA_DEVICE void qlk_cross(const unsigned* own, unsigned tile, int b, unsigned factors, float* d) {
  const int l = threadIdx.x & 31, right = qlk_right(l);
  const uint2* factor = (const uint2*)qlk_floats(factors) + (l & 3);
  qla_clear_tile(d);
#pragma unroll
  for (int k = 0; k < QLK_STEPS; k++) {
    unsigned u[4], v[4];
    qla_ldmatrix(qlk_step(tile, right, b, k), v);
    const uint2 f = factor[4 * k];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u[i] = FIRST ? qlk_times(own[4 * k + i], i & 2 ? f.y : f.x) : own[4 * k + i];
      if (!FIRST) v[i] = qlk_times(v[i], i & 1 ? f.y : f.x);
    }
    qlk_mma(d, u, v[0], v[1]);
    qlk_mma(d + 4, u, v[2], v[3]);
  }
}

// Own rows with the other blocks: L in the first panel of rk, by the betas of its rows, and behind the own block P^T in the second.
// Every warp has three. Of rk nobody else reads the own rows.
QLA_DEVICE void qlk_across(unsigned rk, unsigned rq, unsigned ck, unsigned cross, const float* beta) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31, row = 16 * w + (l >> 2);
  const float down = __uint_as_float((127 - QLK_SHIFT) << 23), b0 = beta[row] * down, b1 = beta[row + 8] * down;
  unsigned own[4 * QLK_STEPS];
  float d[8];
  qlk_own_rows(rk, own);
#pragma unroll 1
  for (int o = 0; o < w; o++) {
    qlk_cross<false>(own, ck, o, cross + QLK_FACTORS * (w * (w - 1) / 2 + o), d);
    qla_stmatrix(qla_block(rk, l, w, o), qla_half2(d[0] * b0, d[1] * b0), qla_half2(d[2] * b1, d[3] * b1), qla_half2(d[4] * b0, d[5] * b0),
                 qla_half2(d[6] * b1, d[7] * b1));
  }
  qlk_own_rows(ck, own);
#pragma unroll 1
  for (int o = w + 1; o < 4; o++) {
    qlk_cross<true>(own, rq, o, cross + QLK_FACTORS * (o * (o - 1) / 2 + w), d);
    qla_stmatrix(qla_block(rk + QLK_PANEL, l, w, o), qla_pack(d[0] * down, d[1] * down), qla_pack(d[2] * down, d[3] * down),
                 qla_pack(d[4] * down, d[5] * down), qla_pack(d[6] * down, d[7] * down));
  }
}

// ---------------------------------------------------------------------------------------------------
// Blocks in which a channel fades by more than 2^-QLK_RANGE.

// d = (own rows of a tile) (own rows of it)^T.
QLA_DEVICE void qlk_square(unsigned tile, float* d) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31;
  qla_clear_tile(d);
#pragma unroll
  for (int k = 0; k < QLK_STEPS; k++) {
    unsigned a[4];
    qla_ldmatrix(qlk_step(tile, l, w, k), a);
    qlk_mma(d, a, a[0], a[2]);
    qlk_mma(d + 4, a, a[1], a[3]);
  }
}

// This lane's eight channels of a row of the input, times its norm; 0 past the sequence's end.
QLA_DEVICE void qlk_read_row(long long rows, long long stride, int row, int valid, int m, float norm, float* v) {
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (row < valid) raw = *(const uint4*)(rows + (row * stride + 8 * m) * 2);
  qlk_unpack8(raw, v);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= norm;
}

// Joins blocks of 1, 2, 4 and 8 rows two by two: from row j of the first to row i of the second a channel fades as from j to the end of
// the first, and from there to i. No exponent is positive, and none is a sum over more than eight rows. Rows of `lower` and columns of
// `upper` up to which no channel has faded too much keep what they have: a token does not change with those after it.
// Then C is made again, anchored at the block's end in channels that are too strong, and kr with it.
// Not inlined, its arrays in local memory: all other blocks would pay for it in registers.
struct qlk_block {
  float x[64], lower[8], upper[8];
};

__device__ __noinline__ void qlk_mend(qlk_block* block, unsigned start, unsigned to_end, unsigned norms, float scale, long long k_rows,
                                      long long k_stride, long long q_rows, long long q_stride, int valid, unsigned ck, long long kr) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31, h = l >> 4, m = l & 15, row0 = 16 * w + 8 * h, g = l >> 2, s = (l & 3) * 2;
  const float *x = block->x, *k_norm = qlk_floats(norms) + 32 * w + 8 * h, *q_norm = k_norm + 16;
  float offset[8], below[8], shift[8], end[8], v[8];
  unsigned op[QLK_WORDS], slow = 0;
  qlk_read8(start + 512 * w + 32 * m, offset);
  qlk_read8(to_end + 512 * w + 32 * m, end);
  qlk_below(x, below);
#pragma unroll
  for (int c = 0; c < 8; c++) {
    // The anchors that qlk_tables chose, by the same sums.
    const float fade = x[56 + c] + below[c], other = __shfl_down_sync(0xffffffffu, fade, 16), whole = offset[c] + (h ? fade : other);
    shift[c] = whole < -QLK_RANGE ? floorf(whole) : 0.f;
    offset[c] += below[c];
  }
#pragma unroll 1
  for (int r = 0; r < 8; r++) {
    bool out = false;
#pragma unroll
    for (int c = 0; c < 8; c++) out |= x[8 * r + c] + offset[c] < -QLK_RANGE;
    const unsigned y = __ballot_sync(0xffffffffu, out);
    slow |= (y & 0xffff ? 1u << r : 0) | (y >> 16 ? 256u << r : 0);
  }
#pragma unroll 1
  for (int step = 0; step < 8; step++) {
    // All rows with k, and then with q in the second blocks.
    const int level = step >> 1, which = step & 1;
#pragma unroll 1
    for (int r = 0; r < 8; r++) {
      if (which && !((8 * h + r) >> level & 1)) continue;
      const float *here = x + 8 * r, *join = x + 8 * (level == 3 ? 7 : (r & ~((2 << level) - 1)) + (1 << level) - 1);
      const bool second = level == 3 && h;
      qlk_read_row(which ? q_rows : k_rows, which ? q_stride : k_stride, row0 + r, valid, m, which ? q_norm[r] * scale : k_norm[r], v);
#pragma unroll
      for (int c = 0; c < 8; c++) v[c] *= qla_exp2(-fabsf(here[c] - (second ? 0.f : join[c])));
      qlk_put(ck, row0 + r, m, v, op);
    }
    float d[8];
    __syncwarp();
    qlk_square(ck, d);
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int i = g + ((e >> 1) & 1) * 8, j = s + (e & 1) + (e >> 2) * 8;
      if ((i ^ j) >> level == 1) {
        if (which && i < j && (slow >> j) & 1) block->upper[e] = d[e];
        if (!which && j < i && (slow >> i) & 1) block->lower[e] = d[e];
      }
    }
  }
  float dot = 0.f;
#pragma unroll 1
  for (int r = 0; r < 8; r++) {
    float q[8], sum = 0.f, near[8], last[8];
    qlk_read_row(k_rows, k_stride, row0 + r, valid, m, k_norm[r], v);
    qlk_read_row(q_rows, q_stride, row0 + r, valid, m, q_norm[r] * scale, q);
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const float y = x[8 * r + c] + offset[c] + QLK_SHIFT;
      sum += v[c] * q[c];
      near[c] = v[c] * qla_exp2(shift[c] - y);
      last[c] = shift[c] < 0.f ? v[c] * qla_exp2(end[c] + QLK_SHIFT - y) : near[c] * end[c];
    }
    qlk_put(ck, row0 + r, m, near, op);
    uint4 y;
    y.x = qla_pack(last[0], last[1]), y.y = qla_pack(last[2], last[3]), y.z = qla_pack(last[4], last[5]), y.w = qla_pack(last[6], last[7]);
    qla_write4(kr + (row0 + r) * 256 + 16 * m, y);
#pragma unroll
    for (int i = 8; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (m == r) dot = sum;
  }
  // Nothing fades between a token and itself. Row i is with lane i or, in the upper half, i + 8.
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int i = g + ((e >> 1) & 1) * 8, j = s + (e & 1) + (e >> 2) * 8;
    const float y = __shfl_sync(0xffffffffu, dot, i + (i & 8));
    if (i == j && (slow >> i) & 1) block->upper[e] = y;
  }
}

QLA_DEVICE void qlk_strong(const float* x, unsigned start, unsigned to_end, unsigned norms, float scale, long long k_rows, long long k_stride,
                           long long q_rows, long long q_stride, int valid, unsigned ck, long long kr, float* lower, float* upper) {
  qlk_block block;
#pragma unroll
  for (int i = 0; i < 64; i++) block.x[i] = x[i];
#pragma unroll
  for (int i = 0; i < 8; i++) block.lower[i] = lower[i], block.upper[i] = upper[i];
  qlk_mend(&block, start, to_end, norms, scale, k_rows, k_stride, q_rows, q_stride, valid, ck, kr);
#pragma unroll
  for (int i = 0; i < 8; i++) lower[i] = block.lower[i], upper[i] = block.upper[i];
}

// ---------------------------------------------------------------------------------------------------
// The triangles: A = (I + L)^-1, L = strict_lower(beta KK). With D the inverses of the four 16x16 diagonal blocks and N = D L below them,
//     A = (I + N)^-1 D = (I - N + N^2 - N^3) D          (N is block-nilpotent: N^4 = 0)
// D is by forward substitution in fp32: it keeps keys that repeat exact, where a power series cancels. The block products are fp16
// mma.sync, three dependent rounds for the longest row.

// Of the own diagonal block of L the strict lower triangles of its two diagonal 8x8 quarters as fp32 into diag (2 x 64 floats, by
// columns), and the quarter below as the operand that is returned.
QLA_DEVICE unsigned qlk_store_quarters(const float* kk, const float* beta, float* diag, int w, int l) {
  int g = l >> 2, t = (l & 3) * 2;
  float b0 = beta[16 * w + g], b1 = beta[16 * w + g + 8], *column = diag + 8 * t + g;
  if (t < g) column[0] = kk[0] * b0, column[64] = kk[6] * b1;
  if (t + 1 < g) column[8] = kk[1] * b0, column[72] = kk[7] * b1;
  return qla_half2(kk[2] * b1, kk[3] * b1);
}

// D^T, D the inverse of the 16x16 unit lower triangle, as fp16 into block (w, w) of x. The inverses D1 and D2 of its diagonal quarters
// by forward substitution in fp32, lane c (and c + 16) column c, column by column, so that the updates of a step do not wait for
// each other; below them -D2 L21 D1, L21 the operand from qlk_store_quarters.
QLA_DEVICE void qlk_diag_inverse(const float* diag, unsigned l21, unsigned x, int w, int l) {
  int c = l & 7, second = (l >> 3) & 1;
  float s[8];
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = i == c ? 1.f : 0.f;
#pragma unroll
  for (int k = 0; k < 7; k++) {
#pragma unroll
    for (int q = (k + 1) / 4; q < 2; q++) {
      float4 p = *(const float4*)(diag + 64 * second + 8 * k + 4 * q);
      if (4 * q > k) s[4 * q] -= p.x * s[k];
      if (4 * q + 1 > k) s[4 * q + 1] -= p.y * s[k];
      if (4 * q + 2 > k) s[4 * q + 2] -= p.z * s[k];
      s[4 * q + 3] -= p.w * s[k];
    }
  }
  // Rows of D^T: zeros left of its second half, whose quarter right of the first half comes last.
  unsigned row = x + (w * 16 + (l & 15)) * 128, left = row + (((2 * w) ^ (l & 7)) << 4), right = row + (((2 * w + 1) ^ (l & 7)) << 4);
  unsigned h0 = qla_half2(s[0], s[1]), h1 = qla_half2(s[2], s[3]), h2 = qla_half2(s[4], s[5]), h3 = qla_half2(s[6], s[7]);
  if (l < 16) {
    qla_store4(second ? right : left, h0, h1, h2, h3);
    if (second) qla_store4(left, 0, 0, 0, 0);
  }
  __syncwarp();
  unsigned d1, d2[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0}, b;
  float z[4] = {0, 0, 0, 0};
  d1 = qla_ldmatrix1(left);  // rows 0 to 7 from lanes 0 to 7
  d2[0] = qla_ldmatrix1_t(x + (w * 16 + 8 + c) * 128 + (((2 * w + 1) ^ c) << 4));
  b = qla_transpose(l21);
  qla_mma(z, d2, b, 0);
  y[0] = qla_half2(-z[0], -z[1]);
  z[0] = z[1] = 0.f;
  qla_mma(z, y, d1, 0);
  qla_stmatrix1_t(right, qla_half2(z[0], z[1]));
}

// Own rows of the tile up to its diagonal block: T = A beta from the own rows of L in x and the other warps' N and D; on and above the
// diagonal of that block P^T, from qk. One code for all four warps, with branches a warp takes as one.
QLA_DEVICE void qlk_rows(const float* beta, const float* qk, unsigned x, unsigned tile, int w, int l) {
  int g = l >> 2, t = (l & 3) * 2, c = w * 16 + t;
  unsigned d[4], n[3][4], y[4];
  float2 b0 = *(const float2*)(beta + c), b1 = *(const float2*)(beta + c + 8);
  qla_ldmatrix_t(qla_block(x, l, w, w), y);
  d[0] = y[0], d[1] = y[2], d[2] = y[1], d[3] = y[3];
  float z[3][8], f[8];
  if (w) {
    // Blocks at or right of the diagonal come out as garbage that nothing uses.
    unsigned lower[3][4];
#pragma unroll
    for (int j = 0; j < 3; j++) qla_ldmatrix_t(qla_block(x, l, w, j), lower[j]);
#pragma unroll
    for (int j = 0; j < 3; j++) {
      qla_clear_tile(z[j]);
      qla_mma16(z[j], d, lower[j]);
    }
  }
  // Meanwhile the diagonal block.
  qla_float_tile(d, f);
  qla_stmatrix(qla_block(tile, l, w, w), qla_pack(t < g ? f[0] * b0.x : qk[0], t + 1 < g ? f[1] * b0.y : qk[1]), qla_pack(f[2] * b0.x, f[3] * b0.y),
               qla_pack(qk[4], qk[5]), qla_pack(t < g ? f[6] * b1.x : qk[6], t + 1 < g ? f[7] * b1.y : qk[7]));
  if (w) {
#pragma unroll
    for (int j = 0; j < 3; j++) {
      qla_half2_tile(z[j], n[j]);
      if (j < w) qla_stmatrix(qla_block(x, l, w, j), n[j][0], n[j][1], n[j][2], n[j][3]);
    }
  }
  qla_sync();
  if (w == 0) return;
  if (w > 1) {
    // n becomes N - N^2 + N^3, which is -(I + N)^-1 off the diagonal.
    unsigned n10[4], n20[4], n21[4], m[4];
    qla_ldmatrix_t(qla_block(x, l, 1, 0), n10);
    qla_float_tile(n[0], z[0]);
    qla_clear_tile(z[1]);
    if (w == 3) {
      qla_ldmatrix_t(qla_block(x, l, 2, 1), n21);
      qla_ldmatrix_t(qla_block(x, l, 2, 0), n20);
      qla_mma16(z[1], n[2], n21);
      qla_negate(n[2], m);
      qla_mma16(z[0], m, n20);
    }
    qla_negate(n[1], m);
    qla_mma16(z[0], m, n10);
    if (w == 3) {
      qla_half2_tile(z[1], m);
      qla_mma16(z[0], m, n10);
      qla_float_tile(n[1], f);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] -= z[1][i];
      qla_half2_tile(f, n[1]);
    }
    qla_half2_tile(z[0], n[0]);
  }
#pragma unroll
  for (int j = 0; j < 3; j++)
    if (j < w) {
      b0 = *(const float2*)(beta + 16 * j + t), b1 = *(const float2*)(beta + 16 * j + 8 + t);
      qla_ldmatrix(qla_block(x, l, j, j), y);
      d[0] = y[0], d[1] = y[2], d[2] = y[1], d[3] = y[3];
      qla_clear_tile(z[j]);
      qla_mma16(z[j], n[j], d);
      qla_stmatrix(qla_block(tile, l, w, j), qla_pack(-z[j][0] * b0.x, -z[j][1] * b0.y), qla_pack(-z[j][2] * b0.x, -z[j][3] * b0.y),
                   qla_pack(-z[j][4] * b1.x, -z[j][5] * b1.y), qla_pack(-z[j][6] * b1.x, -z[j][7] * b1.y));
    }
}

// The 16 own rows, 128 bytes each, of a tile to memory.
QLA_DEVICE void qlk_store_rows(unsigned tile, long long out) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = 16 * w + 4 * i + (l >> 3);
    qla_write4(out + row * 128 + (l & 7) * 16, qla_load4(qlk_at(tile, row, l & 7)));
  }
}

// Own rows, in memory, of the tile with T below its diagonal and P^T (keys are rows) on and above it: from what qlk_across left in x,
// and the diagonal blocks of KK and QK^T. scratch: 512 bytes a warp.
QLA_DEVICE void qlk_solve(const float* kk, const float* qk, const float* beta, unsigned x, unsigned scratch, long long out) {
  const int t = threadIdx.x, w = t >> 5, l = t & 31;
  const unsigned tile = x + QLK_PANEL;
  float* diag = qlk_floats(scratch + 512 * w);
  const unsigned l21 = qlk_store_quarters(kk, beta, diag, w, l);
  __syncwarp();
  qlk_diag_inverse(diag, l21, x, w, l);
  __syncwarp();
  qlk_rows(beta, qk, x, tile, w, l);
  qlk_store_rows(tile, out);
}
