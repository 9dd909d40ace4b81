// Products of 2 to 128 tokens with a matrix on tensor cores: each weight is read once and made bf16 in registers.
// What mma_direct.cu (few tokens) and mma_tiled.cu (more) share.
//
// A warp takes 16 MT rows. Lane (g, t) = (lane / 4, lane % 4) reads chunk 4 i + t of rows g and g + 8, and its 16
// consecutive elements of each are spread over four mma k-steps: step j takes elements 4j .. 4j+3 of each of the four
// lanes' runs. The sum over k does not mind the order as long as the activations come in the same one, so a lane's
// activations are 16 consecutive elements of one token too, and nothing is ever shuffled.
//
// With GATED the MT = 2 row tiles of a warp are the same rows of matrix 0 (gate) and matrix 1 (up).
// x: (n_tokens, K) bf16. Results f32, or bf16 with `out_bf16`.

#pragma once
#include "linear.cuh"

struct MmaParams {
    Matrix matrices[MAX_MATRICES];
    const __nv_bfloat16 *x;
    float *partial;  // (token tiles, tiles, splits, results of a tile) f32, in fragment order
    u32 *counters;   // (token tiles, tiles) start and end at zero
    int n_matrices, n_tokens, K;
    int activation;  // of a gated launch (linear.cuh)
    int out_bf16;
    int n_splits;    // of K over blockIdx.y; 1 for mma_direct
};
static_assert(sizeof(MmaParams) == 336, "matmul_launch.py");

constexpr int WARPS = 8;

template <class T, int MT, bool GATED> struct WarpRows {
    Planes planes[MT];
    u32 first[MT][2];  // the first chunk of rows g and g + 8; rows past the end read the last one, results are dropped
    int row0;          // of the first tile
    __device__ __forceinline__ WarpRows(const MmaParams &p, const Matrix &matrix, int row0, int g) : row0(row0) {
        const u32 chunks_a_row = p.K / T::E;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            planes[mt] = GATED ? p.matrices[mt].weights : matrix.weights;
            const int row = row0 + g + (GATED ? 0 : 16 * mt);
            first[mt][0] = min(row, matrix.rows - 1) * chunks_a_row, first[mt][1] = min(row + 8, matrix.rows - 1) * chunks_a_row;
        }
    }
};

template <class T, int MT> struct Fragments {
    typename T::Raw raw[MT][2];
    template <bool GATED> __device__ __forceinline__ void load(const WarpRows<T, MT, GATED> &rows, int c) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            raw[mt][0] = T::load(rows.planes[mt], rows.first[mt][0] + c), raw[mt][1] = T::load(rows.planes[mt], rows.first[mt][1] + c);
        }
    }
};

// 16 elements of a row as 8 bf16 pairs.
template <class V> __device__ __forceinline__ void bf16_pairs(const V &values, int s, u32 (&to)[8]) {
    float v[16];
    values.segment(s, v);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = pack2<__nv_bfloat16>(v[2 * i], v[2 * i + 1]);
}

// One chunk a lane: `activations(nt, s, b)` gives the lane's 16 elements of segment s of token 8 nt + g.
template <class T, int MT, int NT, bool GATED, class F>
__device__ __forceinline__ void multiply(const WarpRows<T, MT, GATED> &rows, const Fragments<T, MT> &fragments, int c, bool live,
                                         F activations, float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int s = 0; s < T::SEGMENTS; s++) {
        u32 a[MT][2][8];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Values<T> values(fragments.raw[mt][h], rows.first[mt][h] + c);
                bf16_pairs(values, s, a[mt][h]);
                if (!live)
#pragma unroll
                    for (int i = 0; i < 8; i++) a[mt][h][i] = 0;
            }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            u32 b[8];
            activations(nt, s, b);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned step[4] = {a[mt][0][2 * j], a[mt][1][2 * j], a[mt][0][2 * j + 1], a[mt][1][2 * j + 1]};
                    mma16816<__nv_bfloat16>(acc[mt][nt], step, b[2 * j], b[2 * j + 1]);
                }
        }
    }
}

__device__ __forceinline__ void set8(u32 (&b)[8], const uint4 &low, const uint4 &high) {
    b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w, b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
}

__device__ __forceinline__ void finish(const MmaParams &p, const Matrix &matrix, float value, int row, int token) {
    if (row >= matrix.rows || token >= p.n_tokens) return;
    const size_t at = (size_t)token * matrix.out_stride + row;
    if (matrix.bias) value += matrix.bias[row];
    if (matrix.residual) value += matrix.residual[at];
    if (p.out_bf16)
        static_cast<__nv_bfloat16 *>(matrix.out)[at] = __float2bfloat16_rn(value);
    else
        static_cast<float *>(matrix.out)[at] = value;
}
__device__ __forceinline__ void finish_gated(const MmaParams &p, float gate, float up, int row, int token) {
    if (row >= p.matrices[0].rows) return;
    if (p.matrices[0].bias) gate += p.matrices[0].bias[row];
    if (p.matrices[1].bias) up += p.matrices[1].bias[row];
    Matrix plain = p.matrices[0];
    plain.bias = nullptr;
    finish(p, plain, activate(p.activation, gate) * up, row, token);
}
