// Linears of several sessions' tokens, one token each: the rows of a step share the weights, and each has the bits that it has alone.
//
// A row's arithmetic is that of gemv.cu, group by group and block by block. What differs is the place of numbers: a kernel of its own
// rounds inputs to fixed point; in mma columns 2r and 2r + 1 stand high and low bytes of row r of four rows, a quad, and a group's sums
// are taken on their own. A CTA of 8 warps takes tiles as in gemv.cu; a warp keeps the inputs of its block in registers.
// Experts: rows that chose one are put together by four; the lists are made on the device.
// Bytes moved: the weights once, of experts those of every one that some row chose.

constexpr int ROWS = 16;      // most rows
constexpr int ROW_WARPS = 8;
constexpr int ROW_THREADS = ROW_WARPS * 32;
constexpr int SHARES = TOP_K + 1;   // what a row adds up: experts, and the shared one

// Up to four rows that meet an expert. A pair is row * SHARES + i for a row's i-th choice.
struct Meeting {
    u32 expert, count;
    u32 pairs[4];
    u32 unused[2];
};
constexpr int MEETINGS = ROWS * TOP_K;

// ---- Rounding to fixed point, a warp per block of a row; the layout is that of store_fixed.
DEVICE void store_lane(const FixedRows& out, int row, int block, const FixedLane& own, int lane) {
    u8* plane = lane >> 2 & 1 ? out.low : out.high;
    const u64 at = (u64)row * out.width + block * BLOCK_INPUTS + (lane >> 3) * GROUP;
    *(uint4*)(plane + at + (lane & 3) * 16) = make_uint4(own.words[0], own.words[1], own.words[2], own.words[3]);
    if ((lane & 7) == 0) out.groups[at / GROUP] = make_float2(own.scale, own.sum);
}

// Norm of h without its scale, whose sums of squares go to `squares` [rows, HIDDEN_BLOCKS]. Before it the experts' `parts`
// [rows, DOWN_BLOCKS, HIDDEN] are added to h, if there are any.
KERNEL(256, 4) rows_norm(float* h, const float* parts, const float* norm, int rows, FixedRows out, float* squares) {
    const int at = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    const int row = at / HIDDEN_BLOCKS, block = at % HIDDEN_BLOCKS, k = lane_start(block, lane);
    launch_dependents();
    wait_for_inputs();
    if (row >= rows) return;
    float v[16], w[16];
    load16(v, h + row * HIDDEN + k);
    load16(w, norm + k);
    if (parts) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // In the order of gemv.cu: even blocks, odd ones, and both.
            float4 sums[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
            for (int b = 0; b < DOWN_BLOCKS; b++) {
                const float4 p = load_cg((const float4*)(parts + ((u64)row * DOWN_BLOCKS + b) * HIDDEN + k + 16 * i));
                sums[b & 1].x += p.x, sums[b & 1].y += p.y, sums[b & 1].z += p.z, sums[b & 1].w += p.w;
            }
            v[4 * i] += sums[0].x + sums[1].x, v[4 * i + 1] += sums[0].y + sums[1].y;
            v[4 * i + 2] += sums[0].z + sums[1].z, v[4 * i + 3] += sums[0].w + sums[1].w;
        }
        // The lanes of low bytes have read the same values.
        __syncwarp();
        if ((lane >> 2 & 1) == 0)
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(float4*)(h + row * HIDDEN + k + 16 * i) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    const float sum = normed(v, w);
    store_lane(out, row, block, fix_lane(v, lane), lane);
    if (lane == 0) squares[row * HIDDEN_BLOCKS + block] = sum;
}

// Rows of `x` [rows, width of `out`] as they are, or with the scale of the gated norm from `squares` [rows, VALUE_HEADS, 4].
KERNEL(256, 4) rows_fix(const float* x, const float* squares, int rows, FixedRows out) {
    const int at = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, blocks = out.width / BLOCK_INPUTS;
    const int row = at / blocks, block = at % blocks, k = lane_start(block, lane);
    wait_for_inputs();
    // Only now, for rows_down: see experts_up.
    launch_dependents();
    if (row >= rows) return;
    float v[16];
    load16(v, x + (u64)row * out.width + k);
    if (squares) {
        const float scale = gated_norm_scale(squares + row * VALUE_HEADS * 4, k);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] *= scale;
    }
    store_lane(out, row, block, fix_lane(v, lane), lane);
}

