// From router logits of many tokens to lists of what each expert has to do. Reference: `route`.
//
// Pair p = token * EXPERTS_PER_TOKEN + slot. Lists are in the order of the experts, and of the tokens inside: the same on every
// run, with nothing counted by atomics and nothing read by the host.

// logits: [tokens, EXPERTS + 1] f32; chosen: [tokens, EXPERTS_PER_TOKEN] u32; weights: [tokens, EXPERTS_PER_TOKEN + 1] f32, the
// shared expert's last. One simdgroup has one token.
kernel void route(device const float* logits [[buffer(0)]], device uint* chosen [[buffer(1)]],
                  device float* weights [[buffer(2)]], uint token [[threadgroup_position_in_grid]],
                  ushort lane [[thread_index_in_simdgroup]]) {
  device const float* own = logits + token * (EXPERTS + 1);
  float mine[EXPERTS_PER_LANE];
  load_logits(mine, own, lane);
  Choice choices[EXPERTS_PER_TOKEN];
  uint taken = 0;
  for (uint i = 0; i < EXPERTS_PER_TOKEN; i++) choices[i] = take_highest(mine, taken, lane);
  if (lane == 0) write_choice(choices, own, chosen + token * EXPERTS_PER_TOKEN, weights + token * (EXPERTS_PER_TOKEN + 1));
}

// How many pairs have this expert. counts: [EXPERTS]. One simdgroup has one expert. Reads tokens * EXPERTS_PER_TOKEN ids.
kernel void count_pairs(device const uint* chosen [[buffer(0)]], device uint* counts [[buffer(1)]],
                        constant uint& pair_count [[buffer(2)]], uint expert [[threadgroup_position_in_grid]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  uint count = 0;
  for (uint pair = lane; pair < pair_count; pair += LANES) count += chosen[pair] == expert ? 1 : 0;
  count = simd_sum(count);
  if (lane == 0) counts[expert] = count;
}

struct ListSpan {
  uint pair_count;
  uint tile_count;
};

// pairs: [tokens * EXPERTS_PER_TOKEN], sorted by expert; tiles: [tile_count] (expert, first pair of the list, pairs, 0), those
// beyond the last are empty. One simdgroup has one expert. Reads tokens * EXPERTS_PER_TOKEN ids.
kernel void list_pairs(device const uint* chosen [[buffer(0)]], device const uint* counts [[buffer(1)]],
                       device uint* pairs [[buffer(2)]], device uint4* tiles [[buffer(3)]],
                       constant ListSpan& span [[buffer(4)]], uint expert [[threadgroup_position_in_grid]],
                       ushort lane [[thread_index_in_simdgroup]]) {
  uint place = 0, tile = 0;
  for (uint other = lane; other < expert; other += LANES) {
    place += counts[other];
    tile += (counts[other] + TILE_ROWS - 1) / TILE_ROWS;
  }
  place = simd_sum(place);
  tile = simd_sum(tile);
  const uint end = place + counts[expert], own_tiles = (counts[expert] + TILE_ROWS - 1) / TILE_ROWS;
  for (uint i = lane; i < own_tiles; i += LANES) {
    const uint first = place + i * TILE_ROWS;
    tiles[tile + i] = uint4(expert, first, min(end - first, TILE_ROWS), 0);
  }
  if (expert == EXPERTS - 1) {
    for (uint i = tile + own_tiles + lane; i < span.tile_count; i += LANES) tiles[i] = uint4(0, 0, 0, 0);
  }
  for (uint first = 0; first < span.pair_count; first += LANES) {
    const uint pair = first + lane;
    const uint hit = pair < span.pair_count && chosen[min(pair, span.pair_count - 1)] == expert ? 1 : 0;
    const uint before = simd_prefix_exclusive_sum(hit);
    if (hit == 1) pairs[place + before] = pair;
    place += simd_sum(hit);
  }
}
