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

// ---- One token. A CTA has 32 rows of a value head's state, 16 lanes a row; 4 CTAs a head.
// In: projected [PROJ_DELTA], taps [CONV_WIDTH, 4], rates = exp(A_log), dt_bias [VALUE_HEADS], norm [128].
// Out: out [VALUE_WIDTH] = o * norm * silu(z), without the norm's scale, and squares [VALUE_HEADS, 4].
// Bytes moved: the state read and written, 2 x 16 KB a CTA.
KERNEL(512, 2)
delta_step(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
           const float* norm, float* out, float* squares) {
    __shared__ float qs[DELTA_HEAD], ks[DELTA_HEAD], vs[32], sums[8], gates[2], outputs[32];
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3, key_head = head / VALUES_PER_KEY;
    const int tid = threadIdx.x, row = tid >> 4, lane16 = tid & 15, lane = tid & 31;
    launch_dependents();
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
        gates[0] = decay_of(load_cg(projected + PROJ_A + head), rates[head], dt_bias[head]);
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
        out[head * DELTA_HEAD + slice * 32 + row] = o * __ldg(norm + slice * 32 + row) * silu(z);
    }
    __syncthreads();
    if (tid < 32) {
        const float sum = sum_lanes<32>(outputs[tid] * outputs[tid]);
        if (tid == 0) squares[head * 4 + slice] = sum;
    }
}

// ---- Many tokens, before the recurrence. Grid [tokens, KEY_HEADS + VALUE_HEADS], 256 threads.
// In: projected [tokens, PROJ_DELTA]. Out: mixed [tokens, CONV_WIDTH] (q and k scaled), gates [tokens, VALUE_HEADS] of decay and
// beta, products [tokens, KEY_HEADS] = k . q.
KERNEL(256, 4)
delta_prepare(const Run* run, int layer, const float* projected, const float4* taps, const float* rates,
              const float* dt_bias, float* mixed, float2* gates, float* products) {
    __shared__ float sums[8], qs[DELTA_HEAD], crossed[4];
    const int token = blockIdx.x, head = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
    const bool is_key = head < KEY_HEADS;
    const int value_head = head - KEY_HEADS;
    if (!is_key && tid >= DELTA_HEAD) {
        if (tid == DELTA_HEAD) {
            const float* row = projected + (u64)token * PROJ_DELTA;
            gates[token * VALUE_HEADS + value_head] =
                make_float2(decay_of(row[PROJ_A + value_head], rates[value_head], dt_bias[value_head]),
                            sigmoid(row[PROJ_B + value_head]));
        }
        return;
    }
    const int channel = is_key ? (tid >= DELTA_HEAD ? KEY_WIDTH : 0) + head * DELTA_HEAD + tid % DELTA_HEAD
                               : 2 * KEY_WIDTH + value_head * DELTA_HEAD + tid;
    float u[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = token - 3 + i;
        u[i] = at >= 0 ? projected[(u64)at * PROJ_DELTA + channel]
                       : history_slot(run->conv, layer, run->position + 4 + at)[channel];
    }
    float y = convolve(u[0], u[1], u[2], u[3], taps[channel]);
    if (is_key) {
        const float sum = sum_lanes<32>(y * y);
        if (lane == 0) sums[tid >> 5] = sum;
        __syncthreads();
        const int first = tid >= DELTA_HEAD ? 4 : 0;
        y *= inverse_root(sums[first] + sums[first + 1] + sums[first + 2] + sums[first + 3] + UNIT_EPS);
        if (tid < DELTA_HEAD) {
            y *= inverse_root((float)DELTA_HEAD);
            qs[tid] = y;
        }
        __syncthreads();
        if (tid >= DELTA_HEAD) {
            const float product = sum_lanes<32>(y * qs[tid - DELTA_HEAD]);
            if (lane == 0) crossed[(tid >> 5) - 4] = product;
        }
        __syncthreads();
        if (tid == 0) products[token * KEY_HEADS + head] = crossed[0] + crossed[1] + crossed[2] + crossed[3];
    }
    mixed[(u64)token * CONV_WIDTH + channel] = y;
}

