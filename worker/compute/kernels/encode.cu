// Gradients as they go over the wire: the bytes of common/src/encoding, bit for bit. To be compiled without
// fused multiply-add.
#include "prelude.cuh"

INLINE bool finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

// Rounds to nearest, ties to even. A finite value stays finite, which an instruction's conversion does not
// do.
struct Bf16 {
    static __device__ __forceinline__ unsigned encode(float v) {
        const unsigned bits = __float_as_uint(v), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        const unsigned rounded = (size + 0x7fffu + (size >> 16 & 1u)) >> 16;
        const unsigned special = size >> 16 | (size > 0x7f800000u ? 0x40u : 0u);
        return sign | (size < 0x7f800000u ? min(rounded, 0x7f7fu) : special);
    }
};

struct F16 {
    static __device__ __forceinline__ unsigned encode(float v) {
        const unsigned bits = __float_as_uint(v), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        // Added to one half, whose last place is the smallest f16, a value is rounded by the addition itself.
        const unsigned small = __float_as_uint(__uint_as_float(size) + 0.5f) - __float_as_uint(0.5f);
        const unsigned whole = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
        const unsigned normal = size >= 0x477ff000u ? 0x7bffu : whole;
        const unsigned special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const unsigned number = size < 113u << 23 ? small : normal;
        return sign | ((size < 0x7f800000u ? number : special) & 0xffffu);
    }
};

// W halves in W / 2 words, or one.
template <int W>
INLINE void store_halves(unsigned short* p, const unsigned (&h)[W]) {
    if constexpr (W == 1) {
        *p = (unsigned short)h[0];
    } else {
        unsigned words[W / 2];
#pragma unroll
        for (int i = 0; i < W / 2; i++) words[i] = h[2 * i] | h[2 * i + 1] << 16;
        store_words<W * 2>(p, words);
    }
}

// out = code(g).
template <class Code>
INLINE void encode_halves(const float* g, unsigned short* out, long long n) {
    flat<4>(n, aligned16(g) && aligned_to(out, 8), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W];
        unsigned h[W];
        load<W>(g + i, v);
#pragma unroll
        for (int e = 0; e < W; e++) h[e] = Code::encode(v[e]);
        store_halves<W>(out + i, h);
    });
}

KERNEL(encode_bf16)(const float* g, unsigned short* out, long long n) { encode_halves<Bf16>(g, out, n); }
KERNEL(encode_f16)(const float* g, unsigned short* out, long long n) { encode_halves<F16>(g, out, n); }

// ------------------------------------------------------------------------------------------------------ int8

// Values that share a scale, and the bytes that they take: the scale, then one each.
constexpr int INT8_BLOCK = 1024;
constexpr int INT8_BYTES = INT8_BLOCK + 4;

// The largest of the block's values, which are bits of magnitudes.
INLINE unsigned block_max(unsigned v) {
    __shared__ unsigned slots[8];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v = max(v, __shfl_xor_sync(FULL_WARP, v, d));
    if (lane_of() == 0) slots[warp_of()] = v;
    __syncthreads();
    for (int i = 0; i < 8; i++) v = max(v, slots[i]);
    __syncthreads();  // the next block writes the slots
    return v;
}

INLINE float int8_scale(unsigned largest) {
    if (largest >= 0x7f800000u) return not_a_number();
    float scale = __uint_as_float(largest) / 127.0f;
    if (scale < __uint_as_float(0x00800000u)) return 0.0f;
    while (!finite(scale * 127.0f)) scale = __uint_as_float(__float_as_uint(scale) - 1u);
    return scale;
}

INLINE unsigned to_int8(float v, float scale) {
    // Added to this, a number below 2^22 in size loses what is behind its point; the lowest byte is the whole
    // number.
    constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23
    v = v / scale;
    v = v > 127.0f ? 127.0f : v;
    v = v < -127.0f ? -127.0f : v;
    return __float_as_uint(v + WHOLE) & 0xffu;
}

// A block of 256 threads takes 1024 values, four each.
KERNEL(encode_int8)(const float* g, unsigned char* out, long long n) {
    const bool wide = aligned16(g);
    const long long blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    for (long long b = blockIdx.x; b < blocks; b += gridDim.x) {
        const long long at = b * INT8_BLOCK + (long long)threadIdx.x * 4;
        const int count = (int)max(0LL, min(4LL, n - at));
        float v[4] = {};
        if (wide && count == 4) {
            load<4>(g + at, v);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < count) v[e] = g[at + e];
            }
        }
        unsigned largest = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) largest = max(largest, __float_as_uint(v[e]) & 0x7fffffffu);
        const float scale = int8_scale(block_max(largest));
        unsigned char* to = out + b * INT8_BYTES;
        if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(to) = __float_as_uint(scale);
        unsigned word = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) word |= (scale > 0.0f ? to_int8(v[e], scale) : 0u) << (8 * e);
        to += 4 + threadIdx.x * 4;
        if (count == 4) {
            *reinterpret_cast<unsigned*>(to) = word;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < count) to[e] = (unsigned char)(word >> (8 * e));
            }
        }
    }
}
