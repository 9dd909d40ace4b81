// Products of 1 to 8 tokens with a matrix: each weight is read once, at the memory's rate.
//
// A group of `threads` lanes takes R rows (GATED: R/2 of the gate and the same R/2 of up) and splits them over
// its lanes, a chunk a lane at a time. Quantized weights meet 8- or 16-bit activations in dp4a, float weights f32 ones.
// The first chunks are on their way before the previous kernel has ended (weights do not depend on it).
// Grid: (tiles of rows, tiles of M tokens). Block: a multiple of `threads`, at most 256.
//
// With `next.hi` the launch also quantizes what it computed: of each 32 rows the last group to arrive does it
// (counters start and end at zero). With `next_norm` the values are multiplied by the next RMS norm's weight first and
// the sums of their squares kept in `next_squares`; the product that reads them divides by the norm (`squares`).

// instance: gemv<Q8_0, 1, 2, 2, false, 6, false>
// instance: gemv<Q8_0, 1, 2, 2, true, 6, false>
// instance: gemv<Q4_K, 1, 2, 2, false, 4, false>
// instance: gemv<Q4_K, 1, 2, 2, true, 4, false>
// instance: gemv<Q6_K, 1, 2, 2, false, 4, false>
// instance: gemv<Q6_K, 1, 2, 2, true, 4, false>
// instance: gemv<Q5_0, 1, 2, 2, false, 4, false>
// instance: gemv<Q5_0, 1, 2, 2, true, 4, false>
// instance: gemv<BF16, 1, 2, 1, false, 6, false>
// instance: gemv<BF16, 1, 2, 1, true, 6, false>
// instance: gemv<Q8_0, 2, 2, 2, false, 4, false>
// instance: gemv<F32, 8, 2, 1, false, 1, false>

#include "linear.cuh"

struct GemvParams {
    Matrix matrices[MAX_MATRICES];
    Quantized x;           // of the whole batch
    const float *x_float;  // (n_tokens, K) f32, for float weights
    const float *squares;  // (n_tokens, K / 32) or null: results are multiplied by 1 / sqrt(mean square + epsilon)
    Quantized next;
    const float *next_norm;  // (rows,) or null
    float *next_squares;     // (n_tokens, rows / 32)
    u32 *counters;           // (token tiles, rows / 32)
    float epsilon;
    int n_matrices, n_tokens, K;
    int log_threads;
    int activation;  // of a gated launch (linear.cuh)
};
static_assert(sizeof(GemvParams) == 416, "matmul_launch.py");

template <class T, int R, bool GATED> struct Chunks {
    typename T::Raw raw[R];
    __device__ __forceinline__ void load(const GemvParams &p, const Planes &planes, const u32 (&first)[R], int c) {
#pragma unroll
        for (int r = 0; r < R; r++) raw[r] = T::load(GATED ? p.matrices[r >= R / 2].weights : planes, first[r] + c);
    }
};

__device__ __forceinline__ uint4 load16(const void *p) { return *reinterpret_cast<const uint4 *>(p); }

__device__ __forceinline__ int dot16(const int *w, const uint4 &x, int sum) {
    return __dp4a(w[3], (int)x.w, __dp4a(w[2], (int)x.z, __dp4a(w[1], (int)x.y, __dp4a(w[0], (int)x.x, sum))));
}

template <class T, int M, int R, int BYTES, bool GATED>
__device__ __forceinline__ void accumulate(const GemvParams &p, const Chunks<T, R, GATED> &chunks, const u32 (&first)[R], int c,
                                           const int (&token)[M], float (&acc)[R][M]) {
    if constexpr (T::FLOAT) {
        float w[R][16];
#pragma unroll
        for (int r = 0; r < R; r++) T::values(chunks.raw[r], w[r]);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float *x = p.x_float + (size_t)token[m] * p.K + T::segment(c, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = reinterpret_cast<const float4 *>(x)[i];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    acc[r][m] = fmaf(w[r][4 * i], v.x, acc[r][m]), acc[r][m] = fmaf(w[r][4 * i + 1], v.y, acc[r][m]);
                    acc[r][m] = fmaf(w[r][4 * i + 2], v.z, acc[r][m]), acc[r][m] = fmaf(w[r][4 * i + 3], v.w, acc[r][m]);
                }
            }
        }
    } else {
        Unpacked<T::SEGMENTS> u[R];
#pragma unroll
        for (int r = 0; r < R; r++) T::unpack(chunks.raw[r], first[r] + c, u[r]);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const size_t row = (size_t)token[m] * p.K;
            int joined[R];
#pragma unroll
            for (int s = 0; s < T::SEGMENTS; s++) {
                const int k = T::segment(c, s);
                const uint4 hi = load16(p.x.hi + row + k);
                uint4 lo;
                if (BYTES == 2) lo = load16(p.x.lo + row + k);
                const float scale = p.x.scale[(row + k) >> 5];
                float sum = 0.f;
                if (T::HAS_MIN || T::OFFSET) sum = p.x.sum[(row + k) >> 4];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    int dot = dot16(u[r].w + 4 * s, hi, 0);
                    if (BYTES == 2) dot = dot16(u[r].w + 4 * s, lo, 256 * dot);
                    if (T::JOINED) {
                        joined[r] = s ? joined[r] + dot : dot;
                        if (s == T::SEGMENTS - 1) acc[r][m] = fmaf((float)joined[r], u[r].d[0] * scale, acc[r][m]);
                    } else {
                        acc[r][m] = fmaf((float)dot, u[r].d[s] * scale, acc[r][m]);
                    }
                    if (T::HAS_MIN) acc[r][m] = fmaf(-u[r].m[s], sum, acc[r][m]);
                    if (T::OFFSET) acc[r][m] = fmaf(u[r].d[s] * (float)-T::OFFSET, sum, acc[r][m]);
                }
            }
        }
    }
}

