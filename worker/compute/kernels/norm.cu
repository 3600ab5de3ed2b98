// LayerNorm (Ba, Kiros, Hinton 2016) over the last dimension, with the residual's addition in front; its gradients.
//
//   y  = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),   g = dy * gamma
#include "prelude.cuh"

// Up to so many columns a warp takes a row; a block of 256 threads beyond.
constexpr int WARP_COLUMNS = 1024;
// Values of a row that a thread keeps in registers, so that the variance is computed from the distances to
// the mean without a second read. Rows of more than 256 times as many are read again.
constexpr int HELD = 32;

template <bool BLOCK>
INLINE int thread_of() {
    return BLOCK ? (int)threadIdx.x : lane_of();
}

// Calls body(j, c) for the runs of W columns of this thread: j counts its values. `KEEP`: HELD values at
// most, and j is known when the loop is unrolled.
template <bool BLOCK, int W, bool KEEP, class Body>
INLINE void over_row(int cols, Body body) {
    constexpr int STEP = (BLOCK ? 256 : 32) * W;
    if constexpr (KEEP) {
#pragma unroll
        for (int i = 0; i < HELD / W; i++) {
            const int c = i * STEP + thread_of<BLOCK>() * W;
            if (c < cols) body(i * W, c);
        }
    } else {
        for (int c = thread_of<BLOCK>() * W; c < cols; c += STEP) body(0, c);
    }
}

// Parameters are f32 at any alignment.
template <int W>
INLINE void load_param(const float* p, bool wide, float (&v)[W]) {
    if (W > 1 && wide) {
        load<W>(p, v);
    } else {
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = p[e];
    }
}

template <class T>
struct Forward {
    const T* x;
    const T* residual;
    T* sum;
    const float* gamma;
    const float* beta;
    T* y;
    float* mean;
    float* rstd;
    int rows, cols;
    float eps;
};

// x + residual, rounded to T as the backward pass will read it.
template <int W, class T>
INLINE void load_sum(const Forward<T>& a, long long at, bool first, float (&v)[W]) {
    if (!a.residual) {
        load<W>(a.x + at, v);
    } else if (first) {
        float r[W];
        load<W>(a.x + at, v);
        load<W>(a.residual + at, r);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = to_f32(from_f32<T>(v[e] + r[e]));
        store<W>(a.sum + at, v);
    } else {
        load<W>(a.sum + at, v);
    }
}

template <bool BLOCK, int W, bool KEEP, class T>
INLINE void forward_row(const Forward<T>& a, int row) {
    const long long start = (long long)row * a.cols;
    float held[KEEP ? HELD : W];
    float total = 0.0f;
    over_row<BLOCK, W, KEEP>(a.cols, [&](int j, int c) {
        float v[W];
        load_sum<W>(a, start + c, true, v);
#pragma unroll
        for (int e = 0; e < W; e++) {
            held[j + e] = v[e];
            total += v[e];
        }
    });
    const float mean = group_sum<BLOCK>(total) / (float)a.cols;
    float spread = 0.0f;
    over_row<BLOCK, W, KEEP>(a.cols, [&](int j, int c) {
        float v[W];
        if constexpr (!KEEP) load_sum<W>(a, start + c, false, v);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float d = (KEEP ? held[j + e] : v[e]) - mean;
            spread += d * d;
        }
    });
    const float rstd = 1.0f / sqrtf(group_sum<BLOCK>(spread) / (float)a.cols + a.eps);
    if (thread_of<BLOCK>() == 0) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
    const bool wide = aligned16(a.gamma) && aligned16(a.beta);
    over_row<BLOCK, W, KEEP>(a.cols, [&](int j, int c) {
        float v[W], gamma[W], beta[W];
        if constexpr (!KEEP) load_sum<W>(a, start + c, false, v);
        load_param<W>(a.gamma + c, wide, gamma);
        load_param<W>(a.beta + c, wide, beta);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] = ((KEEP ? held[j + e] : v[e]) - mean) * rstd * gamma[e] + beta[e];
        store<W>(a.y + start + c, v);
    });
}

