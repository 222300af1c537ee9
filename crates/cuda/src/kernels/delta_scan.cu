// Many tokens through the gated delta rule, second half: the state through the chunks that delta_wide.cu made ready, whose formulas and
// formats are explained there; and the norm of the output of few tokens.
// Bytes moved: what delta_wide.cu left, once from memory and four times from the L2; outputs; the state read and written.
// Reference: lily_reference::ops::{delta_step, gated_norm}.

// ---- Chunk after chunk. A CTA has 32 values of a head, so that 4 share a head; its two groups of four warps have 16 values each, and of
// a group each warp 32 of the keys, whose part of the state stays in its registers, and 16 of the tokens, whose E and O it finishes.
// Sums over keys meet in shared memory. Pieces come through a ring.
// Out: out [tokens, VALUE_WIDTH] = o; the state; and the last four inputs into the history of the convolution.
constexpr int SCAN_THREADS = 256;
constexpr int SCAN_SLOTS = 3;
constexpr int SCAN_PIECES = 7;   // of a chunk: W, W, Q, Q, K, K, P
struct Scan {
    PieceRing<SCAN_SLOTS, PIECE> ring;
    float4 met[8][6][32];            // of a warp: sums over its keys, of 8 tokens each that it does not finish
    uint4 errors[2][4][2][2][32];    // of a group: 16 tokens of E, as it is and times D_n, as A operands' high and low halves
};

