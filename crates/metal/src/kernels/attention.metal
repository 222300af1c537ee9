// One token through the attention of a layer, from the projections to the input of the output projection, in two kernels:
// partial results over stretches of the context, and their sum.
//
// query_gate: [QUERY_HEADS, query and gate, HEAD_DIM]; key_value: k, then v, [KV_HEADS, HEAD_DIM] each, f32
// query_norm, key_norm: [HEAD_DIM]; angles: [ROTARY_DIM / 2] (cos, sin) of this position
// keys, values: [KV_HEADS, capacity, HEAD_DIM] of KvElement; this token's row is written
// outputs: [QUERY_HEADS, MOST_SPLITS, HEAD_DIM] f32; maxima_sums: [QUERY_HEADS, MOST_SPLITS] (max, sum)
//
// A threadgroup has one stretch of one key/value head, and all query heads that read it, so that keys and values come from
// memory once; its simdgroups divide the query heads and need nothing of each other. A lane has 8 of 256 dimensions. Four keys
// are met at a time. Moves 2 * KV_HEADS * (position + 1) * HEAD_DIM elements of keys and values. Reference: `rms_norm`, `rope`,
// `attention`, `attention_gate`.

constant uint KEYS = 4;
constant uint SIMD_HEADS = QUERIES_PER_KV <= SIMDS ? 1 : QUERIES_PER_KV <= 2 * SIMDS ? 2 : QUERIES_PER_KV <= 4 * SIMDS ? 4 : 8;
static_assert(QUERIES_PER_KV <= 8 * SIMDS, "more query heads than a threadgroup holds");
// Lanes that come to hold the same score.
constant uint SCORE_LANES = LANES / (KEYS * SIMD_HEADS);

struct Span {
  uint position;
  uint splits;
  uint capacity;
};

// What a simdgroup has summed up so far. Maximum and sum are those of the head that the lane's score belongs to.
struct Running {
  Part outputs[SIMD_HEADS];
  float maximum;
  float sum;
};

// Meets `count` keys, 1 to KEYS, with all heads of the simdgroup.
inline void attend(thread Running& running, thread const Part (&queries)[SIMD_HEADS], thread const Part (&keys)[KEYS],
                   thread const Part (&values)[KEYS], uint count, ushort lane) {
  float scores[KEYS * SIMD_HEADS];
  UNROLL for (ushort h = 0; h < SIMD_HEADS; h++) {
    UNROLL for (ushort i = 0; i < KEYS; i++) scores[h * KEYS + i] = dot_parts(queries[h], keys[i]);
  }
  float score = sum_each<KEYS * SIMD_HEADS>(scores, lane);
  if (lane / SCORE_LANES % KEYS >= count) score = -INFINITY;
  float maximum = max(running.maximum, score);
  for (ushort mask = SCORE_LANES; mask < SCORE_LANES * KEYS; mask *= 2) maximum = max(maximum, simd_shuffle_xor(maximum, mask));
  const float weight = exp(score - maximum), shrink = exp(running.maximum - maximum);
  float sum = weight;
  for (ushort mask = SCORE_LANES; mask < SCORE_LANES * KEYS; mask *= 2) sum += simd_shuffle_xor(sum, mask);
  running.sum = running.sum * shrink + sum;
  running.maximum = maximum;
  UNROLL for (ushort h = 0; h < SIMD_HEADS; h++) {
    const float head_shrink = simd_shuffle(shrink, ushort(h * KEYS * SCORE_LANES));
    running.outputs[h].low *= head_shrink;
    running.outputs[h].high *= head_shrink;
    UNROLL for (ushort i = 0; i < KEYS; i++) {
      const float w = simd_shuffle(weight, ushort((h * KEYS + i) * SCORE_LANES));
      running.outputs[h].low += w * values[i].low;
      running.outputs[h].high += w * values[i].high;
    }
  }
}

