// Transposed values, 64 tokens x 64 values in memory, as an operand.
QLA_DEVICE void qla_transposed_operand(const void* tile, void* operand) {
#pragma unroll
  for (int j = 0; j < 4; j++) qls_transposed(tile, j, (unsigned*)operand + 4 * j);
}

// How many of `count` chunks a state must be followed back through: until what they leave of what was before is 2^limit, or count + 1
// if that is more. reach: of the first that is gone through; that of the next is `stride` numbers in front. One warp.
QLA_DEVICE int qla_within_reach(const float* reach, long long stride, int count, float limit) {
  int l = threadIdx.x & 31;
  float sum = 0.f;
  for (int first = 0; first < count; first += 32) {
    float x = first + l < count ? reach[-(first + l) * stride] : 0.f;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      float below = __shfl_up_sync(0xffffffffu, x, i);
      if (l >= i) x += below;
    }
    x += sum;
    unsigned found = __ballot_sync(0xffffffffu, x <= limit);
    if (found) return first + __ffs(found);
    sum = __shfl_sync(0xffffffffu, x, 31);
  }
  return count + 1;
}
