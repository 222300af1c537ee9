// Linears of several sessions' tokens, one token each: the rows of a step share the weights, and each has the bits that it has alone.
//
// A row's arithmetic is that of gemv.cu, group by group and block by block. What differs is the place of numbers: inputs are rounded to
// fixed point where they are made; in mma columns 2r and 2r + 1 stand high and low bytes of row r of four rows, a quad, and a
// group's sums are taken on their own. A CTA has the inputs of all rows in shared memory, where its teams of 8 warps take them from; a team
// takes tiles as a CTA does in gemv.cu.
// Experts: rows that chose one are put together by four; the lists are made on the device.
// Bytes moved: the weights once, of experts those of every one that some row chose.

constexpr int ROWS = 16;      // most rows
static_assert(ROWS < 32, "attend has a lane for each, and one behind them");
constexpr int TEAM_WARPS = 8, TEAM_THREADS = TEAM_WARPS * 32;
constexpr int TEAMS = LITTLE_SHARED ? 1 : 2;
constexpr int ROW_THREADS = TEAMS * TEAM_THREADS;
constexpr int ROW_SLOTS = SHARED_KIB >= 227 ? 3 : LITTLE_SHARED ? 1 : 2;   // blocks of 4 bits that a warp has on the way
constexpr int DOWN_SLOTS = 4;                                              // the same of the down projections
constexpr int ROW_SLOT_BYTES = TEAMS * TEAM_WARPS * ROW_SLOTS * BLOCK4;
// CTAs of the down projections that have room beside each other.
#if __CUDA_ARCH__ >= 900
#define ROW_CTAS 2
#else
#define ROW_CTAS 1
#endif
constexpr int SHARES = TOP_K + 1;   // what a row adds up: experts, and the shared one

DEVICE int team() { return threadIdx.x / TEAM_THREADS; }
DEVICE void team_meets() { meet(1 + team(), TEAM_THREADS); }

// Up to four rows that meet an expert. A pair is row * SHARES + i for a row's i-th choice.
struct Meeting {
    u32 expert, count;
    u32 pairs[4];
    u32 unused[2];
};
constexpr int MEETINGS = ROWS * TOP_K;

// ---- Rows of inputs as they lie in shared memory, and in device memory to be copied from there.
//
// A block of a row: high bytes of its 4 groups; low bytes, of groups 1, 0, 3, 2, so that a group's high and low bytes lie in different
// banks; scale and sum of each group. A row: its blocks, and of each block the sum of squares that a norm needs, in an odd number of 16 bytes,
// which keep rows apart in the banks. An image: ROWS such rows, in parts that some CTA each needs alone: of two parts the first has the
// even blocks.
constexpr int ROW_BLOCK = 2 * BLOCK_INPUTS + 4 * 8;
DEVICE constexpr int row_stride(int blocks) { return blocks * ROW_BLOCK + ((blocks + 3) / 4 | 1) * 16; }
struct RowImage {
    u8* at;
    int blocks, parts;

    DEVICE u8* block(int row, int block) const {
        const int stride = row_stride((blocks + parts - 1) / parts);
        return at + (block % parts * ROWS + row) * stride + block / parts * ROW_BLOCK;
    }
    // Of a row that is in one part.
    DEVICE float* squares(int row) const { return (float*)block(row, blocks); }
};

// A lane's part of a block, to where the block lies.
DEVICE void store_lane(u8* block, const FixedLane& own, int lane, int group) {
    u8* const to = lane >> 2 & 1 ? block + BLOCK_INPUTS + (group ^ 1) * GROUP : block + group * GROUP;
    *(uint4*)(to + (lane & 3) * 16) = make_uint4(own.words[0], own.words[1], own.words[2], own.words[3]);
    if ((lane & 7) == 0) ((float2*)(block + 2 * BLOCK_INPUTS))[group] = make_float2(own.scale, own.sum);
}

// Groups of a row from group `first` on that lie in shared memory, times `scale`, and nothing in those behind them up to `stored`; one
// warp.
DEVICE void fix_groups(const RowImage& out, int row, int first, const float* values, float scale, int groups, int stored, int lane) {
    const bool there = lane < 8 * groups;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = there ? values[lane_start(0, lane) + i % 4 + i / 4 * 16] * scale : 0.0f;
    const FixedLane own = fix_lane(v, lane);
    const int group = first + (lane >> 3);
    if (lane < 8 * stored) store_lane(out.block(row, group / 4), own, lane, group % 4);
}

// Sums of `count` parts [HIDDEN] that lie one after the other, at k .. k + 3: even ones, odd ones, and both, as in gemv.cu.
template <int COUNT> DEVICE float4 add_parts(const float* parts, int k) {
    float4 sums[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float4 p = load_cg((const float4*)(parts + i * HIDDEN + k));
        float4& sum = sums[i & 1];
        sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w;
    }
    return make_float4(sums[0].x + sums[1].x, sums[0].y + sums[1].y, sums[0].z + sums[1].z, sums[0].w + sums[1].w);
}

