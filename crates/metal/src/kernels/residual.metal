// h += W y for a 4-bit matrix [HIDDEN, INPUTS], and what the next norm needs of h.
//
// A threadgroup makes STREAM_ROWS rows; its four simdgroups divide the columns, 1024 at a time. Reference: `linear`, and
// `gated_norm` where it is said. Moves HIDDEN * INPUTS / 2 bytes of codes and a sixteenth of that of scales and biases.

constant uint INPUTS [[function_constant(0)]];

inline void add_rows(Matrix m, device const float* x, device const float* head_squares, bool gated, uint group, uint simd,
                     ushort lane, threadgroup float (&partial)[SIMDS][STREAM_ROWS], device const float* gain,
                     device float* stream, device float* gained, device float* squares) {
  float sums[STREAM_ROWS] = {};
  for (uint column = (simd * LANES + lane) * LANE_COLUMNS; column < INPUTS; column += SIMDS * SLICE_COLUMNS) {
    float scale = 1.0f;
    if (gated) {
      // A delta head's width is a whole number of lanes.
      device const float* parts = head_squares + column / DELTA_HEAD_DIM * SIMDS;
      scale = rsqrt(((parts[0] + parts[1]) + (parts[2] + parts[3])) / float(DELTA_HEAD_DIM) + RMS_EPS);
    }
    Inputs in;
    load_inputs_q4(in, x, column, scale);
    UNROLL for (ushort r = 0; r < STREAM_ROWS; r++) sums[r] += row_q4(m, group * STREAM_ROWS + r, column, in);
  }
  const float sum = sum_each<STREAM_ROWS>(sums, lane);
  if (lane % (LANES / STREAM_ROWS) == 0) partial[simd][lane / (LANES / STREAM_ROWS)] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  float value = 0;
  if (lane < STREAM_ROWS) {
    value = stream[group * STREAM_ROWS + lane];
    for (uint s = 0; s < SIMDS; s++) value += partial[s][lane];
  }
  finish_rows(value, group, lane, gain, stream, gained, squares);
}

// x: [INPUTS]; gain: [HIDDEN] of the next norm; stream, gained: [HIDDEN]; squares: [STREAM_GROUPS]; all f32
[[max_total_threads_per_threadgroup(128)]] kernel void gemv_q4_residual(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device const float* gain [[buffer(4)]],
    device float* stream [[buffer(5)]], device float* gained [[buffer(6)]], device float* squares [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][STREAM_ROWS];
  const Matrix m = {codes, scales, biases, INPUTS};
  add_rows(m, x, x, false, group, simd, lane, partial, gain, stream, gained, squares);
}

// The same behind the norm of a delta layer's output. x: [DELTA_VALUE_WIDTH], o times weight times silu(z);
// head_squares: [DELTA_VALUE_HEADS, SIMDS], parts of the sum of o^2 of each head
[[max_total_threads_per_threadgroup(128)]] kernel void gemv_q4_residual_gated(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device const float* gain [[buffer(4)]],
    device float* stream [[buffer(5)]], device float* gained [[buffer(6)]], device float* squares [[buffer(7)]],
    device const float* head_squares [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][STREAM_ROWS];
  const Matrix m = {codes, scales, biases, INPUTS};
  add_rows(m, x, head_squares, true, group, simd, lane, partial, gain, stream, gained, squares);
}