KERNEL(SCAN_THREADS, 1)
delta_scan(const Run* run, int layer, const float* projected, const char* related, int tokens, float* out) {
    Scan& shared = *(Scan*)dynamic_shared;
    const int head = blockIdx.x >> 2, slice = blockIdx.x & 3, key_head = head / VALUES_PER_KEY;
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int group = warp >> 2, part = warp & 3;
    const int chunks = (tokens + CHUNK - 1) / CHUNK;
    const char* keys_at = related_key((char*)related, 0, key_head);
    const char* values_at = related_value((char*)related, 0, head);
    float* state = run->delta + (((u64)layer * VALUE_HEADS + head) * DELTA_HEAD + slice * 32 + group * 16 + g) * DELTA_HEAD +
                   part * 32 + 2 * t;
    launch_dependents();
    float s[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 x = *(const float2*)(state + r * 8 * DELTA_HEAD + n * 8);
            s[n][2 * r] = x.x, s[n][2 * r + 1] = x.y;
        }
    wait_for_inputs();

    // What the next convolution begins with; the last one is done.
    const int old = tokens - 4 + warp;
    if (warp < 4 && old >= 0) {
        float* history = history_slot(run->conv, layer, run->position + old);
        const float* row = projected + (u64)old * PROJ_DELTA;
        int channel = 2 * KEY_WIDTH + head * DELTA_HEAD + slice * 32 + lane;
        history[channel] = row[channel];
        if (head % VALUES_PER_KEY == 0) {
            channel = key_head * DELTA_HEAD + slice * 32 + lane;
            history[channel] = row[channel];
            history[channel + KEY_WIDTH] = row[channel + KEY_WIDTH];
        }
    }
    // Where `piece` of the chunk whose operands begin `at_chunk` further on than the first's goes.
    auto fetch = [&](int piece, u64 at_chunk, int to_slot) {
        const char* from = piece < 2 ? values_at + piece * PIECE : piece < 6 ? keys_at + (piece - 2) * PIECE : values_at + 4 * PIECE;
        shared.ring.fetch(to_slot, from + at_chunk, piece < 6 ? PIECE : LOWER);
    };
    shared.ring.begin();
#pragma unroll
    for (int i = 0; i < SCAN_SLOTS - 1; i++) fetch(i, 0, i);
    int slot = 0, turn = 0;

    // A group's warps have tokens, eight by eight, in orders of their own: first those that they finish.
    const int turned = 2 * part;
    // Where sums of other warps over this warp's tokens lie.
    auto add_met = [&](float(*sums)[4]) {
#pragma unroll
        for (int other = 1; other < 4; other++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 x = shared.met[warp ^ other][2 * other + n - 2][lane];
                sums[n][0] += x.x, sums[n][1] += x.y, sums[n][2] += x.z, sums[n][3] += x.w;
            }
    };
    auto put_met = [&](const float(*sums)[4]) {
#pragma unroll
        for (int n = 2; n < 8; n++) shared.met[warp][n - 2][lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    };
    const char* own_u = values_at + 2 * PIECE + ((slice * 2 + group) * 8 + turned) * FRAGMENT + lane * 16;
    const char* own_factors = values_at + 4 * PIECE + LOWER;
    float* own_out = out + head * DELTA_HEAD + slice * 32 + group * 16 + g;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        float e[8][4] = {}, o[8][4] = {};
        float4 u[2];
        float2 from_start[2], to_end[2];
        const u64 at_chunk = chunk * RELATED_CHUNK;
        const float* factors = (const float*)(own_factors + at_chunk);
        // The next piece, as this lane sees it. All warps are done with the one before.
        auto next = [&](int piece) {
            shared.ring.ready<SCAN_SLOTS - 2>();
            __syncthreads();
            const int later = piece + SCAN_SLOTS - 1, wraps = later >= SCAN_PIECES;
            if (chunk + wraps < chunks)
                fetch(later % SCAN_PIECES, at_chunk + wraps * RELATED_CHUNK, slot == 0 ? SCAN_SLOTS - 1 : slot - 1);
            else shared.ring.fetched();
            shared.ring.wait(slot, turn);
            const char* here = shared.ring.slots[slot] + lane * 16;
            if (++slot == SCAN_SLOTS) slot = 0, turn ^= 1;
            return here;
        };
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u[n] = load_cg((const float4*)(own_u + at_chunk + n * FRAGMENT));
            from_start[n] = __ldcg((const float2*)(factors + (turned + n) * 8 + 2 * t));
            to_end[n] = __ldcg((const float2*)(factors + CHUNK + (turned + n) * 8 + 2 * t));
        }
        const float shrink = load_cg(factors + CHUNK - 1);
        const Rows16 own[2] = {rows_of(s[0], s[1]), rows_of(s[2], s[3])};
        auto meet = [&](float(*sums)[4], const Rows16& state, int piece) {
            const char* here = next(piece) + part * 8 * FRAGMENT;
            uint4 b[8];
#pragma unroll
            for (int n = 0; n < 8; n++) b[n] = *(const uint4*)(here + (n ^ turned) * FRAGMENT);
            add_products<8>(sums, state, b);
        };
        meet(e, own[0], 0);
        meet(e, own[1], 1);
        put_met(e);
        meet(o, own[0], 2);
        add_met(e);
#pragma unroll
        for (int n = 0; n < 2; n++) e[n][0] += u[n].x, e[n][1] += u[n].y, e[n][2] += u[n].z, e[n][3] += u[n].w;
#pragma unroll
        for (int kind = 0; kind < 2; kind++) {
            if (kind)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    e[n][0] *= to_end[n].x, e[n][1] *= to_end[n].y, e[n][2] *= to_end[n].x, e[n][3] *= to_end[n].y;
            const Rows16 rows = rows_of(e[0], e[1]);
            shared.errors[group][part][kind][0][lane] = make_uint4(rows.high[0], rows.high[1], rows.high[2], rows.high[3]);
            shared.errors[group][part][kind][1][lane] = make_uint4(rows.low[0], rows.low[1], rows.low[2], rows.low[3]);
        }
        meet(o, own[1], 3);
        put_met(o);
        auto errors = [&](int step, int kind) {
            const uint4 high = shared.errors[group][step][kind][0][lane], low = shared.errors[group][step][kind][1][lane];
            return Rows16{{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}};
        };
#pragma unroll
        for (int n = 0; n < 4; n++) s[n][0] *= shrink, s[n][1] *= shrink, s[n][2] *= shrink, s[n][3] *= shrink;
        Rows16 to_state[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const char* here = next(4 + half) + part * 8 * FRAGMENT;
#pragma unroll
            for (int step = 0; step < 4; step++) {
                if (half == 0) to_state[step] = errors(step, 1);
                const uint4 b[2] = {*(const uint4*)(here + step * 2 * FRAGMENT), *(const uint4*)(here + (step * 2 + 1) * FRAGMENT)};
                add_products<2>(s + 2 * half, to_state[step], b);
            }
        }
        const char* lower = next(6) + part * (part + 1) * FRAGMENT;
        add_met(o);
#pragma unroll
        for (int n = 0; n < 2; n++)
            o[n][0] *= from_start[n].x, o[n][1] *= from_start[n].y, o[n][2] *= from_start[n].x, o[n][3] *= from_start[n].y;
#pragma unroll
        for (int step = 0; step < 4; step++)
            if (step <= part) {
                const uint4 b[2] = {*(const uint4*)(lower + step * FRAGMENT), *(const uint4*)(lower + (part + 1 + step) * FRAGMENT)};
                add_products<2>(o, errors(step, 0), b);
            }
        const int token = chunk * CHUNK + part * 16 + 2 * t;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int at = token + n * 8 + (c & 1);
                if (at < tokens) own_out[(u64)at * VALUE_WIDTH + (c >> 1) * 8] = o[n][c];
            }
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2*)(state + r * 8 * DELTA_HEAD + n * 8) = make_float2(s[n][2 * r], s[n][2 * r + 1]);
}

// ---- The gated norm of a delta layer for up to ROWS tokens, rounded to fixed point as the kernels of rows.cu take it. A warp has a block
// of a token. In: o [tokens, VALUE_WIDTH], z in projected. Reference: lily_reference::ops::gated_norm.
KERNEL(32, 16) few_delta_norm(const float* o, const float* projected, const float* norm, RowImage out) {
    const int lane = threadIdx.x, row = blockIdx.x / out.blocks, block = blockIdx.x % out.blocks;
    const int k = lane_start(block, lane);
    launch_dependents();
    wait_for_inputs();
    float v[8] = {};
    if (k < VALUE_WIDTH) {
        float z[8], w[8];
        load_lane(v, o + row * VALUE_WIDTH + k);
        load_lane(z, projected + row * PROJ_DELTA + PROJ_Z + k);
        load_lane(w, norm + k % DELTA_HEAD);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
        // Half a warp has a head; whole halves are here.
        const u32 mask = 0xffffu << (lane & 16);
#pragma unroll
        for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(mask, sum, d);
        const float scale = inverse_root(sum / DELTA_HEAD + RMS_EPS);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale * w[i] * silu(z[i]);
    }
    __syncwarp();
    store_lane(out.block(row, block), fix_lane(v, lane), lane, lane >> 3);
}
