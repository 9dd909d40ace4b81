// Products of few tokens with their chosen experts: a pair (token, choice) reads its expert's rows, nothing else.
//
// A stack of experts lies as one matrix: expert e starts at row e * rows_an_expert. Quantized weights meet 8- or 16-bit
// activations in dp4a, float weights f32 ones (linear.cuh). Two launches a layer:
//   expert_gate_up  silu(gate) * up of every pair, quantized for down (or f32 where down is a float type)
//   expert_down     residual += sum over a token's choices of weight * down, in a fixed order, + the shared expert
// expert_gate_up lets its dependents start only after its own wait, so when expert_down starts, the routing before them
// both is complete, and weights can be on their way before gate and up are.

// instance: expert_gate_up<Q8_0, Q8_0, true, 2>
// instance: expert_gate_up<Q8_0, Q8_0, true, 1>
// instance: expert_gate_up<Q4_K, Q4_K, false, 2>
// instance: expert_gate_up<Q5_K, Q4_K, false, 2>
// instance: expert_gate_up<Q3_K, Q2_K, false, 2>
// instance: expert_gate_up<Q4_0, Q5_1, false, 2>
// instance: expert_gate_up<Q6_K, Q6_K, false, 2>
// instance: expert_gate_up<BF16, BF16, false, 1>
// instance: expert_gate_up<F32, F32, false, 1>
// instance: expert_down<Q8_0, 4, 2>
// instance: expert_down<Q8_0, 4, 1>
// instance: expert_down<Q4_K, 2, 2>
// instance: expert_down<Q5_K, 2, 2>
// instance: expert_down<Q6_K, 2, 2>
// instance: expert_down<Q2_K, 2, 2>
// instance: expert_down<Q3_K, 2, 2>
// instance: expert_down<Q4_0, 2, 2>
// instance: expert_down<BF16, 2, 1>
// instance: expert_down<F32, 2, 1>

#include "linear.cuh"

constexpr int MAX_USED = 32;

struct ExpertParams {
    Planes gate, up;           // expert_down: its stack is `gate`
    Quantized x;               // gate_up: (n_tokens, K); down: (n_pairs, K)
    const float *x_float;      // the same in f32, for float weights
    const int *ids;            // (n_tokens, n_used)
    const float *weights;      // (n_tokens, n_used)
    Quantized next;            // gate_up: (n_pairs, rows) or hi null
    float *out;                // gate_up: (n_pairs, rows), unless quantized; down: the residual (n_tokens, rows)
    const float *shared;       // down: (n_tokens, rows) or null
    const float *shared_gate;  // (n_tokens,) before the sigmoid; null: 1
    int K, rows;               // rows of one product
    int rows_an_expert;        // of the stack: twice `rows` where gate and up are one
    int up_offset;             // of up's rows in an expert
    int n_used, pad;
};
static_assert(sizeof(ExpertParams) == 200, "experts_arguments.py");

