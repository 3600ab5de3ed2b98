// CUDA C++ as far as our kernels use it, for an ordinary C++ compiler: the device's side. It stands in front of each
// .cu file (-include shim.h); emu.h says how a kernel is launched, shim.cpp runs the threads.
#ifndef PARAFT_SHIM_H
#define PARAFT_SHIM_H

#define PARAFT_SHIM 1

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmath>
#include <type_traits>
#include <utility>

#define SHIM_HIDDEN __attribute__((visibility("hidden")))
#define SHIM_INLINE static inline __attribute__((always_inline, unused))

// ------------------------------------------------------------------------------------------- what shim.cpp supplies

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern SHIM_HIDDEN uint3 threadIdx, blockIdx;
extern SHIM_HIDDEN dim3 blockDim, gridDim;
extern SHIM_HIDDEN unsigned char* shim_dynamic_shared;

SHIM_HIDDEN void shim_barrier(int line);
SHIM_HIDDEN int shim_barrier_reduce(int predicate, int how, int line);

enum shim_collective : int { SHIM_SYNC, SHIM_SHUFFLE, SHIM_BALLOT, SHIM_GATHER };
// What a lane gives to and takes from a collective of its warp.
struct shim_lane_op {
    shim_collective what;
    unsigned mask;
    int line;
    int bytes;
    int source;        // SHUFFLE: the lane whose value is taken
    const void* mine;  // SHUFFLE, GATHER: `bytes` bytes; BALLOT: an int
    void* out;         // SHUFFLE: `bytes` bytes; GATHER: 32 * bytes; BALLOT: unsigned
};
SHIM_HIDDEN void shim_warp(const shim_lane_op& op);
SHIM_HIDDEN unsigned shim_active_lanes();
SHIM_HIDDEN int shim_lane();

typedef void (*shim_trampoline)(void* function, void** args);
struct shim_kernel {
    void* function;
    shim_trampoline call;
    const size_t* arg_sizes;
    const bool* arg_is_pointer;
    int arg_count, max_threads;
    char *shared_begin, *shared_end;  // the static shared memory of its file
};
SHIM_HIDDEN void shim_register(const char* name, const shim_kernel& kernel);

template <class... A, size_t... I>
void shim_call(void (*function)(A...), void** args, std::index_sequence<I...>) {
    function(*(std::remove_cv_t<A>*)args[I]...);
}
// The first number of a kernel's __launch_bounds__.
template <class... Rest>
constexpr int shim_bounds(int threads, Rest...) {
    return threads;
}
template <class... A>
void shim_register_kernel(const char* name, void (*function)(A...), int max_threads, char* begin, char* end) {
    static const size_t sizes[] = {sizeof(A)..., 0};
    static const bool pointers[] = {std::is_pointer<A>::value..., false};
    auto call = [](void* f, void** args) {
        shim_call((void (*)(A...))f, args, std::index_sequence_for<A...>());
    };
    shim_register(name, {(void*)function, call, sizes, pointers, (int)sizeof...(A), max_threads, begin, end});
}

// ------------------------------------------------------------------------------------------------- words of CUDA C++

#define __global__
#define __device__
#define __host__
#define __constant__ static
// Blocks run one after another and one launch at a time, so that one copy serves.
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(T, name) T* name = (T*)shim_dynamic_shared

static const int warpSize __attribute__((unused)) = 32;

#define SHIM_VECTOR(T, name)                                                                                       \
    struct alignas(2 * sizeof(T)) name##2 {                                                                        \
        T x, y;                                                                                                    \
    };                                                                                                             \
    struct name##3 {                                                                                               \
        T x, y, z;                                                                                                 \
    };                                                                                                             \
    struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 {                                              \
        T x, y, z, w;                                                                                              \
    };                                                                                                             \
    SHIM_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                                \
    SHIM_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                        \
    SHIM_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTOR(float, float)
SHIM_VECTOR(double, double)
SHIM_VECTOR(int, int)
SHIM_VECTOR(short, short)
SHIM_VECTOR(signed char, char)
SHIM_VECTOR(unsigned char, uchar)
SHIM_VECTOR(unsigned short, ushort)
SHIM_VECTOR(long long, longlong)
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
SHIM_INLINE uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
SHIM_INLINE uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
SHIM_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---------------------------------------------------------------------------------------------- barriers and warps

#define __syncthreads() shim_barrier(__LINE__)
#define __syncthreads_count(p) shim_barrier_reduce((p) != 0, 0, __LINE__)
#define __syncthreads_and(p) shim_barrier_reduce((p) != 0, 1, __LINE__)
#define __syncthreads_or(p) shim_barrier_reduce((p) != 0, 2, __LINE__)
#define __syncwarp(...) shim_syncwarp{__LINE__}(__VA_ARGS__)

