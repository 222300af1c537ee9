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

// From 16 values per lane: lane 4g + t has inputs 4t .. 4t + 3 of every sixteen of group g / 2, for high bytes if g is even.
DEVICE FixedLane fix_lane(const float* v, int lane) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) largest = fmaxf(largest, fabsf(v[i]));
    largest = max_lanes<4>(largest);
    const float inverse = fixed_inverse(largest);
    float sum = 0.0f;
    u32 q[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float rounded = v[i] * inverse + ROUNDER;
        q[i] = __float_as_uint(rounded);
        sum += rounded - ROUNDER;
    }
    // Whole numbers below 2^24: exact in any order.
    sum = sum_lanes<4>(sum);
    const bool low = lane >> 2 & 1;
    FixedLane own;
#pragma unroll
    for (int i = 0; i < 4; i++)
        own.words[i] = low ? fixed_bytes<false>(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3])
                           : fixed_bytes<true>(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
    own.scale = fixed_scale(largest);
    own.sum = own.scale * sum;
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
// (batch.cu) have the same bits.
DEVICE float group_term(u32 scale_and_bias, float scale, float sum, int high, int low) {
    const float dot = (float)(high * 256 + low);
    return __fmaf_rn(__fmul_rn(bf16_low(scale_and_bias), scale), dot, __fmul_rn(bf16_high(scale_and_bias), sum));
}

// Adds a block's 16 outputs into `out` [16]: lane 0 of each quad writes rows g and g + 8.
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
    const float y0 = sum_lanes<4>(group_term(s.x, x.scale, x.sum, c[0][0] + c[1][0], c[0][1] + c[1][1]));
    const float y1 = sum_lanes<4>(group_term(s.y, x.scale, x.sum, c[0][2] + c[1][2], c[0][3] + c[1][3]));
    if ((lane & 3) == 0) {
        out[lane >> 2] = y0;
        out[(lane >> 2) + 8] = y1;
    }
}

// The tiles of a CTA. `Address(tile, block)` is where a block lies.
template <int BLOCKS, int BITS, int DEPTH = SLOTS> struct Tiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8;
    // Tiles whose partial sums fit beside each other; about three blocks per warp.
    static constexpr int CHUNK = BLOCKS >= 3 * WARPS ? 1 : 3 * WARPS / BLOCKS;
    static constexpr int CHUNK_BLOCKS = CHUNK * BLOCKS;
    static constexpr int SLOTS_FILLED = DEPTH;

    struct Shared {
        float partial[CHUNK_BLOCKS * BLOCK_ROWS];
        float squares[WARPS];
    };
    // Behind the slots: each warp's part of a norm's weights.
    static constexpr int NORM_OFFSET = WARPS * SLOTS * BLOCK4;

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

    char* slots;
    int warp, lane, first_tile, stride, count, filled;
    Walk ahead;

    // Tiles cta, cta + ctas, ... below `tiles`.
    DEVICE Tiles(char* shared, int tiles, int cta, int ctas) {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        slots = shared + warp * DEPTH * BYTES;
        first_tile = cta, stride = ctas;
        count = tiles > cta ? (tiles - cta - 1) / ctas + 1 : 0;
        filled = 0;
        ahead = Walk{0, warp};
    }
    DEVICE Tiles(char* shared, int tiles) : Tiles(shared, tiles, blockIdx.x, gridDim.x) {}

    DEVICE int tile_of(int index) const { return first_tile + index * stride; }

    template <class Address> DEVICE void fill_slot(Address address) {
        // A warp with more warps than a chunk has blocks never has any.
        const int index = ahead.chunk * CHUNK + ahead.at / BLOCKS;
        if (ahead.at < CHUNK_BLOCKS && index < count) {
            const char* from = address(tile_of(index), ahead.at % BLOCKS);
            char* to = slots + filled * BYTES;
#pragma unroll
            for (int i = 0; i < BYTES / 512; i++) copy16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
            if (lane < 16) copy16(to + BYTES / 512 * 512 + lane * 16, from + BYTES / 512 * 512 + lane * 16);
            ahead.next(warp);
            if (++filled == DEPTH) filled = 0;
        }
        copy_commit();
    }

    // Fetches the norm's weights of the warp's first block, before the slots are filled.
    DEVICE float* fetch_norm(char* shared, const float* weight) {
        float* to = (float*)(shared + NORM_OFFSET) + warp * BLOCK_INPUTS;
        const float* from = weight + warp % BLOCKS * BLOCK_INPUTS;
        copy16(to + lane * 4, from + lane * 4);
        copy16(to + 128 + lane * 4, from + 128 + lane * 4);
        copy_commit();
        return to;
    }

    template <class Address> DEVICE void fill(Address address) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) fill_slot(address);
    }

    // `load(x, block)` makes the fixed-point input of a block; `finish(tile, lane, sum)` is called by a whole warp for each
    // tile, lanes i and i + 16 with the sum of row i.
    template <class Address, class Load, class Finish>
    DEVICE void run(Shared& shared, Address address, Load load, Finish finish) {
        Fixed x;
        int current = -1, slot = 0;
        for (int first = 0; first < count; first += CHUNK) {
            const int tiles = min(CHUNK, count - first), blocks = tiles * BLOCKS;
            for (int at = warp; at < blocks; at += WARPS) {
                const int block = at % BLOCKS;
                if (block != current) {
                    load(x, block);
                    current = block;
                }
                copy_wait<DEPTH - 1>();
                __syncwarp();
                block_times_x<BITS>(slots + slot * BYTES, x, lane, shared.partial + at * BLOCK_ROWS);
                if (++slot == DEPTH) slot = 0;
                __syncwarp();
                fill_slot(address);
            }
            __syncthreads();
            for (int i = warp; i < tiles; i += WARPS) {
                const float* partial = shared.partial + i * BLOCKS * BLOCK_ROWS + (lane & 15);
                float sum = 0.0f;
#pragma unroll
                for (int block = 0; block < (BLOCKS + 1) / 2; block++)
                    if (2 * block + (lane >> 4) < BLOCKS) sum += partial[(2 * block + (lane >> 4)) * BLOCK_ROWS];
                sum += __shfl_xor_sync(FULL, sum, 16);
                finish(tile_of(first + i), lane, sum);
            }
            if (first + CHUNK < count) __syncthreads();
        }
    }
};