// Adds to h what lies in `parts`: NOTHING; MIXED [rows, 2, HIDDEN] by an output projection; EXPERTS [rows, DOWN_BLOCKS, HIDDEN].
// Then its norm without the scale, to `out`. A CTA has a block: two warps add, one goes on. `meeting_count` becomes 0 for what comes behind.
enum Parts { NOTHING, MIXED, EXPERTS_PARTS };
KERNEL(64, 8)
rows_norm(float* h, const float* parts, int kind, const float* norm, RowImage out, u32* meeting_count) {
    __shared__ float stream[BLOCK_INPUTS];
    const int lane = threadIdx.x & 31, row = blockIdx.x / HIDDEN_BLOCKS, block = blockIdx.x % HIDDEN_BLOCKS;
    launch_dependents();
    float v[8], w[8];
    if (threadIdx.x < 32) load_lane(w, norm + lane_start(block, lane));
    wait_for_inputs();
    if (blockIdx.x == 0 && threadIdx.x == 0) *meeting_count = 0;
    if (threadIdx.x < BLOCK_INPUTS / 4) {
        const int k = block * BLOCK_INPUTS + threadIdx.x * 4;
        float4* to = (float4*)(h + row * HIDDEN + k);
        float4 own = load_cg(to);
        if (kind != NOTHING) {
            float4 sum;
            if (kind == MIXED) {
                sum = add_parts<2>(parts + row * 2 * HIDDEN, k);
            } else {
                const float* of_row = parts + (u64)row * DOWN_BLOCKS * HIDDEN;
                const float4 routed = add_parts<ROUTED_BLOCKS>(of_row, k);
                const float4 shared = add_parts<SHARED_BLOCKS>(of_row + ROUTED_BLOCKS * HIDDEN, k);
                sum = make_float4(routed.x + shared.x, routed.y + shared.y, routed.z + shared.z, routed.w + shared.w);
            }
            own.x += sum.x, own.y += sum.y, own.z += sum.z, own.w += sum.w;
            *to = own;
        }
        *(float4*)(stream + threadIdx.x * 4) = own;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 q = *(const float4*)(stream + lane_start(0, lane) + 16 * i);
        v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
    const float sum = normed(v, w);
    store_lane(out.block(row, block), fix_lane(v, lane), lane, lane >> 3);
    if (lane == 0) out.squares(row)[block] = sum;
}

// Rows of `x` [rows, 256 blocks] as they are.
KERNEL(32, 16) rows_fix(const float* x, RowImage out) {
    const int lane = threadIdx.x, row = blockIdx.x / out.blocks, block = blockIdx.x % out.blocks;
    launch_dependents();
    wait_for_inputs();
    float v[8];
    load_lane(v, x + (u64)row * out.blocks * BLOCK_INPUTS + lane_start(block, lane));
    store_lane(out.block(row, block), fix_lane(v, lane), lane, lane >> 3);
}

// Sums over 16 lanes of `own[p]`, x and y, of which each lane gets one: x (lanes below 8) or y of p = lane / 2 % 4. In the order of
// sum_lanes, with a quarter of its exchanges: a lane gives away what it does not go on with.
DEVICE float scatter_sums(const float2 (&own)[4], int lane16) {
    const bool second = lane16 & 8, high = lane16 & 4, odd = lane16 & 2;
    float four[4], two[2];
#pragma unroll
    for (int p = 0; p < 4; p++) four[p] = (second ? own[p].y : own[p].x) + __shfl_xor_sync(FULL, second ? own[p].x : own[p].y, 8);
#pragma unroll
    for (int p = 0; p < 2; p++) two[p] = (high ? four[p + 2] : four[p]) + __shfl_xor_sync(FULL, high ? four[p] : four[p + 2], 4);
    const float one = (odd ? two[1] : two[0]) + __shfl_xor_sync(FULL, odd ? two[0] : two[1], 2);
    return one + __shfl_xor_sync(FULL, one, 1);
}

// One token of each row through a delta layer, with the gated norm, to out [rows, VALUE_WIDTH]. A CTA has some key heads, KEY_HEADS /
// gridDim.x from blockIdx.x on, with their value heads, of row blockIdx.y; 16 lanes have a row of a state. States are on their way before the
// inputs are waited for, and come one after the other. Of four tokens one writes a head's state, see delta.cu.
// In: as delta_step. Bytes moved: the state read, 64 KB a head, and where it is written as many.
constexpr int STATE = DELTA_HEAD * DELTA_HEAD;
constexpr int STATE_SLOTS = ROW_SLOTS;   // states that a CTA has on the way
constexpr int MOST_HEADS = 4;            // of a CTA
typedef PieceRing<STATE_SLOTS, STATE * 4> StateRing;
KERNEL(512, 1)
rows_delta_step(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
                const float* norm, RowImage out) {
    constexpr int CHANNELS = (2 + VALUES_PER_KEY) * DELTA_HEAD, MOST_CHANNELS = MOST_HEADS / VALUES_PER_KEY * CHANNELS;
    constexpr int ROUNDS = (MOST_CHANNELS + 511) / 512, PIECES = sizeof(Update) / 16;
    static_assert(VALUES_PER_KEY <= MOST_HEADS && MOST_HEADS * DELTA_HEAD <= 512 && KEPT * PIECES <= 512);
    // Of each key head q, k, and v of its value heads.
    __shared__ __align__(16) float convolved[MOST_CHANNELS];
    __shared__ float sums[MOST_HEADS][8], decays[MOST_HEADS], betas[MOST_HEADS], gates[MOST_HEADS * DELTA_HEAD];
    __shared__ __align__(16) float weights[DELTA_HEAD];
    __shared__ float outputs[MOST_HEADS * DELTA_HEAD], squares[MOST_HEADS * 4];
    __shared__ __align__(16) Update kept[MOST_HEADS][KEPT];
    __shared__ Update* keep[MOST_HEADS];   // where this token's go, or nowhere because the state is written
    StateRing& ring = *(StateRing*)dynamic_shared;
    const int keys = KEY_HEADS / gridDim.x, first_key = blockIdx.x * keys, heads = keys * VALUES_PER_KEY;
    const int first = first_key * VALUES_PER_KEY;
    const int tid = threadIdx.x, row = tid >> 4, lane16 = tid & 15, lane = tid & 31;
    launch_dependents();
    run += blockIdx.y, projected += blockIdx.y * PROJ_DELTA;
    // What the token before left is there: a whole pass of kernels lies between. Memory answers in order: more than the first state would
    // keep the inputs from coming.
    float* const states = run->delta + ((u64)layer * VALUE_HEADS + first) * STATE;
    float* const conv = run->conv;
    Update* const all_updates = run->updates + ((u64)layer * VALUE_HEADS + first) * KEPT;
    const u32 position = run->position, applied = (u32)run->applied;
    auto fetch = [&](int n) {
        if (n < heads) ring.fetch(n % STATE_SLOTS, (const char*)(states + n * STATE), STATE * 4);
        else ring.fetched();
    };
    ring.begin();
    fetch(0);
    // A thread's channel of q, k and v, in which CTAs share none.
    auto channel_of = [&](int i) {
        const int key = first_key + i / CHANNELS, inside = i % CHANNELS;
        return inside < DELTA_HEAD       ? key * DELTA_HEAD + inside
               : inside < 2 * DELTA_HEAD ? KEY_WIDTH + (key - 1) * DELTA_HEAD + inside
                                         : 2 * KEY_WIDTH + (key * VALUES_PER_KEY - 2) * DELTA_HEAD + inside;
    };
    float u[ROUNDS][3];
    float4 tap[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if (r * 512 + tid < keys * CHANNELS) {
            const int channel = channel_of(r * 512 + tid);
#pragma unroll
            for (int i = 0; i < 3; i++) u[r][i] = load_cg(history_slot(conv, layer, position + 1 + i) + channel);
            tap[r] = __ldg(taps + channel);
        }
    for (int n = 0; n < heads; n++) {
        Update* const updates = all_updates + n * KEPT;
        const u32 behind = updates_kept(position, applied, first + n);
        // The oldest first.
        const u32 i = tid / PIECES, piece = tid % PIECES;
        if (i < behind) copy16((uint4*)(kept[n] + i) + piece, (const uint4*)(updates + (position - behind + i) % KEPT) + piece);
        if (tid == 0) keep[n] = writes_state(position, first + n) ? nullptr : updates + position % KEPT;
    }
    if (tid < DELTA_HEAD / 4) copy16(weights + 4 * tid, norm + 4 * tid);
    copy_commit();
    const int one = first + min(tid, heads - 1);
    const float rate = __ldg(rates + one), bias = __ldg(dt_bias + one);
    wait_for_inputs();
    float inputs[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if (r * 512 + tid < keys * CHANNELS) inputs[r] = load_cg(projected + channel_of(r * 512 + tid));
    const float z = load_cg(projected + PROJ_Z + first * DELTA_HEAD + min(tid, heads * DELTA_HEAD - 1));
    const float a = load_cg(projected + PROJ_A + one), b = load_cg(projected + PROJ_B + one);
#pragma unroll
    for (int n = 1; n < STATE_SLOTS; n++) fetch(n);
    if (tid < heads * DELTA_HEAD) gates[tid] = silu(z);
    if (tid < heads) decays[tid] = decay_of(a, rate, bias), betas[tid] = sigmoid(b);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int i = r * 512 + tid;
        if (i < keys * CHANNELS) {
            const float y = convolve(u[r][0], u[r][1], u[r][2], inputs[r], tap[r]);
            // Slot position % 4 holds what no token needs any more.
            history_slot(conv, layer, position)[channel_of(i)] = inputs[r];
            convolved[i] = y;
            if (i % CHANNELS < 2 * DELTA_HEAD) {
                const float sum = sum_lanes<32>(y * y);
                if (lane == 0) sums[i / CHANNELS][i % CHANNELS / 32] = sum;
            }
        }
    }
    copy_wait<StateRing::ENGINE ? 0 : STATE_SLOTS - 1>();
    __syncthreads();
    int slot = 0, turn = 0;
#pragma unroll 1
    for (int n = 0; n < heads; n++) {
        ring.ready<STATE_SLOTS - 1>();
        if (!StateRing::ENGINE) __syncthreads();
        ring.wait(slot, turn);
        const u32 here = shared_address(ring.slots[slot]) + tid * 16 + (tid >> 4) * 256;
        float4 s[4][2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint4 v = load_shared16(here + i / 2 * 32 * DELTA_HEAD * 4 + i % 2 * 256);
            s[i / 2][i % 2] = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
        }
        if (n + STATE_SLOTS < heads) __syncthreads();
        fetch(n + STATE_SLOTS);
        if (++slot == STATE_SLOTS) slot = 0, turn ^= 1;
        const u32 behind = updates_kept(position, applied, first + n);
        for (u32 i = 0; i < behind; i++) apply(kept[n][i], s, row, lane16);
        const int key = n / VALUES_PER_KEY;
        const float* const own_key = convolved + key * CHANNELS;
        float4 k[2], q[2];
        load_scaled(k, own_key + DELTA_HEAD, unit_scale(sums[key] + 4), lane16);
        load_scaled(q, own_key, unit_scale(sums[key]) * inverse_root((float)DELTA_HEAD), lane16);
        const float decay = decays[n];
        Update* const to = keep[n];
        const float kq = sum_lanes<16>(dot(k, q));
        float2 own[4];
#pragma unroll
        for (int p = 0; p < 4; p++) own[p] = make_float2(dot(s[p], k), dot(s[p], q));
        // S k (lanes below 8) or S q of one of the lane's rows.
        const float sum = scatter_sums(own, lane16);
        const int value = lane16 / 2 % 4 * 32 + row;
        const float v = own_key[(2 + n % VALUES_PER_KEY) * DELTA_HEAD + value];
        const float e = betas[n] * (v - decay * sum), other = __shfl_xor_sync(FULL, e, 8);
        if (lane16 >= 8 && lane16 % 2 == 0) outputs[n * DELTA_HEAD + value] = __fmaf_rn(decay, sum, __fmul_rn(other, kq));
        if (!to) {
            float4* const state = (float4*)(states + n * STATE + row * DELTA_HEAD) + lane16;
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float of_row = __shfl_sync(FULL, e, 2 * p, 16);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    update(s[p][i], decay, of_row, k[i]);
                    state[p * 8 * DELTA_HEAD + 16 * i] = s[p][i];
                }
            }
        } else if (lane16 < 8 && lane16 % 2 == 0) {
            to->e[value] = e;
        }
        if (to && row == 0) {
            ((float4*)to->k)[lane16] = k[0], ((float4*)to->k)[16 + lane16] = k[1];
            if (lane16 == 0) to->decay = decay;
        }
    }
    __syncthreads();
    if (tid < heads * DELTA_HEAD) {
        const float o = outputs[tid], square = sum_lanes<32>(o * o);
        outputs[tid] = o * weights[tid % DELTA_HEAD] * gates[tid];
        if (lane == 0) squares[tid >> 5] = square;
    }
    __syncthreads();
    const int n = tid >> 5, head = first + n;
    if (n >= heads) return;
    const float scale = gated_norm_scale(make_float4(squares[4 * n], squares[4 * n + 1], squares[4 * n + 2], squares[4 * n + 3]));
    // The last head may have half a block of nothing behind it.
    const bool pads = VALUE_WIDTH % BLOCK_INPUTS != 0 && head == VALUE_HEADS - 1;
    fix_groups(out, blockIdx.y, head * (DELTA_HEAD / GROUP), outputs + n * DELTA_HEAD, scale, 2, pads ? 4 : 2, lane);
}

