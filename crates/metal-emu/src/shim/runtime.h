// What a kernel sees of the runner: its lane, the calls at which lanes meet, and the report of faults.
//
// A shared object holds one .metal file and one runner. All state is global to it: the emulator opens a copy of the
// object per pipeline and runs it from one thread.
#pragma once
#include <cstddef>
#include <cstdint>

namespace msl {

struct U3 { uint32_t x, y, z; };

// What is known of four bytes of device memory: the stamps of the threadgroups that last wrote and read them.
struct Cell {
  uint32_t write;
  uint32_t read;  // high bit: several threadgroups have read since `level_stamp`
};

// A buffer as an encoder binds it. Laid out as in library.rs.
struct Binding {
  uint64_t begin, end;  // addresses
  uint32_t slot, writable;
  uint64_t read_bytes, written_bytes;  // each address once
};

// One dispatch. Laid out as in library.rs.
struct Launch {
  U3 groups, threads;
  uint32_t order;           // 0 forward, 1 reverse, else the seed of a shuffle
  uint32_t level_stamp;     // stamp of the first threadgroup since the last barrier
  uint32_t dispatch_stamp;  // stamp of this dispatch's first threadgroup
  uint32_t binding_count;
  uint64_t arena_begin, arena_end;
  Cell* cells;  // one for every four bytes of the arena
  Binding* bindings;
  void* buffers[31];
  uint32_t threadgroup_bytes[8];
  char* stacks;
  uint64_t stack_bytes;  // of one lane
};

struct Report {
  uint64_t lane_steps;  // simd calls, barriers and ends of lanes
  uint32_t faulted;
  char message[508];
};

struct Lane {
  U3 in_group, group, in_grid, group_size, groups, grid_size;
  uint32_t simd, lane, simds, index;
};

struct Arguments {
  void* buffers[31];
  void* threadgroup[8];
};

typedef void (*Thunk)(const Arguments*, const Lane*);

extern Lane* current;

// All of these take the call site, line << 8 | column, by which a meeting of lanes at different calls is noticed.
[[noreturn]] void fault(const char* what, uint32_t site);
void threadgroup_barrier(uint32_t site);
void simd_barrier(uint32_t site);
void whole_simdgroup(uint32_t site);  // a fault unless all 32 lanes live
// Every lane's value becomes visible to the others of its simdgroup: 32 slots of 16 bytes, valid until the next call.
const unsigned char* exchange(const void* value, size_t size, uint32_t site);
uint32_t exchanged_lanes();  // bits of the lanes that took part
// 8x8 matrices of float, one row-major product a * b per simdgroup; each lane brings two elements of both.
const float* multiply(const float lane_elements[4], uint32_t site);
inline void product(const float lane_elements[4], int row, int column, float two[2], uint32_t site) {
  const float* from = multiply(lane_elements, site) + row * 8 + column;
  two[0] = from[0], two[1] = from[1];
}
inline int lane() { return current->lane; }
inline uint32_t index_in_group() { return current->index; }
// Rows of halves, one behind the other.
struct HalfRows { const _Float16* data; uint32_t rows, columns; };
// left * right^T by all threads of the threadgroup, which are so many simdgroups: [left.rows, right.rows], valid until the
// next call. Threads do not wait for each other's memory here.
const float* multiply_rows(HalfRows left, HalfRows right, uint32_t simdgroups, uint32_t site);
struct RowProduct {
  const float* all;
  uint32_t columns;
  RowProduct(HalfRows left, HalfRows right, uint32_t simdgroups, uint32_t site) : all(multiply_rows(left, right, simdgroups, site)), columns(right.rows) {}
  float at(int row, int column) const { return all[row * columns + column]; }
};
// A variable in threadgroup memory comes to life: counted and poisoned.
void threadgroup_variable(void* address, size_t size);

// Converts to whatever pointer or reference a kernel takes.
struct Argument {
  void* address;
  template <class T> operator T*() const { return static_cast<T*>(address); }
  template <class T> operator T&() const { return *static_cast<T*>(address); }
};

// A parameter's type, for the table of the kernel. Laid out as in library.rs.
struct Type { uint32_t is_address, is_const, size; };
template <class T> struct TypeOf { static Type get() { return {0, 0, sizeof(T)}; } };
template <class T> struct TypeOf<T*> { static Type get() { return {1, 0, sizeof(T)}; } };
template <class T> struct TypeOf<const T*> { static Type get() { return {1, 1, sizeof(T)}; } };
template <class T> struct TypeOf<T&> { static Type get() { return {2, 0, sizeof(T)}; } };
template <class T> struct TypeOf<const T&> { static Type get() { return {2, 1, sizeof(T)}; } };
template <class... P> void types(void (*)(P...), Type* out) {
  const Type all[] = {TypeOf<P>::get()...};
  for (size_t i = 0; i < sizeof...(P); i++) out[i] = all[i];
}

}  // namespace msl
