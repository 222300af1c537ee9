// The gated delta rule: convolution, decay, the recurrence, and the norm of its output.
//
// Recurrence per value head, S [128 (value), 128 (key)] f32: with k and q of unit length (q also over sqrt(128)),
//   e = beta * (v - decay * (S k));  o = decay * (S q) + e * (k . q);  S = decay * S + e k^T
// which is the rule with its two products taken of the old S, so that they are added up together.
// Reference: lily_reference::ops::{conv_step, delta_query, delta_key, decay, delta_step, gated_norm}.

constexpr float UNIT_EPS = 1e-6f;
constexpr int VALUES_PER_KEY = VALUE_HEADS / KEY_HEADS;

// One channel's convolution: the three inputs before this one, oldest first.
DEVICE float convolve(float u0, float u1, float u2, float u3, float4 taps) {
    return silu(u0 * taps.x + u1 * taps.y + u2 * taps.z + u3 * taps.w);
}
DEVICE float decay_of(float a, float rate, float dt_bias) { return expf(-rate * softplus(a + dt_bias)); }
DEVICE float* history_slot(float* conv, int layer, u32 position) {
    return conv + ((u64)layer * 4 + position % 4) * CONV_WIDTH;
}

// ---- One token of each row of a step, blockIdx.y. A CTA has 32 rows of a value head's state, 16 lanes a row; 4 CTAs a head.
// In: projected [PROJ_DELTA], taps [CONV_WIDTH, 4], rates = exp(A_log), dt_bias [VALUE_HEADS], norm [128].
// Out: out [VALUE_WIDTH] = o * norm * silu(z), without the norm's scale, and squares [VALUE_HEADS, 4].
// Bytes moved: the state read and written, 2 x 16 KB a CTA.
DEVICE void step_of_row(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
                        const float* norm, float* out, float* squares) {
    __shared__ float qs[DELTA_HEAD], ks[DELTA_HEAD], vs[32], sums[8], gates[2], outputs[32];
    run += blockIdx.y;
    projected += blockIdx.y * PROJ_DELTA;
    out += blockIdx.y * VALUE_BLOCKS * BLOCK_INPUTS;
    squares += blockIdx.y * VALUE_HEADS * 4;
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3, key_head = head / VALUES_PER_KEY;
    const int tid = threadIdx.x, row = tid >> 4, lane16 = tid & 15, lane = tid & 31;
    launch_dependents();
    if (head >= VALUE_HEADS) return wait_for_inputs();
    // What the token before left is there: a whole pass of kernels lies between.
    float* state = run->delta + (((u64)layer * VALUE_HEADS + head) * DELTA_HEAD + slice * 32 + row) * DELTA_HEAD;
    float4 s[2] = {load_cg((const float4*)state + lane16), load_cg((const float4*)state + 16 + lane16)};
    const u32 position = run->position;
    int channel = -1;
    bool owner = true;
    if (tid < 2 * DELTA_HEAD) {
        channel = (tid >= DELTA_HEAD ? KEY_WIDTH : 0) + key_head * DELTA_HEAD + tid % DELTA_HEAD;
        owner = slice == 0 && head % VALUES_PER_KEY == 0;
    } else if (tid < 2 * DELTA_HEAD + 32) {
        channel = 2 * KEY_WIDTH + head * DELTA_HEAD + slice * 32 + tid - 2 * DELTA_HEAD;
    }
    const float norm_weight = __ldg(norm + slice * 32 + row), rate = __ldg(rates + head), bias = __ldg(dt_bias + head);
    float u[3];
    float4 tap;
    if (channel >= 0) {
#pragma unroll
        for (int i = 0; i < 3; i++) u[i] = load_cg(history_slot(run->conv, layer, position + 1 + i) + channel);
        tap = __ldg(taps + channel);
    }
    wait_for_inputs();
    if (channel >= 0) {
        const float input = load_cg(projected + channel);
        const float y = convolve(u[0], u[1], u[2], input, tap);
        // Slot position % 4 holds what no token needs any more.
        if (owner) history_slot(run->conv, layer, position)[channel] = input;
        if (tid < DELTA_HEAD) qs[tid] = y;
        else if (tid < 2 * DELTA_HEAD) ks[tid - DELTA_HEAD] = y;
        else vs[tid - 2 * DELTA_HEAD] = y;
        if (tid < 2 * DELTA_HEAD) {
            const float sum = sum_lanes<32>(y * y);
            if (lane == 0) sums[tid >> 5] = sum;
        }
    } else if (tid == 511) {
        gates[0] = decay_of(load_cg(projected + PROJ_A + head), rate, bias);
        gates[1] = sigmoid(load_cg(projected + PROJ_B + head));
    }
    float z = 0.0f;
    if (lane16 == 0) z = load_cg(projected + PROJ_Z + head * DELTA_HEAD + slice * 32 + row);
    __syncthreads();
    const float q_scale = inverse_root(sums[0] + sums[1] + sums[2] + sums[3] + UNIT_EPS) * inverse_root((float)DELTA_HEAD);
    const float k_scale = inverse_root(sums[4] + sums[5] + sums[6] + sums[7] + UNIT_EPS);
    float4 k[2], q[2];
    float sk = 0.0f, sq = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        k[i] = *(const float4*)(ks + 64 * i + 4 * lane16);
        q[i] = *(const float4*)(qs + 64 * i + 4 * lane16);
        k[i].x *= k_scale, k[i].y *= k_scale, k[i].z *= k_scale, k[i].w *= k_scale;
        q[i].x *= q_scale, q[i].y *= q_scale, q[i].z *= q_scale, q[i].w *= q_scale;
        sk += s[i].x * k[i].x + s[i].y * k[i].y + s[i].z * k[i].z + s[i].w * k[i].w;
        sq += s[i].x * q[i].x + s[i].y * q[i].y + s[i].z * q[i].z + s[i].w * q[i].w;
        kq += k[i].x * q[i].x + k[i].y * q[i].y + k[i].z * q[i].z + k[i].w * q[i].w;
    }
    sk = sum_lanes<16>(sk), sq = sum_lanes<16>(sq), kq = sum_lanes<16>(kq);
    const float decay = gates[0];
    const float e = gates[1] * (vs[row] - decay * sk);
    const float o = decay * sq + e * kq;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[i].x = decay * s[i].x + e * k[i].x, s[i].y = decay * s[i].y + e * k[i].y;
        s[i].z = decay * s[i].z + e * k[i].z, s[i].w = decay * s[i].w + e * k[i].w;
        ((float4*)state)[16 * i + lane16] = s[i];
    }
    if (lane16 == 0) {
        outputs[row] = o;
        out[head * DELTA_HEAD + slice * 32 + row] = o * norm_weight * silu(z);
    }
    __syncthreads();
    if (tid < 32) {
        const float sum = sum_lanes<32>(outputs[tid] * outputs[tid]);
        if (tid == 0) squares[head * 4 + slice] = sum;
    }
}
// Two CTAs have room on a processor, one of this kernel and one of a neighbour: see `gemv.rs`.
KERNEL(512, 2)
delta_step(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
           const float* norm, float* out, float* squares) {
    step_of_row(run, layer, projected, taps, rates, dt_bias, norm, out, squares);
}
// Of several rows three, because their states are all that counts.
KERNEL(512, 3)
rows_delta_step(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
                const float* norm, float* out, float* squares) {
    step_of_row(run, layer, projected, taps, rates, dt_bias, norm, out, squares);
}

