// Linears of several sessions' tokens, one token each: the rows of a step share the weights, and each has the bits that it has alone.
//
// A row's arithmetic is that of gemv.cu, group by group and block by block. What differs is the place of numbers: inputs are rounded to
// fixed point where they are made; in mma columns 2r and 2r + 1 stand high and low bytes of row r of four rows, a quad, and a
// group's sums are taken on their own. A CTA takes tiles as in gemv.cu, by 8 warps, each of which keeps the inputs of its block in registers. (Two
// warps for a block with half of the rows each are slower: both decode the weights.)
// Experts: rows that chose one are put together by four; the lists are made on the device.
// Bytes moved: the weights once, of experts those of every one that some row chose.

constexpr int ROWS = 16;      // most rows
static_assert(ROWS < 32, "attend has a lane for each, and one behind them");
constexpr int ROW_WARPS = 8;
constexpr int ROW_THREADS = ROW_WARPS * 32;
constexpr int ROW_SLOTS4 = 3, ROW_SLOTS8 = 2;   // blocks that a warp has on the way
constexpr int ROW_SLOT_BYTES = ROW_WARPS * ROW_SLOTS8 * BLOCK8;
static_assert(ROW_SLOTS4 * BLOCK4 <= ROW_SLOTS8 * BLOCK8, "slots of either kind have the same room");
// CTAs that have room beside each other.
#if __CUDA_ARCH__ >= 900
#define ROW_CTAS 2
#else
#define ROW_CTAS 1
#endif
constexpr int SHARES = TOP_K + 1;   // what a row adds up: experts, and the shared one

// Up to four rows that meet an expert. A pair is row * SHARES + i for a row's i-th choice.
struct Meeting {
    u32 expert, count;
    u32 pairs[4];
    u32 unused[2];
};
constexpr int MEETINGS = ROWS * TOP_K;

// ---- Rounding to fixed point: groups of a row from input `first` on, 8 lanes each; the layout is that of store_fixed.
DEVICE void store_lane(const FixedRows& out, int row, int first, const FixedLane& own, int lane) {
    u8* plane = lane >> 2 & 1 ? out.low : out.high;
    const u64 at = (u64)row * out.width + first + (lane >> 3) * GROUP;
    *(uint4*)(plane + at + (lane & 3) * 16) = make_uint4(own.words[0], own.words[1], own.words[2], own.words[3]);
    if ((lane & 7) == 0) out.groups[at / GROUP] = make_float2(own.scale, own.sum);
}

// Groups of a row that lie in shared memory, times `scale`, and nothing in those behind them up to `stored`; one warp.
DEVICE void fix_groups(const FixedRows& out, int row, int first, const float* values, float scale, int groups, int stored, int lane) {
    const bool there = lane < 8 * groups;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = there ? values[lane_start(0, lane) + i % 4 + i / 4 * 16] * scale : 0.0f;
    const FixedLane own = fix_lane(v, lane);
    if (lane < 8 * stored) store_lane(out, row, first, own, lane);
}

// Sums of `count` parts [HIDDEN] that lie one after the other, at k .. k + 3: even ones, odd ones, and both, as in gemv.cu.
template <int COUNT> DEVICE float4 add_parts(const float* parts, int k) {
    float4 sums[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float4 p = load_cg((const float4*)(parts + i * HIDDEN + k));
        float4& sum = sums[i & 1];
        sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w;
    }
    return make_float4(sums[0].x + sums[1].x, sums[0].y + sums[1].y, sums[0].z + sums[1].z, sums[0].w + sums[1].w);
}

