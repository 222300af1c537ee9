// Choosing a token on the device, by the steps that SamplingParams lists.
//
// Greedy needs only the best of every CTA of the head. Everything else selects along the falling order of scores without sorting
// it: a histogram of 2048 bins over the upper bits of an order-preserving key finds the bin in which a running count or sum
// crosses its target; two more levels find the key; ids decide among equal ones. Sums of exp((score - highest) / temperature)
// are whole numbers of 2^-40, so that they do not depend on the order of additions.
// Reference: lily_reference::ops::sample.

constexpr int BINS = 2048;
constexpr int SAMPLE_THREADS = 256;
constexpr float MASS_ONE = 1099511627776.0f;   // 2^40

struct Query {       // where the falling order is cut: all scores of higher keys, and of equal ones the first `ties`
    u32 key, ties;
    u64 mass;        // up to there
};
struct Sampler {
    u32 count[BINS];      // by the upper 11 bits
    u64 mass[BINS];
    u32 fine_count[BINS]; // inside one bin of the level above
    u64 fine_mass[BINS];
    u64 likely_mass;      // of scores that min_p leaves
    u64 target, mass_above, count_above, allowed;
    Query cuts[3];
    u32 query;            // 0: top-k, 1: top-p, 2: the draw, 3: done
    u32 level, prefix, ticket;
    float highest;
    u32 best, bad, any;
    u32 block_best[1024]; // of every CTA: key, id, whether a logit is not finite
    u32 block_id[1024];
    u32 block_bad[1024];
    u32 block_ties[1024];
};

DEVICE u64 mass_of(float score, float highest, float temperature) {
    return (u64)(expf((score - highest) / temperature) * MASS_ONE);
}
DEVICE u32 uniform_24(u64 seed, u64 position) {
    u64 z = seed + (position + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return (u32)(z >> 40);
}
// The last CTA to come here, with everything that the others wrote before.
DEVICE bool last_block(u32* ticket) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == gridDim.x - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The result to the host, the token to the next step.
DEVICE void deliver(Run* run, Result* results, u32 id, u32 status) {
    Result* result = results + run->slot;
    result->id = id;
    result->status = status;
    *run->sampled = status ? 0 : id;
    run->token = FROM_STATE;
    run->position++;
    run->slot = (run->slot + 1) % RESULTS;
}

// ---- Greedy. A CTA per row of a step; rows that are not greedy are sampled otherwise.
KERNEL(256, 1) pick_best(Run* run, const Best* bests, int count, Result* results) {
    __shared__ Best warps[8];
    run += blockIdx.x;
    bests += blockIdx.x * count;
    wait_for_inputs();
    if (!run->greedy) return;
    Best own{-INFINITY, 0xffffffffu, 0, 0};
    for (int i = threadIdx.x; i < count; i += 256) join(own, bests[i]);
    join_lanes<1>(own);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; i++) join(own, warps[i]);
        const u32 status = own.bad ? BAD_LOGITS : own.id == 0xffffffffu ? EXCLUDED : 0;
        deliver(run, results, own.id, status);
    }
}

// ---- 1. Copies the logits, clears counts and histograms. Grid covers VOCAB.
KERNEL(SAMPLE_THREADS, 4) sample_begin(const float* logits, float* scores, u32* counts, Sampler* s) {
    const int i = blockIdx.x * SAMPLE_THREADS + threadIdx.x;
    if (i < VOCAB) scores[i] = logits[i], counts[i] = 0;
    for (int bin = i; bin < BINS; bin += gridDim.x * SAMPLE_THREADS)
        s->count[bin] = 0, s->mass[bin] = 0, s->fine_count[bin] = 0, s->fine_mass[bin] = 0;
    if (i == 0) s->likely_mass = 0, s->query = 0, s->level = 0, s->ticket = 0;
}

