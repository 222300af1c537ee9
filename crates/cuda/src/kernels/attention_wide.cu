// Attention of many tokens on Hopper's warpgroup tensor cores: what attend_many does, for key/value heads that 4 or 8 query heads share.
//
// A warpgroup has 16 positions of 4 query heads, a warp those of one; both warpgroups share the tiles of keys and values. Queries and
// weights are split in two BF16 values each, so that products are as exact as the cache. Rows of keys and queries lie in four blocks of
// 64 dimensions, each row of them 128 bytes permuted as the tensor cores want it; values are the same, read across.
// Bytes moved: keys and values once per 16 positions, from the cache in L2.

constexpr int WIDE_TILE = 64;   // tokens of keys and values
constexpr int WIDE_GROUPS = QUERIES_PER_KV % 4 == 0 ? QUERIES_PER_KV / 4 : 1;   // warpgroups
constexpr int WIDE_BLOCK = 64 * 128;   // bytes of 64 rows of a block
constexpr int WIDE_OPERAND = HEAD / 64 * WIDE_BLOCK;
constexpr int WIDE_FLASH_THREADS = 128 * WIDE_GROUPS;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// s (+)= a b^T: 64 x 16 and 64 x 16, both in shared memory.
DEVICE void add_scores(float* s, u64 a, u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " %32, %33, p, 1, 1, 0, 0;\n}\n"
        : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]),
          "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]),
          "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]),
          "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
        : "l"(a), "l"(b), "r"(keep));
}
// o += p v: 64 x 16 in registers, 16 x 256 in shared memory.
DEVICE void add_values(float* o, const u32* p, u64 v) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
        " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
        " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
        " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127},"
        " {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]), "+f"(o[4]), "+f"(o[5]), "+f"(o[6]), "+f"(o[7]),
          "+f"(o[8]), "+f"(o[9]), "+f"(o[10]), "+f"(o[11]), "+f"(o[12]), "+f"(o[13]), "+f"(o[14]), "+f"(o[15]),
          "+f"(o[16]), "+f"(o[17]), "+f"(o[18]), "+f"(o[19]), "+f"(o[20]), "+f"(o[21]), "+f"(o[22]), "+f"(o[23]),
          "+f"(o[24]), "+f"(o[25]), "+f"(o[26]), "+f"(o[27]), "+f"(o[28]), "+f"(o[29]), "+f"(o[30]), "+f"(o[31]),
          "+f"(o[32]), "+f"(o[33]), "+f"(o[34]), "+f"(o[35]), "+f"(o[36]), "+f"(o[37]), "+f"(o[38]), "+f"(o[39]),
          "+f"(o[40]), "+f"(o[41]), "+f"(o[42]), "+f"(o[43]), "+f"(o[44]), "+f"(o[45]), "+f"(o[46]), "+f"(o[47]),
          "+f"(o[48]), "+f"(o[49]), "+f"(o[50]), "+f"(o[51]), "+f"(o[52]), "+f"(o[53]), "+f"(o[54]), "+f"(o[55]),
          "+f"(o[56]), "+f"(o[57]), "+f"(o[58]), "+f"(o[59]), "+f"(o[60]), "+f"(o[61]), "+f"(o[62]), "+f"(o[63]),
          "+f"(o[64]), "+f"(o[65]), "+f"(o[66]), "+f"(o[67]), "+f"(o[68]), "+f"(o[69]), "+f"(o[70]), "+f"(o[71]),
          "+f"(o[72]), "+f"(o[73]), "+f"(o[74]), "+f"(o[75]), "+f"(o[76]), "+f"(o[77]), "+f"(o[78]), "+f"(o[79]),
          "+f"(o[80]), "+f"(o[81]), "+f"(o[82]), "+f"(o[83]), "+f"(o[84]), "+f"(o[85]), "+f"(o[86]), "+f"(o[87]),
          "+f"(o[88]), "+f"(o[89]), "+f"(o[90]), "+f"(o[91]), "+f"(o[92]), "+f"(o[93]), "+f"(o[94]), "+f"(o[95]),
          "+f"(o[96]), "+f"(o[97]), "+f"(o[98]), "+f"(o[99]), "+f"(o[100]), "+f"(o[101]), "+f"(o[102]), "+f"(o[103]),
          "+f"(o[104]), "+f"(o[105]), "+f"(o[106]), "+f"(o[107]), "+f"(o[108]), "+f"(o[109]), "+f"(o[110]), "+f"(o[111]),
          "+f"(o[112]), "+f"(o[113]), "+f"(o[114]), "+f"(o[115]), "+f"(o[116]), "+f"(o[117]), "+f"(o[118]), "+f"(o[119]),
          "+f"(o[120]), "+f"(o[121]), "+f"(o[122]), "+f"(o[123]), "+f"(o[124]), "+f"(o[125]), "+f"(o[126]), "+f"(o[127])
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}
template <int COUNT> DEVICE void wait_for(float* d) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Values as an operand that is read across: 64 dimensions to the next block of them, 8 tokens to the next 1024 bytes.
DEVICE u64 values_operand(const char* values) {
    return (u64)((shared_address(values) & 0x3ffff) >> 4) | (u64)(WIDE_BLOCK >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
DEVICE char* piece_of(char* operand, int row, int piece) {
    return operand + (piece >> 3) * WIDE_BLOCK + row * 128 + ((piece ^ row) & 7) * 16;
}

DEVICE void flash_wide(const Run* run, int layer, const uint4* queries, const float* projected, int tokens, float* out) {
    // Permuted atoms begin at multiples of 1024.
    char* keys_tile = dynamic_shared + (-shared_address(dynamic_shared) & 1023);
    char* values_tile = keys_tile + WIDE_OPERAND;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int kv_head = blockIdx.y, head = kv_head * QUERIES_PER_KV + warp;
    // Of this warpgroup, the rounded ones and what rounding left.
    char* own_queries = values_tile + WIDE_OPERAND * (1 + 2 * (tid >> 7));
    // The longest rows first.
    const int first = (gridDim.x - 1 - blockIdx.x) * 16;
    const u32 start = run->position + first, end = run->position + min(first + 16, tokens);
    const u16* keys = keys_of(run, layer, kv_head);
    const u16* values = keys + value_offset(run);
#pragma unroll 4
    for (int i = tid & 127; i < 2 * 64 * PIECES; i += 128) {
        const int piece = i % PIECES, row = i / PIECES % 64, half = i / PIECES / 64;
        const int token = min(first + row % 16, tokens - 1), own_head = kv_head * QUERIES_PER_KV + (tid >> 7) * 4 + row / 16;
        copy16(piece_of(own_queries + half * WIDE_OPERAND, row, piece),
               queries + (((u64)half * tokens + token) * QUERY_HEADS + own_head) * PIECES + piece);
    }
    auto load = [&](char* to, const u16* from, u32 tile) {
#pragma unroll
        for (int i = 0; i < WIDE_TILE * PIECES / WIDE_FLASH_THREADS; i++) {
            const int row = i * (WIDE_FLASH_THREADS / PIECES) + tid / PIECES, piece = tid % PIECES;
            // Rows beyond the end repeat the last, so that no number in a tile is undefined.
            const u32 token = min(tile * WIDE_TILE + row, end - 1);
            copy16(piece_of(to, row, piece), from + (u64)token * HEAD + piece * 8);
        }
        copy_commit();
    };
    const u32 tiles = (end + WIDE_TILE - 1) / WIDE_TILE;
    load(keys_tile, keys, 0);
    load(values_tile, values, 0);

    float o[HEAD / 2] = {};
    float highest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const u64 key_operand = plane_operand((const u8*)keys_tile), value_operand = values_operand(values_tile);
    const u64 query_operand = plane_operand((const u8*)own_queries);
    for (u32 tile = 0; tile < tiles; tile++) {
        copy_wait<1>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        float s[WIDE_TILE / 2];
        begin_products();
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            // Four steps to a block; a step is 32 bytes, in units of 16.
            const int at = step / 4 * (WIDE_BLOCK >> 4) + step % 4 * 2;
            add_scores(s, query_operand + at, key_operand + at, step > 0);
            add_scores(s, query_operand + (WIDE_OPERAND >> 4) + at, key_operand + at, 1);
        }
        end_products();
        wait_for<WIDE_TILE / 2>(s);
        __syncthreads();
        if (tile + 1 < tiles) load(keys_tile, keys, tile + 1);
        else copy_commit();
        if ((tile + 1) * WIDE_TILE > start) {
#pragma unroll
            for (int n = 0; n < WIDE_TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile * WIDE_TILE + n * 8 + 2 * t + (i & 1) > start + g + (i >> 1) * 8) s[4 * n + i] = -INFINITY;
        }
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = highest[r];
#pragma unroll
            for (int n = 0; n < WIDE_TILE / 8; n++) top = fmaxf(top, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
            top = max_lanes<4>(top);
            correction[r] = exp2f(highest[r] - top);
            highest[r] = top;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < WIDE_TILE / 8; n++)
#pragma unroll
                for (int i = 4 * n + 2 * r; i < 4 * n + 2 * r + 2; i++) {
                    s[i] = exp2f(s[i] - top);
                    total += s[i];
                }
            sum[r] = sum[r] * correction[r] + total;
        }
        // Mostly no row has a new highest score.
        if (__any_sync(FULL, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++) {
                o[4 * n] *= correction[0], o[4 * n + 1] *= correction[0];
                o[4 * n + 2] *= correction[1], o[4 * n + 3] *= correction[1];
            }
        }
        u32 p[2][WIDE_TILE / 16][4];
#pragma unroll
        for (int step = 0; step < WIDE_TILE / 16; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Rows g and g + 8 of the first eight tokens, then of the second.
                const float low = s[8 * step + (i >> 1) * 4 + (i & 1) * 2], high = s[8 * step + (i >> 1) * 4 + (i & 1) * 2 + 1];
                p[0][step][i] = round_pair(low, high);
                p[1][step][i] = round_pair(low - bf16_low(p[0][step][i]), high - bf16_high(p[0][step][i]));
            }
        copy_wait<1>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        begin_products();
#pragma unroll
        for (int step = 0; step < WIDE_TILE / 16; step++) {
            const u64 v = value_operand + step * (2048 >> 4);
            add_values(o, p[0][step], v);
            add_values(o, p[1][step], v);
        }
        end_products();
        wait_for<HEAD / 2>(o);
        __syncthreads();
        if (tile + 1 < tiles) load(values_tile, values, tile + 1);
        else copy_commit();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = first + g + 8 * r;
        const float scale = 1.0f / sum_lanes<4>(sum[r]);
        if (token >= tokens) continue;
        const float* gate = projected + (u64)token * PROJ_ATTENTION + head * 2 * HEAD + HEAD + 2 * t;
        float* to = out + (u64)token * QUERY_WIDTH + head * HEAD + 2 * t;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const float2 z = *(const float2*)(gate + n * 8);
            *(float2*)(to + n * 8) =
                make_float2(o[4 * n + 2 * r] * scale * sigmoid(z.x), o[4 * n + 2 * r + 1] * scale * sigmoid(z.y));
        }
    }
}
#else
// Other GPUs take attend_many.
DEVICE void flash_wide(const Run*, int, const uint4*, const float*, int, float*) {}
#endif

KERNEL(WIDE_FLASH_THREADS, 1)
attend_wide(const Run* run, int layer, const uint4* queries, const float* projected, int tokens, float* out) {
    launch_dependents();
    wait_for_inputs();
    if (QUERIES_PER_KV % 4 == 0) flash_wide(run, layer, queries, projected, tokens, out);
}
