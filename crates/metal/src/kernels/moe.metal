// The mixture of experts for one token, in three kernels: router logits, gate and up of the chosen experts, down.
//
// The choice itself takes no kernel: each threadgroup of the second one repeats it from the logits, as far as its own expert.
// The shared expert is one more expert behind the chosen ones.

// Simdgroups that share rows of `gemv_q8_router` and `experts_gate_up`: 1, 2 or 4.
constant uint SLICES = HIDDEN <= SLICE_COLUMNS ? 1 : HIDDEN <= 2 * SLICE_COLUMNS ? 2 : 4;
constant uint ROUTER_ROWS = 2;
// Gate rows, and as many up rows, of a simdgroup.
constant uint PAIRS = 8;
constant uint GROUP_PAIRS = SIMDS / SLICES * PAIRS;

// Router logits, and behind them the logit of the shared expert's gate, of rms_norm(h).
// codes: [EXPERTS + 1, HIDDEN], 8 bits; x: [HIDDEN]; squares: [STREAM_GROUPS]; logits: [EXPERTS + 1] f32
// Moves (EXPERTS + 1) * HIDDEN bytes of codes. Reference: `linear`.
[[max_total_threads_per_threadgroup(128)]] kernel void gemv_q8_router(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]],
    device const float* squares [[buffer(4)]], device float* logits [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][ROUTER_ROWS];
  const Matrix m = {codes, scales, biases, HIDDEN};
  const uint group_rows = SIMDS / SLICES * ROUTER_ROWS;
  const uint row = group * group_rows + simd / SLICES * ROUTER_ROWS;
  float sums[ROUTER_ROWS] = {};
  for (uint first = simd % SLICES * SLICE_COLUMNS; first < HIDDEN; first += SLICES * SLICE_COLUMNS) {
    const uint column = first + lane * LANE_COLUMNS;
    if (column >= HIDDEN) continue;
    Inputs in;
    load_inputs(in, x, column, 1.0f, 1.0f);
    UNROLL for (ushort r = 0; r < ROUTER_ROWS; r++) sums[r] += row_q8(m, min(row + r, EXPERTS), column, in);
  }
  const float sum = sum_each<ROUTER_ROWS>(sums, lane);
  const float scale = norm_scale(squares, lane);
  if (lane % (LANES / ROUTER_ROWS) == 0) partial[simd][lane / (LANES / ROUTER_ROWS)] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint thread_index = simd * LANES + lane, output = group * group_rows + thread_index;
  if (thread_index >= group_rows || output > EXPERTS) return;
  float total = 0;
  for (uint s = 0; s < SLICES; s++) total += partial[thread_index / ROUTER_ROWS * SLICES + s][thread_index % ROUTER_ROWS];
  logits[output] = total * scale;
}

// act = silu(gate x) * (up x) for the chosen experts and the shared one, x = rms_norm(h).
// codes: 4 bits, [gate and up, EXPERTS, EXPERT_WIDTH, HIDDEN], then the shared expert's [gate and up, SHARED_WIDTH, HIDDEN]
// x: [HIDDEN]; squares: [STREAM_GROUPS]; logits: [EXPERTS + 1]
// act: [EXPERTS_PER_TOKEN, EXPERT_WIDTH], then [SHARED_WIDTH] f32; chosen: [EXPERTS_PER_TOKEN] u32;
// weights: [EXPERTS_PER_TOKEN + 1] f32, the shared expert's last
// A simdgroup makes PAIRS values from as many rows of gate and of up. Moves (EXPERTS_PER_TOKEN * EXPERT_WIDTH + SHARED_WIDTH)
// * HIDDEN bytes of codes. Reference: `route`, `expert_linear`, `swiglu`.
[[max_total_threads_per_threadgroup(128)]] kernel void experts_gate_up(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const float* x [[buffer(3)]],
    device const float* squares [[buffer(4)]], device const float* logits [[buffer(5)]], device float* act [[buffer(6)]],
    device uint* chosen [[buffer(7)]], device float* weights [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS][2 * PAIRS];
  const uint expert_groups = EXPERT_WIDTH / GROUP_PAIRS, routed_groups = EXPERTS_PER_TOKEN * expert_groups;
  const bool routed = group < routed_groups;
  // The first threadgroup of the shared expert writes the whole choice down.
  const uint rounds = routed ? group / expert_groups + 1 : group == routed_groups ? EXPERTS_PER_TOKEN : 0;
  float mine[EXPERTS_PER_LANE];
  load_logits(mine, logits, lane);
  Choice choices[EXPERTS_PER_TOKEN];
  uint taken = 0, expert = 0;
  for (uint i = 0; i < rounds; i++) {
    choices[i] = take_highest(mine, taken, lane);
    expert = choices[i].expert;
  }
  if (!routed && rounds > 0 && simd == 0 && lane == 0) {
    write_choice(choices, logits, chosen, weights);
  }

  const Matrix m = {codes, scales, biases, HIDDEN};
  const uint gate_row = routed ? expert * EXPERT_WIDTH : 2 * EXPERTS * EXPERT_WIDTH;
  const uint up_after = routed ? EXPERTS * EXPERT_WIDTH : SHARED_WIDTH;
  const uint first_pair = (routed ? group % expert_groups : group - routed_groups) * GROUP_PAIRS;
  const uint row = gate_row + first_pair + simd / SLICES * PAIRS;
  float sums[2 * PAIRS] = {};
  for (uint first = simd % SLICES * SLICE_COLUMNS; first < HIDDEN; first += SLICES * SLICE_COLUMNS) {
    const uint column = first + lane * LANE_COLUMNS;
    if (column >= HIDDEN) continue;
    Inputs in;
    load_inputs_q4(in, x, column, 1.0f);
    UNROLL for (ushort r = 0; r < PAIRS; r++) {
      sums[r] += row_q4(m, row + r, column, in);
      sums[PAIRS + r] += row_q4(m, row + up_after + r, column, in);
    }
  }
  const float sum = sum_each<2 * PAIRS>(sums, lane);
  const float scale = norm_scale(squares, lane);
  if (lane % 2 == 0) partial[simd][lane / 2] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint thread_index = simd * LANES + lane;
  if (thread_index >= GROUP_PAIRS) return;
  float gate = 0, up = 0;
  for (uint s = 0; s < SLICES; s++) {
    gate += partial[thread_index / PAIRS * SLICES + s][thread_index % PAIRS];
    up += partial[thread_index / PAIRS * SLICES + s][PAIRS + thread_index % PAIRS];
  }
  const uint slot = routed ? group / expert_groups : EXPERTS_PER_TOKEN;
  act[slot * EXPERT_WIDTH + first_pair + thread_index] = silu(gate * scale) * (up * scale);
}

