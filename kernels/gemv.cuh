// What gemv.cu and gemv_ring.cu share: one chunk of R rows times the same elements of M tokens.
#pragma once
#include "linear.cuh"

// acc[r][m] += (chunk c of row r) . x[m]. `first_chunk` is the row's place in the matrix, as far as `unpack` minds it.
// X gives the activations: quantized(m, c, s), or four(m, c, i) for float weights.
template <class T, int M, int R, int BYTES, class X>
__device__ __forceinline__ void accumulate(const typename T::Raw (&raw)[R], const u32 (&chunk)[R], int c, const X &x, float (&acc)[R][M]) {
    if constexpr (T::FLOAT) {
        float w[R][16];
#pragma unroll
        for (int r = 0; r < R; r++) T::values(raw[r], w[r]);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = x.four(m, c, i);
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
        for (int r = 0; r < R; r++) T::unpack(raw[r], chunk[r], u[r]);
#pragma unroll
        for (int m = 0; m < M; m++) {
            int joined[R];
#pragma unroll
            for (int s = 0; s < T::SEGMENTS; s++) {
                const auto v = x.quantized(m, c, s);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    int dot = dot16(u[r].w + 4 * s, v.hi, 0);
                    if (BYTES == 2) dot = dot16(u[r].w + 4 * s, v.lo, 256 * dot);
                    if (T::JOINED) {
                        joined[r] = s ? joined[r] + dot : dot;
                        if (s == T::SEGMENTS - 1) acc[r][m] = fmaf((float)joined[r], u[r].d[0] * v.scale, acc[r][m]);
                    } else {
                        acc[r][m] = fmaf((float)dot, u[r].d[s] * v.scale, acc[r][m]);
                    }
                    if (T::HAS_MIN) acc[r][m] = fmaf(-u[r].m[s], v.sum, acc[r][m]);
                    if (T::OFFSET) acc[r][m] = fmaf(u[r].d[s] * (float)-T::OFFSET, v.sum, acc[r][m]);
                }
            }
        }
    }
}

// A run of 16 quantized activations: x = scale * (256 hi + lo), or scale * hi.
struct Run {
    uint4 hi, lo;
    float scale, sum;
};
