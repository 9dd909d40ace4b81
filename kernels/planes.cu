// A quant type's file blocks -> the planes of quants.cuh: after the upload, from the landing area to the destination.
//
// Blocks of the file lie at 2-byte (MXFP4: 1-byte) boundaries, so bytes are gathered by twos; destinations are written
// 16 bytes at a time. A thread moves one chunk: 16 bytes of quants and what belongs to it; the first chunk of a block
// also moves what the block has once. Which plane holds what is said once, in streamer/plan/layouts.py.

// instance: to_planes<MoveQ8_0>
// instance: to_planes<MoveQ4_0>
// instance: to_planes<MoveQ4_1>
// instance: to_planes<MoveQ5_0>
// instance: to_planes<MoveQ5_1>
// instance: to_planes<MoveMXFP4>
// instance: to_planes<MoveQ2_K>
// instance: to_planes<MoveQ3_K>
// instance: to_planes<MoveQ4_K>
// instance: to_planes<MoveQ5_K>
// instance: to_planes<MoveQ6_K>
// instance: to_planes<MoveIQ4_XS>

#include "quants.cuh"

struct PlanesParams {
    const u8 *source;  // (n_blocks * block bytes), the file's bytes
    u8 *p0, *p1, *p2, *p3;
    u32 n_chunks;  // 16 bytes of quants each
    u32 pad;
};
static_assert(sizeof(PlanesParams) == 48, "planes.py");

__device__ __forceinline__ u32 bytes2(const u8 *p) { return *reinterpret_cast<const u16 *>(p); }
__device__ __forceinline__ u32 bytes4(const u8 *p) { return bytes2(p) | bytes2(p + 2) << 16; }
__device__ __forceinline__ uint4 bytes16(const u8 *p) { return make_uint4(bytes4(p), bytes4(p + 4), bytes4(p + 8), bytes4(p + 12)); }
template <typename V> __device__ __forceinline__ void put(u8 *plane, u32 i, V v) { reinterpret_cast<V *>(plane)[i] = v; }

// The fifth bits of 32 elements, element e (16 low, then 16 high nibbles) to byte e & 3, bit e >> 2.
template <class F> __device__ __forceinline__ u32 spread32(F bit) {
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 32; e++) word |= (bit(e) & 1u) << (8 * (e & 3) + (e >> 2));
    return word;
}

__device__ __forceinline__ uint4 k_header(const u8 *block) {
    const u8 *s = block + 4;
    u32 words[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 scale = i < 4 ? s[i] & 63 : (s[4 + i] & 15) | (s[i - 4] >> 6) << 4;
        const u32 min = i < 4 ? s[4 + i] & 63 : (s[4 + i] >> 4) | (s[i] >> 6) << 4;
        const int at = 12 * i;  // 24 bits a pair of sub-blocks
        const unsigned long long bits = (unsigned long long)(scale | min << 6) << (at & 31);
        words[at >> 5] |= (u32)bits;
        if ((at >> 5) < 2) words[(at >> 5) + 1] |= (u32)(bits >> 32);
    }
    return make_uint4(bytes4(block), words[0], words[1], words[2]);
}

