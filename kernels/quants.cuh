// How each quant type lies in device memory (planes: see planes.py for the table) and how a chunk of it is read.
//
// A chunk is what one lane takes at a time: 16 bytes of quants (32 or 64 bytes of a float type), E elements of one
// row in SEGMENTS runs of 16 consecutive elements. A row is K / E chunks; chunks are numbered through the matrix.
// Element value: d * (w - OFFSET) - m, w a small integer, d (and m with HAS_MIN) one a segment.
//   load(planes, chunk)     the chunk's raw bits; nothing else is read from memory afterwards
//   segment(c, s)           index in the row of segment s of the row's chunk c
//   chunk_of(run), segment_of(run)   the inverse: which chunk and segment hold the row's elements 16 run ..
//   per8(i)                 bytes of plane i for 8 chunks; 0: no such plane
//   unpack(raw, chunk, u)   u.w: 4 elements a word (signed bytes), u.d, u.m
#pragma once
#include "common.cuh"

#define QUANT static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef signed char i8;

struct Planes {
    const u8 *p0, *p1, *p2, *p3;
};

// The same of a few rows in shared memory (gemv_ring.cu): `load` takes either.
struct Near {
    const u8 *at;
    __device__ __forceinline__ Near operator+(unsigned long long offset) const { return {at + offset}; }
};
struct NearPlanes {
    Near p0, p1, p2, p3;
};

// Weights are read once a step: keep them out of L1. Not ld.global.nc, here and below: ptxas moves such loads behind
// griddepcontrol.wait, and these are meant to be on their way before it.
__device__ __forceinline__ uint4 stream16(const u8 *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// Scales: neighbouring lanes and the next chunks share their lines. volatile keeps a load where it was written:
// before the wait for the previous kernel.
template <typename V> __device__ __forceinline__ V shared_line(const u8 *p);
template <> __device__ __forceinline__ u8 shared_line<u8>(const u8 *p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return (u8)v;
}
template <> __device__ __forceinline__ u16 shared_line<u16>(const u8 *p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
template <> __device__ __forceinline__ u32 shared_line<u32>(const u8 *p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
template <> __device__ __forceinline__ uint2 shared_line<uint2>(const u8 *p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
template <> __device__ __forceinline__ uint4 shared_line<uint4>(const u8 *p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 stream16(Near p) { return *reinterpret_cast<const uint4 *>(p.at); }
template <typename V> __device__ __forceinline__ V shared_line(Near p) { return *reinterpret_cast<const V *>(p.at); }

__device__ __forceinline__ float half_bits(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }
__device__ __forceinline__ float low_half(u32 pair) { return half_bits(pair & 0xFFFFu); }
__device__ __forceinline__ float high_half(u32 pair) { return half_bits(pair >> 16); }

template <int SEGMENTS> struct Unpacked {
    int w[4 * SEGMENTS];
    float d[SEGMENTS], m[SEGMENTS];
};

// ---- what the layouts have in common ------------------------------------------------------------------------

// 32 nibbles: low nibbles are segment 0, high nibbles segment 1.
__device__ __forceinline__ void nibbles(const uint4 &q, int (&w)[8]) {
    const u32 v[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = v[i] & 0x0F0F0F0F, w[4 + i] = (v[i] >> 4) & 0x0F0F0F0F;
}
// A fifth bit for each of 32 elements: word i takes bit i of each byte of `high`.
__device__ __forceinline__ void fifth_bits(u32 high, int (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] |= (i <= 4 ? high << (4 - i) : high >> (i - 4)) & 0x10101010;
}
// 16 nibble codes of one word -> table values, in the order of `nibbles`; `table` holds 16 signed bytes.
__device__ __forceinline__ void lookup(u32 q, const u32 (&table)[4], int &low, int &high) {
    const u32 index = q & 0x77777777, pick = 0x32103210 | ((q & 0x88888888) >> 1);
    const u32 a = __byte_perm(__byte_perm(table[0], table[1], index), __byte_perm(table[2], table[3], index), pick);
    const u32 b = __byte_perm(__byte_perm(table[0], table[1], index >> 16), __byte_perm(table[2], table[3], index >> 16), pick >> 16);
    low = __byte_perm(a, b, 0x6420), high = __byte_perm(a, b, 0x7531);
}
__device__ __forceinline__ void lookups(const uint4 &q, const u32 (&table)[4], int (&w)[8]) {
    const u32 v[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) lookup(v[i], table, w[i], w[4 + i]);
}
// K-quants' header: f16 d, f16 dmin, then for each of 4 pairs of 32 elements 24 bits: scale, min, scale, min.
__device__ __forceinline__ void k_scales(const uint4 &header, u32 chunk, float (&d)[2], float (&m)[2]) {
    const u32 j = (chunk >> 1) & 3;
    const u32 low = j < 2 ? header.y : j == 2 ? header.z : header.w, high = j < 2 ? header.z : header.w;
    const u32 bits = __funnelshift_r(low, high, (24 * j) & 31);
    const float scale = low_half(header.x), min = high_half(header.x);
    d[0] = scale * (float)(bits & 63), m[0] = min * (float)((bits >> 6) & 63);
    d[1] = scale * (float)((bits >> 12) & 63), m[1] = min * (float)((bits >> 18) & 63);
}

// Each type says: FLOAT (values, not integers), E, SEGMENTS, OFFSET, HAS_MIN, JOINED (all segments lie in one
// activation block of 32 and share d).
struct Block32 {
    static constexpr bool FLOAT = false, JOINED = true;
    static constexpr int E = 32, SEGMENTS = 2;
    QUANT int segment(int c, int s) { return 32 * c + 16 * s; }
    QUANT int chunk_of(int run) { return run >> 1; }
    QUANT int segment_of(int run) { return run & 1; }
};
// Chunk 2j + h of a block of 256: elements 64 j + 16 h and 64 j + 32 + 16 h.
struct Block256 {
    static constexpr bool FLOAT = false, JOINED = false;
    static constexpr int E = 32, SEGMENTS = 2;
    QUANT int segment(int c, int s) { return 64 * (c >> 1) + 16 * (c & 1) + 32 * s; }
    QUANT int chunk_of(int run) { return 2 * (run >> 2) + (run & 1); }
    QUANT int segment_of(int run) { return (run >> 1) & 1; }
};
// Chunk 2n + h of a block of 256: elements 128 n + 16 h + 32 s, two bits each.
struct Crumbs256 {
    static constexpr bool FLOAT = false, JOINED = false;
    static constexpr int E = 64, SEGMENTS = 4;
    QUANT int segment(int c, int s) { return 128 * (c >> 1) + 16 * (c & 1) + 32 * s; }
    QUANT int chunk_of(int run) { return 2 * (run >> 3) + (run & 1); }
    QUANT int segment_of(int run) { return (run >> 1) & 3; }
    QUANT void crumbs(const uint4 &q, int (&w)[16]) {
        const u32 v[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 16; i++) w[i] = (v[i & 3] >> (2 * (i >> 2))) & 0x03030303;
    }
};

// ---- the types ----------------------------------------------------------------------------------------------

struct Q8_0 {
    static constexpr bool FLOAT = false, JOINED = true, HAS_MIN = false;
    static constexpr int E = 16, SEGMENTS = 1, OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 8 : 0; }
    struct Raw { uint4 q; u16 d; };
    QUANT int segment(int c, int) { return 16 * c; }
    QUANT int chunk_of(int run) { return run; }
    QUANT int segment_of(int) { return 0; }
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u16>(p.p1 + 2ull * (chunk >> 1))};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<1> &u) {
        u.w[0] = raw.q.x, u.w[1] = raw.q.y, u.w[2] = raw.q.z, u.w[3] = raw.q.w;
        u.d[0] = half_bits(raw.d);
    }
};

struct Q4_0 : Block32 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 8;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 16 : 0; }
    struct Raw { uint4 q; u16 d; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u16>(p.p1 + 2ull * chunk)};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        nibbles(raw.q, u.w);
        u.d[0] = u.d[1] = half_bits(raw.d);
    }
};

