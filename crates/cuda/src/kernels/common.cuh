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

// ---- Pieces of up to BYTES bytes on their way into a CTA's shared memory, each into one of some slots.
template <int SLOTS, int BYTES> struct PieceRing {
    char slots[SLOTS][BYTES];
    u64 arrived[SLOTS];

#if __CUDA_ARCH__ >= 900
    static constexpr bool ENGINE = true;
    // One thread asks the copy engine. Turns of a slot are even and odd.
    DEVICE void begin() {
        if (threadIdx.x == 0)
#pragma unroll
            for (int i = 0; i < SLOTS; i++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + i)) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
    }
    DEVICE void fetch(int slot, const char* from, int bytes) {
        if (threadIdx.x) return;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived + slot)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(slots[slot])),
                     "l"(from), "r"(bytes), "r"(shared_address(arrived + slot))
                     : "memory");
    }
    DEVICE void fetched() {}
    template <int PENDING> DEVICE void ready() {}
    DEVICE void wait(int slot, int turn) {
        asm volatile(
            "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(
                shared_address(arrived + slot)),
            "r"(turn)
            : "memory");
    }
#else
    static constexpr bool ENGINE = false;
    DEVICE void begin() {}
    DEVICE void fetch(int slot, const char* from, int bytes) {
        for (int at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) copy16(slots[slot] + at, from + at);
        copy_commit();
    }
    // A group of copies stands for every piece, also for those that are not there.
    DEVICE void fetched() { copy_commit(); }
    // To be called before the CTA meets, behind which all pieces but PENDING are there.
    template <int PENDING> DEVICE void ready() { copy_wait<PENDING>(); }
    DEVICE void wait(int, int) {}
#endif
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

// ---- The choice of experts: one warp, ids of the highest logits, lowest first on ties, in falling order.
DEVICE u32 order_key(float x) {  // larger floats have larger keys; -0 counts as 0
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// A lane's logits: of experts lane, lane + 32, ...
struct LaneLogits {
    static constexpr int COUNT = (EXPERTS + 31) / 32;
    float of[COUNT];
    DEVICE LaneLogits(const float* logits, int lane) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) of[i] = load_cg(logits + min(i * 32 + lane, EXPERTS - 1));
    }
};
// Ids of the chosen to `chosen` [TOP_K], the warp's in shared memory: for any logits.
DEVICE void pick_carefully(const LaneLogits& logits, int lane, u32* chosen) {
    u32 taken = 0;
#pragma unroll 1
    for (int round = 0; round < TOP_K; round++) {
        u32 key = 0, id = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < LaneLogits::COUNT; i++) {
            // Key 0 is below that of every number.
            const u32 own = i * 32 + lane < EXPERTS && !(taken >> i & 1) ? max(order_key(logits.of[i]), 1u) : 0;
            if (own > key) key = own, id = i * 32 + lane;
        }
        const u32 highest = __reduce_max_sync(FULL, key), lowest = __reduce_min_sync(FULL, key == highest ? id : 0xffffffffu);
        if (id == lowest) chosen[round] = id, taken |= 1u << id / 32;
    }
}
// The same, at once where the logits differ by more than their last three bits: there the number of a logit stands among its lane's. Small
// loops: all code of a step together is more than what a processor keeps.
DEVICE void pick_experts(const LaneLogits& logits, int lane, u32* chosen) {
    constexpr int COUNT = LaneLogits::COUNT;
    constexpr u32 NUMBER = 7;
    static_assert(COUNT <= 8);
    u32 keys[COUNT], found = 0, last = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < COUNT; i++) keys[i] = i * 32 + lane < EXPERTS ? order_key(logits.of[i]) & ~NUMBER | NUMBER - i : 0;
    // Each lane's in falling order.
#pragma unroll 1
    for (int step = 0; step < COUNT; step += 2)
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int i = odd; i + 1 < COUNT; i += 2) {
                const u32 low = min(keys[i], keys[i + 1]);
                keys[i] = max(keys[i], keys[i + 1]), keys[i + 1] = low;
            }
    bool differ = true;
#pragma unroll 1
    for (int round = 0; round <= TOP_K; round++) {
        const u32 highest = __reduce_max_sync(FULL, keys[0]);
        differ = differ && (highest ^ last) > NUMBER;
        last = highest;
        const bool own = keys[0] == highest && round < TOP_K;
        if (own) chosen[round] = (NUMBER - highest % (NUMBER + 1)) * 32 + lane;
        found += own;
#pragma unroll
        for (int i = 0; i + 1 < COUNT; i++) keys[i] = own ? keys[i + 1] : keys[i];
        keys[COUNT - 1] = own ? 0 : keys[COUNT - 1];
    }
    __syncwarp();
    // Of equal ones in different lanes more than one was found.
    if (!differ || __reduce_add_sync(FULL, found) != TOP_K) pick_carefully(logits, lane, chosen);
    __syncwarp();
}
// The weight of the lane-th of those, the softmax over them; nothing from the TOP_K-th lane on.
DEVICE float weigh_chosen(const LaneLogits& logits, const u32* chosen, int lane) {
    const u32 id = lane < TOP_K ? chosen[lane] : 0;
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < LaneLogits::COUNT; i++) {
        const float other = __shfl_sync(FULL, logits.of[i], id % 32);
        if (id / 32 == i) logit = other;
    }
    const float top = __shfl_sync(FULL, logit, 0);
    const float weight = lane < TOP_K ? expf(logit - top) : 0.0f;
    return weight / sum_lanes<32>(weight);
}
