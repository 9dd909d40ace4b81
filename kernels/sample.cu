// From logits to ids on the device: adjust and mask, statistics, then greedy or top-k / top-p / min-p by a given draw.
//
// logits (n, pitch) f32 stay as the model gave them: log-probabilities are of these. work (n, pitch) f32 holds the
// adjusted logits divided by the temperature (undivided for greedy rows); ids >= n_valid are never candidates.
// Order: adjust, mask, temperature, top-k, top-p of what top-k kept, min-p, then the draw over descending probability
// (ties by ascending id). Sums that decide are taken in fixed point, so the same draw gives the same id every time.

#include "common.cuh"

constexpr int SLICE = 4096;       // ids a block of sample_prepare looks at
constexpr int BINS = 256;         // histogram of (max - x), BINS_A_NAT bins a unit, the last takes the rest
constexpr float BINS_A_NAT = 8.f;
constexpr int CANDIDATES = 2048;  // what the final block sorts; a bin with more is divided again
constexpr int LEVELS = 4;         // so often at most
constexpr float FIXED = 1099511627776.f;  // 2^40: fixed-point probability mass

struct SliceStatistics {  // one a (row, slice)
    float raw_max, raw_sum;  // of the model's logits: max and sum of exp(l - max)
    float work_max;          // of the adjusted ones
    int work_argmax;         // lowest id of that max; -1: every id masked
    int nan;                 // a NaN was seen
    int pad[3];
};

struct Histogram {  // one a row, zeroed by sample_pick for the next step
    unsigned count[BINS];
    unsigned long long mass[BINS];
};

__device__ __forceinline__ bool better(float a, int i, float b, int j) { return a > b || (a == b && i < j); }

// Grid (n_slices, n_rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4) sample_prepare(
    const float *logits, float *work, SliceStatistics *__restrict__ slices,
    const float *temperature, const int *adjust_start, const int *adjust_ids,
    const float *adjust_divide, const float *adjust_add, const int *mask_of_row,
    const unsigned *masks, int pitch, int n_vocab, int n_valid, int mask_words) {
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y, begin = blockIdx.x * SLICE, end = min(begin + SLICE, n_vocab);
    const float *l = logits + (size_t)row * pitch;
    float *w = work + (size_t)row * pitch;
    const float scale = temperature[row] > 0.f ? 1.f / temperature[row] : 1.f;
    const int mask = mask_of_row[row];
    const unsigned *allowed = mask >= 0 ? masks + (size_t)mask * mask_words : nullptr;

    float raw_max = -INFINITY;
    bool nan = false;
    for (int i = begin + threadIdx.x; i < end; i += 256) {
        const float x = l[i];
        nan |= isnan(x);
        raw_max = fmaxf(raw_max, x);
        const bool live = i < n_valid && (!allowed || allowed[i / 32] >> (i % 32) & 1u);
        w[i] = live ? x * scale : -INFINITY;
    }
    __syncthreads();
    for (int e = adjust_start[row] + threadIdx.x; e < adjust_start[row + 1]; e += 256) {
        const int id = adjust_ids[e];
        if (id < begin || id >= end || w[id] == -INFINITY) continue;
        const float x = l[id], d = adjust_divide[e];
        w[id] = ((x > 0.f ? x / d : x * d) + adjust_add[e]) * scale;
    }
    __syncthreads();

    float raw_sum = 0.f, best = -INFINITY;
    int best_id = -1;
    __shared__ float s_max[8], s_sum[8], s_best[8];
    __shared__ int s_id[8], s_nan[8];
    __shared__ float block_max;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 16; o > 0; o /= 2) raw_max = fmaxf(raw_max, __shfl_xor_sync(~0u, raw_max, o));
    if (lane == 0) s_max[warp] = raw_max;
    __syncthreads();
    if (threadIdx.x == 0) {
        float m = s_max[0];
        for (int i = 1; i < 8; i++) m = fmaxf(m, s_max[i]);
        block_max = m;
    }
    __syncthreads();
    const float m = block_max == -INFINITY ? 0.f : block_max;
    for (int i = begin + threadIdx.x; i < end; i += 256) {
        raw_sum += expf(l[i] - m);
        if (better(w[i], i, best, best_id) && w[i] != -INFINITY) best = w[i], best_id = i;
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        raw_sum += __shfl_xor_sync(~0u, raw_sum, o);
        const float other = __shfl_xor_sync(~0u, best, o);
        const int other_id = __shfl_xor_sync(~0u, best_id, o);
        if (other_id >= 0 && (best_id < 0 || better(other, other_id, best, best_id))) best = other, best_id = other_id;
        nan |= __shfl_xor_sync(~0u, (int)nan, o) != 0;
    }
    if (lane == 0) s_sum[warp] = raw_sum, s_best[warp] = best, s_id[warp] = best_id, s_nan[warp] = nan;
    __syncthreads();
    if (threadIdx.x == 0) {
        SliceStatistics out = {block_max, 0.f, -INFINITY, -1, 0, {0, 0, 0}};
        for (int i = 0; i < 8; i++) {
            out.raw_sum += s_sum[i];
            out.nan |= s_nan[i];
            if (s_id[i] >= 0 && (out.work_argmax < 0 || better(s_best[i], s_id[i], out.work_max, out.work_argmax)))
                out.work_max = s_best[i], out.work_argmax = s_id[i];
        }
        slices[(size_t)row * gridDim.x + blockIdx.x] = out;
    }
}