struct Q4_1 : Block32 {
    static constexpr bool HAS_MIN = true;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 32 : 0; }
    struct Raw { uint4 q; u32 dm; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u32>(p.p1 + 4ull * chunk)};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        nibbles(raw.q, u.w);
        u.d[0] = u.d[1] = low_half(raw.dm), u.m[0] = u.m[1] = -high_half(raw.dm);
    }
};

struct Q5_0 : Block32 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 16;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 32 : i == 2 ? 16 : 0; }
    struct Raw { uint4 q; u32 high; u16 d; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u32>(p.p1 + 4ull * chunk), shared_line<u16>(p.p2 + 2ull * chunk)};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        nibbles(raw.q, u.w), fifth_bits(raw.high, u.w);
        u.d[0] = u.d[1] = half_bits(raw.d);
    }
};

struct Q5_1 : Block32 {
    static constexpr bool HAS_MIN = true;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 32 : i == 2 ? 32 : 0; }
    struct Raw { uint4 q; u32 high, dm; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u32>(p.p1 + 4ull * chunk), shared_line<u32>(p.p2 + 4ull * chunk)};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        nibbles(raw.q, u.w), fifth_bits(raw.high, u.w);
        u.d[0] = u.d[1] = low_half(raw.dm), u.m[0] = u.m[1] = -high_half(raw.dm);
    }
};

