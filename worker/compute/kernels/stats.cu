// Statistics of a gradient: the sum of its squares and how many of its values are not finite.
#include "prelude.cuh"

INLINE bool not_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) == 0x7f800000u; }

// factor: multiplies g in place first, where SCALE. The squares are added in f64: an f32's square fits it
// exactly.
template <bool SCALE>
INLINE void statistics(const float* g, float* out, long long n, float factor, double* partial_squares,
                       unsigned long long* partial_bad) {
    double squares = 0.0;
    unsigned long long bad = 0;
    flat<4>(n, aligned16(g), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W];
        load<W>(g + i, v);
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (SCALE) v[e] *= factor;
            squares += (double)v[e] * (double)v[e];
            bad += not_finite(v[e]);
        }
        if (SCALE) store<W>(out + i, v);
    });
    squares = block_sum(squares);
    bad = block_sum(bad);
    if (threadIdx.x == 0) {
        partial_squares[blockIdx.x] = squares;
        partial_bad[blockIdx.x] = bad;
    }
}

KERNEL(grad_stats)(const float* g, long long n, double* partial_squares, unsigned long long* partial_bad) {
    statistics<false>(g, nullptr, n, 1.0f, partial_squares, partial_bad);
}

// g *= factor (one over the loss's scale), and the statistics of the result.
KERNEL(unscale)(float* g, long long n, float factor, double* partial_squares,
                unsigned long long* partial_bad) {
    statistics<true>(g, g, n, factor, partial_squares, partial_bad);
}

// The sums of the blocks' statistics (+ what is there where `accumulate`). One block.
KERNEL(grad_stats_final)(const double* partial_squares, const unsigned long long* partial_bad, int blocks,
                         double* squares, unsigned long long* bad, int accumulate) {
    double sum = 0.0;
    unsigned long long count = 0;
    for (int i = (int)threadIdx.x; i < blocks; i += (int)blockDim.x) {
        sum += partial_squares[i];
        count += partial_bad[i];
    }
    sum = block_sum(sum);
    count = block_sum(count);
    if (threadIdx.x == 0) {
        *squares = accumulate ? *squares + sum : sum;
        *bad = accumulate ? *bad + count : count;
    }
}
