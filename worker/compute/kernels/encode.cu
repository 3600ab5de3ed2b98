// Gradients as they go over the wire: the bytes of common/src/encoding, bit for bit, with error feedback
// (Seide et al. 2014), and the selection of the largest values. To be compiled without fused multiply-add.
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
    static __device__ __forceinline__ float decode(unsigned half) { return __uint_as_float(half << 16); }
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
    static __device__ __forceinline__ float decode(unsigned half) {
        return to_f32(f16{(unsigned short)half});
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

template <int W>
INLINE void load_halves(const unsigned short* p, unsigned (&h)[W]) {
    if constexpr (W == 1) {
        h[0] = *p;
    } else {
        unsigned words[W / 2];
        load_words<W * 2>(p, words);
#pragma unroll
        for (int i = 0; i < W; i++) h[i] = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
    }
}

// out = code(g), or with a residual: v = g + residual, out = code(v), residual = v - what out means (where
// that is finite).
template <class Code>
INLINE void encode_halves(const float* g, float* residual, unsigned short* out, long long n) {
    flat<4>(n, aligned16(g) && aligned16(residual) && aligned_to(out, 8), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W], rest[W] = {};
        unsigned h[W];
        load<W>(g + i, v);
        if (residual) load<W>(residual + i, rest);
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (residual) v[e] = v[e] + rest[e];
            h[e] = Code::encode(v[e]);
            rest[e] = finite(v[e]) ? v[e] - Code::decode(h[e]) : rest[e];
        }
        store_halves<W>(out + i, h);
        if (residual) store<W>(residual + i, rest);
    });
}

template <class Code>
INLINE void decode_halves(const unsigned short* in, float* x, long long n) {
    flat<4>(n, aligned16(x) && aligned_to(in, 8), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        unsigned h[W];
        float v[W];
        load_halves<W>(in + i, h);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = Code::decode(h[e]);
        store<W>(x + i, v);
    });
}

KERNEL(encode_bf16)(const float* g, float* residual, unsigned short* out, long long n) {
    encode_halves<Bf16>(g, residual, out, n);
}
KERNEL(encode_f16)(const float* g, float* residual, unsigned short* out, long long n) {
    encode_halves<F16>(g, residual, out, n);
}
KERNEL(decode_bf16)(const unsigned short* in, float* x, long long n) { decode_halves<Bf16>(in, x, n); }
KERNEL(decode_f16)(const unsigned short* in, float* x, long long n) { decode_halves<F16>(in, x, n); }

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

INLINE float from_int8(unsigned byte, float scale) { return (float)(signed char)(unsigned char)byte * scale; }

// A block of 256 threads takes 1024 values, four each.
KERNEL(encode_int8)(const float* g, float* residual, unsigned char* out, long long n) {
    const bool wide = aligned16(g) && aligned16(residual);
    const long long blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    for (long long b = blockIdx.x; b < blocks; b += gridDim.x) {
        const long long at = b * INT8_BLOCK + (long long)threadIdx.x * 4;
        const int count = (int)max(0LL, min(4LL, n - at));
        float v[4] = {}, rest[4] = {};
        if (wide && count == 4) {
            load<4>(g + at, v);
            if (residual) load<4>(residual + at, rest);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < count) {
                    v[e] = g[at + e];
                    if (residual) rest[e] = residual[at + e];
                }
            }
        }
        unsigned largest = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (residual) v[e] = v[e] + rest[e];
            largest = max(largest, __float_as_uint(v[e]) & 0x7fffffffu);
        }
        const float scale = int8_scale(block_max(largest));
        unsigned char* to = out + b * INT8_BYTES;
        if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(to) = __float_as_uint(scale);
        unsigned word = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const unsigned byte = scale > 0.0f ? to_int8(v[e], scale) : 0u;
            word |= byte << (8 * e);
            rest[e] = finite(scale) ? v[e] - from_int8(byte, scale) : rest[e];
        }
        to += 4 + threadIdx.x * 4;
        if (count == 4) {
            *reinterpret_cast<unsigned*>(to) = word;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < count) to[e] = (unsigned char)(word >> (8 * e));
            }
        }
        if (residual && wide && count == 4) {
            store<4>(residual + at, rest);
        } else if (residual) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < count) residual[at + e] = rest[e];
            }
        }
    }
}

