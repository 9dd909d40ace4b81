// Products of many tokens with their experts on tensor cores: tiles of one expert's pairs (experts_route.cu).
//
// A block takes 128 rows (GATED: 64 of the gate and the same 64 of up) and one tile of up to TOKENS pairs. A stage is
// 128 elements of K: the weights come through registers, are dequantized once and lie in shared memory as bf16; the
// pairs' activations come by asynchronous copies, double-buffered. While a stage is multiplied the next one is on its
// way. Grid: (tiles of rows, most tiles of pairs there can be); blocks without a tile end at once.
//
// GATED: x is (n_tokens, K), the result silu(gate) * up goes to the pair's place. Else x is (places, K), the result goes
// to the pair. Mma tiles of a GATED launch hold 8 rows of the gate above the same 8 of up, so that one lane has both.

// instance: expert_tiles<Q8_0, Q8_0, 16, true>
// instance: expert_tiles<Q8_0, Q8_0, 32, false>
// instance: expert_tiles<Q8_0, Q8_0, 64, true>
// instance: expert_tiles<Q8_0, Q8_0, 128, true>
// instance: expert_tiles<Q8_0, Q8_0, 128, false>
// instance: expert_tiles<Q4_K, Q5_K, 64, true>
// instance: expert_tiles<Q4_K, Q4_K, 128, true>
// instance: expert_tiles<Q6_K, Q6_K, 64, false>
// instance: expert_tiles<Q2_K, Q3_K, 64, true>
// instance: expert_tiles<BF16, BF16, 32, true>
// instance: expert_tiles<BF16, BF16, 64, false>

#include "linear.cuh"

struct TileParams {
    Planes gate, up;         // without GATED the stack is `gate`
    const __nv_bfloat16 *x;
    const int *order;        // (n_pairs,) place -> pair
    const int4 *tiles;       // expert, first place, number of pairs (0: no tile), unused
    __nv_bfloat16 *out;      // (n_pairs, rows) by place with GATED, else by pair
    int K, rows;             // rows of one product
    int rows_an_expert;      // of the stack
    int up_offset;           // of up's rows in an expert
    int n_used, pad;
};
static_assert(sizeof(TileParams) == 120, "experts_arguments.py");

constexpr int THREADS = 256, ROWS = 128, STAGE = 128;
constexpr int PITCH = 2 * STAGE;  // bytes of a row in shared memory: 16 units of 16 bytes, permuted by the row

__device__ __forceinline__ u8 *unit_at(u8 *base, int row, int unit) { return base + row * PITCH + ((unit ^ (row & 7)) << 4); }

// A thread's share of N_ROWS rows of a stage, on its way from device to shared memory.
template <class T, int N_ROWS> struct Share {
    static constexpr int A_ROW = STAGE / T::E, TOTAL = N_ROWS * A_ROW, N = (TOTAL + THREADS - 1) / THREADS;
    typename T::Raw raw[N];

    static __device__ __forceinline__ u32 chunk_of(const TileParams &p, u32 base, int row0, int c0, int at) {
        // rows past the end read the last one, chunks past the end the last one and count as zeros
        const int chunks = p.K / T::E;
        return (base + (u32)min(row0 + at / A_ROW, p.rows - 1)) * (u32)chunks + (u32)min(c0 + at % A_ROW, chunks - 1);
    }
    __device__ __forceinline__ void load(const TileParams &p, const Planes &planes, u32 base, int row0, int stage) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = threadIdx.x + THREADS * i;
            if (TOTAL % THREADS && at >= TOTAL) continue;
            raw[i] = T::load(planes, chunk_of(p, base, row0, stage * A_ROW, at));
        }
    }
    // `slot(r)`: where row r of the share lies in shared memory.
    template <class F> __device__ __forceinline__ void store(const TileParams &p, u32 base, int row0, int stage, u8 *shared, F slot) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = threadIdx.x + THREADS * i;
            if (TOTAL % THREADS && at >= TOTAL) continue;
            const Values<T> values(raw[i], chunk_of(p, base, row0, stage * A_ROW, at));
            const bool exists = stage * A_ROW + at % A_ROW < p.K / T::E;
            const int row = slot(at / A_ROW);
#pragma unroll
            for (int s = 0; s < T::SEGMENTS; s++) {
                float v[16];
                values.segment(s, v);
                u32 w[8];
#pragma unroll
                for (int j = 0; j < 8; j++) w[j] = exists ? pack2<__nv_bfloat16>(v[2 * j], v[2 * j + 1]) : 0u;
                // runs of a stage's chunks lie as those of the row's first chunks do
                const int unit = T::segment(at % A_ROW, s) / 8;
                *reinterpret_cast<uint4 *>(unit_at(shared, row, unit)) = make_uint4(w[0], w[1], w[2], w[3]);
                *reinterpret_cast<uint4 *>(unit_at(shared, row, unit + 1)) = make_uint4(w[4], w[5], w[6], w[7]);
            }
        }
    }
};

template <int TOKENS> __device__ __forceinline__ void stage_tokens(u8 *to, const TileParams &p, const int *sources, int stage) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * 16; i += THREADS) {
        const int token = i / 16, unit = i % 16;
        const int k = min(stage * STAGE + 8 * unit, p.K - 8);  // past the end: anything finite, weights there are zeros
        copy_async16(unit_at(to, token, unit), p.x + (size_t)sources[token] * p.K + k);
    }
    copy_async_commit();
}

