// Attention over paged keys and values: decode (one row a sequence, split over the tokens) and prefill (tiles of rows).
//
// Pages:  keys, values (n_pages, n_kv_heads, page_size, head_dim) of T (bf16 or f16)
// Tables: page_table (n_spans, max_pages) int32, row_span (n_rows) int32, positions (n_rows) int32
// q, out: (n_rows, n_heads * head_dim) f32; gate the same or null: out is multiplied by sigmoid(gate)
// Key p is seen from position t when p <= t and, with a sliding window w > 0, t - p < w.

#include "common.cuh"

// Instances that are compiled ahead in tests; a model's own are compiled when it is loaded:
// instance: attention_decode<__nv_bfloat16, 8, 3>
// instance: attention_decode<__nv_bfloat16, 16, 4>
// instance: attention_decode<__nv_bfloat16, 32, 6>
// instance: attention_prefill<__nv_bfloat16, 64, 64>
// instance: attention_prefill<__nv_bfloat16, 128, 64>
// instance: attention_prefill<__nv_bfloat16, 256, 32>
// instance: attention_prefill<__half, 128, 64>

// ---- decode -----------------------------------------------------------------------------------------------------
// Grid (n_kv_heads * parts, n_splits, n_rows), 128 threads. LANES lanes share a token, 8 elements a lane (one 16-byte
// load); a block serves G query heads of its kv head (all of them with parts == 1), so a key is read once for G heads.
// The last split to arrive combines: partial (row, kv part, split, G, head_dim + 2) f32, counters (row, kv part)
// start and end at zero.

constexpr int DECODE_WARPS = 4;
constexpr int MIN_TOKENS_A_SPLIT = 64;

struct Running {
    float max, sum;
};

template <int G>
__device__ __forceinline__ void merge(Running (&state)[G], float (&acc)[G][8], const Running (&other)[G], const float (&other_acc)[G][8]) {
#pragma unroll
    for (int g = 0; g < G; g++) {
        float m = fmaxf(state[g].max, other[g].max);
        float a = m == -INFINITY ? 0.f : exp2f(state[g].max - m), b = m == -INFINITY ? 0.f : exp2f(other[g].max - m);
        state[g] = {m, state[g].sum * a + other[g].sum * b};
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] = acc[g][i] * a + other_acc[g][i] * b;
    }
}

template <typename T, int LANES, int G>
__global__ void __launch_bounds__(32 * DECODE_WARPS, 2) attention_decode(
    const float *__restrict__ q, float *__restrict__ out, const float *__restrict__ gate, const T *__restrict__ keys,
    const T *__restrict__ values, const int *__restrict__ page_table, const int *__restrict__ rows,
    const int *__restrict__ row_span, const int *__restrict__ positions, float *__restrict__ partial,
    unsigned *__restrict__ counters, int parts, int head_dim, int page_size, int max_pages, float scale, float softcap,
    int sliding_window) {
    pdl_wait();
    pdl_launch();
    constexpr int GROUPS = 32 / LANES;           // tokens a warp looks at together
    constexpr int STEP = GROUPS * DECODE_WARPS;  // tokens a block looks at together
    constexpr int UNROLL = G <= 4 ? 4 : G <= 6 ? 2 : 1;       // of those in flight, as registers allow
    const int kv_head = blockIdx.x / parts, split = blockIdx.y, n_splits = gridDim.y;
    const int n_heads = gridDim.x * G, n_kv_heads = gridDim.x / parts, first_head = blockIdx.x * G;
    const int row = rows[blockIdx.z];
    if (row < 0) return;  // padding of a graph's bucket
    const int position = positions[row];
    const int first = sliding_window > 0 ? max(0, position - sliding_window + 1) : 0;
    const int total = position + 1 - first;
    const int share = max(MIN_TOKENS_A_SPLIT, (total + n_splits - 1) / n_splits);
    const int active = (total + share - 1) / share;
    if (split >= active) return;
    const int begin = first + split * share, end = min(position + 1, begin + share);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, sub = lane % LANES;
    const bool live = sub * 8 < head_dim;
    const int *pages = page_table + (size_t)row_span[row] * max_pages;

    float query[G][8];
    // scores live in base 2 unless a softcap needs them plain
    const float query_scale = softcap > 0.f ? scale : scale * LOG2E;
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            query[g][i] = live ? q[((size_t)row * n_heads + first_head + g) * head_dim + sub * 8 + i] * query_scale : 0.f;

    Running state[G];
    float acc[G][8];
#pragma unroll
    for (int g = 0; g < G; g++) {
        state[g] = {-INFINITY, 0.f};
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] = 0.f;
    }

    for (int base = begin + warp * GROUPS; base < end; base += STEP * UNROLL) {  // uniform over the warp
        uint4 k_bits[UNROLL], v_bits[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int token = base + u * STEP + group;
            k_bits[u] = v_bits[u] = make_uint4(0, 0, 0, 0);
            if (token >= end || !live) continue;
            const size_t at = (((size_t)pages[token / page_size] * n_kv_heads + kv_head) * page_size + token % page_size) * head_dim + sub * 8;
            k_bits[u] = *reinterpret_cast<const uint4 *>(keys + at);
            v_bits[u] = *reinterpret_cast<const uint4 *>(values + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const bool seen = base + u * STEP + group < end;
            float k[8], v[8];
            unpack8<T>(k_bits[u], k);
            unpack8<T>(v_bits[u], v);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float s = 0.f;
#pragma unroll
                for (int i = 0; i < 8; i++) s += query[g][i] * k[i];
#pragma unroll
                for (int o = LANES / 2; o > 0; o /= 2) s += __shfl_xor_sync(~0u, s, o);
                if (softcap > 0.f) s = softcap * tanhf(s / softcap) * LOG2E;
                if (!seen) continue;
                const float m = fmaxf(state[g].max, s);
                const float fade = exp2f(state[g].max - m), p = exp2f(s - m);
                state[g] = {m, state[g].sum * fade + p};
#pragma unroll
                for (int i = 0; i < 8; i++) acc[g][i] = acc[g][i] * fade + p * v[i];
            }
        }
    }

    // across the groups of a warp
