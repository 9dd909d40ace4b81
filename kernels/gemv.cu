// Products of 1 to 8 tokens with a matrix, on any device and for any width; for some types gemv_ring.cu is faster.
//
// A group of `threads` lanes takes R rows (GATED: R/2 of the gate and the same R/2 of up) and splits them over
// its lanes, a chunk a lane at a time. Quantized weights meet 8- or 16-bit activations in dp4a, float weights f32 ones.
// The first chunks are on their way before the previous kernel has ended (weights do not depend on it).
// Grid: (tiles of rows, tiles of M tokens). Block: a multiple of `threads`, at most 256.

// instance: gemv<Q8_0, 1, 4, 2, false, 3>
// instance: gemv<Q8_0, 1, 4, 2, true, 3>
// instance: gemv<Q4_K, 1, 2, 2, false, 4>
// instance: gemv<Q4_K, 1, 2, 2, true, 4>
// instance: gemv<BF16, 1, 4, 1, false, 3>
// instance: gemv<BF16, 1, 4, 1, true, 3>
// instance: gemv<Q8_0, 2, 4, 2, false, 3>
// instance: gemv<F32, 8, 2, 1, false, 1>

#include "gemv.cuh"

struct GemvParams {
    Matrix matrices[MAX_MATRICES];
    Quantized x;           // of the whole batch
    const float *x_float;  // (n_tokens, K) f32, for float weights
    int n_matrices, n_tokens, K;
    int log_threads;
    int activation;  // of a gated launch (linear.cuh)
    int pad;
};
static_assert(sizeof(GemvParams) == 352, "matmul_launch.py");

template <class T, int M, int BYTES> struct GlobalRows {
    const GemvParams &p;
    const int (&token)[M];
    __device__ __forceinline__ Run quantized(int m, int c, int s) const {
        const size_t at = (size_t)token[m] * p.K + T::segment(c, s);
        Run run;
        run.hi = load16(p.x.hi + at);
        if (BYTES == 2) run.lo = load16(p.x.lo + at);
        run.scale = p.x.scale[at >> 5];
        if (T::HAS_MIN || T::OFFSET) run.sum = p.x.sum[at >> 4];
        return run;
    }
    __device__ __forceinline__ float4 four(int m, int c, int i) const {
        return reinterpret_cast<const float4 *>(p.x_float + (size_t)token[m] * p.K + T::segment(c, 0))[i];
    }
};

// BLOCKS of 256 must fit a multiprocessor: more of them hide more latency, until registers spill.
template <class T, int M, int R, int BYTES, bool GATED, int BLOCKS>
__global__ void __launch_bounds__(256, BLOCKS) gemv(const __grid_constant__ GemvParams p) {
    __shared__ float partial[32][R * M + 1];  // of each sub-group of up to 32 lanes (8 lanes: 32 of them)
    pdl_launch();

    constexpr int ROWS = GATED ? R / 2 : R;  // results of a group
    const int threads = 1 << p.log_threads, lane = threadIdx.x & (threads - 1), group = threadIdx.x >> p.log_threads;
    const int tile = blockIdx.x * (blockDim.x >> p.log_threads) + group;
    const Matrix &matrix = p.matrices[GATED ? 0 : matrix_of(p.matrices, p.n_matrices, tile)];
    const Planes planes = matrix.weights;
    const int row0 = (tile - matrix.first_tile) * ROWS;
    const int chunks_a_row = p.K / T::E;
    u32 first[R];  // the first chunk of each row; rows past the end read the last one again, their results are dropped
#pragma unroll
    for (int r = 0; r < R; r++) first[r] = (u32)min(row0 + r % ROWS, matrix.rows - 1) * (u32)chunks_a_row;
    const int first_token = blockIdx.y * M, n_tokens = min(M, p.n_tokens - first_token);
    int token[M];
#pragma unroll
    for (int m = 0; m < M; m++) token[m] = min(first_token + m, p.n_tokens - 1);

    typename T::Raw raw[R];
    const auto load = [&](int c) {
#pragma unroll
        for (int r = 0; r < R; r++) raw[r] = T::load(GATED ? p.matrices[r >= R / 2].weights : planes, first[r] + c);
    };
    if (lane < chunks_a_row) load(lane);
    pdl_wait();
    const GlobalRows<T, M, BYTES> x{p, token};
    float acc[R][M] = {};
    for (int c = lane; c < chunks_a_row; c += threads) {
        u32 chunk[R];
#pragma unroll
        for (int r = 0; r < R; r++) chunk[r] = first[r] + c;
        accumulate<T, M, R, BYTES>(raw, chunk, c, x, acc);
        if (c + threads < chunks_a_row) load(c + threads);
    }

    const int width = min(threads, 32);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int o = 16; o; o >>= 1)
                if (o < width) acc[r][m] += __shfl_xor_sync(0xFFFFFFFFu, acc[r][m], o);
            if ((threadIdx.x & (width - 1)) == 0) partial[threadIdx.x / width][r * M + m] = acc[r][m];
        }
    __syncthreads();

    const int parts = threads / width;  // sub-groups of a group
    for (int i = lane; i < ROWS * M; i += threads) {
        const int r = i / M, m = i % M, row = row0 + r;
        if (m >= n_tokens || row >= matrix.rows) continue;
        float value = 0.f, up = 0.f;
        for (int w = 0; w < parts; w++) {
            value += partial[group * parts + w][r * M + m];
            if (GATED) up += partial[group * parts + w][(r + R / 2) * M + m];
        }
        if (matrix.bias) value += matrix.bias[row];
        if (GATED) {
            if (p.matrices[1].bias) up += p.matrices[1].bias[row];
            value = activate(p.activation, value) * up;
        }
        const size_t at = (size_t)(first_token + m) * matrix.out_stride + row;
        if (matrix.residual) value += matrix.residual[at];
        static_cast<float *>(matrix.out)[at] = value;
    }
}
