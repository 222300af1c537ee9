// A tile of a product on the tensor units of Metal 4, one group of 64 columns of x and W at a time.
//
// These units multiply halves and add in f32, in an order that is their own. To be as exact as f32 all the same they get whole
// numbers only: of W the codes, less the middle one; of x the values of a row's group as whole multiples of 2^-23 of the power of
// two above the largest, cut in two numbers of 11 bits and a sign. Sums of 64 products are then whole numbers of at most 2^24,
// which f32 has exactly in any order of adding, and the same bits come out on every device. Of x at most half a unit in the last
// place of the group's largest value is lost. Scales and biases are applied to these sums in f32, see NUMERICS.md.

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;

constant uint TILE_INPUTS = GROUP;
constant uint TILE_HALVES = TILE_ROWS * TILE_INPUTS;
// What a unit of the upper number of x counts in units of the lower one.
constant float UPPER = 4096.0f;
// Both numbers of x, the codes, and two floats for each row and output.
constant uint SHARED_FLOATS = 3 * TILE_HALVES / 2 + 2 * (TILE_ROWS + TILE_OUTPUTS);
static_assert(TILE_ROWS * Y_STRIDE <= SHARED_FLOATS, "the finished tile takes the place of its operands");
static_assert(2 * TILE_ROWS == GROUP_THREADS && TILE_ROWS == TILE_OUTPUTS, "two threads bring a row of each operand");
static_assert(TILE_INPUTS == 64, "a thread brings 32 columns");

typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Operand;

// Where a group's operands lie in threadgroup memory.
struct Operands {
  threadgroup half* upper;
  threadgroup half* lower;
  threadgroup half* codes;
  // Of a row of x: its unit, and the sum of its values.
  threadgroup float2* rows;
  // Of an output: its scale, and its bias for codes less the middle one.
  threadgroup float2* outputs;
};

inline Operands operands_in(threadgroup float* shared) {
  threadgroup half* upper = (threadgroup half*)shared;
  threadgroup float2* rows = (threadgroup float2*)(upper + 3 * TILE_HALVES);
  const Operands operands = {upper, upper + TILE_HALVES, upper + 2 * TILE_HALVES, rows, rows + TILE_ROWS};
  return operands;
}

// What a thread brings: half a row of x and of W.
struct Piece {
  float4 x[TILE_INPUTS / 8];
  uint4 codes[2];
  float scale;
  float bias;
};

template <ushort BITS> inline void load_piece(thread Piece& piece, Matrix m, device const float* x, bool has_row, uint w_row, uint column) {
  UNROLL for (ushort i = 0; i < TILE_INPUTS / 8; i++) piece.x[i] = has_row ? *(device const float4*)(x + column + 4 * i) : float4(0.0f);
  const uint at = w_row * m.inputs + column;
  UNROLL for (ushort i = 0; i < BITS / 4; i++) piece.codes[i] = m.codes[at / (128 / BITS) + i];
  piece.scale = bf16(m.scales[at / GROUP]);
  piece.bias = bf16(m.biases[at / GROUP]);
}

// Eight codes of 4 bits, less 8. See `halves`: those of odd columns come out 16 times as large.
inline void centre_q4(uint codes, threadgroup half4* to) {
  const half2 even = half2(half(1032)), odd = half2(half(1152)), sixteenth = half2(half(0.0625f));
  const half2 c04 = as_type<half2>((codes & 0x000f000fu) | 0x64006400u) - even;
  const half2 c15 = (as_type<half2>((codes & 0x00f000f0u) | 0x64006400u) - odd) * sixteenth;
  codes >>= 8;
  const half2 c26 = as_type<half2>((codes & 0x000f000fu) | 0x64006400u) - even;
  const half2 c37 = (as_type<half2>((codes & 0x00f000f0u) | 0x64006400u) - odd) * sixteenth;
  to[0] = half4(c04.x, c15.x, c26.x, c37.x);
  to[1] = half4(c04.y, c15.y, c26.y, c37.y);
}

// Four codes of 8 bits, less 128.
inline half4 centre_q8(uint codes) {
  const half2 middle = half2(half(1152));
  const half2 c02 = as_type<half2>((codes & 0x00ff00ffu) | 0x64006400u) - middle;
  const half2 c13 = as_type<half2>(((codes >> 8) & 0x00ff00ffu) | 0x64006400u) - middle;
  return half4(c02.x, c13.x, c02.y, c13.y);
}