// Adds to h what lies in `parts`: NOTHING; MIXED [rows, 2, HIDDEN] by an output projection; EXPERTS [rows, DOWN_BLOCKS, HIDDEN].
// Then its norm without the scale, whose sums of squares go to `squares` [rows, HIDDEN_BLOCKS]. A CTA has a block: two warps add, one
// goes on.
enum Parts { NOTHING, MIXED, EXPERTS_PARTS };
KERNEL(64, 8) rows_norm(float* h, const float* parts, int kind, const float* norm, FixedRows out, float* squares) {
    __shared__ float stream[BLOCK_INPUTS];
    const int lane = threadIdx.x & 31, row = blockIdx.x / HIDDEN_BLOCKS, block = blockIdx.x % HIDDEN_BLOCKS;
    launch_dependents();
    float v[8], w[8];
    if (threadIdx.x < 32) load_lane(w, norm + lane_start(block, lane));
    wait_for_inputs();
    if (threadIdx.x < BLOCK_INPUTS / 4) {
        const int k = block * BLOCK_INPUTS + threadIdx.x * 4;
        float4* to = (float4*)(h + row * HIDDEN + k);
        float4 own = load_cg(to);
        if (kind != NOTHING) {
            float4 sum;
            if (kind == MIXED) {
                sum = add_parts<2>(parts + row * 2 * HIDDEN, k);
            } else {
                const float* of_row = parts + (u64)row * DOWN_BLOCKS * HIDDEN;
                const float4 routed = add_parts<ROUTED_BLOCKS>(of_row, k);
                const float4 shared = add_parts<SHARED_BLOCKS>(of_row + ROUTED_BLOCKS * HIDDEN, k);
                sum = make_float4(routed.x + shared.x, routed.y + shared.y, routed.z + shared.z, routed.w + shared.w);
            }
            own.x += sum.x, own.y += sum.y, own.z += sum.z, own.w += sum.w;
            *to = own;
        }
        *(float4*)(stream + threadIdx.x * 4) = own;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 q = *(const float4*)(stream + lane_start(0, lane) + 16 * i);
        v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
    const float sum = normed(v, w);
    store_lane(out, row, block * BLOCK_INPUTS, fix_lane(v, lane), lane);
    if (lane == 0) squares[row * HIDDEN_BLOCKS + block] = sum;
}

// Rows of `x` [rows, width of `out`] as they are.
KERNEL(32, 16) rows_fix(const float* x, FixedRows out) {
    const int lane = threadIdx.x, blocks = out.width / BLOCK_INPUTS;
    const int row = blockIdx.x / blocks, block = blockIdx.x % blocks;
    launch_dependents();
    wait_for_inputs();
    float v[8];
    load_lane(v, x + (u64)row * out.width + lane_start(block, lane));
    store_lane(out, row, block * BLOCK_INPUTS, fix_lane(v, lane), lane);
}

// One token of each row through a delta layer, with the gated norm, to out [rows, VALUE_WIDTH]. A CTA for each head, blockIdx.x, and
// row, blockIdx.y; a whole head's state is on its way before the inputs are waited for. Of four tokens one writes it.
KERNEL(512, 2)
rows_delta_step(const Run* runs, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
                const float* norm, FixedRows out) {
    __shared__ float values[DELTA_HEAD], squares[4];
    const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x & 31;
    launch_dependents();
    projected += row * PROJ_DELTA;
    step_of_head<4, true>(runs + row, layer, head, 0, projected, taps, rates, dt_bias, norm, [&](int i, float value, float square) {
        values[i] = value;
        if (lane == 0) squares[i >> 5] = square;
    });
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float scale = gated_norm_scale(make_float4(squares[0], squares[1], squares[2], squares[3]));
    // The last head may have half a block of nothing behind it.
    const bool pads = VALUE_WIDTH % BLOCK_INPUTS != 0 && head == VALUE_HEADS - 1;
    fix_groups(out, row, head * DELTA_HEAD, values, scale, 2, pads ? 4 : 2, lane);
}

// Attention's parts of every row together, to out [rows, QUERY_WIDTH]. A CTA has a head.
KERNEL(256, 4)
rows_attend_combine(const Run* runs, int parts, const float* projected, const float2* part_sums, const float* part_values,
                    FixedRows out) {
    __shared__ float values[HEAD];
    combine_parts<HEAD>(runs, parts, projected, part_sums, part_values, [&](int i, float value) { values[i] = value; });
    __syncthreads();
    if (threadIdx.x < 32) fix_groups(out, blockIdx.y, blockIdx.x * HEAD, values, 1.0f, HEAD / GROUP, HEAD / GROUP, threadIdx.x);
}

// The scale of a row's norm, from what rows_norm left.
DEVICE float row_scale(const float* squares, int row) {
    float own[HIDDEN_BLOCKS];
#pragma unroll
    for (int i = 0; i < HIDDEN_BLOCKS; i++) own[i] = load_cg(squares + row * HIDDEN_BLOCKS + i);
    return norm_scale(own);
}

// Of all rows, for all threads of a CTA when they have met again.
DEVICE void row_scales(const float* squares, float* scales, int rows) {
    if (threadIdx.x < rows) scales[threadIdx.x] = row_scale(squares, threadIdx.x);
}

// ---- Blocks times rows.

// A lane's inputs of a block: of row g / 2 of each quad high (g even) or low bytes of the four groups.
template <int QUADS> struct RowInputs {
    uint4 bytes[QUADS][4];

    // `place(row)`: where the row's block begins, in bytes from the start of a plane; negative: no such row.
    // Scales and sums go to `scales` [4 QUADS, 4], in shared memory.
    template <class Place> DEVICE void load(const FixedRows& x, Place place, float2* scales, int lane) {
        const int g = lane >> 2, t = lane & 3;
        // What is needed first is asked for first.
        constexpr int ROUNDS = (QUADS + 1) / 2;
        float2 groups[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int group = i * 32 + lane, at = group < 16 * QUADS ? place(group / 4) : -1;
            groups[i] = at >= 0 ? __ldcg(x.groups + at / GROUP + group % 4) : make_float2(0, 0);
        }
        const u8* from[QUADS];
        bool there[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int at = place(4 * q + (g >> 1));
            from[q] = (g & 1 ? x.low : x.high) + max(at, 0) + t * 16;
            there[q] = at >= 0;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                bytes[q][j] = there[q] ? __ldcg((const uint4*)(from[q] + j * GROUP)) : make_uint4(0, 0, 0, 0);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (i * 32 + lane < 16 * QUADS) scales[i * 32 + lane] = groups[i];
        __syncwarp();
    }
    // Takes those that `round_rows` put aside.
    DEVICE void take(const u8* aside, int lane) {
        static_assert(QUADS == 1);
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int j = 0; j < 4; j++) bytes[0][j] = *(const uint4*)(aside + g * BLOCK_INPUTS + j * GROUP + t * 16);
    }
};

// Rounds a block of four rows, by a warp: bytes to `aside` [4, 2, 256], scales and sums times weights to `scales` [4, 4].
// `from(row)`: where values of the row's block begin; `weight` is that of row lane / 4.
template <class From> DEVICE void round_rows(From from, float weight, u8* aside, float2* scales, int lane) {
    float v[4][8];
#pragma unroll
    for (int row = 0; row < 4; row++) load_lane(v[row], from(row) + lane_start(0, lane));
#pragma unroll
    for (int row = 0; row < 4; row++) {
        const FixedLane own = fix_lane(v[row], lane);
        *(uint4*)(aside + (2 * row + (lane >> 2 & 1)) * BLOCK_INPUTS + (lane >> 3) * GROUP + (lane & 3) * 16) =
            make_uint4(own.words[0], own.words[1], own.words[2], own.words[3]);
        const float of_row = __shfl_sync(FULL, weight, 4 * row);
        if ((lane & 7) == 0) scales[4 * row + (lane >> 3)] = make_float2(own.scale * of_row, own.sum * of_row);
    }
}

// `block` and `scales` [4 QUADS, 4] are addresses in shared memory. `take(q, y0, y1)` gets outputs g and g + 8 of row t of quad q.
template <int BITS, int QUADS, class Take>
DEVICE void block_times_rows(u32 block, const RowInputs<QUADS>& x, u32 scales, int lane, Take take) {
    const u32 codes = block + lane * 16, factors = block + (BITS == 4 ? 2048 : 4096) + (lane >> 2) * 32, own = scales + (lane & 3) * 32;
    // Sums of groups 0 and 2, and of 1 and 3.
    float sums[QUADS][2][2];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        // Scale and bias of outputs g and g + 8 for two groups; scale and sum of the rows' groups.
        const uint4 weights = load_shared16(factors + pair * 16);
        uint4 inputs[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) inputs[q] = load_shared16(own + q * 128 + pair * 16);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int j = 2 * pair + odd;
            u32 w[8];
            if (BITS == 4) {
                const uint4 c = load_shared16(codes + j * 512);
                w[0] = c.x & NIBBLES, w[1] = c.y & NIBBLES, w[2] = c.x >> 4 & NIBBLES, w[3] = c.y >> 4 & NIBBLES;
                w[4] = c.z & NIBBLES, w[5] = c.w & NIBBLES, w[6] = c.z >> 4 & NIBBLES, w[7] = c.w >> 4 & NIBBLES;
            } else {
                const uint4 a = load_shared16(codes + j * 1024), b = load_shared16(codes + j * 1024 + 512);
                w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
            }
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                int c[4] = {0, 0, 0, 0};
                mma_u8_s8(c, w[0], w[1], w[2], w[3], x.bytes[q][j].x, x.bytes[q][j].y);
                mma_u8_s8(c, w[4], w[5], w[6], w[7], x.bytes[q][j].z, x.bytes[q][j].w);
                const float scale = __uint_as_float(odd ? inputs[q].z : inputs[q].x), sum = __uint_as_float(odd ? inputs[q].w : inputs[q].y);
                const float y0 = group_term(odd ? weights.z : weights.x, scale, sum, c[0], c[1]);
                const float y1 = group_term(odd ? weights.w : weights.y, scale, sum, c[2], c[3]);
                sums[q][odd][0] = pair == 0 ? y0 : sums[q][odd][0] + y0;
                sums[q][odd][1] = pair == 0 ? y1 : sums[q][odd][1] + y1;
            }
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) take(q, sums[q][0][0] + sums[q][1][0], sums[q][0][1] + sums[q][1][1]);
}

