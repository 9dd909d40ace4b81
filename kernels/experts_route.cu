// Which experts a token goes to; its (token, choice) pairs in the order of their experts; the sum of what came back.
//
// route: softmax over all experts, the n_used most probable (ties: the lower expert), their probabilities divided by
// their sum. group: pairs sorted by expert, cut into tiles of one expert's pairs. A pair's number is
// token * n_used + choice, its place the one it has in `order`.
// The order of pairs within an expert is not the same from run to run; no result depends on it.

// instance: route<1, false>
// instance: route<4, false>
// instance: route<4, true>
// instance: route<8, true>
// instance: route<32, false>
// instance: group<1024>
// instance: combine<false>
// instance: combine<true>

#include "common.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int MAX_EXPERTS = 1024;      // a thread each when pairs are grouped
constexpr float SMALLEST_SUM = 6.103515625e-5f;  // smallest normal f16: probabilities are divided by no less
constexpr u32 ALL = 0xFFFFFFFFu;

struct RouteParams {
    const float *logits;  // (n_tokens, n_experts)
    int *ids;             // (n_tokens, n_used)
    float *weights;       // (n_tokens, n_used)
    int *order;           // (n_pairs,) place -> pair
    int4 *tiles;          // (n_tiles,) expert, first place, number of pairs (0: no tile), unused
    float scale;
    int n_tokens, n_experts, n_used;
    int n_tiles, log_tile;  // most tiles there can be; pairs a tile
};
static_assert(sizeof(RouteParams) == 64, "experts_arguments.py");

// One warp, one token; up to 32 PER experts.
template <int PER> __device__ __forceinline__ void route_token(const RouteParams &p, int token) {
    const int lane = threadIdx.x & 31;
    const float *logits = p.logits + (size_t)token * p.n_experts;
    float e[PER];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int id = lane + 32 * i;
        e[i] = id < p.n_experts ? logits[id] : -INFINITY;
        largest = fmaxf(largest, e[i]);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    float sum = 0.f;
    u32 key[PER];  // of an expert that may still be chosen: its probability's bits + 1; a NaN's are the largest
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool exists = lane + 32 * i < p.n_experts;
        e[i] = expf(e[i] - largest);
        if (exists) sum += e[i];
        key[i] = exists ? (__float_as_uint(e[i]) & 0x7FFFFFFFu) + 1u : 0u;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(ALL, sum, o);

    int chosen = 0;
    float probability = 0.f;  // of choice `lane`
    for (int choice = 0; choice < p.n_used; choice++) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) best = max(best, key[i]);
        best = __reduce_max_sync(ALL, best);
        u32 mine = ALL;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            if (key[i] == best) mine = lane + 32 * i;
        const u32 id = __reduce_min_sync(ALL, mine);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane + 32 * i == id) key[i] = 0;
        if (lane == choice) chosen = (int)id, probability = __uint_as_float(best - 1u) / sum;
    }
    float total = probability;
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(ALL, total, o);
    if (lane < p.n_used) {
        p.ids[(size_t)token * p.n_used + lane] = chosen;
        p.weights[(size_t)token * p.n_used + lane] = probability / fmaxf(total, SMALLEST_SUM) * p.scale;
    }
}