// Attention's parts of every row together, to out [rows, QUERY_WIDTH]. A CTA has a head.
KERNEL(256, 4)
rows_attend_combine(const Run* runs, int parts, const float* projected, const float2* part_sums, const float* part_values,
                    RowImage out) {
    __shared__ float values[HEAD];
    combine_parts<HEAD>(runs, parts, projected, part_sums, part_values, [&](int i, float value) { values[i] = value; });
    __syncthreads();
    if (threadIdx.x < 32) fix_groups(out, blockIdx.y, blockIdx.x * (HEAD / GROUP), values, 1.0f, HEAD / GROUP, HEAD / GROUP, threadIdx.x);
}

// ---- Blocks times rows.

// A lane's inputs of a block in shared memory: of row g / 2 of each quad high (g even) or low bytes of the four groups; scales and sums of
// row t. Quads lie APART bytes behind each other. Bytes of one quad stay in registers, those of several are read for every block of weights.
template <int QUADS, int APART> struct BlockInputs {
    static constexpr bool STAY = QUADS == 1;
    u32 even, odd, own_groups;   // addresses; those of groups 0 and 2, and of 1 and 3
    uint4 own[STAY ? 4 : 1];

    BlockInputs() = default;
    // Addresses of the block, of row g / 2 and of row t of the first quad.
    DEVICE BlockInputs(u32 of_bytes, u32 of_groups, int lane) {
        const bool low = lane >> 2 & 1;
        const u32 at = of_bytes + (lane & 3) * 16;
        even = at + (low ? BLOCK_INPUTS + GROUP : 0), odd = at + (low ? BLOCK_INPUTS - GROUP : 0);
        own_groups = of_groups + 2 * BLOCK_INPUTS;
        if (STAY)
#pragma unroll
            for (int j = 0; j < 4; j++) own[j] = load_shared16((j & 1 ? odd : even) + j * GROUP);
    }
    DEVICE uint4 bytes(int quad, int j) const {
        return STAY ? own[STAY ? j : 0] : load_shared16((j & 1 ? odd : even) + quad * APART + j * GROUP);
    }
    // Scale and sum of groups 2 pair and 2 pair + 1.
    DEVICE uint4 groups(int quad, int pair) const { return load_shared16(own_groups + quad * APART + pair * 16); }
};

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