template <class T>
struct Backward {
    const T* dy;
    const T* x;
    const float* gamma;
    const float* mean;
    const float* rstd;
    const T* residual_grad;
    T* dx;
    int rows, cols;
};

// g = dy * gamma and h = xhat of W columns.
template <int W, class T>
INLINE void load_terms(const Backward<T>& a, long long start, int c, float mean, float rstd, bool wide,
                       float (&g)[W], float (&h)[W]) {
    float gamma[W];
    load<W>(a.dy + start + c, g);
    load<W>(a.x + start + c, h);
    load_param<W>(a.gamma + c, wide, gamma);
#pragma unroll
    for (int e = 0; e < W; e++) {
        g[e] *= gamma[e];
        h[e] = (h[e] - mean) * rstd;
    }
}

template <bool BLOCK, int W, bool KEEP, class T>
INLINE void backward_row(const Backward<T>& a, int row) {
    const long long start = (long long)row * a.cols;
    const float mean = a.mean[row], rstd = a.rstd[row];
    const bool wide = aligned16(a.gamma);
    float gs[KEEP ? HELD : W], hs[KEEP ? HELD : W];
    float sum = 0.0f, product = 0.0f;
    over_row<BLOCK, W, KEEP>(a.cols, [&](int j, int c) {
        float g[W], h[W];
        load_terms<W>(a, start, c, mean, rstd, wide, g, h);
#pragma unroll
        for (int e = 0; e < W; e++) {
            gs[j + e] = g[e];
            hs[j + e] = h[e];
            sum += g[e];
            product += g[e] * h[e];
        }
    });
    const float constant = group_sum<BLOCK>(sum) / (float)a.cols;
    const float slope = group_sum<BLOCK>(product) / (float)a.cols;
    over_row<BLOCK, W, KEEP>(a.cols, [&](int j, int c) {
        float g[W], h[W], d[W], r[W] = {};
        if constexpr (!KEEP) load_terms<W>(a, start, c, mean, rstd, wide, g, h);
        if (a.residual_grad) load<W>(a.residual_grad + start + c, r);
#pragma unroll
        for (int e = 0; e < W; e++) {
            d[e] = rstd * ((KEEP ? gs[j + e] : g[e]) - constant - (KEEP ? hs[j + e] : h[e]) * slope) + r[e];
        }
        store<W>(a.dx + start + c, d);
    });
}

// Runs each(row) for this warp's or this block's rows.
template <bool BLOCK, class Each>
INLINE void over_rows(int rows, Each each) {
    constexpr int TOGETHER = BLOCK ? 1 : 8;
    for (int r = (int)blockIdx.x * TOGETHER + (BLOCK ? 0 : warp_of()); r < rows;
         r += (int)gridDim.x * TOGETHER)
        each(r);
}

// Rows of an odd length or place are read value by value, and again for each pass.
template <class T>
INLINE void forward(const Forward<T>& a) {
    constexpr int W = WIDE<T>;
    const bool aligned = aligned16(a.x) && aligned16(a.residual) && aligned16(a.sum) && aligned16(a.y);
    const bool wide = a.cols % W == 0 && aligned, warp = a.cols <= WARP_COLUMNS;
    if (wide && warp) {
        over_rows<false>(a.rows, [&](int r) { forward_row<false, W, true>(a, r); });
    } else if (wide && a.cols <= 256 * HELD) {
        over_rows<true>(a.rows, [&](int r) { forward_row<true, W, true>(a, r); });
    } else if (warp) {
        over_rows<false>(a.rows, [&](int r) { forward_row<false, 1, false>(a, r); });
    } else {
        over_rows<true>(a.rows, [&](int r) { forward_row<true, 1, false>(a, r); });
    }
}

