// Types without a native product: the file's blocks -> float, once, at load. Eight elements a thread.
//
// `grid` is the type's codebook as gguf.quants has it ((n, 8) or (n, 4) int8), `signs` 128 bytes of sign patterns.

// instance: decode_blocks<IQ2_XXS, __nv_bfloat16>
// instance: decode_blocks<IQ2_XXS, float>
// instance: decode_blocks<IQ2_XS, __nv_bfloat16>
// instance: decode_blocks<IQ2_XS, float>
// instance: decode_blocks<IQ2_S, __nv_bfloat16>
// instance: decode_blocks<IQ2_S, float>
// instance: decode_blocks<IQ3_XXS, __nv_bfloat16>
// instance: decode_blocks<IQ3_XXS, float>
// instance: decode_blocks<IQ3_S, __nv_bfloat16>
// instance: decode_blocks<IQ3_S, float>
// instance: decode_blocks<IQ1_S, __nv_bfloat16>
// instance: decode_blocks<IQ1_S, float>
// instance: decode_blocks<IQ1_M, __nv_bfloat16>
// instance: decode_blocks<IQ1_M, float>
// instance: decode_blocks<TQ1_0, __nv_bfloat16>
// instance: decode_blocks<TQ1_0, float>
// instance: decode_blocks<TQ2_0, __nv_bfloat16>
// instance: decode_blocks<TQ2_0, float>
// instance: decode_blocks<NVFP4, __nv_bfloat16>
// instance: decode_blocks<NVFP4, float>
// instance: decode_blocks<Q1_0, __nv_bfloat16>
// instance: decode_blocks<Q1_0, float>
// instance: decode_blocks<F64, __nv_bfloat16>
// instance: decode_blocks<F64, float>

#include "quants.cuh"

struct CodebookParams {
    const u8 *source;  // the file's bytes
    const i8 *grid;
    const u8 *signs;
    void *out;  // elements in order, of O
    u32 n_groups;  // of eight elements
    u32 pad;
};
static_assert(sizeof(CodebookParams) == 40, "planes.py");

__device__ __forceinline__ u32 bytes2(const u8 *p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ u32 bytes4(const u8 *p) { return bytes2(p) | bytes2(p + 2) << 16; }
__device__ __forceinline__ u32 nibble(const u8 *p, int i) { return (p[i >> 1] >> (4 * (i & 1))) & 15; }
__device__ __forceinline__ float f16_at(const u8 *p) { return half_bits(bytes2(p)); }

// v = (scale * entry) * sign
__device__ __forceinline__ void signed_entries(float scale, const i8 *a, const i8 *b, u32 signs, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = __fmul_rn(scale, (float)(j < 4 ? a[j] : b[j - 4]));
        v[j] = (signs >> j) & 1 ? -x : x;
    }
}