struct IQ4_NL : Block32 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 16 : 0; }
    struct Raw { uint4 q; u16 d; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u16>(p.p1 + 2ull * chunk)};
    }
    QUANT void values(const uint4 &q, int (&w)[8]) {
        // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
        constexpr u32 table[4] = {0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u};
        lookups(q, table, w);
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        values(raw.q, u.w);
        u.d[0] = u.d[1] = half_bits(raw.d);
    }
};

struct MXFP4 : Block32 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 8 : 0; }
    struct Raw { uint4 q; u8 e; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u8>(p.p1 + chunk)};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        // 0 1 2 3, 4 6 8 12, 0 -1 -2 -3, -4 -6 -8 -12: e2m1 doubled, so the scale is half of E8M0's
        constexpr u32 table[4] = {0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu};
        lookups(raw.q, table, u.w);
        const u32 e = raw.e;
        u.d[0] = u.d[1] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

struct Q2_K : Crumbs256 {
    static constexpr bool HAS_MIN = true;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 32 : i == 2 ? 8 : 0; }
    struct Raw { uint4 q; u32 scales, dm; };  // scales: for each segment 4 bits scale, 4 bits min
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<u32>(p.p1 + 4ull * chunk), shared_line<u32>(p.p2 + 4ull * (chunk >> 2))};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<4> &u) {
        crumbs(raw.q, u.w);
        const float d = low_half(raw.dm), min = high_half(raw.dm);
#pragma unroll
        for (int s = 0; s < 4; s++) u.d[s] = d * (float)((raw.scales >> (8 * s)) & 15), u.m[s] = min * (float)((raw.scales >> (8 * s + 4)) & 15);
    }
};

struct Q3_K : Crumbs256 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 4;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 64 : i == 2 ? 24 : i == 3 ? 4 : 0; }
    struct Raw { uint4 q; uint2 high; u32 low_scales, high_scales; u16 d; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        // 4 scales of 6 bits: 3 bytes a chunk, 12 a block, so a chunk's bits never leave its block's three words
        const auto words = p.p2 + (3ull * chunk & ~3ull);
        return {stream16(p.p0 + 16ull * chunk), shared_line<uint2>(p.p1 + 8ull * chunk), shared_line<u32>(words),
                shared_line<u32>(words + (((3 * chunk) & 3) > 1 ? 4 : 0)), shared_line<u16>(p.p3 + 2ull * (chunk >> 2))};
    }
    QUANT void unpack(const Raw &raw, u32 chunk, Unpacked<4> &u) {
        crumbs(raw.q, u.w);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 high = i < 8 ? raw.high.x : raw.high.y;
            u.w[i] |= ((i & 7) <= 2 ? high << (2 - (i & 7)) : high >> ((i & 7) - 2)) & 0x04040404;
        }
        const u32 bits = __funnelshift_r(raw.low_scales, raw.high_scales, 8 * ((3 * chunk) & 3));
        const float d = half_bits(raw.d);
#pragma unroll
        for (int s = 0; s < 4; s++) u.d[s] = d * (float)((int)((bits >> (6 * s)) & 63) - 32);
    }
};

struct Q4_K : Block256 {
    static constexpr bool HAS_MIN = true;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 16 : 0; }
    struct Raw { uint4 q, header; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<uint4>(p.p1 + 16ull * (chunk >> 3))};
    }
    QUANT void unpack(const Raw &raw, u32 chunk, Unpacked<2> &u) {
        nibbles(raw.q, u.w), k_scales(raw.header, chunk, u.d, u.m);
    }
};

struct Q5_K : Block256 {
    static constexpr bool HAS_MIN = true;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 32 : i == 2 ? 16 : 0; }
    struct Raw { uint4 q, header; u32 high; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<uint4>(p.p2 + 16ull * (chunk >> 3)), shared_line<u32>(p.p1 + 4ull * chunk)};
    }
    QUANT void unpack(const Raw &raw, u32 chunk, Unpacked<2> &u) {
        nibbles(raw.q, u.w), fifth_bits(raw.high, u.w), k_scales(raw.header, chunk, u.d, u.m);
    }
};