// 1 / RMS of this block's tokens, from the sums of squares of 32-blocks: a warp a token.
template <int M> __device__ __forceinline__ void inverse_norms(const GemvParams &p, const int (&token)[M], float *inverse) {
    const int n = p.K / 32, lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < M; m++) {
        if ((threadIdx.x >> 5) != m % (blockDim.x >> 5)) continue;
        float sum = 0.f;
        for (int i = lane; i < n; i += 32) sum += p.squares[(size_t)token[m] * n + i];
#pragma unroll
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
        if (lane == 0) inverse[m] = rsqrtf(sum / (float)p.K + p.epsilon);
    }
}

// Quantize 32 finished rows from `row` on; called by one block, whose warps share the tokens.
template <int BYTES>
__device__ __forceinline__ void quantize_next(const GemvParams &p, const Matrix &matrix, int row, int first_token, int n_tokens) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int m = threadIdx.x >> 5; m < n_tokens; m += warps) {
        const int token = first_token + m;
        float x = __ldcg(static_cast<const float *>(matrix.out) + (size_t)token * matrix.out_stride + row + lane);
        if (p.next_norm) {
            float square = x * x;
#pragma unroll
            for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(0xFFFFFFFFu, square, o);
            if (lane == 0) p.next_squares[(size_t)token * (matrix.rows / 32) + row / 32] = square;
            x *= p.next_norm[row + lane];
        }
        quantize_lane<BYTES == 2>(p.next, x, token, row / 32, matrix.rows, lane);
    }
}

// BLOCKS of 256 must fit a multiprocessor: more of them hide more latency, until registers spill. AHEAD: a lane's next
// chunk is on its way while it computes.
template <class T, int M, int R, int BYTES, bool GATED, int BLOCKS, bool AHEAD>
__global__ void __launch_bounds__(256, BLOCKS) gemv(const __grid_constant__ GemvParams p) {
    __shared__ float partial[32][R * M + 1];  // of each sub-group of up to 32 lanes (8 lanes: 32 of them)
    __shared__ float inverse[M];
    __shared__ int is_last;
    pdl_launch();

    constexpr int ROWS = GATED ? R / 2 : R;  // results of a group
    const int threads = 1 << p.log_threads, lane = threadIdx.x & (threads - 1), group = threadIdx.x >> p.log_threads;
    const int groups = blockDim.x >> p.log_threads;
    const int tile = blockIdx.x * groups + group;
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

    float acc[R][M] = {};
    Chunks<T, R, GATED> now;
    if (lane < chunks_a_row) now.load(p, planes, first, lane);
    pdl_wait();
    if (p.squares) inverse_norms<M>(p, token, inverse);
    for (int c = lane; c < chunks_a_row; c += threads) {
        const bool more = c + threads < chunks_a_row;
        if constexpr (AHEAD) {
            Chunks<T, R, GATED> next;
            if (more) next.load(p, planes, first, c + threads);
            accumulate<T, M, R, BYTES, GATED>(p, now, first, c, token, acc);
            now = next;
        } else {
            accumulate<T, M, R, BYTES, GATED>(p, now, first, c, token, acc);
            if (more) now.load(p, planes, first, c + threads);
        }
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
        if (p.squares) value *= inverse[m], up *= inverse[m];
        if (matrix.bias) value += matrix.bias[row];
        if (GATED) {
            if (p.matrices[1].bias) up += p.matrices[1].bias[row];
            value = activate(p.activation, value) * up;
        }
        const size_t at = (size_t)(first_token + m) * matrix.out_stride + row;
        if (matrix.residual) value += matrix.residual[at];
        static_cast<float *>(matrix.out)[at] = value;
        if (p.next.hi) __threadfence();  // before the block is counted as arrived
    }
    if (!p.next.hi) return;

    // The whole block lies in one 32-row group: its rows are a power of two up to 32, and so are its bounds.
    const int rows_a_block = groups * ROWS, block_row = blockIdx.x * rows_a_block;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 *counter = p.counters + blockIdx.y * (p.matrices[0].rows / 32) + block_row / 32;
        is_last = atomicAdd(counter, rows_a_block) + rows_a_block == 32;
        if (is_last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) quantize_next<BYTES>(p, p.matrices[0], block_row & ~31, first_token, n_tokens);
}