// ---- Many tokens, before the recurrence. Grid [tokens / PREPARED, KEY_HEADS + VALUE_HEADS / 2], 256 threads: a key head's q and
// k, or two value heads; PREPARED tokens one after the other, the convolution's window in registers.
// In: projected [tokens, PROJ_DELTA]. Out: mixed [tokens, CONV_WIDTH] (q and k scaled), gates [tokens, VALUE_HEADS] of decay and
// beta.
constexpr int PREPARED = 8;
KERNEL(256, 4)
delta_prepare(const Run* run, int layer, const float* projected, const float4* taps, const float* rates,
              const float* dt_bias, int tokens, float* mixed, float2* gates) {
    __shared__ float sums[2][8];
    const int first = blockIdx.x * PREPARED, last = min(first + PREPARED, tokens), tid = threadIdx.x, lane = tid & 31;
    const bool is_key = blockIdx.y < KEY_HEADS;
    const int value_head = 2 * (blockIdx.y - KEY_HEADS) + tid / DELTA_HEAD;
    if (!is_key && value_head >= VALUE_HEADS) return;
    const int channel = is_key ? (tid >= DELTA_HEAD ? KEY_WIDTH : 0) + blockIdx.y * DELTA_HEAD + tid % DELTA_HEAD
                               : 2 * KEY_WIDTH + value_head * DELTA_HEAD + tid % DELTA_HEAD;
    float u[4];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int at = first - 3 + i;
        u[i + 1] = at >= 0 ? projected[(u64)at * PROJ_DELTA + channel]
                           : history_slot(run->conv, layer, run->position + 4 + at)[channel];
    }
    const float4 tap = taps[channel];
    for (int token = first; token < last; token++) {
        const float* row = projected + (u64)token * PROJ_DELTA;
        u[0] = u[1], u[1] = u[2], u[2] = u[3], u[3] = row[channel];
        float y = convolve(u[0], u[1], u[2], u[3], tap);
        if (is_key) {
            // Two sets of sums in turn: a thread may be a token ahead of another.
            const int turn = token & 1;
            const float sum = sum_lanes<32>(y * y);
            if (lane == 0) sums[turn][tid >> 5] = sum;
            __syncthreads();
            const float* own = sums[turn] + (tid >= DELTA_HEAD ? 4 : 0);
            y *= inverse_root(own[0] + own[1] + own[2] + own[3] + UNIT_EPS);
            if (tid < DELTA_HEAD) y *= inverse_root((float)DELTA_HEAD);
        } else if (tid % DELTA_HEAD == 0) {
            gates[token * VALUE_HEADS + value_head] =
                make_float2(decay_of(row[PROJ_A + value_head], rates[value_head], dt_bias[value_head]),
                            sigmoid(row[PROJ_B + value_head]));
        }
        mixed[(u64)token * CONV_WIDTH + channel] = y;
    }
}

