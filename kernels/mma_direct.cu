// Products of up to 16 tokens (mma.cuh): a block is 16 MT rows, its warps split K, activations come through L1.

// instance: mma_direct<Q8_0, 1, false>
// instance: mma_direct<Q8_0, 2, true>
// instance: mma_direct<Q4_K, 1, false>
// instance: mma_direct<Q4_K, 2, true>

#include "mma.cuh"

template <class T, int NT, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, GATED && NT == 2 && T::E > 16 ? 1 : 2) mma_direct(const __grid_constant__ MmaParams p) {
    constexpr int MT = GATED ? 2 : 1;
    constexpr bool AHEAD = !GATED || T::E == 16;  // the next chunks are on their way, where registers allow
    __shared__ float sums[WARPS][MT * 16 * NT * 8];
    pdl_launch();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const Matrix &matrix = p.matrices[GATED ? 0 : matrix_of(p.matrices, p.n_matrices, blockIdx.x)];
    const WarpRows<T, MT, GATED> rows(p, matrix, 16 * ((int)blockIdx.x - matrix.first_tile), g);
    const int chunks = p.K / T::E;

    // lanes past the end of a row (K no multiple of 4 chunks) read its last chunk and count for nothing
    Fragments<T, MT> now, next;
    int c = 4 * warp + t;
    if (4 * warp < chunks) now.load(rows, min(c, chunks - 1));
    float acc[MT][NT][4] = {};
    pdl_wait();
    for (; c - t < chunks; c += 4 * WARPS) {
        const bool more = c - t + 4 * WARPS < chunks;
        if (AHEAD && more) next.load(rows, min(c + 4 * WARPS, chunks - 1));
        const int at = min(c, chunks - 1);
        multiply<T, MT, NT>(
            rows, now, at, c < chunks,
            [&](int nt, int s, u32(&b)[8]) {
                const int token = min(8 * nt + g, p.n_tokens - 1);
                const uint4 *x = reinterpret_cast<const uint4 *>(p.x + (size_t)token * p.K + T::segment(at, s));
                set8(b, x[0], x[1]);
            },
            acc);
        if (AHEAD)
            now = next;
        else if (more)
            now.load(rows, min(c + 4 * WARPS, chunks - 1));
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++)  // (token, row) order, rows fastest
                sums[warp][(8 * nt + 2 * t + (i & 1)) * 16 * MT + 16 * mt + g + 8 * (i >> 1)] = acc[mt][nt][i];
    __syncthreads();
    constexpr int RESULTS = 16 * NT * 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < RESULTS; i += 32 * WARPS) {
        const int row = i & 15, token = i >> 4;
        float value = 0.f, up = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            value += sums[w][token * 16 * MT + row];
            if (GATED) up += sums[w][token * 16 * MT + 16 + row];
        }
        if (GATED)
            finish_gated(p, value, up, rows.row0 + row, token);
        else
            finish(p, matrix, value, rows.row0 + row, token);
    }
}
