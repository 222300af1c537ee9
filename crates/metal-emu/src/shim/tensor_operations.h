// Stands in for the tensor operations of Apple's <MetalPerformancePrimitives/MetalPerformancePrimitives.h>: products of two
// tensors of halves in threadgroup memory, rows by rows, into a cooperative tensor of floats. The real one takes more types
// and forms; a kernel that needs one brings it here.
#pragma once
#include <metal_tensor>

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left = false, bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right), relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
  // Metal takes a descriptor as a template argument, C++17 takes only numbers there.
  constexpr operator uint64_t() const {
    return uint64_t(m) | uint64_t(n) << 16 | uint64_t(k) << 32 | uint64_t(transpose_left) << 60 | uint64_t(transpose_right) << 61 |
           uint64_t(relaxed_precision) << 62 | uint64_t(matmul_mode == mode::multiply_accumulate) << 63;
  }
};

template <uint64_t DESCRIPTOR, class Scope> struct matmul2d {
  static constexpr int M = DESCRIPTOR & 0xffff, N = DESCRIPTOR >> 16 & 0xffff, K = DESCRIPTOR >> 32 & 0xfffffff;
  static constexpr bool ADDS = DESCRIPTOR >> 63;
  static_assert((DESCRIPTOR >> 60 & 7) == 2, "the stand-in multiplies rows by rows in full precision");
  static_assert(M % 16 == 0 || N % 16 == 0, "Metal asks for a multiple of 16 on one side");

  template <class Left, class Right, class T> struct Operation {
    typedef ::metal::tensor<half, ::metal::dextents<int32_t, 2>, ::metal::tensor_inline> Halves;
    static_assert(std::is_same<Left, Halves>::value && std::is_same<Right, Halves>::value && std::is_same<T, float>::value,
                  "the stand-in multiplies halves into floats");
  };
  template <class Left, class Right, class T>
  using Destination = ::metal::cooperative_tensor<T, N, M, Scope::msl_count * 32, Operation<Left, Right, T>>;

  template <class Left, class Right, class T> Destination<Left, Right, T> get_destination_cooperative_tensor() const {
    (void)sizeof(Operation<Left, Right, T>);
    return Destination<Left, Right, T>();
  }

  template <class Left, class Right, class T>
  void run(Left& left, Right& right, Destination<Left, Right, T>& to, uint site = __builtin_LINE() << 8 | (__builtin_COLUMN() & 255)) const {
    const msl::HalfRows rows[2] = {of(left, M, site), of(right, N, site)};
    const msl::RowProduct product(rows[0], rows[1], Scope::msl_count, site);
    for (int i = 0; i < to.get_capacity(); i++) {
      if (!to.is_valid_element(i)) continue;
      const auto at = to.get_multidimensional_index(i);
      to[i] = (ADDS ? to[i] : T(0)) + product.at(at[1], at[0]);
    }
  }

 private:
  template <class Tensor> static msl::HalfRows of(Tensor& tensor, int rows, uint site) {
    const auto lengths = tensor.msl_extents.lengths;
    if (lengths[0] != K || lengths[1] != rows) msl::fault("matmul2d of tensors that do not have the extents of its descriptor", site);
    return {tensor.msl_data, uint32_t(rows), uint32_t(K)};
  }
};

}  // namespace tensor_ops
}  // namespace mpp