// Where a lane's 16 values of a block begin: 4 of every 16.
DEVICE int lane_start(int block, int lane) { return block * BLOCK_INPUTS + (lane >> 3) * GROUP + (lane & 3) * 4; }

DEVICE void load16(float* v, const float* from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 q = load_cg((const float4*)from + 4 * i);
        v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
}

// Input of a phase that begins with a norm: h * weight. The scale of the norm, one number, is applied to the outputs; the sums of
// squares that it needs are left by warps 0 .. BLOCKS - 1, whose first block is their own number.
constexpr int HIDDEN_BLOCKS = HIDDEN / BLOCK_INPUTS;
static_assert(HIDDEN % BLOCK_INPUTS == 0 && HIDDEN_BLOCKS <= WARPS, "the norm needs a warp per block");

// A block's values times the norm's weights; their sum of squares before that.
DEVICE float normed(float* v, const float* weights) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) sum += v[i] * v[i];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] *= weights[i];
    // High and low lanes hold the same values.
    return sum_lanes<32>(sum) * 0.5f;
}
template <class T> DEVICE void load_normed(const T&, Fixed& x, int block, int lane, int warp, const float* h, const float* fetched, const float* weight,
                        float* squares) {
    float v[16];
    load16(v, h + lane_start(block, lane));
    const float4* w;
    if (WARPS % HIDDEN_BLOCKS == 0 || warp % HIDDEN_BLOCKS == block) {
        // The first group of copies holds them, so weights may still be on their way. A warp reads no other's.
        copy_wait<T::SLOTS_FILLED>();
        __syncwarp();
        w = (const float4*)(fetched + lane_start(0, lane));
    } else {
        w = (const float4*)(weight + lane_start(block, lane));
    }
    float weights[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 q = w[4 * i];
        weights[4 * i] = q.x, weights[4 * i + 1] = q.y, weights[4 * i + 2] = q.z, weights[4 * i + 3] = q.w;
    }
    const float sum = normed(v, weights);
    make_fixed(x, v, lane);
    if (warp == block && lane == 0) squares[warp] = sum;
}
DEVICE float norm_scale(const float* squares) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HIDDEN_BLOCKS; i++) sum += squares[i];
    return inverse_root(sum / HIDDEN + RMS_EPS);
}

extern __shared__ __align__(128) char dynamic_shared[];

