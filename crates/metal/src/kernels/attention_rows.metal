// Many tokens through the attention of a layer, in two kernels: what becomes of queries, keys and values before they meet, and
// the meeting, on 8x8 matrices of the simdgroup.
//
// query_gate: [tokens, QUERY_HEADS, query and gate, HEAD_DIM]; key_value: [tokens, k and v, KV_HEADS, HEAD_DIM], f32
// query_norm, key_norm: [HEAD_DIM]; angles: [tokens, ROTARY_DIM / 2] (cos, sin)
// keys, values: [KV_HEADS, capacity, HEAD_DIM] of KvElement; the tokens' own rows are written
// queries: [KV_HEADS, query rows, HEAD_DIM] f32, row token * QUERIES_PER_KV + head, up to whole blocks, zero beyond the tokens
// out: [tokens, QUERY_HEADS, HEAD_DIM] f32, gated
//
// Reference: `rms_norm`, `rope`, `attention`, `attention_gate`.

#include <metal_simdgroup_matrix>

// Query rows of a threadgroup: a simdgroup has eight.
constant uint BLOCK_ROWS = SIMDS * 8;
// Keys that are met at a time; their rows and then their values lie in threadgroup memory as f32.
constant uint KEYS = 16;
constant uint KEY_STRIDE = HEAD_DIM + 4;
constant uint SCORE_STRIDE = KEYS + 4;
constant uint ROW_LANES = LANES / 8;
constant uint LANE_KEYS = KEYS / ROW_LANES;
static_assert(LANE_KEYS == 4, "a lane has four scores of a row");
// Dimensions of finished rows that a simdgroup puts into threadgroup memory at a time.
constant uint OUT_DIMS = 128;
static_assert(BLOCK_ROWS * OUT_DIMS <= KEYS * KEY_STRIDE, "finished rows take the place of values");