__device__ __forceinline__ float row_work_max(const SliceStatistics *slices, int n) {
    float m = -INFINITY;
    for (int i = 0; i < n; i++) m = fmaxf(m, slices[i].work_max);
    return m;
}

__device__ __forceinline__ int bin_of(float max, float x) { return min(BINS - 1, (int)((max - x) * BINS_A_NAT)); }

// Grid (n_slices, n_rows), 256 threads: counts and mass of the adjusted logits by distance from the row's maximum.
extern "C" __global__ void __launch_bounds__(256, 4) sample_histogram(
    const float *work, const SliceStatistics *slices, const float *temperature,
    Histogram *histograms, int pitch, int n_vocab) {
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y;
    if (!(temperature[row] > 0.f)) return;
    __shared__ unsigned count[BINS];
    __shared__ unsigned long long mass[BINS];
    __shared__ float row_max;
    count[threadIdx.x] = 0, mass[threadIdx.x] = 0;
    if (threadIdx.x == 0) row_max = row_work_max(slices + (size_t)row * gridDim.x, gridDim.x);
    __syncthreads();
    const float *w = work + (size_t)row * pitch, max = row_max;
    const int begin = blockIdx.x * SLICE, end = min(begin + SLICE, n_vocab);
    for (int i = begin + threadIdx.x; i < end; i += 256) {
        const float x = w[i];
        if (!(x > -INFINITY)) continue;
        const int b = bin_of(max, x);
        atomicAdd(&count[b], 1u);
        atomicAdd(&mass[b], (unsigned long long)(expf(x - max) * FIXED));
    }
    __syncthreads();
    Histogram *h = histograms + row;
    if (count[threadIdx.x]) atomicAdd(&h->count[threadIdx.x], count[threadIdx.x]), atomicAdd(&h->mass[threadIdx.x], mass[threadIdx.x]);
}

struct Candidate {
    float x;
    int id;
};

__device__ void sort_candidates(Candidate *c, int n) {  // bitonic, best first; n a power of two, whole block
    for (int k = 2; k <= n; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            for (int i = threadIdx.x; i < n; i += blockDim.x) {
                const int other = i ^ j;
                if (other <= i) continue;
                const bool up = (i & k) == 0, swap = better(c[other].x, c[other].id, c[i].x, c[i].id);
                if (swap == up) {
                    const Candidate t = c[i];
                    c[i] = c[other], c[other] = t;
                }
            }
            __syncthreads();
        }
}

// Inclusive scan over the block's first n (<= 2 * blockDim.x) elements of shared memory, in place; whole block.
template <typename V> __device__ void scan_shared(V *x, int n) {
    __shared__ V warp_sums[32];
    const int i = 2 * threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    V a = i < n ? x[i] : 0, b = i + 1 < n ? x[i + 1] : 0;
    V sum = a + b;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const V other = __shfl_up_sync(~0u, sum, o);
        if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    V before = sum - a - b;
    for (int w = 0; w < warp; w++) before += warp_sums[w];
    if (i < n) x[i] = before + a;
    if (i + 1 < n) x[i + 1] = before + a + b;
    __syncthreads();
}

// First index of a sorted prefix array whose value is at least (above: more than) `wanted`; n - 1 if none.
template <typename V> __device__ int first_reaching(const V *prefix, int n, V wanted, bool above) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (above ? prefix[middle] > wanted : prefix[middle] >= wanted) high = middle;
        else low = middle + 1;
    }
    return low;
}

typedef unsigned long long u64;

enum Goal { COUNT_REACHES, MASS_REACHES, MASS_EXCEEDS };

struct Place {  // an id in the descending order
    int id;
    u64 mass_through;  // mass of all ids up to and including it
};