// ---- 2. Adds biases (ids differ), counts the tokens that penalties are for.
KERNEL(SAMPLE_THREADS, 4)
sample_mark(const Run* run, const uint2* biases, float* scores, u32* counts) {
    const u32 threads = gridDim.x * SAMPLE_THREADS, first = blockIdx.x * SAMPLE_THREADS + threadIdx.x;
    for (u32 i = first; i < run->biases; i += threads) scores[biases[i].x] += __uint_as_float(biases[i].y);
    if (run->repetition == 1.0f && run->presence == 0.0f && run->frequency == 0.0f) return;
    for (u32 i = run->penalty_start + first; i <= run->position; i += threads) atomicAdd(counts + run->tokens[i], 1u);
}

// ---- 3. Penalties and exclusions; the highest score. Grid covers VOCAB.
KERNEL(SAMPLE_THREADS, 4)
sample_scores(const Run* run, const float* logits, const u32* counts, const u32* mask, float* scores, Sampler* s) {
    __shared__ u32 keys[8], ids[8], bads[8];
    const int id = blockIdx.x * SAMPLE_THREADS + threadIdx.x, lane = threadIdx.x & 31;
    u32 key = 0, bad = 0, lowest = 0xffffffffu;
    if (id < VOCAB) {
        float score = scores[id];
        bad = !(fabsf(logits[id]) <= 3.402823466e+38f);
        const u32 count = counts[id];
        if (count > 0) {
            score = score > 0.0f ? score / run->repetition : score * run->repetition;
            score -= run->presence + run->frequency * (float)count;
        }
        if (id >= run->vocab_limit || (run->masked && !(mask[id / 32] >> id % 32 & 1))) score = -INFINITY;
        scores[id] = score;
        if (score > -INFINITY) key = order_key(score);
    }
    auto reduce = [&](u32 own_key, u32 own_id) {
        const u32 top = __reduce_max_sync(FULL, own_key);
        key = top;
        lowest = __reduce_min_sync(FULL, own_key == top ? own_id : 0xffffffffu);
        bad = __reduce_or_sync(FULL, bad);
    };
    reduce(key, id);
    if (lane == 0) keys[threadIdx.x / 32] = key, ids[threadIdx.x / 32] = lowest, bads[threadIdx.x / 32] = bad;
    __syncthreads();
    if (threadIdx.x < 32) {
        bad = lane < 8 ? bads[lane] : 0;
        reduce(lane < 8 ? keys[lane] : 0, lane < 8 ? ids[lane] : 0xffffffffu);
        if (lane == 0) s->block_best[blockIdx.x] = key, s->block_id[blockIdx.x] = lowest, s->block_bad[blockIdx.x] = bad;
    }
    if (!last_block(&s->ticket)) return;
    u32 own_key = 0, own_id = 0xffffffffu;
    bad = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += SAMPLE_THREADS) {
        bad |= s->block_bad[i];
        const u32 other = s->block_best[i];
        if (other > own_key) own_key = other, own_id = s->block_id[i];
    }
    reduce(own_key, own_id);
    if (lane == 0) keys[threadIdx.x / 32] = key, ids[threadIdx.x / 32] = lowest, bads[threadIdx.x / 32] = bad;
    __syncthreads();
    if (threadIdx.x < 32) {
        bad = lane < 8 ? bads[lane] : 0;
        reduce(lane < 8 ? keys[lane] : 0, lane < 8 ? ids[lane] : 0xffffffffu);
        if (lane == 0) {
            s->any = key > 0;
            s->bad = bad;
            s->best = lowest;
            s->highest = key > 0 ? scores[lowest] : 0.0f;
        }
    }
}

