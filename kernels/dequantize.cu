// Resident weights to float: whole rows for cuBLAS and tests, single rows for the embedding.

// instance: dequantize<Q8_0, __nv_bfloat16>
// instance: embed<Q8_0>
// instance: dequantize<Q4_K, __nv_bfloat16>
// instance: embed<Q4_K>
// instance: dequantize<Q6_K, __nv_bfloat16>
// instance: embed<Q6_K>
// instance: dequantize<BF16, __nv_bfloat16>
// instance: embed<BF16>

#include "linear.cuh"

struct DequantizeParams {
    Planes weights;
    void *out;      // (n_rows, K) of O
    int first_row;  // of the matrix
    int n_rows, K;
};
static_assert(sizeof(DequantizeParams) == 56, "matmul_launch.py");

__device__ __forceinline__ void store16(float *to, const float (&v)[16], bool) {
#pragma unroll
    for (int i = 0; i < 4; i++) reinterpret_cast<float4 *>(to)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

// Lanes 2i and 2i + 1 write one whole 32-byte sector together, the even lane's first, then the odd lane's.
__device__ __forceinline__ void store16(__nv_bfloat16 *to, const float (&v)[16], bool live) {
    uint4 half[2];
    u32 *words = reinterpret_cast<u32 *>(half);
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = pack2<__nv_bfloat16>(v[2 * i], v[2 * i + 1]);
    const bool odd = threadIdx.x & 1;
    const uint4 give = odd ? half[0] : half[1];
    uint4 got;
    got.x = __shfl_xor_sync(0xFFFFFFFFu, give.x, 1), got.y = __shfl_xor_sync(0xFFFFFFFFu, give.y, 1);
    got.z = __shfl_xor_sync(0xFFFFFFFFu, give.z, 1), got.w = __shfl_xor_sync(0xFFFFFFFFu, give.w, 1);
    const unsigned long long own = live ? (unsigned long long)to : 0;
    const unsigned long long other = __shfl_xor_sync(0xFFFFFFFFu, own, 1);
    const unsigned long long first = odd ? other : own, second = odd ? own : other;
    if (first) reinterpret_cast<uint4 *>(first)[odd] = odd ? got : half[0];
    if (second) reinterpret_cast<uint4 *>(second)[odd] = odd ? half[1] : got;
}

// A chunk a thread. Grid: enough blocks of 256 for n_rows * K / E chunks, or fewer (each takes several).
template <class T, typename O> __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ DequantizeParams p) {
    pdl_launch();
    pdl_wait();  // `out` is scratch that an earlier kernel may still read
    const u32 chunks_a_row = p.K / T::E, total = (u32)p.n_rows * chunks_a_row, step = gridDim.x * blockDim.x;
    const u32 first = (u32)p.first_row * chunks_a_row;
    for (u32 base = blockIdx.x * blockDim.x; base < total; base += step) {
        const u32 i = base + threadIdx.x;
        const bool live = i < total;
        const u32 at = live ? i : total - 1, row = at / chunks_a_row, c = at - row * chunks_a_row;
        const Values<T> values(T::load(p.weights, first + at), first + at);
#pragma unroll
        for (int s = 0; s < T::SEGMENTS; s++) {
            float v[16];
            values.segment(s, v);
            O *to = static_cast<O *>(p.out) + (size_t)row * p.K + T::segment(c, s);
            if (sizeof(O) == 2 || live) store16(to, v, live);
        }
    }
}

struct EmbedParams {
    Planes table;
    float *out;           // (n_tokens, K) f32
    const int *ids;       // (n_tokens,); negative: the id sampled last for the row's slot
    const int *last_ids;  // (n_slots,) or null
    const int *slots;     // (n_tokens,) or null
    float scale;
    int n_ids, K;
};
static_assert(sizeof(EmbedParams) == 80, "matmul_launch.py");

// Grid (pieces of 256 chunks, n_tokens). An id outside the table gives NaN: an error to see, not a row to trust.
template <class T> __global__ void __launch_bounds__(256) embed(const __grid_constant__ EmbedParams p) {
    pdl_launch();
    pdl_wait();
    const int token = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x, chunks_a_row = p.K / T::E;
    if (c >= chunks_a_row) return;
    int id = p.ids[token];
    if (id < 0 && p.last_ids) id = p.last_ids[p.slots[token]];
    const bool known = id >= 0 && id < p.n_ids;
    const u32 chunk = (u32)(known ? id : 0) * chunks_a_row + c;
    const Values<T> values(T::load(p.table, chunk), chunk);
#pragma unroll
    for (int s = 0; s < T::SEGMENTS; s++) {
        float v[16];
        values.segment(s, v);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = known ? v[i] * p.scale : __int_as_float(0x7FFFFFFF);
        store16(p.out + (size_t)token * p.K + T::segment(c, s), v, true);
    }
}
