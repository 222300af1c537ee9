// Many tokens through quantized matrices, y = x W^T.
//
// A threadgroup makes a tile of up to 64 rows and 64 outputs. How it multiplies stands in the file before this one, which there is
// for matrices of the simdgroup and for tensor units: `multiply_tile` leaves a tile in threadgroup memory. Rows do not depend on
// each other. Reference: `linear`, `expert_linear`, `swiglu`.
//
// Moves for every tile of rows OUTPUTS * INPUTS * 9 / 16 bytes of weights, for every tile of outputs the rows of x.

constant uint INPUTS [[function_constant(0)]];
// Rows of W that make outputs; of gate and up together where they meet.
constant uint OUTPUTS [[function_constant(1)]];
// Outputs that go to the first of two, where there are two.
constant uint SPLIT [[function_constant(2)]];

// The tile of all tokens' rows that a threadgroup of a plain grid makes.
inline uint plain_rows(uint row_tile, uint tokens) { return min(tokens - row_tile * TILE_ROWS, TILE_ROWS); }

template <ushort BITS> inline void multiply_plain(Matrix m, device const float* x, uint2 group, uint tokens, uint simd, ushort lane, threadgroup float* shared) {
  const uint own = (simd * LANES + lane) / 2, first = group.y * TILE_ROWS;
  const uint w_row = min(group.x * TILE_OUTPUTS + own, OUTPUTS - 1);
  multiply_tile<BITS>(m, x + (first + own) * m.inputs, w_row, plain_rows(group.y, tokens), simd, lane, shared);
}

// y = x W^T. x: [tokens, INPUTS]; y: [tokens, OUTPUTS]; f32
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device float* y [[buffer(4)]],
    constant uint& tokens [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const Matrix m = {codes, scales, biases, INPUTS};
  multiply_plain<4>(m, x, group, tokens, simd, lane, shared);
  const uint elements = plain_rows(group.y, tokens) * TILE_OUTPUTS;
  for (uint i = simd * LANES + lane; i < elements; i += GROUP_THREADS) {
    const uint row = i / TILE_OUTPUTS, output = group.x * TILE_OUTPUTS + i % TILE_OUTPUTS;
    if (output < OUTPUTS) y[(group.y * TILE_ROWS + row) * OUTPUTS + output] = shared[row * Y_STRIDE + i % TILE_OUTPUTS];
  }
}