KERNEL(decode_int8)(const unsigned char* in, float* x, long long n) {
    const bool wide = aligned16(x);
    const long long blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    for (long long b = blockIdx.x; b < blocks; b += gridDim.x) {
        const long long at = b * INT8_BLOCK + (long long)threadIdx.x * 4;
        const unsigned char* from = in + b * INT8_BYTES;
        const float scale = __uint_as_float(*reinterpret_cast<const unsigned*>(from));
        from += 4 + threadIdx.x * 4;
        if (wide && at + 4 <= n) {
            const unsigned word = *reinterpret_cast<const unsigned*>(from);
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = from_int8(word >> (8 * e) & 0xffu, scale);
            store<4>(x + at, v);
        } else {
            for (int e = 0; e < 4 && at + e < n; e++) x[at + e] = from_int8(from[e], scale);
        }
    }
}

// ----------------------------------------------------------------------------------------------------- top-k
// The k-th largest magnitude is found by its bits, eleven and then ten and ten from the top: each pass counts
// how often each value of the next bits occurs among those that begin with what was chosen, and chooses.
// Magnitudes of floats are in the order of their bits.

constexpr int BINS = 2048;
constexpr int TILE = 4096;
// Words of `state`: the bits chosen so far (at last the threshold), how many are still to be taken among
// those that begin with them (at last: of those that equal the threshold); from HISTOGRAMS on, the counts of
// three passes.
constexpr int CHOSEN = 0;
constexpr int NEED = 1;
constexpr int HISTOGRAMS = 8;

INLINE unsigned size_of(float v) { return __float_as_uint(v) & 0x7fffffffu; }

KERNEL(topk_begin)(unsigned* state, unsigned k) {
    for (int i = (int)threadIdx.x; i < HISTOGRAMS + 3 * BINS; i += (int)blockDim.x)
        state[i] = i == NEED ? k : 0u;
}

INLINE void count_bits(unsigned* bins, float v, unsigned chosen, int pass) {
    const unsigned size = size_of(v);
    if (pass == 0) {
        atomicAdd(&bins[size >> 20], 1u);
    } else if (pass == 1) {
        if (size >> 20 == chosen) atomicAdd(&bins[size >> 10 & 1023u], 1u);
    } else {
        if (size >> 10 == chosen) atomicAdd(&bins[size & 1023u], 1u);
    }
}

// Whole numbers may be added in any order: the counts are the same.
KERNEL(topk_histogram)(const float* v, long long n, unsigned* state, int pass) {
    __shared__ unsigned bins[BINS];
    for (int i = (int)threadIdx.x; i < BINS; i += (int)blockDim.x) bins[i] = 0;
    __syncthreads();
    const unsigned chosen = state[CHOSEN];
    flat<4>(n, aligned16(v), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float x[W];
        load<W>(v + i, x);
#pragma unroll
        for (int e = 0; e < W; e++) count_bits(bins, x[e], chosen, pass);
    });
    __syncthreads();
    unsigned* total = state + HISTOGRAMS + pass * BINS;
    for (int i = (int)threadIdx.x; i < BINS; i += (int)blockDim.x) {
        if (bins[i]) atomicAdd(&total[i], bins[i]);
    }
}

// One block of 256 threads, eight bins each: the bin that the k-th largest is in.
KERNEL(topk_choose)(unsigned* state, int pass) {
    __shared__ unsigned totals[256];
    const unsigned* bins = state + HISTOGRAMS + pass * BINS;
    const int t = (int)threadIdx.x;
    const unsigned chosen = state[CHOSEN], need = state[NEED];
    unsigned mine = 0;
    for (int i = 0; i < 8; i++) mine += bins[t * 8 + i];
    totals[t] = mine;
    __syncthreads();
    unsigned above = 0;
    for (int i = t + 1; i < 256; i++) above += totals[i];
    if (above >= need || above + mine < need) return;
    for (int i = 7; i >= 0; i--) {
        const unsigned here = bins[t * 8 + i];
        if (above + here >= need) {
            state[CHOSEN] = chosen << (pass == 0 ? 11 : 10) | (unsigned)(t * 8 + i);
            state[NEED] = need - above;
            return;
        }
        above += here;
    }
}

