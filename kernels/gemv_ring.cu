// Products of 1 to 4 tokens with a matrix at the memory's rate, for devices with bulk copies (from sm_90).
//
// Persistent blocks of WARPS warps, each of which streams its own tiles of R rows (GATED: R/2 of the gate, the same
// R/2 of up) through a ring of stages in shared memory. A piece, what one stage holds, is 32 ITER chunks of each row;
// the copy engine brings it, so the bytes in flight do not depend on what the warps are doing. The ring fills before
// the previous kernel has ended: weights do not depend on it. Meanwhile activations are brought into the order in
// which lanes read them; where they come in f32, norm and quantization happen here, once a block.
//
// A row's bytes in every plane are a multiple of 16 (ring_fits, matmul_launch.py).
// Grid: (blocks, tiles of M tokens). Shared memory: ring, then activations.

// instance: gemv_ring<Q4_K, 1, 4, 2, 8, 2, false>
// instance: gemv_ring<Q4_K, 1, 4, 2, 8, 2, true>
// instance: gemv_ring<Q4_K, 2, 4, 2, 8, 2, false>
// instance: gemv_ring<Q4_K, 1, 2, 2, 8, 2, false>
// instance: gemv_ring<Q5_K, 1, 4, 2, 8, 2, true>
// instance: gemv_ring<Q6_K, 1, 2, 2, 8, 2, false>
// instance: gemv_ring<Q4_1, 1, 4, 2, 8, 2, true>

#include "bulk.cuh"
#include "gemv.cuh"

struct RingParams {
    Matrix matrices[MAX_MATRICES];
    Quantized x;           // (n_tokens, K); hi null: from x_float
    const float *x_float;  // (n_tokens, x_stride)
    const float *norm;     // (K,) weight of the RMS norm of x_float, or null
    float epsilon;
    int x_stride, n_matrices, n_tokens, K;
    int activation;  // of a gated launch (linear.cuh)
    int tiles;       // of all matrices
    int stages;      // of each warp's ring
};
static_assert(sizeof(RingParams) == 368, "matmul_launch.py");

constexpr int MAX_STAGES = 16;

// Where a warp is in its tiles: pieces of `tile` from chunk `c0` of its rows on.
struct Place {
    int tile, c0;
    template <int PIECE> __device__ __forceinline__ void advance(int chunks, int step) {
        c0 += PIECE;
        if (c0 >= chunks) c0 = 0, tile += step;
    }
};

template <class T, int R, int ITER, bool GATED> struct Stage {
    static constexpr int PIECE = 32 * ITER, ROWS = GATED ? R / 2 : R;
    static constexpr int PLANES = T::per8(3) ? 4 : T::per8(2) ? 3 : T::per8(1) ? 2 : 1;
    static constexpr __device__ int plane_bytes(int i) { return 4 * ITER * T::per8(i); }  // of one row
    static constexpr __device__ int plane_at(int i) {
        return R * ((i > 0 ? plane_bytes(0) : 0) + (i > 1 ? plane_bytes(1) : 0) + (i > 2 ? plane_bytes(2) : 0) + (i > 3 ? plane_bytes(3) : 0));
    }
    static constexpr int NBYTES = plane_at(4), PER8 = T::per8(0) + T::per8(1) + T::per8(2) + T::per8(3);
    static_assert(R * PLANES <= 32 && plane_bytes(0) % 16 == 0 && plane_bytes(1) % 16 == 0 && plane_bytes(2) % 16 == 0 && plane_bytes(3) % 16 == 0, "");

    // Lane r * PLANES + i takes plane i of row r.
    static __device__ __forceinline__ void fetch(const RingParams &p, const Place &place, u8 *stage, Barrier *barrier) {
        const int lane = threadIdx.x & 31, r = lane / PLANES, i = lane % PLANES;
        const Matrix &matrix = p.matrices[GATED ? (r >= R / 2) : matrix_of(p.matrices, p.n_matrices, place.tile)];
        const int row = min((place.tile - matrix.first_tile) * ROWS + r % ROWS, matrix.rows - 1);  // past the end: the last again
        const int chunks = p.K / T::E, count = min(PIECE, chunks - place.c0);
        const Planes &planes = matrix.weights;
        const u8 *plane = i == 0 ? planes.p0 : i == 1 ? planes.p1 : i == 2 ? planes.p2 : planes.p3;
        const u8 *from = plane + (((unsigned long long)row * chunks + place.c0) * T::per8(i) >> 3);
        const u32 nbytes = count * T::per8(i) >> 3;
        if (lane == 0) barrier_expect(barrier, R * (count * PER8 >> 3));
        __syncwarp();
        if (lane < R * PLANES) bulk_copy(stage + plane_at(i) + r * plane_bytes(i), from, nbytes, barrier);
    }

    static __device__ __forceinline__ NearPlanes row(const u8 *stage, int r) {
        return {{stage + r * plane_bytes(0)}, {stage + plane_at(1) + r * plane_bytes(1)}, {stage + plane_at(2) + r * plane_bytes(2)},
                {stage + plane_at(3) + r * plane_bytes(3)}};
    }
};

