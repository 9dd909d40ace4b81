// The gated delta net mixer between its projections: causal convolution, delta rule, gated norm.
//
// u (n_rows, channels) f32 = [q: n_k_heads * k_dim | k: the same | v: n_v_heads * v_dim], as projected
// conv_state (n_slots, 3, channels) f32 oldest first: the inputs before the span; state (n_slots, n_v_heads, v_dim, k_dim)
// f32: row j is column j of S. spans (n_spans) int4 {first row, rows, slot, 0}; slot < 0 is padding of a graph's bucket.
// v-head h uses k-head h % n_k_heads (the converter's tiling).

#include "common.cuh"

// instance: gated_delta<1>
// instance: gated_delta<4>

constexpr int CONV_WIDTH = 4;

// Grid (ceil(channels / 256), n_tiles): depthwise convolution over time, then SiLU.
// tiles (n_tiles) int4 {first row, rows, first row of the span, slot}; a tile of a single-row span also shifts the state.
extern "C" __global__ void __launch_bounds__(256, 4) conv_silu(
    const float *u, const float *weight, float *conv_state, float *__restrict__ out,
    const int4 *tiles, int channels, int single_rows) {
    pdl_wait();
    pdl_launch();
    const int channel = blockIdx.x * 256 + threadIdx.x;
    const int4 tile = tiles[blockIdx.y];
    if (channel >= channels || tile.w < 0) return;
    const float4 w = *reinterpret_cast<const float4 *>(weight + (size_t)channel * CONV_WIDTH);
    float *past = conv_state + (size_t)tile.w * (CONV_WIDTH - 1) * channels + channel;
    float x[CONV_WIDTH - 1];
#pragma unroll
    for (int i = 0; i < CONV_WIDTH - 1; i++) {  // the inputs 3, 2, 1 rows before the tile
        const int row = tile.x - (CONV_WIDTH - 1) + i;
        x[i] = row >= tile.z ? u[(size_t)row * channels + channel] : past[(size_t)(row - tile.z + CONV_WIDTH - 1) * channels];
    }
    for (int r = tile.x; r < tile.x + tile.y; r++) {
        const float now = u[(size_t)r * channels + channel];
        out[(size_t)r * channels + channel] = silu(x[0] * w.x + x[1] * w.y + x[2] * w.z + now * w.w);
        x[0] = x[1], x[1] = x[2], x[2] = now;
    }
    if (single_rows)
#pragma unroll
        for (int i = 0; i < CONV_WIDTH - 1; i++) past[(size_t)i * channels] = x[i];
}

// Grid (ceil(channels / 256), n_spans), after conv_silu has read the old state of spans of several rows.
extern "C" __global__ void __launch_bounds__(256) conv_state_update(
    const float *u, float *conv_state, const int4 *spans, int channels) {
    pdl_wait();
    pdl_launch();
    const int channel = blockIdx.x * 256 + threadIdx.x;
    const int4 span = spans[blockIdx.y];
    if (channel >= channels || span.z < 0) return;
    float *past = conv_state + (size_t)span.z * (CONV_WIDTH - 1) * channels + channel;
    float x[CONV_WIDTH - 1];
#pragma unroll
    for (int i = 0; i < CONV_WIDTH - 1; i++) {
        const int row = span.y - (CONV_WIDTH - 1) + i;
        x[i] = row >= 0 ? u[(size_t)(span.x + row) * channels + channel] : past[(size_t)(row + CONV_WIDTH - 1) * channels];
    }
#pragma unroll
    for (int i = 0; i < CONV_WIDTH - 1; i++) past[(size_t)i * channels] = x[i];
}

