// The gated delta rule, one token at a time: convolution, decay, the recurrence, and the norm of its output. Many tokens take
// delta_wide.cu and delta_scan.cu.
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