// Activations in the order in which lanes read them: segment s of chunk c of a token lies at s * chunks + c.
template <class T, int M, int BYTES> struct SharedRows {
    static constexpr bool SUMS = T::HAS_MIN || T::OFFSET;
    u8 *base;
    int K, chunks;
    __device__ __forceinline__ int token_bytes() const { return T::FLOAT ? 4 * K : BYTES * K + (SUMS ? K / 2 : K / 4); }
    __device__ __forceinline__ u8 *token(int m) const { return base + m * token_bytes(); }
    __device__ __forceinline__ Run quantized(int m, int c, int s) const {
        const u8 *at = token(m);
        const int i = s * chunks + c;
        Run run;
        run.hi = load16(at + 16 * i);
        if (BYTES == 2) run.lo = load16(at + K + 16 * i);
        if (SUMS) {
            const float2 both = reinterpret_cast<const float2 *>(at + BYTES * K)[i];
            run.scale = both.x, run.sum = both.y;
        } else {
            run.scale = reinterpret_cast<const float *>(at + BYTES * K)[i];
        }
        return run;
    }
    __device__ __forceinline__ void put(int m, int run, const Run &value) const {
        u8 *at = token(m);
        const int i = T::segment_of(run) * chunks + T::chunk_of(run);
        *reinterpret_cast<uint4 *>(at + 16 * i) = value.hi;
        if (BYTES == 2) *reinterpret_cast<uint4 *>(at + K + 16 * i) = value.lo;
        if (SUMS)
            reinterpret_cast<float2 *>(at + BYTES * K)[i] = make_float2(value.scale, value.sum);
        else
            reinterpret_cast<float *>(at + BYTES * K)[i] = value.scale;
    }
    __device__ __forceinline__ float4 four(int m, int c, int i) const { return reinterpret_cast<const float4 *>(token(m))[i * chunks + c]; }
    __device__ __forceinline__ void put_four(int m, int at, const float4 &v) const {  // elements 4 at ..
        reinterpret_cast<float4 *>(token(m))[(at & 3) * chunks + (at >> 2)] = v;
    }
};

// Sum over the block; `scratch` holds WARPS floats, free again after the next barrier of the block.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float *scratch) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += scratch[w];
    return sum;
}

__device__ __forceinline__ float4 times(const float4 &x, float inverse, const float4 &w) {
    return make_float4(x.x * inverse * w.x, x.y * inverse * w.y, x.z * inverse * w.z, x.w * inverse * w.w);
}

// 16 elements to integers; lanes 2i and 2i + 1 hold the halves of a 32-block, and both are here (linear.cuh).
template <bool TWO> __device__ __forceinline__ Run quantize16(const float4 (&x)[4]) {
    const float *v = reinterpret_cast<const float *>(x);
    u32 bits = 0;  // as integers, so that a NaN is the largest of all and reaches the result
#pragma unroll
    for (int i = 0; i < 16; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7FFFFFFFu);
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, 1));
    const float largest = __uint_as_float(bits);
    constexpr float LEVELS = TWO ? 32512.f : 127.f;
    const float inverse = largest > 0.f ? LEVELS / largest : 0.f;
    u32 hi[4] = {}, lo[4] = {};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int q = __float2int_rn(v[i] * inverse), high = TWO ? (q + 128) >> 8 : q;
        hi[i / 4] |= (u32)(high & 255) << (8 * (i % 4));
        if (TWO) lo[i / 4] |= (u32)((q - 256 * high) & 255) << (8 * (i % 4));
        sum += q;
    }
    Run run;
    run.hi = make_uint4(hi[0], hi[1], hi[2], hi[3]), run.lo = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    run.scale = largest / LEVELS, run.sum = (float)sum * run.scale;
    return run;
}

// All threads of the block bring one token's row into shared memory.
template <class T, int M, int BYTES, int WARPS>
__device__ __forceinline__ void bring(const RingParams &p, const SharedRows<T, M, BYTES> &to, int m, int token, float *scratch) {
    const int n_runs = p.K / 16;
    if (!T::FLOAT && p.x.hi) {
        for (int run = threadIdx.x; run < n_runs; run += 32 * WARPS) {
            const size_t at = (size_t)token * n_runs + run;
            Run value;
            value.hi = load16(p.x.hi + 16 * at);
            if (BYTES == 2) value.lo = load16(p.x.lo + 16 * at);
            value.scale = p.x.scale[at >> 1], value.sum = p.x.sum[at];
            to.put(m, run, value);
        }
        return;
    }
    const float4 *x = reinterpret_cast<const float4 *>(p.x_float + (size_t)token * p.x_stride);
    const float4 *weight = reinterpret_cast<const float4 *>(p.norm);
    float inverse = 1.f;
    if (p.norm) {
        float squares = 0.f;
        for (int i = threadIdx.x; i < 4 * n_runs; i += 32 * WARPS) {
            const float4 v = x[i];
            squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
        }
        inverse = rsqrtf(block_sum<WARPS>(squares, scratch + WARPS * m) / (float)p.K + p.epsilon);
    }
    if constexpr (T::FLOAT) {
        for (int i = threadIdx.x; i < 4 * n_runs; i += 32 * WARPS) to.put_four(m, i, p.norm ? times(x[i], inverse, weight[i]) : x[i]);
    } else {
        for (int first = 0; first < n_runs; first += 32 * WARPS) {
            const int run = first + threadIdx.x, at = min(run, n_runs - 1);
            float4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = p.norm ? times(x[4 * at + i], inverse, weight[4 * at + i]) : x[4 * at + i];
            const Run value = quantize16<BYTES == 2>(v);
            if (run < n_runs) to.put(m, run, value);
        }
    }
}

