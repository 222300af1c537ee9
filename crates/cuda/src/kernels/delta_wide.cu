// Many tokens through the gated delta rule, CHUNK at a time on tensor cores (the WY form of the literature): what needs no state.
// delta_scan.cu takes the state through the chunks.
//
// With a_i the decay of token i of a chunk, c_i = a_1 .. a_i, D_ij = a_{j+1} .. a_i for j <= i, the last token n, and tokens as
// rows of K, Q (of unit length, Q also over sqrt(128)), V, E, O:
//   A_ij = beta_i D_ij (k_i . k_j) for j < i;  T = (I + A)^-1;  P_ij = D_ij (q_i . k_j) for j <= i
//   W = -T (beta c K);  U = T (beta V)        `delta_relate`, chunks at once
//   E = U + W S^T;  O = c (Q S^T) + P E;  S = c_n S + (D_n E)^T K        `delta_scan`, one after the other
// Decays enter as exponentials of differences of sums of logarithms, which are kept in two floats: they can vanish but neither
// overflow nor lose digits to a long sum. Beyond the last token q = k = v = 0, beta = 0 and a = 1.
//
// Matrices are f32, and as operands two BF16 halves each, of whose four products the smallest is left out: off by 2^-16. T is
// found by blocks, those of 16 by substitution, so that nothing is added up that cancels.
//
// Operands lie as the tensor cores take them: a fragment is 16 (k) x 8 (n) of a B operand, 16 bytes a lane, namely its high halves
// and its low halves. Of each chunk and key head two pieces of Q and two of K, of each value head two of W, one of P, and U:
//   Q, W: first or second 16 keys of every 32, [32 keys][8 of tokens], a fragment = 16 keys x 8 tokens
//   K: likewise, [32 keys][16 of tokens][8 of the 16 keys], a fragment = 16 tokens x 8 keys
//   P: fragments of 16 tokens j x 8 tokens i on and below the diagonal, i by i; then c and D_n, [2][CHUNK]
//   U: [8 of 16 values][8 of 8 tokens], a fragment = 16 values x 8 tokens as the tensor cores leave sums, f32
// Reference: lily_reference::ops::{conv_step, delta_query, delta_key, decay, delta_step}.

constexpr int CHUNK = 64;
constexpr int FRAGMENT = 512;
constexpr int PIECE = 32 * FRAGMENT;
constexpr int LOWER = 20 * FRAGMENT;                     // of P, in front of the factors
constexpr int LOWER_PIECE = LOWER + 2 * CHUNK * 4;
constexpr int RELATED_KEY = 4 * PIECE;                   // Q, K
constexpr int RELATED_VALUE = 4 * PIECE + LOWER_PIECE;   // W, U, P
constexpr u64 RELATED_CHUNK = (u64)KEY_HEADS * RELATED_KEY + (u64)VALUE_HEADS * RELATED_VALUE;
DEVICE char* related_key(char* related, int chunk, int head) { return related + chunk * RELATED_CHUNK + (u64)head * RELATED_KEY; }
DEVICE char* related_value(char* related, int chunk, int head) {
    return related + chunk * RELATED_CHUNK + (u64)KEY_HEADS * RELATED_KEY + (u64)head * RELATED_VALUE;
}

// ---- Operands in halves.
struct Halves {
    u32 high, low;
};
DEVICE Halves halve(float x, float y) {
    const u32 high = round_pair(x, y);
    return Halves{high, round_pair(x - bf16_low(high), y - bf16_high(high))};
}
DEVICE uint4 fragment_of(float2 first, float2 second) {
    const Halves x = halve(first.x, first.y), y = halve(second.x, second.y);
    return make_uint4(x.high, y.high, x.low, y.low);
}
// From memory that this thread wrote, or a kernel before.
DEVICE uint4 load_fragment(const char* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
struct Rows16 {   // an A operand, 16 x 16
    u32 high[4], low[4];
};
// Of fragments of its first eight rows and its last.
DEVICE Rows16 rows_of(uint4 a, uint4 b) { return Rows16{{a.x, b.x, a.y, b.y}, {a.z, b.z, a.w, b.w}}; }
// Of sums that the tensor cores left of its first eight columns and its last.
DEVICE Rows16 rows_of(const float* a, const float* b) {
    Rows16 rows;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float* from = i < 2 ? a : b;
        const Halves x = halve(from[2 * (i & 1)], from[2 * (i & 1) + 1]);
        rows.high[i] = x.high, rows.low[i] = x.low;
    }
    return rows;
}
DEVICE void add_product(float* sums, const Rows16& a, uint4 b) {
    mma_bf16(sums, a.low, b.x, b.y);
    mma_bf16(sums, a.high, b.z, b.w);
    mma_bf16(sums, a.high, b.x, b.y);
}
// The same for COUNT sums, so that no product waits for the one before.
template <int COUNT> DEVICE void add_products(float (*sums)[4], const Rows16& a, const uint4* b) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) mma_bf16(sums[i], a.low, b[i].x, b[i].y);
#pragma unroll
    for (int i = 0; i < COUNT; i++) mma_bf16(sums[i], a.high, b[i].z, b[i].w);
