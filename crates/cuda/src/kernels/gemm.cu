// Linears of many tokens on integer tensor cores: weights are the A operand, straight from their blocks into registers; tokens
// are the B operand, in fixed point through shared memory. A warp has a tile of 16 rows, a CTA of 8 warps shares up to
// 8 * COLUMNS tokens. Sums of a group are exact; they are scaled and added up in f32 in the order of the inputs.
// Bytes moved: weights once per 8 * COLUMNS tokens, fixed-point inputs once per 128 rows.
// Two CTAs per processor: the chains of instructions are long, and fewer warps wait for them most of the time.
// Reference: lily_reference::ops::{linear, expert_linear, swiglu}.

constexpr int GEMM_WARPS = 8;

// One linear or a stack of them.
struct Gemm {
    const char* weights;       // [experts, tiles, blocks] blocks
    u64 expert_bytes;
    int tiles, blocks;
    FixedRows x;
    const u32* list;           // [experts, list_stride]: rows that meet an expert; null: all rows, one expert
    const uint2* token_tiles;  // expert, first place in its list
    const u32* token_tile_count;
    const u32* counts;         // [experts]
    int list_stride;
    int share;                 // rows of the list that share a row of x
    int rows;                  // without a list
    int tile;                  // tokens of a CTA at most, without a list
    float* out;                // [rows, stride]
    int stride;
    int outputs;               // that are stored, of a row
};

template <int COLUMNS> struct GemmStage {
    uint4 high[4][8 * COLUMNS][4];
    uint4 low[4][8 * COLUMNS][4];
    float2 groups[4][8 * COLUMNS];
};

enum Finish { STORE, ADD, SWIGLU };

// Which tokens a CTA has: `count` places of an expert's list from `first` on. False: none.
DEVICE bool tokens_of_cta(const Gemm& p, int& expert, int& first, int& count) {
    if (p.list) {
        if (blockIdx.y >= *p.token_tile_count) return false;
        const uint2 place = p.token_tiles[blockIdx.y];
        expert = place.x, first = place.y;
        count = min(p.tile, (int)p.counts[expert] - first);
    } else {
        first = blockIdx.y * p.tile;
        count = min(p.tile, p.rows - first);
    }
    return true;
}
// The row of a token; those beyond the last repeat it and are not stored.
DEVICE u32 row_of_token(const Gemm& p, int expert, int first, int count, int token) {
    const int i = first + min(token, count - 1);
    return p.list ? p.list[(u64)expert * p.list_stride + i] : i;
}

// What a group adds to an output. One order of operations, so that all forms have the same bits.
DEVICE float add_group(float y, u32 scale_and_bias, float scale, float sum, int high, int low) {
    const float dot = (float)(high * 256 + low);
    return __fmaf_rn(bf16_low(scale_and_bias), __fmul_rn(scale, dot), __fmaf_rn(bf16_high(scale_and_bias), sum, y));
}

// Outputs g and g + 8 of a tile for tokens `token` and the one behind it.
template <Finish FINISH>
DEVICE void store_outputs(const Gemm& p, const u32* rows, int tile, int token, int count, int g, const float* sums) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (token + i >= count) continue;
        float* to = p.out + (u64)rows[token + i] * p.stride;
        const float upper = sums[i], lower = sums[i + 2];
        if (FINISH == SWIGLU) {
            to[tile * 8 + g] = silu(upper) * lower;
        } else {
            const int row = tile * 16 + g;
            if (row < p.outputs) to[row] = FINISH == ADD ? to[row] + upper : upper;
            if (row + 8 < p.outputs) to[row + 8] = FINISH == ADD ? to[row + 8] + lower : lower;
        }
    }
}

