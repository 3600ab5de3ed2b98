// Elementwise operators: bias and activation, their gradients, sums of columns, casts. All are bound by
// memory.
#include "prelude.cuh"

constexpr int RELU = 1;
constexpr int GELU = 2;

// sqrt(2 / pi) and the cubic's factor of the tanh approximation (Hendrycks, Gimpel 2016).
constexpr float GELU_ROOT = 0.7978845608028654f;
constexpr float GELU_CUBE = 0.044715f;

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), u = root * (x + cube * x^3): one exponential instead of a tanhf.
INLINE float gelu_gate(float x) {
    const float u = GELU_ROOT * (x + GELU_CUBE * x * x * x);
    return __fdividef(1.0f, 1.0f + __expf(-2.0f * u));
}

INLINE float activate(float x, int act) {
    if (act == RELU) return x <= 0.0f ? 0.0f : x;  // a NaN passes
    if (act == GELU) return x * gelu_gate(x);
    return x;
}

INLINE float activation_slope(float saved, int act) {
    if (act == RELU) return saved <= 0.0f ? 0.0f : 1.0f;
    if (act == GELU) {
        const float gate = gelu_gate(saved);
        // Beyond this the gate is 0 or 1 and the product below 0; the square of a large number would make it
        // NaN.
        const float x = fminf(fmaxf(saved, -20.0f), 20.0f);
        return gate + x * gate * (1.0f - gate) * 2.0f * GELU_ROOT * (1.0f + 3.0f * GELU_CUBE * x * x);
    }
    return 1.0f;
}

// bias[(i + e) % cols] for e below W.
template <int W>
INLINE void load_bias(const float* bias, long long i, int cols, bool wide, float (&b)[W]) {
    int c;
    divide(i, cols, c);
    if (W > 1 && wide) {
        load<W>(bias + c, b);
        return;
    }
#pragma unroll
    for (int e = 0; e < W; e++) {
        b[e] = bias[c];
        c = c + 1 == cols ? 0 : c + 1;
    }
}

// y = act(y + bias) in place, [rows, cols]; y + bias goes to `pre` where that is given.
template <class T>
INLINE void bias_act(T* y, const float* bias, T* pre, long long rows, int cols, int act) {
    const bool wide_bias = cols % WIDE<T> == 0 && aligned16(bias);
    flat<WIDE<T>>(rows * cols, aligned16(y) && aligned16(pre), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W], b[W];
        load<W>(y + i, v);
        if (bias) {
            load_bias<W>(bias, i, cols, wide_bias, b);
#pragma unroll
            for (int e = 0; e < W; e++) v[e] += b[e];
        }
        if (pre) store<W>(pre + i, v);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = activate(v[e], act);
        store<W>(y + i, v);
    });
}

// dy *= act'(saved).
template <class T>
INLINE void act_backward(T* dy, const T* saved, long long n, int act) {
    flat<WIDE<T>>(n, aligned16(dy) && aligned16(saved), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float d[W], s[W];
        load<W>(dy + i, d);
        load<W>(saved + i, s);
#pragma unroll
        for (int e = 0; e < W; e++) {
            // Not a product for ReLU: 0 * inf would be NaN.
            d[e] = act == RELU ? (s[e] <= 0.0f ? 0.0f : d[e]) : d[e] * activation_slope(s[e], act);
        }
        store<W>(dy + i, d);
    });
}

template <class T>
INLINE void add(T* y, const T* a, const T* b, long long n) {
    flat<WIDE<T>>(n, aligned16(y) && aligned16(a) && aligned16(b), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float u[W], v[W];
        load<W>(a + i, u);
        load<W>(b + i, v);
#pragma unroll
        for (int e = 0; e < W; e++) u[e] += v[e];
        store<W>(y + i, u);
    });
}

