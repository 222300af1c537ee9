// Mixture of experts of many tokens: the choice, the lists of who meets whom, and the weighted sum at the end.
// A pair is a token and its i-th choice, numbered token * TOP_K + i. All of it is in the order of the tokens: the same every run.
// Reference: lily_reference::ops::route.

// ---- The choice. A warp per token. In: logits [tokens, ROUTER_ROWS]. Out: ids and weights [tokens, TOP_K].
KERNEL(256, 4) route_many(const float* logits, int tokens, u32* ids, float* weights) {
    __shared__ u32 chosen[8][TOP_K];
    const int token = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (token >= tokens) return;
    u32* const own = chosen[threadIdx.x >> 5];
    const LaneLogits of_token(logits + (u64)token * ROUTER_ROWS, lane);
    pick_experts(of_token, lane, own);
    const float weight = weigh_chosen(of_token, own, lane);
    if (lane < TOP_K) {
        ids[token * TOP_K + lane] = own[lane];
        weights[token * TOP_K + lane] = weight;
    }
}

// ---- The pairs of each expert, in order. A CTA per expert, 256 threads of 4 pairs. Out: list [EXPERTS, tokens], counts [EXPERTS].
KERNEL(256, 4) list_pairs(const u32* ids, int tokens, u32* list, u32* counts) {
    __shared__ u32 warp_counts[8];
    const u32 expert = blockIdx.x;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, pairs = tokens * TOP_K;
    u32 before = 0;
    for (int first = 0; first < pairs; first += 1024) {
        const int pair = first + tid * 4;
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (pair + i < pairs && ids[pair + i] == expert) found |= 1u << i;
        u32 sum = __popc(found);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(FULL, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) warp_counts[warp] = sum;
        __syncthreads();
        u32 place = before + sum - __popc(found), total = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i < warp) place += warp_counts[i];
            total += warp_counts[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (found >> i & 1) list[(u64)expert * tokens + place++] = pair + i;
        before += total;
        __syncthreads();
    }
    if (tid == 0) counts[expert] = before;
}

// ---- Cuts the lists into tiles of `tile` pairs. One CTA, a thread per expert. Out: tiles (expert, first place), their count.
KERNEL(1024, 1) list_tiles(const u32* counts, int tile, uint2* tiles, u32* tile_count) {
    __shared__ u32 sums[1024];
    const int tid = threadIdx.x;
    const u32 own = tid < EXPERTS ? (counts[tid] + tile - 1) / tile : 0;
    sums[tid] = own;
    __syncthreads();
    for (int d = 1; d < 1024; d *= 2) {
        const u32 other = tid >= d ? sums[tid - d] : 0;
        __syncthreads();
        sums[tid] += other;
        __syncthreads();
    }
    const u32 start = sums[tid] - own;
    for (u32 i = 0; i < own; i++) tiles[start + i] = make_uint2(tid, i * tile);
    if (tid == 1023) *tile_count = sums[tid];
}

// ---- Adds to h what the experts and the shared one made. Grid [tokens], 256 threads.
KERNEL(256, 4)
combine_experts(const float* routed, const float* weights, const float* shared_out, const float* logits, float* h) {
    __shared__ float scales[TOP_K + 1];
    const u64 token = blockIdx.x;
    if (threadIdx.x < TOP_K) scales[threadIdx.x] = weights[token * TOP_K + threadIdx.x];
    if (threadIdx.x == TOP_K) scales[TOP_K] = sigmoid(logits[token * ROUTER_ROWS + SHARED_GATE]);
    __syncthreads();
    for (int k = threadIdx.x * 4; k < HIDDEN; k += 1024) {
        float4 sum = make_float4(0, 0, 0, 0);
        auto add = [&](const float* from, float scale) {
            const float4 v = *(const float4*)from;
            sum.x += scale * v.x, sum.y += scale * v.y, sum.z += scale * v.z, sum.w += scale * v.w;
        };
#pragma unroll
        for (int i = 0; i < TOP_K; i++) add(routed + (token * TOP_K + i) * HIDDEN + k, scales[i]);
        add(shared_out + token * HIDDEN + k, scales[TOP_K]);
        float4* to = (float4*)(h + token * HIDDEN + k);
        const float4 old = *to;
        *to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
    }
}
