// Grouped-query attention over a BF16 cache [kv head, capacity, 256], with norms and RoPE of queries and keys.
//
// One token: the cached tokens are cut into parts, a CTA takes one part of one kv head for all its query heads, and a second
// kernel adds the parts up. Many tokens: blocks of 16 positions of up to 4 query heads. Both on tensor cores.
// Reference: lily_reference::ops::{rms_norm, rope, attention, attention_gate}.

constexpr int QUERIES_PER_KV = QUERY_HEADS / KV_HEADS;
constexpr float LOG2E = 1.44269504088896341f;

// Keys of a layer's kv head; its values lie `value_offset` further on.
DEVICE u16* keys_of(const Run* run, int layer, int kv_head) {
    return run->kv + ((u64)layer * KV_HEADS + kv_head) * run->capacity * HEAD;
}
DEVICE u64 value_offset(const Run* run) { return (u64)ATTENTION_LAYERS * KV_HEADS * run->capacity * HEAD; }

// A head in a warp, 8 consecutive dimensions a lane: norm and RoPE. `turns` [32] of cosine and sine.
DEVICE void norm_lane(float* x, const float* own) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    const float scale = inverse_root(sum_lanes<32>(sum) / HEAD + RMS_EPS);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale * own[i];
}
DEVICE void norm_head(float* x, const float* weight, int lane) {
    float own[8];
#pragma unroll
    for (int i = 0; i < 8; i++) own[i] = __ldg(weight + lane * 8 + i);
    norm_lane(x, own);
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
// The same with `own`: the turns of the lane's dimensions.
DEVICE void rope_lane(float* x, const float2* own, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(FULL, x[i], 4);
        if (lane < 8) x[i] = lane < 4 ? x[i] * own[i].x - other * own[i].y : x[i] * own[i].x + other * own[i].y;
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

// ---- Tensor cores.
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
// An 8 x 8 matrix of BF16 pairs, lane 4i + j with columns 2j and 2j + 1 of row i, transposed.
DEVICE u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Rows in shared memory are 512 bytes; their 16-byte pieces are permuted by the row, so that ldmatrix meets no bank twice.
constexpr int PIECES = HEAD / 8;

// ---- One token of each row of a step. The tokens of a row's cache are cut into parts, and a part into tiles of 16 tokens. So many
// warps of a CTA as a part has tiles, up to all, take it, every WARPS-th tile each, for all query heads of the kv head at once: they are the
// columns of the B operand, keys and values the rows of A. A CTA has a part, or of several rows as many neighbouring parts of a kv head as
// it has warps for: a job. CTAs take the jobs of all rows in turn. Queries and weights are split in two BF16 values each, so that products are as exact as the cache.
constexpr int ATTEND_WARPS = 8;
constexpr int ATTEND_TILE = 16;
static_assert(QUERIES_PER_KV <= 8, "query heads are the columns of an operand");
// Where shared memory is little, keys and values of a tile come one after the other to the same place.
constexpr int ATTEND_PLACES = LITTLE_SHARED ? 1 : 2;
typedef uint4 AttendTile[ATTEND_TILE][PIECES];
// Partial outputs of a warp, in memory that held tiles: rows are apart by 4 words more, so that heads of a lane's row meet no bank twice.
constexpr int OUTPUT_STRIDE = HEAD + 4;

// Tokens of a part: whole tiles.
DEVICE u32 part_length(u32 tokens, u32 parts) {
    return ((tokens + parts - 1) / parts + ATTEND_TILE - 1) / ATTEND_TILE * ATTEND_TILE;
}
// Warps that take a part.
DEVICE u32 warps_of_part(u32 length) {
    const u32 tiles = length / ATTEND_TILE;
    return tiles > 4 ? 8 : tiles > 2 ? 4 : tiles;
}

// What a row's attention consists of.
struct RowJobs {
    u32 position, length;   // of its new token; tokens of a part
    u32 first;              // the row's first job, of those of all rows
    u32 warps, together;    // of a part, a power of two; parts of a job
    u32 last;               // the job of a kv head that has the new token
};

// Partial results of a part: [query head, parts] of maximum and sum, [parts, query head, 256] of values. `turns` [rows, 32].
KERNEL(ATTEND_WARPS * 32, 2)
attend(const Run* runs, int rows, int layer, int parts, const float* all_projected, const float* q_norm, const float* k_norm,
       const float2* all_turns, float2* all_sums, float* all_values) {
    __shared__ uint4 queries[2][8][PIECES];
    __shared__ float2 warp_sums[ATTEND_WARPS][8];
    __shared__ RowJobs rows_jobs[32];
    __shared__ uint2 places[ATTEND_WARPS];
    __shared__ uint4 new_key_value[2][PIECES];
    extern __shared__ __align__(128) char dynamic_shared[];
    const int tid = threadIdx.x, warp = tid >> 5;
    AttendTile* tiles = (AttendTile*)dynamic_shared;
    AttendTile &key_tile = tiles[warp], &value_tile = tiles[(ATTEND_PLACES - 1) * ATTEND_WARPS + warp];
    launch_dependents();
    if (QUERIES_PER_KV < 8)
        for (int i = tid; i < 2 * 8 * PIECES; i += ATTEND_WARPS * 32) (&queries[0][0][0])[i] = make_uint4(0, 0, 0, 0);
    // Lane i of the first warp describes row i; divisions row by row would take longer than the rest.
    if (warp == 0) {
        RowJobs own = {};
        u32 jobs = 0;
        if (tid < rows) {
            own.position = runs[tid].position, own.length = part_length(own.position + 1, parts), own.warps = warps_of_part(own.length);
            own.together = rows == 1 ? 1 : ATTEND_WARPS / own.warps;
            const u32 used = (own.position + own.length) / own.length;
            own.last = (used - 1) / own.together;
            jobs = (own.last + 1) * KV_HEADS;
        }
        u32 behind = jobs;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(FULL, behind, d);
            if (tid >= d) behind += other;
        }
        own.first = behind - jobs;
        rows_jobs[tid] = own;
    }
    __syncthreads();
    int job = blockIdx.x;
    for (;; job += gridDim.x) {
        const bool first_job = job == (int)blockIdx.x;
        // Made anew for every job, or what follows from it would be kept in registers over all of them.
        const int lane = opaque(tid & 31);
        const int g = lane >> 2, t = lane & 3;
        // The last row whose first job does not lie behind this one: lanes without a row say where all jobs end.
        const int row = __popc(__ballot_sync(FULL, (int)rows_jobs[lane].first <= job)) - 1;
        if (row >= rows) break;
        const u32 position = rows_jobs[row].position, length = rows_jobs[row].length;
        const u32 warps = rows_jobs[row].warps, together = rows_jobs[row].together, in_row = job - rows_jobs[row].first;
        // What the job before had in shared memory is used up.
        if (!first_job) __syncthreads();
        const Run* run = runs + row;
        const int kv_head = in_row % KV_HEADS;
        // This warp's part, and which of its warps it is.
        const u32 in_head = in_row / KV_HEADS, in_job = warp >> __ffs(warps) - 1;
        const u32 part = in_head * together + in_job, own = warp & warps - 1;
        const u32 start = part * length;
        const u32 count = start > position || in_job >= together ? 0 : min(position + 1 - start, length);
        u16* keys = keys_of(run, layer, kv_head) + (u64)start * HEAD;
        u16* values = keys + value_offset(run);
        // Rows beyond the limit repeat the one before it, so that no number in a tile is undefined.
        auto load = [&](AttendTile& to, const u16* from, u32 tile, u32 limit) {
            const u32 first = tile * ATTEND_TILE;
            if (first < limit) {
#pragma unroll 2
                for (int row = 0; row < ATTEND_TILE; row++)
                    copy16(&to[row][lane ^ (row & 7)], from + (u64)min(first + row, limit - 1) * HEAD + lane * 8);
            }
            copy_commit();
        };
        // The part of the new token. Those before it were written a whole pass ago.
        const bool owner = count && position - start < length;
        load(key_tile, keys, own, owner ? count - 1 : count);
        if (ATTEND_PLACES == 2) load(value_tile, values, own, owner ? count - 1 : count);
        float weights[8];
        load8(weights, q_norm + lane * 8);
        if (first_job) wait_for_inputs();
        const float* projected = all_projected + (u64)row * PROJ_ATTENTION;
        // The CTA that has the new token's part writes its key and value.
        const bool writes = in_head == rows_jobs[row].last;
        // A warp's query, and the first two also the key and the value.
        const bool asks = warp < QUERIES_PER_KV, writes_one = writes && warp < 2;
        float2 turns[8] = {};
        float x[8] = {}, new_one[8] = {};
        if (asks) load8(x, projected + (kv_head * QUERIES_PER_KV + warp) * 2 * HEAD + lane * 8);
        if (writes_one) load8(new_one, projected + (warp ? PROJ_V : PROJ_K) + kv_head * HEAD + lane * 8);
        if (lane < 8) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 two = load_cg((const float4*)(all_turns + row * (ROTARY / 2) + lane % 4 * 8) + i);
                turns[2 * i] = make_float2(two.x, two.y), turns[2 * i + 1] = make_float2(two.z, two.w);
            }
        }
        if (asks) {
            norm_lane(x, weights);
            rope_lane(x, turns, lane);
            float rest[8];
            // Scores in powers of two, over sqrt(256).
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] *= LOG2E / 16.0f;
                rest[i] = x[i] - bf16_low(to_bf16(x[i]));
            }
            queries[0][warp][lane ^ warp] = pack8(x);
            queries[1][warp][lane ^ warp] = pack8(rest);
        }
        if (writes_one) {
            if (warp == 0) {
                norm_head(new_one, k_norm, lane);
                rope_lane(new_one, turns, lane);
            }
            u16* to = keys_of(run, layer, kv_head) + (warp ? value_offset(run) : 0);
            const uint4 packed = pack8(new_one);
            ((uint4*)(to + (u64)position * HEAD))[lane] = packed;
            new_key_value[warp][lane] = packed;
        }
        // Where its results go, in shared memory while registers hold outputs.
        if (lane == 0)
            places[warp] = make_uint2(((row * parts) + part) * QUERY_HEADS + kv_head * QUERIES_PER_KV,
                                      (row * QUERY_HEADS + kv_head * QUERIES_PER_KV) * parts + part);
        // Copies into the tile of the new token must not come after it.
        if (owner) copy_wait<0>();
        __syncthreads();
        // If its tile is already here it belongs there too, and repeats to the end of the tile.
        if (owner && (count - 1) / ATTEND_TILE == own) {
            const uint4 key = new_key_value[0][lane], value = new_key_value[1][lane];
            for (u32 row = (count - 1) % ATTEND_TILE; row < ATTEND_TILE; row++) {
                key_tile[row][lane ^ (row & 7)] = key;
                if (ATTEND_PLACES == 2) value_tile[row][lane ^ (row & 7)] = value;
            }
            __syncwarp();
        }
        // Dimensions g and g + 8 of each sixteen, for heads 2t and 2t + 1.
        float o[HEAD / 16][4] = {};
        float highest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        for (u32 tile = own; tile * ATTEND_TILE < count; tile += warps) {
            copy_wait<ATTEND_PLACES - 1>();
            __syncwarp();
            // Tokens g and g + 8, for heads 2t and 2t + 1.
            // Two sums side by side, because one would wait for itself at every step.
            float parts_of_s[2][4] = {};
#pragma unroll 4
            for (int step = 0; step < HEAD / 16; step++) {
                u32 a[4], b[4];
                // Matrices: tokens 0-7 and 8-15 for inputs 0-7, then for 8-15.
                const int row = lane & 15, piece = step * 2 + (lane >> 4);
                load_matrices(a, &key_tile[row][piece ^ (row & 7)]);
                // Matrices: inputs 0-7 and 8-15 of the rounded queries, then of what rounding left.
                load_matrices(b, &queries[lane >> 4][lane & 7][(step * 2 + (lane >> 3 & 1)) ^ (lane & 7)]);
                mma_bf16(parts_of_s[0], a, b[0], b[1]);
                mma_bf16(parts_of_s[1], a, b[2], b[3]);
            }
            float s[4];
#pragma unroll
            for (int i = 0; i < 4; i++) s[i] = parts_of_s[0][i] + parts_of_s[1][i];
            __syncwarp();
            if (ATTEND_PLACES == 2) load(key_tile, keys, tile + warps, count);
            else load(value_tile, values, tile, count);
            if (tile * ATTEND_TILE + g >= count) s[0] = s[1] = -INFINITY;
            if (tile * ATTEND_TILE + g + 8 >= count) s[2] = s[3] = -INFINITY;
            float correction[2];
            u32 p[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Over the tokens: lanes of one t.
                float top = fmaxf(highest[i], fmaxf(s[i], s[i + 2]));
#pragma unroll
                for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, d));
                correction[i] = exp2f(highest[i] - top);
                highest[i] = top;
                s[i] = exp2f(s[i] - top), s[i + 2] = exp2f(s[i + 2] - top);
                sum[i] = sum[i] * correction[i] + s[i] + s[i + 2];
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 rounded = round_pair(s[2 * i], s[2 * i + 1]);
                p[0][i] = transpose(rounded);
                p[1][i] = transpose(round_pair(s[2 * i] - bf16_low(rounded), s[2 * i + 1] - bf16_high(rounded)));
            }
