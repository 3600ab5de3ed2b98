// Losses and their gradients, and the sums that they need.
#include "prelude.cuh"

// Up to so many columns a warp takes a row; a block beyond.
constexpr int WARP_COLUMNS = 1024;
constexpr unsigned LEFT_OUT = 0xffffffffu;

// The largest value of a part of a row, where it is first, and the sum of exp(x - base(max)): an online
// softmax (Milakov, Gimelshein 2018), so that the row is read once for both.
struct Peak {
    float max;
    float sum;
    int at;
};

// What is subtracted before the exponential: minus infinity minus itself would be NaN.
INLINE float base_of(float max) { return max == -infinity() ? 0.0f : max; }

template <int W>
INLINE void take(Peak& p, const float (&v)[W], int c) {
    float max = p.max;
#pragma unroll
    for (int e = 0; e < W; e++) {
        if (v[e] > max) max = v[e], p.at = c + e;
    }
    const float base = base_of(max);
    float sum = p.sum * __expf(p.max - base);
#pragma unroll
    for (int e = 0; e < W; e++) sum += __expf(v[e] - base);
    p.sum = sum;
    p.max = max;
}

INLINE Peak merge(Peak a, Peak b) {
    Peak r;
    r.max = b.max > a.max ? b.max : a.max;
    r.at = a.max > b.max ? a.at : b.max > a.max ? b.at : min(a.at, b.at);
    const float base = base_of(r.max);
    r.sum = a.sum * __expf(a.max - base) + b.sum * __expf(b.max - base);
    return r;
}

INLINE Peak merge_warp(Peak p) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        Peak other;
        other.max = __shfl_xor_sync(FULL_WARP, p.max, d);
        other.sum = __shfl_xor_sync(FULL_WARP, p.sum, d);
        other.at = __shfl_xor_sync(FULL_WARP, p.at, d);
        // The lower lane first on both sides, so that all lanes have the same bits.
        p = lane_of() & d ? merge(other, p) : merge(p, other);
    }
    return p;
}

INLINE Peak merge_block(Peak p) {
    __shared__ Peak slots[32];
    p = merge_warp(p);
    if (lane_of() == 0) slots[warp_of()] = p;
    __syncthreads();
    Peak all = slots[0];
    for (int i = 1; i < (int)(blockDim.x >> 5); i++) all = merge(all, slots[i]);
    __syncthreads();  // the next row writes the slots
    return all;
}

// Calls body(width, c, d) for every column, 16 bytes at a time from the first aligned element on: rows of an
// odd length begin anywhere. d is a second run of columns, so that two are on their way at a time, or -1.
// `other` is a second row that the body writes.
template <class T, class Body>
INLINE void over_row(const T* row, const T* other, int cols, int first, int step, Body body) {
    constexpr int W = WIDE<T>;
    const unsigned long long address = (unsigned long long)row;
    const bool together = ((address ^ (unsigned long long)other) & 15) == 0;
    const int head = together ? min(cols, (int)((16 - (address & 15)) & 15) / (int)sizeof(T)) : cols;
    const int runs = (cols - head) / W;
    for (int c = first; c < head; c += step) body(Width<1>{}, c, -1);
    for (int i = first; i < runs; i += 2 * step) {
        body(Width<W>{}, head + i * W, i + step < runs ? head + (i + step) * W : -1);
    }
    for (int c = head + runs * W + first; c < cols; c += step) body(Width<1>{}, c, -1);
}

