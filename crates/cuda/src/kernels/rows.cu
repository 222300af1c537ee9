// Linears of several sessions' tokens, one token each: the rows of a step share the weights, and each has the bits that it has alone. Experts
// are in rows_experts.cu, the delta step in rows_delta.cu.
//
// A row's arithmetic is that of gemv.cu, group by group and block by block. What differs is the place of numbers: inputs are rounded to
// fixed point where they are made; in mma columns 2r and 2r + 1 stand high and low bytes of row r of four rows, a quad, and a
// group's sums are taken on their own. A CTA has the inputs of all rows in shared memory, where its teams of 8 warps take them from; a team
// takes tiles as a CTA does in gemv.cu.
// Bytes moved: the weights once.

constexpr int ROWS = 16;      // most rows
static_assert(ROWS < 32, "attend has a lane for each, and one behind them");
constexpr int TEAM_WARPS = 8, TEAM_THREADS = TEAM_WARPS * 32;
constexpr int TEAMS = LITTLE_SHARED ? 1 : 2;
constexpr int ROW_THREADS = TEAMS * TEAM_THREADS;
constexpr int ROW_SLOTS = SHARED_KIB >= 227 ? 3 : LITTLE_SHARED ? 1 : 2;   // blocks of 4 bits that a warp has on the way
constexpr int ROW_SLOT_BYTES = TEAMS * TEAM_WARPS * ROW_SLOTS * BLOCK4;

DEVICE int team() { return threadIdx.x / TEAM_THREADS; }
DEVICE void team_meets() { meet(1 + team(), TEAM_THREADS); }

// ---- Rows of inputs as they lie in shared memory, and in device memory to be copied from there.
//
// A block of a row: high bytes of its 4 groups; low bytes, of groups 1, 0, 3, 2, so that a group's high and low bytes lie in different
// banks; scale and sum of each group. A row: its blocks, and of each block the sum of squares that a norm needs, in an odd number of 16 bytes,
// which keep rows apart in the banks. An image: ROWS such rows, in parts that some CTA each needs alone: of two parts the first has the
// even blocks.
constexpr int ROW_BLOCK = 2 * BLOCK_INPUTS + 4 * 8;
DEVICE constexpr int row_stride(int blocks) { return blocks * ROW_BLOCK + ((blocks + 3) / 4 | 1) * 16; }
struct RowImage {
    u8* at;
    int blocks, parts;

    DEVICE u8* block(int row, int block) const {
        const int stride = row_stride((blocks + parts - 1) / parts);
        return at + (block % parts * ROWS + row) * stride + block / parts * ROW_BLOCK;
    }
    // Of a row that is in one part.
    DEVICE float* squares(int row) const { return (float*)block(row, blocks); }
};

// A lane's part of a block, to where the block lies.
DEVICE void store_lane(u8* block, const FixedLane& own, int lane, int group) {
    u8* const to = lane >> 2 & 1 ? block + BLOCK_INPUTS + (group ^ 1) * GROUP : block + group * GROUP;
    *(uint4*)(to + (lane & 3) * 16) = make_uint4(own.words[0], own.words[1], own.words[2], own.words[3]);
    if ((lane & 7) == 0) ((float2*)(block + 2 * BLOCK_INPUTS))[group] = make_float2(own.scale, own.sum);
}