inline float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Called by all threads of a simdgroup; the two threads of a row are neighbours.
template <ushort BITS> inline void store_piece(thread const Piece& piece, uint thread_index, Operands to) {
  const uint row = thread_index / 2, place = row * TILE_INPUTS + thread_index % 2 * (TILE_INPUTS / 2);
  uint largest = 0;
  UNROLL for (ushort i = 0; i < TILE_INPUTS / 8; i++) {
    const uint4 bits = as_type<uint4>(fabs(piece.x[i]));
    largest = max(largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));
  }
  largest = max(largest, simd_shuffle_xor(largest, ushort(1)));
  // The largest is below 2^(exponent - 126). From 23 on both the unit, 2^(exponent - 149), and its inverse are normal.
  const uint exponent = max(largest >> 23, 23u);
  const float unit = as_type<float>((exponent - 22) << 23), per_unit = as_type<float>((276 - exponent) << 23);
  threadgroup half4* upper = (threadgroup half4*)(to.upper + place);
  threadgroup half4* lower = (threadgroup half4*)(to.lower + place);
  float upper_sum = 0, lower_sum = 0;
  UNROLL for (ushort i = 0; i < TILE_INPUTS / 8; i++) {
    const float4 whole = rint(piece.x[i] * per_unit);
    const float4 high = rint(whole * (1.0f / UPPER));
    const float4 low = whole - high * UPPER;
    upper[i] = half4(high);
    lower[i] = half4(low);
    // Exact, as whole numbers.
    upper_sum += sum_of(high);
    lower_sum += sum_of(low);
  }
  upper_sum += simd_shuffle_xor(upper_sum, ushort(1));
  lower_sum += simd_shuffle_xor(lower_sum, ushort(1));
  threadgroup half4* codes = (threadgroup half4*)(to.codes + place);
  if (BITS == 4) {
    const uint words[4] = {piece.codes[0].x, piece.codes[0].y, piece.codes[0].z, piece.codes[0].w};
    UNROLL for (ushort i = 0; i < 4; i++) centre_q4(words[i], codes + 2 * i);
  } else {
    UNROLL for (ushort i = 0; i < 2; i++) {
      codes[4 * i] = centre_q8(piece.codes[i].x);
      codes[4 * i + 1] = centre_q8(piece.codes[i].y);
      codes[4 * i + 2] = centre_q8(piece.codes[i].z);
      codes[4 * i + 3] = centre_q8(piece.codes[i].w);
    }
  }
  if (thread_index % 2 == 0) {
    to.rows[row] = float2(unit, fma(UPPER, upper_sum, lower_sum) * unit);
    to.outputs[row] = float2(piece.scale, fma(BITS == 4 ? 8.0f : 128.0f, piece.scale, piece.bias));
  }
}

// A tile of up to ROWS rows.
template <ushort BITS, ushort ROWS> inline void multiply_rows(Matrix m, device const float* x, uint w_row, uint rows, uint thread_index, threadgroup float* shared) {
  const bool has_row = thread_index / 2 < rows;
  const uint first = thread_index % 2 * (TILE_INPUTS / 2);
  const Operands operands = operands_in(shared);
  matmul2d<matmul2d_descriptor(ROWS, TILE_OUTPUTS, TILE_INPUTS, false, true, false, matmul2d_descriptor::mode::multiply), execution_simdgroups<SIMDS>> product;
  Operand upper(operands.upper, dextents<int32_t, 2>(TILE_INPUTS, ROWS));
  Operand lower(operands.lower, dextents<int32_t, 2>(TILE_INPUTS, ROWS));
  Operand codes(operands.codes, dextents<int32_t, 2>(TILE_INPUTS, TILE_OUTPUTS));
  auto part = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
  auto sum = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
  UNROLL for (ushort i = 0; i < sum.get_capacity(); i++) {
    if (sum.is_valid_element(i)) sum[i] = 0.0f;
  }
  Piece piece;
  load_piece<BITS>(piece, m, x, has_row, w_row, first);
  for (uint column = 0; column < m.inputs; column += TILE_INPUTS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_piece<BITS>(piece, thread_index, operands);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (column + TILE_INPUTS < m.inputs) load_piece<BITS>(piece, m, x, has_row, w_row, column + TILE_INPUTS + first);
    product.run(upper, codes, part);
    UNROLL for (ushort i = 0; i < part.get_capacity(); i++) {
      if (!part.is_valid_element(i)) continue;
      const auto at = part.get_multidimensional_index(i);
      const float2 row = operands.rows[at[1]], output = operands.outputs[at[0]];
      sum[i] = fma(row.x * UPPER * output.x, part[i], fma(row.y, output.y, sum[i]));
    }
    product.run(lower, codes, part);
    UNROLL for (ushort i = 0; i < part.get_capacity(); i++) {
      if (!part.is_valid_element(i)) continue;
      const auto at = part.get_multidimensional_index(i);
      sum[i] = fma(operands.rows[at[1]].x * operands.outputs[at[0]].x, part[i], sum[i]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (ushort i = 0; i < sum.get_capacity(); i++) {
    if (!sum.is_valid_element(i)) continue;
    const auto at = sum.get_multidimensional_index(i);
    shared[at[1] * Y_STRIDE + at[0]] = sum[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A tile of `rows` rows, left in `shared` as [TILE_ROWS, TILE_OUTPUTS] with rows Y_STRIDE apart. Thread t brings row t / 2 of
// both operands: `x` is where that row begins, if there is one, `w_row` which row of W it is. Called by all threads. What a tile
// costs depends on its rows up to 16, 32 or 64.
template <ushort BITS> inline void multiply_tile(Matrix m, device const float* x, uint w_row, uint rows, uint simd, ushort lane, threadgroup float* shared) {
  const uint thread_index = simd * LANES + lane;
  if (rows <= 16) multiply_rows<BITS, 16>(m, x, w_row, rows, thread_index, shared);
  else if (rows <= 32) multiply_rows<BITS, 32>(m, x, w_row, rows, thread_index, shared);
  else multiply_rows<BITS, 64>(m, x, w_row, rows, thread_index, shared);
}
