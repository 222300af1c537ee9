// What kernels may use of the language, each with a result that says whether it means here what MSL says.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant uint SCALE [[function_constant(0)]];
constant float TABLE[3] = {0.5f, 1.5f, 2.5f};

struct Pair {
  float2 x;
  uint n;
};

// y: [12]
kernel void vectors(constant Pair& pair [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i > 0) return;
  const float4 v = float4(1, pair.x, 4);
  y[0] = v.x + v.w;
  y[1] = dot(v, float4(2.0f));
  const half2 h = half2(float2(0.1f, 2.0f));
  y[2] = float(h.x);
  y[3] = float2(h).y;
  const uint2 bits = as_type<uint2>(pair.x);
  y[4] = as_type<float>(bits.y);
  y[5] = float(as_type<half2>(0x64056403u).y);
  y[6] = TABLE[pair.n] * float(SCALE);
  y[7] = v.zyx.x;
  y[8] = float(half(2048.0f) + half(1.0f));
  y[9] = exp(0.0f) + fast::exp(1.0f);
  y[10] = clamp(7.0f, 0.0f, 3.0f);
  y[11] = float(uint(3.99f)) + select(1.0f, 2.0f, isnan(as_type<float>(0x7fc00000u)));
}

// y: [32, 8]
kernel void lanes(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  device float* out = y + lane * 8;
  const float x = float(lane);
  out[0] = simd_sum(x);
  out[1] = simd_max(x);
  out[2] = simd_shuffle_xor(x, ushort(5));
  out[3] = simd_shuffle_down(x, ushort(1));
  out[4] = simd_broadcast(x, ushort(9));
  out[5] = simd_prefix_exclusive_sum(1.0f);
  out[6] = simd_any(lane == 3) && !simd_all(lane == 3) ? 1.0f : 0.0f;
  const float2 both = simd_shuffle(float2(x, -x), ushort(31 - lane));
  out[7] = both.x - both.y;
}

// c = a b^T + c, all [8, 8]; through threadgroup memory of the encoder's size
kernel void matrices(device const float* a [[buffer(0)]], device const half* b [[buffer(1)]], device float* c [[buffer(2)]],
                     threadgroup half* staged [[threadgroup(0)]], uint lane [[thread_index_in_simdgroup]]) {
  for (uint i = lane; i < 64; i += 32) staged[i] = b[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> x, sum;
  simdgroup_matrix<half, 8, 8> w;
  simdgroup_load(x, a, 8);
  simdgroup_load(w, staged, 8, ulong2(0, 0), true);
  simdgroup_load(sum, c, 8);
  simdgroup_multiply_accumulate(sum, x, w, sum);
  simdgroup_store(sum, c, 8);
}