template <int TOKENS> struct Tiling {
    static constexpr int N_WARP = TOKENS < 32 ? TOKENS : 32;  // tokens a warp
    static constexpr int COLUMN_WARPS = TOKENS / N_WARP, ROW_WARPS = THREADS / 32 / COLUMN_WARPS;
    static constexpr int MT = ROWS / ROW_WARPS / 16, NT = N_WARP / 8;
};

template <int MT, int NT>
__device__ __forceinline__ void multiply_stage(u8 *weights, u8 *tokens, int row0, int token0, float (&acc)[MT][NT][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int step = 0; step < STAGE / 16; step++) {
        u32 b[NT / 2][4];
#pragma unroll
        for (int n = 0; n < NT / 2; n++)
            load_matrix4(b[n], unit_at(tokens, token0 + 16 * n + (lane & 7) + (lane >> 4) * 8, 2 * step + ((lane >> 3) & 1)));
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            u32 a[4];
            load_matrix4(a, unit_at(weights, row0 + 16 * mt + (lane & 15), 2 * step + (lane >> 4)));
#pragma unroll
            for (int nt = 0; nt < NT; nt++) mma16816<__nv_bfloat16>(acc[mt][nt], a, b[nt / 2][nt % 2 * 2], b[nt / 2][nt % 2 * 2 + 1]);
        }
    }
}

template <class TG, class TU, int TOKENS, bool GATED>
__global__ void __launch_bounds__(THREADS, 2) expert_tiles(const __grid_constant__ TileParams p) {
    using Cut = Tiling<TOKENS>;
    constexpr int MT = Cut::MT, NT = Cut::NT, RESULTS = GATED ? ROWS / 2 : ROWS;
    extern __shared__ __align__(16) u8 shared[];
    u8 *const weights = shared, *const tokens = shared + ROWS * PITCH;
    int *const sources = reinterpret_cast<int *>(tokens + 2 * TOKENS * PITCH);  // rows of x
    pdl_launch();
    pdl_wait();
    const int4 tile = p.tiles[blockIdx.y];
    if (tile.z == 0) return;
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) {
        const int place = tile.y + min(i, tile.z - 1);
        sources[i] = GATED ? p.order[place] / p.n_used : place;
    }
    const int first_row = blockIdx.x * RESULTS, n_stages = (p.K + STAGE - 1) / STAGE;
    const u32 base = (u32)tile.x * (u32)p.rows_an_expert, up_base = base + (u32)p.up_offset;
    __syncthreads();

    Share<TG, RESULTS> gate;
    Share<TU, GATED ? RESULTS : 1> up;
    stage_tokens<TOKENS>(tokens, p, sources, 0);
    gate.load(p, p.gate, base, first_row, 0);
    if (GATED) up.load(p, p.up, up_base, first_row, 0);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int row0 = 16 * MT * (warp % Cut::ROW_WARPS), token0 = Cut::N_WARP * (warp / Cut::ROW_WARPS);
    float acc[MT][NT][4] = {};
    for (int stage = 0; stage < n_stages; stage++) {
        copy_async_wait_all();
        __syncthreads();  // the stage's tokens are here; everybody is done with the weights and tokens before it
        if (GATED) {
            gate.store(p, base, first_row, stage, weights, [](int r) { return (r & ~7) * 2 + (r & 7); });
            up.store(p, up_base, first_row, stage, weights, [](int r) { return (r & ~7) * 2 + (r & 7) + 8; });
        } else {
            gate.store(p, base, first_row, stage, weights, [](int r) { return r; });
        }
        if (stage + 1 < n_stages) {
            stage_tokens<TOKENS>(tokens + ((stage + 1) & 1) * TOKENS * PITCH, p, sources, stage + 1);
            gate.load(p, p.gate, base, first_row, stage + 1);
            if (GATED) up.load(p, p.up, up_base, first_row, stage + 1);
        }
        __syncthreads();
        multiply_stage<MT, NT>(weights, tokens + (stage & 1) * TOKENS * PITCH, row0, token0, acc);
    }

    // to (tokens, rows) in shared memory, then out by 16 bytes
    constexpr int OUT_PITCH = 2 * RESULTS + 16;
    static_assert(TOKENS * OUT_PITCH <= ROWS * PITCH + 2 * TOKENS * PITCH, "the results' room");
    const int g = lane >> 2, t = lane & 3;
    __syncthreads();
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < (GATED ? 2 : 4); i++) {
                const int row = GATED ? (row0 + 16 * mt) / 2 + g : row0 + 16 * mt + g + 8 * (i >> 1);
                const int token = token0 + 8 * nt + 2 * t + (i & 1);
                const float value = GATED ? silu(acc[mt][nt][i]) * acc[mt][nt][i + 2] : acc[mt][nt][i];
                *reinterpret_cast<__nv_bfloat16 *>(shared + token * OUT_PITCH + 2 * row) = __float2bfloat16_rn(value);
            }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * (RESULTS / 8); i += THREADS) {
        const int token = i / (RESULTS / 8), unit = i % (RESULTS / 8), row = first_row + 8 * unit;
        if (token >= tile.z || row >= p.rows) continue;
        const int place = tile.y + token;
        const size_t at = (size_t)(GATED ? place : p.order[place]) * p.rows + row;
        *reinterpret_cast<uint4 *>(p.out + at) = *reinterpret_cast<const uint4 *>(shared + token * OUT_PITCH + 16 * unit);
    }
}
