// Rows of the residual stream of many tokens, each with the norm that comes next. A threadgroup has one row, a thread four of its
// columns, then four 512 further. stream, normed: [tokens, HIDDEN]; gain: [HIDDEN] of the next norm; f32

constant uint STEP = 4 * GROUP_THREADS;

inline float squares_of(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }

// The norm of a row whose columns this thread has written itself. `squares`: of these columns.
inline void norm_row(device const float* row, device const float* gain, device float* normed, float squares, uint simd, ushort lane,
                     threadgroup float (&partial)[SIMDS]) {
  const float scale = rsqrt(sum_group(squares, simd, lane, partial) / float(HIDDEN) + RMS_EPS);
  for (uint column = 4 * (simd * LANES + lane); column < HIDDEN; column += STEP) {
    const float4 value = *(device const float4*)(row + column), w = *(device const float4*)(gain + column);
    *(device float4*)(normed + column) = value * scale * w;
  }
}

// Rows of the embedding. ids: [tokens] u32, an id outside of the vocabulary counts as the last one; codes, scales, biases:
// [VOCAB, HIDDEN], 4 bits. Reference: dequantize_row, `rms_norm`.
[[max_total_threads_per_threadgroup(128)]] kernel void embed_rows(
    device const uint* ids [[buffer(0)]], device const uint* codes [[buffer(1)]], device const ushort* scales [[buffer(2)]],
    device const ushort* biases [[buffer(3)]], device const float* gain [[buffer(4)]], device float* stream [[buffer(5)]],
    device float* normed [[buffer(6)]], uint token [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS];
  const uint id = min(ids[token], VOCAB - 1);
  device float* row = stream + token * HIDDEN;
  float squares = 0;
  for (uint column = 4 * (simd * LANES + lane); column < HIDDEN; column += STEP) {
    const uint at = id * HIDDEN + column, word = codes[at / 8] >> (16 * (at / 4 % 2));
    const float scale = bf16(scales[at / GROUP]), bias = bf16(biases[at / GROUP]);
    const float4 code = float4(float(word & 15u), float(word >> 4 & 15u), float(word >> 8 & 15u), float(word >> 12 & 15u));
    const float4 value = code * scale + float4(bias);
    squares += squares_of(value);
    *(device float4*)(row + column) = value;
  }
  norm_row(row, gain, normed + token * HIDDEN, squares, simd, lane, partial);
}

// normed = rms_norm(stream). Reference: `rms_norm`.
[[max_total_threads_per_threadgroup(128)]] kernel void norm_rows(
    device const float* stream [[buffer(0)]], device const float* gain [[buffer(1)]], device float* normed [[buffer(2)]],
    uint token [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS];
  device const float* row = stream + token * HIDDEN;
  float squares = 0;
  for (uint column = 4 * (simd * LANES + lane); column < HIDDEN; column += STEP) {
    squares += squares_of(*(device const float4*)(row + column));
  }
  norm_row(row, gain, normed + token * HIDDEN, squares, simd, lane, partial);
}

// stream += sum_j weights_j * routed_j + weights_shared * shared, then the norm.
// routed: [tokens, EXPERTS_PER_TOKEN, HIDDEN]; shared_rows: [tokens, HIDDEN]; weights: [tokens, EXPERTS_PER_TOKEN + 1]
[[max_total_threads_per_threadgroup(128)]] kernel void combine_rows(
    device const float* routed [[buffer(0)]], device const float* shared_rows [[buffer(1)]],
    device const float* weights [[buffer(2)]], device const float* gain [[buffer(3)]], device float* stream [[buffer(4)]],
    device float* normed [[buffer(5)]], uint token [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS];
  device const float* shares = weights + token * (EXPERTS_PER_TOKEN + 1);
  device float* row = stream + token * HIDDEN;
  float squares = 0;
  for (uint column = 4 * (simd * LANES + lane); column < HIDDEN; column += STEP) {
    float4 value = *(device const float4*)(row + column);
    for (uint slot = 0; slot < EXPERTS_PER_TOKEN; slot++) {
      value += shares[slot] * *(device const float4*)(routed + (token * EXPERTS_PER_TOKEN + slot) * HIDDEN + column);
    }
    value += shares[EXPERTS_PER_TOKEN] * *(device const float4*)(shared_rows + token * HIDDEN + column);
    squares += squares_of(value);
    *(device float4*)(row + column) = value;
  }
  norm_row(row, gain, normed + token * HIDDEN, squares, simd, lane, partial);
}

// One row as the kernels of one token take it. One simdgroup has STREAM_ROWS values; see common.metal.
kernel void take_row(device const float* row [[buffer(0)]], device const float* gain [[buffer(1)]],
                     device float* stream [[buffer(2)]], device float* gained [[buffer(3)]],
                     device float* squares [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                     ushort lane [[thread_index_in_simdgroup]]) {
  finish_rows(row[group * STREAM_ROWS + lane % STREAM_ROWS], group, lane, gain, stream, gained, squares);
}