// Chunk 4n + 2a + h of a block: elements 128 n + 32 a + 16 h (low nibbles) and 64 further (high nibbles).
struct Q6_K {
    static constexpr bool FLOAT = false, JOINED = false, HAS_MIN = false;
    static constexpr int E = 32, SEGMENTS = 2, OFFSET = 32;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 64 : i == 2 ? 16 : i == 3 ? 2 : 0; }
    struct Raw { uint4 q; uint2 high; u16 scales, d; };
    QUANT int segment(int c, int s) { return 128 * (c >> 2) + 16 * (c & 3) + 64 * s; }
    QUANT int chunk_of(int run) { return 4 * (run >> 3) + (run & 3); }
    QUANT int segment_of(int run) { return (run >> 2) & 1; }
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<uint2>(p.p1 + 8ull * chunk), shared_line<u16>(p.p2 + 2ull * chunk),
                shared_line<u16>(p.p3 + 2ull * (chunk >> 3))};
    }
    QUANT void unpack(const Raw &raw, u32, Unpacked<2> &u) {
        nibbles(raw.q, u.w);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 high = i < 4 ? raw.high.x : raw.high.y;
            u.w[i] |= ((i & 3) <= 2 ? high << (4 - 2 * (i & 3)) : high >> 2) & 0x30303030;
        }
        const float d = half_bits(raw.d);
        u.d[0] = d * (float)(i8)(raw.scales & 255), u.d[1] = d * (float)(i8)(raw.scales >> 8);
    }
};

struct IQ4_XS : Block32 {
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 0;
    QUANT constexpr int per8(int i) { return i == 0 ? 128 : i == 1 ? 8 : 0; }
    struct Raw { uint4 q; uint2 header; };  // header: f16 d, 8 x 2 high bits, 8 x 4 low bits
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 16ull * chunk), shared_line<uint2>(p.p1 + 8ull * (chunk >> 3))};
    }
    QUANT void unpack(const Raw &raw, u32 chunk, Unpacked<2> &u) {
        IQ4_NL::values(raw.q, u.w);
        const u32 i = chunk & 7;
        const u32 scale = ((raw.header.y >> (4 * i)) & 15) | (((raw.header.x >> (16 + 2 * i)) & 3) << 4);
        u.d[0] = u.d[1] = low_half(raw.header.x) * (float)((int)scale - 32);
    }
};

// Float types keep the file's layout; `values` gives 16 elements.
struct Float16Elements {
    static constexpr bool FLOAT = true, JOINED = true, HAS_MIN = false;
    static constexpr int E = 16, SEGMENTS = 1, OFFSET = 0;
    QUANT int segment(int c, int) { return 16 * c; }
    QUANT int chunk_of(int run) { return run; }
    QUANT int segment_of(int) { return 0; }
};
template <typename H> struct Half : Float16Elements {
    QUANT constexpr int per8(int i) { return i == 0 ? 256 : 0; }
    struct Raw { uint4 a, b; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        return {stream16(p.p0 + 32ull * chunk), stream16(p.p0 + 32ull * chunk + 16)};
    }
    QUANT void values(const Raw &raw, float (&v)[16]) {
        float low[8], high[8];
        unpack8<H>(raw.a, low), unpack8<H>(raw.b, high);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = low[i], v[8 + i] = high[i];
    }
};
using F16 = Half<__half>;
using BF16 = Half<__nv_bfloat16>;
struct F32 : Float16Elements {
    QUANT constexpr int per8(int i) { return i == 0 ? 512 : 0; }
    struct Raw { uint4 q[4]; };
    template <class P> QUANT Raw load(const P &p, u32 chunk) {
        const auto at = p.p0 + 64ull * chunk;
        return {{stream16(at), stream16(at + 16), stream16(at + 32), stream16(at + 48)}};
    }
    QUANT void values(const Raw &raw, float (&v)[16]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[4 * i] = __uint_as_float(raw.q[i].x), v[4 * i + 1] = __uint_as_float(raw.q[i].y);
            v[4 * i + 2] = __uint_as_float(raw.q[i].z), v[4 * i + 3] = __uint_as_float(raw.q[i].w);
        }
    }
};

// ---- values ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float signed_byte(int word, int i) { return (float)(i8)(word >> (8 * i)); }

// A chunk unpacked for float arithmetic. The order of operations is gguf.quants', so float32 results are equal to its.
template <class T> struct Values {
    Unpacked<T::SEGMENTS> u;
    __device__ __forceinline__ Values(const typename T::Raw &raw, u32 chunk) { T::unpack(raw, chunk, u); }
    __device__ __forceinline__ void segment(int s, float (&v)[16]) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float w = signed_byte(u.w[4 * s + i / 4], i % 4);
            v[i] = T::HAS_MIN ? fmaf(u.d[s], w, -u.m[s]) : (w - (float)T::OFFSET) * u.d[s];
        }
    }
};
template <class T> struct FloatValues {
    typename T::Raw raw;
    __device__ __forceinline__ FloatValues(const typename T::Raw &raw, u32) : raw(raw) {}
    __device__ __forceinline__ void segment(int, float (&v)[16]) const { T::values(raw, v); }
};
template <> struct Values<F16> : FloatValues<F16> { using FloatValues<F16>::FloatValues; };
template <> struct Values<BF16> : FloatValues<BF16> { using FloatValues<BF16>::FloatValues; };
template <> struct Values<F32> : FloatValues<F32> { using FloatValues<F32>::FloatValues; };