// ---- Leaves the last four inputs in the history. Grid covers CONV_WIDTH.
KERNEL(256, 4) delta_history(const Run* run, int layer, const float* projected, int tokens) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= CONV_WIDTH) return;
    for (int token = max(0, tokens - 4); token < tokens; token++)
        history_slot(run->conv, layer, run->position + token)[channel] = projected[(u64)token * PROJ_DELTA + channel];
}

// ---- Many tokens through the recurrence, four at a time, all of whose products with the old state are taken together. With P_c the
// decay from before the four to token c and D_ic the decay after token i up to c, both products of decays:
//   e_c = beta_c (v_c - P_c (S k_c) - sum_{i<c} D_ic e_i (k_i . k_c))
//   o_c = P_c (S q_c) + sum_{i<=c} D_ic e_i (k_i . q_c)
//   S   = P_3 S + sum_i D_i3 e_i k_i^T
// A CTA has 32 rows of a value head's state, 8 lanes for two rows, in registers; the tokens' vectors come through shared memory,
// SCAN_BATCH at a time. Tokens beyond the last have beta 0, decay 1 and whatever vectors are there.
// Out: out [tokens, VALUE_WIDTH] = o.
constexpr int SCAN_BATCH = 16;
constexpr int FOUR = 4;
constexpr int SCAN_THREADS = 128;
constexpr int SCAN_ROWS = 2;
struct ScanStage {
    float q[SCAN_BATCH][DELTA_HEAD];
    float k[SCAN_BATCH][DELTA_HEAD];
    float v[SCAN_BATCH][32];
    float2 gates[SCAN_BATCH];
};
struct ScanFactors {       // of four tokens
    float key[FOUR][FOUR];   // [i][c]: D_ic (k_i . k_c)
    float query[FOUR][FOUR]; // [i][c]: D_ic (k_i . q_c)
    float before[FOUR];      // P_c
    float after[FOUR];       // D_i3
};