// Groups of a row from group `first` on that lie in shared memory, times `scale`, and nothing in those behind them up to `stored`; one
// warp.
DEVICE void fix_groups(const RowImage& out, int row, int first, const float* values, float scale, int groups, int stored, int lane) {
    const bool there = lane < 8 * groups;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = there ? values[lane_start(0, lane) + i % 4 + i / 4 * 16] * scale : 0.0f;
    const FixedLane own = fix_lane(v, lane);
    const int group = first + (lane >> 3);
    if (lane < 8 * stored) store_lane(out.block(row, group / 4), own, lane, group % 4);
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
// Then its norm without the scale, to `out`. A CTA has a block: two warps add, one goes on. `meeting_count` becomes 0 for what comes behind.
enum Parts { NOTHING, MIXED, EXPERTS_PARTS };
KERNEL(64, 8)
rows_norm(float* h, const float* parts, int kind, const float* norm, RowImage out, u32* meeting_count) {
    __shared__ float stream[BLOCK_INPUTS];
    const int lane = threadIdx.x & 31, row = blockIdx.x / HIDDEN_BLOCKS, block = blockIdx.x % HIDDEN_BLOCKS;
    launch_dependents();
    float v[8], w[8];
    if (threadIdx.x < 32) load_lane(w, norm + lane_start(block, lane));
    wait_for_inputs();
    if (blockIdx.x == 0 && threadIdx.x == 0) *meeting_count = 0;
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
    store_lane(out.block(row, block), fix_lane(v, lane), lane, lane >> 3);
    if (lane == 0) out.squares(row)[block] = sum;
}

// Rows of `x` [rows, 256 blocks] as they are.
KERNEL(32, 16) rows_fix(const float* x, RowImage out) {
    const int lane = threadIdx.x, row = blockIdx.x / out.blocks, block = blockIdx.x % out.blocks;
    launch_dependents();
    wait_for_inputs();
    float v[8];
    load_lane(v, x + (u64)row * out.blocks * BLOCK_INPUTS + lane_start(block, lane));
    store_lane(out.block(row, block), fix_lane(v, lane), lane, lane >> 3);
}

// Attention's parts of every row together, to out [rows, QUERY_WIDTH]. A CTA has a head.
KERNEL(256, 4)
rows_attend_combine(const Run* runs, int parts, const float* projected, const float2* part_sums, const float* part_values,
                    RowImage out) {
    __shared__ float values[HEAD];
    combine_parts<HEAD>(runs, parts, projected, part_sums, part_values, [&](int i, float value) { values[i] = value; });
    __syncthreads();
    if (threadIdx.x < 32) fix_groups(out, blockIdx.y, blockIdx.x * (HEAD / GROUP), values, 1.0f, HEAD / GROUP, HEAD / GROUP, threadIdx.x);
}

// ---- Blocks times rows.

// A lane's inputs of a block in shared memory: of row g / 2 of each quad high (g even) or low bytes of the four groups; scales and sums of
// row t. Quads lie APART bytes behind each other. Bytes of one quad stay in registers, those of several are read for every block of weights.
template <int QUADS, int APART> struct BlockInputs {
    static constexpr bool STAY = QUADS == 1;
    u32 even, odd, own_groups;   // addresses; those of groups 0 and 2, and of 1 and 3
    uint4 own[STAY ? 4 : 1];

    BlockInputs() = default;
    // Addresses of the block, of row g / 2 and of row t of the first quad.
    DEVICE BlockInputs(u32 of_bytes, u32 of_groups, int lane) {
        const bool low = lane >> 2 & 1;
        const u32 at = of_bytes + (lane & 3) * 16;
        even = at + (low ? BLOCK_INPUTS + GROUP : 0), odd = at + (low ? BLOCK_INPUTS - GROUP : 0);
        own_groups = of_groups + 2 * BLOCK_INPUTS;
        if (STAY)
#pragma unroll
            for (int j = 0; j < 4; j++) own[j] = load_shared16((j & 1 ? odd : even) + j * GROUP);
    }
    DEVICE uint4 bytes(int quad, int j) const {
        return STAY ? own[STAY ? j : 0] : load_shared16((j & 1 ? odd : even) + quad * APART + j * GROUP);
    }
    // Scale and sum of groups 2 pair and 2 pair + 1.
    DEVICE uint4 groups(int quad, int pair) const { return load_shared16(own_groups + quad * APART + pair * 16); }
};

// `block` is an address in shared memory. `take(q, y0, y1)` gets outputs g and g + 8 of row t of quad q.
template <int BITS, int QUADS, int APART, class Take>
DEVICE void block_times_rows(u32 block, const BlockInputs<QUADS, APART>& x, int lane, Take take) {
    const u32 codes = block + lane * 16, factors = block + (BITS == 4 ? 2048 : 4096) + (lane >> 2) * 32;
    // Sums of groups 0 and 2, and of 1 and 3.
    float sums[QUADS][2][2];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        // Scale and bias of outputs g and g + 8 for two groups; scale and sum of the rows' groups.
        const uint4 weights = load_shared16(factors + pair * 16);
        uint4 inputs[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) inputs[q] = x.groups(q, pair);
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
                const uint4 bytes = x.bytes(q, j);
                mma_u8_s8(c, w[0], w[1], w[2], w[3], bytes.x, bytes.y);
                mma_u8_s8(c, w[4], w[5], w[6], w[7], bytes.z, bytes.w);
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

// A warp's stream of blocks through shared memory: those with numbers first, first + APART, ... below `count`.
template <int BYTES, int DEPTH, int APART = TEAM_WARPS> struct BlockStream {
    static constexpr int WHOLE = BYTES / 512, REST = BYTES % 512 / 16;   // pieces for all lanes, and for the first ones
    u32 slots, slot;   // addresses in shared memory: of the first one, and of the next to be used
    u32 first;

    // `shared` is the team's.
    DEVICE BlockStream(char* shared, u32 first) : first(first) {
        slots = slot = opaque(shared_address(shared) + threadIdx.x / 32 % TEAM_WARPS * DEPTH * BYTES);
    }
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
    // The warp's blocks FROM to TO, not including the latter, of those that there are slots for.
    template <int FROM, int TO, class Address> DEVICE void fill(u32 count, Address address) {
#pragma unroll
        for (int i = FROM; i < TO; i++) fetch(first + i * APART, slots + i * BYTES, count, address);
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
        fetch(at + DEPTH * APART, slot, count, address);
        slot = slot == slots + (DEPTH - 1) * BYTES ? slots : slot + BYTES;
    }
};

// The row whose outputs a thread finishes.
template <int QUADS> DEVICE int row_of_thread() { return (threadIdx.x >> 4) % (4 * QUADS); }

// The tiles of a team, `count` of them, of BLOCKS blocks each, times rows that lie STRIDE bytes apart; a tile's outputs are added up over
// the blocks in CHAINS chains: with two in the order of gemv.cu, even blocks, odd ones, and both.
template <int BLOCKS, int BITS, int QUADS, int STRIDE, int CHAINS = 2> struct RowTiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8, DEPTH = BITS == 4 ? ROW_SLOTS : 1;
    // Of the few warps' worth of memory there is for blocks of 8 bits on some GPUs.
    static constexpr int STREAMS = TEAM_WARPS * DEPTH * BYTES * TEAMS <= ROW_SLOT_BYTES ? TEAM_WARPS : TEAM_WARPS / 2;
    static_assert(STREAMS * DEPTH * BYTES * TEAMS <= ROW_SLOT_BYTES);
    // Tiles whose sums stand beside each other in shared memory.
    static constexpr int CHUNK_BLOCKS = (SHARED_KIB >= 227 ? 2 : 1) * TEAM_WARPS * (QUADS == 1 ? 3 : 1);
    static constexpr u32 CHUNK = BLOCKS >= CHUNK_BLOCKS ? 1 : CHUNK_BLOCKS / BLOCKS;
    typedef float Sums[CHUNK * BLOCKS][4 * QUADS][BLOCK_ROWS];
    BlockStream<BYTES, DEPTH, STREAMS> stream;

    // `slots` are those of all teams.
    DEVICE RowTiles(char* slots) : stream(slots + team() * (ROW_SLOT_BYTES / TEAMS), threadIdx.x / 32 % TEAM_WARPS) {}

    // Asks for each warp's first block, or for those behind it. `address(index, block)`.
    template <class Address> DEVICE void fetch_first(u32 count, Address address) { fill<0, 1>(count, address); }
    template <class Address> DEVICE void fetch_next(u32 count, Address address) { fill<1, DEPTH>(count, address); }
    template <int FROM, int TO, class Address> DEVICE void fill(u32 count, Address address) {
        if (threadIdx.x / 32 % TEAM_WARPS >= STREAMS) return;
        stream.fill<FROM, TO>(count * BLOCKS, [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); });
    }
    // Once first blocks and the image are there, for all warps. `key(index)`: which rows a tile meets; `place(index, row)`: where one of the
    // first quad begins in shared memory; `finish(index, row, output, sum)`.
    template <class Address, class Key, class Place, class Finish>
    DEVICE void run(Sums& shared, u32 count, Address address, Key key, Place place, Finish finish) {
        auto flat = [&](u32 at) { return address(at / BLOCKS, at % BLOCKS); };
        const u32 warp = threadIdx.x / 32 % TEAM_WARPS, lane = threadIdx.x % 32;
        // Where a lane's first sum of the chunk's first block goes.
        const u32 sums = opaque(shared_address(&shared[0][lane % 4][lane / 4]));
        BlockInputs<QUADS, 4 * STRIDE> inputs;
        u32 current = 0xffffffffu, at = warp;
        for (u32 first = 0; first < count; first += CHUNK) {
            const u32 tiles = min(CHUNK, count - first), end = warp < STREAMS ? (first + tiles) * BLOCKS : 0;
            for (; at < end; at += STREAMS) {
                const u32 index = at / BLOCKS, block = at % BLOCKS, wanted = key(index) * BLOCKS + block;
                if (wanted != current) {
                    const u32 inside = block * ROW_BLOCK;
                    inputs = {place(index, lane / 8) + inside, place(index, lane % 4) + inside, (int)lane};
                    current = wanted;
                }
                const u32 weights = stream.wait(), to = sums + (at - first * BLOCKS) * sizeof(shared[0]);
                block_times_rows<BITS>(weights, inputs, lane, [&](int q, float y0, float y1) {
                    store_shared(to + q * 4 * BLOCK_ROWS * 4, y0);
                    store_shared(to + q * 4 * BLOCK_ROWS * 4 + 32, y1);
                });
                stream.next(at, count * BLOCKS, flat);
            }
            team_meets();
            // Whole warps have a tile, for shuffles.
            const int output = threadIdx.x & 15, row = row_of_thread<QUADS>();
            for (u32 i = threadIdx.x % TEAM_THREADS / (64 * QUADS); i < tiles; i += TEAM_THREADS / (64 * QUADS)) {
                float chains[2] = {0.0f, 0.0f};
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) chains[block % CHAINS] += shared[i * BLOCKS + block][row][output];
                finish(first + i, row, output, CHAINS == 2 ? chains[0] + chains[1] : chains[0]);
            }
            if (first + CHUNK < count) team_meets();
        }
    }
};

