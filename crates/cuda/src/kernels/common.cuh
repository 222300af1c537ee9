// What all kernels share: types, PTX wrappers, the packed weight block, fixed-point activations.
//
// Sizes come from the prelude that is generated for the Shape (see plan.rs); nothing here or in a kernel is a literal of one
// model. One translation unit, no includes: NVRTC without headers compiles it.

typedef unsigned char u8;
typedef signed char s8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, per_sm) extern "C" __global__ void __launch_bounds__(threads, per_sm)

constexpr bool LITTLE_SHARED = SHARED_KIB < 163;   // then some kernels do with less
constexpr int HEAD = 256;        // width of an attention head
constexpr int ROTARY = 64;       // its leading dimensions that RoPE turns
constexpr int DELTA_HEAD = 128;  // width of a delta head
constexpr int GROUP = 64;        // inputs that share a scale and a bias
constexpr u32 FULL = 0xffffffffu;         // all lanes of a warp
#define INFINITY __int_as_float(0x7f800000)

// ---- A block of packed weights: 16 rows x 256 inputs.
//
// 4 bits: 4 groups x 32 lanes x 16 bytes of codes, then 32 lanes x 2 words (scale low, bias high, both BF16).
// 8 bits: 8 half groups x 32 lanes x 16 bytes, then the same 256 bytes.
// Lane 4g + t holds rows g and g + 8 and, of every 16 inputs, 4t .. 4t + 3, in the order in which mma.m16n8k32 takes its A
// operand: word 2m + r of a group has row g + 8r, inputs 32m + 4t .. in its low nibbles (8 bits: its own bytes) and those 16
// further on in the high ones. Its scale words are those of group t.
constexpr int BLOCK_ROWS = 16;
constexpr int BLOCK_INPUTS = 256;
constexpr int BLOCK4 = 2304;
constexpr int BLOCK8 = 4352;

// ---- A token's change of a delta head's state: S = decay * S + e k^T.
struct Update {
    float e[DELTA_HEAD], k[DELTA_HEAD];
    float decay, unused[3];
};
constexpr int KEPT = 3;    // most that are kept of a head before they are written with the next one

// ---- The step's row, in device memory so that a captured graph need not change.
struct Run {
    u16* kv;        // keys of all attention layers [layer, kv head, capacity, 256], then as many values; BF16
    float* conv;    // [delta layer, 4, conv width]: raw inputs of position p in slot p % 4
    float* delta;   // [delta layer, value head, 128 (value), 128 (key)]
    u32* tokens;    // [capacity], ids fed so far
    u32* sampled;   // the id that the state's last step sampled
    u32 capacity;
    u32 position;   // of the token that is fed
    u32 token;      // to feed; FROM_STATE: what `sampled` says
    u32 slot;       // of `results` for the next result
    // Sampling, see SamplingParams.
    u32 vocab_limit, top_k, penalty_start, masked;
    float temperature, top_p, min_p, repetition, presence, frequency;
    u32 biases;     // number of them
    u32 greedy;     // whether the raw logits decide alone
    u64 seed;
    Update* updates;   // [delta layer, value head, KEPT]: what is still to be applied to `delta`
    u64 applied;    // tokens from the first on that are all in `delta`
};
constexpr u32 FROM_STATE = 0xffffffffu;

// What the host reads of a row, in its memory.
struct Result {
    u32 id;
    u32 status;     // 0, or BAD_LOGITS, or EXCLUDED
};
constexpr u32 RESULTS = 256;     // slots of the ring
constexpr u32 BAD_LOGITS = 1;
constexpr u32 EXCLUDED = 2;

// ---- Programmatic dependent launch: `launch_dependents` lets the next kernel of the graph start, `wait_for_inputs` waits
// for the kernels before this one. What stands between may only read what no kernel of the last layer wrote.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Warps of a CTA that meet, `threads` of them in all; who arrives does not wait.
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// ---- Copies into shared memory.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy16(void* to, const void* from) { copy16(shared_address(to), from); }
DEVICE void copy8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- A warp's blocks on their way into shared memory, through DEPTH slots in turn. (Copies by Hopper's engine for them are no faster here.)
template <int BYTES, int DEPTH> struct BlockRing {
    static_assert(BYTES % 512 == 0 || BYTES % 512 == 256);
    char* slots;
    int filled, used;

    DEVICE BlockRing(char* slots) : slots(slots), filled(0), used(0) {}
    // By the whole warp, which is done with the slot.
    DEVICE void fetch(const char* from) {
        char* to = slots + filled * BYTES;
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < BYTES / 512; i++) copy16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
        if (BYTES % 512 && lane < 16) copy16(to + BYTES / 512 * 512 + lane * 16, from + BYTES / 512 * 512 + lane * 16);
        copy_commit();
        if (++filled == DEPTH) filled = 0;
    }
    // In the place of a fetch, where there is nothing more to fetch.
    DEVICE void fetch_nothing() { copy_commit(); }
    // The oldest of DEPTH blocks that were fetched.
    DEVICE const char* wait() {
        copy_wait<DEPTH - 1>();
        __syncwarp();
        return slots + used * BYTES;
    }
    // The oldest block is used up.
    DEVICE void next() {
        __syncwarp();
        if (++used == DEPTH) used = 0;
    }
};

