// One token through a 4-bit matrix [OUTPUTS, INPUTS].
//
// A simdgroup holds 1024 columns of x in registers, 32 a lane, and meets them with ROWS rows: one 16-byte load of codes per
// lane and row, 512 adjacent bytes per simdgroup. SLICES simdgroups share rows and divide the columns; their sums meet in
// threadgroup memory in a fixed order. Reference: `linear` in ops.rs, after `rms_norm` where it is said.
// Moves OUTPUTS * INPUTS / 2 bytes of codes and a sixteenth of that of scales and biases.

constant uint INPUTS [[function_constant(0)]];
constant uint OUTPUTS [[function_constant(1)]];
// Simdgroups that share rows: 1, 2 or 4.
constant uint SLICES [[function_constant(2)]];
// Rows that go to the first of the two outputs.
constant uint SPLIT [[function_constant(3)]];

constant uint ROWS = 16;
// Of a threadgroup, if SLICES is 1.
constant uint MOST_ROWS = SIMDS * ROWS;
constant uint NO_ID = 0xffffffffu;

// ROWS row sums of this simdgroup's columns; lane l has that of row `row` + l / 2.
inline float rows_of_simd(Matrix m, device const float* x, uint row, uint simd, ushort lane) {
  float sums[ROWS] = {};
  for (uint first = simd % SLICES * SLICE_COLUMNS; first < INPUTS; first += SLICES * SLICE_COLUMNS) {
    const uint column = first + lane * LANE_COLUMNS;
    if (column >= INPUTS) continue;
    Inputs in;
    load_inputs_q4(in, x, column, 1.0f);
    UNROLL for (ushort r = 0; r < ROWS; r++) sums[r] += row_q4(m, min(row + r, OUTPUTS - 1), column, in);
  }
  return sum_each<ROWS>(sums, lane);
}

// Row sums of the whole threadgroup: thread t < rows_of_group() has that of its row t. Called by all threads.
inline uint rows_of_group() { return SIMDS / SLICES * ROWS; }

inline float group_row(Matrix m, device const float* x, uint group, uint simd, ushort lane, threadgroup float (&partial)[SIMDS][ROWS]) {
  const uint row = group * rows_of_group() + simd / SLICES * ROWS;
  const float sum = rows_of_simd(m, x, row, simd, lane);
  if (lane % 2 == 0) partial[simd][lane / 2] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint thread_index = simd * LANES + lane;
  float total = 0;
  if (thread_index < rows_of_group()) {
    const uint first = thread_index / ROWS * SLICES;
    for (uint s = 0; s < SLICES; s++) total += partial[first + s][thread_index % ROWS];
  }
  return total;
}

// y = W rms_norm(h); rows below SPLIT go to `first`, the others to `second`.
// x: [INPUTS], h times the gain; squares: [STREAM_GROUPS]; first: [SPLIT], second: [OUTPUTS - SPLIT], f32
[[max_total_threads_per_threadgroup(128)]] kernel void gemv_q4(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]],
    device const float* squares [[buffer(4)]], device float* first [[buffer(5)]], device float* second [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][ROWS];
  const Matrix m = {codes, scales, biases, INPUTS};
  const float y = group_row(m, x, group, simd, lane, partial) * norm_scale(squares, lane);
  const uint thread_index = simd * LANES + lane, row = group * rows_of_group() + thread_index;
  if (thread_index >= rows_of_group() || row >= OUTPUTS) return;
  if (row < SPLIT) first[row] = y;
  else second[row - SPLIT] = y;
}

// The better of two candidates: the higher logit, the lower id on ties.
inline bool is_better(float logit, uint id, float than, uint than_id) {
  return logit > than || (logit == than && id < than_id);
}

// logits = W rms_norm(h), and the best one of each threadgroup among ids below `limit`.
// best: [groups] f32; ids: [groups] u32, NO_ID where a logit is not finite, OUTPUTS where no id is below the limit
[[max_total_threads_per_threadgroup(128)]] kernel void gemv_q4_head(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]],
    device const float* squares [[buffer(4)]], device float* logits [[buffer(5)]], device float* best [[buffer(6)]],
    device uint* ids [[buffer(7)]], constant uint& limit [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][ROWS];
  threadgroup float rows[MOST_ROWS];
  const Matrix m = {codes, scales, biases, INPUTS};
  const float y = group_row(m, x, group, simd, lane, partial) * norm_scale(squares, lane);
  const uint thread_index = simd * LANES + lane, first_row = group * rows_of_group();
  if (thread_index < rows_of_group()) {
    rows[thread_index] = y;
    if (first_row + thread_index < OUTPUTS) logits[first_row + thread_index] = y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  float top = -INFINITY;
  uint id = OUTPUTS;
  bool damaged = false;
  for (uint i = lane; i < rows_of_group() && first_row + i < OUTPUTS; i += LANES) {
    const float logit = rows[i];
    damaged = damaged || !isfinite(logit);
    if (first_row + i < limit && is_better(logit, first_row + i, top, id)) {
      top = logit;
      id = first_row + i;
    }
  }
  if (damaged) id = NO_ID;
  for (ushort mask = LANES / 2; mask > 0; mask /= 2) {
    const float other = simd_shuffle_xor(top, mask);
    const uint other_id = simd_shuffle_xor(id, mask);
    if (id == NO_ID) continue;
    if (other_id == NO_ID || is_better(other, other_id, top, id)) {
      top = other;
      id = other_id;
    }
  }
  if (lane == 0) {
    best[group] = top;
    ids[group] = id;
  }
}

// The token of the best logit. best, ids: [PAIRS], as `gemv_q4_head` leaves them; token: [1] u32, NO_ID if a logit is not
// finite. One threadgroup of one simdgroup. Reference: `greedy`.
kernel void argmax(device const float* best [[buffer(0)]], device const uint* ids [[buffer(1)]],
                   device uint* token [[buffer(2)]], constant uint& pairs [[buffer(3)]],
                   uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float tops[LANES];
  threadgroup uint top_ids[LANES];
  float top = -INFINITY;
  uint id = OUTPUTS;
  for (uint i = simd * LANES + lane; i < pairs; i += LANES * LANES) {
    const uint other = ids[i];
    if (other == NO_ID || (id != NO_ID && is_better(best[i], other, top, id))) {
      top = best[i];
      id = other;
    }
  }
  for (ushort round = 0; round < 2; round++) {
    for (ushort mask = LANES / 2; mask > 0; mask /= 2) {
      const float other = simd_shuffle_xor(top, mask);
      const uint other_id = simd_shuffle_xor(id, mask);
      if (id == NO_ID) continue;
      if (other_id == NO_ID || is_better(other, other_id, top, id)) {
        top = other;
        id = other_id;
      }
    }
    if (round == 1) break;
    if (lane == 0) {
      tops[simd] = top;
      top_ids[simd] = id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    top = tops[lane];
    id = top_ids[lane];
  }
  if (simd == 0 && lane == 0) token[0] = id;
}
