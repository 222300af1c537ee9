// One kernel per fault, each with a sound twin where it has one.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

kernel void sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint& n [[buffer(2)]],
                uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float partial[32];
  float total = 0;
  for (uint i = thread_index; i < n; i += threads) total += x[group * n + i];
  total = simd_sum(total);
  if (lane == 0) partial[simd] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  total = simd_sum(lane < simds ? partial[lane] : 0.0f);
  if (thread_index == 0) y[group] = total;
}

// The same without its barrier.
kernel void sum_without_barrier(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                                uint simds [[simdgroups_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[32];
  const float total = simd_sum(x[thread_index]);
  if (lane == 0) partial[simd] = total;
  const float all = simd_sum(lane < simds ? partial[lane] : 0.0f);
  if (thread_index == 0) y[0] = all;
}

kernel void reads_unwritten_threadgroup_memory(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float never[32];
  y[lane] = never[lane];
}

kernel void divergent_simd_calls(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  if (lane < 16) y[lane] = simd_sum(1.0f);
  else y[lane] = simd_max(2.0f);
}

kernel void one_side_of_a_branch_calls(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  if (lane < 16) y[lane] = simd_sum(1.0f);
}

kernel void return_before_a_barrier(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 40) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = 1;
}

kernel void different_barriers(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
  else threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = 1;
}

kernel void shuffle_from_beyond(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  y[lane] = simd_shuffle(float(lane), ushort(lane + 1));
}

kernel void too_much_threadgroup_memory(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[8000];
  threadgroup float b[300];
  a[i] = 1;
  b[i] = 1;
  y[i] = a[i] + b[i];
}

kernel void write_at(device float* y [[buffer(0)]], constant uint& at [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) y[at] = 1;
}

kernel void read_at(device const float* x [[buffer(0)]], constant uint& at [[buffer(1)]], device float* y [[buffer(2)]],
                    uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) y[0] = x[at];
}

kernel void read_four_at(device const float* x [[buffer(0)]], constant uint& at [[buffer(1)]], device float4* y [[buffer(2)]],
                         uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) y[0] = *(device const float4*)(x + at);
}

kernel void write_through_a_cast(device const float* x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  device float* y = (device float*)x;
  if (i == 0) y[0] = 1;
}

kernel void groups_write_one_place(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) y[0] = 1;
}

kernel void groups_read_what_others_write(device float* y [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
                                          uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) y[group + 1] = y[group];
}

[[max_total_threads_per_threadgroup(64)]] kernel void at_most_64_threads(device float* y [[buffer(0)]],
                                                                          uint i [[thread_index_in_threadgroup]]) {
  y[i] = 1;
}

// The lanes' ones become a matrix before all of them are written. y: [8, 8]
kernel void matrix_of_what_was_not_waited_for(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float ones[64];
  ones[2 * lane] = 1;
  ones[2 * lane + 1] = 1;
  simdgroup_matrix<float, 8, 8> x;
  simdgroup_load(x, ones, 8);
  simdgroup_store(x, y, 8);
}

kernel void matrix_of_a_part_of_the_lanes(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  if (lane >= 16) return;
  simdgroup_matrix<float, 8, 8> x;
  simdgroup_load(x, y, 8);
  simdgroup_store(x, y, 8);
}