struct shim_syncwarp {
    int line;
    void operator()(unsigned mask = 0xffffffffu) const {
        shim_warp({SHIM_SYNC, mask, line, 0, 0, nullptr, nullptr});
    }
};

template <class T>
SHIM_INLINE T shim_shuffle(int line, unsigned mask, T value, int source) {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "a shuffle takes 4 or 8 bytes");
    T taken;
    shim_warp({SHIM_SHUFFLE, mask, line, (int)sizeof(T), source, &value, &taken});
    return taken;
}
template <class T>
SHIM_INLINE T shim_shfl(int line, unsigned mask, T value, int source, int width = 32) {
    const int lane = shim_lane(), first = lane & ~(width - 1);
    return shim_shuffle(line, mask, value, first + (source & (width - 1)));
}
template <class T>
SHIM_INLINE T shim_shfl_up(int line, unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = shim_lane(), first = lane & ~(width - 1), source = lane - (int)delta;
    return shim_shuffle(line, mask, value, source < first ? lane : source);
}
template <class T>
SHIM_INLINE T shim_shfl_down(int line, unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = shim_lane(), end = (lane & ~(width - 1)) + width, source = lane + (int)delta;
    return shim_shuffle(line, mask, value, source >= end ? lane : source);
}
template <class T>
SHIM_INLINE T shim_shfl_xor(int line, unsigned mask, T value, int lanes, int width = 32) {
    const int lane = shim_lane(), end = (lane & ~(width - 1)) + width, source = lane ^ lanes;
    return shim_shuffle(line, mask, value, source >= end ? lane : source);
}
#define __shfl_sync(...) shim_shfl(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) shim_shfl_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) shim_shfl_down(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) shim_shfl_xor(__LINE__, __VA_ARGS__)

SHIM_INLINE unsigned shim_ballot(int line, unsigned mask, int predicate) {
    unsigned votes;
    shim_warp({SHIM_BALLOT, mask, line, (int)sizeof(int), 0, &predicate, &votes});
    return votes;
}
#define __ballot_sync(mask, p) shim_ballot(__LINE__, mask, (p) != 0)
#define __any_sync(mask, p) (shim_ballot(__LINE__, mask, (p) != 0) != 0)
#define __all_sync(mask, p) (shim_ballot(__LINE__, mask, (p) == 0) == 0)
SHIM_INLINE unsigned __activemask() { return shim_active_lanes(); }

// Every lane of the warp gives `bytes` bytes and gets those of all 32 (0xFF for lanes that are not there): the ground
// on which instructions of the whole warp (matrix products) are emulated.
#define shim_warp_gather(mine, bytes, all) shim_gather(__LINE__, mine, bytes, all)
SHIM_INLINE void shim_gather(int line, const void* mine, int bytes, void* all) {
    shim_warp({SHIM_GATHER, 0xffffffffu, line, bytes, 0, mine, all});
}

template <class T>
SHIM_INLINE T shim_reduce_add(int line, unsigned mask, T value) {
    static_assert(std::is_integral<T>::value, "as on the device, integers only");
    T sum = 0;
    for (int lane = 0; lane < 32; lane++) {
        T v = shim_shuffle(line, mask, value, lane);
        if (mask >> lane & 1) sum += v;
    }
    return sum;
}
#define __reduce_add_sync(mask, v) shim_reduce_add(__LINE__, mask, v)

// Blocks and fibers run one at a time: what a fence orders is in order.
SHIM_INLINE void __threadfence() {}
SHIM_INLINE void __threadfence_block() {}
SHIM_INLINE void __threadfence_system() {}
SHIM_INLINE void __nanosleep(unsigned) {}

// ----------------------------------------------------------------------------------------------------------- atomics
// Fibers are switched only at barriers, so that a plain read and write is atomic. As on the device, the value before is
// returned.

#define SHIM_ATOMIC(name, T, expression)                                                                           \
    SHIM_INLINE T name(T* address, T value) {                                                                      \
        const T old = *address;                                                                                    \
        *address = (expression);                                                                                   \
        return old;                                                                                                \
    }
#define SHIM_ATOMICS(T)                                                                                            \
    SHIM_ATOMIC(atomicMax, T, old > value ? old : value)                                                           \
    SHIM_ATOMIC(atomicMin, T, old < value ? old : value)                                                           \
    SHIM_ATOMIC(atomicAnd, T, old & value)                                                                         \
    SHIM_ATOMIC(atomicOr, T, old | value)                                                                          \
    SHIM_ATOMIC(atomicXor, T, old ^ value)                                                                         \
    SHIM_ATOMIC(atomicExch, T, value)                                                                              \
    SHIM_INLINE T atomicCAS(T* address, T compare, T value) {                                                      \
        const T old = *address;                                                                                    \
        if (old == compare) *address = value;                                                                      \
        return old;                                                                                                \
    }
