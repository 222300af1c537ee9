// Linears of one token: the phases of decoding that stream weights.
//
// A CTA of 16 warps takes tiles blockIdx.x, blockIdx.x + gridDim.x, ...; its warps share the blocks of a tile, each through two
// slots of shared memory that are filled before the inputs are waited for. Every warp converts its own part of x to fixed point:
// in mma columns 2j and 2j + 1 stand high and low bytes of group j, so one pass of integer mma gives four groups.
// Partial sums meet in shared memory and are added in a fixed order. Bytes moved: the weights once.
// Reference: lily_reference::ops::linear.

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * 32;
constexpr int SLOTS = 2;
constexpr int PROJECT_SLOTS = LITTLE_SHARED ? 2 : 3;   // of the projections, whose warps have about three blocks each

// x of one block in a lane: bytes for the B operand, and of group t the scale and the sum.
struct Fixed {
    u32 bytes[16];
    float scale, sum;
};

// A lane's part of a block in fixed point: of group g / 2 the four words of high (g even) or low bytes, its scale and its sum.
struct FixedLane {
    u32 words[4];
    float scale, sum;
};

// Where a lane's 8 values of a block begin: of group g / 2 four inputs from 32 (g % 2) + 4t on, and four 16 further on.
DEVICE int lane_start(int block, int lane) {
    return block * BLOCK_INPUTS + (lane >> 3) * GROUP + (lane >> 2 & 1) * 32 + (lane & 3) * 4;
}
DEVICE void load_lane(float* v, const float* from) {
    const float4 a = load_cg((const float4*)from), b = load_cg((const float4*)(from + 16));
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// From a lane's 8 values. Every value is rounded once; lanes with even and odd g then give each other the bytes they lack.
DEVICE FixedLane fix_lane(const float* v, int lane) {
    float largest = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) largest = max_or_nan(largest, fabsf(v[i]));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = max_or_nan(largest, __shfl_xor_sync(FULL, largest, d));
    const float inverse = fixed_inverse(largest);
    u32 q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = __float_as_uint(__fmaf_rn(v[i], inverse, ROUNDER));
    u32 high[2], low[2];
    int sum_high = 0, sum_low = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        high[i] = fixed_bytes<true>(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
        low[i] = fixed_bytes<false>(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
        sum_high = __dp4a((int)high[i], 0x01010101, sum_high);
        sum_low = __dp4a((int)low[i], 0x01010101, sum_low);
    }
    int sum = sum_high * 256 + sum_low;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
    const bool odd = lane >> 2 & 1;
    FixedLane own;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 other = __shfl_xor_sync(FULL, odd ? high[i] : low[i], 4);
        own.words[i] = odd ? other : high[i];
        own.words[i + 2] = odd ? low[i] : other;
    }
    own.scale = fixed_scale(largest);
    own.sum = own.scale * (float)sum;
    return own;
}

DEVICE void make_fixed(Fixed& x, const float* v, int lane) {
    const FixedLane own = fix_lane(v, lane);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x.bytes[4 * j + i] = lane >> 3 == j ? own.words[i] : 0u;
    x.scale = __shfl_sync(FULL, own.scale, (lane & 3) * 8);
    x.sum = __shfl_sync(FULL, own.sum, (lane & 3) * 8);
}

// What a group adds to an output: `dot` of codes and fixed-point inputs. One order of operations, so that one token and several
// (rows.cu) have the same bits.
DEVICE float group_term(u32 scale_and_bias, float scale, float sum, int high, int low) {
    const float dot = (float)(high * 256 + low);
    return __fmaf_rn(__fmul_rn(bf16_low(scale_and_bias), scale), dot, __fmul_rn(bf16_high(scale_and_bias), sum));
}