// How many values of each tile are above the threshold, and how many equal it.
KERNEL(topk_count)(const float* v, long long n, const unsigned* state, unsigned* tiles) {
    const unsigned threshold = state[CHOSEN];
    const long long first = (long long)blockIdx.x * TILE;
    unsigned above = 0, equal = 0;
    for (int i = (int)threadIdx.x; i < TILE && first + i < n; i += (int)blockDim.x) {
        const unsigned size = size_of(v[first + i]);
        above += size > threshold;
        equal += size == threshold;
    }
    above = block_sum(above);
    equal = block_sum(equal);
    if (threadIdx.x == 0) {
        tiles[blockIdx.x] = above;
        tiles[gridDim.x + blockIdx.x] = equal;
    }
}

// x[i] becomes the sum of what is before it. One block of 1024 threads, each of which takes values that lie
// together.
INLINE void exclusive_scan(unsigned* x, int n) {
    __shared__ unsigned totals[1024];
    const int each = (n + 1023) / 1024, first = (int)threadIdx.x * each, end = min(n, first + each);
    unsigned sum = 0;
    for (int i = first; i < end; i++) sum += x[i];
    totals[threadIdx.x] = sum;
    for (int d = 1; d < 1024; d *= 2) {
        __syncthreads();
        const unsigned before = (int)threadIdx.x >= d ? totals[threadIdx.x - d] : 0u;
        __syncthreads();
        totals[threadIdx.x] += before;
    }
    sum = totals[threadIdx.x] - sum;
    for (int i = first; i < end; i++) {
        const unsigned here = x[i];
        x[i] = sum;
        sum += here;
    }
}

KERNEL(topk_scan)(unsigned* tiles, int tile_count) {
    // Behind its last barrier a scan reads each thread's own total only, so that the next may begin.
    exclusive_scan(tiles, tile_count);
    exclusive_scan(tiles + tile_count, tile_count);
}

// Writes what was selected, in rising order of the index; each warp takes an eighth of the tile. `clear`:
// sets it to zero in v.
KERNEL(topk_write)(float* v, long long n, const unsigned* state, const unsigned* tiles, unsigned* indices,
                   float* values, int clear) {
    __shared__ unsigned counts[2][8];
    constexpr int PART = TILE / 8;
    const unsigned threshold = state[CHOSEN], need = state[NEED];
    const long long first = (long long)blockIdx.x * TILE + warp_of() * PART;
    unsigned above = 0, equal = 0;
    for (int i = lane_of(); i < PART; i += 32) {
        const unsigned size = first + i < n ? size_of(v[first + i]) : 0u;
        const bool inside = first + i < n;
        above += (unsigned)__popc(__ballot_sync(FULL_WARP, inside && size > threshold));
        equal += (unsigned)__popc(__ballot_sync(FULL_WARP, inside && size == threshold));
    }
    if (lane_of() == 0) {
        counts[0][warp_of()] = above;
        counts[1][warp_of()] = equal;
    }
    __syncthreads();
    if (above + equal == 0) return;
    above = tiles[blockIdx.x];
    equal = tiles[gridDim.x + blockIdx.x];
    for (int i = 0; i < warp_of(); i++) {
        above += counts[0][i];
        equal += counts[1][i];
    }
    const unsigned lower = (1u << lane_of()) - 1u;
    for (int i = lane_of(); i < PART; i += 32) {
        const bool inside = first + i < n;
        const float x = inside ? v[first + i] : 0.0f;
        const unsigned size = size_of(x);
        const unsigned over = __ballot_sync(FULL_WARP, inside && size > threshold);
        const unsigned same = __ballot_sync(FULL_WARP, inside && size == threshold);
        const unsigned rank = equal + (unsigned)__popc(same & lower);
        if (inside && (size > threshold || (size == threshold && rank < need))) {
            const unsigned place = above + (unsigned)__popc(over & lower) + min(rank, need);
            indices[place] = (unsigned)(first + i);
            values[place] = x;
            if (clear) v[first + i] = 0.0f;
        }
        above += (unsigned)__popc(over);
        equal += (unsigned)__popc(same);
    }
}