#pragma unroll
    for (int i = 0; i < COUNT; i++) mma_bf16(sums[i], a.high, b[i].x, b[i].y);
}

// ---- A chunk of a key head and its value heads, which `shares` CTAs share. Grid [chunks, KEY_HEADS * shares], 8 warps.
// In: projected [tokens, PROJ_DELTA], taps [CONV_WIDTH, 4], rates = exp(A_log), dt_bias [VALUE_HEADS]. Out: related.
constexpr int RELATE_THREADS = 256;
constexpr int STAGE_STRIDE = DELTA_HEAD + 4;
constexpr int SQUARE_STRIDE = CHUNK + 4;
struct Relate {
    float before[3][STAGE_STRIDE];                 // inputs of the tokens before
    float stage[CHUNK][STAGE_STRIDE];              // keys, then queries, then values; token by token
    union {
        uint4 keys[8][8][32];                      // fragments of 8 tokens and 16 keys
        float square[CHUNK][SQUARE_STRIDE];        // A, which T takes the place of, block by block
    };
    float2 logs[VALUES_PER_KEY][CHUNK];            // log c in two floats
    float betas[VALUES_PER_KEY][CHUNK];
    float weights[CHUNK];                          // -beta c
};

// Rows `row` and 8 further on, inputs `column` on, each times its factor.
DEVICE Rows16 rows_of_square(const float (*square)[SQUARE_STRIDE], int row, int column, float2 first, float2 second) {
    Rows16 rows;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = *(const float2*)&square[row + (i & 1) * 8][column + (i >> 1) * 8], factor = i < 2 ? first : second;
        const Halves halves = halve(x.x * factor.x, x.y * factor.y);
        rows.high[i] = halves.high, rows.low[i] = halves.low;
    }
    return rows;
}
// 16 rows from `row` on, of column `column`.
DEVICE uint4 column_of_square(const float (*square)[SQUARE_STRIDE], int row, int column) {
    return fragment_of(make_float2(square[row][column], square[row + 1][column]),
                       make_float2(square[row + 8][column], square[row + 9][column]));
}

