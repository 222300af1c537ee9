// Experts of several sessions' tokens, one token each, see rows.cu: rows that chose an expert are put together by four; the lists are made on
// the device.
// Bytes moved: the weights of every expert that some row chose, once.
// Reference: lily_reference::ops::{route, expert_linear, swiglu}.

constexpr int SHARES = TOP_K + 1;   // what a row adds up: experts, and the shared one
constexpr int DOWN_SLOTS = 4;       // blocks that a warp of the down projections has on the way
// CTAs of the down projections that have room beside each other.
#if __CUDA_ARCH__ >= 900
#define ROW_CTAS 2
#else
#define ROW_CTAS 1
#endif

// Up to four rows that meet an expert. A pair is row * SHARES + i for a row's i-th choice.
struct Meeting {
    u32 expert, count;
    u32 pairs[4];
    u32 unused[2];
};
constexpr int MEETINGS = ROWS * TOP_K;

// The choice of every row, and who meets whom: experts rising, the rows of each in order, by four. Every CTA of the up projections makes
// the list for itself, because a kernel for it would cost more; the first one leaves it for the down projections.
struct Choices {
    static constexpr int SPANS = (EXPERTS + 31) / 32;   // of experts, one for each warp
    static_assert(SPANS <= TEAM_WARPS);
    u32 masks[SPANS * 32];        // of rows that chose an expert
    u8 places[ROWS][SPANS * 32];  // of an expert among those that a row chose
    u32 chosen[ROWS][TOP_K];

    DEVICE void clear() {
        for (int i = threadIdx.x; i < SPANS * 32; i += ROW_THREADS) masks[i] = 0;
        __syncthreads();
    }
    // After that. `first` are the logits of row threadIdx.x / 32. To be called by all threads; the list is there when they have met again.
    // Returns how many meetings there are.
    DEVICE u32 make(const LaneLogits& first, const float* logits, int rows, Meeting* meetings) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int row = warp; row < rows; row += ROW_THREADS / 32) {
            pick_experts(row == warp ? first : LaneLogits(logits + row * ROUTER_ROWS, lane), lane, chosen[row]);
            if (lane < TOP_K) {
                const u32 id = chosen[row][lane];
                atomicOr(&masks[id], 1u << row);
                places[row][id] = lane;
            }
        }
        __syncthreads();
        // Meetings of each lane's experts of all spans, and of the spans in front of the warp's.
        u32 all = 0, before = 0;
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            const u32 own = (__popc(masks[span * 32 + lane]) + 3) / 4;
            all += own, before += span < warp ? own : 0;
        }
        if (warp < SPANS) {
            const u32 expert = warp * 32 + lane, mask = masks[expert], met = __popc(mask), own = (met + 3) / 4;
            u32 sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 other = __shfl_up_sync(FULL, sum, d);
                if (lane >= d) sum += other;
            }
            u32 at = __reduce_add_sync(FULL, before) + sum - own, rest = mask;
            for (u32 rank = 0; rank < met; rank++, rest &= rest - 1) {
                const u32 row = __ffs(rest) - 1;
                Meeting& meeting = meetings[at + rank / 4];
                meeting.pairs[rank % 4] = row * SHARES + places[row][expert];
                if (rank % 4 == 0) meeting.expert = expert, meeting.count = min(4u, met - rank);
            }
        }
        return __reduce_add_sync(FULL, all);
    }
    // Weights of each row's shares, to weights [rows, SHARES].
    DEVICE void weigh(const float* logits, int rows, float* weights) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int row = warp; row < rows; row += ROW_THREADS / 32) {
            const float* own = logits + row * ROUTER_ROWS;
            const float shared = lane == TOP_K ? sigmoid(load_cg(own + SHARED_GATE)) : 0.0f;
            const float weight = weigh_chosen(LaneLogits(own, lane), chosen[row], lane);
            if (lane < SHARES) weights[row * SHARES + lane] = lane == TOP_K ? shared : weight;
        }
    }
};

// The list that the up projections' first CTA leaves, early: by a release of the number, which is nothing before.
DEVICE void leave_meetings(const Meeting* from, u32 meetings, Meeting* list, u32* count) {
    for (int i = threadIdx.x; i < meetings * sizeof(Meeting) / 16; i += ROW_THREADS) ((uint4*)list)[i] = ((const uint4*)from)[i];
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(count), "r"(meetings) : "memory");
}
// All threads of a CTA take it and meet.
DEVICE u32 take_meetings(Meeting* to, const Meeting* list, const u32* count) {
    u32 meetings;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(meetings) : "l"(count) : "memory");
    while (meetings == 0);
    for (int i = threadIdx.x; i < meetings * sizeof(Meeting) / 16; i += TEAM_THREADS) ((uint4*)to)[i] = __ldcg((const uint4*)list + i);
    __syncthreads();
    return meetings;
}