struct PickShared {
    Candidate candidates[CANDIDATES];
    u64 prefix[CANDIDATES];
    unsigned count[BINS];
    u64 mass[BINS];
    // the chain of bins a search has gone down: level l divides distances from `start` by `scale`
    float start[LEVELS], scale[LEVELS];
    int bin[LEVELS], level;
    u64 mass_before;
    unsigned count_before, in_bin;
    int n_gathered;
    Place place;
    u64 kept;
    float log_sum, work_max;
    int picked, ok;
};

__device__ __forceinline__ int sub_bin(const PickShared &s, int level, float distance) {
    return max(0, min(BINS - 1, (int)((distance - s.start[level]) * s.scale[level])));
}
// Whether the search's chain of bins down to `level` (exclusive) holds this distance.
__device__ __forceinline__ bool in_chain(const PickShared &s, int level, float distance) {
    for (int l = 0; l < level; l++)
        if (sub_bin(s, l, distance) != s.bin[l]) return false;
    return true;
}

// Count and mass hold one level's bins: make prefix sums, go into the bin that reaches the goal. Whole block.
__device__ void descend(PickShared &s, Goal goal, u64 wanted) {
    scan_shared(s.count, BINS);
    scan_shared(s.mass, BINS);
    if (threadIdx.x == 0) {
        const u64 left = goal == COUNT_REACHES ? wanted - s.count_before : wanted - s.mass_before;
        const int b = goal == COUNT_REACHES ? first_reaching(s.count, BINS, (unsigned)left, false)
                                            : first_reaching(s.mass, BINS, left, goal == MASS_EXCEEDS);
        s.bin[s.level] = b;
        s.in_bin = s.count[b] - (b ? s.count[b - 1] : 0u);
        s.count_before += b ? s.count[b - 1] : 0u;
        s.mass_before += b ? s.mass[b - 1] : 0ull;
        if (s.level + 1 < LEVELS) {
            s.start[s.level + 1] = s.start[s.level] + b / s.scale[s.level];
            s.scale[s.level + 1] = s.scale[s.level] * BINS;
        }
        s.level++;
    }
    __syncthreads();
}

// The place where count or mass of the descending order reaches (exceeds) `wanted`. Whole block; `h` the row's bins.
__device__ void locate(const float *w, PickShared &s, const Histogram &h, int n_vocab, Goal goal, u64 wanted) {
    const float max = s.work_max;
    if (threadIdx.x < BINS) s.count[threadIdx.x] = h.count[threadIdx.x], s.mass[threadIdx.x] = h.mass[threadIdx.x];
    if (threadIdx.x == 0) {
        s.level = 0, s.start[0] = 0.f, s.scale[0] = BINS_A_NAT;
        s.mass_before = 0, s.count_before = 0, s.n_gathered = 0;
    }
    __syncthreads();
    descend(s, goal, wanted);
    while (s.in_bin > CANDIDATES && s.level < LEVELS) {  // a crowded bin is divided again
        if (threadIdx.x < BINS) s.count[threadIdx.x] = 0, s.mass[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n_vocab; i += 1024) {
            const float x = w[i];
            if (!(x > -INFINITY) || !in_chain(s, s.level, max - x)) continue;
            const int b = sub_bin(s, s.level, max - x);
            atomicAdd(&s.count[b], 1u);
            atomicAdd(&s.mass[b], (u64)(expf(x - max) * FIXED));
        }
        __syncthreads();
        descend(s, goal, wanted);
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < n_vocab; i += 1024) {
        const float x = w[i];
        if (!(x > -INFINITY) || !in_chain(s, s.level, max - x)) continue;
        const int at = atomicAdd(&s.n_gathered, 1);
        if (at < CANDIDATES) s.candidates[at] = {x, i};
    }
    __syncthreads();
    const int n = min(s.n_gathered, CANDIDATES);  // more only where thousands of logits are equal to the last bit
    int padded = 1;
    while (padded < n) padded *= 2;
    for (int i = n + threadIdx.x; i < padded; i += 1024) s.candidates[i] = {-INFINITY, 0x7fffffff};
    __syncthreads();
    sort_candidates(s.candidates, padded);
    for (int i = threadIdx.x; i < n; i += 1024) s.prefix[i] = (u64)(expf(s.candidates[i].x - max) * FIXED);
    __syncthreads();
    scan_shared(s.prefix, n);
    if (threadIdx.x == 0 && n > 0) {
        const int at = goal == COUNT_REACHES ? min((int)(wanted - s.count_before), n) - 1
                                             : first_reaching(s.prefix, n, wanted - s.mass_before, goal == MASS_EXCEEDS);
        s.place = {s.candidates[at].id, s.mass_before + s.prefix[at]};
    }
    __syncthreads();
}