SHIM_ATOMICS(int)
SHIM_ATOMICS(unsigned)
SHIM_ATOMICS(unsigned long long)
SHIM_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
SHIM_ATOMIC(atomicAdd, unsigned, old + value)
SHIM_ATOMIC(atomicAdd, unsigned long long, old + value)
SHIM_ATOMIC(atomicAdd, float, old + value)
SHIM_ATOMIC(atomicAdd, double, old + value)
SHIM_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
SHIM_ATOMIC(atomicSub, unsigned, old - value)
SHIM_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
SHIM_ATOMIC(atomicExch, float, value)
// For floats the device has neither; kernels that want a maximum compare bits. Here they would compile by conversion.
float atomicMax(float*, float) = delete;
float atomicMin(float*, float) = delete;

// ------------------------------------------------------------------------------------------------ loads and stores

template <class T>
SHIM_INLINE T __ldg(const T* p) { return *p; }
template <class T>
SHIM_INLINE T __ldcs(const T* p) { return *p; }
template <class T>
SHIM_INLINE T __ldcg(const T* p) { return *p; }
template <class T>
SHIM_INLINE T __ldca(const T* p) { return *p; }
template <class T>
SHIM_INLINE void __stcs(T* p, T v) { *p = v; }
template <class T>
SHIM_INLINE void __stcg(T* p, T v) { *p = v; }

// -------------------------------------------------------------------------------------------------------- arithmetic

#define SHIM_MIN_MAX(T)                                                                                            \
    SHIM_INLINE T min(T a, T b) { return a < b ? a : b; }                                                          \
    SHIM_INLINE T max(T a, T b) { return a > b ? a : b; }
SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long)
SHIM_MIN_MAX(unsigned long)
SHIM_MIN_MAX(long long)
SHIM_MIN_MAX(unsigned long long)
// A NaN gives way to the other value, as fminf and fmaxf have it.
SHIM_INLINE float min(float a, float b) { return fminf(a, b); }
SHIM_INLINE float max(float a, float b) { return fmaxf(a, b); }
SHIM_INLINE double min(double a, double b) { return fmin(a, b); }
SHIM_INLINE double max(double a, double b) { return fmax(a, b); }

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

SHIM_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
SHIM_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
SHIM_INLINE float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
// Macros, for the C library has functions of these names.
#define __expf expf
#define __exp10f(x) powf(10.0f, x)
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanhf tanhf
SHIM_INLINE float __fdividef(float x, float y) { return x / y; }
SHIM_INLINE float __fdiv_rn(float x, float y) { return x / y; }
SHIM_INLINE float __frcp_rn(float x) { return 1.0f / x; }
SHIM_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
SHIM_INLINE float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
SHIM_INLINE float __fadd_rn(float x, float y) { return x + y; }
SHIM_INLINE float __fsub_rn(float x, float y) { return x - y; }
SHIM_INLINE float __fmul_rn(float x, float y) { return x * y; }
SHIM_INLINE float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
SHIM_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

template <class To, class From>
SHIM_INLINE To shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
SHIM_INLINE int __float_as_int(float x) { return shim_bits<int>(x); }
SHIM_INLINE unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
SHIM_INLINE float __int_as_float(int x) { return shim_bits<float>(x); }
SHIM_INLINE float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
SHIM_INLINE long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
SHIM_INLINE double __longlong_as_double(long long x) { return shim_bits<double>(x); }

// The device's conversions saturate and take NaN to zero, where C++ leaves the result open.
SHIM_INLINE int shim_to_int(float x) {
    if (isnan(x)) return 0;
    if (x >= 2147483648.0f) return 2147483647;
    if (x < -2147483648.0f) return -2147483647 - 1;
    return (int)x;
}
SHIM_INLINE int __float2int_rn(float x) { return shim_to_int(rintf(x)); }
SHIM_INLINE int __float2int_rz(float x) { return shim_to_int(x); }
SHIM_INLINE int __float2int_rd(float x) { return shim_to_int(floorf(x)); }
SHIM_INLINE int __float2int_ru(float x) { return shim_to_int(ceilf(x)); }
SHIM_INLINE unsigned __float2uint_rn(float x) {
    const float r = rintf(x);
    return !(r > 0.0f) ? 0 : r >= 4294967296.0f ? 4294967295u : (unsigned)r;
}
SHIM_INLINE float __int2float_rn(int x) { return (float)x; }
SHIM_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
SHIM_INLINE float __ll2float_rn(long long x) { return (float)x; }

SHIM_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SHIM_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SHIM_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
SHIM_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
SHIM_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SHIM_INLINE unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
SHIM_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
SHIM_INLINE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
SHIM_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
SHIM_INLINE int __mul24(int a, int b) { return a * b; }
SHIM_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
SHIM_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
SHIM_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(both >> (8 * (selector >> (4 * i) & 7))) & 0xff;
        if (selector >> (4 * i) & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}

#endif
