// Per-head RMS norm, rotation, and the write of keys and values into their pages, in one pass over q, k, v.
//
// Grid (n_rows, ceil((n_heads + 2 n_kv_heads) / WARPS)), a warp a head. In: q (n_rows, q_stride) f32, each head
// [q] or, gated, [q | gate]; k, v (n_rows, kv_stride) f32. Out: q_out, gate_out (n_rows, n_heads * head_dim) f32;
// keys, values (n_pages, n_kv_heads, page_size, head_dim) of T. q_out may not alias q when gated.
// inverse_frequency (n_rot / 2) f32, computed in float64 on the host (base, scaling, factors, yarn folded in).

#include "common.cuh"

// instance: rope_cache_write<__nv_bfloat16>
// instance: rope_cache_write<__half>

constexpr int WARPS = 4;
constexpr int MAX_HEAD_DIM = 256;

template <typename T>
__global__ void __launch_bounds__(32 * WARPS) rope_cache_write(
    const float *q, const float *k, const float *v, float *q_out, float *gate_out, T *__restrict__ keys,
    T *__restrict__ values, const float *q_norm, const float *k_norm,
    const float *inverse_frequency, const int *page_table, const int *row_span,
    const int *positions, int q_stride, int k_stride, int v_stride, int n_heads, int n_kv_heads,
    int head_dim, int n_rot, int neox, float attention_factor, float q_epsilon, float k_epsilon, int page_size, int max_pages) {
    pdl_launch();
    __shared__ float staged[WARPS][MAX_HEAD_DIM];
    __shared__ float2 turns[WARPS][MAX_HEAD_DIM / 2];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y * WARPS + warp;
    if (head >= n_heads + 2 * n_kv_heads) {
        pdl_wait();
        return;
    }
    const bool is_q = head < n_heads, is_k = !is_q && head < n_heads + n_kv_heads;
    const int h = is_q ? head : is_k ? head - n_heads : head - n_heads - n_kv_heads;
    const bool gated = gate_out != nullptr;
    const float *from = is_q ? q + (size_t)row * q_stride + h * head_dim * (gated ? 2 : 1)
                       : is_k ? k + (size_t)row * k_stride + h * head_dim
                              : v + (size_t)row * v_stride + h * head_dim;
    const int span = row_span[row], position = positions[row];
    if (span < 0) {  // padding of a graph's bucket
        pdl_wait();
        return;
    }
    float *mine = staged[warp];
    const int half = n_rot / 2;
    if (is_q || is_k)  // angles need the tables only, so they are ready before the projections are
        for (int i = lane; i < half; i += 32) {
            float sine, cosine;
            sincosf(position * inverse_frequency[i], &sine, &cosine);
            turns[warp][i] = make_float2(cosine * attention_factor, sine * attention_factor);
        }
    pdl_wait();

    const float *norm = is_q ? q_norm : is_k ? k_norm : nullptr;
    float squares = 0.f;
    for (int i = lane; i < head_dim; i += 32) {
        mine[i] = from[i];
        squares += mine[i] * mine[i];
    }
    if (norm) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
        const float inverse = rsqrtf(squares / head_dim + (is_q ? q_epsilon : k_epsilon));
        for (int i = lane; i < head_dim; i += 32) mine[i] *= inverse * norm[i];
    }
    __syncwarp();

    if (is_q || is_k) {
        for (int i = lane; i < half; i += 32) {
            const float cosine = turns[warp][i].x, sine = turns[warp][i].y;
            const int a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
            const float x = mine[a], y = mine[b];
            mine[a] = x * cosine - y * sine;
            mine[b] = x * sine + y * cosine;
        }
        __syncwarp();
    }

    if (is_q) {
        const size_t to = ((size_t)row * n_heads + h) * head_dim;
        for (int i = lane; i < head_dim; i += 32) {
            q_out[to + i] = mine[i];
            if (gated) gate_out[to + i] = from[head_dim + i];
        }
    } else {
        const int page = page_table[(size_t)span * max_pages + position / page_size];
        T *to = (is_k ? keys : values) + (((size_t)page * n_kv_heads + h) * page_size + position % page_size) * head_dim;
        for (int i = lane; i < head_dim; i += 32) to[i] = from_float<T>(mine[i]);
    }
}
