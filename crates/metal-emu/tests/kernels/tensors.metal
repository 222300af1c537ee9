// Products on tensors of MSL 4: a sound one, and what must not be done with them. a: [32, 64]; b: [16, 64]; y: [32, 16]
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

constant uint ROWS = 32;
constant uint OUTPUTS = 16;
constant uint INPUTS = 64;

typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Operand;
typedef matmul2d<matmul2d_descriptor(32, 16, 64, false, true, false, matmul2d_descriptor::mode::multiply), execution_simdgroups<2>> Product;
typedef matmul2d<matmul2d_descriptor(32, 16, 64, false, true, false, matmul2d_descriptor::mode::multiply_accumulate), execution_simdgroups<2>> Sum;

inline void bring(device const half* from, threadgroup half* to, uint count, uint thread_index) {
  for (uint i = thread_index; i < count; i += 64) to[i] = from[i];
}

// y = a b^T + a b^T + row + column / 100
kernel void product(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]], device float* y [[buffer(2)]],
                    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half4 memory[(ROWS + OUTPUTS) * INPUTS / 4];
  threadgroup half* left = (threadgroup half*)memory;
  threadgroup half* right = left + ROWS * INPUTS;
  bring(a, left, ROWS * INPUTS, thread_index);
  bring(b, right, OUTPUTS * INPUTS, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Operand x(left, dextents<int32_t, 2>(INPUTS, ROWS));
  Operand w(right, dextents<int32_t, 2>(INPUTS, OUTPUTS));
  Product first;
  Sum second;
  auto once = first.get_destination_cooperative_tensor<Operand, Operand, float>();
  auto twice = second.get_destination_cooperative_tensor<Operand, Operand, float>();
  first.run(x, w, once);
  for (ushort i = 0; i < once.get_capacity(); i++) {
    if (once.is_valid_element(i)) twice[i] = once[i];
  }
  second.run(x, w, twice);
  for (ushort i = 0; i < twice.get_capacity(); i++) {
    if (!twice.is_valid_element(i)) continue;
    const auto at = twice.get_multidimensional_index(i);
    y[at[1] * OUTPUTS + at[0]] = twice[i] + float(at[1]) + float(at[0]) * 0.01f;
  }
}

// Elements that are none have no place.
kernel void every_element(device float* y [[buffer(0)]]) {
  Product product;
  auto tile = product.get_destination_cooperative_tensor<Operand, Operand, float>();
  for (ushort i = 0; i < tile.get_capacity(); i++) {
    const auto at = tile.get_multidimensional_index(i);
    y[at[1] * OUTPUTS + at[0]] = 0.0f;
  }
}

kernel void product_of_what_was_not_waited_for(device float* y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half4 memory[ROWS * INPUTS / 4];
  threadgroup half* left = (threadgroup half*)memory;
  for (uint i = thread_index; i < ROWS * INPUTS; i += 64) left[i] = half(1.0f);
  Operand x(left, dextents<int32_t, 2>(INPUTS, ROWS));
  Operand w(left, dextents<int32_t, 2>(INPUTS, OUTPUTS));
  Product product;
  auto tile = product.get_destination_cooperative_tensor<Operand, Operand, float>();
  product.run(x, w, tile);
  y[thread_index] = tile[0];
}

kernel void operand_overwritten_at_once(device float* y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half4 memory[ROWS * INPUTS / 4];
  threadgroup half* left = (threadgroup half*)memory;
  for (uint i = thread_index; i < ROWS * INPUTS; i += 64) left[i] = half(1.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Operand x(left, dextents<int32_t, 2>(INPUTS, ROWS));
  Operand w(left, dextents<int32_t, 2>(INPUTS, OUTPUTS));
  Product product;
  auto tile = product.get_destination_cooperative_tensor<Operand, Operand, float>();
  product.run(x, w, tile);
  left[thread_index] = half(2.0f);
  y[thread_index] = tile[0];
}

kernel void product_by_one_simdgroup(device float* y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half4 memory[ROWS * INPUTS / 4];
  threadgroup half* left = (threadgroup half*)memory;
  Operand x(left, dextents<int32_t, 2>(INPUTS, ROWS));
  Operand w(left, dextents<int32_t, 2>(INPUTS, OUTPUTS));
  Product product;
  auto tile = product.get_destination_cooperative_tensor<Operand, Operand, float>();
  if (thread_index < 32) product.run(x, w, tile);
  y[thread_index] = 0.0f;
}

kernel void extents_of_another_product(device float* y [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half4 memory[ROWS * INPUTS / 4];
  threadgroup half* left = (threadgroup half*)memory;
  Operand x(left, dextents<int32_t, 2>(INPUTS, OUTPUTS));
  Product product;
  auto tile = product.get_destination_cooperative_tensor<Operand, Operand, float>();
  product.run(x, x, tile);
  y[thread_index] = 0.0f;
}
