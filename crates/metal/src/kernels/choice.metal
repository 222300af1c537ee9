// The choice of experts from router logits, for kernels of one token and of many. A simdgroup makes it together.

constant uint EXPERTS_PER_LANE = (EXPERTS + LANES - 1) / LANES;

struct Choice {
  float logit;
  uint expert;
};

// The highest logit among those not taken, the lowest expert on ties, the same in every lane; marks it as taken. Lane l
// holds experts l, l + 32, ... A NaN counts as minus infinity, so that whatever is chosen is an expert.
inline Choice take_highest(thread const float (&logits)[EXPERTS_PER_LANE], thread uint& taken, ushort lane) {
  Choice best = {-INFINITY, EXPERTS};
  UNROLL for (uint i = 0; i < EXPERTS_PER_LANE; i++) {
    const uint expert = i * LANES + lane;
    if (expert >= EXPERTS || (taken >> i & 1) != 0) continue;
    if (best.expert == EXPERTS || logits[i] > best.logit) {
      best.logit = logits[i];
      best.expert = expert;
    }
  }
  for (ushort mask = LANES / 2; mask > 0; mask /= 2) {
    const float logit = simd_shuffle_xor(best.logit, mask);
    const uint expert = simd_shuffle_xor(best.expert, mask);
    if (logit > best.logit || (logit == best.logit && expert < best.expert)) {
      best.logit = logit;
      best.expert = expert;
    }
  }
  if (best.expert % LANES == lane) taken |= 1u << (best.expert / LANES);
  return best;
}

// A lane's logits: of experts lane, lane + 32, ...
inline void load_logits(thread float (&mine)[EXPERTS_PER_LANE], device const float* logits, ushort lane) {
  UNROLL for (uint i = 0; i < EXPERTS_PER_LANE; i++) {
    const float logit = i * LANES + lane < EXPERTS ? logits[i * LANES + lane] : -INFINITY;
    mine[i] = isnan(logit) ? -INFINITY : logit;
  }
}

// What one thread writes down: the experts and their weights, behind them the weight of the shared one.
inline void write_choice(thread const Choice (&choices)[EXPERTS_PER_TOKEN], device const float* logits, device uint* chosen,
                         device float* weights) {
  float total = 0;
  for (uint i = 0; i < EXPERTS_PER_TOKEN; i++) total += exp(choices[i].logit - choices[0].logit);
  for (uint i = 0; i < EXPERTS_PER_TOKEN; i++) {
    chosen[i] = choices[i].expert;
    weights[i] = exp(choices[i].logit - choices[0].logit) / total;
  }
  weights[EXPERTS_PER_TOKEN] = sigmoid(logits[EXPERTS]);
}
