// The delta step of several sessions' tokens, one token each; each has the bits that it has alone, see delta.cu.
// Reference: lily_reference::ops::{conv_step, delta_query, delta_key, decay, delta_step, gated_norm}.

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
    const int own_head = first + min(tid, heads - 1);
    const float rate = __ldg(rates + own_head), bias = __ldg(dt_bias + own_head);
    wait_for_inputs();
    float inputs[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if (r * 512 + tid < keys * CHANNELS) inputs[r] = load_cg(projected + channel_of(r * 512 + tid));
    const float z = load_cg(projected + PROJ_Z + first * DELTA_HEAD + min(tid, heads * DELTA_HEAD - 1));
    const float a = load_cg(projected + PROJ_A + own_head), b = load_cg(projected + PROJ_B + own_head);
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
