// Grouped-query attention over a BF16 cache [kv head, capacity, 256], with norms and RoPE of queries and keys.
//
// One token: the cached tokens are cut into parts, a CTA takes one part of one kv head for all its query heads, and a second
// kernel adds the parts up. Many tokens: blocks of 16 positions of up to 4 query heads on tensor cores.
// Reference: lily_reference::ops::{rms_norm, rope, attention, attention_gate}.

constexpr int QUERIES_PER_KV = QUERY_HEADS / KV_HEADS;
constexpr float LOG2E = 1.44269504088896341f;

// Keys of a layer's kv head; its values lie `value_offset` further on.
DEVICE u16* keys_of(const Run* run, int layer, int kv_head) {
    return run->kv + ((u64)layer * KV_HEADS + kv_head) * run->capacity * HEAD;
}
DEVICE u64 value_offset(const Run* run) { return (u64)ATTENTION_LAYERS * KV_HEADS * run->capacity * HEAD; }

// A head in a warp, 8 consecutive dimensions a lane: norm and RoPE. `turns` [32] of cosine and sine.
DEVICE void norm_head(float* x, const float* weight, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    const float scale = inverse_root(sum_lanes<32>(sum) / HEAD + RMS_EPS);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale * __ldg(weight + lane * 8 + i);
}
DEVICE void rope_head(float* x, const float2* turns, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(FULL, x[i], 4);
        if (lane < 8) {
            const float2 turn = turns[(lane * 8 + i) % (ROTARY / 2)];
            x[i] = lane < 4 ? x[i] * turn.x - other * turn.y : x[i] * turn.x + other * turn.y;
        }
    }
}
// Cosine and sine of `position * theta^(-i / 32)`, the angle in f64 and in half turns.
DEVICE float2 rope_turn(int i, u32 position) {
    double sine, cosine;
    sincospi((double)position * ROPE_HALF_TURNS[i], &sine, &cosine);
    return make_float2((float)cosine, (float)sine);
}
DEVICE uint4 pack8(const float* x) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
DEVICE void unpack8(float* x, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = bf16_low(words[i]), x[2 * i + 1] = bf16_high(words[i]);
}
DEVICE void load8(float* x, const float* from) {
    const float4 a = load_cg((const float4*)from), b = load_cg((const float4*)from + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// ---- One token.
constexpr int TILE = 32;               // tokens in shared memory at a time
constexpr int STAGES = 2;
constexpr int AT_ONCE = 4;             // tokens a warp scores at a time
constexpr int HEADS_PER_WARP = QUERIES_PER_KV % 4 == 0 ? 4 : QUERIES_PER_KV % 2 == 0 ? 2 : 1;
constexpr int HEAD_GROUPS = QUERIES_PER_KV / HEADS_PER_WARP;
static_assert(HEAD_GROUPS <= 16, "a warp per group of heads");
constexpr int TOKEN_WARPS = 16 / HEAD_GROUPS;
constexpr int SCORES = AT_ONCE * HEADS_PER_WARP;

// Tokens of a part: whole sixteens.
DEVICE u32 part_length(u32 tokens, u32 parts) { return ((tokens + parts - 1) / parts + 15) / 16 * 16; }

// Sums of N values over the lanes: lane l gets the value `sum_index<N>(l)`.
template <int N> DEVICE int sum_index(int lane) {
    int index = 0;
#pragma unroll
    for (int half = N / 2, bit = 1; half > 0; half /= 2, bit *= 2)
        if (lane & bit) index += half;
    return index;
}
template <int N> DEVICE int lane_of_sum(int index) {
    int lane = 0;
#pragma unroll
    for (int half = N / 2, bit = 1; half > 0; half /= 2, bit *= 2)
        if (index & half) lane += bit;
    return lane;
}
template <int N> DEVICE float sum_each(float* v, int lane) {
    int bit = 1;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float send = upper ? v[i] : v[i + half];
            const float keep = upper ? v[i + half] : v[i];
            v[i] = keep + __shfl_xor_sync(FULL, send, bit);
        }
        bit *= 2;
    }
    float sum = v[0];
    for (; bit < 32; bit *= 2) sum += __shfl_xor_sync(FULL, sum, bit);
    return sum;
}