KERNEL(RELATE_THREADS, 2)
delta_relate(const Run* run, int layer, const float* projected, const float4* taps, const float* rates, const float* dt_bias,
             int tokens, int shares, char* related) {
    Relate& shared = *(Relate*)dynamic_shared;
    const int chunk = blockIdx.x, key_head = blockIdx.y / shares, share = blockIdx.y % shares, first = chunk * CHUNK;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    // Of products over pairs of tokens a warp has 16 rows, and of 16 columns every second lot.
    const int rows = warp >> 1, odd = warp & 1;
    // Tokens of the chunk that there are, and 16 of them that are not all beyond the last.
    const int live = min(CHUNK, tokens - first), blocks = (live + 15) / 16;
    launch_dependents();
    wait_for_inputs();

    // A head's raw inputs, and those before the chunk; what stands between this and convolve_staged hides the wait.
    auto fetch_head = [&](int head_channel) {
        const int channel = head_channel + lane * 4;
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            const int token = i * 8 + warp;
            float* to = &shared.stage[token][lane * 4];
            if (token < live) copy16(to, projected + (u64)(first + token) * PROJ_DELTA + channel);
            else *(float4*)to = make_float4(0, 0, 0, 0);
        }
        if (warp < 3) {
            const int at = first - 3 + warp;
            copy16(&shared.before[warp][lane * 4], (at >= 0 ? projected + (u64)at * PROJ_DELTA
                                                            : history_slot(run->conv, layer, run->position + 4 + at)) + channel);
        }
        copy_commit();
    };
    // Their convolution in place; half of the threads has half of the tokens.
    auto convolve_staged = [&](int head_channel) {
        constexpr int EACH = CHUNK / 2;
        const int begin = tid / DELTA_HEAD * EACH;
        float* column = &shared.stage[begin][tid % DELTA_HEAD];
        const float4 tap = __ldg(taps + head_channel + tid % DELTA_HEAD);
        copy_wait<0>();
        __syncthreads();
        float u[3];
#pragma unroll
        for (int i = 0; i < 3; i++) u[i] = column[(i - 3) * STAGE_STRIDE];
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < EACH; i++) {
            const float x = column[i * STAGE_STRIDE];
            column[i * STAGE_STRIDE] = begin + i < live ? convolve(u[0], u[1], u[2], x, tap) : 0.0f;
            u[0] = u[1], u[1] = u[2], u[2] = x;
        }
        __syncthreads();
    };
    // Gives the staged rows the length `length`; a warp has eight.
    auto unit_rows = [&](float length) {
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            float4* row = (float4*)shared.stage[warp * (CHUNK / 8) + i] + lane;
            float4 x = *row;
            const float scale = length * inverse_root(sum_lanes<32>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) + UNIT_EPS);
            x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
            *row = x;
        }
    };

    fetch_head(KEY_WIDTH + key_head * DELTA_HEAD);
    for (int h = warp; h < VALUES_PER_KEY; h += RELATE_THREADS / 32) {
        const int head = key_head * VALUES_PER_KEY + h;
        double log[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = first + 2 * lane + i;
            const float* row = projected + (u64)min(token, tokens - 1) * PROJ_DELTA;
            log[i] = token < tokens ? -rates[head] * softplus(row[PROJ_A + head] + dt_bias[head]) : 0.0f;
            shared.betas[h][2 * lane + i] = token < tokens ? sigmoid(row[PROJ_B + head]) : 0.0f;
        }
        double sum = log[0] + log[1];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const double before = __shfl_up_sync(FULL, sum, d);
            if (lane >= d) sum += before;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const double own = i ? sum : sum - log[1];
            const float high = (float)own;
            shared.logs[h][2 * lane + i] = make_float2(high, (float)(own - high));
        }
    }
    convolve_staged(KEY_WIDTH + key_head * DELTA_HEAD);
    unit_rows(1.0f);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < DELTA_HEAD / 16; step++) {
        const float* from = &shared.stage[warp * 8 + g][step * 16 + 2 * t];
        shared.keys[warp][step][lane] = fragment_of(*(const float2*)from, *(const float2*)(from + 8));
    }
    // Of 16 keys, for the sums over tokens, here and in the scan.
    char* own_key = related_key(related, chunk, key_head) + lane * 16;
    char* own_keys = own_key + (2 + odd) * PIECE + rows * 8 * FRAGMENT;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float* from = &shared.stage[step * 16 + 2 * t][warp * 16 + j * 8 + g];
            *(uint4*)(own_keys + (step * 2 + j) * FRAGMENT) = fragment_of(
                make_float2(from[0], from[STAGE_STRIDE]), make_float2(from[8 * STAGE_STRIDE], from[9 * STAGE_STRIDE]));
        }
    __syncthreads();
    fetch_head(key_head * DELTA_HEAD);
    // [lot of columns][8 of 16]
    float key_products[2][2][4] = {}, query_products[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < DELTA_HEAD / 16; step++) {
        const Rows16 a = rows_of(shared.keys[2 * rows][step][lane], shared.keys[2 * rows + 1][step][lane]);
#pragma unroll
        for (int lot = 0; lot < 2; lot++)
            if (odd + 2 * lot <= rows && rows < blocks) {
                const uint4 b[2] = {shared.keys[2 * odd + 4 * lot][step][lane], shared.keys[2 * odd + 4 * lot + 1][step][lane]};
                add_products<2>(key_products[lot], a, b);
            }
    }
    convolve_staged(key_head * DELTA_HEAD);
    unit_rows(inverse_root((float)DELTA_HEAD));
    __syncthreads();