// The scale of a row's norm, from what rows_norm left.
DEVICE float row_scale(const float* squares, int row) {
    float own[HIDDEN_BLOCKS];
#pragma unroll
    for (int i = 0; i < HIDDEN_BLOCKS; i++) own[i] = load_cg(squares + row * HIDDEN_BLOCKS + i);
    return norm_scale(own);
}

// ---- Blocks times rows.

// A lane's inputs of a block: of row g / 2 of each quad high (g even) or low bytes of the four groups.
template <int QUADS> struct RowInputs {
    uint4 bytes[QUADS][4];

    // `place(row)`: where the row's block begins, in bytes from the start of a plane; negative: no such row.
    // Scales and sums go to `scales` [4 QUADS, 4], in shared memory.
    template <class Place> DEVICE void load(const FixedRows& x, Place place, float2* scales, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int at = place(4 * q + (g >> 1));
            const u8* from = (g & 1 ? x.low : x.high) + max(at, 0) + t * 16;
#pragma unroll
            for (int j = 0; j < 4; j++) bytes[q][j] = at >= 0 ? __ldcg((const uint4*)(from + j * GROUP)) : make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
#pragma unroll
        for (int i = lane; i < 16 * QUADS; i += 32) {
            const int at = place(i / 4);
            scales[i] = at >= 0 ? __ldcg(x.groups + at / GROUP + i % 4) : make_float2(0, 0);
        }
        __syncwarp();
    }
};

// `take(q, y0, y1)` gets outputs g and g + 8 of row t of quad q.
template <int BITS, int QUADS, class Take>
DEVICE void block_times_rows(const char* block, const RowInputs<QUADS>& x, const float2* scales, int quads, int lane, Take take) {
    const int g = lane >> 2, t = lane & 3;
    // Sums of groups 0 and 2, and of 1 and 3.
    float sums[QUADS][2][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 w[8];
        if (BITS == 4) {
            const uint4 q = *(const uint4*)(block + j * 512 + lane * 16);
            w[0] = q.x & NIBBLES, w[1] = q.y & NIBBLES, w[2] = q.x >> 4 & NIBBLES, w[3] = q.y >> 4 & NIBBLES;
            w[4] = q.z & NIBBLES, w[5] = q.w & NIBBLES, w[6] = q.z >> 4 & NIBBLES, w[7] = q.w >> 4 & NIBBLES;
        } else {
            const uint4 a = *(const uint4*)(block + j * 1024 + lane * 16), b = *(const uint4*)(block + j * 1024 + 512 + lane * 16);
            w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
        }
        const uint2 s = *(const uint2*)(block + (BITS == 4 ? 2048 : 4096) + (4 * g + j) * 8);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            if (q >= quads) break;
            int c[4] = {0, 0, 0, 0};
            mma_u8_s8(c, w[0], w[1], w[2], w[3], x.bytes[q][j].x, x.bytes[q][j].y);
            mma_u8_s8(c, w[4], w[5], w[6], w[7], x.bytes[q][j].z, x.bytes[q][j].w);
            const float2 own = scales[(4 * q + t) * 4 + j];
            const float y0 = group_term(s.x, own.x, own.y, c[0], c[1]), y1 = group_term(s.y, own.x, own.y, c[2], c[3]);
            sums[q][j & 1][0] = j < 2 ? y0 : sums[q][j & 1][0] + y0;
            sums[q][j & 1][1] = j < 2 ? y1 : sums[q][j & 1][1] + y1;
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        if (q >= quads) break;
        take(q, sums[q][0][0] + sums[q][1][0], sums[q][0][1] + sums[q][1][1]);
    }
}