// The row's statistics out of its slices'. One warp.
__device__ void join_slices(const SliceStatistics *s, int n_slices, PickShared &out) {
    const int lane = threadIdx.x;
    float m = -INFINITY, best = -INFINITY, sum = 0.f;
    int id = -1, nan = 0;
    for (int i = lane; i < n_slices; i += 32) m = fmaxf(m, s[i].raw_max);
#pragma unroll
    for (int o = 16; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int i = lane; i < n_slices; i += 32) {
        nan |= s[i].nan;
        sum += s[i].raw_sum * expf((s[i].raw_max == -INFINITY ? 0.f : s[i].raw_max) - m);
        if (s[i].work_argmax >= 0 && (id < 0 || better(s[i].work_max, s[i].work_argmax, best, id)))
            best = s[i].work_max, id = s[i].work_argmax;
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        sum += __shfl_xor_sync(~0u, sum, o);
        nan |= __shfl_xor_sync(~0u, nan, o);
        const float other = __shfl_xor_sync(~0u, best, o);
        const int other_id = __shfl_xor_sync(~0u, id, o);
        if (other_id >= 0 && (id < 0 || better(other, other_id, best, id))) best = other, id = other_id;
    }
    if (lane == 0) {
        out.log_sum = m + logf(sum), out.work_max = best, out.picked = id;
        out.ok = !nan && id >= 0 && m > -INFINITY && m < INFINITY && best < INFINITY;
    }
}

// Mass of the ids at least min_p times as likely as the best. Whole block.
__device__ u64 mass_of_likely(const float *w, PickShared &s, int n_vocab, float min_p) {
    if (threadIdx.x == 0) s.kept = 0;
    __syncthreads();
    u64 mine = 0;
    for (int i = threadIdx.x; i < n_vocab; i += 1024) {
        const float mass = expf(w[i] - s.work_max);
        if (mass >= min_p) mine += (u64)(mass * FIXED);
    }
    atomicAdd(&s.kept, mine);
    __syncthreads();
    return s.kept;
}

// Every cut keeps a run from the most likely on, so the mass it keeps says it all. Whole block.
__device__ void pick_by_draw(const float *w, PickShared &s, const Histogram &h, int n_vocab, int top_k, float top_p, float min_p, float uniform) {
    if (threadIdx.x < BINS) s.count[threadIdx.x] = h.count[threadIdx.x], s.mass[threadIdx.x] = h.mass[threadIdx.x];
    __syncthreads();
    scan_shared(s.count, BINS);
    scan_shared(s.mass, BINS);
    u64 kept = s.mass[BINS - 1];
    const unsigned count = s.count[BINS - 1];
    __syncthreads();
    if (top_k > 0 && top_k < count) {
        locate(w, s, h, n_vocab, COUNT_REACHES, top_k);
        kept = s.place.mass_through;
    }
    if (top_p < 1.f) {
        locate(w, s, h, n_vocab, MASS_REACHES, (u64)(top_p * (double)kept));
        kept = s.place.mass_through;
    }
    if (min_p > 0.f) kept = min(kept, max(mass_of_likely(w, s, n_vocab, min_p), (u64)FIXED));
    locate(w, s, h, n_vocab, MASS_EXCEEDS, min((u64)(uniform * (double)kept), kept - 1));
    if (threadIdx.x == 0) s.picked = s.place.id;
    __syncthreads();
}

// Grid (n_rows), 1024 threads: the id, its log-probability, the target's; keeps the id for the slot's next step.
extern "C" __global__ void __launch_bounds__(1024, 1) sample_pick(
    const float *logits, const float *work, const SliceStatistics *slices,
    Histogram *histograms, const float *temperature, const int *top_k,
    const float *top_p, const float *min_p, const float *uniform,
    const int *slots, const int *target_ids, int *__restrict__ last_ids, int *__restrict__ ids,
    float *__restrict__ logprobs, float *__restrict__ target_logprobs, int *__restrict__ finite, float *__restrict__ log_sums,
    int pitch, int n_vocab, int n_slices) {
    pdl_wait();
    pdl_launch();
    __shared__ PickShared s;
    const int row = blockIdx.x;
    const bool greedy = !(temperature[row] > 0.f);
    Histogram &h = histograms[row];
    if (threadIdx.x < 32) join_slices(slices + (size_t)row * n_slices, n_slices, s);
    __syncthreads();
    if (!greedy && s.ok) pick_by_draw(work + (size_t)row * pitch, s, h, n_vocab, top_k[row], top_p[row], min_p[row], uniform[row]);
    if (!greedy && threadIdx.x < BINS) h.count[threadIdx.x] = 0, h.mass[threadIdx.x] = 0;  // for the next step
    if (threadIdx.x == 0) {
        const int id = s.ok ? s.picked : 0, target = target_ids[row];
        const float *l = logits + (size_t)row * pitch;
        ids[row] = id, finite[row] = s.ok, log_sums[row] = s.log_sum;
        logprobs[row] = s.ok ? l[id] - s.log_sum : 0.f;
        target_logprobs[row] = target >= 0 && target < n_vocab ? l[target] - s.log_sum : 0.f;
        if (slots[row] >= 0) last_ids[slots[row]] = id;
    }
}

