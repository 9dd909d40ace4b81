// Attention over paged keys and values, one row a sequence, split over the tokens (decode).
//
// Pages:  keys, values (n_pages, n_kv_heads, page_size, head_dim) of T (bf16 or f16)
// Tables: page_table (n_spans, max_pages) int32, row_span (n_rows) int32, positions (n_rows) int32
// q, out: (n_rows, n_heads * head_dim) f32; gate the same or null: out is multiplied by sigmoid(gate)
// Key p is seen from position t when p <= t and, with a sliding window w > 0, t - p < w.

//
// Grid (n_kv_heads * parts, n_splits, n_rows), 256 threads. LANES lanes share a token, 8 elements a lane (one 16-byte
// load); a block serves G query heads of its kv head (all of them with parts == 1), so a key is read once for G heads.
// The last split to arrive combines: partial (row, kv part, split, G, head_dim + 2) f32, counters (row, kv part)
// start and end at zero.

#include "common.cuh"

// Instances that are compiled ahead in tests; a model's own are compiled when it is loaded:
// instance: attention_decode<__nv_bfloat16, 8, 3>
// instance: attention_decode<__nv_bfloat16, 16, 4>
// instance: attention_decode<__nv_bfloat16, 16, 8>
// instance: attention_decode<__nv_bfloat16, 32, 6>

// Loads that stay where they are written: the compiler moves read-only ones behind the wait for the predecessor.
__device__ __forceinline__ int load_early(const int *p) {
    int v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 load_early16(const void *p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

constexpr int DECODE_WARPS = 8;
constexpr int MIN_TOKENS_A_SPLIT = 128;  // a split's combining costs as much as some tokens more

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
__global__ void __launch_bounds__(32 * DECODE_WARPS, 1) attention_decode(
    const float *q, float *__restrict__ out, const float *gate, const T *keys,
    const T *values, const int *page_table, const int *rows,
    const int *row_span, const int *positions, float *partial,
    unsigned *counters, int parts, int head_dim, int page_size, int max_pages, float scale, float softcap,
    int sliding_window) {
    pdl_launch();
    constexpr int GROUPS = 32 / LANES;           // tokens a warp looks at together
    constexpr int STEP = GROUPS * DECODE_WARPS;  // tokens a block looks at together
    constexpr int UNROLL = G <= 4 ? 4 : G <= 6 ? 2 : 1;       // of those in flight, as registers allow
    const int kv_head = blockIdx.x / parts, split = blockIdx.y, n_splits = gridDim.y;
    const int n_heads = gridDim.x * G, n_kv_heads = gridDim.x / parts, first_head = blockIdx.x * G;
    const int row = rows[blockIdx.z];
    if (row < 0) {  // padding of a graph's bucket
        pdl_wait();
        return;
    }
    const int position = positions[row];
    const int first = sliding_window > 0 ? max(0, position - sliding_window + 1) : 0;
    const int total = position + 1 - first;
    const int share = max(MIN_TOKENS_A_SPLIT, (total + n_splits - 1) / n_splits);
    const int active = (total + share - 1) / share;
    if (split >= active) {
        pdl_wait();
        return;
    }
    const int begin = first + split * share, end = min(position + 1, begin + share);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, sub = lane % LANES;
    const bool live = sub * 8 < head_dim;
    const int *pages = page_table + (size_t)row_span[row] * max_pages;

    // Keys and values of tokens in [from, to) that this lane's next UNROLL steps look at.
    uint4 k_bits[UNROLL], v_bits[UNROLL];
    auto fetch = [&](int base, int from, int to) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int token = base + u * STEP + group;
            if (token < from || token >= to || !live) continue;
            const size_t at = (((size_t)load_early(pages + token / page_size) * n_kv_heads + kv_head) * page_size + token % page_size) * head_dim + sub * 8;
            k_bits[u] = load_early16(keys + at);
            v_bits[u] = load_early16(values + at);
        }
    };
#pragma unroll
    for (int u = 0; u < UNROLL; u++) k_bits[u] = v_bits[u] = make_uint4(0, 0, 0, 0);
    // tables and earlier tokens were there before the step began: they come while the previous kernels still run
    const int base0 = begin + warp * GROUPS;
    fetch(base0, 0, min(end, position));
    pdl_wait();
    fetch(base0, position, end);  // this row's own key and value
    float query[G][8];
    // scores live in base 2 unless a softcap needs them plain
    const float query_scale = softcap > 0.f ? scale : scale * LOG2E;
#pragma unroll
    for (int g = 0; g < G; g++) {
        float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
        if (live) {
            const float4 *from = reinterpret_cast<const float4 *>(q + ((size_t)row * n_heads + first_head + g) * head_dim + sub * 8);
            a = from[0], b = from[1];
        }
        query[g][0] = a.x * query_scale, query[g][1] = a.y * query_scale, query[g][2] = a.z * query_scale;
        query[g][3] = a.w * query_scale, query[g][4] = b.x * query_scale, query[g][5] = b.y * query_scale;
        query[g][6] = b.z * query_scale, query[g][7] = b.w * query_scale;
    }

    Running state[G];
    float acc[G][8];
#pragma unroll
    for (int g = 0; g < G; g++) {
        state[g] = {-INFINITY, 0.f};
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] = 0.f;
    }

    for (int base = begin + warp * GROUPS; base < end; base += STEP * UNROLL) {  // uniform over the warp
        if (base != begin + warp * GROUPS) fetch(base, 0, end);
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

    __shared__ float fades[DECODE_WARPS][G], sums[G], maxima[G];
    if (threadIdx.x < G) {
        const int g = threadIdx.x;
        float m = -INFINITY, sum = 0.f;
        for (int w = 0; w < DECODE_WARPS; w++) m = fmaxf(m, shared[(w * G + g) * width + head_dim]);
        for (int w = 0; w < DECODE_WARPS; w++) {
            fades[w][g] = exp2f(shared[(w * G + g) * width + head_dim] - m);  // a warp without tokens has -inf: 0
            sum += shared[(w * G + g) * width + head_dim + 1] * fades[w][g];
        }
        maxima[g] = m, sums[g] = sum;
    }
    __syncthreads();

    const size_t cell = (size_t)blockIdx.z * gridDim.x + blockIdx.x;
    float *my_partial = partial + (cell * n_splits + split) * G * width;
    for (int i = threadIdx.x; i < G * head_dim; i += blockDim.x) {
        const int g = i / head_dim, d = i % head_dim;
        float value = 0.f;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) value += shared[(w * G + g) * width + d] * fades[w][g];
        if (active == 1) {
            const size_t at = ((size_t)row * n_heads + first_head + g) * head_dim + d;
            out[at] = value / sums[g] * (gate ? sigmoid(gate[at]) : 1.f);
        } else {
            my_partial[g * width + d] = value;
            if (d == 0) my_partial[g * width + head_dim] = maxima[g], my_partial[g * width + head_dim + 1] = sums[g];
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