// The bin, from the highest down, in which `before` plus the running count (or mass) reaches `target`; one warp. Adds what lies
// above it to the sampler's sums.
DEVICE u32 crossing_bin(Sampler* s, const u32* counts, const u64* masses, bool by_mass, int lane) {
    constexpr int PER_LANE = BINS / 32;
    u64 count = 0, mass = 0;
    const int first = BINS - 1 - lane * PER_LANE;
    for (int i = 0; i < PER_LANE; i++) count += counts[first - i], mass += masses[first - i];
    u64 count_before = count, mass_before = mass;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u64 c = __shfl_up_sync(FULL, count_before, d), m = __shfl_up_sync(FULL, mass_before, d);
        if (lane >= d) count_before += c, mass_before += m;
    }
    count_before += s->count_above, mass_before += s->mass_above;
    const u64 target = s->target;
    const u32 reached = __ballot_sync(FULL, (by_mass ? mass_before : count_before) >= target);
    const int owner = reached ? __ffs(reached) - 1 : 31;
    count_before -= count, mass_before -= mass;
    u32 bin = 0;
    __syncwarp();
    if (lane == owner) {
        int i = 0;
        for (; i < PER_LANE - 1; i++) {
            const u64 with = by_mass ? mass_before + masses[first - i] : count_before + counts[first - i];
            if (with >= target) break;
            count_before += counts[first - i], mass_before += masses[first - i];
        }
        bin = first - i;
        s->count_above = count_before, s->mass_above = mass_before;
    }
    return __shfl_sync(FULL, bin, owner);
}

// Goes on to the next query that asks for anything, and to its bin of the first level. One warp.
DEVICE void begin_query(const Run* run, Sampler* s, int lane) {
    for (;;) {
        const u32 query = s->query;
        bool wanted = query >= 2;
        u64 target = 0;
        const Query all{0, 0xffffffffu, query == 0 ? 0 : s->cuts[0].mass};
        if (query == 0) {
            wanted = run->top_k > 0 && run->top_k < s->allowed;
            target = run->top_k;
        } else if (query == 1) {
            wanted = run->top_p < 1.0f;
            target = (u64)ceil((double)run->top_p * (double)all.mass);
            target = target > 1 ? target : 1;
        } else if (query == 2) {
            // Both cuts are of one order, so the shorter one holds.
            const u64 mass = min(s->cuts[1].mass, s->likely_mass);
            const u64 u = uniform_24(run->seed, (u64)run->position + 1);
            target = (__umul64hi(mass, u) << 40 | mass * u >> 24) + 1;
        }
        __syncwarp();
        if (query > 2) return;
        if (wanted) {
            if (lane == 0) s->target = target, s->count_above = 0, s->mass_above = 0;
            __syncwarp();
            const u32 bin = crossing_bin(s, s->count, s->mass, query > 0, lane);
            if (lane == 0) s->prefix = bin, s->level = 1;
            __syncwarp();
            return;
        }
        if (lane == 0) {
            if (query == 1) s->cuts[1] = s->cuts[0];
            s->query = query + 1;
        }
        __syncwarp();
    }
}

