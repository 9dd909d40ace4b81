// Attention over paged keys and values for tiles of rows on tensor cores (prefill). Pages and tables as in
// attention_decode.cu, whose rows-of-one it leaves to that.
//
// Flash attention: grid (n_tiles, n_heads), 128 threads = 4 warps of 16 query rows, mma m16n8k16.
// tiles (n_tiles) int4 {first row, rows (<= 64), position of the first row, span}. BN tokens of K and V in shared memory.
// HD is head_dim rounded up to 16; columns beyond head_dim are zero in shared memory.

#include "common.cuh"

// Instances that are compiled ahead in tests; a model's own are compiled when it is loaded:
// instance: attention_prefill<__nv_bfloat16, 64, 64>
// instance: attention_prefill<__nv_bfloat16, 128, 64>
// instance: attention_prefill<__nv_bfloat16, 256, 32>
// instance: attention_prefill<__half, 128, 64>

constexpr int TILE_ROWS = 64;

template <typename T, int HD, int BN>
__global__ void __launch_bounds__(128) attention_prefill(
    const float *q, float *__restrict__ out, const float *gate, const T *keys,
    const T *values, const int *page_table, const int4 *tiles, int n_heads,
    int n_kv_heads, int head_dim, int page_size, int max_pages, float scale, float softcap, int sliding_window) {
    pdl_wait();
    pdl_launch();
    constexpr int PITCH = HD + 8;  // a row's padding keeps ldmatrix free of bank conflicts
    constexpr int KSTEPS = HD / 16, NTILES = BN / 8, OTILES = HD / 8;
    extern __shared__ __align__(16) unsigned char raw[];
    T *tile_q = reinterpret_cast<T *>(raw);      // (64, PITCH)
    T *tile_k = tile_q + TILE_ROWS * PITCH;      // (BN, PITCH)
    T *tile_v = tile_k + BN * PITCH;             // (BN, PITCH)

    const int4 tile = tiles[blockIdx.x];
    const int head = blockIdx.y, kv_head = head / (n_heads / n_kv_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int *pages = page_table + (size_t)tile.w * max_pages;
    const float query_scale = softcap > 0.f ? scale : scale * LOG2E;

    for (int i = threadIdx.x; i < TILE_ROWS * (HD / 4); i += 128) {
        const int r = i / (HD / 4), c = i % (HD / 4) * 4;
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (r < tile.y && c < head_dim)
            x = *reinterpret_cast<const float4 *>(q + ((size_t)(tile.x + r) * n_heads + head) * head_dim + c);
        T *to = tile_q + r * PITCH + c;
        to[0] = from_float<T>(x.x * query_scale), to[1] = from_float<T>(x.y * query_scale);
        to[2] = from_float<T>(x.z * query_scale), to[3] = from_float<T>(x.w * query_scale);
    }

    float acc[OTILES][4];
#pragma unroll
    for (int t = 0; t < OTILES; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.f;
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
    const int my_row = warp * 16 + lane / 4;  // and my_row + 8
    const int position[2] = {tile.z + my_row, tile.z + my_row + 8};

    const int last = tile.z + tile.y - 1;  // highest key any row sees
    const int first = sliding_window > 0 ? max(0, tile.z - sliding_window + 1) / BN * BN : 0;
    for (int base = first; base <= last; base += BN) {
        __syncthreads();  // the previous tile of keys and values is no longer read
        for (int i = threadIdx.x; i < BN * (HD / 8); i += 128) {
            const int r = i / (HD / 8), c = i % (HD / 8) * 8, token = base + r;
            if (token <= last && c < head_dim) {
                const size_t at = (((size_t)pages[token / page_size] * n_kv_heads + kv_head) * page_size + token % page_size) * head_dim + c;
                copy_async16(tile_k + r * PITCH + c, keys + at);
                copy_async16(tile_v + r * PITCH + c, values + at);
            } else {  // zero, so that 0 * garbage never becomes NaN
                *reinterpret_cast<uint4 *>(tile_k + r * PITCH + c) = make_uint4(0, 0, 0, 0);
                *reinterpret_cast<uint4 *>(tile_v + r * PITCH + c) = make_uint4(0, 0, 0, 0);
            }
        }
        copy_async_wait_all();
        __syncthreads();

        float score[NTILES][4];
#pragma unroll
        for (int t = 0; t < NTILES; t++) score[t][0] = score[t][1] = score[t][2] = score[t][3] = 0.f;
#pragma unroll
        for (int ks = 0; ks < KSTEPS; ks++) {
            unsigned a[4];
            load_matrix4(a, tile_q + (warp * 16 + lane % 16) * PITCH + ks * 16 + lane / 16 * 8);
#pragma unroll
            for (int t = 0; t < NTILES; t += 2) {  // two n-tiles of 8 tokens
                unsigned b[4];
                load_matrix4(b, tile_k + (t * 8 + lane % 8 + lane / 16 * 8) * PITCH + ks * 16 + lane / 8 % 2 * 8);
                mma16816<T>(score[t], a, b[0], b[1]);
                mma16816<T>(score[t + 1], a, b[2], b[3]);
            }
        }

        float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int t = 0; t < NTILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int half = e / 2, key = base + t * 8 + lane % 4 * 2 + e % 2;
                float s = score[t][e];
                if (softcap > 0.f) s = softcap * tanhf(s / softcap) * LOG2E;
                const bool seen = key <= position[half] && (sliding_window <= 0 || position[half] - key < sliding_window);
                score[t][e] = seen ? s : -INFINITY;
                new_max[half] = fmaxf(new_max[half], score[t][e]);
            }
        float fade[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(~0u, new_max[half], 1));
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(~0u, new_max[half], 2));
            const float safe = new_max[half] == -INFINITY ? 0.f : new_max[half];  // a row that sees nothing yet
            fade[half] = exp2f(row_max[half] - safe);
            row_max[half] = new_max[half];
            row_sum[half] *= fade[half];
            new_max[half] = safe;
        }
#pragma unroll
        for (int t = 0; t < OTILES; t++) acc[t][0] *= fade[0], acc[t][1] *= fade[0], acc[t][2] *= fade[1], acc[t][3] *= fade[1];

#pragma unroll
        for (int ks = 0; ks < BN / 16; ks++) {  // 16 tokens a step: two score tiles become one A operand
            unsigned p[4];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float x = exp2f(score[2 * ks + t][2 * half] - new_max[half]);
                    const float y = exp2f(score[2 * ks + t][2 * half + 1] - new_max[half]);
                    row_sum[half] += x + y;
                    p[t * 2 + half] = pack2<T>(x, y);
                }
#pragma unroll
            for (int t = 0; t < OTILES; t += 2) {
                unsigned b[4];
                load_matrix4_transposed(b, tile_v + (ks * 16 + lane % 16) * PITCH + t * 8 + lane / 16 * 8);
                mma16816<T>(acc[t], p, b[0], b[1]);
                mma16816<T>(acc[t + 1], p, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
        row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
        const int r = my_row + half * 8;
        if (r >= tile.y) continue;
        const float inverse = 1.f / row_sum[half];
        const size_t start = ((size_t)(tile.x + r) * n_heads + head) * head_dim;
#pragma unroll
        for (int t = 0; t < OTILES; t++) {
            if (t * 8 >= head_dim) break;
            const size_t at = start + t * 8 + lane % 4 * 2;
            float2 x = make_float2(acc[t][half * 2] * inverse, acc[t][half * 2 + 1] * inverse);
            if (gate) x.x *= sigmoid(gate[at]), x.y *= sigmoid(gate[at + 1]);
            *reinterpret_cast<float2 *>(out + at) = x;
        }
    }
}
