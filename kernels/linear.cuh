// What the matrix products share: matrices of one launch, activations, epilogues.
#pragma once
#include "quants.cuh"

constexpr int MAX_MATRICES = 4;

// One matrix of a launch: its rows, and where their results go.
struct Matrix {
    Planes weights;
    void *out;              // (n_tokens, out_stride) f32, or bf16 where the launch says so
    const float *bias;      // (rows,) or null
    const float *residual;  // (n_tokens, out_stride) added to the result, or null; may be `out` itself
    int rows;               // n_out
    int first_tile;         // of the grid's x dimension; tiles are the launch's groups of rows
    int out_stride;
    int pad;
};

// out = act(matrix 0) * matrix 1 when `gated`: 0 no, 1 SiLU, 2 GELU (tanh).
__device__ __forceinline__ float activate(int kind, float x) {
    if (kind == 1) return x / (1.f + __expf(-x));
    const float inner = 0.7978845608028654f * x * fmaf(0.044715f * x, x, 1.f);
    return x / (1.f + __expf(-2.f * inner));  // 0.5 x (1 + tanh(inner)), without cancellation
}

__device__ __forceinline__ int matrix_of(const Matrix *matrices, int n, int tile) {
    int i = 0;
#pragma unroll
    for (int j = 1; j < MAX_MATRICES; j++)
        if (j < n && tile >= matrices[j].first_tile) i = j;
    return i;
}

// Activations quantized to 8 bits a 32-block (hi alone: x = scale * hi) or 16 bits (x = scale * (256 hi + lo)).
struct Quantized {
    i8 *hi, *lo;   // (n_tokens, K); lo null for 8 bits
    float *scale;  // (n_tokens, K / 32)
    float *sum;    // (n_tokens, K / 16): sum of x over 16 elements
};

__device__ __forceinline__ uint4 load16(const void *p) { return *reinterpret_cast<const uint4 *>(p); }
// sum + 16 weights . 16 activations, a byte each.
__device__ __forceinline__ int dot16(const int *w, const uint4 &x, int sum) {
    return __dp4a(w[3], (int)x.w, __dp4a(w[2], (int)x.z, __dp4a(w[1], (int)x.y, __dp4a(w[0], (int)x.x, sum))));
}

// One warp quantizes a block of 32: lane i holds element i of token `token`, block `block`.
template <bool TWO>
__device__ __forceinline__ void quantize_lane(const Quantized &to, float x, int token, int block, int K, int lane) {
    // as integers, so that a NaN is the largest of all and reaches the result
    const float largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(x) & 0x7FFFFFFFu));
    constexpr float LEVELS = TWO ? 32512.f : 127.f;  // 127 * 256: hi stays within +-127
    const float scale = largest / LEVELS, inverse = largest > 0.f ? LEVELS / largest : 0.f;
    const int q = __float2int_rn(x * inverse);
    float sum = (float)q;
#pragma unroll
    for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
    const size_t at = (size_t)token * K + 32 * block + lane;
    if (TWO) {
        const int hi = (q + 128) >> 8;
        to.hi[at] = (i8)hi, to.lo[at] = (i8)(q - 256 * hi);
    } else {
        to.hi[at] = (i8)q;
    }
    if (lane == 0) to.scale[(size_t)token * (K / 32) + block] = scale;
    if ((lane & 15) == 0) to.sum[(size_t)token * (K / 16) + 2 * block + (lane >> 4)] = sum * scale;
}
