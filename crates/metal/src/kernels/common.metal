// What several kernels need. The constants of the shape stand before this file, see `prelude` in mod.rs.
#include <metal_stdlib>
using namespace metal;

constant uint LANES = 32;
// Simdgroups and threads of every threadgroup that reads weights.
constant uint SIMDS = 4;
constant uint GROUP_THREADS = SIMDS * LANES;
// Columns of a row that one lane holds, and one simdgroup.
constant uint LANE_COLUMNS = 32;
constant uint SLICE_COLUMNS = LANES * LANE_COLUMNS;
// Rows of the residual stream that one threadgroup finishes, and the partial sums of squares that this makes.
constant uint STREAM_ROWS = 8;
constant uint STREAM_GROUPS = HIDDEN / STREAM_ROWS;

// Rows of x in one tile of a matrix product over many tokens, its outputs, and how far its rows are apart in threadgroup memory:
// a few words more than what they hold, so that eight of them begin in different banks.
constant uint TILE_ROWS = 64;
constant uint TILE_OUTPUTS = 64;
constant uint Y_STRIDE = TILE_OUTPUTS + 8;
// Tokens that the delta rule takes at a time over many tokens.
constant uint CHUNK = 64;

inline float bf16(ushort bits) { return as_type<float>(uint(bits) << 16); }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

inline float silu(float x) { return x / (1.0f + exp(-x)); }

// log(1 + x) for x >= 0, exact where 1 + x is not.
inline float log_of_1_plus(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : x * (log(sum) / (sum - 1.0f));
}

// exp(-rate * softplus(a)): what is left of a delta state after a token. Reference: `decay`.
inline float decay_of(float a, float rate) { return exp(-rate * (max(a, 0.0f) + log_of_1_plus(exp(-fabs(a))))); }

// The sum over all lanes, in every lane, in an order that is the same on every device; that of simd_sum is Apple's own.
inline float sum_lanes(float x) {
  for (ushort mask = LANES / 2; mask > 0; mask /= 2) x += simd_shuffle_xor(x, mask);
  return x;
}