struct KvTile {
    uint4 keys[TILE][HEAD / 8];
    uint4 values[TILE][HEAD / 8];
};
// Partial results of a part: [query head, parts] of maximum and sum, [parts, query head, 256] of values.
KERNEL(512, 1)
attend(const Run* run, int layer, int parts, const float* projected, const float* q_norm, const float* k_norm,
       float2* part_sums, float* part_values) {
    __shared__ float2 turns[ROTARY / 2];
    __shared__ float queries[QUERIES_PER_KV][HEAD];
    __shared__ float2 warp_sums[16][HEADS_PER_WARP];
    extern __shared__ __align__(128) char dynamic_shared[];
    KvTile* stages = (KvTile*)dynamic_shared;
    const int kv_head = blockIdx.x / parts, part = blockIdx.x % parts;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    launch_dependents();
    const u32 position = run->position, length = part_length(position + 1, parts);
    const u32 start = part * length, end = min(position + 1, start + length);
    u16* keys = keys_of(run, layer, kv_head);
    u16* values = keys + value_offset(run);
    auto load = [&](int tile, u32 limit) {
        KvTile& stage = stages[tile % STAGES];
        for (int i = tid; i < TILE * HEAD / 8; i += 512) {
            const u32 token = start + tile * TILE + i / (HEAD / 8);
            if (token >= limit) continue;
            copy16(&stage.keys[i / 32][i % 32], keys + (u64)token * HEAD + i % 32 * 8);
            copy16(&stage.values[i / 32][i % 32], values + (u64)token * HEAD + i % 32 * 8);
        }
        copy_commit();
    };
    // Tokens before this one were written a whole pass ago.
#pragma unroll
    for (int i = 0; i < STAGES; i++) load(i, min(end, position));
    if (tid < ROTARY / 2) turns[tid] = rope_turn(tid, position);
    __syncthreads();
    wait_for_inputs();
    if (start >= end) return;
    const int tiles = (end - start + TILE - 1) / TILE;
    const bool owner = end == position + 1;
    // The new token's place in shared memory, if its tile is already loading.
    const u32 at = position - start;
    const bool beside = owner && (int)(at / TILE) < STAGES;
    for (int job = warp; job < QUERIES_PER_KV + (owner ? 2 : 0); job += 16) {
        float x[8];
        if (job < QUERIES_PER_KV) {
            const int head = kv_head * QUERIES_PER_KV + job;
            load8(x, projected + head * 2 * HEAD + lane * 8);
            norm_head(x, q_norm, lane);
            rope_head(x, turns, lane);
            // Scores in powers of two, over sqrt(256).
#pragma unroll
            for (int i = 0; i < 8; i++) queries[job][lane * 8 + i] = x[i] * (LOG2E / 16.0f);
        } else {
            const bool key = job == QUERIES_PER_KV;
            load8(x, projected + (key ? PROJ_K : PROJ_V) + kv_head * HEAD + lane * 8);
            if (key) {
                norm_head(x, k_norm, lane);
                rope_head(x, turns, lane);
            }
            const uint4 packed = pack8(x);
            ((uint4*)((key ? keys : values) + (u64)position * HEAD))[lane] = packed;
            if (beside) {
                KvTile& stage = stages[at / TILE % STAGES];
                (key ? stage.keys : stage.values)[at % TILE][lane] = packed;
            }
        }
    }
    __syncthreads();
    const int group = warp % HEAD_GROUPS, token_warp = warp / HEAD_GROUPS;
    float q[HEADS_PER_WARP][8], o[HEADS_PER_WARP][8];
#pragma unroll
    for (int h = 0; h < HEADS_PER_WARP; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[h][i] = queries[group * HEADS_PER_WARP + h][lane * 8 + i];
            o[h][i] = 0.0f;
        }
    // Of the head of this lane's score.
    float highest = -INFINITY, sum = 0.0f;
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<STAGES - 1>();
        __syncthreads();
        const KvTile& stage = stages[tile % STAGES];
        for (int first = token_warp * AT_ONCE; first < TILE; first += TOKEN_WARPS * AT_ONCE) {
            const u32 token = start + tile * TILE + first;
            if (token_warp >= TOKEN_WARPS || token >= end) break;
            float scores[SCORES];
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++) {
                float key[8];
                unpack8(key, stage.keys[first + t][lane]);
#pragma unroll
                for (int h = 0; h < HEADS_PER_WARP; h++) {
                    float score = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; i++) score += key[i] * q[h][i];
                    scores[t * HEADS_PER_WARP + h] = score;
                }
            }
            float score = sum_each<SCORES>(scores, lane);
            // Of tokens beyond the end shared memory holds anything.
            if (token + sum_index<SCORES>(lane) / HEADS_PER_WARP >= end) score = -INFINITY;
            // The token's number is in the lowest two bits of the lane.
            const float now = fmaxf(highest, max_lanes<AT_ONCE>(score));
            const float correction = exp2f(highest - now), p = exp2f(score - now);
            sum = sum * correction + sum_lanes<AT_ONCE>(p);
            highest = now;