// Of every CTA: slots of all teams, then the image of all rows, then sums of each team.
DEVICE char* image_of_cta() { return dynamic_shared + ROW_SLOT_BYTES; }
template <int STRIDE> DEVICE char* sums_of_cta() { return dynamic_shared + ROW_SLOT_BYTES + ROWS * STRIDE; }
// The scale of a row's norm, of an image that rows_norm made.
DEVICE float row_scale(int row) {
    return norm_scale((const float*)(image_of_cta() + row * row_stride(HIDDEN_BLOCKS) + HIDDEN_BLOCKS * ROW_BLOCK));
}

// Asks for `rows` rows of an image's part.
template <int STRIDE> DEVICE void fetch_image(const RowImage& x, int part, int rows) {
    const u32 to = shared_address(image_of_cta());
    const u8* from = x.at + part * ROWS * STRIDE;
    for (int i = threadIdx.x; i < rows * (STRIDE / 16); i += ROW_THREADS) copy16(to + i * 16, from + i * 16);
    copy_commit();
}

// A linear whose tiles all meet all rows of a part of `x`: a team has `tiles` of them from `first` on, `apart`. `weights_of(tile, block)`;
// `finish(tile, row, output, sum)`; the last argument says whether there is such a row.
template <int BLOCKS, int BITS, int CHAINS, int QUADS, class Weights, class Finish>
DEVICE void quads_linear(int first, int apart, int tiles, const RowImage& x, int part, int rows, Weights weights_of, Finish finish) {
    constexpr int STRIDE = row_stride(BLOCKS);
    typedef RowTiles<BLOCKS, BITS, QUADS, STRIDE, CHAINS> T;
    typename T::Sums& sums = ((typename T::Sums*)sums_of_cta<STRIDE>())[team()];
    T t(dynamic_shared);
    auto address = [&](int index, int block) { return weights_of(first + index * apart, block); };
    launch_dependents();
    // Inputs would queue behind all that is asked for before them, and nothing begins without them.
    t.fetch_first(tiles, address);
    wait_for_inputs();
    fetch_image<STRIDE>(x, part, rows);
    t.fetch_next(tiles, address);
    // Of an odd number of blocks in two parts the last one of the second part is not there.
    if (x.parts == 2 && part == 1 && x.blocks % 2 == 1) {
        copy_wait<0>();
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * (ROW_BLOCK / 4); i += ROW_THREADS)
            *(u32*)(image_of_cta() + i / (ROW_BLOCK / 4) * STRIDE + (BLOCKS - 1) * ROW_BLOCK + i % (ROW_BLOCK / 4) * 4) = 0;
    }
    copy_wait<T::DEPTH - 1>();
    __syncthreads();
    const u32 image = shared_address(image_of_cta());
    t.run(
        sums, tiles, address, [](int) { return 0; }, [=](int, int row) { return image + row * STRIDE; },
        [&](int index, int row, int output, float sum) { finish(first + index * apart, row, output, sum, row < rows); });
}
template <int BLOCKS, int BITS, int CHAINS, class Weights, class Finish>
DEVICE void rows_linear(int first, int apart, int tiles, const RowImage& x, int part, int rows, Weights weights, Finish finish) {
    if (rows <= 4) quads_linear<BLOCKS, BITS, CHAINS, 1>(first, apart, tiles, x, part, rows, weights, finish);
    else if (rows <= 8) quads_linear<BLOCKS, BITS, CHAINS, 2>(first, apart, tiles, x, part, rows, weights, finish);
    else quads_linear<BLOCKS, BITS, CHAINS, 4>(first, apart, tiles, x, part, rows, weights, finish);
}
// Of a matrix whose tiles lie one after the other, for inputs that do as well: `tiles` of them, of which teams take one in turn, from
// team `before` on.
template <int BLOCKS, int BITS, class Finish>
DEVICE void rows_linear(const char* weights, int before, int tiles, const RowImage& x, int rows, Finish finish) {
    const int first = blockIdx.x * TEAMS + team() - before, apart = gridDim.x * TEAMS;
    rows_linear<BLOCKS, BITS, 2>(
        first, apart, tiles > first ? (tiles - first - 1) / apart + 1 : 0, x, 0, rows,
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + block) * (BITS == 4 ? BLOCK4 : BLOCK8); }, finish);
}

