// BatchNorm (Ioffe, Szegedy 2015) of NCHW images, with ReLU and 2x2 max pooling in one operator: of the
// planes in between only the convolution's output y and the pooled result are stored.
//
//   z = scale * y + shift,  scale = gamma * inv_std,  shift = beta - mean * scale
//   pooled = max over 2x2 of max(z, 0)
//   dy = scale * (dz - sum(dz) / count - xhat * sum(dz * xhat) / count)
//   dz is dpooled where the maximum was, else 0
//
// Sums over the batch are f64, with the count behind them: both may be added over a group of ranks before they
// are used.
#include "prelude.cuh"

// Calls body(width, image, pixel) for the channel's pixels in a chunk of images, by the threads of the block.
template <class Body>
INLINE void over_channel(int n, int hw, int images_per_chunk, bool wide, Body body) {
    const int first = (int)blockIdx.y * images_per_chunk, images = min(n, first + images_per_chunk) - first;
    if (wide) {
        const unsigned runs = (unsigned)hw / 4;
#pragma unroll 4
        for (unsigned i = threadIdx.x; i < (unsigned)images * runs; i += blockDim.x) {
            body(Width<4>{}, first + (int)(i / runs), (int)(i % runs) * 4);
        }
    } else {
        for (unsigned i = threadIdx.x; i < (unsigned)images * (unsigned)hw; i += blockDim.x) {
            body(Width<1>{}, first + (int)(i / (unsigned)hw), (int)(i % (unsigned)hw));
        }
    }
}

// Whether runs of four elements from p on are aligned to their size, when p and the stride are.
template <class T>
INLINE bool in_fours(const T* p, int stride) {
    return stride % 4 == 0 && aligned_to(p, 4 * (int)sizeof(T));
}

// The sums of y and y^2 of a channel over a chunk of images: partial is [chunks, 2, c]. They are collected
// relative to the channel's first value, so that a mean that is large against the spread costs no precision.
// Grid (c, chunks).
template <class T>
INLINE void bn_stats_partial(const T* y, double* partial, int n, int c, int hw, int images_per_chunk) {
    const int channel = (int)blockIdx.x;
    const T* first = y + (long long)channel * hw;
    const float base = to_f32(*first);
    float sum = 0.0f, squares = 0.0f;
    int count = 0;
    over_channel(n, hw, images_per_chunk, in_fours(y, hw), [&](auto width, int image, int pixel) {
        constexpr int W = decltype(width)::value;
        float v[W];
        load<W>(first + (long long)image * c * hw + pixel, v);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float d = v[e] - base;
            sum += d;
            squares += d * d;
        }
        count += W;
    });
    const double s = block_sum((double)sum), q = block_sum((double)squares), m = block_sum((double)count);
    if (threadIdx.x == 0) {
        double* out = partial + (long long)blockIdx.y * 2 * c;
        out[channel] = s + m * (double)base;
        out[c + channel] = q + 2.0 * (double)base * s + m * (double)base * (double)base;
    }
}

// sums[i] = the sum over the chunks of partial[chunk, i]; sums[m] = count. A warp takes one.
KERNEL(bn_sum)(const double* partial, double* sums, int chunks, int m, double count) {
    const int i = (int)blockIdx.x * 8 + warp_of();
    if (i == 0 && lane_of() == 0) sums[m] = count;
    if (i >= m) return;
    double sum = 0.0;
    for (int chunk = lane_of(); chunk < chunks; chunk += 32) sum += partial[(long long)chunk * m + i];
    sum = warp_sum(sum);
    if (lane_of() == 0) sums[i] = sum;
}

// From the sums of y and y^2 over sums[2 * c] values a channel: what the channel is normalised with, and what
// is to be subtracted from the running statistics (null: not wanted): momentum * (running - batch), with the
// unbiased variance.
KERNEL(bn_finalize)(const double* sums, const float* gamma, const float* beta, const float* running_mean,
                    const float* running_var, float* scale, float* shift, float* mean, float* inv_std,
                    float* d_running_mean, float* d_running_var, int c, float eps, float momentum) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= c) return;
    const double count = sums[2 * c];
    const double m = sums[i] / count;
    const double spread = fmax(sums[c + i] - sums[i] * m, 0.0);
    const float center = (float)m, inv = 1.0f / sqrtf((float)(spread / count) + eps);
    mean[i] = center;
    inv_std[i] = inv;
    scale[i] = gamma[i] * inv;
    shift[i] = beta[i] - center * (gamma[i] * inv);
    if (d_running_mean) {
        d_running_mean[i] = momentum * (running_mean[i] - center);
        d_running_var[i] = momentum * (running_var[i] - (float)(spread / fmax(count - 1.0, 1.0)));
    }
}