// A warp's stream of blocks through shared memory: those with numbers warp, warp + 8, ... below `count`.
template <int BYTES, int DEPTH> struct BlockStream {
    static constexpr int WHOLE = BYTES / 512, REST = BYTES % 512 / 16;   // pieces for all lanes, and for the first ones
    u32 slots, slot;   // addresses in shared memory: of the first one, and of the next to be used

    DEVICE BlockStream(char* shared) { slots = slot = opaque(shared_address(shared) + threadIdx.x / 32 * DEPTH * BYTES); }
    template <class Address> DEVICE void fetch(u32 at, u32 to, u32 count, Address address) {
        if (at < count) {
            // Pieces lie at fixed distances from one address.
            const u32 lane = threadIdx.x % 32;
            const char* from = address(at) + lane * 16;
            to += lane * 16;
#pragma unroll
            for (int i = 0; i < WHOLE; i++) copy16(to + i * 512, from + i * 512);
            if (lane < REST) copy16(to + WHOLE * 512, from + WHOLE * 512);
        }
        copy_commit();
    }
    template <class Address> DEVICE void fill(u32 count, Address address) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) fetch(threadIdx.x / 32 + i * ROW_WARPS, slots + i * BYTES, count, address);
    }
    // The address of the next block.
    DEVICE u32 wait() {
        copy_wait<DEPTH - 1>();
        __syncwarp();
        return slot;
    }
    // Block `at` is used up.
    template <class Address> DEVICE void next(u32 at, u32 count, Address address) {
        __syncwarp();
        fetch(at + DEPTH * ROW_WARPS, slot, count, address);
        slot = slot == slots + (DEPTH - 1) * BYTES ? slots : slot + BYTES;
    }
};