// Norm and the projections of a mixer, to out [rows, stride].
KERNEL(ROW_THREADS, 1)
rows_project(const char* weights, int tiles, RowImage x, int rows, float* out) {
    rows_linear<HIDDEN_BLOCKS, 4>(weights, 0, tiles, x, rows, [=](int tile, int row, int output, float sum, bool there) {
        if (there) out[(row * tiles + tile) * 16 + output] = sum * row_scale(row);
    });
}

// Output projections, to parts [rows, 2, HIDDEN]: a CTA has tiles' even or their odd blocks.
template <int BLOCKS> DEVICE void rows_output(const char* weights, const RowImage& x, int rows, float* parts) {
    constexpr int HALF = (BLOCKS + 1) / 2, TILES = HIDDEN / 16;
    const int odd = blockIdx.x & 1, first = (blockIdx.x >> 1) * TEAMS + team(), apart = (gridDim.x >> 1) * TEAMS;
    rows_linear<HALF, 4, 1>(
        first, apart, TILES > first ? (TILES - first - 1) / apart + 1 : 0, x, odd, rows,
        // Of a block that is not there another one's, times nothing.
        [=](int tile, int block) { return weights + ((u64)tile * BLOCKS + min(2 * block + odd, BLOCKS - 1)) * BLOCK4; },
        [=](int tile, int row, int output, float sum, bool there) {
            if (there) parts[(row * 2 + odd) * HIDDEN + tile * 16 + output] = sum;
        });
}
KERNEL(ROW_THREADS, 1) rows_delta_output(const char* weights, RowImage x, int rows, float* parts) {
    rows_output<VALUE_BLOCKS>(weights, x, rows, parts);
}
KERNEL(ROW_THREADS, 1) rows_attention_output(const char* weights, RowImage x, int rows, float* parts) {
    rows_output<QUERY_BLOCKS>(weights, x, rows, parts);
}