// Lanes that share a row of `width` inputs: with up to 16 of them a simdgroup reads several rows at once.
inline constexpr ushort row_lanes(uint width) { return width <= 128 ? 4 : width <= 256 ? 8 : width <= 512 ? 16 : 32; }

// STREAM_ROWS rows of one expert's down matrix, times `weight`, added to sums: those of row p * (32 / SHARING) + lane / SHARING.
template <ushort SHARING> inline void add_down(Matrix m, uint first_row, device const float* act, float weight, ushort lane,
                                               thread float (&sums)[SHARING / 4]) {
  for (uint column = lane % SHARING * LANE_COLUMNS; column < m.inputs; column += SHARING * LANE_COLUMNS) {
    Inputs in;
    load_inputs_q4(in, act, column, 1.0f);
    UNROLL for (ushort p = 0; p < SHARING / 4; p++) {
      sums[p] += weight * row_q4(m, first_row + p * (LANES / SHARING) + lane / SHARING, column, in);
    }
  }
}

template <ushort SHARING> inline void store_down(thread float (&sums)[SHARING / 4], ushort lane, threadgroup float (&rows)[STREAM_ROWS]) {
  UNROLL for (ushort p = 0; p < SHARING / 4; p++) {
    float sum = sums[p];
    for (ushort mask = SHARING / 2; mask > 0; mask /= 2) sum += simd_shuffle_xor(sum, mask);
    if (lane % SHARING == 0) rows[p * (LANES / SHARING) + lane / SHARING] = sum;
  }
}

// h += sum_j weights_j * down_j act_j, and what the next norm needs of h.
// codes: 4 bits, [EXPERTS, HIDDEN, EXPERT_WIDTH]; shared_codes: [HIDDEN, SHARED_WIDTH]; act, chosen, weights: as above;
// gain: [HIDDEN] of the next norm; stream, gained: [HIDDEN]; squares: [STREAM_GROUPS] f32
// A threadgroup makes STREAM_ROWS rows; simdgroup s takes the chosen experts s, s + 4, ..., the first one the shared expert too.
// Moves HIDDEN * (EXPERTS_PER_TOKEN * EXPERT_WIDTH + SHARED_WIDTH) / 2 bytes of codes. Reference: `expert_linear`.
[[max_total_threads_per_threadgroup(128)]] kernel void experts_down(
    device const uint4* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]],
    device const ushort* biases [[buffer(2)]], device const uint4* shared_codes [[buffer(3)]],
    device const ushort* shared_scales [[buffer(4)]], device const ushort* shared_biases [[buffer(5)]],
    device const float* act [[buffer(6)]], device const uint* chosen [[buffer(7)]], device const float* weights [[buffer(8)]],
    device const float* gain [[buffer(9)]], device float* stream [[buffer(10)]], device float* gained [[buffer(11)]],
    device float* squares [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  constexpr ushort sharing = row_lanes(EXPERT_WIDTH), shared_sharing = row_lanes(SHARED_WIDTH);
  threadgroup float partial[SIMDS + 1][STREAM_ROWS];
  const Matrix m = {codes, scales, biases, EXPERT_WIDTH};
  float sums[sharing / 4] = {};
  for (uint slot = simd; slot < EXPERTS_PER_TOKEN; slot += SIMDS) {
    const uint row = chosen[slot] * HIDDEN + group * STREAM_ROWS;
    add_down<sharing>(m, row, act + slot * EXPERT_WIDTH, weights[slot], lane, sums);
  }
  store_down<sharing>(sums, lane, partial[simd]);
  if (simd == 0) {
    const Matrix shared = {shared_codes, shared_scales, shared_biases, SHARED_WIDTH};
    float shared_sums[shared_sharing / 4] = {};
    device const float* shared_act = act + EXPERTS_PER_TOKEN * EXPERT_WIDTH;
    add_down<shared_sharing>(shared, group * STREAM_ROWS, shared_act, weights[EXPERTS_PER_TOKEN], lane, shared_sums);
    store_down<shared_sharing>(shared_sums, lane, partial[SIMDS]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  float value = 0;
  if (lane < STREAM_ROWS) {
    value = stream[group * STREAM_ROWS + lane];
    for (uint s = 0; s <= SIMDS; s++) value += partial[s][lane];
  }
  finish_rows(value, group, lane, gain, stream, gained, squares);
}