// Gate and up of the chosen experts: x [rows, HIDDEN] to activation. Choices by logits [rows, ROUTER_ROWS]; the list, and weights
// [rows, SHARES], are left for the down projections.
KERNEL(ROW_THREADS, 1)
rows_up(const char* weights, const float* logits, RowImage x, int rows, float* activation, Meeting* list, u32* list_count,
        float* list_weights) {
    constexpr int STRIDE = row_stride(HIDDEN_BLOCKS);
    typedef RowTiles<HIDDEN_BLOCKS, 4, 1, STRIDE> T;
    __shared__ Meeting meetings[MEETINGS];
    typename T::Sums* const all_sums = (typename T::Sums*)sums_of_cta<STRIDE>();
    typename T::Sums& sums = all_sums[team()];
    T t(dynamic_shared);
    // In the place of sums, which come later.
    static_assert(sizeof(Choices) <= TEAMS * sizeof(typename T::Sums));
    Choices& choices = *(Choices*)all_sums;
    choices.clear();
    wait_for_inputs();
    launch_dependents();
    // Weights wait for the choice, which waits for the logits: they go first.
    const LaneLogits own(logits + min((int)threadIdx.x / 32, rows - 1) * ROUTER_ROWS, threadIdx.x % 32);
    fetch_image<STRIDE>(x, 0, rows);
    const u32 count = choices.make(own, logits, rows, meetings);
    __syncthreads();
    const uint2 tiles = share_of(count * EXPERT_TILES, blockIdx.x * TEAMS + team(), gridDim.x * TEAMS);
    auto address = [&](u32 index, u32 block) {
        const u32 tile = tiles.x + index;
        const u64 row = (u64)meetings[tile / EXPERT_TILES].expert * EXPERT_TILES + tile % EXPERT_TILES;
        return weights + (row * HIDDEN_BLOCKS + block) * BLOCK4;
    };
    t.fetch_first(tiles.y - tiles.x, address);
    t.fetch_next(tiles.y - tiles.x, address);
    // The image is older than the blocks.
    copy_wait<ROW_SLOTS>();
    __syncthreads();
    if (blockIdx.x == 0) {
        choices.weigh(logits, rows, list_weights);
        leave_meetings(meetings, count, list, list_count);
    }
    const u32 image = shared_address(image_of_cta());
    t.run(
        sums, tiles.y - tiles.x, address, [&](u32 index) { return (tiles.x + index) / EXPERT_TILES; },
        [&](u32 index, u32 row) {
            const Meeting& m = meetings[(tiles.x + index) / EXPERT_TILES];
            // In the place of rows that are not there the first one.
            return image + m.pairs[row < m.count ? row : 0] / SHARES * STRIDE;
        },
        [&](u32 index, int row, int output, float sum) {
            const u32 tile = tiles.x + index;
            const Meeting& m = meetings[tile / EXPERT_TILES];
            const bool there = row < m.count;
            const u32 pair = there ? m.pairs[row] : 0;
            sum *= row_scale(pair / SHARES);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (there && output < 8)
                activation[(u64)(pair / SHARES) * DOWN_BLOCKS * BLOCK_INPUTS + pair % SHARES * EXPERT_STRIDE +
                           tile % EXPERT_TILES * 8 + output] = silu(sum) * up;
        });
}

// Rounds a block of four rows, by a warp, to `to` [4, ROW_BLOCK] in shared memory, scales and sums times weights.
// `from(row)`: where values of the row's block begin; `weight` is that of row lane / 4.
template <class From> DEVICE void round_rows(From from, float weight, u8* to, int lane) {
    float v[4][8];
#pragma unroll
    for (int row = 0; row < 4; row++) load_lane(v[row], from(row) + lane_start(0, lane));
#pragma unroll
    for (int row = 0; row < 4; row++) {
        FixedLane own = fix_lane(v[row], lane);
        const float of_row = __shfl_sync(FULL, weight, 4 * row);
        own.scale *= of_row, own.sum *= of_row;
        store_lane(to + row * ROW_BLOCK, own, lane, lane >> 3);
    }
}