// The sum over all threads of a threadgroup of SIMDS simdgroups, in every thread, in the same order everywhere.
inline float sum_group(float x, uint simd, ushort lane, threadgroup float (&partial)[SIMDS]) {
  const float sum = sum_lanes(x);
  if (lane == 0) partial[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

// Arrays that are to stay in registers are indexed by constants only, so loops over them are unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")

// Half of the sums goes to the lane across MASK, half is kept and added to what comes from there; and so on with the halves.
template <ushort HALF, ushort MASK> struct Fold {
  static float sum(thread float* sums, ushort lane) {
    const bool upper = (lane & MASK) != 0;
    UNROLL for (ushort i = 0; i < HALF; i++) {
      const float kept = upper ? sums[i + HALF] : sums[i];
      const float sent = upper ? sums[i] : sums[i + HALF];
      sums[i] = kept + simd_shuffle_xor(sent, MASK);
    }
    return Fold<HALF / 2, MASK / 2>::sum(sums, lane);
  }
};

template <ushort MASK> struct Fold<0, MASK> {
  static float sum(thread float* sums, ushort) {
    float sum = sums[0];
    for (ushort mask = MASK; mask > 0; mask /= 2) sum += simd_shuffle_xor(sum, mask);
    return sum;
  }
};

// N sums over all lanes, N a power of two up to 32: lane l receives number l / (32 / N). At most 31 shuffles in place of 5 N.
template <ushort N> inline float sum_each(thread float (&sums)[N], ushort lane) {
  return Fold<N / 2, LANES / 2>::sum(sums, lane);
}

// ---- quantized rows ----

// A matrix [rows, inputs] of 4 or 8 bits as the checkpoint packs it.
struct Matrix {
  device const uint4* codes;
  device const ushort* scales;
  device const ushort* biases;
  uint inputs;
};

// A lane's 32 inputs. For 4-bit codes those of odd columns are divided by 16, see `halves`.
struct Inputs {
  float x[LANE_COLUMNS];
  float sum;
};

// 0x6400 is 1024 as a half, whose ten bits of mantissa then count in ones: two codes of up to 8 bits become exact halves
// without a conversion, which takes four times as long on older GPUs. A 4-bit code from an odd column stands four bits
// higher and comes out 16 times as large.
inline half2 halves(uint codes) { return as_type<half2>(codes | 0x64006400u) - half2(half(1024)); }

inline void load_inputs(thread Inputs& in, device const float* x, uint column, float scale, float odd) {
  device const float4* from = (device const float4*)(x + column);
  in.sum = 0;
  UNROLL for (ushort i = 0; i < LANE_COLUMNS / 4; i++) {
    const float4 v = from[i] * scale;
    in.sum += (v.x + v.y) + (v.z + v.w);
    in.x[4 * i] = v.x;
    in.x[4 * i + 1] = v.y * odd;
    in.x[4 * i + 2] = v.z;
    in.x[4 * i + 3] = v.w * odd;
  }
}

inline void load_inputs_q4(thread Inputs& in, device const float* x, uint column, float scale) {
  load_inputs(in, x, column, scale, 0.0625f);
}

// scale * code + bias of eight columns.
inline void dequantize_q4(uint codes, float scale, float bias, thread float4& low, thread float4& high) {
  const half2 c04 = halves(codes & 0x000f000fu), c15 = halves(codes & 0x00f000f0u);
  codes >>= 8;
  const half2 c26 = halves(codes & 0x000f000fu), c37 = halves(codes & 0x00f000f0u);
  const float odd = scale * 0.0625f;
  low = float4(fma(float(c04.x), scale, bias), fma(float(c15.x), odd, bias), fma(float(c26.x), scale, bias), fma(float(c37.x), odd, bias));
  high = float4(fma(float(c04.y), scale, bias), fma(float(c15.y), odd, bias), fma(float(c26.y), scale, bias), fma(float(c37.y), odd, bias));
}

// The same of four columns of 8 bits.
inline float4 dequantize_q8(uint codes, float scale, float bias) {
  const half2 c02 = halves(codes & 0x00ff00ffu), c13 = halves((codes >> 8) & 0x00ff00ffu);
  return float4(fma(float(c02.x), scale, bias), fma(float(c13.x), scale, bias), fma(float(c02.y), scale, bias), fma(float(c13.y), scale, bias));
}

// sum of code * x over eight columns
inline float dot_q4(uint codes, thread const Inputs& in, ushort first, float sum) {
  const half2 c04 = halves(codes & 0x000f000fu), c15 = halves(codes & 0x00f000f0u);
  codes >>= 8;
  const half2 c26 = halves(codes & 0x000f000fu), c37 = halves(codes & 0x00f000f0u);
  sum = fma(float(c04.x), in.x[first], sum);
  sum = fma(float(c15.x), in.x[first + 1], sum);
  sum = fma(float(c26.x), in.x[first + 2], sum);
  sum = fma(float(c37.x), in.x[first + 3], sum);
  sum = fma(float(c04.y), in.x[first + 4], sum);
  sum = fma(float(c15.y), in.x[first + 5], sum);
  sum = fma(float(c26.y), in.x[first + 6], sum);
  return fma(float(c37.y), in.x[first + 7], sum);
}

// sum of code * x over four columns
inline float dot_q8(uint codes, thread const Inputs& in, ushort first, float sum) {
  const half2 c02 = halves(codes & 0x00ff00ffu), c13 = halves((codes >> 8) & 0x00ff00ffu);
  sum = fma(float(c02.x), in.x[first], sum);
  sum = fma(float(c13.x), in.x[first + 1], sum);
  sum = fma(float(c02.y), in.x[first + 2], sum);
  return fma(float(c13.y), in.x[first + 3], sum);
}

// A lane's share of row . x, from column `column` on: scale * sum(code * x) + bias * sum(x).
inline float row_q4(Matrix m, uint row, uint column, thread const Inputs& in) {
  const uint4 codes = m.codes[(row * m.inputs + column) / 32];
  const uint group = (row * m.inputs + column) / GROUP;
  float sum = dot_q4(codes.x, in, 0, 0.0f);
  sum = dot_q4(codes.y, in, 8, sum);
  sum = dot_q4(codes.z, in, 16, sum);
  sum = dot_q4(codes.w, in, 24, sum);
  return fma(bf16(m.scales[group]), sum, bf16(m.biases[group]) * in.sum);
}

inline float row_q8(Matrix m, uint row, uint column, thread const Inputs& in) {
  const uint at = (row * m.inputs + column) / 16;
  const uint4 low = m.codes[at], high = m.codes[at + 1];
  const uint group = (row * m.inputs + column) / GROUP;
  float sum = dot_q8(low.x, in, 0, 0.0f);
  sum = dot_q8(low.y, in, 4, sum);
  sum = dot_q8(low.z, in, 8, sum);
  sum = dot_q8(low.w, in, 12, sum);
  sum = dot_q8(high.x, in, 16, sum);
  sum = dot_q8(high.y, in, 20, sum);
  sum = dot_q8(high.z, in, 24, sum);
  sum = dot_q8(high.w, in, 28, sum);
  return fma(bf16(m.scales[group]), sum, bf16(m.biases[group]) * in.sum);
}

// ---- the residual stream and its norm ----
//
// No kernel normalizes. Who finishes rows of the stream h leaves, beside h, h times the gain of the norm that comes next
// and the sum of squares of its rows; who reads them multiplies its results by `norm_scale`.

// 1 / sqrt(mean(h^2) + eps), in every lane. squares: [STREAM_GROUPS]
inline float norm_scale(device const float* squares, ushort lane) {
  float sum = 0;
  for (uint i = lane; i < STREAM_GROUPS; i += LANES) sum += squares[i];
  return rsqrt(sum_lanes(sum) / float(HIDDEN) + RMS_EPS);
}

// Called by one whole simdgroup: lane l < STREAM_ROWS brings the new value of row STREAM_ROWS * group + l.
inline void finish_rows(float value, uint group, ushort lane, device const float* gain, device float* stream,
                        device float* gained, device float* squares) {
  const bool has_row = lane < STREAM_ROWS;
  if (has_row) {
    const uint row = group * STREAM_ROWS + lane;
    stream[row] = value;
    gained[row] = value * gain[row];
  }
  const float sum = sum_lanes(has_row ? value * value : 0.0f);
  if (lane == 0) squares[group] = sum;
}