// `block` is an address in shared memory. `take(q, y0, y1)` gets outputs g and g + 8 of row t of quad q.
template <int BITS, int QUADS, int APART, class Take>
DEVICE void block_times_rows(u32 block, const BlockInputs<QUADS, APART>& x, int lane, Take take) {
    const u32 codes = block + lane * 16, factors = block + (BITS == 4 ? 2048 : 4096) + (lane >> 2) * 32;
    // Sums of groups 0 and 2, and of 1 and 3.
    float sums[QUADS][2][2];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        // Scale and bias of outputs g and g + 8 for two groups; scale and sum of the rows' groups.
        const uint4 weights = load_shared16(factors + pair * 16);
        uint4 inputs[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) inputs[q] = x.groups(q, pair);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int j = 2 * pair + odd;
            u32 w[8];
            if (BITS == 4) {
                const uint4 c = load_shared16(codes + j * 512);
                w[0] = c.x & NIBBLES, w[1] = c.y & NIBBLES, w[2] = c.x >> 4 & NIBBLES, w[3] = c.y >> 4 & NIBBLES;
                w[4] = c.z & NIBBLES, w[5] = c.w & NIBBLES, w[6] = c.z >> 4 & NIBBLES, w[7] = c.w >> 4 & NIBBLES;
            } else {
                const uint4 a = load_shared16(codes + j * 1024), b = load_shared16(codes + j * 1024 + 512);
                w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
            }
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                int c[4] = {0, 0, 0, 0};
                const uint4 bytes = x.bytes(q, j);
                mma_u8_s8(c, w[0], w[1], w[2], w[3], bytes.x, bytes.y);
                mma_u8_s8(c, w[4], w[5], w[6], w[7], bytes.z, bytes.w);
                const float scale = __uint_as_float(odd ? inputs[q].z : inputs[q].x), sum = __uint_as_float(odd ? inputs[q].w : inputs[q].y);
                const float y0 = group_term(odd ? weights.z : weights.x, scale, sum, c[0], c[1]);
                const float y1 = group_term(odd ? weights.w : weights.y, scale, sum, c[2], c[3]);
                sums[q][odd][0] = pair == 0 ? y0 : sums[q][odd][0] + y0;
                sums[q][odd][1] = pair == 0 ? y1 : sums[q][odd][1] + y1;
            }
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) take(q, sums[q][0][0] + sums[q][1][0], sums[q][0][1] + sums[q][1][1]);
}