// Norm, router and shared gate to logits [rows, ROUTER_ROWS], gate and up of the shared expert to activation
// [rows, DOWN_BLOCKS * 256]. A team per tile; CTAs have tiles of one kind.
KERNEL(ROW_THREADS, 1)
rows_route_and_share(const char* router, const char* shared_up, RowImage x, int rows, float* logits, float* activation) {
    constexpr int ROUTER_CTAS = (ROUTER_TILES + TEAMS - 1) / TEAMS;
    if (blockIdx.x < ROUTER_CTAS) {
        rows_linear<HIDDEN_BLOCKS, 8>(router, 0, ROUTER_TILES, x, rows, [=](int tile, int row, int output, float sum, bool there) {
            if (there) logits[row * ROUTER_ROWS + tile * 16 + output] = sum * row_scale(row);
        });
    } else {
        const int before = ROUTER_CTAS * TEAMS, tiles = SHARED_WIDTH / 8;
        rows_linear<HIDDEN_BLOCKS, 4>(shared_up, before, tiles, x, rows, [=](int tile, int row, int output, float sum, bool there) {
            sum *= row_scale(row);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (there && output < 8)
                activation[(u64)row * DOWN_BLOCKS * BLOCK_INPUTS + TOP_K * EXPERT_STRIDE + tile * 8 + output] = silu(sum) * up;
        });
    }
}

