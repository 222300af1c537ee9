// Many tokens through the mixer of a delta layer, from the projections to the input of the output projection.
//
// The gated delta rule is unrolled over chunks of CHUNK tokens (the WY form of the literature), where everything is a product of
// matrices. With D_ij = a_{j+1} .. a_i for j <= i, else 0, c_i = a_1 .. a_i, and the tokens as rows of E, V, K, Q, O:
//   A_ij = beta_i D_ij (k_i . k_j) for j < i;  T = (I + A)^-1;  P_ij = D_ij (q_i . k_j) for j <= i      `delta_rows_relate`
//   E = T beta (V - c K S^T);  O = c Q S^T + P E;  S <- c_n S + (D_n E)^T K                             `delta_rows_scan`
// Decays a enter as products of numbers up to 1 and never as quotients, so they can vanish but not overflow. Beyond the tokens a
// chunk is filled up with k = q = v = 0, a = 1, beta = 0. All f32.
//
// inputs: [tokens, CONV_WIDTH], raw; ring: [CONV_TAPS, CONV_WIDTH], the inputs before them, that of position p in row p % CONV_TAPS
// taps: [CONV_TAPS, CONV_WIDTH], the newest last; zba: [tokens, z, b, a]; rates, dt_bias: [DELTA_VALUE_HEADS]
// mixed: [chunks * CHUNK, CONV_WIDTH]; gates: [chunks * CHUNK, decays and betas, DELTA_VALUE_HEADS]
// related: [chunks, DELTA_VALUE_HEADS, T and P, CHUNK, CHUNK]; products: [chunks, DELTA_VALUE_HEADS, c and D_n, CHUNK]
// state: [DELTA_VALUE_HEADS, DELTA_HEAD_DIM (value), DELTA_HEAD_DIM (key)]; out: [chunks * CHUNK, DELTA_VALUE_WIDTH]
//
// Reference: `conv_step`, `delta_query`, `delta_key`, `decay`, `delta_step`, `gated_norm`.

#include <metal_simdgroup_matrix>

constant uint LANE_CHANNELS = DELTA_HEAD_DIM / LANES;
static_assert(LANE_CHANNELS == 4 && CONV_TAPS == 4, "a lane has four channels of a head");
constant uint KEY_HEADS = DELTA_KEY_WIDTH / DELTA_HEAD_DIM;
constant uint CONV_HEADS = CONV_WIDTH / DELTA_HEAD_DIM;
constant uint ZBA_WIDTH = DELTA_VALUE_WIDTH + 2 * DELTA_VALUE_HEADS;

struct TokenSpan {
  // Of the first token.
  uint position;
  uint tokens;
};

