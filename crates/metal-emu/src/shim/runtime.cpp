// Runs the threadgroups of a dispatch one after the other, each thread a fiber with a stack of its own.
//
// Lanes of a simdgroup meet at simd calls, threads of a threadgroup at barriers; a thread that arrives first waits and
// another goes on, in an order that the dispatch chooses. Loads and stores of kernels are announced by clang
// (-fsanitize-coverage=trace-loads,trace-stores) and checked here before they happen.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

// First and last byte of this shared object, by the linker.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;

namespace msl {

Lane* current;

namespace {

constexpr uint32_t SEVERAL = 1u << 31;
constexpr size_t THREADGROUP_MEMORY = 32768;  // of every Apple GPU family from 7 on
constexpr uint32_t MOST_THREADS = 1024;       // as memory.rs has it
constexpr uint32_t MOST_PRODUCTS = 128 * 128;

struct Simdgroup {
  alignas(64) unsigned char slots[2][32][16];
  float product[2][64];
  uint32_t took_part[2];
  uint32_t phase, arrived, started, live, site;
};

enum class Status : uint8_t { Runs, InSimdCall, InBarrier, Done };

struct Variable { char* address; size_t size, offset; };

// Who touched two bytes of threadgroup memory since the last barrier.
struct LocalCell { uint64_t write_phase, read_phase; uint32_t writer, readers; };

// What kernels touch of it lies inside this object, see `touch`.
struct Group {
  const Launch* launch;
  Report* report;
  Thunk thunk;
  Arguments arguments;
  Lane lanes[MOST_THREADS];
  std::vector<void*> stacks;
  std::vector<Status> status;
  std::vector<uint32_t> waits_for;
  std::vector<uint32_t> order, place;  // place[order[i]] == i
  Simdgroup simds[MOST_THREADS / 32];
  std::vector<Variable> variables;
  std::vector<LocalCell> local;
  float product[MOST_PRODUCTS];  // of `multiply_rows`
  alignas(16) char dynamic[2 * THREADGROUP_MEMORY];
  size_t dynamic_bytes;
  void* scheduler;
  uint32_t me, count, live, barrier_phase, barrier_arrived, barrier_site, stamp;
  uint64_t phase;  // counts barriers and threadgroups
  size_t threadgroup_bytes;
} g;

// Saves the registers of one stack and takes up another.
extern "C" void msl_switch(void** from, void* to);
asm(R"(.text
.local msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

Simdgroup& simd_of(uint32_t thread) { return g.simds[thread / 32]; }

bool ready(uint32_t thread) {
  switch (g.status[thread]) {
    case Status::Runs: return true;
    case Status::InSimdCall: return simd_of(thread).phase != g.waits_for[thread];
    case Status::InBarrier: return g.barrier_phase != g.waits_for[thread];
    default: return false;
  }
}

void resume(uint32_t from, uint32_t to) {
  g.status[to] = Status::Runs;
  if (to == from) return;
  g.me = to;
  current = &g.lanes[to];
  msl_switch(&g.stacks[from], g.stacks[to]);
}

// Lets another thread run: of the same simdgroup if one can, else of the next that can.
void yield() {
  const uint32_t from = g.me, at = g.place[from], first = at & ~31u;
  const uint32_t end = first + 32 < g.count ? first + 32 : g.count;
  for (uint32_t n = first, i = at; n < end; n++) {
    if (++i == end) i = first;
    if (ready(g.order[i])) return resume(from, g.order[i]);
  }
  for (uint32_t n = 0, i = end - 1; n < g.count; n++) {
    if (++i >= g.count) i = 0;
    if (ready(g.order[i])) return resume(from, g.order[i]);
  }
  if (g.live) fault("deadlock: threads wait at different barriers or simd calls", g.barrier_site);
  void* gone;
  msl_switch(&gone, g.scheduler);
}

// One rendezvous of the live lanes of a simdgroup; the last to arrive computes. Returns which of the two banks holds it.
template <class Compute> int meet(const void* value, size_t size, uint32_t site, Compute compute) {
  Simdgroup& s = simd_of(g.me);
  const uint32_t phase = s.phase, bank = phase & 1, bit = 1u << (g.me % 32);
  memcpy(s.slots[bank][g.me % 32], value, size);
  g.report->lane_steps++;
  if (!s.arrived) s.site = site;
  if (s.live != s.started) fault("a simd call after a lane of the simdgroup has returned", site);
  if (s.site != site) fault("lanes of one simdgroup meet at different simd calls", site);
  s.arrived |= bit;
  if (s.arrived == s.live) {
    s.took_part[bank] = s.arrived;
    compute(s, bank);
    s.arrived = 0;
    s.phase++;
  } else {
    g.status[g.me] = Status::InSimdCall;
    g.waits_for[g.me] = phase;
    yield();
  }
  return bank;
}

void body() {
  g.thunk(&g.arguments, current);
  const uint32_t me = g.me;
  Simdgroup& s = simd_of(me);
  g.status[me] = Status::Done;
  g.live--;
  g.report->lane_steps++;
  s.live &= ~(1u << (me % 32));
  if (s.live && s.arrived == s.live) fault("a lane returned while others of its simdgroup wait at a simd call", s.site);
  if (g.live && g.barrier_arrived == g.live) fault("a thread returned while others wait at a barrier", g.barrier_site);
  yield();
  abort();
}

void start_thread(uint32_t thread, U3 group) {
  const U3 size = g.launch->threads, groups = g.launch->groups;
  Lane& lane = g.lanes[thread];
  lane.in_group = {thread % size.x, thread / size.x % size.y, thread / (size.x * size.y)};
  lane.group = group;
  lane.in_grid = {group.x * size.x + lane.in_group.x, group.y * size.y + lane.in_group.y, group.z * size.z + lane.in_group.z};
  lane.group_size = size;
  lane.groups = groups;
  lane.grid_size = {size.x * groups.x, size.y * groups.y, size.z * groups.z};
  lane.simd = thread / 32;
  lane.lane = thread % 32;
  lane.simds = (g.count + 31) / 32;
  lane.index = thread;
  // Stacks start at different distances from their ends: else all would fall into the same sets of the cache.
  char* end = g.launch->stacks + (thread + 1) * g.launch->stack_bytes;
  void** top = reinterpret_cast<void**>(end - thread % 64 * 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(body);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  g.stacks[thread] = top;
}

void run_group(U3 group) {
  g.live = g.count;
  g.barrier_phase = g.barrier_arrived = 0;
  g.phase++;
  g.variables.clear();
  g.threadgroup_bytes = 0;
  memset(g.dynamic, 0xff, g.dynamic_bytes);
  char* at = g.dynamic;
  for (int i = 0; i < 8; i++) {
    g.arguments.threadgroup[i] = at;
    if (g.launch->threadgroup_bytes[i]) threadgroup_variable(at, g.launch->threadgroup_bytes[i]);
    at += (g.launch->threadgroup_bytes[i] + 15) & ~15u;
  }
  g.status.assign(g.count, Status::Runs);
  for (uint32_t s = 0; s < (g.count + 31) / 32; s++) {
    const uint32_t lanes = g.count - s * 32;
    g.simds[s].phase = g.simds[s].arrived = 0;
    g.simds[s].started = g.simds[s].live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
  }
  for (uint32_t t = 0; t < g.count; t++) start_thread(t, group);
  g.me = g.order[0];
  current = &g.lanes[g.me];
  msl_switch(&g.scheduler, g.stacks[g.me]);
}

struct Random {
  uint64_t state;
  uint32_t below(uint32_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % n;
  }
  void shuffle(uint32_t* values, uint32_t n) {
    for (uint32_t i = n; i > 1; i--) std::swap(values[i - 1], values[below(i)]);
  }
};

// Threads stay with their simdgroup; simdgroups and the lanes inside change places.
void choose_order() {
  const uint32_t n = g.count, seed = g.launch->order;
  g.order.resize(n);
  g.place.resize(n);
  for (uint32_t i = 0; i < n; i++) g.order[i] = seed == 1 ? n - 1 - i : i;
  if (seed > 1 && n % 32 == 0) {
    Random random{seed * 0x9E3779B97F4A7C15ull};
    std::vector<uint32_t> simds(n / 32);
    for (uint32_t s = 0; s < n / 32; s++) simds[s] = s;
    random.shuffle(simds.data(), n / 32);
    for (uint32_t s = 0; s < n / 32; s++) {
      for (uint32_t i = 0; i < 32; i++) g.order[s * 32 + i] = simds[s] * 32 + i;
      random.shuffle(&g.order[s * 32], 32);
    }
  }
  for (uint32_t i = 0; i < n; i++) g.place[g.order[i]] = i;
}

Binding* binding_of(uint64_t address, uint64_t end) {
  static Binding* last;
  Binding* all = g.launch->bindings;
  const uint32_t n = g.launch->binding_count;
  if (last >= all && last < all + n && address >= last->begin && end <= last->end) return last;
  for (uint32_t i = 0; i < n; i++) {
    if (address >= all[i].begin && end <= all[i].end) return last = &all[i];
  }
  return nullptr;
}

[[noreturn]] void access_fault(const char* what, uint64_t address, uint32_t size) {
  char text[160];
  for (uint32_t i = 0; i < g.launch->binding_count; i++) {
    const Binding& b = g.launch->bindings[i];
    if (address + 4096 >= b.begin && address < b.end + 4096) {
      snprintf(text, sizeof text, "%s: %u bytes at offset %lld of the %llu bound at slot %u", what, size,
               (long long)(address - b.begin), (unsigned long long)(b.end - b.begin), b.slot);
      fault(text, 0);
    }
  }
  snprintf(text, sizeof text, "%s: %u bytes", what, size);
  fault(text, 0);
}

void device_access(uint64_t address, uint32_t size, bool store) {
  if (address % size) access_fault("misaligned access", address, size);
  Binding* binding = binding_of(address, address + size);
  if (!binding) access_fault("access outside of every bound buffer", address, size);
  if (store && !binding->writable) access_fault("write to a buffer bound for reading", address, size);
  const uint32_t level = g.launch->level_stamp, dispatch = g.launch->dispatch_stamp, me = g.stamp;
  Cell* cell = g.launch->cells + (address - g.launch->arena_begin) / 4;
  for (uint32_t i = 0; i < (size + 3) / 4; i++, cell++) {
    if (!store && cell->read == me && cell->write < level) continue;  // once more by the same threadgroup
    const uint32_t reader = cell->read & ~SEVERAL;
    if (cell->write >= level && cell->write != me) {
      access_fault(cell->write >= dispatch ? "race: another threadgroup of the same dispatch writes this"
                                           : "race: a dispatch that no barrier separates writes this", address, size);
    }
    if (store) {
      if (reader >= level && cell->read != me) {
        access_fault(reader >= dispatch ? "race: another threadgroup of the same dispatch reads this"
                                        : "race: a dispatch that no barrier separates reads this", address, size);
      }
      if (cell->write < dispatch) binding->written_bytes += 4;
      cell->write = me;
    } else {
      if (reader < dispatch) binding->read_bytes += 4;
      const bool several = reader >= level && cell->read != me;
      cell->read = several ? me | SEVERAL : me;
    }
  }
}

void threadgroup_access(const Variable& v, uint64_t offset, uint32_t size, bool store) {
  LocalCell* cell = &g.local[(v.offset + offset) / 2];
  const uint32_t simd = g.me / 32, bit = 1u << simd;
  for (uint32_t i = 0; i < (size + 1) / 2; i++, cell++) {
    if (cell->write_phase == g.phase && cell->writer != simd) {
      fault("race: another simdgroup writes this threadgroup memory, with no barrier between", 0);
    }
    if (cell->read_phase != g.phase) cell->read_phase = g.phase, cell->readers = 0;
    if (store) {
      if (cell->readers & ~bit) fault("race: another simdgroup reads this threadgroup memory, with no barrier between", 0);
      cell->write_phase = g.phase;
      cell->writer = simd;
    } else {
      cell->readers |= bit;
    }
  }
}

inline void touch(uint64_t address, uint32_t size, bool store) {
  if (!g.launch) return;  // no kernel: the table is being read
  if (address - g.launch->arena_begin < g.launch->arena_end - g.launch->arena_begin) return device_access(address, size, store);
  if (address - reinterpret_cast<uint64_t>(g.launch->stacks) < g.count * g.launch->stack_bytes) return;
  for (const Variable& v : g.variables) {
    const uint64_t offset = address - reinterpret_cast<uint64_t>(v.address);
    if (offset < v.size) return threadgroup_access(v, offset, size, store);
  }
  // Constants of the file, and what the stand-in for the library keeps.
  const uint64_t image = reinterpret_cast<uint64_t>(&__ehdr_start);
  if (address - image >= uint64_t(&_end - &__ehdr_start)) access_fault("access outside of every bound buffer", address, size);
}

}  // namespace

void fault(const char* what, uint32_t site) {
  Report& r = *g.report;
  const Lane& l = *current;
  char line[32] = "";
  if (site) snprintf(line, sizeof line, "line %u, ", site >> 8);
  snprintf(r.message, sizeof r.message, "%s (%sthread %u of threadgroup %u,%u,%u)", what, line, l.index, l.group.x, l.group.y, l.group.z);
  r.faulted = 1;
  void* gone;  // the threads of this dispatch end here
  msl_switch(&gone, g.scheduler);
  abort();
}

// A meeting of all threads of the threadgroup; the last to arrive computes.
template <class Compute> static void meet_all(uint32_t site, Compute compute) {
  g.report->lane_steps++;
  if (!g.barrier_arrived) g.barrier_site = site;
  if (g.barrier_site != site) fault("threads of one threadgroup meet at different barriers", site);
  if (g.live != g.count) fault("threadgroup_barrier after a thread has returned", site);
  if (++g.barrier_arrived == g.count) {
    g.barrier_arrived = 0;
    g.barrier_phase++;
    compute();
    return;
  }
  g.status[g.me] = Status::InBarrier;
  g.waits_for[g.me] = g.barrier_phase;
  yield();
}

void threadgroup_barrier(uint32_t site) {
  meet_all(site, [] { g.phase++; });
}

void simd_barrier(uint32_t site) {
  meet("", 0, site, [](Simdgroup&, int) {});
}

void whole_simdgroup(uint32_t site) {
  if (simd_of(g.me).live != ~0u) fault("a simdgroup_matrix operation without all 32 lanes", site);
}

static int exchanged_bank;

const unsigned char* exchange(const void* value, size_t size, uint32_t site) {
  const int bank = meet(value, size, site, [](Simdgroup&, int) {});
  exchanged_bank = bank;
  return simd_of(g.me).slots[bank][0];
}

uint32_t exchanged_lanes() { return simd_of(g.me).took_part[exchanged_bank]; }

const float* multiply(const float lane_elements[4], uint32_t site) {
  const int bank = meet(lane_elements, 16, site, [site](Simdgroup& s, int bank) {
    if (s.live != ~0u) fault("a simdgroup_matrix operation without all 32 lanes", site);
    float a[64], b[64];
    for (int lane = 0; lane < 32; lane++) {
      float e[4];
      memcpy(e, s.slots[bank][lane], 16);
      const int quad = lane / 4, row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
      memcpy(a + row * 8 + column, e, 8);
      memcpy(b + row * 8 + column, e + 2, 8);
    }
    for (int row = 0; row < 8; row++) {
      float sums[8] = {};
      for (int k = 0; k < 8; k++)
        for (int column = 0; column < 8; column++) sums[column] += a[row * 8 + k] * b[k * 8 + column];
      memcpy(s.product[bank] + row * 8, sums, sizeof sums);
    }
  });
  return simd_of(g.me).product[bank];
}

const float* multiply_rows(HalfRows left, HalfRows right, uint32_t simdgroups, uint32_t site) {
  if (g.count != simdgroups * 32) fault("matmul2d by other simdgroups than those of the threadgroup", site);
  if (left.rows * right.rows > MOST_PRODUCTS) fault("matmul2d of a tile that is larger than the stand-in has room for", site);
  if (left.columns % 8 || left.columns != right.columns) fault("matmul2d of rows of other lengths", site);
  // Which simdgroup reads what is not specified: each is taken to read everything, from when it arrives until a barrier.
  if (g.me % 32 == 0) {
    for (const HalfRows& rows : {left, right}) {
      const uint64_t begin = reinterpret_cast<uint64_t>(rows.data);
      for (uint64_t at = 0; at < 2ull * rows.rows * rows.columns; at += 16) touch(begin + at, 16, false);
    }
  }
  meet_all(site, [&] {
    std::vector<float> operands[2];
    for (int side = 0; side < 2; side++) {
      const HalfRows& rows = side ? right : left;
      operands[side].assign(rows.data, rows.data + rows.rows * rows.columns);
    }
    const float* a = operands[0].data();
    for (uint32_t row = 0; row < left.rows; row++, a += left.columns) {
      const float* b = operands[1].data();
      for (uint32_t column = 0; column < right.rows; column++, b += right.columns) {
        // In eight parts; Apple does not say in which order they are added.
        float sums[8] = {};
        for (uint32_t k = 0; k < left.columns; k += 8)
          for (uint32_t i = 0; i < 8; i++) sums[i] += a[k + i] * b[k + i];
        g.product[row * right.rows + column] =
            ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
      }
    }
  });
  return g.product;
}

void threadgroup_variable(void* address, size_t size) {
  for (const Variable& v : g.variables)
    if (v.address == address) return;
  g.variables.push_back({static_cast<char*>(address), size, g.threadgroup_bytes});
  g.threadgroup_bytes += (size + 15) & ~size_t(15);
  if (g.threadgroup_bytes > THREADGROUP_MEMORY) fault("more than 32768 bytes of threadgroup memory", 0);
  memset(address, 0xff, size);
}

extern "C" void msl_run(Thunk thunk, const Launch* launch, Report* report) {
  g.launch = launch;
  g.report = report;
  g.thunk = thunk;
  g.count = launch->threads.x * launch->threads.y * launch->threads.z;
  memcpy(g.arguments.buffers, launch->buffers, sizeof launch->buffers);
  g.dynamic_bytes = 0;
  for (uint32_t bytes : launch->threadgroup_bytes) g.dynamic_bytes += (bytes + 15) & ~15u;
  g.local.resize(THREADGROUP_MEMORY / 2 + 64);
  g.stacks.resize(g.count);
  g.waits_for.assign(g.count, 0);
  choose_order();
  const uint64_t groups = uint64_t(launch->groups.x) * launch->groups.y * launch->groups.z;
  // A step that has no divisor in common with the number of groups visits each once, in an order unlike the counted one.
  uint64_t step = 1, start = 0;
  if (launch->order == 1) step = groups - 1, start = groups - 1;
  if (launch->order > 1) step = 7919 % groups ? 7919 : 1, start = launch->order % groups;
  for (uint64_t n = 0, at = start; n < groups && !report->faulted; n++, at = (at + step) % groups) {
    g.stamp = launch->dispatch_stamp + at;
    run_group({uint32_t(at % launch->groups.x), uint32_t(at / launch->groups.x % launch->groups.y),
               uint32_t(at / (uint64_t(launch->groups.x) * launch->groups.y))});
  }
  g.launch = nullptr;
}

}  // namespace msl

#define MSL_WATCH(n, type) \
  extern "C" void __sanitizer_cov_load##n(type* p) { msl::touch(reinterpret_cast<uint64_t>(p), n, false); } \
  extern "C" void __sanitizer_cov_store##n(type* p) { msl::touch(reinterpret_cast<uint64_t>(p), n, true); }
MSL_WATCH(1, uint8_t)
MSL_WATCH(2, uint16_t)
MSL_WATCH(4, uint32_t)
MSL_WATCH(8, uint64_t)
MSL_WATCH(16, __int128)

// To nearest even. Debian 12's libgcc has no conversion to bfloat.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t high = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &high, 2);
  return result;
}