// Sums of 16 values over groups of LANES lanes, each left in the lane whose number, reversed, is its index.
template <int N, int LANES, int BIT = 1> DEVICE void scatter_sums(float* v, int lane) {
    if constexpr (BIT < LANES && N > 1) {
        const bool upper = lane & BIT;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float send = upper ? v[i] : v[i + N / 2], keep = upper ? v[i + N / 2] : v[i];
            v[i] = keep + __shfl_xor_sync(FULL, send, BIT);
        }
        scatter_sums<N / 2, LANES, BIT * 2>(v, lane);
    } else if constexpr (BIT < LANES) {
        v[0] += __shfl_xor_sync(FULL, v[0], BIT);
        scatter_sums<1, LANES, BIT * 2>(v, lane);
    }
}

// Factors of four tokens by one warp, a lane per product.
DEVICE void scan_factors(const ScanStage& stage, int four, ScanFactors& factors, int lane) {
    float4 k[FOUR], q[FOUR];
#pragma unroll
    for (int c = 0; c < FOUR; c++) {
        k[c] = *(const float4*)&stage.k[four * FOUR + c][4 * lane];
        q[c] = *(const float4*)&stage.q[four * FOUR + c][4 * lane];
    }
    auto dot = [](float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; };
    float products[2][FOUR * FOUR];
#pragma unroll
    for (int i = 0; i < FOUR; i++)
#pragma unroll
        for (int c = 0; c < FOUR; c++) {
            products[0][i * FOUR + c] = i < c ? dot(k[i], k[c]) : 0.0f;
            products[1][i * FOUR + c] = i <= c ? dot(k[i], q[c]) : 0.0f;
        }
    scatter_sums<16, 32>(products[0], lane);
    scatter_sums<16, 32>(products[1], lane);
    const int index = __brev(lane & 15) >> 28, i = index / FOUR, c = index % FOUR;
    float from = 1.0f, before = 1.0f, after = 1.0f;
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        const float decay = stage.gates[four * FOUR + j].x;
        if (j > i && j <= c) from *= decay;
        if (j <= c) before *= decay;
        if (j > i) after *= decay;
    }
    if (lane < 16) {
        factors.key[i][c] = i < c ? from * products[0][0] : 0.0f;
        factors.query[i][c] = i <= c ? from * products[1][0] : 0.0f;
        if (i == 0) factors.before[c] = before;
        if (c == 0) factors.after[i] = after;
    }
}