#pragma unroll
            for (int n = 0; n < HEAD / 16; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] *= correction[i & 1];
            copy_wait<ATTEND_PLACES - 1>();
            __syncwarp();
#pragma unroll
            for (int n = 0; n < HEAD / 16; n++) {
                // Matrices: dimensions 0-7 and 8-15 of tokens 0-7, then of 8-15.
                u32 a[4];
                const int row = (lane & 7) + (lane >> 4) * 8, piece = n * 2 + (lane >> 3 & 1);
                load_matrices_transposed(a, &value_tile[row][piece ^ (row & 7)]);
                mma_bf16(o[n], a, p[0][0], p[0][1]);
                mma_bf16(o[n], a, p[1][0], p[1][1]);
            }
            __syncwarp();
            if (ATTEND_PLACES == 2) load(value_tile, values, tile + warps, count);
            else load(key_tile, keys, tile + warps, count);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int d = 4; d < 32; d *= 2) sum[i] += __shfl_xor_sync(FULL, sum[i], d);
        // Results of one warp as they are, those of several together.
        float* part_values = all_values + (u64)places[warp].x * HEAD;
        float2* part_sums = all_sums + places[warp].y;
        if (warps == 1) {
            if (count) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (2 * t + i >= QUERIES_PER_KV) continue;
                    float* to = part_values + (2 * t + i) * HEAD + g;
#pragma unroll
                    for (int n = 0; n < HEAD / 16; n++) to[n * 16] = o[n][i], to[n * 16 + 8] = o[n][i + 2];
                    if (g == 0) part_sums[(2 * t + i) * parts] = make_float2(highest[i], sum[i]);
                }
            }
            continue;
        }
        float(*outputs)[8][OUTPUT_STRIDE] = (float(*)[8][OUTPUT_STRIDE])dynamic_shared;
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < HEAD / 16; n++) {
                outputs[warp][2 * t + i][n * 16 + g] = o[n][i];
                outputs[warp][2 * t + i][n * 16 + g + 8] = o[n][i + 2];
            }
            if (g == 0) warp_sums[warp][2 * t + i] = make_float2(highest[i], sum[i]);
        }
        __syncthreads();
        const u32 first = warp - own, used = min(warps, (count + ATTEND_TILE - 1) / ATTEND_TILE);
        for (u32 i = own * 32 + lane; used && i < QUERIES_PER_KV * HEAD / 4; i += warps * 32) {
            const u32 head = i / (HEAD / 4), dim = i % (HEAD / 4) * 4;
            float top = warp_sums[first][head].x;
            for (u32 w = 1; w < used; w++) top = fmaxf(top, warp_sums[first + w][head].x);
            float total = 0.0f;
            float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (u32 w = 0; w < used; w++) {
                const float scale = exp2f(warp_sums[first + w][head].x - top);
                const float4 of_warp = *(const float4*)&outputs[first + w][head][dim];
                total += scale * warp_sums[first + w][head].y;
                value.x += scale * of_warp.x, value.y += scale * of_warp.y;
                value.z += scale * of_warp.z, value.w += scale * of_warp.w;
            }
            *(float4*)(part_values + head * HEAD + dim) = value;
            if (dim == 0) part_sums[head * parts] = make_float2(top, total);
        }
    }
    if (job == (int)blockIdx.x) wait_for_inputs();
}