// A warp's stream of blocks through shared memory: those with numbers first, first + APART, ... below `count`.
template <int BYTES, int DEPTH, int APART = TEAM_WARPS> struct BlockStream {
    static constexpr int WHOLE = BYTES / 512, REST = BYTES % 512 / 16;   // pieces for all lanes, and for the first ones
    u32 slots, slot;   // addresses in shared memory: of the first one, and of the next to be used
    u32 first;

    // `shared` is the team's.
    DEVICE BlockStream(char* shared, u32 first) : first(first) {
        slots = slot = opaque(shared_address(shared) + threadIdx.x / 32 % TEAM_WARPS * DEPTH * BYTES);
    }
    template <class Address> DEVICE void fetch(u32 at, u32 to, u32 count, Address address) {
        if (at < count) {
            // Pieces lie at fixed distances from one address.
            const u32 lane = threadIdx.x % 32;
            const char* from = address(at) + lane * 16;
            to += lane * 16;
#pragma unroll
            for (int i = 0; i < WHOLE; i++) copy16(to + i * 512, from + i * 512);
            if (lane < REST) copy16(to + WHOLE * 512, from + WHOLE * 512);
        }
        copy_commit();
    }
    // The warp's blocks FROM to TO, not including the latter, of those that there are slots for.
    template <int FROM, int TO, class Address> DEVICE void fill(u32 count, Address address) {
#pragma unroll
        for (int i = FROM; i < TO; i++) fetch(first + i * APART, slots + i * BYTES, count, address);
    }
    // The address of the next block.
    DEVICE u32 wait() {
        copy_wait<DEPTH - 1>();
        __syncwarp();
        return slot;
    }
    // Block `at` is used up.
    template <class Address> DEVICE void next(u32 at, u32 count, Address address) {
        __syncwarp();
        fetch(at + DEPTH * APART, slot, count, address);
        slot = slot == slots + (DEPTH - 1) * BYTES ? slots : slot + BYTES;
    }
};

// The row whose outputs a thread finishes.
template <int QUADS> DEVICE int row_of_thread() { return (threadIdx.x >> 4) % (4 * QUADS); }