[[max_total_threads_per_threadgroup(128)]] kernel void attention_partials(
    device const float* query_gate [[buffer(0)]], device const float* key_value [[buffer(1)]],
    device const float* query_norm [[buffer(2)]], device const float* key_norm [[buffer(3)]],
    device const float2* angles [[buffer(4)]], device KvElement* keys [[buffer(5)]], device KvElement* values [[buffer(6)]],
    device float* outputs [[buffer(7)]], device float2* maxima_sums [[buffer(8)]], constant Span& span [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const uint split = group.x, kv_head = group.y, first_head = simd * SIMD_HEADS;
  if (first_head >= QUERIES_PER_KV) return;
  Part queries[SIMD_HEADS];
  Running running;
  running.maximum = -INFINITY;
  running.sum = 0;
  UNROLL for (ushort h = 0; h < SIMD_HEADS; h++) {
    const uint head = kv_head * QUERIES_PER_KV + min(first_head + h, QUERIES_PER_KV - 1);
    queries[h] = norm_and_rotate(load_part(query_gate + head * 2 * HEAD_DIM + lane * DIMS), query_norm, angles, lane);
    queries[h].low *= rsqrt(float(HEAD_DIM));
    queries[h].high *= rsqrt(float(HEAD_DIM));
    running.outputs[h].low = float4(0.0f);
    running.outputs[h].high = float4(0.0f);
  }

  const uint length = (span.position + span.splits) / span.splits;
  const uint start = split * length, end = min(start + length, span.position + 1), cached = min(end, span.position);
  device KvElement* head_keys = keys + kv_head * span.capacity * HEAD_DIM + lane * DIMS;
  device KvElement* head_values = values + kv_head * span.capacity * HEAD_DIM + lane * DIMS;
  Part k[KEYS], v[KEYS];
  for (uint first = start; first < cached; first += KEYS) {
    UNROLL for (uint i = 0; i < KEYS; i++) {
      const uint at = min(first + i, cached - 1) * HEAD_DIM;
      k[i] = load_part(head_keys + at);
      v[i] = load_part(head_values + at);
    }
    attend(running, queries, k, v, cached - first, lane);
  }
  if (start <= span.position && span.position < end) {
    // The token's own key and value, rounded as the cache holds them.
    const uint at = span.position * HEAD_DIM;
    device const float* own = key_value + kv_head * HEAD_DIM + lane * DIMS;
    const Part key = store_part(head_keys + at, norm_and_rotate(load_part(own), key_norm, angles, lane), simd == 0);
    const Part value = store_part(head_values + at, load_part(own + KV_WIDTH), simd == 0);
    UNROLL for (uint i = 0; i < KEYS; i++) {
      k[i] = key;
      v[i] = value;
    }
    attend(running, queries, k, v, 1, lane);
  }

  UNROLL for (ushort h = 0; h < SIMD_HEADS; h++) {
    if (first_head + h >= QUERIES_PER_KV) break;
    const uint place = (kv_head * QUERIES_PER_KV + first_head + h) * MOST_SPLITS + split;
    device float* output = outputs + place * HEAD_DIM + lane * DIMS;
    *(device float4*)output = running.outputs[h].low;
    *(device float4*)(output + 4) = running.outputs[h].high;
    if (lane == h * KEYS * SCORE_LANES) maxima_sums[place] = float2(running.maximum, running.sum);
  }
}

// out = sum of the partial results, times sigmoid(gate). out: [QUERY_HEADS, HEAD_DIM] f32
// A thread makes one dimension of one head; a head's dimensions are COMBINED to a threadgroup.
constant uint COMBINED = 64;

kernel void attention_combine(device const float* outputs [[buffer(0)]], device const float2* maxima_sums [[buffer(1)]],
                              device const float* query_gate [[buffer(2)]], device float* out [[buffer(3)]],
                              constant uint& splits [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
  const uint head = group / (HEAD_DIM / COMBINED), dim = group % (HEAD_DIM / COMBINED) * COMBINED + thread_index;
  device const float2* parts = maxima_sums + head * MOST_SPLITS;
  float maximum = -INFINITY;
  for (uint s = 0; s < splits; s++) maximum = max(maximum, parts[s].x);
  float sum = 0, output = 0;
  for (uint s = 0; s < splits; s++) {
    const float weight = exp(parts[s].x - maximum);
    sum += weight * parts[s].y;
    output += weight * outputs[(head * MOST_SPLITS + s) * HEAD_DIM + dim];
  }
  const float gate = query_gate[(head * 2 + 1) * HEAD_DIM + dim];
  out[head * HEAD_DIM + dim] = output / sum * sigmoid(gate);
}