template <int BITS, int COLUMNS, Finish FINISH> DEVICE void gemm(const Gemm& p) {
    constexpr int TOKENS = 8 * COLUMNS, BYTES = BITS == 4 ? BLOCK4 : BLOCK8, PIECES = BITS == 4 ? 4 : 8;
    typedef GemmStage<COLUMNS> Stage;
    Stage* stages = (Stage*)dynamic_shared;
    __shared__ u32 rows[TOKENS];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int expert = 0, first = 0, count = 0;
    if (!tokens_of_cta(p, expert, first, count)) return;
    if (tid < TOKENS) rows[tid] = row_of_token(p, expert, first, count, tid);
    __syncthreads();
    const int columns = (count + 7) / 8;

    auto load_x = [&](int block) {
        if (block < p.blocks) {
            Stage& stage = stages[block & 1];
            for (int i = tid; i < TOKENS * 32; i += GEMM_WARPS * 32) {
                const int piece = i & 15, low = i >> 4 & 1, token = i >> 5;
                if (token >= columns * 8) break;
                const u64 at = (u64)(rows[token] / p.share) * p.x.width + block * BLOCK_INPUTS + piece * 16;
                copy16(low ? &stage.low[piece >> 2][token][piece & 3] : &stage.high[piece >> 2][token][piece & 3],
                       (low ? p.x.low : p.x.high) + at);
            }
            for (int i = tid; i < TOKENS * 4; i += GEMM_WARPS * 32) {
                const int group = i & 3, token = i >> 2;
                if (token >= columns * 8) break;
                copy8(&stage.groups[group][token],
                      p.x.groups + (u64)(rows[token] / p.share) * (p.x.width / GROUP) + block * 4 + group);
            }
        }
        copy_commit();
    };
    load_x(0);
    load_x(1);

    const int tile = blockIdx.x * GEMM_WARPS + warp;
    const char* weights = p.weights + expert * p.expert_bytes + (u64)min(tile, p.tiles - 1) * p.blocks * BYTES;
    // Of the next block, on its way while this one is computed.
    uint4 next_codes[PIECES];
    uint2 next_scales;
    auto load_weights = [&](int block) {
        const char* from = weights + (u64)block * BYTES;
#pragma unroll
        for (int i = 0; i < PIECES; i++) next_codes[i] = __ldg((const uint4*)(from + i * 512 + lane * 16));
        next_scales = __ldg((const uint2*)(from + PIECES * 512 + lane * 8));
    };
    float sums[COLUMNS][4] = {};
    load_weights(0);
    for (int block = 0; block < p.blocks; block++) {
        copy_wait<1>();
        __syncthreads();
        const Stage& stage = stages[block & 1];
        uint4 codes[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; i++) codes[i] = next_codes[i];
        const uint2 scales = next_scales;
        load_weights(min(block + 1, p.blocks - 1));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 upper = __shfl_sync(FULL, scales.x, lane & ~3 | j), lower = __shfl_sync(FULL, scales.y, lane & ~3 | j);
            u32 w[8];
            if (BITS == 4) {
                const uint4 q = codes[j];
                w[0] = q.x & NIBBLES, w[1] = q.y & NIBBLES, w[2] = q.x >> 4 & NIBBLES, w[3] = q.y >> 4 & NIBBLES;
                w[4] = q.z & NIBBLES, w[5] = q.w & NIBBLES, w[6] = q.z >> 4 & NIBBLES, w[7] = q.w >> 4 & NIBBLES;
            } else {
                const uint4 q = codes[2 * j % PIECES], r = codes[(2 * j + 1) % PIECES];
                w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
                w[4] = r.x, w[5] = r.y, w[6] = r.z, w[7] = r.w;
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                if (n >= columns) break;
                const uint4 high = stage.high[j][n * 8 + g][t], low = stage.low[j][n * 8 + g][t];
                // Scale and sum of the inputs of two tokens.
                const float4 x = *(const float4*)&stage.groups[j][n * 8 + 2 * t];
                int h[4] = {0, 0, 0, 0}, l[4] = {0, 0, 0, 0};
                mma_u8_s8(h, w[0], w[1], w[2], w[3], high.x, high.y);
                mma_u8_s8(l, w[0], w[1], w[2], w[3], low.x, low.y);
                mma_u8_s8(h, w[4], w[5], w[6], w[7], high.z, high.w);
                mma_u8_s8(l, w[4], w[5], w[6], w[7], low.z, low.w);
                float* y = sums[n];
                y[0] = add_group(y[0], upper, x.x, x.y, h[0], l[0]);
                y[1] = add_group(y[1], upper, x.z, x.w, h[1], l[1]);
                y[2] = add_group(y[2], lower, x.x, x.y, h[2], l[2]);
                y[3] = add_group(y[3], lower, x.z, x.w, h[3], l[3]);
            }
        }
        __syncthreads();
        load_x(block + 2);
    }
    if (tile >= p.tiles) return;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) store_outputs<FINISH>(p, rows, tile, n * 8 + 2 * t, count, g, sums[n]);
}

// Large: 64 tokens a CTA. Small: 16, for few tokens.
KERNEL(256, 2) gemm_q4_store_large(Gemm p) { gemm<4, 8, STORE>(p); }
KERNEL(256, 2) gemm_q4_add_large(Gemm p) { gemm<4, 8, ADD>(p); }
KERNEL(256, 2) gemm_q4_swiglu_large(Gemm p) { gemm<4, 8, SWIGLU>(p); }
KERNEL(256, 2) gemm_q4_store_small(Gemm p) { gemm<4, 2, STORE>(p); }
KERNEL(256, 2) gemm_q4_add_small(Gemm p) { gemm<4, 2, ADD>(p); }
KERNEL(256, 2) gemm_q4_swiglu_small(Gemm p) { gemm<4, 2, SWIGLU>(p); }
KERNEL(256, 1) gemm_q8_store(Gemm p) { gemm<8, 4, STORE>(p); }