// One row by a warp or a block, whose thread this is the `first` of `step`. Without `drow`, no gradient.
template <bool BLOCK, class T>
INLINE void xent_row(const T* row, unsigned label, T* drow, float* loss, unsigned* correct, int cols,
                     float scale, int first, int step) {
    const bool inside = label < (unsigned)cols;
    // Read before anyone writes the gradient over it: the merge below is a barrier.
    const float chosen = inside ? to_f32(row[label]) : not_a_number();
    Peak peak{-infinity(), 0.0f, 0x7fffffff};
    over_row(row, row, cols, first, step, [&](auto width, int c, int d) {
        constexpr int W = decltype(width)::value;
        float u[W], v[W];
        load<W>(row + c, u);
        if (d >= 0) load<W>(row + d, v);
        take<W>(peak, u, c);
        if (d >= 0) take<W>(peak, v, d);
    });
    peak = BLOCK ? merge_block(peak) : merge_warp(peak);
    const float base = base_of(peak.max);
    const bool left_out = label == LEFT_OUT;
    if (first == 0) {
        *loss = left_out ? 0.0f : logf(peak.sum) - (chosen - base);
        if (correct) *correct = peak.at == (int)label;
    }
    if (!drow) return;
    const float factor = inside ? scale / peak.sum : not_a_number();
    auto slope = [&](float x, int c) {
        const float d = __expf(x - base) * factor - (c == (int)label ? scale : 0.0f);
        return left_out ? 0.0f : d;
    };
    over_row(row, drow, cols, first, step, [&](auto width, int c, int d) {
        constexpr int W = decltype(width)::value;
        float u[W], v[W];
        load<W>(row + c, u);
        if (d >= 0) load<W>(row + d, v);
#pragma unroll
        for (int e = 0; e < W; e++) u[e] = slope(u[e], c + e);
        store<W>(drow + c, u);
        if (d >= 0) {
#pragma unroll
            for (int e = 0; e < W; e++) v[e] = slope(v[e], d + e);
            store<W>(drow + d, v);
        }
    });
}

// logits and dlogits are [rows, cols], a row `pitch` values behind the one before (dlogits null: no gradient), labels, losses and
// correct [rows].
template <class T>
INLINE void xent(const T* logits, const unsigned* labels, T* dlogits, float* losses, unsigned* correct,
                 int rows, int cols, int pitch, float scale) {
    const bool block = cols > WARP_COLUMNS;
    const int together = block ? 1 : (int)(blockDim.x >> 5);
    const int start = (int)blockIdx.x * together + (block ? 0 : warp_of());
    for (int r = start; r < rows; r += (int)gridDim.x * together) {
        const long long at = (long long)r * pitch;
        T* drow = dlogits ? dlogits + at : nullptr;
        unsigned* right = correct ? correct + r : nullptr;
        if (block) {
            xent_row<true>(logits + at, labels[r], drow, losses + r, right, cols, scale, (int)threadIdx.x,
                           (int)blockDim.x);
        } else {
            xent_row<false>(logits + at, labels[r], drow, losses + r, right, cols, scale, lane_of(), 32);
        }
    }
}

// dy = (y - target) * scale (dy null: none); partial = the block's sum of squared differences.
template <class T>
INLINE void mse(const T* y, const float* target, T* dy, double* partial, long long n, float scale) {
    float sum = 0.0f;
    flat<4>(n, aligned16(y) && aligned16(target) && aligned16(dy), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W], t[W];
        load<W>(y + i, v);
        load<W>(target + i, t);
#pragma unroll
        for (int e = 0; e < W; e++) {
            v[e] -= t[e];
            sum += v[e] * v[e];
            v[e] *= scale;
        }
        if (dy) store<W>(dy + i, v);
    });
    const double total = block_sum((double)sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// *out = the sum of n values (+ *out where `accumulate`). One block.
template <class Sum, class V>
INLINE void sum_all(const V* x, Sum* out, long long n, int accumulate) {
    Sum sum = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += (Sum)x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = accumulate ? *out + sum : sum;
}

KERNEL(sum_f32)(const float* x, double* out, long long n, int accumulate) { sum_all(x, out, n, accumulate); }
KERNEL(sum_f64)(const double* x, double* out, long long n, int accumulate) { sum_all(x, out, n, accumulate); }
KERNEL(sum_u32)(const unsigned* x, unsigned long long* out, long long n, int accumulate) {
    sum_all(x, out, n, accumulate);
}

#define INSTANTIATE(S, T)                                                                                    \
    KERNEL(softmax_xent_##S)(const T* logits, const unsigned* labels, T* dlogits, float* losses,             \
                             unsigned* correct, int rows, int cols, int pitch, float scale) {                \
        xent(logits, labels, dlogits, losses, correct, rows, cols, pitch, scale);                            \
    }                                                                                                        \
    KERNEL(xent_##S)(const T* logits, const unsigned* labels, float* losses, unsigned* correct, int rows,    \
                     int cols, int pitch) {                                                                  \
        xent(logits, labels, (T*)nullptr, losses, correct, rows, cols, pitch, 0.0f);                         \
    }                                                                                                        \
    KERNEL(mse_##S)(const T* y, const float* target, T* dy, double* partial, long long n, float scale) {     \
        mse(y, target, dy, partial, n, scale);                                                               \
    }
FOR_EACH_TYPE(INSTANTIATE)