struct IQ2_XXS {
    static constexpr int ELEMENTS = 256, BYTES = 66;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u32 q = bytes4(b + 2 + 8 * (i >> 2)), s = bytes4(b + 6 + 8 * (i >> 2));
        const float scale = __fmul_rn(f16_at(b), 0.5f + (float)(s >> 28)) * 0.25f;
        const i8 *entry = p.grid + 8 * ((q >> (8 * (i & 3))) & 255);
        signed_entries(scale, entry, entry + 4, p.signs[(s >> (7 * (i & 3))) & 127], v);
    }
};
struct IQ2_XS {
    static constexpr int ELEMENTS = 256, BYTES = 74;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u32 q = bytes2(b + 2 + 2 * i);
        const float scale = __fmul_rn(f16_at(b), 0.5f + (float)nibble(b + 66, i >> 1)) * 0.25f;
        const i8 *entry = p.grid + 8 * (q & 511);
        signed_entries(scale, entry, entry + 4, p.signs[q >> 9], v);
    }
};
struct IQ2_S {
    static constexpr int ELEMENTS = 256, BYTES = 82;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u32 q = b[2 + i] | ((b[66 + (i >> 2)] >> (2 * (i & 3))) & 3) << 8;
        const float scale = __fmul_rn(f16_at(b), 0.5f + (float)nibble(b + 74, i >> 1)) * 0.25f;
        const i8 *entry = p.grid + 8 * q;
        signed_entries(scale, entry, entry + 4, b[34 + i], v);
    }
};
struct IQ3_XXS {
    static constexpr int ELEMENTS = 256, BYTES = 98;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u32 s = bytes4(b + 66 + 4 * (i >> 2));
        const float scale = __fmul_rn(f16_at(b), 0.5f + (float)(s >> 28)) * 0.5f;
        signed_entries(scale, p.grid + 4 * b[2 + 2 * i], p.grid + 4 * b[3 + 2 * i], p.signs[(s >> (7 * (i & 3))) & 127], v);
    }
};
struct IQ3_S {
    static constexpr int ELEMENTS = 256, BYTES = 110;
    static __device__ const i8 *entry(const CodebookParams &p, const u8 *b, int e) {
        return p.grid + 4 * (b[2 + e] | ((b[66 + (e >> 3)] >> (e & 7)) & 1) << 8);
    }
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const float scale = __fmul_rn(f16_at(b), (float)(1 + 2 * nibble(b + 106, i >> 2)));
        signed_entries(scale, entry(p, b, 2 * i), entry(p, b, 2 * i + 1), b[74 + i], v);
    }
};
// v = scale * (entry + delta)
__device__ __forceinline__ void shifted_entries(float scale, const i8 *entry, float delta, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __fmul_rn(scale, (float)entry[j] + delta);
}
struct IQ1_S {
    static constexpr int ELEMENTS = 256, BYTES = 50;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u32 h = bytes2(b + 34 + 2 * (i >> 2));
        const float scale = __fmul_rn(f16_at(b), (float)(2 * ((h >> 12) & 7) + 1));
        shifted_entries(scale, p.grid + 8 * (b[2 + i] | ((h >> (3 * (i & 3))) & 7) << 8), h & 0x8000 ? -0.125f : 0.125f, v);
    }
};
struct IQ1_M {
    static constexpr int ELEMENTS = 256, BYTES = 56;
    static __device__ void decode(const CodebookParams &p, const u8 *b, int i, float (&v)[8]) {
        const u8 *s = b + 48;
        const u32 d = bytes2(s) >> 12 | (bytes2(s + 2) & 0xF000) >> 8 | (bytes2(s + 4) & 0xF000) >> 4 | (bytes2(s + 6) & 0xF000);
        const u32 scale = (bytes2(s + 2 * (i >> 3)) >> (3 * ((i >> 1) & 3))) & 7, h = nibble(b + 32, i);
        shifted_entries(__fmul_rn(half_bits(d), (float)(2 * scale + 1)), p.grid + 8 * (b[i] | (h & 7) << 8), h & 8 ? -0.125f : 0.125f, v);
    }
};
struct TQ1_0 {
    static constexpr int ELEMENTS = 256, BYTES = 54;
    static __device__ void decode(const CodebookParams &, const u8 *b, int i, float (&v)[8]) {
        const float d = f16_at(b + 52);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int e = 8 * i + j;
            const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
            const u8 byte = e < 160 ? b[e % 32] : e < 240 ? b[32 + (e - 160) % 16] : b[48 + (e - 240) % 4];
            const u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
            v[j] = d * (float)((int)((((byte * power) & 255) * 3) >> 8) - 1);
        }
    }
};
struct TQ2_0 {
    static constexpr int ELEMENTS = 256, BYTES = 66;
    static __device__ void decode(const CodebookParams &, const u8 *b, int i, float (&v)[8]) {
        const float d = f16_at(b + 64);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = d * (float)((int)((b[32 * (i >> 4) + 8 * (i & 3) + j] >> (2 * ((i >> 2) & 3))) & 3) - 1);
    }
};
struct NVFP4 {
    static constexpr int ELEMENTS = 64, BYTES = 36;
    static __device__ void decode(const CodebookParams &, const u8 *b, int i, float (&v)[8]) {
        const u32 x = b[i >> 1], exponent = (x >> 3) & 15, mantissa = x & 7;
        // UE4M3 halved: e2m1 values below are doubled
        float d = exponent ? (1.f + (float)mantissa / 8.f) * exp2f((float)exponent - 7.f) : (float)mantissa * 0.001953125f;
        d = x == 0 || x == 0x7F ? 0.f : d * 0.5f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 code = (b[4 + 8 * (i >> 1) + j] >> (4 * (i & 1))) & 15;
            const float value = (float)((0xC8643210u >> (4 * (code & 7))) & 15);  // 0 1 2 3 4 6 8 12
            v[j] = d * (code > 8 ? -value : value);  // code 8 is plain zero
        }
    }
};
struct Q1_0 {
    static constexpr int ELEMENTS = 128, BYTES = 18;
    static __device__ void decode(const CodebookParams &, const u8 *b, int i, float (&v)[8]) {
        const float d = f16_at(b);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = (b[2 + i] >> j) & 1 ? d : -d;
    }
};

struct F64 {
    static constexpr int ELEMENTS = 8, BYTES = 64;
    static __device__ void decode(const CodebookParams &, const u8 *b, int, float (&v)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = (float)reinterpret_cast<const double *>(b)[j];
    }
};

__device__ __forceinline__ void store8(float *to, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) reinterpret_cast<float4 *>(to)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}
__device__ __forceinline__ void store8(__nv_bfloat16 *to, const float (&v)[8]) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(pack2<__nv_bfloat16>(v[0], v[1]), pack2<__nv_bfloat16>(v[2], v[3]),
                                                pack2<__nv_bfloat16>(v[4], v[5]), pack2<__nv_bfloat16>(v[6], v[7]));
}

template <class T, typename O> __global__ void __launch_bounds__(256) decode_blocks(const __grid_constant__ CodebookParams p) {
    constexpr int GROUPS = T::ELEMENTS / 8;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n_groups; i += gridDim.x * blockDim.x) {
        float v[8];
        T::decode(p, p.source + (size_t)(i / GROUPS) * T::BYTES, i % GROUPS, v);
        store8(static_cast<O *>(p.out) + 8ull * i, v);
    }
}
