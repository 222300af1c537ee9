// One token through the mixer of a delta layer, from the projections to the input of the output projection.
//
// ring: [CONV_TAPS, CONV_WIDTH] f32, the last raw inputs of the convolution, that of position p in row p % CONV_TAPS, this
//   token's among them; taps: [CONV_TAPS, CONV_WIDTH] f32, the newest last
// zba: z [DELTA_VALUE_WIDTH], b and a [DELTA_VALUE_HEADS] each; rates: [DELTA_VALUE_HEADS], exp(A_log); dt_bias: the same;
//   norm: [DELTA_HEAD_DIM]
// state: [DELTA_VALUE_HEADS, DELTA_HEAD_DIM (value), DELTA_HEAD_DIM (key)] f32, read once and written once
// out: [DELTA_VALUE_WIDTH] f32, o times norm times silu(z); squares: [DELTA_VALUE_HEADS, SIMDS] f32, sums of o^2
//
// A threadgroup has a quarter of a value head's rows, a simdgroup VALUES of them, a lane KEYS keys of each. One pass over the
// old state S gives S k and S q, and from these, with e = beta (v - g S k), both o = g S q + e (k . q) and S' = g S + e k^T.
// Moves 2 * DELTA_VALUE_HEADS * DELTA_HEAD_DIM^2 * 4 bytes of state. Reference: `conv_step`, `delta_query`, `delta_key`,
// `decay`, `delta_step`, `gated_norm`.

constant uint KEYS = DELTA_HEAD_DIM / LANES;
constant uint VALUES = DELTA_HEAD_DIM / (SIMDS * SIMDS);
static_assert(KEYS == 4 && VALUES == 8 && CONV_TAPS == 4, "a lane holds four keys, sixteen sums meet in sixteen pairs of lanes");

inline float4 conv4(device const float* ring, device const float* taps, uint position, uint channel) {
  float4 sum = float4(0.0f);
  for (uint j = 0; j < CONV_TAPS; j++) {
    const uint row = (position + 1 + j) % CONV_TAPS;
    const float4 u = *(device const float4*)(ring + row * CONV_WIDTH + channel);
    sum += u * *(device const float4*)(taps + j * CONV_WIDTH + channel);
  }
  return float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

[[max_total_threads_per_threadgroup(128)]] kernel void delta_step(
    device const float* ring [[buffer(0)]], device const float* taps [[buffer(1)]], device const float* zba [[buffer(2)]],
    device const float* rates [[buffer(3)]], device const float* dt_bias [[buffer(4)]], device const float* norm [[buffer(5)]],
    device float4* state [[buffer(6)]], device float* out [[buffer(7)]], device float* squares [[buffer(8)]],
    constant uint& position [[buffer(9)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[SIMDS];
  const uint head = group / SIMDS, first_row = (group % SIMDS * SIMDS + simd) * VALUES;

  const uint key_channel = head / VALUES_PER_KEY * DELTA_HEAD_DIM + lane * KEYS;
  float4 q = conv4(ring, taps, position, key_channel);
  float4 k = conv4(ring, taps, position, DELTA_KEY_WIDTH + key_channel);
  q *= rsqrt(sum_lanes(dot(q, q)) + UNIT_EPS) * rsqrt(float(DELTA_HEAD_DIM));
  k *= rsqrt(sum_lanes(dot(k, k)) + UNIT_EPS);
  const float kq = sum_lanes(dot(k, q));

  const float beta = sigmoid(zba[DELTA_VALUE_WIDTH + head]);
  const float a = zba[DELTA_VALUE_WIDTH + DELTA_VALUE_HEADS + head] + dt_bias[head];
  const float decay = decay_of(a, rates[head]);

  device float4* rows = state + (head * DELTA_HEAD_DIM + first_row) * LANES + lane;
  float4 old[VALUES];
  float sums[2 * VALUES];
  UNROLL for (ushort r = 0; r < VALUES; r++) {
    old[r] = rows[r * LANES];
    sums[r] = dot(old[r], k);
    sums[VALUES + r] = dot(old[r], q);
  }
  // Lane l has the sum with k of row l / 2, or with q in the upper half; its partner there has the other.
  const float own = sum_each<2 * VALUES>(sums, lane);
  const float other = simd_shuffle_xor(own, ushort(LANES / 2));
  const bool upper = lane >= LANES / 2;
  const float sk = upper ? other : own, sq = upper ? own : other;

  const uint row = first_row + lane / 2 % VALUES;
  const uint value_channel = 2 * DELTA_KEY_WIDTH + head * DELTA_HEAD_DIM + row;
  float v = 0;
  for (uint j = 0; j < CONV_TAPS; j++) {
    v += ring[(position + 1 + j) % CONV_TAPS * CONV_WIDTH + value_channel] * taps[j * CONV_WIDTH + value_channel];
  }
  const float error = beta * (silu(v) - decay * sk);
  const float o = decay * sq + error * kq;
  UNROLL for (ushort r = 0; r < VALUES; r++) rows[r * LANES] = decay * old[r] + simd_shuffle(error, ushort(2 * r)) * k;

  const bool writes = lane % 2 == 0 && !upper;
  if (writes) {
    const uint at = head * DELTA_HEAD_DIM + row;
    out[at] = o * norm[row] * silu(zba[at]);
  }
  const float sum = sum_lanes(writes ? o * o : 0.0f);
  if (lane == 0) partial[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0 && lane == 0) squares[group] = (partial[0] + partial[1]) + (partial[2] + partial[3]);
}