// The same for a matrix of 8 bits.
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q8(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device float* y [[buffer(4)]],
    constant uint& tokens [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const Matrix m = {codes, scales, biases, INPUTS};
  multiply_plain<8>(m, x, group, tokens, simd, lane, shared);
  const uint elements = plain_rows(group.y, tokens) * TILE_OUTPUTS;
  for (uint i = simd * LANES + lane; i < elements; i += GROUP_THREADS) {
    const uint row = i / TILE_OUTPUTS, output = group.x * TILE_OUTPUTS + i % TILE_OUTPUTS;
    if (output < OUTPUTS) y[(group.y * TILE_ROWS + row) * OUTPUTS + output] = shared[row * Y_STRIDE + i % TILE_OUTPUTS];
  }
}

// Outputs below SPLIT go to `first` [tokens, SPLIT], the others to `second` [tokens, OUTPUTS - SPLIT].
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4_split(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device float* first [[buffer(4)]],
    device float* second [[buffer(5)]], constant uint& tokens [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const Matrix m = {codes, scales, biases, INPUTS};
  multiply_plain<4>(m, x, group, tokens, simd, lane, shared);
  const uint elements = plain_rows(group.y, tokens) * TILE_OUTPUTS;
  for (uint i = simd * LANES + lane; i < elements; i += GROUP_THREADS) {
    const uint row = i / TILE_OUTPUTS, output = group.x * TILE_OUTPUTS + i % TILE_OUTPUTS, token = group.y * TILE_ROWS + row;
    if (output >= OUTPUTS) continue;
    const float y = shared[row * Y_STRIDE + i % TILE_OUTPUTS];
    if (output < SPLIT) first[token * SPLIT + output] = y;
    else second[token * (OUTPUTS - SPLIT) + output - SPLIT] = y;
  }
}

// h += x W^T. stream: [tokens, OUTPUTS]
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4_residual(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device float* stream [[buffer(4)]],
    constant uint& tokens [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const Matrix m = {codes, scales, biases, INPUTS};
  multiply_plain<4>(m, x, group, tokens, simd, lane, shared);
  const uint elements = plain_rows(group.y, tokens) * TILE_OUTPUTS;
  for (uint i = simd * LANES + lane; i < elements; i += GROUP_THREADS) {
    const uint row = i / TILE_OUTPUTS, output = group.x * TILE_OUTPUTS + i % TILE_OUTPUTS;
    if (output < OUTPUTS) stream[(group.y * TILE_ROWS + row) * OUTPUTS + output] += shared[row * Y_STRIDE + i % TILE_OUTPUTS];
  }
}

// ---- experts ----
//
// The list of pairs (token, slot) is sorted by expert, see route.metal; a tile has rows of one expert. Tiles are as many as there
// may be; those without rows are left out.

struct ExpertTile {
  uint expert;
  // Of the list of pairs.
  uint first;
  uint rows;
  uint unused;
};

// Row of W that a thread brings where 32 gate rows and their up rows share a tile: gate rows begin at `gate_row`, up rows
// `up_after` rows behind them.
inline uint gate_up_row(uint gate_row, uint up_after, uint tile, uint own) {
  const uint half_tile = TILE_OUTPUTS / 2;
  return gate_row + tile * half_tile + own % half_tile + (own < half_tile ? 0 : up_after);
}

// silu(gate) * up of a finished tile, to rows `first`, ... of act [.., OUTPUTS / 2].
inline void store_swiglu(threadgroup const float* shared, uint tile, uint first, uint rows, device float* act, uint thread_index) {
  const uint half_tile = TILE_OUTPUTS / 2;
  for (uint i = thread_index; i < rows * half_tile; i += GROUP_THREADS) {
    const uint row = i / half_tile, column = i % half_tile;
    const float gate = shared[row * Y_STRIDE + column], up = shared[row * Y_STRIDE + half_tile + column];
    act[(first + row) * (OUTPUTS / 2) + tile * half_tile + column] = silu(gate) * up;
  }
}

// act = silu(gate x) * (up x) of the experts that were chosen, row by row of the list.
// codes: [gate and up, EXPERTS, OUTPUTS / 2, INPUTS]; x: [tokens, INPUTS]; pairs: [tokens * EXPERTS_PER_TOKEN];
// act: [tokens * EXPERTS_PER_TOKEN, OUTPUTS / 2]
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4_experts_swiglu(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device const uint* pairs [[buffer(4)]],
    device const ExpertTile* tiles [[buffer(5)]], device float* act [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const ExpertTile tile = tiles[group.y];
  if (tile.rows == 0) return;
  const uint thread_index = simd * LANES + lane, own = thread_index / 2;
  const Matrix m = {codes, scales, biases, INPUTS};
  const uint token = pairs[tile.first + min(own, tile.rows - 1)] / EXPERTS_PER_TOKEN;
  const uint w_row = gate_up_row(tile.expert * (OUTPUTS / 2), EXPERTS * (OUTPUTS / 2), group.x, own);
  multiply_tile<4>(m, x + token * INPUTS, w_row, tile.rows, simd, lane, shared);
  store_swiglu(shared, group.x, tile.first, tile.rows, act, thread_index);
}

// y = down act of the experts that were chosen. act: rows in the order of the list; y: [tokens * EXPERTS_PER_TOKEN, OUTPUTS],
// rows in the order of the tokens
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4_experts(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* act [[buffer(3)]], device const uint* pairs [[buffer(4)]],
    device const ExpertTile* tiles [[buffer(5)]], device float* y [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const ExpertTile tile = tiles[group.y];
  if (tile.rows == 0) return;
  const uint thread_index = simd * LANES + lane, own = thread_index / 2;
  const Matrix m = {codes, scales, biases, INPUTS};
  const uint w_row = tile.expert * OUTPUTS + min(group.x * TILE_OUTPUTS + own, OUTPUTS - 1);
  multiply_tile<4>(m, act + (tile.first + own) * INPUTS, w_row, tile.rows, simd, lane, shared);
  for (uint i = thread_index; i < tile.rows * TILE_OUTPUTS; i += GROUP_THREADS) {
    const uint row = i / TILE_OUTPUTS, output = group.x * TILE_OUTPUTS + i % TILE_OUTPUTS;
    if (output < OUTPUTS) y[pairs[tile.first + row] * OUTPUTS + output] = shared[row * Y_STRIDE + i % TILE_OUTPUTS];
  }
}

struct SharedSpan {
  uint tokens;
  // At which row of the matrix the shared expert's gate begins, with its up behind it.
  uint gate_row;
};

// act = silu(gate x) * (up x) of the shared expert. x: [tokens, INPUTS]; act: [tokens, OUTPUTS / 2]
[[max_total_threads_per_threadgroup(128)]] kernel void gemm_q4_shared_swiglu(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]], device float* act [[buffer(4)]],
    constant SharedSpan& span [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[SHARED_FLOATS / 4];
  threadgroup float* shared = (threadgroup float*)memory;
  const uint thread_index = simd * LANES + lane, own = thread_index / 2, first = group.y * TILE_ROWS;
  const uint rows = plain_rows(group.y, span.tokens);
  const Matrix m = {codes, scales, biases, INPUTS};
  multiply_tile<4>(m, x + (first + own) * INPUTS, gate_up_row(span.gate_row, OUTPUTS / 2, group.x, own), rows, simd, lane, shared);
  store_swiglu(shared, group.x, first, rows, act, thread_index);
}