// The tiles of a team, `count` of them, of BLOCKS blocks each, times rows that lie STRIDE bytes apart; a tile's outputs are added up over
// the blocks in CHAINS chains: with two in the order of gemv.cu, even blocks, odd ones, and both.
template <int BLOCKS, int BITS, int QUADS, int STRIDE, int CHAINS = 2> struct RowTiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8, DEPTH = BITS == 4 ? ROW_SLOTS : 1;
    // Of the few warps' worth of memory there is for blocks of 8 bits on some GPUs.
    static constexpr int STREAMS = TEAM_WARPS * DEPTH * BYTES * TEAMS <= ROW_SLOT_BYTES ? TEAM_WARPS : TEAM_WARPS / 2;
    static_assert(STREAMS * DEPTH * BYTES * TEAMS <= ROW_SLOT_BYTES);
    // Tiles whose sums stand beside each other in shared memory.
    static constexpr int CHUNK_BLOCKS = (SHARED_KIB >= 227 ? 2 : 1) * TEAM_WARPS * (QUADS == 1 ? 3 : 1);
    static constexpr u32 CHUNK = BLOCKS >= CHUNK_BLOCKS ? 1 : CHUNK_BLOCKS / BLOCKS;
    typedef float Sums[CHUNK * BLOCKS][4 * QUADS][BLOCK_ROWS];
    BlockStream<BYTES, DEPTH, STREAMS> stream;

    // `slots` are those of all teams.
    DEVICE RowTiles(char* slots) : stream(slots + team() * (ROW_SLOT_BYTES / TEAMS), threadIdx.x / 32 % TEAM_WARPS) {}

    // Asks for each warp's first block, or for those behind it. `address(index, block)`.
    template <class Address> DEVICE void fetch_first(u32 count, Address address) { fill<0, 1>(count, address); }
    template <class Address> DEVICE void fetch_next(u32 count, Address address) { fill<1, DEPTH>(count, address); }
    template <int FROM, int TO, class Address> DEVICE void fill(u32 count, Address address) {
        if (threadIdx.x / 32 % TEAM_WARPS >= STREAMS) return;
        stream.fill<FROM, TO>(count * BLOCKS, [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); });
    }
    // Once first blocks and the image are there, for all warps. `key(index)`: which rows a tile meets; `place(index, row)`: where one of the
    // first quad begins in shared memory; `finish(index, row, output, sum)`.
    template <class Address, class Key, class Place, class Finish>
    DEVICE void run(Sums& shared, u32 count, Address address, Key key, Place place, Finish finish) {
        auto flat = [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); };
        const u32 warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
        // Where a lane's first sum of the chunk's first block goes.
        const u32 sums = opaque(shared_address(&shared[0][lane % 4][lane / 4]));
        BlockInputs<QUADS, 4 * STRIDE> inputs;
        u32 current = 0xffffffffu, at = warp;
        for (u32 first = 0; first < count; first += CHUNK) {
            const u32 tiles = min(CHUNK, count - first), end = warp < STREAMS ? (first + tiles) * BLOCKS : 0;
            for (; at < end; at += STREAMS) {
                const u32 index = at / BLOCKS, block = at % BLOCKS, wanted = key(index) * BLOCKS + block;
                if (wanted != current) {
                    const u32 inside = block * ROW_BLOCK;
                    inputs = {place(index, lane / 8) + inside, place(index, lane % 4) + inside, (int)lane};
                    current = wanted;
                }
                const u32 weights = stream.wait(), to = sums + (at - first * BLOCKS) * sizeof(shared[0]);
                block_times_rows<BITS>(weights, inputs, lane, [&](int q, float y0, float y1) {
                    store_shared(to + q * 4 * BLOCK_ROWS * 4, y0);
                    store_shared(to + q * 4 * BLOCK_ROWS * 4 + 32, y1);
                });
                stream.next(at, count * BLOCKS, flat);
            }
            team_meets();
            // Whole warps have a tile, for shuffles.
            const int output = threadIdx.x & 15, row = row_of_thread<QUADS>();
            for (u32 i = threadIdx.x % TEAM_THREADS / (64 * QUADS); i < tiles; i += TEAM_THREADS / (64 * QUADS)) {
                float chains[2] = {0.0f, 0.0f};
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) chains[block % CHAINS] += shared[i * BLOCKS + block][row][output];
                finish(first + i, row, output, CHAINS == 2 ? chains[0] + chains[1] : chains[0]);
            }
            if (first + CHUNK < count) team_meets();
        }
    }
};

// Of every CTA: slots of all teams, then the image of all rows, then sums of each team.
DEVICE char* image_of_cta() { return dynamic_shared + ROW_SLOT_BYTES; }
template <int STRIDE> DEVICE char* sums_of_cta() { return dynamic_shared + ROW_SLOT_BYTES + ROWS * STRIDE; }
// The scale of a row's norm, of an image that rows_norm made.
DEVICE float row_scale(int row) {
    return norm_scale((const float*)(image_of_cta() + row * row_stride(HIDDEN_BLOCKS) + HIDDEN_BLOCKS * ROW_BLOCK));
}

// Asks for `rows` rows of an image's part.
template <int STRIDE> DEVICE void fetch_image(const RowImage& x, int part, int rows) {
    const u32 to = shared_address(image_of_cta());
    const u8* from = x.at + part * ROWS * STRIDE;
    for (int i = threadIdx.x; i < rows * (STRIDE / 16); i += ROW_THREADS) copy16(to + i * 16, from + i * 16);
    copy_commit();
}