// The stream of a warp's blocks through shared memory: those with numbers warp, warp + 8, ... below `count`.
template <int BYTES, int DEPTH> struct BlockStream {
    char* slots;
    int lane, ahead, filled, slot;

    DEVICE BlockStream(char* shared) {
        slots = shared + (threadIdx.x >> 5) * DEPTH * BYTES;
        lane = threadIdx.x & 31, ahead = threadIdx.x >> 5, filled = 0, slot = 0;
    }
    template <class Address> DEVICE void fetch(int count, Address address) {
        if (ahead < count) {
            const char* from = address(ahead);
            char* to = slots + filled * BYTES;
#pragma unroll
            for (int i = 0; i < BYTES / 512; i++) copy16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
            if (lane < 16) copy16(to + BYTES / 512 * 512 + lane * 16, from + BYTES / 512 * 512 + lane * 16);
            ahead += ROW_WARPS;
            if (++filled == DEPTH) filled = 0;
        }
        copy_commit();
    }
    template <class Address> DEVICE void fill(int count, Address address) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) fetch(count, address);
    }
    DEVICE const char* wait() {
        copy_wait<DEPTH - 1>();
        __syncwarp();
        return slots + slot * BYTES;
    }
    template <class Address> DEVICE void next(int count, Address address) {
        if (++slot == DEPTH) slot = 0;
        __syncwarp();
        fetch(count, address);
    }
};

// The tiles of a CTA, `count` of them, of BLOCKS blocks each; a tile's outputs are added up over the blocks in the order of gemv.cu.
template <int BLOCKS, int BITS, int QUADS> struct RowTiles {
    static constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8, DEPTH = BITS == 4 ? 4 : 2;
    // Blocks whose sums stand beside each other in shared memory: about three per warp, in whole rounds of the warps if possible.
    static constexpr int CHUNK = BLOCKS >= 3 * ROW_WARPS ? 1 : 3 * ROW_WARPS / BLOCKS;
    struct Shared {
        float sums[CHUNK * BLOCKS][4 * QUADS][BLOCK_ROWS];
        float2 scales[ROW_WARPS][16 * QUADS];
    };
    BlockStream<BYTES, DEPTH> stream;
    int warp, lane;

    DEVICE RowTiles(char* dynamic) : stream(dynamic) { warp = threadIdx.x >> 5, lane = threadIdx.x & 31; }

    // `address(index, block)`, `key(index)`: which rows a tile meets, `place(index, row, block)`, `finish(index, row, output, sum)`.
    template <class Address> DEVICE void fill(int count, Address address) {
        stream.fill(count * BLOCKS, [&](int at) { return address(at / BLOCKS, at % BLOCKS); });
    }
    template <class Address, class Key, class Place, class Finish>
    DEVICE void run(Shared& shared, int count, int rows, const FixedRows& x, Address address, Key key, Place place, Finish finish) {
        auto flat = [&](int at) { return address(at / BLOCKS, at % BLOCKS); };
        RowInputs<QUADS> inputs;
        int current = -1, at = warp;
        const int quads = (rows + 3) / 4;
        for (int first = 0; first < count; first += CHUNK) {
            const int tiles = min(CHUNK, count - first), end = (first + tiles) * BLOCKS;
            for (; at < end; at += ROW_WARPS) {
                const int index = at / BLOCKS, block = at % BLOCKS, wanted = key(index) * BLOCKS + block;
                if (wanted != current) {
                    inputs.load(x, [&](int row) { return place(index, row, block); }, shared.scales[warp], lane);
                    current = wanted;
                }
                const char* weights = stream.wait();
                float(*sums)[BLOCK_ROWS] = shared.sums[at - first * BLOCKS];
                block_times_rows<BITS>(weights, inputs, shared.scales[warp], quads, lane, [&](int q, float y0, float y1) {
                    sums[4 * q + (lane & 3)][lane >> 2] = y0;
                    sums[4 * q + (lane & 3)][(lane >> 2) + 8] = y1;
                });
                stream.next(count * BLOCKS, flat);
            }
            __syncthreads();
            const int output = threadIdx.x & 15, row = threadIdx.x >> 4;
            // Whole warps, for shuffles.
            if (row < 4 * QUADS)
                for (int i = 0; i < tiles; i++) {
                    float both[2] = {0.0f, 0.0f};
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++) both[block & 1] += shared.sums[i * BLOCKS + block][row][output];
                    finish(first + i, row, output, both[0] + both[1]);
                }
            if (first + CHUNK < count) __syncthreads();
        }
    }
};

DEVICE int tiles_of_cta(int tiles) { return tiles > (int)blockIdx.x ? (tiles - blockIdx.x - 1) / gridDim.x + 1 : 0; }
DEVICE int tile_of_cta(int index) { return blockIdx.x + index * gridDim.x; }