#pragma unroll
            for (int h = 0; h < HEADS_PER_WARP; h++) {
                const float c = __shfl_sync(FULL, correction, lane_of_sum<SCORES>(h));
#pragma unroll
                for (int i = 0; i < 8; i++) o[h][i] *= c;
            }
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++) {
                if (token + t >= end) break;
                float value[8];
                unpack8(value, stage.values[first + t][lane]);
#pragma unroll
                for (int h = 0; h < HEADS_PER_WARP; h++) {
                    const float weight = __shfl_sync(FULL, p, lane_of_sum<SCORES>(t * HEADS_PER_WARP + h));
#pragma unroll
                    for (int i = 0; i < 8; i++) o[h][i] += weight * value[i];
                }
            }
        }
        __syncthreads();
        if (tile + STAGES < tiles) load(tile + STAGES, end);
        else copy_commit();
    }
    // The warps' parts, in shared memory that held the tiles.
    float* outputs = (float*)dynamic_shared;
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS_PER_WARP; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) outputs[(warp * HEADS_PER_WARP + h) * HEAD + lane * 8 + i] = o[h][i];
    if (lane < SCORES && sum_index<SCORES>(lane) < HEADS_PER_WARP)
        warp_sums[warp][sum_index<SCORES>(lane)] = make_float2(highest, sum);
    __syncthreads();
    for (int i = tid; i < QUERIES_PER_KV * HEAD; i += 512) {
        const int head = i / HEAD, h = head % HEADS_PER_WARP, g = head / HEADS_PER_WARP;
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < TOKEN_WARPS; w++) top = fmaxf(top, warp_sums[w * HEAD_GROUPS + g][h].x);
        float total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < TOKEN_WARPS; w++) {
            const int source = w * HEAD_GROUPS + g;
            const float2 part_sum = warp_sums[source][h];
            const float scale = exp2f(part_sum.x - top);
            total += scale * part_sum.y;
            value += scale * outputs[(source * HEADS_PER_WARP + h) * HEAD + i % HEAD];
        }
        const int query_head = kv_head * QUERIES_PER_KV + head;
        part_values[((u64)part * QUERY_HEADS + query_head) * HEAD + i % HEAD] = value;
        if (i % HEAD == 0) part_sums[query_head * parts + part] = make_float2(top, total);
    }
}

// ---- Adds up the parts and applies the gate. Grid [QUERY_HEADS * 4], 256 threads: 64 dimensions, the parts in 4 shares.
constexpr int MAX_PARTS = 128;
KERNEL(256, 2)
attend_combine(const Run* run, int parts, const float* projected, const float2* part_sums, const float* part_values,
               float* out) {
    __shared__ float scales[MAX_PARTS], shares[4][64], warp_values[8];
    const int head = blockIdx.x / 4, tid = threadIdx.x, share = tid / 64;
    const int dim = blockIdx.x % 4 * 64 + tid % 64;
    launch_dependents();
    const u32 tokens = run->position + 1, length = part_length(tokens, parts);
    const int used = (tokens + length - 1) / length;
    wait_for_inputs();
    const float gate = sigmoid(load_cg(projected + head * 2 * HEAD + HEAD + dim));
    float2 own = make_float2(-INFINITY, 0.0f);
    if (tid < used) {
        const float2* from = part_sums + head * parts + tid;
        own = make_float2(load_cg((const float*)from), load_cg((const float*)from + 1));
    }
    const float warp_top = max_lanes<32>(own.x);
    if (tid % 32 == 0) warp_values[tid / 32] = warp_top;
    __syncthreads();
    float top = warp_values[0];
#pragma unroll
    for (int i = 1; i < MAX_PARTS / 32; i++) top = fmaxf(top, warp_values[i]);
    const float scale = exp2f(own.x - top);
    if (tid < MAX_PARTS) scales[tid] = scale;
    __syncthreads();
    const float warp_total = sum_lanes<32>(scale * own.y);
    if (tid % 32 == 0) warp_values[tid / 32] = warp_total;
    float value = 0.0f;
    for (int part = share; part < used; part += 4)
        value += scales[part] * load_cg(part_values + ((u64)part * QUERY_HEADS + head) * HEAD + dim);
    shares[share][tid % 64] = value;
    __syncthreads();
    if (tid < 64) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_PARTS / 32; i++) total += warp_values[i];
        out[head * HEAD + dim] = (shares[0][tid] + shares[1][tid] + shares[2][tid] + shares[3][tid]) / total * gate;
    }
}