template <class T>
INLINE void backward(const Backward<T>& a) {
    constexpr int W = WIDE<T>;
    const bool aligned = aligned16(a.dy) && aligned16(a.x) && aligned16(a.residual_grad) && aligned16(a.dx);
    const bool wide = a.cols % W == 0 && aligned, warp = a.cols <= WARP_COLUMNS;
    if (wide && warp) {
        over_rows<false>(a.rows, [&](int r) { backward_row<false, W, true>(a, r); });
    } else if (wide && a.cols <= 256 * HELD) {
        over_rows<true>(a.rows, [&](int r) { backward_row<true, W, true>(a, r); });
    } else if (warp) {
        over_rows<false>(a.rows, [&](int r) { backward_row<false, 1, false>(a, r); });
    } else {
        over_rows<true>(a.rows, [&](int r) { backward_row<true, 1, false>(a, r); });
    }
}

// Sums over a chunk of rows of dy * xhat, and of dy.
template <int W, class T>
INLINE void params_chunk(const T* dy, const T* x, const float* mean, const float* rstd, float* partial,
                         int rows, int cols, int rows_per_chunk) {
    float dgamma[8] = {}, dbeta[8] = {};
    const Columns<W> columns{(int)blockIdx.x * 256};
    const int first = (int)blockIdx.y * rows_per_chunk, end = min(rows, first + rows_per_chunk);
#pragma unroll 2
    for (int r = first + warp_of(); r < end; r += 8) {
        const long long start = (long long)r * cols;
        const float m = mean[r], s = rstd[r];
#pragma unroll
        for (int g = 0; g < Columns<W>::RUNS; g++) {
            const int c = columns.at(g);
            if (c < cols) {
                float d[W], h[W];
                load<W>(dy + start + c, d);
                load<W>(x + start + c, h);
#pragma unroll
                for (int e = 0; e < W; e++) {
                    dgamma[g * W + e] += d[e] * ((h[e] - m) * s);
                    dbeta[g * W + e] += d[e];
                }
            }
        }
    }
    const int c = columns.base + (int)threadIdx.x;
    float* out = partial + (long long)blockIdx.y * cols * 2;
    const float total = column_total<W>(dgamma);
    if (c < cols) out[c] = total;
    const float other = column_total<W>(dbeta);
    if (c < cols) out[cols + c] = other;
}

template <class T>
INLINE void params_partial(const T* dy, const T* x, const float* mean, const float* rstd, float* partial,
                           int rows, int cols, int rows_per_chunk) {
    if (cols % WIDE<T> == 0 && aligned16(dy) && aligned16(x)) {
        params_chunk<WIDE<T>>(dy, x, mean, rstd, partial, rows, cols, rows_per_chunk);
    } else {
        params_chunk<1>(dy, x, mean, rstd, partial, rows, cols, rows_per_chunk);
    }
}

#define INSTANTIATE(S, T)                                                                                    \
    KERNEL(layernorm_##S)(const T* x, const T* residual, T* sum, const float* gamma, const float* beta,      \
                          T* y, float* mean, float* rstd, int rows, int cols, float eps) {                   \
        forward(Forward<T>{x, residual, sum, gamma, beta, y, mean, rstd, rows, cols, eps});                  \
    }                                                                                                        \
    KERNEL(layernorm_backward_##S)(const T* dy, const T* x, const float* gamma, const float* mean,           \
                                   const float* rstd, const T* residual_grad, T* dx, int rows, int cols) {   \
        backward(Backward<T>{dy, x, gamma, mean, rstd, residual_grad, dx, rows, cols});                      \
    }                                                                                                        \
    KERNEL(layernorm_params_partial_##S)(const T* dy, const T* x, const float* mean, const float* rstd,      \
                                         float* partial, int rows, int cols, int rows_per_chunk) {           \
        params_partial(dy, x, mean, rstd, partial, rows, cols, rows_per_chunk);                              \
    }
FOR_EACH_TYPE(INSTANTIATE)