// A linear whose tiles all meet all rows of a part of `x`: a team has `tiles` of them from `first` on, `apart`. `weights_of(tile, block)`;
// `finish(tile, row, output, sum)`; the last argument says whether there is such a row.
template <int BLOCKS, int BITS, int CHAINS, int QUADS, class Weights, class Finish>
DEVICE void quads_linear(int first, int apart, int tiles, const RowImage& x, int part, int rows, Weights weights_of, Finish finish) {
    constexpr int STRIDE = row_stride(BLOCKS);
    typedef RowTiles<BLOCKS, BITS, QUADS, STRIDE, CHAINS> T;
    typename T::Sums& sums = ((typename T::Sums*)sums_of_cta<STRIDE>())[team()];
    T t(dynamic_shared);
    auto address = [&](int index, int block) { return weights_of(first + index * apart, block); };
    launch_dependents();
    // Inputs would queue behind all that is asked for before them, and nothing begins without them.
    t.fetch_first(tiles, address);
    wait_for_inputs();
    fetch_image<STRIDE>(x, part, rows);
    t.fetch_next(tiles, address);
    // Of an odd number of blocks in two parts the last one of the second part is not there.
    if (x.parts == 2 && part == 1 && x.blocks % 2 == 1) {
        copy_wait<0>();
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * (ROW_BLOCK / 4); i += ROW_THREADS)
            *(u32*)(image_of_cta() + i / (ROW_BLOCK / 4) * STRIDE + (BLOCKS - 1) * ROW_BLOCK + i % (ROW_BLOCK / 4) * 4) = 0;
    }
    copy_wait<T::DEPTH - 1>();
    __syncthreads();
    const u32 image = shared_address(image_of_cta());
    t.run(
        sums, tiles, address, [](int) { return 0; }, [=](int, int row) { return image + row * STRIDE; },
        [&](int index, int row, int output, float sum) { finish(first + index * apart, row, output, sum, row < rows); });
}
template <int BLOCKS, int BITS, int CHAINS, class Weights, class Finish>
DEVICE void rows_linear(int first, int apart, int tiles, const RowImage& x, int part, int rows, Weights weights, Finish finish) {
    if (rows <= 4) quads_linear<BLOCKS, BITS, CHAINS, 1>(first, apart, tiles, x, part, rows, weights, finish);
    else if (rows <= 8) quads_linear<BLOCKS, BITS, CHAINS, 2>(first, apart, tiles, x, part, rows, weights, finish);
    else quads_linear<BLOCKS, BITS, CHAINS, 4>(first, apart, tiles, x, part, rows, weights, finish);
}
// Of a matrix whose tiles lie one after the other, for inputs that do as well: `tiles` of them, of which teams take one in turn, from
// team `before` on.
template <int BLOCKS, int BITS, class Finish>
DEVICE void rows_linear(const char* weights, int before, int tiles, const RowImage& x, int rows, Finish finish) {
    const int first = blockIdx.x * TEAMS + team() - before, apart = gridDim.x * TEAMS;
    rows_linear<BLOCKS, BITS, 2>(
        first, apart, tiles > first ? (tiles - first - 1) / apart + 1 : 0, x, 0, rows,
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + block) * (BITS == 4 ? BLOCK4 : BLOCK8); }, finish);
}

// Norm and the projections of a mixer, to out [rows, stride].
KERNEL(ROW_THREADS, 1)
rows_project(const char* weights, int tiles, RowImage x, int rows, float* out) {
    rows_linear<HIDDEN_BLOCKS, 4>(weights, 0, tiles, x, rows, [=](int tile, int row, int output, float sum, bool there) {
        if (there) out[(row * tiles + tile) * 16 + output] = sum * row_scale(row);
    });
}

// Output projections, to parts [rows, 2, HIDDEN]: a CTA has tiles' even or their odd blocks.
template <int BLOCKS> DEVICE void rows_output(const char* weights, const RowImage& x, int rows, float* parts) {
    constexpr int HALF = (BLOCKS + 1) / 2, TILES = HIDDEN / 16;
    const int odd = blockIdx.x & 1, first = (blockIdx.x >> 1) * TEAMS + team(), apart = (gridDim.x >> 1) * TEAMS;
    rows_linear<HALF, 4, 1>(
        first, apart, TILES > first ? (TILES - first - 1) / apart + 1 : 0, x, odd, rows,
        // Of a block that is not there another one's, times nothing.
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + min(2 * block + odd, BLOCKS - 1)) * BLOCK4; },
        [=](int tile, int row, int output, float sum, bool there) {
            if (there) parts[(row * 2 + odd) * HIDDEN + tile * 16 + output] = sum;
        });
}
KERNEL(ROW_THREADS, 1) rows_delta_output(const char* weights, RowImage x, int rows, float* parts) {
    rows_output<VALUE_BLOCKS>(weights, x, rows, parts);
}
KERNEL(ROW_THREADS, 1) rows_attention_output(const char* weights, RowImage x, int rows, float* parts) {
    rows_output<QUERY_BLOCKS>(weights, x, rows, parts);
}

// Norm, router and shared gate to logits [rows, ROUTER_ROWS], gate and up of the shared expert to activation
// [rows, DOWN_BLOCKS * 256]. A team per tile; CTAs have tiles of one kind.
KERNEL(ROW_THREADS, 1)
rows_route_and_share(const char* router, const char* shared_up, RowImage x, int rows, float* logits, float* activation) {
    constexpr int ROUTER_CTAS = (ROUTER_TILES + TEAMS - 1) / TEAMS;
    if (blockIdx.x < ROUTER_CTAS) {
        rows_linear<HIDDEN_BLOCKS, 8>(router, 0, ROUTER_TILES, x, rows, [=](int tile, int row, int output, float sum, bool there) {
            if (there) logits[row * ROUTER_ROWS + tile * 16 + output] = sum * row_scale(row);
        });
    } else {
        const int before = ROUTER_CTAS * TEAMS, tiles = SHARED_WIDTH / 8;
        rows_linear<HIDDEN_BLOCKS, 4>(shared_up, before, tiles, x, rows, [=](int tile, int row, int output, float sum, bool there) {
            sum *= row_scale(row);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (there && output < 8)
                activation[(u64)row * DOWN_BLOCKS * BLOCK_INPUTS + TOP_K * EXPERT_STRIDE + tile * 8 + output] = silu(sum) * up;
        });
    }
}

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
// The first of the share of `total` things in a row that the `own`-th of `all` has, and of the next one's.
DEVICE uint2 share_of(u32 total, u32 own, u32 all) { return make_uint2((u64)total * own / all, (u64)total * (own + 1) / all); }

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

