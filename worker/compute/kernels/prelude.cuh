// What every kernel file needs: storage types and their conversions, loads and stores of several elements,
// sums over warps and blocks. For NVRTC, and for g++ with the shim (tests/fake-cuda) in front of it.
#ifndef PARAFT_PRELUDE_CUH
#define PARAFT_PRELUDE_CUH

#define KERNEL(name) extern "C" __global__ void name
// For at most so many threads, of which so many blocks are to fit a multiprocessor.
#define KERNEL_BOUNDS(name, threads, blocks)                                                                 \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name
// Instantiates M(suffix, type) for each storage type: all of them, or those that the compiler's options name,
// which saves time.
#if !defined(PARAFT_F32) && !defined(PARAFT_BF16) && !defined(PARAFT_F16)
#define PARAFT_F32
#define PARAFT_BF16
#define PARAFT_F16
#endif
#ifdef PARAFT_F32
#define IN_F32(M) M(f32, float)
#else
#define IN_F32(M)
#endif
#ifdef PARAFT_BF16
#define IN_BF16(M) M(bf16, bf16)
#else
#define IN_BF16(M)
#endif
#ifdef PARAFT_F16
#define IN_F16(M) M(f16, f16)
#else
#define IN_F16(M)
#endif
#define FOR_EACH_TYPE(M) IN_F32(M) IN_BF16(M) IN_F16(M)

#ifndef PARAFT_SHIM
#define DYNAMIC_SHARED(T, name)                                                                              \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];                                    \
    T* name = reinterpret_cast<T*>(dynamic_shared_bytes)
#endif

#define INLINE [[maybe_unused]] static __device__ __forceinline__

constexpr unsigned FULL_WARP = 0xffffffffu;

// --------------------------------------------------------------------------------------------- storage types

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

// A float whose significand is rounded to 11 bits, for products only: what is stored is a float.
struct tf32 {
    unsigned bits;
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

// As cvt.rna.tf32.f32: to nearest, ties away from zero.
INLINE tf32 to_tf32(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    tf32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r.bits) : "f"(v));
    return r;
#else
    const unsigned bits = __float_as_uint(v);
    return {(bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u};
#endif
}

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

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

// -------------------------------------------------------------------------------- several elements at a time

// Elements of T in 16 bytes.
template <class T>
constexpr int WIDE = 16 / (int)sizeof(T);

INLINE bool aligned_to(const void* p, int bytes) {
    return ((unsigned long long)p & (unsigned)(bytes - 1)) == 0;
}
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
INLINE float element(unsigned word, int i, bf16) {
    return __uint_as_float(i ? word & 0xffff0000u : word << 16);
}
INLINE float element(unsigned word, int i, f16) {
    return to_f32(f16{(unsigned short)(i ? word >> 16 : word)});
}

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

// Calls body(Width<W>{}, i) for runs of W elements from 0 to n, and body(Width<1>{}, i) for what is left, or
// for all where `wide` is false. The grid may be of any size.
template <int W, class Body>
INLINE void flat(long long n, bool wide, Body body) {
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long runs = wide ? n / W : 0;
    for (long long i = first; i < runs; i += step) body(Width<W>{}, i * W);
    for (long long i = runs * W + first; i < n; i += step) body(Width<1>{}, i);
}

// a / b, and a % b to `rest`. Divisions of 64 bits cost several times those of 32, which mostly do.
INLINE long long divide(long long a, int b, int& rest) {
    if (a <= 0xffffffffLL) {
        const unsigned quotient = (unsigned)a / (unsigned)b;
        rest = (int)((unsigned)a - quotient * (unsigned)b);
        return quotient;
    }
    const long long quotient = a / b;
    rest = (int)(a - quotient * b);
    return quotient;
}

// 2^x by one instruction (its error is below 2^-22); 0 of minus infinity.
INLINE float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
#else
    return exp2f(x);
#endif
}

// ------------------------------------------------------------------------------------------------ reductions

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

// ------------------------------------------------------------------------------------------ tiles of columns

// A block of 256 threads over 256 columns: each of the eight warps takes rows of its own, each thread eight
// columns, as 8 / W runs of W that lie together.
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

// -------------------------------------------------------------------------------------- products of matrices
// Instructions of a whole warp on matrices of two-byte elements, as the PTX ISA has them ("Matrix
// multiply-accumulate operation using mma instruction", m16n8k16). With g = lane / 4 and t = lane % 4 a
// thread holds
//   of A (16x16):  a[0] row g, columns 2t and 2t+1;  a[1] row g+8 of those;
//                  a[2] row g, columns 2t+8 and 2t+9;  a[3] row g+8 of those
//   of B (16x8):   b[0] rows 2t and 2t+1 of column g;  b[1] rows 2t+8 and 2t+9
//   of C (16x8):   c[0], c[1] row g, columns 2t and 2t+1;  c[2], c[3] row g+8
// tf32 (m16n8k8) is the same with one element of four bytes in the place of two: a[0] row g, column t; a[2]
// column t+4; b[0] row t, b[1] row t+4 of column g. So what follows speaks of halves, and a tf32 counts as
// two. For sm_80 and later; before it they trap.

#ifdef PARAFT_SHIM
// Element k of a row of A or of a column of B, which lie in the words of four lanes.
INLINE float factor_of(const unsigned* low, const unsigned* high, int k, tf32) {
    return __uint_as_float(k < 4 ? low[0] : high[0]);
}
template <class T>
INLINE float factor_of(const unsigned* low, const unsigned* high, int k, T) {
    return element(k < 8 ? low[0] : high[0], k % 2, T{});
}
#endif