// The row whose outputs a thread finishes.
template <int QUADS> DEVICE int row_of_thread() { return (threadIdx.x >> 4) % (4 * QUADS); }

// The tiles of a CTA, `count` of them, of BLOCKS blocks each; a tile's outputs are added up over the blocks in CHAINS chains: with two
// in the order of gemv.cu, even blocks, odd ones, and both.
template <int BLOCKS, int BITS, int QUADS, int CHAINS = 2> struct RowTiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8, DEPTH = BITS == 4 ? ROW_SLOTS4 : ROW_SLOTS8;
    // Tiles whose sums stand beside each other in shared memory: of all rows about three blocks per warp.
    static constexpr int CHUNK_BLOCKS = 3 * ROW_WARPS * (ROWS / 4) / QUADS;
    static constexpr u32 CHUNK = BLOCKS >= CHUNK_BLOCKS ? 1 : CHUNK_BLOCKS / BLOCKS;
    struct Shared {
        float sums[CHUNK * BLOCKS][4 * QUADS][BLOCK_ROWS];
        float2 scales[ROW_WARPS][16 * QUADS];
    };
    BlockStream<BYTES, DEPTH> stream;

    DEVICE RowTiles(char* dynamic) : stream(dynamic) {}

    // `address(index, block)`, `key(index)`: which rows a tile meets, `place(index, row, block)`, `finish(index, row, output, sum)`.
    template <class Address> DEVICE void fill(u32 count, Address address) {
        stream.fill(count * BLOCKS, [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); });
    }
    template <class Address, class Key, class Place, class Finish>
    DEVICE void run(Shared& shared, u32 count, const FixedRows& x, Address address, Key key, Place place, Finish finish) {
        auto flat = [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); };
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 scales = opaque(shared_address(shared.scales[warp]));
        // Where a lane's first sum of the chunk's first block goes.
        const u32 sums = opaque(shared_address(&shared.sums[0][lane % 4][lane / 4]));
        RowInputs<QUADS> inputs;
        u32 current = 0xffffffffu, at = warp;
        for (u32 first = 0; first < count; first += CHUNK) {
            const u32 tiles = min(CHUNK, count - first), end = (first + tiles) * BLOCKS;
            for (; at < end; at += ROW_WARPS) {
                const u32 index = at / BLOCKS, block = at % BLOCKS, wanted = key(index) * BLOCKS + block;
                if (wanted != current) {
                    inputs.load(x, [&](int row) { return place(index, row, block); }, shared.scales[warp], lane);
                    current = wanted;
                }
                const u32 weights = stream.wait(), to = sums + (at - first * BLOCKS) * sizeof(shared.sums[0]);
                block_times_rows<BITS>(weights, inputs, scales, lane, [&](int q, float y0, float y1) {
                    store_shared(to + q * 4 * BLOCK_ROWS * 4, y0);
                    store_shared(to + q * 4 * BLOCK_ROWS * 4 + 32, y1);
                });
                stream.next(at, count * BLOCKS, flat);
            }
            __syncthreads();
            // Whole warps have a tile, for shuffles.
            const int output = threadIdx.x & 15, row = row_of_thread<QUADS>();
            for (u32 i = threadIdx.x / (64 * QUADS); i < tiles; i += ROW_THREADS / (64 * QUADS)) {
                float chains[2] = {0.0f, 0.0f};
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
                    chains[block % CHAINS] += shared.sums[i * BLOCKS + block][row][output];
                finish(first + i, row, output, CHAINS == 2 ? chains[0] + chains[1] : chains[0]);
            }
            if (first + CHUNK < count) __syncthreads();
        }
    }
};