#pragma unroll
    for (int step = 0; step < DELTA_HEAD / 16; step++) {
        const float* from = &shared.stage[rows * 16 + g][step * 16 + 2 * t];
        const uint4 early = fragment_of(*(const float2*)from, *(const float2*)(from + 8));
        from += 8 * STAGE_STRIDE;
        const uint4 late = fragment_of(*(const float2*)from, *(const float2*)(from + 8));
        *(uint4*)(own_key + (step & 1) * PIECE + ((step >> 1) * 8 + rows * 2 + odd) * FRAGMENT) =
            odd ? late : early;
        const Rows16 a = rows_of(early, late);
#pragma unroll
        for (int lot = 0; lot < 2; lot++)
            if (odd + 2 * lot <= rows && rows < blocks) {
                const uint4 b[2] = {shared.keys[2 * odd + 4 * lot][step][lane], shared.keys[2 * odd + 4 * lot + 1][step][lane]};
                add_products<2>(query_products[lot], a, b);
            }
    }
    __syncthreads();

#pragma unroll 1
    for (int h = share; h < VALUES_PER_KEY; h += shares) {
        const int head = key_head * VALUES_PER_KEY + h;
        char* own_value = related_value(related, chunk, head) + lane * 16;
        const float2* logs = shared.logs[h];
        const float* betas = shared.betas[h];
        fetch_head(2 * KEY_WIDTH + head * DELTA_HEAD);
#pragma unroll
        for (int lot = 0; lot < 2; lot++) {
            const int columns = odd + 2 * lot;
            if (columns > rows || rows >= blocks) continue;
            float p[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int i = rows * 16 + g + (c >> 1) * 8, j = columns * 16 + half * 8 + 2 * t + (c & 1);
                    const float decay = j <= i ? expf((logs[i].x - logs[j].x) + (logs[i].y - logs[j].y)) : 0.0f;
                    shared.square[i][j] = j < i ? betas[i] * decay * key_products[lot][half][c] : 0.0f;
                    p[half][c] = decay * query_products[lot][half][c];
                }
            char* lower = own_value + 4 * PIECE + (rows * (rows + 1) + columns) * FRAGMENT;
            *(uint4*)lower = fragment_of(make_float2(p[0][0], p[0][1]), make_float2(p[1][0], p[1][1]));
            *(uint4*)(lower + (rows + 1) * FRAGMENT) = fragment_of(make_float2(p[0][2], p[0][3]), make_float2(p[1][2], p[1][3]));
        }
        if (tid < CHUNK) {
            const float2 log = logs[tid], last = logs[CHUNK - 1];
            const float from_start = expf(log.x + log.y);
            float* factors = (float*)(related_value(related, chunk, head) + 4 * PIECE + LOWER);
            factors[tid] = from_start;
            factors[CHUNK + tid] = expf((last.x - log.x) + (last.y - log.y));
            shared.weights[tid] = -betas[tid] * from_start;
        }
        __syncthreads();

        // T, first its blocks of 16 x 16 on the diagonal: a thread has a column of one.
        if (tid < 16 * blocks) {
            const int block = tid & 48, column = tid & 15;
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
                for (int k = 0; k < i; k += 4) {
                    const float4 a = *(const float4*)&shared.square[block + i][block + k];
                    sum -= a.x * x[k];
                    if (k + 1 < i) sum -= a.y * x[k + 1];
                    if (k + 2 < i) sum -= a.z * x[k + 2];
                    if (k + 3 < i) sum -= a.w * x[k + 3];
                }
                x[i] = sum;
            }
            // Nobody reads another block.
            __syncwarp(__activemask());
#pragma unroll
            for (int i = 0; i < 16; i++) shared.square[block + i][block + column] = x[i];
        }
        __syncthreads();
        // [[X, 0], [Y, Z]]^-1 = [[X', 0], [-Z' Y X', Z']]: of 16 x 16, then of 32 x 32.
        const float2 ones = make_float2(1.0f, 1.0f);
        if (warp < blocks / 2) {
            const int block = odd * 32;
            const Rows16 z = rows_of_square(shared.square, block + 16 + g, block + 16 + 2 * t, ones, ones);
            float zy[2][4] = {}, zyx[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; n++)
                add_product(zy[n], z, column_of_square(shared.square, block + 16 + 2 * t, block + n * 8 + g));
            const Rows16 a = rows_of(zy[0], zy[1]);
#pragma unroll
            for (int n = 0; n < 2; n++)
                add_product(zyx[n], a, column_of_square(shared.square, block + 2 * t, block + n * 8 + g));
            __syncwarp();
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    shared.square[block + 16 + g + (c >> 1) * 8][block + n * 8 + 2 * t + (c & 1)] = -zyx[n][c];
        }
        __syncthreads();
        const int late = 32 + odd * 16;
        float zyx[4][4] = {};
        if (warp < blocks - 2) {
            float zy[4][4] = {};
#pragma unroll
            for (int step = 0; step < 2; step++)
                if (step <= odd) {
                    const Rows16 z =
                        rows_of_square(shared.square, late + g, 32 + step * 16 + 2 * t, ones, ones);
                    uint4 y[4];
#pragma unroll
                    for (int n = 0; n < 4; n++) y[n] = column_of_square(shared.square, 32 + step * 16 + 2 * t, n * 8 + g);
                    add_products<4>(zy, z, y);
                }
#pragma unroll
            for (int step = 0; step < 2; step++) {
                const Rows16 a = rows_of(zy[2 * step], zy[2 * step + 1]);
#pragma unroll
                for (int n = 0; n < 2 + 2 * step; n++)
                    add_product(zyx[n], a, column_of_square(shared.square, step * 16 + 2 * t, n * 8 + g));
            }
        }
        __syncthreads();
        if (warp < blocks - 2) {
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    shared.square[late + g + (c >> 1) * 8][n * 8 + 2 * t + (c & 1)] = -zyx[n][c];
        }
        __syncthreads();

        // W: a warp has 16 keys.
        uint4 keys[CHUNK / 16][2];
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
            for (int j = 0; j < 2; j++) keys[step][j] = load_fragment(own_keys + (step * 2 + j) * FRAGMENT);