#pragma unroll
    for (int o = LANES; o < 32; o *= 2) {
        Running other[G];
        float other_acc[G][8];
#pragma unroll
        for (int g = 0; g < G; g++) {
            other[g] = {__shfl_xor_sync(~0u, state[g].max, o), __shfl_xor_sync(~0u, state[g].sum, o)};
#pragma unroll
            for (int i = 0; i < 8; i++) other_acc[g][i] = __shfl_xor_sync(~0u, acc[g][i], o);
        }
        merge<G>(state, acc, other, other_acc);
    }

    // across the warps of the block
    extern __shared__ float shared[];  // (DECODE_WARPS, G, head_dim + 2)
    const int width = head_dim + 2;
    if (group == 0) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            float *mine = shared + (warp * G + g) * width;
            if (live)
#pragma unroll
                for (int i = 0; i < 8; i++) mine[sub * 8 + i] = acc[g][i];
            if (sub == 0) mine[head_dim] = state[g].max, mine[head_dim + 1] = state[g].sum;
        }
    }
    __syncthreads();

    const size_t cell = (size_t)blockIdx.z * gridDim.x + blockIdx.x;
    float *my_partial = partial + (cell * n_splits + split) * G * width;
    for (int i = threadIdx.x; i < G * head_dim; i += blockDim.x) {
        const int g = i / head_dim, d = i % head_dim;
        float m = -INFINITY;
        for (int w = 0; w < DECODE_WARPS; w++) m = fmaxf(m, shared[(w * G + g) * width + head_dim]);
        float value = 0.f, sum = 0.f;
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float *other = shared + (w * G + g) * width;
            const float fade = exp2f(other[head_dim] - m);  // a warp without tokens has -inf: 0
            value += other[d] * fade, sum += other[head_dim + 1] * fade;
        }
        if (active == 1) {
            const size_t at = ((size_t)row * n_heads + first_head + g) * head_dim + d;
            out[at] = value / sum * (gate ? sigmoid(gate[at]) : 1.f);
        } else {
            my_partial[g * width + d] = value;
            if (d == 0) my_partial[g * width + head_dim] = m, my_partial[g * width + head_dim + 1] = sum;
        }
    }
    if (active == 1) return;

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counters + cell, 1u) == unsigned(active - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    const float *all = partial + cell * n_splits * G * width;
    for (int i = threadIdx.x; i < G * head_dim; i += blockDim.x) {
        const int g = i / head_dim, d = i % head_dim;
        float m = -INFINITY;
        for (int s = 0; s < active; s++) m = fmaxf(m, __ldcg(all + (s * G + g) * width + head_dim));
        float value = 0.f, sum = 0.f;
        for (int s = 0; s < active; s++) {
            const float *other = all + (s * G + g) * width;
            const float fade = exp2f(__ldcg(other + head_dim) - m);
            value += __ldcg(other + d) * fade, sum += __ldcg(other + head_dim + 1) * fade;
        }
        const size_t at = ((size_t)row * n_heads + first_head + g) * head_dim + d;
        out[at] = value / sum * (gate ? sigmoid(gate[at]) : 1.f);
    }
    if (threadIdx.x == 0) counters[cell] = 0u;
}

// ---- prefill ----------------------------------------------------------------------------------------------------
// Flash attention on tensor cores: grid (n_tiles, n_heads), 128 threads = 4 warps of 16 query rows, mma m16n8k16.
// tiles (n_tiles) int4 {first row, rows (<= 64), position of the first row, span}. BN tokens of K and V in shared memory.
// HD is head_dim rounded up to 16; columns beyond head_dim are zero in shared memory.

constexpr int TILE_ROWS = 64;

template <typename T, int HD, int BN>
__global__ void __launch_bounds__(128) attention_prefill(
    const float *__restrict__ q, float *__restrict__ out, const float *__restrict__ gate, const T *__restrict__ keys,
    const T *__restrict__ values, const int *__restrict__ page_table, const int4 *__restrict__ tiles, int n_heads,
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