DEVICE int tiles_of_cta(int tiles) { return tiles > (int)blockIdx.x ? (tiles - blockIdx.x - 1) / gridDim.x + 1 : 0; }

// A linear whose tiles all meet all rows: `tiles` of them from `first` on, as many apart as there are CTAs. `weights_of(tile, block)`,
// `place_of(block)`: where inputs of a block begin in a row; `finish(row)` makes what takes (tile, output, sum) of a row.
template <int BLOCKS, int BITS, int CHAINS, int QUADS, class Weights, class Place, class Finish>
DEVICE void quads_linear(int first, int apart, int tiles, const FixedRows& x, int rows, Weights weights_of, Place place_of, Finish finish) {
    typedef RowTiles<BLOCKS, BITS, QUADS, CHAINS> T;
    // Behind the slots.
    typename T::Shared& shared = *(typename T::Shared*)(dynamic_shared + ROW_SLOT_BYTES);
    T t(dynamic_shared);
    auto address = [&](int index, int block) { return weights_of(first + index * apart, block); };
    launch_dependents();
    t.fill(tiles, address);
    wait_for_inputs();
    auto take = finish(min(row_of_thread<QUADS>(), rows - 1));
    t.run(
        shared, tiles, x, address, [](int) { return 0; },
        [&](int, int row, int block) { return row < rows ? row * x.width + place_of(block) : -1; },
        [&](int index, int row, int output, float sum) { take(first + index * apart, row, output, sum, row < rows); });
}
template <int BLOCKS, int BITS, int CHAINS, class Weights, class Place, class Finish>
DEVICE void rows_linear(int first, int apart, int tiles, const FixedRows& x, int rows, Weights weights, Place place, Finish finish) {
    if (rows <= 4) quads_linear<BLOCKS, BITS, CHAINS, 1>(first, apart, tiles, x, rows, weights, place, finish);
    else if (rows <= 8) quads_linear<BLOCKS, BITS, CHAINS, 2>(first, apart, tiles, x, rows, weights, place, finish);
    else quads_linear<BLOCKS, BITS, CHAINS, 4>(first, apart, tiles, x, rows, weights, place, finish);
}
// Of a matrix whose tiles lie one after the other, for inputs that do as well. CTAs take every `gridDim.x`-th tile.
template <int BLOCKS, int BITS, class Finish>
DEVICE void rows_linear(const char* weights, int first, int tiles, const FixedRows& x, int rows, Finish finish) {
    rows_linear<BLOCKS, BITS, 2>(
        first, gridDim.x, tiles, x, rows,
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + block) * (BITS == 4 ? BLOCK4 : BLOCK8); },
        [](int block) { return block * BLOCK_INPUTS; }, finish);
}

// Norm and the projections of a mixer, to out [rows, stride].
KERNEL(ROW_THREADS, 1)
rows_project(const char* weights, int tiles, FixedRows x, int rows, const float* squares, float* out) {
    __shared__ float scales[ROWS];
    rows_linear<HIDDEN_BLOCKS, 4>(weights, blockIdx.x, tiles_of_cta(tiles), x, rows, [&](int) {
        row_scales(squares, scales, rows);
        return [&](int tile, int row, int output, float sum, bool there) {
            if (there) out[(row * tiles + tile) * 16 + output] = sum * scales[row];
        };
    });
}

// Output projections, to parts [rows, 2, HIDDEN]: a CTA has tiles' even or their odd blocks.
template <int BLOCKS> DEVICE void rows_output(const char* weights, const FixedRows& x, int rows, float* parts) {
    constexpr int HALF = (BLOCKS + 1) / 2, TILES = HIDDEN / 16;
    const int odd = blockIdx.x & 1, first = blockIdx.x >> 1, apart = gridDim.x >> 1;
    // Of an odd number of blocks the last odd one is not there: it repeats a block and has no inputs.
    rows_linear<HALF, 4, 1>(
        first, apart, (TILES - first - 1) / apart + 1, x, rows,
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + min(2 * block + odd, BLOCKS - 1)) * BLOCK4; },
        [=](int block) { return 2 * block + odd < BLOCKS ? (2 * block + odd) * BLOCK_INPUTS : -(1 << 30); },
        [&](int) {
            return [=](int tile, int row, int output, float sum, bool there) {
                if (there) parts[(row * 2 + odd) * HIDDEN + tile * 16 + output] = sum;
            };
        });
}
KERNEL(ROW_THREADS, 1) rows_delta_output(const char* weights, FixedRows x, int rows, float* parts) {
    rows_output<VALUE_BLOCKS>(weights, x, rows, parts);
}
KERNEL(ROW_THREADS, 1) rows_attention_output(const char* weights, FixedRows x, int rows, float* parts) {
    rows_output<QUERY_BLOCKS>(weights, x, rows, parts);
}