// Grid (n_rows), 1024 threads: the n_top most likely ids of the model's own distribution (ids < n_valid), best first.
extern "C" __global__ void __launch_bounds__(1024, 1) sample_top(
    const float *logits, const float *log_sums, int *__restrict__ top_ids,
    float *__restrict__ top_logprobs, int pitch, int n_valid, int n_top) {
    pdl_wait();
    pdl_launch();
    const float *l = logits + (size_t)blockIdx.x * pitch;
    __shared__ float s_x[32];
    __shared__ int s_id[32];
    __shared__ float winner_x;
    __shared__ int winner;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float mine = -INFINITY;
    int mine_id = -1;
    auto rescan = [&](float below, int after) {  // my best that comes after (below, after) in the order
        mine = -INFINITY, mine_id = -1;
        for (int i = threadIdx.x; i < n_valid; i += 1024) {
            const float x = l[i];
            if (after >= 0 && !better(below, after, x, i)) continue;
            if (mine_id < 0 || better(x, i, mine, mine_id)) mine = x, mine_id = i;
        }
    };
    rescan(0.f, -1);
    for (int rank = 0; rank < n_top; rank++) {
        float x = mine;
        int id = mine_id;
#pragma unroll
        for (int o = 16; o > 0; o /= 2) {
            const float other = __shfl_xor_sync(~0u, x, o);
            const int other_id = __shfl_xor_sync(~0u, id, o);
            if (other_id >= 0 && (id < 0 || better(other, other_id, x, id))) x = other, id = other_id;
        }
        if (lane == 0) s_x[warp] = x, s_id[warp] = id;
        __syncthreads();
        if (threadIdx.x == 0) {
            float best = s_x[0];
            int best_id = s_id[0];
            for (int i = 1; i < 32; i++)
                if (s_id[i] >= 0 && (best_id < 0 || better(s_x[i], s_id[i], best, best_id))) best = s_x[i], best_id = s_id[i];
            winner_x = best, winner = best_id;
            const size_t at = (size_t)blockIdx.x * n_top + rank;
            top_ids[at] = best_id, top_logprobs[at] = best - log_sums[blockIdx.x];
        }
        __syncthreads();
        if (mine_id >= 0 && mine_id == winner) rescan(winner_x, winner);
        __syncthreads();
    }
}

// Grid (1), 256 threads: the ids a step embeds; -1 means the id sampled last for the row's slot.
extern "C" __global__ void resolve_ids(const int *token_ids, const int *row_slot, const int *last_ids,
                            int *__restrict__ resolved, int n_rows) {
    pdl_wait();
    pdl_launch();
    for (int r = threadIdx.x; r < n_rows; r += blockDim.x) resolved[r] = token_ids[r] >= 0 ? token_ids[r] : last_ids[max(0, row_slot[r])];
}

// Grid (ceil(columns / 1024), n): rows of x by number, for the head.
extern "C" __global__ void __launch_bounds__(256) gather_rows(const float *x, const int *rows, float *__restrict__ out,
                                                   int columns, int x_stride) {
    pdl_wait();
    pdl_launch();
    const int c = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (c >= columns) return;
    *reinterpret_cast<float4 *>(out + (size_t)blockIdx.y * columns + c) =
        *reinterpret_cast<const float4 *>(x + (size_t)rows[blockIdx.y] * x_stride + c);
}

// Grid (ceil(n_vocab / 256), n): l = cap * tanh(l / cap), in place.
extern "C" __global__ void __launch_bounds__(256) softcap_logits(float *logits, int pitch, int n_vocab, float cap) {
    pdl_wait();
    pdl_launch();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n_vocab) logits[(size_t)blockIdx.y * pitch + i] = cap * tanhf(logits[(size_t)blockIdx.y * pitch + i] / cap);
}