// Shared memory by its address, which stays one register over a loop where the compiler would make a pointer anew in every turn.
DEVICE uint4 load_shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE void store_shared(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
// A number that the compiler takes as it is, so that nothing is made anew from what it came from.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE float4 load_cg(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
DEVICE float load_cg(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// ---- Numbers.
DEVICE float bf16_low(u32 word) { return __uint_as_float(word << 16); }
DEVICE float bf16_high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
DEVICE u32 to_bf16(float x) {  // nearest, ties to even; NaN stays NaN
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
DEVICE u32 round_pair(float low, float high) {  // the same in one instruction, where there is no NaN
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE u32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
// Quotients and roots by the special function units: two units in the last place, and no slow path.
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
DEVICE float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
DEVICE float inverse_root(float x) { return rsqrtf(x); }

template <int WIDTH> DEVICE float sum_lanes(float x) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
}
template <int WIDTH> DEVICE float max_lanes(float x) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, d));
    return x;
}

// ---- Activations as 16-bit fixed point in two signed bytes: of a group of 64, q = round(x * 32512 / max |x|) = 256 high + low,
// so that products with codes are exact in integers. NaN and infinity reach the group's sum and through it every output.
constexpr float FIXED_LARGEST = 32512.0f;
constexpr float FIXED_NOTHING = 1e-30f;    // a group without larger values counts as zeros
constexpr float ROUNDER = 12582912.0f;     // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
DEVICE float fixed_inverse(float largest) { return largest > FIXED_NOTHING ? __fdividef(FIXED_LARGEST, largest) : 0.0f; }
// NaN stays NaN.
DEVICE float fixed_scale(float largest) { return largest <= FIXED_NOTHING ? 0.0f : largest * (1.0f / FIXED_LARGEST); }
DEVICE float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
// Low (HIGH = false) or high bytes of four rounded values, in order.
template <bool HIGH> DEVICE u32 fixed_bytes(u32 a, u32 b, u32 c, u32 d) {
    if (HIGH) {
        a += 128, b += 128, c += 128, d += 128;
        return __byte_perm(__byte_perm(a, b, 0x51), __byte_perm(c, d, 0x51), 0x5410);
    }
    return __byte_perm(__byte_perm(a, b, 0x40), __byte_perm(c, d, 0x40), 0x5410);
}

DEVICE void mma_u8_s8(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
constexpr u32 NIBBLES = 0x0f0f0f0fu;

// ---- The choice of experts: one warp, ids of the highest logits, lowest first on ties, in falling order. Lane i < TOP_K gets
// the i-th id and its weight, the softmax over the chosen.
struct Choice {
    u32 id;
    float weight;
};
DEVICE u32 order_key(float x) {  // larger floats have larger keys; -0 counts as 0
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// `chosen` [TOP_K] is the warp's, in shared memory. Small loops: all code of a step together is more than what a processor keeps.
DEVICE Choice choose_experts(const float* logits, int lane, uint2* chosen) {
    constexpr int PER_LANE = (EXPERTS + 31) / 32;
    u32 keys[PER_LANE], ids[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        ids[i] = i * 32 + lane;
        // Key 0 is below that of every number.
        keys[i] = ids[i] < EXPERTS ? order_key(load_cg(logits + ids[i])) : 0;
    }
    // Each lane's keys in falling order; equal ones stay in the order of their ids, because only neighbours change places.
#pragma unroll 1
    for (int step = 0; step < PER_LANE; step += 2)
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int i = odd; i + 1 < PER_LANE; i += 2) {
                const bool swap = keys[i] < keys[i + 1];
                const u32 key = keys[i], id = ids[i];
                keys[i] = swap ? keys[i + 1] : key, keys[i + 1] = swap ? key : keys[i + 1];
                ids[i] = swap ? ids[i + 1] : id, ids[i + 1] = swap ? id : ids[i + 1];
            }
#pragma unroll 1
    for (int round = 0; round < TOP_K; round++) {
        const u32 highest = __reduce_max_sync(FULL, keys[0]);
        u32 holders = __ballot_sync(FULL, keys[0] == highest);
        // Of equal ones the lowest id, which is rarely needed.
        if (holders & (holders - 1)) {
            const u32 lowest = __reduce_min_sync(FULL, keys[0] == highest ? ids[0] : 0xffffffffu);
            holders = __ballot_sync(FULL, keys[0] == highest && ids[0] == lowest);
        }
        if (lane == __ffs(holders) - 1) {
            chosen[round] = make_uint2(ids[0], highest);
#pragma unroll
            for (int i = 0; i + 1 < PER_LANE; i++) keys[i] = keys[i + 1], ids[i] = ids[i + 1];
            keys[PER_LANE - 1] = 0;
        }
    }
    __syncwarp();
    const uint2 own = lane < TOP_K ? chosen[lane] : make_uint2(0, 0);
    const float logit = __uint_as_float(own.y & 0x80000000u ? own.y & 0x7fffffffu : ~own.y);
    const float top = __shfl_sync(FULL, logit, 0);
    const float weight = lane < TOP_K ? expf(logit - top) : 0.0f;
    return Choice{own.x, weight / sum_lanes<32>(weight)};
}