// c += a * b, with sums in f32.
template <class T>
INLINE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef PARAFT_SHIM
    struct Held {
        unsigned a[4], b[2];
    };
    const Held mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    Held all[32];
    shim_warp_gather(&mine, (int)sizeof mine, all);
    const int g = lane_of() / 4, t = lane_of() % 4;
    constexpr int PER = 4 / (int)sizeof(T), DEPTH = 8 * PER;
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), col = 2 * t + i % 2;
        for (int k = 0; k < DEPTH; k++) {
            const Held &left = all[row % 8 * 4 + k / PER % 4], &right = all[col * 4 + k / PER % 4];
            c[i] += factor_of(&left.a[row / 8], &left.a[row / 8 + 2], k, T{}) *
                    factor_of(&right.b[0], &right.b[1], k, T{});
        }
    }
#elif __CUDA_ARCH__ >= 800
#define MMA(SHAPE, TYPE)                                                                                     \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                     \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (same_type<T, bf16>) {
        MMA("m16n8k16", "bf16");
    } else if constexpr (same_type<T, f16>) {
        MMA("m16n8k16", "f16");
    } else {
        MMA("m16n8k8", "tf32");
    }
#undef MMA
#else
    asm volatile("trap;");
#endif
}

// Loads four 8x8 matrices from shared memory: the lanes 8i to 8i + 7 give the addresses of the rows of matrix
// i (16 bytes each); r[i] is row lane / 4, elements 2 * (lane % 4) and the next. TRANSPOSED: r[i] is column
// lane / 4 of the matrix, likewise.
template <bool TRANSPOSED>
INLINE void load_matrices(unsigned (&r)[4], const void* row) {
#ifdef PARAFT_SHIM
    const unsigned short* rows[32];
    shim_warp_gather(&row, (int)sizeof row, rows);
    const int g = lane_of() / 4, t = lane_of() % 4;
    for (int i = 0; i < 4; i++) {
        unsigned short pair[2];
        for (int e = 0; e < 2; e++) {
            const int from = TRANSPOSED ? 2 * t + e : g, at = TRANSPOSED ? g : 2 * t + e;
            __builtin_memcpy(&pair[e], rows[8 * i + from] + at, 2);
        }
        r[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    // On the device all rows are read by the one instruction: no lane goes on and writes before that.
    __syncwarp();
#elif __CUDA_ARCH__ >= 750
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// A 16x16 part of a row-major matrix in shared memory as the A of a product, from its first element on;
// strides are in halves.
INLINE void load_a(unsigned (&a)[4], const void* m, int stride) {
    load_matrices<false>(a, (const unsigned short*)m + lane_of() % 16 * stride + lane_of() / 16 * 8);
}

// Two Bs (16x8 each, side by side) of which shared memory has the transpose, 16 rows of 16: b[0], b[1] are
// the first one's.
INLINE void load_b_transposed(unsigned (&b)[4], const void* m, int stride) {
    const int row = lane_of() / 16 * 8 + lane_of() % 8;
    load_matrices<false>(b, (const unsigned short*)m + row * stride + lane_of() / 8 % 2 * 8);
}

// Two Bs (16x8 each, side by side) from a row-major 16x16 part in shared memory; not of tf32.
INLINE void load_b(unsigned (&b)[4], const void* m, int stride) {
    load_matrices<true>(b, (const unsigned short*)m + lane_of() % 16 * stride + lane_of() / 16 * 8);
}

// Copies from global to shared memory that go on while the thread computes (cp.async). What was copied may be
// read after `wait` and a barrier. In the shim the even threads' copies are made only when they are waited for,
// those of the odd threads at once: a wait that is missing fails a test, and so does a copy to where others
// still read.
struct AsyncCopies {
#ifdef PARAFT_SHIM
    struct Copy {
        void* to;
        const void* from;
        int group;
    };
    Copy copies[256];
    int count = 0, group = 0;

    static void make(const Copy& c) {
        if (c.from) {
            __builtin_memcpy(c.to, c.from, 16);
        } else {
            __builtin_memset(c.to, 0, 16);
        }
    }
#endif

    // 16 bytes, aligned to them; zeros where `real` is false (`from` must be an address all the same).
    __device__ __forceinline__ void copy16(void* to, const void* from, bool real) {
#ifdef PARAFT_SHIM
        const Copy copy{to, real ? from : nullptr, group};
        if (threadIdx.x % 2) {
            make(copy);
        } else {
            if (count == 256) __builtin_trap();
            copies[count++] = copy;
        }
#elif __CUDA_ARCH__ >= 800
        const unsigned address = (unsigned)__cvta_generic_to_shared(to);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                     "r"(real ? 16 : 0)
                     : "memory");
#else
        *reinterpret_cast<uint4*>(to) = real ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
    }

    // What was copied since the last call is a group.
    __device__ __forceinline__ void commit() {
#ifdef PARAFT_SHIM
        group++;
#elif __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Waits until all groups but the last PENDING are there.
    template <int PENDING>
    __device__ __forceinline__ void wait() {
#ifdef PARAFT_SHIM
        int kept = 0;
        for (int i = 0; i < count; i++) {
            const Copy c = copies[i];
            if (c.group >= group - PENDING) {
                copies[kept++] = c;
            } else {
                make(c);
            }
        }
        count = kept;
#elif __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
    }
};

#endif