// Final norm and head: logits [rows, VOCAB], and of every CTA each row's best, best [rows, CTAs]. There are so many tiles that a warp takes
// whole ones, block after block, and adds up in registers.
template <int QUADS>
DEVICE void head_of_quads(const char* weights, const Run* runs, const RowImage& x, int rows, float* logits, Best* best) {
    constexpr int STRIDE = row_stride(HIDDEN_BLOCKS), HEAD_WARPS = TEAMS * TEAM_WARPS;
    constexpr float LOWEST = -3.402823466e+38f;
    __shared__ float scales[ROWS];
    __shared__ u32 limits[ROWS];
    // Of row t of each quad, in shared memory because registers are what rows need most: in the place of sums, which there are none of.
    static_assert(QUADS * ROW_THREADS * 8 <= TEAMS * sizeof(typename RowTiles<HIDDEN_BLOCKS, 4, QUADS, STRIDE>::Sums));
    float(*highest)[ROW_THREADS] = (float(*)[ROW_THREADS])sums_of_cta<STRIDE>();
    u32(*highest_id)[ROW_THREADS] = (u32(*)[ROW_THREADS])highest[QUADS];
    // Of a warp that has used its blocks up, in their place.
    auto bests_of = [](int warp) { return (Best*)(dynamic_shared + warp * (ROW_SLOTS * BLOCK4)); };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint2 tiles = share_of(VOCAB_TILES, blockIdx.x * HEAD_WARPS + warp, gridDim.x * HEAD_WARPS);
    const u32 blocks = (tiles.y - tiles.x) * HIDDEN_BLOCKS;
    weights += (u64)tiles.x * HIDDEN_BLOCKS * BLOCK4;
    auto address = [&](u32 at) { return weights + (u64)at * BLOCK4; };
    BlockStream<BLOCK4, ROW_SLOTS, 1> stream(dynamic_shared + team() * (ROW_SLOT_BYTES / TEAMS), 0);
    launch_dependents();
    stream.fill<0, 1>(blocks, address);
    wait_for_inputs();
    fetch_image<STRIDE>(x, 0, rows);
    stream.fill<1, ROW_SLOTS>(blocks, address);
    copy_wait<ROW_SLOTS - 1>();
    __syncthreads();
    if (threadIdx.x < rows) scales[threadIdx.x] = row_scale(threadIdx.x), limits[threadIdx.x] = runs[threadIdx.x].vocab_limit;
    __syncthreads();
    const u32 image = shared_address(image_of_cta());
    u32 bad = 0;
#pragma unroll
    for (int q = 0; q < QUADS; q++) highest[q][threadIdx.x] = LOWEST, highest_id[q][threadIdx.x] = 0xffffffffu;
    for (u32 at = 0, id_of_tile = tiles.x * 16; at < blocks; id_of_tile += 16) {
        float chains[QUADS][2][2] = {};
#pragma unroll 1
        for (int pair = 0; pair < HIDDEN_BLOCKS; pair += 2)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int block = pair + odd;
                if (block == HIDDEN_BLOCKS) break;
                const u32 inside = block * ROW_BLOCK;
                const BlockInputs<QUADS, 4 * STRIDE> inputs(image + lane / 8 * STRIDE + inside, image + lane % 4 * STRIDE + inside, lane);
                block_times_rows<4>(stream.wait(), inputs, lane, [&](int q, float y0, float y1) {
                    chains[q][odd][0] += y0, chains[q][odd][1] += y1;
                });
                stream.next(at++, blocks, address);
            }
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 4 * q + lane % 4;
                const u32 id = id_of_tile + half * 8 + lane / 4;
                if (row >= rows || id >= VOCAB) continue;
                const float logit = (chains[q][0][half] + chains[q][1][half]) * scales[row];
                logits[(u64)row * VOCAB + id] = logit;
                if (!(fabsf(logit) <= -LOWEST)) bad |= 1u << q;
                // Ids of a lane rise: the first of equal ones stays.
                if (id < limits[row] && logit > highest[q][threadIdx.x]) highest[q][threadIdx.x] = logit, highest_id[q][threadIdx.x] = id;
            }
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) bad |= __shfl_xor_sync(FULL, bad, d);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        Best own{highest[q][threadIdx.x], highest_id[q][threadIdx.x], bad >> q & 1, 0};
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            const Best other{__shfl_xor_sync(FULL, own.logit, d), __shfl_xor_sync(FULL, own.id, d), 0, 0};
            if (above(other, own)) own.logit = other.logit, own.id = other.id;
        }
        if (lane < 4) bests_of(warp)[4 * q + lane] = own;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= rows) return;
    Best of_row = bests_of(0)[row];
    for (int i = 1; i < HEAD_WARPS; i++) {
        const Best other = bests_of(i)[row];
        of_row.bad |= other.bad;
        if (above(other, of_row)) of_row.logit = other.logit, of_row.id = other.id;
    }
    best[row * gridDim.x + blockIdx.x] = of_row;
}
KERNEL(ROW_THREADS, 1)
rows_head(const char* weights, const Run* runs, RowImage x, int rows, float* logits, Best* best) {
    if (rows <= 4) head_of_quads<1>(weights, runs, x, rows, logits, best);
    else if (rows <= 8) head_of_quads<2>(weights, runs, x, rows, logits, best);
    else head_of_quads<4>(weights, runs, x, rows, logits, best);
}