// A linear whose tiles all meet all rows.
template <int BLOCKS, int BITS, class Finish>
DEVICE void rows_linear(const char* weights, int first, int tiles, const FixedRows& x, int rows, Finish finish) {
    typedef RowTiles<BLOCKS, BITS, ROWS / 4> T;
    // Behind the slots.
    typename T::Shared& shared = *(typename T::Shared*)(dynamic_shared + ROW_WARPS * 4 * BLOCK4);
    T t(dynamic_shared);
    auto address = [&](int index, int block) {
        return weights + ((u64)(first + index * gridDim.x) * BLOCKS + block) * T::BYTES;
    };
    launch_dependents();
    t.fill(tiles, address);
    wait_for_inputs();
    auto made = finish();
    t.run(
        shared, tiles, rows, x, address, [](int) { return 0; },
        [&](int, int row, int block) { return row < rows ? row * x.width + block * BLOCK_INPUTS : -1; },
        [&](int index, int row, int output, float sum) { made(first + index * gridDim.x, row, output, sum, row < rows); });
}

// Norm and the projections of a mixer, to out [rows, stride].
KERNEL(ROW_THREADS, 2)
rows_project(const char* weights, int tiles, FixedRows x, int rows, const float* squares, float* out, int stride) {
    rows_linear<HIDDEN_BLOCKS, 4>(weights, blockIdx.x, tiles_of_cta(tiles), x, rows, [&] {
        const float scale = row_scale(squares, threadIdx.x >> 4);
        return [=](int tile, int row, int output, float sum, bool there) {
            if (there) out[row * stride + tile * 16 + output] = sum * scale;
        };
    });
}

// Output projections, added to h [rows, HIDDEN].
template <int BLOCKS> DEVICE void rows_output(const char* weights, const FixedRows& x, int rows, float* h) {
    rows_linear<BLOCKS, 4>(weights, blockIdx.x, tiles_of_cta(HIDDEN / 16), x, rows, [&] {
        return [=](int tile, int row, int output, float sum, bool there) {
            float* to = h + row * HIDDEN + tile * 16 + output;
            if (there) *to = load_cg(to) + sum;
        };
    });
}
KERNEL(ROW_THREADS, 2) rows_delta_output(const char* weights, FixedRows x, int rows, float* h) {
    rows_output<VALUE_BLOCKS>(weights, x, rows, h);
}
KERNEL(ROW_THREADS, 2) rows_attention_output(const char* weights, FixedRows x, int rows, float* h) {
    rows_output<QUERY_BLOCKS>(weights, x, rows, h);
}

