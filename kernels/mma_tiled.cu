// Products of 17 to 128 tokens (mma.cuh): a block is 32 rows a row warp and up to 64 tokens (blockIdx.z takes the next),
// activations are staged in shared memory.
//
// A stage is STAGE elements of K for all tokens; the K warps take its chunks in turn, the row warps share it. Stages are
// double-buffered. blockIdx.y splits K over blocks; the last to arrive adds the parts, always in the same order.

// instance: mma_tiled<Q8_0, 4, false>
// instance: mma_tiled<Q8_0, 8, true>
// instance: mma_tiled<Q4_K, 8, false>

#include "mma.cuh"

constexpr int STAGE = 256, MT_TILED = 2;
constexpr int PITCH = STAGE * 2 + 16;  // bytes a token: lanes g and g + 1 meet different banks

template <class T> struct Tiling {
    static constexpr int K_WARPS = STAGE / (4 * T::E), ROW_WARPS = WARPS / K_WARPS;
};

template <int NT> __device__ __forceinline__ void stage(u8 *to, const MmaParams &p, int first_token, int k0) {
    constexpr int PIECES = STAGE * 2 / 16;  // 16-byte pieces a token
    for (int i = threadIdx.x; i < NT * 8 * PIECES; i += 32 * WARPS) {
        const int token = i / PIECES, piece = i % PIECES;
        const int k = min(k0 + 8 * piece, p.K - 8);  // past the end: anything finite, weights there count as zero
        copy_async16(to + token * PITCH + 16 * piece, p.x + (size_t)min(first_token + token, p.n_tokens - 1) * p.K + k);
    }
    copy_async_commit();
}

template <class T, int NT, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, NT < 8 && T::E == 16 && !T::FLOAT ? 2 : 1) mma_tiled(const __grid_constant__ MmaParams p) {
    constexpr int MT = MT_TILED, K_WARPS = Tiling<T>::K_WARPS, ROW_WARPS = Tiling<T>::ROW_WARPS;
    constexpr int TILE = ROW_WARPS * 16 * (GATED ? 1 : MT);  // rows of the result
    constexpr int STAGE_BYTES = NT * 8 * PITCH;
    extern __shared__ __align__(16) u8 shared[];
    __shared__ int is_last;
    pdl_launch();

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int k_warp = warp % K_WARPS, row_warp = warp / K_WARPS;
    const int tile = blockIdx.x, first_token = blockIdx.z * NT * 8;
    const Matrix &matrix = p.matrices[GATED ? 0 : matrix_of(p.matrices, p.n_matrices, tile)];
    const WarpRows<T, MT, GATED> rows(p, matrix, TILE * (tile - matrix.first_tile) + row_warp * (TILE / ROW_WARPS), g);
    const int chunks = p.K / T::E;

    const int n_stages = (p.K + STAGE - 1) / STAGE;
    const int begin = (int)((long long)n_stages * blockIdx.y / p.n_splits), end = (int)((long long)n_stages * (blockIdx.y + 1) / p.n_splits);
    const auto chunk = [&](int i) { return i * (STAGE / T::E) + 4 * k_warp + t; };

    Fragments<T, MT> now, next;
    now.load(rows, min(chunk(begin), chunks - 1));
    float acc[MT][NT][4] = {};
    pdl_wait();
    if (begin < end) stage<NT>(shared, p, first_token, begin * STAGE);
    for (int i = begin; i < end; i++) {
        copy_async_wait_all();
        __syncthreads();  // stage i is here, and everybody is done with the buffer of stage i - 1
        const u8 *buffer = shared + ((i - begin) & 1) * STAGE_BYTES;
        if (i + 1 < end) {
            stage<NT>(shared + ((i + 1 - begin) & 1) * STAGE_BYTES, p, first_token, (i + 1) * STAGE);
            next.load(rows, min(chunk(i + 1), chunks - 1));
        }
        const int c = chunk(i), at = min(c, chunks - 1);
        multiply<T, MT, NT>(
            rows, now, at, c < chunks,
            [&](int nt, int s, u32(&b)[8]) {
                const uint4 *x = reinterpret_cast<const uint4 *>(buffer + (8 * nt + g) * PITCH + 2 * (T::segment(c, s) - i * STAGE));
                set8(b, x[0], x[1]);
            },
            acc);
        now = next;
    }

    // every warp's fragments to shared memory (8 MT NT 512 bytes, the two stages' room), then a thread a result
    constexpr int FRAGMENT = MT * NT * 4, RESULTS = ROW_WARPS * FRAGMENT * 32;
    float *sums = reinterpret_cast<float *>(shared);
    __syncthreads();
    float *mine = sums + (k_warp * ROW_WARPS + row_warp) * FRAGMENT * 32 + lane;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) mine[((mt * NT + nt) * 4 + i) * 32] = acc[mt][nt][i];
    __syncthreads();
    const auto summed = [&](int at) {
        float sum = sums[at];
#pragma unroll
        for (int w = 1; w < K_WARPS; w++) sum += sums[w * RESULTS + at];
        return sum;
    };
    const size_t place = blockIdx.z * gridDim.x + tile;
    float *parts = p.partial + place * p.n_splits * RESULTS;
    u32 *counter = p.counters + place;
    if (p.n_splits > 1) {
        for (int i = threadIdx.x; i < RESULTS; i += 32 * WARPS) parts[(size_t)blockIdx.y * RESULTS + i] = summed(i);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(counter, 1u) == (u32)p.n_splits - 1;
            if (is_last) *counter = 0;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
    }
    const auto total = [&](int at) {
        if (p.n_splits == 1) return summed(at);
        float sum = 0.f;
        for (int split = 0; split < p.n_splits; split++) sum += __ldcg(parts + (size_t)split * RESULTS + at);
        return sum;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < RESULTS; i += 32 * WARPS) {
        const int of_warp = i % (FRAGMENT * 32), f = of_warp >> 5, mt = f / (NT * 4);
        if (GATED && mt == 1) continue;
        const int n = f / 4 % NT, at_g = (i & 31) >> 2, at_t = i & 3;
        const int row = TILE * (tile - matrix.first_tile) + i / (FRAGMENT * 32) * (TILE / ROW_WARPS) + 16 * mt + at_g + 8 * ((f >> 1) & 1);
        const int token = first_token + 8 * n + 2 * at_t + (f & 1);
        if (GATED)
            finish_gated(p, total(i), total(i + NT * 4 * 32), row, token);
        else
            finish(p, matrix, total(i), row, token);
    }
}
