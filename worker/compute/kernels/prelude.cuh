// What every kernel file needs: storage types and their conversions, loads and stores of several elements, sums over
// warps and blocks. For NVRTC, and for g++ with the shim (tests/fake-cuda) in front of it.
#ifndef PARAFT_PRELUDE_CUH
#define PARAFT_PRELUDE_CUH

#define KERNEL(name) extern "C" __global__ void name
// For at most so many threads, of which so many blocks are to fit a multiprocessor.
#define KERNEL_BOUNDS(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
// Instantiates M(suffix, type) for each storage type.
#define FOR_EACH_TYPE(M) M(f32, float) M(bf16, bf16) M(f16, f16)

#ifndef PARAFT_SHIM
#define DYNAMIC_SHARED(T, name)                                                                              \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];                                    \
    T* name = reinterpret_cast<T*>(dynamic_shared_bytes)
#endif

#define INLINE static __device__ __forceinline__

constexpr unsigned FULL_WARP = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------- storage types

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

INLINE float infinity() { return __uint_as_float(0x7f800000u); }
INLINE float not_a_number() { return __uint_as_float(0x7fc00000u); }

INLINE float to_f32(float v) { return v; }
INLINE float to_f32(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }
INLINE float to_f32(f16 v) {
#ifdef __CUDA_ARCH__
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
    return r;
#else
    // The bits mean 2^112 times less in an f32's bias; the product is exact, of subnormal numbers too.
    const unsigned size = (unsigned)(v.bits & 0x7fff) << 13;
    const unsigned finite = __float_as_uint(__uint_as_float(size) * __uint_as_float((127u + 112u) << 23));
    const unsigned bits = size < 0x0f800000u ? finite : size | 0x7f800000u;
    return __uint_as_float(bits | (unsigned)(v.bits & 0x8000) << 16);
#endif
}