#pragma unroll 1
        for (int i = 0; i < CHUNK / 16; i++) {
            float sums[2][4] = {};
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++) {
                if (step > i || i >= blocks) break;
                const float* weights = &shared.weights[step * 16 + 2 * t];
                const Rows16 a = rows_of_square(shared.square, i * 16 + g, step * 16 + 2 * t, *(const float2*)weights,
                                                *(const float2*)(weights + 8));
                add_products<2>(sums, a, keys[step]);
            }
            char* to = own_value + odd * PIECE + (rows * 8 + 2 * i) * FRAGMENT;
            *(uint4*)to = fragment_of(make_float2(sums[0][0], sums[0][1]), make_float2(sums[1][0], sums[1][1]));
            *(uint4*)(to + FRAGMENT) = fragment_of(make_float2(sums[0][2], sums[0][3]), make_float2(sums[1][2], sums[1][3]));
        }
        // U: a warp has 16 values.
        convolve_staged(2 * KEY_WIDTH + head * DELTA_HEAD);
        Rows16 values[CHUNK / 16];
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* from = &shared.stage[step * 16 + (i >> 1) * 8 + 2 * t][warp * 16 + (i & 1) * 8 + g];
                const Halves x = halve(from[0], from[STAGE_STRIDE]);
                values[step].high[i] = x.high, values[step].low[i] = x.low;
            }
#pragma unroll 1
        for (int i = 0; i < CHUNK / 16; i++) {
            float sums[2][4] = {};
#pragma unroll
            for (int step = 0; step < CHUNK / 16; step++) {
                if (step > i || i >= blocks) break;
                const float* beta = &betas[step * 16 + 2 * t];
                const float2 early = *(const float2*)beta, late = *(const float2*)(beta + 8);
                uint4 b[2];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float* row = &shared.square[i * 16 + n * 8 + g][step * 16 + 2 * t];
                    const float2 x = *(const float2*)row, y = *(const float2*)(row + 8);
                    b[n] = fragment_of(make_float2(x.x * early.x, x.y * early.y), make_float2(y.x * late.x, y.y * late.y));
                }
                add_products<2>(sums, values[step], b);
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
                *(float4*)(own_value + 2 * PIECE + (warp * 8 + 2 * i + n) * FRAGMENT) =
                    make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
        }
        __syncthreads();
    }
}