inline uint query_rows(uint tokens) { return (tokens * QUERIES_PER_KV + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS; }

struct RowsSpan {
  // Of the first token.
  uint position;
  uint tokens;
  uint capacity;
  // Block of query rows at which the grid begins.
  uint first_block;
};

// A simdgroup has one row of queries, or one key with its value.
kernel void attention_rows_prepare(
    device const float* query_gate [[buffer(0)]], device const float* key_value [[buffer(1)]],
    device const float* query_norm [[buffer(2)]], device const float* key_norm [[buffer(3)]],
    device const float2* angles [[buffer(4)]], device float* queries [[buffer(5)]], device KvElement* keys [[buffer(6)]],
    device KvElement* values [[buffer(7)]], constant RowsSpan& span [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint token = group.y, head = group.x;
  device const float2* own_angles = angles + min(token, span.tokens - 1) * (ROTARY_DIM / 2);
  if (head >= QUERY_HEADS) {
    if (token >= span.tokens) return;
    const uint kv_head = head - QUERY_HEADS;
    device const float* own = key_value + token * 2 * KV_WIDTH + kv_head * HEAD_DIM + lane * DIMS;
    const uint at = (kv_head * span.capacity + span.position + token) * HEAD_DIM + lane * DIMS;
    store_part(keys + at, norm_and_rotate(load_part(own), key_norm, own_angles, lane), true);
    store_part(values + at, load_part(own + KV_WIDTH), true);
    return;
  }
  const uint rows = query_rows(span.tokens), row = token * QUERIES_PER_KV + head % QUERIES_PER_KV;
  if (row >= rows) return;
  Part query = {float4(0.0f), float4(0.0f)};
  if (token < span.tokens) {
    query = load_part(query_gate + (token * QUERY_HEADS + head) * 2 * HEAD_DIM + lane * DIMS);
    query = norm_and_rotate(query, query_norm, own_angles, lane);
    query.low *= rsqrt(float(HEAD_DIM));
    query.high *= rsqrt(float(HEAD_DIM));
  }
  store_part(queries + (head / QUERIES_PER_KV * rows + row) * HEAD_DIM + lane * DIMS, query, true);
}

// KEYS rows of keys or values as f32, the last one again where there are none. Called by all threads.
inline void load_rows(device const KvElement* rows, uint first, uint length, uint thread_index, threadgroup float* tile) {
  for (uint i = thread_index; i < KEYS * LANES; i += SIMDS * LANES) {
    const uint row = i / LANES, dim = i % LANES * DIMS;
    const Part part = load_part(rows + min(first + row, length - 1) * HEAD_DIM + dim);
    threadgroup float4* place = (threadgroup float4*)(tile + row * KEY_STRIDE + dim);
    place[0] = part.low;
    place[1] = part.high;
  }
}

// A threadgroup has 32 query rows, those of 32 / QUERIES_PER_KV tokens, and meets every key that one of them may see, 16 at a
// time: keys and values come from memory once for all query heads that share them. The running maximum of a row is kept by the
// four lanes that have its scores; where it grows, what was summed up shrinks by a product with a diagonal matrix, which asks
// for no knowledge of where a lane's elements lie. Moves, per threadgroup, 2 * length * HEAD_DIM elements of keys and values.
[[max_total_threads_per_threadgroup(128)]] kernel void attention_rows(
    device const float* queries [[buffer(0)]], device const KvElement* keys [[buffer(1)]],
    device const KvElement* values [[buffer(2)]], device const float* query_gate [[buffer(3)]],
    device float* out [[buffer(4)]], constant RowsSpan& span [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[KEYS * KEY_STRIDE / 4];
  threadgroup float4 score_memory[SIMDS][8 * SCORE_STRIDE / 4];
  threadgroup float diagonals[SIMDS][64];
  threadgroup float* tile = (threadgroup float*)memory;
  threadgroup float* scores = (threadgroup float*)score_memory[simd];
  threadgroup float* diagonal = diagonals[simd];
  const uint thread_index = simd * LANES + lane, kv_head = group.y;
  const uint block = (span.first_block + group.x) * BLOCK_ROWS, row = block + simd * 8;
  const uint real_rows = span.tokens * QUERIES_PER_KV;
  const uint length = span.position + (min(block + BLOCK_ROWS, real_rows) - 1) / QUERIES_PER_KV + 1;
  const uint own_row = row + lane / ROW_LANES, own_position = span.position + own_row / QUERIES_PER_KV;
  device const float* own_queries = queries + (kv_head * query_rows(span.tokens) + row) * HEAD_DIM;
  device const KvElement* head_keys = keys + kv_head * span.capacity * HEAD_DIM;
  device const KvElement* head_values = values + kv_head * span.capacity * HEAD_DIM;

  simdgroup_float8x8 outputs[HEAD_DIM / 8];
  UNROLL for (ushort d = 0; d < HEAD_DIM / 8; d++) outputs[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  float maximum = -INFINITY, sum = 0;
  for (uint first = 0; first < length; first += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_rows(head_keys, first, length, thread_index, tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 products[KEYS / 8];
    UNROLL for (ushort c = 0; c < KEYS / 8; c++) products[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint d = 0; d < HEAD_DIM; d += 8) {
      simdgroup_float8x8 query;
      simdgroup_load(query, own_queries + d, HEAD_DIM);
      UNROLL for (ushort c = 0; c < KEYS / 8; c++) {
        simdgroup_float8x8 key;
        simdgroup_load(key, tile + c * 8 * KEY_STRIDE + d, KEY_STRIDE, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(products[c], query, key, products[c]);
      }
    }
    UNROLL for (ushort c = 0; c < KEYS / 8; c++) simdgroup_store(products[c], scores + c * 8, SCORE_STRIDE);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    const uint first_key = first + lane % ROW_LANES * LANE_KEYS;
    threadgroup float4* place = (threadgroup float4*)(scores + lane / ROW_LANES * SCORE_STRIDE + lane % ROW_LANES * LANE_KEYS);
    float4 score = *place;
    score.x = first_key <= own_position ? score.x : -INFINITY;
    score.y = first_key + 1 <= own_position ? score.y : -INFINITY;
    score.z = first_key + 2 <= own_position ? score.z : -INFINITY;
    score.w = first_key + 3 <= own_position ? score.w : -INFINITY;
    float highest = max(maximum, max(max(score.x, score.y), max(score.z, score.w)));
    for (ushort mask = 1; mask < ROW_LANES; mask *= 2) highest = max(highest, simd_shuffle_xor(highest, mask));
    const float4 weights = float4(exp(score.x - highest), exp(score.y - highest), exp(score.z - highest), exp(score.w - highest));
    const float shrink = exp(maximum - highest);
    float total = (weights.x + weights.y) + (weights.z + weights.w);
    for (ushort mask = 1; mask < ROW_LANES; mask *= 2) total += simd_shuffle_xor(total, mask);
    sum = sum * shrink + total;
    maximum = highest;
    *place = weights;
    if (simd_any(shrink != 1.0f)) {
      const uint diagonal_row = lane / ROW_LANES, column = lane % ROW_LANES * 2;
      diagonal[diagonal_row * 8 + column] = column == diagonal_row ? shrink : 0.0f;
      diagonal[diagonal_row * 8 + column + 1] = column + 1 == diagonal_row ? shrink : 0.0f;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_float8x8 shrinks;
      simdgroup_load(shrinks, diagonal, 8);
      UNROLL for (ushort d = 0; d < HEAD_DIM / 8; d++) simdgroup_multiply(outputs[d], shrinks, outputs[d]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_rows(head_values, first, length, thread_index, tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 weight[KEYS / 8];
    UNROLL for (ushort c = 0; c < KEYS / 8; c++) simdgroup_load(weight[c], scores + c * 8, SCORE_STRIDE);
    UNROLL for (ushort d = 0; d < HEAD_DIM / 8; d++) {
      UNROLL for (ushort c = 0; c < KEYS / 8; c++) {
        simdgroup_float8x8 value;
        simdgroup_load(value, tile + c * 8 * KEY_STRIDE + d * 8, KEY_STRIDE);
        simdgroup_multiply_accumulate(outputs[d], weight[c], value, outputs[d]);
      }
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* finished = tile + simd * 8 * OUT_DIMS;
  const uint head = kv_head * QUERIES_PER_KV + own_row % QUERIES_PER_KV;
  device float* own_out = out + (own_row / QUERIES_PER_KV * QUERY_HEADS + head) * HEAD_DIM;
  device const float* own_gate = query_gate + ((own_row / QUERIES_PER_KV * QUERY_HEADS + head) * 2 + 1) * HEAD_DIM;
  UNROLL for (ushort part = 0; part < HEAD_DIM / OUT_DIMS; part++) {
    UNROLL for (ushort d = 0; d < OUT_DIMS / 8; d++) simdgroup_store(outputs[part * (OUT_DIMS / 8) + d], finished + d * 8, OUT_DIMS);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane % ROW_LANES; i < OUT_DIMS && own_row < real_rows; i += ROW_LANES) {
      const uint dim = part * OUT_DIMS + i;
      own_out[dim] = finished[lane / ROW_LANES * OUT_DIMS + i] / sum * sigmoid(own_gate[dim]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