// Convolution, SiLU, unit lengths; decays and betas. A simdgroup has one head of one token, or its gates.
kernel void delta_rows_prepare(
    device const float* inputs [[buffer(0)]], device const float* ring [[buffer(1)]], device const float* taps [[buffer(2)]],
    device const float* zba [[buffer(3)]], device const float* rates [[buffer(4)]], device const float* dt_bias [[buffer(5)]],
    device float* mixed [[buffer(6)]], device float* gates [[buffer(7)]], constant TokenSpan& span [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint head = group.x, token = group.y;
  const bool is_token = token < span.tokens;
  if (head == CONV_HEADS) {
    device const float* ba = zba + token * ZBA_WIDTH + DELTA_VALUE_WIDTH;
    device float* own = gates + token * 2 * DELTA_VALUE_HEADS;
    for (uint h = lane; h < DELTA_VALUE_HEADS; h += LANES) {
      float decay = 1.0f, beta = 0.0f;
      if (is_token) {
        decay = decay_of(ba[DELTA_VALUE_HEADS + h] + dt_bias[h], rates[h]);
        beta = sigmoid(ba[h]);
      }
      own[h] = decay;
      own[DELTA_VALUE_HEADS + h] = beta;
    }
    return;
  }
  const uint channel = head * DELTA_HEAD_DIM + lane * LANE_CHANNELS;
  float4 x = float4(0.0f);
  if (is_token) {
    for (uint j = 0; j < CONV_TAPS; j++) {
      const uint age = CONV_TAPS - 1 - j;
      device const float* row = token >= age ? inputs + (token - age) * CONV_WIDTH
                                             : ring + (span.position + token + CONV_TAPS - age) % CONV_TAPS * CONV_WIDTH;
      x += *(device const float4*)(row + channel) * *(device const float4*)(taps + j * CONV_WIDTH + channel);
    }
    x = float4(silu(x.x), silu(x.y), silu(x.z), silu(x.w));
  }
  if (head < 2 * KEY_HEADS) {
    x *= rsqrt(sum_lanes(dot(x, x)) + UNIT_EPS);
    if (head < KEY_HEADS) x *= rsqrt(float(DELTA_HEAD_DIM));
  }
  *(device float4*)(mixed + token * CONV_WIDTH + channel) = x;
}

// The last inputs become those before the next token. A thread has a channel of one of the last CONV_TAPS tokens.
kernel void delta_rows_ring(device const float* inputs [[buffer(0)]], device float* ring [[buffer(1)]],
                            constant TokenSpan& span [[buffer(2)]], uint2 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
  if (group.y >= span.tokens) return;
  const uint token = span.tokens - 1 - group.y, channel = group.x * DELTA_HEAD_DIM + thread_index;
  ring[(span.position + token) % CONV_TAPS * CONV_WIDTH + channel] = inputs[token * CONV_WIDTH + channel];
}

// x_i . k_j for j up to i, into the lower half of `square` [CHUNK, CHUNK]. Called by all threads.
inline void relate(device const float* x, device const float* keys, uint simd, threadgroup float* square) {
  UNROLL for (ushort part = 0; part < 2; part++) {
    // Of early and late rows each simdgroup has as many.
    const uint row = (part == 0 ? simd : CHUNK / 8 - 1 - simd) * 8;
    for (uint column = 0; column <= row; column += 8) {
      simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (uint d = 0; d < DELTA_HEAD_DIM; d += 8) {
        simdgroup_float8x8 left, right;
        simdgroup_load(left, x + row * CONV_WIDTH + d, CONV_WIDTH);
        simdgroup_load(right, keys + column * CONV_WIDTH + d, CONV_WIDTH, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
      }
      simdgroup_store(sum, square + row * CHUNK + column, CHUNK);
    }
  }
}

// T, P and the products of decays. A threadgroup has one value head of one chunk; thread j < CHUNK has column j, and as A_ik of
// row i meets T_kj of rows before, T takes the place of A row by row.
[[max_total_threads_per_threadgroup(128)]] kernel void delta_rows_relate(
    device const float* mixed [[buffer(0)]], device const float* gates [[buffer(1)]], device float* related [[buffer(2)]],
    device float* products [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float square[CHUNK * CHUNK];
  threadgroup float decays[CHUNK];
  threadgroup float betas[CHUNK];
  const uint head = group.x, chunk = group.y, column = simd * LANES + lane;
  const bool has_column = column < CHUNK;
  if (has_column) {
    device const float* own = gates + (chunk * CHUNK + column) * 2 * DELTA_VALUE_HEADS + head;
    decays[column] = own[0];
    betas[column] = own[DELTA_VALUE_HEADS];
  }
  device const float* queries = mixed + chunk * CHUNK * CONV_WIDTH + head / VALUES_PER_KEY * DELTA_HEAD_DIM;
  device const float* keys = queries + DELTA_KEY_WIDTH;
  device float* own_related = related + (chunk * DELTA_VALUE_HEADS + head) * 2 * CHUNK * CHUNK + column;
  device float* own_products = products + (chunk * DELTA_VALUE_HEADS + head) * 2 * CHUNK;
  relate(queries, keys, simd, square);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_column) {
    float product = 1.0f;
    for (uint i = 0; i < CHUNK; i++) {
      if (i > column) product *= decays[i];
      own_related[(CHUNK + i) * CHUNK] = i >= column ? product * square[i * CHUNK + column] : 0.0f;
      if (column == 0) own_products[i] = decays[0] * product;
    }
    own_products[CHUNK + column] = product;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  relate(keys, keys, simd, square);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_column) {
    float product = 1.0f;
    for (uint i = column + 1; i < CHUNK; i++) {
      product *= decays[i];
      square[i * CHUNK + column] *= betas[i] * product;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 1; i < CHUNK; i++) {
    float sum = 0;
    if (column < i) {
      sum = square[i * CHUNK + column];
      for (uint k = column + 1; k < i; k++) sum += square[i * CHUNK + k] * square[k * CHUNK + column];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (column < i) square[i * CHUNK + column] = -sum;
  }
  if (has_column) {
    for (uint i = 0; i < CHUNK; i++) {
      own_related[i * CHUNK] = i > column ? square[i * CHUNK + column] : i == column ? 1.0f : 0.0f;
    }
  }
}

// Values of a head that one threadgroup of the scan has.
constant uint SLICE = 16;
constant uint SLICES = DELTA_HEAD_DIM / SLICE;
constant uint STATE_STRIDE = DELTA_HEAD_DIM + 4;
constant uint ROW_STRIDE = SLICE + 4;
// Chunk rows of a simdgroup, values of these that a lane has, and keys of the state that a simdgroup has.
constant uint SIMD_ROWS = CHUNK / SIMDS;
constant uint LANE_VALUES = SIMD_ROWS * SLICE / LANES;
constant uint SIMD_KEYS = DELTA_HEAD_DIM / SIMDS;
static_assert(SIMD_ROWS == 16 && LANE_VALUES == 8, "two lanes have a row");

// sums += left E over the chunk's rows up to this simdgroup's last; left is lower triangular.
inline void add_lower(thread simdgroup_float8x8 (&sums)[2][2], device const float* left, threadgroup const float* rows, uint simd) {
  for (uint j = 0; j < 2 * simd + 2; j++) {
    simdgroup_float8x8 right[2];
    UNROLL for (ushort c = 0; c < 2; c++) simdgroup_load(right[c], rows + j * 8 * ROW_STRIDE + c * 8, ROW_STRIDE);
    UNROLL for (ushort r = 0; r < 2; r++) {
      if (j > 2 * simd + r) continue;
      simdgroup_float8x8 part;
      simdgroup_load(part, left + (2 * simd + r) * 8 * CHUNK + j * 8, CHUNK);
      UNROLL for (ushort c = 0; c < 2; c++) simdgroup_multiply_accumulate(sums[r][c], part, right[c], sums[r][c]);
    }
  }
}

inline void clear(thread simdgroup_float8x8 (&sums)[2][2]) {
  UNROLL for (ushort r = 0; r < 2; r++) {
    UNROLL for (ushort c = 0; c < 2; c++) sums[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

// To this simdgroup's own rows.
inline void store_rows(thread const simdgroup_float8x8 (&sums)[2][2], threadgroup float* own) {
  UNROLL for (ushort r = 0; r < 2; r++) {
    UNROLL for (ushort c = 0; c < 2; c++) simdgroup_store(sums[r][c], own + r * 8 * ROW_STRIDE + c * 8, ROW_STRIDE);
  }
}

// Chunk after chunk. A threadgroup has SLICE values of one head, whose state stays in threadgroup memory; a simdgroup has 16 rows
// of the chunk, and 32 keys of the state where it moves on. Moves the state once, and K and Q of the head for every slice.
[[max_total_threads_per_threadgroup(128)]] kernel void delta_rows_scan(
    device const float* mixed [[buffer(0)]], device const float* gates [[buffer(1)]], device const float* related [[buffer(2)]],
    device const float* products [[buffer(3)]], device float* state [[buffer(4)]], device float* out [[buffer(5)]],
    constant uint& chunks [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 state_memory[SLICE * STATE_STRIDE / 4];
  threadgroup float rows[CHUNK * ROW_STRIDE];
  threadgroup float errors[CHUNK * ROW_STRIDE];
  const uint head = group / SLICES, slice = group % SLICES, thread_index = simd * LANES + lane;
  threadgroup float* slice_state = (threadgroup float*)state_memory;
  device float4* own_state = (device float4*)(state + (head * DELTA_HEAD_DIM + slice * SLICE) * DELTA_HEAD_DIM);
  for (uint i = thread_index; i < SLICE * LANES; i += SIMDS * LANES) {
    state_memory[i / LANES * (STATE_STRIDE / 4) + i % LANES] = own_state[i];
  }
  threadgroup float* own_rows = rows + simd * SIMD_ROWS * ROW_STRIDE;
  threadgroup float* own_errors = errors + simd * SIMD_ROWS * ROW_STRIDE;
  // Of the values that a lane has: row of the chunk, and place in a row of the slice and in threadgroup memory.
  const uint row = simd * SIMD_ROWS + lane / 2, first = lane % 2 * LANE_VALUES, place = lane / 2 * ROW_STRIDE + first;

  for (uint chunk = 0; chunk < chunks; chunk++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device const float* queries = mixed + chunk * CHUNK * CONV_WIDTH + head / VALUES_PER_KEY * DELTA_HEAD_DIM;
    device const float* keys = queries + DELTA_KEY_WIDTH;
    device const float* solve = related + (chunk * DELTA_VALUE_HEADS + head) * 2 * CHUNK * CHUNK;
    device const float* from_start = products + (chunk * DELTA_VALUE_HEADS + head) * 2 * CHUNK;
    const uint token = chunk * CHUNK + row, value_at = head * DELTA_HEAD_DIM + slice * SLICE + first;

    // K S^T and Q S^T.
    simdgroup_float8x8 met[2][2], recalled[2][2];
    clear(met);
    clear(recalled);
    for (uint d = 0; d < DELTA_HEAD_DIM; d += 8) {
      simdgroup_float8x8 turned[2];
      UNROLL for (ushort c = 0; c < 2; c++) simdgroup_load(turned[c], slice_state + c * 8 * STATE_STRIDE + d, STATE_STRIDE, ulong2(0, 0), true);
      UNROLL for (ushort r = 0; r < 2; r++) {
        const uint at = (simd * SIMD_ROWS + r * 8) * CONV_WIDTH + d;
        simdgroup_float8x8 key, query;
        simdgroup_load(key, keys + at, CONV_WIDTH);
        simdgroup_load(query, queries + at, CONV_WIDTH);
        UNROLL for (ushort c = 0; c < 2; c++) {
          simdgroup_multiply_accumulate(met[r][c], key, turned[c], met[r][c]);
          simdgroup_multiply_accumulate(recalled[r][c], query, turned[c], recalled[r][c]);
        }
      }
    }
    store_rows(met, own_rows);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float product = from_start[row], beta = gates[(token * 2 + 1) * DELTA_VALUE_HEADS + head];
    device const float* value = mixed + token * CONV_WIDTH + 2 * DELTA_KEY_WIDTH + value_at;
    for (uint i = 0; i < LANE_VALUES; i++) own_rows[place + i] = beta * (value[i] - product * own_rows[place + i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // E = T rows, while the state shrinks.
    clear(met);
    add_lower(met, solve, rows, simd);
    store_rows(met, own_errors);
    const float shrink = from_start[CHUNK - 1];
    for (uint i = thread_index; i < SLICE * LANES; i += SIMDS * LANES) {
      state_memory[i / LANES * (STATE_STRIDE / 4) + i % LANES] *= shrink;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // O, through this simdgroup's own rows.
    store_rows(recalled, own_rows);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float4 low = float4(own_rows[place], own_rows[place + 1], own_rows[place + 2], own_rows[place + 3]) * product;
    float4 high = float4(own_rows[place + 4], own_rows[place + 5], own_rows[place + 6], own_rows[place + 7]) * product;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    clear(met);
    add_lower(met, solve + CHUNK * CHUNK, errors, simd);
    store_rows(met, own_rows);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    low += float4(own_rows[place], own_rows[place + 1], own_rows[place + 2], own_rows[place + 3]);
    high += float4(own_rows[place + 4], own_rows[place + 5], own_rows[place + 6], own_rows[place + 7]);
    device float4* own_out = (device float4*)(out + token * DELTA_VALUE_WIDTH + value_at);
    own_out[0] = low;
    own_out[1] = high;

    // (D_n E)^T K.
    const float to_end = from_start[CHUNK + row];
    for (uint i = 0; i < LANE_VALUES; i++) own_rows[place + i] = to_end * own_errors[place + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 moved[2][SIMD_KEYS / 8];
    UNROLL for (ushort c = 0; c < 2; c++) {
      UNROLL for (ushort k = 0; k < SIMD_KEYS / 8; k++) {
        simdgroup_load(moved[c][k], slice_state + c * 8 * STATE_STRIDE + simd * SIMD_KEYS + k * 8, STATE_STRIDE);
      }
    }
    for (uint j = 0; j < CHUNK; j += 8) {
      simdgroup_float8x8 turned[2];
      UNROLL for (ushort c = 0; c < 2; c++) simdgroup_load(turned[c], rows + j * ROW_STRIDE + c * 8, ROW_STRIDE, ulong2(0, 0), true);
      UNROLL for (ushort k = 0; k < SIMD_KEYS / 8; k++) {
        simdgroup_float8x8 key;
        simdgroup_load(key, keys + j * CONV_WIDTH + simd * SIMD_KEYS + k * 8, CONV_WIDTH);
        UNROLL for (ushort c = 0; c < 2; c++) simdgroup_multiply_accumulate(moved[c][k], turned[c], key, moved[c][k]);
      }
    }
    UNROLL for (ushort c = 0; c < 2; c++) {
      UNROLL for (ushort k = 0; k < SIMD_KEYS / 8; k++) {
        simdgroup_store(moved[c][k], slice_state + c * 8 * STATE_STRIDE + simd * SIMD_KEYS + k * 8, STATE_STRIDE);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < SLICE * LANES; i += SIMDS * LANES) {
    own_state[i] = state_memory[i / LANES * (STATE_STRIDE / 4) + i % LANES];
  }
}

// The norm of each head's output and its gate. o: [tokens, DELTA_VALUE_WIDTH]; norm: [DELTA_HEAD_DIM]; normed: as o. A simdgroup
// has one head of one token.
kernel void delta_rows_norm(device const float* o [[buffer(0)]], device const float* zba [[buffer(1)]],
                            device const float* norm [[buffer(2)]], device float* normed [[buffer(3)]],
                            uint2 group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint column = group.x * DELTA_HEAD_DIM + lane * LANE_CHANNELS;
  const float4 x = *(device const float4*)(o + group.y * DELTA_VALUE_WIDTH + column);
  // Its rows are no whole number of four where the heads are not.
  device const float* own_z = zba + group.y * ZBA_WIDTH + column;
  const float4 z = float4(own_z[0], own_z[1], own_z[2], own_z[3]);
  const float4 w = *(device const float4*)(norm + lane * LANE_CHANNELS);
  const float scale = rsqrt(sum_lanes(dot(x, x)) / float(DELTA_HEAD_DIM) + RMS_EPS);
  *(device float4*)(normed + group.y * DELTA_VALUE_WIDTH + column) = x * scale * w * float4(silu(z.x), silu(z.y), silu(z.z), silu(z.w));
}
