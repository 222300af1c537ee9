// Weights from the order of the file to blocks.
//
// In: codes [rows, inputs * bits / 8], scales and biases [rows, inputs / 64] BF16 of one or two matrices, in device memory,
//     `tiles` tiles of 16 rows. Of two matrices a tile takes 8 rows each, the first ones first (gate and up).
// Out: [tile, blocks(inputs)] blocks. Rows beyond `rows` and inputs beyond `inputs` are zeros.
// One work-item makes one word; bytes moved: those of the matrix, read and written once.

struct Source {
    const u8* codes;
    const u16* scales;
    const u16* biases;
};

template <int BITS> DEVICE void repack(Source first, Source second, int paired, int rows, int inputs, int tiles, u32* out) {
    constexpr int CODE_WORDS = BITS == 4 ? 512 : 1024;
    constexpr int WORDS = CODE_WORDS + 64;
    const int blocks = (inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS, groups = inputs / GROUP;
    const u64 total = (u64)tiles * blocks * WORDS;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        const int word = at % WORDS, block = at / WORDS % blocks, tile = at / WORDS / blocks;
        const bool code = word < CODE_WORDS;
        const int lane = code ? word / 4 % 32 : (word - CODE_WORDS) / 2, g = lane >> 2, t = lane & 3;
        const int row_in_tile = g + 8 * (word & 1);
        const Source source = paired && row_in_tile >= 8 ? second : first;
        const int row = paired ? tile * 8 + (row_in_tile & 7) : tile * 16 + row_in_tile;
        u32 value = 0;
        if (!code) {
            const int group = block * (BLOCK_INPUTS / GROUP) + t;
            if (row < rows && group < groups) {
                const u64 i = (u64)row * groups + group;
                value = source.scales[i] | (u32)source.biases[i] << 16;
            }
        } else if (BITS == 4) {
            const int k = block * BLOCK_INPUTS + word / 128 * GROUP + 32 * (word >> 1 & 1) + 4 * t;
            if (row < rows && k < inputs) {
                const u8* codes = source.codes + ((u64)row * inputs + k) / 2;
                const u32 low = *(const u16*)codes, high = *(const u16*)(codes + 8);
#pragma unroll
                for (int n = 0; n < 4; n++) value |= (low >> 4 * n & 15) << 8 * n | (high >> 4 * n & 15) << (8 * n + 4);
            }
        } else {
            const int half = word / 128;
            const int k = block * BLOCK_INPUTS + half / 2 * GROUP + 32 * (half & 1) + 16 * (word >> 1 & 1) + 4 * t;
            if (row < rows && k < inputs) value = *(const u32*)(source.codes + (u64)row * inputs + k);
        }
        out[at] = value;
    }
}

KERNEL(256, 1) repack_q4(Source first, Source second, int paired, int rows, int inputs, int tiles, u32* out) {
    repack<4>(first, second, paired, rows, inputs, tiles, out);
}
KERNEL(256, 1) repack_q8(Source first, Source second, int paired, int rows, int inputs, int tiles, u32* out) {
    repack<8>(first, second, paired, rows, inputs, tiles, out);
}

// ---- Reads memory, for measuring. The sum would be written if it were what it never is.
KERNEL(512, 2) plain_read(const uint4* from, u64 pieces, u32* never) {
    u32 sum = 0;
    const u64 threads = (u64)gridDim.x * 512;
    for (u64 at = (u64)blockIdx.x * 512 + threadIdx.x; at < pieces; at += 4 * threads) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i * threads >= pieces) break;
            const uint4 v = __ldcs(from + at + i * threads);
            sum |= v.x ^ v.y ^ v.z ^ v.w;
        }
    }
    if (sum == 0x9e3779b9u && threadIdx.x == 513) *never = sum;
}