// Norm, router and shared gate to logits [rows, ROUTER_ROWS], gate and up of the shared expert to activation
// [rows, DOWN_BLOCKS * 256]. A CTA per tile.
KERNEL(ROW_THREADS, 1)
rows_route_and_share(const char* router, const char* shared_up, FixedRows x, int rows, const float* squares, float* logits,
                     float* activation) {
    if (blockIdx.x < ROUTER_TILES) {
        rows_linear<HIDDEN_BLOCKS, 8>(router, blockIdx.x, 1, x, rows, [&](int own) {
            const float scale = row_scale(squares, own);
            return [=](int tile, int row, int output, float sum, bool there) {
                if (there) logits[row * ROUTER_ROWS + tile * 16 + output] = sum * scale;
            };
        });
    } else {
        rows_linear<HIDDEN_BLOCKS, 4>(shared_up, blockIdx.x - ROUTER_TILES, 1, x, rows, [&](int own) {
            const float scale = row_scale(squares, own);
            return [=](int tile, int row, int output, float sum, bool there) {
                sum *= scale;
                const float up = __shfl_down_sync(FULL, sum, 8);
                if (there && output < 8)
                    activation[(u64)row * DOWN_BLOCKS * BLOCK_INPUTS + TOP_K * EXPERT_STRIDE + tile * 8 + output] = silu(sum) * up;
            };
        });
    }
}

// The choice of every row, and who meets whom: experts rising, the rows of each in order, by four. One CTA, a warp per row.
KERNEL(ROWS * 32, 1) rows_choose(const float* logits, int rows, Meeting* meetings, u32* count, float* weights) {
    constexpr int SPANS = (EXPERTS + 31) / 32;   // of experts, one for each warp
    static_assert(SPANS <= ROWS);
    __shared__ u32 masks[EXPERTS], starts[EXPERTS], totals[SPANS];
    __shared__ uint2 chosen[ROWS][TOP_K];
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < EXPERTS; i += ROWS * 32) masks[i] = 0;
    __syncthreads();
    wait_for_inputs();
    launch_dependents();
    Choice choice{0, 0.0f};
    if (row < rows) {
        choice = choose_experts(logits + row * ROUTER_ROWS, lane, chosen[row]);
        if (lane < TOP_K) {
            atomicOr(&masks[choice.id], 1u << row);
            weights[row * SHARES + lane] = choice.weight;
        }
        if (lane == 0) weights[row * SHARES + TOP_K] = sigmoid(load_cg(logits + row * ROUTER_ROWS + SHARED_GATE));
    }
    __syncthreads();
    if (row < SPANS) {
        const int expert = row * 32 + lane;
        const u32 own = expert < EXPERTS ? (__popc(masks[expert]) + 3) / 4 : 0;
        u32 sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(FULL, sum, d);
            if (lane >= d) sum += other;
        }
        if (expert < EXPERTS) starts[expert] = sum - own;
        if (lane == 31) totals[row] = sum;
    }
    __syncthreads();
    // Of a chosen expert, or of all together.
    u32 before = 0;
    const int span = threadIdx.x == TOP_K ? SPANS : (int)choice.id / 32;
    for (int i = 0; i < SPANS; i++) before += i < span ? totals[i] : 0;
    if (threadIdx.x == TOP_K) *count = before;
    if (row < rows && lane < TOP_K) {
        const u32 mask = masks[choice.id], rank = __popc(mask & ((1u << row) - 1));
        Meeting& meeting = meetings[before + starts[choice.id] + rank / 4];
        meeting.pairs[rank % 4] = row * SHARES + lane;
        if (rank % 4 == 0) meeting.expert = choice.id, meeting.count = min(4, (int)(__popc(mask) - rank));
    }
}

// The meetings in shared memory, for all threads of a CTA when they have met again; returns their number. All that there may be are
// asked for at once with the number.
DEVICE int load_meetings(Meeting* to, const Meeting* from, const u32* count) {
    constexpr int WORDS = MEETINGS * sizeof(Meeting) / 16, ROUNDS = (WORDS + ROW_THREADS - 1) / ROW_THREADS;
    uint4 own[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) own[i] = __ldcg((const uint4*)from + min(i * ROW_THREADS + (int)threadIdx.x, WORDS - 1));
    const int meetings = __ldcg(count);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
        if (i * ROW_THREADS + threadIdx.x < WORDS) ((uint4*)to)[i * ROW_THREADS + threadIdx.x] = own[i];
    return meetings;
}
// The first of a CTA's share of `total` things in a row, and of the next one's.
DEVICE uint2 share_of_cta(u32 total) {
    return make_uint2((u64)total * blockIdx.x / gridDim.x, (u64)total * (blockIdx.x + 1) / gridDim.x);
}