// ---- Many tokens, before attention: norms and RoPE; keys and values go to the cache. Grid [tokens], a warp per head.
// Out: queries [2, tokens, QUERY_HEADS, 256] BF16: the rounded query, scaled, and what rounding left of it.
KERNEL(256, 4)
attention_prepare(const Run* run, int layer, const float* projected, const float* q_norm, const float* k_norm, int tokens,
                  uint4* queries) {
    __shared__ float2 turns[ROTARY / 2];
    const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 position = run->position + token;
    if (threadIdx.x < ROTARY / 2) turns[threadIdx.x] = rope_turn(threadIdx.x, position);
    __syncthreads();
    const float* row = projected + (u64)token * PROJ_ATTENTION;
    for (int job = warp; job < QUERY_HEADS + 2 * KV_HEADS; job += 8) {
        float x[8];
        if (job < QUERY_HEADS) {
            load8(x, row + job * 2 * HEAD + lane * 8);
            norm_head(x, q_norm, lane);
            rope_head(x, turns, lane);
            float rest[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] *= LOG2E / 16.0f;
                rest[i] = x[i] - bf16_low(to_bf16(x[i]));
            }
            const u64 at = ((u64)token * QUERY_HEADS + job) * (HEAD / 8) + lane;
            queries[at] = pack8(x);
            queries[(u64)tokens * QUERY_HEADS * (HEAD / 8) + at] = pack8(rest);
        } else {
            const int kv_head = (job - QUERY_HEADS) % KV_HEADS;
            const bool key = job < QUERY_HEADS + KV_HEADS;
            load8(x, row + (key ? PROJ_K : PROJ_V) + kv_head * HEAD + lane * 8);
            if (key) {
                norm_head(x, k_norm, lane);
                rope_head(x, turns, lane);
            }
            u16* to = keys_of(run, layer, kv_head) + (key ? 0 : value_offset(run));
            ((uint4*)(to + (u64)position * HEAD))[lane] = pack8(x);
        }
    }
}