// acc[r] += factor * (chunk c of row r) . (the same elements of row x_row of x); first[r]: the row's first chunk.
template <class T, int R, int BYTES>
__device__ __forceinline__ void multiply(const ExpertParams &p, const typename T::Raw (&raw)[R], const u32 (&first)[R], int c, size_t x_row,
                                         float factor, float (&acc)[R]) {
    if constexpr (T::FLOAT) {
        const float4 *x = reinterpret_cast<const float4 *>(p.x_float + x_row * p.K + T::segment(c, 0));
        float4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = x[i];
#pragma unroll
        for (int r = 0; r < R; r++) {
            float w[16], sum = 0.f;
            T::values(raw[r], w);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(w[4 * i], v[i].x, sum), sum = fmaf(w[4 * i + 1], v[i].y, sum);
                sum = fmaf(w[4 * i + 2], v[i].z, sum), sum = fmaf(w[4 * i + 3], v[i].w, sum);
            }
            acc[r] = fmaf(factor, sum, acc[r]);
        }
    } else {
        uint4 hi[T::SEGMENTS], lo[T::SEGMENTS];
        float scale[T::SEGMENTS], sum[T::SEGMENTS];
#pragma unroll
        for (int s = 0; s < T::SEGMENTS; s++) {
            const size_t at = x_row * p.K + T::segment(c, s);
            hi[s] = load16(p.x.hi + at);
            if (BYTES == 2) lo[s] = load16(p.x.lo + at);
            scale[s] = factor * p.x.scale[at >> 5];
            if (T::HAS_MIN || T::OFFSET) sum[s] = factor * p.x.sum[at >> 4];
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            Unpacked<T::SEGMENTS> u;
            T::unpack(raw[r], first[r] + c, u);
            int joined = 0;
#pragma unroll
            for (int s = 0; s < T::SEGMENTS; s++) {
                int dot = dot16(u.w + 4 * s, hi[s], 0);
                if (BYTES == 2) dot = dot16(u.w + 4 * s, lo[s], 256 * dot);
                if (T::JOINED) {
                    joined += dot;
                    if (s == T::SEGMENTS - 1) acc[r] = fmaf((float)joined, u.d[0] * scale[0], acc[r]);
                } else {
                    acc[r] = fmaf((float)dot, u.d[s] * scale[s], acc[r]);
                }
                if (T::HAS_MIN) acc[r] = fmaf(-u.m[s], sum[s], acc[r]);
                if (T::OFFSET) acc[r] = fmaf(u.d[s] * (float)-T::OFFSET, sum[s], acc[r]);
            }
        }
    }
}

template <int R> __device__ __forceinline__ void warp_sums(float (&acc)[R]) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int o = 16; o; o >>= 1) acc[r] += __shfl_xor_sync(0xFFFFFFFFu, acc[r], o);
}

constexpr int GATE_ROWS = 4, GATE_WARPS = 8;  // rows a warp takes at once; 32 rows a block

// Types whose rows take few registers: twice the warps fit a multiprocessor.
template <class T> constexpr bool LIGHT = !T::FLOAT && T::SEGMENTS == 1;
// The next chunk is on its way while one is multiplied, where registers allow.
template <class T> constexpr bool AHEAD = T::E <= 32 && sizeof(typename T::Raw) <= 32;

// GATE_ROWS rows from stack row `base` + row on, times row x_row of x, to `results`.
template <class T, int BYTES>
__device__ __forceinline__ void few_rows(const ExpertParams &p, const Planes &planes, u32 base, int row, int x_row, float *results) {
    constexpr int R = GATE_ROWS;
    const int chunks = p.K / T::E, lane = threadIdx.x & 31;
    u32 first[R];  // rows past the end read the last one again, their results are dropped
#pragma unroll
    for (int r = 0; r < R; r++) first[r] = (base + (u32)min(row + r, p.rows - 1)) * (u32)chunks;
    typename T::Raw now[R], next[R];
    const auto load = [&](typename T::Raw(&raw)[R], int c) {
#pragma unroll
        for (int r = 0; r < R; r++) raw[r] = T::load(planes, first[r] + c);
    };
    float acc[R] = {};
    if (lane < chunks) load(now, lane);
#pragma unroll 1
    for (int c = lane; c < chunks; c += 32) {
        const bool more = c + 32 < chunks;
        if (AHEAD<T> && more) load(next, c + 32);
        multiply<T, R, BYTES>(p, now, first, c, x_row, 1.f, acc);
        if (!AHEAD<T> && more) load(now, c + 32);
        if (AHEAD<T>)
#pragma unroll
            for (int r = 0; r < R; r++) now[r] = next[r];
    }
    warp_sums(acc);
    if (lane == 0)
#pragma unroll
        for (int r = 0; r < R; r++) results[r] = acc[r];
}

