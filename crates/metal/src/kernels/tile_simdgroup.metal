// A tile of a product on 8x8 matrices of the simdgroup, 32 columns of x and W at a time.
//
// The threads of a threadgroup bring both as f32 into threadgroup memory, W dequantized, while the next 32 are on their way into
// registers. A simdgroup has all rows of 16 outputs, so that a tile of few rows costs no more than those rows, eight at a time.
// Operands are f32, which Apple GPUs of families 7 and 8 multiply as fast as f16: a prompt is as exact as tokens one by one.

#include <metal_simdgroup_matrix>

constant uint TILE_INPUTS = 32;
// Longer than what they hold as rows of Y are, see common.metal.
constant uint X_STRIDE = TILE_INPUTS + 4;
constant uint SHARED_FLOATS = (TILE_ROWS + TILE_OUTPUTS) * X_STRIDE;
static_assert(TILE_ROWS * Y_STRIDE <= SHARED_FLOATS, "the finished tile takes the place of its operands");
static_assert(2 * TILE_ROWS == GROUP_THREADS && TILE_ROWS == TILE_OUTPUTS, "two threads bring a row of each operand");

// What a thread brings for one step: half a row of x and of W.
struct Piece {
  float4 x[TILE_INPUTS / 8];
  uint4 codes;
  float scale;
  float bias;
};

template <ushort BITS> inline void load_piece(thread Piece& piece, Matrix m, device const float* x, bool has_row, uint w_row, uint column) {
  UNROLL for (ushort i = 0; i < TILE_INPUTS / 8; i++) piece.x[i] = has_row ? *(device const float4*)(x + column + 4 * i) : float4(0.0f);
  const uint at = w_row * m.inputs + column;
  if (BITS == 4) {
    const uint2 codes = ((device const uint2*)m.codes)[at / 16];
    piece.codes = uint4(codes.x, codes.y, 0, 0);
  } else {
    piece.codes = m.codes[at / 16];
  }
  piece.scale = bf16(m.scales[at / GROUP]);
  piece.bias = bf16(m.biases[at / GROUP]);
}

template <ushort BITS> inline void store_piece(thread const Piece& piece, uint thread_index, threadgroup float* shared) {
  threadgroup float* place = shared + thread_index / 2 * X_STRIDE + thread_index % 2 * (TILE_INPUTS / 2);
  threadgroup float4* x = (threadgroup float4*)place;
  UNROLL for (ushort i = 0; i < TILE_INPUTS / 8; i++) x[i] = piece.x[i];
  threadgroup float4* w = (threadgroup float4*)(place + TILE_ROWS * X_STRIDE);
  if (BITS == 4) {
    UNROLL for (ushort i = 0; i < 2; i++) {
      float4 low, high;
      dequantize_q4(i == 0 ? piece.codes.x : piece.codes.y, piece.scale, piece.bias, low, high);
      w[2 * i] = low;
      w[2 * i + 1] = high;
    }
  } else {
    w[0] = dequantize_q8(piece.codes.x, piece.scale, piece.bias);
    w[1] = dequantize_q8(piece.codes.y, piece.scale, piece.bias);
    w[2] = dequantize_q8(piece.codes.z, piece.scale, piece.bias);
    w[3] = dequantize_q8(piece.codes.w, piece.scale, piece.bias);
  }
}

// A tile of `rows` rows, left in `shared` as [TILE_ROWS, TILE_OUTPUTS] with rows Y_STRIDE apart. Thread t brings row t / 2 of
// both operands: `x` is where that row begins, if there is one, `w_row` which row of W it is. Called by all threads.
template <ushort BITS> inline void multiply_tile(Matrix m, device const float* x, uint w_row, uint rows, uint simd, ushort lane, threadgroup float* shared) {
  const uint thread_index = simd * LANES + lane;
  const bool has_row = thread_index / 2 < rows;
  const uint first = thread_index % 2 * (TILE_INPUTS / 2);
  threadgroup const float* w_tile = shared + (TILE_ROWS + simd * 16) * X_STRIDE;
  simdgroup_float8x8 sums[TILE_ROWS / 8][2];
  UNROLL for (ushort r = 0; r < TILE_ROWS / 8; r++) {
    UNROLL for (ushort c = 0; c < 2; c++) sums[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  Piece piece;
  load_piece<BITS>(piece, m, x, has_row, w_row, first);
  for (uint column = 0; column < m.inputs; column += TILE_INPUTS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_piece<BITS>(piece, thread_index, shared);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (column + TILE_INPUTS < m.inputs) load_piece<BITS>(piece, m, x, has_row, w_row, column + TILE_INPUTS + first);
    UNROLL for (ushort k = 0; k < TILE_INPUTS; k += 8) {
      simdgroup_float8x8 w[2];
      UNROLL for (ushort c = 0; c < 2; c++) simdgroup_load(w[c], w_tile + c * 8 * X_STRIDE + k, X_STRIDE, ulong2(0, 0), true);
      UNROLL for (ushort r = 0; r < TILE_ROWS / 8; r++) {
        if (r * 8 >= rows) continue;
        simdgroup_float8x8 part;
        simdgroup_load(part, shared + r * 8 * X_STRIDE + k, X_STRIDE);
        UNROLL for (ushort c = 0; c < 2; c++) simdgroup_multiply_accumulate(sums[r][c], part, w[c], sums[r][c]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (ushort r = 0; r < TILE_ROWS / 8; r++) {
    if (r * 8 >= rows) continue;
    UNROLL for (ushort c = 0; c < 2; c++) simdgroup_store(sums[r][c], shared + r * 8 * Y_STRIDE + simd * 16 + c * 8, Y_STRIDE);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