// Outputs of a tile, from those of its blocks [BLOCKS, 16]: even blocks, odd ones, and both. Lanes i and i + 16 get row i.
template <int BLOCKS> DEVICE float tile_sum(const float* partial, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < (BLOCKS + 1) / 2; block++)
        if (2 * block + (lane >> 4) < BLOCKS) sum += partial[(2 * block + (lane >> 4)) * BLOCK_ROWS + (lane & 15)];
    return sum + __shfl_xor_sync(FULL, sum, 16);
}

// A block's 16 outputs to `out` [16].
template <int BITS> DEVICE void block_times_x(const char* block, const Fixed& x, int lane, float* out) {
    int c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (BITS == 4) {
            const uint4 w = *(const uint4*)(block + j * 512 + lane * 16);
            mma_u8_s8(c[0], w.x & NIBBLES, w.y & NIBBLES, w.x >> 4 & NIBBLES, w.y >> 4 & NIBBLES, x.bytes[4 * j],
                      x.bytes[4 * j + 1]);
            mma_u8_s8(c[1], w.z & NIBBLES, w.w & NIBBLES, w.z >> 4 & NIBBLES, w.w >> 4 & NIBBLES, x.bytes[4 * j + 2],
                      x.bytes[4 * j + 3]);
        } else {
            const uint4 a = *(const uint4*)(block + j * 1024 + lane * 16);
            const uint4 b = *(const uint4*)(block + j * 1024 + 512 + lane * 16);
            mma_u8_s8(c[0], a.x, a.y, a.z, a.w, x.bytes[4 * j], x.bytes[4 * j + 1]);
            mma_u8_s8(c[1], b.x, b.y, b.z, b.w, x.bytes[4 * j + 2], x.bytes[4 * j + 3]);
        }
    }
    const uint2 s = *(const uint2*)(block + (BITS == 4 ? 2048 : 4096) + lane * 8);
    const float y0 = group_term(s.x, x.scale, x.sum, c[0][0] + c[1][0], c[0][1] + c[1][1]);
    const float y1 = group_term(s.y, x.scale, x.sum, c[0][2] + c[1][2], c[0][3] + c[1][3]);
    // Over the groups: lanes 0 and 1 of each quad end with row g, lanes 2 and 3 with row g + 8.
    const bool second = lane & 2;
    float y = (second ? y1 : y0) + __shfl_xor_sync(FULL, second ? y0 : y1, 2);
    y += __shfl_xor_sync(FULL, y, 1);
    if ((lane & 1) == 0) out[(lane >> 2) + (second ? 8 : 0)] = y;
}