// Gate and up of the chosen experts: x [rows, HIDDEN] to activation.
KERNEL(ROW_THREADS, ROW_CTAS)
rows_up(const char* weights, const Meeting* list, const u32* list_count, FixedRows x, const float* squares, float* activation) {
    typedef RowTiles<HIDDEN_BLOCKS, 4, 1> T;
    __shared__ T::Shared shared;
    __shared__ Meeting meetings[MEETINGS];
    __shared__ float scales[ROWS];
    T t(dynamic_shared);
    wait_for_inputs();
    launch_dependents();
    const int count = load_meetings(meetings, list, list_count);
    // Of rows that are not there as well: nothing asks for them.
    row_scales(squares, scales, ROWS);
    __syncthreads();
    const uint2 tiles = share_of_cta(count * EXPERT_TILES);
    auto address = [&](u32 index, u32 block) {
        const u32 tile = tiles.x + index;
        const u64 row = (u64)meetings[tile / EXPERT_TILES].expert * EXPERT_TILES + tile % EXPERT_TILES;
        return weights + (row * HIDDEN_BLOCKS + block) * BLOCK4;
    };
    t.fill(tiles.y - tiles.x, address);
    t.run(
        shared, tiles.y - tiles.x, x, address, [&](u32 index) { return (tiles.x + index) / EXPERT_TILES; },
        [&](u32 index, int row, u32 block) {
            const Meeting& m = meetings[(tiles.x + index) / EXPERT_TILES];
            return row < m.count ? (int)(m.pairs[row] / SHARES) * x.width + block * BLOCK_INPUTS : -1;
        },
        [&](u32 index, int row, int output, float sum) {
            const u32 tile = tiles.x + index;
            const Meeting& m = meetings[tile / EXPERT_TILES];
            const bool there = row < m.count;
            const u32 pair = there ? m.pairs[row] : 0;
            sum *= scales[pair / SHARES];
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (there && output < 8)
                activation[(u64)(pair / SHARES) * DOWN_BLOCKS * BLOCK_INPUTS + pair % SHARES * EXPERT_STRIDE +
                           tile % EXPERT_TILES * 8 + output] = silu(sum) * up;
        });
}

// Down projections of the chosen experts and of the shared one, weighted, block by block to parts [rows, DOWN_BLOCKS, HIDDEN].
// activation [rows, DOWN_BLOCKS * 256], rounded by every CTA that needs it.
KERNEL(ROW_THREADS, ROW_CTAS)
rows_down(const char* experts, const char* shared_down, const Meeting* list, const u32* list_count, const float* weights,
          const float* activation, int rows, float* parts) {
    constexpr u32 TILES = HIDDEN / 16, ROUTED = TILES * EXPERT_BLOCKS, SHARED = TILES * SHARED_BLOCKS;
    // Whoever meets an expert, and rows by four that meet the shared one, are parties; each warp rounds a block of one of them.
    constexpr u32 MOST_BLOCKS = EXPERT_BLOCKS > SHARED_BLOCKS ? EXPERT_BLOCKS : SHARED_BLOCKS, TOGETHER = ROW_WARPS / MOST_BLOCKS;
    static_assert(TOGETHER >= 1);
    __shared__ Meeting meetings[MEETINGS];
    __shared__ float2 scales[ROW_WARPS][16];
    __shared__ __align__(16) u8 aside[ROW_WARPS][8 * BLOCK_INPUTS];
    BlockStream<BLOCK4, ROW_SLOTS4> stream(dynamic_shared);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    // The kernels that made them are complete: the one between launched this only after it had waited.
    const u32 count = load_meetings(meetings, list, list_count);
    __syncthreads();
    const uint2 share = share_of_cta(count * ROUTED + (rows + 3) / 4 * SHARED);
    auto address = [&](u32 i) {
        const u32 at = share.x + i;
        if (at < count * ROUTED) return experts + ((u64)meetings[at / ROUTED].expert * ROUTED + at % ROUTED) * BLOCK4;
        return shared_down + (u64)((at - count * ROUTED) % SHARED) * BLOCK4;
    };
    stream.fill(share.y - share.x, address);
    wait_for_inputs();
    auto party_of = [&](u32 at) { return at < count * ROUTED ? at / ROUTED : count + (at - count * ROUTED) / SHARED; };
    auto start_of = [&](u32 party) { return party < count ? party * ROUTED : count * ROUTED + (party - count) * SHARED; };
    auto blocks_of = [&](u32 party) -> u32 { return party < count ? EXPERT_BLOCKS : SHARED_BLOCKS; };
    auto met_by = [&](u32 party) -> u32 { return party < count ? meetings[party].count : min(4, rows - 4 * (int)(party - count)); };
    auto pair_of = [&](u32 party, u32 row) -> u32 {
        return party < count ? meetings[party].pairs[row] : (4 * (party - count) + row) * SHARES + TOP_K;
    };
    // Blocks of a row, of all its shares.
    auto block_of = [](u32 pair, u32 block) { return pair / SHARES * DOWN_BLOCKS + pair % SHARES * EXPERT_BLOCKS + block; };
    RowInputs<1> inputs;
    u32 at = share.x + warp;
    for (u32 first = party_of(share.x); start_of(first) < share.y; first += TOGETHER) {
        const u32 own = first + warp / MOST_BLOCKS, own_block = warp % MOST_BLOCKS;
        if (start_of(own) < share.y && own_block < blocks_of(own)) {
            const u32 met = met_by(own);
            // Of rows that are not there the first one's.
            auto pair = [&](u32 row) { return pair_of(own, row < met ? row : 0); };
            const float weight = load_cg(weights + pair(lane / 4 % 4));
            round_rows(
                [&](int row) { return activation + block_of(pair(row), own_block) * BLOCK_INPUTS; }, weight, aside[warp], scales[warp],
                lane);
        }
        __syncthreads();
        const u32 end = min(share.y, start_of(first + TOGETHER));
        // Of the block whose inputs a warp has: its scales, and where a lane's row has its outputs.
        u32 current = 0xffffffffu, current_scales = 0;
        float* to = nullptr;
        for (; at < end; at += ROW_WARPS) {
            const u32 party = party_of(at), blocks = blocks_of(party), inside = at - start_of(party);
            const u32 tile = inside / blocks, block = inside % blocks, place = (party - first) * MOST_BLOCKS + block;
            if (place != current) {
                current = place;
                inputs.take(aside[place], lane);
                current_scales = opaque(shared_address(scales[place]));
                to = lane % 4 < met_by(party) ? parts + (u64)block_of(pair_of(party, lane % 4), block) * HIDDEN + lane / 4 : nullptr;
            }
            block_times_rows<4>(stream.wait(), inputs, current_scales, lane, [&](int, float y0, float y1) {
                if (to) to[tile * 16] = y0, to[tile * 16 + 8] = y1;
            });
            stream.next(at - share.x, share.y - share.x, address);
        }
        __syncthreads();
    }
}