// Norm, router and shared gate to logits [rows, ROUTER_ROWS], gate and up of the shared expert to activation
// [rows, DOWN_BLOCKS * 256]. A CTA per tile.
KERNEL(ROW_THREADS, 2)
rows_route_and_share(const char* router, const char* shared_up, FixedRows x, int rows, const float* squares, float* logits,
                     float* activation) {
    if (blockIdx.x < ROUTER_TILES) {
        rows_linear<HIDDEN_BLOCKS, 8>(router, blockIdx.x, 1, x, rows, [&] {
            const float scale = row_scale(squares, threadIdx.x >> 4);
            return [=](int tile, int row, int output, float sum, bool there) {
                if (there) logits[row * ROUTER_ROWS + tile * 16 + output] = sum * scale;
            };
        });
    } else {
        rows_linear<HIDDEN_BLOCKS, 4>(shared_up, blockIdx.x - ROUTER_TILES, 1, x, rows, [&] {
            const float scale = row_scale(squares, threadIdx.x >> 4);
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
    __shared__ u32 masks[EXPERTS], starts[EXPERTS];
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < EXPERTS; i += ROWS * 32) masks[i] = 0;
    __syncthreads();
    wait_for_inputs();
    launch_dependents();
    Choice choice{0, 0.0f};
    if (row < rows) {
        choice = choose_experts(logits + row * ROUTER_ROWS, lane);
        if (lane < TOP_K) {
            atomicOr(&masks[choice.id], 1u << row);
            weights[row * SHARES + lane] = choice.weight;
        }
        if (lane == 0) weights[row * SHARES + TOP_K] = sigmoid(load_cg(logits + row * ROUTER_ROWS + SHARED_GATE));
    }
    __syncthreads();
    if (row == 0) {
        u32 before = 0;
        for (int first = 0; first < EXPERTS; first += 32) {
            const u32 own = first + lane < EXPERTS ? (__popc(masks[first + lane]) + 3) / 4 : 0;
            u32 sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 other = __shfl_up_sync(FULL, sum, d);
                if (lane >= d) sum += other;
            }
            if (first + lane < EXPERTS) starts[first + lane] = before + sum - own;
            before += __shfl_sync(FULL, sum, 31);
        }
        if (lane == 0) *count = before;
    }
    __syncthreads();
    if (row < rows && lane < TOP_K) {
        const u32 mask = masks[choice.id], rank = __popc(mask & ((1u << row) - 1));
        Meeting& meeting = meetings[starts[choice.id] + rank / 4];
        meeting.pairs[rank % 4] = row * SHARES + lane;
        if (rank % 4 == 0) meeting.expert = choice.id, meeting.count = min(4, (int)(__popc(mask) - rank));
    }
}

// The meetings in shared memory, for all threads of a CTA.
DEVICE int load_meetings(Meeting* to, const Meeting* from, const u32* count) {
    const int meetings = __ldcg(count);
    for (int i = threadIdx.x; i < 2 * meetings; i += ROW_THREADS) ((uint4*)to)[i] = __ldcg((const uint4*)from + i);
    __syncthreads();
    return meetings;
}
// The first of a CTA's share of `total` things in a row, and of the next one's.
DEVICE int2 share_of_cta(int total) {
    return make_int2((u64)total * blockIdx.x / gridDim.x, (u64)total * (blockIdx.x + 1) / gridDim.x);
}

// Gate and up of the chosen experts: x [rows, HIDDEN] to activation.
KERNEL(ROW_THREADS, 2)
rows_up(const char* weights, const Meeting* list, const u32* list_count, FixedRows x, const float* squares, float* activation) {
    typedef RowTiles<HIDDEN_BLOCKS, 4, 1> T;
    __shared__ T::Shared shared;
    __shared__ Meeting meetings[MEETINGS];
    T t(dynamic_shared);
    wait_for_inputs();
    launch_dependents();
    const int2 tiles = share_of_cta(load_meetings(meetings, list, list_count) * EXPERT_TILES);
    auto address = [&](int index, int block) {
        const int tile = tiles.x + index;
        const u64 row = (u64)meetings[tile / EXPERT_TILES].expert * EXPERT_TILES + tile % EXPERT_TILES;
        return weights + (row * HIDDEN_BLOCKS + block) * BLOCK4;
    };
    t.fill(tiles.y - tiles.x, address);
    t.run(
        shared, tiles.y - tiles.x, 4, x, address, [&](int index) { return (tiles.x + index) / EXPERT_TILES; },
        [&](int index, int row, int block) {
            const Meeting& m = meetings[(tiles.x + index) / EXPERT_TILES];
            return row < m.count ? (int)(m.pairs[row] / SHARES) * x.width + block * BLOCK_INPUTS : -1;
        },
        [&](int index, int row, int output, float sum) {
            const int tile = tiles.x + index;
            const Meeting& m = meetings[tile / EXPERT_TILES];
            const bool there = row < m.count;
            const u32 pair = there ? m.pairs[row] : 0;
            sum *= row_scale(squares, pair / SHARES);
            const float up = __shfl_down_sync(FULL, sum, 8);
            if (there && output < 8)
                activation[(u64)(pair / SHARES) * DOWN_BLOCKS * BLOCK_INPUTS + pair % SHARES * EXPERT_STRIDE +
                           tile % EXPERT_TILES * 8 + output] = silu(sum) * up;
        });
}

// Down projections of the chosen experts and of the shared one, weighted, block by block to parts [rows, DOWN_BLOCKS, HIDDEN].
// x [rows, DOWN_BLOCKS * 256].
KERNEL(ROW_THREADS, 2)
rows_down(const char* experts, const char* shared_down, const Meeting* list, const u32* list_count, const float* weights,
          FixedRows x, int rows, float* parts) {
    constexpr int TILES = HIDDEN / 16, ROUTED = TILES * EXPERT_BLOCKS, SHARED = TILES * SHARED_BLOCKS;
    __shared__ Meeting meetings[MEETINGS];
    __shared__ float2 scales[ROW_WARPS][16];
    BlockStream<BLOCK4, 4> stream(dynamic_shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    launch_dependents();
    // The kernels that made them are complete: the one between launched this only after it had waited.
    const int count = load_meetings(meetings, list, list_count);
    const int2 share = share_of_cta(count * ROUTED + (rows + 3) / 4 * SHARED);
    auto address = [&](int at) {
        at += share.x;
        if (at < count * ROUTED)
            return experts + ((u64)meetings[at / ROUTED].expert * ROUTED + at % ROUTED) * BLOCK4;
        return shared_down + (u64)((at - count * ROUTED) % SHARED) * BLOCK4;
    };
    stream.fill(share.y - share.x, address);
    wait_for_inputs();
    RowInputs<1> inputs;
    int current = -1;
    for (int i = warp; i < share.y - share.x; i += ROW_WARPS) {
        const int at = share.x + i;
        const bool routed = at < count * ROUTED;
        const int rest = at - count * ROUTED, meeting = routed ? at / ROUTED : count + rest / SHARED;
        const int inside = routed ? at % ROUTED : rest % SHARED, blocks = routed ? EXPERT_BLOCKS : SHARED_BLOCKS;
        const int tile = inside / blocks, block = inside % blocks;
        auto pair_of = [&](int row) {   // negative: none
            if (routed) return row < meetings[meeting].count ? (int)meetings[meeting].pairs[row] : -1;
            const int own = rest / SHARED * 4 + row;
            return own < rows ? own * SHARES + TOP_K : -1;
        };
        // Blocks of a row, of all its shares.
        auto block_of = [&](int pair) { return pair / SHARES * DOWN_BLOCKS + pair % SHARES * EXPERT_BLOCKS + block; };
        constexpr int MOST_BLOCKS = EXPERT_BLOCKS > SHARED_BLOCKS ? EXPERT_BLOCKS : SHARED_BLOCKS;
        if (meeting * MOST_BLOCKS + block != current) {
            current = meeting * MOST_BLOCKS + block;
            inputs.load(
                x, [&](int row) { return pair_of(row) < 0 ? -1 : block_of(pair_of(row)) * BLOCK_INPUTS; }, scales[warp], lane);
            if (lane < 16 && pair_of(lane / 4) >= 0) {
                const float weight = load_cg(weights + pair_of(lane / 4));
                scales[warp][lane].x *= weight;
                scales[warp][lane].y *= weight;
            }
            __syncwarp();
        }
        const char* from = stream.wait();
        block_times_rows<4>(from, inputs, scales[warp], 1, lane, [&](int, float y0, float y1) {
            const int pair = pair_of(lane & 3);
            if (pair < 0) return;
            float* to = parts + (u64)block_of(pair) * HIDDEN + tile * 16 + (lane >> 2);
            to[0] = y0;
            to[8] = y1;
        });
        stream.next(share.y - share.x, address);
    }
}

// Final norm and head: logits [rows, VOCAB], and of every CTA each row's best, best [rows, CTAs].
KERNEL(ROW_THREADS, 2)
rows_head(const char* weights, const Run* runs, FixedRows x, int rows, const float* squares, float* logits, Best* best) {
    constexpr float LOWEST = -3.402823466e+38f;
    Best own{LOWEST, 0xffffffffu, 0, 0};
    const int row = threadIdx.x >> 4;
    const u32 limit = row < rows ? min(runs[row].vocab_limit, (u32)VOCAB) : 0;
    rows_linear<HIDDEN_BLOCKS, 4>(weights, blockIdx.x, tiles_of_cta(VOCAB_TILES), x, rows, [&] {
        const float scale = row_scale(squares, row);
        return [&, scale](int tile, int row, int output, float sum, bool there) {
            sum *= scale;
            const u32 id = tile * 16 + output;
            if (!there || id >= VOCAB) return;
            logits[(u64)row * VOCAB + id] = sum;
            if (!(fabsf(sum) <= -LOWEST)) own.bad = 1;
            const Best candidate{sum, id, 0, 0};
            if (id < limit && above(candidate, own)) own.logit = sum, own.id = id;
        };
    });
#pragma unroll
    for (int d = 8; d > 0; d /= 2) {
        const Best other{__shfl_xor_sync(FULL, own.logit, d), __shfl_xor_sync(FULL, own.id, d), 0, 0};
        own.bad |= __shfl_xor_sync(FULL, own.bad, d);
        if (above(other, own)) own.logit = other.logit, own.id = other.id;
    }
    if ((threadIdx.x & 15) == 0 && row < rows) best[row * gridDim.x + blockIdx.x] = own;
}
