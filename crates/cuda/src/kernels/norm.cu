// Activations of many tokens: embedding, norms, and rounding to fixed point for the linears that follow.
//
// Fixed-point rows of `width` inputs (whole blocks of 256, zeros beyond the real ones) lie as two planes of bytes, high and low,
// [rows, width], and per group of 64 the scale and the sum of its rounded values, [rows, width / 64].
// 16 lanes make a group, 4 values each. Bytes moved: each input once, 2 bytes and an eighth for each output.
// Reference: lily_reference::ops::{rms_norm, gated_norm}.

struct FixedRows {
    u8* high;
    u8* low;
    float2* groups;
    int width;
};

DEVICE void store_fixed(const FixedRows& out, u64 row, int k, float4 v) {
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    largest = max_lanes<16>(largest);
    const float inverse = fixed_inverse(largest);
    const float x = v.x * inverse + ROUNDER, y = v.y * inverse + ROUNDER, z = v.z * inverse + ROUNDER,
                w = v.w * inverse + ROUNDER;
    const float sum = sum_lanes<16>((x - ROUNDER) + (y - ROUNDER) + (z - ROUNDER) + (w - ROUNDER));
    const u32 a = __float_as_uint(x), b = __float_as_uint(y), c = __float_as_uint(z), d = __float_as_uint(w);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const u64 at = row * out.width + k;
#else
    // Within a group the four inputs 16i + 4t .. come at byte 16t + 4i, so that a lane of mma finds its bytes together.
    const u64 at = row * out.width + k / GROUP * GROUP + k / 4 % 4 * 16 + k / 16 % 4 * 4;
#endif
    *(u32*)(out.high + at) = fixed_bytes<true>(a, b, c, d);
    *(u32*)(out.low + at) = fixed_bytes<false>(a, b, c, d);
    if (k % GROUP == 0) {
        const float scale = fixed_scale(largest);
        out.groups[at / GROUP] = make_float2(scale, scale * sum);
    }
}

// ---- Tokens to the residual stream. Grid [tokens], 256 threads. `ids`: what to feed, or null for each run's own token.
// `turns` [tokens, 32], or null: the turns of RoPE at each run's position, for all attention layers.
KERNEL(256, 4)
embed(const Run* run, const u32* ids, const u8* codes, const u16* scales, const u16* biases, float* h, float2* turns) {
    if (!ids) run += blockIdx.x;
    const u32 id = ids ? ids[blockIdx.x] : run->token == FROM_STATE ? *run->sampled : run->token;
    launch_dependents();
    wait_for_inputs();
    if (threadIdx.x == 0) run->tokens[run->position + (ids ? blockIdx.x : 0)] = id;
    if (turns && threadIdx.x < ROTARY / 2) turns[blockIdx.x * (ROTARY / 2) + threadIdx.x] = rope_turn(threadIdx.x, run->position);
    for (int k = threadIdx.x * 8; k < HIDDEN; k += 256 * 8) {
        const u32 word = *(const u32*)(codes + ((u64)id * HIDDEN + k) / 2);
        const u64 group = ((u64)id * HIDDEN + k) / GROUP;
        const float scale = bf16_low(scales[group]), bias = bf16_low(biases[group]);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __fadd_rn(__fmul_rn(scale, (float)(word >> 4 * i & 15)), bias);
        float4* to = (float4*)(h + (u64)blockIdx.x * HIDDEN + k);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}

// ---- Norm of the residual stream h [rows, HIDDEN]. Grid [rows], 256 threads.
KERNEL(256, 4) norm_rows(const float* h, const float* weight, FixedRows out) {
    __shared__ float sums[8];
    constexpr int PER_THREAD = (HIDDEN + 1023) / 1024;
    const float* row = h + (u64)blockIdx.x * HIDDEN;
    float4 v[PER_THREAD];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int k = i * 1024 + threadIdx.x * 4;
        v[i] = k < HIDDEN ? *(const float4*)(row + k) : make_float4(0, 0, 0, 0);
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    sum = sum_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += sums[i];
    const float scale = inverse_root(sum / HIDDEN + RMS_EPS);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int k = i * 1024 + threadIdx.x * 4;
        // Whole warps leave together: HIDDEN is a multiple of 256.
        if (k >= HIDDEN) continue;
        const float4 w = __ldg((const float4*)(weight + k));
        store_fixed(out, blockIdx.x, k,
                    make_float4(v[i].x * scale * w.x, v[i].y * scale * w.y, v[i].z * scale * w.z, v[i].w * scale * w.w));
    }
}

// ---- x [rows, inputs] as it is. Grid covers rows * width / 4 threads.
KERNEL(256, 4) fix_rows(const float* x, int rows, int inputs, FixedRows out) {
    const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
    const u64 row = at / out.width;
    const int k = at % out.width;
    // Whole warps leave together: the width is a multiple of 256.
    if (row >= rows) return;
    store_fixed(out, row, k, k < inputs ? *(const float4*)(x + row * inputs + k) : make_float4(0, 0, 0, 0));
}

// ---- The gated norm of a delta layer: o [rows, VALUE_WIDTH], z in projected. A warp per head and 128 values.
KERNEL(256, 4) delta_norm(const float* o, const float* projected, const float* weight, int rows, FixedRows out) {
    const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
    const u64 row = at / out.width;
    const int k = at % out.width;
    if (row >= rows) return;
    float4 v = make_float4(0, 0, 0, 0);
    if (k < VALUE_WIDTH) {
        v = *(const float4*)(o + row * VALUE_WIDTH + k);
        const float sum = sum_lanes<32>(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w);
        const float scale = inverse_root(sum / DELTA_HEAD + RMS_EPS);
        const float4 z = *(const float4*)(projected + row * PROJ_DELTA + PROJ_Z + k);
        const float4 w = __ldg((const float4*)(weight + k % DELTA_HEAD));
        v = make_float4(v.x * scale * w.x * silu(z.x), v.y * scale * w.y * silu(z.y), v.z * scale * w.z * silu(z.z),
                        v.w * scale * w.w * silu(z.w));
    }
    store_fixed(out, row, k, v);
}