DEVICE void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void load_matrices(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
DEVICE void load_matrices_transposed(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

// ---- Many tokens: flash attention. A warp has one query head and 16 positions; the warps of a CTA share a kv head. Queries and
// weights are split in two BF16 values each, so that products are as exact as the cache. Out: out [tokens, QUERY_WIDTH], gated.
// Rows in shared memory are 512 bytes; their 16-byte pieces are permuted by the row, so that ldmatrix meets no bank twice.
constexpr int FLASH_WARPS = QUERIES_PER_KV % 4 == 0 ? 4 : QUERIES_PER_KV % 2 == 0 ? 2 : 1;
constexpr int FLASH_GROUPS = QUERY_HEADS / FLASH_WARPS;
constexpr int PIECES = HEAD / 8;
struct FlashShared {
    uint4 queries[2][FLASH_WARPS][16][PIECES];
    uint4 keys[TILE][PIECES];
    uint4 values[TILE][PIECES];
};
KERNEL(FLASH_WARPS * 32, 2)
attend_many(const Run* run, int layer, const uint4* queries, const float* projected, int tokens, float* out) {
    extern __shared__ __align__(128) char dynamic_shared[];
    FlashShared& shared = *(FlashShared*)dynamic_shared;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, threads = FLASH_WARPS * 32;
    const int group = blockIdx.y, head = group * FLASH_WARPS + warp, kv_head = head / QUERIES_PER_KV;
    // The longest rows first.
    const int first = (gridDim.x - 1 - blockIdx.x) * 16;
    const u32 start = run->position + first;
    const u32 end = run->position + min(first + 16, tokens);
    const u16* keys = keys_of(run, layer, kv_head);
    const u16* values = keys + value_offset(run);

    for (int i = tid; i < 2 * FLASH_WARPS * 16 * PIECES; i += threads) {
        const int piece = i % PIECES, row = i / PIECES % 16, w = i / PIECES / 16 % FLASH_WARPS, half = i / PIECES / 16 / FLASH_WARPS;
        const int token = min(first + row, tokens - 1);
        const uint4* from = queries + (((u64)half * tokens + token) * QUERY_HEADS + group * FLASH_WARPS + w) * PIECES + piece;
        copy16(&shared.queries[half][w][row][piece ^ (row & 7)], from);
    }
    auto load = [&](uint4 (*to)[PIECES], const u16* from, u32 tile) {
        for (int i = tid; i < TILE * PIECES; i += threads) {
            const u32 row = i / PIECES, piece = i % PIECES;
            // Rows beyond the end repeat the last, so that no number in a tile is undefined.
            const u32 token = min(tile * TILE + row, end - 1);
            copy16(&to[row][piece ^ (row & 7)], from + (u64)token * HEAD + piece * 8);
        }
        copy_commit();
    };
    const u32 tiles = (end + TILE - 1) / TILE;
    load(shared.keys, keys, 0);
    load(shared.values, values, 0);

    float o[HEAD / 8][4] = {};
    float highest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const int g = lane >> 2, t = lane & 3;
    for (u32 tile = 0; tile < tiles; tile++) {
        copy_wait<1>();
        __syncthreads();
        float s[TILE / 8][4] = {};
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            u32 a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = lane & 15, piece = step * 2 + (lane >> 4);
                load_matrices(a[half], &shared.queries[half][warp][row][piece ^ (row & 7)]);
            }
#pragma unroll
            for (int pair = 0; pair < TILE / 16; pair++) {
                // Matrices: tokens 0-7 and 8-15 of the pair, each for inputs 0-7 and 8-15.
                u32 b[4];
                const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8, piece = step * 2 + (lane >> 3 & 1);
                load_matrices(b, &shared.keys[row][piece ^ (row & 7)]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    mma_bf16(s[pair * 2], a[half], b[0], b[1]);
                    mma_bf16(s[pair * 2 + 1], a[half], b[2], b[3]);
                }
            }
        }
        __syncthreads();
        if (tile + 1 < tiles) load(shared.keys, keys, tile + 1);
        else copy_commit();
        if ((tile + 1) * TILE > start) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile * TILE + n * 8 + 2 * t + (i & 1) > start + g + (i >> 1) * 8) s[n][i] = -INFINITY;
        }
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = highest[r];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            top = max_lanes<4>(top);
            correction[r] = exp2f(highest[r] - top);
            highest[r] = top;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    s[n][i] = exp2f(s[n][i] - top);
                    total += s[n][i];
                }
            sum[r] = sum[r] * correction[r] + total;
        }
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            o[n][0] *= correction[0], o[n][1] *= correction[0];
            o[n][2] *= correction[1], o[n][3] *= correction[1];
        }
        copy_wait<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < TILE / 16; step++) {
            u32 p[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = s[step * 2 + (i >> 1)][(i & 1) * 2], high = s[step * 2 + (i >> 1)][(i & 1) * 2 + 1];
                p[0][i] = pack_bf16(low, high);
                p[1][i] = pack_bf16(low - bf16_low(p[0][i]), high - bf16_high(p[0][i]));
            }
#pragma unroll
            for (int n = 0; n < HEAD / 16; n++) {
                // Matrices: tokens 0-7 and 8-15, each for dimensions 0-7 and 8-15.
                u32 b[4];
                const int row = step * 16 + (lane & 15), piece = n * 2 + (lane >> 4);
                load_matrices_transposed(b, &shared.values[row][piece ^ (row & 7)]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    mma_bf16(o[n * 2], p[half], b[0], b[1]);
                    mma_bf16(o[n * 2 + 1], p[half], b[2], b[3]);
                }
            }
        }
        __syncthreads();
        if (tile + 1 < tiles) load(shared.values, values, tile + 1);
        else copy_commit();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = first + g + 8 * r;
        const float scale = 1.0f / sum_lanes<4>(sum[r]);
        if (token >= tokens) continue;
        const float* gate = projected + (u64)token * PROJ_ATTENTION + head * 2 * HEAD + HEAD + 2 * t;
        float* to = out + (u64)token * QUERY_WIDTH + head * HEAD + 2 * t;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const float2 z = *(const float2*)(gate + n * 8);
            *(float2*)(to + n * 8) =
                make_float2(o[n][2 * r] * scale * sigmoid(z.x), o[n][2 * r + 1] * scale * sigmoid(z.y));
        }
    }
}

// ---- Noise for measuring: uniform of deviation 1, the same in every plane. Grid [tokens, planes], a thread per value.
KERNEL(HEAD, 4) fill_noise(const Run* run, u32 count, u64 seed) {
    const u64 place = (u64)(run->position + blockIdx.x) * HEAD + threadIdx.x;
    u64 z = seed + (place + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float uniform = (float)(z >> 40) / 16777216.0f;
    const u64 plane = (u64)blockIdx.y * run->capacity * HEAD;
    run->kv[plane + place] = to_bf16(1.7320508f * (2.0f * uniform - 1.0f));
}