// 32 rows of one pair a block. SPLIT (one type): warps 0-7 take the gate's, 8-15 up's; else 8 warps take both in turn.
// Grid: n_pairs * tiles of 32 rows.
template <class TG, class TU, bool SPLIT, int BYTES>
__global__ void __launch_bounds__((SPLIT ? 64 : 32) * GATE_WARPS, 2) expert_gate_up(const __grid_constant__ ExpertParams p) {
    __shared__ float results[2][GATE_WARPS * GATE_ROWS];
    pdl_wait();
    pdl_launch();
    const int tiles = (p.rows + 31) / 32, pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int in_tile = GATE_ROWS * (warp % GATE_WARPS), row = 32 * tile + in_tile, token = pair / p.n_used;
    const u32 base = (u32)p.ids[pair] * (u32)p.rows_an_expert;
    if constexpr (SPLIT) {
        const int half = warp / GATE_WARPS;
        few_rows<TG, BYTES>(p, half ? p.up : p.gate, base + (half ? (u32)p.up_offset : 0u), row, token, results[half] + in_tile);
    } else {
        few_rows<TG, BYTES>(p, p.gate, base, row, token, results[0] + in_tile);
        few_rows<TU, BYTES>(p, p.up, base + (u32)p.up_offset, row, token, results[1] + in_tile);
    }
    __syncthreads();
    if (warp != 0) return;
    const float value = silu(results[0][lane]) * results[1][lane];
    if (p.next.hi) {  // rows are a multiple of 32
        if (p.next.lo)
            quantize_lane<true>(p.next, value, pair, tile, p.rows, lane);
        else
            quantize_lane<false>(p.next, value, pair, tile, p.rows, lane);
    } else if (32 * tile + lane < p.rows) {
        p.out[(size_t)pair * p.rows + 32 * tile + lane] = value;
    }
}

// R rows of one token a block: its lanes share the chunks of all choices. Grid: n_tokens * tiles of R rows.
template <class T, int R, int BYTES> __global__ void __launch_bounds__(256, LIGHT<T> ? 3 : 2) expert_down(const __grid_constant__ ExpertParams p) {
    __shared__ int ids[MAX_USED];
    __shared__ float factors[MAX_USED];
    __shared__ float partial[8][R];
    pdl_launch();
    const int tiles = (p.rows + R - 1) / R, token = blockIdx.x / tiles, row0 = R * (blockIdx.x % tiles);
    if (threadIdx.x < p.n_used) {  // the routing is complete (above); past L1, which may still hold the last layer's
        ids[threadIdx.x] = __ldcg(p.ids + token * p.n_used + threadIdx.x);
        factors[threadIdx.x] = __ldcg(p.weights + token * p.n_used + threadIdx.x);
    }
    __syncthreads();
    const int chunks = p.K / T::E, total = p.n_used * chunks;
    typename T::Raw now[R], next[R];
    u32 first[R], following[R];
    const auto load = [&](typename T::Raw(&raw)[R], u32(&at)[R], int choice, int c) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            at[r] = ((u32)ids[choice] * (u32)p.rows_an_expert + (u32)min(row0 + r, p.rows - 1)) * (u32)chunks;
            raw[r] = T::load(p.gate, at[r] + c);
        }
    };
    int choice = (int)threadIdx.x / chunks, c = (int)threadIdx.x % chunks;
    if (choice < p.n_used) load(now, first, choice, c);
    pdl_wait();
    float acc[R] = {};
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
        int next_choice = choice, next_c = c + blockDim.x;
        while (next_c >= chunks) next_c -= chunks, next_choice++;
        if (next_choice < p.n_used) load(next, following, next_choice, next_c);
        multiply<T, R, BYTES>(p, now, first, c, (size_t)token * p.n_used + choice, factors[choice], acc);
        choice = next_choice, c = next_c;
#pragma unroll
        for (int r = 0; r < R; r++) now[r] = next[r], first[r] = following[r];
    }
    warp_sums(acc);
    if ((threadIdx.x & 31) == 0)
#pragma unroll
        for (int r = 0; r < R; r++) partial[threadIdx.x >> 5][r] = acc[r];
    __syncthreads();
    if (threadIdx.x >= R || row0 + (int)threadIdx.x >= p.rows) return;
    const size_t at = (size_t)token * p.rows + row0 + threadIdx.x;
    float value = p.out[at];
    for (int w = 0; w < blockDim.x >> 5; w++) value += partial[w][threadIdx.x];
    if (p.shared) value += p.shared[at] * (p.shared_gate ? sigmoid(p.shared_gate[token]) : 1.f);
    p.out[at] = value;
}