// ---- Adds up the parts, in four shares, and applies the gate: every fourth part is a share. 256 threads have DIMS dimensions of a head: 64
// and a share each, or 256 and all shares. Grid [QUERY_HEADS * 256 / DIMS, rows].
constexpr int MAX_PARTS = 128;
// `finish(i, value)`: of the CTA's dimensions, by the first DIMS threads.
template <int DIMS, class Finish>
DEVICE void combine_parts(const Run* run, int parts, const float* projected, const float2* part_sums, const float* part_values,
                          Finish finish) {
    constexpr int OWN = DIMS / 64;   // shares of a thread
    __shared__ float scales[MAX_PARTS], shares[4][64], warp_values[8];
    const int tid = threadIdx.x, first = tid / DIMS;
    const int head = blockIdx.x / (HEAD / DIMS), dim = blockIdx.x % (HEAD / DIMS) * DIMS + tid % DIMS;
    run += blockIdx.y;
    projected += blockIdx.y * PROJ_ATTENTION;
    part_sums += blockIdx.y * QUERY_HEADS * parts;
    part_values += (u64)blockIdx.y * parts * QUERY_HEADS * HEAD;
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
    float value[OWN] = {};
    const float* from = part_values + head * HEAD + dim;
    if constexpr (OWN == 1) {
        for (int part = first; part < used; part += 4) value[0] += scales[part] * load_cg(from + (u64)part * QUERY_HEADS * HEAD);
    } else {
        // Loads without conditions, so that several are on the way at once.
#pragma unroll 4
        for (int part = 0; part < used; part += 4)
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int at = min(part + i, used - 1);
                value[i] += (part + i < used ? scales[at] : 0.0f) * load_cg(from + (u64)at * QUERY_HEADS * HEAD);
            }
    }
    if (OWN == 1) shares[first][tid % 64] = value[0];
    __syncthreads();
    if (tid < DIMS) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_PARTS / 32; i++) total += warp_values[i];
        float sum;
        if constexpr (OWN == 1) sum = shares[0][tid] + shares[1][tid] + shares[2][tid] + shares[3][tid];
        else sum = value[0] + value[1] + value[2] + value[3];
        finish(tid, sum / total * gate);
    }
}
// Of the step's one row to out [QUERY_WIDTH].
KERNEL(256, 2)
attend_combine(const Run* run, int parts, const float* projected, const float2* part_sums, const float* part_values,
               float* out) {
    combine_parts<64>(run, parts, projected, part_sums, part_values, [=](int i, float value) { out[blockIdx.x * 64 + i] = value; });
}

// ---- Many tokens, before attention: norms and RoPE; keys and values go to the cache. Grid [tokens], a warp per head.
// Out: queries [2, tokens, QUERY_HEADS, 256] BF16: the rounded query, scaled, and what rounding left of it.
KERNEL(256, 4)
attention_prepare(const Run* run, int layer, const float* projected, const float* q_norm, const float* k_norm, int tokens,
                  uint4* queries) {
    __shared__ float2 turns[ROTARY / 2];
    const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    launch_dependents();
    wait_for_inputs();
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

// ---- Many tokens: flash attention. A warp has one query head and 16 positions; the warps of a CTA share a kv head. Queries and
// weights are split in two BF16 values each, so that products are as exact as the cache. Out: out [tokens, QUERY_WIDTH], gated.
constexpr int TILE = 32;
constexpr int FLASH_WARPS = QUERIES_PER_KV % 4 == 0 ? 4 : QUERIES_PER_KV % 2 == 0 ? 2 : 1;
constexpr int FLASH_GROUPS = QUERY_HEADS / FLASH_WARPS;
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
    launch_dependents();
    wait_for_inputs();
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
