// What happens to activations between products: RMS norm, residual with post norm, gate times up, quantization.
//
// One launch takes an input stage (x | act(gate) * up | residual + norm(x; post)), an optional RMS norm, and writes any
// of: 8- or 16-bit quantized rows (linear.cuh), f32, bf16. All matrices are (n_tokens, K) with K a multiple of 32.

// instance: norm_rows<1>
// instance: norm_rows<2>
// instance: norm_rows<4>

#include "linear.cuh"

struct RowsParams {
    const float *x;         // (n_tokens, x_stride) f32
    const float *up;        // (n_tokens, x_stride): x becomes act(x) * up; or null
    const float *residual;  // (n_tokens, K): x becomes residual + norm(x; post), kept in `updated`; or null
    const float *post;      // (K,) weight of the post norm
    float *updated;         // (n_tokens, K); may be `residual` itself
    const float *weight;    // (K,) of the norm; null: no norm
    Quantized to;           // hi null: not wanted; lo null: 8 bits
    float *out;             // (n_tokens, K) f32 or null
    __nv_bfloat16 *out_bf16;  // (n_tokens, K) or null
    float post_epsilon, epsilon;
    int K, x_stride, activation, n_tokens;
};
static_assert(sizeof(RowsParams) == 120, "matmul_launch.py");

// Sum over the block; every thread gets it. `scratch` holds 33 floats; the second barrier frees it for the next use.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : 0.f;
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    __syncthreads();
    return x;
}

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

// Eight lanes hold a 32-block, four elements each; all 32 lanes of the warp take part.
template <bool TWO> __device__ __forceinline__ void quantize4(const Quantized &to, const float (&x)[4], int token, int k, int K, bool live) {
    u32 bits = 0;  // as integers, so that a NaN is the largest of all and reaches the result
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
#pragma unroll
    for (int o = 4; o; o >>= 1) bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, o));
    const float largest = __uint_as_float(bits);
    constexpr float LEVELS = TWO ? 32512.f : 127.f;
    const float scale = largest / LEVELS, inverse = largest > 0.f ? LEVELS / largest : 0.f;
    u32 hi = 0, lo = 0;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int q = __float2int_rn(x[i] * inverse), high = TWO ? (q + 128) >> 8 : q;
        hi |= (u32)(high & 255) << (8 * i);
        if (TWO) lo |= (u32)((q - 256 * high) & 255) << (8 * i);
        sum += (float)q;
    }
#pragma unroll
    for (int o = 2; o; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
    if (!live) return;
    const size_t row = (size_t)token * K;
    *reinterpret_cast<u32 *>(to.hi + row + k) = hi;
    if (TWO) *reinterpret_cast<u32 *>(to.lo + row + k) = lo;
    if ((threadIdx.x & 7) == 0) to.scale[(row + k) >> 5] = scale;
    if ((threadIdx.x & 3) == 0) to.sum[(row + k) >> 4] = sum * scale;
}

__device__ __forceinline__ void write4(const RowsParams &p, const float (&x)[4], int token, int k, bool live) {
    if (p.to.hi) {
        if (p.to.lo)
            quantize4<true>(p.to, x, token, k, p.K, live);
        else
            quantize4<false>(p.to, x, token, k, p.K, live);
    }
    if (!live) return;
    const size_t at = (size_t)token * p.K + k;
    if (p.out) *reinterpret_cast<float4 *>(p.out + at) = make_float4(x[0], x[1], x[2], x[3]);
    if (p.out_bf16) *reinterpret_cast<uint2 *>(p.out_bf16 + at) = make_uint2(pack2<__nv_bfloat16>(x[0], x[1]), pack2<__nv_bfloat16>(x[2], x[3]));
}

__device__ __forceinline__ void input4(const RowsParams &p, float (&x)[4], int token, int k) {
    const size_t at = (size_t)token * p.x_stride + k;
    const float4 v = load4(p.x + at);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    if (!p.up) return;
    const float4 up = load4(p.up + at);
    x[0] = activate(p.activation, x[0]) * up.x, x[1] = activate(p.activation, x[1]) * up.y;
    x[2] = activate(p.activation, x[2]) * up.z, x[3] = activate(p.activation, x[3]) * up.w;
}

// A block a token, VECTORS times four elements a thread. Grid (n_tokens), block a multiple of 32.
template <int VECTORS> __global__ void __launch_bounds__(1024) norm_rows(const __grid_constant__ RowsParams p) {
    __shared__ float scratch[33];
    pdl_launch();
    const int token = blockIdx.x;
    float norm_weight[VECTORS][4];  // weights do not depend on the previous kernel
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int k = 4 * (threadIdx.x + v * blockDim.x);
        if (p.weight && k < p.K) {
            const float4 w = load4(p.weight + k);
            norm_weight[v][0] = w.x, norm_weight[v][1] = w.y, norm_weight[v][2] = w.z, norm_weight[v][3] = w.w;
        }
    }
    pdl_wait();
    float x[VECTORS][4] = {};
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int k = 4 * (threadIdx.x + v * blockDim.x);
        if (k < p.K) input4(p, x[v], token, k);
#pragma unroll
        for (int i = 0; i < 4; i++) squares = fmaf(x[v][i], x[v][i], squares);
    }
    if (p.residual) {
        const float inverse = rsqrtf(block_sum(squares, scratch) / (float)p.K + p.post_epsilon);
        squares = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int k = 4 * (threadIdx.x + v * blockDim.x);
            if (k >= p.K) continue;
            const size_t at = (size_t)token * p.K + k;
            const float4 post = load4(p.post + k), residual = load4(p.residual + at);
            x[v][0] = residual.x + x[v][0] * inverse * post.x, x[v][1] = residual.y + x[v][1] * inverse * post.y;
            x[v][2] = residual.z + x[v][2] * inverse * post.z, x[v][3] = residual.w + x[v][3] * inverse * post.w;
            *reinterpret_cast<float4 *>(p.updated + at) = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
#pragma unroll
            for (int i = 0; i < 4; i++) squares = fmaf(x[v][i], x[v][i], squares);
        }
    }
    const float inverse = p.weight ? rsqrtf(block_sum(squares, scratch) / (float)p.K + p.epsilon) : 1.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int k = 4 * (threadIdx.x + v * blockDim.x);
        if (p.weight)
#pragma unroll
            for (int i = 0; i < 4; i++) x[v][i] = k < p.K ? x[v][i] * inverse * norm_weight[v][i] : 0.f;
        write4(p, x[v], token, k, k < p.K);
    }
}

// Without a norm, elements do not depend on each other beyond their 32-block. Grid (pieces of 1024 elements, n_tokens), block 256.
extern "C" __global__ void __launch_bounds__(256) elements(const __grid_constant__ RowsParams p) {
    pdl_launch();
    pdl_wait();
    const int k = 4 * (threadIdx.x + blockIdx.x * blockDim.x);
    for (int token = blockIdx.y; token < p.n_tokens; token += gridDim.y) {
        float x[4] = {};
        if (k < p.K) input4(p, x, token, k);
        write4(p, x, token, k, k < p.K);
    }
}