// The tiles of a CTA. `Address(tile, block)` is where a block lies.
template <int BLOCKS, int BITS, int DEPTH = SLOTS> struct Tiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8;
    // Tiles whose partial sums fit beside each other; about three blocks per warp.
    static constexpr int CHUNK = BLOCKS >= 3 * WARPS ? 1 : 3 * WARPS / BLOCKS;
    static constexpr int CHUNK_BLOCKS = CHUNK * BLOCKS;

    struct Shared {
        float partial[CHUNK_BLOCKS * BLOCK_ROWS];
        float squares[WARPS];
    };

    // A walk over this warp's blocks, chunk by chunk.
    struct Walk {
        int chunk, at;
        DEVICE void next(int warp) {
            at += WARPS;
            if (at >= CHUNK_BLOCKS) {
                at = warp;
                chunk++;
            }
        }
    };

    BlockRing<BYTES, DEPTH> ring;
    int warp, lane, first_tile, stride, count;
    Walk ahead;

    // Tiles cta, cta + ctas, ... below `tiles`; the slots lie in `slots`.
    DEVICE Tiles(char* slots, int tiles, int cta, int ctas)
        : ring(slots + (threadIdx.x >> 5) * DEPTH * BYTES) {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        first_tile = cta, stride = ctas;
        count = tiles > cta ? (tiles - cta - 1) / ctas + 1 : 0;
        ahead = Walk{0, warp};
    }
    DEVICE Tiles(char* slots, int tiles) : Tiles(slots, tiles, blockIdx.x, gridDim.x) {}

    DEVICE int tile_of(int index) const { return first_tile + index * stride; }

    template <class Address> DEVICE void fill_slot(Address address) {
        // A warp with more warps than a chunk has blocks never has any.
        const int index = ahead.chunk * CHUNK + ahead.at / BLOCKS;
        if (ahead.at < CHUNK_BLOCKS && index < count) {
            ring.fetch(address(tile_of(index), ahead.at % BLOCKS));
            ahead.next(warp);
        } else {
            ring.fetch_nothing();
        }
    }

    template <class Address> DEVICE void fill(Address address) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) fill_slot(address);
    }

    // One slot after the other: so much on the way keeps memory busy, and more would delay the inputs of the kernel before.
    template <class Address> DEVICE void fill_slowly(Address address) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            copy_wait<0>();
            fill_slot(address);
        }
    }

    // `load(x, block)` makes the fixed-point input of a block; `finish(tile, lane, sum)` is called by a whole warp for each
    // tile, lanes i and i + 16 with the sum of row i.
    template <class Address, class Load, class Finish>
    DEVICE void run(Shared& shared, Address address, Load load, Finish finish) {
        Fixed x;
        const bool any = warp < min(CHUNK, count) * BLOCKS;
        if (any) load(x, warp % BLOCKS);
        run(shared, address, load, finish, x);
    }
    // The same, where x is that of the warp's first block already.
    template <class Address, class Load, class Finish>
    DEVICE void run(Shared& shared, Address address, Load load, Finish finish, Fixed& x) {
        int current = warp % BLOCKS;
        for (int first = 0; first < count; first += CHUNK) {
            const int tiles = min(CHUNK, count - first), blocks = tiles * BLOCKS;
            for (int at = warp; at < blocks; at += WARPS) {
                // Often a warp has the same block of every tile.
                if (WARPS % BLOCKS != 0 && at % BLOCKS != current) {
                    current = at % BLOCKS;
                    load(x, current);
                }
                block_times_x<BITS>(ring.wait(), x, lane, shared.partial + at * BLOCK_ROWS);
                ring.next();
                fill_slot(address);
            }
            __syncthreads();
            for (int i = warp; i < tiles; i += WARPS) {
                finish(tile_of(first + i), lane, tile_sum<BLOCKS>(shared.partial + i * BLOCKS * BLOCK_ROWS, lane));
            }
            if (first + CHUNK < count) __syncthreads();
        }
    }
};

// Input of a phase that begins with a norm: h * weight. The scale of the norm, one number, is applied to the outputs; the sums of
// squares that it needs are left by warps 0 .. BLOCKS - 1, whose first block is their own number.
constexpr int HIDDEN_BLOCKS = HIDDEN / BLOCK_INPUTS;
static_assert(HIDDEN % BLOCK_INPUTS == 0 && HIDDEN_BLOCKS <= WARPS, "the norm needs a warp per block");

// A lane's values times the norm's weights; the block's sum of squares before that.
DEVICE float normed(float* v, const float* weights) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i] * v[i];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= weights[i];
    return sum_lanes<32>(sum);
}
// A norm's weights; those of a warp's first block are fetched before the inputs are waited for.
struct NormWeights {
    const float* all;
    float first[8];
    int warp, lane;