// Down projections of the chosen experts and of the shared one, weighted, block by block to parts [rows, DOWN_BLOCKS, HIDDEN].
// activation [rows, DOWN_BLOCKS * 256], rounded by every CTA that needs it.
KERNEL(TEAM_THREADS, ROW_CTAS)
rows_down(const char* experts, const char* shared_down, const Meeting* list, const u32* list_count, const float* weights,
          const float* activation, int rows, float* parts) {
    constexpr u32 TILES = HIDDEN / 16, ROUTED = TILES * EXPERT_BLOCKS, SHARED = TILES * SHARED_BLOCKS;
    // Whoever meets an expert, and rows by four that meet the shared one, are parties; each warp rounds a block of one of them.
    constexpr u32 MOST_BLOCKS = EXPERT_BLOCKS > SHARED_BLOCKS ? EXPERT_BLOCKS : SHARED_BLOCKS, TOGETHER = TEAM_WARPS / MOST_BLOCKS;
    static_assert(TOGETHER >= 1);
    __shared__ Meeting meetings[MEETINGS];
    __shared__ __align__(16) u8 aside[TEAM_WARPS][4 * ROW_BLOCK];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    BlockStream<BLOCK4, DOWN_SLOTS> stream(dynamic_shared, warp);
    launch_dependents();
    // CTAs of the kernel in front, which leave them, run as soon as this one may.
    const u32 count = take_meetings(meetings, list, list_count);
    const uint2 share = share_of(count * ROUTED + (rows + 3) / 4 * SHARED, blockIdx.x, gridDim.x);
    auto address = [&](u32 i) {
        const u32 at = share.x + i;
        if (at < count * ROUTED) return experts + ((u64)meetings[at / ROUTED].expert * ROUTED + at % ROUTED) * BLOCK4;
        return shared_down + (u64)((at - count * ROUTED) % SHARED) * BLOCK4;
    };
    stream.fill<0, DOWN_SLOTS>(share.y - share.x, address);
    wait_for_inputs();
    auto party_of = [&](u32 at) { return at < count * ROUTED ? at / ROUTED : count + (at - count * ROUTED) / SHARED; };
    auto start_of = [&](u32 party) { return party < count ? party * ROUTED : count * ROUTED + (party - count) * SHARED; };
    auto blocks_of = [&](u32 party) -> u32 { return party < count ? EXPERT_BLOCKS : SHARED_BLOCKS; };
    auto met_by = [&](u32 party) -> u32 { return party < count ? meetings[party].count : min(4, rows - 4 * (int)(party - count)); };
    auto pair_of = [&](u32 party, u32 row) -> u32 {
        return party < count ? meetings[party].pairs[row] : (4 * (party - count) + row) * SHARES + TOP_K;
    };
    // Blocks of a row, of all its shares.
    auto block_of = [](u32 pair, u32 block) { return pair / SHARES * DOWN_BLOCKS + pair % SHARES * EXPERT_BLOCKS + block; };
    u32 at = share.x + warp;
    for (u32 first = party_of(share.x); start_of(first) < share.y; first += TOGETHER) {
        const u32 own = first + warp / MOST_BLOCKS, own_block = warp % MOST_BLOCKS;
        if (start_of(own) < share.y && own_block < blocks_of(own)) {
            const u32 met = met_by(own);
            // Of rows that are not there the first one's.
            auto pair = [&](u32 row) { return pair_of(own, row < met ? row : 0); };
            const float weight = load_cg(weights + pair(lane / 4 % 4));
            round_rows(
                [&](int row) { return activation + block_of(pair(row), own_block) * BLOCK_INPUTS; }, weight, aside[warp], lane);
        }
        __syncthreads();
        const u32 end = min(share.y, start_of(first + TOGETHER));
        // Of the block whose inputs a warp has: where they lie, and where a lane's row has its outputs.
        u32 current = 0xffffffffu;
        BlockInputs<1, 0> inputs;
        float* to = nullptr;
        for (; at < end; at += TEAM_WARPS) {
            const u32 party = party_of(at), blocks = blocks_of(party), inside = at - start_of(party);
            const u32 tile = inside / blocks, block = inside % blocks, place = (party - first) * MOST_BLOCKS + block;
            if (place != current) {
                current = place;
                const u32 from = shared_address(aside[place]);
                inputs = {from + lane / 8 * ROW_BLOCK, from + lane % 4 * ROW_BLOCK, (int)lane};
                to = lane % 4 < met_by(party) ? parts + (u64)block_of(pair_of(party, lane % 4), block) * HIDDEN + lane / 4 : nullptr;
            }
            block_times_rows<4>(stream.wait(), inputs, lane, [&](int, float y0, float y1) {
                if (to) to[tile * 16] = y0, to[tile * 16 + 8] = y1;
            });
            stream.next(at - share.x, share.y - share.x, address);
        }
        __syncthreads();
    }
}
