// The residency checksum (definition: streamer/device/checksum.py) over any byte range, at the speed of memory.
//
// sum over words i of w[i] * multiplier(i % 64) + nbytes * LENGTH_FACTOR, mod 2^64. The grid strides by a multiple of
// 64 words, so every thread meets the same two lanes in each turn: it adds plainly, and multiplies once at the end.
// A range that does not start at 16 bytes is read in aligned vectors and shifted together.

typedef unsigned long long u64;
typedef unsigned char u8;

#define LANES 64
#define GOLDEN 0x9E3779B97F4A7C15ull
#define LENGTH_FACTOR 0xD1B54A32D192ED03ull
#define UNROLL 4

struct Accumulator {  // zero before and after each launch
    u64 sum;
    unsigned blocks_done;
    unsigned unused;
};

static __device__ __forceinline__ u64 multiplier(u64 word) { return (2 * (word % LANES) + 1) * GOLDEN; }

// Streaming load: the data is read once.
static __device__ __forceinline__ ulonglong2 load(const ulonglong2* p) { return __ldcs(p); }

// The 8 bytes that start `bits / 8` bytes into the pair (low, high); 0 < bits < 64.
static __device__ __forceinline__ u64 joined(u64 low, u64 high, int bits) {
    return (low >> bits) | (high << (64 - bits));
}

// 16 bytes at `shift` (0 < shift < 16) bytes into the vectors a, b.
static __device__ __forceinline__ ulonglong2 shifted(ulonglong2 a, ulonglong2 b, int shift) {
    const int bits = (shift & 7) * 8;
    const u64 x = shift < 8 ? a.x : a.y, y = shift < 8 ? a.y : b.x, z = shift < 8 ? b.x : b.y;
    ulonglong2 r;
    r.x = bits ? joined(x, y, bits) : x;
    r.y = bits ? joined(y, z, bits) : y;
    return r;
}

static __device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int step = 16; step; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
    return value;
}

// The last nbytes % 16 bytes: at most two words, padded with zero bytes.
static __device__ u64 tail_sum(const u8* data, u64 nbytes) {
    u64 sum = 0;
    for (u64 start = nbytes / 16 * 16; start < nbytes; start += 8) {
        u64 word = 0;
        for (int i = 0; i < 8 && start + i < nbytes; i++) word |= (u64)data[start + i] << (8 * i);
        sum += word * multiplier(start / 8);
    }
    return sum;
}

// data: nbytes of device memory, any alignment; the 16-byte vectors around it must be readable (device allocations
// are 256-byte aligned). accumulator: zero. result: 8 bytes the device may write. Grid (n, 1, 1), block (512, 1, 1).
extern "C" __global__ void __launch_bounds__(512) checksum(const u8* data, u64 nbytes, Accumulator* accumulator, u64* result) {
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 stride = (u64)gridDim.x * blockDim.x;  // a multiple of 32 vectors, so of 64 words
    const u64 vectors = nbytes / 16;
    const int shift = (int)((u64)data & 15);
    const ulonglong2* p = (const ulonglong2*)((u64)data & ~(u64)15);
    u64 even = 0, odd = 0;
    u64 i = first;
    if (shift == 0) {
        for (; i + (UNROLL - 1) * stride < vectors; i += UNROLL * stride) {
            ulonglong2 v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) v[k] = load(p + i + k * stride);
#pragma unroll
            for (int k = 0; k < UNROLL; k++) even += v[k].x, odd += v[k].y;
        }
        for (; i < vectors; i += stride) {
            const ulonglong2 v = load(p + i);
            even += v.x, odd += v.y;
        }
    } else {
#pragma unroll 4
        for (; i < vectors; i += stride) {
            const ulonglong2 v = shifted(__ldg(p + i), __ldg(p + i + 1), shift);
            even += v.x, odd += v.y;
        }
    }
    u64 sum = even * multiplier(2 * first) + odd * multiplier(2 * first + 1);
    if (first == 0) sum += tail_sum(data, nbytes) + nbytes * LENGTH_FACTOR;

    __shared__ u64 partial[16];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0);
    if (threadIdx.x != 0) return;
    atomicAdd(&accumulator->sum, sum);
    __threadfence();
    if (atomicAdd(&accumulator->blocks_done, 1u) == gridDim.x - 1) {
        __threadfence();
        *result = atomicExch(&accumulator->sum, 0ull);
        accumulator->blocks_done = 0;
        __threadfence_system();
    }
}