// Grid (n_v_heads, v_dim / 16, n_spans), 128 threads: 16 columns of S a block, 8 lanes a column, S in registers over the
// whole span; the state is read once and written once. k_dim = 32 * VECS; lane l holds k = 4 * (l + 8 i) .. + 3.
// With both dots taken on the old S they reduce together: o = g (S q) + delta (k q).
template <int VECS>
__global__ void __launch_bounds__(128, 4) gated_delta(
    const float *u, const float *alpha, const float *beta,
    const float *dt_bias, const float *a, float *state, float *__restrict__ out,
    const int4 *spans, int n_k_heads, int n_v_heads, int v_dim, int alpha_stride, int beta_stride, float epsilon) {
    pdl_wait();
    pdl_launch();
    constexpr int K_DIM = 32 * VECS, TOKENS = 16, COLUMNS = 16;
    __shared__ float4 q_tile[TOKENS][K_DIM / 4], k_tile[TOKENS][K_DIM / 4];
    __shared__ float v_tile[TOKENS][COLUMNS], decay[TOKENS], rate[TOKENS], kq[TOKENS];
    const int4 span = spans[blockIdx.z];
    if (span.z < 0) return;
    const int head = blockIdx.x, k_head = head % n_k_heads, first_column = blockIdx.y * COLUMNS;
    const int column = threadIdx.x / 8, lane = threadIdx.x % 8;
    const int channels = 2 * n_k_heads * K_DIM + n_v_heads * v_dim;

    float4 *mine = reinterpret_cast<float4 *>(state + (((size_t)span.z * n_v_heads + head) * v_dim + first_column + column) * K_DIM);
    float4 s[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) s[i] = mine[lane + 8 * i];

    for (int base = 0; base < span.y; base += TOKENS) {
        const int n = min(TOKENS, span.y - base);
        const float *rows = u + (size_t)(span.x + base) * channels;
        __syncthreads();
        for (int i = threadIdx.x; i < n * (K_DIM / 4); i += 128) {
            const int t = i / (K_DIM / 4), c = i % (K_DIM / 4);
            const float4 *row = reinterpret_cast<const float4 *>(rows + (size_t)t * channels + k_head * K_DIM);
            q_tile[t][c] = row[c];
            k_tile[t][c] = row[c + n_k_heads * (K_DIM / 4)];
        }
        for (int i = threadIdx.x; i < n * COLUMNS; i += 128)
            v_tile[i / COLUMNS][i % COLUMNS] =
                rows[(size_t)(i / COLUMNS) * channels + 2 * n_k_heads * K_DIM + head * v_dim + first_column + i % COLUMNS];
        if (threadIdx.x < n) {
            const size_t row = span.x + base + threadIdx.x;
            const float x = alpha[row * alpha_stride + head] + dt_bias[head];
            const float softplus = x > 20.f ? x : log1pf(__expf(x));
            decay[threadIdx.x] = __expf(a[head] * softplus);
            rate[threadIdx.x] = sigmoid(beta[row * beta_stride + head]);
        }
        __syncthreads();
        for (int t = threadIdx.x / 32; t < n; t += 4) {  // l2 norms, a warp a token
            float *q = reinterpret_cast<float *>(q_tile[t]), *k = reinterpret_cast<float *>(k_tile[t]);
            float qq = 0.f, kk = 0.f, dot = 0.f;
            for (int i = threadIdx.x % 32; i < K_DIM; i += 32) qq += q[i] * q[i], kk += k[i] * k[i], dot += q[i] * k[i];
#pragma unroll
            for (int o = 16; o > 0; o /= 2) {
                qq += __shfl_xor_sync(~0u, qq, o);
                kk += __shfl_xor_sync(~0u, kk, o);
                dot += __shfl_xor_sync(~0u, dot, o);
            }
            const float q_scale = rsqrtf(qq + epsilon) * rsqrtf((float)K_DIM), k_scale = rsqrtf(kk + epsilon);
            for (int i = threadIdx.x % 32; i < K_DIM; i += 32) q[i] *= q_scale, k[i] *= k_scale;
            if (threadIdx.x % 32 == 0) kq[t] = dot * q_scale * k_scale;
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            float4 k[VECS];
            float dot_k = 0.f, dot_q = 0.f;
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                k[i] = k_tile[t][lane + 8 * i];
                const float4 q = q_tile[t][lane + 8 * i];
                dot_k += s[i].x * k[i].x + s[i].y * k[i].y + s[i].z * k[i].z + s[i].w * k[i].w;
                dot_q += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
            }
#pragma unroll
            for (int o = 4; o > 0; o /= 2) {
                dot_k += __shfl_xor_sync(~0u, dot_k, o);
                dot_q += __shfl_xor_sync(~0u, dot_q, o);
            }
            const float g = decay[t], delta = rate[t] * (v_tile[t][column] - g * dot_k);
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                s[i].x = g * s[i].x + k[i].x * delta;
                s[i].y = g * s[i].y + k[i].y * delta;
                s[i].z = g * s[i].z + k[i].z * delta;
                s[i].w = g * s[i].w + k[i].w * delta;
            }
            if (lane == 0)
                out[((size_t)(span.x + base + t) * n_v_heads + head) * v_dim + first_column + column] = g * dot_q + delta * kq[t];
        }
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) mine[lane + 8 * i] = s[i];
}

// Grid (n_rows, ceil(n_v_heads / 4)), a warp a head: out = RMS(o; weight) * silu(z), in place of o.
extern "C" __global__ void __launch_bounds__(128) gated_norm(
    float *o, const float *z, const float *weight, int n_v_heads, int v_dim,
    int z_stride, float epsilon) {
    pdl_wait();
    pdl_launch();
    const int head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= n_v_heads) return;
    float *mine = o + ((size_t)blockIdx.x * n_v_heads + head) * v_dim;
    const float *gate = z + (size_t)blockIdx.x * z_stride + head * v_dim;
    float squares = 0.f;
    for (int i = lane; i < v_dim; i += 32) squares += mine[i] * mine[i];
#pragma unroll
    for (int o2 = 16; o2 > 0; o2 /= 2) squares += __shfl_xor_sync(~0u, squares, o2);
    const float inverse = rsqrtf(squares / v_dim + epsilon);
    for (int i = lane; i < v_dim; i += 32) mine[i] = mine[i] * inverse * weight[i] * silu(gate[i]);
}