// What a channel is normalised with outside training.
KERNEL(bn_inference)(const float* gamma, const float* beta, const float* running_mean,
                     const float* running_var, float* scale, float* shift, int c, float eps) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= c) return;
    const float s = gamma[i] * (1.0f / sqrtf(running_var[i] + eps));
    scale[i] = s;
    shift[i] = beta[i] - running_mean[i] * s;
}

// A NaN wins and stays, as in PyTorch; else the first of the largest.
INLINE void rival(float z, int place, float& best, int& at) {
    if (z > best || z != z) best = z, at = place;
}

constexpr unsigned char NO_PICK = 4;

template <int W, class T>
INLINE void pool_windows(const T* y, const float* scale, const float* shift, T* pooled, unsigned char* pick,
                         long long i, int c, int h, int w) {
    // W windows side by side, from i on.
    const int oh = h / 2, ow = w / 2;
    int rest, col, channel;
    const long long plane = divide(i, oh * ow, rest);
    const int row = (int)divide(rest, ow, col);
    divide(plane, c, channel);
    const float s = scale[channel], b = shift[channel];
    const T* above = y + (plane * h + 2 * row) * w + 2 * col;
    float u[2 * W], v[2 * W], p[W];
    if constexpr (W == 2) {
        load<4>(above, u);
        load<4>(above + w, v);
    } else {
        u[0] = to_f32(above[0]), u[1] = to_f32(above[1]);
        v[0] = to_f32(above[w]), v[1] = to_f32(above[w + 1]);
    }
#pragma unroll
    for (int e = 0; e < W; e++) {
        float best = s * u[2 * e] + b;
        int at = 0;
        rival(s * u[2 * e + 1] + b, 1, best, at);
        rival(s * v[2 * e] + b, 2, best, at);
        rival(s * v[2 * e + 1] + b, 3, best, at);
        p[e] = best <= 0.0f ? 0.0f : best;
        if (pick) pick[i + e] = best > 0.0f ? (unsigned char)at : NO_PICK;
    }
#pragma unroll
    for (int e = 0; e < W; e++) pooled[i + e] = from_f32<T>(p[e]);
}

// pooled = the maximum over 2x2 of max(scale * y + shift, 0); pick says which: 0 to 3, or 4 where that is 0.
template <class T>
INLINE void bn_relu_pool(const T* y, const float* scale, const float* shift, T* pooled, unsigned char* pick,
                         int n, int c, int h, int w) {
    const long long windows = (long long)n * c * (h / 2) * (w / 2);
    flat<2>(windows, in_fours(y, w), [&](auto width, long long i) {
        pool_windows<decltype(width)::value>(y, scale, shift, pooled, pick, i, c, h, w);
    });
}

// The sums of dz and dz * xhat of a channel over a chunk of images: partial is [chunks, 2, c]. Grid (c,
// chunks).
template <class T>
INLINE void bn_pool_backward_partial(const T* dpooled, const unsigned char* pick, const T* y,
                                     const float* mean, const float* inv_std, double* partial, int n, int c,
                                     int h, int w, int images_per_chunk) {
    const int channel = (int)blockIdx.x, oh = h / 2, ow = w / 2, half = oh * ow;
    const float m = mean[channel], inv = inv_std[channel];
    float sum = 0.0f, product = 0.0f;
    over_channel(n, half, images_per_chunk, false, [&](auto, int image, int place) {
        const long long plane = (long long)image * c + channel, i = plane * half + place;
        const int at = pick[i];
        if (at != NO_PICK) {
            const int row = 2 * (place / ow) + (at >> 1), col = 2 * (place % ow) + (at & 1);
            const float d = to_f32(dpooled[i]), v = to_f32(y[(plane * h + row) * w + col]);
            sum += d;
            product += d * ((v - m) * inv);
        }
    });
    const double s = block_sum((double)sum), p = block_sum((double)product);
    if (threadIdx.x == 0) {
        double* out = partial + (long long)blockIdx.y * 2 * c;
        out[channel] = s;
        out[c + channel] = p;
    }
}