template <int W, class T>
INLINE float chunk_sum(const T* x, int rows, int cols, int rows_per_chunk) {
    float sums[8] = {};
    const Columns<W> columns{(int)blockIdx.x * 256};
    const int first = (int)blockIdx.y * rows_per_chunk, end = min(rows, first + rows_per_chunk);
#pragma unroll 4
    for (int r = first + warp_of(); r < end; r += 8) {
        const T* row = x + (long long)r * cols;
#pragma unroll
        for (int g = 0; g < Columns<W>::RUNS; g++) {
            const int c = columns.at(g);
            if (c < cols) {
                float v[W];
                load<W>(row + c, v);
#pragma unroll
                for (int e = 0; e < W; e++) sums[g * W + e] += v[e];
            }
        }
    }
    return column_total<W>(sums);
}

// The sums of the columns over a chunk of rows: x is [rows, cols], partial [chunks, cols]. Grid (256 columns
// each, chunks).
template <class T>
INLINE void col_sum_partial(const T* x, float* partial, int rows, int cols, int rows_per_chunk) {
    const bool wide = cols % WIDE<T> == 0 && aligned16(x);
    const float total = wide ? chunk_sum<WIDE<T>>(x, rows, cols, rows_per_chunk)
                             : chunk_sum<1>(x, rows, cols, rows_per_chunk);
    const int c = (int)(blockIdx.x * 256 + threadIdx.x);
    if (c < cols) partial[(long long)blockIdx.y * cols + c] = total;
}

// out = the sum of the chunks, in order (+ out where `accumulate`). A block takes 32 columns, its eight warps
// every eighth chunk.
KERNEL(col_sum_final)(const float* partial, float* out, int chunks, int cols, int accumulate) {
    __shared__ float sums[8][32];
    const int c = (int)blockIdx.x * 32 + lane_of();
    float sum = 0.0f;
    if (c < cols) {
#pragma unroll 4
        for (int i = warp_of(); i < chunks; i += 8) sum += partial[(long long)i * cols + c];
    }
    sums[warp_of()][lane_of()] = sum;
    __syncthreads();
    if (warp_of() == 0 && c < cols) {
        float total = accumulate ? out[c] : 0.0f;
        for (int i = 0; i < 8; i++) total += sums[i][lane_of()];
        out[c] = total;
    }
}

KERNEL(fill_f32)(float* x, float value, long long n) {
    flat<4>(n, aligned16(x), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W];
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = value;
        store<W>(x + i, v);
    });
}

// Four at a time, so that the threads of a warp read and write memory that lies together on both sides.
template <class From, class To>
INLINE void cast(const From* x, To* y, long long n) {
    flat<4>(n, aligned16(x) && aligned16(y), [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float v[W];
        load<W>(x + i, v);
        store<W>(y + i, v);
    });
}

KERNEL(cast_f32_to_bf16)(const float* x, bf16* y, long long n) { cast(x, y, n); }
KERNEL(cast_f32_to_f16)(const float* x, f16* y, long long n) { cast(x, y, n); }
KERNEL(cast_bf16_to_f32)(const bf16* x, float* y, long long n) { cast(x, y, n); }
KERNEL(cast_f16_to_f32)(const f16* x, float* y, long long n) { cast(x, y, n); }

#define INSTANTIATE(S, T)                                                                                    \
    KERNEL(bias_act_##S)(T * y, const float* bias, T* pre, long long rows, int cols, int act) {              \
        bias_act(y, bias, pre, rows, cols, act);                                                             \
    }                                                                                                        \
    KERNEL(act_backward_##S)(T * dy, const T* saved, long long n, int act) {                                 \
        act_backward(dy, saved, n, act);                                                                     \
    }                                                                                                        \
    KERNEL(add_##S)(T * y, const T* a, const T* b, long long n) { add(y, a, b, n); }                         \
    KERNEL(col_sum_partial_##S)(const T* x, float* partial, int rows, int cols, int rows_per_chunk) {        \
        col_sum_partial(x, partial, rows, cols, rows_per_chunk);                                             \
    }
FOR_EACH_TYPE(INSTANTIATE)