// ---- Leaves the last four inputs in the history. Grid covers CONV_WIDTH.
KERNEL(256, 4) delta_history(const Run* run, int layer, const float* projected, int tokens) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= CONV_WIDTH) return;
    for (int token = max(0, tokens - 4); token < tokens; token++)
        history_slot(run->conv, layer, run->position + token)[channel] = projected[(u64)token * PROJ_DELTA + channel];
}

// ---- Many tokens through the recurrence, in order. A CTA has 32 rows of a value head's state, 8 lanes a row, in registers; the
// tokens' vectors come through shared memory, SCAN_BATCH at a time. Out: out [tokens, VALUE_WIDTH] = o.
constexpr int SCAN_BATCH = 16;
struct ScanStage {
    float q[SCAN_BATCH][DELTA_HEAD];
    float k[SCAN_BATCH][DELTA_HEAD];
    float v[SCAN_BATCH][32];
    float2 gates[SCAN_BATCH];
    float product[SCAN_BATCH];
};
KERNEL(256, 1)
delta_scan(const Run* run, int layer, const float* mixed, const float2* gates, const float* products, int tokens,
           float* out) {
    extern __shared__ __align__(128) char dynamic_shared[];
    ScanStage* stages = (ScanStage*)dynamic_shared;
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3, key_head = head / VALUES_PER_KEY;
    const int tid = threadIdx.x, row = tid >> 3, lane8 = tid & 7;
    float* state = run->delta + (((u64)layer * VALUE_HEADS + head) * DELTA_HEAD + slice * 32 + row) * DELTA_HEAD;
    float4 s[4];
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = ((const float4*)state)[8 * i + lane8];

    auto load = [&](int first, ScanStage& stage) {
        const int count = min(SCAN_BATCH, tokens - first);
        for (int i = tid; i < SCAN_BATCH * 32; i += 256) {
            const int token = i >> 5, part = i & 31;
            if (token >= count) continue;
            const float* from = mixed + (u64)(first + token) * CONV_WIDTH + key_head * DELTA_HEAD + part * 4;
            copy16(&stage.q[token][part * 4], from);
            copy16(&stage.k[token][part * 4], from + KEY_WIDTH);
        }
        if (tid < SCAN_BATCH * 8 && tid / 8 < count)
            copy16(&stage.v[tid / 8][tid % 8 * 4], mixed + (u64)(first + tid / 8) * CONV_WIDTH + 2 * KEY_WIDTH +
                                                       head * DELTA_HEAD + slice * 32 + tid % 8 * 4);
        if (tid >= 128 && tid < 128 + count) {
            stage.gates[tid - 128] = gates[(first + tid - 128) * VALUE_HEADS + head];
            stage.product[tid - 128] = products[(first + tid - 128) * KEY_HEADS + key_head];
        }
        copy_commit();
    };
    load(0, stages[0]);
    for (int first = 0, turn = 0; first < tokens; first += SCAN_BATCH, turn ^= 1) {
        if (first + SCAN_BATCH < tokens) load(first + SCAN_BATCH, stages[turn ^ 1]);
        else copy_commit();
        copy_wait<1>();
        __syncthreads();
        const ScanStage& stage = stages[turn];
        const int count = min(SCAN_BATCH, tokens - first);
        for (int token = 0; token < count; token++) {
            float4 k[4];
            float sk = 0.0f, sq = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                k[i] = *(const float4*)&stage.k[token][32 * i + 4 * lane8];
                const float4 q = *(const float4*)&stage.q[token][32 * i + 4 * lane8];
                sk += s[i].x * k[i].x + s[i].y * k[i].y + s[i].z * k[i].z + s[i].w * k[i].w;
                sq += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
            }
            sk = sum_lanes<8>(sk), sq = sum_lanes<8>(sq);
            const float decay = stage.gates[token].x;
            const float e = stage.gates[token].y * (stage.v[token][row] - decay * sk);
            if (lane8 == 0)
                out[(u64)(first + token) * VALUE_WIDTH + head * DELTA_HEAD + slice * 32 + row] =
                    decay * sq + e * stage.product[token];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[i].x = decay * s[i].x + e * k[i].x, s[i].y = decay * s[i].y + e * k[i].y;
                s[i].z = decay * s[i].z + e * k[i].z, s[i].w = decay * s[i].w + e * k[i].w;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) ((float4*)state)[8 * i + lane8] = s[i];
}