    DEVICE NormWeights(const float* weights) : all(weights), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {
        load_lane(first, all + lane_start(warp % HIDDEN_BLOCKS, lane));
    }
    // A lane's values of a block times the weights; the block's sum of squares is left.
    DEVICE void apply(float* v, int block, float* squares) const {
        float sum;
        if (WARPS % HIDDEN_BLOCKS == 0 || warp % HIDDEN_BLOCKS == block) {
            sum = normed(v, first);
        } else {
            float weights[8];
            load_lane(weights, all + lane_start(block, lane));
            sum = normed(v, weights);
        }
        if (warp == block && lane == 0) squares[warp] = sum;
    }
    // The fixed-point input of a block.
    DEVICE void load(Fixed& x, const float* h, int block, float* squares) const {
        float v[8];
        load_lane(v, h + lane_start(block, lane));
        apply(v, block, squares);
        make_fixed(x, v, lane);
    }
};
DEVICE float norm_scale(const float* squares) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HIDDEN_BLOCKS; i++) sum += squares[i];
    return inverse_root(sum / HIDDEN + RMS_EPS);
}

extern __shared__ __align__(128) char dynamic_shared[];

// ---- Norm and the projections of a mixer: h [HIDDEN] to out [16 tiles].
KERNEL(THREADS, 2) norm_project(const char* weights, int tiles, const float* h, const float* norm, float* out) {
    typedef Tiles<HIDDEN_BLOCKS, 4, PROJECT_SLOTS> T;
    __shared__ T::Shared shared;
    T t(dynamic_shared, tiles);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
    launch_dependents();
    const NormWeights weights_of_norm(norm);
    t.fill_slowly(address);
    wait_for_inputs();
    t.run(
        shared, address, [&](Fixed& x, int block) { weights_of_norm.load(x, h, block, shared.squares); },
        [&](int tile, int lane, float sum) {
            sum *= norm_scale(shared.squares);
            if (lane < 16) out[tile * 16 + lane] = sum;
        });
}

// The stream's values of a warp's first tile, fetched while the linear is computed.
struct Residual {
    float old;
    int tile;
    template <class T> DEVICE Residual(const T& t, const float* h) {
        tile = t.warp < t.count ? t.tile_of(t.warp) : -1;
        old = tile >= 0 ? load_cg(h + tile * 16 + (t.lane & 15)) : 0.0f;
    }
    DEVICE float at(const float* h, int at_tile, int lane) const {
        return at_tile == tile ? old : load_cg(h + at_tile * 16 + (lane & 15));
    }
    DEVICE void add(float* h, int at_tile, int lane, float sum) const {
        if (lane < 16) h[at_tile * 16 + lane] = at(h, at_tile, lane) + sum;
    }
};

// ---- Output projections, added to h. x [QUERY_WIDTH] of an attention layer; that of a delta layer [VALUE_WIDTH] lacks the scale of the
// gated norm, which follows from the sums of squares [value head, 4].
constexpr int VALUE_BLOCKS = (VALUE_WIDTH + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
constexpr int QUERY_BLOCKS = QUERY_WIDTH / BLOCK_INPUTS;
// Of a delta head, from its four sums of squares.
DEVICE float gated_norm_scale(float4 squares) {
    return inverse_root((squares.x + squares.y + squares.z + squares.w) / DELTA_HEAD + RMS_EPS);
}
template <int BLOCKS, bool NORMED>
DEVICE void output(const char* weights, const float* x_in, const float* squares, float* h) {
    typedef Tiles<BLOCKS, 4> T;
    __shared__ typename T::Shared shared;
    T t(dynamic_shared, HIDDEN / 16);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * BLOCKS + block) * BLOCK4; };
    launch_dependents();
    t.fill(address);
    wait_for_inputs();
    const Residual residual(t, h);
    t.run(
        shared, address,
        [&](Fixed& x, int block) {
            float v[8];
            const int k = lane_start(block, t.lane);
            load_lane(v, x_in + k);
            if (NORMED) {
                const float scale = gated_norm_scale(load_cg((const float4*)squares + k / DELTA_HEAD));
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] *= scale;
            }
            make_fixed(x, v, t.lane);
        },
        [&](int tile, int lane, float sum) { residual.add(h, tile, lane, sum); });
}
KERNEL(THREADS, 2) delta_output(const char* weights, const float* x, const float* squares, float* h) {
    output<VALUE_BLOCKS, true>(weights, x, squares, h);
}
KERNEL(THREADS, 2) attention_output(const char* weights, const float* x, float* h) {
    output<QUERY_BLOCKS, false>(weights, x, nullptr, h);
}

