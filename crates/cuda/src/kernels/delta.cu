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

// ---- Updates of a head's state that are kept instead of written. Writing a state of 64 KB takes as long as reading it, an update has
// 1 KB: rows that share a pass write a head's state once in KEPT + 1 tokens, and apply what was kept in between, one after the other, each
// time they have read it. The state has the bits that it has when every token writes it. Heads take turns.
DEVICE bool writes_state(u32 position, int head) { return (position + head) % (KEPT + 1) == KEPT; }
// How many updates are kept of a head when the token of `position` comes; that of a position lies in slot position % KEPT.
DEVICE u32 updates_kept(u32 position, u32 applied, int head) { return min(position - applied, (position + head) % (KEPT + 1)); }

DEVICE void update(float4& s, float decay, float e, float4 k) {
    s.x = __fmaf_rn(s.x, decay, __fmul_rn(e, k.x)), s.y = __fmaf_rn(s.y, decay, __fmul_rn(e, k.y));
    s.z = __fmaf_rn(s.z, decay, __fmul_rn(e, k.z)), s.w = __fmaf_rn(s.w, decay, __fmul_rn(e, k.w));
}
// Applies a kept update to rows row, row + 32, ... of a state, of which a lane has 4 columns from 4 lane16 and from 64 + 4 lane16 on.
DEVICE void apply(const Update& kept, float4 (&s)[4][2], int row, int lane16) {
    const float4 k0 = *(const float4*)(kept.k + 4 * lane16), k1 = *(const float4*)(kept.k + 64 + 4 * lane16);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const float e = kept.e[p * 32 + row];
        update(s[p][0], kept.decay, e, k0), update(s[p][1], kept.decay, e, k1);
    }
}

// Brings a state up to the run's position: all kept updates are applied and written. A CTA for each head, blockIdx.x, and delta layer,
// blockIdx.y.
KERNEL(512, 2) apply_updates(const Run* run) {
    const int head = blockIdx.x, row = threadIdx.x >> 4, lane16 = threadIdx.x & 15;
    const u32 position = run->position, kept = updates_kept(position, (u32)run->applied, head);
    if (kept == 0) return;
    const u64 at = (u64)blockIdx.y * VALUE_HEADS + head;
    float4* state = (float4*)(run->delta + (at * DELTA_HEAD + row) * DELTA_HEAD) + lane16;
    float4 s[4][2];
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int i = 0; i < 2; i++) s[p][i] = load_cg(state + p * 8 * DELTA_HEAD + 16 * i);
    for (u32 i = kept; i > 0; i--) apply(run->updates[at * KEPT + (position - i) % KEPT], s, row, lane16);
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int i = 0; i < 2; i++) state[p * 8 * DELTA_HEAD + 16 * i] = s[p][i];
}

// A lane's part of q or k, times the scale.
DEVICE void load_scaled(float4 (&to)[2], const float* from, float scale, int lane16) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        to[i] = *(const float4*)(from + 64 * i + 4 * lane16);
        to[i].x *= scale, to[i].y *= scale, to[i].z *= scale, to[i].w *= scale;
    }
}
// A lane's part of a product over the columns.
DEVICE float dot(const float4 (&a)[2], const float4 (&b)[2]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) sum += a[i].x * b[i].x + a[i].y * b[i].y + a[i].z * b[i].z + a[i].w * b[i].w;
    return sum;
}
// What gives q or k unit length, from the sums of squares of its four parts.
DEVICE float unit_scale(const float* sums) { return inverse_root(sums[0] + sums[1] + sums[2] + sums[3] + UNIT_EPS); }

// ---- The step's one row, four CTAs a head, each of which has a slice of 32 rows of its state; 512 threads, 16 lanes a row.
// In: projected [PROJ_DELTA], taps [CONV_WIDTH, 4], rates = exp(A_log), dt_bias [VALUE_HEADS], norm [128].
// Out: out [VALUE_WIDTH], o * norm * silu(z) without the norm's scale, and squares [VALUE_HEADS, 4], of o in each slice.
// Bytes moved: the state read and written, 2 x 16 KB a slice.
// Two CTAs have room on a processor, one of this kernel and one of a neighbour: see `gemv.rs`.
KERNEL(512, 2)
delta_step(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
           const float* norm, float* out, float* squares) {
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3;
    launch_dependents();
    if (head >= VALUE_HEADS) return wait_for_inputs();
    __shared__ float qs[DELTA_HEAD], ks[DELTA_HEAD], vs[32], sums[8], gates[2], outputs[32];
    const int key_head = head / VALUES_PER_KEY, first = head * DELTA_HEAD + slice * 32;   // of the values
    const int tid = threadIdx.x, row = tid >> 4, lane16 = tid & 15, lane = tid & 31;
    // What the token before left is there: a whole pass of kernels lies between.
    float* state = run->delta + ((u64)layer * VALUE_WIDTH + first + row) * DELTA_HEAD;
    float4 s[2];
#pragma unroll
    for (int i = 0; i < 2; i++) s[i] = load_cg((const float4*)state + 16 * i + lane16);
    const u32 position = run->position;
    int channel = -1;
    bool owner = true;
    if (tid < 2 * DELTA_HEAD) {
        channel = (tid >= DELTA_HEAD ? KEY_WIDTH : 0) + key_head * DELTA_HEAD + tid % DELTA_HEAD;
        owner = slice == 0 && head % VALUES_PER_KEY == 0;
    } else if (tid < 2 * DELTA_HEAD + 32) {
        channel = 2 * KEY_WIDTH + first + tid - 2 * DELTA_HEAD;
    }
    const float rate = __ldg(rates + head), bias = __ldg(dt_bias + head);
    float norm_weight = 0.0f, z = 0.0f;
    if (tid < 32) norm_weight = __ldg(norm + slice * 32 + tid);
    float u[3];
    float4 tap;
    if (channel >= 0) {
#pragma unroll
        for (int i = 0; i < 3; i++) u[i] = load_cg(history_slot(run->conv, layer, position + 1 + i) + channel);
        tap = __ldg(taps + channel);
    }
    wait_for_inputs();
    if (tid < 32) z = load_cg(projected + PROJ_Z + first + tid);
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
    __syncthreads();
    const float q_scale = unit_scale(sums) * inverse_root((float)DELTA_HEAD), k_scale = unit_scale(sums + 4), decay = gates[0];
    float4 k[2], q[2];
    load_scaled(k, ks, k_scale, lane16), load_scaled(q, qs, q_scale, lane16);
    const float kq = sum_lanes<16>(dot(k, q));
    const float sk = sum_lanes<16>(dot(s, k)), sq = sum_lanes<16>(dot(s, q)), e = gates[1] * (vs[row] - decay * sk);
    if (lane16 == 0) outputs[row] = __fmaf_rn(decay, sq, __fmul_rn(e, kq));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        update(s[i], decay, e, k[i]);
        ((float4*)state)[16 * i + lane16] = s[i];
    }
    __syncthreads();
    if (tid < 32) {
        const float o = outputs[tid], square = sum_lanes<32>(o * o);
        out[first + tid] = o * norm_weight * silu(z);
        if (tid == 0) squares[head * 4 + slice] = square;
    }
}
