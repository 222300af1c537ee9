// What a kernel sees of an NVIDIA GPU: a simdgroup is a warp, a threadgroup a block, each thread a lane of its own. Beside the
// emulator this is a second device that runs the files, with true concurrency.
#pragma once
#include <cstddef>
#include <cstdint>

// What clang needs of CUDA's own headers; `device` and `constant` are words of MSL.
#define __device__ __attribute__((__device__))
#define __global__ __attribute__((__global__))
#define __shared__ __attribute__((__shared__))
#define __constant__ __attribute__((__constant__))

#pragma clang force_cuda_host_device begin

namespace msl {

struct U3 { uint32_t x, y, z; };
struct Arguments { void* buffers[31]; };

// Converts to whatever pointer or reference a kernel takes.
struct Argument {
  void* address;
  template <class T> operator T*() const { return static_cast<T*>(address); }
  template <class T> operator T&() const { return *static_cast<T*>(address); }
};

struct Lane {
  U3 in_group, group, in_grid, group_size, groups, grid_size;
  uint32_t simd, lane, simds, index;
};

inline __device__ int lane() { return __nvvm_read_ptx_sreg_laneid(); }

inline __device__ Lane here() {
  const U3 at = {uint32_t(__nvvm_read_ptx_sreg_tid_x()), uint32_t(__nvvm_read_ptx_sreg_tid_y()), uint32_t(__nvvm_read_ptx_sreg_tid_z())};
  const U3 size = {uint32_t(__nvvm_read_ptx_sreg_ntid_x()), uint32_t(__nvvm_read_ptx_sreg_ntid_y()), uint32_t(__nvvm_read_ptx_sreg_ntid_z())};
  const U3 group = {uint32_t(__nvvm_read_ptx_sreg_ctaid_x()), uint32_t(__nvvm_read_ptx_sreg_ctaid_y()), uint32_t(__nvvm_read_ptx_sreg_ctaid_z())};
  const U3 groups = {uint32_t(__nvvm_read_ptx_sreg_nctaid_x()), uint32_t(__nvvm_read_ptx_sreg_nctaid_y()), uint32_t(__nvvm_read_ptx_sreg_nctaid_z())};
  const uint32_t index = (at.z * size.y + at.y) * size.x + at.x;
  Lane here;
  here.in_group = at;
  here.group = group;
  here.in_grid = {group.x * size.x + at.x, group.y * size.y + at.y, group.z * size.z + at.z};
  here.group_size = size;
  here.groups = groups;
  here.grid_size = {size.x * groups.x, size.y * groups.y, size.z * groups.z};
  here.simd = index / 32;
  here.lane = index % 32;
  here.simds = (size.x * size.y * size.z + 31) / 32;
  here.index = index;
  return here;
}
inline __device__ uint32_t index_in_group() { return here().index; }

inline __device__ void threadgroup_barrier(uint32_t) { __syncthreads(); }
inline __device__ void simd_barrier(uint32_t) { __nvvm_bar_warp_sync(~0u); }
inline __device__ void whole_simdgroup(uint32_t) {}

// The value of another lane.
template <class T> inline __device__ T from_lane(T value, int lane) {
  constexpr int words = (sizeof(T) + 3) / 4;
  int moved[words] = {};
  __builtin_memcpy(moved, &value, sizeof(T));
  for (int i = 0; i < words; i++) moved[i] = __nvvm_shfl_sync_idx_i32(~0u, moved[i], lane, 31);
  __builtin_memcpy(&value, moved, sizeof(T));
  return value;
}

// Two elements of the row-major product of 8x8 matrices of which each lane brings two elements, see metal_simdgroup_matrix.
inline __device__ void product(const float elements[4], int row, int column, float two[2], uint32_t) {
  two[0] = two[1] = 0;
  for (int k = 0; k < 8; k++) {
    // Lanes that have column k of this row of a, and this pair of columns of row k of b.
    const int of_a = ((row & 4) + (k >> 2) * 2) * 4 + (row & 3) * 2 + ((k & 3) >> 1);
    const int of_b = ((k & 4) + (column >> 2) * 2) * 4 + (k & 3) * 2 + ((column & 3) >> 1);
    const float a0 = from_lane(elements[0], of_a), a1 = from_lane(elements[1], of_a);
    const float b0 = from_lane(elements[2], of_b), b1 = from_lane(elements[3], of_b);
    const float a = k & 1 ? a1 : a0;
    two[0] = __builtin_fmaf(a, b0, two[0]);
    two[1] = __builtin_fmaf(a, b1, two[1]);
  }
}

// Rows of halves, one behind the other, and left * right^T.
struct HalfRows { const _Float16* data; uint32_t rows, columns; };
struct RowProduct {
  HalfRows left, right;
  __device__ RowProduct(HalfRows left, HalfRows right, uint32_t, uint32_t) : left(left), right(right) {}
  __device__ float at(int row, int column) const {
    float sum = 0;
    for (uint32_t k = 0; k < left.columns; k++) sum += float(left.data[row * left.columns + k]) * float(right.data[column * right.columns + k]);
    return sum;
  }
};
[[noreturn]] inline __device__ void fault(const char*, uint32_t) { __builtin_trap(); }

// ---- functions that clang has no instruction for: in f64, within one unit in the last place of f32 ----
inline __device__ float sqrt(float x) { return __nvvm_sqrt_rn_f(x); }
inline __device__ float rint(float x) { return __builtin_rintf(x); }
inline __device__ float floor(float x) { return __builtin_floorf(x); }
inline __device__ float fabs(float x) { return __builtin_fabsf(x); }
inline __device__ float exp(float x) {
  if (!(x < 89.0f)) return x < 89.0f || x != x ? x : __builtin_inff();
  if (x < -104.0f) return 0.0f;
  const double n = __builtin_rint(double(x) * 1.4426950408889634), r = double(x) - n * 0.69314718055994531;
  double sum = 1.0;
  for (int i = 11; i > 0; i--) sum = 1.0 + sum * r / double(i);
  const int64_t bits = (int64_t(n) + 1023) << 52;
  double power;
  __builtin_memcpy(&power, &bits, 8);
  return float(sum * power);
}
inline __device__ float log(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
  if (x == __builtin_inff()) return x;
  const double wide = double(x);
  int64_t bits;
  __builtin_memcpy(&bits, &wide, 8);
  int64_t exponent = (bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffll) | 0x3ff0000000000000ll;
  double m;
  __builtin_memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) m *= 0.5, exponent++;
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 0.0;
  for (int i = 21; i > 0; i -= 2) sum = sum * square + 1.0 / double(i);
  return float(2.0 * s * sum + double(exponent) * 0.69314718055994531);
}

}  // namespace msl