// Final norm and head: logits [rows, VOCAB], and of every CTA each row's best, best [rows, CTAs].
KERNEL(ROW_THREADS, ROW_CTAS)
rows_head(const char* weights, const Run* runs, FixedRows x, int rows, const float* squares, float* logits, Best* best) {
    constexpr float LOWEST = -3.402823466e+38f;
    __shared__ u32 bad[ROWS];
    __shared__ float scales[ROWS];
    if (threadIdx.x < ROWS) bad[threadIdx.x] = 0;
    // Of every thread, in shared memory because registers are what rows need most.
    __shared__ float highest[ROW_THREADS];
    __shared__ u32 highest_id[ROW_THREADS];
    highest[threadIdx.x] = LOWEST, highest_id[threadIdx.x] = 0xffffffffu;
    rows_linear<HIDDEN_BLOCKS, 4>(weights, blockIdx.x, tiles_of_cta(VOCAB_TILES), x, rows, [&](int) {
        row_scales(squares, scales, rows);
        return [&](int tile, int row, int output, float sum, bool there) {
            const u32 id = tile * 16 + output;
            if (!there || id >= VOCAB) return;
            sum *= scales[row];
            logits[(u64)row * VOCAB + id] = sum;
            if (!(fabsf(sum) <= -LOWEST)) atomicOr(&bad[row], 1u);
            // Ids of a thread rise: the first of equal ones stays.
            if (id < runs[row].vocab_limit && sum > highest[threadIdx.x]) highest[threadIdx.x] = sum, highest_id[threadIdx.x] = id;
        };
    });
    Best own{highest[threadIdx.x], highest_id[threadIdx.x], 0, 0};
#pragma unroll
    for (int d = 8; d > 0; d /= 2) {
        const Best other{__shfl_xor_sync(FULL, own.logit, d), __shfl_xor_sync(FULL, own.id, d), 0, 0};
        if (above(other, own)) own.logit = other.logit, own.id = other.id;
    }
    // Sixteen threads finish the outputs of a row; of few rows several times sixteen.
    __shared__ Best halves[ROW_THREADS / 16];
    if ((threadIdx.x & 15) == 0) halves[threadIdx.x >> 4] = own;
    __syncthreads();
    const int row = threadIdx.x, distance = rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
    if (row >= rows) return;
    own = halves[row];
    for (int i = row + distance; i < ROW_THREADS / 16; i += distance)
        if (above(halves[i], own)) own = halves[i];
    own.bad = bad[row];
    best[row * gridDim.x + blockIdx.x] = own;
}