// One block of MAX_EXPERTS threads; the ids are written.
__device__ __forceinline__ void group_pairs(const RouteParams &p) {
    __shared__ int places[MAX_EXPERTS];  // number of an expert's pairs, then the next free place
    __shared__ u64 sums[32];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, n_pairs = p.n_tokens * p.n_used;
    places[t] = 0;
    __syncthreads();
    for (int pair = t; pair < n_pairs; pair += MAX_EXPERTS) atomicAdd(&places[p.ids[pair]], 1);
    __syncthreads();
    const int count = places[t], n_tiles = (count + (1 << p.log_tile) - 1) >> p.log_tile;
    // exclusive sums of both over the experts before this one
    const u64 both = (u64)n_tiles << 32 | (u32)count;
    u64 inclusive = both;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const u64 below = __shfl_up_sync(ALL, inclusive, o);
        if (lane >= o) inclusive += below;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    u64 before = 0, all = 0;
#pragma unroll 4
    for (int w = 0; w < 32; w++) {
        if (w < warp) before += sums[w];
        all += sums[w];
    }
    before += inclusive - both;
    const int first = (int)(u32)before, first_tile = (int)(before >> 32);
    places[t] = first;  // this thread's alone until the barrier
    for (int i = 0; i < n_tiles; i++)
        p.tiles[first_tile + i] = make_int4(t, first + (i << p.log_tile), min(1 << p.log_tile, count - (i << p.log_tile)), 0);
    for (int i = (int)(all >> 32) + t; i < p.n_tiles; i += MAX_EXPERTS) p.tiles[i] = make_int4(0, 0, 0, 0);
    __syncthreads();
    for (int pair = t; pair < n_pairs; pair += MAX_EXPERTS) p.order[atomicAdd(&places[p.ids[pair]], 1)] = pair;
}

// A warp a token. GROUP: one block of MAX_EXPERTS threads does it all.
template <int PER, bool GROUP>
__global__ void __launch_bounds__(GROUP ? MAX_EXPERTS : 128) route(const __grid_constant__ RouteParams p) {
    pdl_launch();
    pdl_wait();
    const int warps = gridDim.x * blockDim.x >> 5;
    for (int token = (blockIdx.x * blockDim.x + threadIdx.x) >> 5; token < p.n_tokens; token += warps) route_token<PER>(p, token);
    if constexpr (GROUP) {
        __syncthreads();
        group_pairs(p);
    }
}

template <int THREADS> __global__ void __launch_bounds__(THREADS) group(const __grid_constant__ RouteParams p) {
    static_assert(THREADS == MAX_EXPERTS, "a thread an expert");
    pdl_launch();
    pdl_wait();
    group_pairs(p);
}

// x += sum over choices of weight * y, + sigmoid(shared_gate) * shared. A thread has 8 columns.
// Grid (pieces of 2048 columns, n_tokens), block 256.
struct CombineParams {
    float *x;                  // (n_tokens, columns)
    const __nv_bfloat16 *y;    // (n_pairs, columns)
    const float *weights;      // (n_tokens, n_used)
    const float *shared;       // (n_tokens, columns), with SHARED
    const float *shared_gate;  // (n_tokens,) before the sigmoid; null: 1
    int n_used, columns;
};
static_assert(sizeof(CombineParams) == 48, "experts_arguments.py");

template <bool SHARED> __global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineParams p) {
    pdl_launch();
    pdl_wait();
    const int token = blockIdx.y, column = 8 * (blockIdx.x * 256 + threadIdx.x);
    if (column >= p.columns) return;
    float sum[8] = {};
    const __nv_bfloat16 *y = p.y + (size_t)token * p.n_used * p.columns + column;
#pragma unroll 4
    for (int choice = 0; choice < p.n_used; choice++) {
        float v[8];
        unpack8<__nv_bfloat16>(*reinterpret_cast<const uint4 *>(y + (size_t)choice * p.columns), v);
        const float weight = p.weights[token * p.n_used + choice];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(weight, v[i], sum[i]);
    }
    const size_t at = (size_t)token * p.columns + column;
    if constexpr (SHARED) {
        const float gate = p.shared_gate ? sigmoid(p.shared_gate[token]) : 1.f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(gate, p.shared[at + i], sum[i]);
    }
    float4 *x = reinterpret_cast<float4 *>(p.x + at);
    float4 low = x[0], high = x[1];
    low.x += sum[0], low.y += sum[1], low.z += sum[2], low.w += sum[3];
    high.x += sum[4], high.y += sum[5], high.z += sum[6], high.w += sum[7];
    x[0] = low, x[1] = high;
}
