#pragma once
#include <metal_tensor>
namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  ulong bits;
  constexpr matmul2d_descriptor(int m, int n, int k, bool = false, bool = false, bool = false, mode = mode::multiply) : bits(ulong(m) ^ ulong(n) ^ ulong(k)) {}
  constexpr operator ulong() const { return bits; }
};
template <ulong DESCRIPTOR, class Scope> struct matmul2d {
  template <class Left, class Right, class T> ::metal::cooperative_tensor<T> get_destination_cooperative_tensor() const;
  template <class Left, class Right, class T> void run(thread Left&, thread Right&, thread ::metal::cooperative_tensor<T>&) const;
};
}  // namespace tensor_ops
}  // namespace mpp