template <class T>
INLINE T from_f32(float v);
template <>
__device__ __forceinline__ float from_f32<float>(float v) {
    return v;
}
template <>
__device__ __forceinline__ bf16 from_f32<bf16>(float v) {
    bf16 r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
#else
    const unsigned bits = __float_as_uint(v);
    // Half of what is cut off, or a little less where the last bit that stays is even.
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    r.bits = (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
    return r;
}
template <>
__device__ __forceinline__ f16 from_f32<f16>(float v) {
    f16 r;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
#else
    const unsigned bits = __float_as_uint(v), size = bits & 0x7fffffffu;
    unsigned half;
    if (size > 0x7f800000u) {
        half = 0x7fffu;
    } else if (size >= 0x477ff000u) {  // 65520, half-way between the largest finite f16 and what would follow
        half = 0x7c00u;
    } else if (size < 113u << 23) {
        // Added to one half, whose last place is the smallest f16, a value is rounded by the addition itself.
        half = __float_as_uint(__uint_as_float(size) + 0.5f) - __float_as_uint(0.5f);
    } else {
        half = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    r.bits = (unsigned short)(half | (bits >> 16 & 0x8000u) * (size <= 0x7f800000u));
#endif
    return r;
}

// Two values in a word, the first in its lower half.
template <class T>
INLINE unsigned pair(float low, float high);
template <>
__device__ __forceinline__ unsigned pair<bf16>(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return from_f32<bf16>(low).bits | (unsigned)from_f32<bf16>(high).bits << 16;
#endif
}
template <>
__device__ __forceinline__ unsigned pair<f16>(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return from_f32<f16>(low).bits | (unsigned)from_f32<f16>(high).bits << 16;
#endif
}

// --------------------------------------------------------------------------------------- several elements at a time

// Elements of T in 16 bytes.
template <class T>
constexpr int WIDE = 16 / (int)sizeof(T);

INLINE bool aligned_to(const void* p, int bytes) { return ((unsigned long long)p & (unsigned)(bytes - 1)) == 0; }
INLINE bool aligned16(const void* p) { return aligned_to(p, 16); }

template <int BYTES>
INLINE void load_words(const void* p, unsigned* words) {
#ifdef PARAFT_SHIM
    __builtin_memcpy(words, __builtin_assume_aligned(p, BYTES < 16 ? BYTES : 16), BYTES);
#else
    if constexpr (BYTES == 4) {
        words[0] = *reinterpret_cast<const unsigned*>(p);
    } else if constexpr (BYTES == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(p);
        words[0] = v.x, words[1] = v.y;
    } else {
        static_assert(BYTES % 16 == 0, "4, 8 or a multiple of 16 bytes");
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 v = reinterpret_cast<const uint4*>(p)[i];
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
    }
#endif
}

template <int BYTES>
INLINE void store_words(void* p, const unsigned* words) {
#ifdef PARAFT_SHIM
    __builtin_memcpy(__builtin_assume_aligned(p, BYTES < 16 ? BYTES : 16), words, BYTES);
#else
    if constexpr (BYTES == 4) {
        *reinterpret_cast<unsigned*>(p) = words[0];
    } else if constexpr (BYTES == 8) {
        *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
    } else {
        static_assert(BYTES % 16 == 0, "4, 8 or a multiple of 16 bytes");
        for (int i = 0; i < BYTES / 16; i++) {
            reinterpret_cast<uint4*>(p)[i] =
                make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
#endif
}

INLINE float element(unsigned word, int i, float) { return __uint_as_float(word); }
INLINE float element(unsigned word, int i, bf16) { return __uint_as_float(i ? word & 0xffff0000u : word << 16); }
INLINE float element(unsigned word, int i, f16) { return to_f32(f16{(unsigned short)(i ? word >> 16 : word)}); }

// W elements from p, which is aligned to their size (16 bytes at most).
template <int W, class T>
INLINE void load(const T* p, float (&v)[W]) {
    if constexpr (W == 1) {
        v[0] = to_f32(*p);
    } else {
        constexpr int PER = 4 / (int)sizeof(T);
        unsigned words[W / PER];
        load_words<W * (int)sizeof(T)>(p, words);
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = element(words[i / PER], i % PER, T{});
    }
}

template <int W, class T>
INLINE void store(T* p, const float (&v)[W]) {
    if constexpr (W == 1) {
        *p = from_f32<T>(v[0]);
    } else if constexpr (sizeof(T) == 4) {
        unsigned words[W];
#pragma unroll
        for (int i = 0; i < W; i++) words[i] = __float_as_uint(v[i]);
        store_words<W * 4>(p, words);
    } else {
        unsigned words[W / 2];
#pragma unroll
        for (int i = 0; i < W / 2; i++) words[i] = pair<T>(v[2 * i], v[2 * i + 1]);
        store_words<W * 2>(p, words);
    }
}

template <int W>
struct Width {
    static constexpr int value = W;
};

// Calls body(Width<W>{}, i) for runs of W elements from 0 to n, and body(Width<1>{}, i) for what is left, or for all where
// `wide` is false. The grid may be of any size.
template <int W, class Body>
INLINE void flat(long long n, bool wide, Body body) {
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long runs = wide ? n / W : 0;
    for (long long i = first; i < runs; i += step) body(Width<W>{}, i * W);
    for (long long i = runs * W + first; i < n; i += step) body(Width<1>{}, i);
}

// --------------------------------------------------------------------------------------------------------- reductions

INLINE int lane_of() { return (int)(threadIdx.x & 31); }
INLINE int warp_of() { return (int)(threadIdx.x >> 5); }

template <class V>
INLINE V warp_sum(V v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(FULL_WARP, v, d);
    return v;
}

// The sum over all threads of the block, to all of them, in an order that depends on blockDim alone.
template <class V>
INLINE V block_sum(V v) {
    __shared__ V slots[32];
    v = warp_sum(v);
    if (lane_of() == 0) slots[warp_of()] = v;
    __syncthreads();
    V total = slots[0];
    for (int i = 1; i < (int)(blockDim.x >> 5); i++) total += slots[i];
    __syncthreads();  // the next call writes the slots
    return total;
}

// The sum over a row's threads: a warp (BLOCK false) or a block.
template <bool BLOCK, class V>
INLINE V group_sum(V v) {
    if constexpr (BLOCK) {
        return block_sum(v);
    } else {
        return warp_sum(v);
    }
}

// ---------------------------------------------------------------------------------------------------- tiles of columns

// A block of 256 threads over 256 columns: each of the eight warps takes rows of its own, each thread eight columns, as
// 8 / W runs of W that lie together.
template <int W>
struct Columns {
    static constexpr int RUNS = 8 / W;
    int base;
    __device__ __forceinline__ int at(int run) const { return base + (run * 32 + lane_of()) * W; }
};

// Adds the warps' sums in order; thread i gets that of the block's column i.
template <int W>
INLINE float column_total(const float (&sums)[8]) {
    __shared__ float all[8][256];
#pragma unroll
    for (int g = 0; g < 8 / W; g++) {
#pragma unroll
        for (int e = 0; e < W; e++) all[warp_of()][(g * 32 + lane_of()) * W + e] = sums[g * W + e];
    }
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) total += all[i][threadIdx.x];
    __syncthreads();  // the next call writes `all`
    return total;
}

#endif
