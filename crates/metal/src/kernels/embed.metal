// The residual stream of one token: its row of the embedding, dequantized.
//
// token: [1] u32; codes, scales, biases: [VOCAB, HIDDEN], 4 bits; gain: [HIDDEN] of the first layer's norm
// stream, gained: [HIDDEN] f32; squares: [STREAM_GROUPS] f32
// One simdgroup makes STREAM_ROWS values: one word of codes. Moves HIDDEN / 2 bytes of codes. Reference: dequantize_row.
kernel void embed(device const uint* token [[buffer(0)]], device const uint* codes [[buffer(1)]],
                  device const ushort* scales [[buffer(2)]], device const ushort* biases [[buffer(3)]],
                  device const float* gain [[buffer(4)]], device float* stream [[buffer(5)]],
                  device float* gained [[buffer(6)]], device float* squares [[buffer(7)]],
                  uint group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  // A token that could not be sampled is no id; the step that sampled it reports it.
  const uint row = min(token[0], VOCAB - 1);
  const uint word = codes[row * (HIDDEN / 8) + group];
  const uint at = (row * HIDDEN + group * STREAM_ROWS) / GROUP;
  const float code = float((word >> (4 * (lane % STREAM_ROWS))) & 15u);
  finish_rows(bf16(scales[at]) * code + bf16(biases[at]), group, lane, gain, stream, gained, squares);
}