// ---- Norm, router and shared gate [ROUTER_TILES tiles, 8 bits], and gate and up of the shared expert. The first ROUTER_TILES
// CTAs take a tile of the router each. `activation` gets the shared expert's inner values behind those of the routed ones.
constexpr int EXPERT_BLOCKS = (EXPERT_WIDTH + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
constexpr int SHARED_BLOCKS = (SHARED_WIDTH + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
constexpr int EXPERT_STRIDE = EXPERT_BLOCKS * BLOCK_INPUTS;
constexpr int EXPERT_TILES = EXPERT_WIDTH / 8;
constexpr int SHARED_TILES = SHARED_WIDTH / 8;
KERNEL(THREADS, 2)
route_and_share(const char* router, const char* shared_up, const float* h, const float* norm, float* logits,
                float* activation) {
    if (blockIdx.x < ROUTER_TILES) {
        typedef Tiles<HIDDEN_BLOCKS, 8, 1> T;
        __shared__ T::Shared shared;
        // A tile per CTA.
        T t(dynamic_shared, ROUTER_TILES, blockIdx.x, ROUTER_TILES);
        auto address = [&](int tile, int block) { return router + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK8; };
        launch_dependents();
        t.fill(address);
        const NormWeights weights(norm);
        wait_for_inputs();
        t.run(
            shared, address, [&](Fixed& x, int block) { weights.load(x, h, block, shared.squares); },
            [&](int tile, int lane, float sum) {
                sum *= norm_scale(shared.squares);
                if (lane < 16) logits[tile * 16 + lane] = sum;
            });
    } else {
        typedef Tiles<HIDDEN_BLOCKS, 4> T;
        __shared__ T::Shared shared;
        T t(dynamic_shared, SHARED_TILES, blockIdx.x - ROUTER_TILES, gridDim.x - ROUTER_TILES);
        auto address = [&](int tile, int block) { return shared_up + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
        launch_dependents();
        t.fill(address);
        const NormWeights weights(norm);
        wait_for_inputs();
        t.run(
            shared, address, [&](Fixed& x, int block) { weights.load(x, h, block, shared.squares); },
            [&](int tile, int lane, float sum) {
                sum *= norm_scale(shared.squares);
                const float up = __shfl_down_sync(FULL, sum, 8);
                if (lane < 8)
                    activation[TOP_K * EXPERT_STRIDE + tile * 8 + lane] = silu(sum) * up;
            });
    }
}

// ---- The down projection of the shared expert, weighted, to shared_out [HIDDEN]: a CTA's last warp takes tiles blockIdx.x,
// blockIdx.x + gridDim.x, ... while the experts are chosen and fetched.
struct SharedDown {
    static constexpr int TILES = HIDDEN / 16;
    static constexpr int BYTES = SHARED_BLOCKS * BLOCK4;
    struct Shared {
        float partial[SHARED_BLOCKS * BLOCK_ROWS];
    };
    const char* weights;
    BlockRing<BYTES, 1> ring;
    int lane;

    DEVICE SharedDown(const char* weights, char* slots) : weights(weights), ring(slots), lane(threadIdx.x & 31) {}
    DEVICE void fetch(int tile) {
        if (tile < TILES) ring.fetch(weights + (u64)tile * BYTES);
    }
    // The first tile has been fetched.
    DEVICE void run(Shared& shared, const float* inner, float weight, float* out) {
        for (int tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
            // Two blocks' inputs at a time: their way is what takes long.
            for (int first = 0; first < SHARED_BLOCKS; first += 2) {
                float v[2][8];
#pragma unroll
                for (int i = 0; i < 2; i++) load_lane(v[i], inner + lane_start(min(first + i, SHARED_BLOCKS - 1), lane));
                const char* blocks = ring.wait();
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (first + i == SHARED_BLOCKS) break;
                    Fixed x;
                    make_fixed(x, v[i], lane);
                    x.scale *= weight;
                    x.sum *= weight;
                    block_times_x<4>(blocks + (first + i) * BLOCK4, x, lane, shared.partial + (first + i) * BLOCK_ROWS);
                }
            }
            ring.next();
            const float sum = tile_sum<SHARED_BLOCKS>(shared.partial, lane);
            if (lane < 16) out[tile * 16 + lane] = sum;
            fetch(tile + gridDim.x);
        }
    }
};

// ---- Gate and up of the chosen experts: their addresses are known only when the router's logits are.
KERNEL(THREADS, 2)
experts_up(const char* weights, const char* shared_down, const float* logits, const float* h, const float* norm,
           float* activation, float* shared_out) {
    typedef Tiles<HIDDEN_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ SharedDown::Shared shared_of_down;
    __shared__ float4 aside[2][64];
    __shared__ u32 chosen[TOP_K];
    T t(dynamic_shared, TOP_K * EXPERT_TILES);
    const bool takes_down = t.warp == WARPS - 1;
    SharedDown down(shared_down, dynamic_shared + WARPS * SLOTS * BLOCK4);
    if (takes_down) down.fetch(blockIdx.x);
    const NormWeights weights_of_norm(norm);
    wait_for_inputs();
    // Only now: so the next kernel may use what the kernels before this one wrote before it waits itself.
    launch_dependents();
    auto address = [&](int tile, int block) {
        const u64 row = (u64)chosen[tile / EXPERT_TILES] * EXPERT_TILES + tile % EXPERT_TILES;
        return weights + (row * HIDDEN_BLOCKS + block) * BLOCK4;
    };
    // Every warp fetches its inputs at once: behind the experts' weights they would come late. The first one then chooses, the last
    // one takes the shared expert's part, and both find their inputs in shared memory when they are done.
    constexpr int CHOSEN = 1, CHOSEN_FOR_LAST = 2;
    const int block = t.warp % HIDDEN_BLOCKS;
    const float* inputs = h + lane_start(block, t.lane);
    Fixed x;
    if (t.warp == 0 || takes_down) {
        float4* own = aside[takes_down] + t.lane;
        copy16(own, inputs), copy16(own + 32, inputs + 16);
        copy_commit();
        if (takes_down) {
            down.run(shared_of_down, activation + TOP_K * EXPERT_STRIDE, sigmoid(load_cg(logits + SHARED_GATE)), shared_out);
            meet(CHOSEN_FOR_LAST, 64);
        } else {
            pick_experts(LaneLogits(logits, t.lane), t.lane, chosen);
            arrive(CHOSEN_FOR_LAST, 64);
            meet(CHOSEN, THREADS - 32);
        }
        t.fill(address);
        copy_wait<SLOTS>();
        const float4 a = own[0], b = own[32];
        float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        weights_of_norm.apply(v, block, shared.squares);
        make_fixed(x, v, t.lane);
    } else {
        weights_of_norm.load(x, h, block, shared.squares);
        meet(CHOSEN, THREADS - 32);
        t.fill(address);
    }
    t.run(
        shared, address, [&](Fixed& x, int block) { weights_of_norm.load(x, h, block, shared.squares); },
        [&](int tile, int lane, float sum) {
            sum *= norm_scale(shared.squares);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (lane < 8)
                activation[tile / EXPERT_TILES * EXPERT_STRIDE + tile % EXPERT_TILES * 8 + lane] = silu(sum) * up;
        },
        x);
}

// ---- Down projections of the chosen experts as one linear, weighted, added to h together with the shared expert's.
constexpr int ROUTED_BLOCKS = TOP_K * EXPERT_BLOCKS;
constexpr int DOWN_BLOCKS = ROUTED_BLOCKS + SHARED_BLOCKS;
KERNEL(THREADS, 2)
experts_down(const char* experts, const float* logits, const float* activation, const float* shared_out, float* h) {
    typedef Tiles<ROUTED_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ u32 chosen[TOP_K];
    __shared__ float weights[TOP_K];
    T t(dynamic_shared, HIDDEN / 16);
    launch_dependents();
    // The router's kernel is complete: the one between launched this only after it had waited for it.
    if (t.warp == 0) {
        const LaneLogits own(logits, t.lane);
        pick_experts(own, t.lane, chosen);
        const float weight = weigh_chosen(own, chosen, t.lane);
        if (t.lane < TOP_K) weights[t.lane] = weight;
    }
    __syncthreads();
    auto address = [&](int tile, int block) {
        const u64 row = (u64)chosen[block / EXPERT_BLOCKS] * (HIDDEN / 16) + tile;
        return experts + (row * EXPERT_BLOCKS + block % EXPERT_BLOCKS) * BLOCK4;
    };
    t.fill(address);
    wait_for_inputs();
    const Residual residual(t, h), of_shared(t, shared_out);
    t.run(
        shared, address,
        [&](Fixed& x, int block) {
            float v[8];
            // Inner values of one expert after the other, each in whole blocks, like the weights.
            load_lane(v, activation + lane_start(block, t.lane));
            make_fixed(x, v, t.lane);
            const float weight = weights[block / EXPERT_BLOCKS];
            x.scale *= weight;
            x.sum *= weight;
        },
        [&](int tile, int lane, float sum) { residual.add(h, tile, lane, sum + of_shared.at(shared_out, tile, lane)); });
}

// ---- Final norm and head; of every CTA also its highest logit below the limit.
struct Best {
    float logit;
    u32 id;
    u32 bad;        // whether a logit is not finite
    u32 unused;
};
DEVICE bool above(const Best& a, const Best& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }
// The better of two, and whether one of them is bad.
DEVICE void join(Best& own, const Best& other) {
    own.bad |= other.bad;
    if (above(other, own)) own.logit = other.logit, own.id = other.id;
}
// Of all lanes whose numbers are equal modulo LEAST.
template <int LEAST> DEVICE void join_lanes(Best& own) {
#pragma unroll
    for (int d = 16; d >= LEAST; d /= 2)
        join(own, Best{__shfl_xor_sync(FULL, own.logit, d), __shfl_xor_sync(FULL, own.id, d), __shfl_xor_sync(FULL, own.bad, d), 0});
}
KERNEL(THREADS, 2)
head(const char* weights, const Run* run, const float* h, const float* norm, float* logits, Best* best) {
    typedef Tiles<HIDDEN_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ Best bests[WARPS];
    constexpr float LOWEST = -3.402823466e+38f;
    T t(dynamic_shared, VOCAB_TILES);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
    launch_dependents();
    t.fill(address);
    const NormWeights weights_of_norm(norm);
    const u32 limit = min(run->vocab_limit, (u32)VOCAB);
    wait_for_inputs();
    Best own{LOWEST, 0xffffffffu, 0, 0};
    t.run(
        shared, address, [&](Fixed& x, int block) { weights_of_norm.load(x, h, block, shared.squares); },
        [&](int tile, int lane, float sum) {
            sum *= norm_scale(shared.squares);
            const u32 id = tile * 16 + lane;
            if (lane < 16 && id < VOCAB) {
                logits[id] = sum;
                if (!(fabsf(sum) <= -LOWEST)) own.bad = 1;
                const Best candidate{sum, id, 0, 0};
                if (id < limit && above(candidate, own)) own.logit = sum, own.id = id;
            }
        });
    join_lanes<1>(own);
    if (t.lane == 0) bests[t.warp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; i++) join(own, bests[i]);
        best[blockIdx.x] = own;
    }
}
