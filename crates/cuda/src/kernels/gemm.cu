// Linears of many tokens on integer tensor cores: weights are the A operand, straight from their blocks into registers; tokens
// are the B operand, in fixed point through shared memory. A warp has TILES tiles of 16 rows, a CTA of 8 warps shares up to
// 8 * COLUMNS tokens. Sums of a group are exact; they are scaled and added up in f32 in the order of the inputs.
// Bytes moved: weights once per 8 * COLUMNS tokens, fixed-point inputs once per 8 * TILES * 16 rows.
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

template <int BITS, int TILES, int COLUMNS, Finish FINISH> DEVICE void gemm(const Gemm& p) {
    constexpr int TOKENS = 8 * COLUMNS, BYTES = BITS == 4 ? BLOCK4 : BLOCK8, PIECES4 = BITS == 4 ? 4 : 8;
    extern __shared__ __align__(128) char dynamic_shared[];
    typedef GemmStage<COLUMNS> Stage;
    Stage* stages = (Stage*)dynamic_shared;
    __shared__ u32 rows[TOKENS];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    int expert = 0, first = blockIdx.y * TOKENS, count;
    if (p.list) {
        if (blockIdx.y >= *p.token_tile_count) return;
        const uint2 place = p.token_tiles[blockIdx.y];
        expert = place.x, first = place.y;
        count = min(TOKENS, (int)p.counts[expert] - first);
    } else {
        count = min(TOKENS, p.rows - first);
    }
    // Columns beyond the last repeat it and are not stored.
    if (tid < TOKENS) {
        const int i = first + min(tid, count - 1);
        rows[tid] = p.list ? p.list[(u64)expert * p.list_stride + i] : i;
    }
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

    const int first_tile = (blockIdx.x * GEMM_WARPS + warp) * TILES;
    const char* weights[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++)
        weights[m] = p.weights + expert * p.expert_bytes + (u64)min(first_tile + m, p.tiles - 1) * p.blocks * BYTES;
    uint4 a[TILES][PIECES4];
    uint2 s[TILES];
    auto load_weights = [&](int block) {
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const char* from = weights[m] + (u64)block * BYTES;
#pragma unroll
            for (int i = 0; i < PIECES4; i++) a[m][i] = __ldg((const uint4*)(from + i * 512 + lane * 16));
            s[m] = __ldg((const uint2*)(from + PIECES4 * 512 + lane * 8));
        }
    };
    float sums[TILES][COLUMNS][4] = {};
    load_weights(0);
    for (int block = 0; block < p.blocks; block++) {
        copy_wait<1>();
        __syncthreads();
        const Stage& stage = stages[block & 1];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 scale[TILES], bias[TILES];
            u32 w[TILES][8];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const u32 upper = __shfl_sync(FULL, s[m].x, lane & ~3 | j), lower = __shfl_sync(FULL, s[m].y, lane & ~3 | j);
                scale[m] = make_float2(bf16_low(upper), bf16_low(lower));
                bias[m] = make_float2(bf16_high(upper), bf16_high(lower));
                if (BITS == 4) {
                    const uint4 q = a[m][j];
                    w[m][0] = q.x & NIBBLES, w[m][1] = q.y & NIBBLES, w[m][2] = q.x >> 4 & NIBBLES, w[m][3] = q.y >> 4 & NIBBLES;
                    w[m][4] = q.z & NIBBLES, w[m][5] = q.w & NIBBLES, w[m][6] = q.z >> 4 & NIBBLES, w[m][7] = q.w >> 4 & NIBBLES;
                } else {
                    const uint4 q = a[m][2 * j], r = a[m][2 * j + 1];
                    w[m][0] = q.x, w[m][1] = q.y, w[m][2] = q.z, w[m][3] = q.w;
                    w[m][4] = r.x, w[m][5] = r.y, w[m][6] = r.z, w[m][7] = r.w;
                }
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                if (n >= columns) break;
                const uint4 high = stage.high[j][n * 8 + g][t], low = stage.low[j][n * 8 + g][t];
                const float4 x = *(const float4*)&stage.groups[j][n * 8 + 2 * t];
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    int h[4] = {0, 0, 0, 0}, l[4] = {0, 0, 0, 0};
                    mma_u8_s8(h, w[m][0], w[m][1], w[m][2], w[m][3], high.x, high.y);
                    mma_u8_s8(l, w[m][0], w[m][1], w[m][2], w[m][3], low.x, low.y);
                    mma_u8_s8(h, w[m][4], w[m][5], w[m][6], w[m][7], high.z, high.w);
                    mma_u8_s8(l, w[m][4], w[m][5], w[m][6], w[m][7], low.z, low.w);
                    float* y = sums[m][n];
                    y[0] += scale[m].x * (x.x * (float)(h[0] * 256 + l[0])) + bias[m].x * x.y;
                    y[1] += scale[m].x * (x.z * (float)(h[1] * 256 + l[1])) + bias[m].x * x.w;
                    y[2] += scale[m].y * (x.x * (float)(h[2] * 256 + l[2])) + bias[m].y * x.y;
                    y[3] += scale[m].y * (x.z * (float)(h[3] * 256 + l[3])) + bias[m].y * x.w;
                }
            }
            if (j == 3 && block + 1 < p.blocks) load_weights(block + 1);
        }
        __syncthreads();
        load_x(block + 2);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const int tile = first_tile + m;
        if (tile >= p.tiles) break;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = n * 8 + 2 * t + i;
                if (token >= count) continue;
                float* to = p.out + (u64)rows[token] * p.stride;
                const float upper = sums[m][n][i], lower = sums[m][n][i + 2];
                if (FINISH == SWIGLU) {
                    to[tile * 8 + g] = silu(upper) * lower;
                } else {
                    const int row = tile * 16 + g;
                    if (row < p.outputs) to[row] = FINISH == ADD ? to[row] + upper : upper;
                    if (row + 8 < p.outputs) to[row + 8] = FINISH == ADD ? to[row + 8] + lower : lower;
                }
            }
    }
}

// Large: 256 rows x 64 tokens a CTA. Small: 128 rows x 16 tokens, for few tokens.
KERNEL(256, 1) gemm_q4_store_large(Gemm p) { gemm<4, 2, 8, STORE>(p); }
KERNEL(256, 1) gemm_q4_add_large(Gemm p) { gemm<4, 2, 8, ADD>(p); }
KERNEL(256, 1) gemm_q4_swiglu_large(Gemm p) { gemm<4, 2, 8, SWIGLU>(p); }
KERNEL(256, 2) gemm_q4_store_small(Gemm p) { gemm<4, 1, 2, STORE>(p); }
KERNEL(256, 2) gemm_q4_add_small(Gemm p) { gemm<4, 1, 2, ADD>(p); }
KERNEL(256, 2) gemm_q4_swiglu_small(Gemm p) { gemm<4, 1, 2, SWIGLU>(p); }
KERNEL(256, 1) gemm_q8_store(Gemm p) { gemm<8, 1, 4, STORE>(p); }