KERNEL(SCAN_THREADS, 1)
delta_scan(const Run* run, int layer, const float* mixed, const float2* gates, int tokens, float* out) {
    extern __shared__ __align__(128) char dynamic_shared[];
    __shared__ ScanFactors all_factors[SCAN_BATCH / FOUR];
    ScanStage* stages = (ScanStage*)dynamic_shared;
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3, key_head = head / VALUES_PER_KEY;
    const int tid = threadIdx.x, row = (tid >> 3) * SCAN_ROWS, lane8 = tid & 7, lane = tid & 31;
    float* state = run->delta + (((u64)layer * VALUE_HEADS + head) * DELTA_HEAD + slice * 32 + row) * DELTA_HEAD;
    float4 s[SCAN_ROWS][4];
#pragma unroll
    for (int r = 0; r < SCAN_ROWS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[r][i] = ((const float4*)(state + r * DELTA_HEAD))[8 * i + lane8];

    auto load = [&](int first, ScanStage& stage) {
        // Tokens beyond the last repeat it, so that no number is undefined.
        for (int i = tid; i < SCAN_BATCH * 32; i += SCAN_THREADS) {
            const int token = i >> 5, part = i & 31;
            const float* from =
                mixed + (u64)min(first + token, tokens - 1) * CONV_WIDTH + key_head * DELTA_HEAD + part * 4;
            copy16(&stage.q[token][part * 4], from);
            copy16(&stage.k[token][part * 4], from + KEY_WIDTH);
        }
        copy16(&stage.v[tid / 8][tid % 8 * 4], mixed + (u64)min(first + tid / 8, tokens - 1) * CONV_WIDTH + 2 * KEY_WIDTH +
                                                   head * DELTA_HEAD + slice * 32 + tid % 8 * 4);
        if (tid < SCAN_BATCH)
            stage.gates[tid] = first + tid < tokens ? gates[(first + tid) * VALUE_HEADS + head] : make_float2(1.0f, 0.0f);
        copy_commit();
    };
    load(0, stages[0]);
    for (int first = 0, turn = 0; first < tokens; first += SCAN_BATCH, turn ^= 1) {
        if (first + SCAN_BATCH < tokens) load(first + SCAN_BATCH, stages[turn ^ 1]);
        else copy_commit();
        copy_wait<1>();
        __syncthreads();
        const ScanStage& stage = stages[turn];
        scan_factors(stage, tid >> 5, all_factors[tid >> 5], lane);
        __syncthreads();
        for (int four = 0; four < SCAN_BATCH / FOUR && first + four * FOUR < tokens; four++) {
            const ScanFactors& f = all_factors[four];
            const int token = four * FOUR;
            float4 k[FOUR][4];
            // [row][token][S k, S q]: the first two levels of the sum choose row and token.
            float dots[SCAN_ROWS * FOUR * 2];
#pragma unroll
            for (int c = 0; c < FOUR; c++) {
                float sk[SCAN_ROWS] = {}, sq[SCAN_ROWS] = {};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    k[c][i] = *(const float4*)&stage.k[token + c][32 * i + 4 * lane8];
                    const float4 q = *(const float4*)&stage.q[token + c][32 * i + 4 * lane8];
#pragma unroll
                    for (int r = 0; r < SCAN_ROWS; r++) {
                        sk[r] += s[r][i].x * k[c][i].x + s[r][i].y * k[c][i].y + s[r][i].z * k[c][i].z + s[r][i].w * k[c][i].w;
                        sq[r] += s[r][i].x * q.x + s[r][i].y * q.y + s[r][i].z * q.z + s[r][i].w * q.w;
                    }
                }
#pragma unroll
                for (int r = 0; r < SCAN_ROWS; r++) {
                    dots[(r * FOUR + c) * 2] = sk[r];
                    dots[(r * FOUR + c) * 2 + 1] = sq[r];
                }
            }
            scatter_sums<16, 8>(dots, lane);
            // This lane has row `own_row`, token `own`.
            const int own_index = __brev(lane8) >> 29, own_row = own_index / FOUR, own = own_index % FOUR;
            float e[SCAN_ROWS][FOUR];
#pragma unroll
            for (int r = 0; r < SCAN_ROWS; r++)
#pragma unroll
                for (int c = 0; c < FOUR; c++) {
                    const int holder = __brev(r * FOUR + c) >> 29;
                    float sum = f.before[c] * __shfl_sync(FULL, dots[0], lane & 24 | holder);
#pragma unroll
                    for (int i = 0; i < c; i++) sum += f.key[i][c] * e[r][i];
                    e[r][c] = stage.gates[token + c].y * (stage.v[token + c][row + r] - sum);
                }
            float o = f.before[own] * dots[1];
#pragma unroll
            for (int i = 0; i < FOUR; i++) o += f.query[i][own] * (own_row ? e[1][i] : e[0][i]);
            if (first + token + own < tokens)
                out[(u64)(first + token + own) * VALUE_WIDTH + head * DELTA_HEAD + slice * 32 + row + own_row] = o;
            const float decay = f.before[FOUR - 1];
#pragma unroll
            for (int r = 0; r < SCAN_ROWS; r++) {
#pragma unroll
                for (int c = 0; c < FOUR; c++) e[r][c] *= f.after[c];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float4 sum = s[r][i];
                    sum.x *= decay, sum.y *= decay, sum.z *= decay, sum.w *= decay;
#pragma unroll
                    for (int c = 0; c < FOUR; c++) {
                        sum.x += e[r][c] * k[c][i].x, sum.y += e[r][c] * k[c][i].y;
                        sum.z += e[r][c] * k[c][i].z, sum.w += e[r][c] * k[c][i].w;
                    }
                    s[r][i] = sum;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < SCAN_ROWS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) ((float4*)(state + r * DELTA_HEAD))[8 * i + lane8] = s[r][i];
}