// slopes is [2, c]: dy = scale * dz + slopes[0] * (y - mean) + slopes[1], from the sums over sums[2 * c]
// values a channel.
KERNEL(bn_backward_slopes)(const double* sums, const float* scale, const float* inv_std, float* slopes,
                           int c) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= c) return;
    const double count = sums[2 * c];
    const double s = (double)scale[i];
    slopes[i] = (float)(-s * (double)inv_std[i] * sums[c + i] / count);
    slopes[c + i] = (float)(-s * sums[i] / count);
}

// dy, which may lie over y: a thread takes a 2x2 window, those at odd borders cut off (no gradient comes from
// there, but the statistics' part does).
template <class T>
INLINE void bn_relu_pool_backward(const T* dpooled, const unsigned char* pick, const T* y, const float* scale,
                                  const float* mean, const float* slopes, T* dy, int n, int c, int h, int w) {
    const int wh = (h + 1) / 2, ww = (w + 1) / 2, oh = h / 2, ow = w / 2;
    const bool pairs = w % 2 == 0 && aligned_to(y, 2 * (int)sizeof(T)) && aligned_to(dy, 2 * (int)sizeof(T));
    flat<1>((long long)n * c * wh * ww, false, [&](auto, long long i) {
        int rest, col, channel;
        const long long plane = divide(i, wh * ww, rest);
        const int row = (int)divide(rest, ww, col);
        divide(plane, c, channel);
        const float middle = mean[channel], slope = slopes[channel], constant = slopes[c + channel];
        const bool whole = row < oh && col < ow;
        const long long window = (plane * oh + row) * ow + col;
        const int at = whole ? (int)pick[window] : (int)NO_PICK;
        const float d = at != NO_PICK ? scale[channel] * to_f32(dpooled[window]) : 0.0f;
        const long long corner = (plane * h + 2 * row) * w + 2 * col;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (2 * row + r >= h) break;
            const long long p = corner + (long long)r * w;
            float v[2] = {};
            if (pairs) {
                load<2>(y + p, v);
            } else {
                v[0] = to_f32(y[p]);
                if (2 * col + 1 < w) v[1] = to_f32(y[p + 1]);
            }
#pragma unroll
            for (int e = 0; e < 2; e++)
                v[e] = slope * (v[e] - middle) + constant + (at == 2 * r + e ? d : 0.0f);
            if (pairs) {
                store<2>(dy + p, v);
            } else {
                dy[p] = from_f32<T>(v[0]);
                if (2 * col + 1 < w) dy[p + 1] = from_f32<T>(v[1]);
            }
        }
    });
}

// The gradients of gamma and beta from this rank's sums.
KERNEL(bn_write_grads)(const double* sums, float* dgamma, float* dbeta, int c) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= c) return;
    dbeta[i] = (float)sums[i];
    dgamma[i] = (float)sums[c + i];
}

#define INSTANTIATE(S, T)                                                                                    \
    KERNEL(bn_stats_partial_##S)(const T* y, double* partial, int n, int c, int hw, int images_per_chunk) {  \
        bn_stats_partial(y, partial, n, c, hw, images_per_chunk);                                            \
    }                                                                                                        \
    KERNEL(bn_relu_pool_##S)(const T* y, const float* scale, const float* shift, T* pooled,                  \
                             unsigned char* pick, int n, int c, int h, int w) {                              \
        bn_relu_pool(y, scale, shift, pooled, pick, n, c, h, w);                                             \
    }                                                                                                        \
    KERNEL(bn_pool_backward_partial_##S)(const T* dpooled, const unsigned char* pick, const T* y,            \
                                         const float* mean, const float* inv_std, double* partial, int n,    \
                                         int c, int h, int w, int images_per_chunk) {                        \
        bn_pool_backward_partial(dpooled, pick, y, mean, inv_std, partial, n, c, h, w, images_per_chunk);    \
    }                                                                                                        \
    KERNEL(bn_relu_pool_backward_##S)(const T* dpooled, const unsigned char* pick, const T* y,               \
                                      const float* scale, const float* mean, const float* slopes, T* dy,     \
                                      int n, int c, int h, int w) {                                          \
        bn_relu_pool_backward(dpooled, pick, y, scale, mean, slopes, dy, n, c, h, w);                        \
    }
FOR_EACH_TYPE(INSTANTIATE)