struct MoveQ8_0 {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 34ull * (i >> 1);
        put(p.p0, i, bytes16(block + 2 + 16 * (i & 1)));
        if (!(i & 1)) put(p.p1, i >> 1, (u16)bytes2(block));
    }
};
struct MoveQ4_0 {  // and IQ4_NL
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 18ull * i;
        put(p.p0, i, bytes16(block + 2)), put(p.p1, i, (u16)bytes2(block));
    }
};
struct MoveQ4_1 {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 20ull * i;
        put(p.p0, i, bytes16(block + 4)), put(p.p1, i, bytes4(block));
    }
};
struct MoveQ5_0 {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 22ull * i;
        const u32 high = bytes4(block + 2);
        put(p.p0, i, bytes16(block + 6)), put(p.p1, i, spread32([&](int e) { return high >> e; })), put(p.p2, i, (u16)bytes2(block));
    }
};
struct MoveQ5_1 {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 24ull * i;
        const u32 high = bytes4(block + 4);
        put(p.p0, i, bytes16(block + 8)), put(p.p1, i, spread32([&](int e) { return high >> e; })), put(p.p2, i, bytes4(block));
    }
};
struct MoveMXFP4 {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 17ull * i;
        u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = block[1 + 4 * j] | block[2 + 4 * j] << 8 | block[3 + 4 * j] << 16 | (u32)block[4 + 4 * j] << 24;
        put(p.p0, i, make_uint4(w[0], w[1], w[2], w[3])), put(p.p1, i, block[0]);
    }
};
struct MoveQ2_K {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 84ull * (i >> 2);
        const u32 n = (i >> 1) & 1, h = i & 1;
        put(p.p0, i, bytes16(block + 16 + 16 * (i & 3)));
        u32 scales = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) scales |= (u32)block[8 * n + 2 * s + h] << (8 * s);
        put(p.p1, i, scales);
        if (!(i & 3)) put(p.p2, i >> 2, bytes4(block + 80));
    }
};
struct MoveQ3_K {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 110ull * (i >> 2), *mask = block, *scales = block + 96;
        const u32 n = (i >> 1) & 1, h = i & 1;
        put(p.p0, i, bytes16(block + 32 + 16 * (i & 3)));
        u32 high[2] = {0, 0}, packed = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int l = 0; l < 16; l++) high[s >> 1] |= (u32)((mask[16 * h + l] >> (4 * n + s)) & 1) << (8 * (l & 3) + 4 * (s & 1) + (l >> 2));
            const u32 j = 8 * n + 2 * s + h;
            const u32 low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4, top = (scales[8 + (j & 3)] >> (2 * (j >> 2))) & 3;
            packed |= (low | top << 4) << (6 * s);
        }
        put(p.p1, i, make_uint2(high[0], high[1]));
        u8 *to = p.p2 + 3ull * i;
        to[0] = (u8)packed, to[1] = (u8)(packed >> 8), to[2] = (u8)(packed >> 16);
        if (!(i & 3)) put(p.p3, i >> 2, (u16)bytes2(block + 108));
    }
};
struct MoveQ4_K {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 144ull * (i >> 3);
        put(p.p0, i, bytes16(block + 16 + 16 * (i & 7)));
        if (!(i & 7)) put(p.p1, i >> 3, k_header(block));
    }
};
struct MoveQ5_K {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 176ull * (i >> 3), *high = block + 16;
        const u32 j = (i >> 1) & 3, h = i & 1;
        put(p.p0, i, bytes16(block + 48 + 16 * (i & 7)));
        put(p.p1, i, spread32([&](int e) { return (u32)high[16 * h + (e & 15)] >> (2 * j + (e >> 4)); }));
        if (!(i & 7)) put(p.p2, i >> 3, k_header(block));
    }
};
struct MoveQ6_K {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 210ull * (i >> 3), *top = block + 128, *scales = block + 192;
        const u32 n = (i >> 2) & 1, a = (i >> 1) & 1, h = i & 1;
        put(p.p0, i, bytes16(block + 16 * (i & 7)));
        u32 low = 0, high = 0;
#pragma unroll
        for (int l = 0; l < 16; l++) {
            const u32 bits = top[32 * n + 16 * h + l] >> (2 * a);
            low |= (bits & 3) << (8 * (l & 3) + 2 * (l >> 2)), high |= ((bits >> 4) & 3) << (8 * (l & 3) + 2 * (l >> 2));
        }
        put(p.p1, i, make_uint2(low, high));
        const u32 s = 8 * n + 2 * a + h;
        put(p.p2, i, (u16)(scales[s] | scales[s + 4] << 8));
        if (!(i & 7)) put(p.p3, i >> 3, (u16)bytes2(block + 208));
    }
};
struct MoveIQ4_XS {
    static __device__ __forceinline__ void move(const PlanesParams &p, u32 i) {
        const u8 *block = p.source + 136ull * (i >> 3);
        put(p.p0, i, bytes16(block + 8 + 16 * (i & 7)));
        if (!(i & 7)) put(p.p1, i >> 3, make_uint2(bytes4(block), bytes4(block + 4)));
    }
};

// Grid: enough blocks of 256 for the chunks, or fewer.
template <class MOVE> __global__ void __launch_bounds__(256) to_planes(const __grid_constant__ PlanesParams p) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n_chunks; i += gridDim.x * blockDim.x) MOVE::move(p, i);
}