// The first of the share of `total` things in a row that the `own`-th of `all` has, and of the next one's.
DEVICE uint2 share_of(u32 total, u32 own, u32 all) { return make_uint2((u64)total * own / all, (u64)total * (own + 1) / all); }

// Final norm and head: logits [rows, VOCAB], and of every CTA each row's best, best [rows, CTAs]. There are so many tiles that a warp takes
// whole ones, block after block, and adds up in registers.
template <int QUADS>
DEVICE void head_of_quads(const char* weights, const Run* runs, const RowImage& x, int rows, float* logits, Best* best) {
    constexpr int STRIDE = row_stride(HIDDEN_BLOCKS), HEAD_WARPS = TEAMS * TEAM_WARPS;
    constexpr float LOWEST = -3.402823466e+38f;
    __shared__ float scales[ROWS];
    __shared__ u32 limits[ROWS];
    // Of row t of each quad, in shared memory because registers are what rows need most: in the place of sums, which there are none of.
    static_assert(QUADS * ROW_THREADS * 8 <= TEAMS * sizeof(typename RowTiles<HIDDEN_BLOCKS, 4, QUADS, STRIDE>::Sums));
    float(*highest)[ROW_THREADS] = (float(*)[ROW_THREADS])sums_of_cta<STRIDE>();
    u32(*highest_id)[ROW_THREADS] = (u32(*)[ROW_THREADS])highest[QUADS];
    // Of a warp that has used its blocks up, in their place.
    auto bests_of = [](int warp) { return (Best*)(dynamic_shared + warp * (ROW_SLOTS * BLOCK4)); };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint2 tiles = share_of(VOCAB_TILES, blockIdx.x * HEAD_WARPS + warp, gridDim.x * HEAD_WARPS);
    const u32 blocks = (tiles.y - tiles.x) * HIDDEN_BLOCKS;
    weights += (u64)tiles.x * HIDDEN_BLOCKS * BLOCK4;
    auto address = [&](u32 at) { return weights + (u64)at * BLOCK4; };
    BlockStream<BLOCK4, ROW_SLOTS, 1> stream(dynamic_shared + team() * (ROW_SLOT_BYTES / TEAMS), 0);
    launch_dependents();
    stream.fill<0, 1>(blocks, address);
    wait_for_inputs();
    fetch_image<STRIDE>(x, 0, rows);
    stream.fill<1, ROW_SLOTS>(blocks, address);
    copy_wait<ROW_SLOTS - 1>();
    __syncthreads();
    if (threadIdx.x < rows) scales[threadIdx.x] = row_scale(threadIdx.x), limits[threadIdx.x] = runs[threadIdx.x].vocab_limit;
    __syncthreads();
    const u32 image = shared_address(image_of_cta());
    u32 bad = 0;
#pragma unroll
    for (int q = 0; q < QUADS; q++) highest[q][threadIdx.x] = LOWEST, highest_id[q][threadIdx.x] = 0xffffffffu;
    for (u32 at = 0, id_of_tile = tiles.x * 16; at < blocks; id_of_tile += 16) {
        float chains[QUADS][2][2] = {};
#pragma unroll 1
        for (int pair = 0; pair < HIDDEN_BLOCKS; pair += 2)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int block = pair + odd;
                if (block == HIDDEN_BLOCKS) break;
                const u32 inside = block * ROW_BLOCK;
                const BlockInputs<QUADS, 4 * STRIDE> inputs(image + lane / 8 * STRIDE + inside, image + lane % 4 * STRIDE + inside, lane);
                block_times_rows<4>(stream.wait(), inputs, lane, [&](int q, float y0, float y1) {
                    chains[q][odd][0] += y0, chains[q][odd][1] += y1;
                });
                stream.next(at++, blocks, address);
            }
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 4 * q + lane % 4;
                const u32 id = id_of_tile + half * 8 + lane / 4;
                if (row >= rows || id >= VOCAB) continue;
                const float logit = (chains[q][0][half] + chains[q][1][half]) * scales[row];
                logits[(u64)row * VOCAB + id] = logit;
                if (!(fabsf(logit) <= -LOWEST)) bad |= 1u << q;
                // Ids of a lane rise: the first of equal ones stays.
                if (id < limits[row] && logit > highest[q][threadIdx.x]) highest[q][threadIdx.x] = logit, highest_id[q][threadIdx.x] = id;
            }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        Best own{highest[q][threadIdx.x], highest_id[q][threadIdx.x], bad >> q & 1, 0};
        join_lanes<4>(own);
        if (lane < 4) bests_of(warp)[4 * q + lane] = own;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= rows) return;
    Best of_row = bests_of(0)[row];
    for (int i = 1; i < HEAD_WARPS; i++) join(of_row, bests_of(i)[row]);
    best[row * gridDim.x + blockIdx.x] = of_row;
}
KERNEL(ROW_THREADS, 1)
rows_head(const char* weights, const Run* runs, RowImage x, int rows, float* logits, Best* best) {
    if (rows <= 4) head_of_quads<1>(weights, runs, x, rows, logits, best);
    else if (rows <= 8) head_of_quads<2>(weights, runs, x, rows, logits, best);
    else head_of_quads<4>(weights, runs, x, rows, logits, best);
}
