// Linears of many tokens on Hopper's warpgroup tensor cores. What gemm.cu computes, bit for bit; inputs lie in the order of the columns.
//
// A CTA of two warpgroups has 128 rows of weights and up to 128 tokens. Weights are the A operand, from shared memory through registers,
// where they lose their packing; tokens the B operand, high and low bytes in two planes of 128 inputs a row, permuted as the tensor cores
// want it. Two groups of inputs make a stage of a ring of four. While the tensor cores work for one warpgroup the other one scales its
// sums: five instructions an output and group, which is what bounds it. Three warpgroups with 64 tokens are as fast; sums of two groups in
// turn are not, because the compiler waits for the tensor cores before it lets registers of the other group be read.
// Fewer tokens take narrower forms of the same.
// Bytes moved: weights once per 128 tokens, fixed-point inputs once per 128 rows.

constexpr int WIDE_WARPGROUPS = 2;
constexpr int WIDE_INPUTS = 128;
constexpr int WIDE_TOKENS = 128;
constexpr int HALF_WIDE_TOKENS = 64;   // of 8-bit weights, of which there are few
constexpr int NARROW_TOKENS = 32;
constexpr int WIDE_WARPS = 4 * WIDE_WARPGROUPS;
constexpr int WIDE_THREADS = 32 * WIDE_WARPS;
// Permuted atoms begin at multiples of 1024.
template <int BITS, int TOKENS> struct __align__(1024) WideStage {
    static constexpr int CODES = BITS == 4 ? 1024 : 2048;   // of half a block
    static constexpr int COUNT = TOKENS == NARROW_TOKENS ? 3 : 4;   // in the ring
    u8 high[TOKENS * WIDE_INPUTS];
    u8 low[TOKENS * WIDE_INPUTS];
    float2 groups[2][TOKENS];
    char weights[WIDE_WARPS][CODES + 256];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d (+)= a b: a 64 x 32 bytes in registers, b 32 x N in shared memory. Registers are in use until wait_products.
template <int N> struct Products;
template <> struct Products<16> {
    static DEVICE void add(int* d, const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7},"
            " {%8, %9, %10, %11}, %12, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};
template <> struct Products<32> {
    static DEVICE void add(int* d, const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
            " {%16, %17, %18, %19}, %20, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
              "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};
template <> struct Products<64> {
    static DEVICE void add(int* d, const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
            " {%32, %33, %34, %35}, %36, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
              "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
              "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
              "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};
template <> struct Products<96> {
    static DEVICE void add(int* d, const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47},"
            " {%48, %49, %50, %51}, %52, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
              "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
              "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
              "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
              "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
              "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};
template <> struct Products<128> {
    static DEVICE void add(int* d, const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
            " {%64, %65, %66, %67}, %68, p;\n}\n"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
              "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
              "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
              "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
              "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
              "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
              "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
              "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products(int* d, int* e) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // What follows reads them only now.
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+r"(d[i]), "+r"(e[i])::"memory");
}
// A plane as the B operand: rows of 128 bytes, eight of them an atom, 16-byte pieces permuted by the row.
DEVICE u64 plane_operand(const u8* plane) {
    return (u64)((shared_address(plane) & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

template <int BITS, int TOKENS, int N, Finish FINISH>
DEVICE void wide(const Gemm& p, const u32* rows, const u32* places, int expert, const int* count) {
    constexpr int BYTES = BITS == 4 ? BLOCK4 : BLOCK8;
    typedef WideStage<BITS, TOKENS> Stage;
    constexpr int STAGES = Stage::COUNT;
    char* stages = dynamic_shared + (-shared_address(dynamic_shared) & 1023);
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x * WIDE_WARPS + warp, count_of_stages = 2 * p.blocks;
    const char* weights = p.weights + expert * p.expert_bytes + (u64)min(tile, p.tiles - 1) * p.blocks * BYTES + lane * 16;
    // Pieces of 16 bytes that a thread fetches: eight of high bytes and eight of low ones a token.
    constexpr int PIECES_OF_X = (N * 16 + WIDE_THREADS - 1) / WIDE_THREADS;
    const u8* plane = (tid >> 3 & 1 ? p.x.low : p.x.high) + (tid & 7) * 16;
    const u32* own_places = places + (tid >> 4);
    auto load = [&](int s) {
        if (s < count_of_stages) {
            Stage& stage = *(Stage*)(stages + s % STAGES * sizeof(Stage));
            u8* to = (tid >> 3 & 1 ? stage.low : stage.high) + (tid >> 4) * WIDE_INPUTS + (tid & 7 ^ tid >> 4 & 7) * 16;
#pragma unroll
            for (int i = 0; i < PIECES_OF_X; i++)
                // Rows of a piece are a multiple of eight apart: they are permuted alike.
                if ((i + 1) * WIDE_THREADS <= N * 16 || i * (WIDE_THREADS / 16) + (tid >> 4) < N)
                    copy16(to + i * (WIDE_THREADS / 16) * WIDE_INPUTS, plane + (own_places[i * (WIDE_THREADS / 16)] + s * WIDE_INPUTS));
            if (tid < 2 * N)
                copy8(&stage.groups[tid & 1][tid >> 1], p.x.groups + places[tid >> 1] / GROUP + 2 * s + (tid & 1));
            const char* block = weights + (u64)(s >> 1) * BYTES;
            char* own = stage.weights[warp] + lane * 16;
#pragma unroll
            for (int i = 0; i < Stage::CODES / 512; i++) copy16(own + i * 512, block + (s & 1) * Stage::CODES + i * 512);
            if (lane < 16) copy16(own + Stage::CODES, block + 2 * Stage::CODES);
        }
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);
    float sums[N / 2] = {};
    for (int s = 0; s < count_of_stages; s++) {
        copy_wait<STAGES - 2>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const Stage& stage = *(const Stage*)(stages + s % STAGES * sizeof(Stage));
        const u64 high = plane_operand(stage.high), low = plane_operand(stage.low);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w[8];
            const char* codes = stage.weights[warp] + lane * 16;
            if (BITS == 4) {
                const uint4 q = *(const uint4*)(codes + j * 512);
                w[0] = q.x & NIBBLES, w[1] = q.y & NIBBLES, w[2] = q.x >> 4 & NIBBLES, w[3] = q.y >> 4 & NIBBLES;
                w[4] = q.z & NIBBLES, w[5] = q.w & NIBBLES, w[6] = q.z >> 4 & NIBBLES, w[7] = q.w >> 4 & NIBBLES;
            } else {
                const uint4 a = *(const uint4*)(codes + j * 1024), b = *(const uint4*)(codes + j * 1024 + 512);
                w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
            }
            int h[N / 2], l[N / 2];
            begin_products();
            // A group is 64 bytes further on, half of it 32; in units of 16.
            Products<N>::add(h, w, high + 4 * j, 0);
            Products<N>::add(l, w, low + 4 * j, 0);
            Products<N>::add(h, w + 4, high + 4 * j + 2, 1);
            Products<N>::add(l, w + 4, low + 4 * j + 2, 1);
            end_products();
            // While they are at work: the next stage.
            if (j == 0) load(s + STAGES - 1);
            const uint2 scales = *(const uint2*)(stage.weights[warp] + Stage::CODES + (4 * g + 2 * (s & 1) + j) * 8);
            wait_products<N>(h, l);
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                const float4 x = *(const float4*)&stage.groups[j][n * 8 + 2 * t];
                float* y = sums + 4 * n;
                y[0] = add_group(y[0], scales.x, x.x, x.y, h[4 * n], l[4 * n]);
                y[1] = add_group(y[1], scales.x, x.z, x.w, h[4 * n + 1], l[4 * n + 1]);
                y[2] = add_group(y[2], scales.y, x.x, x.y, h[4 * n + 2], l[4 * n + 2]);
                y[3] = add_group(y[3], scales.y, x.z, x.w, h[4 * n + 3], l[4 * n + 3]);
            }
        }
    }
    if (tile >= p.tiles) return;
#pragma unroll
    for (int n = 0; n < N / 8; n++) store_outputs<FINISH>(p, rows, tile, n * 8 + 2 * t, *count, g, sums + 4 * n);
}

template <int BITS, int TOKENS, Finish FINISH> DEVICE void gemm_wide(const Gemm& p) {
    __shared__ u32 rows[TOKENS], places[TOKENS];
    __shared__ int shared_count;
    int expert = 0, first = 0, count = 0;
    if (!tokens_of_cta(p, expert, first, count)) return;
    if (threadIdx.x < TOKENS) {
        const u32 row = row_of_token(p, expert, first, count, threadIdx.x);
        rows[threadIdx.x] = row;
        places[threadIdx.x] = row / p.share * p.x.width;
    }
    if (threadIdx.x == 0) shared_count = count;
    __syncthreads();
    if (count <= 16) wide<BITS, TOKENS, 16, FINISH>(p, rows, places, expert, &shared_count);
    else if (count <= 32) wide<BITS, TOKENS, 32, FINISH>(p, rows, places, expert, &shared_count);
    else if constexpr (TOKENS == HALF_WIDE_TOKENS) {
        wide<BITS, TOKENS, 64, FINISH>(p, rows, places, expert, &shared_count);
    } else if constexpr (TOKENS == WIDE_TOKENS) {
        if (count <= 64) wide<BITS, TOKENS, 64, FINISH>(p, rows, places, expert, &shared_count);
        else if (count <= 96) wide<BITS, TOKENS, 96, FINISH>(p, rows, places, expert, &shared_count);
        else wide<BITS, TOKENS, 128, FINISH>(p, rows, places, expert, &shared_count);
    }
}
#else
// Other GPUs take the forms of gemm.cu.
template <int BITS, int TOKENS, Finish FINISH> DEVICE void gemm_wide(const Gemm&) {}
#endif

// Narrow: up to 32 tokens, two CTAs or more a processor, so that one streams weights while another begins or ends.
KERNEL(WIDE_THREADS, 1) gemm_q4_store_wide(Gemm p) { gemm_wide<4, WIDE_TOKENS, STORE>(p); }
KERNEL(WIDE_THREADS, 1) gemm_q4_add_wide(Gemm p) { gemm_wide<4, WIDE_TOKENS, ADD>(p); }
KERNEL(WIDE_THREADS, 1) gemm_q4_swiglu_wide(Gemm p) { gemm_wide<4, WIDE_TOKENS, SWIGLU>(p); }
KERNEL(WIDE_THREADS, 1) gemm_q8_store_wide(Gemm p) { gemm_wide<8, HALF_WIDE_TOKENS, STORE>(p); }
KERNEL(WIDE_THREADS, 2) gemm_q4_store_narrow(Gemm p) { gemm_wide<4, NARROW_TOKENS, STORE>(p); }
KERNEL(WIDE_THREADS, 2) gemm_q4_add_narrow(Gemm p) { gemm_wide<4, NARROW_TOKENS, ADD>(p); }
KERNEL(WIDE_THREADS, 2) gemm_q4_swiglu_narrow(Gemm p) { gemm_wide<4, NARROW_TOKENS, SWIGLU>(p); }
KERNEL(WIDE_THREADS, 2) gemm_q8_store_narrow(Gemm p) { gemm_wide<8, NARROW_TOKENS, STORE>(p); }