// ---- Norm and the projections of a mixer: h [HIDDEN] to out [16 tiles].
KERNEL(THREADS, 2) norm_project(const char* weights, int tiles, const float* h, const float* norm, float* out) {
    typedef Tiles<HIDDEN_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    T t(dynamic_shared, tiles);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
    launch_dependents();
    const float* fetched = t.fetch_norm(dynamic_shared, norm);
    t.fill(address);
    wait_for_inputs();
    t.run(
        shared, address,
        [&](Fixed& x, int block) { load_normed(t, x, block, t.lane, t.warp, h, fetched, norm, shared.squares); },
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
DEVICE float gated_norm_scale(const float* squares, int k) {
    const float4 s = load_cg((const float4*)squares + k / DELTA_HEAD);
    return inverse_root((s.x + s.y + s.z + s.w) / DELTA_HEAD + RMS_EPS);
}
template <int BLOCKS, bool NORMED> DEVICE void output(const char* weights, const float* x_in, const float* squares, float* h) {
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
            float v[16];
            const int k = lane_start(block, t.lane);
            load16(v, x_in + k);
            if (NORMED) {
                const float scale = gated_norm_scale(squares, k);
#pragma unroll
                for (int i = 0; i < 16; i++) v[i] *= scale;
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
// CTAs take a tile of the router each. `activation` gets the shared expert's inner values behind those of the routed ones. CTAs beyond
// the tiles fetch `later` bytes that a later kernel streams into the cache.
constexpr int EXPERT_BLOCKS = (EXPERT_WIDTH + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
constexpr int SHARED_BLOCKS = (SHARED_WIDTH + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
constexpr int EXPERT_STRIDE = EXPERT_BLOCKS * BLOCK_INPUTS;
constexpr int EXPERT_TILES = EXPERT_WIDTH / 8;
constexpr int SHARED_TILES = SHARED_WIDTH / 8;
KERNEL(THREADS, 2)
route_and_share(const char* router, const char* shared_up, const float* h, const float* norm, float* logits,
                float* activation, const char* later, u32 later_bytes) {
    if (blockIdx.x >= ROUTER_TILES + SHARED_TILES) {
        // Memory is idle until experts are chosen.
        launch_dependents();
        wait_for_inputs();
        const u32 ctas = gridDim.x - ROUTER_TILES - SHARED_TILES, cta = blockIdx.x - ROUTER_TILES - SHARED_TILES;
        const u32 share = (later_bytes / ctas + 127) / 128 * 128, piece = (share / THREADS + 127) / 128 * 128;
        const u32 from = cta * share + threadIdx.x * piece, end = min(min(from + piece, (cta + 1) * share), later_bytes);
        if (from < end) fetch_into_cache(later + from, end - from);
    } else if (blockIdx.x < ROUTER_TILES) {
        typedef Tiles<HIDDEN_BLOCKS, 8, 1> T;
        __shared__ T::Shared shared;
        // A tile per CTA.
        T t(dynamic_shared, ROUTER_TILES, blockIdx.x, ROUTER_TILES);
        auto address = [&](int tile, int block) { return router + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK8; };
        launch_dependents();
        const float* fetched = t.fetch_norm(dynamic_shared, norm);
        t.fill(address);
        wait_for_inputs();
        t.run(
            shared, address,
            [&](Fixed& x, int block) { load_normed(t, x, block, t.lane, t.warp, h, fetched, norm, shared.squares); },
            [&](int tile, int lane, float sum) {
                sum *= norm_scale(shared.squares);
                if (lane < 16) logits[tile * 16 + lane] = sum;
            });
    } else {
        typedef Tiles<HIDDEN_BLOCKS, 4> T;
        __shared__ T::Shared shared;
        T t(dynamic_shared, SHARED_TILES, blockIdx.x - ROUTER_TILES, SHARED_TILES);
        auto address = [&](int tile, int block) { return shared_up + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
        launch_dependents();
        const float* fetched = t.fetch_norm(dynamic_shared, norm);
        t.fill(address);
        wait_for_inputs();
        t.run(
            shared, address,
            [&](Fixed& x, int block) { load_normed(t, x, block, t.lane, t.warp, h, fetched, norm, shared.squares); },
            [&](int tile, int lane, float sum) {
                sum *= norm_scale(shared.squares);
                const float up = __shfl_down_sync(FULL, sum, 8);
                if (lane < 8)
                    activation[TOP_K * EXPERT_STRIDE + tile * 8 + lane] = silu(sum) * up;
            });
    }
}

// ---- Gate and up of the chosen experts: their addresses are known only when the router's logits are. The last SHARED_DOWN_CTAS CTAs
// meanwhile take the down projection of the shared expert, weighted, to shared_out [HIDDEN]: so few that the next kernel finds room.
constexpr int SHARED_DOWN_CTAS = 16;
DEVICE void shared_down_part(const char* weights, const float* logits, const float* activation, float* shared_out, int cta) {
    typedef Tiles<SHARED_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    T t(dynamic_shared, HIDDEN / 16, cta, SHARED_DOWN_CTAS);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * SHARED_BLOCKS + block) * BLOCK4; };
    t.fill(address);
    wait_for_inputs();
    launch_dependents();
    const float weight = sigmoid(load_cg(logits + SHARED_GATE));
    t.run(
        shared, address,
        [&](Fixed& x, int block) {
            float v[16];
            load16(v, activation + TOP_K * EXPERT_STRIDE + lane_start(block, t.lane));
            make_fixed(x, v, t.lane);
            x.scale *= weight;
            x.sum *= weight;
        },
        [&](int tile, int lane, float sum) {
            if (lane < 16) shared_out[tile * 16 + lane] = sum;
        });
}
KERNEL(THREADS, 2)
experts_up(const char* weights, const char* shared_down, const float* logits, const float* h, const float* norm,
           float* activation, float* shared_out) {
    const int ctas = gridDim.x - SHARED_DOWN_CTAS;
    if ((int)blockIdx.x >= ctas) return shared_down_part(shared_down, logits, activation, shared_out, blockIdx.x - ctas);
    typedef Tiles<HIDDEN_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ u32 ids[TOP_K];
    T t(dynamic_shared, TOP_K * EXPERT_TILES, blockIdx.x, ctas);
    const float* fetched = t.fetch_norm(dynamic_shared, norm);
    wait_for_inputs();
    // Only now: so the next kernel may use what the kernels before this one wrote before it waits itself.
    launch_dependents();
    if (t.warp == 0) {
        const Choice choice = choose_experts(logits, t.lane);
        if (t.lane < TOP_K) ids[t.lane] = choice.id;
    }
    __syncthreads();
    auto address = [&](int tile, int block) {
        const u64 row = (u64)ids[tile / EXPERT_TILES] * EXPERT_TILES + tile % EXPERT_TILES;
        return weights + (row * HIDDEN_BLOCKS + block) * BLOCK4;
    };
    t.fill(address);
    t.run(
        shared, address,
        [&](Fixed& x, int block) { load_normed(t, x, block, t.lane, t.warp, h, fetched, norm, shared.squares); },
        [&](int tile, int lane, float sum) {
            sum *= norm_scale(shared.squares);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (lane < 8)
                activation[tile / EXPERT_TILES * EXPERT_STRIDE + tile % EXPERT_TILES * 8 + lane] = silu(sum) * up;
        });
}

// ---- Down projections of the chosen experts as one linear, weighted, added to h together with the shared expert's.
constexpr int ROUTED_BLOCKS = TOP_K * EXPERT_BLOCKS;
constexpr int DOWN_BLOCKS = ROUTED_BLOCKS + SHARED_BLOCKS;
KERNEL(THREADS, 2)
experts_down(const char* experts, const float* logits, const float* activation, const float* shared_out, float* h) {
    typedef Tiles<ROUTED_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ u32 ids[TOP_K];
    __shared__ float weights[TOP_K];
    T t(dynamic_shared, HIDDEN / 16);
    launch_dependents();
    // The router's kernel is complete: the one between launched this only after it had waited for it.
    if (t.warp == 0) {
        const Choice choice = choose_experts(logits, t.lane);
        if (t.lane < TOP_K) {
            ids[t.lane] = choice.id;
            weights[t.lane] = choice.weight;
        }
    }
    __syncthreads();
    auto address = [&](int tile, int block) {
        const u64 row = (u64)ids[block / EXPERT_BLOCKS] * (HIDDEN / 16) + tile;
        return experts + (row * EXPERT_BLOCKS + block % EXPERT_BLOCKS) * BLOCK4;
    };
    t.fill(address);
    wait_for_inputs();
    const Residual residual(t, h), of_shared(t, shared_out);
    t.run(
        shared, address,
        [&](Fixed& x, int block) {
            float v[16];
            // Inner values of one expert after the other, each in whole blocks, like the weights.
            load16(v, activation + lane_start(block, t.lane));
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
KERNEL(THREADS, 2)
head(const char* weights, const Run* run, const float* h, const float* norm, float* logits, Best* best) {
    typedef Tiles<HIDDEN_BLOCKS, 4> T;
    __shared__ T::Shared shared;
    __shared__ Best bests[WARPS];
    constexpr float LOWEST = -3.402823466e+38f;
    T t(dynamic_shared, VOCAB_TILES);
    auto address = [&](int tile, int block) { return weights + ((u64)tile * HIDDEN_BLOCKS + block) * BLOCK4; };
    launch_dependents();
    const float* fetched = t.fetch_norm(dynamic_shared, norm);
    t.fill(address);
    const u32 limit = min(run->vocab_limit, (u32)VOCAB);
    wait_for_inputs();
    Best own{LOWEST, 0xffffffffu, 0, 0};
    t.run(
        shared, address,
        [&](Fixed& x, int block) { load_normed(t, x, block, t.lane, t.warp, h, fetched, norm, shared.squares); },
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
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const Best other{__shfl_xor_sync(FULL, own.logit, d), __shfl_xor_sync(FULL, own.id, d), 0, 0};
        own.bad |= __shfl_xor_sync(FULL, own.bad, d);
        if (above(other, own)) own.logit = other.logit, own.id = other.id;
    }
    if (t.lane == 0) bests[t.warp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; i++) {
            own.bad |= bests[i].bad;
            if (above(bests[i], own)) own.logit = bests[i].logit, own.id = bests[i].id;
        }
        best[blockIdx.x] = own;
    }
}