// N sums over the warp at once: afterwards lane i holds sum i >> (5 - log2 N).
template <int N> __device__ __forceinline__ float warp_sums(float (&v)[N]) {
    const int lane = threadIdx.x & 31;
    int o = 16;
#pragma unroll
    for (int n = N; n > 1; n /= 2, o /= 2) {
        const bool upper = lane & o;
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            const float give = upper ? v[i] : v[i + n / 2], keep = upper ? v[i + n / 2] : v[i];
            v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, o);
        }
    }
#pragma unroll
    for (; o; o /= 2) v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], o);
    return v[0];
}

template <class T, int M, int R, int ITER, int WARPS, int BYTES, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, (M == 1 ? 24 : 16) / WARPS) gemv_ring(const __grid_constant__ RingParams p) {
    using S = Stage<T, R, ITER, GATED>;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Barrier full[WARPS * MAX_STAGES];
    __shared__ float scratch[WARPS * M];
    pdl_launch();

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunks = p.K / T::E;
    u8 *ring = shared + warp * p.stages * S::NBYTES;
    Barrier *barriers = full + warp * MAX_STAGES;
    if (lane == 0) {
        for (int i = 0; i < p.stages; i++) barrier_init(barriers + i, 1);
        barrier_init_fence();
    }
    __syncwarp();

    const int step = gridDim.x * WARPS, n_tokens = min(M, p.n_tokens - (int)blockIdx.y * M);
    Place now{(int)(blockIdx.x + gridDim.x * warp), 0}, next = now;
    for (int i = 0; i < p.stages && next.tile < p.tiles; i++, next.template advance<S::PIECE>(chunks, step))
        S::fetch(p, next, ring + i * S::NBYTES, barriers + i);

    pdl_wait();
    const SharedRows<T, M, BYTES> x{shared + WARPS * p.stages * S::NBYTES, p.K, chunks};
    for (int m = 0; m < n_tokens; m++) bring<T, M, BYTES, WARPS>(p, x, m, blockIdx.y * M + m, scratch);
    __syncthreads();

    int stage = 0;
    u32 parity = 0;
    float acc[R][M] = {};
    while (now.tile < p.tiles) {
        const u8 *held = ring + stage * S::NBYTES;
        barrier_wait(barriers + stage, parity);
        const int count = min(S::PIECE, chunks - now.c0);
#pragma unroll
        for (int i = 0; i < ITER; i++) {
            const int at = 32 * i + lane;
            if (at >= count) break;
            typename T::Raw raw[R];
            u32 chunk[R];
#pragma unroll
            for (int r = 0; r < R; r++) raw[r] = T::load(S::row(held, r), at), chunk[r] = at;  // pieces start at whole blocks
            accumulate<T, M, R, BYTES>(raw, chunk, now.c0 + at, x, acc);
        }
        __syncwarp();  // every lane is done with the stage
        if (next.tile < p.tiles) {
            S::fetch(p, next, ring + stage * S::NBYTES, barriers + stage);
            next.template advance<S::PIECE>(chunks, step);
        }
        if (++stage == p.stages) stage = 0, parity ^= 1;

        const int tile = now.tile;
        now.template advance<S::PIECE>(chunks, step);
        if (now.tile == tile) continue;
        constexpr int N = R * M, LANES = 32 / N;  // lanes that hold the same sum
        float sums[N];
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = acc[i / M][i % M], acc[i / M][i % M] = 0.f;
        float value = warp_sums<N>(sums);
        const float up = GATED ? __shfl_xor_sync(0xFFFFFFFFu, value, 16) : 0.f;
        const Matrix &matrix = p.matrices[GATED ? 0 : matrix_of(p.matrices, p.n_matrices, tile)];
        const int of = lane / LANES, m = of % M, row = (tile - matrix.first_tile) * S::ROWS + of / M;
        if (lane % LANES || of / M >= S::ROWS || row >= matrix.rows || m >= n_tokens) continue;
        if (matrix.bias) value += matrix.bias[row];
        if (GATED) value = activate(p.activation, value) * (p.matrices[1].bias ? up + p.matrices[1].bias[row] : up);
        const size_t at = (size_t)(blockIdx.y * M + m) * matrix.out_stride + row;
        if (matrix.residual) value += matrix.residual[at];
        static_cast<float *>(matrix.out)[at] = value;
    }
}