// ---- 4. One level of one query; launched seven times, which is enough for three. Grid covers VOCAB in part.
KERNEL(SAMPLE_THREADS, 4) sample_level(const Run* run, const float* scores, Sampler* s) {
    __shared__ u32 count[BINS];
    __shared__ u64 mass[BINS];
    __shared__ u64 likely;
    const u32 query = s->query, level = s->level;
    if (query > 2 || run->temperature == 0.0f || !s->any) return;
    const float highest = s->highest, temperature = run->temperature;
    const u64 least = (u64)((double)run->min_p * (double)MASS_ONE);
    const u32 prefix = s->prefix;
    for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) count[i] = 0, mass[i] = 0;
    if (threadIdx.x == 0) likely = 0;
    __syncthreads();
    for (int id = blockIdx.x * SAMPLE_THREADS + threadIdx.x; id < VOCAB; id += gridDim.x * SAMPLE_THREADS) {
        const float score = scores[id];
        if (!(score > -INFINITY)) continue;
        const u32 key = order_key(score);
        if (level == 1 && key >> 21 != prefix || level == 2 && key >> 10 != prefix) continue;
        const u32 bin = level == 0 ? key >> 21 : level == 1 ? key >> 10 & 2047 : key & 1023;
        const u64 own = mass_of(score, highest, temperature);
        atomicAdd(count + bin, 1u);
        if (own > 0) atomicAdd(mass + bin, own);
        if (level == 0 && own >= least) atomicAdd(&likely, own);
    }
    __syncthreads();
    u32* counts = level == 0 ? s->count : s->fine_count;
    u64* masses = level == 0 ? s->mass : s->fine_mass;
    for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS)
        if (count[i]) {
            atomicAdd(counts + i, count[i]);
            atomicAdd(masses + i, mass[i]);
        }
    if (threadIdx.x == 0 && likely) atomicAdd(&s->likely_mass, likely);
    if (!last_block(&s->ticket)) return;
    const int lane = threadIdx.x;
    if (lane < 32) {
        if (level == 0) {
            u64 all_count = 0, all_mass = 0;
            for (int i = lane; i < BINS; i += 32) all_count += counts[i], all_mass += masses[i];
#pragma unroll
            for (int d = 16; d > 0; d /= 2)
                all_count += __shfl_xor_sync(FULL, all_count, d), all_mass += __shfl_xor_sync(FULL, all_mass, d);
            if (lane == 0) s->allowed = all_count, s->cuts[0] = Query{0, 0xffffffffu, all_mass};
            __syncwarp();
            begin_query(run, s, lane);
        } else {
            const u32 bin = crossing_bin(s, counts, masses, query > 0, lane);
            if (level == 1) {
                if (lane == 0) s->prefix = prefix << 11 | bin, s->level = 2;
            } else {
                if (lane == 0) {
                    const u32 key = prefix << 10 | bin, equal = counts[bin];
                    const u64 each = equal ? masses[bin] / equal : 0;
                    u64 ties = query == 0 ? s->target - s->count_above
                               : each     ? (s->target - s->mass_above + each - 1) / each
                                          : 1;
                    ties = max(1ull, min(ties, (u64)equal));
                    if (query > 0 && key == s->cuts[query - 1].key) ties = min(ties, (u64)s->cuts[query - 1].ties);
                    s->cuts[query] = Query{key, (u32)ties, s->mass_above + ties * each};
                    s->query = query + 1;
                }
                __syncwarp();
                begin_query(run, s, lane);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) s->fine_count[i] = 0, s->fine_mass[i] = 0;
}

// ---- 5. The id: of equal scores the one whose turn it is. Every CTA has a range of ids.
KERNEL(SAMPLE_THREADS, 4) sample_finish(Run* run, const float* scores, Sampler* s, Result* results) {
    __shared__ u32 found, block;
    const int range = (VOCAB + gridDim.x - 1) / gridDim.x, first = blockIdx.x * range;
    const bool draws = run->temperature != 0.0f && s->any;
    const u32 key = s->cuts[2].key;
    if (draws) {
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < range; i += SAMPLE_THREADS) {
            const int id = first + i;
            if (id < VOCAB && scores[id] > -INFINITY && order_key(scores[id]) == key) atomicAdd(&found, 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) s->block_ties[blockIdx.x] = found;
    }
    if (!last_block(&s->ticket) || threadIdx.x != 0) return;
    u32 id = s->best;
    if (draws) {
        u32 ties = s->cuts[2].ties;
        for (block = 0; block < gridDim.x - 1 && s->block_ties[block] < ties; block++) ties -= s->block_ties[block];
        for (int i = block * range; i < VOCAB; i++)
            if (scores[i] > -INFINITY && order_key(scores[i]) == key && --ties == 0) {
                id = i;
                break;
            }
    }
    deliver(run, results, id, s->bad ? BAD_LOGITS : s->any ? 0 : EXCLUDED);
}
